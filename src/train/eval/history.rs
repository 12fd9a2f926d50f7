//! Best evaluation of a run, and patience for early stopping.

use ft_base::store::Checkpoints;
use ft_base::terminal::warn;
use serde_json::Value;

/// History of evaluation losses.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EvalHistory {
    /// Loss before the first step.
    start: Option<f64>,
    /// Step and loss of the best evaluation after at least one step.
    best: Option<(u64, f64)>,
    /// Number of evaluations since the last new minimum.
    since: usize,
}

impl EvalHistory {
    /// Reads evaluations from the events of a run.
    pub fn of(events: &[Value]) -> Self {
        let mut out = Self::default();
        for e in events.iter().filter(|e| e["event"] == "eval") {
            if let (Some(step), Some(loss)) = (e["step"].as_u64(), e["loss"].as_f64()) {
                out.record(step, loss);
            }
        }
        out
    }

    /// As [`EvalHistory::of`], for runs with `run.keep_best`: ignores evaluations without a whole checkpoint, with
    /// a warning. Step `newest` is exempt, because the caller has its checkpoint or is about to write it.
    pub fn with_checkpoints(mut events: Vec<Value>, checkpoints: &Checkpoints, newest: u64) -> Self {
        loop {
            let all = Self::of(&events);
            let Some((step, loss)) = all.best.filter(|(step, _)| *step != newest) else { return all };
            let Err(e) = checkpoints.whole(step) else { return all };
            warn(&format!("the best evaluation, after step {step} (loss {loss:.4}), is left out: {e}"));
            events.retain(|e| e["event"] != "eval" || e["step"] != step);
        }
    }

    /// Records an evaluation. Returns true if it is the best after at least one step; step 0 never counts,
    /// because no result belongs to it.
    pub fn record(&mut self, step: u64, loss: f64) -> bool {
        if step == 0 {
            self.start = Some(loss);
            return false;
        }
        let lowest = self.lowest().is_none_or(|(_, lowest)| loss < lowest);
        self.since = if lowest { 0 } else { self.since + 1 };
        let better = self.best.is_none_or(|(_, best)| loss < best);
        if better {
            self.best = Some((step, loss));
        }
        better
    }

    /// Step and loss of the best evaluation after at least one step.
    pub fn best(&self) -> Option<(u64, f64)> {
        self.best
    }

    /// Step and loss of the lowest evaluation, including step 0.
    pub fn lowest(&self) -> Option<(u64, f64)> {
        let start = self.start.map(|loss| (0, loss));
        match (start, self.best) {
            (Some(start), Some(best)) => Some(if best.1 < start.1 { best } else { start }),
            (start, best) => start.or(best),
        }
    }

    /// Returns true after `patience` evaluations in a row without a new minimum. Patience 0 means never.
    pub fn is_exhausted(&self, patience: usize) -> bool {
        patience > 0 && self.since >= patience
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_first_of_the_lowest_is_the_best() {
        let eval = |step: u64, loss: f64| json!({"event": "eval", "step": step, "loss": loss});
        let events =
            [eval(10, 3.0), json!({"event": "step", "step": 11, "loss": 0.0}), eval(20, 2.0), eval(30, 2.0)];
        let mut b = EvalHistory::of(&events);
        assert_eq!(b.best(), Some((20, 2.0)));
        assert!(b.is_exhausted(1) && !b.is_exhausted(2) && !b.is_exhausted(0));
        assert!(!b.record(40, 2.5) && b.is_exhausted(2));
        assert!(b.record(50, 1.0) && !b.is_exhausted(1));
    }

    #[test]
    fn what_was_before_the_first_step_is_of_no_result_and_to_be_beaten() {
        let mut b = EvalHistory::default();
        assert!(!b.record(0, 1.0));
        assert_eq!((b.best(), b.lowest()), (None, Some((0, 1.0))));
        assert!(b.record(10, 3.0) && b.record(20, 2.0) && b.is_exhausted(2));
        assert_eq!((b.best(), b.lowest()), (Some((20, 2.0)), Some((0, 1.0))));
        assert!(b.record(30, 0.5) && !b.is_exhausted(1));
        assert_eq!(b.lowest(), Some((30, 0.5)));
    }
}
