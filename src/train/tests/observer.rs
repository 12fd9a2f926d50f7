//! An observer of a run.

use super::events;
use super::out_of_memory::recipe;
use crate::log::{Event, Observer};
use crate::train::{Options, Outcome, run};
use anyhow::{Context as _, Result};
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

/// What an observer saw, in words, and the result of the run.
fn watch(options: Options, out: &std::path::Path, last: u64) -> Result<(Vec<String>, PathBuf)> {
    let seen = Arc::<Mutex<Vec<String>>>::default();
    let list = seen.clone();
    let observer = Observer::new(move |event: &Event<'_>| {
        let mut end = ControlFlow::Continue(());
        let words = match event {
            Event::Start { name, step, steps } => format!("start {name} {step} of {steps}"),
            Event::Step { step, loss, tokens, .. } => {
                if *step == last {
                    end = ControlFlow::Break(());
                }
                assert!(loss.is_finite() && *tokens > 0);
                format!("step {step}")
            }
            Event::Sample { step, prompt, .. } => format!("sample {step} {prompt}"),
            Event::Checkpoint { step, path } => format!("checkpoint {step} {}", path.is_dir()),
            Event::End { step, result } => format!("end {step} {}", result.is_dir()),
            other => format!("{other:?}"),
        };
        list.lock().unwrap_or_else(PoisonError::into_inner).push(words);
        end
    });
    let recipe = recipe(out, &[])?;
    let Outcome::Done { result } = run(recipe, &Options { observer: Some(observer), ..options })? else {
        anyhow::bail!("no result");
    };
    let seen = seen.lock().unwrap_or_else(PoisonError::into_inner).clone();
    Ok((seen, result))
}

#[test]
fn an_observer_sees_a_run_and_ends_it() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let out = dir.path().join("o");
    let (seen, result) = watch(Options::default(), &out, 2)?;
    let begin = ["start quickstart 0 of 5", "sample 0 hi", "step 1", "step 2"];
    let end = ["sample 2 hi", "checkpoint 2 true", "end 2 true"];
    assert_eq!(seen, [&begin[..], &end].concat());
    assert!(result.is_dir());
    // The rest, to the same weights as in one go.
    let resume = Options { resume: true, ..Options::default() };
    let (seen, result) = watch(resume, &out, 99)?;
    assert_eq!(seen[..2], ["start quickstart 2 of 5", "step 3"]);
    assert_eq!(seen.last().context("an event")?, "end 5 true");
    let (_, whole) = watch(Options::default(), &dir.path().join("w"), 99)?;
    let weights = |result: PathBuf| std::fs::read(result.join("adapter_model.safetensors"));
    assert_eq!(weights(result)?, weights(whole)?);
    assert_eq!(events(&out, "end")?.len(), 1);
    Ok(())
}
