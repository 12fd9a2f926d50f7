//! Tasks with a loss of whole documents: the common interface of a step and of an evaluation.

use super::classify::Classes;
use super::eval::Evaluation;
use super::preference::{Group, Preferences, Scorer, Tally};
use super::step::Stop;
use ft_data::{Dataset, Micro};
use ft_recipe::{Part, Recipe};
use serde_json::{Map, Value};

/// A task with a loss of whole documents.
#[derive(Clone, Copy, Debug)]
pub enum Objective<'a> {
    /// Comparison or rating of completions, and their samples.
    Preferences(&'a Preferences, Group),
    /// Classification.
    Classes(Classes<'a>),
}

impl<'a> Objective<'a> {
    /// The task of a run on a part of the data, with its preferences, without KTO's estimate; `None` for tasks on
    /// tokens.
    pub fn of(recipe: &'a Recipe, preferences: Option<&'a Preferences>, part: Part) -> Option<Self> {
        let preferences = preferences.map(|p| Self::Preferences(p, Group { part, kl: None }));
        preferences.or_else(|| Classes::of(recipe).map(Self::Classes))
    }

    /// Loss and metrics of a dataset.
    pub fn evaluate(
        &self,
        scorer: &Scorer<'_>,
        data: &Dataset,
        stop: Stop<'_>,
    ) -> ft_base::Result<Evaluation> {
        match self {
            Self::Preferences(preferences, group) => preferences.evaluate(scorer, data, group.part, stop),
            Self::Classes(classes) => classes.evaluate(scorer, data, stop),
        }
    }

    /// Whether the loss is a mean over samples; over documents by weight, if not.
    pub fn is_by_samples(&self) -> bool {
        matches!(self, Self::Preferences(..))
    }

    /// Weights of a micro-batch's targets from their losses, or the gradient of scores, flattened; adds to the tally of
    /// the step.
    pub fn weigh(&self, m: &Micro, values: Vec<f64>, tally: &mut Tally) -> Vec<f32> {
        match self {
            Self::Preferences(p, group) => p.weigh(m, values, *group, tally),
            Self::Classes(classes) => classes.gradient(m, &values, tally),
        }
    }

    /// Loss and metrics of a step.
    pub fn result(&self, tally: &Tally) -> (f64, Map<String, Value>) {
        match self {
            Self::Preferences(p, group) => (p.loss(tally), p.metrics(tally, *group)),
            Self::Classes(_) => (tally.class_loss(), tally.class_metrics()),
        }
    }
}
