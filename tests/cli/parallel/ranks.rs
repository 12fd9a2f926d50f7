//! Runs on several ranks: results do not depend on sharding, and agree with one rank.

use crate::runs::resume::killed;
use crate::split::{self, ADAPTERS, MIXTURE, apart, bits, ends, world};
use crate::world::{FULL, LORA, World, alternate, kills, repository};

/// Step number and metrics, as bits.
type Step = (u64, u64, u64, u64);

/// Losses, gradient norms and evaluations of a run, bit for bit.
fn told(w: &World, run: &str) -> (Vec<Step>, Vec<String>) {
    (w.steps(run), w.events(run, "eval").iter().map(|e| e["loss"].to_string()).collect())
}

/// Sharding and the number of ranks change no bit. One rank sums gradients within products, and agrees to
/// 1e-6.
#[test]
fn stages_and_ranks_have_the_same_bits() {
    let cases = [
        (FULL, &[][..]),
        (FULL, &["model.dtype=bf16", "memory.recompute=all"]),
        (LORA, &["memory.recompute=1", "memory.offload=['optimizer']"]),
        (MIXTURE, &["memory.recompute=feed_forward"]),
        (MIXTURE, &["memory.recompute=all", "model.dtype=bf16", "memory.offload=['optimizer']"]),
        (LORA, &["model.dtype=f16", "memory.recompute=none"]),
        (LORA, &["model.dtype=bf16", "memory.recompute=norms"]),
        (ADAPTERS, &[]),
        (ADAPTERS, &["model.dtype=bf16", "model.quantize=nf4"]),
    ];
    for (at, (rules, set)) in cases.into_iter().enumerate() {
        let w = world(rules);
        let run = |ranks: usize, zero: u8| {
            let parallel = [format!("parallel.data={ranks}"), format!("parallel.zero={zero}")];
            let set = [set, &[&*parallel[0], &*parallel[1]]].concat();
            bits(&w, &format!("run-{ranks}-{zero}"), &set)
        };
        let want = run(2, 0);
        for (ranks, zero) in alternate(at, [(2, 1), (2, 2), (2, 3), (4, 0), (4, 1), (4, 2), (4, 3)]) {
            assert!(run(ranks, zero) == want, "{set:?}: {ranks} ranks, stage {zero}");
            let name = format!("run-{ranks}-{zero}");
            let (steps, evals) = told(&w, &name);
            let (first, one) = told(&w, "run-2-0");
            assert_eq!(evals, one, "{set:?}");
            assert!(ranks == 4 || steps == first, "{set:?}: stage {zero} tells something else");
            // In f16, a step is repeated after an overflow.
            if !set.contains(&"model.dtype=f16") {
                split::as_planned(&w, &name, "wire_bytes", &format!("{set:?} {name}"));
            }
        }
        let one = run(1, 0);
        let half = set.iter().any(|s| s.contains("f16"));
        // In half precision, the last bit of a gradient may change a weight.
        let bar = if half { 2e-2 } else { 1e-6 };
        let far = apart(&want[0], &one[0]);
        eprintln!("{set:?}: {far:.1e} from one rank");
        assert!(far <= bar, "{set:?}: {far:.1e} from one rank");
        let loss = |run: &str| split::told(&w, run, "step", "loss");
        let pairs = loss("run-2-0").into_iter().zip(loss("run-1-0"));
        assert!(
            pairs.clone().count() == 12 && pairs.clone().all(|(a, b)| (a - b).abs() <= bar * b),
            "{set:?}"
        );
    }
}

/// A checkpoint does not depend on ranks: a run resumes on another number of ranks with the same bits.
#[test]
fn a_run_goes_on_with_other_ranks() {
    for rules in [FULL, LORA, MIXTURE] {
        let w = world(rules);
        let half: &[&str] = if rules == LORA { &[] } else { &["model.dtype=bf16"] };
        let set = |ranks: &'static str, zero: &'static str| [half, &[ranks, zero]].concat();
        let whole = bits(&w, "whole", &set("parallel.data=2", "parallel.zero=1"));
        let steps = w.steps("whole");
        for (ranks, zero) in [
            ("parallel.data=4", "parallel.zero=0"),
            ("parallel.data=4", "parallel.zero=2"),
            ("parallel.data=2", "parallel.zero=2"),
            ("parallel.data=4", "parallel.zero=3"),
        ] {
            bits(&w, "again", &set(ranks, zero));
            split::keep_first(&w, "again");
            let back = [&["--resume"][..], &set("parallel.data=2", "parallel.zero=1")].concat();
            assert!(bits(&w, "again", &back) == whole, "{ranks} {zero}");
            assert_eq!(w.steps("again").last(), steps.last());
        }
        // Down to one rank: the loaded values equal the saved ones.
        let back = [&["--resume"][..], &set("parallel.data=1", "parallel.zero=0")].concat();
        bits(&w, "again", &back);
        let first = |run: &str| w.read(&format!("{run}/checkpoints/step-00000004/weights.safetensors"));
        assert!(first("again") == first("whole"));
    }
}

/// A run killed at random moments, and resumed with other ranks and stages, ends like an uninterrupted run.
/// `FT_KILLS` sets the number of kills.
#[test]
fn a_run_killed_and_resumed_with_other_ranks_ends_the_same() {
    let w = world(FULL);
    let longer = ["run.epochs=4", "run.save_every=1"];
    let ranks = |round: u64| match round % 4 {
        0 => ["parallel.data=2", "parallel.zero=2"],
        1 => ["parallel.data=4", "parallel.zero=3"],
        2 => ["parallel.data=2", "parallel.zero=0"],
        _ => ["parallel.data=4", "parallel.zero=1"],
    };
    let whole = bits(&w, "whole", &[&longer[..], &ranks(1)].concat());
    let args =
        |round| [&["run", "r.toml", "run.output=killed", "--resume"][..], &longer, &ranks(round)].concat();
    killed(&w, ("killed", kills(2) as usize, 3), &args, &|| assert!(ends(&w, "killed") == whole));
}

/// An error on one rank ends the run as on a single rank: same exit code, before any update.
#[test]
fn a_diverged_run_ends_all_ranks() {
    let w = world(FULL);
    for zero in ["parallel.zero=2", "parallel.zero=3"] {
        let set = ["parallel.data=2", zero, "optimizer.lr=1e30", "run.clip=0"];
        let r = w.ft(&[&["run", "r.toml", "run.output=bad", "--overwrite"][..], &set].concat());
        assert_eq!(r.code, 6, "{}", r.err);
        assert_eq!(r.err.matches("error: ").count(), 1, "{}", r.err);
    }
}

/// With sharded weights, the first rank alone can generate and check the result. The result works like any
/// other: it can be trained further, evaluated and asked.
#[test]
fn sharded_weights_give_a_whole_result() {
    let w = World::new();
    let quickstart = repository().join("recipes/quickstart.toml").display().to_string();
    let at = |key: &str, file: &str| format!("{key}={}", repository().join("data").join(file).display());
    let found = [
        at("model.source", "model"),
        at("data.train.0.source", "quickstart/train.jsonl"),
        at("data.eval.0.source", "quickstart/eval.jsonl"),
    ];
    let mut set: Vec<&str> = found.iter().map(String::as_str).collect();
    set.extend(["run.steps=2", "run.batch_rows=4", "run.micro_rows=1", "run.eval_at_start=false"]);
    set.extend(["train.0.modules=['attention']", "train.0.dora=true", "run.eval_every=0"]);
    let adapter = |run: &str| w.read(&format!("{run}/adapter/adapter_model.safetensors"));
    let replies = |run: &str| {
        let replies: Vec<_> = w.events(run, "sample").iter().map(|e| e["reply"].to_string()).collect();
        assert_eq!(replies.len(), 2, "{run}");
        replies
    };
    let parallel = |zero: u8| ["parallel.data=2".to_string(), format!("parallel.zero={zero}")];
    for zero in [0, 3] {
        let (first, second) = (format!("first-{zero}"), format!("second-{zero}"));
        let own = parallel(zero);
        let own = [own[0].as_str(), own[1].as_str()];
        let out = format!("run.output={}", w.path(&first).display());
        w.ok(&[&["run", &quickstart, &out][..], &set, &own].concat());
        // And resumed from there.
        let (out, init) = (
            format!("run.output={}", w.path(&second).display()),
            format!("lora.init={}", w.path(&first).join("adapter").display()),
        );
        w.ok(&[&["run", &quickstart, &out, &init][..], &set, &own].concat());
    }
    for (split, whole) in [("first-3", "first-0"), ("second-3", "second-0")] {
        assert!(adapter(split) == adapter(whole), "{split}");
        assert_eq!(replies(split), replies(whole));
    }
    let asked = ["--prompt", "What colour is the sky?", "--max-tokens", "64"];
    let model = repository().join("data/model").display().to_string();
    let reply = w.ok(&[&["chat", &model, "--adapter", "second-3/adapter"][..], &asked].concat()).out;
    let said: String = serde_json::from_str(&replies("second-3")[1]).expect("a string");
    assert_eq!(reply.trim_end_matches('\n'), said.trim_end_matches('\n'));
}
