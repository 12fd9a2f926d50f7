//! The best evaluation of a run so far, and for how long there was no better one.

use serde_json::Value;

/// What evaluations have shown.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Best {
    /// Step and loss of the best.
    best: Option<(u64, f64)>,
    /// Evaluations after it.
    since: usize,
}

impl Best {
    /// Of the events of a run.
    pub fn of(events: &[Value]) -> Self {
        let mut out = Self::default();
        for e in events.iter().filter(|e| e["event"] == "eval") {
            if let (Some(step), Some(loss)) = (e["step"].as_u64(), e["loss"].as_f64()) {
                out.seen(step, loss);
            }
        }
        out
    }

    /// Takes an evaluation in; whether it is the best. One before the first step is none of the run.
    pub fn seen(&mut self, step: u64, loss: f64) -> bool {
        if step == 0 {
            return false;
        }
        let better = self.best.is_none_or(|(_, best)| loss < best);
        if better {
            (self.best, self.since) = (Some((step, loss)), 0);
        } else {
            self.since += 1;
        }
        better
    }

    /// The step and loss of the best.
    pub fn get(&self) -> Option<(u64, f64)> {
        self.best
    }

    /// Whether so many evaluations in a row were no better; never with 0.
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
        let events = [
            eval(0, 0.1),
            eval(10, 3.0),
            json!({"event": "step", "step": 11, "loss": 0.0}),
            eval(20, 2.0),
            eval(30, 2.0),
        ];
        let mut b = Best::of(&events);
        assert_eq!(b.get(), Some((20, 2.0)));
        assert!(b.exhausts(1) && !b.exhausts(2) && !b.exhausts(0));
        assert!(!b.seen(40, 2.5) && b.exhausts(2));
        assert!(b.seen(50, 1.0) && !b.exhausts(1));
    }
}
