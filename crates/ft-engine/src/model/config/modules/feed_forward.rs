//! Modules of the feed-forward part of a layer.

use super::module::{Group, InLayer, Kind, Module, Parameter, Slice, linear};
use crate::model::config::types::Config;
use std::sync::Arc;

/// Names of gate, up and down projection.
const NAMES: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];

/// Linears of a gated feed-forward: a dense one or one expert.
#[derive(Clone, Debug)]
pub struct MlpTree {
    /// `[d]` -> `[f]`; joint with up, `[d]` -> `[2 f]`.
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
    /// A dense one beside a mixture of experts.
    Beside {
        /// Norms of input and output of the dense one.
        dense_norms: [Module; 2],
        dense: MlpTree,
        /// Weight of the norm of the router's input, the router, and factors on the gates.
        router: [Module; 3],
        /// Norms of input and output of the experts.
        norms: [Module; 2],
        experts: Vec<MlpTree>,
    },
}

impl FeedForwardTree {
    /// Modules of layer `l`.
    pub(super) fn of(c: &Config, l: usize, layer: InLayer<'_>) -> Self {
        let (Some(moe), Some(family)) = (c.moe.as_ref().filter(|m| m.sparse[l]), &c.family.experts) else {
            return FeedForwardTree::Dense(MlpTree::dense(c, l, layer).cut());
        };
        let linear = |name: &str, out, bias| {
            layer.module(&family.within(name), linear(out, c.hidden, bias), Group::Router)
        };
        let block = family.within("experts");
        let expert = |e| {
            let (own, of) = (format!("{block}.{e}"), (Group::Experts, Some(e)));
            let tree = MlpTree::of((c, layer), &own, family.names, (moe.width, family.bias), of);
            let parameters = layer.name(&family.within_current("experts"));
            if moe.fused { tree.fused(&parameters, moe.experts, c.is_mxfp4()) } else { tree }
        };
        let router = linear(family.router, moe.experts, family.bias);
        let experts = (0..moe.experts).map(expert).collect();
        let shared = || {
            let (block, of) = (family.within("shared_expert"), (Group::Mlp, None));
            let own = MlpTree::of((c, layer), &block, NAMES, (moe.shared, false), of);
            (own, linear("shared_expert_gate", 1, false))
        };
        let Some(beside) = &family.beside else {
            let parameter = layer.name(&family.within_current(family.router));
            return FeedForwardTree::Mixture {
                router: if moe.fused { router.into_parameter(&parameter) } else { router },
                experts,
                shared: (moe.shared > 0).then(shared),
            };
        };
        let norm = |name: &str| layer.norm(name, c.hidden);
        let factors = |name: &str, dim| layer.module(name, Kind::Vector { dim }, Group::RouterScales);
        FeedForwardTree::Beside {
            dense_norms: beside.dense.map(norm),
            dense: MlpTree::dense(c, l, layer),
            router: [factors(beside.router_scale, c.hidden), router, factors(beside.factors, moe.experts)],
            norms: beside.experts.map(norm),
            experts,
        }
    }

    /// Modules in the order of the forward pass.
    pub(super) fn list(self, out: &mut Vec<Module>) {
        match self {
            FeedForwardTree::Dense(mlp) => out.extend(mlp.modules()),
            FeedForwardTree::Mixture { router, experts, shared } => {
                out.push(router);
                out.extend(experts.into_iter().flat_map(MlpTree::modules));
                if let Some((mlp, gate)) = shared {
                    out.extend(mlp.modules());
                    out.push(gate);
                }
            }
            FeedForwardTree::Beside { dense_norms: [before, after], dense, router, norms, experts } => {
                out.push(before);
                out.extend(dense.modules());
                out.push(after);
                out.extend(router.into_iter().chain(norms));
                out.extend(experts.into_iter().flat_map(MlpTree::modules));
            }
        }
    }
}

impl MlpTree {
    /// Linears below `block`, with `f` values between them; without a name for `up`, gate and up in one.
    fn of(
        (c, layer): (&Config, InLayer<'_>),
        block: &str,
        [gate, up, down]: [&str; 3],
        (f, bias): (usize, bool),
        (group, expert): (Group, Option<usize>),
    ) -> Self {
        let (d, joint) = (c.hidden, up.is_empty());
        let of = |name: &str, out, inp| {
            let module = layer.module(&format!("{block}.{name}"), linear(out, inp, bias), group);
            Module { expert, ..module }
        };
        Self {
            gate: of(gate, if joint { 2 * f } else { f }, d),
            up: (!joint).then(|| of(up, f, d)),
            down: of(down, d, f),
        }
    }

    /// The dense part of a layer.
    fn dense(c: &Config, l: usize, layer: InLayer<'_>) -> Self {
        let names = if c.family.joint_mlp { ["gate_up_proj", "", "down_proj"] } else { NAMES };
        let sizes = (c.intermediate_of(l), c.biases.mlp);
        Self::of((c, layer), "mlp", names, sizes, (Group::Mlp, None))
    }

    /// The feed-forward, cut along the values between its linears.
    fn cut(self) -> Self {
        let f = self.down.cols();
        let gate = if self.up.is_some() { [f, 0, 0] } else { [f, f, 0] };
        Self {
            gate: self.gate.by_rows(gate),
            up: self.up.map(Module::by_all_rows),
            down: self.down.by_columns(),
        }
    }

    fn modules(self) -> impl Iterator<Item = Module> {
        [Some(self.gate), self.up, Some(self.down)].into_iter().flatten()
    }

    /// An expert with slices of the adapters of `block`: gate rows, then up rows, with one A for both.
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
