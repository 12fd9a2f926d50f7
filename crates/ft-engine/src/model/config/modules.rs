//! Enumerates all modules with weights from the config alone, under their names in checkpoints and PEFT.

use super::family::{DeltaProjections, QkNorms};
use super::spelling::LAYER_SCALAR;
use super::types::{Config, Delta, KeySource};
use std::collections::BTreeSet;
use std::fmt::Arguments;
use std::sync::Arc;

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
    /// Convolution, decay and its bias of linear attention.
    Recurrence,
    /// Attention's sinks.
    Sinks,
    /// Tables, linears and norms of per-layer inputs.
    PerLayer,
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
            Group::Recurrence => "recurrence",
            Group::Sinks => "sinks",
            Group::PerLayer => "per_layer",
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
    /// Depthwise convolution with taps `[channels, 1, taps]`.
    Conv { channels: usize, taps: usize },
    /// A parameter `[dim]` that is no module's weight: its tensor has the name of the module.
    Vector { dim: usize },
    /// As [`Kind::Vector`], but a constant, which is in no list of modules and never trains.
    Constant { dim: usize },
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
    /// The parameter that PEFT adapts in place of this linear, in families whose adapters are fused.
    pub parameter: Option<Arc<Parameter>>,
}

/// A parameter that PEFT adapts as a whole (`target_parameters`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// Full name, such as `model.layers.0.mlp.experts.gate_up_proj`.
    pub name: String,
    /// The linear's place, if the parameter is of all experts.
    pub slice: Option<Slice>,
}

/// Place of an expert's linear in a parameter of all experts of a layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slice {
    /// Module of the parameter.
    pub block: String,
    pub experts: usize,
    /// Output rows of an expert.
    pub rows: usize,
    /// First of the linear's rows, and their distance.
    pub first: usize,
    pub step: usize,
    /// Module whose A this linear shares, if it has none of its own.
    pub a_of: Option<String>,
    /// Whether PEFT wraps this parameter around another one of the module, if both are adapted.
    pub outer: bool,
    /// Whether the checkpoint holds the parameter in MXFP4.
    pub mxfp4: bool,
}

/// Last name of the block of a shared expert.
pub const SHARED_EXPERT: &str = "shared_expert";
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

    /// Whether the checkpoint holds the weight in MXFP4.
    pub fn is_mxfp4(&self) -> bool {
        self.slice().is_some_and(|s| s.mxfp4)
    }

    /// Name of the bias's tensor.
    pub fn bias_name(&self) -> String {
        format!("{}.bias", self.name)
    }

    /// Shape of the weight.
    pub fn weight_shape(&self) -> Vec<usize> {
        match self.kind {
            Kind::Norm { dim } | Kind::Vector { dim } | Kind::Constant { dim } => vec![dim],
            Kind::Conv { channels, taps } => vec![channels, 1, taps],
            _ => vec![self.rows(), self.cols()],
        }
    }

    /// Rows and columns of the weight.
    fn dims(&self) -> (usize, usize) {
        match self.kind {
            Kind::Linear { out, inp, .. } => (out, inp),
            Kind::Norm { dim } | Kind::Vector { dim } | Kind::Constant { dim } => (dim, 1),
            Kind::Conv { channels, taps } => (channels, taps),
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

    /// The linear's place in a parameter of all experts, if adapters are of that.
    pub fn slice(&self) -> Option<&Slice> {
        self.parameter.as_ref()?.slice.as_ref()
    }

    /// Module whose A an adapter of this linear uses.
    pub fn a_of(&self) -> &str {
        self.slice().and_then(|s| s.a_of.as_deref()).unwrap_or(&self.name)
    }

    /// Name of the weight in a checkpoint.
    pub fn weight_name(&self) -> String {
        if self.is_bare() { self.name.clone() } else { format!("{}.weight", self.name) }
    }

    /// Whether the weight is a parameter without a module, which adapters cannot hold.
    pub fn is_bare(&self) -> bool {
        matches!(self.kind, Kind::Vector { .. } | Kind::Constant { .. })
    }

    /// Whether the weight is a constant, which is one where a checkpoint lacks it.
    pub fn is_constant(&self) -> bool {
        matches!(self.kind, Kind::Constant { .. })
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
            None if matches!(self.group, Group::Embedding | Group::PerLayer) => 0,
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
#[expect(clippy::large_enum_variant, reason = "one a layer")]
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

/// Part of a layer that mixes tokens.
#[derive(Clone, Debug)]
pub enum MixerTree {
    Attention {
        q: Module,
        /// Keys, unless an earlier layer's are used.
        k: Option<Module>,
        /// Values, if they have a projection of their own.
        v: Option<Module>,
        o: Module,
        /// Query and key norms, if the family has them; the key norm is absent with the keys.
        qk_norm: Option<(Module, Option<Module>)>,
        /// Sinks, if the family has them.
        sinks: Option<Module>,
    },
    /// Linear attention.
    Delta {
        /// Linears of the input.
        projections: Vec<Module>,
        conv: Module,
        a_log: Module,
        bias: Module,
        norm: Module,
        out: Module,
    },
}

impl MixerTree {
    /// Modules in the order of the forward pass.
    fn modules(self) -> Vec<Module> {
        match self {
            MixerTree::Attention { q, k, v, o, qk_norm, sinks } => {
                let norms = qk_norm.into_iter().flat_map(|(q, k)| [Some(q), k]).flatten();
                [Some(q), k, v, Some(o)].into_iter().flatten().chain(norms).chain(sinks).collect()
            }
            MixerTree::Delta { mut projections, conv, a_log, bias, norm, out } => {
                projections.extend([conv, a_log, bias, norm, out]);
                projections
            }
        }
    }
}

/// Modules of one decoder layer.
#[derive(Clone, Debug)]
pub struct LayerTree {
    /// Norms of the inputs and outputs of mixer and feed-forward part, of those that the family has.
    pub attn_norm: Option<Module>,
    pub mixer: MixerTree,
    pub attn_post: Option<Module>,
    pub mlp_norm: Option<Module>,
    pub mlp_post: Option<Module>,
    pub mlp: FeedForwardTree,
    /// Gate, projection and norm of the layer's inputs, if the model has per-layer inputs.
    pub per_layer: Option<[Module; 3]>,
    /// Factor on the output, a constant outside of the list of modules.
    pub scalar: Option<Module>,
}

/// Modules of the whole model. Building, loading and listing tensors all traverse this tree.
#[derive(Clone, Debug)]
pub struct Tree {
    pub embedding: Module,
    /// Table, projection and norm of the per-layer inputs of all layers, if the model has them.
    pub per_layer: Option<[Module; 3]>,
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

    /// An expert whose adapters are slices of those of `block`: gate rows, then up rows, with one A for both.
    fn fused(self, block: &str, experts: usize, mxfp4: bool) -> Self {
        let (f, d) = (self.gate.rows(), self.down.rows());
        let both = if self.up.is_some() { 2 * f } else { f };
        let of = |m: Module, name: &str, slice: Slice| {
            let parameter = Parameter { name: format!("{block}.{name}"), slice: Some(slice) };
            Module { parameter: Some(Arc::new(parameter)), ..m }
        };
        let slice = |rows, first, a_of, outer| {
            let block = block.to_string();
            Slice { block, experts, rows, first, step: 1, a_of, outer, mxfp4 }
        };
        let gate = self.gate.name.clone();
        Self {
            gate: of(self.gate, "gate_up_proj", slice(both, 0, None, false)),
            up: self.up.map(|up| of(up, "gate_up_proj", slice(both, f, Some(gate), false))),
            down: of(self.down, "down_proj", slice(d, 0, None, true)),
        }
    }
}

/// Modules of linear attention in a model of width `d`; `module` makes a module of the layer.
fn delta_tree(c: &Delta, d: usize, module: impl Fn(Arguments<'_>, Kind, Group) -> Module) -> MixerTree {
    let heads = c.heads;
    let of = |name: &str, kind, group| module(format_args!("linear_attn.{name}"), kind, group);
    let linear = |name, out, inp| of(name, linear(out, inp, false), Group::Attention);
    let vector = |name, dim| of(name, Kind::Vector { dim }, Group::Recurrence);
    let (channels, values) = (heads.channels(), heads.value_width());
    let projections = match c.projections {
        DeltaProjections::Split => vec![
            linear("in_proj_qkv", channels, d),
            linear("in_proj_z", values, d),
            linear("in_proj_b", heads.values, d),
            linear("in_proj_a", heads.values, d),
        ],
        DeltaProjections::Interleaved => {
            vec![linear("in_proj_qkvz", channels + values, d), linear("in_proj_ba", 2 * heads.values, d)]
        }
    };
    MixerTree::Delta {
        projections,
        conv: of("conv1d", Kind::Conv { channels, taps: c.taps }, Group::Recurrence),
        a_log: vector("A_log", heads.values),
        bias: vector("dt_bias", heads.values),
        norm: of("norm", Kind::Norm { dim: heads.value_dim }, Group::Norms),
        out: linear("out_proj", d, values),
    }
}

impl LayerTree {
    /// Modules of layer `l`.
    pub fn of(c: &Config, l: usize) -> Self {
        let (d, f) = (c.hidden, c.intermediate_of(l));
        let own = &c.attention[l];
        let (q, kv) = (c.heads * own.head_dim, own.kv_heads * own.head_dim);
        let (has_k, has_v) =
            (matches!(own.keys, KeySource::Own | KeySource::Joint), own.keys == KeySource::Own);
        let (of_q, name_of_q) = match own.keys {
            KeySource::WithQueries => (q + 2 * kv, "qkv_proj"),
            _ => (if c.family.gated { 2 * q } else { q }, "q_proj"),
        };
        let module = |name: Arguments<'_>, kind, group| {
            let name = format!("{}.layers.{l}.{name}", c.body);
            Module { name, kind, group, layer: Some(l), expert: None, parameter: None }
        };
        let norm = |name: &str, dim| module(format_args!("{name}"), Kind::Norm { dim }, Group::Norms);
        let attn = |name: &str, out, inp, bias| {
            module(format_args!("self_attn.{name}"), linear(out, inp, bias), Group::Attention)
        };
        let mlp = |block: Arguments<'_>, [gate, up, down]: [&str; 3], f, bias, group, expert| {
            let joint = up.is_empty();
            let of = |name, kind| Module { expert, ..module(format_args!("{block}.{name}"), kind, group) };
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
            let (q, k) = if whole { (q, kv) } else { (own.head_dim, own.head_dim) };
            (norm("self_attn.q_norm", q), has_k.then(|| norm("self_attn.k_norm", k)))
        };
        let sinks = || module(format_args!("self_attn.sinks"), Kind::Vector { dim: c.heads }, Group::Sinks);
        Self {
            attn_norm: named(of_family.attn),
            attn_post: named(of_family.attn_post),
            mlp_norm: named(of_family.mlp),
            mlp_post: named(of_family.mlp_post),
            mixer: match c.delta_of(l) {
                Some(delta) => delta_tree(delta, d, module),
                None => MixerTree::Attention {
                    q: attn(name_of_q, of_q, d, c.biases.qkv),
                    k: has_k.then(|| attn("k_proj", kv, d, c.biases.qkv)),
                    v: has_v.then(|| attn("v_proj", kv, d, c.biases.qkv)),
                    o: attn("o_proj", d, q, c.biases.o),
                    qk_norm: (c.family.qk_norm != QkNorms::Never).then(qk),
                    sinks: c.family.sinks.then(sinks),
                },
            },
            mlp: match (&c.moe, &c.family.experts) {
                (Some(moe), Some(family)) if moe.sparse[l] => {
                    let block = family.block;
                    let router = |name: &str, out, bias| {
                        module(format_args!("{block}.{name}"), linear(out, d, bias), Group::Router)
                    };
                    let expert = |e| {
                        let (own, group) = (format_args!("{block}.experts.{e}"), Group::Experts);
                        let tree = mlp(own, family.names, moe.width, family.bias, group, Some(e));
                        let whole = format!("{}.layers.{l}.{block}.experts", c.body);
                        if family.fused { tree.fused(&whole, moe.experts, c.mxfp4) } else { tree }
                    };
                    let of_router = |m: Module| match family.fused {
                        true => {
                            let name = m.weight_name();
                            Module { parameter: Some(Arc::new(Parameter { name, slice: None })), ..m }
                        }
                        false => m,
                    };
                    let shared = || {
                        let block = format_args!("{block}.{SHARED_EXPERT}");
                        let own = mlp(block, names, moe.shared, false, Group::Mlp, None);
                        (own, router("shared_expert_gate", 1, false))
                    };
                    FeedForwardTree::Mixture {
                        router: of_router(router(family.router, moe.experts, family.bias)),
                        experts: (0..moe.experts).map(expert).collect(),
                        shared: (moe.shared > 0).then(shared),
                    }
                }
                _ => {
                    let names = if c.family.joint_mlp { ["gate_up_proj", "", "down_proj"] } else { names };
                    FeedForwardTree::Dense(mlp(format_args!("mlp"), names, f, c.biases.mlp, Group::Mlp, None))
                }
            },
            per_layer: c.layer_inputs.map(|inputs| {
                let linear = |name: &str, out, inp| {
                    module(format_args!("{name}"), linear(out, inp, false), Group::PerLayer)
                };
                [
                    linear("per_layer_input_gate", inputs.width, d),
                    linear("per_layer_projection", d, inputs.width),
                    norm("post_per_layer_input_norm", d),
                ]
            }),
            scalar: c
                .family
                .by_layer
                .then(|| module(format_args!("{LAYER_SCALAR}"), Kind::Constant { dim: 1 }, Group::Norms)),
        }
    }

    /// Appends the modules in the order of the forward pass.
    fn list(self, out: &mut Vec<Module>) {
        out.extend(self.attn_norm);
        out.extend(self.mixer.modules());
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
        out.extend(self.per_layer.into_iter().flatten());
    }
}

impl Tree {
    /// Modules of the whole model.
    pub fn of(c: &Config) -> Self {
        let (embedding, norm, head) = Self::ends(c);
        let layers = (0..c.layers).map(|l| LayerTree::of(c, l)).collect();
        Self { embedding, per_layer: Self::per_layer(c), layers, norm, head }
    }

    /// Table, projection and norm of per-layer inputs.
    pub fn per_layer(c: &Config) -> Option<[Module; 3]> {
        let inputs = c.layer_inputs?;
        let (width, all) = (inputs.width, inputs.width * c.layers);
        let module = |name: &str, kind| Module {
            name: format!("{}.{name}", c.body),
            kind,
            group: Group::PerLayer,
            layer: None,
            expert: None,
            parameter: None,
        };
        Some([
            module("embed_tokens_per_layer", Kind::Embedding { vocab: inputs.vocab, dim: all }),
            module("per_layer_model_projection", linear(all, c.hidden, false)),
            module("per_layer_projection_norm", Kind::Norm { dim: width }),
        ])
    }

    /// Modules outside of the layers: embedding, final norm and head.
    pub fn ends(c: &Config) -> (Module, Module, Module) {
        let module = |name: &str, kind, group| Module {
            name: name.into(),
            kind,
            group,
            layer: None,
            expert: None,
            parameter: None,
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
        out.extend(self.per_layer.into_iter().flatten());
        self.layers.into_iter().for_each(|layer| layer.list(&mut out));
        out.extend([self.norm, self.head]);
        out
    }
}

/// All modules of a config in the order of the forward pass.
pub fn modules(c: &Config) -> Vec<Module> {
    Tree::of(c).list()
}

/// Tensors that the model computes with and that never train, outside of [`modules`].
pub fn constants(c: &Config) -> Vec<Module> {
    if !c.family.by_layer {
        return Vec::new();
    }
    (0..c.layers).filter_map(|l| LayerTree::of(c, l).scalar).collect()
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
