//! A whole decoder: embedding, layers, head; and a micro-batch as it enters it.

use super::attention::Attention;
use super::config::Config;
use super::embedding::{Embedding, EmbeddingLora};
use super::head::Head;
use super::layer::Layer;
use super::linear::{Linear, Lora, Weight};
use super::mlp::Mlp;
use super::modules::{Module, modules};
use super::norm::Norm;
use super::sink::Slot;
use crate::kernel::attention::Sequences;
use candle_core::{Device, Tensor};
use std::collections::HashMap;

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
            },
            target_rows: Tensor::from_vec(rows, n, device)?,
            targets: Tensor::from_vec(ids, n, device)?,
            target_count: n,
            first_target: first.1,
        })
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
        let by_name: HashMap<String, Module> =
            modules(config).into_iter().map(|m| (m.name.clone(), m)).collect();
        let mut b = Builder { by_name, weights, eps: config.eps };
        let (embedding, table) = b.embedding()?;
        let mut layers = Vec::with_capacity(config.layers);
        for l in 0..config.layers {
            layers.push(b.layer(config, l)?);
        }
        let norm = b.norm("model.norm")?;
        let linear = if config.tied {
            let m = b.module("lm_head")?;
            let weight = Weight::Dense(table.0);
            let lora = b.weights.lora(&m, &weight)?;
            Linear { weight, bias: None, weight_slot: table.1, bias_slot: None, lora }
        } else {
            b.linear("lm_head")?
        };
        let head = Head { norm, linear, vocab: config.vocab };
        Ok(Self { config: config.clone(), embedding, layers, head })
    }
}

impl Decoder {
    /// A linear by the name of its module.
    pub fn linear(&self, name: &str) -> Option<&Linear> {
        if name == "lm_head" {
            return Some(&self.head.linear);
        }
        let (layer, rest) = name.strip_prefix("model.layers.")?.split_once('.')?;
        let layer = self.layers.get(layer.parse::<usize>().ok()?)?;
        match rest {
            "self_attn.q_proj" => Some(&layer.attn.q),
            "self_attn.k_proj" => Some(&layer.attn.k),
            "self_attn.v_proj" => Some(&layer.attn.v),
            "self_attn.o_proj" => Some(&layer.attn.o),
            "mlp.gate_proj" => Some(&layer.mlp.gate),
            "mlp.up_proj" => Some(&layer.mlp.up),
            "mlp.down_proj" => Some(&layer.mlp.down),
            _ => None,
        }
    }
}

struct Builder<'a> {
    by_name: HashMap<String, Module>,
    weights: &'a mut dyn Weights,
    eps: f64,
}

impl Builder<'_> {
    fn module(&self, name: &str) -> crate::Result<Module> {
        match self.by_name.get(name) {
            Some(m) => Ok(m.clone()),
            None => Err(candle_core::Error::Msg(format!("no module {name}")).into()),
        }
    }

    fn embedding(&mut self) -> crate::Result<(Embedding, (Tensor, Option<Slot>))> {
        let m = self.module("model.embed_tokens")?;
        let (table, slot) = self.weights.weight(&m)?;
        let lora = self.weights.embedding_lora(&m)?;
        Ok((Embedding { table: table.clone(), slot, lora }, (table, slot)))
    }

    fn norm(&mut self, name: &str) -> crate::Result<Norm> {
        let m = self.module(name)?;
        let (weight, slot) = self.weights.weight(&m)?;
        Ok(Norm { weight, slot, eps: self.eps })
    }

    fn linear(&mut self, name: &str) -> crate::Result<Linear> {
        let m = self.module(name)?;
        let (weight, weight_slot) = self.weights.matrix(&m)?;
        let (bias, bias_slot) = match m.bias() {
            Some(_) => {
                let (b, slot) = self.weights.bias(&m)?;
                (Some(b), slot)
            }
            None => (None, None),
        };
        let lora = self.weights.lora(&m, &weight)?;
        Ok(Linear { weight, bias, weight_slot, bias_slot, lora })
    }

    fn layer(&mut self, c: &Config, l: usize) -> crate::Result<Layer> {
        let p = format!("model.layers.{l}");
        let attn_norm = self.norm(&format!("{p}.input_layernorm"))?;
        let attn = Attention {
            q: self.linear(&format!("{p}.self_attn.q_proj"))?,
            k: self.linear(&format!("{p}.self_attn.k_proj"))?,
            v: self.linear(&format!("{p}.self_attn.v_proj"))?,
            o: self.linear(&format!("{p}.self_attn.o_proj"))?,
            qk_norm: match c.family.qk_norm {
                true => Some((
                    self.norm(&format!("{p}.self_attn.q_norm"))?,
                    self.norm(&format!("{p}.self_attn.k_norm"))?,
                )),
                false => None,
            },
            heads: c.heads,
            kv_heads: c.kv_heads,
            head_dim: c.head_dim,
            window: c.windows[l],
        };
        Ok(Layer {
            attn_norm,
            attn,
            mlp_norm: self.norm(&format!("{p}.post_attention_layernorm"))?,
            mlp: Mlp {
                gate: self.linear(&format!("{p}.mlp.gate_proj"))?,
                up: self.linear(&format!("{p}.mlp.up_proj"))?,
                down: self.linear(&format!("{p}.mlp.down_proj"))?,
            },
        })
    }
}
