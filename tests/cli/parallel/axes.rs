//! Several axes of `[parallel]` together, by a seeded draw on 4 and 8 ranks: gradients, losses, norms and results are
//! those of one rank, and a run goes on in any other layout.

use super::tensor::QUANTIZED;
use crate::split::{self, apart, bits, ends, gradients_apart, gradients_of, with};
use crate::world::{Dice, World, merged, nightly, recipe, repository};
use serde_json::{Value, json};

/// Everything in full, with both losses of the routers.
const ALL: &str = r#"
[[train]]
modules = ["attention", "mlp", "experts", "router", "norms", "embedding", "head"]
method = "full"
[router]
aux_loss = 0.01
z_loss = 0.001
"#;

/// LoRA with dropout, drawn by token and column of the whole.
const ADAPTERS: &str = r#"
[lora]
rank = 2
dropout = 0.2
[[train]]
modules = ["attention", "mlp", "experts"]
[[train]]
modules = ["norms"]
method = "full"
"#;

const DENSE: &str = r#"
[[train]]
modules = ["attention", "mlp", "norms", "embedding", "head"]
method = "full"
"#;

/// Numbers of ranks by axis: pipeline, data, context, tensor; ranks that split the experts; the ZeRO stage.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Layout([usize; 4], usize, u8);

impl Layout {
    const ONE: Self = Self([1; 4], 1, 0);

    fn set(self) -> Vec<String> {
        let axes = ["pipeline", "data", "context", "tensor"].into_iter().zip(self.0);
        let all = axes.chain([("expert", self.1), ("zero", self.2.into())]);
        all.map(|(key, n)| format!("parallel.{key}={n}")).collect()
    }

    /// A layout of `ranks` ranks over two axes or more, beside those of data.
    fn draw(dice: &mut Dice, ranks: usize, mixture: bool) -> Self {
        loop {
            let mut axes = [1; 4];
            let mut left = ranks;
            while left > 1 {
                let axis = dice.below(4) as usize;
                // Three layers, four heads.
                if axes[axis] < [2, 8, 8, 4][axis] {
                    axes[axis] *= 2;
                    left /= 2;
                }
            }
            let stage = ranks / axes[0];
            let expert = if mixture { 1 << dice.below(3) } else { 1 };
            let zero = dice.below(4) as u8;
            let split = [axes[0], axes[2], axes[3], expert].iter().filter(|n| **n > 1).count();
            if split >= 2 && stage.is_multiple_of(expert) {
                return Self(axes, expert, zero);
            }
        }
    }
}

/// A mixture with a dense layer and a shared expert, or a dense model.
fn config(rules: &str, top_k: usize) -> Value {
    let heads = json!({"num_key_value_heads": 4, "max_position_embeddings": 512});
    let more = match rules {
        ALL | ADAPTERS => json!({"model_type": "qwen2_moe", "num_experts": 4, "num_experts_per_tok": top_k,
            "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24, "mlp_only_layers": [1],
            "norm_topk_prob": true}),
        QUANTIZED => json!({"hidden_size": 64, "intermediate_size": 256, "head_dim": 64}),
        _ => json!({"tie_word_embeddings": true}),
    };
    merged(heads, &more)
}

/// Two steps: of four micro-batches, and of one. Ranks have segments of rows of more than 128 tokens a rank, and none of
/// short ones.
fn world(rules: &str) -> World {
    let w = World::new();
    w.config("tiny", config(rules, 2));
    w.write("rows.jsonl", rows(&[300, 77, 512, 140, 390], 1));
    w.write("eval.jsonl", rows(&[333, 9, 256], 2));
    let run = "epochs = 1\nsave_every = 1\nkeep = 9\nclip = 0.5";
    let text = recipe(rules).replace("steps = 6", run).replace("micro_rows = 2", "micro_rows = 1");
    w.write("r.toml", text.replace("max_length = 32", "max_length = 512\npack = false"));
    w
}

fn rows(lengths: &[usize], seed: u64) -> String {
    let mut dice = Dice(seed);
    let mut row = |n: &usize| {
        let ids: Vec<u64> = (0..*n).map(|_| dice.below(64)).collect();
        let label = |(i, id): (usize, &u64)| if i % 4 == 2 { -100 } else { *id as i64 };
        let labels: Vec<i64> = ids.iter().enumerate().map(label).collect();
        format!("{}\n", json!({"input_ids": ids, "labels": labels}))
    };
    lengths.iter().map(&mut row).collect()
}

#[track_caller]
fn run(w: &World, name: &str, layout: Layout, set: &[&str]) -> Vec<Vec<u8>> {
    bits(w, name, &with(&layout.set(), set))
}

fn told(w: &World, run: &str) -> Vec<f64> {
    let of = |e: &Value| ["loss", "grad_norm", "aux_loss", "z_loss"].map(|key| e[key].as_f64());
    let steps = w.events(run, "step");
    steps.iter().flat_map(of).flatten().chain(split::evals(w, run)).collect()
}

/// Gradients, norms, losses, evaluations and results of a layout against one rank, in the run `one`.
#[track_caller]
fn compare(w: &World, layout: Layout, set: &[&str], what: &str) {
    let got = run(w, "run", layout, set);
    let first = |run: &str| gradients_of(w, run, "step-00000001");
    let far = gradients_apart(&first("run"), &first("one"), &format!("{what}{layout:?}"));
    // Sums of four parts round more often.
    let bar = if layout.0[2] * layout.0[3] > 2 { 2e-6 } else { 1e-6 };
    assert!(far <= bar, "{what}{layout:?}: all gradients are {far:.1e} apart");
    let (a, b) = (told(w, "run"), told(w, "one"));
    assert!(a.len() == b.len() && a.len() >= 5, "{what}{layout:?}: {a:?}, {b:?}");
    let near = |(a, b): (&f64, &f64)| (a - b).abs() <= 2e-6 * b.abs();
    assert!(a.iter().zip(&b).all(near), "{what}{layout:?}: {a:?}, {b:?}");
    let far = apart(&got[0], &ends(w, "one")[0]);
    assert!(far <= 1e-5, "{what}{layout:?}: results are {far:.1e} apart");
}

/// Each pair of axes, and triples, in full, with adapters and with a 4-bit base.
#[test]
fn axes_together_have_the_gradients_of_one_rank() {
    let (none, all) = (&["memory.recompute=none"][..], &["memory.recompute=all"][..]);
    let norms = &["memory.recompute=norms", "data.neftune=5"][..];
    let cases = [
        (ALL, [2, 2, 1, 1], 2, 0, none),
        (ALL, [2, 1, 2, 1], 1, 0, all),
        (ALL, [2, 1, 1, 2], 1, 0, none),
        (ALL, [1, 1, 2, 2], 1, 0, norms),
        (ALL, [1, 1, 1, 2], 2, 0, none),
        (ADAPTERS, [1, 2, 1, 2], 4, 3, all),
        (ADAPTERS, [2, 1, 2, 2], 2, 2, norms),
        (ADAPTERS, [2, 2, 2, 1], 4, 1, none),
        (DENSE, [2, 1, 2, 2], 1, 1, norms),
        (DENSE, [2, 2, 1, 2], 1, 3, all),
        (QUANTIZED, [2, 1, 2, 2], 1, 2, none),
        (QUANTIZED, [1, 1, 2, 4], 1, 3, norms),
    ];
    for rules in [ALL, ADAPTERS, DENSE, QUANTIZED] {
        let w = world(rules);
        for (_, axes, expert, zero, set) in cases.iter().filter(|c| c.0 == rules) {
            run(&w, "one", Layout::ONE, set);
            compare(&w, Layout(*axes, *expert, *zero), set, rules);
        }
    }
}

/// Drawn layouts: each has the results of one rank, and goes on from the checkpoint of the one before.
#[test]
fn drawn_layouts_train_as_one_rank_and_resume_one_another() {
    let (seed, count) = if nightly() { (7, 24) } else { (5, 3) };
    for rules in [ALL, ADAPTERS, DENSE] {
        let w = world(rules);
        run(&w, "one", Layout::ONE, &[]);
        let (mut dice, mut before) = (Dice(seed), Layout::ONE);
        for i in 0..count {
            let layout = Layout::draw(&mut dice, if i % 2 == 0 { 4 } else { 8 }, rules != DENSE);
            run(&w, "half", before, &[]);
            std::fs::remove_dir_all(w.path("half/checkpoints/step-00000002")).expect("removed");
            let got = run(&w, "half", layout, &["--resume"]);
            let far = apart(&got[0], &ends(&w, "one")[0]);
            assert!(far <= 1e-4, "{rules}{before:?} to {layout:?}: {far:.1e}");
            compare(&w, layout, &[], rules);
            before = layout;
        }
    }
}

/// Verbs work on the adapter of a layout with all axes.
#[test]
fn verbs_take_an_adapter_trained_over_all_axes() {
    let w = split::on_files(ADAPTERS, config(ADAPTERS, 2));
    run(&w, "one", Layout::ONE, &[]);
    run(&w, "run", Layout([2, 1, 2, 2], 4, 1), &[]);
    let loss = |of: &str| w.ok(&["eval", of, "--json"]).loss();
    let (want, near) = (loss("one"), |a: f64, b: f64| (a - b).abs() <= 1e-5 * b);
    assert!(near(loss("run"), want));
    w.ok(&["report", "run"]);
    w.ok(&["merge", "run", "--out", "merged"]);
    w.ok(&["export", "run", "--to", "peft-fused", "--out", "fused"]);
    let merged = ["eval", "r.toml", "model.source=merged", "--json"];
    assert!(near(w.ok(&merged).loss(), want));
}

/// Planned bytes are those that come. Each token goes to all experts, so that the spread is even.
#[test]
fn bytes_between_ranks_are_as_planned() {
    for (rules, axes, expert, zero) in [
        (ALL, [2, 2, 1, 1], 2, 0),
        (ALL, [2, 1, 2, 1], 1, 2),
        (ALL, [1, 1, 2, 2], 4, 3),
        (DENSE, [2, 1, 1, 2], 1, 0),
        (DENSE, [2, 1, 2, 2], 1, 3),
    ] {
        let w = world(rules);
        w.config("tiny", config(rules, 4));
        w.write("rows.jsonl", rows(&[512; 4], 1));
        for recompute in ["memory.recompute=none", "memory.recompute=all"] {
            let layout = Layout(axes, expert, zero);
            run(&w, "run", layout, &[recompute]);
            for key in ["wire_bytes", "wire_bytes_exchanged"] {
                split::as_planned(&w, "run", key, &format!("{rules}{layout:?} {recompute}"));
            }
        }
    }
}

/// Each pair in the table of docs/several-gpus.md is accepted.
#[test]
fn pairs_of_axes_in_the_docs_are_accepted() {
    let text = std::fs::read_to_string(repository().join("docs/several-gpus.md")).expect("the page");
    let cells =
        |line: &str| line.trim_matches('|').split('|').map(|c| c.trim().to_string()).collect::<Vec<_>>();
    let mut lines = text.lines().skip_while(|l| !l.starts_with("| | `context`"));
    let columns = cells(lines.next().expect("the head of the table"));
    let w = world(ALL);
    let mut pairs = 0;
    for row in lines.skip(1).take_while(|l| l.starts_with('|')).map(cells) {
        let (row, set) = (row[0].clone(), row.into_iter().zip(&columns).skip(1));
        for (_, column) in set.filter(|(cell, _)| cell.starts_with("works")) {
            let key = |name: &str| {
                format!("parallel.{}=2", name.split(',').next().unwrap_or(name).replace('`', ""))
            };
            let mut keys = vec![key(&row), key(column)];
            if keys == ["parallel.data=2", "parallel.expert=2"]
                || !keys.iter().any(|k| k.ends_with("expert=2"))
            {
                keys.push("parallel.zero=1".into());
            }
            if keys.contains(&"parallel.pipeline=2".into()) && keys.contains(&"parallel.expert=2".into()) {
                keys.push("parallel.data=2".into());
            }
            let set: Vec<&str> = keys.iter().map(String::as_str).collect();
            w.ok(&[&["plan", "r.toml"][..], &set].concat());
            pairs += 1;
        }
    }
    assert_eq!(pairs, 10);
}
