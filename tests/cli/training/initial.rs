//! Initial values of low-rank updates taken from the base, and noise on embeddings.

use crate::split::{ends, evals, on_files};
use crate::world::{LORA, World};
use serde_json::json;

const PLAIN: &str = "[lora]\nrank = 4\nalpha = 6\n[[train]]\nmodules = [\"attention\", \"mlp\", \"head\"]\n";
const EXPERTS: &str =
    "[lora]\nrank = 3\nalpha = 6\n[[train]]\nmodules = [\"experts\", \"router\", \"q_proj\"]\n";

/// LoRA with several ranks and scales, with DoRA and rsLoRA, and norms in full; no dropout.
fn mixed() -> String {
    LORA.replace("dropout = 0.1", "alpha = 6")
}

/// A model on disk, for merging and chat.
fn world(rules: &str, moe: bool) -> World {
    let extra = match moe {
        true => json!({"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2,
                       "moe_intermediate_size": 24, "norm_topk_prob": true, "decoder_sparse_step": 1}),
        false => json!({}),
    };
    on_files(rules, extra)
}

fn near(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-5 * b.abs()
}

/// The run starts at the loss of the base. The adapter, with twice the LoRA rank, reproduces the trained
/// model on the unmodified base, and so does the merged model. A run resumed in the middle ends with the
/// same bits.
#[test]
fn pissa_and_olora_adapters_fit_the_unmodified_base() {
    for (rules, moe) in [(mixed().as_str(), false), (PLAIN, false), (EXPERTS, true)] {
        let w = world(rules, moe);
        let base = w.ok(&["eval", "r.toml", "--json"]).loss();
        for init in ["pissa", "olora"] {
            let set = format!("lora.init={init}");
            let output = format!("run.output={init}");
            let r = w.ok(&["run", "r.toml", &set, &output]);
            let said = format!("{init}: A and B start from");
            assert!(r.err.contains(&said) && r.err.contains("twice the rank"), "{}", r.err);
            let losses = evals(&w, init);
            assert!(near(losses[0], base), "{init}: {} and {base}", losses[0]);
            assert!(!near(losses[1], base), "{init}: nothing was trained");
            let adapter = format!("{init}/adapter");
            let with = w.ok(&["eval", "r.toml", "--json", "--adapter", &adapter]).loss();
            assert!(near(with, losses[1]), "{init}: {with} and {}", losses[1]);
            let merged = format!("{init}-merged");
            w.ok(&["merge", &adapter, "--out", &merged]);
            let source = format!("model.source={merged}");
            let after = w.ok(&["eval", "r.toml", "--json", &source]).loss();
            assert!(near(after, losses[1]), "{init}: {after} and {}", losses[1]);

            let want = ends(&w, init);
            std::fs::remove_dir_all(w.path(&format!("{init}/checkpoints/step-00000006"))).expect("removed");
            w.ok(&["run", "r.toml", &set, &output, "--resume"]);
            assert!(ends(&w, init) == want, "{init}: other bits after a resume");
            let r = w.ft(&["run", "r.toml", &output, "--resume"]);
            assert!(r.code == 2 && r.err.contains("lora.init"), "{}", r.err);
        }
        // PiSSA scales A by singular values, OLoRA does not, so the first gradients differ.
        let first = |run: &str| w.events(run, "step")[0]["grad_norm"].as_f64().expect("a norm");
        assert!(!near(first("pissa"), first("olora")));
    }
}

/// With any sharding over several ranks, the bits are the same.
#[test]
fn ranks_begin_with_the_same_factors() {
    let w = world(&mixed(), false);
    for (init, more) in
        [("pissa", &[][..]), ("olora", &["model.dtype=bf16"]), ("pissa", &["model.quantize=nf4"])]
    {
        let run = |ranks: usize, zero: u8| {
            let name = format!("{init}-{}-{ranks}-{zero}", more.len());
            let set = [
                format!("lora.init={init}"),
                format!("run.output={name}"),
                format!("parallel.data={ranks}"),
                format!("parallel.zero={zero}"),
                "run.micro_rows=1".into(),
            ];
            let set: Vec<&str> = set.iter().map(String::as_str).chain(more.iter().copied()).collect();
            w.ok(&[&["run", "r.toml", "--overwrite"][..], &set[..]].concat());
            ends(&w, &name)
        };
        let want = run(2, 0);
        for (ranks, zero) in [(2, 1), (2, 2), (2, 3), (4, 3)] {
            assert!(run(ranks, zero) == want, "{init} {more:?}: {ranks} ranks, stage {zero}");
        }
    }
}

/// LoftQ reduces the quantization error: the run starts closer to the base than with NF4 alone, and the
/// adapter applies to the base in NF4.
#[test]
fn loftq_starts_closer_to_the_base_than_nf4() {
    let w = world(&PLAIN.replace(", \"head\"", "").replace("rank = 4", "rank = 24"), false);
    let base = w.ok(&["eval", "r.toml", "--json"]).loss();
    let nf4 = "model.quantize=nf4";
    w.ok(&["run", "r.toml", nf4, "run.output=nf4"]);
    w.ok(&["run", "r.toml", nf4, "lora.init=loftq", "run.output=loftq"]);
    let [plain, loftq] = ["nf4", "loftq"].map(|r| (evals(&w, r)[0] - base).abs());
    assert!(loftq < 0.5 * plain, "{loftq} and {plain} from {base}");
    let with = w.ok(&["eval", "r.toml", "--json", nf4, "--adapter", "loftq/adapter"]).loss();
    assert!(near(with, evals(&w, "loftq")[1]), "{with}");
    let r = w.ft(&["run", "r.toml", "lora.init=loftq", "run.output=x"]);
    assert!(r.code == 2 && r.err.contains("model.quantize"), "{}", r.err);
}

#[test]
fn unsupported_settings_of_lora_init_are_refused() {
    let w = world(PLAIN, false);
    w.config("tied", json!({"tie_word_embeddings": true}));
    let tied = ["model.source=tied", "model.weights=random", "lora.init=pissa"];
    for verb in ["check", "run"] {
        let r = w.ft(&[&[verb, "r.toml"][..], &tied].concat());
        assert!(r.code == 2 && r.err.contains("tie_word_embeddings"), "{verb}: {}", r.err);
    }
    w.ok(&["quantize", "made/model", "--out", "four"]);
    let r = w.ft(&["run", "r.toml", "model.source=four", "lora.init=olora"]);
    assert!(r.code == 2 && r.err.contains("4-bit already"), "{}", r.err);
    let cache = ["model.quantize=nf4", "model.cache=c", "lora.init=pissa"];
    let r = w.ft(&[&["check", "r.toml"][..], &cache].concat());
    assert!(r.code == 2 && r.err.contains("model.cache"), "{}", r.err);
    let r = w.ft(&["check", "r.toml", "lora.init=pissa", "train=[{modules=['norms'],method='full'}]"]);
    assert!(r.code == 2 && r.err.contains("does nothing"), "{}", r.err);
}

/// Noise applies in training only, follows the definition for any micro-batch and recompute setting, and
/// must be a valid number.
#[test]
fn noise_on_embeddings_is_the_same_however_a_step_is_walked() {
    let w = world(PLAIN, false);
    let run = |name: &str, set: &[&str]| {
        let output = format!("run.output={name}");
        w.ok(&[&["run", "r.toml", "data.neftune=5", &output][..], set].concat());
        ends(&w, name)
    };
    w.ok(&["run", "r.toml", "run.output=plain"]);
    let want = run("noise", &["memory.recompute=none"]);
    assert!(run("again", &["memory.recompute=all"]) == want);
    assert_eq!(evals(&w, "noise")[0], evals(&w, "plain")[0]);
    let loss = |run: &str| w.events(run, "step")[0]["loss"].as_f64().expect("a loss");
    assert!(!near(loss("noise"), loss("plain")), "no noise");
    // With other micro-batches, the documents are the same, but the order of sums differs.
    run("micro", &["run.micro_rows=1"]);
    assert!(near(loss("micro"), loss("noise")), "{} {}", loss("micro"), loss("noise"));
    let two = run("two", &["parallel.data=2"]);
    assert!(near(loss("two"), loss("noise")));
    assert!(run("two-3", &["parallel.data=2", "parallel.zero=3"]) == two);
    std::fs::remove_dir_all(w.path("noise/checkpoints/step-00000006")).expect("removed");
    w.ok(&["run", "r.toml", "data.neftune=5", "run.output=noise", "--resume"]);
    assert!(ends(&w, "noise") == want, "other bits after a resume");
    let r = w.ft(&["run", "r.toml", "data.neftune=6", "run.output=noise", "--resume"]);
    assert!(r.code == 2 && r.err.contains("data.neftune"), "{}", r.err);
    for bad in ["-1", "inf", "nan"] {
        let r = w.ft(&["check", "r.toml", &format!("data.neftune={bad}")]);
        assert!(r.code == 2 && r.err.contains("neftune"), "{bad}: {}", r.err);
    }
}
