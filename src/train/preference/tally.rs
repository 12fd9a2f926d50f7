//! Sums over the pairs, rated completions or classified documents of a step, and the metrics of a step.

use super::loss::{LogProb, PairLoss, RatedLoss};
use serde_json::{Map, Value, json};

/// Sums over samples. Metrics are means over the samples of all micro-batches and ranks, so they do not depend on
/// the split.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Tally {
    loss: f64,
    /// Number, rewards and log-probabilities: rejected or undesirable, then chosen or desirable.
    sides: [[f64; 3]; 2],
    /// Pairs with the higher reward for chosen.
    correct: f64,
    /// Mean negative log-likelihoods of chosen completions.
    nll: f64,
    /// Number of classified documents, and the sum of their weights.
    classified: [f64; 2],
}

/// Number of values in a [`Tally`].
pub const WORDS: usize = 11;

impl Tally {
    /// Adds a pair.
    pub fn pair(&mut self, c: LogProb, r: LogProb, of: &PairLoss) {
        self.loss += of.loss;
        self.correct += f64::from(u8::from(of.rewards[0] > of.rewards[1]));
        self.nll -= c.sum / c.tokens;
        self.side(true, of.rewards[0], c);
        self.side(false, of.rewards[1], r);
    }

    /// Adds a classified document.
    pub fn classified(&mut self, loss: f64, weight: f64, correct: bool) {
        self.loss += weight * loss;
        self.correct += f64::from(u8::from(correct));
        self.classified.iter_mut().zip([1.0, weight]).for_each(|(sum, x)| *sum += x);
    }

    /// Mean loss of classified documents, by weight.
    pub fn class_loss(&self) -> f64 {
        let [_, weight] = self.classified;
        if weight > 0.0 { self.loss / weight } else { 0.0 }
    }

    /// The metrics of classified documents.
    pub fn class_metrics(&self) -> Map<String, Value> {
        let [n, _] = self.classified;
        let all = [("accuracy", json!(self.correct / n.max(1.0))), ("rows", json!(n as u64))];
        all.into_iter().map(|(name, value)| (name.to_string(), value)).collect()
    }

    /// Adds a rated completion.
    pub fn rated(&mut self, s: LogProb, desirable: bool, of: &RatedLoss) {
        self.loss += of.loss;
        self.side(desirable, of.reward, s);
    }

    fn side(&mut self, wanted: bool, reward: f64, s: LogProb) {
        let side = &mut self.sides[usize::from(wanted)];
        side.iter_mut().zip([1.0, reward, s.sum]).for_each(|(sum, x)| *sum += x);
    }

    /// The sums as words, to exchange between ranks.
    pub fn words(&self) -> [u64; WORDS] {
        let [[a, b, c], [d, e, f]] = self.sides;
        let [n, weight] = self.classified;
        [self.loss, self.correct, self.nll, n, weight, a, b, c, d, e, f].map(f64::to_bits)
    }

    /// Adds the words of another rank.
    pub fn add(&mut self, words: [u64; WORDS]) {
        let [loss, correct, nll, n, weight, sides @ ..] = words.map(f64::from_bits);
        self.loss += loss;
        self.correct += correct;
        self.nll += nll;
        self.classified.iter_mut().zip([n, weight]).for_each(|(sum, x)| *sum += x);
        self.sides.iter_mut().flatten().zip(sides).for_each(|(sum, x)| *sum += x);
    }

    /// Number of samples: pairs, or rated completions with a `kl`.
    fn samples(&self, rated: bool) -> f64 {
        self.sides[1][0] + if rated { self.sides[0][0] } else { 0.0 }
    }

    /// Mean loss.
    pub fn loss(&self, rated: bool) -> f64 {
        self.loss / self.samples(rated).max(1.0)
    }

    /// The metrics by name. `kl` belongs to rated completions. Scores have no log-probabilities.
    pub fn metrics(&self, kl: Option<f64>, (has_nll, has_logps): (bool, bool)) -> Map<String, Value> {
        let n = self.samples(kl.is_some()).max(1.0);
        let [rejected, chosen] = self.sides;
        let mean = |[n, rewards, logps]: [f64; 3]| (n > 0.0).then(|| (rewards / n, logps / n));
        let (c, r) = (mean(chosen), mean(rejected));
        let reward = |means: Option<(f64, f64)>| means.map(|(reward, _)| json!(reward));
        let logps = |means: Option<(f64, f64)>| means.filter(|_| has_logps).map(|(_, logps)| json!(logps));
        let all = [
            ("rewards_chosen", reward(c)),
            ("rewards_rejected", reward(r)),
            ("margins", c.zip(r).map(|(c, r)| json!(c.0 - r.0))),
            ("accuracy", kl.is_none().then(|| json!(self.correct / n))),
            ("logps_chosen", logps(c)),
            ("logps_rejected", logps(r)),
            ("nll", has_nll.then(|| json!(self.nll / n))),
            ("kl", kl.map(|kl| json!(kl))),
            (if kl.is_some() { "rows" } else { "pairs" }, Some(json!(n as u64))),
            ("desirable", kl.map(|_| json!(chosen[0] as u64))),
        ];
        all.into_iter().filter_map(|(name, value)| Some((name.to_string(), value?))).collect()
    }
}
