//! Checks of `[optimizer]` against further keys.

use super::context::Cross;
use crate::keys::{Dtype, MICRO_ROWS, Method, MicroRows, Offload, Recipe};

impl Cross<'_, '_> {
    pub(super) fn optimizer(&mut self, recipe: &Recipe) {
        let both = ["optimizer.warmup_steps", "optimizer.warmup_ratio"];
        if both.iter().all(|p| self.given(p)) {
            self.report(
                both[1],
                "warmup_steps and warmup_ratio are both given".into(),
                "they say the same thing in two ways: leave one out",
            );
        }
        let o = &recipe.optimizer;
        if self.all_good(&["optimizer", "optimizer.min_lr", "optimizer.lr"])
            && let Some(lr) = o.lr
            && o.min_lr > lr
        {
            let message = format!("min_lr = {:?} is above lr = {lr:?}", o.min_lr);
            self.report("optimizer.min_lr", message, "the learning rate falls from lr to min_lr");
        }
    }

    /// Conflicts of `optimizer.in_backward` with further keys.
    pub(super) fn in_backward(&mut self, recipe: &Recipe) {
        const KEY: &str = "optimizer.in_backward";
        if !recipe.optimizer.in_backward
            || !self.all_good(&[
                KEY,
                "run.batch_rows",
                "run.micro_rows",
                "run.clip",
                "model.dtype",
                "parallel.data",
            ])
        {
            return;
        }
        let (run, ranks) = (&recipe.run, recipe.parallel.data);
        if run.clip != 0.0 {
            let message = "a layer that is updated in its backward pass cannot be clipped by the norm of all \
                           gradients, which is known after the last layer";
            self.report(KEY, message.into(), "write run.clip = 0, or in_backward = false");
        }
        let one = run.batch_rows / ranks.max(1);
        if run.micro_rows == MicroRows::Auto || run.micro_rows.count() * ranks != run.batch_rows {
            let micro = match run.micro_rows {
                MicroRows::Auto => "\"auto\"".to_string(),
                MicroRows::Rows(n) => n.to_string(),
            };
            let message = format!(
                "a layer is updated with one micro-batch, and a step of batch_rows = {} has micro-batches of \
                 micro_rows = {micro} on {ranks} rank(s)",
                run.batch_rows
            );
            let hint = match one * ranks == run.batch_rows && (1..=MICRO_ROWS).contains(&(one as u64)) {
                true => format!(
                    "write run.micro_rows = {one}, or run.batch_rows = {}",
                    run.micro_rows.count() * ranks
                ),
                false => format!("write run.batch_rows = {}", run.micro_rows.count() * ranks),
            };
            self.report(KEY, message, hint);
        }
        if recipe.model.dtype == Some(Dtype::F16) {
            let message =
                "in f16 a step whose gradients overflow is done again, which is known after the last layer";
            self.report(KEY, message.into(), "write model.dtype = \"bf16\", or in_backward = false");
        }
    }

    /// Conflicts of GaLore with further keys.
    pub(super) fn galore(&mut self, recipe: &Recipe) {
        const KEY: &str = "optimizer.name";
        let o = &recipe.optimizer;
        if !self.all_good(&["optimizer", KEY, "parallel", "parallel.zero", "parallel.data", "memory.offload"])
        {
            return;
        }
        let word = o.name.word();
        if !o.name.projects() {
            return;
        }
        if recipe.parallel.zero > 0 && recipe.parallel.stage() > 1 {
            let message = format!("not built yet: {KEY} = \"{word}\" with states that ranks split");
            self.report("parallel.zero", message, "write parallel.zero = 0");
        }
        if recipe.memory.offloads(Offload::Optimizer) {
            let message = format!("not built yet: {KEY} = \"{word}\" with states on the host");
            self.report("memory.offload", message, "leave \"optimizer\" out of memory.offload");
        }
        if self.rules_are_good()
            && !recipe.train.is_empty()
            && recipe.train.iter().all(|r| !r.is(Method::Full))
        {
            let message =
                format!("{KEY} = \"{word}\" is for matrices that train in full, and no rule trains any");
            self.report(KEY, message, "a rule with method = \"full\", or optimizer.name = \"adamw\"");
        }
    }
}
