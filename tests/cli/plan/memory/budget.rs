//! Reserves and budgets: runs within them, and the verdict of `ft plan`.

use super::{FEED_FORWARD, FULL, LORA, NF4, config, event, mixture, process, run, run_rows, wide};
use crate::world::{command, few};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::path::Path;

/// Rows of one repeated token route all tokens to the same experts. The run stays within the routing
/// reserve of the plan.
#[test]
fn uneven_routing_takes_no_more_than_its_reserve() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let moe = mixture();
    let everything = FULL.replace("\"mlp\"", "\"experts\", \"router\"");
    let experts = "[[train]]\nmodules = [\"experts\"]\n";
    let some = "[[train]]\nmodules = [\"experts\"]\nexperts = \"0-3\"\n";
    let cases = [
        (experts, &["memory.recompute=none", "lora.dora=true", "lora.dropout=0.1"][..]),
        (some, &["memory.recompute=all", "run.micro_rows=4", NF4]),
        (everything.as_str(), &["memory.recompute=all", "run.micro_rows=4"]),
        (experts, &["memory.recompute=all", "run.micro_rows=4"]),
    ];
    for (rules, set) in cases.into_iter().take(few(2)) {
        // The repeated token fills one document.
        let (planned, measured) = run_rows(dir.path(), &moe, rules, &[512; 4], set, |_, _| 7)?;
        let start = event(dir.path(), "start")?;
        let reserve = start["plan"]["device"]["routing_reserve"].as_u64().unwrap_or(0);
        ensure!(
            measured as f64 <= 1.01 * (planned + reserve) as f64,
            "{set:?}: {planned} {reserve} {measured}"
        );
        let (total, process) = process(dir.path())?;
        ensure!(process <= total, "{set:?}: {process} of {total}");
    }
    Ok(())
}

/// With uneven routing, the largest experts need more memory than with even routing, most of all with DoRA
/// and dropout. The peak lies between the plan and the plan plus reserve.
#[test]
fn some_uneven_routing_takes_a_part_of_the_reserve() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let experts = "[[train]]\nmodules = [\"attention\", \"experts\"]\n";
    for level in [FEED_FORWARD, "memory.recompute=all"].into_iter().take(few(1)) {
        let set = [level, "lora.dora=true", "lora.dropout=0.1"];
        let (planned, measured) = run(dir.path(), &mixture(), experts, &[512; 8], &set)?;
        let reserve = event(dir.path(), "start")?["plan"]["device"]["routing_reserve"].as_u64().unwrap_or(0);
        let between = planned - planned / 100..=planned + reserve;
        ensure!(between.contains(&measured), "{level}: {measured} of {planned} and {reserve}");
    }
    Ok(())
}

/// A step of many rows needs no more memory than a step of few, because micro-batches are built on demand.
#[test]
fn rows_of_a_step_are_made_as_they_are_needed() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let mut tiny = config("qwen3", false);
    for (key, value) in
        [("hidden_size", 32), ("intermediate_size", 64), ("num_hidden_layers", 1), ("num_attention_heads", 2)]
    {
        tiny[key] = json!(value);
    }
    (tiny["num_key_value_heads"], tiny["head_dim"], tiny["vocab_size"]) = (json!(1), json!(16), json!(64));
    let rows = |n: &str| run_rows(dir.path(), &tiny, LORA, &[512; 4], &[n], |i, k| (i * 7 + k) % 64);
    let (few, many) = (rows("run.batch_rows=2")?, rows("run.batch_rows=1024")?);
    // Shuffled in two epochs.
    ensure!(few.0.abs_diff(many.0) < 1 << 10, "{few:?} {many:?}");
    // The collated tokens alone would take 16 MB.
    ensure!(many.1 < few.1 + (1 << 18), "{few:?} {many:?}");
    Ok(())
}

/// The budget determines the number of recomputed layers. The run stays within it, with the same bits.
#[test]
fn a_run_obeys_its_budget() -> Result<()> {
    let dir = tempfile::tempdir()?;
    // As wide as at night: half of it, the allocator's overhead is up to 2% of the process.
    let mut model = config("qwen3", false);
    (model["hidden_size"], model["intermediate_size"]) = (json!(512), json!(1536));
    let peak = |budget: &str| run(dir.path(), &model, LORA, &[512; 8], &[budget]);
    let adapter = || std::fs::read(dir.path().join("out/adapter/adapter_model.safetensors"));
    run(dir.path(), &model, LORA, &[512; 8], &["memory.recompute=all", "memory.budget=10GiB"])?;
    let least = process(dir.path())?.0;
    peak("memory.budget=10GiB")?;
    let (most, free) = (process(dir.path())?.0, adapter()?);
    for tenths in [5, 0, 8, 2].into_iter().take(few(2)) {
        let tight = least + (most - least) * tenths / 10;
        let (_, measured) = peak(&format!("memory.budget={tight}"))?;
        let (planned, process) = process(dir.path())?;
        // Includes allocator overhead, to 0.5%, because small blocks vary between runs.
        let within = tight + tight / 200;
        ensure!(
            planned <= tight && measured < process && process <= within,
            "{planned} {process} of {tight}"
        );
        // A layer saves 14 MiB of activations.
        ensure!(planned > tight - (15 << 20), "more was recomputed than had to be: {planned} of {tight}");
        ensure!(adapter()? == free, "the recompute level changed the result");
    }

    let out = command(dir.path(), &["run", "r.toml", "--overwrite", "memory.budget=20MiB"]).output()?;
    let said = String::from_utf8_lossy(&out.stderr);
    ensure!(out.status.code() == Some(8), "{said}");
    ensure!(said.contains("hint:"), "{said}");
    Ok(())
}

/// Choices of the plan in a run, by key.
fn chosen(dir: &Path) -> Result<Value> {
    let text = std::fs::read_to_string(dir.join("out/metrics.jsonl"))?;
    let start: Value = serde_json::from_str(text.lines().next().context("no line")?)?;
    Ok(start["plan"]["choices"].clone())
}

/// With less memory, logit chunks and micro-batches shrink and layers are recomputed. The run needs the
/// planned memory, and gives the same bits for the same micro-batch size.
#[test]
fn less_memory_shrinks_chunks_and_recomputes_layers() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let model = wide();
    let adapter = || std::fs::read(dir.path().join("out/adapter/adapter_model.safetensors"));
    let at = |budget: u64, rows: &str| -> Result<(u64, Value, Vec<u8>)> {
        let budget = format!("memory.budget={budget}");
        let (planned, measured) = run(dir.path(), &model, LORA, &[512; 8], &[&budget, rows])?;
        let apart = measured as f64 / planned as f64 - 1.0;
        ensure!(apart.abs() <= 0.01, "{budget}: planned {planned}, measured {measured}");
        Ok((process(dir.path())?.0, chosen(dir.path())?, adapter()?))
    };
    let value = |c: &Value, key: &str| c[key]["value"].as_u64().with_context(|| format!("{key}: {c}"));
    let (most, free, bits) = at(64 << 30, "run.micro_rows=4")?;
    ensure!(value(&free, "recompute")? == 0, "{free}");
    let (taken, tight, same) = at(most - (90 << 20), "run.micro_rows=4")?;
    ensure!(taken <= most - (90 << 20), "{taken} of {most}");
    ensure!(value(&tight, "head_rows")? < value(&free, "head_rows")?, "{free} {tight}");
    ensure!(bits == same, "the choices changed the result");
    let (_, auto, _) = at(64 << 30, "run.micro_rows=auto")?;
    ensure!(value(&auto, "micro_rows")? > 1, "{auto}");
    let recipe = std::fs::read_to_string(dir.path().join("out/recipe.toml"))?;
    let line = format!("micro_rows    = {}\n", value(&auto, "micro_rows")?);
    ensure!(recipe.contains(&line), "{recipe}");
    let (_, few, _) = at(most - (90 << 20), "run.micro_rows=auto")?;
    ensure!(value(&few, "micro_rows")? <= value(&auto, "micro_rows")?, "{few}");
    Ok(())
}

/// `ft plan` needs only the config, prints the plan before it fails, and exits with 8.
#[test]
fn plan_prints_and_says_by_its_exit_code_whether_it_fits() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let recipe = concat!(env!("CARGO_MANIFEST_DIR"), "/recipes/qwen3-8b-lora.toml");
    let plan = |set: &[&str]| {
        let mut ft = command(dir.path(), &["plan", "--json", recipe]);
        ft.args(set).env("FT_CACHE", "/dev/null").output()
    };
    for (budget, code) in [("memory.budget=200GiB", 0), ("memory.budget=4GiB", 8)] {
        for device in ["run.device=cpu", "run.device=cuda"] {
            let out = plan(&[budget, device, "parallel.data=2", "parallel.zero=2"])?;
            ensure!(out.status.code() == Some(code), "{}", String::from_utf8_lossy(&out.stderr));
            let json: Value = serde_json::from_slice(&out.stdout)?;
            ensure!(json["fits"] == json!(code == 0) && json["ranks"] == 2);
            for key in ["parameters", "device", "host", "disk", "hints", "theory"] {
                ensure!(!json[key].is_null(), "no {key}");
            }
        }
    }
    Ok(())
}

/// `--gpu` is the same as the two keys, takes cards by name, and the verdict comes first.
#[test]
fn the_gpu_option_sets_device_and_budget() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let plan = |args: &[&str]| {
        let mut ft = command(dir.path(), &["plan", "qwen3-8b-qlora"]);
        ft.args(args).env("FT_CACHE", "/dev/null").output()
    };
    let said = |args: &[&str]| plan(args).map(|out| String::from_utf8_lossy(&out.stdout).into_owned());
    // What is free changes from one command to the next.
    let known = ["--json", "memory.host_budget=64GiB", "memory.disk_budget=1TiB"];
    let json = |set: &[&str]| said(&[&known[..], set].concat());
    let by_keys = json(&["run.device=cuda", "memory.budget=48GB"])?;
    ensure!(!by_keys.is_empty() && by_keys == json(&["--gpu", "48GB"])?);
    ensure!(by_keys == json(&["--gpu", "48"])?);
    let text = said(&["--gpu", "48GB"])?;
    ensure!(text.starts_with("fits: 42.50 of 44.70 GiB on one CUDA card ("), "{text}");
    ensure!(text.lines().count() < 20 && !text.contains("theory"), "{text}");
    ensure!(said(&["--gpu", "48GB", "--verbose"])?.contains("theory"));
    let small = said(&["--gpu", "6GB"])?;
    ensure!(
        small.starts_with("does not fit: ")
            && small.contains("hint: memory.offload = [\"params\"]: 5.34 GiB"),
        "{small}"
    );
    let named = said(&["--gpu", "a100-80gb"])?;
    ensure!(named.starts_with("fits: ") && named.contains("by the data sheet of A100-80"), "{named}");
    for (gpu, words) in [
        ("A100", "such as 48GB, or one of L4, A10, 4090, 3090, 5090, A100-40, "),
        ("T4", "--gpu T4: T4 has compute capability 7.5, and ft needs 8.0 or later"),
        ("Tesla V100-16GB", "has compute capability 7.0, and ft needs 8.0 or later"),
    ] {
        let out = plan(&["--gpu", gpu])?;
        let err = String::from_utf8_lossy(&out.stderr).into_owned();
        ensure!(out.status.code() == Some(2) && err.contains(words), "{err}");
    }
    Ok(())
}
