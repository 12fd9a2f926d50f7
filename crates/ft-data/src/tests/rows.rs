//! Rows to samples: formats, masks, lengths, mixing.

use super::*;
use ft_base::error::Failure;
use ft_recipe::Mask;
use serde_json::json;

/// The supervised text of a sample.
pub(super) fn supervised(e: &Example) -> String {
    let ids: Vec<u32> =
        e.ids.iter().zip(&e.labels).filter(|(_, l)| **l != IGNORE_INDEX).map(|(i, _)| *i).collect();
    tiny().decode(&ids).unwrap()
}

fn one(row: serde_json::Value, source: ft_recipe::Source, cfg: &ft_recipe::Data) -> Result<Example, Error> {
    let files = Files::new(&[(&source.source, &row.to_string())]);
    files.load(&[source], cfg).map(|d| nth(&d, 0))
}

#[test]
fn each_format_has_its_supervised_tokens() {
    let cfg = data(500);
    let t = tiny();
    for (row, format, mask, text, trained) in [
        (
            json!({"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "the world"}]}),
            Format::Messages,
            None,
            "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nthe world<|im_end|>\n",
            "the world<|im_end|>",
        ),
        (
            json!({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}),
            Format::Messages,
            Some(Mask::None),
            "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n",
            "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n",
        ),
        (
            json!({"instruction": "Add.", "input": "1 2", "output": "3"}),
            Format::Alpaca,
            None,
            "Below is an instruction that describes a task, paired with an input that provides further context. Write a response that appropriately completes the request.\n\n### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n3<|endoftext|>",
            "3<|endoftext|>",
        ),
        (
            json!({"instruction": "Greet.", "input": "", "output": "Hello"}),
            Format::Alpaca,
            None,
            "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n### Instruction:\nGreet.\n\n### Response:\nHello<|endoftext|>",
            "Hello<|endoftext|>",
        ),
        (
            json!({"prompt": "Hello", "completion": " world"}),
            Format::Completion,
            None,
            "Hello world<|endoftext|>",
            " world<|endoftext|>",
        ),
        (json!({"text": "Hello"}), Format::Text, None, "Hello<|endoftext|>", "Hello<|endoftext|>"),
    ] {
        let mut s = source("a.jsonl", format);
        s.mask = mask;
        let e = one(row, s, &cfg).unwrap();
        assert_eq!(t.decode(&e.ids).unwrap(), text);
        assert_eq!(supervised(&e), trained);
        assert!(e.ids.iter().zip(&e.labels).all(|(i, l)| *l == IGNORE_INDEX || *l == *i as i32));
    }
}

/// Rows of questions, instructions and TRL's lists of messages are the conversation that they spell out.
#[test]
fn questions_and_instructions_are_conversations() {
    let turn = |role: &str, text: &str| json!({"role": role, "content": text});
    let [sys, first, second, third, last] = [
        ("system", "Be brief."),
        ("user", "Hello"),
        ("assistant", "Yes"),
        ("user", "And?\n12"),
        ("assistant", "No"),
    ]
    .map(|(role, text)| turn(role, text));
    let whole = one(
        json!({"messages": [sys, first, second, third, last]}),
        source("a.jsonl", Format::Messages),
        &data(500),
    );
    let whole = whole.unwrap();
    let mut tail = source("a.jsonl", Format::Messages);
    tail.mask = Some(Mask::Last);
    let tail = one(json!({"messages": [sys, first, second, third, last]}), tail, &data(500)).unwrap();
    for (format, row, expected) in [
        (
            Format::Alpaca,
            json!({"system": "Be brief.", "history": [["Hello", "Yes"]], "instruction": "And?", "input": "12", "output": "No"}),
            &whole,
        ),
        // only the completion of a prompt with earlier answers is supervised
        (Format::Completion, json!({"prompt": [sys, first, second, third], "completion": [last]}), &tail),
        (
            Format::Completion,
            json!({"system": "Be brief.", "prompt": [first, second, third], "completion": "No"}),
            &tail,
        ),
    ] {
        for form in [None, Some(Form::Chat)] {
            let s = ft_recipe::Source { form, ..source("a.jsonl", format) };
            assert_eq!(&one(row.clone(), s, &data(500)).unwrap(), expected, "{row}");
        }
        let s = ft_recipe::Source { form: Some(Form::Plain), ..source("a.jsonl", format) };
        let plain = one(row.clone(), s, &data(500));
        assert!(plain.is_err() || plain.is_ok_and(|e| e != *expected), "{row}");
    }
    let s = ft_recipe::Source { form: None, mask: Some(Mask::None), ..source("a.jsonl", Format::Completion) };
    let e = one(json!({"prompt": "Hello", "completion": "No"}), s, &data(500)).unwrap();
    assert!(e.ids.iter().zip(&e.labels).all(|(i, l)| *l == *i as i32));
    // lists of messages as strings of JSON
    let text = serde_json::to_string(&json!([sys, first, second, third, last])).unwrap();
    for name in ["messages", "conversations", "conversation"] {
        let e = one(json!({ name: text }), source("a.jsonl", Format::Messages), &data(500)).unwrap();
        assert_eq!(e, whole, "{name}");
    }
}

/// The last message of a rated conversation is the completion, as in LLaMA-Factory.
#[test]
fn a_rated_conversation_ends_with_the_completion() {
    let turns = ["Two?", "Yes.", "Three?", "No."];
    let said = |role: &str, i: usize| json!({"role": role, "content": turns[i]});
    let list = json!([said("user", 0), said("assistant", 1), said("user", 2), said("assistant", 3)]);
    let of =
        |row, form| one(row, ft_recipe::Source { form, ..source("a.jsonl", Format::Unpaired) }, &data(99));
    let parts = json!({"prompt": list.as_array().unwrap()[..3], "completion": [list[3]], "label": false});
    let expected = of(parts, None).unwrap();
    assert_eq!((supervised(&expected).as_str(), expected.content), ("No.<|im_end|>", Content::Rated(false)));
    for row in [
        json!({"messages": list, "label": false}),
        json!({"conversations": list, "completion": null, "label": false}),
        json!({"messages": list.to_string(), "label": 0}),
    ] {
        assert_eq!(of(row.clone(), None).unwrap(), expected, "{row}");
    }
    let renamed = ft_recipe::Source {
        fields: [("messages".to_string(), "talk".to_string())].into(),
        ..source("a.jsonl", Format::Unpaired)
    };
    let renamed = ft_recipe::Source { form: None, ..renamed };
    assert_eq!(one(json!({"talk": list, "label": false}), renamed, &data(99)).unwrap(), expected);
    let told = |row, form| of(row, form).unwrap_err().to_string();
    let prompted = json!({"prompt": "a", "messages": list, "label": true});
    assert!(told(prompted, None).contains("no field \"completion\""));
    let open = json!({"messages": list.as_array().unwrap()[..3], "label": true});
    assert!(told(open, None).contains("no message of an assistant behind the prompt"));
    let plain = told(json!({"messages": list, "label": true}), Some(Form::Plain));
    assert!(plain.contains("holds messages, which need a chat template"), "{plain}");
    assert!(told(json!({"messages": [], "label": true}), None).contains("messages"));
    // with a completion, messages are not read, and counted as such
    let files = Files::new(&[(
        "a.jsonl",
        &json!({"prompt": "a", "completion": "b", "messages": list, "label": true}).to_string(),
    )]);
    let both = files.load(&[source("a.jsonl", Format::Unpaired)], &data(99)).unwrap();
    let warned = both.warnings(99).unwrap().join("\n");
    assert!(warned.contains("the key \"messages\""), "{warned}");
}

/// Lists of messages as strings of JSON are messages in every format that has either; other JSON is text.
#[test]
fn strings_of_messages_are_messages() {
    let (user, yes, no) = (
        json!([{"role": "user", "content": "Two?"}]),
        json!([{"role": "assistant", "content": "Yes"}]),
        json!([{"from": "gpt", "value": "No"}]),
    );
    for (format, row) in [
        (Format::Completion, json!({"prompt": user, "completion": no})),
        (Format::Preference, json!({"prompt": user, "chosen": yes, "rejected": no})),
        (Format::Unpaired, json!({"prompt": user, "completion": yes, "label": true})),
    ] {
        let s = ft_recipe::Source { form: None, ..source("a.jsonl", format) };
        let mut spelled = row.clone();
        for value in spelled.as_object_mut().unwrap().values_mut().filter(|v| v.is_array()) {
            *value = format!(" {value}\n").into();
        }
        let [list, text] = [row, spelled].map(|row| one(row, s.clone(), &data(99)).unwrap());
        assert_eq!(list, text, "{format:?}");
    }
    for other in [r#"[{"name": "f"}]"#, "[{not JSON", "[1, 2]"] {
        let row = json!({"prompt": "a", "completion": other});
        let e = one(row, source("a.jsonl", Format::Completion), &data(99)).unwrap();
        assert_eq!(supervised(&e), format!("{other}<|endoftext|>"));
    }
}

/// As in TRL, a text that ends with the end-of-sequence token has no second one, also if it is cut.
#[test]
fn texts_with_an_end_get_no_second_one() {
    let end = "<|endoftext|>";
    for (format, row) in [
        (Format::Text, json!({"text": "Hello"})),
        (Format::Completion, json!({"prompt": "a", "completion": "Hello"})),
        (Format::Alpaca, json!({"instruction": "a", "history": [["b", "Hello"]], "output": "Hello"})),
    ] {
        let ended: serde_json::Value =
            serde_json::from_str(&row.to_string().replace("Hello", &format!("Hello{end}"))).unwrap();
        let [plain, ended] = [row, ended].map(|row| one(row, source("a.jsonl", format), &data(999)).unwrap());
        assert_eq!(plain, ended, "{format:?}");
    }
    for text in ["Hello the", "Hello the<|endoftext|>"] {
        let files = Files::new(&[("a.jsonl", &json!({"text": text}).to_string())]);
        let drop = ft_recipe::Data { over_length: OverLength::Error, ..data(1) };
        let error = files.load(&[source("a.jsonl", Format::Text)], &drop).unwrap_err().to_string();
        assert!(error.contains("3 tokens are more than"), "{error}");
    }
}

#[test]
fn rows_that_no_conversation_can_be_made_of_are_told() {
    let chat = |row| {
        let s = ft_recipe::Source { form: None, ..source("a.jsonl", Format::Completion) };
        one(row, s, &data(500)).unwrap_err().to_string()
    };
    let user = json!([{"role": "user", "content": "Hi"}]);
    for (row, why) in [
        (json!({"prompt": "Hi", "completion": " "}), "completion is empty"),
        (json!({"prompt": "Hi"}), "no field \"completion\""),
        (json!({"prompt": "Hi", "completion": user}), "completion: no message of an assistant"),
        (json!({"prompt": [{"role": "user"}], "completion": "x"}), "prompt[0].content is missing"),
        (
            json!({"prompt": "Hi", "completion": "x", "history": [["a", "b"]]}),
            "history: write earlier turns as messages",
        ),
        (json!({"prompt": "Hi", "completion": "x", "label": false}), "label: a judgment"),
        (json!({"prompt": "Hi", "completion": "x", "chosen": "a", "rejected": "b"}), "a pair of preferences"),
    ] {
        let told = chat(row);
        assert!(told.contains(why), "{told}");
    }
    let list =
        one(json!({"prompt": user, "completion": "x"}), source("a.jsonl", Format::Completion), &data(500));
    assert!(
        list.unwrap_err().to_string().contains("prompt: a list of messages, which needs a chat template")
    );
}

/// Rows of preferences whose prompt would be lost, and what a plain text cannot say, are refused by name.
#[test]
fn prompts_of_preferences_are_not_lost() {
    let answer = |text: &str| json!([{"role": "assistant", "content": text}]);
    let instruction = |mut s: ft_recipe::Source| {
        s.fields.insert("prompt".into(), "instruction".into());
        s
    };
    let pair = || source("a.jsonl", Format::Preference);
    for (row, source, why) in [
        (
            json!({"question": "Hi", "chosen": "a", "rejected": "b"}),
            pair(),
            "no field \"prompt\"; there is question, chosen, rejected, and chosen and rejected begin with nothing in \
             common\n  hint: fields = { prompt = \"question\" }",
        ),
        (json!({"chosen": "a", "rejected": "b"}), pair(), "no field \"prompt\""),
        (json!({"chosen": answer("a"), "rejected": answer("b")}), pair(), "no field \"prompt\""),
        (
            json!({"instruction": "Add.", "input": "1 2", "chosen": "3", "rejected": "4"}),
            instruction(pair()),
            "input: the prompt of a pair is one text",
        ),
        (json!({"system": "Be.", "prompt": "Hi", "chosen": "a", "rejected": "b"}), pair(), "system: texts"),
        (json!({"tools": [{}], "prompt": "Hi", "chosen": "a", "rejected": "b"}), pair(), "tools: texts"),
        (
            json!({"system": "Be.", "prompt": "Hi", "completion": "a", "label": true}),
            source("a.jsonl", Format::Unpaired),
            "system: texts",
        ),
        (
            json!({"prompt": "Hi", "chosen": "a", "rejected": "b"}),
            source("a.jsonl", Format::Unpaired),
            "task = \"kto\" takes a completion a row",
        ),
    ] {
        let told = one(row, source, &data(500)).unwrap_err().to_string();
        assert!(told.contains(why), "{told}");
    }
    let common =
        json!({"chosen": "\n\nHuman: Hi\n\nAssistant: a", "rejected": "\n\nHuman: Hi\n\nAssistant: b"});
    assert!(one(common, pair(), &data(500)).is_ok());
    // chosen is the beginning of rejected
    let turn = |role: &str, text: &str| json!({"role": role, "content": text});
    let [u, a, v, b] = [("user", "q"), ("assistant", "a"), ("user", "r"), ("assistant", "b")]
        .map(|(role, text)| turn(role, text));
    let implicit = one(json!({"chosen": [u, a], "rejected": [u, a, v, b]}), pair(), &data(500));
    let spelled = one(json!({"prompt": [u], "chosen": [a], "rejected": [a, v, b]}), pair(), &data(500));
    assert_eq!(implicit.unwrap(), spelled.unwrap());
}

/// In form "chat", texts of pairs and rated completions are the messages that they stand for.
#[test]
fn texts_of_preferences_in_form_chat_are_messages() {
    let turn = |role: &str, text: &str| json!({"role": role, "content": text});
    let (q, a, b) = (turn("user", "Two?"), turn("assistant", "Yes."), turn("assistant", "No."));
    let with = |format, form| ft_recipe::Source { form, ..source("a.jsonl", format) };
    let spelled = |value: &str| json!([turn("system", "Be brief."), turn("user", value)]);
    for (format, texts, messages) in [
        (
            Format::Preference,
            json!({"prompt": "Two?", "chosen": "Yes.", "rejected": "No."}),
            json!({"prompt": [q], "chosen": [a], "rejected": [b]}),
        ),
        (
            Format::Preference,
            json!({"system": "Be brief.", "prompt": "Two?", "chosen": "Yes.", "rejected": "No."}),
            json!({"prompt": spelled("Two?"), "chosen": [a], "rejected": [b]}),
        ),
        (
            Format::Unpaired,
            json!({"prompt": "Two?", "completion": "Yes.", "label": true}),
            json!({"prompt": [q], "completion": [a], "label": true}),
        ),
    ] {
        let expected = one(messages.clone(), with(format, None), &data(500)).unwrap();
        for row in [&texts, &messages] {
            let chat = one(row.clone(), with(format, Some(Form::Chat)), &data(500)).unwrap();
            assert_eq!(chat, expected, "{row}");
        }
        let plain = |row| one(row, with(format, Some(Form::Plain)), &data(500)).map_err(|e| e.to_string());
        assert_ne!(plain(texts), Ok(expected));
        assert!(plain(messages).unwrap_err().contains("holds messages, which need a chat template"));
    }
    let row = json!({"prompt": "Two?", "chosen": "Yes.", "rejected": "No."});
    let [default, plain] =
        [None, Some(Form::Plain)].map(|form| one(row.clone(), with(Format::Preference, form), &data(500)));
    assert_eq!(default.unwrap(), plain.unwrap());
    let mut renamed = with(Format::Preference, Some(Form::Chat));
    renamed.fields =
        [("role", "who"), ("content", "said")].map(|(a, b)| (a.to_string(), b.to_string())).into();
    assert!(one(row, renamed, &data(500)).is_ok());
    let error =
        |row| one(row, with(Format::Preference, Some(Form::Chat)), &data(500)).unwrap_err().to_string();
    assert!(error(json!({"prompt": "Two?", "chosen": " ", "rejected": "No."})).contains("chosen is empty"));
    let told = error(json!({"chosen": "It is a", "rejected": "It is b"}));
    assert!(told.contains("makes the user's message of it\n  hint: form = \"plain\""), "{told}");
}

#[test]
fn cut_samples_are_a_warning() {
    let rows = "{\"input_ids\": [7, 8, 9, 10]}\n{\"input_ids\": [7, 8]}\n";
    let files = Files::new(&[("a.jsonl", rows)]);
    let told = |max| {
        let d = files.load(&[source("a.jsonl", Format::Tokens)], &data(max)).unwrap();
        d.warnings(100).unwrap().join("\n")
    };
    assert!(told(3).contains("1 of 2 samples are cut to data.max_length"), "{}", told(3));
    assert_eq!(told(4), "");
}

/// A completion begins at the first token that the prompt alone does not have, of a pair at the earlier of two, as in
/// TRL. Merged tokens are told.
#[test]
fn completions_begin_with_the_tokens_that_they_change() {
    let [hell, hello, world, mark, the] = ["Hell", "Hello", " world", "!", "the"].map(|text| {
        let ids = tiny().encode(text).unwrap();
        assert_eq!(ids.len(), 1, "{text}");
        ids[0]
    });
    let end = tiny().text_end().unwrap();
    let merged = "tokens merge across the end of the prompt";
    for (row, format, ids, masked, told) in [
        (
            json!({"prompt": "theHell", "chosen": "o world", "rejected": "!"}),
            Format::Preference,
            vec![the, hello, world, end, the, hell, mark, end],
            vec![0, 4],
            true,
        ),
        (
            json!({"prompt": "theHello", "chosen": " world", "rejected": "!"}),
            Format::Preference,
            vec![the, hello, world, end, the, hello, mark, end],
            vec![0, 1, 4, 5],
            false,
        ),
        (
            json!({"prompt": "theHell", "completion": "o", "label": true}),
            Format::Unpaired,
            vec![the, hello, end],
            vec![0],
            true,
        ),
    ] {
        let files = Files::new(&[("a.jsonl", &row.to_string())]);
        let d = files.load(&[source("a.jsonl", format)], &data(50)).unwrap();
        let e = nth(&d, 0);
        let without: Vec<usize> = (0..e.labels.len()).filter(|i| e.labels[*i] == IGNORE_INDEX).collect();
        assert_eq!((&e.ids, &without), (&ids, &masked), "{row}");
        assert!(e.ids.iter().zip(&e.labels).all(|(id, l)| *l == IGNORE_INDEX || *l == *id as i32), "{row}");
        assert_eq!(d.stats.notes.told().iter().any(|n| n.contains(merged)), told, "{row}");
    }
}

/// A margin of a pair is refused for reward models alone, but for a margin of 0.
#[test]
fn margins_of_reward_models_are_refused() {
    let pair = |margin: f64| json!({"prompt": "a", "chosen": "b", "rejected": "c", "margin": margin});
    let reward = ft_recipe::Data { scores: ft_recipe::ScoreTargets::Pairs, ..data(50) };
    let told = |margin, cfg: &ft_recipe::Data| {
        one(pair(margin), source("a.jsonl", Format::Preference), cfg).err().map(|e| e.to_string())
    };
    let refused = told(0.5, &reward).expect("a refusal");
    assert!(refused.contains("margin: the loss of task = \"reward\" has no margin"), "{refused}");
    assert_eq!((told(0.0, &reward), told(0.5, &data(50))), (None, None));
}

/// Slices and limits count the rows of all files of a source, and have tokens of their own in the cache.
#[test]
fn parts_of_a_source_are_its_rows() {
    let lines = |from: usize, to: usize| {
        (from..to).map(|i| format!("{{\"input_ids\": [7, {i}]}}\n")).collect::<String>()
    };
    let files = Files::new(&[("a.jsonl", &lines(0, 7)), ("b.jsonl", &lines(7, 10))]);
    for (split, max_samples, rows) in [
        (Some("train[:50%]"), None, 0..5),
        (Some("[6:8]"), None, 6..8),
        (Some("[-20%:]"), None, 8..10),
        (Some("[2:]"), Some(3), 2..5),
        (None, Some(8), 0..8),
        (None, Some(99), 0..10),
        (None, None, 0..10),
    ] {
        let s = ft_recipe::Source {
            split: split.map(String::from),
            max_samples,
            ..source("*.jsonl", Format::Tokens)
        };
        let d = files.load(&[s], &data(9)).unwrap();
        let read: Vec<usize> = all(&d).iter().map(|e| e.ids[1] as usize).collect();
        assert_eq!(read, rows.clone().collect::<Vec<_>>(), "{split:?} {max_samples:?}");
        assert_eq!(d.stats.rows_read, rows.len());
    }
    for (split, said) in [
        ("[50:60]", "split = \"[50:60]\" selects none of its 10 rows"),
        ("train[:1%]", "split = \"train[:1%]\" selects none of its 10 rows"),
        ("[5:2]", "split = \"[5:2]\" selects none of its rows"),
    ] {
        let s = ft_recipe::Source { split: Some(split.into()), ..source("*.jsonl", Format::Tokens) };
        let error = files.load(&[s], &data(9)).unwrap_err().to_string();
        assert!(error.contains(said), "{error}");
    }
    let s = ft_recipe::Source { split: Some("test[:2]".into()), ..source("a.jsonl", Format::Tokens) };
    let error = files.load(&[s], &data(9)).unwrap_err().to_string();
    assert!(error.contains("split = \"test\" is for datasets of the hub"), "{error}");
}

/// Preferences without a difference are told: equal completions, ratings of one kind.
#[test]
fn preferences_without_a_difference_are_told() {
    let told = |format, rows: &str| {
        let files = Files::new(&[("a.jsonl", rows)]);
        files.load(&[source("a.jsonl", format)], &data(99)).unwrap().warnings(99).unwrap().join("\n")
    };
    let pair =
        |rejected: &str| format!("{{\"prompt\": \"a\", \"chosen\": \"b\", \"rejected\": {rejected:?}}}\n");
    let rated = |label: bool| format!("{{\"prompt\": \"a\", \"completion\": \"b\", \"label\": {label}}}\n");
    assert_eq!(told(Format::Preference, &pair("c")), "");
    let equal = told(Format::Preference, &(pair("c") + &pair("b")));
    assert!(equal.starts_with("1 row whose chosen and rejected are the same tokens"), "{equal}");
    assert!(equal.contains("a.jsonl:2"), "{equal}");
    assert_eq!(told(Format::Unpaired, &(rated(true) + &rated(false))), "");
    for label in [true, false] {
        let all = told(Format::Unpaired, &(rated(label) + &rated(label)));
        assert!(all.starts_with(&format!("2 rows, all of them, with label = {label}")), "{all}");
        assert!(all.contains(&format!("hint: add rows with label = {}", !label)), "{all}");
    }
}

#[test]
fn tokens_are_taken_as_they_are() {
    let e = one(
        json!({"input_ids": [5, 6, 7], "labels": [-100, 9, 7]}),
        source("a.jsonl", Format::Tokens),
        &data(9),
    );
    assert_eq!(
        e.unwrap(),
        Example { ids: vec![5, 6, 7], labels: vec![-100, 9, 7], line: 1, ..Example::default() }
    );
    let e = one(json!({"input_ids": [5, 6]}), source("a.jsonl", Format::Tokens), &data(9)).unwrap();
    assert_eq!(e.labels, [5, 6]);
}

#[test]
fn fields_rename_keys_of_rows() {
    let mut s = source("a.jsonl", Format::Completion);
    s.fields = [("prompt".to_string(), "q".to_string()), ("completion".to_string(), "a".to_string())].into();
    assert_eq!(
        supervised(&one(json!({"q": "x", "a": "y"}), s.clone(), &data(50)).unwrap()),
        "y<|endoftext|>"
    );
    s.fields.insert("answer".into(), "a".into());
    let error = one(json!({"q": "x", "a": "y"}), s, &data(50)).unwrap_err();
    assert!(
        error.to_string().contains("recipe.toml:7:3") && error.to_string().contains("\"answer\""),
        "{error}"
    );
    assert_eq!(error.exit_code(), ft_base::ExitCode::Usage);
    let mut s = source("a.jsonl", Format::Messages);
    s.fields = [("messages", "turns"), ("role", "who"), ("content", "what")]
        .map(|(a, b)| (a.into(), b.into()))
        .into();
    let row = json!({"turns": [{"who": "user", "what": "a"}, {"who": "gpt", "what": "b"}]});
    assert_eq!(supervised(&one(row, s, &data(50)).unwrap()), "b<|im_end|>");
}

#[test]
fn masks_that_a_format_cannot_do_are_refused() {
    for (format, mask) in [
        (Format::Messages, Mask::Completion),
        (Format::Alpaca, Mask::Assistant),
        (Format::Text, Mask::Assistant),
        (Format::Tokens, Mask::Completion),
    ] {
        let cfg = ft_recipe::Data { mask: Some(mask), ..data(8) };
        let error = one(json!({}), source("a.jsonl", format), &cfg).unwrap_err();
        assert_eq!(error.exit_code(), ft_base::ExitCode::Usage);
        assert!(error.to_string().contains("cannot do mask"), "{error}");
    }
    // the mask of a source overrides the recipe's
    let cfg = ft_recipe::Data { mask: Some(Mask::Assistant), ..data(8) };
    let mut s = source("a.jsonl", Format::Text);
    s.mask = Some(Mask::None);
    assert!(one(json!({"text": "Hello"}), s, &cfg).is_ok());
}

#[test]
fn long_samples_are_cut_dropped_or_refused() {
    let rows = "{\"prompt\": \"Hello\", \"completion\": \"1234567890\"}\n{\"prompt\": \"1234567890\", \"completion\": \"x\"}\n{\"prompt\": \"1\", \"completion\": \"2\"}\n";
    let files = Files::new(&[("a.jsonl", rows)]);
    let load = |over_length| {
        files.load(&[source("a.jsonl", Format::Completion)], &ft_recipe::Data { over_length, ..data(8) })
    };
    let cut = load(OverLength::Truncate).unwrap();
    assert_eq!((cut.samples.len(), cut.stats.truncated, cut.stats.drops.empty_after_truncation), (2, 1, 1));
    assert!(all(&cut).iter().all(|e| e.ids.len() <= 8 && e.targets() > 0));
    assert!(
        cut.stats.left_out[0].contains("a.jsonl:2: empty mask after truncation"),
        "{:?}",
        cut.stats.left_out
    );
    let drop = load(OverLength::Drop).unwrap();
    assert_eq!((drop.samples.len(), drop.stats.drops.too_long), (1, 2));
    let error = load(OverLength::Error).unwrap_err().to_string();
    assert!(error.contains("a.jsonl:1: 12 tokens are more than data.max_length = 8"), "{error}");
}

/// The pieces of a document, one after the other, are the document.
#[test]
fn long_documents_are_divided() {
    let long: Vec<u32> = (1..=20).collect();
    let weights: Vec<f32> = long.iter().map(|i| *i as f32).collect();
    let labels = |n: usize, targets: usize| [vec![IGNORE_INDEX; n], vec![3; targets]].concat();
    let ten = [labels(8, 1), labels(1, 0)].concat();
    let rows = [
        json!({"input_ids": long}),
        json!({"input_ids": long, "labels": labels(17, 3)}),
        json!({"input_ids": long, "weights": weights}),
        json!({"input_ids": long, "teacher_ids": long.iter().map(|i| [*i]).collect::<Vec<_>>(),
            "teacher_logits": vec![[0.0]; 20]}),
        json!({"input_ids": [1, 2]}),
        json!({"input_ids": &long[..17]}),
        // the only target is the first token of a piece
        json!({"input_ids": &long[..10], "labels": ten}),
    ];
    let lines: String = rows.iter().map(|r| format!("{r}\n")).collect();
    let files = Files::new(&[("a.jsonl", &lines)]);
    let cfg = ft_recipe::Data { over_length: OverLength::Split, ..data(8) };
    let d = files.load(&[source("a.jsonl", Format::Tokens)], &cfg).unwrap();
    let pieces = all(&d);
    let of = |line| pieces.iter().filter(move |e| e.line == line).collect::<Vec<_>>();
    let ids = |line| of(line).iter().map(|e| e.ids.clone()).collect::<Vec<_>>();
    for line in [1, 3, 4] {
        assert_eq!(ids(line), [&long[..8], &long[8..16], &long[16..]], "{line}");
    }
    assert_eq!((ids(2), of(2)[0].labels.clone()), (vec![long[16..].to_vec()], vec![IGNORE_INDEX, 3, 3, 3]));
    assert_eq!(of(3).iter().flat_map(|e| e.weights.clone()).collect::<Vec<_>>(), weights);
    let taught: Vec<u32> = of(4).iter().flat_map(|e| e.teacher.ids.clone()).collect();
    assert_eq!(taught, [&long[..7], &long[8..15], &long[16..19]].concat());
    assert_eq!(ids(5), [[1, 2]]);
    assert_eq!(ids(6), [&long[..8], &long[8..15], &long[15..17]]);
    assert_eq!((of(7).len(), d.stats.drops.empty_after_truncation), (0, 1));
    assert_eq!((d.stats.divided, d.stats.truncated, d.stats.rows_read, d.stats.examples), (5, 0, 7, 14));
    let told = d.warnings(64).unwrap().join("\n");
    assert!(told.contains("1 row in which pieces of data.max_length tokens"), "{told}");
    let shown = {
        let mut out = Vec::new();
        crate::rows::show::rows(&d, None, 0, (8, OverLength::Split), false, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    };
    assert!(shown.contains("examples     14, 5 documents divided at data.max_length"), "{shown}");
    assert!(!shown.contains("tokens lost"), "{shown}");
}

/// A text has its first tokens in its first piece, and its end in its last one.
#[test]
fn pieces_of_a_text_have_one_end() {
    let text = "one two three four five six seven eight nine ten ".repeat(20);
    let files = Files::new(&[("a.jsonl", &json!({"text": text}).to_string())]);
    let load = |cfg| files.load(&[source("a.jsonl", Format::Text)], &cfg).map(|d| all(&d)).unwrap();
    let whole = &load(data(4096))[0];
    let pieces = load(ft_recipe::Data { over_length: OverLength::Split, ..data(30) });
    assert!(pieces.len() > 5 && pieces.iter().rev().skip(2).all(|e| e.ids.len() == 30));
    let joined = |of: fn(&Example) -> Vec<i32>| pieces.iter().flat_map(of).collect::<Vec<_>>();
    assert_eq!(
        joined(|e| e.ids.iter().map(|i| *i as i32).collect()),
        whole.ids.iter().map(|i| *i as i32).collect::<Vec<_>>()
    );
    assert_eq!(joined(|e| e.labels.clone()), whole.labels);
}

/// All pieces of a document are trained on, or all are held out.
#[test]
fn pieces_of_a_document_are_held_out_together() {
    let row = |n: usize| json!({"input_ids": vec![n; 3 + n * 5 % 40]}).to_string() + "\n";
    let files = Files::new(&[("a.jsonl", &(0..20).map(row).collect::<String>())]);
    let s = [source("a.jsonl", Format::Tokens)];
    for cache in [true, false] {
        let over_length = OverLength::Split;
        let cfg = ft_recipe::Data { eval_share: 0.25, over_length, cache, ..of(&s, &data(8)) };
        let both = Dataset::load_both(&cfg, &|s| files.0.path().join(s), None, 64, 3).unwrap();
        let documents =
            |d: &Dataset| all(d).iter().map(|e| e.line).collect::<std::collections::BTreeSet<_>>();
        let (train, eval) = (documents(&both.0), documents(both.1.as_ref().unwrap()));
        assert_eq!((train.len(), eval.len(), train.union(&eval).count()), (15, 5, 20));
        let divided = |lines: &std::collections::BTreeSet<usize>| {
            lines.iter().filter(|line| 3 + (*line - 1) * 5 % 40 > 8).count()
        };
        assert_eq!([both.0.stats.divided, both.1.unwrap().stats.divided], [divided(&train), divided(&eval)]);
    }
}

#[test]
fn sources_are_mixed_by_weight_and_read_in_order() {
    let line = |n: usize| format!("{{\"input_ids\": [{n}, {n}]}}\n");
    let ten: String = (0..10).map(line).collect();
    let files = Files::new(&[("a.jsonl", &ten), ("b.jsonl", &line(20))]);
    std::fs::create_dir(files.0.path().join("d")).unwrap();
    for (name, n) in [("2.jsonl", 32), ("1.jsonl", 31), (".hidden.jsonl", 33), ("readme.md", 34)] {
        std::fs::write(files.0.path().join("d").join(name), line(n)).unwrap();
    }
    let mut s =
        [source("a.jsonl", Format::Tokens), source("b.jsonl", Format::Tokens), source("d", Format::Tokens)];
    let first = |d: &Dataset| lists(&d.rows).iter().map(|r| nth(d, r[0] as usize).ids[0]).collect::<Vec<_>>();
    let all = files.load(&s, &data(8)).unwrap();
    assert_eq!(first(&all), [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 20, 31, 32]);
    (s[0].weight, s[1].weight) = (0.5, 3.0);
    let mixed = files.load(&s, &data(8)).unwrap();
    assert_eq!((mixed.rows.len(), mixed.stats.tokens), (5 + 3 + 2, 20));
    assert_eq!(first(&mixed)[5..], [20, 20, 20, 31, 32]);
    assert_ne!(all.hash, mixed.hash);
    assert_eq!(mixed.hash, files.load(&s, &data(8)).unwrap().hash);
    s[0].weight = f64::NAN;
    assert!(files.load(&s, &data(8)).is_err());
}

/// Averaged over seeds, every sample occurs as often as the weight specifies.
#[test]
fn weights_are_exact_in_expectation() {
    let rows: String = (0..3).map(|n| format!("{{\"input_ids\": [{n}, {n}]}}\n")).collect();
    let files = Files::new(&[("a.jsonl", &rows), ("b.jsonl", "{\"input_ids\": [9, 9]}\n")]);
    let mut s = [source("a.jsonl", Format::Tokens), source("b.jsonl", Format::Tokens)];
    s[0].weight = 1.5;
    let (mut counts, seeds) = ([0usize; 3], 400);
    for seed in 0..seeds {
        let cfg = of(&s, &data(8));
        let d = Dataset::load(Part::Train, &cfg, &|s| files.0.path().join(s), None, 64, seed).unwrap();
        for row in lists(&d.rows) {
            let id = nth(&d, row[0] as usize).ids[0] as usize;
            if id < 3 {
                counts[id] += 1;
            }
        }
    }
    for count in counts {
        let mean = count as f64 / seeds as f64;
        assert!((mean - 1.5).abs() < 0.1, "{counts:?}");
    }
    s[0].weight = 1e8;
    let many = files.load(&s[..1], &data(8)).unwrap_err().to_string();
    assert!(many.contains("that is too many"), "{many}");
    s[0].weight = 0.01;
    let cfg = ft_recipe::Data { eval: s[..1].to_vec(), ..of(&s[..1], &data(8)) };
    for (part, key) in [(Part::Train, "data.train"), (Part::Eval, "data.eval")] {
        let few = Dataset::load(part, &cfg, &|s| files.0.path().join(s), None, 64, 0);
        let told = format!("{key}: by their weights no sample of the sources is in an epoch");
        assert!(few.unwrap_err().to_string().contains(&told));
    }
}

#[test]
fn a_share_is_held_out_of_each_source() {
    let rows = |from: usize, n: usize| {
        (from..from + n).map(|n| format!("{{\"input_ids\": [{n}, {n}]}}\n")).collect::<String>()
    };
    let files =
        Files::new(&[("a.jsonl", &rows(0, 40)), ("b.jsonl", &rows(40, 10)), ("c.jsonl", &rows(50, 1))]);
    let s = ["a.jsonl", "b.jsonl", "c.jsonl"].map(|f| source(f, Format::Tokens));
    let cfg = ft_recipe::Data { eval_share: 0.1, shuffle: true, ..of(&s, &data(8)) };
    let resolve = |s: &str| files.0.path().join(s);
    let ids = |d: &Dataset| lists(&d.rows).iter().map(|r| nth(d, r[0] as usize).ids[0]).collect::<Vec<_>>();
    let load = |part, seed| Dataset::load(part, &cfg, &resolve, None, 64, seed).unwrap();
    let (train, eval) = (ids(&load(Part::Train, 3)), ids(&load(Part::Eval, 3)));
    assert_eq!((train.len(), eval.len()), (36 + 9 + 1, 4 + 1));
    assert!(eval.is_sorted() && eval[4] >= 40, "{eval:?}");
    let mut all = [train.clone(), eval.clone()].concat();
    all.sort_unstable();
    assert_eq!(all, (0..51).collect::<Vec<_>>());
    assert_ne!(ids(&load(Part::Eval, 4)), eval, "another seed, another share");
    let (both, held) = Dataset::load_both(&cfg, &resolve, None, 64, 3).unwrap();
    assert_eq!((ids(&both), ids(&held.unwrap())), (train, eval));
    // a single sample stays for training, and nothing to evaluate on
    let one = ft_recipe::Data { train: s[2..].to_vec(), ..cfg };
    let told = "recipe.toml:7:3: data.eval_share: no sample is held out";
    for alone in [
        Dataset::load_both(&one, &resolve, None, 64, 3).map(|_| ()),
        Dataset::load(Part::Eval, &one, &resolve, None, 64, 3).map(|_| ()),
    ] {
        assert!(alone.unwrap_err().to_string().starts_with(told));
    }
    let checked = Dataset::check(&one, &resolve, None, 64, 3, 9);
    assert_eq!(checked.problems.len(), 1, "{:?}", checked.problems);
    assert!(checked.problems[0].to_string().starts_with(told) && checked.train.is_some());
}

/// With a share held out, each part counts its own cut samples.
#[test]
fn cut_samples_are_counted_by_part() {
    let rows: String = (0..10).map(|n| format!("{{\"text\": \"{}\"}}\n", "long ".repeat(n * 5))).collect();
    let files = Files::new(&[("a.jsonl", &rows.replacen("\"\"", "\"a\"", 1))]);
    let cfg = ft_recipe::Data { eval_share: 0.3, ..of(&[source("a.jsonl", Format::Text)], &data(20)) };
    let resolve = |s: &str| files.0.path().join(s);
    let (train, eval) = Dataset::load_both(&cfg, &resolve, Some(&tiny()), 285, 3).unwrap();
    let eval = eval.unwrap();
    let full = |d: &Dataset| all(d).iter().filter(|e| e.ids.len() == 20).count();
    assert_eq!([train.stats.truncated, eval.stats.truncated], [full(&train), full(&eval)]);
    assert!(train.stats.truncated + eval.stats.truncated >= 8);
}

#[test]
fn held_out_samples_count_once_whatever_the_weight() {
    let rows: String = (0..10).map(|n| format!("{{\"input_ids\": [{n}, {n}]}}\n")).collect();
    let files = Files::new(&[("a.jsonl", &rows)]);
    for (weight, train) in [(2.0, 16), (0.5, 4)] {
        let s = ft_recipe::Source { weight, ..source("a.jsonl", Format::Tokens) };
        let cfg = ft_recipe::Data { eval_share: 0.2, ..of(&[s], &data(8)) };
        let made = Dataset::load_both(&cfg, &|s| files.0.path().join(s), None, 64, 3).unwrap();
        assert_eq!((made.0.rows.len(), made.1.unwrap().rows.len()), (train, 2), "{weight}");
    }
}

#[test]
fn numbers_that_name_a_class_are_its_name() {
    let class = |label: &str, names: &[&str]| {
        let row = format!("{{\"text\": \"a\", \"label\": {label}}}");
        let scores = ft_recipe::ScoreTargets::Classes(names.iter().map(|n| n.to_string()).collect());
        let files = Files::new(&[("a.jsonl", &row)]);
        let d = files.load(&[source("a.jsonl", Format::Labeled)], &ft_recipe::Data { scores, ..data(9) });
        d.map(|d| *nth(&d, 0).labels.last().unwrap()).map_err(|e| e.to_string())
    };
    let stars = ["1", "2", "3"];
    for (label, want) in [("1", 0), ("3", 2), ("1.0", 0), ("\"1\"", 0), ("\"3\"", 2), ("0", 0)] {
        assert_eq!(class(label, &stars), Ok(want), "{label}");
    }
    for (label, want) in [("1", 1), ("1.0", 1), ("\"1\"", 1), ("\"yes\"", 1)] {
        assert_eq!(class(label, &["no", "yes"]), Ok(want), "{label}");
    }
    // cells of tables, and booleans
    for (label, want) in [("\"3.0\"", 2), ("\" 1.0\"", 0), ("\"0.0\"", 0)] {
        assert_eq!(class(label, &stars), Ok(want), "{label}");
    }
    for (label, want) in [("\"yes \"", 1), ("\"1.0\"", 1), ("true", 1), ("false", 0)] {
        assert_eq!(class(label, &["no", "yes"]), Ok(want), "{label}");
    }
    assert_eq!((class("true", &["True", "False"]), class("false", &["True", "False"])), (Ok(0), Ok(1)));
    let told = class("\"Yes \"", &["no", "yes"]).unwrap_err();
    assert!(told.contains("\"Yes \" is none of the classes: \"no\", \"yes\", or 0 to 1"), "{told}");
    for label in ["true", "\"1.5\"", "\"nan\""] {
        assert!(class(label, &stars).unwrap_err().contains("is none of the classes"), "{label}");
    }
    assert!(
        class("4", &stars).unwrap_err().contains("4 is none of the classes: \"1\", \"2\", \"3\", or 0 to 2")
    );
}

/// As `tokenizer(text, truncation=True, max_length=3)` of transformers.
#[test]
fn labeled_texts_have_the_tokens_behind_them() {
    let path = fixture("tiny-tokenizer/tokenizer.json");
    let mut file: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let special = |id: &str| json!({"SpecialToken": {"id": id, "type_id": 0}});
    let token = |name: &str, id: u32| json!({"id": name, "ids": [id], "tokens": [name]});
    let [start, end] = ["<|im_start|>", "<|endoftext|>"];
    let [a, b] = ["A", "B"].map(|id| json!({"Sequence": {"id": id, "type_id": 0}}));
    file["post_processor"] = json!({
        "type": "TemplateProcessing",
        "single": [special(start), a, special(end)],
        "pair": [a, b],
        "special_tokens": {start: token(start, 283), end: token(end, 282)},
    });
    let row = r#"{"text": "Hello world", "label": 1}"#;
    let files = Files::new(&[("tokenizer.json", &file.to_string()), ("a.jsonl", row)]);
    let t = Tokenizer::load(files.0.path(), None).unwrap().unwrap();
    let words = tiny().encode("Hello world").unwrap();
    assert_eq!(words.len(), 2);
    for (max_length, ids) in [(9, vec![283, words[0], words[1], 282]), (3, vec![283, words[0], 282])] {
        let scores = ft_recipe::ScoreTargets::Classes(vec!["no".into(), "yes".into()]);
        let cfg = ft_recipe::Data { scores, ..data(max_length) };
        let d = load_in(files.0.path(), &[source("a.jsonl", Format::Labeled)], &cfg, &t).unwrap();
        let e = nth(&d, 0);
        assert_eq!((&e.ids, e.labels.last()), (&ids, Some(&1)));
        assert_eq!(d.stats.truncated, usize::from(max_length == 3));
    }
}

#[test]
fn samples_without_weight_are_told() {
    let row = |weight: &str| format!("{{\"text\": \"Hello\", \"weight\": {weight}}}\n");
    let warnings = |rows: &str| {
        let files = Files::new(&[("a.jsonl", rows)]);
        let d = files.load(&[source("a.jsonl", Format::Text)], &data(9));
        d.unwrap().warnings(9).unwrap()
    };
    assert_eq!(warnings(&row("0.5")), [""; 0]);
    let told = warnings(&(row("0") + &row("0.0") + &row("1")));
    assert_eq!(told, ["2 of 3 samples have a weight of 0, and do not count in the loss"]);
}

#[test]
fn evaluation_rows_without_weight_are_refused() {
    let row = |weight: usize| format!("{{\"text\": \"Hello\", \"weight\": {weight}}}\n");
    let files =
        Files::new(&[("a.jsonl", &row(1)), ("none.jsonl", &row(0)), ("some.jsonl", &(row(0) + &row(1)))]);
    let load = |eval: &str| {
        let eval = vec![source(eval, Format::Text)];
        let cfg = ft_recipe::Data { eval, ..of(&[source("a.jsonl", Format::Text)], &data(9)) };
        Dataset::load(Part::Eval, &cfg, &|s| files.0.path().join(s), Some(&tiny()), 285, 11)
    };
    assert_eq!(load("some.jsonl").unwrap().samples.len(), 2);
    let told = load("none.jsonl").unwrap_err().to_string();
    assert!(told.contains("data.eval: all samples have a weight of 0"), "{told}");
}

/// The last token of a prompt may become one with the completion's, which leaves the end-of-sequence token.
#[test]
fn long_pairs_of_one_token_are_too_long_not_labels() {
    let row = |words: usize| {
        let prompt = "word ".repeat(words);
        format!("{{\"prompt\": \"{prompt}\", \"chosen\": \"a\", \"rejected\": \"b\"}}\n")
    };
    let files = Files::new(&[("a.jsonl", &(row(1) + &row(60)))]);
    for (over_length, drops) in [(OverLength::Truncate, [1, 0]), (OverLength::Drop, [0, 1])] {
        let cfg = ft_recipe::Data { over_length, ..data(40) };
        let found = files.load(&[source("a.jsonl", Format::Preference)], &cfg).unwrap().stats.drops;
        assert_eq!([found.empty_after_truncation, found.too_long], drops);
    }
}

#[test]
fn nulls_and_large_weights_are_told_as_such() {
    for (row, format, said) in [
        (
            r#"{"prompt": "a", "chosen": "b", "rejected": null}"#,
            Format::Preference,
            "a.jsonl:1: rejected is null",
        ),
        (
            r#"{"text": "a", "weight": 1e300}"#,
            Format::Text,
            "weight: 1e+300 is not a weight; a weight is a number from 0 to 3.4028235e38",
        ),
    ] {
        let files = Files::new(&[("a.jsonl", row)]);
        let error = files.load(&[source("a.jsonl", format)], &data(9)).unwrap_err().to_string();
        assert!(error.contains(said), "{error}");
    }
}

#[test]
fn unsupported_and_missing_sources_are_named() {
    let files =
        Files::new(&[("a.parquet", ""), ("a.csv", ""), ("a.md", ""), ("a.jsonl", "{\"text\": \"a\"}")]);
    let parquet =
        if cfg!(feature = "parquet") { (3, "a.parquet: not Parquet") } else { (2, "parquet feature") };
    for (name, code, text) in [
        ("a.parquet", parquet.0, parquet.1),
        ("org/data", 3, "is not there"),
        (".", 3, "a.csv"),
        ("gone.jsonl", 3, "is not there"),
        ("a.csv", 3, "a.csv"),
        ("a.md", 2, "none of the files that hold rows"),
        ("https://a.org/a.jsonl?x=1", 2, "is a URL"),
        ("s3://a/a.jsonl", 2, "is a URL"),
        ("file:///a.jsonl", 2, "is a URL"),
    ] {
        let error = files.load(&[source(name, Format::Text)], &data(8)).unwrap_err();
        assert!(error.to_string().contains(text), "{error}");
        assert_eq!(error.exit_code() as u8, code, "{error}");
    }
    let none = |format| {
        Dataset::load(
            Part::Train,
            &of(&[source("a.jsonl", format)], &data(8)),
            &|s| files.0.path().join(s),
            None,
            9,
            0,
        )
    };
    assert_eq!(none(Format::Text).unwrap_err().exit_code(), ft_base::ExitCode::Model);
    let mut s = source("a.jsonl", Format::Text);
    s.split = Some("validation".into());
    assert!(files.load(&[s], &data(8)).unwrap_err().to_string().contains("split"));
}

#[test]
fn models_without_what_a_format_needs_are_refused() {
    let files = Files::new(&[("a.jsonl", "{\"input_ids\": [1, 2]}")]);
    let dir = files.0.path();
    std::fs::copy(fixture("tiny-tokenizer/tokenizer.json"), dir.join("tokenizer.json")).unwrap();
    let bare = Tokenizer::load(dir, None).unwrap().unwrap();
    let load = |format| load_in(dir, &[source("a.jsonl", format)], &data(8), &bare);
    for (format, lacks) in [
        (Format::Messages, "no chat template, which format = \"messages\" needs"),
        (Format::Text, "names no end-of-sequence token"),
    ] {
        let error = load(format).unwrap_err();
        assert!(error.to_string().contains(lacks), "{error}");
        assert_eq!(error.exit_code(), ft_base::ExitCode::Model);
    }
    assert!(load(Format::Tokens).is_ok());
}

#[test]
fn a_line_of_many_megabytes_is_a_row() {
    let ids = vec!["7"; 4_000_000].join(",");
    let files =
        Files::new(&[("a.jsonl", &format!("{{\"input_ids\": [{ids}]}}\n{{\"input_ids\": [1, 2]}}\n"))]);
    let d = files.load(&[source("a.jsonl", Format::Tokens)], &data(16)).unwrap();
    assert_eq!(all(&d).iter().map(|e| e.ids.len()).collect::<Vec<_>>(), [16, 2]);
}

#[test]
fn five_rows_left_out_are_shown_and_the_others_counted() {
    for (bad, more) in [(5, ""), (7, "             ... and 2 more\n")] {
        let rows = String::from("{\"text\": \"a\"}\n") + &"{}\n".repeat(bad);
        let files = Files::new(&[("a.jsonl", &rows)]);
        let skip = ft_recipe::Data { on_bad_row: OnBadRow::Skip, ..data(9) };
        let d = files.load(&[source("a.jsonl", Format::Text)], &skip).unwrap();
        let mut out = Vec::new();
        crate::rows::show::rows(&d, None, 0, (9, OverLength::Truncate), false, &mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        let told = format!("a.jsonl:6: no field \"text\"; the object is empty\n{more}examples ");
        assert!(text.contains(&told), "{text}");
    }
}

#[test]
fn shown_rows_mark_what_is_supervised() {
    let rows = "{\"prompt\": \"Hello\\n\\u001b[31m\", \"completion\": \"world\\nend\"}\n{\"prompt\": \"1\", \"completion\": \"2\"}\n";
    let files = Files::new(&[("a.jsonl", rows)]);
    let d = files
        .load(&[source("a.jsonl", Format::Completion)], &ft_recipe::Data { pack: true, ..data(40) })
        .unwrap();
    let mut out = Vec::new();
    crate::rows::show::rows(&d, Some(&tiny()), 3, (64, OverLength::Truncate), false, &mut out).unwrap();
    let text = String::from_utf8(out).unwrap();
    // escape codes come only from ft, and match the marks
    let mut colored = Vec::new();
    crate::rows::show::rows(&d, Some(&tiny()), 3, (64, OverLength::Truncate), true, &mut colored).unwrap();
    let colored = String::from_utf8(colored).unwrap();
    let green = colored.lines().filter(|l| l.contains("> \u{1b}[32m") && l.ends_with("\u{1b}[0m")).count();
    assert_eq!(
        (green, colored.replace("\u{1b}[32m", "").replace("\u{1b}[0m", "")),
        (text.matches("  > ").count(), text.clone())
    );
    insta::assert_snapshot!(text);
}
