//! Training step by step.

use super::out_of_memory::{adapter, recipe, train};
use crate::Run;
use anyhow::Result;

#[test]
fn a_session_computes_the_bits_of_a_run() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let (out, done) = train(dir.path(), "run", &[]);
    done?;
    let mut session = Run::new(recipe(&dir.path().join("unused"), &[])?).load()?;
    while session.step()?.is_some() {}
    assert_eq!((session.done(), session.evaluate()?.0.is_finite()), (5, true));
    let saved = session.save(dir.path().join("session"))?;
    assert!(std::fs::read(saved.join("adapter_model.safetensors"))? == adapter(&out)?);
    assert!(!dir.path().join("unused").exists());
    Ok(())
}
