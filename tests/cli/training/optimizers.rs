//! Optimizers with special states: compared with published implementations, and independent of sharding and
//! offloading.

use crate::runs::resume::killed;
use crate::split::{bits, ends, told};
use crate::world::{
    FULL, LORA, World, alternate, apart, kills, merged, mixture, recipe, repository, rows_of,
};
use candle_core::{DType, Device};
use ft::files::TensorFiles;
use serde_json::{Value, json};

const EIGHT_BIT: &str = "optimizer.name=adamw8bit";
/// LoRA always has master weights; modules in full may have none.
const MIXED: &str = r#"
[lora]
rank = 64
[[train]]
modules = ["attention"]
[[train]]
modules = ["mlp", "norms", "head"]
method = "full"
"#;
const BF16: &[&str] = &["model.dtype=bf16"];

/// A recipe that trains the model of a fixture in full, like the script of the fixture, for as many steps.
fn published(fixture: &str) -> (World, Value) {
    let w = World::new();
    let folder = repository().join("tests/fixtures").join(fixture);
    let log: Value = serde_json::from_slice(&std::fs::read(folder.join("trajectory.json")).expect("a file"))
        .expect("JSON");
    w.write("rows.jsonl", rows_of(&folder));
    let steps = log["full"].as_array().expect("steps");
    // Peak learning rate, after the warm-up.
    let lr = steps.iter().filter_map(|s| s["lr"].as_f64()).fold(0.0, f64::max);
    let text = recipe(FULL)
        .replace("source = \"tiny\"\nweights = \"random\"", &format!("source = {:?}", folder.join("model")))
        .replace("max_length = 32", "max_length = 64\npack = false\nshuffle = false\nmask = \"none\"")
        .replace("steps = 6", &format!("steps = {}", steps.len()))
        .replace("lr = 1e-2", &format!("lr = {lr:e}\ndecay = \"all\""));
    w.write("r.toml", text);
    (w, log)
}

/// Maximum distances of losses, gradient norms and final weights from a fixture.
#[track_caller]
fn off(w: &World, run: &str, fixture: &str, log: &Value) -> f64 {
    let steps = w.events(run, "step");
    let want = log["full"].as_array().expect("steps");
    assert_eq!(steps.len(), want.len());
    let mut worst = 0f64;
    for (got, want) in steps.iter().zip(want) {
        for key in ["loss", "grad_norm", "lr"] {
            let [got, want] = [got, want].map(|e| e[key].as_f64().expect("a number"));
            worst = worst.max((got / want - 1.0).abs());
        }
    }
    let open = |path: std::path::PathBuf| TensorFiles::open_file(&path).expect("tensors");
    let expected = open(repository().join("tests/fixtures").join(fixture).join("final.safetensors"));
    let model = open(w.path(&format!("{run}/model/model.safetensors")));
    for name in expected.names() {
        let get = |f: &TensorFiles| f.tensor(name, DType::F32, &Device::Cpu).expect("a tensor");
        worst = worst.max(apart(&get(&model), &get(&expected)));
    }
    eprintln!("{fixture}: {run} is within {worst:.1e}");
    worst
}

/// A world with a model that has some large tensors.
fn world(rules: &str) -> World {
    let w = World::new();
    w.config(
        "tiny",
        json!({"hidden_size": 68, "intermediate_size": 100, "num_hidden_layers": 2, "vocab_size": 80}),
    );
    let text =
        recipe(rules).replace("micro_rows = 2", "micro_rows = 1").replace("steps = 6", "steps = 6\nkeep = 9");
    w.write("r.toml", text.replace("max_length = 32", "max_length = 32\npack = false"));
    w
}

/// GaLore with the settings of the fixture.
const GALORE: &[&str] = &[
    "optimizer.name=galore",
    "optimizer.galore_rank=8",
    "optimizer.galore_gap=6",
    "optimizer.galore_scale=0.25",
];

/// Twenty steps, with four projector updates, agree with a plain implementation of the authors' algorithm.
#[test]
fn low_rank_gradients_train_as_in_galore() {
    let (w, log) = published("galore");
    w.ok(&[&["run", "r.toml", "run.output=out"][..], GALORE].concat());
    assert!(off(&w, "out", "galore", &log) <= 1e-4);
    w.ok(&["run", "r.toml", "run.output=adamw"]);
    assert!(off(&w, "adamw", "galore", &log) > 1e-3);
    // A checkpoint holds projectors, and moments of the projected shape.
    let newest = w.checkpoints("out").pop().expect("a checkpoint");
    let held = TensorFiles::open_file(&w.path(&format!("out/checkpoints/{newest}/optimizer.safetensors")));
    let held = held.expect("tensors");
    let shape = |name: &str| held.info(name).expect("a tensor").shape.clone();
    assert_eq!(shape("model.layers.0.mlp.up_proj.weight.projector"), [68, 8]);
    assert_eq!(shape("model.layers.0.mlp.up_proj.weight.exp_avg"), [100, 8]);
    assert_eq!(shape("model.layers.0.mlp.down_proj.weight.exp_avg"), [8, 100]);
    assert_eq!(shape("model.embed_tokens.weight.exp_avg"), [100, 68]);
    let projected: Vec<&str> =
        log["projected"].as_array().expect("names").iter().filter_map(Value::as_str).collect();
    let mut found: Vec<&str> = held.names().filter_map(|n| n.strip_suffix(".projector")).collect();
    found.sort_unstable();
    assert_eq!(found, projected);
}

/// In the backward pass, on several ranks, in bf16, with 8-bit moments, and after a resume: the same bits.
#[test]
fn low_rank_gradients_have_the_same_bits_everywhere() {
    for (name, rank, more) in [
        ("galore", 8, &[][..]),
        ("galore", 8, &["model.dtype=bf16"]),
        ("galore8bit", 60, &[]),
        ("galore8bit", 60, BF16),
    ] {
        let w = world(FULL);
        let set = [
            format!("optimizer.name={name}"),
            format!("optimizer.galore_rank={rank}"),
            "optimizer.galore_gap=4".into(),
            "run.save_every=3".into(),
        ];
        let set: Vec<&str> = set.iter().map(String::as_str).chain(more.iter().copied()).collect();
        let run = |name: &str, more: &[&str]| bits(&w, name, &[&set[..], more].concat());
        let want = run("one", &[]);
        std::fs::remove_dir_all(w.path("one/checkpoints/step-00000006")).expect("removed");
        assert!(run("one", &["--resume"]) == want, "{more:?}: other bits after a resume");
        let at_once = ["run.clip=0", "run.batch_rows=1", "run.micro_rows=1"];
        let plain = run("plain", &at_once);
        let inside = run("inside", &[&at_once[..], &["optimizer.in_backward=true"]].concat());
        assert!(plain == inside, "{more:?}: other bits in the backward pass");
        let two = run("two", &["parallel.data=2"]);
        assert!(run("four", &["parallel.data=4"]) == two, "{more:?}: other bits on more ranks");
    }
    let w = world(FULL);
    for (set, said) in [
        (&["parallel.data=2", "parallel.zero=1"][..], "not built yet"),
        (&["memory.offload=['optimizer']"], "not built yet"),
        (&["train=[{modules=['mlp']}]"], "no rule trains any"),
    ] {
        let r = w.ft(&[&["check", "r.toml"][..], GALORE, set].concat());
        assert!(r.code == 2 && r.err.contains(said), "{set:?}: {}", r.err);
    }
    let r = w.ft(&["check", "r.toml", "optimizer.galore_rank=4"]);
    assert!(r.code == 2 && r.err.contains("does nothing"), "{}", r.err);
}

/// Twenty steps agree with bitsandbytes.
#[test]
fn eight_bit_moments_train_as_in_bitsandbytes() {
    let (w, log) = published("adamw8bit");
    w.ok(&["run", "r.toml", "run.output=out", EIGHT_BIT]);
    assert!(off(&w, "out", "adamw8bit", &log) <= 1e-4);
    // f32 moments give other values.
    w.ok(&["run", "r.toml", "run.output=wide"]);
    assert!(off(&w, "wide", "adamw8bit", &log) > 1e-3);
    // A checkpoint holds codes for 8-bit moments.
    let newest = w.checkpoints("out").pop().expect("a checkpoint");
    let held = TensorFiles::open_file(&w.path(&format!("out/checkpoints/{newest}/optimizer.safetensors")));
    let held = held.expect("tensors");
    let quantized: Vec<&str> =
        log["quantized"].as_array().expect("names").iter().filter_map(Value::as_str).collect();
    let coded: Vec<&str> = held.names().filter_map(|n| n.strip_suffix(".exp_avg_sq.absmax")).collect();
    assert_eq!(coded, quantized);
}

/// With any offloading and sharding, and after a resume with other ranks: the same bits.
#[test]
fn eight_bit_moments_have_the_same_bits_everywhere() {
    let cases = [
        (FULL, &[][..]),
        (FULL, BF16),
        (FULL, &["model.dtype=bf16", "optimizer.master=f32"]),
        (FULL, &["model.dtype=f16", "optimizer.master=none"]),
        (MIXED, BF16),
        (MIXED, &["model.dtype=bf16", "train.0.dora=true"]),
        (LORA, &["lora.rank=64", "train.1.rank=70"]),
    ];
    for (at, (rules, set)) in cases.into_iter().enumerate() {
        let w = world(rules);
        let run = |name: &str, more: &[&str]| {
            bits(&w, name, &[set, &[EIGHT_BIT, "run.save_every=3"], more].concat())
        };
        let offload = "memory.offload=['optimizer']";
        assert!(run("one", &[]) == run("host", &[offload]), "{set:?}");
        let want = run("2-0", &["parallel.data=2"]);
        let threads = [&["run", "r.toml", "run.output=2-0", "--overwrite", "parallel.data=2"], set].concat();
        let mut c = w.command(&[&threads[..], &[EIGHT_BIT, "run.save_every=3"]].concat());
        assert!(c.env("RAYON_NUM_THREADS", "1").output().expect("a run").status.success());
        assert!(ends(&w, "2-0") == want, "{set:?}: one thread");
        for (ranks, zero) in alternate(at, [(2, 1), (2, 2), (2, 3), (4, 0), (4, 1)]).chain([(4, 3)]) {
            let name = format!("{ranks}-{zero}");
            let parallel = [format!("parallel.data={ranks}"), format!("parallel.zero={zero}")];
            assert!(
                run(&name, &[&parallel[0], &parallel[1]]) == want,
                "{set:?}: {ranks} ranks, stage {zero}"
            );
        }
        std::fs::remove_dir_all(w.path("4-3/checkpoints/step-00000006")).expect("removed");
        let back = run("4-3", &["--resume", "parallel.data=2", "parallel.zero=2", offload]);
        assert!(back == want, "{set:?}: after a resume");
    }
}

/// Without f32 master weights, a bf16 run stays close to a run with them: within the error of rounding
/// every weight at every step, small relative to the change by training. This holds for f32 moments and for
/// GaLore, too.
#[test]
fn weights_without_masters_train_as_those_with_them() {
    let w = world(FULL);
    for (name, more) in [("adamw8bit", &[][..]), ("adamw", &[]), ("galore", &["optimizer.galore_rank=8"])] {
        let run = |master: &str| -> (Vec<f64>, TensorFiles) {
            let run = format!("{name}-{master}");
            let own = [format!("optimizer.name={name}"), format!("optimizer.master={master}")];
            let set = ["model.dtype=bf16", "run.steps=30", "optimizer.lr=1e-3", &own[0], &own[1]];
            bits(&w, &run, &[&set[..], more].concat());
            let losses = told(&w, &run, "step", "loss");
            let newest = w.checkpoints(&run).pop().expect("a checkpoint");
            let held = w.path(&format!("{run}/checkpoints/{newest}/weights.safetensors"));
            (losses, TensorFiles::open_file(&held).expect("tensors"))
        };
        let ((kept, with), (bare, without)) = (run("f32"), run("none"));
        assert_eq!(kept[0], bare[0]);
        // a single step's loss is noisy
        let end = |losses: &[f64]| losses[20..].iter().sum::<f64>() / 10.0;
        let (fallen, apart) = (kept[0] - end(&kept), (end(&kept) - end(&bare)).abs());
        assert!(fallen > 0.1 && apart < 0.02 * fallen, "{name}: {kept:?}\n{bare:?}");
        // Without stochastic rounding, the values differ.
        assert_ne!(kept[29], bare[29]);
        // A checkpoint has the stored dtype.
        for (files, dtype) in [(&with, "F32"), (&without, "BF16")] {
            for name in files.names() {
                assert_eq!(format!("{:?}", files.info(name).expect("a tensor").dtype), dtype, "{name}");
            }
        }
    }
}

/// A resume cannot silently add or drop master weights.
#[test]
fn a_resume_keeps_its_master_weights() {
    let w = world(FULL);
    let set = ["run", "r.toml", "run.output=out", "model.dtype=bf16", "run.save_every=3"];
    w.ok(&[&set[..], &["optimizer.master=none"]].concat());
    std::fs::remove_dir_all(w.path("out/checkpoints/step-00000006")).expect("removed");
    let r = w.ft(&[&set[..], &["--resume"]].concat());
    assert!(r.code != 0 && r.err.contains("optimizer.master: was none, is (not set)"), "{}", r.err);
    w.ok(&[&set[..], &["--resume", "--accept-change", "optimizer.master"]].concat());
    // f32 weights are their own master weights.
    for (name, master) in [("a", "none"), ("b", "f32")] {
        let own = [format!("run.output={name}"), format!("optimizer.master={master}")];
        w.ok(&["run", "r.toml", &own[0], &own[1]]);
    }
    assert!(ends(&w, "a") == ends(&w, "b"));
    let lora = LORA.replace("modules = [\"norms\"]\nmethod = \"full\"", "modules = [\"head\"]");
    let r = world(&lora).ft(&["check", "r.toml", "optimizer.master=none"]);
    let said = r.out + &r.err;
    assert!(r.code == 2 && said.contains("no rule trains anything so"), "{said}");
}

/// A run that is killed and resumed ends like an uninterrupted run.
#[test]
fn eight_bit_moments_are_killed_and_resumed() {
    let w = world(FULL);
    let longer = [EIGHT_BIT, "run.steps=24", "run.save_every=1"];
    let whole = bits(&w, "whole", &longer);
    let args = |_| [&["run", "r.toml", "run.output=killed", "--resume"][..], &longer].concat();
    killed(&w, ("killed", kills(2) as usize, 3), &args, &|| assert!(ends(&w, "killed") == whole));
}

/// Updates in the backward pass give the same bits as updates at the end of a step.
#[test]
fn updates_in_the_backward_pass_have_the_same_bits() {
    let tied = json!({"tie_word_embeddings": true});
    let experts =
        FULL.replace("\"mlp\"", "\"experts\", \"router\"") + "[router]\naux_loss = 0.01\nz_loss = 0.001\n";
    let offload = "memory.offload=['optimizer']";
    let cases = [
        (FULL, &tied, &["memory.recompute=none"][..]),
        (FULL, &tied, &["model.dtype=bf16", "optimizer.master=none"]),
        (FULL, &json!({}), &["model.dtype=bf16", "memory.recompute=1", EIGHT_BIT]),
        (FULL, &tied, &["model.dtype=bf16", offload, EIGHT_BIT]),
        (LORA, &tied, &["memory.recompute=norms"]),
        (&*experts, &mixture(), &["memory.recompute=feed_forward"]),
    ];
    for (at, (rules, config, set)) in cases.into_iter().enumerate() {
        let w = world(rules);
        let own = json!({"hidden_size": 68, "num_hidden_layers": 2, "vocab_size": 80});
        w.config("tiny", merged(own, config));
        for (ranks, stages) in [(1, vec![0]), (2, alternate(at, [0, 1, 2, 3]).collect())] {
            let micro = format!("run.micro_rows={}", 4 / ranks);
            let data = format!("parallel.data={ranks}");
            let common = [set, &["run.clip=0", "run.save_every=3", &micro, &data]].concat();
            let want = bits(&w, "end", &common);
            for zero in stages {
                let zero = format!("parallel.zero={zero}");
                let now = [&common[..], &["optimizer.in_backward=true", &zero]].concat();
                assert!(bits(&w, "now", &now) == want, "{now:?}");
                assert_eq!(w.steps("now"), w.steps("end"), "{now:?}");
                // A resume may switch between the two.
                std::fs::remove_dir_all(w.path("now/checkpoints/step-00000006")).expect("removed");
                assert!(bits(&w, "now", &[&common[..], &["--resume"]].concat()) == want, "{now:?}: resumed");
            }
        }
    }
}

/// Settings incompatible with updates in the backward pass are refused with a hint.
#[test]
fn settings_that_exclude_updates_in_the_backward_pass_are_refused() {
    let w = world(FULL);
    let set = ["check", "r.toml", "optimizer.in_backward=true"];
    let r = w.ft(&set);
    assert_eq!(r.code, 2, "{}", r.err);
    let said = r.out + &r.err;
    assert!(said.contains("write run.clip = 0") && said.contains("write run.micro_rows = 4"), "{said}");
    let r = w.ft(&[&set[..], &["run.clip=0", "run.micro_rows=4", "model.dtype=f16"]].concat());
    assert!(r.code == 2 && (r.out + &r.err).contains("in f16 a step whose gradients overflow"));
    let r = w.ft(&[&set[..], &["run.clip=0", "run.micro_rows='auto'"]].concat());
    assert!(r.code == 2 && (r.out + &r.err).contains("write run.micro_rows = 4"));
    // Non-finite values are reported the same way.
    for name in [&[][..], &["run.output=projected", "optimizer.name=galore", "optimizer.galore_gap=1"]] {
        let own = ["run.clip=0", "run.micro_rows=4", "optimizer.lr=1e30", "optimizer.in_backward=true"];
        let r = w.ft(&[&["run", "r.toml"][..], &own, name].concat());
        assert_eq!(r.code, 6, "{name:?}: {}", r.err);
        assert!(r.err.contains("are not saved"), "{name:?}: {}", r.err);
    }
}
