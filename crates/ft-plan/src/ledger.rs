//! What bytes of a device are for, and where they are at their most.

use ft_kernels::Role;
use ft_kernels::ledger::ROLES;
pub use ft_base::memory::place::Phase;

/// What bytes are for. The order is that of tables and charts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Component {
    /// Frozen token embedding.
    Embedding,
    /// Frozen attention linears.
    Attention,
    /// Frozen dense feed-forward linears.
    Mlp,
    /// Frozen experts.
    Experts,
    /// Frozen routers.
    Router,
    /// Frozen norms.
    Norms,
    /// Frozen output head.
    Head,
    /// Scales of quantized blocks.
    QuantConstants,
    /// Weights that train in full, in the compute dtype.
    Trained,
    /// LoRA's matrices and DoRA's magnitudes, in the compute dtype.
    Adapters,
    /// Gradients.
    #[default]
    Gradients,
    /// f32 copies of what trains, where the compute dtype is another.
    Master,
    /// The optimizer's moments.
    Moments,
    /// Token ids, positions and rotary tables of the micro-batch.
    Batch,
    /// What layers keep from forward to backward.
    Activations,
    /// Temporaries of the layer that is at work, or of whatever the phase does.
    Workspace,
    /// Weights dequantized from 4 bits, or gathered from other ranks, while they are used.
    InFlight,
    /// The chunk of logits that exists.
    Logits,
    /// Keys and values of what was read, while the model answers.
    Cache,
    /// Buffers of collectives, and of what is on its way to or from the host.
    Communication,
    /// What a mixture takes more where all tokens choose the same experts.
    Routing,
    /// What the allocator holds beyond what was asked for.
    AllocatorOverhead,
    /// The driver's context and the libraries' own workspaces.
    Context,
}

impl Component {
    /// All of them.
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

    /// The name in `ft plan --json`.
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

    /// The name in tables.
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

    /// The recipe keys that make it smaller.
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

    /// Adds to a component.
    pub fn add(&mut self, c: Component, bytes: u64) {
        self.0[c.index()] += bytes;
    }

    /// Adds each component of another.
    pub fn add_all(&mut self, other: &Bytes) {
        self.0.iter_mut().zip(&other.0).for_each(|(a, b)| *a += b);
    }

    /// Sum of all.
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }

    /// Components that are not zero, in order.
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

/// One allocation of a plan, and where the engine makes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Listed {
    /// Doing what.
    pub phase: Phase,
    /// At which unit, as in [`Peak`].
    pub unit: usize,
    /// What for.
    pub component: Component,
    /// Its bytes.
    pub bytes: u64,
}

/// Where the sum was highest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peak {
    /// Doing what.
    pub phase: Phase,
    /// At which unit of the walk: 0 the embedding, then the layers, the last is the head.
    pub unit: usize,
    /// What it was made of.
    pub bytes: Bytes,
    /// The highest sum of each phase, in the order of [`Phase::ALL`].
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
