//! Best evaluation of a run, and patience for early stopping.

use ft_base::store::Checkpoints;
use ft_base::terminal::warn;
use serde_json::Value;

/// History of evaluation losses.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Best {
    /// Loss before the first step.
    start: Option<f64>,
    /// Step and loss of the best evaluation after at least one step.
    best: Option<(u64, f64)>,
    /// Number of evaluations since the last new minimum.
    since: usize,
}

impl Best {
    /// Reads evaluations from the events of a run.
    pub fn of(events: &[Value]) -> Self {
        let mut out = Self::default();
        for e in events.iter().filter(|e| e["event"] == "eval") {
            if let (Some(step), Some(loss)) = (e["step"].as_u64(), e["loss"].as_f64()) {
                out.seen(step, loss);
            }
        }
        out
    }

    /// As [`Best::of`], for runs with `run.keep_best`: ignores evaluations without a whole checkpoint, with
    /// a warning. Step `newest` is exempt, because the caller has its checkpoint or is about to write it.
    pub fn of_whole(mut events: Vec<Value>, checkpoints: &Checkpoints, newest: u64) -> Self {
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
    pub fn seen(&mut self, step: u64, loss: f64) -> bool {
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
    pub fn get(&self) -> Option<(u64, f64)> {
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
    pub fn exhausts(&self, patience: usize) -> bool {
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
        let mut b = Best::of(&events);
        assert_eq!(b.get(), Some((20, 2.0)));
        assert!(b.exhausts(1) && !b.exhausts(2) && !b.exhausts(0));
        assert!(!b.seen(40, 2.5) && b.exhausts(2));
        assert!(b.seen(50, 1.0) && !b.exhausts(1));
    }

    #[test]
    fn what_was_before_the_first_step_is_of_no_result_and_to_be_beaten() {
        let mut b = Best::default();
        assert!(!b.seen(0, 1.0));
        assert_eq!((b.get(), b.lowest()), (None, Some((0, 1.0))));
        assert!(b.seen(10, 3.0) && b.seen(20, 2.0) && b.exhausts(2));
        assert_eq!((b.get(), b.lowest()), (Some((20, 2.0)), Some((0, 1.0))));
        assert!(b.seen(30, 0.5) && !b.exhausts(1));
        assert_eq!(b.lowest(), Some((30, 0.5)));
    }
}
