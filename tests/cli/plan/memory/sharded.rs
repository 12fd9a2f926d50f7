//! Peaks and traffic of a rank among several.

use super::{
    CUT, FEED_FORWARD, FULL, LOAD, LORA, NF4, NORMS, ON_HOST, config, event, mixture, rows, run, shared,
    within_a_percent,
};
use crate::world::{few, nightly};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::fmt::Write;

/// Cut matrices take what the plan says on the rank with the most.
#[test]
fn cut_matrices_take_what_their_plan_says() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let (qwen3, tied) = (config("qwen3", false), config("qwen3", true));
    let mut biased = config("llama", false);
    (biased["model_type"], biased["attention_bias"], biased["mlp_bias"]) =
        (json!("llama"), json!(true), json!(true));
    biased["architectures"] = json!(["LlamaForCausalLM"]);
    let (full_rows, data) = ([512; 8], "parallel.data=2");
    let cases: &[(&Value, &str, &[usize], &[&str])] = &[
        (&qwen3, FULL, &full_rows, &[CUT, "memory.recompute=none"]),
        (&tied, LORA, &full_rows, &[CUT, NF4, "model.dtype=bf16", "memory.recompute=all"]),
        (&biased, LORA, &full_rows, &[CUT, NORMS, "lora.dropout=0.1"]),
        (
            &tied,
            FULL,
            &full_rows,
            &[CUT, data, "parallel.zero=3", "model.dtype=bf16", "memory.recompute=all"],
        ),
        (&qwen3, FULL, &full_rows, &[CUT, data, "parallel.zero=2", FEED_FORWARD]),
        (&biased, LORA, &full_rows, &["parallel.tensor=4", "memory.recompute=1", LOAD]),
    ];
    within_a_percent(dir.path(), cases)
}

/// Memory and traffic per rank agree with the plan to 1%. Sharded states, gradients and weights shrink in
/// proportion to the number of ranks.
#[test]
fn a_rank_holds_what_its_plan_says() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let (full_rows, moe, tokens) = ([128; 8], mixture(), rows());
    let (qwen3, tied) = (config("qwen3", false), config("qwen3", true));
    let experts = "[[train]]\nmodules = [\"attention\", \"experts\"]\n";
    let cases: [(&Value, &str, &[&str]); 8] = [
        (&tied, &tokens, &["model.dtype=bf16", NORMS]),
        (&qwen3, LORA, &[LOAD, "lora.dora=true", "memory.recompute=1"]),
        (&tied, FULL, &["model.dtype=bf16", "memory.recompute=all", ON_HOST]),
        (&qwen3, LORA, &["lora.dora=true", "model.dtype=bf16", "memory.recompute=1"]),
        (&qwen3, FULL, &["memory.recompute=none"]),
        (&tied, FULL, &["model.dtype=bf16", "memory.recompute=all"]),
        (&qwen3, LORA, &[NF4, "memory.recompute=2", "model.dtype=bf16"]),
        (&moe, experts, &[FEED_FORWARD, "memory.offload=['optimizer']"]),
    ];
    let (mut table, mut wrong) = (String::new(), Vec::new());
    let every = if nightly() { 1 } else { 4 };
    for (config, rules, set) in cases.into_iter().step_by(every) {
        let mut whole = [0.0; 3];
        let all = [(1, 0), (2, 2), (4, 3), (2, 0), (2, 1), (4, 2), (2, 3)];
        for &(ranks, zero) in all.iter().take(few(3)) {
            let parallel = [format!("parallel.data={ranks}"), format!("parallel.zero={zero}")];
            let more = ["memory.budget=2GiB", "data.max_length=128", &*parallel[0], &*parallel[1]];
            let set = [set, &more[..]].concat();
            let (planned, measured) = run(dir.path(), config, rules, &full_rows, &set)?;
            let apart = 100.0 * (measured as f64 / planned as f64 - 1.0);
            writeln!(table, "{apart:>6.2}% of {planned:>10} planned, {measured:>10} a rank  {set:?}")?;
            // With several ranks, this is the largest one.
            if apart.abs() > 1.0 {
                wrong.push(format!("{set:?}: {apart:.2}%"));
            }
            let (start, end) = (event(dir.path(), "start")?, event(dir.path(), "end")?);
            let kept = ["frozen_weights", "weights_that_train", "gradients", "master_weights", "moments"];
            let of = |table: &str, what: &str| {
                end["memory"][table][what].as_f64().with_context(|| format!("no {what}"))
            };
            for what in kept {
                let (planned, measured) = (of("planned", what)?, of("measured", what)?);
                // Tables of names and shapes are counted as frozen weights.
                let rest = if what == "frozen_weights" { 5e5 } else { 1e4 };
                if (planned - measured).abs() > 0.01 * planned + rest {
                    wrong.push(format!("{set:?}, {what}: planned {planned}, measured {measured}"));
                }
            }
            let (gradients, moments) = (of("measured", "gradients")?, of("measured", "moments")?);
            let weights = of("measured", "frozen_weights")? + of("measured", "weights_that_train")?;
            let held = [gradients, moments, weights];
            if ranks == 1 {
                whole = held;
            }
            for ((bytes, whole), (from, rest)) in
                held.into_iter().zip(whole).zip([(2, 0.0), (1, 0.0), (3, 3e5)])
            {
                let parts = if zero >= from { f64::from(ranks) } else { 1.0 };
                if (bytes - whole / parts).abs() > 0.01 * whole / parts + rest {
                    wrong.push(format!("{set:?}: {bytes} of {whole} on a rank"));
                }
            }
            writeln!(
                table,
                "        {weights:>10} of weights, {gradients} of gradients, {moments} of moments"
            )?;
            let wire = start["plan"]["wire_bytes_a_step"].as_f64().context("no wire bytes")?;
            let came = event(dir.path(), "step")?["wire_bytes"].as_f64().unwrap_or(0.0);
            if (wire - came).abs() > 0.01 * wire {
                wrong.push(format!("{set:?}: {wire} planned on the wire, {came} came"));
            }
        }
    }
    eprintln!("{table}");
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    Ok(())
}

/// With layers over ranks, the rank with the most allocates what the plan says, to 1%. Weights and states of each of two
/// equal stages are half of those of one rank, to 2%.
#[test]
fn a_stage_holds_what_its_plan_says() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let (qwen3, tied, moe) = (config("qwen3", false), config("qwen3", true), mixture());
    let (rows, all) = ([512; 8], FULL.replace("\"mlp\"", "\"experts\", \"router\""));
    let cases: [(&Value, &str, &[usize], &[&str]); 6] = [
        (&qwen3, FULL, &rows, &["parallel.pipeline=2", "memory.recompute=none"]),
        (&tied, FULL, &rows, &["parallel.pipeline=2", "parallel.data=2", "parallel.zero=1"]),
        (&qwen3, LORA, &rows, &["parallel.pipeline=3", NF4, "memory.recompute=all"]),
        (&moe, &all, &rows, &["parallel.pipeline=2", "memory.recompute=1", "router.aux_loss=0.01"]),
        (&qwen3, LORA, &rows, &["parallel.pipeline=2", "parallel.data=2", "parallel.zero=3"]),
        (&tied, FULL, &rows, &["parallel.pipeline=6", "model.dtype=bf16", NORMS]),
    ];
    let cases = cases.map(|(config, rules, rows, set)| {
        (config, rules, rows, [set, &["memory.budget=2GiB", "run.micro_rows=1"]].concat())
    });
    within_a_percent(dir.path(), &cases)?;
    let states = |set: &[&str]| -> Result<f64> {
        run(dir.path(), &qwen3, FULL, &rows, &[set, &["memory.budget=2GiB"]].concat())?;
        let planned = event(dir.path(), "end")?["memory"]["planned"].clone();
        let parts = ["frozen_weights", "weights_that_train", "gradients", "master_weights", "moments"];
        Ok(parts.iter().filter_map(|part| planned[part].as_f64()).sum())
    };
    let (one, two) = (states(&[])?, states(&["parallel.pipeline=2", "parallel.stages=[3, 3]"])?);
    let far = 2.0 * two / one - 1.0;
    ensure!(far.abs() <= 0.02, "{two} of {one} on each of two ranks");
    Ok(())
}

/// With several axes together, the rank with the most allocates what the plan says, to 1%. Tokens go to all experts, so
/// that the spread is even.
#[test]
fn a_rank_of_several_axes_holds_what_its_plan_says() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let (qwen3, mut moe) = (config("qwen3", false), shared());
    (moe["num_experts"], moe["mlp_only_layers"]) = (json!(4), json!([1]));
    let (long, all) = ([1024; 4], FULL.replace("\"mlp\"", "\"mlp\", \"experts\", \"router\""));
    let (stages, context, expert) = ("parallel.pipeline=2", "parallel.context=2", "parallel.expert=2");
    let (data, aux) = ("parallel.data=2", "router.aux_loss=0.01");
    let cases: [(&Value, &str, &[usize], &[&str]); 7] = [
        (&qwen3, FULL, &long, &[context, CUT, NORMS]),
        (&moe, &all, &long, &[stages, data, expert, "memory.recompute=1", aux]),
        (&moe, &all, &long, &[CUT, expert, "memory.recompute=none", aux]),
        (&qwen3, FULL, &long, &[stages, context, "memory.recompute=none"]),
        (&qwen3, LORA, &long, &[stages, CUT, NF4, "memory.recompute=all"]),
        (&moe, &all, &long, &[CUT, data, "parallel.zero=3", FEED_FORWARD]),
        (&qwen3, LORA, &long, &[stages, context, CUT, "parallel.zero=3", NORMS]),
    ];
    let more = ["memory.budget=2GiB", "data.max_length=1024", "data.pack=false", "run.micro_rows=1"];
    let cases = cases.map(|(config, rules, rows, set)| (config, rules, rows, [set, &more].concat()));
    within_a_percent(dir.path(), &cases)
}

/// With the tokens of a row over ranks, memory and traffic agree with the plan to 1%: keys and values go to the ranks
/// whose queries see them, and their gradients back.
#[test]
fn a_rank_with_some_tokens_holds_what_its_plan_says() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let (qwen3, moe) = (config("qwen3", false), mixture());
    let mut windows = config("qwen3", false);
    for (key, value) in
        [("use_sliding_window", json!(true)), ("sliding_window", json!(200)), ("max_window_layers", json!(2))]
    {
        windows[key] = value;
    }
    let (long, short) = ([1024; 4], [128; 8]);
    let experts = "[[train]]\nmodules = [\"attention\", \"experts\"]\n";
    let cases: [(&Value, &str, &[usize], &[&str]); 6] = [
        (&qwen3, FULL, &long, &["parallel.context=2", "memory.recompute=none"]),
        (&qwen3, LORA, &long, &["parallel.context=4", "parallel.zero=3", "memory.recompute=all", NF4]),
        (&windows, LORA, &long, &["parallel.context=2", "memory.recompute=norms"]),
        (&moe, experts, &long, &["parallel.context=2", "parallel.zero=2", FEED_FORWARD]),
        (
            &qwen3,
            LORA,
            &long,
            &["parallel.data=2", "parallel.context=2", "model.dtype=bf16", "memory.recompute=all"],
        ),
        (&qwen3, FULL, &short, &["parallel.context=2", "run.micro_rows=4", "memory.recompute=1"]),
    ];
    let (mut table, mut wrong) = (String::new(), Vec::new());
    for (config, rules, lengths, set) in cases.into_iter().step_by(if nightly() { 1 } else { 2 }) {
        let micro: &[&str] = if lengths.len() == 4 { &["run.micro_rows=1"] } else { &[] };
        let more = ["memory.budget=2GiB", "data.max_length=1024", "data.pack=false"];
        let batch: &[&str] = if micro.is_empty() || nightly() { &[] } else { &["run.batch_rows=2"] };
        let set = [set, micro, batch, &more].concat();
        let (planned, measured) = run(dir.path(), config, rules, lengths, &set)?;
        let apart = 100.0 * (measured as f64 / planned as f64 - 1.0);
        writeln!(table, "{apart:>6.2}% of {planned:>10} planned, {measured:>10} a rank  {set:?}")?;
        if apart.abs() > 1.0 {
            wrong.push(format!("{set:?}: {apart:.2}%"));
        }
        let (start, step) = (event(dir.path(), "start")?, event(dir.path(), "step")?);
        for (planned, came) in
            [("wire_bytes_a_step", "wire_bytes"), ("wire_bytes_exchanged", "wire_bytes_exchanged")]
        {
            let planned = start["plan"][planned].as_f64().with_context(|| format!("no {planned}"))?;
            let came = step[came].as_f64().with_context(|| format!("no {came}"))?;
            writeln!(table, "        {planned} bytes planned on the wire, {came} came")?;
            if (planned - came).abs() > 0.01 * planned {
                wrong.push(format!("{set:?}: {planned} planned on the wire, {came} came"));
            }
        }
    }
    eprintln!("{table}");
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    Ok(())
}
