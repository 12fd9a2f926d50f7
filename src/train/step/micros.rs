//! Micro-batches of a step.

use crate::train::objective::Objective;
use ft_data::{Dataset, Size};
use serde_json::{Map, Value, json};

/// Micro-batches of a step, without tensors: a micro-batch builds them when it runs.
pub struct MicroBatches<'a> {
    /// Rows of every micro-batch with tokens, and the numbers of tokens and targets before it.
    pub all: Vec<(&'a [usize], (usize, usize))>,
    /// Size of all together.
    pub size: Size,
}

impl<'a> MicroBatches<'a> {
    /// Divides the rows of a step.
    pub fn new(data: &Dataset, rows: &'a [usize], micro_rows: usize) -> Result<Self, ft_data::Error> {
        let (mut all, mut size) = (Vec::new(), Size::default());
        for rows in rows.chunks(micro_rows.max(1)) {
            let own = Size::of(data, rows)?;
            if own.tokens == 0 {
                continue;
            }
            all.push((rows, (size.tokens, size.targets)));
            size.tokens += own.tokens;
            size.targets += own.targets;
            size.weight += own.weight;
            size.samples += own.samples;
        }
        Ok(Self { all, size })
    }

    /// Factor on the sum of losses: of targets by weight, or of samples.
    pub fn scale(&self, objective: Option<Objective<'_>>) -> f64 {
        let by_samples = objective.is_some_and(|o| o.is_by_samples());
        let all = if by_samples { self.size.samples as f64 } else { self.size.weight };
        if all > 0.0 { 1.0 / all } else { 1.0 }
    }

    /// Metrics of supervised fine-tuning.
    pub fn metrics(&self, data: &Dataset) -> Map<String, Value> {
        let weight = data.rows.weighted.then(|| ("target_weight".into(), json!(self.size.weight)));
        weight.into_iter().collect()
    }
}
