//! Exports a checkpoint as an adapter or a model.

use super::folder::{changes_base, save_adapter, write_model};
use super::read_back::wrong;
use crate::train::checkpoint::state;
use crate::train::job::Job;
use candle_core::{DType, Device, Tensor};
use ft_engine::adapters::Trained;
use ft_engine::adapters::peft;
use std::path::Path;

/// Exports a checkpoint as a result, without the weights of the base.
///
/// # Errors
/// Checkpoint of another run. DoRA in combination with plain LoRA, which needs magnitudes from the base.
/// `lora.init` with a decomposition of the base, for the same reason.
pub fn of_checkpoint(job: &Job, checkpoint: &Path, out: &Path) -> ft_base::Result<()> {
    let trained = job.selection.trained();
    let files = state::weights(checkpoint)?;
    let values = |i: usize| -> ft_base::Result<Tensor> {
        let t: &Trained = &trained[i];
        // Dtype in the checkpoint.
        let held = files.info(&t.name).and_then(|i| DType::try_from(i.dtype).ok()).unwrap_or(DType::F32);
        let value = files.tensor(&t.name, held, &Device::Cpu)?;
        if value.dims() != t.shape {
            return Err(wrong(checkpoint, format!("{} has the shape {:?}", t.name, value.dims())).into());
        }
        Ok(value)
    };
    if job.selection.everything_full() {
        write_model(job, (&trained, &values), out)?;
    } else {
        if peft::needs_neutral(&job.selection) {
            let why =
                "DoRA beside plain LoRA needs the base's weights\n  hint: ft run --resume writes adapter/";
            return Err(wrong(checkpoint, why.into()).into());
        }
        if changes_base(job) {
            let init = job.recipe.place("lora.init");
            let why = format!(
                "{init}: lora.init needs the base's weights\n  hint: ft run --resume writes adapter/"
            );
            return Err(wrong(checkpoint, why).into());
        }
        save_adapter(job, &job.selection, (&trained, &values, Vec::new()), out)?;
    }
    Ok(job.trained().save(out, job.tokenizer.as_deref().and_then(|t| t.given_template()))?)
}
