//! A micro-batch, the input of the model, with the context shared by all layers.

use super::context_parallel::ContextParallel;
use super::sequence_parallel::{Columns, SequenceParallel};
use super::shared_state::SharedState;
use super::stage_boundary::Rows;
use crate::model::config::Config;
use crate::model::config::rope::{Rope, Tables};
use crate::ranks::{CollectiveId, Comm, words_of};
use candle_core::{DType, Device};
use ft_base::rng::{Purpose, Stream};
use ft_data::Micro;
use ft_kernels::attention::{Sequences, Sizes};
use ft_kernels::cuda::upload::{Lists, Place};
use ft_kernels::embed::ById;
use ft_kernels::noise;
use ft_kernels::tensor::Ghost;
use ft_kernels::{Ledger, Tensor};
use std::ops::Range;
use std::sync::Arc;

/// Key of the dropout random numbers; see [`ft_base::rng`].
#[derive(Clone, Copy, Debug)]
pub struct DropoutKey {
    pub seed: u64,
    /// Optimizer step.
    pub step: u64,
    /// Index, within the step, of the first row of a linear's input.
    pub first_row: usize,
}

/// Ranks with tokens of the same micro-batch.
#[derive(Clone, Debug)]
pub struct MicroBatchGroup<'a> {
    /// Ranks with tokens of the same rows.
    pub comm: &'a dyn Comm,
    /// Those with tokens of this micro-batch.
    pub active: Vec<usize>,
}

impl MicroBatchGroup<'_> {
    /// All-gathers numbers among the ranks with tokens, in rank order.
    ///
    /// # Errors
    /// A lost rank.
    pub fn all_gather(&self, at: CollectiveId, own: &[u64]) -> ft_base::Result<Vec<Vec<u64>>> {
        let all = self.comm.all_gather_bytes_among((&self.active, at), bytemuck::cast_slice(own), true)?;
        Ok(all.iter().map(|bytes| words_of(bytes).collect()).collect())
    }
}

/// Per-micro-batch data shared by all layers.
#[derive(Clone, Debug)]
pub struct Context<'a> {
    /// Document boundaries, for the attention mask.
    pub seqs: Sequences,
    /// Segments over the ranks of a context group, in place of `seqs`.
    pub context_parallel: Option<Arc<ContextParallel<'a>>>,
    /// Ranks with tokens of the same micro-batch, if several.
    pub micro_batch_group: Option<Arc<MicroBatchGroup<'a>>>,
    /// Tensor-parallel ranks, with the context of all tokens; the rest of this context is of the rank's own tokens.
    pub sequence_parallel: Option<Arc<SequenceParallel<'a>>>,
    /// Ranks with other heads of the same tokens, if any.
    pub columns: Option<Columns<'a>>,
    /// Rotary embeddings of the model, in the order of its config.
    pub ropes: Vec<Tables>,
    /// Dropout key in training; `None` disables dropout.
    pub dropout: Option<DropoutKey>,
    /// The token of every row, within an expert or a segment, to make dropout depend on the token alone. `None` means
    /// row i is token i.
    pub rows: Option<Arc<Vec<u32>>>,
    /// Expert-parallel ranks, if any.
    pub experts: Option<&'a dyn Comm>,
    /// State handed on between layers.
    pub shared_state: Arc<SharedState>,
}

impl<'a> Context<'a> {
    /// A context on one rank.
    pub fn new(seqs: Sequences, ropes: Vec<Tables>, dropout: Option<DropoutKey>) -> Self {
        Self {
            seqs,
            context_parallel: None,
            micro_batch_group: None,
            sequence_parallel: None,
            columns: None,
            ropes,
            dropout,
            rows: None,
            experts: None,
            shared_state: Arc::default(),
        }
    }

    /// The same context for a pass with this state between layers, among expert-parallel ranks.
    pub fn for_pass(&self, shared_state: &Arc<SharedState>, experts: Option<&'a dyn Comm>) -> Self {
        let sequence_parallel = self.sequence_parallel.as_ref().map(|s| Arc::new(s.for_pass(shared_state)));
        Self { experts, shared_state: Arc::clone(shared_state), sequence_parallel, ..self.clone() }
    }

    /// Context of all tokens, for blocks with cut matrices.
    pub fn whole(&self) -> &Self {
        self.sequence_parallel.as_ref().map_or(self, |s| s.whole())
    }

    /// Whether the rank has no tokens, but one row unseen by other ranks.
    pub fn has_placeholder_row(&self) -> bool {
        self.sequence_parallel.as_ref().is_some_and(|s| s.has_placeholder_row())
    }

    /// Spare columns of a block's input: none if gathered first.
    pub fn room(&self, rank: usize) -> usize {
        if self.sequence_parallel.is_some() { 0 } else { rank }
    }

    /// Lengths of the documents of the micro-batch.
    fn docs(&self) -> &[usize] {
        let whole = self.whole();
        whole.context_parallel.as_ref().map_or(&whole.seqs.docs[..], |c| c.docs())
    }

    /// The same context for a subset of the tokens.
    pub fn for_tokens(&self, tokens: &[u32]) -> Self {
        let rows = match &self.rows {
            Some(rows) => tokens.iter().filter_map(|t| rows.get(*t as usize).copied()).collect(),
            None => tokens.to_vec(),
        };
        Self { rows: Some(Arc::new(rows)), ..self.clone() }
    }
}

/// One micro-batch on the device: documents end to end, no padding.
#[derive(Clone, Debug)]
pub struct Batch<'a> {
    /// Token ids `[t]`, u32.
    pub ids: Tensor,
    /// Tokens of the embedding's gradient, sorted by id, without the padding token; `None` on the CPU if they are all.
    pub by_id: Option<ById>,
    /// The padding token, if among the ids.
    pub pad: Option<u32>,
    /// Number of tokens t.
    pub tokens: usize,
    pub context: Context<'a>,
    /// Query rows of the targets `[n]`, u32.
    pub target_rows: Tensor,
    /// Target ids `[n]`, u32.
    pub targets: Tensor,
    /// Weights of the targets' losses `[n]`, f32; all 1 without.
    pub weights: Option<Tensor>,
    /// Teacher of the targets, in distillation.
    pub teacher: Option<Teacher>,
    /// Number of targets n.
    pub target_count: usize,
    /// Number of targets in earlier micro-batches of the step.
    pub first_target: usize,
    /// Indices of the targets in the micro-batch, if this is a part of one.
    pub target_numbers: Option<Vec<u32>>,
}

/// Kept probabilities of a teacher at the targets.
#[derive(Clone, Debug)]
pub struct Teacher {
    /// Token ids `[n, k]`, u32.
    pub ids: Tensor,
    /// Probabilities at the temperature `[n, k]`, f32.
    pub probs: Tensor,
    pub by: Distillation,
}

impl Teacher {
    /// The teacher of `n` targets from target `from` on.
    pub fn narrow(&self, from: usize, n: usize) -> candle_core::Result<Self> {
        let (ids, probs) = (self.ids.narrow(0, from, n)?, self.probs.narrow(0, from, n)?);
        Ok(Self { ids, probs, by: self.by })
    }
}

/// Settings of distillation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Distillation {
    pub temperature: f64,
    /// Weight of the divergence from the teacher; 1 - alpha is the weight of the cross-entropy.
    pub alpha: f64,
}

/// Sizes of the targets of a micro-batch, for plans.
#[derive(Clone, Copy, Debug, Default)]
pub struct Targets {
    pub count: usize,
    /// Whether targets have weights.
    pub weighted: bool,
    /// Kept probabilities of a teacher for each target; 0 without a teacher.
    pub kept: usize,
}

/// A micro-batch on the host, as produced by the data loader.
#[derive(Clone, Copy, Debug)]
pub struct HostBatch<'a> {
    /// Token ids of all documents, end to end.
    pub ids: &'a [u32],
    /// Token positions within documents, from 0.
    pub positions: &'a [u32],
    /// Lengths of the documents. In generation: the length of the single document, cached tokens included.
    pub docs: &'a [usize],
    /// Pairs of query row and target id.
    pub targets: &'a [(u32, u32)],
    /// Weights of the targets; empty for weights of 1.
    pub weights: &'a [f32],
}

impl<'a> From<&'a Micro> for HostBatch<'a> {
    fn from(m: &'a Micro) -> Self {
        Self { ids: &m.ids, positions: &m.positions, docs: &m.docs, targets: &m.targets, weights: &m.weights }
    }
}

impl<'a> Batch<'a> {
    /// Copies a micro-batch to the device.
    ///
    /// `first` counts the tokens and targets of earlier micro-batches of the step; `dropout` is the seed
    /// and step in training.
    pub fn new(
        config: &Config,
        host: HostBatch<'_>,
        first: (usize, usize),
        dropout: Option<(u64, u64)>,
        device: &Device,
    ) -> crate::model::config::Result<Self> {
        let rows: Vec<u32> = host.targets.iter().map(|t| t.0).collect();
        let of_targets: Vec<u32> = host.targets.iter().map(|t| t.1).collect();
        let dropout = dropout.map(|(seed, step)| DropoutKey { seed, step, first_row: first.0 });
        let past = host.docs.iter().sum::<usize>().saturating_sub(host.ids.len());
        let (ids, target_rows, targets, seqs, ropes);
        if device.is_cpu() {
            let tables = |r: &Rope| r.tables(host.positions, host.docs, device);
            ropes = config.ropes.iter().map(tables).collect::<candle_core::Result<_>>()?;
            seqs = Sequences::new(host.docs, past, device)?;
            ids = Tensor::new(host.ids, device)?;
            (target_rows, targets) = (list(rows, device)?, list(of_targets, device)?);
        } else {
            // One asynchronous copy for all lists; the host does not wait.
            let mut lists = Lists::default();
            let places = [host.ids, &rows, &of_targets].map(|l| lists.ints(l));
            let tiles = Sequences::list(host.docs, past, &mut lists);
            let values = |r: &Rope| (r.dim / 2, r.values(host.positions, host.docs).map(|t| lists.floats(t)));
            let tables: Vec<_> = config.ropes.iter().map(values).collect();
            let sent = lists.send(device)?;
            let table = |(half, places): (usize, [Place; 2])| {
                let [cos, sin] = places.map(|p| sent.floats(p)?.reshape((host.positions.len(), half)));
                Ok(Tables { cos: cos?, sin: sin? })
            };
            ropes = tables.into_iter().map(table).collect::<candle_core::Result<_>>()?;
            let [a, b, c] = places.map(|p| sent.ints(p));
            (ids, target_rows, targets) = (a?, b?, c?);
            seqs = Sequences::sent(host.docs, past, tiles, &sent)?;
        }
        let pad = config.pad.filter(|pad| host.ids.contains(pad));
        let by_id = (!device.is_cpu() || pad.is_some()).then(|| sorted(host.ids, pad));
        Ok(Self {
            ids,
            by_id,
            pad,
            tokens: host.ids.len(),
            context: Context::new(seqs, ropes, dropout),
            target_rows,
            targets,
            weights: (!host.weights.is_empty()).then(|| Tensor::new(host.weights, device)).transpose()?,
            teacher: None,
            target_count: host.targets.len(),
            first_target: first.1,
            target_numbers: None,
        })
    }

    /// Sets the rotary embeddings of a document of `tokens`, of which these are the tokens at `positions`.
    ///
    /// # Errors
    /// Device errors.
    pub fn of_document(
        mut self,
        config: &Config,
        positions: &[u32],
        tokens: usize,
        device: &Device,
    ) -> crate::model::config::Result<Self> {
        for (rope, own) in config.ropes.iter().zip(&mut self.context.ropes) {
            *own = rope.tables(positions, &[tokens], device)?;
        }
        Ok(self)
    }

    /// Number of tokens, of this rank and of all tensor-parallel ranks.
    pub fn rows(&self) -> Rows {
        Rows {
            own: self.tokens,
            attended: self.context.sequence_parallel.as_ref().map_or(self.tokens, |s| s.tokens()),
        }
    }

    /// Makes this the part of a micro-batch on one rank of a context group: `tokens` and `targets` are the indices of
    /// its tokens and targets in the micro-batch.
    pub fn with_context_parallel(
        self,
        context_parallel: Arc<ContextParallel<'a>>,
        tokens: Vec<u32>,
        targets: Vec<u32>,
    ) -> Self {
        let rows = self.context.dropout.map(|_| Arc::new(tokens));
        let context = Context { context_parallel: Some(context_parallel), rows, ..self.context };
        Self { context, target_numbers: Some(targets), ..self }
    }

    /// Makes this the part of a micro-batch on one rank of a tensor group: `tokens` and `targets` are the indices of
    /// its tokens and targets in the micro-batch.
    pub fn with_sequence_parallel(
        self,
        sequence_parallel: SequenceParallel<'a>,
        tokens: Vec<u32>,
        targets: Vec<u32>,
    ) -> Self {
        let rows = self.context.dropout.map(|_| Arc::new(tokens));
        let context = Context { sequence_parallel: Some(Arc::new(sequence_parallel)), rows, ..self.context };
        Self { context, target_numbers: Some(targets), ..self }
    }

    /// The same, given the ranks with tokens of the micro-batch.
    pub fn with_group(mut self, micro_batch_group: MicroBatchGroup<'a>) -> Self {
        self.context.micro_batch_group = Some(Arc::new(micro_batch_group));
        self
    }

    /// The context of the targets `of`, with rows numbered within the step.
    pub fn for_targets(&self, of: Range<usize>) -> Context<'a> {
        let mut c = self.context.clone();
        c.rows = self.target_numbers.as_ref().map(|all| Arc::new(all[of.clone()].to_vec()));
        if let Some(d) = &mut c.dropout {
            d.first_row = self.first_target + if c.rows.is_some() { 0 } else { of.start };
        }
        c
    }

    /// Adds a teacher: for each target, `kept` token ids and unnormalized log-probabilities, with negative infinity
    /// for empty places.
    ///
    /// # Errors
    /// Lists of other lengths; device errors.
    pub fn with_teacher(
        self,
        (kept, ids, logits): (usize, &[u32], &[f32]),
        by: Distillation,
        device: &Device,
    ) -> candle_core::Result<Self> {
        let shape = (self.target_count, kept);
        if kept == 0 || [ids.len(), logits.len()] != [shape.0 * kept; 2] {
            candle_core::bail!("distillation: a micro-batch without values of the teacher for every target");
        }
        let mut probs = Vec::with_capacity(logits.len());
        for row in logits.chunks(kept) {
            let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let exp = |x: &f32| (f64::from(x - max) / by.temperature).exp();
            let sum: f64 = row.iter().map(exp).sum();
            probs.extend(row.iter().map(|x| (exp(x) / sum) as f32));
        }
        let (ids, probs) =
            (Tensor::new(ids, device)?.reshape(shape)?, Tensor::from_vec(probs, shape, device)?);
        Ok(Self { teacher: Some(Teacher { ids, probs, by }), ..self })
    }

    /// Adds NEFTune noise with this `alpha` to token embeddings `x` `[t, d]`; identity outside of training
    /// or if `alpha` is 0.
    ///
    /// # Errors
    /// A number of rows other than the number of tokens.
    pub fn noisy(&self, x: Tensor, alpha: f64) -> candle_core::Result<Tensor> {
        match self.context.dropout.filter(|_| alpha > 0.0) {
            None => Ok(x),
            Some(key) => {
                let stream = Stream::new(key.seed, Purpose::Noise, key.step, 0);
                let docs = self.context.docs();
                let tokens = self.context.rows.as_ref().map(|rows| rows.as_slice());
                noise::add(&x, stream, (key.first_row, tokens), docs, alpha)
            }
        }
    }

    /// A shape-only micro-batch for a plan, with rotary tables of `ropes` channels. Charged to the ledger once, for the
    /// whole run: [`Batch::bytes`].
    pub fn ghost(
        ledger: &Ledger,
        sizes: Sizes,
        Targets { count, weighted, kept }: Targets,
        ropes: &[usize],
        dropout: Option<(u64, u64)>,
    ) -> candle_core::Result<Self> {
        let list = |n: usize| Tensor::from(Ghost::weight(ledger, n, DType::U32));
        let tables = |dim: &usize| {
            let table = || Tensor::from(Ghost::weight(ledger, (sizes.keys, dim / 2), DType::F32));
            Tables { cos: table(), sin: table() }
        };
        let of_teacher = |dtype| Tensor::from(Ghost::weight(ledger, (count, kept), dtype));
        let by = Distillation { temperature: 1.0, alpha: 1.0 };
        let teacher = || Teacher { ids: of_teacher(DType::U32), probs: of_teacher(DType::F32), by };
        let seqs = Sequences::ghost(sizes);
        let dropout = dropout.map(|(seed, step)| DropoutKey { seed, step, first_row: 0 });
        Ok(Self {
            ids: list(sizes.keys),
            by_id: None,
            pad: None,
            tokens: sizes.keys,
            context: Context::new(seqs, ropes.iter().map(tables).collect(), dropout),
            target_rows: list(count),
            targets: list(count),
            weights: weighted.then(|| Ghost::weight(ledger, count, DType::F32).into()),
            teacher: (kept > 0).then(teacher),
            target_count: count,
            first_target: 0,
            target_numbers: None,
        })
    }

    /// Device bytes of a micro-batch: ids, rotary tables, collation buffers, documents, targets and their teacher. On
    /// the CPU, the teacher's values are held as read and as probabilities.
    pub fn bytes(sizes: Sizes, targets: Targets, ropes: &[usize], cuda: bool) -> u64 {
        let Targets { count, weighted, kept } = targets;
        let target = if weighted { 12 } else { 8 } + kept * if cuda { 8 } else { 16 };
        let channels: usize = ropes.iter().sum();
        (sizes.keys * (4 + 4 * channels + 8) + Sequences::bytes(sizes, cuda) + target * count) as u64
    }
}

/// Tokens by id, without padding tokens.
fn sorted(ids: &[u32], pad: Option<u32>) -> ById {
    let all = ById::new(ids);
    match pad {
        Some(pad) => all.without(pad),
        None => all,
    }
}

/// Copies numbers to the device. Empty lists allocate one element: a device has no address for zero bytes.
fn list(mut numbers: Vec<u32>, device: &Device) -> candle_core::Result<Tensor> {
    let n = numbers.len();
    numbers.resize(n.max(1), 0);
    Tensor::from_vec(numbers, n.max(1), device)?.narrow(0, 0, n)
}
