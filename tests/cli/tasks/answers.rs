//! Evaluation by generation, and the cache of tokenized data.

use crate::world::{World, quickstart};
use serde_json::{Value, json};

/// A world with the quickstart model, and a recipe that memorizes two answers. The evaluation asks for
/// these and a third.
fn world() -> World {
    let w = World::new();
    let model = quickstart(&w);
    let row = |q: &str, a: &str| {
        json!({"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}).to_string()
            + "\n"
    };
    let learnt = row("Where is it?", "It is 12 miles off.") + &row("Who goes there?", "Nobody, it is 7.");
    w.write("train.jsonl", &learnt);
    w.write("eval.jsonl", learnt + &row("Which number?", "The number 90210 it shall be."));
    w.write(
        "r.toml",
        format!(
            "[model]\nsource = \"{model}\"\n[lora]\nrank = 8\n[[train]]\nmodules = [\"attention\", \"mlp\"]\n[data]\n\
             train = [{{ source = \"train.jsonl\", format = \"messages\" }}]\n\
             eval = [{{ source = \"eval.jsonl\", format = \"messages\" }}]\nmax_length = 64\npack = false\n\
             [generate]\nsamples = 3\nmax_new_tokens = 24\nregex = '\\d+'\n[optimizer]\nlr = 1e-2\n\
             [run]\nsteps = 40\nbatch_rows = 2\neval_at_start = true\ndevice = \"cpu\"\noutput = \"o\"\n"
        ),
    );
    w
}

fn scores(e: &Value) -> [f64; 3] {
    ["exact_match", "rouge_l", "regex_match"].map(|key| e[key].as_f64().unwrap_or(-1.0))
}

/// Stages have the answers and samples of one rank, at ZeRO stage 3 too, and to a prompt that is read in several parts.
#[test]
fn stages_answer_as_one_rank() {
    let w = world();
    let long = format!("log.samples=['Where is it?', '{}']", "Who goes there? ".repeat(700));
    let set = ["run.steps=6", "run.eval_every=6", &long];
    let told = |run: &str, layout: &[&str]| {
        let output = format!("run.output={run}");
        w.ok(&[&["run", "r.toml", "--overwrite", &output][..], &set, layout].concat());
        let of = |event: &str, keys: &[&str]| -> Vec<Value> {
            let events = w.events(run, event);
            events.iter().flat_map(|e| keys.iter().map(|key| e[*key].clone()).collect::<Vec<_>>()).collect()
        };
        let evals = of("eval", &["loss", "rouge_l", "exact_match", "generated_tokens"]);
        [evals, of("answer", &["prompt", "reply"]), of("sample", &["prompt", "reply"])]
    };
    for (data, pipeline, zero) in [("1", "3", "0"), ("2", "2", "3")] {
        let data = format!("parallel.data={data}");
        let one = told("one", &[&data]);
        assert!(one.iter().all(|all| all.len() >= 4), "{one:?}");
        let (stages, zero) = (format!("parallel.pipeline={pipeline}"), format!("parallel.zero={zero}"));
        assert_eq!(told("run", &[&data, &stages, &zero]), one, "{stages} {zero}");
    }
}

/// Memorized answers are reproduced, unlike the third; also from the run folder, and on several ranks.
#[test]
fn answers_are_scored_beside_the_loss() {
    let w = world();
    let r = w.ok(&["run", "r.toml"]);
    let evals = w.events("o", "eval");
    let [before, after] = [&evals[0], &evals[1]].map(scores);
    assert_eq!((before[0], before[2]), (0.0, 0.0), "{evals:?}");
    assert!(after[0] > 0.6 && after[0] < 0.7 && after[2] > 0.6, "{evals:?}");
    assert!(after[1] > before[1] && after[1] >= after[0] && after[1] < 1.0, "{evals:?}");
    assert_eq!(evals[1]["generated_samples"], 3);
    assert!(r.err.contains("exact match 66.7 %, ROUGE-L 0."), "{}", r.err);
    // The answers stand in the metrics and in the report.
    let answers = w.events("o", "answer");
    assert_eq!(answers.len(), 6);
    let last = &answers[3];
    assert_eq!(
        (&last["reference"], &last["reply"]),
        (&json!("It is 12 miles off."), &json!("It is 12 miles off."))
    );
    assert!(last["prompt"].as_str().is_some_and(|p| p.contains("Where is it?")), "{last}");
    assert_eq!((&last["exact_match"], &last["rouge_l"]), (&json!(true), &json!(1.0)));
    w.ok(&["report", "o"]);
    let page = w.text("o/report.html");
    for shown in ["id=\"scores\"", "Wanted: <q>It is 12 miles off.</q>", "Scored answers"] {
        assert!(page.contains(shown), "{shown}");
    }
    let read = |args: &[&str]| w.ok(args).json();
    let again = read(&["eval", "o", "--json"]);
    assert_eq!((scores(&again), &again["generated_tokens"]), (after, &evals[1]["generated_tokens"]));
    assert!(w.ok(&["eval", "o"]).out.contains("generated   exact match 66.7 %"));
    let one = read(&["eval", "o", "--json", "generate.samples=1"]);
    assert_eq!((scores(&one)[0], &one["generated_samples"]), (1.0, &json!(1)));
    assert_eq!(read(&["eval", "o", "--json", "generate={}"])["rouge_l"], Value::Null);
    // Sampling depends on the seed.
    let drawn = ["eval", "o", "--json", "generate.temperature=3"];
    assert_eq!(read(&drawn), read(&drawn));
    assert_ne!(scores(&read(&drawn)), after);

    let parallel = |zero: u8| {
        let (out, zero) = (format!("run.output=p{zero}"), format!("parallel.zero={zero}"));
        w.ok(&["run", "r.toml", "run.steps=4", "parallel.data=2", &zero, &out]);
        w.events(&out[11..], "eval").iter().map(scores).collect::<Vec<_>>()
    };
    assert_eq!(parallel(0), parallel(3));
}

#[test]
fn generation_without_a_prompt_or_with_idle_keys_is_refused() {
    let w = world();
    w.write("text.jsonl", "{\"text\": \"no prompt at all\"}\n");
    for (set, code, says) in [
        (&["data.eval.0.source=text.jsonl", "data.eval.0.format=text"][..], 2, "has a prompt"),
        (
            &["data.eval.0.source=text.jsonl", "data.eval.0.format=text", "run.eval_at_start=false"],
            2,
            "has a prompt",
        ),
        (&["generate.regex=("], 2, "generate.regex"),
        (&["data.eval=[]", "run.eval_at_start=false"], 2, "generate.samples does nothing"),
        (&["generate.samples=0"], 2, "generate.regex does nothing"),
        (&["generate.samples=-1"], 2, "generate.samples"),
    ] {
        let r = w.ft(&[&["run", "r.toml"][..], set].concat());
        assert!(r.code == code && r.err.contains(says), "{set:?}: {} {}", r.code, r.err);
        assert!(!r.err.contains("step 1/"), "{set:?}: {}", r.err);
    }
}

/// With a token cache, without one, and with a damaged one, runs are equal bit for bit.
#[test]
fn the_token_cache_changes_no_bit() {
    let w = world();
    let kept = || {
        let entries = std::fs::read_dir(w.path("cache/tokens")).into_iter().flatten().flatten();
        let mut all: Vec<_> =
            entries.map(|e| e.path()).filter(|p| p.extension().is_some_and(|e| e == "tokens")).collect();
        all.sort();
        all
    };
    let run = |out: &str, more: &[&str]| {
        let output = format!("run.output={out}");
        let set = [
            "run",
            "r.toml",
            "run.steps=3",
            "run.eval_at_start=false",
            "generate={}",
            "data.pack=true",
            &output,
        ];
        let r = w.ok(&[&set[..], more].concat());
        (w.read(&format!("{out}/adapter/adapter_model.safetensors")), r.err)
    };
    let plain = run("a", &["data.cache=false"]).0;
    assert_eq!(kept().len(), 0);
    assert!(run("b", &[]).0 == plain);
    assert_eq!(kept().len(), 2);
    let (again, said) = run("c", &[]);
    assert!(again == plain && !said.contains("anew"), "{said}");
    std::fs::write(&kept()[0], b"other").expect("written");
    let (anew, said) = run("d", &[]);
    assert!(anew == plain && said.contains("made anew"), "{said}");
    let hash = |out: &str| w.events(out, "start")[0]["hashes"]["data"].clone();
    assert_eq!(hash("a"), hash("c"));
}

/// Plans include generated answers, and the token cache still to be written.
#[test]
fn plans_include_generated_answers_and_the_token_cache() {
    let w = world();
    let plan = |set: &[&str]| w.ok(&[&["plan", "r.toml", "--json"], set].concat()).json();
    let size = |name: &str| std::fs::metadata(w.path(name)).expect("a file").len();
    let files = size("train.jsonl") + size("eval.jsonl");
    assert_eq!(plan(&[])["disk"]["tokens"], files);
    assert_eq!(plan(&["data.cache=false"])["disk"]["tokens"], Value::Null);
    // With answers this long, the peak is in the evaluation.
    let config: Value = serde_json::from_slice(
        &std::fs::read(crate::world::repository().join("data/model/config.json")).expect("a config"),
    )
    .expect("JSON");
    let n = |key: &str| config[key].as_u64().expect("a number");
    let token = 2 * 4 * n("num_hidden_layers") * n("num_key_value_heads") * n("head_dim");
    let long = ["generate.max_new_tokens=50000", "data.cache=true"];
    assert_eq!(plan(&long)["device"]["key_value_cache"], token * (50_000 + 64));
    assert_eq!(plan(&long)["peak"]["phase"], "evaluation");
    assert_eq!(plan(&["generate={}"])["device"]["key_value_cache"], Value::Null);

    // A run with answers of maximum length takes the planned memory.
    let set = ["generate.max_new_tokens=400", "generate.temperature=1000", "run.steps=1"];
    w.ok(&[&["run", "r.toml"], &set[..]].concat());
    assert_eq!(plan(&set)["disk"]["tokens"], Value::Null);
    let drawn = w.events("o", "eval")[1]["generated_tokens"].as_u64().expect("tokens");
    assert!(drawn > 2 * 400, "{drawn}: no seed of long answers");
    let end = &w.events("o", "end")[0]["memory"];
    let of = |what: &str| end[what]["evaluation"].as_u64().expect("bytes");
    let (planned, measured) = (of("planned_phases"), of("measured_phases"));
    // The plan covers a few MB; unplanned overhead is some hundred KB.
    assert!(planned.abs_diff(measured) < planned / 30, "{planned} {measured}");
}
