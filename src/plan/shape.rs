//! The sizes of a model that memory depends on, from its config and what a recipe trains.

use crate::adapt::{Choice, Selection};
use crate::model::Config;
use crate::model::modules::{Group, Kind, Module};
use crate::quant;
use crate::recipe::Quantize;

/// One linear.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Linear {
    /// Input features.
    pub i: u64,
    /// Output features.
    pub o: u64,
    /// Whether it has a bias.
    pub bias: bool,
    /// Whether it trains in full.
    pub full: bool,
    /// Rank of its LoRA, 0 for none.
    pub rank: u64,
    /// Whether LoRA drops inputs.
    pub dropout: bool,
    /// Whether it is DoRA.
    pub dora: bool,
    /// Whether its weight is kept in 4 bits.
    pub nf4: bool,
}

impl Linear {
    fn of(m: &Module, choice: &Choice, nf4: bool) -> Self {
        let (o, i, bias) = match m.kind {
            Kind::Linear { out, inp, bias } => (out, inp, bias),
            Kind::Norm { dim } => (dim, 1, false),
            Kind::Embedding { vocab, dim } => (vocab, dim, false),
        };
        let mut l = Self { i: i as u64, o: o as u64, bias, nf4, ..Self::default() };
        match choice {
            Choice::Freeze => {}
            Choice::Full { .. } => l.full = true,
            Choice::Lora { spec, .. } => {
                l.rank = spec.rank as u64;
                l.dropout = spec.dropout > 0.0;
                l.dora = spec.dora;
            }
        }
        l
    }

    /// Whether backward needs the input.
    pub fn needs_input(&self) -> bool {
        self.full || self.rank > 0
    }

    /// Values of the weight.
    pub fn weight(&self) -> u64 {
        self.i * self.o
    }
}

/// The feed-forward block of a layer.
#[derive(Clone, Debug, PartialEq)]
pub enum Ffn {
    /// gate, up, down.
    Dense([Linear; 3]),
    /// A mixture.
    Experts {
        /// The router.
        router: Linear,
        /// gate, up and down of an expert, and how many in a row are like it.
        experts: Vec<([Linear; 3], u64)>,
        /// Gate, up and down of the expert of every token, and the linear that scales it.
        shared: Option<([Linear; 3], Linear)>,
        /// Experts a token.
        top_k: u64,
    },
}

/// One layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Layer {
    /// q, k, v, o.
    pub attention: [Linear; 4],
    /// Whether queries and keys are normalised.
    pub qk_norm: bool,
    /// Feed-forward.
    pub ffn: Ffn,
    /// Sliding window.
    pub window: Option<u64>,
}

impl Layer {
    /// The linears but for the router, each with how many in a row are like it.
    pub fn linears(&self) -> impl Iterator<Item = (&Linear, u64)> {
        let (three, gate, experts): (&[Linear], Option<&Linear>, &[_]) = match &self.ffn {
            Ffn::Dense(three) => (three, None, &[]),
            Ffn::Experts { experts, shared: Some((three, gate)), .. } => (three, Some(gate), experts),
            Ffn::Experts { experts, shared: None, .. } => (&[], None, experts),
        };
        let experts = experts.iter().flat_map(|(e, n)| e.iter().map(|l| (l, *n)));
        self.attention.iter().chain(three).chain(gate).map(|l| (l, 1)).chain(experts)
    }
}

/// A whole model.
#[derive(Clone, Debug)]
pub struct Shape {
    /// Width.
    pub d: u64,
    /// Vocabulary.
    pub vocab: u64,
    /// Query heads.
    pub heads: u64,
    /// Key/value heads.
    pub kv_heads: u64,
    /// Channels of a head.
    pub head_dim: u64,
    /// Whether head and embedding are one tensor.
    pub tied: bool,
    /// The embedding, as a linear [vocab, d].
    pub embedding: Linear,
    /// Layers.
    pub layers: Vec<Layer>,
    /// The head; of a tied one, what trains of it.
    pub head: Linear,
    /// Whether the final norm trains.
    pub final_norm: bool,
    /// Lowest unit that trains.
    pub lowest: Option<usize>,
}

/// Whether `quantize` makes a module's weight 4-bit: decoder linears, not routers, and not what trains in full.
pub fn is_quantized(m: &Module, choice: &Choice, quantize: Quantize) -> bool {
    quantize == Quantize::Nf4 && quant::takes(m) && !matches!(choice, Choice::Full { .. })
}

impl Shape {
    /// From a config and a selection of its modules.
    pub fn new(c: &Config, selection: &Selection, quantize: Quantize) -> Self {
        let mut embedding = Linear::default();
        let mut head = Linear::default();
        let mut final_norm = false;
        let (mut attention, mut mlp) = (vec![Vec::new(); c.layers], vec![Vec::new(); c.layers]);
        let mut routers = vec![Vec::new(); c.layers];
        let mut lowest: Option<usize> = None;
        let tied_full = c.tied
            && selection.modules.iter().any(|(m, choice)| {
                matches!(m.group, Group::Head | Group::Embedding) && matches!(choice, Choice::Full { .. })
            });
        for (m, choice) in &selection.modules {
            let l = Linear::of(m, choice, is_quantized(m, choice, quantize));
            let mut unit = m.unit(c.layers);
            if tied_full && m.group == Group::Head {
                unit = 0;
            }
            if l.needs_input() {
                lowest = Some(lowest.map_or(unit, |u| u.min(unit)));
            }
            match (m.group, m.layer) {
                (Group::Embedding, _) => embedding = l,
                (Group::Head, _) => head = l,
                (Group::Norms, None) => final_norm = l.full,
                (Group::Norms, Some(_)) => {}
                (Group::Attention, Some(at)) => attention[at].push(l),
                (Group::Router, Some(at)) => routers[at].push(l),
                (Group::Mlp | Group::Experts, Some(at)) => mlp[at].push(l),
                _ => {}
            }
        }
        if tied_full {
            embedding.full = true;
            head.full = true;
        }
        let layers = attention
            .into_iter()
            .zip(mlp)
            .enumerate()
            .map(|(at, (a, f))| {
                let get = |v: &[Linear], i: usize| v.get(i).copied().unwrap_or_default();
                let three = |v: &[Linear]| [get(v, 0), get(v, 1), get(v, 2)];
                let ffn = match &c.moe {
                    Some(moe) if moe.sparse[at] => {
                        let (experts, rest) = f.split_at((3 * moe.experts).min(f.len()));
                        Ffn::Experts {
                            router: get(&routers[at], 0),
                            experts: alike(experts.chunks(3).map(three)),
                            shared: (moe.shared > 0).then(|| (three(rest), get(&routers[at], 1))),
                            top_k: moe.top_k as u64,
                        }
                    }
                    _ => Ffn::Dense(three(&f)),
                };
                Layer {
                    attention: [get(&a, 0), get(&a, 1), get(&a, 2), get(&a, 3)],
                    qk_norm: c.family.qk_norm,
                    ffn,
                    window: c.windows[at].map(|w| w as u64),
                }
            })
            .collect();
        Self {
            d: c.hidden as u64,
            vocab: c.vocab as u64,
            heads: c.heads as u64,
            kv_heads: c.kv_heads as u64,
            head_dim: c.head_dim as u64,
            tied: c.tied,
            embedding,
            layers,
            head,
            final_norm,
            lowest,
        }
    }

    /// The part of one rank: `tensor` ranks share each linear, `stages` share the layers.
    pub fn split(&mut self, tensor: u64, stages: usize) {
        if stages > 1 {
            let mine = self.layers.len().div_ceil(stages);
            // backward walks a stage's layers from its lowest that trains: counted from the top
            let walked = self.walked().min(mine);
            self.layers.drain(..self.layers.len() - mine);
            self.lowest = self.lowest.map(|u| if u == 0 { 0 } else { mine + 1 - walked.min(mine) });
        }
        if tensor <= 1 {
            return;
        }
        let part = |n: &mut u64| *n = n.div_ceil(tensor);
        let three = |e: &mut [Linear; 3]| {
            let [gate, up, down] = e;
            [&mut gate.o, &mut up.o, &mut down.i].into_iter().for_each(part);
        };
        for l in &mut self.layers {
            let [q, k, v, o] = &mut l.attention;
            [&mut q.o, &mut k.o, &mut v.o, &mut o.i].into_iter().for_each(part);
            match &mut l.ffn {
                Ffn::Dense(e) => three(e),
                Ffn::Experts { experts, shared, .. } => {
                    experts
                        .iter_mut()
                        .map(|(e, _)| e)
                        .chain(shared.iter_mut().map(|(e, _)| e))
                        .for_each(three);
                }
            }
        }
        let rest = [&mut self.heads, &mut self.kv_heads, &mut self.vocab, &mut self.head.o];
        rest.into_iter().for_each(part);
    }

    /// Units of the walk: embedding, layers, head.
    pub fn units(&self) -> usize {
        self.layers.len() + 2
    }

    /// Layers that backward walks through.
    pub fn walked(&self) -> usize {
        self.lowest.map_or(0, |u| (self.layers.len() + 1).saturating_sub(u.max(1)))
    }
}

/// Neighbours that are equal, counted.
fn alike(experts: impl Iterator<Item = [Linear; 3]>) -> Vec<([Linear; 3], u64)> {
    let mut out: Vec<([Linear; 3], u64)> = Vec::new();
    for e in experts {
        match out.last_mut() {
            Some((last, n)) if *last == e => *n += 1,
            _ => out.push((e, 1)),
        }
    }
    out
}
