//! Modules of a decoder layer.

use super::feed_forward::FeedForwardTree;
use super::module::{A_LOG, DELTA, Group, InLayer, Kind, Module, linear};
use crate::model::config::family::{DeltaProjections, QkNorms};
use crate::model::config::spelling::LAYER_SCALAR;
use crate::model::config::types::{Config, Delta, KeySource};

/// Token-mixing part of a layer.
#[derive(Clone, Debug)]
#[expect(clippy::large_enum_variant, reason = "one for each layer, taken apart at once")]
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
    /// Norms of the inputs and outputs of mixer and feed-forward part, if the family has them.
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

impl MixerTree {
    /// Attention of layer `l`.
    fn attention(c: &Config, l: usize, of: InLayer<'_>) -> Self {
        let (d, own) = (c.hidden, &c.attention[l]);
        let (q, kv) = (c.heads * own.head_dim, own.kv_heads * own.head_dim);
        let (has_k, has_v) =
            (matches!(own.keys, KeySource::Own | KeySource::Joint), own.keys == KeySource::Own);
        let (of_q, name_of_q) = match own.keys {
            KeySource::WithQueries => ([q, kv, kv], "qkv_proj"),
            _ => ([if c.family.gated { 2 * q } else { q }, 0, 0], "q_proj"),
        };
        let within = |name: &str, kind, group| of.module(&format!("self_attn.{name}"), kind, group);
        let linear = |name: &str, out, inp, bias| within(name, linear(out, inp, bias), Group::Attention);
        let keys = |name: &str| {
            let keys = linear(name, kv, d, c.biases.qkv);
            if c.shares_keys(l) { keys } else { keys.by_all_rows() }
        };
        let qk = || {
            let whole = c.family.qk_norm == QkNorms::Whole;
            let (q, k) = if whole { (q, kv) } else { (own.head_dim, own.head_dim) };
            let norm = |name: &str, dim| {
                let norm = within(name, Kind::Norm { dim }, Group::Norms);
                if whole { norm.by_all_rows() } else { norm }
            };
            (norm("q_norm", q), has_k.then(|| norm("k_norm", k)))
        };
        MixerTree::Attention {
            q: linear(name_of_q, of_q.iter().sum(), d, c.biases.qkv).by_rows(of_q),
            k: has_k.then(|| keys("k_proj")),
            v: has_v.then(|| keys("v_proj")),
            o: linear("o_proj", d, q, c.biases.o).by_columns(),
            qk_norm: (c.family.qk_norm != QkNorms::Never).then(qk),
            sinks: c
                .family
                .sinks
                .then(|| within("sinks", Kind::Vector { dim: c.heads }, Group::Sinks).by_all_rows()),
        }
    }

    /// Linear attention in a model of width `d`.
    fn delta(c: &Delta, d: usize, layer: InLayer<'_>) -> Self {
        let heads = c.heads;
        let of = |name: &str, kind, group| layer.module(&format!("{DELTA}.{name}"), kind, group);
        let linear = |name, out, inp| of(name, linear(out, inp, false), Group::Attention);
        let into = |name, out| linear(name, out, d).by_all_rows();
        let vector = |name, dim| of(name, Kind::Vector { dim }, Group::Recurrence).by_all_rows();
        let (channels, values) = (heads.channels(), heads.value_width());
        // Queries and keys, each of the key heads, then values.
        let parts = [heads.key_width(), heads.key_width(), values];
        let projections = match c.projections {
            DeltaProjections::Split => vec![
                linear("in_proj_qkv", channels, d).by_rows(parts),
                into("in_proj_z", values),
                into("in_proj_b", heads.values),
                into("in_proj_a", heads.values),
            ],
            DeltaProjections::Interleaved => {
                vec![into("in_proj_qkvz", channels + values), into("in_proj_ba", 2 * heads.values)]
            }
        };
        MixerTree::Delta {
            projections,
            conv: of("conv1d", Kind::Conv { channels, taps: c.taps }, Group::Recurrence).by_rows(parts),
            a_log: vector(A_LOG, heads.values),
            bias: vector("dt_bias", heads.values),
            norm: of("norm", Kind::Norm { dim: heads.value_dim }, Group::Norms),
            out: linear("out_proj", d, values).by_columns(),
        }
    }
}

impl LayerTree {
    /// Modules of layer `l`.
    pub fn of(c: &Config, l: usize) -> Self {
        let (d, of) = (c.hidden, InLayer { body: c.body, layer: l });
        let names = c.family.norms;
        let named = |name: Option<&str>| name.map(|name| of.norm(name, d));
        let mlp = FeedForwardTree::of(c, l, of);
        let has_norm = !matches!(mlp, FeedForwardTree::Beside { .. });
        let inputs = |width| {
            let linear = |name: &str, out, inp| of.module(name, linear(out, inp, false), Group::PerLayer);
            [
                linear("per_layer_input_gate", width, d),
                linear("per_layer_projection", d, width),
                of.norm("post_per_layer_input_norm", d),
            ]
        };
        Self {
            attn_norm: named(names.attn),
            attn_post: named(names.attn_post),
            mlp_norm: named(names.mlp.filter(|_| has_norm)),
            mlp_post: named(names.mlp_post),
            mixer: match c.delta_of(l) {
                Some(delta) => MixerTree::delta(delta, d, of),
                None => MixerTree::attention(c, l, of),
            },
            mlp,
            per_layer: c.layer_inputs.map(|own| inputs(own.width)),
            scalar: c
                .family
                .by_layer
                .then(|| of.module(LAYER_SCALAR, Kind::Constant { dim: 1 }, Group::Norms)),
        }
    }

    /// Appends the modules in the order of the forward pass.
    pub(super) fn list(self, out: &mut Vec<Module>) {
        out.extend(self.attn_norm);
        out.extend(self.mixer.modules());
        out.extend(self.attn_post);
        out.extend(self.mlp_norm);
        self.mlp.list(out);
        out.extend(self.mlp_post);
        out.extend(self.per_layer.into_iter().flatten());
    }
}
