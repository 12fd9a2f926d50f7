//! `ft push` up to the upload: model card, files, refusals.

use crate::world::{World, recipe, reference, repository};
use std::os::unix::fs::symlink;

#[test]
fn the_model_card_describes_the_run() {
    let w = World::new();
    let base = reference("qwen3-dense/model");
    let rules = "[[train]]\nmodules = [\"attention\"]\nrank = 3\n";
    // Private paths.
    let rows = w.path("private/rows.jsonl").display().to_string();
    w.write("private/rows.jsonl", w.read("rows.jsonl"));
    w.write(
        "r.toml",
        recipe(rules)
            .replace("source = \"tiny\"\nweights = \"random\"", &format!("source = {base:?}"))
            .replace("source = \"rows.jsonl\"", &format!("source = {rows:?}")),
    );
    let output = format!("run.output={:?}", w.path("a"));
    w.ok(&["run", "r.toml", &output, "run.seed=0", "log.mlflow=http://127.0.0.1:9"]);
    // The run wrote a card without the name of a repository.
    let left = w.text("a/adapter/README.md");
    assert!(left.contains("| steps | 6 |") && left.contains("OWNER/r"), "{left}");
    w.write("a/adapter/notes.txt", "mine");
    w.write("a/adapter/additional_chat_templates/tool_use.jinja", "{{ tools }}");
    w.write("a/adapter/additional_chat_templates/mine.jinja", "{{ tools }}");
    symlink("/etc/passwd", w.path("a/adapter/LICENSE")).expect("a link");
    let r = w.ok(&["push", "a", "me/pirate", "--dry-run"]);
    let last = w.events("a", "eval").last().and_then(|e| e["loss"].as_f64()).expect("an evaluation");
    let rows = format!("| evaluation loss after step 6 | {last:.4}");
    let says = [
        "library_name: peft",
        "- lora",
        "# pirate",
        "| steps | 6 |",
        &rows,
        "PeftModel.from_pretrained(model, \"me/pirate\")",
        "--adapter me/pirate",
        "`rows.jsonl`",
        "```toml",
        "[[train]]\nmodules = [\"attention\"]\nrank    = 3\n",
        "[model]\nsource = \"model\"\n",
        "\nsource = \"rows.jsonl\"\n",
    ];
    for text in says {
        assert!(r.out.contains(text), "no {text:?} in\n{}", r.out);
    }
    // The recipe is that of the user: set keys, of any value, and no others.
    let shown = r.out.split("```toml").nth(1).expect("a recipe");
    assert!(shown.contains("seed") && shown.lines().count() < 40, "{shown}");
    for absent in ["clip", "output", "mlflow", "#"] {
        assert!(!shown.contains(absent), "{absent}: {shown}");
    }
    for path in [repository(), w.path("")] {
        assert!(!r.out.contains(&path.display().to_string()), "{}: a path of this machine", path.display());
    }
    assert!(r.err.contains("adapter_model.safetensors: ") && r.err.contains("ft.json: "), "{}", r.err);
    assert!(r.err.contains("additional_chat_templates/tool_use.jinja: 11 bytes"), "{}", r.err);
    let left = "left out: LICENSE, additional_chat_templates/mine.jinja, notes.txt";
    assert!(r.err.contains(left), "{}", r.err);
    assert!(
        r.err.contains("no repository of the hub") && r.err.contains("base_model_name_or_path"),
        "{}",
        r.err
    );

    let step = w.checkpoints("a").pop().expect("a checkpoint");
    let r = w.ok(&["push", &format!("a/checkpoints/{step}"), "me/pirate", "--dry-run"]);
    assert!(r.out.contains("| steps | 6 |") && r.err.contains("adapter_model.safetensors: "), "{}", r.err);

    // A base on the hub, and a custom card.
    let config = w.text("a/adapter/adapter_config.json");
    w.write("a/adapter/adapter_config.json", config.replace(&base, "Qwen/Qwen3-0.6B"));
    let r = w.ok(&["push", "a/adapter", "me/pirate", "--dry-run"]);
    assert!(r.out.contains("base_model: \"Qwen/Qwen3-0.6B\"\nbase_model_relation: adapter\n"), "{}", r.out);
    assert!(r.out.contains("| steps | 6 |") && !r.err.contains("no repository of the hub"), "{}", r.err);
    w.write("a/adapter/README.md", "# my words\n");
    assert_eq!(w.ok(&["push", "a", "me/pirate", "--dry-run"]).out, "# my words\n");
    // A longer run keeps the custom card.
    w.ok(&["run", "--resume", "r.toml", &output, "run.steps=7", "--accept-change", "run.steps"]);
    assert_eq!(w.read("a/adapter/README.md"), b"# my words\n");
}

#[test]
fn invalid_pushes_are_refused_before_anything_is_sent() {
    let w = World::new();
    w.write("empty/x", "");
    let r = w.ft(&["push", "empty", "me/it"]);
    assert!(r.code == 2 && r.err.contains("neither an adapter nor a model"), "{}", r.err);
    let model = reference("qwen3-dense/model");
    let r = w.ft(&["push", &model, "me/it"]);
    assert!(r.code == 4 && r.err.contains("me/it") && r.err.contains("HF_HUB_OFFLINE"), "{}", r.err);
    for name in ["not an id", "x", "a/b/c", "a/b ü", "a/b--c", "a/b.git", "a/-b", "a/"] {
        for more in [&[][..], &["--dry-run"]] {
            let r = w.ft(&[&["push", &model, name], more].concat());
            assert!(r.code == 2 && r.out.is_empty() && r.err.contains("OWNER/NAME"), "{name}: {}", r.err);
        }
    }
    let card = w.ok(&["push", &model, "me/it", "--dry-run"]).out;
    assert!(
        card.contains("library_name: transformers") && card.contains("from_pretrained(\"me/it\")"),
        "{card}"
    );
}

#[test]
fn an_upload_without_weights_is_refused() {
    let (w, model) = (World::new(), reference("qwen3-dense/model"));
    let refused = |dir: &str, said: &str| {
        let r = w.ft(&["push", dir, "me/it", "--dry-run"]);
        let told = r.err.contains(&format!("{dir}: no {said}"));
        assert!(r.code == 2 && r.out.is_empty() && told, "{}", r.err);
    };
    w.write("a/adapter_config.json", "{}");
    refused("a", "adapter_model.safetensors to upload");
    w.write("a/adapter_model.safetensors", "");
    std::fs::remove_file(w.path("a/adapter_config.json")).expect("removed");
    symlink("/etc/passwd", w.path("a/adapter_config.json")).expect("a link");
    refused("a", "adapter_config.json to upload\nhint: it is a link");
    w.copy(&model, "m");
    std::fs::remove_file(w.path("m/model.safetensors")).expect("removed");
    refused("m", "model.safetensors to upload");
    let index = r#"{"metadata": {}, "weight_map": {"x": "model-00001-of-00001.safetensors"}}"#;
    w.write("m/model.safetensors.index.json", index);
    refused("m", "model-00001-of-00001.safetensors to upload");
}
