//! Everyday use: recipes by name, run folders, early stopping, the best checkpoint, other log formats.

use crate::world::{FULL, LORA, World, quickstart, ran, recipe, reference};
use serde_json::{Value, json};

/// Arguments of `ft init` for LoRA in the free memory.
fn init<'a>(name: &'a str, model: &'a str, data: &'a str) -> [&'a str; 10] {
    ["init", name, "--model", model, "--data", data, "--method", "lora", "--memory", "free"]
}

#[test]
fn shipped_recipes_go_by_their_names() {
    let w = World::new();
    let plan = w.ok(&["plan", "qwen3-8b-qlora", "run.device=cuda", "memory.budget=48GiB"]);
    assert!(plan.out.starts_with("fits: ") && plan.out.contains("built-in qwen3-8b.json"), "{}", plan.out);
    let wrong = w.ft(&["plan", "qwen3-8b-qlora", "run.stepz=3"]);
    assert!(wrong.code == 2 && wrong.err.contains("did you mean steps?"), "{}", wrong.err);
    for (verb, name) in [("check", "qwen3-8b-qlor"), ("plan", "qwen3-8b-qlor.toml"), ("run", "qwen3-8b-qlro")]
    {
        let near = w.ft(&[verb, name]);
        assert!(near.code == 2 && near.err.contains("hint: did you mean qwen3-8b-qlora?"), "{}", near.err);
    }
    let far = w.ft(&["check", "mine.toml"]);
    assert!(
        far.code == 2 && far.err.contains("mine.toml") && !far.err.contains("did you mean"),
        "{}",
        far.err
    );
    // rows of the quickstart are samples of what another model could learn
    for (set, warns) in [(&[][..], true), (&["data.train.0.source=rows.jsonl"], false)] {
        let r = w.ft(&[&["check", "qwen3-8b-qlora"], set].concat());
        assert_eq!(r.err.contains("warning: data.train has sample rows"), warns, "{}", r.err);
    }
    assert!(!w.ok(&["check", "quickstart"]).err.contains("sample rows"));
    // A file of this name takes precedence.
    w.write("qwen3-8b-qlora", "version = 2");
    assert_eq!(w.ft(&["plan", "qwen3-8b-qlora"]).code, 2);
}

#[test]
fn ft_init_asks_and_writes_a_recipe() {
    let w = World::new();
    let model = quickstart(&w);
    w.write("rows.csv", "prompt,completion\nWhat?,That.\nWho?,They.\nWhere?,There.\n");
    let r = w.ft_with(&["init", "mine"], &format!("{model}\nrows.csv\n\nfree\n"));
    assert!(r.code == 0 && r.out == "mine.toml\n", "{}{}", r.out, r.err);
    assert!(r.err.contains("Model (hub id or folder) [Qwen/Qwen3-0.6B]:"), "{}", r.err);
    w.ok(&["check", "mine.toml"]);
    w.ok(&["run", "mine.toml", "run.steps=1", "run.batch_rows=1", "run.device=cpu"]);
    // Common column names of prompts and answers are written into the recipe.
    w.write("asked.csv", "id,question,answer\n1,What?,That.\n2,Who?,They.\n");
    let r = w.ok(&init("asked", &model, "asked.csv"));
    assert!(r.err.contains("warning: data.train: 2 rows with the key \"id\""), "{}", r.err);
    let asked = w.text("asked.toml");
    let keys = "format = \"completion\", fields = { prompt = \"question\", completion = \"answer\" }, form = \"chat\"";
    assert!(asked.contains(keys), "{asked}");
    w.ok(&["run", "asked.toml", "run.steps=1", "run.batch_rows=1", "run.device=cpu"]);
    assert_eq!(w.ft(&["init", "mine", "--model", "m"]).code, 2, "it is there already");
    let short = w.ft_with(&["init", "other", "--model", "m"], "");
    assert!(short.code == 2 && short.err.contains("stdin ended"), "{}", short.err);
    let given =
        ["init", "other", "--model", "m", "--data", "d.jsonl", "--method", "full", "--memory", "many"];
    assert_eq!(w.ft(&given).code, 2, "no size");
    // Of what cannot be trained, the recipe has what is known, and has the same error.
    let call = json!({"messages": [{"role": "user", "content": "Weather?"},
        {"role": "assistant", "tool_calls": [{"name": "weather", "arguments": {"in": "Oslo"}}]}]});
    w.write("calls.jsonl", format!("{call}\n"));
    w.write("strange.jsonl", "{\"what\": \"is this\"}\n");
    w.config("strange", json!({"model_type": "strange"}));
    w.write("german.csv", "Frage;Antwort\nWas?;Das.\nWer?;Sie.\n");
    let german = "{ prompt = \"Frage\", completion = \"Antwort\" }";
    for (model, data, code, said, written) in [
        (model.as_str(), "gone.jsonl", 3, "gone.jsonl is not there", false),
        (model.as_str(), "calls.jsonl", 3, "tool_calls[0].name: not in the training text", true),
        (model.as_str(), "strange.jsonl", 2, "other.toml:12:10: \"strange.jsonl\" has no format", true),
        (model.as_str(), "german.csv", 2, german, true),
        ("strange", "rows.csv", 4, "strange", false),
    ] {
        let r = w.ft(&init("other", model, data));
        assert_eq!(r.code, code, "{data}: {}", r.err);
        assert!(r.err.contains(said) && r.out.is_empty(), "{data}: {}", r.err);
        assert_eq!(w.path("other.toml").exists(), written, "{data}");
        if written {
            assert!(r.err.contains("other.toml is written; mend the error"), "{data}: {}", r.err);
            let checked = w.ft(&["check", "other.toml"]);
            assert!(checked.code == code && checked.err.contains(said), "{data}: {}", checked.err);
            std::fs::rename(w.path("other.toml"), w.path("last.toml")).expect("renamed");
        }
    }
    let keys = format!("\"german.csv\", format = \"completion\", fields = {german}");
    w.write("last.toml", w.text("last.toml").replace("\"german.csv\"", &keys));
    w.ok(&["check", "last.toml"]);
    // Few samples are not packed into fewer rows.
    let rows: String = (0..300).map(|i| format!("{i}?,Yes {i}.\n")).collect();
    w.write("some.csv", format!("question,answer\n{rows}"));
    let r = w.ok(&init("some", &model, "some.csv"));
    assert!(r.err.contains("some.csv: 37 steps of 8 rows, not packed"), "{}", r.err);
    let steps = w.ok(&["check", "some.toml"]).out;
    assert!(steps.contains("37 of 8 rows"), "{steps}");
    // One sample: none is held out.
    w.write("book.jsonl", format!("{}\n", json!({"text": "Once upon a time"})));
    w.ok(&init("book", &model, "book.jsonl"));
    w.ok(&["check", "book.toml"]);
    // Words in any case, gigabytes without a unit, and a model that is not there.
    let r = w.ft_with(&["init", "typed"], "modle\nrows.csv\nLoRA\n24\n");
    assert!(
        r.code == 0 && r.err.contains("warning: the model's config is not at hand: \"modle\""),
        "{}",
        r.err
    );
    let text = w.text("typed.toml");
    assert!(text.contains("[lora]") && text.contains("budget = \"24GB\""), "{text}");
    // The task is that of the rows.
    let pair = "{\"prompt\": \"Hi\", \"chosen\": \"a\", \"rejected\": \"b\"}\n";
    let rated = "{\"prompt\": \"Hi\", \"completion\": \"a\", \"label\": true}\n";
    let asked = "{\"question\": \"Hi\", \"chosen\": \"a\", \"rejected\": \"b\"}\n";
    let taught = "{\"input_ids\": [5, 6], \"teacher_ids\": [[6], [7]], \"teacher_logits\": [[0.5], [0.5]]}\n";
    for (name, task, row) in
        [("a", "dpo", pair), ("b", "dpo", asked), ("c", "kto", rated), ("d", "distill", taught)]
    {
        w.write("rows.jsonl", row.repeat(40));
        w.ok(&init(name, &model, "rows.jsonl"));
        let text = w.text(&format!("{name}.toml"));
        assert!(text.starts_with(&format!("task = \"{task}\"")), "{text}");
        w.ok(&["check", &format!("{name}.toml")]);
    }
    let labeled = |label: Value| format!("{}\n", json!({"text": "Hi there", "label": label}));
    for (name, labels, names) in [
        ("texts", [json!("rude"), json!("kind")], "labels = [\"kind\", \"rude\"]"),
        ("numbers", [json!(1), json!(0)], "labels = [\"0\", \"1\"]"),
    ] {
        w.write("rows.jsonl", labels.map(labeled).concat().repeat(20));
        w.ok(&init(name, &model, "rows.jsonl"));
        let text = w.text(&format!("{name}.toml"));
        assert!(text.starts_with("task = \"classify\"") && text.contains(names), "{text}");
        // The model has no more positions.
        assert!(text.contains("max_length = 512 "), "{text}");
        w.ok(&["check", &format!("{name}.toml")]);
    }
}

/// Each source has a table, with its own keys.
#[test]
fn ft_init_takes_several_sources() {
    let w = World::new();
    let model = quickstart(&w);
    let init = |sources: [&str; 2]| {
        let data = sources.map(|source| ["--data", source]).concat();
        let others =
            ["init", "two", "--overwrite", "--model", &model, "--method", "lora", "--memory", "free"];
        let r = w.ok(&[&others[..], &data].concat());
        w.ok(&["check", "two.toml"]);
        (r.err, toml::from_str::<toml::Table>(&w.text("two.toml")).expect("a recipe"))
    };
    w.write("rows.csv", "prompt,completion\nWhat?,That.\nWho?,They.\nWhere?,There.\n");
    w.write("book.jsonl", format!("{}\n", json!({"text": "Once upon a time"})).repeat(3));
    let (said, recipe) = init(["rows.csv", "book.jsonl"]);
    assert!(said.contains("rows.csv, book.jsonl: "), "{said}");
    let key = |n: usize, key: &str| recipe["data"]["train"][n].get(key).and_then(toml::Value::as_str);
    assert_eq!((key(0, "source"), key(0, "format")), (Some("rows.csv"), Some("completion")));
    assert_eq!((key(1, "source"), key(1, "format")), (Some("book.jsonl"), Some("text")));
    // The classes are those of all.
    for (file, labels) in [("one.csv", ["a", "b"]), ("two.csv", ["c", "b"])] {
        let rows = labels.map(|label| format!("Once upon a time,{label}\n")).concat().repeat(20);
        w.write(file, format!("text,label\n{rows}"));
    }
    let (_, recipe) = init(["one.csv", "two.csv"]);
    assert_eq!(recipe["classify"]["labels"], toml::Value::from(vec!["a", "b", "c"]));
}

#[test]
fn a_recipe_names_modules_that_its_model_has() {
    let w = World::new();
    let init = |model: &str, method: &str| {
        let all = [
            "init",
            "--model",
            model,
            "--data",
            "rows.jsonl",
            "--method",
            method,
            "--memory",
            "free",
            "--overwrite",
        ];
        w.ok(&all);
        w.text("recipe.toml")
    };
    for method in ["lora", "qlora", "full"] {
        for case in ["qwen3-dense", "llama-embed-head", "mixtral", "qwen3-moe", "qwen2-moe"] {
            let text = init(&reference(&format!("{case}/model")), method);
            assert!(!text.contains("not at hand"), "{case}: {text}");
            assert_eq!(
                text.contains("\"experts\""),
                case.ends_with("moe") || case == "mixtral",
                "{case}: {text}"
            );
            w.ok(&["check", "recipe.toml"]);
        }
        // A built-in config.
        let text = init("Qwen/Qwen3-30B-A3B", method);
        assert!(text.contains("\"experts\"") && !text.contains("mlp"), "{text}");
        // An unknown model.
        let text = init("somebody/unknown", method);
        assert!(text.contains("config was not at hand") && text.contains("\"mlp\""), "{text}");
    }
}

#[test]
fn a_missing_folder_is_named_as_a_folder() {
    let w = World::tiny(FULL);
    w.write("runs/here/x", "");
    w.config("models/there", Value::Null);
    for args in [
        &["chat", "runs/none"][..],
        &["check", "r.toml", "model.source=runs/none"],
        &["plan", "r.toml", "model.source=runs/none"],
        &["plan", "r.toml", "model.source=./runs/none"],
        &["merge", "runs/none", "--out", "m"],
    ] {
        let r = w.ft(args);
        let said =
            ["there is no folder \"runs/none\" here", "no such folder"].iter().any(|s| r.err.contains(s));
        assert!(r.code != 0 && said, "{args:?}: {}", r.err);
    }
    let r = w.ft(&["plan", "r.toml", "model.source=nobody/none"]);
    assert!(r.code == 4 && !r.err.contains("there is no folder"), "{}", r.err);
}

/// A recipe of one epoch, with 16 rows per step.
fn of_an_epoch() -> World {
    let w = World::tiny(LORA);
    w.write(
        "r.toml",
        recipe(LORA).replace("steps = 6\n", "epochs = 1\n").replace("batch_rows = 4", "batch_rows = 16"),
    );
    w
}

#[test]
fn an_epoch_of_few_steps_is_a_warning() {
    let w = of_an_epoch();
    for verb in ["check", "run"] {
        let r = w.ok(&[verb, "r.toml"]);
        let packed =
            "1 optimizer step by run.epochs = 1: 13 rows, of 40 samples packed, 16 a step (run.batch_rows)";
        assert!(r.err.contains(packed), "{}", r.err);
        assert!(r.err.contains("data.pack = false or a smaller data.max_length"), "{}", r.err);
        let r = w.ok(&[verb, "r.toml", "data.pack=false", "run.output=long"]);
        let each = "3 optimizer steps by run.epochs = 1: 40 rows, 16 a step (run.batch_rows)";
        assert!(r.err.contains(each) && !r.err.contains("pack"), "{}", r.err);
    }
    for enough in [&["data.pack=false", "run.batch_rows=4"][..], &["run.steps=1"]] {
        let r = w.ok(&[&["check", "r.toml"], enough].concat());
        assert!(!r.err.contains("run.epochs"), "{}", r.err);
    }
}

/// Ten steps by epochs.
#[test]
fn a_warm_up_or_an_interval_beyond_the_run_is_a_warning() {
    let w = of_an_epoch();
    let set = ["r.toml", "data.pack=false", "run.batch_rows=4", "run.keep_best=true"];
    let [warm_up, best] = ["is more than the run's 10 steps", "run.keep_best does nothing: run.eval_every"];
    for (more, told) in [
        (["run.eval_every=10", "optimizer.warmup_steps=11", "run.output=beyond"], true),
        (["run.eval_every=9", "optimizer.warmup_steps=10", "run.output=within"], false),
    ] {
        for verb in ["check", "run"] {
            let r = w.ok(&[&[verb], &set[..], &more].concat());
            assert_eq!([r.err.contains(warm_up), r.err.contains(best)], [told; 2], "{verb}: {}", r.err);
        }
    }
}

#[test]
fn an_override_that_the_model_does_not_read_is_refused_by_each_verb() {
    let w = World::tiny(LORA);
    for verb in ["check", "plan", "data", "run"] {
        let r = w.ft(&[verb, "r.toml", "model.override={rms_norm_ep=0.5}"]);
        let told = r.out + &r.err;
        let said = told.contains("model.override.rms_norm_ep: ft does not know this key of config.json")
            && told.contains("did you mean rms_norm_eps?");
        assert!(r.code != 0 && said && !told.contains("leaves it alone"), "{verb}: {told}");
    }
}

#[test]
fn epochs_of_more_steps_than_run_steps_allows_are_refused() {
    let w = of_an_epoch();
    // Now the plan knows the number of rows.
    w.ok(&["check", "r.toml"]);
    for verb in ["check", "plan", "run"] {
        for epochs in ["run.epochs=1e300", "run.epochs=2e9"] {
            let r = w.ft(&[verb, "r.toml", epochs, "run.output=many"]);
            let said = r.err.contains("comes to more than 1000000000 steps");
            assert!(r.code == 2 && said, "{verb} {epochs}: {}", r.err);
        }
    }
}

#[test]
fn suggested_commands_are_quoted_for_a_shell() {
    let w = World::tiny(FULL);
    let r = w.ok(&["run", "r.toml", "run.output=my runs/it's"]);
    assert!(
        r.err.contains(r"next: ft chat 'my runs/it'\''s/model', ft report 'my runs/it'\''s'"),
        "{}",
        r.err
    );
    let r = w.ok(&init("my own", "tiny", "rows.jsonl"));
    assert!(r.err.contains("ft run 'my own.toml'"), "{}", r.err);
}

#[test]
fn completions_and_man_pages_are_written() {
    let w = World::new();
    for shell in ["bash", "zsh", "fish"] {
        assert!(w.ok(&["completions", shell]).out.contains("quantize"));
    }
    w.ok(&["man", "pages"]);
    let page = w.text("pages/ft-run.1");
    assert!(page.contains("accept\\-change") && w.path("pages/ft.1").exists(), "{page}");
}

#[test]
fn a_yaml_recipe_is_one_error() {
    let w = World::new();
    w.write("r.yaml", "model_name_or_path: Qwen/Qwen3-8B\nstage: sft\nlora_rank: 8\n");
    w.write("r.toml", "---\nbase_model: x\ndatasets:\n  - path: y\n");
    for name in ["r.yaml", "r.toml"] {
        let r = w.ft(&["check", name]);
        assert!(
            r.code == 2 && r.err.matches("error").count() == 1 && r.err.contains("this is YAML"),
            "{}",
            r.err
        );
    }
}

#[test]
fn keys_and_values_of_other_programs_are_translated() {
    let w = World::tiny(FULL);
    let told = |set: &str, what: &str| {
        let r = w.ft(&["check", "r.toml", set]);
        assert!(r.code == 2 && r.err.contains(what), "{set}: {}", r.err);
    };
    told("optimizer.name=paged_adamw_8bit", "\"adamw8bit\" with memory.offload = [\"optimizer\"]");
    told("model.dtype=bfloat16", "here it is \"bf16\"");
    told("data.train.0.format=sharegpt", "ShareGPT");
    told("run.logging_steps=1", "leave it out: each step is in metrics.jsonl");
    told(
        "run.gradient_accumulation_steps=4",
        "here it is run.batch_rows: rows a step = micro-batch x accumulation",
    );
    told("data.val_set_size=0.1", "data.eval_share");
    told("run.evals_per_epoch=4", "run.eval_every: evals_per_epoch = 4 is \"epoch/4\"");
    told("model.load_in_8bit=true", "there is no such key: no weights of 8 bits");
    told("train.0.modules=['all-linear']", "write [\"attention\", \"mlp\"]");
    told("lora.init=gaussian", "here it is \"default\"");
    told("lora.init=true", "here it is \"default\"");
    told("training.epochs=3", "[run] has steps");
}

/// A run folder, its newest checkpoint, and its adapter are interchangeable.
#[test]
fn run_folders_and_checkpoints_stand_for_their_adapter() {
    let w = World::tiny(&LORA.replace("dora = true", "dora = false"));
    w.ok(&["run", "r.toml", "run.save_every=3", "run.output=o"]);
    let loss = |args: &[&str]| w.ok(&[&["eval"], args, &["--json"]].concat()).loss();
    let of_adapter = loss(&["r.toml", "--adapter", "o/adapter"]);
    for other in [
        &["r.toml", "--adapter", "o"][..],
        &["r.toml", "--adapter", "o/checkpoints/step-00000006"],
        &["o"],
        &["o/checkpoints/step-00000006"],
    ] {
        assert_eq!(loss(other), of_adapter, "{other:?}");
    }
    let earlier = loss(&["o/checkpoints/step-00000003"]);
    assert_ne!(earlier, of_adapter);
    assert_eq!(loss(&["o", "--adapter", "o/checkpoints/step-00000003"]), earlier);
    // A run without a result counts as its newest checkpoint.
    std::fs::remove_dir_all(w.path("o/adapter")).expect("removed");
    assert_eq!(loss(&["o"]), of_adapter);
    std::fs::remove_dir_all(w.path("o/checkpoints")).expect("removed");
    let none = w.ft(&["eval", "o"]);
    assert!(none.code == 2 && none.err.contains("no result and no checkpoint"), "{}", none.err);
}

/// Relative paths of a run go by its working directory and the folder of its recipe, wherever its folder is used.
#[test]
fn a_run_folder_is_used_from_any_folder() {
    let w = World::new();
    w.config("mine/tiny", json!({}));
    w.write("mine/r.toml", recipe(&LORA.replace("dora = true", "dora = false")));
    for file in ["rows.jsonl", "eval.jsonl"] {
        w.write(&format!("mine/{file}"), w.read(file));
        std::fs::remove_file(w.path(file)).expect("removed");
    }
    w.ok(&["run", "mine/r.toml", "run.save_every=3", "run.output=o"]);
    std::fs::create_dir(w.path("elsewhere")).expect("created");
    let loss = |folder: &str, args: &[&str]| {
        let mut command = w.command(&[&["eval"], args, &["--json"]].concat());
        let r = ran(command.current_dir(w.path(folder)).output().expect("started"));
        assert_eq!(r.code, 0, "{}", r.err);
        r.loss()
    };
    let from_here = loss("", &["o"]);
    assert_eq!(loss("elsewhere", &["../o"]), from_here);
    // A path on the command line goes by this folder.
    w.write("elsewhere/eval.jsonl", w.text("mine/eval.jsonl").lines().next().expect("a row"));
    assert_eq!(loss("elsewhere", &["../o"]), from_here);
    assert_ne!(loss("elsewhere", &["../o", "data.eval.0.source=eval.jsonl"]), from_here);
    // A checkpoint needs no rows.
    std::fs::remove_file(w.path("mine/rows.jsonl")).expect("removed");
    assert_eq!(loss("elsewhere", &["../o/checkpoints/step-00000006"]), from_here);
}

#[test]
fn a_run_folder_of_full_training_is_a_model() {
    let w = World::tiny(FULL);
    w.ok(&["run", "r.toml", "run.save_every=3", "run.output=o"]);
    let loss = |args: &[&str]| w.ok(&[&["eval"], args, &["--json"]].concat()).loss();
    let whole = loss(&["r.toml", "model.source=o/model", "model.weights=load"]);
    assert_eq!(loss(&["o"]), whole);
    assert_eq!(loss(&["o/checkpoints/step-00000006"]), whole);
    assert_eq!(w.events("o", "eval")[0]["loss"].as_f64().expect("a loss"), whole);
}

#[test]
fn a_run_goes_on_from_a_chosen_step() {
    let w = World::tiny(FULL);
    let set = ["r.toml", "run.save_every=2", "run.keep=9", "run.output=o"];
    w.ok(&[&["run"], &set[..]].concat());
    let (steps, model) = (w.steps("o"), w.read("o/model/model.safetensors"));
    let r = w.ok(&[&["run"], &set[..], &["--resume", "--step", "2"]].concat());
    assert!(r.err.contains("step-00000002 (step 2 of 6)"), "{}", r.err);
    assert_eq!((w.steps("o"), w.read("o/model/model.safetensors")), (steps, model));
    let none = w.ft(&[&["run"], &set[..], &["--resume", "--step", "3"]].concat());
    assert!(none.code == 5 && none.err.contains("there are those of 2, 4, 6"), "{}", none.err);
    assert_eq!(w.ft(&[&["run"], &set[..], &["--step", "2"]].concat()).code, 2);
    // Later checkpoints go with their metrics, also where no step follows.
    let shorter = ["--resume", "--step", "4", "run.steps=4", "--accept-change", "run.steps"];
    w.ok(&[&["run"], &set[..], &shorter].concat());
    assert_eq!(w.steps("o").len(), 4);
    assert_eq!(w.checkpoints("o"), ["step-00000002", "step-00000004"]);
}

/// With a destructive learning rate, the first evaluations are the best.
#[test]
fn the_best_checkpoint_is_the_result_and_a_run_that_gets_worse_ends() {
    let w = World::tiny(FULL);
    let set = [
        "r.toml",
        "run.eval_every=2",
        "run.keep=1",
        "run.keep_best=true",
        "optimizer.lr=0.3",
        "optimizer.warmup_steps=0",
        "optimizer.schedule=constant",
        "run.clip=0",
    ];
    w.ok(&[&["run"], &set[..], &["run.output=long", "run.steps=20"]].concat());
    let evals: Vec<(u64, f64)> = w
        .events("long", "eval")
        .iter()
        .map(|e| (e["step"].as_u64().expect("a step"), e["loss"].as_f64().expect("a loss")))
        .collect();
    let best = evals.iter().copied().reduce(|a, b| if b.1 < a.1 { b } else { a }).expect("evaluations");
    assert!(best.0 < 20, "the rate ruins nothing: {evals:?}");
    let end = &w.events("long", "end")[0];
    assert_eq!(end["of_step"], best.0);
    let of_result = w.ok(&["eval", "long", "--json"]).loss();
    assert!((of_result - best.1).abs() < 1e-6, "{of_result} {best:?}");
    assert_eq!(w.checkpoints("long"), [format!("step-{:08}", best.0), "step-00000020".into()]);

    let early = w.ok(&[&["run"], &set[..], &["run.output=short", "run.patience=2", "run.steps=20"]].concat());
    assert!(early.err.contains("2 evaluations in a row were no better"), "{}", early.err);
    let done = w.events("short", "end")[0]["step"].as_u64().expect("a step");
    assert_eq!(done, w.events("short", "eval").last().expect("one")["step"].as_u64().expect("a step"));
    assert!(done < 20);
    let resumed = |more: &[&str]| {
        w.ok(&[&["run", "--resume"], &set[..], &["run.output=short", "run.steps=20"], more].concat())
    };
    let again = resumed(&["run.patience=2"]);
    assert!(again.err.contains("finished already"), "{}", again.err);
    // Evaluations of other data do not count.
    let other = ["run.output=other", "run.patience=2", "run.steps=20"];
    w.ok(&[&["run"], &set[..], &other].concat());
    w.write("other.jsonl", w.text("eval.jsonl").lines().take(2).fold(String::new(), |all, l| all + l + "\n"));
    let eval = ["data.eval=[{source='other.jsonl', format='tokens'}]", "--resume"];
    let r = w.ok(&[&["run"], &set[..], &other, &eval].concat());
    assert!(r.err.contains("of other data: not compared"), "{}", r.err);
    let at_done = w.events("other", "eval").into_iter().filter(|e| e["step"] == done);
    assert_eq!(at_done.count(), 2, "the last step is evaluated on the new data");
    // With more patience, the run continues to the same end as an uninterrupted run.
    resumed(&["run.patience=0"]);
    assert_eq!(w.steps("short"), w.steps("long"));
    assert_eq!(w.read("short/model/model.safetensors"), w.read("long/model/model.safetensors"));
    // If the best checkpoint is missing, the best remaining one is the result, with a warning before
    // training.
    std::fs::remove_dir_all(w.path(&format!("long/checkpoints/step-{:08}", best.0))).expect("removed");
    let more = ["run.steps=22", "--accept-change", "run.steps", "run.output=long"];
    let r = w.ok(&[&["run", "--resume"], &set[..], &more].concat());
    let told = format!("the best evaluation, after step {} (loss {:.4}), is left out: ", best.0, best.1);
    assert!(r.err.contains(&told) && r.err.find(&told) < r.err.find("step 22/22"), "{}", r.err);
    let end = &w.events("long", "end")[0];
    assert_eq!(
        w.checkpoints("long").first(),
        Some(&format!("step-{:08}", end["of_step"].as_u64().expect("one")))
    );
    // If the newest checkpoint is the best, no extra one is kept.
    let gentle: Vec<&str> = set.iter().copied().filter(|s| !s.starts_with("optimizer.lr")).collect();
    w.ok(&[&["run"], &gentle[..], &["run.output=better", "run.steps=6", "optimizer.lr=0.001"]].concat());
    assert_eq!(w.events("better", "end")[0]["of_step"], 6);
    assert_eq!(w.checkpoints("better"), ["step-00000006"]);
    // The evaluation before the first step counts for patience, but is never the result.
    let start = ["run.output=vain", "run.steps=20", "run.eval_at_start=true", "run.patience=3"];
    let from = ["model.source=better/model", "model.weights=load"];
    let r = w.ok(&[&["run"], &set[..], &start, &from].concat());
    assert!(r.err.contains("3 evaluations in a row were no better than step 0's"), "{}", r.err);
    assert!(r.err.contains("no evaluation was better than that before the first step"), "{}", r.err);
    let vain = w.ft(&["check", "r.toml", "run.patience=2"]);
    assert!(vain.code == 2 && vain.err.contains("run.patience does nothing"), "{}", vain.err);
}

#[test]
fn a_run_writes_its_summary_tensorboard_and_csv() {
    let w = World::tiny(FULL);
    let set = ["run", "r.toml", "run.output=o", "log.tensorboard=true", "log.csv=true", "run.save_every=3"];
    let r = w.ok(&set);
    assert!(r.err.contains("done: step 6, best evaluation loss"), "{}", r.err);
    assert!(r.err.contains("next: ft chat o/model, ft report o"), "{}", r.err);
    let files = || {
        let mut names: Vec<_> = std::fs::read_dir(w.path("o/tensorboard"))
            .expect("a folder")
            .flatten()
            .map(|e| e.path())
            .collect();
        names.sort();
        names
    };
    let bytes = std::fs::read(&files()[0]).expect("a file");
    for tag in ["brain.Event:2", "train/loss", "train/grad_norm", "eval/perplexity"] {
        assert!(bytes.windows(tag.len()).any(|w| w == tag.as_bytes()), "{tag}");
    }
    // One line per step and per evaluation, with the numbers of `metrics.jsonl`.
    let table = || w.text("o/metrics.csv");
    // Losses agree to twelve digits, because JSON readers differ in the last one.
    let shown = |kind: &str, step: f64, loss: f64| format!("{kind} {step} {loss:.12}");
    let of = |kind: &str| {
        let n = |e: &Value, key: &str| e[key].as_f64().expect("a number");
        let rows = w.events("o", kind).into_iter();
        rows.map(|e| shown(kind, n(&e, "step"), n(&e, "loss"))).collect::<Vec<_>>()
    };
    let losses = |kind: &str| {
        let text = table();
        let rows = text.lines().map(|l| l.split(',').collect::<Vec<_>>()).filter(|r| r[0] == kind);
        let n = |s: &str| s.parse::<f64>().expect("a number");
        rows.map(|r| shown(kind, n(r[1]), n(r[2]))).collect::<Vec<_>>()
    };
    assert_eq!((losses("step"), losses("eval")), (of("step"), of("eval")));
    let whole = table().lines().count();
    w.ok(&[&set[..], &["--resume", "--step", "3"]].concat());
    assert_eq!(files().len(), 2, "one for each start");
    assert_eq!((losses("step"), losses("eval")), (of("step"), of("eval")));
    assert_eq!(table().lines().count(), whole, "each step once");
    w.ok(&[&set[..], &["--overwrite"]].concat());
    assert_eq!(files().len(), 1);
}

/// `ft check` of a recipe for a card passes where there is none, and says so; `ft run` needs it.
#[test]
fn ft_check_for_cuda_passes_without_a_card() {
    if ft::kernel::cuda::count() > 0 {
        return;
    }
    let w = World::tiny(FULL);
    let r = w.ft(&["check", "r.toml", "run.device=cuda", "parallel.zero=2"]);
    assert!(r.code == 0 && r.out.contains("runs on      CUDA, bf16"), "{}{}", r.out, r.err);
    assert!(
        r.out.contains("not checked  memory and libraries of the CUDA device: none is here"),
        "{}",
        r.out
    );
    assert!(
        r.err.contains("warning: command line: parallel.zero=2: parallel.zero does nothing"),
        "{}",
        r.err
    );
    assert_eq!(w.ft(&["run", "r.toml", "run.device=cuda"]).code, 2);
}

/// A long run with its only checkpoint at the end is warned of, by the check too.
#[test]
fn a_long_run_without_checkpoints_is_warned_of() {
    let w = World::tiny(LORA);
    let said = "warning: no checkpoint before the end of 101 steps";
    for (set, warns) in [
        (&["run.steps=101"][..], true),
        (&["run.steps=100"], false),
        (&["run.steps=101", "run.save_every=50"], false),
        (&["run.steps=101", "run.save_every=101"], true),
        (&["run.steps=101", "run.save_every=100"], false),
        (&["run.steps=101", "run.batch_rows=2", "run.micro_rows=1", "run.save_every=epoch"], false),
        (&["run.steps=101", "run.eval_every=50", "run.keep_best=true"], false),
    ] {
        let r = w.ok(&[&["check", "r.toml"], set].concat());
        assert_eq!(r.err.contains(said), warns, "{set:?}: {}", r.err);
    }
    let r = w.ok(&["run", "r.toml", "run.steps=101"]);
    assert!(r.err.contains(said), "{}", r.err);
}

/// Intervals are steps, shares of the steps, or parts of an epoch: here, of 10 steps.
#[test]
fn intervals_are_of_epochs_and_shares_too() {
    let w = World::tiny(LORA);
    let set = ["run", "r.toml", "run.output=o", "run.steps=12", "data.pack=false", "run.keep=9"];
    w.ok(&[&set[..], &["run.save_every=epoch", "run.eval_every=25%"]].concat());
    assert_eq!(w.checkpoints("o"), ["step-00000010", "step-00000012"]);
    let evaluated: Vec<u64> = w.events("o", "eval").iter().filter_map(|e| e["step"].as_u64()).collect();
    assert_eq!(evaluated, [3, 6, 9, 12]);
    let r = w.ft(&["check", "r.toml", "run.save_every=0.25"]);
    assert_eq!(r.code, 2, "{}", r.err);
    assert!(r.err.contains("a share of all steps is a string: \"25%\""), "{}", r.err);
}
