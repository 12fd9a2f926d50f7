//! Out-of-memory recovery, tested on the CPU with simulated failures.

use super::{events, quickstart};
use crate::train::step::small_device::SMALL;
use crate::train::{Options, run};
use anyhow::{Context as _, Result};
use ft_base::error::ExitCode;
use ft_base::memory::place;
use ft_recipe::Recipe;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// The quickstart with five steps, in the folder `out`.
pub(super) fn recipe(out: &Path, set: &[&str]) -> ft_base::Result<Recipe> {
    let own = ["run.steps=5", "memory.budget=4GiB", "log.samples=[\"hi\"]", "run.eval_at_start=false"];
    quickstart(out, &[&own[..], set].concat())
}

/// Trains the quickstart model for five steps in `dir/name`.
pub(super) fn train(dir: &Path, name: &str, set: &[&str]) -> (PathBuf, ft_base::Result<()>) {
    let out = dir.join(name);
    let done = recipe(&out, set).and_then(|r| run(r, &Options::default()).map(|_| ()));
    (out, done)
}

pub(super) fn adapter(run: &Path) -> Result<Vec<u8>> {
    Ok(std::fs::read(run.join("adapter/adapter_model.safetensors"))?)
}

#[test]
fn a_step_that_runs_out_of_memory_begins_anew_with_more_recomputed() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let (plain, done) = train(dir.path(), "plain", &[]);
    done?;
    let bits = adapter(&plain)?;
    let start = &events(&plain, "start")?[0];
    let layers = start["plan"]["recompute_of"].as_u64().context("no layers")? as usize;
    let recomputed = |e: &Value| -> u64 {
        let of = &e["plan"]["choices"]["recompute"];
        ["value", "feed_forward", "norms"].iter().filter_map(|k| of[*k].as_u64()).sum()
    };
    assert_eq!(recomputed(start), 0);
    assert!(layers > 2);

    // From the first step, and from the third step of this process.
    for (from, enough) in [(0, 1), (0, layers / 2), (2, layers / 2)] {
        SMALL.set(Some((from, enough)));
        let (out, done) = train(dir.path(), &format!("small-{from}-{enough}"), &[]);
        SMALL.set(None);
        done?;
        assert!(adapter(&out)? == bits, "another result");
        let replanned = events(&out, "replanned")?;
        let last = replanned.last().context("nothing was replanned")?;
        assert!(recomputed(last) >= enough as u64, "{last}");
        assert_eq!((&last["step"], events(&out, "step")?.len()), (&Value::from(from), 5));
        let peaks: Vec<u64> =
            replanned.iter().filter_map(|e| e["plan"]["peak_device_bytes"].as_u64()).collect();
        assert!(peaks.windows(2).all(|w| w[1] < w[0]), "{peaks:?}");
    }
    Ok(())
}

#[test]
fn out_of_memory_ends_a_run_where_no_plan_takes_less_or_it_comes_late() -> Result<()> {
    let dir = tempfile::tempdir()?;
    for (name, small, set, replans) in [
        ("never", (0, usize::MAX), &[][..], true),
        ("late", (3, 1), &[], false),
        ("fixed", (0, 1), &["memory.recompute=none"], false),
    ] {
        let path = dir.path();
        // Tests of other threads move the position of the process; a rank other than 0 has its own.
        let (out, done) = std::thread::scope(|s| {
            let small_run = move || {
                place::follow();
                SMALL.set(Some(small));
                train(path, name, set)
            };
            s.spawn(small_run).join().expect("no panic")
        });
        let e = done.err().context("it ran")?;
        assert_eq!(e.exit_code(), ExitCode::DoesNotFit, "{name}: {e}");
        assert!(!e.to_string().contains("saving"), "{name}: {e}");
        if name != "fixed" {
            assert_eq!(!events(&out, "replanned")?.is_empty(), replans, "{name}");
        }
        assert_eq!(events(&out, "stopped")?.len(), 1, "{name}");
        assert!(!out.join("adapter").exists(), "{name}");
        // no step is lost
        assert_eq!(out.join("checkpoints/step-00000003").is_dir(), name == "late", "{name}");
    }
    let late = dir.path().join("late");
    run(recipe(&late, &[])?, &Options { resume: true, ..Options::default() })?;
    let (plain, done) = train(dir.path(), "plain", &[]);
    done?;
    assert!(adapter(&late)? == adapter(&plain)?, "another result");
    Ok(())
}
