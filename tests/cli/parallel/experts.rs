//! Experts over ranks (`parallel.expert`): results agree with one rank, and do not depend on sharding.

use crate::split::{self, apart, bits, gradients, gradients_apart, told, with};
use crate::world::{Dice, World, alternate, content, merged, mixture};
use serde_json::{Value, json};

const ALL: &str = r#"
[[train]]
modules = ["attention", "experts", "router", "norms", "embedding", "head"]
method = "full"
[router]
aux_loss = 0.01
z_loss = 0.001
"#;

/// LoRA of several kinds with dropout: experts draw it by the token of the step.
const ADAPTERS: &str = r#"
[lora]
rank = 2
dropout = 0.2
[[train]]
modules = ["experts"]
[[train]]
modules = ["attention"]
rank = 3
"#;

/// DoRA on experts of a 4-bit base.
const DORA: &str = r#"
quantize = "nf4"
[lora]
rank = 2
dora = true
[[train]]
modules = ["experts", "attention"]
"#;

/// The experts of one rank alone train: the first two of four in full, on a 4-bit base.
const CHOSEN: &str = r#"
quantize = "nf4"
[[train]]
modules = ["experts"]
experts = [0, 1]
method = "full"
"#;

/// DoRA beside LoRA, whose result has magnitudes without effect of all experts.
const MIXED: &str = r#"
[lora]
rank = 2
[[train]]
modules = ["attention"]
dora = true
[[train]]
modules = ["experts"]
"#;

const ROUTER: &str = r#"
[[train]]
modules = ["router"]
method = "full"
[router]
aux_loss = 0.01
"#;

const EXPERTS: &str = r#"
[[train]]
modules = ["experts"]
method = "full"
"#;

fn world(rules: &str) -> World {
    split::world_of(rules, mixture())
}

fn layout(data: usize, expert: usize, zero: u8) -> [String; 3] {
    split::layout("expert", data, expert, zero)
}

/// Gradients of every tensor and their norm are those of one rank, in every layout.
#[test]
fn gradients_are_those_of_one_rank() {
    for rules in [ALL, ADAPTERS, DORA, CHOSEN, ROUTER, EXPERTS] {
        let w = world(rules);
        let one_step = ["run.epochs=0.1", "run.save_every=1"];
        bits(&w, "one", &one_step);
        let want = gradients(&w, "one");
        assert!(!want.is_empty());
        let norm = |run: &str| w.events(run, "step")[0]["grad_norm"].as_f64().expect("a norm");
        for (data, expert, set) in [
            (2, 2, &["memory.recompute=none"][..]),
            (4, 2, &["memory.recompute=all"]),
            (4, 4, &["memory.recompute=feed_forward"]),
            (2, 2, &["memory.recompute=norms"]),
        ] {
            let (own, run) = (layout(data, expert, 0), format!("run-{data}-{expert}"));
            bits(&w, &run, &[&with(&own, set)[..], &one_step].concat());
            let far = (norm(&run) / norm("one") - 1.0).abs();
            assert!(far <= 1e-6, "{rules}{own:?}: the norm is {far:.1e} apart");
            let far = gradients_apart(&gradients(&w, &run), &want, &format!("{rules}{own:?} {set:?}"));
            assert!(far <= 1e-6, "{rules}{own:?} {set:?}: all gradients are {far:.1e} apart");
        }
    }
}

/// Sharding changes no bit at a fixed layout of experts; losses and results are those of one rank. The last step has
/// two micro-batches: of four ranks, two are idle.
#[test]
fn experts_over_ranks_train_as_one() {
    let cases = [
        (ALL, &["memory.recompute=1"][..]),
        (ADAPTERS, &[]),
        (DORA, &["memory.recompute=norms"]),
        (CHOSEN, &["memory.offload=['optimizer']"]),
        (MIXED, &[]),
    ];
    for (at, (rules, set)) in cases.into_iter().enumerate() {
        let w = world(rules);
        let one = bits(&w, "one", set);
        for (i, (data, expert)) in [(2, 2), (4, 2), (4, 4)].into_iter().enumerate() {
            let want = bits(&w, "first", &with(&layout(data, expert, 0), set));
            let far = apart(&want[0], &one[0]);
            eprintln!("{data} ranks, experts over {expert}: {far:.1e} from one rank");
            assert!(far <= 1e-5, "{rules}{data} {expert}: {far:.1e}");
            let far = apart(&want[2], &one[2]);
            assert!(far <= 1e-5, "{rules}{data} {expert}: results are {far:.1e} apart");
            for zero in alternate(at + i, 1..=3) {
                let own = layout(data, expert, zero);
                assert!(bits(&w, "run", &with(&own, set)) == want, "{rules}{own:?}");
                assert_eq!(w.steps("run"), w.steps("first"), "{own:?}");
            }
            let loss = |run: &str| told(&w, run, "step", "loss");
            let pairs = loss("first").into_iter().zip(loss("one"));
            assert!(pairs.clone().count() == 12 && pairs.clone().all(|(a, b)| (a - b).abs() <= 1e-6 * b));
            assert_eq!(split::evals(&w, "first").len(), split::evals(&w, "one").len());
        }
    }
}

/// A checkpoint is of logical tensors: one of any layout goes on in any other, with the bits of that layout.
#[test]
fn a_run_goes_on_in_another_layout() {
    let w = world(ALL);
    let layouts = [layout(1, 1, 0), layout(2, 2, 3), layout(4, 2, 1), layout(4, 4, 2)];
    for (at, from) in layouts.iter().enumerate() {
        bits(&w, "run", &with(from, &[]));
        split::keep_first(&w, "run");
        let begun = content(&w.path("run"));
        let mut ways = Vec::new();
        for (to, zero) in alternate(at + 1, &layouts).flat_map(|to| [(to, 0), (to, 3)]) {
            std::fs::remove_dir_all(w.path("run")).expect("removed");
            begun.iter().for_each(|(path, bytes)| w.write(&path.to_string_lossy(), bytes));
            let saved = w.read("run/checkpoints/step-00000004/weights.safetensors");
            let to = [to[0].clone(), to[1].clone(), format!("parallel.zero={zero}")];
            ways.push((to.clone(), bits(&w, "run", &with(&to, &["--resume"]))));
            assert!(w.read("run/checkpoints/step-00000004/weights.safetensors") == saved);
        }
        for pair in ways.chunks(2) {
            assert!(pair[0].1 == pair[1].1, "{from:?} to {:?}", pair[0].0);
        }
    }
}

/// Memory of experts falls as 1 / ranks, in the plan.
#[test]
fn experts_take_their_part_of_memory() {
    let w = world(ALL);
    let of = |data: usize, expert: usize| {
        let own = layout(data, expert, 0);
        w.ok(&[&["plan", "r.toml", "--json"][..], &with(&own, &[])].concat()).json()["device"].clone()
    };
    let trained = |v: &Value| v["gradients"].as_f64().expect("gradients");
    let (one, two, four) = (of(4, 1), of(4, 2), of(4, 4));
    // what is not of experts stays
    let experts = |a: &Value, b: &Value| trained(a) - trained(b);
    let apart = experts(&one, &two) / experts(&two, &four) - 2.0;
    assert!(apart.abs() <= 0.02, "{apart}");
}

/// Each token goes to all experts, so that the spread is even: planned bytes are those that come.
#[test]
fn bytes_between_ranks_are_as_planned() {
    let w = split::world_of(ALL, merged(mixture(), &json!({"num_experts_per_tok": 4})));
    let mut dice = Dice(3);
    let row = |d: &mut Dice| {
        let ids: Vec<u64> = (0..16).map(|_| d.below(64)).collect();
        format!("{}\n", json!({"input_ids": ids, "labels": ids}))
    };
    w.write("rows.jsonl", (0..40).map(|_| row(&mut dice)).collect::<String>());
    for (data, expert, zero) in [(2, 2, 0), (4, 2, 3), (4, 4, 2)] {
        for recompute in ["memory.recompute=none", "memory.recompute=all"] {
            let own = layout(data, expert, zero);
            bits(&w, "run", &with(&own, &[recompute]));
            split::as_planned(&w, "run", "wire_bytes", &format!("{own:?} {recompute}"));
        }
    }
}

/// With projected gradients, the weights and states of a step are those of one rank, and a run goes on on one. Later steps
/// may differ by more: a basis follows from near singular values.
#[test]
fn projected_gradients_of_experts_are_those_of_one_rank() {
    let w = world(ALL);
    let set = ["optimizer.name=galore", "optimizer.galore_rank=4", "run.epochs=0.1", "run.save_every=1"];
    let one = bits(&w, "one", &set);
    for (data, expert) in [(2, 2), (4, 4)] {
        let got = bits(&w, "run", &with(&layout(data, expert, 0), &set));
        let far = apart(&got[0], &one[0]);
        assert!(far <= 1e-5, "{data} {expert}: {far:.1e}");
        assert_eq!(got[1].len(), one[1].len(), "{data} {expert}: other states");
    }
    let more = ["run.epochs=0.2", "--resume", "--accept-change", "run.epochs"];
    w.ok(&[&["run", "r.toml", "run.output=run"], &set[..2], &more].concat());
}

/// Processes have the bits of threads: the owners of experts tell the first rank what the result needs of these.
#[test]
fn processes_have_the_bits_of_threads() {
    let w = world(MIXED);
    let own = layout(2, 2, 0);
    let set = with(&own, &["lora.init=pissa", "run.epochs=0.3"]);
    assert!(split::processes(&w, 2, "processes", &set) == bits(&w, "threads", &set));
}

/// A process that dies is named, and ends all with exit code 7.
#[test]
fn a_lost_owner_of_experts_is_named() {
    let w = world(EXPERTS);
    let said = split::lost(&w, &with(&layout(2, 2, 0), &[]));
    assert!(said.contains("its process is gone"), "{said}");
}

/// What ranks cannot split is refused by name.
#[test]
fn experts_that_ranks_cannot_split_are_refused() {
    let w = world(EXPERTS);
    for (set, says) in [
        (&["parallel.data=3", "parallel.expert=3", "run.batch_rows=6"][..], "4 experts"),
        (&["parallel.data=2", "parallel.expert=4"], "parallel.expert"),
        (&["parallel.data=2", "parallel.expert=2", "generate.samples=2"], "generate.samples"),
    ] {
        for verb in ["run", "check"] {
            split::refused(&w, verb, set, says);
        }
    }
    // On CUDA, known without a card.
    let drops = world(ADAPTERS);
    for (set, says) in [
        (["parallel.context=2", "model.quantize=none"], "dropout in adapters of experts on a GPU"),
        (["memory.dequantize=per_layer", "model.quantize=nf4"], "is not built for experts on CUDA"),
    ] {
        for verb in ["check", "plan"] {
            split::refused(&drops, verb, &[&["run.device=cuda"][..], &set].concat(), says);
        }
    }
    w.config("tiny", json!({"model_type": "qwen3"}));
    for verb in ["run", "check"] {
        let r = w.ft(&[verb, "r.toml", "run.output=none", "parallel.data=2", "parallel.expert=2"]);
        assert!(r.code == 2 && r.err.contains("parallel.expert"), "{}", r.err);
        assert!(!w.path("none").exists());
    }
}
