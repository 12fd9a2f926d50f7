//! Losses of pairs and of rated completions, as functions of log-probabilities, with derivatives.

use ft_recipe::{PreferenceLoss, Recipe, Task};

/// Log-probability of a completion under the model and under the reference.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LogProb {
    /// Sum over the tokens.
    pub sum: f64,
    pub tokens: f64,
    /// Sum under the reference; 0 without a reference.
    pub reference: f64,
}

impl LogProb {
    /// Sum relative to the reference.
    fn ratio(self) -> f64 {
        self.sum - self.reference
    }

    fn mean(self) -> f64 {
        self.sum / self.tokens
    }
}

/// Loss of a pair.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PairLoss {
    pub loss: f64,
    /// Derivatives with respect to the sums of chosen and rejected.
    pub slopes: [f64; 2],
    /// Rewards of chosen and rejected.
    pub rewards: [f64; 2],
}

/// Loss of a rated completion.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RatedLoss {
    pub loss: f64,
    /// Derivative with respect to the sum.
    pub slope: f64,
    pub reward: f64,
}

/// Loss function of a task.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PreferenceObjective {
    pub task: Task,
    pub loss: PreferenceLoss,
    pub beta: f64,
    pub label_smoothing: f64,
    pub gamma: f64,
    pub nll: f64,
    /// Weights of undesirable and desirable completions.
    pub weights: [f64; 2],
}

/// Logarithm of the sigmoid.
fn log_sigmoid(x: f64) -> f64 {
    x.min(0.0) - (-x.abs()).exp().ln_1p()
}

fn sigmoid(x: f64) -> f64 {
    log_sigmoid(x).exp()
}

/// Logarithm of the odds of a sequence with mean log-probability `a`, and its derivative. A probability of 1 is
/// taken as the largest below.
fn log_odds(a: f64) -> (f64, f64) {
    let rest = (-a.exp_m1()).max(f64::EPSILON);
    (a - rest.ln(), 1.0 / rest)
}

impl PreferenceObjective {
    /// Reads `[preference]`; `None` for tasks without preferences. The loss of a reward model is Bradley-Terry's: of
    /// scores in place of log-probabilities, without a reference.
    pub fn of(r: &Recipe) -> Option<Self> {
        let p = &r.preference;
        let reward = r.task == Task::Reward;
        (r.task.prefers() || reward).then(|| Self {
            task: r.task,
            loss: if reward { PreferenceLoss::Sigmoid } else { p.loss(r.task) },
            beta: if reward { 1.0 } else { p.beta(r.task) },
            label_smoothing: p.label_smoothing,
            gamma: p.gamma,
            nll: p.nll,
            weights: [p.undesirable_weight, p.desirable_weight],
        })
    }

    /// Whether the loss has a mean negative log-likelihood of chosen completions.
    pub fn has_nll(&self) -> bool {
        matches!(self.loss, PreferenceLoss::Orpo | PreferenceLoss::Cpo)
    }

    /// Whether rewards are per token.
    fn by_mean(&self) -> bool {
        matches!(self.loss, PreferenceLoss::Orpo | PreferenceLoss::Simpo)
    }

    /// The negative logarithm of the sigmoid of `x`, with label smoothing as in cDPO (Mitchell 2023), and its
    /// derivative.
    fn smoothed(&self, x: f64) -> (f64, f64) {
        let e = self.label_smoothing;
        let loss = -(1.0 - e) * log_sigmoid(x) - e * log_sigmoid(-x);
        (loss, e * sigmoid(x) - (1.0 - e) * sigmoid(-x))
    }

    /// Loss of a pair. Sources of the formulas: [`Task`], [`PreferenceLoss`].
    pub fn pair(&self, c: LogProb, r: LogProb) -> PairLoss {
        let b = self.beta;
        let reward = |p: LogProb| b * if self.by_mean() { p.mean() } else { p.ratio() };
        let rewards = [c, r].map(reward);
        let margin = rewards[0] - rewards[1];
        let (loss, slopes) = match self.loss {
            PreferenceLoss::Ipo => {
                let apart = c.ratio() / c.tokens - r.ratio() / r.tokens - 1.0 / (2.0 * b);
                (apart * apart, [2.0 * apart / c.tokens, -2.0 * apart / r.tokens])
            }
            PreferenceLoss::Simpo => {
                let (loss, slope) = self.smoothed(margin - self.gamma);
                let slope = slope * b;
                (loss, [slope / c.tokens, -slope / r.tokens])
            }
            PreferenceLoss::Orpo => {
                let ((odds_c, dc), (odds_r, dr)) = (log_odds(c.mean()), log_odds(r.mean()));
                let slope = -b * sigmoid(odds_r - odds_c);
                let loss = -c.mean() - b * log_sigmoid(odds_c - odds_r);
                (loss, [(slope * dc - 1.0) / c.tokens, -slope * dr / r.tokens])
            }
            PreferenceLoss::Cpo => {
                let (loss, slope) = self.smoothed(margin);
                let slope = slope * b;
                (loss - self.nll * c.mean(), [slope - self.nll / c.tokens, -slope])
            }
            PreferenceLoss::Sigmoid | PreferenceLoss::Kto => {
                let (loss, slope) = self.smoothed(margin);
                (loss, [b * slope, -b * slope])
            }
        };
        PairLoss { loss, slopes, rewards }
    }

    /// Loss of a rated completion; `kl` is the estimate z of the divergence from the reference.
    pub fn rated(&self, s: LogProb, desirable: bool, kl: f64) -> RatedLoss {
        let (b, weight) = (self.beta, self.weights[usize::from(desirable)]);
        let reward = b * s.ratio();
        let sign = if desirable { 1.0 } else { -1.0 };
        let value = sigmoid(sign * (reward - b * kl));
        let slope = -weight * sign * b * value * (1.0 - value);
        RatedLoss { loss: weight * (1.0 - value), slope, reward }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn objective(task: Task, loss: PreferenceLoss) -> PreferenceObjective {
        let weights = [1.5, 1.0];
        PreferenceObjective { task, loss, beta: 0.3, label_smoothing: 0.1, gamma: 0.5, nll: 0.7, weights }
    }

    /// Central differences, in f64.
    #[test]
    fn slopes_are_the_derivatives_of_the_losses() {
        let at = |sum: f64, tokens: f64, reference: f64| LogProb { sum, tokens, reference };
        for (c, r) in
            [(at(-9.0, 3.0, -8.0), at(-31.0, 9.0, -33.0)), (at(-40.0, 12.0, -39.0), at(-2.0, 4.0, 0.0))]
        {
            for loss in [
                PreferenceLoss::Sigmoid,
                PreferenceLoss::Ipo,
                PreferenceLoss::Simpo,
                PreferenceLoss::Orpo,
                PreferenceLoss::Cpo,
            ] {
                let o = objective(Task::Dpo, loss);
                let h = 1e-5;
                let moved = |dc: f64, dr: f64| {
                    o.pair(LogProb { sum: c.sum + dc, ..c }, LogProb { sum: r.sum + dr, ..r }).loss
                };
                let slopes = [
                    (moved(h, 0.0) - moved(-h, 0.0)) / (2.0 * h),
                    (moved(0.0, h) - moved(0.0, -h)) / (2.0 * h),
                ];
                let found = o.pair(c, r).slopes;
                for (a, b) in slopes.into_iter().zip(found) {
                    assert!((a - b).abs() < 1e-8 * (1.0 + b.abs()), "{loss:?}: {a} {b}");
                }
            }
            for desirable in [false, true] {
                let o = objective(Task::Kto, PreferenceLoss::Kto);
                let h = 1e-5;
                let moved = |d: f64| o.rated(LogProb { sum: c.sum + d, ..c }, desirable, 0.4).loss;
                let slope = (moved(h) - moved(-h)) / (2.0 * h);
                assert!((slope - o.rated(c, desirable, 0.4).slope).abs() < 1e-9);
            }
        }
    }

    /// Label smoothing takes its share of the loss from the pair the other way round.
    #[test]
    fn smoothed_losses_are_means_of_both_orders() {
        let [c, r] = [(-9.0, 3.0, -8.0), (-31.0, 9.0, -33.0)].map(|(sum, tokens, reference)| LogProb {
            sum,
            tokens,
            reference,
        });
        for loss in [PreferenceLoss::Sigmoid, PreferenceLoss::Simpo, PreferenceLoss::Cpo] {
            let smoothed = PreferenceObjective { gamma: 0.0, nll: 0.0, ..objective(Task::Dpo, loss) };
            let plain = PreferenceObjective { label_smoothing: 0.0, ..smoothed };
            let mean = 0.9 * plain.pair(c, r).loss + 0.1 * plain.pair(r, c).loss;
            assert!((smoothed.pair(c, r).loss - mean).abs() < 1e-12, "{loss:?}");
        }
    }

    #[test]
    fn losses_stay_finite_where_a_sequence_is_certain_or_impossible() {
        for loss in
            [PreferenceLoss::Sigmoid, PreferenceLoss::Simpo, PreferenceLoss::Orpo, PreferenceLoss::Cpo]
        {
            for sum in [0.0, -1e-12, -1e6] {
                let c = LogProb { sum, tokens: 2.0, reference: 0.0 };
                let r = LogProb { sum: -1e6 - sum, tokens: 2.0, reference: 0.0 };
                for pair in [objective(Task::Dpo, loss).pair(c, r), objective(Task::Dpo, loss).pair(r, c)] {
                    assert!(
                        pair.loss.is_finite() && pair.slopes.iter().all(|s| s.is_finite()),
                        "{loss:?} {pair:?}"
                    );
                }
            }
        }
    }
}
