//! Modules with weights: names, kinds, groups, and the parameters adapted by PEFT.

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
    /// Factors on the inputs of routers and on gates.
    RouterScales,
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
            Group::RouterScales => "router_scales",
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
    /// A parameter `[dim]`, not a module's weight: the tensor has the name of the module.
    Vector { dim: usize },
    /// As [`Kind::Vector`], but a constant, in no list of modules and never trained.
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
    /// The parameter adapted by PEFT in place of this linear, if adapters are of parameters.
    pub parameter: Option<Arc<Parameter>>,
    /// How ranks of a tensor group cut the weight.
    pub cut: CutAlong,
}

/// Dimension of a weight cut by the ranks of a tensor group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CutAlong {
    /// Every rank has all of it.
    #[default]
    Nothing,
    /// The first: rows of a product into a block. Consecutive parts of these lengths are cut evenly, each by itself;
    /// 0 where there are fewer.
    Rows([usize; 3]),
    /// The last: columns of a product out of a block.
    Columns,
}

/// A parameter adapted by PEFT as a whole (`target_parameters`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// Full name, such as `model.layers.0.mlp.experts.gate_up_proj`.
    pub name: String,
    /// The linear's place, if the parameter is of all experts.
    pub slice: Option<Slice>,
}

impl Parameter {
    /// Module of the parameter.
    pub fn block(&self) -> &str {
        let of_linear = || self.name.strip_suffix(".weight").unwrap_or(&self.name);
        self.slice.as_ref().map_or_else(of_linear, |s| &s.block)
    }
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
    /// Module with the A of this linear, if shared.
    pub a_of: Option<String>,
    /// Whether PEFT wraps this parameter around another one of the module, if both are adapted.
    pub outer: bool,
    /// Whether the checkpoint holds the parameter in MXFP4.
    pub mxfp4: bool,
}

/// Name of linear attention in a layer.
pub(super) const DELTA: &str = "linear_attn";

/// Name of the logarithms of linear attention's decay rates.
pub(super) const A_LOG: &str = "A_log";

/// Name of a score head.
pub const SCORE: &str = "score";

impl Module {
    /// A module outside of the layers, whole on every rank.
    pub(super) fn new(name: impl Into<String>, kind: Kind, group: Group) -> Self {
        let cut = CutAlong::Nothing;
        Self { name: name.into(), kind, group, layer: None, expert: None, parameter: None, cut }
    }

    /// Whether this is a score head.
    pub fn is_score(&self) -> bool {
        self.group == Group::Head && self.name == SCORE
    }

    /// Whether this is a part of linear attention.
    pub(super) fn is_of_delta(&self) -> bool {
        self.name.rsplit('.').nth(1) == Some(DELTA)
    }

    /// Whether this is the logarithms of linear attention's decay rates.
    pub fn is_decay(&self) -> bool {
        self.is_of_delta() && self.last() == A_LOG
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

    /// Module with the A of this linear's adapter.
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

    /// Whether the weight is a constant: 1 if absent from a checkpoint.
    pub fn is_constant(&self) -> bool {
        matches!(self.kind, Kind::Constant { .. })
    }

    /// The linear as PEFT adapts a parameter: the weight of `block`, the linear in transformers 5.
    pub(crate) fn into_parameter(self, block: &str) -> Self {
        let parameter = Parameter { name: format!("{block}.weight"), slice: None };
        Self { parameter: Some(Arc::new(parameter)), ..self }
    }

    /// Name of the linear in an adapter.
    pub fn adapted_name(&self) -> &str {
        match &self.parameter {
            Some(p) if p.slice.is_none() => p.block(),
            _ => &self.name,
        }
    }

    /// The module, cut along consecutive parts of its rows.
    pub(super) fn by_rows(self, parts: [usize; 3]) -> Self {
        Self { cut: CutAlong::Rows(parts), ..self }
    }

    /// The module, cut along all of its rows.
    pub(super) fn by_all_rows(self) -> Self {
        let rows = self.rows();
        self.by_rows([rows, 0, 0])
    }

    /// The module, cut along its columns.
    pub(super) fn by_columns(self) -> Self {
        Self { cut: CutAlong::Columns, ..self }
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

/// Kind of a linear.
pub(super) fn linear(out: usize, inp: usize, bias: bool) -> Kind {
    Kind::Linear { out, inp, bias }
}

/// Makes the modules of a layer.
#[derive(Clone, Copy, Debug)]
pub(super) struct InLayer<'a> {
    /// Prefix of the modules below the head.
    pub body: &'a str,
    pub layer: usize,
}

impl InLayer<'_> {
    /// Full name of a part of the layer.
    pub fn name(self, name: &str) -> String {
        format!("{}.layers.{}.{name}", self.body, self.layer)
    }

    pub fn module(self, name: &str, kind: Kind, group: Group) -> Module {
        Module { layer: Some(self.layer), ..Module::new(self.name(name), kind, group) }
    }

    pub fn norm(self, name: &str, dim: usize) -> Module {
        self.module(name, Kind::Norm { dim }, Group::Norms)
    }
}
