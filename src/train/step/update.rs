//! One optimizer step.

use super::context::{StepInput, StepOutput, TrainContext};
use super::finite;
use super::loss_scale::LossScale;
use ft_engine::optim;
use ft_engine::walk::{Part, Times};

impl TrainContext<'_> {
    /// Runs one step: accumulates gradients over all micro-batches, normalized by the number of targets in
    /// the step, then updates the weights.
    ///
    /// # Errors
    /// [`crate::train::Error::NonFinite`], before any update.
    pub fn step(&self, input: &StepInput<'_>) -> ft_base::Result<StepOutput> {
        self.timed_step(input, &mut Times::off())
    }

    /// As [`TrainContext::step`]. Adds the time of every part to `times`.
    pub fn timed_step(&self, input: &StepInput<'_>, times: &mut Times) -> ft_base::Result<StepOutput> {
        let output = self.accumulate(input, times, &|| 0)?;
        self.update(input, &output, times)?;
        Ok(output)
    }

    /// Clips the accumulated gradients and updates the weights.
    ///
    /// # Errors
    /// [`crate::train::Error::NonFinite`], before any update.
    pub fn update(
        &self,
        input: &StepInput<'_>,
        output: &StepOutput,
        times: &mut Times,
    ) -> ft_base::Result<()> {
        let params = &self.model.params;
        let factor = optim::clip_factor(output.grad_norm, self.job.recipe.run.clip);
        finite::check_gradients(self, input, output, factor)?;
        if !params.in_backward {
            let scale = factor / self.loss_factor();
            self.model.optimizer.step(params, self.comm, input.step + 1, input.lr, scale)?;
        }
        self.loss_scale.set(self.loss_scale.get().map(LossScale::after_step));
        Ok(times.lap(Part::Step, self.device())?)
    }
}
