//! Results of evaluations: the best one of a run, and patience for early stopping.

use ft_base::store::Checkpoints;
use ft_base::terminal::warn;
use ft_recipe::Best;
use serde_json::{Map, Value};

/// Result of an evaluation.
#[derive(Clone, Debug, Default)]
pub struct Evaluation {
    /// Mean loss over the targets, by weight; over the pairs, rated completions or classified documents.
    pub loss: f64,
    pub targets: usize,
    /// Further metrics, by name.
    pub metrics: Map<String, Value>,
}

/// History of evaluation losses, or accuracies.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EvalHistory {
    by: Best,
    /// Value before the first step.
    start: Option<f64>,
    /// Step and value of the best evaluation after at least one step.
    best: Option<(u64, f64)>,
    /// Number of evaluations since the last new best.
    since: usize,
}

impl EvalHistory {
    /// Without evaluations.
    pub fn new(by: Best) -> Self {
        Self { by, start: None, best: None, since: 0 }
    }

    /// Reads evaluations from the events of a run.
    pub fn of(by: Best, events: &[Value]) -> Self {
        let mut out = Self::new(by);
        for e in events.iter().filter(|e| e["event"] == "eval") {
            if let (Some(step), Some(value)) = (e["step"].as_u64(), e[by.word()].as_f64()) {
                out.record(step, value);
            }
        }
        out
    }

    /// Drops evaluations of data with another hash than `data` from the events of a run. Returns their number.
    pub fn only_of(events: &mut Vec<Value>, data: Option<&str>) -> usize {
        let (before, mut is_other) = (events.len(), false);
        events.retain(|e| {
            if let Some(hash) = e["data"]["eval"].as_str() {
                is_other = Some(hash) != data;
            }
            !(is_other && e["event"] == "eval")
        });
        before - events.len()
    }

    /// The compared value of an evaluation.
    pub fn value_of(&self, evaluation: &Evaluation) -> f64 {
        match self.by {
            Best::Loss => evaluation.loss,
            Best::Accuracy => evaluation.metrics.get("accuracy").and_then(Value::as_f64).unwrap_or(f64::NAN),
        }
    }

    /// A value in words: "loss 0.1234".
    pub fn told(&self, value: f64) -> String {
        format!("{} {value:.4}", self.by.word())
    }

    fn is_better(&self, value: f64, than: f64) -> bool {
        match self.by {
            Best::Loss => value < than,
            Best::Accuracy => value > than,
        }
    }

    /// As [`EvalHistory::of`], for runs with `run.keep_best`: ignores evaluations without a whole checkpoint, with
    /// a warning. Step `newest` is exempt, because the caller has the checkpoint or is about to write it.
    pub fn with_checkpoints(
        by: Best,
        mut events: Vec<Value>,
        checkpoints: &Checkpoints,
        newest: u64,
    ) -> Self {
        loop {
            let all = Self::of(by, &events);
            let Some((step, value)) = all.best.filter(|(step, _)| *step != newest) else { return all };
            let Err(e) = checkpoints.whole(step) else { return all };
            warn(&format!("the best evaluation, after step {step} ({}), is left out: {e}", all.told(value)));
            events.retain(|e| e["event"] != "eval" || e["step"] != step);
        }
    }

    /// Records an evaluation. Returns true for the best after at least one step; step 0 never counts, because no result
    /// belongs to it.
    pub fn record(&mut self, step: u64, value: f64) -> bool {
        if step == 0 {
            self.start = Some(value);
            return false;
        }
        let first = self.best_of_all().is_none_or(|(_, best)| self.is_better(value, best));
        self.since = if first { 0 } else { self.since + 1 };
        let better = self.best.is_none_or(|(_, best)| self.is_better(value, best));
        if better {
            self.best = Some((step, value));
        }
        better
    }

    /// Step and value of the best evaluation after at least one step.
    pub fn best(&self) -> Option<(u64, f64)> {
        self.best
    }

    /// Step and value of the best evaluation, including step 0.
    pub fn best_of_all(&self) -> Option<(u64, f64)> {
        let start = self.start.map(|value| (0, value));
        match (start, self.best) {
            (Some(start), Some(best)) => Some(if self.is_better(best.1, start.1) { best } else { start }),
            (start, best) => start.or(best),
        }
    }

    /// Returns true after `patience` evaluations in a row without a new best. Patience 0 means never.
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
        let mut b = EvalHistory::of(Best::Loss, &events);
        assert_eq!(b.best(), Some((20, 2.0)));
        assert!(b.is_exhausted(1) && !b.is_exhausted(2) && !b.is_exhausted(0));
        assert!(!b.record(40, 2.5) && b.is_exhausted(2));
        assert!(b.record(50, 1.0) && !b.is_exhausted(1));
    }

    #[test]
    fn the_highest_accuracy_is_the_best() {
        let eval = |step: u64, accuracy: f64| json!({"event": "eval", "step": step, "loss": 1.0, "accuracy": accuracy});
        let mut b = EvalHistory::of(Best::Accuracy, &[eval(0, 0.5), eval(10, 0.7), eval(20, 0.6)]);
        assert_eq!((b.best(), b.is_exhausted(1)), (Some((10, 0.7)), true));
        assert!(!b.record(30, 0.7) && b.record(40, 0.8));
        assert_eq!(b.told(0.8), "accuracy 0.8000");
    }

    #[test]
    fn evaluations_of_other_data_are_left_out() {
        let start = |hash: Option<&str>| json!({"event": "start", "data": {"eval": hash}});
        let eval = |step: u64| json!({"event": "eval", "step": step, "loss": 1.0});
        let all = [
            start(None),
            eval(10),
            start(Some("a")),
            eval(20),
            start(Some("b")),
            eval(30),
            start(Some("a")),
            eval(40),
        ];
        for (data, steps) in [("a", &[10, 20, 40][..]), ("b", &[10, 30]), ("c", &[10])] {
            let mut events = all.to_vec();
            assert_eq!(EvalHistory::only_of(&mut events, Some(data)), 4 - steps.len());
            let left: Vec<u64> = events.iter().filter_map(|e| e["step"].as_u64()).collect();
            assert_eq!(left, steps, "{data}");
        }
    }

    /// Values of a resumed run are those that it wrote, to the bit.
    #[test]
    fn values_survive_the_file() -> serde_json::Result<()> {
        for n in 1..200 {
            let accuracy = f64::from(n) / 200.0 / 3.0;
            let line = json!({"event": "eval", "step": 10, "loss": 1.0, "accuracy": accuracy}).to_string();
            let b = EvalHistory::of(Best::Accuracy, &[serde_json::from_str(&line)?]);
            assert_eq!(b.best(), Some((10, accuracy)), "{n}");
        }
        let read: f64 = serde_json::from_str("0.9333333333333333")?;
        assert_eq!(read, 14.0 / 15.0);
        Ok(())
    }

    #[test]
    fn an_evaluation_at_step_0_is_no_result_but_must_be_beaten() {
        let mut b = EvalHistory::new(Best::Loss);
        assert!(!b.record(0, 1.0));
        assert_eq!((b.best(), b.best_of_all()), (None, Some((0, 1.0))));
        assert!(b.record(10, 3.0) && b.record(20, 2.0) && b.is_exhausted(2));
        assert_eq!((b.best(), b.best_of_all()), (Some((20, 2.0)), Some((0, 1.0))));
        assert!(b.record(30, 0.5) && !b.is_exhausted(1));
        assert_eq!(b.best_of_all(), Some((30, 0.5)));
    }
}
