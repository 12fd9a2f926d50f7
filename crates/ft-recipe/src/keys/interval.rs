//! Intervals of evaluations and checkpoints.

use super::checked::Checked;
use super::field::{Field, Formatted};
use super::words::Length;
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
    pub(crate) const PATTERN: &'static str = r"^(epoch(/[1-9][0-9]{0,5})?|[0-9]{1,2}(\.[0-9]+)?%)$";

    /// Parses a form that is a string.
    pub(crate) fn from_text(text: &str) -> Option<Self> {
        if let Some(percent) = text.strip_suffix('%') {
            let is_plain = percent.bytes().all(|b| b.is_ascii_digit() || b == b'.');
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

    /// Number of intervals that are complete after `done` steps, of `steps` in all. An epoch of `rows` rows is
    /// complete with the step that takes its last one; `taken` rows have been.
    pub fn completed(self, (done, steps): (usize, usize), (taken, rows): (u128, usize)) -> u128 {
        match self {
            Interval::Steps(0) => 0,
            Interval::Steps(n) => (done / n) as u128,
            Interval::Percent(_) => (done / self.steps_of(steps)) as u128,
            Interval::Epoch(parts) => taken * u128::from(parts) / rows.max(1) as u128,
        }
    }

    /// Steps of a share of `all` steps, rounded up.
    fn steps_of(self, all: usize) -> usize {
        match self {
            Interval::Percent(percent) => ((all as f64 * percent / 100.0).ceil() as usize).max(1),
            Interval::Steps(n) => n.max(1),
            Interval::Epoch(_) => all.max(1),
        }
    }

    /// Upper bound on the events before the last step of a run of `steps`, if known.
    pub fn most_before_end(self, length: Length, steps: Option<u64>) -> Option<u64> {
        let before_last = steps.map(|n| n.saturating_sub(1));
        match (self, length) {
            (Interval::Steps(0), _) => Some(0),
            (Interval::Percent(percent), _) if steps.is_none() => Some((100.0 / percent).ceil() as u64),
            (Interval::Epoch(parts), Length::Epochs(epochs)) => {
                let ends = (epochs * f64::from(parts)).ceil() as u64;
                Some(ends.saturating_sub(1).min(before_last.unwrap_or(u64::MAX)))
            }
            (Interval::Epoch(_), Length::Steps(_)) => before_last,
            _ => Some(before_last? / self.steps_of(usize::try_from(steps?).ok()?) as u64),
        }
    }
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
            ("%", None),
            ("", None),
        ] {
            assert_eq!(Interval::from_text(text), expected, "{text}");
        }
    }

    #[test]
    fn events_before_the_end_are_bounded() {
        let (epochs, steps) = (Length::Epochs(3.0), Length::Steps(40));
        for (interval, length, all, expected) in [
            (Interval::Steps(0), epochs, None, Some(0)),
            (Interval::Steps(10), epochs, None, None),
            (Interval::Steps(10), steps, Some(40), Some(3)),
            (Interval::Percent(25.0), epochs, None, Some(4)),
            (Interval::Percent(25.0), steps, Some(40), Some(3)),
            (Interval::Percent(0.001), steps, Some(40), Some(39)),
            (Interval::Epoch(1), epochs, None, Some(2)),
            (Interval::Epoch(4), epochs, None, Some(11)),
            (Interval::Epoch(4), Length::Epochs(0.3), None, Some(1)),
            (Interval::Epoch(400), epochs, Some(40), Some(39)),
            (Interval::Epoch(1), steps, Some(40), Some(39)),
        ] {
            assert_eq!(interval.most_before_end(length, all), expected, "{interval:?} {length:?} {all:?}");
        }
    }
}
