//! Preferences as the task of a run: losses of micro-batches and of datasets.

use super::loss::{LogProb, PreferenceObjective};
use super::reference::ReferenceScores;
use super::sequences::{DocumentScore, Scorer, by_document, crossed, samples_of};
use super::tally::Tally;
use crate::train::eval::Evaluation;
use crate::train::step::Stop;
use ft_data::{Content, Dataset, Micro};
use ft_recipe::{Part, PreferenceLoss, Recipe, Task};
use serde_json::{Map, Value};

/// Preferences as the task of a run.
#[derive(Clone, Debug)]
pub struct Preferences {
    pub objective: PreferenceObjective,
    pub reference: ReferenceScores,
    /// `data.max_length`.
    limit: usize,
}

/// Samples of a step or of the evaluation data, and the divergence from the reference on them.
#[derive(Clone, Copy, Debug)]
pub struct Group {
    pub part: Part,
    /// z of KTO; `None` for pairs.
    pub kl: Option<f64>,
}

impl Preferences {
    /// Preferences of a recipe, with a reference not computed yet; `None` for other tasks.
    pub fn of(r: &Recipe) -> Option<Self> {
        let objective = PreferenceObjective::of(r)?;
        Some(Self { objective, reference: ReferenceScores::default(), limit: r.data.max_length })
    }

    /// Whether completions are rated, not paired.
    fn is_rated(&self) -> bool {
        self.objective.loss == PreferenceLoss::Kto
    }

    /// Whether rewards are scores, not log-probabilities.
    fn has_scores(&self) -> bool {
        self.objective.task == Task::Reward
    }

    /// Adds the samples of a micro-batch to a tally. Returns the derivatives of the sum of their losses with respect
    /// to the log-probabilities of the documents.
    pub fn add(
        &self,
        samples: &[(u32, Content)],
        scores: &[DocumentScore],
        group: Group,
        tally: &mut Tally,
    ) -> Vec<f64> {
        let (mut out, mut scores) = (Vec::with_capacity(scores.len()), scores.iter());
        for (sample, content) in samples {
            let reference = self.reference.of(group.part, *sample);
            let mut next = |reference: f64| {
                let (sum, tokens) = scores.next().copied().unwrap_or((f64::NAN, 0));
                LogProb { sum, tokens: tokens as f64, reference }
            };
            let first = next(reference[0]);
            match content {
                Content::Pair(_) => {
                    let second = next(reference[1]);
                    let pair = self.objective.pair(first, second);
                    tally.pair(first, second, &pair);
                    out.extend(pair.slopes);
                }
                _ => {
                    let desirable = *content == Content::Rated(true);
                    let rated = self.objective.rated(first, desirable, group.kl.unwrap_or(0.0));
                    tally.rated(first, desirable, &rated);
                    out.push(rated.slope);
                }
            }
        }
        out
    }

    /// Weights of the targets in the backward pass, from their losses; or the gradient of the sum of the losses with
    /// respect to the scores of documents.
    pub fn weigh(&self, m: &Micro, outputs: Vec<f64>, group: Group, tally: &mut Tally) -> Vec<f32> {
        let scores = by_document(m, outputs, self.has_scores());
        let slopes = self.add(&m.samples, &scores, group, tally);
        let sign = if self.has_scores() { 1.0 } else { -1.0 };
        let each = scores.iter().zip(slopes);
        each.flat_map(|((_, n), slope)| std::iter::repeat_n((sign * slope) as f32, *n)).collect()
    }

    /// Mean loss of a tally.
    pub fn loss(&self, tally: &Tally) -> f64 {
        tally.loss(self.is_rated())
    }

    /// Metrics of a tally.
    pub fn metrics(&self, tally: &Tally, group: Group) -> Map<String, Value> {
        tally.metrics(group.kl, (self.objective.has_nll(), !self.has_scores()))
    }

    /// Estimates the divergence from the reference for KTO: the mean over `samples` of the log-ratio of the
    /// completion of the sample before, given the prompt, not below 0 (arXiv 2402.01306, equation 8). `first` is the
    /// index of the first sample over all steps. `None` for pairs.
    pub fn kl(
        &self,
        scorer: &Scorer<'_>,
        data: &Dataset,
        (part, first): (Part, usize),
        samples: &[u32],
        stop: Stop<'_>,
    ) -> ft_base::Result<Group> {
        if !self.is_rated() {
            return Ok(Group { part, kl: None });
        }
        let scores = crossed(scorer, data, samples, self.limit, stop)?;
        let ratio = |(i, (sum, _)): (usize, &DocumentScore)| sum - self.reference.of_crossed(part, first + i);
        let sum: f64 = scores.iter().enumerate().map(ratio).sum();
        Ok(Group { part, kl: Some((sum / samples.len().max(1) as f64).max(0.0)) })
    }

    /// Loss and metrics of a dataset.
    pub fn evaluate(
        &self,
        scorer: &Scorer<'_>,
        data: &Dataset,
        part: Part,
        stop: Stop<'_>,
    ) -> ft_base::Result<Evaluation> {
        let samples = samples_of(data, 0..data.rows.len())?;
        let group = self.kl(scorer, data, (part, 0), &samples, stop)?;
        let scores = scorer.scores(&samples, &|chunk| Micro::of_samples(data, chunk), stop, &|_| ())?;
        let mut contents = Vec::with_capacity(samples.len());
        for sample in &samples {
            contents.extend(data.samples.content(*sample as usize)?.map(|content| (*sample, content)));
        }
        let mut tally = Tally::default();
        self.add(&contents, &scores, group, &mut tally);
        let targets = scores.iter().map(|(_, n)| n).sum();
        Ok(Evaluation { loss: self.loss(&tally), targets, metrics: self.metrics(&tally, group) })
    }
}
