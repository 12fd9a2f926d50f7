//! Peaks of one rank: methods, tasks, settings of memory, 4-bit bases.

use super::{
    ACTIVATIONS, ALL_AT_ONCE, CLASSIFY, DISTILL, EIGHT_BIT, FEED_FORWARD, FULL, LOAD, LORA, NF4, NORMS,
    ON_HOST, PARAMS, REWARD, config, event, mixtral, mixture, rows, run, shared, wide, within_a_percent,
};
use crate::world::nightly;
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::fmt::Write;

/// On the CPU, the measured peak of a run agrees with the plan to 1%: in full and with LoRA, DoRA, dropout,
/// biases, a tied head, mixtures of experts, packed and ragged rows, micro-batches, recompute levels, half
/// precision, 4-bit bases dequantized per matmul and per layer, and logit chunks. Every eighteenth case, all in
/// the nightly tier.
#[test]
fn a_run_allocates_what_its_plan_lists() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let (full_rows, short) = ([512; 8], [8; 512]);
    let ragged: Vec<usize> = (0..40).map(|i| 30 + (i * 37) % 470).collect();
    let moe = mixture();
    let experts = "[[train]]\nmodules = [\"attention\", \"experts\"]\n";
    let experts_alone = "[[train]]\nmodules = [\"experts\"]\n";
    let everything = FULL.replace("\"mlp\"", "\"experts\", \"router\"");
    let (qwen3, tied, qwen2) = (config("qwen3", false), config("qwen3", true), config("qwen2", false));
    let some = "[[train]]\nmodules = [\"experts\"]\nexperts = [0, 1]\nmethod = \"full\"\n[[train]]\n\
                modules = [\"router\"]\nmethod = \"full\"\n";
    let offload = "memory.offload=['optimizer']";
    let ends = "[[train]]\nmodules = [\"embedding\", \"attention\"]\n";
    let (wide, shared, mixtral, mut all, tokens) = (wide(), shared(), mixtral(), mixture(), rows());
    all["num_experts_per_tok"] = all["num_experts"].clone();
    let cases: &[(&Value, &str, &[usize], &[&str])] = &[
        (&qwen3, FULL, &full_rows, &["memory.recompute=none"]),
        (&qwen3, FULL, &full_rows, &["memory.recompute=all"]),
        (&qwen3, FULL, &full_rows, &["memory.recompute=2", "run.micro_rows=2"]),
        (&qwen3, LORA, &full_rows, &["memory.recompute=none"]),
        (&qwen3, LORA, &full_rows, &["memory.recompute=all", "run.micro_rows=2"]),
        (&qwen3, LORA, &full_rows, &["lora.dropout=0.1", "memory.recompute=3"]),
        (&qwen3, LORA, &full_rows, &["lora.dora=true", "memory.recompute=none"]),
        (&qwen3, LORA, &full_rows, &["train.0.layers=-2:", "memory.recompute=none", "run.micro_rows=4"]),
        (&qwen3, FULL, &full_rows, &["model.dtype=bf16", "memory.recompute=none"]),
        (&qwen3, LORA, &full_rows, &["model.dtype=f16", "memory.recompute=none"]),
        (&qwen3, FULL, &full_rows, &["model.dtype=f16", "memory.recompute=all"]),
        (&moe, experts, &full_rows, &["model.dtype=f16", "memory.recompute=2"]),
        (&moe, experts_alone, &full_rows, &["model.dtype=f16", "memory.recompute=all"]),
        (&tied, FULL, &ragged, &["memory.recompute=none"]),
        (&tied, FULL, &ragged, &["data.pack=false", "run.micro_rows=4"]),
        (&qwen2, LORA, &ragged, &["memory.recompute=none", "run.micro_rows=2"]),
        (&qwen2, FULL, &full_rows, &["memory.recompute=4"]),
        (&moe, experts, &full_rows, &["memory.recompute=none"]),
        (&moe, experts, &full_rows, &["memory.recompute=all"]),
        (&moe, &everything, &full_rows, &["memory.recompute=2"]),
        (&moe, experts, &full_rows, &["memory.recompute=none", "lora.dora=true"]),
        (&moe, experts, &full_rows, &["memory.recompute=all", "lora.dropout=0.1"]),
        (&moe, experts, &full_rows, &["memory.recompute=2", "lora.dora=true", "lora.dropout=0.1"]),
        (&qwen3, LORA, &full_rows, &["memory.recompute=all", "run.batch_rows=16", "data.shuffle=false"]),
        // Recomputes norms only, or the feed-forward as well.
        (&qwen3, FULL, &full_rows, &[FEED_FORWARD]),
        (&qwen3, FULL, &full_rows, &[NORMS, "model.dtype=bf16", "run.micro_rows=2"]),
        (&qwen3, LORA, &full_rows, &[FEED_FORWARD, "lora.dora=true", "lora.dropout=0.1"]),
        (&qwen3, LORA, &full_rows, &[NORMS, ACTIVATIONS]),
        (&qwen3, LORA, &full_rows, &[NF4, FEED_FORWARD, "model.dtype=bf16", "memory.dequantize=per_layer"]),
        (&qwen2, LORA, &ragged, &[FEED_FORWARD, "run.micro_rows=2"]),
        (&tied, ends, &ragged, &[NORMS]),
        (&tied, FULL, &full_rows, &[&[FEED_FORWARD, ON_HOST], ALL_AT_ONCE].concat()),
        (&moe, &everything, &full_rows, &[NORMS]),
        (&moe, experts, &full_rows, &[FEED_FORWARD, "lora.dora=true"]),
        (&moe, some, &full_rows, &[NF4, NORMS, "model.dtype=bf16"]),
        (&shared, &everything, &full_rows, &[NORMS, "run.micro_rows=2"]),
        (&mixtral, experts, &full_rows, &[NF4, FEED_FORWARD, "memory.dequantize=per_layer"]),
        (&all, experts, &full_rows, &[NORMS, "lora.dropout=0.1"]),
        // Some experts and the routers in full, with a 4-bit base; offloaded states stay in the same memory
        // on the CPU.
        (&moe, some, &full_rows, &["model.quantize=nf4", "memory.recompute=none"]),
        (&moe, some, &full_rows, &["model.quantize=nf4", "memory.recompute=all", offload]),
        (&moe, some, &full_rows, &["model.quantize=nf4", "memory.recompute=none", "model.dtype=bf16"]),
        (&moe, some, &full_rows, &["model.quantize=nf4", "memory.recompute=2", "model.dtype=bf16", offload]),
        (&moe, &everything, &full_rows, &["memory.recompute=all", offload]),
        (&qwen3, FULL, &full_rows, &["memory.recompute=all", offload]),
        (&qwen3, FULL, &full_rows, &["memory.recompute=all", "model.dtype=bf16", offload]),
        // Weights and saved layer inputs on the host.
        (&qwen3, FULL, &full_rows, &["memory.recompute=none", PARAMS]),
        (&qwen3, FULL, &full_rows, &["memory.recompute=all", ON_HOST]),
        (&tied, FULL, &ragged, &["memory.recompute=all", "model.dtype=bf16", ON_HOST, "run.micro_rows=4"]),
        (&tied, FULL, &full_rows, &["memory.recompute=2", "model.dtype=bf16", PARAMS]),
        (&qwen3, LORA, &full_rows, &["lora.dora=true", "model.dtype=bf16", "memory.recompute=3", ON_HOST]),
        (&qwen3, LORA, &full_rows, &[NF4, "memory.recompute=all", "run.micro_rows=4", ACTIVATIONS]),
        (&qwen3, LORA, &full_rows, &[NF4, "model.dtype=bf16", "memory.recompute=all", ON_HOST]),
        (&moe, some, &full_rows, &[NF4, "memory.recompute=all", "model.dtype=bf16", ON_HOST]),
        (&moe, &everything, &full_rows, &[&["memory.recompute=2", PARAMS], ALL_AT_ONCE].concat()),
        (&qwen3, FULL, &full_rows, &[&["memory.recompute=2"], ALL_AT_ONCE].concat()),
        (
            &tied,
            FULL,
            &full_rows,
            &[&[EIGHT_BIT, "memory.recompute=all", "model.dtype=bf16"], ALL_AT_ONCE].concat(),
        ),
        (
            &moe,
            some,
            &full_rows,
            &[&["memory.recompute=all", "model.dtype=bf16", offload], ALL_AT_ONCE].concat(),
        ),
        (&qwen3, FULL, &full_rows, &[EIGHT_BIT, "memory.recompute=2"]),
        (
            &qwen3,
            FULL,
            &full_rows,
            &[&[EIGHT_BIT, "model.dtype=bf16", "optimizer.master=f32"], ALL_AT_ONCE].concat(),
        ),
        (&qwen3, FULL, &full_rows, &["optimizer.master=none", "model.dtype=bf16"]),
        (
            &tied,
            FULL,
            &full_rows,
            &[
                "optimizer.name=galore8bit",
                "optimizer.galore_rank=32",
                "model.dtype=bf16",
                "memory.recompute=2",
            ],
        ),
        (&tied, FULL, &ragged, &[EIGHT_BIT, "memory.recompute=all", "model.dtype=bf16"]),
        (&moe, some, &full_rows, &[EIGHT_BIT, "model.quantize=nf4", "memory.recompute=all", offload]),
        (&qwen3, LORA, &full_rows, &[NF4, "memory.recompute=none"]),
        (&qwen3, LORA, &full_rows, &[NF4, "memory.recompute=all", "memory.dequantize=per_matmul"]),
        (&qwen3, LORA, &full_rows, &[NF4, "memory.recompute=all", "memory.dequantize=per_layer"]),
        (
            &qwen3,
            FULL,
            &full_rows,
            &["optimizer.name=galore", "optimizer.galore_rank=32", "memory.recompute=2"],
        ),
        (&qwen3, LORA, &full_rows, &["run.micro_rows=auto"]),
        (&qwen3, LORA, &full_rows, &["lora.init=olora", "data.neftune=5", "memory.recompute=none"]),
        (&qwen3, LORA, &full_rows, &["lora.init=pissa", NF4, "model.dtype=bf16", "memory.recompute=all"]),
        (&qwen3, &tokens, &full_rows, &["memory.recompute=none"]),
        (&tied, &tokens, &ragged, &["model.dtype=bf16", "memory.recompute=all", ON_HOST]),
        (&tied, &tokens, &full_rows, &[&["memory.recompute=2", EIGHT_BIT], ALL_AT_ONCE].concat()),
        (&wide, LORA, &full_rows, &["memory.recompute=all"]),
        (&wide, LORA, &ragged, &["memory.recompute=none", "run.micro_rows=4"]),
        (&qwen3, LORA, &full_rows, &["lora.dora=true", "lora.dropout=0.1", "memory.recompute=all"]),
        (&qwen3, LORA, &full_rows, &["model.dtype=bf16", "memory.recompute=none", "run.micro_rows=2"]),
        (&qwen3, LORA, &full_rows, &[NF4, "model.dtype=bf16", "memory.recompute=all"]),
        (
            &qwen3,
            LORA,
            &full_rows,
            &[NF4, "model.dtype=bf16", "memory.recompute=all", "memory.dequantize=per_layer"],
        ),
        (&qwen3, LORA, &full_rows, &["model.dtype=bf16", "lora.dora=true", "memory.recompute=none"]),
        (&tied, ends, &ragged, &["memory.recompute=none"]),
        (&shared, &everything, &full_rows, &["memory.recompute=none"]),
        (&shared, experts, &full_rows, &["memory.recompute=all", "model.dtype=bf16"]),
        (&mixtral, experts, &full_rows, &["memory.recompute=none"]),
        (&mixtral, &everything, &full_rows, &["memory.recompute=all"]),
        (&mixtral, experts, &full_rows, &[NF4, "memory.recompute=all", "memory.dequantize=per_layer"]),
        (&moe, experts, &full_rows, &["model.dtype=bf16", "memory.recompute=none"]),
        // Experts without tokens are not dequantized, so short documents are chosen to reach all experts.
        (&moe, experts, &short, &[NF4, "memory.recompute=all", "memory.dequantize=per_layer"]),
        (&qwen3, LORA, &full_rows, &[LOAD, "memory.recompute=none"]),
        (&qwen3, LORA, &full_rows, &[LOAD, "memory.recompute=all", "lora.dora=true", "lora.dropout=0.1"]),
        (&tied, ends, &ragged, &[LOAD, "memory.recompute=2", "run.micro_rows=4"]),
        (&moe, experts, &full_rows, &[LOAD, "memory.recompute=all"]),
        (&qwen3, LORA, &full_rows, &[LOAD, NF4, "memory.recompute=none"]),
        (&qwen3, LORA, &full_rows, &[LOAD, "memory.recompute=2", PARAMS]),
        // All experts for every token, side by side: shared buffers live until the last expert.
        (&all, experts, &full_rows, &["memory.recompute=all", "lora.dropout=0.1"]),
        (&all, experts, &full_rows, &[NF4, "memory.recompute=all", "memory.dequantize=per_layer"]),
        (&all, experts, &full_rows, &["memory.recompute=all", "lora.dora=true", "lora.dropout=0.1"]),
    ];
    // Runs all cases before it fails.
    let (mut table, mut wrong) = (String::new(), Vec::new());
    let every = if nightly() { 1 } else { 18 };
    for (config, rules, lengths, set) in cases.iter().step_by(every) {
        let (planned, measured) = run(dir.path(), config, rules, lengths, set)?;
        let apart = 100.0 * (measured as f64 / planned as f64 - 1.0);
        let family = config["model_type"].as_str().unwrap_or_default();
        let line =
            format!("{apart:>6.2}% of {planned:>10} planned, {measured:>10} measured  {family:<10} {set:?}");
        writeln!(table, "{line}")?;
        if apart.abs() > 1.0 {
            wrong.push(line);
        }
        let end = event(dir.path(), "end")?;
        let pairs = ["forward", "backward"].map(|p| (p, "planned_phases", "measured_phases"));
        let kept = ["frozen_weights", "weights_that_train", "gradients", "master_weights", "moments"];
        for (what, ours, theirs) in pairs.into_iter().chain(kept.map(|k| (k, "planned", "measured"))) {
            let of = |table: &str| end["memory"][table][what].as_f64().with_context(|| format!("no {what}"));
            let (planned, measured) = (of(ours)?, of(theirs)?);
            // Tables of names and shapes are counted as frozen weights.
            if (planned - measured).abs() > 0.015 * planned + 5e5 {
                wrong.push(format!("{family} {set:?}, {what}: planned {planned}, measured {measured}"));
            }
        }
    }
    eprintln!("{table}");
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    Ok(())
}

/// A score head: its weights, gradients and moments, and no logits of the vocabulary.
#[test]
fn a_score_head_takes_what_its_plan_says() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let (full_rows, short) = ([512; 8], [8; 512]);
    let labels = ["classify.num_labels=5", "data.train.0.format=labeled"];
    let pairs = ["data.train.0.format=preference", "memory.recompute=all"];
    let (qwen3, tied) = (config("qwen3", false), config("qwen3", true));
    let cases: &[(&Value, &str, &[usize], Vec<&str>)] = &[
        (&qwen3, LORA, &full_rows, [&[REWARD], &pairs[..]].concat()),
        (
            &tied,
            FULL,
            &full_rows,
            [&[REWARD], &pairs[..], &["run.micro_rows=2", "model.dtype=bf16"]].concat(),
        ),
        (&tied, FULL, &short, [&[CLASSIFY], &labels[..], &["memory.recompute=none"]].concat()),
        (&qwen3, LORA, &full_rows, [&[CLASSIFY], &labels[..], &[NF4, "memory.recompute=none"]].concat()),
        (&qwen3, LORA, &full_rows, [&[CLASSIFY], &labels[..], &[LOAD, "memory.recompute=norms"]].concat()),
    ];
    within_a_percent(dir.path(), cases)
}

/// A teacher's values and both losses, where the logits of a row are one chunk and where they are several.
#[test]
fn a_teacher_takes_what_its_plan_says() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let (qwen3, wide) = (config("qwen3", false), wide());
    let eval = "data.eval=[{source='rows.jsonl', format='tokens'}]";
    let cases: &[(&Value, &str, &[&str])] = &[
        (&qwen3, LORA, &[DISTILL, "memory.recompute=all", "run.micro_rows=2"]),
        (&wide, LORA, &[DISTILL, "memory.recompute=none"]),
        (&wide, FULL, &[DISTILL, "memory.recompute=all", "model.dtype=bf16", eval]),
    ];
    for (config, rules, set) in cases {
        let (planned, measured) = run(dir.path(), config, rules, &[512; 8], set)?;
        let apart = 100.0 * (measured as f64 / planned as f64 - 1.0);
        ensure!(apart.abs() <= 1.0, "{set:?}: {apart:.2}% of {planned} planned, {measured} measured");
    }
    Ok(())
}

/// Linear layers of a 4-bit base take at most 4.13 bits per value, in plan and run.
#[test]
fn a_4_bit_base_takes_what_its_plan_says() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let set = ["model.quantize=nf4", "model.dtype=bf16", "run.batch_rows=1", "memory.budget=8GiB"];
    // Large enough at each push for the tables of names and shapes below.
    let mut qwen3 = config("qwen3", false);
    (qwen3["hidden_size"], qwen3["intermediate_size"]) = (json!(512), json!(1536));
    run(dir.path(), &qwen3, LORA, &[64; 2], &set)?;
    let (start, end) = (event(dir.path(), "start")?, event(dir.path(), "end")?);
    let planned = |names: &[&str]| -> f64 {
        names.iter().filter_map(|n| start["plan"]["device"][format!("weights_{n}")].as_f64()).sum()
    };
    let scales = start["plan"]["device"]["quantization_constants"].as_f64().context("no scales")?;
    let linears = planned(&["attention", "mlp"]) + scales;
    let values = 6.0 * (2.0 * 512.0 * 512.0 + 2.0 * 512.0 * 256.0 + 3.0 * 512.0 * 1536.0);
    ensure!(8.0 * linears / values <= 4.13, "planned {} bits", 8.0 * linears / values);
    let rest = planned(&["embedding", "head", "norms"]);
    let measured = end["memory"]["measured"]["frozen_weights"].as_f64().context("not measured")?;
    let bits = 8.0 * (measured - rest) / values;
    // 0.2 MB of tables of names and shapes are not weights.
    ensure!(bits <= 4.13 + 8.0 * 2e5 / values && bits >= 4.1, "measured {bits} bits");
    Ok(())
}
