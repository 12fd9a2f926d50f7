//! Training step by step.

use super::ROOT;
use super::out_of_memory::{adapter, recipe, train};
use crate::{Run, Session};
use anyhow::{Context as _, Result};

/// A session of three steps on the CPU, of the quickstart's model and of the rows in `file`.
fn session(start: &str, rule: &str, (file, format): (&str, &str), data: &str) -> ft_base::Result<Session> {
    let rows = format!("[{{ source = \"{ROOT}/data/quickstart/{file}\", format = \"{format}\" }}]");
    let data = data.replace("ROWS", &rows);
    let run = "steps = 3\nbatch_rows = 4\nmicro_rows = 4\ndevice = \"cpu\"";
    Run::from_toml(&format!(
        "{start}source = \"{ROOT}/data/model\"\n[[train]]\n{rule}\n[data]\nmax_length = 256\ntrain = {rows}\n{data}\n\
         [run]\n{run}\n"
    ))?
    .load()
}

/// A result on disk, an evaluation and logits in the middle of the training change no bit of its end: with f32 master
/// weights that a model's file has rounded, and with weights that come and go.
#[test]
fn a_session_goes_on_after_a_result() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let rows = ("train.jsonl", "messages");
    let full = ("[model]\ndtype = \"bf16\"\n", "modules = [\"/.*/\"]\nmethod = \"full\"", "");
    let offloaded =
        ("[model]\n", "modules = [\"attention\"]", "[memory]\noffload = [\"params\", \"optimizer\"]");
    for (start, rule, more) in [full, offloaded] {
        let end = |looks: bool| -> Result<Vec<u8>> {
            let mut session = session(start, rule, rows, more)?;
            while session.step()?.is_some() {
                if looks {
                    session.save(dir.path().join("looks"))?;
                    assert!(session.evaluate()?.0.is_finite() && session.logits(0)?.elem_count() > 0);
                }
            }
            let saved = session.save(dir.path().join("end"))?;
            let file = if saved.ends_with("model") { "model" } else { "adapter_model" };
            Ok(std::fs::read(saved.join(format!("{file}.safetensors")))?)
        };
        assert!(end(true)? == end(false)?, "{rule}");
    }
    Ok(())
}

/// The reference of the training data is computed of the rows in the steps alone.
#[test]
fn a_task_with_a_reference_is_evaluated_on_data_of_its_own() -> Result<()> {
    let rows = ("choices-eval.jsonl", "preference");
    let session = |data: &str| session("task = \"dpo\"\n[model]\n", "modules = [\"attention\"]", rows, data);
    let refused = session("")?.evaluate().err().context("evaluated")?;
    assert!(refused.to_string().contains("data.eval is missing"), "{refused}");
    let (loss, _) = session("eval = ROWS")?.evaluate()?;
    assert!((loss - 2f64.ln()).abs() < 1e-6, "{loss}");
    Ok(())
}

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
