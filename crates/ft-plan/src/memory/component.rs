//! Device bytes by component, and the peak.

pub use ft_base::memory::place::Phase;
use ft_kernels::Role;
use ft_kernels::ledger::ROLES;

/// Purpose of device bytes, in the order of tables and charts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Component {
    Embedding,
    Attention,
    Mlp,
    Experts,
    Router,
    Norms,
    Head,
    /// Scales of 4-bit quantization blocks.
    QuantConstants,
    /// Fully trained weights, in the compute dtype.
    Trained,
    /// LoRA matrices and DoRA magnitudes, in the compute dtype.
    Adapters,
    #[default]
    Gradients,
    /// f32 master weights, if the compute dtype is 16-bit.
    Master,
    /// Optimizer moments.
    Moments,
    /// Token ids, positions and rotary tables of the micro-batch.
    Batch,
    /// Saved activations, from forward to backward.
    Activations,
    /// Temporaries of the current layer, or of the current phase.
    Workspace,
    /// Weights dequantized from 4 bits or gathered from other ranks, for the duration of a visit.
    InFlight,
    /// The current logit chunk.
    Logits,
    /// Key-value cache during generation.
    Cache,
    /// Buffers of collectives, and staging buffers for host transfers.
    Communication,
    /// Extra bytes of a mixture if all tokens choose the same experts.
    Routing,
    /// Bytes held by the allocator beyond the requested ones.
    AllocatorOverhead,
    /// CUDA context and workspaces of the libraries.
    Context,
}

impl Component {
    /// All components, in declaration order.
    pub const ALL: [Component; 23] = {
        use Component::*;
        [
            Embedding,
            Attention,
            Mlp,
            Experts,
            Router,
            Norms,
            Head,
            QuantConstants,
            Trained,
            Adapters,
            Gradients,
            Master,
            Moments,
            Batch,
            Activations,
            Workspace,
            InFlight,
            Logits,
            Cache,
            Communication,
            Routing,
            AllocatorOverhead,
            Context,
        ]
    };

    /// Key in `ft plan --json`.
    pub fn key(self) -> &'static str {
        use Component::*;
        match self {
            Embedding => "weights_embedding",
            Attention => "weights_attention",
            Mlp => "weights_mlp",
            Experts => "weights_experts",
            Router => "weights_router",
            Norms => "weights_norms",
            Head => "weights_head",
            QuantConstants => "quantization_constants",
            Trained => "weights_trained",
            Adapters => "adapters",
            Gradients => "gradients",
            Master => "master",
            Moments => "moments",
            Batch => "batch",
            Activations => "activations",
            Workspace => "workspace",
            InFlight => "weights_in_flight",
            Logits => "logits",
            Cache => "key_value_cache",
            Communication => "communication",
            Routing => "routing_reserve",
            AllocatorOverhead => "allocator_overhead",
            Context => "context",
        }
    }

    /// Label in tables.
    pub fn label(self) -> &'static str {
        use Component::*;
        match self {
            Embedding => "frozen embedding",
            Attention => "frozen attention",
            Mlp => "frozen feed-forward",
            Experts => "frozen experts",
            Router => "frozen routers",
            Norms => "frozen norms",
            Head => "frozen head",
            QuantConstants => "quantization constants",
            Trained => "weights that train",
            Adapters => "adapters",
            Gradients => "gradients",
            Master => "f32 master weights",
            Moments => "optimizer moments",
            Batch => "micro-batch",
            Activations => "saved activations",
            Workspace => "workspace",
            InFlight => "weights in flight",
            Logits => "logit chunk",
            Cache => "key-value cache",
            Communication => "communication",
            Routing => "routing reserve",
            AllocatorOverhead => "allocator overhead",
            Context => "context, libraries",
        }
    }

    /// Recipe keys to change to shrink it.
    pub fn keys_to_change(self) -> &'static str {
        use Component::*;
        match self {
            Embedding | Attention | Mlp | Experts | Router | Norms | Head | QuantConstants => {
                "model.quantize, model.dtype or parallel.zero"
            }
            Master => "[[train]] (fewer modules, or method = \"lora\"), memory.offload or parallel.zero",
            Trained | Gradients => "[[train]] (fewer modules, or method = \"lora\"), parallel.zero",
            Adapters => "lora.rank",
            Moments => "optimizer.name, memory.offload or parallel.zero",
            Batch | Workspace | Logits => "data.max_length or run.micro_rows",
            Cache => "generate.max_new_tokens or data.max_length",
            Activations => "memory.recompute, data.max_length or run.micro_rows",
            InFlight | Communication | Routing | AllocatorOverhead | Context => {
                "data.max_length or run.micro_rows"
            }
        }
    }

    fn index(self) -> usize {
        self as usize
    }
}

/// Bytes by component.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Bytes([u64; Component::ALL.len()]);

impl Bytes {
    /// Bytes of one component.
    pub fn get(&self, c: Component) -> u64 {
        self.0[c.index()]
    }

    /// Adds bytes to a component.
    pub fn add(&mut self, c: Component, bytes: u64) {
        self.0[c.index()] += bytes;
    }

    /// Adds `other` component by component.
    pub fn add_all(&mut self, other: &Bytes) {
        self.0.iter_mut().zip(&other.0).for_each(|(a, b)| *a += b);
    }

    /// Sum over all components.
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }

    /// Nonzero components, in declaration order.
    pub fn iter(&self) -> impl Iterator<Item = (Component, u64)> + '_ {
        Component::ALL.into_iter().map(|c| (c, self.get(c))).filter(|(_, b)| *b > 0)
    }
}

impl From<Role> for Component {
    fn from(role: Role) -> Self {
        match role {
            Role::Batch => Component::Batch,
            Role::Activations => Component::Activations,
            Role::Workspace => Component::Workspace,
            Role::InFlight => Component::InFlight,
            Role::Logits => Component::Logits,
            Role::Gradients => Component::Gradients,
        }
    }
}

impl From<[u64; ROLES]> for Bytes {
    fn from(bytes: [u64; ROLES]) -> Self {
        let mut out = Bytes::default();
        Role::ALL.into_iter().for_each(|r| out.add(r.into(), bytes[r as usize]));
        out
    }
}

/// One planned allocation, and the engine's place for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Allocation {
    pub phase: Phase,
    /// Unit of the walk, as in [`Peak::unit`].
    pub unit: usize,
    pub component: Component,
    pub bytes: u64,
}

/// The peak of the device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peak {
    pub phase: Phase,
    /// Unit of the walk: 0 is the embedding, then come the layers, the last is the head.
    pub unit: usize,
    /// Bytes held at the peak.
    pub bytes: Bytes,
    /// Highest sum of each phase, in the order of [`Phase::ALL`].
    pub phases: [u64; Phase::ALL.len()],
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_component_has_its_own_index_and_names() {
        for (i, c) in Component::ALL.into_iter().enumerate() {
            assert_eq!(c.index(), i);
        }
        let mut keys: Vec<_> = Component::ALL.iter().map(|c| c.key()).collect();
        keys.sort_unstable();
        keys.dedup();
        assert_eq!(keys.len(), Component::ALL.len());
    }
}
