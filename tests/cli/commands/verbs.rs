//! Output of the remaining subcommands, and closed output streams.

use crate::world::{LORA, World, quickstart, repository};
use std::process::{Command, Stdio};

#[test]
fn check_shows_model_rules_and_steps() {
    let w = World::new();
    quickstart(&w);
    let r = w.ok(&["check", "q.toml"]);
    for said in [
        "qwen3: 6 layers",
        "parameters (",
        "attention: 24 modules, LoRA rank 8, alpha 16",
        "steps        100 of 8 rows",
        "names and shapes of all tensors fit",
    ] {
        assert!(r.out.contains(said), "{said:?} is not in\n{}", r.out);
    }
    assert!(!r.out.contains("not checked") && r.err.is_empty(), "{}{}", r.out, r.err);
    assert!(!w.path("runs").exists());
    // All errors at once, with the exit code of the first.
    w.write("bad.jsonl", "{\"messages\": []}\n{\"text\": 1}\n");
    let r = w.ft(&[
        "check",
        "q.toml",
        "data.train.0.source=bad.jsonl",
        "data.eval.0.source=gone.jsonl",
        "train.0.modules=['x']",
    ]);
    assert_eq!(r.code, 2);
    for said in ["train.0: \"x\" matches no module", "bad.jsonl:1", "bad.jsonl:2", "gone.jsonl is not there"]
    {
        assert!(r.err.contains(said), "{said:?} is not in\n{}", r.err);
    }
}

/// Settings that a run refuses before it loads anything.
#[test]
fn check_refuses_what_a_run_refuses() {
    let w = World::new();
    quickstart(&w);
    for (set, codes, said) in [
        ("router.aux_loss=0.1", [2, 2], "qwen3 has no routers"),
        ("data.train.0.weight=1e9", [2, 2], "that is too many"),
        ("data.train.0.weight=1e-9", [2, 2], "no sample of the sources is in an epoch"),
        ("run.output='q.toml'", [2, 2], "q.toml is a file, and run.output is a folder\nhint: "),
        ("run.output='q.toml/x'", [2, 2], "q.toml is a file, and run.output is a folder\nhint: "),
        // the superuser may write there, and can make nothing
        ("run.output='/proc/x'", [2, 5], "/proc"),
        ("memory.products=fp8", [2, 2], "the CPU, which has no such products"),
        ("parallel.comm=nccl", [2, 2], "is for CUDA devices"),
    ] {
        for (verb, code) in ["check", "run"].into_iter().zip(codes) {
            let r = w.ft(&[verb, "q.toml", "run.device=cpu", set]);
            assert!(r.code == code && r.err.contains(said), "{verb} {set}: {} {}", r.code, r.err);
        }
    }
    w.write(
        "pairs.jsonl",
        "{\"prompt\": \"Who?\", \"chosen\": \"They.\", \"rejected\": \"No.\"}\n".repeat(9),
    );
    let pairs =
        ["train", "eval"].map(|p| format!("data.{p}=[{{source='pairs.jsonl', format='preference'}}]"));
    for verb in ["check", "run"] {
        let set: [&str; 5] =
            ["run.device=cpu", "task=dpo", "preference.reference=./nowhere", &pairs[0], &pairs[1]];
        let r = w.ft(&[&[verb, "q.toml"][..], &set].concat());
        assert!(r.code == 4 && r.err.contains("\"./nowhere\" is not there"), "{verb}: {} {}", r.code, r.err);
    }
    // No tokenizer to ask questions with.
    let w = World::tiny(LORA);
    for verb in ["check", "run"] {
        let r = w.ft(&[verb, "r.toml", "run.eval_every=1", "generate.samples=2"]);
        assert!(r.code == 2 && r.err.contains("has no tokenizer.json"), "{verb}: {} {}", r.code, r.err);
    }
}

/// A published model is known without the hub, as in a plan.
#[test]
fn check_knows_published_models_without_the_hub() {
    let w = World::new();
    let data = format!("{}/data/quickstart/train.jsonl", repository().display());
    let r = w.ok(&["check", "qwen3-8b-qlora", &format!("data.train=[{{source='{data}'}}]"), "data.eval=[]"]);
    for said in
        ["Qwen/Qwen3-8B (qwen3: 36 layers", "LoRA rank", "not checked  tokenizer, chat template and rows"]
    {
        assert!(r.out.contains(said), "{said:?} is not in\n{}", r.out);
    }
    // A run says so before it downloads anything.
    for (verb, set, said) in [
        ("check", "train.0.modules=['x']", "\"x\" matches no module"),
        ("run", "train.0.modules=['x']", "\"x\" matches no module"),
        ("run", "serve.devices=['cuda:99']", "there is no cuda:99"),
    ] {
        let r = w.ft(&[verb, "qwen3-8b-qlora", "run.device=cpu", set]);
        assert!(r.code == 2 && r.err.contains(said), "{verb} {set}: {} {}", r.code, r.err);
    }
}

#[test]
fn data_shows_rows_and_refuses_bad_ones() {
    let w = World::new();
    quickstart(&w);
    let r = w.ok(&["data", "q.toml", "--rows", "1", "data.pack=false"]);
    assert!(r.out.contains("row 1 of 415") && !r.out.contains("row 2 of"), "{}", r.out);
    assert!(r.out.lines().any(|l| l.starts_with("  > ")) && r.out.contains("supervised"), "{}", r.out);
    let r = w.ok(&["data", "q.toml", "--eval", "--rows", "0"]);
    assert!(r.out.contains("rows read    61"), "{}", r.out);
    w.write("bad.jsonl", "{\"messages\": 1}\n");
    let bad = ["data", "q.toml", "data.train.0.source=bad.jsonl"];
    let r = w.ft(&bad);
    assert!(r.code == 3 && r.err.contains("bad.jsonl:1"), "{}", r.err);
    let r = w.ft(&[&bad[..], &["data.on_bad_row=skip"]].concat());
    assert!(r.code == 3 && r.err.contains("none of its 1 rows"), "{}", r.err);
}

#[test]
fn eval_prints_loss_and_perplexity() {
    let w = World::new();
    quickstart(&w);
    let r = w.ok(&["eval", "q.toml", "--json"]);
    let loss = r.loss();
    assert_eq!(r.json()["perplexity"], loss.exp());
    let plain = w.ok(&["eval", "q.toml"]).out;
    assert!(plain.contains(&format!("loss        {loss:.6}")), "{plain}");
    assert!(plain.contains(&format!("perplexity  {:.4}", loss.exp())), "{plain}");
    let r = w.ft(&["eval", "q.toml", "data.eval=[]"]);
    assert!(r.code == 2 && r.err.contains("data.eval"), "{}", r.err);
}

/// A large penalty forbids each token that has occurred.
#[test]
fn chat_takes_a_repetition_penalty() {
    let w = World::new();
    let model = quickstart(&w);
    let chat = ["chat", &model, "--prompt", "What colour is the sky?", "--max-tokens", "8"];
    let with = |penalty: &str| w.ft(&[&chat[..], &["--repetition-penalty", penalty]].concat());
    let plain = w.ok(&chat).out;
    assert_eq!(with("1").out, plain);
    let r = with("1e30");
    assert!(r.code == 0 && r.out != plain, "{}{}", r.out, r.err);
    let r = with("0");
    assert!(r.code == 2 && r.err.contains("--repetition-penalty is above 0"), "{}", r.err);
}

#[test]
fn chat_answers_each_line_and_forgets_after_clear() {
    let w = World::new();
    let model = quickstart(&w);
    let one = w.ok(&["chat", &model, "--prompt", "What colour is the sky?"]);
    assert!(one.out.to_lowercase().contains("blue"), "{}", one.out);
    // The same line starts a new conversation only after `/clear`.
    let question = "What colour is the sky?";
    let r = w.ft_with(&["chat", &model], &format!("{question}\n/clear\n\n{question}\n/exit\n{question}\n"));
    assert_eq!((r.code, r.out), (0, one.out.repeat(2)));
    // An unknown command is not a message; with a leading space, it is.
    let r = w.ft_with(&["chat", &model], "/quit\n /quit\n");
    assert!(r.code == 0 && r.err.contains("/quit") && r.err.contains("/exit ends"), "{}", r.err);
    assert_eq!(r.out.lines().count(), 1, "{}", r.out);
    // A second turn continues the first.
    let two = w.ft_with(&["chat", &model], "Hello!\nWhat is the capital of France?\n");
    let lines: Vec<&str> = two.out.lines().collect();
    assert!(two.code == 0 && lines.len() == 2 && lines[1].contains("Paris"), "{}{}", two.out, two.err);
    let short = w.ok(&["chat", &model, "--prompt", question, "--max-tokens", "1"]);
    assert!(short.out.len() < one.out.len() && one.out.starts_with(short.out.trim_end()), "{}", short.out);
    // Sampling is seeded.
    let draw = |seed: &str| {
        w.ok(&[
            "chat",
            &model,
            "--prompt",
            "Tell me a story.",
            "--temperature",
            "3",
            "--top-k",
            "200",
            "--top-p",
            "0.99",
            "--seed",
            seed,
            "--max-tokens",
            "20",
        ])
        .out
    };
    assert_eq!(draw("1"), draw("1"));
    assert_ne!(draw("1"), draw("2"));
    let r = w.ft(&["chat", &model, "--prompt", "a", "--temperature", "-1"]);
    assert_eq!(r.code, 2, "{}", r.err);
    // The folder of an adapter names the base.
    w.ok(&["run", "q.toml", "run.steps=2", "run.output=a", "run.eval_at_start=false"]);
    let adapter = w.ok(&["chat", "a/adapter", "--prompt", question]);
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        assert_eq!(w.read(&format!("a/adapter/{file}")), w.read(&format!("{model}/{file}")), "{file}");
    }
    assert_eq!(adapter.out, w.ok(&["chat", &model, "--adapter", "a/adapter", "--prompt", question]).out);
    // A template with required variables.
    w.write("t.jinja", "{% if not mood is defined %}{{ raise_exception('mood?') }}{% endif %}{{ mood + 1 }}{{ messages[-1].content }}");
    let with = ["chat", &model, "--prompt", "a", "--max-tokens", "1", "--chat-template", "t.jinja"];
    let r = w.ft(&with);
    assert!(r.code == 4 && r.err.contains("mood?"), "{}", r.err);
    w.ok(&[&with[..], &["--template", "mood=1"]].concat());
}

#[test]
fn a_misspelt_verb_is_refused_with_a_similar_one() {
    let w = World::new();
    let r = w.ft(&["runn"]);
    assert!(r.code == 2 && r.err.contains("'run'"), "{}", r.err);
}

/// A reader may close stdout or stderr at any time.
#[test]
fn a_closed_stream_is_no_panic() {
    let w = World::new();
    let model = quickstart(&w);
    let shut = |args: &[&str], out: bool, err: bool| {
        let mut c: Command = w.command(args);
        c.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = c.spawn().expect("started");
        if out {
            drop(child.stdout.take());
        }
        if err {
            drop(child.stderr.take());
        }
        crate::world::ran(child.wait_with_output().expect("an end"))
    };
    for args in [
        &["data", "q.toml", "--rows", "400"][..],
        &["recipes"],
        &["schema"],
        &["schema", "--markdown"],
        &["check", "q.toml"],
        &["eval", "q.toml"],
        &["chat", &model, "--prompt", "Hello!"],
        &["--help"],
    ] {
        let r = shut(args, true, false);
        assert_eq!(r.code, 0, "{args:?}: {}", r.err);
        assert!(!r.err.contains("panicked"), "{args:?}: {}", r.err);
    }
    let r = shut(&["run", "q.toml", "run.steps=1", "run.eval_at_start=false"], true, true);
    assert_eq!(r.code, 0);
    assert!(w.path("runs/q/adapter/adapter_model.safetensors").exists());
    assert_eq!(shut(&["run", "gone.toml"], true, true).code, 2);
    // The reader closes after a while.
    let mut child =
        w.command(&["data", "q.toml", "--rows", "400"]).stdout(Stdio::piped()).spawn().expect("started");
    let mut first = [0u8; 10];
    let mut out = child.stdout.take().expect("stdout");
    std::io::Read::read_exact(&mut out, &mut first).expect("a line");
    drop(out);
    assert_eq!(child.wait().expect("an end").code(), Some(0));
}
