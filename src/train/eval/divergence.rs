//! Detection of diverged runs.

use super::loss::probe_of;
use crate::train::Error;
use crate::train::step::{StepOutput, TrainContext};
use candle_core::DType;
use ft_data::Micro;
use ft_kernels::to_host;
use ft_recipe::Task;

/// Number of steps without a gradient between checks of the logits.
const CHECK_EVERY: u64 = 3;

/// Detects a diverged model: all logits of a token are equal.
///
/// A zero gradient alone is not conclusive: experts may receive no token, and a router with top-1 experts
/// may get no gradient. So the logits decide, and they are computed only after steps without a gradient.
#[derive(Debug, Default)]
pub struct DivergenceCheck {
    /// Number of consecutive steps without a gradient.
    steps: u64,
}

impl DivergenceCheck {
    /// Records step number `step` with one of its rows; `last` marks the final step of the run.
    ///
    /// # Errors
    /// [`Error::Diverged`].
    pub fn check(
        &mut self,
        cx: &TrainContext<'_>,
        output: &StepOutput,
        row: impl FnOnce() -> ft_base::Result<Micro>,
        (step, last): (u64, bool),
    ) -> ft_base::Result<()> {
        // a score has none to compare with, and pairs far apart have no gradient
        if cx.job.recipe.task == Task::Reward {
            return Ok(());
        }
        self.steps = if output.grad_norm == 0.0 && output.targets > 0 { self.steps + 1 } else { 0 };
        if self.steps == 0 || !(last || self.steps.is_multiple_of(CHECK_EVERY)) {
            return Ok(());
        }
        let row = row()?;
        if row.ids.is_empty() {
            return Ok(());
        }
        let logits_tv = probe_of(cx, &row)?.to_dtype(DType::F32)?;
        let logits_tv = to_host(&logits_tv)?.to_vec2::<f32>()?;
        let same = |row: &Vec<f32>| row.iter().all(|x| Some(x) == row.first());
        if logits_tv.iter().all(same) {
            return Err(Error::Diverged { step, steps: self.steps, loss: output.loss }.into());
        }
        Ok(())
    }
}
