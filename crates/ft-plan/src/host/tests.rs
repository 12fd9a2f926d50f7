//! Capacity on fictional machines.

use super::capacity::{Capacity, Volume};
use super::files::FileGroup;
use super::parts::{NamedBytes, sum};
use super::plan::{MPI, NCCL, TOKENS};
use crate::{Plan, Workload};
use ft_recipe::Recipe;
use serde_json::{Value, json};
use std::path::Path;

const BASE: &str = "[model]\nsource = \"Qwen/Qwen3-0.6B\"\n[[train]]\nmodules = [\"attention\", \"mlp\"]\n\
    [[data.train]]\nsource = \"d.jsonl\"\nformat = \"text\"\n";
const FULL: &str = "train.0.method=full";
const GIB: u64 = 1 << 30;

/// A recipe as `ft plan` reads it.
fn recipe(set: &[&str]) -> anyhow::Result<Recipe> {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("r.toml");
    std::fs::write(&path, BASE)?;
    let set: Vec<String> = set.iter().map(|s| s.to_string()).collect();
    Ok(Recipe::load_for_plan(&path, &set)?)
}

/// Two disks with `free` bytes each: one for the run folder, one for all other files.
fn plan(set: &[&str], host: u64, free: [u64; 2], replaced: u64) -> anyhow::Result<Plan> {
    let mut all = vec!["run.output=/runs/x".to_string(), "run.device=cpu".into()];
    all.extend(set.iter().map(|s| s.to_string()));
    let recipe = Recipe::parse(BASE, "r.toml", &all)?;
    let volume = |dir: &Path| {
        let k = usize::from(!dir.starts_with("/runs"));
        Some(Volume { id: k as u64, free: free[k] })
    };
    let room =
        Capacity { host: Some(host), shared: Some(64 << 20), volume: &volume, replaced: &|_| replaced };
    Ok(crate::of_recipe_in(&recipe, false, &room)?.0)
}

fn of(p: &Plan, name: &str) -> u64 {
    p.space.files.iter().filter(|f| f.name == name).map(|f| f.bytes).sum()
}

#[test]
fn kept_checkpoints_and_the_one_being_written_are_counted() -> anyhow::Result<()> {
    let n = 440_401_920u64; // decoder linears of Qwen3-0.6B
    let checkpoints = |set: &[&str]| -> anyhow::Result<u64> {
        let mut all = vec![FULL, "memory.budget=1TiB"];
        all.extend(set);
        Ok(of(&plan(&all, 64 * GIB, [1 << 40; 2], 0)?, "checkpoints"))
    };
    for (set, count) in [
        (&["run.steps=100"][..], 1),
        (&["run.steps=100", "run.save_every=60"], 2),
        (&["run.steps=100", "run.save_every=10"], 3),
        (&["run.steps=100", "run.save_every=10", "run.keep=5"], 6),
        (&["run.save_every=10", "run.keep=5"], 6),
        (&["run.steps=100", "run.save_every=50%"], 2),
        (&["run.steps=100", "run.save_every=10%", "run.keep=5"], 6),
        (&["run.save_every=epoch"], 1),
        (&["run.save_every=epoch/2"], 2),
        (&["run.save_every=epoch/2", "run.epochs=3"], 3),
        // the newest two, the best one, and the one that is written
        (&["run.steps=100", "run.eval_every=10", "run.keep_best=true", "data.eval_share=0.1"], 4),
        (&["run.eval_every=10", "run.keep_best=true", "data.eval_share=0.1"], 4),
        (&["run.steps=15", "run.eval_every=10", "run.keep_best=true", "data.eval_share=0.1"], 2),
    ] {
        let got = checkpoints(set)?;
        assert!(got > count * 12 * n && got < count * (12 * n + (1 << 20)), "{set:?}: {got}");
    }
    Ok(())
}

#[test]
fn files_are_summed_by_disk() -> anyhow::Result<()> {
    let set = [FULL, "memory.budget=60GiB", "run.steps=9", "run.save_every=1", "run.keep=3"];
    let p = plan(&set, 64 * GIB, [100 * GIB, 100 * GIB], 0)?;
    assert!(p.fits(), "{:?}", p.space.shortages(true));
    assert_eq!(p.space.disks.len(), 2);
    // the model is not downloaded: 0.6 B parameters in bf16, in the hub's cache
    let model = of(&p, "model");
    assert!((1_190_000_000..1_200_000_000).contains(&model), "{model}");
    let (runs, hub) = (&p.space.disks[0], &p.space.disks[1]);
    assert_eq!(
        (runs.needed(), hub.needed()),
        (of(&p, "checkpoints") + of(&p, "result") + of(&p, "metrics"), model)
    );

    // 12 GiB hold two checkpoints of 5 GB and a result, but not four
    let p = plan(&set, 64 * GIB, [12 * GIB, GIB], 0)?;
    assert!(!p.fits() && p.fits_device());
    let said = p.refusal().to_string();
    for what in [
        "disk of /runs/x",
        "checkpoints 19.",
        "to change: run.keep, run.output",
        "12.00 GiB are free",
        "hint: run.keep 3 -> 1: fits, saves 9.8",
        "HF_HOME on another disk: fits, saves 1.11 GiB",
    ] {
        assert!(said.contains(what), "{what:?} is not in {said}");
    }
    let short = p.verdict().to_string();
    assert!(!short.contains("hint") && short.contains("disk of /runs/x"), "{short}");
    let mut fewer = set.to_vec();
    fewer[4] = "run.keep=1";
    assert!(plan(&fewer, 64 * GIB, [12 * GIB, 2 * GIB], 0)?.fits());
    // a budget above this machine's memory is for another machine of unknown disks
    let elsewhere = [FULL, "memory.budget=1TiB", set[2], set[3], set[4]];
    assert!(plan(&elsewhere, 64 * GIB, [12 * GIB, GIB], 0)?.fits());
    // files in the run folder are replaced
    assert!(plan(&set, 64 * GIB, [12 * GIB, 2 * GIB], 12 * GIB)?.fits());
    Ok(())
}

/// The token cache is estimated in advance; a disk too small gets a hint to disable it.
#[test]
fn a_disk_without_room_for_tokens_is_told_with_what_helps() -> anyhow::Result<()> {
    let recipe = Recipe::parse(BASE, "r.toml", &["run.output=/runs/x".into(), "memory.budget=1TiB".into()])?;
    let volume = |d: &Path| match d.starts_with("/cache") {
        true => Some(Volume { id: 1, free: GIB }),
        false => Some(Volume { id: 0, free: GIB << 10 }),
    };
    let room = Capacity { volume: &volume, ..Capacity::UNKNOWN };
    let mut p = crate::of_recipe_in(&recipe, false, &room)?.0;
    let tokens = FileGroup { name: "tokens", bytes: 3 * GIB, dir: "/cache".into(), change: TOKENS };
    p.space.files.push(tokens);
    p.look(&recipe, &room);
    let said = p.refusal().to_string();
    for what in [
        "disk of /cache: 3.00 GiB (tokens 3.00 GiB), and 1.00 GiB are free; to change: FT_CACHE, data.cache",
        "hint: FT_CACHE on another disk: fits, saves 3.00 GiB on this one",
        "hint: data.cache true -> false: fits, saves 3.00 GiB on this one; tokens stay in memory",
    ] {
        assert!(said.contains(what), "{what:?} is not in {said}");
    }
    assert!(p.hints.iter().any(|h| h.set == ["data.cache=false"]));
    // with another file on the disk, no single one of them makes enough room
    let model = FileGroup { name: "model", bytes: 2 * GIB, dir: "/cache".into(), change: &["HF_HOME"] };
    p.space.files.push(model);
    p.hints.clear();
    p.look(&recipe, &room);
    let said = p.refusal().to_string();
    for what in [
        "hint: FT_CACHE on another disk: saves 3.00 GiB on this one",
        "hint: data.cache true -> false: saves 3.00 GiB on this one; tokens stay in memory",
        "hint: HF_HOME on another disk: saves 2.00 GiB on this one",
    ] {
        assert!(said.contains(what), "{what:?} is not in {said}");
    }
    assert!(p.hints.iter().all(|h| h.set != ["data.cache=false"]));
    Ok(())
}

#[test]
fn files_on_one_disk_are_summed() -> anyhow::Result<()> {
    let recipe = Recipe::parse(BASE, "r.toml", &["run.output=/runs/x".into(), "memory.budget=1TiB".into()])?;
    let with = |free: u64| -> anyhow::Result<Plan> {
        let volume = |_: &Path| Some(Volume { id: 7, free });
        let room = Capacity { volume: &volume, ..Capacity::UNKNOWN };
        Ok(crate::of_recipe_in(&recipe, false, &room)?.0)
    };
    let all = sum(&with(1 << 50)?.space.files.iter().map(|f| (f.name, f.bytes)).collect::<NamedBytes>());
    assert!(with(all)?.fits() && !with(all - 1)?.fits());
    let json = with(all)?.json(None);
    assert_eq!((&json["disk"]["total"], &json["disk"]["available"]), (&json!(all), &json!(all)));
    assert_eq!(json["host"]["available"], Value::Null);
    Ok(())
}

/// On the CPU the device bytes count as host memory, once.
#[test]
fn the_cpus_device_is_the_host() -> anyhow::Result<()> {
    let roomy = plan(&["memory.budget=1TiB", "memory.host_budget=64GiB"], 0, [1 << 40; 2], 0)?;
    let (device, host) = (roomy.total(), sum(&roomy.space.host));
    assert_eq!(roomy.space.host_left, Some(64 * GIB - device));
    for (less, fits) in [(0, true), (1, false)] {
        let all = format!("memory.host_budget={}", device + host - less);
        let p = plan(&["memory.budget=1TiB", "memory.recompute=none", &all], 0, [1 << 40; 2], 0)?;
        assert_eq!(p.total(), device);
        assert_eq!(p.fits(), fits, "{}", p.refusal());
        assert!(p.fits_device());
    }
    // without a budget the device gets the host memory left by the process
    let p = plan(&["memory.host_budget=32GiB"], 0, [1 << 40; 2], 0)?;
    assert_eq!(p.budget, Some(32 * GIB / 20 * 19 - host));
    // and by the tokenized data
    let recipe = recipe(&["memory.host_budget=32GiB"])?;
    let mut data = Workload::default();
    data.epoch.get_or_insert_default().resident = GIB;
    let with = |w: Workload| super::budget(&recipe, crate::machine(&recipe, false), &w, (None, 0));
    assert_eq!(with(Workload::default()).zip(with(data)).map(|(a, b)| a - b), Some(GIB));
    Ok(())
}

#[test]
fn shared_memory_is_for_ranks_that_are_processes() -> anyhow::Result<()> {
    for (set, bytes) in [
        (&["parallel.data=1"][..], 0),
        (&["parallel.data=2", "parallel.comm=threads"], 0),
        (&["parallel.data=2", "parallel.comm=mpi"], MPI),
        (&["parallel.data=2", "parallel.comm=nccl"], NCCL),
    ] {
        let r = recipe(&[&["memory.budget=1TiB"], set].concat())?;
        let room = Capacity { shared: Some(16 << 20), ..Capacity::UNKNOWN };
        let p = crate::of_recipe_in(&r, false, &room)?.0;
        assert_eq!(sum(&p.space.shared), bytes, "{set:?}");
        assert_eq!(p.fits(), bytes < 16 << 20);
    }
    Ok(())
}

/// A plan over host memory is refused with required and available bytes and settings to change.
#[test]
fn a_host_that_is_too_small_is_told_beforehand() -> anyhow::Result<()> {
    let set = [
        "model.source=Qwen/Qwen2-72B",
        FULL,
        "train.0.modules=['attention', 'mlp', 'norms', 'embedding', 'head']",
        "parallel.data=8",
        "parallel.zero=3",
        "parallel.comm=nccl",
        "memory.budget=80GiB",
        "memory.offload=['optimizer', 'params', 'activations']",
    ];
    let recipe = recipe(&set)?;
    let with = |host: u64| -> anyhow::Result<Plan> {
        // eight ranks in one process
        let room = Capacity { host: Some(host), ..Capacity::UNKNOWN };
        Ok(crate::of_recipe_in(&recipe, true, &room)?.0)
    };
    let short = with(503_000_000_000)?;
    assert!(!short.fits());
    let said = short.refusal();
    assert_eq!(ft_base::error::Failure::exit_code(&said), ft_base::ExitCode::DoesNotFit);
    for what in ["offloaded optimizer 10", "offloaded weights 1", "58.56 GiB are left", "memory.offload, "] {
        assert!(said.to_string().contains(what), "{what:?} is not in {said}");
    }
    let host = sum(&short.space.host);
    assert!((126_000_000_000..140_000_000_000).contains(&host), "{host}");
    let roomy = with(8 * host)?;
    assert!(roomy.fits(), "{}", roomy.refusal());
    Ok(())
}
