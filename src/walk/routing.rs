//! What the routers of a micro-batch decided, the losses on them, and the load that a user sees.

use crate::kernel::Tensor;
use crate::kernel::route::Balance;
use crate::model::moe;
use candle_core::{DType, Result};

/// Coefficients of the losses on routers, for one micro-batch: the recipe's over the step's micro-batches.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RouterLosses {
    /// Of the load-balancing loss.
    pub aux: f64,
    /// Of the z-loss.
    pub z: f64,
}

impl RouterLosses {
    fn any(&self) -> bool {
        self.aux != 0.0 || self.z != 0.0
    }
}

/// What the routers decided in one pass over the layers.
#[derive(Debug, Default)]
pub struct Routing {
    tokens: usize,
    layers: Vec<RouterOutput>,
}

#[derive(Debug)]
struct RouterOutput {
    layer: usize,
    counts: Vec<u64>,
    /// Sum of the tokens' probabilities [e], and of `logsumexp^2`, where a loss needs them.
    sums: Option<(Tensor, Tensor)>,
}

impl Routing {
    /// Takes down how one layer's router decided.
    pub fn note(&mut self, layer: usize, s: &moe::Saved, losses: RouterLosses) -> Result<()> {
        let exact = |t: &Tensor| if t.device().is_cpu() { t.to_dtype(DType::F64) } else { Ok(t.clone()) };
        let sums = match losses.any() {
            true => Some((exact(&s.probs)?.sum(0)?, exact(&s.lse)?.sqr()?.sum_all()?)),
            false => None,
        };
        self.tokens = s.groups.tokens;
        self.layers.push(RouterOutput { layer, counts: s.groups.counts().map(|n| n as u64).collect(), sums });
        Ok(())
    }

    /// Layer and pairs of each expert, by sparse layer from the bottom.
    pub fn counts(&self) -> impl Iterator<Item = (usize, &[u64])> {
        self.layers.iter().map(|r| (r.layer, r.counts.as_slice()))
    }

    /// Tokens of all sparse layers.
    fn all_tokens(&self) -> f64 {
        (self.tokens * self.layers.len()) as f64
    }

    /// Pairs of each expert a token, over all sparse layers: f of the load-balancing loss.
    fn share(&self) -> Vec<f64> {
        let experts = self.layers.first().map_or(0, |r| r.counts.len());
        (0..experts)
            .map(|e| self.layers.iter().map(|r| r.counts[e] as f64).sum::<f64>() / self.all_tokens())
            .collect()
    }

    /// The load-balancing loss and the z-loss, before their coefficients; zero where there are no routers.
    ///
    /// # Errors
    /// The pass was made without coefficients.
    pub fn losses(&self) -> Result<(f64, f64)> {
        let share = self.share();
        let (mut aux, mut z) = (0.0, 0.0);
        for r in &self.layers {
            let Some((p, lse2)) = &r.sums else { candle_core::bail!("routing: no sums were taken") };
            let p = p.to_dtype(DType::F64)?.to_vec1::<f64>()?;
            aux += share.iter().zip(p).map(|(f, p)| f * p).sum::<f64>() / self.all_tokens();
            z += lse2.to_dtype(DType::F64)?.to_scalar::<f64>()? / self.tokens as f64;
        }
        Ok((aux * share.len() as f64, z))
    }

    /// What the losses add to the gradients of every sparse layer; nothing without coefficients.
    pub fn balance(&self, losses: RouterLosses) -> Option<Balance> {
        if !losses.any() || self.layers.is_empty() {
            return None;
        }
        let mut dp = Vec::new();
        if losses.aux != 0.0 {
            dp = self.share();
            let factor = losses.aux * dp.len() as f64 / self.all_tokens();
            dp.iter_mut().for_each(|f| *f *= factor);
        }
        Some(Balance { dp, z: losses.z / self.tokens as f64 })
    }
}

/// How often each expert was chosen, over any number of micro-batches.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Load {
    /// By sparse layer from the bottom: its number, and the pairs of each expert.
    pub layers: Vec<(usize, Vec<u64>)>,
}

impl Load {
    /// Adds what one pass decided.
    pub fn add(&mut self, routing: &Routing) {
        self.add_counts(routing.counts());
    }

    /// Adds another load.
    pub fn merge(&mut self, other: &Load) {
        self.add_counts(other.layers.iter().map(|(l, c)| (*l, c.as_slice())));
    }

    fn add_counts<'a>(&mut self, counts: impl Iterator<Item = (usize, &'a [u64])>) {
        for (i, (layer, counts)) in counts.enumerate() {
            match self.layers.get_mut(i) {
                Some((_, sum)) => sum.iter_mut().zip(counts).for_each(|(s, c)| *s += c),
                None => self.layers.push((layer, counts.to_vec())),
            }
        }
    }

    /// Experts, over all layers, that no token chose.
    pub fn dead(&self) -> usize {
        self.layers.iter().map(|(_, c)| dead(c)).sum()
    }

    /// The mean over layers of [`entropy`]; none without layers.
    pub fn entropy(&self) -> Option<f64> {
        let sum: f64 = self.layers.iter().map(|(_, c)| entropy(c)).sum();
        (!self.layers.is_empty()).then(|| sum / self.layers.len() as f64)
    }

    /// The highest [`peak`] of all layers; none without layers.
    pub fn peak(&self) -> Option<f64> {
        self.layers.iter().map(|(_, c)| peak(c)).reduce(f64::max)
    }
}

/// Experts that no token chose.
pub fn dead(counts: &[u64]) -> usize {
    counts.iter().filter(|c| **c == 0).count()
}

/// Entropy of the load over its highest value, ln(experts): 1 is even, 0 is one expert for all.
pub fn entropy(counts: &[u64]) -> f64 {
    let sum = counts.iter().sum::<u64>() as f64;
    if counts.len() < 2 || sum == 0.0 {
        return 1.0;
    }
    let shares = counts.iter().filter(|c| **c > 0).map(|c| *c as f64 / sum);
    // the sum of one share of 1 would be -0
    (-shares.map(|p| p * p.ln()).sum::<f64>() / (counts.len() as f64).ln()).max(0.0)
}

/// Load of the busiest expert, as a multiple of the even load.
pub fn peak(counts: &[u64]) -> f64 {
    let (sum, max) = (counts.iter().sum::<u64>(), counts.iter().max().copied().unwrap_or(0));
    if sum == 0 { 1.0 } else { max as f64 * counts.len() as f64 / sum as f64 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn load_of_known_counts() {
        assert_eq!((entropy(&[5, 5, 5, 5]), peak(&[5, 5, 5, 5]), dead(&[5, 5, 5, 5])), (1.0, 1.0, 0));
        assert_eq!((entropy(&[0, 8, 0, 0]), peak(&[0, 8, 0, 0]), dead(&[0, 8, 0, 0])), (0.0, 4.0, 3));
        assert!((entropy(&[1, 1, 0, 0]) - 0.5).abs() < 1e-15);
        let mut l = Load::default();
        assert_eq!((l.entropy(), l.peak(), l.dead()), (None, None, 0));
        l.merge(&Load { layers: vec![(1, vec![1, 0]), (3, vec![0, 2])] });
        l.merge(&Load { layers: vec![(1, vec![1, 0]), (3, vec![1, 1])] });
        assert_eq!(l.layers, [(1, vec![2, 0]), (3, vec![1, 3])]);
        assert_eq!((l.dead(), l.peak()), (1, Some(2.0)));
    }
}
