//! Warnings about dropped parts of training texts, in every subcommand that reads them; inference with the
//! prompt format of training.

use crate::world::{LORA, World, quickstart, recipe};
use serde_json::{Value, json};

/// The quickstart model on custom rows, two steps.
fn small(w: &World, format: &str, rows: &[Value]) -> String {
    let model = quickstart(w);
    w.write("rows.jsonl", rows.iter().map(|r| format!("{r}\n")).collect::<String>());
    w.write(
        "r.toml",
        format!(
            "[model]\nsource = \"{model}\"\n[[train]]\nmodules = [\"attention\"]\n[data]\n\
             train = [{{ source = \"rows.jsonl\", format = \"{format}\" }}]\nmax_length = 256\n\
             [run]\nsteps = 2\nbatch_rows = 1\ndevice = \"cpu\"\noutput = \"o\"\n"
        ),
    );
    model
}

/// Number of warnings on stderr that contain a text.
fn warned(err: &str, what: &str) -> usize {
    err.lines().filter(|l| l.starts_with("warning: ") && l.contains(what)).count()
}

#[test]
fn check_data_and_run_give_the_same_warnings_once() {
    let w = World::new();
    let row = |i: usize| {
        json!({"id": i, "messages": [{"role": "user", "content": "Hello there, how are you?"},
            {"role": "assistant", "content": "Fine.", "reasoning_content": "Say fine."}]})
    };
    small(&w, "messages", &(0..7).map(row).collect::<Vec<_>>());
    w.write(
        "t.jinja",
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
    );
    let set = ["r.toml", "data.chat_template=t.jinja", "model.override={max_position_embeddings=8}"];
    for verb in ["check", "data", "run"] {
        let r = w.ok(&[&[verb], &set[..]].concat());
        for kind in ["\"id\"", "leaves out reasoning", "\"<|user|>\"", "\"<|assistant|>\"", "8 positions"] {
            assert_eq!(warned(&r.err, kind), 1, "{verb} {kind}: {}", r.err);
        }
        assert_eq!(warned(&r.err, "7 rows"), 4, "{verb}: {}", r.err);
        assert_eq!(warned(&r.err, "7 documents"), 1, "{verb}: {}", r.err);
        assert_eq!(warned(&r.err, "rows.jsonl:1"), 4, "{verb}: {}", r.err);
    }
}

#[test]
fn a_variable_that_the_template_does_not_name_is_an_error() {
    let w = World::new();
    let row =
        json!({"messages": [{"role": "user", "content": ""}, {"role": "assistant", "content": "Fine."}]});
    small(&w, "messages", &[row]);
    w.write(
        "t.jinja",
        "{% for m in messages %}{{ m.role }}{{ enable_thinking }}{{ m.content }}<|im_end|>\n{% endfor %}\
         {% if add_generation_prompt %}assistant{{ enable_thinking }}{% endif %}",
    );
    for verb in ["check", "data", "run"] {
        let with = |variable: &str| {
            w.ft(&[
                verb,
                "r.toml",
                "data.chat_template=t.jinja",
                &format!("data.template={{{variable}=false}}"),
            ])
        };
        let r = with("enable_thinkin");
        assert!(r.code == 2 && r.err.contains("hint: \"enable_thinking\""), "{verb}: {}", r.err);
        // a key of messages, a tag, and what ft sets itself
        for (name, why) in
            [("content", "no variable"), ("endfor", "no variable"), ("messages", "sets it itself")]
        {
            let r = with(name);
            assert!(r.code == 2 && r.err.contains(why), "{verb} {name}: {}", r.err);
        }
        assert_eq!(with("enable_thinking").code, 0, "{verb}");
    }
}

#[test]
fn a_row_whose_text_lacks_something_stops_or_is_counted() {
    let w = World::new();
    let turn = |a: Value| json!({"messages": [{"role": "user", "content": "Weather?"}, a]});
    let call = turn(json!({"role": "assistant", "tool_calls": [{"name": "weather", "arguments": "{}"}]}));
    let good = turn(json!({"role": "assistant", "content": "Good."}));
    small(&w, "messages", &[good.clone(), call, good]);
    for verb in ["check", "data", "run"] {
        let r = w.ft(&[verb, "r.toml"]);
        assert_eq!(r.code, 3, "{verb}: {}", r.err);
        assert!(r.err.contains("rows.jsonl:2: messages[1].tool_calls[0].name"), "{verb}: {}", r.err);
    }
    assert!(!w.path("o").exists());
    let r = w.ok(&["data", "r.toml", "data.on_bad_row=skip"]);
    assert!(r.out.contains("left out     1") && r.out.contains("rows.jsonl:2"), "{}", r.out);
    w.ok(&["run", "r.toml", "data.on_bad_row=skip"]);
}

#[test]
fn chat_uses_the_prompt_format_of_training() {
    let w = World::new();
    let question = "Say something.";
    let forms = [
        ("alpaca", json!({"instruction": question, "output": "Something."}), "alpaca"),
        ("completion", json!({"prompt": question, "completion": " Something."}), "text"),
        ("text", json!({"text": "Say something. Something."}), "text"),
        (
            "messages",
            json!({"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": "Something."}]}),
            "chat",
        ),
    ];
    let mut answers = Vec::new();
    for (format, row, form) in forms {
        let model = small(&w, format, &[row]);
        let plain = matches!(format, "alpaca" | "completion").then_some("data.train.0.form=plain");
        let run = [
            "run",
            "r.toml",
            &format!("log.samples=[{question:?}]"),
            "run.output=o",
            "run.steps=12",
            "optimizer.lr=1e-2",
            "--overwrite",
        ];
        w.ok(&[&run[..], plain.as_slice()].concat());
        let samples = w.events("o", "sample");
        assert!(samples.len() == 2 && samples.iter().all(|s| s["form"] == form), "{samples:?}");
        let said = w.json("o/adapter/ft.json");
        assert_eq!(said["form"], form);
        // With adapter and base, the answer equals the sample at the end of the run.
        let chat = ["chat", "o/adapter", "--prompt", question, "--max-tokens", "64"];
        let reply = w.ok(&chat).out;
        assert_eq!(
            reply.trim_end_matches('\n'),
            samples[1]["reply"].as_str().expect("a reply").trim_end_matches('\n'),
            "{format}"
        );
        let named = w.ok(&[&chat[..], &["--form", form]].concat()).out;
        assert_eq!(reply, named);
        answers.push((form, reply));
        if format == "text" {
            assert_eq!(w.ok(&[&chat[..], &["--raw"]].concat()).out, named);
        }
        // The same for exports.
        w.ok(&["merge", "o/adapter", "--out", "m", "--overwrite"]);
        assert_eq!(w.read("m/ft.json"), w.read("o/adapter/ft.json"));
        let merged = w.ok(&["chat", "m", "--prompt", question, "--max-tokens", "4"]);
        assert_eq!(merged.err.contains("stands alone"), form != "chat", "{}", merged.err);
        w.ok(&["export", "o/adapter", "--to", "vllm", "--out", &format!("v-{format}")]);
        assert_eq!(w.read(&format!("v-{format}/ft.json")), w.read("o/adapter/ft.json"));
        // The base alone is a chat model.
        assert!(!w.ok(&["chat", &model, "--prompt", question]).err.contains("stands alone"));
    }
    assert!(answers.iter().any(|a| a.1 != answers[0].1), "the form makes no difference: {answers:?}");
    for (args, code) in [
        (&["--raw", "--form", "chat"][..], 2),
        (&["--raw", "--system", "x"], 2),
        (&["--raw", "--chat-template", "t.jinja"], 2),
        (&["--form", "alpaca", "--template", "a=1"], 2),
        (&["--form", "poem"], 2),
        (&["--max-tokens", "0"], 2),
    ] {
        let r = w.ft(&[&["chat", "o/adapter", "--prompt", "x"], args].concat());
        assert_eq!(r.code, code, "{args:?}: {}", r.err);
    }
    // A system prompt replaces the default of Alpaca.
    let alpaca = ["chat", "o/adapter", "--form", "alpaca", "--prompt", question, "--max-tokens", "8"];
    w.ok(&[&alpaca[..], &["--system", "Answer."]].concat());
    w.write("o/adapter/ft.json", "{\"form\": \"verse\"}");
    let r = w.ft(&["chat", "o/adapter", "--prompt", "x"]);
    assert!(r.code == 4 && r.err.contains("ft.json"), "{}", r.err);
}

#[test]
fn a_model_that_answers_takes_nothing_without_effect() {
    let w = World::new();
    let model = &small(&w, "alpaca", &[json!({"instruction": "Hello!", "output": "Hi."})]);
    w.ok(&["run", "r.toml", "data.train.0.form=plain"]);
    let (chat, serve) = (&["chat", "--prompt", "x"][..], &["serve", "--port", "0"][..]);
    for (verb, model, option, value, said) in [
        (chat, &model[..], "--template", "moood=x", "--template moood: the chat template has no variable"),
        (serve, model, "--template", "moood=x", "--template moood: the chat template has no variable"),
        (chat, model, "--template", "messages=1", "--template messages: each conversation sets it itself"),
        (serve, "o/adapter", "--template", "mood=x", "was not trained with a chat template"),
        (chat, model, "--temperature", "-1", "--temperature is 0 or more"),
    ] {
        let r = w.ft(&[verb, &[model, option, value]].concat());
        assert!(r.code == 2 && r.err.contains(said), "{verb:?} {option} {value}: {} {}", r.code, r.err);
    }
    // A message beyond the context has no answer; the next one has.
    let long = "Hello! ".repeat(600);
    let r = w.ft(&["chat", model, "--prompt", &long]);
    assert!(r.code == 2 && r.err.contains(" tokens, the model is made for 512 tokens\n"), "{}", r.err);
    let r = w.ft_with(&["chat", model, "--max-tokens", "1"], &format!("{long}\nHello!\n"));
    assert_eq!((r.code, r.err.matches(": /clear begins anew").count()), (0, 1), "{}", r.err);
    assert_eq!(r.out, w.ok(&["chat", model, "--max-tokens", "1", "--prompt", "Hello!"]).out);
}

/// The chat template of a recipe, and its variables, are saved with the result.
#[test]
fn the_chat_template_of_the_recipe_is_saved_with_the_result() {
    let w = World::new();
    let row =
        json!({"messages": [{"role": "user", "content": "Hello!"}, {"role": "assistant", "content": "Hi."}]});
    small(&w, "messages", &[row]);
    let template = "{{ mood }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
    w.write("t.jinja", template);
    let set = ["data.chat_template=t.jinja", "data.template={mood=\"Merry. \"}", "log.samples=[\"Hello!\"]"];
    w.ok(&[&["run", "r.toml"], &set[..]].concat());
    assert_eq!(w.read("o/adapter/chat_template.jinja"), template.as_bytes());
    let reply = w.ok(&["chat", "o/adapter", "--prompt", "Hello!"]).out;
    let sample = w.events("o", "sample");
    assert!(reply.starts_with(sample[1]["reply"].as_str().expect("a reply")), "{reply}");
    // A variable on the command line takes precedence.
    let bad = ["chat", "o/adapter", "--prompt", "Hello!", "--max-tokens", "1"];
    w.write(
        "o/adapter/chat_template.jinja",
        format!("{{% if mood == 'Sad.' %}}{{{{ raise_exception('sad') }}}}{{% endif %}}{template}"),
    );
    w.ok(&bad);
    assert_eq!(w.ft(&[&bad[..], &["--template", "mood=Sad."]].concat()).code, 4);
    // For a full fine-tune, the template goes into the model folder at the path preferred by transformers.
    w.ok(&[
        &["run", "r.toml", "run.output=f"],
        &set[..],
        &["train.0.method=full", "train.0.modules=['attention','mlp','norms','embedding','head']"],
    ]
    .concat());
    assert_eq!(w.read("f/model/chat_template.jinja"), template.as_bytes());
    assert!(w.path("f/model/ft.json").is_file());
}

#[test]
fn a_sample_without_a_chat_template_continues_the_text() {
    let w = World::new();
    // Without a tokenizer, `log.samples` is refused.
    w.config("tiny", json!({}));
    w.write("t.toml", recipe(LORA));
    for verb in ["check", "run"] {
        let r = w.ft(&[verb, "t.toml", "log.samples=[\"Hello\"]"]);
        assert!(r.code == 2 && r.err.contains("log.samples"), "{verb}: {}", r.err);
    }
    assert!(!w.path("runs/t").exists());
    // With a tokenizer, the sample continues the text.
    let model = small(&w, "text", &[json!({"text": "Hello there."})]);
    for file in ["config.json", "tokenizer.json", "model.safetensors", "generation_config.json"] {
        w.write(&format!("bare/{file}"), std::fs::read(format!("{model}/{file}")).expect("a file"));
    }
    w.ok(&["run", "r.toml", "model.source=bare", "log.samples=[\"Hello\"]"]);
    let samples = w.events("o", "sample");
    assert!(samples.len() == 2 && samples[0]["form"] == "text", "{samples:?}");
    w.ok(&["chat", "o/adapter", "--prompt", "Hello", "--max-tokens", "4"]);
    // The base has no record of the prompt format.
    let r = w.ft(&["chat", "bare", "--prompt", "Hello"]);
    assert!(r.code == 2 && r.err.contains("--raw"), "{}", r.err);
    w.ok(&["chat", "bare", "--prompt", "Hello", "--raw", "--max-tokens", "4"]);
    let r = w.ft(&["run", "r.toml", "model.source=bare", "log.samples=['']", "run.output=p"]);
    assert!(r.code == 2 && r.err.contains("log.samples"), "{}", r.err);
}

/// Every prompt of `log.samples` is answered at each evaluation, once, also after a resume.
#[test]
fn several_prompts_are_answered_at_each_evaluation() {
    let w = World::new();
    small(&w, "text", &[json!({"text": "Hello there."}), json!({"text": "Goodbye."})]);
    let run = ["run", "r.toml", "run.steps=5", "run.eval_every=2", "run.save_every=2", "data.eval_share=0.5"];
    let set = ["log.samples=[\"Hello\", \"Good\"]", "run.keep=9"];
    let r = w.ok(&[&run[..], &set].concat());
    assert!(r.err.contains("after step 2, continuing \"Good\": "), "{}", r.err);
    let samples = || -> Vec<(u64, u64, String, String)> {
        let text = |e: &Value, key: &str| e[key].as_str().expect("a text").to_string();
        let number = |e: &Value, key: &str| e[key].as_u64().expect("a number");
        let sample =
            |e: Value| (number(&e, "step"), number(&e, "number"), text(&e, "prompt"), text(&e, "reply"));
        w.events("o", "sample").into_iter().map(sample).collect()
    };
    let whole = samples();
    let places: Vec<(u64, u64, &str)> =
        whole.iter().map(|(step, n, prompt, _)| (*step, *n, &prompt[..])).collect();
    let wanted = [0, 2, 4, 5].map(|step| [(step, 1, "Hello"), (step, 2, "Good")]);
    assert_eq!(places, wanted.concat());
    w.ok(&[&run[..], &set, &["--resume", "--step", "2"]].concat());
    assert_eq!(samples(), whole);
    let steps: Vec<Value> = w.events("o", "checkpoint").into_iter().map(|e| e["step"].clone()).collect();
    assert_eq!(steps, [2, 4, 5].map(Value::from));
    w.ok(&["report", "o"]);
    let page = w.text("o/report.html");
    assert!(page.contains("<q>Hello</q>") && page.contains("<q>Good</q>"), "{page}");
    for (set, hint) in [("log.sample=Hello", "did you mean"), ("log.samples=Hello", "write [\"Hello\"]")] {
        let r = w.ft(&["check", "r.toml", set]);
        assert!(r.code == 2 && r.err.contains("samples") && r.err.contains(hint), "{}", r.err);
    }
}

/// Rows that a run leaves out are said by every verb, recorded, and refused beyond a share.
#[test]
fn rows_left_out_are_shown_counted_and_bounded() {
    let w = World::new();
    let row = |question: String| json!({"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": "Yes."}]});
    let long = |i: usize| row(if i < 4 { "Really? ".repeat(99) } else { format!("Is {i} a number?") });
    let mut rows: Vec<Value> = (0..9).map(long).collect();
    rows.push(json!({"messages": []}));
    small(&w, "messages", &rows);
    let skip = "data.on_bad_row=skip";
    let told = "data.train: of 10 rows 5 are left out: 1 not what the format asks for, 4 empty mask after truncation";
    for verb in ["check", "data", "run"] {
        let r = w.ok(&[verb, "r.toml", skip, "data.drop_share=0.5"]);
        assert_eq!(warned(&r.err, told), 1, "{verb}: {}", r.err);
        let few = w.ft(&[verb, "r.toml", skip, "data.drop_share=0.4", "run.output=p"]);
        assert_eq!(few.code, 3, "{verb}: {}", few.err);
        assert!(few.err.contains("more than data.drop_share = 0.4"), "{verb}: {}", few.err);
        assert!(few.err.contains("raise data.max_length"), "{verb}: {}", few.err);
    }
    let start = &w.events("o", "start")[0]["data"];
    assert_eq!((&start["rows_read"], &start["left_out"]["empty_after_truncation"]), (&json!(10), &json!(4)));
    let card = w.text("o/adapter/README.md");
    assert!(card.contains("of 10 rows 5 are left out"), "{card}");
}

/// Equal problems of rows are one message, which names the key; `ft data` shows what it can beside them.
#[test]
fn bad_rows_are_listed_together() {
    let w = World::new();
    let good =
        json!({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]});
    let bad = json!({"messages": [{"role": "user", "content": "Hi"}]});
    small(&w, "messages", &[good.clone(), bad.clone(), good, bad.clone(), bad]);
    for verb in ["check", "data"] {
        let r = w.ft(&[verb, "r.toml"]);
        assert_eq!(r.code, 3, "{verb}: {}", r.err);
        assert_eq!(r.err.matches("no message of an assistant").count(), 1, "{verb}: {}", r.err);
        assert!(r.err.contains("rows.jsonl:2: messages:"), "{verb}: {}", r.err);
        assert!(r.err.contains("and 2 more rows like it: rows.jsonl:4, rows.jsonl:5"), "{verb}: {}", r.err);
        assert_eq!(r.err.matches("data.on_bad_row = \"skip\"").count(), 1, "{verb}: {}", r.err);
    }
    let r = w.ft(&["data", "r.toml"]);
    assert!(r.out.contains("rows read    5") && r.out.contains("Hello"), "{}", r.out);
    let run = w.ft(&["run", "r.toml"]);
    assert!(run.code == 3 && run.err.contains("data.on_bad_row = \"skip\""), "{}", run.err);
}

/// Keys without effect are one warning, also with a share held out.
#[test]
fn unread_keys_are_one_warning() {
    let w = World::new();
    let row = |i: usize| {
        json!({"id": i, "source": "web", "meta": {"a": 1}, "messages":
            [{"role": "user", "content": format!("Is it {i}?")}, {"role": "assistant", "content": "Yes."}]})
    };
    small(&w, "messages", &(0..9).map(row).collect::<Vec<_>>());
    for verb in ["check", "data", "run"] {
        let r = w.ok(&[verb, "r.toml", "data.eval_share=0.2"]);
        let told = "9 rows with the keys \"id\", \"meta\", \"source\", which their format does not read";
        assert_eq!(warned(&r.err, told), 1, "{verb}: {}", r.err);
        assert_eq!(warned(&r.err, "format"), 1, "{verb}: {}", r.err);
    }
}
