//! A micro-batch as it enters a model, and what every layer needs of it.

use super::config::Config;
use ft_kernels::attention::{Sequences, Sizes};
use ft_kernels::cuda::upload::Lists;
use ft_kernels::embed::ById;
use ft_kernels::noise;
use ft_kernels::tensor::Ghost;
use ft_kernels::{Ledger, Tensor};
use ft_base::rng::{Purpose, Stream};
use candle_core::{DType, Device};
use std::sync::Arc;

/// Which numbers dropout draws; see [`ft_base::rng`].
#[derive(Clone, Copy, Debug)]
pub struct DropoutKey {
    /// Seed of the run.
    pub seed: u64,
    /// Optimizer step.
    pub step: u64,
    /// Index, within the step, of the first row of what enters a linear.
    pub first_row: usize,
}

/// What every layer needs of a micro-batch.
#[derive(Clone, Debug)]
pub struct Context {
    /// Documents, and who sees whom.
    pub seqs: Sequences,
    /// Cosines of the rotary embedding [t, c / 2], f32.
    pub cos: Tensor,
    /// Sines.
    pub sin: Tensor,
    /// In training, the key of dropout; `None` turns it off.
    pub dropout: Option<DropoutKey>,
    /// Within an expert, the tokens of its rows, so that dropout depends on tokens; `None` is all in order.
    pub rows: Option<Arc<Vec<u32>>>,
}

impl Context {
    /// The same for some of the tokens.
    pub fn for_tokens(&self, tokens: &[u32]) -> Self {
        Self { rows: Some(Arc::new(tokens.to_vec())), ..self.clone() }
    }

    /// The context of a chunk of target rows, the first of which is the step's `first`th target.
    pub fn for_targets(&self, first: usize) -> Self {
        let mut c = self.clone();
        if let Some(d) = &mut c.dropout {
            d.first_row = first;
        }
        c
    }
}

/// One micro-batch on the device: documents end to end, no padding.
#[derive(Clone, Debug)]
pub struct Batch {
    /// Token ids `[t]`, u32.
    pub ids: Tensor,
    /// The tokens sorted by id, on another device than the CPU: what the embedding's gradient goes by there.
    pub by_id: Option<ById>,
    /// Tokens.
    pub tokens: usize,
    /// What layers need.
    pub context: Context,
    /// Rows that predict a supervised target `[n]`, u32.
    pub target_rows: Tensor,
    /// Their targets `[n]`, u32.
    pub targets: Tensor,
    /// How many.
    pub target_count: usize,
    /// Targets of the step's earlier micro-batches.
    pub first_target: usize,
}

/// A micro-batch on the host, as the data layer gives it.
#[derive(Clone, Copy, Debug)]
pub struct HostBatch<'a> {
    /// Token ids of all documents, end to end.
    pub ids: &'a [u32],
    /// Position of each token in its document.
    pub positions: &'a [u32],
    /// Lengths of the documents; in generation of the one document with what was read of it before.
    pub docs: &'a [usize],
    /// Row that predicts, and target id.
    pub targets: &'a [(u32, u32)],
}

impl Batch {
    /// Copies a micro-batch to the device.
    ///
    /// `first` are the tokens and targets of the step's earlier micro-batches; `dropout` is the seed and
    /// step, in training.
    pub fn new(
        config: &Config,
        host: HostBatch<'_>,
        first: (usize, usize),
        dropout: Option<(u64, u64)>,
        device: &Device,
    ) -> super::Result<Self> {
        let rows: Vec<u32> = host.targets.iter().map(|t| t.0).collect();
        let of_targets: Vec<u32> = host.targets.iter().map(|t| t.1).collect();
        let dropout = dropout.map(|(seed, step)| DropoutKey { seed, step, first_row: first.0 });
        let past = host.docs.iter().sum::<usize>().saturating_sub(host.ids.len());
        let (ids, target_rows, targets, seqs, cos, sin);
        if device.is_cpu() {
            (cos, sin) = config.rope.tables(config.head_dim, host.positions, device)?;
            seqs = Sequences::new(host.docs, past, device)?;
            ids = Tensor::new(host.ids, device)?;
            (target_rows, targets) = (list(rows, device)?, list(of_targets, device)?);
        } else {
            // all in one go, for which the host does not wait
            let mut lists = Lists::default();
            let places = [host.ids, &rows, &of_targets].map(|l| lists.ints(l));
            let tiles = Sequences::list(host.docs, past, &mut lists);
            let tables = config.rope.values(config.head_dim, host.positions).map(|t| lists.floats(&t));
            let sent = lists.send(device)?;
            let shape = (host.positions.len(), config.head_dim / 2);
            let [a, b] = tables.map(|p| sent.floats(p)?.reshape(shape));
            (cos, sin) = (a?, b?);
            let [a, b, c] = places.map(|p| sent.ints(p));
            (ids, target_rows, targets) = (a?, b?, c?);
            seqs = Sequences::sent(host.docs, past, tiles, &sent)?;
        }
        Ok(Self {
            ids,
            by_id: (!device.is_cpu()).then(|| ById::new(host.ids)),
            tokens: host.ids.len(),
            context: Context { seqs, cos, sin, dropout, rows: None },
            target_rows,
            targets,
            target_count: host.targets.len(),
            first_target: first.1,
        })
    }

    /// Embeddings of its tokens [t, d], in training with NEFTune's noise of this `alpha`.
    ///
    /// # Errors
    /// Other rows than tokens.
    pub fn noisy(&self, x: Tensor, alpha: f64) -> candle_core::Result<Tensor> {
        match self.context.dropout.filter(|_| alpha > 0.0) {
            None => Ok(x),
            Some(key) => {
                let stream = Stream::new(key.seed, Purpose::Noise, key.step, 0);
                noise::add(&x, stream, key.first_row, &self.context.seqs.docs, alpha)
            }
        }
    }

    /// That of a plan. It stays all the time: what it takes is [`Batch::bytes`].
    pub fn ghost(
        ledger: &Ledger,
        sizes: Sizes,
        targets: usize,
        head_dim: usize,
        dropout: Option<(u64, u64)>,
    ) -> candle_core::Result<Self> {
        let list = |n: usize| Tensor::from(Ghost::weight(ledger, n, DType::U32));
        let table = || Tensor::from(Ghost::weight(ledger, (sizes.keys, head_dim / 2), DType::F32));
        let seqs = Sequences::ghost(sizes);
        let dropout = dropout.map(|(seed, step)| DropoutKey { seed, step, first_row: 0 });
        Ok(Self {
            ids: list(sizes.keys),
            by_id: None,
            tokens: sizes.keys,
            context: Context { seqs, cos: table(), sin: table(), dropout, rows: None },
            target_rows: list(targets),
            targets: list(targets),
            target_count: targets,
            first_target: 0,
        })
    }

    /// Bytes of a micro-batch: ids, the two tables and what it was collated from; documents; rows and ids of targets.
    pub fn bytes(sizes: Sizes, targets: usize, head_dim: usize, cuda: bool) -> u64 {
        (sizes.keys * (4 + 4 * head_dim + 8) + Sequences::bytes(sizes, cuda) + 8 * targets) as u64
    }
}

/// Numbers on a device; none take a place there too, for a device gives no address to nothing.
fn list(mut numbers: Vec<u32>, device: &Device) -> candle_core::Result<Tensor> {
    let n = numbers.len();
    numbers.resize(n.max(1), 0);
    Tensor::from_vec(numbers, n.max(1), device)?.narrow(0, 0, n)
}
