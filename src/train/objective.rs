//! Tasks with a loss of whole documents: the common interface of a step and of an evaluation.

use super::classify::Classes;
use super::preference::{Group, Preferences, Scorer, Tally};
use super::step::Stop;
use ft_data::{Dataset, Micro};
use ft_recipe::Part;
use serde_json::{Map, Value};

/// A task with a loss of whole documents.
#[derive(Clone, Copy, Debug)]
pub enum Objective<'a> {
    /// Comparison or rating of completions, on a part of the data.
    Preferences(&'a Preferences, Part),
    /// Classification.
    Classes(&'a Classes),
}

impl<'a> Objective<'a> {
    /// The task of a run on a part of the data; `None` for tasks on tokens.
    pub fn of(tasks: (Option<&'a Preferences>, Option<&'a Classes>), part: Part) -> Option<Self> {
        let preferences = tasks.0.map(|p| Self::Preferences(p, part));
        preferences.or(tasks.1.map(Self::Classes))
    }

    /// Whether the loss is a mean over samples; over documents by weight, if not.
    pub fn is_by_samples(&self) -> bool {
        matches!(self, Self::Preferences(..))
    }

    /// Loss, targets and metrics of a dataset.
    ///
    /// # Errors
    /// As [`Scorer::scores`].
    pub fn evaluate(
        &self,
        scorer: &Scorer<'_>,
        data: &Dataset,
        stop: Stop<'_>,
    ) -> ft_base::Result<(f64, usize, Map<String, Value>)> {
        match self {
            Self::Preferences(preferences, part) => preferences.evaluate(scorer, data, *part, stop),
            Self::Classes(classes) => classes.evaluate(scorer, data, stop),
        }
    }
}

/// A task, and what it knows of all samples of a step.
#[derive(Clone, Copy, Debug)]
pub struct StepObjective<'a> {
    pub of: Objective<'a>,
    pub group: Option<Group>,
}

impl StepObjective<'_> {
    /// Weights of a micro-batch's targets from their losses, or the gradient of scores, flattened; adds to the tally of
    /// the step.
    ///
    /// # Errors
    /// A step without its group.
    pub fn weigh(&self, m: &Micro, values: Vec<f64>, tally: &mut Tally) -> candle_core::Result<Vec<f32>> {
        Ok(match (self.of, self.group) {
            (Objective::Preferences(p, _), Some(group)) if p.has_scores() => {
                p.gradient(m, &values, group, tally)
            }
            (Objective::Preferences(p, _), Some(group)) => p.weigh(m, values, group, tally),
            (Objective::Classes(classes), _) => classes.gradient(m, &values, tally),
            (Objective::Preferences(..), None) => candle_core::bail!("a step without its group: a bug in ft"),
        })
    }

    /// Loss and metrics of a step.
    pub fn result(&self, tally: &Tally) -> (f64, Map<String, Value>) {
        match (self.of, self.group) {
            (Objective::Preferences(p, _), Some(group)) => (p.loss(tally), p.metrics(tally, group)),
            _ => (tally.class_loss(), tally.class_metrics()),
        }
    }
}
