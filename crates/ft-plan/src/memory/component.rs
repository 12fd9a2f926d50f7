//! Device bytes by component, and the peak.

pub use ft_base::memory::place::Phase;
use ft_kernels::Role;
use ft_kernels::ledger::ROLES;

/// Declares [`Component`]: its variants, with key and label.
macro_rules! components {
    ($($(#[$meta:meta])* $name:ident: $key:literal, $label:literal;)+) => {
        /// Purpose of device bytes, in the order of tables and charts.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Component {
            $($(#[$meta])* $name,)+
        }

        impl Component {
            /// All components, in declaration order.
            pub const ALL: [Component; [$($key),+].len()] = [$(Component::$name),+];

            /// Key in `ft plan --json`.
            pub fn key(self) -> &'static str {
                match self { $(Self::$name => $key,)+ }
            }

            /// Label in tables.
            pub fn label(self) -> &'static str {
                match self { $(Self::$name => $label,)+ }
            }
        }
    };
}

components! {
    Embedding: "weights_embedding", "frozen embedding";
    Attention: "weights_attention", "frozen attention";
    Mlp: "weights_mlp", "frozen feed-forward";
    Experts: "weights_experts", "frozen experts";
    Router: "weights_router", "frozen routers";
    Norms: "weights_norms", "frozen norms";
    Head: "weights_head", "frozen head";
    /// Scales of 4-bit quantization blocks.
    QuantConstants: "quantization_constants", "quantization constants";
    /// Fully trained weights, in the compute dtype.
    Trained: "weights_trained", "weights that train";
    /// LoRA matrices and DoRA magnitudes, in the compute dtype.
    Adapters: "adapters", "adapters";
    #[default]
    Gradients: "gradients", "gradients";
    /// f32 master weights, if the compute dtype is 16-bit.
    Master: "master", "f32 master weights";
    /// Optimizer moments.
    Moments: "moments", "optimizer moments";
    /// Token ids, positions and rotary tables of the micro-batch.
    Batch: "batch", "micro-batch";
    /// Saved activations, from forward to backward.
    Activations: "activations", "saved activations";
    /// Temporaries of the current layer, or of the current phase.
    Workspace: "workspace", "workspace";
    /// Weights dequantized from 4 bits or gathered from other ranks, for the duration of a visit.
    InFlight: "weights_in_flight", "weights in flight";
    /// The current logit chunk.
    Logits: "logits", "logit chunk";
    /// Key-value cache during generation.
    Cache: "key_value_cache", "key-value cache";
    /// Buffers of collectives, and staging buffers for host transfers.
    Communication: "communication", "communication";
    /// Extra bytes of a mixture if all tokens choose the same experts.
    Routing: "routing_reserve", "routing reserve";
    /// Bytes held by the allocator beyond the requested ones.
    AllocatorOverhead: "allocator_overhead", "allocator overhead";
    /// CUDA context and workspaces of the libraries.
    Context: "context", "context, libraries";
}

impl Component {
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
            Cache => "generate.max_new_tokens, log.samples (shorter prompts) or data.max_length",
            Activations => "memory.recompute, data.max_length or run.micro_rows",
            Batch | Workspace | Logits | InFlight | Communication | Routing | AllocatorOverhead | Context => {
                "data.max_length or run.micro_rows"
            }
        }
    }
}

/// Bytes by component.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Bytes([u64; Component::ALL.len()]);

impl Bytes {
    /// Bytes of one component.
    pub fn get(&self, c: Component) -> u64 {
        self.0[c as usize]
    }

    /// Adds bytes to a component.
    pub fn add(&mut self, c: Component, bytes: u64) {
        self.0[c as usize] += bytes;
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
    /// Highest sums by phase, in the order of [`Phase::ALL`].
    pub phases: [u64; Phase::ALL.len()],
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_component_has_its_own_index_and_names() {
        for (i, c) in Component::ALL.into_iter().enumerate() {
            assert_eq!(c as usize, i);
        }
        let mut keys: Vec<_> = Component::ALL.iter().map(|c| c.key()).collect();
        keys.sort_unstable();
        keys.dedup();
        assert_eq!(keys.len(), Component::ALL.len());
    }

    /// Lengths of answers: of `generate.samples`, with prompts cut by `data.max_length`, and of `log.samples`.
    #[test]
    fn the_hint_of_the_cache_names_the_keys_of_all_answers() {
        let keys = Component::Cache.keys_to_change();
        for key in ["generate.max_new_tokens", "data.max_length", "log.samples (shorter prompts)"] {
            assert!(keys.contains(key), "{key} is not in {keys}");
        }
    }
}
