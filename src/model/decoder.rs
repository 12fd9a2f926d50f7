//! A whole decoder: embedding, layers, head; and a micro-batch as it enters it.

use super::attention::Attention;
use super::config::Config;
use super::embedding::{Embedding, EmbeddingLora};
use super::head::Head;
use super::layer::{FeedForward, Layer};
use super::linear::{Linear, Lora, Weight};
use super::mlp::Mlp;
use super::modules::{FeedForwardTree, Kind, LayerTree, MlpTree, Module, Tree, modules};
use super::moe::{Mixture, Shared};
use super::norm::Norm;
use super::sink::Slot;
use crate::kernel::Ledger;
use crate::kernel::Tensor;
use crate::kernel::attention::{Sequences, Sizes};
use crate::kernel::tensor::Ghost;
use crate::kernel::tensor::Real;
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
    /// The same for rows of targets (the head) from `first` on, counted over the step.
    fn with_first_row(&self, first: usize) -> Self {
        let mut c = self.clone();
        if let Some(d) = &mut c.dropout {
            d.first_row = first;
        }
        c
    }

    /// The same for some of the tokens.
    pub fn for_tokens(&self, tokens: &[u32]) -> Self {
        Self { rows: Some(Arc::new(tokens.to_vec())), ..self.clone() }
    }

    /// The context of a chunk of target rows, the first of which is the step's `first`th target.
    pub fn for_targets(&self, first: usize) -> Self {
        self.with_first_row(first)
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
}

impl Batch {
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

/// Where a model gets its tensors from: files, random numbers, buffers of trained tensors.
pub trait Weights {
    /// The weight of a module in the compute dtype, and where its gradient goes if it trains in full.
    fn weight(&mut self, m: &Module) -> crate::Result<(Tensor, Option<Slot>)>;
    /// The matrix of a linear: as [`Weights::weight`] gives it, or 4-bit.
    fn matrix(&mut self, m: &Module) -> crate::Result<(Weight, Option<Slot>)> {
        let (weight, slot) = self.weight(m)?;
        Ok((Weight::Dense(weight), slot))
    }
    /// The bias of a module that has one.
    fn bias(&mut self, m: &Module) -> crate::Result<(Tensor, Option<Slot>)>;
    /// The low-rank update of a linear, if it has one. `weight` is the matrix it adapts.
    fn lora(&mut self, m: &Module, weight: &Weight) -> crate::Result<Option<Lora>>;
    /// How many experts in a row each one that is built stands for, of a layer's: one, but in a plan.
    fn alike(&self, experts: &[MlpTree]) -> Vec<usize> {
        vec![1; experts.len()]
    }
    /// The low-rank update of the embedding.
    fn embedding_lora(&mut self, m: &Module) -> crate::Result<Option<EmbeddingLora>>;
}

/// A decoder with its weights.
#[derive(Debug)]
pub struct Decoder {
    /// Config.
    pub config: Config,
    /// Token embedding.
    pub embedding: Embedding,
    /// Layers, from the bottom.
    pub layers: Vec<Layer>,
    /// Final norm, head and loss.
    pub head: Head,
}

impl Decoder {
    /// Builds a model, asking `weights` for one tensor after the other in the order of the forward pass.
    pub fn build(config: &Config, weights: &mut dyn Weights) -> crate::Result<Self> {
        let tree = Tree::of(config);
        let mut b = Builder::new(config, weights);
        let (embedding, table) = b.embedding(&tree.embedding)?;
        let layers =
            tree.layers.iter().enumerate().map(|(l, t)| b.layer(l, t)).collect::<crate::Result<_>>()?;
        let head = b.head(&tree.norm, &tree.head, Some(table))?;
        Ok(Self { config: config.clone(), embedding, layers, head })
    }

    /// Logits of a few tokens of one document, [t, v] in f32, with one layer of the model in memory at a time:
    /// to compare models that need not fit.
    pub fn logits_by_layer(
        config: &Config,
        weights: &mut dyn Weights,
        ids: &[u32],
        device: &Device,
    ) -> crate::Result<Real> {
        let positions: Vec<u32> = (0..ids.len() as u32).collect();
        let host = HostBatch { ids, positions: &positions, docs: &[ids.len()], targets: &[] };
        let batch = Batch::new(config, host, (0, 0), None, device)?;
        let tree = Tree::of(config);
        let mut b = Builder::new(config, weights);
        let mut x_td = b.embedding(&tree.embedding)?.0.forward(&batch.ids)?;
        for (l, t) in tree.layers.iter().enumerate() {
            x_td = b.layer(l, t)?.forward(&x_td, &batch.context, None, None)?.0;
        }
        // a tied head's table is loaded again: it would take memory all the time
        let table = if config.tied { Some(b.weights.weight(&tree.embedding)?) } else { None };
        Ok(b.head(&tree.norm, &tree.head, table)?.logits(&x_td, &batch.context)?.real()?.clone())
    }
}

impl Decoder {
    /// Every linear with its module, in the order of the forward pass.
    pub fn linears(&self) -> Vec<(Module, &Linear)> {
        let own = self.layers.iter().flat_map(Layer::linears).chain([&self.head.linear]);
        let linears = modules(&self.config).into_iter().filter(|m| matches!(m.kind, Kind::Linear { .. }));
        linears.zip(own).collect()
    }
}

/// Builds the parts of a model from its modules, which are to be asked for in the order of the forward pass.
pub struct Builder<'a> {
    config: &'a Config,
    weights: &'a mut dyn Weights,
}

/// The embedding's table, and where its gradient goes.
type Table = (Tensor, Option<Slot>);

impl<'a> Builder<'a> {
    /// A builder with these weights.
    pub fn new(config: &'a Config, weights: &'a mut dyn Weights) -> Self {
        Self { config, weights }
    }

    /// Final norm and head; a tied one is `table`.
    pub fn head(&mut self, norm: &Module, head: &Module, table: Option<Table>) -> crate::Result<Head> {
        let norm = self.norm(norm)?;
        let linear = match table.filter(|_| self.config.tied) {
            Some((table, weight_slot)) => {
                let weight = Weight::Dense(table);
                let lora = self.weights.lora(head, &weight)?;
                Linear { weight, bias: None, weight_slot, bias_slot: None, lora }
            }
            None => self.linear(head)?,
        };
        Ok(Head { norm, linear, vocab: self.config.vocab })
    }

    /// The embedding, and its table for a tied head.
    pub fn embedding(&mut self, m: &Module) -> crate::Result<(Embedding, Table)> {
        let (table, slot) = self.weights.weight(m)?;
        let lora = self.weights.embedding_lora(m)?;
        Ok((Embedding { table: table.clone(), slot, lora }, (table, slot)))
    }

    fn norm(&mut self, m: &Module) -> crate::Result<Norm> {
        let (weight, slot) = self.weights.weight(m)?;
        Ok(Norm { weight, slot, eps: self.config.eps })
    }

    fn linear(&mut self, m: &Module) -> crate::Result<Linear> {
        let (weight, weight_slot) = self.weights.matrix(m)?;
        let (bias, bias_slot) = match m.bias() {
            Some(_) => {
                let (b, slot) = self.weights.bias(m)?;
                (Some(b), slot)
            }
            None => (None, None),
        };
        let lora = self.weights.lora(m, &weight)?;
        Ok(Linear { weight, bias, weight_slot, bias_slot, lora })
    }

    /// Layer `l`.
    pub fn layer(&mut self, l: usize, t: &LayerTree) -> crate::Result<Layer> {
        let c = self.config;
        let attn_norm = self.norm(&t.attn_norm)?;
        let attn = Attention {
            q: self.linear(&t.q)?,
            k: self.linear(&t.k)?,
            v: self.linear(&t.v)?,
            o: self.linear(&t.o)?,
            qk_norm: match &t.qk_norm {
                Some((q, k)) => Some((self.norm(q)?, self.norm(k)?)),
                None => None,
            },
            heads: c.heads,
            kv_heads: c.kv_heads,
            head_dim: c.head_dim,
            window: c.windows[l],
        };
        let mlp_norm = self.norm(&t.mlp_norm)?;
        let mlp = match (&t.mlp, &c.moe) {
            (FeedForwardTree::Mixture { router, experts, shared }, Some(moe)) => {
                let router = self.linear(router)?;
                let alike = self.weights.alike(experts);
                let (mut built, mut from) = (Vec::new(), 0);
                for n in &alike {
                    built.push(self.mlp(&experts[from])?);
                    from += n;
                }
                let shared = match shared {
                    Some((mlp, gate)) => Some(Shared { mlp: self.mlp(mlp)?, gate: self.linear(gate)? }),
                    None => None,
                };
                let (experts, top_k, normalise) = (built, moe.top_k, moe.normalise);
                FeedForward::Mixture(Box::new(Mixture { router, experts, alike, shared, top_k, normalise }))
            }
            (FeedForwardTree::Mixture { .. }, None) => {
                return Err(
                    candle_core::Error::Msg(format!("layer {l} has experts and its config none")).into()
                );
            }
            (FeedForwardTree::Dense(mlp), _) => FeedForward::Dense(Box::new(self.mlp(mlp)?)),
        };
        Ok(Layer { attn_norm, attn, mlp_norm, mlp })
    }

    fn mlp(&mut self, t: &MlpTree) -> crate::Result<Mlp> {
        Ok(Mlp { gate: self.linear(&t.gate)?, up: self.linear(&t.up)?, down: self.linear(&t.down)? })
    }
}
