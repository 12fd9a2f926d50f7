//! Predicted time of a step of a layout, and the order of layouts.

use super::layout::Layout;
use crate::time::links::Link;
use serde::Serialize;

/// Limit of a layout's speed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Limit {
    /// Arithmetic takes longer than all transfers.
    Compute,
    /// Gathered weights and summed gradients take longer than the arithmetic that would hide them.
    Gathers,
    /// Transfers that nothing hides take longer than arithmetic.
    Exchanges,
}

impl Limit {
    /// The limit in words.
    pub fn words(self) -> &'static str {
        match self {
            Self::Compute => "arithmetic",
            Self::Gathers => "the link: gathered weights, summed gradients",
            Self::Exchanges => "the link: transfers that nothing hides",
        }
    }
}

/// The plan of a layout, in short.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Candidate {
    #[serde(flatten)]
    pub layout: Layout,
    /// Other keys that the layout needs, in command-line form.
    pub beside: Vec<String>,
    /// Device peak of the rank with the most.
    pub memory: u64,
    /// Bytes that a rank receives in a step.
    pub wire_bytes_a_step: u64,
    /// Predicted seconds of a step.
    pub step_seconds: f64,
    pub limit: Limit,
    /// Execution in words.
    pub how: String,
}

/// Seconds of a step, and the limit: transfers of `wire[0]` bytes run beside `compute` seconds of arithmetic if the
/// devices have engines for them, those of `wire[1]` bytes do not.
pub fn time(compute: f64, wire: [u64; 2], link: &Link, engines: bool) -> (f64, Limit) {
    let (hidden, exposed) = (wire[0] as f64 / link.gather, wire[1] as f64 / link.exchange);
    let limit = match () {
        () if exposed > compute.max(hidden) => Limit::Exchanges,
        () if hidden > compute => Limit::Gathers,
        () => Limit::Compute,
    };
    let together = if engines { compute.max(hidden) } else { compute + hidden };
    (together + exposed, limit)
}

/// Sorts by predicted time, fastest first. Of times within 1%, less memory goes first, then fewer bytes, then the
/// plainer layout.
pub fn sort(all: &mut [Candidate]) {
    // steps of a hundredth: logarithms compare as quotients
    let step = |c: &Candidate| (c.step_seconds.max(f64::MIN_POSITIVE).ln() * 100.0).round() as i64;
    all.sort_by_key(|c| (step(c), c.memory, c.wire_bytes_a_step, c.layout.zero, c.layout));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::time::links::CLASSES;

    #[test]
    fn arithmetic_hides_gathers_and_nothing_hides_exchanges() {
        let gb = 1_000_000_000;
        let [nvlink, pcie, _] = CLASSES.map(Link::of_class);
        assert_eq!(time(2.0, [20 * gb, 0], &pcie, true), (2.0, Limit::Compute));
        assert_eq!(time(2.0, [60 * gb, 0], &pcie, true), (3.0, Limit::Gathers));
        assert_eq!(time(2.0, [20 * gb, 20 * gb], &pcie, true), (3.0, Limit::Compute));
        assert_eq!(time(2.0, [20 * gb, 60 * gb], &pcie, true), (5.0, Limit::Exchanges));
        assert_eq!(time(2.0, [60 * gb, 60 * gb], &nvlink, true), (2.3, Limit::Compute));
        // processors copy by themselves
        assert_eq!(time(2.0, [20 * gb, 20 * gb], &pcie, false), (4.0, Limit::Compute));
    }

    #[test]
    fn the_fastest_go_first_and_of_equals_the_smallest() {
        let of = |data, zero, seconds, memory| Candidate {
            layout: Layout { data, pipeline: 1, context: 1, tensor: 1, expert: 1, zero },
            beside: Vec::new(),
            memory,
            wire_bytes_a_step: 0,
            step_seconds: seconds,
            limit: Limit::Compute,
            how: String::new(),
        };
        let mut all = vec![
            of(1, 0, 2.0, 5),
            of(2, 0, 1.001, 9),
            of(4, 3, 1.0, 9),
            of(8, 3, 0.999, 8),
            of(3, 0, 0.5, 99),
        ];
        sort(&mut all);
        assert_eq!(all.iter().map(|c| c.layout.data).collect::<Vec<_>>(), [3, 8, 2, 4, 1]);
    }
}
