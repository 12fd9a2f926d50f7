//! Routing decisions of a micro-batch, router losses and expert load.

use crate::model::batch::MicroBatchGroup;
use crate::model::feed_forward;
use crate::ranks::CollectiveId;
use candle_core::{DType, Device, Result};
use ft_kernels::Tensor;
use ft_kernels::route::{self, Balance};

/// Coefficients of the router losses for one micro-batch: the recipe's, divided by the micro-batches of a
/// step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RouterLosses {
    /// Load-balancing loss.
    pub aux: f64,
    /// z-loss.
    pub z: f64,
}

impl RouterLosses {
    /// Whether any is not 0.
    pub fn any(&self) -> bool {
        self.aux != 0.0 || self.z != 0.0
    }
}

/// Routing decisions of one pass over the layers. Results on a device stay there until [`Routing::read`].
#[derive(Debug, Default)]
pub struct Routing {
    tokens: usize,
    layers: Vec<RouterOutput>,
    /// `None` if this rank has all tokens and layers.
    total: Option<Total>,
}

/// Routing of a micro-batch on all its ranks: of other stages, and with other tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Total {
    /// Number of tokens.
    pub tokens: u64,
    /// Number of sparse layers.
    pub layers: u64,
    /// Token-expert pairs by expert.
    pub counts: Vec<u64>,
}

impl Total {
    /// Numbers to send to another rank.
    pub fn words(&self) -> Vec<u64> {
        [self.tokens, self.layers].into_iter().chain(self.counts.iter().copied()).collect()
    }

    /// The total of these numbers.
    pub fn of(words: &[u64]) -> Self {
        match words {
            [tokens, layers, counts @ ..] => {
                Self { tokens: *tokens, layers: *layers, counts: counts.to_vec() }
            }
            _ => Self::default(),
        }
    }

    /// The sum over the ranks with tokens of the micro-batch. Collective.
    ///
    /// # Errors
    /// A lost rank.
    pub fn over(self, micro_batch_group: Option<&MicroBatchGroup<'_>>) -> ft_base::Result<Self> {
        let Some(micro_batch_group) = micro_batch_group else { return Ok(self) };
        let mut sum = Self { layers: self.layers, ..Self::default() };
        for words in
            micro_batch_group.all_gather(CollectiveId::all("the counts of the routers"), &self.words())?
        {
            let part = Self::of(&words);
            sum.tokens += part.tokens;
            sum.add(&part.counts);
        }
        Ok(sum)
    }

    /// Adds token-expert pairs by expert.
    fn add(&mut self, counts: &[u64]) {
        self.counts.resize(self.counts.len().max(counts.len()), 0);
        self.counts.iter_mut().zip(counts).for_each(|(s, n)| *s += n);
    }
}

#[derive(Debug)]
struct RouterOutput {
    layer: usize,
    experts: usize,
    sums: RouterSums,
}

#[derive(Debug)]
enum RouterSums {
    /// Tokens per expert; if a loss needs them, the sums over tokens of the
    /// probabilities `[e]` and of `logsumexp^2`.
    Host(Vec<u64>, Option<(Tensor, Tensor)>),
    /// The same numbers as one vector, `[2 e + 1]` in f64.
    Device(Tensor),
}

/// Routing decisions, copied to the host.
#[derive(Clone, Debug, Default)]
pub struct HostRouting {
    tokens: usize,
    layers: Vec<Layer>,
    total: Option<Total>,
}

#[derive(Clone, Debug)]
struct Layer {
    layer: usize,
    counts: Vec<u64>,
    sums: Option<(Vec<f64>, f64)>,
}

impl Routing {
    /// Records the routing of one layer; of an idle rank, without tokens, zeros.
    pub fn note(
        &mut self,
        layer: usize,
        s: &feed_forward::Saved,
        (losses, idle): (RouterLosses, bool),
    ) -> Result<()> {
        let experts = s.probs.dim(1)?;
        if idle {
            let none = || -> Result<_> {
                let sums = Tensor::zeros(experts + 1, DType::F64, &Device::Cpu)?;
                Ok((sums.narrow(0, 0, experts)?, sums.narrow(0, experts, 1)?.sum_all()?))
            };
            let sums = RouterSums::Host(vec![0; experts], losses.any().then(none).transpose()?);
            self.layers.push(RouterOutput { layer, experts, sums });
            return Ok(());
        }
        self.tokens = s.groups.tokens;
        let router_sums = match s.routed() {
            Some((sorted, routed)) => {
                RouterSums::Device(route::cuda::sums(&routed, &sorted.starts, losses.any())?)
            }
            None => {
                let exact =
                    |t: &Tensor| if t.device().is_cpu() { t.to_dtype(DType::F64) } else { Ok(t.clone()) };
                let sums =
                    || -> Result<_> { Ok((exact(&s.probs)?.sum(0)?, exact(&s.lse)?.sqr()?.sum_all()?)) };
                let sums = losses.any().then(sums).transpose()?;
                RouterSums::Host(s.groups.counts().map(|n| n as u64).collect(), sums)
            }
        };
        self.layers.push(RouterOutput { layer, experts, sums: router_sums });
        Ok(())
    }

    /// Stacks the numbers of layers with results on a device, `[layers, 2 e + 1]`.
    fn on_device(&self) -> Result<Option<Tensor>> {
        let rows = self.layers.iter().filter_map(|l| match &l.sums {
            RouterSums::Device(t) => Some(t.unsqueeze(0)),
            RouterSums::Host(..) => None,
        });
        let rows = rows.collect::<Result<Vec<_>>>()?;
        if rows.is_empty() { Ok(None) } else { Tensor::cat(&rows, 0).map(Some) }
    }

    /// Copies the decisions to the host, with one device synchronization.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn read(&self) -> Result<HostRouting> {
        let rows = match self.on_device()? {
            Some(t) => t.to_vec2::<f64>()?,
            None => Vec::new(),
        };
        let mut rows = rows.into_iter();
        let one = |l: &RouterOutput| {
            let (counts, sums) = match &l.sums {
                RouterSums::Host(counts, None) => (counts.clone(), None),
                RouterSums::Host(counts, Some((p, z))) => {
                    let p = p.to_dtype(DType::F64)?.to_vec1::<f64>()?;
                    (counts.clone(), Some((p, z.to_dtype(DType::F64)?.to_scalar::<f64>()?)))
                }
                RouterSums::Device(_) => {
                    let row = rows.next().unwrap_or_default();
                    let [counts, p, z] = [0..l.experts, l.experts..2 * l.experts, 2 * l.experts..row.len()]
                        .map(|r| row.get(r).unwrap_or_default());
                    let counts = counts.iter().map(|n| *n as u64).collect();
                    (counts, Some((p.to_vec(), z.first().copied().unwrap_or_default())))
                }
            };
            Ok(Layer { layer: l.layer, counts, sums })
        };
        let layers = self.layers.iter().map(one).collect::<Result<_>>()?;
        Ok(HostRouting { tokens: self.tokens, layers, total: self.total.clone() })
    }

    /// Adds the decisions of this pass to those of the stages below.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn add_to(&self, below: Total) -> Result<Total> {
        let (own, mut total) = (self.read()?, below);
        total.tokens = total.tokens.max(own.tokens as u64);
        for (_, counts) in own.counts() {
            total.layers += 1;
            total.add(counts);
        }
        Ok(total)
    }

    /// Sets the decisions of all stages and ranks, for the load-balancing loss.
    pub fn set_total(&mut self, total: Total) {
        self.total = Some(total);
    }

    /// Adds up the decisions of the ranks with tokens of the micro-batch, for the load-balancing loss, unless known.
    /// Collective.
    ///
    /// # Errors
    /// A lost rank; errors of the device.
    pub fn share(
        &mut self,
        micro_batch_group: Option<&MicroBatchGroup<'_>>,
        losses: RouterLosses,
    ) -> ft_base::Result<()> {
        if losses.any() && !self.layers.is_empty() && micro_batch_group.is_some() && self.total.is_none() {
            self.total = Some(self.add_to(Total::default())?.over(micro_batch_group)?);
        }
        Ok(())
    }

    /// Terms of the router losses in the gradient of every sparse layer; `None` if both coefficients are zero.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn balance(&self, losses: RouterLosses) -> Result<Option<Balance>> {
        if !losses.any() || self.layers.is_empty() {
            return Ok(None);
        }
        let (tokens, layers) = match &self.total {
            Some(total) => (total.tokens as usize, total.layers as usize),
            None => (self.tokens, self.layers.len()),
        };
        let mut balance = Balance { z: losses.z / tokens as f64, ..Balance::default() };
        if losses.aux == 0.0 {
            return Ok(Some(balance));
        }
        let all_tokens = (tokens * layers) as f64;
        let sums = self.on_device()?;
        let here = self.total.is_none();
        let on_device = |s: &&Tensor| here && s.dim(0).is_ok_and(|n| n == self.layers.len());
        if let Some(sums) = sums.as_ref().filter(on_device) {
            let experts = sums.dim(1)? / 2;
            let factor = losses.aux * experts as f64 / (all_tokens * all_tokens);
            balance.on_device = Some(route::cuda::share(sums, factor)?);
            return Ok(Some(balance));
        }
        let mut dp = self.read()?.share();
        let factor = losses.aux * dp.len() as f64 / all_tokens;
        dp.iter_mut().for_each(|f| *f *= factor);
        if let Some(sums) = sums {
            // some layers routed on the host and some on the device, or on several ranks
            let list: Vec<f32> = dp.iter().map(|f| *f as f32).collect();
            balance.on_device = Some(Tensor::from_vec(list, dp.len(), sums.device())?);
        }
        balance.dp = dp;
        Ok(Some(balance))
    }
}

impl HostRouting {
    /// Layer number and token-expert pairs of each expert, by sparse layer from the bottom.
    pub fn counts(&self) -> impl Iterator<Item = (usize, &[u64])> {
        self.layers.iter().map(|r| (r.layer, r.counts.as_slice()))
    }

    /// Number of tokens of the micro-batch.
    fn tokens(&self) -> f64 {
        self.total.as_ref().map_or(self.tokens as f64, |t| t.tokens as f64)
    }

    /// Number of tokens times number of sparse layers.
    fn all_tokens(&self) -> f64 {
        self.tokens() * self.total.as_ref().map_or(self.layers.len() as f64, |t| t.layers as f64)
    }

    /// Token-expert pairs per token of each expert, over all sparse layers: `f` of the load-balancing loss.
    fn share(&self) -> Vec<f64> {
        let own = || {
            let mut sum = Total::default();
            self.layers.iter().for_each(|r| sum.add(&r.counts));
            sum.counts
        };
        let counts = self.total.as_ref().map_or_else(own, |t| t.counts.clone());
        counts.into_iter().map(|n| n as f64 / self.all_tokens()).collect()
    }

    /// Load-balancing loss and z-loss before their coefficients; zero without routers. On one of several
    /// ranks, its share: the losses are the sums over the ranks.
    ///
    /// # Errors
    /// The pass recorded no sums, because both coefficients were zero.
    pub fn losses(&self) -> Result<(f64, f64)> {
        let share = self.share();
        let (mut aux, mut z) = (0.0, 0.0);
        for r in &self.layers {
            let Some((p, lse2)) = &r.sums else { candle_core::bail!("routing: no sums were taken") };
            aux += share.iter().zip(p).map(|(f, p)| f * p).sum::<f64>() / self.all_tokens();
            z += lse2 / self.tokens();
        }
        Ok((aux * share.len() as f64, z))
    }
}

/// Expert load: token-expert pairs by expert, over any number of micro-batches.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Load {
    /// By sparse layer from the bottom: layer number and token-expert pairs by expert.
    pub layers: Vec<(usize, Vec<u64>)>,
}

impl Load {
    /// Adds the decisions of one pass.
    pub fn add(&mut self, decided: &HostRouting) {
        self.add_counts(decided.counts());
    }

    /// Adds another load.
    pub fn merge(&mut self, other: &Load) {
        self.add_counts(other.layers.iter().map(|(l, c)| (*l, c.as_slice())));
    }

    fn add_counts<'a>(&mut self, counts: impl Iterator<Item = (usize, &'a [u64])>) {
        for (layer, counts) in counts {
            match self.layers.binary_search_by_key(&layer, |(l, _)| *l) {
                Ok(i) => self.layers[i].1.iter_mut().zip(counts).for_each(|(s, c)| *s += c),
                Err(i) => self.layers.insert(i, (layer, counts.to_vec())),
            }
        }
    }

    /// Number of experts without tokens, over all layers.
    pub fn dead(&self) -> usize {
        self.layers.iter().map(|(_, c)| dead(c)).sum()
    }

    /// Mean of [`entropy`] over layers; `None` without layers.
    pub fn entropy(&self) -> Option<f64> {
        let sum: f64 = self.layers.iter().map(|(_, c)| entropy(c)).sum();
        (!self.layers.is_empty()).then(|| sum / self.layers.len() as f64)
    }

    /// Maximum of [`peak`] over layers; `None` without layers.
    pub fn peak(&self) -> Option<f64> {
        self.layers.iter().map(|(_, c)| peak(c)).reduce(f64::max)
    }
}

/// Number of experts without tokens.
pub fn dead(counts: &[u64]) -> usize {
    counts.iter().filter(|c| **c == 0).count()
}

/// Normalized entropy of the load, `H / ln(experts)`: 1 is uniform, 0 is a single expert.
pub fn entropy(counts: &[u64]) -> f64 {
    let sum = counts.iter().sum::<u64>() as f64;
    if counts.len() < 2 || sum == 0.0 {
        return 1.0;
    }
    let shares = counts.iter().filter(|c| **c > 0).map(|c| *c as f64 / sum);
    // max avoids -0.0 for a single expert
    (-shares.map(|p| p * p.ln()).sum::<f64>() / (counts.len() as f64).ln()).max(0.0)
}

/// Load of the busiest expert relative to a uniform load.
pub fn peak(counts: &[u64]) -> f64 {
    let (sum, max) = (counts.iter().sum::<u64>(), counts.iter().max().copied().unwrap_or(0));
    if sum == 0 { 1.0 } else { max as f64 * counts.len() as f64 / sum as f64 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_load_of_experts_follows_from_their_counts() {
        assert_eq!((entropy(&[5, 5, 5, 5]), peak(&[5, 5, 5, 5]), dead(&[5, 5, 5, 5])), (1.0, 1.0, 0));
        assert_eq!((entropy(&[0, 8, 0, 0]), peak(&[0, 8, 0, 0]), dead(&[0, 8, 0, 0])), (0.0, 4.0, 3));
        assert!((entropy(&[1, 1, 0, 0]) - 0.5).abs() < 1e-15);
        let mut l = Load::default();
        assert_eq!((l.entropy(), l.peak(), l.dead()), (None, None, 0));
        l.merge(&Load { layers: vec![(1, vec![1, 0]), (3, vec![0, 2])] });
        l.merge(&Load { layers: vec![(1, vec![1, 0]), (3, vec![1, 1])] });
        assert_eq!(l.layers, [(1, vec![2, 0]), (3, vec![1, 3])]);
        assert_eq!((l.dead(), l.peak()), (1, Some(2.0)));
        // A rank may have other layers.
        l.merge(&Load { layers: vec![(2, vec![5, 5]), (3, vec![1, 0])] });
        assert_eq!(l.layers, [(1, vec![2, 0]), (2, vec![5, 5]), (3, vec![2, 3])]);
    }
}
