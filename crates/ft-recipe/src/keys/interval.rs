//! Intervals of evaluations and checkpoints.

use super::checked::Checked;
use super::field::{Field, Formatted};
use crate::syntax::quote;

/// `run.eval_every` and `run.save_every`: the interval of an event that the end of the run has in any case.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Interval {
    /// A number of optimizer steps; 0 for no event before the end.
    Steps(usize),
    /// A share of all steps, in percent.
    Percent(f64),
    /// A fraction of an epoch: one over the number.
    Epoch(u32),
}

impl Interval {
    /// Spelling of the forms that are strings, for messages.
    pub(crate) const SPELT: &'static str = "\"epoch\", \"epoch/4\" (four an epoch) or \"5%\" (of all steps)";

    /// Regular expression of the same forms, for the schema.
    pub(crate) const PATTERN: &'static str = r"^(epoch(/[0-9]+)?|[0-9]+(\.[0-9]+)?%)$";

    /// Parses a form that is a string.
    pub(crate) fn from_text(text: &str) -> Option<Self> {
        if let Some(percent) = text.strip_suffix('%') {
            let digits = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
            let is_plain =
                percent.split_once('.').map_or_else(|| digits(percent), |(a, b)| digits(a) && digits(b));
            let share = percent.parse().ok().filter(|x| is_plain && (f64::MIN_POSITIVE..100.0).contains(x));
            return share.map(Interval::Percent);
        }
        let parts = match text.strip_prefix("epoch")? {
            "" => "1",
            parts => parts.strip_prefix('/').filter(|n| n.bytes().all(|b| b.is_ascii_digit()))?,
        };
        parts.parse().ok().filter(|n| (1..1_000_000).contains(n)).map(Interval::Epoch)
    }

    /// The form of a share of all steps from 0 to 1, as other toolkits write it.
    pub(crate) fn percent_text(share: f64) -> String {
        // a billionth of a percent hides the rounding of the product
        format!("{}%", (share * 1e11).round() / 1e9)
    }

    /// Whether the event can occur before the end of a run.
    pub fn recurs(self) -> bool {
        self != Interval::Steps(0)
    }

    /// Number of complete intervals after `done` steps, of `steps` in all. An epoch of `rows` rows is complete with the
    /// step of the last row; `taken` rows have been.
    pub fn completed(self, (done, steps): (usize, usize), (taken, rows): (u128, usize)) -> u128 {
        match self {
            Interval::Steps(0) => 0,
            Interval::Steps(n) => (done / n) as u128,
            Interval::Percent(percent) => (done / share(percent, steps)) as u128,
            Interval::Epoch(parts) => taken * u128::from(parts) / rows.max(1) as u128,
        }
    }

    /// Upper bound on the events before the end of a run of `epochs` and of `steps`, as far as these are known.
    pub fn most_before_end(self, epochs: Option<f64>, steps: Option<u64>) -> Option<u64> {
        let before_last = steps.map(|n| n.saturating_sub(1));
        match self {
            Interval::Steps(0) => Some(0),
            Interval::Steps(n) => Some(before_last? / n as u64),
            Interval::Percent(percent) => Some(match steps.and_then(|n| usize::try_from(n).ok()) {
                Some(steps) => steps.saturating_sub(1) / share(percent, steps),
                None => (100.0 / percent).ceil() as usize,
            } as u64),
            Interval::Epoch(parts) => {
                let ends = epochs.map(|epochs| ((epochs * f64::from(parts)).ceil() as u64).saturating_sub(1));
                ends.into_iter().chain(before_last).min()
            }
        }
    }
}

/// A share of `all` steps, rounded up; the rounding of the product itself makes no further step.
fn share(percent: f64, all: usize) -> usize {
    let steps = all as f64 * percent / 100.0 * (1.0 - 1e-12);
    (steps.ceil() as usize).max(1)
}

impl From<usize> for Interval {
    fn from(steps: usize) -> Self {
        Interval::Steps(steps)
    }
}

impl Field for Interval {
    fn read(checked: Option<&Checked>) -> Self {
        match checked {
            Some(Checked::Interval(interval)) => *interval,
            _ => Interval::Steps(0),
        }
    }

    fn write(&self) -> Formatted {
        Formatted::Value(match self {
            Interval::Steps(n) => n.to_string(),
            Interval::Percent(percent) => quote(&format!("{percent}%")),
            Interval::Epoch(1) => quote("epoch"),
            Interval::Epoch(parts) => quote(&format!("epoch/{parts}")),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_are_fractions_of_an_epoch_or_shares_of_all_steps() {
        for (text, expected) in [
            ("epoch", Some(Interval::Epoch(1))),
            ("epoch/4", Some(Interval::Epoch(4))),
            ("5%", Some(Interval::Percent(5.0))),
            ("0.5%", Some(Interval::Percent(0.5))),
            ("epochs", None),
            ("epoch/", None),
            ("epoch/0", None),
            ("epoch/+4", None),
            ("epoch/1000000", None),
            ("100%", None),
            ("0%", None),
            ("-5%", None),
            ("+5%", None),
            ("1e1%", None),
            ("nan%", None),
            (".5%", None),
            ("5.%", None),
            ("%", None),
            ("", None),
        ] {
            assert_eq!(Interval::from_text(text), expected, "{text}");
        }
    }

    #[test]
    fn events_before_the_end_are_bounded() {
        let three = Some(3.0);
        for (interval, epochs, steps, expected) in [
            (Interval::Steps(0), three, None, Some(0)),
            (Interval::Steps(10), three, None, None),
            (Interval::Steps(10), None, Some(40), Some(3)),
            (Interval::Percent(25.0), three, None, Some(4)),
            (Interval::Percent(25.0), None, Some(40), Some(3)),
            (Interval::Percent(0.001), None, Some(40), Some(39)),
            (Interval::Percent(1.1), None, Some(3000), Some(2999 / 33)),
            (Interval::Percent(4.4), None, Some(750), Some(749 / 33)),
            (Interval::Epoch(1), three, None, Some(2)),
            (Interval::Epoch(4), three, None, Some(11)),
            (Interval::Epoch(4), Some(0.3), None, Some(1)),
            (Interval::Epoch(400), three, Some(40), Some(39)),
            (Interval::Epoch(1), None, Some(40), Some(39)),
            (Interval::Epoch(1), None, None, None),
        ] {
            assert_eq!(
                interval.most_before_end(epochs, steps),
                expected,
                "{interval:?} {epochs:?} {steps:?}"
            );
        }
    }
}
