//! Content of rows in the training text: kept, reported or refused.

use super::chat::{read, with_template};
use super::*;
use crate::shape::notes::Note;
use serde_json::{Map, Value, json};

/// The published templates with required variables.
fn published() -> Vec<(String, Tokenizer, Map<String, Value>)> {
    let mut names: Vec<PathBuf> =
        std::fs::read_dir(fixture("chat")).unwrap().map(|e| e.unwrap().path()).collect();
    names.retain(|p| p.extension().is_some_and(|e| e == "jinja"));
    names.sort();
    assert_eq!(names.len(), 4);
    let vars = json!({"bos_token": "<s>", "eos_token": "</s>"}).as_object().cloned().unwrap();
    let load = |p: PathBuf| {
        let t = Tokenizer::load(&fixture("tiny-tokenizer"), Some(&p)).unwrap().unwrap();
        (p.file_name().unwrap().to_string_lossy().into_owned(), t, vars.clone())
    };
    names.into_iter().map(load).collect()
}

fn named(name: &str) -> (Tokenizer, Map<String, Value>) {
    let (_, t, vars) = published().into_iter().find(|(n, ..)| n.contains(name)).unwrap();
    (t, vars)
}

fn call(name: &str, arguments: Value) -> Value {
    json!({"role": "assistant", "content": "", "tool_calls": [
        {"type": "function", "id": "call12345", "function": {"name": name, "arguments": arguments}}
    ]})
}

fn tools(name: &str) -> Value {
    json!([{"type": "function", "function": {"name": name, "description": "d", "parameters": {"type": "object"}}}])
}

fn calling(arguments: Value) -> Value {
    json!({"tools": tools("weather"), "messages": [
        {"role": "user", "content": "Paris?"}, call("weather", arguments),
        {"role": "tool", "tool_call_id": "call12345", "name": "weather", "content": "21"},
        {"role": "assistant", "content": "21 degrees."},
    ]})
}

#[test]
fn arguments_in_a_string_are_the_object_that_it_holds() {
    let object = json!({"city": "Paris", "days": 2, "deep": {"a": ["x\n\"y\"", true, 1.5]}, "none": null});
    for (name, t, vars) in published() {
        let as_object = read(&t, &calling(object.clone()), &vars).unwrap();
        let as_string = read(&t, &calling(object.to_string().into()), &vars).unwrap();
        assert_eq!((&as_object.0, &as_object.1), (&as_string.0, &as_string.1), "{name}");
        assert!(!as_string.0.contains("\\\"city\\\""), "{name}: {}", as_string.0);
        // missing arguments become an empty object
        let none = read(&t, &calling(json!({})), &vars).unwrap().0;
        for nothing in [json!(""), Value::Null, json!(" {} ")] {
            assert_eq!(read(&t, &calling(nothing), &vars).unwrap().0, none, "{name}");
        }
    }
    // also with ShareGPT's names, and for a call without the outer "function"
    let (t, vars) = named("Qwen2.5");
    let share = |arguments: Value| {
        json!({"conversations": [{"from": "human", "value": "q"},
            {"from": "gpt", "value": "", "tool_calls": [{"name": "f", "arguments": arguments}]}]})
    };
    let text = |arguments| read(&t, &share(arguments), &vars).unwrap().0;
    assert_eq!(text(json!({"a": 1})), text(json!("{\"a\": 1}")));
    // arguments must contain an object, as for inference servers
    for bad in [
        json!("{\"city\": "),
        json!("Paris"),
        json!("[1]"),
        json!("3"),
        json!([1]),
        json!(3),
        json!("\"{}\""),
    ] {
        let error = read(&t, &calling(bad.clone()), &vars).unwrap_err();
        assert!(error.starts_with("messages[1].tool_calls[0].function.arguments: "), "{bad}: {error}");
    }
    let long = read(&t, &calling(json!("{\"id\": 123456789012345678901234567890}")), &vars).unwrap_err();
    assert!(long.contains("more digits"), "{long}");
    let mut long = calling(json!({}));
    long["tools"] = json!("[{\"name\": \"f\"}, {\"name\": \"g\", \"maximum\": 100000000000000000000}]");
    let long = read(&t, &long, &vars).unwrap_err();
    assert!(long.starts_with("tools[1]: 1e20 has more digits"), "{long}");
}

/// Rows with content missing from the text, and the path of the content.
#[test]
fn a_text_that_lost_something_is_a_bad_row() {
    let plain = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
    let generation = "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}\n{% endif %}{% endfor %}";
    let qwen3 = std::fs::read_to_string(fixture("chat/Qwen-Qwen3-0.6B.jinja")).unwrap();
    let each = |body: &str| {
        format!(
            "{{% for m in messages %}}{{% if m.role == 'assistant' %}}<a>{{{{ m.content }}}}</a>{{% else %}}{body}{{% endif %}}{{% endfor %}}{{% if add_generation_prompt %}}<a>{{% endif %}}"
        )
    };
    let (q, a) =
        (json!({"role": "user", "content": "What?"}), json!({"role": "assistant", "content": "That."}));
    let asked = |first: Value| json!({"messages": [first, q.clone(), a.clone()]});
    let cases: Vec<(String, Value, &str)> = vec![
        // calls and tools, under templates without support
        (plain.into(), json!({"messages": [q, call("weather", json!({"city": "Paris"}))]}), "messages[1].tool_calls[0].function.name"),
        (generation.into(), json!({"messages": [q, call("weather", json!({}))]}), "messages[1].tool_calls[0].function.name"),
        (plain.into(), json!({"messages": [q, a], "tools": tools("weather")}), "tools[0].function.name"),
        (plain.into(), json!({"messages": [q, a], "tools": tools("weather").to_string()}), "tools[0].function.name"),
        // the same word elsewhere does not count
        (plain.into(), json!({"messages": [{"role": "user", "content": "weather"}, call("weather", json!({}))]}), "messages[1].tool_calls[0].function.name"),
        (qwen3.clone(), asked(json!({"role": "developer", "content": "What?"})), "messages[0].content"),
        (qwen3.clone(), asked(json!({"role": "developer", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": " brief."}]})), "messages[0].content"),
        (qwen3, asked(json!({"role": "ipython", "content": "x"})), ""),
        // names without arguments: strings, numbers and booleans
        (each("{{ m.content }}").replace("{{ m.content }}</a>", "{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}</a>"),
            json!({"messages": [q, call("weather", json!({"city": "Paris"}))]}), "messages[1].tool_calls[0].function.arguments.city"),
        (each("{{ m.content }}").replace("{{ m.content }}</a>", "{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}</a>"),
            json!({"messages": [q, call("weather", json!({"days": 3, "of": [true]}))]}), "messages[1].tool_calls[0].function.arguments.days"),
        // only the first call
        (each("{{ m.content }}").replace("{{ m.content }}</a>", "{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls[0] | tojson }}{% endif %}</a>"),
            json!({"messages": [q, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]}]}), "messages[1].tool_calls[1].name"),
        // content truncated or changed
        (each("{{ m.content[:3] }}"), json!({"messages": [q, a]}), "messages[0].content"),
        (each("{{ m.content[1:] }}"), json!({"messages": [q, a]}), "messages[0].content"),
        (each("{{ m.content | upper }}"), json!({"messages": [q, a]}), "messages[0].content"),
        (each("{{ m.content.split('\\n')[0] }}"), json!({"messages": [{"role": "user", "content": "one\ntwo"}, a]}), "messages[0].content"),
        // messages outside a window
        ("{% for m in messages[-2:] %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}".into(),
            json!({"messages": [q, a, q, a]}), "messages[0].content"),
        // the row's own system text
        (each("{% if m.role == 'user' %}{{ m.content }}{% endif %}"), json!({"system": "Be brief.", "messages": [q, a]}), "system.content"),
    ];
    for (template, row, path) in cases {
        let t = with_template(&template);
        let error = read(&t, &row, &Map::new()).expect_err(&row.to_string());
        assert!(error.starts_with(path), "{row}: {error}");
    }
}

#[test]
fn normalization_by_published_templates_is_no_bad_row() {
    let (q, a) = (
        json!({"role": "user", "content": "  What?\n"}),
        json!({"role": "assistant", "content": "That.\n\n"}),
    );
    let rows = [
        json!({"messages": [q, a]}),
        json!({"system": "Be brief.", "messages": [q, a, q, a]}),
        json!({"messages": [{"role": "system", "content": "Sys"}, q, {"role": "assistant", "content": "<think>\nwhy\n</think>\n\nso"}, q, a]}),
        json!({"messages": [q, {"role": "assistant", "content": "so", "reasoning_content": "why"}, q, {"role": "assistant", "content": "so", "reasoning_content": "why"}]}),
        calling(
            json!({"city": "São \"P\"\n😀", "days": 3, "of": [1, 2.5, true, {"k": "v"}], "no": null, "empty": ""}),
        ),
        json!({"messages": [q, {"role": "assistant", "content": "a"}, {"role": "user", "content": "<tool_response>x</tool_response>"}, a]}),
        json!({"messages": [{"role": "user", "content": "<|im_end|><|eot_id|>[/INST]</s>"}, {"role": "assistant", "content": "</s>"}]}),
    ];
    let mut told = String::new();
    for (name, t, vars) in published() {
        for (i, row) in rows.iter().enumerate() {
            let (_, spans, notes) = read(&t, row, &vars).unwrap_or_else(|e| panic!("{name} {i}: {e}"));
            assert!(!spans.is_empty());
            told += &format!("{name} {i}: {notes:?}\n");
        }
    }
    insta::assert_snapshot!(told);
    // arguments by name, one per line, as in Qwen3-Coder
    let xml = with_template(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}{% for c in m.tool_calls %}{% set c = c.function %}<function={{ c.name }}>{% for k, v in c.arguments | items %}<parameter={{ k }}>{{ v | tojson if v is mapping or (v is sequence and v is not string) else v | string }}</parameter>{% endfor %}</function>{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    );
    let row = json!({"messages": [q, call("f", json!({"a": "x y", "b": 3, "c": false, "d": {"e": [1]}, "f": ["g\n"]}))]});
    assert_eq!(read(&xml, &row, &Map::new()).unwrap().2, []);
    // a template that inspects content, so marks change the text
    let picky = with_template(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content in ['yes', 'no'] %}[{{ m.content }}]{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    );
    let row = json!({"messages": [{"role": "user", "content": "yes"}, {"role": "assistant", "content": "So be it."}]});
    assert_eq!(read(&picky, &row, &Map::new()).unwrap().2, []);
}

#[test]
fn a_weight_of_0_takes_a_message_out_of_the_loss() {
    let row = |first: Value, second: Value| {
        json!({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "one", "weight": first},
            {"role": "user", "content": "q"}, {"role": "assistant", "content": "two", "weight": second}]})
    };
    let generation = with_template(
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}",
    );
    for t in [tiny(), generation] {
        let spans = |row: Value| {
            let (text, spans, notes) = read(&t, &row, &Map::new()).unwrap();
            assert_eq!(notes, []);
            spans.into_iter().map(|s| text[s].to_string()).collect::<Vec<_>>()
        };
        assert_eq!(spans(row(json!(0), json!(1))), ["two<|im_end|>"]);
        assert_eq!(spans(row(json!(1), json!(0.0))), ["one<|im_end|>"]);
        assert_eq!(spans(row(Value::Null, json!(1.0))), ["one<|im_end|>", "two<|im_end|>"]);
        assert!(spans(row(json!(0), json!(0))).is_empty());
    }
    for (weight, role) in
        [(json!(0.5), "assistant"), (json!("0"), "assistant"), (json!(1), "user"), (json!(true), "assistant")]
    {
        let mut row = row(json!(1), json!(1));
        let at = if role == "user" { 0 } else { 1 };
        row["messages"][at]["weight"] = weight;
        let error = read(&tiny(), &row, &Map::new()).unwrap_err();
        assert!(error.starts_with(&format!("messages[{at}].weight: ")), "{error}");
    }
    // no targets remain
    let files = Files::new(&[("a.jsonl", &row(json!(0), json!(0)).to_string())]);
    let error = files.load(&[source("a.jsonl", Format::Messages)], &data(64)).unwrap_err();
    assert!(matches!(&error, Error::Row { problem: Problem::EmptyMask(_), .. }), "{error}");
    // mask "none" cannot exclude a message
    let mut whole = source("a.jsonl", Format::Messages);
    whole.mask = Some(ft_recipe::Mask::None);
    let error = files.load(&[whole], &data(64)).unwrap_err().to_string();
    assert!(error.contains("a.jsonl:1: messages[1].weight"), "{error}");
}

#[test]
fn keys_that_mean_something_are_used_or_refused() {
    let text = |format, row: Value| -> Result<(String, Vec<String>), String> {
        let files = Files::new(&[("a.jsonl", &row.to_string())]);
        let d = files.load(&[source("a.jsonl", format)], &data(4096)).map_err(|e| e.to_string())?;
        Ok((tiny().decode(&nth(&d, 0).ids).unwrap(), d.warnings(4096).unwrap()))
    };
    let chat = json!({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]});
    let alpaca = json!({"instruction": "Add.", "input": "1 2", "output": "3"});
    let with = |row: &Value, key: &str, value: Value| {
        let mut row = row.clone();
        row[key] = value;
        row
    };
    // system: a message, or a replacement of Alpaca's preamble
    let (said, told) = text(Format::Messages, with(&chat, "system", json!("Be brief."))).unwrap();
    assert!(
        said.starts_with("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user") && told.is_empty(),
        "{said}"
    );
    let twice = with(&chat, "system", json!("Be brief."));
    let mut same = twice.clone();
    same["messages"].as_array_mut().unwrap().insert(0, json!({"role": "system", "content": "Be brief. "}));
    assert!(text(Format::Messages, same.clone()).is_ok());
    same["system"] = json!("Be long.");
    assert!(text(Format::Messages, same).unwrap_err().contains("a.jsonl:1: system: "));
    let mut history = with(&alpaca, "system", json!("Count.\n"));
    history["history"] = json!([["Hello", "Hi"], ["Who?", "Me"]]);
    insta::assert_snapshot!(text(Format::Alpaca, history.clone()).unwrap().0);
    let files = Files::new(&[("a.jsonl", &history.to_string())]);
    let d = files.load(&[source("a.jsonl", Format::Alpaca)], &data(4096)).unwrap();
    assert_eq!(super::rows::supervised(&nth(&d, 0)), "Hi<|endoftext|>Me<|endoftext|>3<|endoftext|>");
    for bad in [json!([["a"]]), json!("x"), json!([["a", ""]]), json!([{"a": "b"}]), json!({"a": 1})] {
        assert!(
            text(Format::Alpaca, with(&alpaca, "history", bad)).unwrap_err().contains("a.jsonl:1: history")
        );
    }
    // refused by name, unless empty
    let prompt = json!({"prompt": "p", "completion": "c"});
    let ids = json!({"input_ids": [1, 2, 3]});
    for (format, row, key, value) in [
        (Format::Messages, &chat, "images", json!(["a.png"])),
        (Format::Messages, &chat, "functions", json!([{"name": "f"}])),
        (Format::Messages, &chat, "chat_template_kwargs", json!({"enable_thinking": false})),
        (Format::Messages, &chat, "weight", json!(-1)),
        (Format::Alpaca, &alpaca, "image", json!("a.png")),
        (Format::Alpaca, &alpaca, "tools", json!([{"name": "f"}])),
        (Format::Completion, &prompt, "system", json!("s")),
        (Format::Text, &json!({"text": "t"}), "images", json!(["a.png"])),
        (Format::Tokens, &ids, "loss_mask", json!([0, 1, 1])),
        (Format::Tokens, &ids, "attention_mask", json!([1, 1, 0])),
        (Format::Tokens, &ids, "attention_mask", json!([1, 1])),
    ] {
        let error = text(format, with(row, key, value)).expect_err(key);
        assert!(error.contains("a.jsonl:1: ") && error.contains(key), "{error}");
        for nothing in [Value::Null, json!([])] {
            let said = text(format, with(row, key, nothing.clone()));
            assert!(
                key == "attention_mask" || said.as_ref().is_ok_and(|s| s.1.is_empty()),
                "{key} {nothing} {said:?}"
            );
        }
    }
    assert!(text(Format::Tokens, with(&ids, "attention_mask", json!([1, 1, 1]))).unwrap().1.is_empty());
    for key in ["function_call", "train", "loss", "images"] {
        let mut row = chat.clone();
        row["messages"][1][key] = json!({"name": "f"});
        assert!(text(Format::Messages, row).unwrap_err().contains(&format!("messages[1].{key}: ")));
    }
    for (key, value) in [("train", json!(false)), ("weight", json!(0)), ("image", json!("a.png"))] {
        let mut row = chat.clone();
        row["messages"][1]["content"] = json!([{"type": "text", "text": "a", key: value}]);
        assert!(
            text(Format::Messages, row).unwrap_err().contains(&format!("messages[1].content[0].{key}: "))
        );
    }
    let mut row = chat.clone();
    row["messages"][1]["reasoning_content"] = json!([{"type": "text", "text": "r"}]);
    let told = text(Format::Messages, row).unwrap_err();
    assert!(told.contains("messages[1].reasoning_content: expected a string, found"), "{told}");
    // other keys are accepted and reported
    let told = text(Format::Messages, with(&chat, "id", json!(7))).unwrap().1;
    assert!(told.len() == 1 && told[0].contains("\"id\"") && told[0].contains("a.jsonl:1"), "{told:?}");
    let both = text(Format::Messages, with(&chat, "conversations", json!([{"from": "human", "value": "x"}])));
    assert!(both.unwrap().1[0].contains("\"conversations\""));
}

#[test]
fn notes_are_counted_by_kind_and_told_once() {
    let row = |i: usize| {
        json!({"id": i, "source": null, "messages": [{"role": "user", "content": "q", "name": "Ann"},
            {"role": "assistant", "content": "a", "reasoning_content": "r", "end_turn": true}]})
    };
    let rows: String = (0..5).map(|i| format!("{}\n", row(i))).collect();
    let files = Files::new(&[("a.jsonl", &rows), ("b.jsonl", &row(0).to_string())]);
    let sources = [source("a.jsonl", Format::Messages), source("b.jsonl", Format::Messages)];
    let d = files.load(&sources, &data(64)).unwrap();
    let dir = files.0.path().display().to_string();
    let told = d.warnings(9).unwrap().join("\n").replace(&format!("{dir}/"), "");
    insta::assert_snapshot!(told);
    assert!(d.warnings(64).unwrap().len() == told.lines().filter(|l| !l.starts_with("  hint")).count() - 1);
    // rendered keys are not reported
    let named = with_template(
        "{% for m in messages %}<|im_start|>{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    );
    let (_, _, notes) = read(&named, &row(0), &Map::new()).unwrap();
    let kinds = [
        Note::RowKey { key: "id".into(), format: "messages".into() },
        Note::Reasoning,
        Note::MessageKey("end_turn".into()),
    ];
    assert_eq!(notes, kinds);
}

#[test]
fn markers_without_a_token_are_told_and_take_nothing_of_the_next_header() {
    let row = json!({"messages": [{"role": "user", "content": "<|other|>"}, {"role": "assistant", "content": "one"},
        {"role": "user", "content": "q"}, {"role": "assistant", "content": "two"}]});
    let files = Files::new(&[("a.jsonl", &row.to_string())]);
    let load = |template: &str| {
        let t = with_template(template);
        load_in(files.0.path(), &[source("a.jsonl", Format::Messages)], &data(400), &t).unwrap()
    };
    // markers literal and assembled; ended by a line break, which the tokenizer merges with the text before
    for end in ["<|eot_id|>\\n\\n", "<|eot_id|>"] {
        let d = load(&format!(
            "{{% for m in messages %}}{{{{ '<|' + m.role + '|>' }}}}\n{{{{ m.content + '{end}' }}}}{{% endfor %}}{{% if add_generation_prompt %}}<|assistant|>\n{{% endif %}}"
        ));
        let told = d.warnings(400).unwrap();
        for marker in ["<|eot_id|>", "<|user|>", "<|assistant|>"] {
            assert!(told.iter().any(|w| w.contains(&format!("{marker:?}"))), "{marker}: {told:?}");
        }
        assert!(!told.iter().any(|w| w.contains("<|other|>")), "{told:?}");
        let learnt = super::rows::supervised(&nth(&d, 0));
        assert!(
            "one<|eot_id|>two<|eot_id|>".starts_with(&learnt[..4]) && !learnt.contains("<|u"),
            "{learnt}"
        );
        assert!(!learnt.contains('\n'), "{learnt:?}");
    }
    // special tokens of the model in other forms
    let dir = files.0.path();
    let template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<END><|im_end|>\n{% endfor %}\
        {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
    let config = json!({"eos_token": "<|im_end|>", "sep_token": "<END>", "chat_template": template});
    std::fs::write(dir.join("tokenizer_config.json"), config.to_string()).unwrap();
    std::fs::copy(fixture("tiny-tokenizer/tokenizer.json"), dir.join("tokenizer.json")).unwrap();
    let t = Tokenizer::load(dir, None).unwrap().unwrap();
    let told = load_in(dir, &[source("a.jsonl", Format::Messages)], &data(400), &t).unwrap().warnings(400);
    assert!(told.as_ref().unwrap().iter().any(|w| w.contains("\"<END>\"")), "{told:?}");
    // no notes for the model's own template and tokenizer
    assert_eq!(
        files.load(&[source("a.jsonl", Format::Messages)], &data(400)).unwrap().warnings(400).unwrap(),
        [""; 0]
    );
}

#[test]
fn reasoning_that_no_template_writes_is_told_and_a_system_message_that_moves_too() {
    // only the answer, as in DeepSeek-R1
    let t = with_template(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    );
    let row = json!({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "<think>r</think>a"}]});
    assert_eq!(read(&t, &row, &Map::new()).unwrap().2, [Note::Reasoning]);
    // a turn with only reasoning would become empty
    for thoughts in [json!({"content": "<think>r</think>"}), json!({"content": "", "reasoning_content": "r"})]
    {
        let mut row = row.clone();
        for (key, value) in thoughts.as_object().unwrap() {
            row["messages"][1][key] = value.clone();
        }
        assert!(read(&t, &row, &Map::new()).unwrap_err().starts_with("messages[1]."));
    }
    // not in user messages
    let row = json!({"messages": [{"role": "user", "content": "x</think>y"}, {"role": "assistant", "content": "a"}]});
    assert!(read(&t, &row, &Map::new()).unwrap_err().starts_with("messages[0].content: "));
    let (mistral, vars) = named("Mistral");
    let row = json!({"messages": [{"role": "system", "content": "Sys"}, {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]});
    assert_eq!(read(&mistral, &row, &vars).unwrap().2, [Note::LeftOut("system".into())]);
    // Llama's template drops text next to a call in every position
    let (llama, vars) = named("Llama");
    let mut row = calling(json!({}));
    row["messages"][1]["content"] = json!("Let me look.");
    assert!(read(&llama, &row, &vars).unwrap_err().starts_with("messages[1].content: "));
}

/// Reasoning reaches each template under the name that it reads. The lines are of transformers 5.24.
#[test]
fn reasoning_has_the_names_that_templates_read() {
    let t = with_template("{% for m in messages %}{{ m | tojson }}\n{% endfor %}");
    let all = json!([
        {"role": "assistant", "content": "4", "reasoning": "r"},
        {"role": "assistant", "content": "4", "thinking": "t", "x": 1},
        {"role": "assistant", "content": "4", "reasoning": "r", "thinking": "t"},
        {"role": "assistant", "content": "4", "thinking": "t", "reasoning_content": "c"},
        {"role": "assistant", "content": "4", "reasoning_content": "", "reasoning": "r"},
        {"role": "assistant", "content": "4", "thinking": null, "reasoning": "r"},
    ]);
    let want = r#"{"thinking": "r", "role": "assistant", "content": "4", "reasoning": "r", "reasoning_content": "r"}
{"thinking": "t", "role": "assistant", "content": "4", "x": 1, "reasoning_content": "t"}
{"thinking": "t", "role": "assistant", "content": "4", "reasoning": "r", "reasoning_content": "t"}
{"thinking": "t", "role": "assistant", "content": "4", "reasoning_content": "c"}
{"thinking": "", "role": "assistant", "content": "4", "reasoning_content": "", "reasoning": "r"}
{"thinking": "r", "role": "assistant", "content": "4", "reasoning": "r", "reasoning_content": "r"}
"#;
    assert_eq!(t.render(&all, None, false, &Map::new()).unwrap(), want);
    for template in ["chat/Qwen-Qwen3-0.6B.jinja", "templates/openai-gpt-oss.jinja"] {
        let t = Tokenizer::load(&fixture("tiny-tokenizer"), Some(&fixture(template))).unwrap().unwrap();
        let of = |keys: &[&str]| {
            let mut answer = json!({"role": "assistant", "content": "4"});
            keys.iter().for_each(|key| answer[*key] = "Add both.".into());
            let row = json!({"messages": [{"role": "user", "content": "What is 2+2?"}, answer]});
            read(&t, &row, &Map::new()).unwrap()
        };
        for keys in
            [&["reasoning_content"][..], &["thinking"], &["reasoning"], &["thinking", "reasoning_content"]]
        {
            let (text, spans, notes) = of(keys);
            assert!(text[spans[0].clone()].contains("Add both."), "{template} {keys:?}: {text}");
            assert!(!notes.contains(&Note::Reasoning), "{template} {keys:?}");
        }
    }
}

#[test]
fn a_token_that_reaches_over_an_edge_is_not_supervised_and_told() {
    use crate::tokenize::{encode::mask, markers::cuts, tokenizer::Encoded};
    let offsets = vec![(0, 3), (3, 6), (6, 8), (8, 12)];
    let tokens = Encoded { ids: vec![1, 2, 3, 4], offsets, total: 4, more_within: false };
    for (span, supervised, cut) in [
        (3..8, [false, true, true, false], false),
        (3..7, [false, true, false, false], true),
        (4..12, [false, false, true, true], true),
        (0..12, [true; 4], false),
        (9..10, [false; 4], true),
    ] {
        let spans = std::slice::from_ref(&span);
        assert_eq!((mask(&tokens, spans), cuts(&tokens, spans)), (supervised.to_vec(), cut), "{span:?}");
    }
}

/// An end-of-turn token that absorbs the following line break (Phi-3's `<|end|>`) is still supervised.
#[test]
fn a_token_with_white_space_of_its_own_is_one_token() {
    let files = Files::new(&[(
        "a.jsonl",
        "{\"messages\": [{\"role\": \"user\", \"content\": \"q\"}, {\"role\": \"assistant\", \"content\": \"yes\"}]}",
    )]);
    let bytes = std::fs::read(fixture("tiny-tokenizer/tokenizer.json")).unwrap();
    let mut tokenizer: Value = serde_json::from_slice(&bytes).unwrap();
    for token in tokenizer["added_tokens"].as_array_mut().unwrap() {
        token["rstrip"] = true.into();
    }
    let dir = files.0.path();
    std::fs::write(dir.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    std::fs::copy(fixture("tiny-tokenizer/tokenizer_config.json"), dir.join("tokenizer_config.json"))
        .unwrap();
    let t = Tokenizer::load(dir, None).unwrap().unwrap();
    let d = load_in(dir, &[source("a.jsonl", Format::Messages)], &data(64), &t).unwrap();
    assert_eq!(super::rows::supervised(&nth(&d, 0)), "yes<|im_end|>");
    assert_eq!(d.warnings(64).unwrap(), [""; 0]);
}
