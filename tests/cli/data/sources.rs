//! Short data sources: formats detected from rows, held-out shares, weights.

use crate::world::{World, quickstart};
use serde_json::json;

fn world() -> World {
    let w = World::new();
    let model = quickstart(&w);
    let row =
        |i: usize| json!({"question": format!("What is {i}?"), "answer": format!("It is {i}.")}).to_string();
    let rows: Vec<String> = (0..20).map(row).collect();
    w.write("pairs.jsonl", rows.join("\n") + "\n");
    w.write("texts.txt", "One line.\nAnother line.\n");
    w.write(
        "r.toml",
        format!(
            "[model]\nsource = \"{model}\"\n[[train]]\nmodules = [\"attention\"]\n[data]\n\
             train = [{{ source = \"texts.txt\" }}]\nmax_length = 64\npack = false\n\
             [run]\nsteps = 2\nbatch_rows = 2\ndevice = \"cpu\"\noutput = \"o\"\n"
        ),
    );
    w
}

#[test]
fn a_format_is_detected_and_shown() {
    let w = world();
    let r = w.ok(&["run", "r.toml"]);
    assert!(r.err.contains("data.train.0: texts.txt: format = \"text\", by its first row"), "{}", r.err);
    let resolved = w.text("o/recipe.toml");
    let format = |l: &str| l.starts_with("format ") && l.ends_with("= \"text\"");
    assert!(resolved.lines().any(format), "{resolved}");
    // A resume with the explicit format is the same run.
    w.ok(&["run", "r.toml", "data.train.0.format=text", "--resume"]);
    for verb in ["check", "data", "run"] {
        let r = w.ok(&[verb, "r.toml", "data.train.0.source=pairs.jsonl", "run.output=p"]);
        for said in [
            "format = \"completion\", fields = { prompt = \"question\", completion = \"answer\" }, by its first row",
            "data.train.0: pairs.jsonl: form = \"chat\", as the model has a chat template",
        ] {
            assert!(r.err.contains(said), "{verb}: {}", r.err);
        }
    }
    let named = [
        "data.train.0.source=pairs.jsonl",
        "data.train.0.fields={prompt = \"question\", completion = \"answer\"}",
        "data.train.0.form=chat",
    ];
    // The same run, with nothing left to find.
    let r = w.ok(&[&["run", "r.toml", "run.output=p", "--resume"], &named[..]].concat());
    assert!(!r.err.contains("as the model has"), "{}", r.err);
}

/// Question and answer make the tokens of the same conversation, unless their form is plain.
#[test]
fn questions_and_answers_go_through_the_chat_template() {
    let w = world();
    let rows = [
        ("asked.csv", "question,answer\n1+1?,2\n2+2?,4\n"),
        (
            "alpaca.jsonl",
            "{\"instruction\":\"1+1?\",\"output\":\"2\"}\n{\"instruction\":\"2+2?\",\"output\":\"4\"}\n",
        ),
    ];
    let chat = |q: &str, a: &str| {
        format!(
            "{{\"messages\":[{{\"role\":\"user\",\"content\":\"{q}\"}},{{\"role\":\"assistant\",\"content\":\"{a}\"}}]}}\n"
        )
    };
    w.write("chat.jsonl", chat("1+1?", "2") + &chat("2+2?", "4"));
    let hash = |set: &[&str]| {
        let r = w.ok(&[&["data", "r.toml", "--json", "data.max_length=128"], set].concat());
        r.json()["hash"].clone()
    };
    let expected = hash(&["data.train.0.source=chat.jsonl"]);
    for (name, text) in rows {
        w.write(name, text);
        let source = format!("data.train.0.source={name}");
        assert_eq!(hash(&[&source]), expected, "{name}");
        assert_ne!(hash(&[&source, "data.train.0.form=plain"]), expected, "{name}");
    }
    // Rows of two forms are said.
    let mixed = "data.train=[{source=\"chat.jsonl\"}, {source=\"asked.csv\", form=\"plain\"}]";
    let r = w.ok(&["run", "r.toml", mixed, "run.output=m"]);
    assert!(
        r.err.contains("data.train mixes conversations by the chat template with plain text"),
        "{}",
        r.err
    );
    let card = w.text("m/adapter/README.md");
    assert!(card.contains("trained with the chat template, beside rows of other forms"), "{card}");
}

#[test]
fn a_share_of_the_training_data_is_evaluated_on() {
    let w = world();
    let set = [
        "data.train.0.source=pairs.jsonl",
        "data.train.0.fields={prompt = \"question\", completion = \"answer\"}",
        "data.eval_share=0.2",
    ];
    let with = |words: &[&'static str]| [words, &set[..]].concat();
    let checked = w.ok(&with(&["check", "r.toml"]));
    assert!(
        checked.out.contains("data         16 samples") && checked.out.contains("evaluation   4 samples"),
        "{}",
        checked.out
    );
    w.ok(&with(&["run", "r.toml"]));
    let eval = w.events("o", "eval");
    assert_eq!(eval.len(), 1, "{eval:?}");
    let again = w.ok(&with(&["eval", "r.toml", "--adapter", "o/adapter", "--json"]));
    let said = again.json();
    assert_eq!(said["target_tokens"], eval[0]["target_tokens"]);
    assert!(
        (again.loss() - eval[0]["loss"].as_f64().expect("a loss")).abs() < 1e-6,
        "{} {eval:?}",
        again.out
    );
    // dropout of the model's own acts in training alone
    let dropout = "model.override={attention_dropout = 0.1}";
    let refused = w.ft(&with(&["run", "r.toml", "--overwrite", dropout]));
    assert!(refused.code != 0 && refused.err.contains("attention_dropout = 0.1"), "{}", refused.err);
    assert_eq!(w.ok(&with(&["eval", "r.toml", "--adapter", "o/adapter", "--json", dropout])).out, again.out);
    let both = w.ft(&with(&["check", "r.toml", "data.eval=[{source = \"texts.txt\"}]"]));
    assert!(
        both.code == 2 && both.err.contains("data.eval_share and data.eval are both given"),
        "{}",
        both.err
    );
    let seed = w.ft(&with(&["run", "r.toml", "--resume", "run.steps=3", "data.eval_share=0.1"]));
    assert!(seed.code == 2 && seed.err.contains("data.eval_share"), "{}", seed.err);
}

#[test]
fn ft_data_counts_lost_tokens_and_rows_in_both_parts() {
    let w = World::new();
    w.config("tiny", json!(null));
    let row = |n: usize| json!({"input_ids": (0..n).map(|i| (i + n) % 60).collect::<Vec<_>>()}).to_string();
    w.write("long.jsonl", (0..10).map(|i| row(100 + 50 * i)).collect::<Vec<_>>().join("\n"));
    w.write("both.jsonl", [row(100), row(7)].join("\n"));
    w.write(
        "d.toml",
        "[model]\nsource = \"tiny\"\nweights = \"random\"\n[[train]]\nmodules = [\"attention\"]\n[data]\n\
         train = [{ source = \"long.jsonl\" }]\neval = [{ source = \"both.jsonl\" }]\nmax_length = 300\n\
         [run]\nbatch_rows = 1\ndevice = \"cpu\"\n",
    );
    let r = w.ok(&["data", "d.toml", "--json"]);
    let said = r.json();
    // 350, 400, .. 550 lose 50, 100, .. 250.
    let at =
        |max: u64| said["lost"].as_array().expect("a list").iter().find(|c| c["max_length"] == max).cloned();
    assert_eq!(at(300), Some(json!({"max_length": 300, "tokens": 750, "samples": 5})), "{}", r.out);
    assert_eq!(at(1024), Some(json!({"max_length": 1024, "tokens": 0, "samples": 0})));
    assert_eq!((&said["whole_lengths"]["max"], &said["lengths"]["max"]), (&json!(550), &json!(300)));
    assert_eq!((&said["in_both"], &said["truncated"]), (&json!(1), &json!(5)));
    assert!(r.err.contains("1 of the 2 samples of the evaluation are in the training data too"), "{}", r.err);
    let shown = w.ok(&["data", "d.toml", "--rows", "0"]).out;
    assert!(shown.contains("before     min 100") && shown.contains("of 5 samples, as it is"), "{shown}");
    // Whole samples are dropped: 350, 400, .. 550 of 3250 tokens.
    let drop = "data.over_length=drop";
    let dropped = w.ok(&["data", "d.toml", "--json", drop]).json();
    let at = |max: u64| dropped["lost"].as_array().expect("a list").iter().find(|c| c["max_length"] == max);
    assert_eq!(at(300), Some(&json!({"max_length": 300, "tokens": 2250, "samples": 5})), "{dropped}");
    // At 512, only the sample of 550.
    assert_eq!(at(512), Some(&json!({"max_length": 512, "tokens": 550, "samples": 1})), "{dropped}");
    assert_eq!(dropped["tokens"], json!(1000), "what is left is what was not lost: {dropped}");
    let shown = w.ok(&["data", "d.toml", "--rows", "0", drop]).out;
    assert!(shown.contains("69.2 % of the tokens lost, of 5 samples, as it is"), "{shown}");
    assert!(
        shown.contains("long.jsonl:6: 350 tokens are more than data.max_length = 300\n"),
        "nothing to set, it is set: {shown}"
    );
}

#[test]
fn unread_files_of_a_folder_are_one_warning() {
    let w = world();
    std::fs::create_dir_all(w.path("rows/more")).expect("made");
    w.write("rows/a.txt", "One line.\nAnother line.\n");
    w.write("rows/more/b.txt", "Not read.\n");
    w.write("rows/notes.md", "Not read.\n");
    let told =
        "data.train: not read of the folder \"rows\": 1 subfolder (more), 1 file of another kind (notes.md)";
    // With and without a token cache.
    for verb in ["check", "data", "run", "data"] {
        let r = w.ok(&[verb, "r.toml", "data.train.0.source=rows"]);
        assert_eq!(r.err.matches(told).count(), 1, "{verb}: {}", r.err);
    }
    let deep = w.ok(&["data", "r.toml", "data.train.0.source=rows/**/*.txt", "--json"]);
    assert!(
        !deep.err.contains("not read of") && deep.out.contains("\"rows_read\": 3"),
        "{} {}",
        deep.err,
        deep.out
    );
}
