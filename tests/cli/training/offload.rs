//! Offloading to the host: results do not depend on the location of weights, optimizer states and
//! activations.

use crate::runs::resume::killed;
use crate::split::{self, ADAPTERS, MIXTURE, ends, world};
use crate::world::{FULL, LORA, World, kills};

const PARAMS: &str = "memory.offload=['params']";
const ACTIVATIONS: &str = "memory.offload=['activations']";
const STATES_AND_PARAMS: &str = "memory.offload=['optimizer', 'params']";
const ALL: &str = "memory.offload=['optimizer', 'params', 'activations']";

/// Final files of a run, with steps and evaluations.
type Bits = (Vec<Vec<u8>>, Vec<(u64, u64, u64, u64)>, Vec<String>);

/// Runs with settings. Returns final files, steps and evaluations, bit for bit.
#[track_caller]
fn bits(w: &World, run: &str, set: &[&str]) -> Bits {
    let ends = split::bits(w, run, set);
    let evals = w.events(run, "eval").iter().map(|e| e["loss"].to_string()).collect();
    (ends, w.steps(run), evals)
}

/// In full, with LoRA and DoRA, on a 4-bit base and on a mixture of experts; in half precision; at all
/// recompute levels; with gradient accumulation and clipping, and with updates in the backward pass.
#[test]
fn offloading_changes_no_bit() {
    let at_once = ["optimizer.in_backward=true", "run.clip=0", "run.micro_rows=4", "memory.recompute=1"];
    for (rules, set, offloads) in [
        (FULL, &[][..], &[PARAMS, ACTIVATIONS, ALL][..]),
        (FULL, &["model.dtype=bf16", "memory.recompute=all"], &[PARAMS, STATES_AND_PARAMS, ACTIVATIONS, ALL]),
        (FULL, &["memory.recompute=all"], &[PARAMS, STATES_AND_PARAMS, ACTIVATIONS]),
        (FULL, &at_once, &[PARAMS, ALL]),
        (FULL, &["optimizer.name=adamw8bit", "model.dtype=bf16"], &[ALL]),
        (FULL, &["optimizer.name=galore", "optimizer.galore_rank=4"], &[PARAMS, ACTIVATIONS]),
        (LORA, &["memory.recompute=1"], &[PARAMS, ALL]),
        (LORA, &["model.dtype=bf16", "memory.recompute=all"], &[PARAMS, ALL]),
        (LORA, &["model.dtype=f16", "memory.recompute=none"], &[ALL]),
        (MIXTURE, &["memory.recompute=2"], &[ACTIVATIONS, ALL]),
        (MIXTURE, &["memory.recompute=norms"], &[ACTIVATIONS]),
        (FULL, &["model.dtype=bf16", "memory.recompute=feed_forward"], &[ALL]),
        (MIXTURE, &["memory.recompute=all", "model.dtype=bf16"], &[PARAMS, ALL]),
        (ADAPTERS, &["model.dtype=bf16", "model.quantize=nf4", "memory.recompute=all"], &[PARAMS, ALL]),
        (ADAPTERS, &["memory.dequantize=per_layer", "model.quantize=nf4", "memory.recompute=all"], &[ALL]),
    ] {
        let w = world(rules);
        let want = bits(&w, "here", set);
        for (i, offload) in offloads.iter().enumerate() {
            let run = format!("there-{i}");
            assert!(bits(&w, &run, &[set, &[*offload]].concat()) == want, "{set:?} {offload}");
        }
    }
}

/// The same on several ranks at every ZeRO stage, with the shards on the host.
#[test]
fn offloaded_shards_change_no_bit() {
    for (rules, set) in [
        (FULL, &["model.dtype=bf16", "memory.recompute=1"][..]),
        (MIXTURE, &["memory.recompute=all"]),
        (ADAPTERS, &["model.dtype=bf16", "model.quantize=nf4", "memory.recompute=all"]),
    ] {
        let w = world(rules);
        let want = bits(&w, "here", &[set, &["parallel.data=2"]].concat()).0;
        for (ranks, zero, offload) in [
            (2, 0, ALL),
            (2, 1, STATES_AND_PARAMS),
            (2, 1, PARAMS),
            (2, 2, ALL),
            (2, 3, PARAMS),
            (2, 3, ALL),
            (4, 2, PARAMS),
            (4, 3, ALL),
        ] {
            let parallel = [format!("parallel.data={ranks}"), format!("parallel.zero={zero}")];
            let set = [set, &[&*parallel[0], &*parallel[1], offload]].concat();
            assert!(bits(&w, "there", &set).0 == want, "{set:?}");
        }
    }
}

/// A run that is killed and resumed with other offloading and other ranks ends like an uninterrupted run.
#[test]
fn a_run_killed_and_resumed_with_other_offloading_ends_the_same() {
    let w = world(MIXTURE);
    let longer = ["run.epochs=4", "run.save_every=1", "memory.recompute=all"];
    let sets = |round: u64| match round % 4 {
        0 => [ALL, "parallel.data=2", "parallel.zero=3"],
        1 => [PARAMS, "parallel.data=4", "parallel.zero=1"],
        2 => ["memory.offload=[]", "parallel.data=2", "parallel.zero=0"],
        _ => [ACTIVATIONS, "parallel.data=4", "parallel.zero=3"],
    };
    let whole = bits(&w, "whole", &[&longer[..], &sets(2)].concat()).0;
    let args =
        |round| [&["run", "r.toml", "run.output=killed", "--resume"][..], &longer, &sets(round)].concat();
    killed(&w, ("killed", kills(2) as usize, 11), &args, &|| assert!(ends(&w, "killed") == whole));
}
