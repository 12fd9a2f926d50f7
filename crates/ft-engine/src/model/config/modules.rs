//! Enumerates all modules with weights from the config alone, under their names in checkpoints and PEFT.

use super::family::QkNorms;
use super::types::Config;
use std::collections::BTreeSet;
use std::fmt::Arguments;

/// Module groups, as named in a recipe's `train.modules`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Group {
    /// Query, key, value and output projections.
    Attention,
    /// Dense and shared-expert feed-forward linears.
    Mlp,
    /// Linears of the routed experts.
    Experts,
    /// Routers and shared-expert gates.
    Router,
    Norms,
    /// Vectors of their own, such as attention's sinks.
    Vectors,
    Embedding,
    Head,
}

impl Group {
    /// Name in recipes.
    pub fn name(self) -> &'static str {
        match self {
            Group::Attention => "attention",
            Group::Mlp => "mlp",
            Group::Experts => "experts",
            Group::Router => "router",
            Group::Norms => "norms",
            Group::Vectors => "vectors",
            Group::Embedding => "embedding",
            Group::Head => "head",
        }
    }
}

/// Kind of a module, with dimensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `y = x W^T + b`, W `[out, inp]`.
    Linear {
        out: usize,
        inp: usize,
        /// Whether there is a bias `[out]`.
        bias: bool,
    },
    /// RMSNorm with a weight `[dim]`.
    Norm { dim: usize },
    /// A vector `[dim]`, whose tensor has the module's name.
    Vector { dim: usize },
    /// A table `[vocab, dim]`.
    Embedding { vocab: usize, dim: usize },
}

/// A module of the model.
#[derive(Clone, Debug)]
pub struct Module {
    /// Full name, such as `model.layers.0.self_attn.q_proj`.
    pub name: String,
    pub kind: Kind,
    pub group: Group,
    /// Decoder layer; `None` outside of layers.
    pub layer: Option<usize>,
    /// Expert index, for linears of experts.
    pub expert: Option<usize>,
    /// What transformers holds in place of a linear module, if anything.
    pub held_as: HeldAs,
}

/// How transformers holds the weight of a linear.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HeldAs {
    /// As a module of its own.
    #[default]
    Linear,
    /// As a parameter `weight` of another kind of module: routers.
    Parameter,
    /// As one parameter for all experts; `mxfp4` in a checkpoint in that format.
    Fused { mxfp4: bool },
}

/// Name of a score head.
pub const SCORE: &str = "score";

impl Module {
    /// Whether this is a score head.
    pub fn is_score(&self) -> bool {
        self.group == Group::Head && self.name == SCORE
    }

    /// Last component of the name.
    pub fn last(&self) -> &str {
        self.name.rsplit('.').next().unwrap_or(&self.name)
    }

    /// Name of the weight's tensor.
    pub fn weight_name(&self) -> String {
        match self.kind {
            Kind::Vector { .. } => self.name.clone(),
            _ => format!("{}.weight", self.name),
        }
    }

    /// Name of the parameter that PEFT's `target_parameters` adapt, if the weight is no linear module's.
    pub fn parameter(&self) -> Option<String> {
        match self.held_as {
            HeldAs::Linear => None,
            HeldAs::Parameter => Some(self.weight_name()),
            HeldAs::Fused { .. } => {
                let (experts, last) = self.name.rsplit_once('.')?;
                Some(format!("{}.{last}", experts.rsplit_once('.')?.0))
            }
        }
    }

    /// Whether the weight is one of a parameter for all experts.
    pub fn is_fused(&self) -> bool {
        matches!(self.held_as, HeldAs::Fused { .. })
    }

    /// Whether the checkpoint holds the weight in MXFP4.
    pub fn is_mxfp4(&self) -> bool {
        self.held_as == HeldAs::Fused { mxfp4: true }
    }

    /// Name of the bias's tensor.
    pub fn bias_name(&self) -> String {
        format!("{}.bias", self.name)
    }

    /// Shape of the weight.
    pub fn weight_shape(&self) -> Vec<usize> {
        match self.kind {
            Kind::Norm { dim } | Kind::Vector { dim } => vec![dim],
            _ => vec![self.rows(), self.cols()],
        }
    }

    /// Rows and columns of the weight.
    fn dims(&self) -> (usize, usize) {
        match self.kind {
            Kind::Linear { out, inp, .. } => (out, inp),
            Kind::Norm { dim } | Kind::Vector { dim } => (dim, 1),
            Kind::Embedding { vocab, dim } => (vocab, dim),
        }
    }

    /// Rows of the weight: output features of a linear.
    pub fn rows(&self) -> usize {
        self.dims().0
    }

    /// Columns of the weight: input features of a linear. 1 for norms.
    pub fn cols(&self) -> usize {
        self.dims().1
    }

    /// Number of values of the weight.
    pub fn weight_values(&self) -> usize {
        self.rows() * self.cols()
    }

    /// Length of the bias, if any.
    pub fn bias(&self) -> Option<usize> {
        match self.kind {
            Kind::Linear { out, bias: true, .. } => Some(out),
            _ => None,
        }
    }

    /// Unit of the walk: 0 is the embedding, 1.. are layers, the last one is final norm and head.
    pub fn unit(&self, layers: usize) -> usize {
        match self.layer {
            Some(l) => l + 1,
            None if self.group == Group::Embedding => 0,
            None => layers + 1,
        }
    }
}

/// Linears of a gated feed-forward: a dense one or one expert.
#[derive(Clone, Debug)]
pub struct MlpTree {
    /// `[d]` -> `[f]`; where gate and up are joint, of both, `[d]` -> `[2 f]`.
    pub gate: Module,
    /// `[d]` -> `[f]`, if apart.
    pub up: Option<Module>,
    /// `[f]` -> `[d]`.
    pub down: Module,
}

/// Feed-forward part of a layer.
#[derive(Clone, Debug)]
pub enum FeedForwardTree {
    /// One SwiGLU.
    Dense(MlpTree),
    /// A mixture of experts.
    Mixture {
        router: Module,
        experts: Vec<MlpTree>,
        /// Shared expert and its gate.
        shared: Option<(MlpTree, Module)>,
    },
}

/// Modules of one decoder layer.
#[derive(Clone, Debug)]
pub struct LayerTree {
    /// Norms of the inputs and outputs of attention and feed-forward part, of those that the family has.
    pub attn_norm: Option<Module>,
    pub attn_post: Option<Module>,
    pub mlp_norm: Option<Module>,
    pub mlp_post: Option<Module>,
    pub q: Module,
    pub k: Module,
    pub v: Module,
    pub o: Module,
    /// Query and key norms, if the family has them.
    pub qk_norm: Option<(Module, Module)>,
    /// Attention's sinks, if the family has them.
    pub sinks: Option<Module>,
    pub mlp: FeedForwardTree,
}

/// Modules of the whole model. Building, loading and listing tensors all traverse this tree.
#[derive(Clone, Debug)]
pub struct Tree {
    pub embedding: Module,
    /// Decoder layers, from the bottom.
    pub layers: Vec<LayerTree>,
    /// Final norm.
    pub norm: Module,
    /// Output head, of the vocabulary or of scores; shares the embedding's weight in a tied model.
    pub head: Module,
}

fn linear(out: usize, inp: usize, bias: bool) -> Kind {
    Kind::Linear { out, inp, bias }
}

impl MlpTree {
    fn modules(self) -> impl Iterator<Item = Module> {
        [Some(self.gate), self.up, Some(self.down)].into_iter().flatten()
    }
}

impl LayerTree {
    /// Modules of layer `l`.
    pub fn of(c: &Config, l: usize) -> Self {
        let (d, f) = (c.hidden, c.intermediate);
        let (q, kv) = (c.heads * c.head_dim, c.kv_heads * c.head_dim);
        let of_q = if c.family.gated { 2 * q } else { q };
        let module = |name: Arguments<'_>, kind, group| {
            let name = format!("{}.layers.{l}.{name}", c.body);
            Module { name, kind, group, layer: Some(l), expert: None, held_as: HeldAs::Linear }
        };
        let norm = |name: &str, dim| module(format_args!("{name}"), Kind::Norm { dim }, Group::Norms);
        let attn = |name: &str, out, inp, bias| {
            module(format_args!("self_attn.{name}"), linear(out, inp, bias), Group::Attention)
        };
        let mlp = |block: Arguments<'_>, [gate, up, down]: [&str; 3], f, bias, group, expert| {
            let joint = up.is_empty();
            let held_as = if joint { HeldAs::Fused { mxfp4: c.mxfp4 } } else { HeldAs::Linear };
            let of = |name, kind| Module {
                expert,
                held_as,
                ..module(format_args!("{block}.{name}"), kind, group)
            };
            MlpTree {
                gate: of(gate, linear(if joint { 2 * f } else { f }, d, bias)),
                up: (!joint).then(|| of(up, linear(f, d, bias))),
                down: of(down, linear(d, f, bias)),
            }
        };
        let names = ["gate_proj", "up_proj", "down_proj"];
        let of_family = c.family.norms;
        let named = |name: Option<&str>| name.map(|name| norm(name, d));
        let qk = || {
            let whole = c.family.qk_norm == QkNorms::Whole;
            let (q, k) = if whole { (q, kv) } else { (c.head_dim, c.head_dim) };
            (norm("self_attn.q_norm", q), norm("self_attn.k_norm", k))
        };
        let vector =
            |name: &str, dim| module(format_args!("self_attn.{name}"), Kind::Vector { dim }, Group::Vectors);
        Self {
            attn_norm: named(of_family.attn),
            attn_post: named(of_family.attn_post),
            mlp_norm: named(of_family.mlp),
            mlp_post: named(of_family.mlp_post),
            q: attn("q_proj", of_q, d, c.biases.qkv),
            k: attn("k_proj", kv, d, c.biases.qkv),
            v: attn("v_proj", kv, d, c.biases.qkv),
            o: attn("o_proj", d, q, c.biases.o),
            qk_norm: (c.family.qk_norm != QkNorms::Never).then(qk),
            sinks: c.family.sinks.then(|| vector("sinks", c.heads)),
            mlp: match (&c.moe, &c.family.experts) {
                (Some(moe), Some(family)) if moe.sparse[l] => {
                    let block = family.block;
                    let router = |name: &str, out, bias| {
                        let held_as = match family.joint {
                            Some(_) if name == family.router => HeldAs::Parameter,
                            _ => HeldAs::Linear,
                        };
                        let own = module(format_args!("{block}.{name}"), linear(out, d, bias), Group::Router);
                        Module { held_as, ..own }
                    };
                    let expert = |e| {
                        let (block, group) = (format_args!("{block}.experts.{e}"), Group::Experts);
                        mlp(block, family.names, moe.width, family.bias, group, Some(e))
                    };
                    let shared = || {
                        let block = format_args!("{block}.shared_expert");
                        let own = mlp(block, names, moe.shared, false, Group::Mlp, None);
                        (own, router("shared_expert_gate", 1, false))
                    };
                    FeedForwardTree::Mixture {
                        router: router(family.router, moe.experts, family.bias),
                        experts: (0..moe.experts).map(expert).collect(),
                        shared: (moe.shared > 0).then(shared),
                    }
                }
                _ => {
                    FeedForwardTree::Dense(mlp(format_args!("mlp"), names, f, c.biases.mlp, Group::Mlp, None))
                }
            },
        }
    }

    /// Appends the modules in the order of the forward pass.
    fn list(self, out: &mut Vec<Module>) {
        out.extend(self.attn_norm);
        out.extend([self.q, self.k, self.v, self.o]);
        out.extend(self.qk_norm.into_iter().flat_map(|(q, k)| [q, k]));
        out.extend(self.sinks);
        out.extend(self.attn_post);
        out.extend(self.mlp_norm);
        match self.mlp {
            FeedForwardTree::Dense(mlp) => out.extend(mlp.modules()),
            FeedForwardTree::Mixture { router, experts, shared } => {
                out.push(router);
                out.extend(experts.into_iter().flat_map(MlpTree::modules));
                if let Some((mlp, gate)) = shared {
                    out.extend(mlp.modules());
                    out.push(gate);
                }
            }
        }
        out.extend(self.mlp_post);
    }
}

impl Tree {
    /// Modules of the whole model.
    pub fn of(c: &Config) -> Self {
        let (embedding, norm, head) = Self::ends(c);
        Self { embedding, layers: (0..c.layers).map(|l| LayerTree::of(c, l)).collect(), norm, head }
    }

    /// Modules outside of the layers: embedding, final norm and head.
    pub fn ends(c: &Config) -> (Module, Module, Module) {
        let module = |name: &str, kind, group| {
            let held_as = HeldAs::Linear;
            Module { name: name.into(), kind, group, layer: None, expert: None, held_as }
        };
        let table = Kind::Embedding { vocab: c.vocab, dim: c.hidden };
        let name = if c.scores.is_some() { SCORE } else { c.vocabulary_name() };
        (
            module(&c.embedding_name(), table, Group::Embedding),
            module(&format!("{}.norm", c.body), Kind::Norm { dim: c.hidden }, Group::Norms),
            module(name, linear(c.outputs(), c.hidden, false), Group::Head),
        )
    }

    /// All modules in the order of the forward pass.
    pub fn list(self) -> Vec<Module> {
        let mut out = vec![self.embedding];
        self.layers.into_iter().for_each(|layer| layer.list(&mut out));
        out.extend([self.norm, self.head]);
        out
    }
}

/// All modules of a config in the order of the forward pass.
pub fn modules(c: &Config) -> Vec<Module> {
    Tree::of(c).list()
}

/// Groups present in a config, in the order of [`Group`].
pub fn groups(c: &Config) -> Vec<Group> {
    modules(c).iter().map(|m| m.group).collect::<BTreeSet<_>>().into_iter().collect()
}

/// Total number of parameters; a tied head counts once.
pub fn parameters(c: &Config) -> u64 {
    modules(c)
        .iter()
        .filter(|m| !(c.tied && m.group == Group::Head))
        .map(|m| m.weight_values() as u64 + m.bias().unwrap_or(0) as u64)
        .sum()
}
