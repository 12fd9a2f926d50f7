//! A whole decoder: embedding, layers, head.

use super::attention::Attention;
use super::batch::{Batch, HostBatch};
use super::config::Config;
use super::embedding::{Embedding, EmbeddingLora};
use super::head::Head;
use super::layer::{FeedForward, Layer};
use super::linear::{Linear, Lora, Weight};
use super::mlp::Mlp;
use super::modules::{Module, modules};
use super::moe::{Mixture, Shared};
use super::norm::Norm;
use super::sink::Slot;
use crate::kernel::Tensor;
use crate::kernel::tensor::Real;
use candle_core::Device;

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
    /// How many experts in a row each one that is built stands for, of a layer's (three modules each): one, but in a plan.
    fn alike(&self, experts: &[&Module]) -> Vec<usize> {
        vec![1; experts.len() / 3]
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
        let modules = modules(config);
        let mut b = Builder::new(config, modules.iter(), weights);
        let (embedding, table) = b.embedding()?;
        let layers = (0..config.layers).map(|l| b.layer(l)).collect::<crate::Result<_>>()?;
        let head = b.head(Some(table))?;
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
        let modules = modules(config);
        let mut b = Builder::new(config, modules.iter(), weights);
        let mut x_td = b.embedding()?.0.forward(&batch.ids)?;
        for l in 0..config.layers {
            x_td = b.layer(l)?.forward(&x_td, &batch.context, None, None)?.0;
        }
        // a tied head's table is loaded again: it would take memory all the time
        let table = if config.tied { Some(b.weights.weight(&modules[0])?) } else { None };
        Ok(b.head(table)?.logits(&x_td, &batch.context)?.real()?.clone())
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
            "self_attn.q_proj" => return Some(&layer.attn.q),
            "self_attn.k_proj" => return Some(&layer.attn.k),
            "self_attn.v_proj" => return Some(&layer.attn.v),
            "self_attn.o_proj" => return Some(&layer.attn.o),
            _ => {}
        }
        match (&layer.mlp, &self.config.family.experts) {
            (FeedForward::Dense(mlp), _) => part(mlp, rest.strip_prefix("mlp.")?, &DENSE_NAMES),
            (FeedForward::Mixture(m), Some(names)) => {
                let rest = rest.strip_prefix(names.block)?.strip_prefix('.')?;
                match (rest, &m.shared) {
                    ("gate", _) => return Some(&m.router),
                    ("shared_expert_gate", Some(s)) => return Some(&s.gate),
                    _ => {}
                }
                if let (Some(rest), Some(s)) = (rest.strip_prefix("shared_expert."), &m.shared) {
                    return part(&s.mlp, rest, &DENSE_NAMES);
                }
                let (expert, rest) = rest.strip_prefix("experts.")?.split_once('.')?;
                part(m.experts.get(expert.parse::<usize>().ok()?)?, rest, &names.names)
            }
            (FeedForward::Mixture(_), None) => None,
        }
    }
}

/// Names of gate, up and down projection in a dense block.
const DENSE_NAMES: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];

/// A linear of a block by its name among those of gate, up and down.
fn part<'a>(mlp: &'a Mlp, name: &str, names: &[&str; 3]) -> Option<&'a Linear> {
    names.iter().position(|n| *n == name).map(|i| mlp.linears()[i])
}

/// Builds the parts of a model from its modules, taken in the order of the forward pass.
pub struct Builder<'a> {
    config: &'a Config,
    modules: Box<dyn Iterator<Item = &'a Module> + 'a>,
    weights: &'a mut dyn Weights,
}

/// The embedding's table, and where its gradient goes.
type Table = (Tensor, Option<Slot>);

impl<'a> Builder<'a> {
    /// A builder of what `modules` are.
    pub fn new(
        config: &'a Config,
        modules: impl Iterator<Item = &'a Module> + 'a,
        weights: &'a mut dyn Weights,
    ) -> Self {
        Self { config, modules: Box::new(modules), weights }
    }

    /// The next module, which is to have this last name.
    fn next(&mut self, last: &str) -> crate::Result<&'a Module> {
        match self.modules.next() {
            Some(m) if m.last() == last => Ok(m),
            other => {
                let found = other.map_or("none", |m| &m.name);
                Err(candle_core::Error::Msg(format!("module {last}: the model's next is {found}")).into())
            }
        }
    }

    /// Final norm and head; a tied one is `table`.
    pub fn head(&mut self, table: Option<Table>) -> crate::Result<Head> {
        let norm = self.norm("norm")?;
        let m = self.next("lm_head")?;
        let linear = match table.filter(|_| self.config.tied) {
            Some((table, weight_slot)) => {
                let weight = Weight::Dense(table);
                let lora = self.weights.lora(m, &weight)?;
                Linear { weight, bias: None, weight_slot, bias_slot: None, lora }
            }
            None => self.linear_of(m)?,
        };
        Ok(Head { norm, linear, vocab: self.config.vocab })
    }

    /// The embedding, and its table for a tied head.
    pub fn embedding(&mut self) -> crate::Result<(Embedding, Table)> {
        let m = self.next("embed_tokens")?;
        let (table, slot) = self.weights.weight(m)?;
        let lora = self.weights.embedding_lora(m)?;
        Ok((Embedding { table: table.clone(), slot, lora }, (table, slot)))
    }

    fn norm(&mut self, last: &str) -> crate::Result<Norm> {
        let m = self.next(last)?;
        let (weight, slot) = self.weights.weight(m)?;
        Ok(Norm { weight, slot, eps: self.config.eps })
    }

    fn linear(&mut self, last: &str) -> crate::Result<Linear> {
        let m = self.next(last)?;
        self.linear_of(m)
    }

    fn linear_of(&mut self, m: &Module) -> crate::Result<Linear> {
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

    /// Layer `l`, whose modules come next.
    pub fn layer(&mut self, l: usize) -> crate::Result<Layer> {
        let c = self.config;
        let attn_norm = self.norm("input_layernorm")?;
        let attn = Attention {
            q: self.linear("q_proj")?,
            k: self.linear("k_proj")?,
            v: self.linear("v_proj")?,
            o: self.linear("o_proj")?,
            qk_norm: match c.family.qk_norm {
                true => Some((self.norm("q_norm")?, self.norm("k_norm")?)),
                false => None,
            },
            heads: c.heads,
            kv_heads: c.kv_heads,
            head_dim: c.head_dim,
            window: c.windows[l],
        };
        let mlp_norm = self.norm("post_attention_layernorm")?;
        let mlp = match (&c.moe, &c.family.experts) {
            (Some(moe), Some(names)) if moe.sparse[l] => {
                let router = self.linear("gate")?;
                let ours: Vec<&Module> = self.modules.by_ref().take(3 * moe.experts).collect();
                let alike = self.weights.alike(&ours);
                let (mut experts, mut from) = (Vec::new(), 0);
                for n in &alike {
                    let three = ours[from..].iter().copied();
                    experts.push(Builder::new(c, three, self.weights).mlp(&names.names)?);
                    from += 3 * n;
                }
                let shared = match moe.shared {
                    0 => None,
                    _ => Some(Shared {
                        mlp: self.mlp(&DENSE_NAMES)?,
                        gate: self.linear("shared_expert_gate")?,
                    }),
                };
                let (top_k, normalise) = (moe.top_k, moe.normalise);
                FeedForward::Mixture(Box::new(Mixture { router, experts, alike, shared, top_k, normalise }))
            }
            _ => FeedForward::Dense(Box::new(self.mlp(&DENSE_NAMES)?)),
        };
        Ok(Layer { attn_norm, attn, mlp_norm, mlp })
    }

    fn mlp(&mut self, names: &[&str; 3]) -> crate::Result<Mlp> {
        let [gate, up, down] = names;
        Ok(Mlp { gate: self.linear(gate)?, up: self.linear(up)?, down: self.linear(down)? })
    }
}
