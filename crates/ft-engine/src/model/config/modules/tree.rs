//! Modules of the whole model.

use super::layer::LayerTree;
use super::module::{Group, Kind, Module, SCORE, linear};
use crate::model::config::types::Config;
use std::collections::BTreeSet;

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
        let module = |name: &str, kind| Module::new(format!("{}.{name}", c.body), kind, Group::PerLayer);
        Some([
            module("embed_tokens_per_layer", Kind::Embedding { vocab: inputs.vocab, dim: all }),
            module("per_layer_model_projection", linear(all, c.hidden, false)),
            module("per_layer_projection_norm", Kind::Norm { dim: width }),
        ])
    }

    /// Modules outside of the layers: embedding, final norm and head.
    pub fn ends(c: &Config) -> (Module, Module, Module) {
        let table = Kind::Embedding { vocab: c.vocab, dim: c.hidden };
        let name = if c.scores.is_some() { SCORE } else { c.vocabulary_name() };
        (
            Module::new(c.embedding_name(), table, Group::Embedding),
            Module::new(format!("{}.norm", c.body), Kind::Norm { dim: c.hidden }, Group::Norms),
            Module::new(name, linear(c.outputs(), c.hidden, false), Group::Head),
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

/// Constant tensors of the forward pass, outside of [`modules`].
pub fn constants(c: &Config) -> Vec<Module> {
    if !c.family.by_layer {
        return Vec::new();
    }
    (0..c.layers).filter_map(|l| LayerTree::of(c, l).scalar).collect()
}

/// Constant added to the stored weight of a norm: 1 in families storing weights minus 1, linear attention apart.
pub fn norm_offset(c: &Config, norm: &Module) -> f64 {
    if c.family.plus_one && !norm.is_of_delta() { 1.0 } else { 0.0 }
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
