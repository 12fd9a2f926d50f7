//! Keys of families with layers of different sizes and sources of keys and values (Gemma 4).

use crate::model::config::error::Result;
use crate::model::config::family::Family;
use crate::model::config::keys::Keys;
use crate::model::config::limits::{HEADS, HIDDEN, LAYERS, VOCAB};
use crate::model::config::types::{KeySource, LayerAttention, LayerInputs};
use ft_base::store::json::short;
use std::collections::HashMap;

/// Keys refused in other families.
pub(in crate::model::config) const READ: &[&str] = &[
    "attention_k_eq_v",
    "enable_moe_block",
    "final_logit_softcapping",
    "global_head_dim",
    "hidden_size_per_layer_input",
    "num_global_key_value_heads",
    "num_kv_shared_layers",
    "per_layer_config",
    "top_k_experts",
    "use_bidirectional_attention",
    "use_double_wide_mlp",
    "vocab_size_per_layer_input",
];

/// Head sizes of layers with full attention, if the config names none.
const GLOBAL_HEAD_DIM: usize = 512;

impl Keys<'_> {
    /// Refuses unsupported values of the keys in [`READ`].
    pub(in crate::model::config) fn refuse_by_layer(&self, family: &Family) -> Result<()> {
        if !family.by_layer {
            return Ok(());
        }
        // Images alone are seen both ways with "vision", and ft trains on text.
        const BOTH_WAYS: &str = "use_bidirectional_attention";
        match self.get(BOTH_WAYS) {
            None => Ok(()),
            Some(v) if v.as_str() == Some("vision") || v.as_bool() == Some(false) => Ok(()),
            Some(v) => Err(self.bad(BOTH_WAYS, format!("{}; causal attention is built", short(v)))),
        }
    }

    /// Per-layer inputs, if any.
    pub(in crate::model::config) fn layer_inputs(&self, family: &Family) -> Result<Option<LayerInputs>> {
        if !family.by_layer {
            return Ok(None);
        }
        let width = self.count("hidden_size_per_layer_input", HIDDEN)?.unwrap_or(256);
        const ROWS: &str = "vocab_size_per_layer_input";
        let (vocab, tokens) = (self.some(ROWS, VOCAB)?.unwrap_or(262_144), self.size("vocab_size", VOCAB)?);
        if width > 0 && vocab < tokens {
            return Err(self.bad(ROWS, format!("{vocab}; a row for each of {tokens} tokens is wanted")));
        }
        Ok((width > 0).then_some(LayerInputs { width, vocab }))
    }

    /// Sets the differences between the layers of a family, given layers with the sizes of sliding ones.
    pub(in crate::model::config) fn by_layer(
        &self,
        heads: usize,
        layers: &mut [LayerAttention],
    ) -> Result<()> {
        if layers.last().is_some_and(|last| last.window.is_some()) {
            return Err(self.bad("layer_types", "the last layer is sliding; full_attention is wanted there"));
        }
        let joint = self.flag("attention_k_eq_v")? == Some(true);
        let sizes = self.sizes(layers, joint)?;
        let shared = self.count("num_kv_shared_layers", LAYERS)?.unwrap_or(0);
        let Some(own) = layers.len().checked_sub(shared).filter(|own| *own > 0) else {
            let why = format!("{shared} of {} layers; one is wanted that has its own", layers.len());
            return Err(self.bad("num_kv_shared_layers", why));
        };
        for l in 0..layers.len() {
            let (window, (head_dim, kv_heads)) = (layers[l].window, sizes[l]);
            if !heads.is_multiple_of(kv_heads) {
                let why = format!("layer {l}: {kv_heads}; {heads} heads must be a multiple of it");
                return Err(self.bad("num_key_value_heads", why));
            }
            let keys = if l < own {
                if joint && window.is_none() { KeySource::Joint } else { KeySource::Own }
            } else {
                let alike = |p: &usize| layers[*p].window.is_some() == window.is_some();
                let Some(producer) = (0..own).rev().find(alike).filter(|p| sizes[*p] == sizes[l]) else {
                    let why = format!("{shared}; no layer before them has keys for layer {l}");
                    return Err(self.bad("num_kv_shared_layers", why));
                };
                KeySource::Of(producer)
            };
            layers[l] = LayerAttention { head_dim, kv_heads, keys, scale: 1.0, ..layers[l] };
        }
        Ok(())
    }

    /// Channels per head and key/value heads of every layer.
    fn sizes(&self, layers: &[LayerAttention], joint: bool) -> Result<Vec<(usize, usize)>> {
        const TABLE: &str = "per_layer_config";
        let Some(table) = self.table(TABLE)? else {
            let head_dim = self.some("global_head_dim", HEADS)?.unwrap_or(GLOBAL_HEAD_DIM);
            let kv_heads = self.some("num_global_key_value_heads", HEADS)?.filter(|_| joint);
            let of = |l: &LayerAttention| match l.window {
                Some(_) => (l.head_dim, l.kv_heads),
                None => (head_dim, kv_heads.unwrap_or(l.kv_heads)),
            };
            return Ok(layers.iter().map(of).collect());
        };
        let mut own = HashMap::new();
        for key in table.raw.keys() {
            let layer = key.parse::<usize>().ok().filter(|l| *l < layers.len());
            let (Some(layer), Some(of)) = (layer, table.table(key)?) else {
                return Err(table.bad(key, "the number of a layer is wanted"));
            };
            of.only(|key| ["head_dim", "num_key_value_heads"].contains(&key))?;
            own.insert(layer, (of.some("head_dim", HEADS)?, of.some("num_key_value_heads", HEADS)?));
        }
        let of = |(l, a): (usize, &LayerAttention)| {
            let (head_dim, kv_heads) = own.get(&l).copied().unwrap_or_default();
            (head_dim.unwrap_or(a.head_dim), kv_heads.unwrap_or(a.kv_heads))
        };
        Ok(layers.iter().enumerate().map(of).collect())
    }
}
