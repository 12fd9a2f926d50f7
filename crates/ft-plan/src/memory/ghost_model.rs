//! Shape-only model of a plan: the engine's own modules with ghosts as weights, one layer a kind.

use super::states::own;
use candle_core::DType;
use ft_engine::adapters::{Choice, Selection};
use ft_engine::model::decoder::Builder;
use ft_engine::model::embedding::Embedding;
use ft_engine::model::head::Head;
use ft_engine::model::layer::Layer;
use ft_engine::model::modules::{Group, LayerTree, Module, Tree};
use ft_engine::model::{Config, LayerAttention, Units};
use ft_engine::params::build::ghost::Ghosts;
use ft_engine::walk::Outline;
use ft_kernels::{Ledger, Machine, Tensor};
use ft_recipe::Quantize;

/// A model of ghosts.
#[derive(Debug)]
pub struct GhostModel {
    /// Ledger of all its ghosts.
    pub ledger: Ledger,
    /// Compute dtype.
    pub dtype: DType,
    /// Hidden size.
    pub d: usize,
    /// Channels of the rotary embeddings.
    pub ropes: Vec<usize>,
    pub embedding: Embedding,
    /// One layer of each distinct kind.
    pub kinds: Vec<Layer>,
    /// Index into `kinds` for each layer.
    pub of: Vec<usize>,
    /// Final norm and head.
    pub head: Head,
    /// Whether the head shares the embedding's table.
    pub tied: bool,
    /// Gradient buffers by unit, as `GradAccumulator` takes them.
    pub grads: Vec<Option<Tensor>>,
    /// Units of the planned stage.
    pub units: Units,
    /// Lowest unit that trains; `None` if nothing does.
    pub lowest: Option<usize>,
}

/// Key of a layer kind: choices of the modules, mixture or dense, attention and use of the keys by later layers, linear
/// attention.
type Kind<'a> = (Vec<&'a Choice>, bool, (LayerAttention, bool), bool);

impl GhostModel {
    /// Builds the model from a config and a module selection. `dtype` is the compute dtype; `weights` is the
    /// quantization of linear layers and whether frozen matrices are stored with room for their adapters; `tensor` and
    /// `experts` are the tensor-parallel and expert-parallel world sizes, `units` the units of the planned stage.
    pub fn new(
        config: &Config,
        selection: &Selection,
        weights: (Quantize, bool),
        (machine, dtype): (Machine, DType),
        (tensor, experts): (usize, usize),
        units: Units,
    ) -> ft_base::Result<Self> {
        let ledger = Ledger::new(machine);
        let c = config;
        let mut layers: Vec<Vec<usize>> = vec![Vec::new(); c.layers];
        let (mut first, mut last) = (Vec::new(), Vec::new());
        for (i, (m, _)) in selection.modules.iter().enumerate() {
            match (m.layer, m.group) {
                (Some(l), _) => layers[l].push(i),
                (None, Group::Embedding | Group::PerLayer) => first.push(i),
                (None, _) => last.push(i),
            }
        }
        let own = own(selection, experts).map(|range| (range, experts));
        let ghosts = |list: &[usize]| {
            let execution = list.iter().map(|i| &selection.modules[*i]).map(|(m, c)| (m.name.as_str(), *c));
            let mut ghosts = Ghosts::new(&ledger, dtype, execution, weights);
            (ghosts.own, ghosts.cut_over) = (own.clone(), tensor);
            ghosts
        };
        let (mut kinds, mut known, mut of): (Vec<Layer>, Vec<Kind<'_>>, _) =
            (Vec::new(), Vec::new(), Vec::new());
        for (l, list) in layers.iter().enumerate() {
            let execution = list.iter().map(|i| &selection.modules[*i].1).collect();
            let sparse = c.moe.as_ref().is_some_and(|m| m.sparse[l]);
            let kind = (execution, sparse, (c.attention[l], c.lends_keys(l)), c.delta_of(l).is_some());
            let at = known.iter().position(|k| *k == kind).unwrap_or(known.len());
            if at == known.len() {
                kinds.push(Builder::new(c, &mut ghosts(list)).layer(l, &LayerTree::of(c, l))?);
                known.push(kind);
            }
            of.push(at);
        }
        // shards use the module names of the whole model
        let (table, norm, head) = Tree::ends(c);
        let (embedding, table) =
            Builder::new(c, &mut ghosts(&first)).embedding(&table, Tree::per_layer(c).as_ref())?;
        let head = Builder::new(c, &mut ghosts(&last)).head(&norm, &head, Some(table))?;
        let trains = |(_, choice): &&(Module, Choice)| *choice != Choice::Freeze;
        let lowest = selection.modules.iter().filter(trains).map(|(m, _)| m.unit(c.layers)).min();
        let grads = Ghosts::grads(&ledger);
        Ok(Self {
            ledger,
            dtype,
            d: c.hidden,
            ropes: c.rope_dims(),
            embedding,
            kinds,
            of,
            head,
            tied: config.tied,
            grads,
            units,
            lowest,
        })
    }

    /// Determines the visits of the walk's passes.
    pub fn outline(&self) -> Outline {
        let e = &self.embedding;
        let (embedding, uses_weights) = (e.trains(), e.uses_weights());
        Outline { layers: self.of.len(), units: self.units, tied: self.tied, embedding, uses_weights }
    }

    /// Numbers and kinds of the stage's layers.
    pub fn own(&self) -> impl DoubleEndedIterator<Item = (usize, &usize)> {
        self.units.own_layers().filter_map(|l| Some((l, self.of.get(l)?)))
    }

    /// Layers walked backward.
    pub fn walked(&self) -> usize {
        let own = self.units.own_layers();
        self.lowest.map_or(0, |u| own.end.saturating_sub(u.saturating_sub(1).max(own.start)))
    }

    /// Whether the stage has a backward pass.
    pub fn goes_down(&self) -> bool {
        self.lowest.is_some_and(|u| u < self.units.end)
    }
}
