//! Micro-batches of a step.

use crate::train::objective::StepObjective;
use ft_data::{Dataset, Size};
use serde_json::{Map, Value, json};

/// Micro-batches of a step. Holds sizes only: the tensors of a micro-batch are built when it runs.
pub struct MicroBatches<'a> {
    /// Rows and size of every micro-batch with tokens.
    pub all: Vec<(&'a [usize], Size)>,
    pub tokens: usize,
    pub targets: usize,
    /// Sum of the weights of the targets.
    weight: f64,
    samples: usize,
}

impl<'a> MicroBatches<'a> {
    /// Divides the rows of a step.
    ///
    /// # Errors
    /// Unreadable data.
    pub fn new(data: &Dataset, rows: &'a [usize], micro_rows: usize) -> Result<Self, ft_data::Error> {
        let sized = rows.chunks(micro_rows.max(1)).map(|r| Ok((r, Size::of(data, r)?)));
        let mut all = sized.collect::<Result<Vec<(&[usize], Size)>, ft_data::Error>>()?;
        all.retain(|(_, size)| size.tokens > 0);
        let tokens = all.iter().map(|(_, size)| size.tokens).sum();
        let targets = all.iter().map(|(_, size)| size.targets).sum();
        let weight = all.iter().map(|(_, size)| size.weight).sum();
        let samples = all.iter().map(|(_, size)| size.samples).sum();
        Ok(Self { all, tokens, targets, weight, samples })
    }

    /// Factor on the sum of losses: of targets by weight, or of samples.
    pub fn scale(&self, objective: Option<StepObjective<'_>>) -> f64 {
        let by_samples = objective.is_some_and(|o| o.of.is_by_samples());
        let all = if by_samples { self.samples as f64 } else { self.weight };
        if all > 0.0 { 1.0 / all } else { 1.0 }
    }

    /// Metrics of supervised fine-tuning.
    pub fn metrics(&self, data: &Dataset) -> Map<String, Value> {
        let weight = data.rows.weighted.then(|| ("target_weight".into(), json!(self.weight)));
        weight.into_iter().collect()
    }
}
