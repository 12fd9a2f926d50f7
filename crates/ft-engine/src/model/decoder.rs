//! The whole decoder: embedding, layers, head.

use super::attention::{Attention, QkNorm};
use super::config::family::QkNorms;
use super::config::modules::{
    FeedForwardTree, Kind, LayerTree, MixerTree, MlpTree, Module, Tree, modules, norm_offset,
};
use super::config::{Config, KeySource};
use super::delta::{DeltaNet, Parameter};
use super::embedding::{Embedding, EmbeddingLora};
use super::feed_forward::mlp::Mlp;
use super::feed_forward::{Beside, LocalExperts, Mixture, Shared};
use super::head::Head;
use super::layer::{FeedForward, Layer};
use super::layer_inputs::LayerInputs;
use super::linear::Rows;
use super::linear::{Linear, Lora, Stack, Weight};
use super::mixer::Mixer;
use super::norm::Norm;
use super::pass::batch::{Batch, HostBatch};
use super::pass::grad_accumulator::Slot;
use super::per_layer::PerLayer;
use super::units::Units;
use candle_core::{DType, Device};
use ft_kernels::Tensor;
use ft_kernels::delta::Heads;
use ft_kernels::tensor::Real;
use std::ops::Range;

/// Source of a model's tensors: files, random numbers, or the buffers of trained tensors.
pub trait Weights {
    fn dtype(&self) -> DType;
    /// The units to build, if not all.
    fn units(&self) -> Option<Units> {
        None
    }
    /// Weight of a module in the compute dtype, and the gradient slot if trained in full. A frozen matrix
    /// may stay in half precision: [`kept`].
    ///
    /// [`kept`]: ft_kernels::gemm::kept
    fn weight(&mut self, m: &Module) -> ft_base::Result<(Tensor, Option<Slot>)>;
    /// Matrix of a linear: as [`Weights::weight`], or 4-bit.
    fn matrix(&mut self, m: &Module) -> ft_base::Result<(Weight, Option<Slot>)> {
        let (weight, slot) = self.weight(m)?;
        Ok((Weight::Dense(weight), slot))
    }
    /// Bias of a module with one.
    fn bias(&mut self, m: &Module) -> ft_base::Result<(Tensor, Option<Slot>)>;
    /// Adapter of a linear, if any. `weight` is the adapted matrix.
    fn lora(&mut self, m: &Module, weight: &Weight) -> ft_base::Result<Option<Lora>>;
    /// The adapters of linears of one input, if computed together; before the linears.
    fn stack(&mut self, _: &[&Module]) -> ft_base::Result<Option<Stack>> {
        Ok(None)
    }
    /// Trained rows of a module's weight, if any.
    fn rows(&mut self, _: &Module) -> ft_base::Result<Option<Rows>> {
        Ok(None)
    }
    /// Run lengths of identical experts; a single expert is built per run. All 1 except in a plan.
    fn alike(&self, experts: &[MlpTree]) -> Vec<usize> {
        vec![1; experts.len()]
    }
    /// This rank's experts of a layer, if split over ranks, with the rank's part; `None` for all.
    fn own(&self, _: &[MlpTree], _unit: usize) -> Option<(Range<usize>, LocalExperts)> {
        None
    }
    /// Heads on this rank, of `all` of a layer.
    fn heads(&self, all: usize) -> usize {
        all
    }
    /// Whether this rank adds the bias of a module: of a product over cut columns, one rank does.
    fn adds_bias(&self, _: &Module) -> bool {
        true
    }
    /// LoRA of the embedding, if any.
    fn embedding_lora(&mut self, m: &Module) -> ft_base::Result<Option<EmbeddingLora>>;
}

/// A decoder with weights.
#[derive(Clone, Debug)]
pub struct Decoder {
    pub config: Config,
    /// Units with weights; other units have shapes only.
    pub units: Units,
    pub embedding: Embedding,
    /// Decoder layers, from the bottom.
    pub layers: Vec<Layer>,
    pub head: Head,
}

impl Decoder {
    /// Builds a model, asking `weights` for one tensor after another in the order of the forward pass.
    pub fn build(config: &Config, weights: &mut dyn Weights) -> ft_base::Result<Self> {
        let tree = Tree::of(config);
        let units = weights.units().unwrap_or(Units::all(config.layers));
        let mut b = Builder::new(config, weights);
        let (embedding, table) = b.embedding(&tree.embedding, tree.per_layer.as_ref())?;
        let layers =
            tree.layers.iter().enumerate().map(|(l, t)| b.layer(l, t)).collect::<ft_base::Result<_>>()?;
        let head = b.head(&tree.norm, &tree.head, Some(table))?;
        Ok(Self { config: config.clone(), units, embedding, layers, head })
    }

    /// Logits `[t, v]` (f32) for a few tokens of one document, with a single layer in memory at a time.
    /// Used to compare models, even ones larger than memory.
    pub fn logits_by_layer(
        config: &Config,
        weights: &mut dyn Weights,
        ids: &[u32],
        device: &Device,
    ) -> ft_base::Result<Real> {
        let positions: Vec<u32> = (0..ids.len() as u32).collect();
        let host = HostBatch { ids, positions: &positions, docs: &[ids.len()], targets: &[], weights: &[] };
        let batch = Batch::new(config, host, (0, 0), None, device)?;
        let tree = Tree::of(config);
        let mut b = Builder::new(config, weights);
        let embedding = b.embedding(&tree.embedding, tree.per_layer.as_ref())?.0;
        let mut x_td = embedding.forward(&batch.ids)?;
        embedding.begin(&x_td, &batch.ids, &batch.context)?;
        drop(embedding);
        for (l, t) in tree.layers.iter().enumerate() {
            x_td = b.layer(l, t)?.forward(&x_td, &batch.context, None, None)?.0;
        }
        // A tied head's table is loaded again rather than held throughout.
        let table = if config.tied { Some(b.table(&tree.embedding)?) } else { None };
        Ok(b.head(&tree.norm, &tree.head, table)?.logits(&x_td, &batch.context)?.real()?.clone())
    }

    /// The same weights without adapters and without trained rows of tokens. The embedding table keeps rows written by
    /// an earlier pass.
    pub fn without_adapters(&self) -> Self {
        let mut base = self.clone();
        (base.embedding.lora, base.embedding.rows) = (None, None);
        base.embedding.layer_inputs.iter_mut().for_each(|i| i.projection.lora = None);
        base.layers.iter_mut().for_each(Layer::remove_adapters);
        (base.head.linear.lora, base.head.linear.rows) = (None, None);
        base
    }

    /// Every linear with its module, in forward order. Of experts split over ranks, only those of this rank.
    pub fn linears(&self) -> Vec<(Module, &Linear)> {
        let inputs = self.embedding.layer_inputs.iter().map(|i| &i.projection);
        let own = inputs.chain(self.layers.iter().flat_map(Layer::linears)).chain([&self.head.linear]);
        let here = |m: &Module| match (m.layer.and_then(|l| self.layers.get(l)?.mlp.mixture()), m.expert) {
            (Some(mixture), Some(e)) => mixture.has(e),
            _ => true,
        };
        let linears = modules(&self.config).into_iter();
        linears.filter(|m| matches!(m.kind, Kind::Linear { .. }) && here(m)).zip(own).collect()
    }
}

/// Builds the parts of a model from modules. Callers must ask for parts in the order of the forward pass.
pub struct Builder<'a> {
    config: &'a Config,
    weights: &'a mut dyn Weights,
}

/// Embedding table, gradient slot, trained rows.
type Table = (Tensor, Option<Slot>, Option<Rows>);

impl<'a> Builder<'a> {
    /// Builder on top of these weights.
    pub fn new(config: &'a Config, weights: &'a mut dyn Weights) -> Self {
        Self { config, weights }
    }

    /// Builds final norm and head; a tied head uses `table`.
    pub fn head(&mut self, norm: &Module, head: &Module, table: Option<Table>) -> ft_base::Result<Head> {
        let norm = self.norm(norm)?;
        let linear = match table.filter(|_| self.config.tied) {
            Some((table, weight_slot, rows)) => {
                let weight = Weight::Dense(table);
                let lora = self.weights.lora(head, &weight)?;
                Linear { weight, bias: None, weight_slot, bias_slot: None, lora, rows }
            }
            None => self.linear(head)?,
        };
        let (vocab, scores) = (self.config.outputs(), self.config.scores.is_some());
        Ok(Head { norm, linear, vocab, scores, cap: self.config.logit_cap })
    }

    /// Builds the embedding; also returns the table for a tied head.
    pub fn embedding(
        &mut self,
        m: &Module,
        per_layer: Option<&[Module; 3]>,
    ) -> ft_base::Result<(Embedding, Table)> {
        let (table, slot, rows) = self.table(m)?;
        let lora = self.weights.embedding_lora(m)?;
        let (dtype, scale) = (self.weights.dtype(), self.config.embedding_scale);
        let layer_inputs = per_layer.map(|m| self.layer_inputs(m).map(Box::new)).transpose()?;
        let own = rows.clone();
        let embedding = Embedding { table: table.clone(), dtype, scale, slot, lora, rows: own, layer_inputs };
        Ok((embedding, (table, slot, rows)))
    }

    fn layer_inputs(&mut self, [table, projection, norm]: &[Module; 3]) -> ft_base::Result<LayerInputs> {
        let (table, slot) = self.weights.weight(table)?;
        let (projection, norm) = (self.linear(projection)?, self.norm(norm)?);
        let (hidden, dtype) = (self.config.hidden, self.weights.dtype());
        Ok(LayerInputs { table, slot, projection, norm, hidden, dtype })
    }

    fn table(&mut self, m: &Module) -> ft_base::Result<Table> {
        let (table, slot) = self.weights.weight(m)?;
        Ok((table, slot, self.weights.rows(m)?))
    }

    fn norm(&mut self, m: &Module) -> ft_base::Result<Norm> {
        let (weight, slot) = self.weights.weight(m)?;
        Ok(Norm { weight, slot, eps: self.config.eps, plus: norm_offset(self.config, m) })
    }

    fn optional(&mut self, m: &Option<Module>) -> ft_base::Result<Option<Norm>> {
        m.as_ref().map(|m| self.norm(m)).transpose()
    }

    fn linear(&mut self, m: &Module) -> ft_base::Result<Linear> {
        let (weight, weight_slot) = self.weights.matrix(m)?;
        let (bias, bias_slot) = match m.bias() {
            Some(_) => {
                let (b, slot) = self.weights.bias(m)?;
                if self.weights.adds_bias(m) { (Some(b), slot) } else { (None, None) }
            }
            None => (None, None),
        };
        let lora = self.weights.lora(m, &weight)?;
        let rows = self.weights.rows(m)?;
        Ok(Linear { weight, bias, weight_slot, bias_slot, lora, rows })
    }

    /// Builds the token mixer of layer `l`.
    fn mixer(&mut self, l: usize, t: &MixerTree) -> ft_base::Result<Mixer> {
        let c = self.config;
        Ok(match t {
            MixerTree::Attention { .. } => Mixer::Attention(Box::new(self.attention(l, t)?)),
            MixerTree::Delta { projections, conv, a_log, bias, norm, out } => {
                let Some(delta) = c.delta_of(l) else {
                    let why = format!("layer {l} has linear attention and its config none");
                    return Err(candle_core::Error::Msg(why).into());
                };
                let layout = delta.projections;
                let projections =
                    projections.iter().map(|m| self.linear(m)).collect::<ft_base::Result<_>>()?;
                let own = |all| self.weights.heads(all);
                let heads =
                    Heads { keys: own(delta.heads.keys), values: own(delta.heads.values), ..delta.heads };
                let mut conv = self.parameter(conv)?;
                conv.value = conv.value.reshape((heads.channels(), delta.taps))?;
                let (a_log, bias) = (self.parameter(a_log)?, self.parameter(bias)?);
                let (norm, out) = (self.norm(norm)?, self.linear(out)?);
                Mixer::Delta(Box::new(DeltaNet { projections, layout, out, conv, a_log, bias, norm, heads }))
            }
        })
    }

    /// Builds the attention of layer `l`.
    fn attention(&mut self, l: usize, t: &MixerTree) -> ft_base::Result<Attention> {
        let MixerTree::Attention { q, k, v, o, qk_norm, sinks } = t else {
            return Err(candle_core::Error::Msg(format!("layer {l} has no attention")).into());
        };
        let (c, own) = (self.config, &self.config.attention[l]);
        let inner: Vec<&Module> = std::iter::once(q).chain(k).chain(v).collect();
        let stack = self.weights.stack(&inner)?;
        let q = self.linear(q)?;
        let mut optional = |m: &Option<Module>| m.as_ref().map(|m| self.linear(m)).transpose();
        let (k, v) = (optional(k)?, optional(v)?);
        let o = self.linear(o)?;
        let qk_norm = match qk_norm {
            Some((q, k)) => {
                let whole = c.family.qk_norm == QkNorms::Whole;
                Some(QkNorm { q: self.norm(q)?, k: self.optional(k)?, whole })
            }
            None => None,
        };
        // A weight of ones: the norm of values has none.
        let ones = |n: &QkNorm| -> ft_base::Result<Norm> {
            let weight = Tensor::ones(own.head_dim, self.weights.dtype(), n.q.weight.device())?;
            Ok(Norm { weight, slot: None, eps: c.eps, plus: 0.0 })
        };
        let normed = c.family.by_layer && own.producer().is_none();
        Ok(Attention {
            q,
            k,
            v,
            o,
            stack,
            v_norm: qk_norm.as_ref().filter(|_| normed).map(ones).transpose()?,
            qk_norm,
            sinks: sinks.as_ref().map(|m| self.parameter(m)).transpose()?,
            heads: self.weights.heads(c.heads),
            kv_heads: if c.shares_keys(l) { 1 } else { self.weights.heads(own.kv_heads) },
            head_dim: own.head_dim,
            scale: own.scale,
            rope: own.rope,
            window: own.window,
            gated: c.family.gated,
            layer: l,
            joint: own.keys == KeySource::WithQueries,
            rotates_neighbors: c.family.rotates_neighbors,
            producer: own.producer(),
            lends: c.lends_keys(l),
        })
    }

    fn parameter(&mut self, m: &Module) -> ft_base::Result<Parameter> {
        let (value, slot) = self.weights.weight(m)?;
        Ok(Parameter { value, slot })
    }

    /// Builds the feed-forward part of layer `l`.
    fn feed_forward(&mut self, l: usize, t: &FeedForwardTree) -> ft_base::Result<FeedForward> {
        Ok(match t {
            FeedForwardTree::Dense(mlp) => FeedForward::Dense(Box::new(self.mlp(mlp)?)),
            FeedForwardTree::Mixture { router, experts, shared } => {
                let router = self.linear(router)?;
                let mut mixture = self.mixture(l, router, experts)?;
                if let Some((mlp, gate)) = shared {
                    mixture.shared = Some(Shared { mlp: self.mlp(mlp)?, gate: self.linear(gate)? });
                }
                FeedForward::Mixture(Box::new(mixture))
            }
            FeedForwardTree::Beside { dense_norms: [before, after], dense, router, norms, experts } => {
                let (before, dense, after) = (self.norm(before)?, self.mlp(dense)?, self.norm(after)?);
                let [scale, router, factors] = router;
                let (router_norm, router) = (self.norm(scale)?, self.linear(router)?);
                let factors = Some(self.parameter(factors)?);
                let norms = [self.norm(&norms[0])?, self.norm(&norms[1])?];
                let mut mixture = self.mixture(l, router, experts)?;
                mixture.factors = factors;
                let dense_norms = [before, after];
                FeedForward::Beside(Box::new(Beside { dense_norms, dense, router_norm, norms, mixture }))
            }
        })
    }

    /// Builds the mixture of layer `l` with this rank's experts, one for each run of identical ones.
    fn mixture(&mut self, l: usize, router: Linear, all: &[MlpTree]) -> ft_base::Result<Mixture> {
        let Some(moe) = &self.config.moe else {
            let why = format!("layer {l} has experts and its config none");
            return Err(candle_core::Error::Msg(why).into());
        };
        let (range, owned) = self.weights.own(all, l + 1).unzip();
        let here = range.map_or(all, |range| &all[range]);
        let alike = self.weights.alike(here);
        let (mut built, mut from) = (Vec::new(), 0);
        for n in &alike {
            built.push(self.mlp(&here[from])?);
            from += n;
        }
        let mut mixture = Mixture::new(router, (built, alike), moe.top_k, moe.normalise);
        mixture.owned = owned;
        Ok(mixture)
    }

    /// Builds layer `l`.
    pub fn layer(&mut self, l: usize, t: &LayerTree) -> ft_base::Result<Layer> {
        let attn_norm = self.optional(&t.attn_norm)?;
        let attn = self.mixer(l, &t.mixer)?;
        let attn_post = self.optional(&t.attn_post)?;
        let mlp_norm = self.optional(&t.mlp_norm)?;
        let mlp = self.feed_forward(l, &t.mlp)?;
        let mlp_post = self.optional(&t.mlp_post)?;
        let per_layer = t.per_layer.as_ref().map(|m| self.per_layer(l, m).map(Box::new)).transpose()?;
        let scalar = t.scalar.as_ref().map(|m| self.parameter(m)).transpose()?;
        Ok(Layer { attn_norm, attn, attn_post, mlp_norm, mlp, mlp_post, per_layer, scalar })
    }

    fn per_layer(&mut self, layer: usize, [gate, out, norm]: &[Module; 3]) -> ft_base::Result<PerLayer> {
        let (gate, projection, norm) = (self.linear(gate)?, self.linear(out)?, self.norm(norm)?);
        Ok(PerLayer { layer, gate, projection, norm, glu: self.config.glu })
    }

    fn mlp(&mut self, t: &MlpTree) -> ft_base::Result<Mlp> {
        let first: Vec<&Module> = std::iter::once(&t.gate).chain(&t.up).collect();
        let stack = self.weights.stack(&first)?;
        let gate = self.linear(&t.gate)?;
        let up = t.up.as_ref().map(|up| self.linear(up)).transpose()?;
        Ok(Mlp { gate, up, down: self.linear(&t.down)?, stack, glu: self.config.glu })
    }
}
