//! Runs of which one rank is lost.

use super::again_tests::{events, train};
use super::ranks::broken::{BREAKS, Breaks};
use crate::comm;
use crate::error::ExitCode;
use anyhow::{Context as _, Result};

fn no_memory() -> crate::Result<()> {
    Err(candle_core::Error::Msg("out of memory".into()).into())
}

fn panics() -> crate::Result<()> {
    std::panic::resume_unwind(Box::new("of a test"))
}

fn hangs() -> crate::Result<()> {
    loop {
        std::thread::park();
    }
}

/// However a rank is lost, the run ends with an error that names it and its last collective, and the checkpoints before
/// are whole.
#[test]
fn a_lost_rank_ends_the_run() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let cases: [(&str, Breaks, ExitCode, &str, &str); 3] = [
        ("fails", no_memory, ExitCode::DoesNotFit, "out of memory", "parallel.zero=3"),
        ("panics", panics, ExitCode::LostRank, "it panicked", "parallel.zero=2"),
        ("hangs", hangs, ExitCode::LostRank, "within 5 s", "parallel.zero=3"),
    ];
    for (name, breaks, code, says, zero) in cases {
        let out = dir.path().join(name);
        BREAKS.lock().ok().context("the list")?.push((out.clone(), 2, 3, breaks));
        let set = ["parallel.data=4", zero, "parallel.timeout=5", "run.save_every=2"];
        let set = [&set[..], &["run.batch_rows=4", "run.micro_rows=1"]].concat();
        let (_, done) = train(dir.path(), name, &set);
        let e = done.err().context("it ran")?;
        assert_eq!(e.exit_code(), code, "{name}: {e}");
        let lost = e.of::<comm::Error>().with_context(|| format!("{name}: {e}"))?;
        let text = lost.to_string();
        assert_eq!((lost.rank, lost.world), (2, 4), "{text}");
        assert!(!lost.host.is_empty() && text.contains("last collective") && text.contains(says), "{text}");
        assert_eq!((events(&out, "step")?.len(), events(&out, "stopped")?.len()), (3, 1), "{name}");
        assert!(out.join("checkpoints/step-00000002/COMPLETE").is_file() && !out.join("adapter").exists());
    }
    Ok(())
}
