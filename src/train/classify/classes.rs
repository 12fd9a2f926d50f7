//! Cross-entropy over the classes, from the scores of documents.

use super::class_counts::ClassCounts;
use crate::train::eval::Evaluation;
use crate::train::preference::{Scorer, Tally, samples_of};
use crate::train::step::Stop;
use ft_data::{Dataset, Micro};
use ft_recipe::{Recipe, ScoreTargets};

/// Classes as the task of a run.
#[derive(Clone, Copy, Debug)]
pub struct Classes<'a> {
    names: &'a [String],
}

/// A document: class, weight, and scores.
struct Document<'a> {
    class: usize,
    weight: f64,
    scores: &'a [f64],
}

impl Document<'_> {
    /// Class of the highest score, the first of several.
    fn predicted(&self) -> usize {
        let best = |best: usize, i: usize| if self.scores[i] > self.scores[best] { i } else { best };
        (1..self.scores.len()).fold(0, best)
    }

    /// Probabilities of the classes, and the negative log-probability of the own class.
    fn softmax(&self) -> (Vec<f64>, f64) {
        let most = self.scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = self.scores.iter().map(|s| (s - most).exp()).sum();
        let probabilities = self.scores.iter().map(|s| (s - most).exp() / sum).collect();
        let own = self.scores.get(self.class).copied().unwrap_or(f64::NAN);
        (probabilities, sum.ln() + most - own)
    }
}

impl<'a> Classes<'a> {
    /// Classes of a recipe; `None` for other tasks.
    pub fn of(r: &'a Recipe) -> Option<Self> {
        match &r.data.scores {
            ScoreTargets::Classes(names) => Some(Self { names }),
            _ => None,
        }
    }

    fn documents<'m>(&self, m: &'m Micro, scores: &'m [f64]) -> impl Iterator<Item = Document<'m>> {
        let weight = |i: usize| m.weights.get(i).map_or(1.0, |w| f64::from(*w));
        let all = m.targets.iter().zip(scores.chunks(self.names.len().max(1))).enumerate();
        all.map(move |(i, ((_, class), scores))| Document {
            class: *class as usize,
            weight: weight(i),
            scores,
        })
    }

    /// Adds the documents of a micro-batch to a tally. Returns the gradient of the weighted sum of the losses with
    /// respect to the scores.
    pub fn gradient(&self, m: &Micro, scores: &[f64], tally: &mut Tally) -> Vec<f32> {
        let mut out = Vec::with_capacity(scores.len());
        for document in self.documents(m, scores) {
            let (probabilities, loss) = document.softmax();
            tally.classified(loss, document.weight, document.predicted() == document.class);
            let own = |i: usize| f64::from(u8::from(i == document.class));
            out.extend(
                probabilities.iter().enumerate().map(|(i, p)| (document.weight * (p - own(i))) as f32),
            );
        }
        out
    }

    /// Loss and metrics of a dataset.
    pub fn evaluate(
        &self,
        scorer: &Scorer<'_>,
        data: &Dataset,
        stop: Stop<'_>,
    ) -> ft_base::Result<Evaluation> {
        let samples = samples_of(data, 0..data.rows.len())?;
        let words = |m: &Micro, scores: Vec<f64>| -> Vec<u64> {
            let of = |d: Document<'_>| {
                [d.softmax().1.to_bits(), d.weight.to_bits(), d.class as u64, d.predicted() as u64]
            };
            self.documents(m, &scores).flat_map(of).collect()
        };
        let micro = |chunk: &[u32]| Micro::of_samples(data, chunk);
        let words = scorer.words(&samples, &micro, &words, stop, &|_| ())?;
        let (mut counts, mut tally) = (ClassCounts::new(self.names.len()), Tally::default());
        for [loss, weight, class, predicted] in words.as_chunks().0 {
            tally.classified(f64::from_bits(*loss), f64::from_bits(*weight), predicted == class);
            counts.add(*class as usize, *predicted as usize);
        }
        let (loss, metrics) = (tally.class_loss(), counts.metrics(self.names));
        Ok(Evaluation { loss, targets: samples.len(), metrics })
    }
}
