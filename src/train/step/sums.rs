//! Sums over the micro-batches of a step, and over ranks.

use crate::train::preference::{Tally, WORDS};
use ft_engine::ranks::{CollectiveId, Comm};
use ft_engine::walk::{Load, Routing};
use ft_kernels::loss;

/// What the micro-batches of a rank leave, read at the end of the step.
#[derive(Default)]
pub struct Collected {
    /// Losses of targets.
    pub losses: loss::Running,
    /// Divergences from a teacher.
    pub divergences: loss::Running,
    /// Sums of an objective.
    pub tally: Tally,
    /// Routing decisions of each micro-batch.
    pub routings: Vec<Routing>,
}

/// Sums over the micro-batches of one rank, except gradients.
#[derive(Debug, Default)]
pub struct Sums {
    /// Sum of the losses of targets, by weight.
    pub loss: f64,
    /// Divergence from the teacher, in distillation.
    pub divergence: f64,
    /// Load-balancing loss and z-loss.
    pub router_losses: (f64, f64),
    /// Sums of squares of this rank's shard of the gradients, by the number of the flat buffer where stages have
    /// different ones.
    pub squares: Vec<(usize, f64)>,
    /// True for the trained tensors with a gradient.
    pub reached: Vec<bool>,
    /// Tokens by expert.
    pub load: Load,
    /// Sums of an objective.
    pub tally: Tally,
}

impl Sums {
    /// Adds the expert load of a micro-batch, and its router losses with factor `share`, if used.
    ///
    /// # Errors
    /// Device errors.
    pub fn add_routing(&mut self, routing: &Routing, share: Option<f64>) -> ft_base::Result<()> {
        let decided = routing.read()?;
        self.load.add(&decided);
        if let Some(share) = share {
            let ((aux, z), sum) = (decided.losses()?, self.router_losses);
            self.router_losses = (sum.0 + aux * share, sum.1 + z * share);
        }
        Ok(())
    }

    /// Sums over all ranks, in rank order; squares by buffer over the stages, then over the ranks of a stage, so that
    /// the number of stages changes no bit.
    ///
    /// # Errors
    /// Lost rank.
    pub fn over_ranks(&self, comm: &dyn Comm, stages: usize) -> ft_base::Result<Self> {
        let (aux, z) = self.router_losses;
        let numbers = [self.loss, self.divergence, aux, z];
        let mut words: Vec<u64> = numbers.map(f64::to_bits).into();
        words.push(self.squares.len() as u64);
        words.extend(self.squares.iter().flat_map(|(number, sum)| [*number as u64, sum.to_bits()]));
        words.extend(self.tally.words());
        words.extend(self.reached.iter().map(|r| u64::from(*r)));
        for (layer, counts) in &self.load.layers {
            words.extend([*layer as u64, counts.len() as u64]);
            words.extend(counts);
        }
        let mut sum = Self { reached: vec![false; self.reached.len()], ..Self::default() };
        let mut squares: Vec<Vec<(u64, f64)>> = vec![Vec::new(); comm.world() / stages.max(1)];
        for (rank, words) in comm
            .all_gather_object(CollectiveId::all("the loss and the gradient norm"), &words)?
            .into_iter()
            .enumerate()
        {
            let mut words = words.into_iter();
            let mut number = || words.next().map_or(f64::NAN, f64::from_bits);
            sum.loss += number();
            sum.divergence += number();
            sum.router_losses.0 += number();
            sum.router_losses.1 += number();
            let (place, count) = (rank % squares.len().max(1), words.next().unwrap_or(0));
            for _ in 0..count {
                squares[place].extend(words.next().zip(words.next().map(f64::from_bits)));
            }
            let tally: Vec<u64> = words.by_ref().take(WORDS).collect();
            if let Ok(tally) = tally.try_into() {
                sum.tally.add(tally);
            }
            sum.reached.iter_mut().zip(&mut words).for_each(|(r, w)| *r |= w != 0);
            let mut load = Load::default();
            while let (Some(layer), Some(n)) = (words.next(), words.next()) {
                load.layers.push((layer as usize, words.by_ref().take(n as usize).collect()));
            }
            sum.load.merge(&load);
        }
        let of_place = |mut own: Vec<(u64, f64)>| {
            own.sort_by_key(|(number, _)| *number);
            own.into_iter().map(|(_, sum)| sum).sum::<f64>()
        };
        sum.squares.push((0, squares.into_iter().map(of_place).sum()));
        Ok(sum)
    }

    /// Sum of all squares.
    pub fn total_squares(&self) -> f64 {
        self.squares.iter().map(|(_, sum)| sum).sum()
    }
}
