//! A run that was killed, stopped or restarted ends like an uninterrupted run.

use super::stops::{at_a_moment, send, until};
use crate::world::{Dice, FULL, LORA, World, content, kills, mixture, ran, recipe, reference};
use rustix::process::Signal;
use serde_json::json;
use std::time::Duration;

/// Kills a run `times` times at random moments and resumes it with the arguments of the round. Some kills
/// hit the start, some hit a step. If a run completes first on a busy machine, the result must satisfy
/// `ended`, and the run starts over; so must the final run.
pub fn killed<'a>(
    w: &World,
    (run, times, seed): (&str, usize, u64),
    args: &dyn Fn(u64) -> Vec<&'a str>,
    ended: &dyn Fn(),
) {
    let (mut dice, mut kills) = (Dice(seed), 0);
    for round in 0..100 + 2 * times as u64 {
        if kills == times {
            break;
        }
        let mut child = w.start(&args(round));
        let done = w.events(run, "step").len();
        let later = if round % 3 == 2 { 0 } else { done + 1 + dice.below(4) as usize };
        if !until(&mut child, || w.events(run, "step").len() >= later) {
            ended();
            std::fs::remove_dir_all(w.path(run)).expect("a folder");
            continue;
        }
        std::thread::sleep(Duration::from_micros(dice.below(12_000)));
        child.kill().expect("killed");
        kills += usize::from(child.wait().expect("an end").code().is_none());
    }
    assert_eq!(kills, times, "the run is over before it can be killed");
    w.ok(&args(100));
    ended();
}

const STEPS: usize = 60;

/// Experts and routers in full, with a 4-bit base.
const FOUR_BIT: &str = r#"
quantize = "nf4"
[[train]]
modules = ["experts"]
experts = [0, 1]
method = "full"
[[train]]
modules = ["router"]
method = "full"
"#;

fn world(rules: &str) -> World {
    let w = World::new();
    w.config("tiny", if rules == FOUR_BIT { mixture() } else { json!({}) });
    w.write(
        "r.toml",
        recipe(rules).replace("steps = 6", &format!("steps = {STEPS}\nsave_every = 1\neval_every = 7")),
    );
    w.ok(&["run", "r.toml", "run.output=whole"]);
    w
}

#[track_caller]
fn same_end(w: &World, run: &str, result: &str) {
    assert!(w.read(&format!("whole/{result}")) == w.read(&format!("{run}/{result}")), "{result} differs");
    assert_eq!(w.steps("whole"), w.steps(run), "the metrics differ");
    assert_eq!(w.steps(run).len(), STEPS);
    let evals = |run| {
        w.events(run, "eval").iter().map(|e| (e["step"].clone(), e["loss"].clone())).collect::<Vec<_>>()
    };
    assert_eq!(evals("whole"), evals(run));
    let newest = format!("checkpoints/step-{STEPS:08}");
    for file in ["weights.safetensors", "optimizer.safetensors"] {
        let [a, b] = ["whole", run].map(|r| w.read(&format!("{r}/{newest}/{file}")));
        assert!(a == b, "{file} of the last checkpoint differs");
    }
}

/// A run on a 4-bit base resumes with offloaded or local states; checkpoints are the same.
#[test]
fn a_killed_and_resumed_run_ends_the_same() {
    let adapter = "adapter/adapter_model.safetensors";
    for (rules, result) in [(LORA, adapter), (FULL, "model/model.safetensors"), (FOUR_BIT, adapter)] {
        let w = world(rules);
        let offload = |round: u64| match (rules == FOUR_BIT, round % 2) {
            (true, 0) => "memory.offload=['optimizer']",
            _ => "memory.offload=[]",
        };
        let args = |round| vec!["run", "r.toml", "run.output=killed", "--resume", offload(round)];
        killed(&w, ("killed", kills(3) as usize, 7), &args, &|| same_end(&w, "killed", result));
        let folder = w.path("killed/checkpoints");
        let left: Vec<_> = content(&folder)
            .into_iter()
            .filter_map(|f| Some(f.0.strip_prefix(&folder).ok()?.display().to_string()))
            .collect();
        assert!(!left.iter().any(|f| f.starts_with('.') || f.contains("/.")), "{left:?}");
    }
}

#[test]
fn signals_save_a_checkpoint_first() {
    let w = world(LORA);
    let args = ["run", "r.toml", "run.output=stopped", "run.save_every=0", "--resume"];
    for (which, code) in [(Signal::TERM, 143), (Signal::INT, 130), (Signal::USR1, 138)] {
        let steps = || w.events("stopped", "step").len();
        // A late signal leaves too few steps for the next one.
        if steps() > STEPS / 2 {
            std::fs::remove_dir_all(w.path("stopped")).expect("removed");
        }
        let on = steps() + 3;
        let goes_on = || (on..STEPS).contains(&steps());
        let ended = at_a_moment(&w, ("stopped", &args), goes_on, |child| send(child, which));
        assert_eq!(ended, Some(code));
        let done = steps();
        assert_eq!(w.checkpoints("stopped").last(), Some(&format!("step-{done:08}")));
    }
    // Settings that affect the result may change only with `--accept-change`.
    let lr = "optimizer.lr=2e-2";
    let r = w.ft(&[&args[..], &[lr]].concat());
    assert_eq!(r.code, 2, "{}", r.err);
    assert!(
        r.err.contains("optimizer.lr: was 0.01, is 0.02") && r.err.contains("--accept-change"),
        "{}",
        r.err
    );
    let before = content(&w.path("stopped/checkpoints"));
    w.write("rows2.jsonl", crate::world::rows(40, 9));
    let r = w.ft(&[&args[..], &["data.train.0.source=rows2.jsonl"]].concat());
    assert!(r.code == 2 && r.err.contains("hash.data"), "{}", r.err);
    assert!(before == content(&w.path("stopped/checkpoints")));
    // Without `--resume`, nothing is overwritten.
    let r = w.ft(&args[..4]);
    assert!(r.code == 2 && r.err.contains("--overwrite"), "{}", r.err);
    assert!(before == content(&w.path("stopped/checkpoints")));

    // The same rows in a renamed file are the same data.
    w.write("renamed.jsonl", w.read("rows.jsonl"));
    w.ok(&[&args[..], &["data.train.0.source=renamed.jsonl"]].concat());
    same_end(&w, "stopped", "adapter/adapter_model.safetensors");
    let r = w.ok(&args);
    assert!(r.err.contains("finished already"), "{}", r.err);
    assert_eq!(r.out, "stopped/adapter\n");
    let r = w.ft(&[&args[..], &["--accept-change", "optimiser.lr"]].concat());
    assert!(r.code == 2 && r.err.contains("did you mean optimizer.lr?"), "{}", r.err);
    w.ok(&["run", "r.toml", "run.output=stopped", "--overwrite"]);
    same_end(&w, "stopped", "adapter/adapter_model.safetensors");
}

/// Choices of the first plan hold for the whole run, even if memory changes. Before the first checkpoint,
/// they are read from the resolved recipe in the run folder.
#[test]
fn a_resumed_run_keeps_its_micro_batches() {
    let w = World::new();
    // Layers so wide that the rows of a micro-batch matter.
    w.config("tiny", json!({"intermediate_size": 9000}));
    w.write("r.toml", recipe(LORA));
    let rows = |run: &str| {
        let text = w.text(&format!("{run}/recipe.toml"));
        let line = text.lines().find(|l| l.starts_with("micro_rows")).map(String::from);
        line.expect("micro_rows")
    };
    let args = |run: &'static str, budget: &'static str| {
        ["run", "r.toml", "run.micro_rows=auto", "run.save_every=2", "run.keep=9", run, budget]
    };
    let begun = "memory.budget=50MiB";
    w.ok(&args("run.output=whole", begun));
    let resumed = "memory.budget=8GiB";
    w.ok(&args("run.output=other", resumed));
    assert_ne!(rows("whole"), rows("other"), "the budgets choose alike");
    let leave = |left: usize, budget: &'static str| {
        w.ok(&[&args("run.output=again", budget)[..], &["--overwrite"]].concat());
        for name in w.checkpoints("again").into_iter().skip(left) {
            std::fs::remove_dir_all(w.path(&format!("again/checkpoints/{name}"))).expect("removed");
        }
        if left == 0 {
            // The state of a run killed before the first checkpoint.
            std::fs::remove_dir_all(w.path("again/adapter")).expect("removed");
            std::fs::remove_file(w.path("again/metrics.jsonl")).expect("removed");
        }
    };
    for left in [2, 0] {
        leave(left, begun);
        let r = w.ok(&[&args("run.output=again", resumed)[..], &["--resume"]].concat());
        assert!(
            r.err.contains(if left > 0 { "going on from" } else { "starting from the beginning" }),
            "{}",
            r.err
        );
        assert_eq!(rows("whole"), rows("again"));
        let adapter = "adapter/adapter_model.safetensors";
        assert!(w.read(&format!("whole/{adapter}")) == w.read(&format!("again/{adapter}")), "{left}");
    }
    // Without a checkpoint, a number that does not fit is chosen anew.
    leave(0, resumed);
    w.ok(&[&args("run.output=again", begun)[..], &["--resume"]].concat());
    assert_eq!(rows("whole"), rows("again"));
    // Another explicit number makes another run.
    let mut named = args("run.output=again", begun);
    named[2] = "run.micro_rows=1";
    std::fs::remove_dir_all(w.path("again/checkpoints/step-00000006")).expect("removed");
    let r = w.ft(&[&named[..], &["--resume"]].concat());
    assert!(r.code == 2 && r.err.contains("run.micro_rows: was "), "{}", r.err);
}

/// With less memory than at the start, a resumed run keeps the micro-batches and recomputes more, with the
/// same bits. If this does not suffice, it fails with an error and keeps the checkpoints.
#[test]
fn a_run_goes_on_with_less_memory() {
    let w = World::new();
    w.config("tiny", json!({"intermediate_size": 9000}));
    w.write("r.toml", recipe(LORA));
    let args = |more: &[&'static str]| {
        let all = ["run", "r.toml", "run.micro_rows=auto", "run.save_every=2", "run.keep=9"];
        all.iter().chain(more).map(|s| s.to_string()).collect::<Vec<String>>()
    };
    let ft = |args: &[String]| w.ft(&args.iter().map(String::as_str).collect::<Vec<_>>());
    let chosen = |run: &str, event: &str| w.events(run, event)[0]["plan"]["choices"].clone();
    for run in ["run.output=whole", "run.output=again"] {
        assert_eq!(ft(&args(&[run, "memory.budget=8GiB"])).code, 0);
    }
    let (began, adapter) = (chosen("whole", "start"), "adapter/adapter_model.safetensors");
    let rows = format!("run.micro_rows={}", began["micro_rows"]["value"]);
    assert_eq!(began["recompute"]["value"], 0, "{began}");
    // Minimum memory for the micro-batches.
    let p = w.ok(&["plan", "r.toml", &rows, "memory.recompute=all", "memory.budget=8GiB", "--json"]);
    let p = p.json();
    let least = p["device"]["total"].as_u64().expect("bytes");
    let go_on = |budget: u64| {
        let mut all = args(&["run.output=again", "--resume"]);
        all.push(format!("memory.budget={budget}"));
        ft(&all)
    };
    std::fs::remove_dir_all(w.path("again/checkpoints/step-00000006")).expect("removed");
    let before = content(&w.path("again"));
    let r = go_on(least / 2);
    assert!(r.code == 8 && r.err.contains("hint:"), "{} {}", r.code, r.err);
    assert!(content(&w.path("again")) == before, "what was saved changed");
    let r = go_on(least);
    assert!(r.code == 0 && r.err.contains("going on from"), "{} {}", r.code, r.err);
    let now = chosen("again", "resume");
    assert_eq!(now["micro_rows"]["value"], began["micro_rows"]["value"]);
    assert!(
        now["recompute"]["value"].as_u64() > Some(0) || now["recompute"]["norms"].as_u64() > Some(0),
        "{now}"
    );
    assert!(w.read(&format!("whole/{adapter}")) == w.read(&format!("again/{adapter}")));
}

#[test]
fn a_resume_takes_accepted_changes_alone() {
    let w = World::tiny(LORA);
    w.ok(&["run", "r.toml", "run.output=a"]);
    let more = ["run", "r.toml", "run.output=a", "--resume", "run.steps=8", "optimizer.lr=2e-2"];
    let r = w.ft(&more);
    assert!(r.code == 2 && r.err.contains("run.steps") && r.err.contains("optimizer.lr"), "{}", r.err);
    let r = w.ft(&[&more[..], &["--accept-change", "run.steps"]].concat());
    assert!(r.code == 2 && !r.err.contains("run.steps") && r.err.contains("optimizer.lr"), "{}", r.err);
    w.ok(&[&more[..], &["--accept-change", "run.steps", "--accept-change", "optimizer.lr"]].concat());
    assert_eq!(w.steps("a").len(), 8);
    assert_eq!(w.checkpoints("a").last().map(String::as_str), Some("step-00000008"));
    let fewer = ["run.steps=3", "optimizer.lr=2e-2", "--accept-change", "run.steps"];
    let r = w.ok(&[&more[..4], &fewer].concat());
    assert!(r.err.contains("this run is finished already, after step 8"), "{}", r.err);
}

/// A change of what is in the checkpoint cannot be accepted, and is not offered.
#[test]
fn a_change_of_shapes_is_not_offered() {
    let w = World::tiny(LORA);
    w.ok(&["run", "r.toml", "run.output=a", "run.steps=2"]);
    for (set, said, offered) in [
        ("optimizer.lr=2e-2", "optimizer.lr: was 0.01, is 0.02", true),
        ("lora.rank=5", "train.0.rank: was 4, is 5", false),
        ("train.0.dora=false", "train.0.dora: was true, is false", false),
        ("optimizer.name=adamw8bit", "optimizer.name: was ", false),
    ] {
        let r = w.ft(&["run", "r.toml", "run.output=a", "run.steps=2", "--resume", set]);
        assert!(r.code == 2 && r.err.contains(said) && r.err.contains("hint: put it back"), "{}", r.err);
        assert_eq!(r.err.contains("--accept-change"), offered, "{set}: {}", r.err);
    }
}

/// A result without its config or weights is written again from the last checkpoint.
#[test]
fn an_incomplete_result_is_written_again() {
    let of_adapter = ["o/adapter/adapter_config.json", "o/adapter/adapter_model.safetensors"];
    for (rules, files) in [(LORA, of_adapter), (FULL, ["o/model/config.json", "o/model/model.safetensors"])] {
        let w = World::tiny(rules);
        let run = ["run", "r.toml", "run.output=o", "run.steps=2"];
        w.ok(&run);
        let resume = || w.ok(&[&run[..], &["--resume"]].concat());
        let written_again = |file: &str, left: Option<&[u8]>| {
            let before = w.read(file);
            std::fs::remove_file(w.path(file)).expect("removed");
            left.into_iter().for_each(|bytes| w.write(file, bytes));
            let r = resume();
            assert!(r.err.contains("going on from") && w.read(file) == before, "{file}: {}", r.err);
        };
        for file in files {
            written_again(file, None);
        }
        written_again(files[1], Some(&w.read(files[1])[..100]));
        assert!(resume().err.contains("finished already"));
    }
}

/// From a folder where the relative path of its base leads nowhere.
#[test]
fn a_moved_run_names_the_keys_of_its_resumption() {
    let w = World::tiny(LORA);
    w.ok(&["run", "r.toml", "run.output=o", "run.steps=2"]);
    for file in ["rows.jsonl", "eval.jsonl"] {
        w.write(&format!("elsewhere/{file}"), w.read(file));
    }
    std::fs::rename(w.path("o"), w.path("elsewhere/o")).expect("moved");
    let resume = |more: &[&str]| {
        let mut command = w.command(&[&["run", "o/recipe.toml", "--resume"], more].concat());
        ran(command.current_dir(w.path("elsewhere")).output().expect("started"))
    };
    let real = |name: &str| w.path(name).canonicalize().expect("a folder");
    let base = format!("model.source={}", real("tiny").display());
    let output = format!("run.output={}", real("elsewhere/o").display());
    let r = resume(&[]);
    assert!(r.code == 2 && r.err.contains(&format!("hint: {base} {output}")), "{}", r.err);
    let r = resume(&[&base, &output]);
    assert!(r.code == 0 && r.err.contains("finished already"), "{}", r.err);
}

/// A moved model or adapter with the same content is no change; another model is one.
#[test]
fn a_resume_takes_a_moved_model_and_adapter() {
    let w = World::tiny("[lora]\nrank = 2\n[[train]]\nmodules = [\"attention\"]\n");
    w.ok(&["run", "r.toml", "run.output=first", "run.steps=2"]);
    let run = |steps: &str, set: &[&str], more: &[&str]| {
        w.ft(&[&["run", "r.toml", "run.output=a", steps], set, more].concat())
    };
    assert_eq!(run("run.steps=2", &["lora.init=first/adapter"], &[]).code, 0);
    w.copy(w.path("tiny"), "moved");
    w.copy(w.path("first/adapter"), "kept");
    let resume = ["--resume", "--accept-change", "run.steps"];
    let r = run("run.steps=4", &["lora.init=kept", "model.source=moved"], &resume);
    assert!(r.code == 0 && r.err.contains("going on from"), "{}", r.err);
    assert_eq!(w.steps("a").len(), 4);
    let r = run("run.steps=6", &["model.source=moved"], &resume);
    assert!(r.code == 2 && r.err.contains("lora.init: was ") && !r.err.contains("model.source"), "{}", r.err);
    w.config("moved", json!({"rms_norm_eps": 1e-5}));
    let r = run("run.steps=6", &["lora.init=kept", "model.source=moved"], &resume);
    assert!(r.code == 2 && r.err.contains("hash.model: was ") && !r.err.contains("lora.init"), "{}", r.err);
}

/// An overflowing loss: exit code 6, names of tensors and rows, and unchanged checkpoints.
#[test]
fn nothing_that_is_not_finite_reaches_a_weight() {
    let w = World::new();
    let good = reference("llama-embed-head/model");
    w.write("r.toml", recipe(LORA).replace("weights = \"random\"", ""));
    let source = format!("model.source={good}");
    w.ok(&["run", "r.toml", &source, "run.output=a", "run.steps=2", "run.save_every=1"]);
    let before = content(&w.path("a"));

    let files = ft::files::TensorFiles::open_model(good.as_ref()).expect("a model");
    let cpu = &candle_core::Device::Cpu;
    let name = "model.layers.1.mlp.up_proj.weight";
    let tensors: Vec<(String, candle_core::Tensor)> = files
        .names()
        .map(|n| {
            let t = files.tensor(n, candle_core::DType::F32, cpu).expect("a tensor");
            let t = if n == name { (t * 1e30).expect("huge") } else { t };
            (n.to_string(), t)
        })
        .collect();
    w.write("broken/config.json", std::fs::read(format!("{good}/config.json")).expect("a config"));
    ft::files::write_file(&w.path("broken/model.safetensors"), &tensors, &[]).expect("written");
    let more = [
        "run",
        "r.toml",
        "model.source=broken",
        "run.output=a",
        "run.steps=4",
        "run.save_every=1",
        "--resume",
    ];
    let accept =
        ["--accept-change", "model.source", "--accept-change", "hash.model", "--accept-change", "run.steps"];
    let r = w.ft(&[&more[..], &accept].concat());
    assert_eq!(r.code, 6, "{}", r.err);
    for said in ["step 3: the loss is not finite", "lora_A", "data.train.0 line ", "no weight was updated"] {
        assert!(r.err.contains(said), "{said:?} is not in {}", r.err);
    }
    let after = content(&w.path("a"));
    let only = |c: &[(std::path::PathBuf, Vec<u8>)], what: &str| -> Vec<_> {
        c.iter().filter(|f| f.0.starts_with(w.path(what))).cloned().collect()
    };
    for kept in ["a/checkpoints", "a/adapter"] {
        assert!(
            !only(&before, kept).is_empty() && only(&before, kept) == only(&after, kept),
            "{kept} changed"
        );
    }
    // An evaluation alone has no step number.
    let r = w.ft(&["eval", "r.toml", "model.source=broken"]);
    assert!(r.code == 6 && r.err.contains("not finite"), "{}", r.err);
}
