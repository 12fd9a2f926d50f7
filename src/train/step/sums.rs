//! Sums over the micro-batches of a step, and over ranks.

use crate::train::preference::{Tally, WORDS};
use ft_engine::ranks::{CollectiveId, Comm};
use ft_engine::walk::{Load, Routing};
use ft_kernels::loss;
use serde::{Deserialize, Serialize};

/// Results of a rank's micro-batches, read at the end of the step.
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
    /// Sums of squares of this rank's shard of the gradients, by the number of the flat buffer if stages have different
    /// ones.
    pub squares: Vec<(usize, f64)>,
    /// True for the trained tensors with a gradient.
    pub reached: Vec<bool>,
    /// Tokens by expert.
    pub load: Load,
    /// Sums of an objective.
    pub tally: Tally,
}

/// [`Sums`] of a rank, with the bits of numbers, since JSON rounds them.
#[derive(Serialize, Deserialize)]
struct Words {
    numbers: [u64; 4],
    squares: Vec<(usize, u64)>,
    tally: [u64; WORDS],
    reached: Vec<bool>,
    load: Vec<(usize, Vec<u64>)>,
}

impl Sums {
    /// Adds the expert load of a micro-batch, and the router losses with factor `share`, if used.
    pub fn add_routing(&mut self, routing: &Routing, share: Option<f64>) -> ft_base::Result<()> {
        let decided = routing.read()?;
        self.load.add(&decided);
        if let Some(share) = share {
            let ((aux, z), sum) = (decided.losses()?, self.router_losses);
            self.router_losses = (sum.0 + aux * share, sum.1 + z * share);
        }
        Ok(())
    }

    /// Sums over all ranks, in rank order; squares by buffer over the stages, then over the ranks of a stage: the
    /// number of stages changes no bit.
    pub fn over_ranks(&self, comm: &dyn Comm, stages: usize) -> ft_base::Result<Self> {
        let (aux, z) = self.router_losses;
        let words = Words {
            numbers: [self.loss, self.divergence, aux, z].map(f64::to_bits),
            squares: self.squares.iter().map(|(number, sum)| (*number, sum.to_bits())).collect(),
            tally: self.tally.words(),
            reached: self.reached.clone(),
            load: self.load.layers.clone(),
        };
        let all = comm.all_gather_object(CollectiveId::all("the loss and the gradient norm"), &words)?;
        let mut sum = Self { reached: vec![false; self.reached.len()], ..Self::default() };
        let mut squares: Vec<Vec<(usize, u64)>> = vec![Vec::new(); comm.world() / stages.max(1)];
        for (rank, words) in all.into_iter().enumerate() {
            let [loss, divergence, aux, z] = words.numbers.map(f64::from_bits);
            sum.loss += loss;
            sum.divergence += divergence;
            sum.router_losses.0 += aux;
            sum.router_losses.1 += z;
            let place = rank % squares.len().max(1);
            squares[place].extend(words.squares);
            sum.tally.add(words.tally);
            sum.reached.iter_mut().zip(words.reached).for_each(|(all, own)| *all |= own);
            sum.load.merge(&Load { layers: words.load });
        }
        let of_place = |mut own: Vec<(usize, u64)>| {
            own.sort_by_key(|(number, _)| *number);
            own.into_iter().map(|(_, sum)| f64::from_bits(sum)).sum::<f64>()
        };
        sum.squares.push((0, squares.into_iter().map(of_place).sum()));
        Ok(sum)
    }

    /// Sum of all squares.
    pub fn total_squares(&self) -> f64 {
        self.squares.iter().map(|(_, sum)| sum).sum()
    }
}
