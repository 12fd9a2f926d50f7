//! A micro-batch as it enters a model, and what every layer needs of it.

use super::config::Config;
use crate::kernel::attention::{Sequences, Sizes};
use crate::kernel::tensor::Ghost;
use crate::kernel::{Ledger, Tensor};
use candle_core::{DType, Device};
use std::sync::Arc;

/// Which numbers dropout draws; see [`crate::rng`].
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
    /// Lengths of the documents.
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
        let (cos, sin) = config.rope.tables(config.head_dim, host.positions, device)?;
        let rows: Vec<u32> = host.targets.iter().map(|t| t.0).collect();
        let ids: Vec<u32> = host.targets.iter().map(|t| t.1).collect();
        let n = rows.len();
        Ok(Self {
            ids: Tensor::new(host.ids, device)?,
            tokens: host.ids.len(),
            context: Context {
                seqs: Sequences::new(host.docs, 0, device)?,
                cos,
                sin,
                dropout: dropout.map(|(seed, step)| DropoutKey { seed, step, first_row: first.0 }),
                rows: None,
            },
            target_rows: Tensor::from_vec(rows, n, device)?,
            targets: Tensor::from_vec(ids, n, device)?,
            target_count: n,
            first_target: first.1,
        })
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
        let seqs = Sequences::ghost(sizes, ledger)?;
        let dropout = dropout.map(|(seed, step)| DropoutKey { seed, step, first_row: 0 });
        Ok(Self {
            ids: list(sizes.keys),
            tokens: sizes.keys,
            context: Context { seqs, cos: table(), sin: table(), dropout, rows: None },
            target_rows: list(targets),
            targets: list(targets),
            target_count: targets,
            first_target: 0,
        })
    }

    /// Bytes of a micro-batch: ids, the two tables, the start of each token's document and what it was collated from;
    /// the masks' numbers; rows and ids of targets.
    pub fn bytes(sizes: Sizes, targets: usize, head_dim: usize) -> u64 {
        (sizes.keys * (4 + 4 * head_dim + 4 + 12) + 4 * sizes.longest + 8 * targets) as u64
    }
}
