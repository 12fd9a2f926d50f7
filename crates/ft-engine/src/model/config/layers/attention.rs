//! Attention of each layer: sliding windows, positions, the factor on the scores.

use crate::model::config::error::Result;
use crate::model::config::family::{Family, PATTERN, Window};
use crate::model::config::keys::Keys;
use crate::model::config::limits::{LAYERS, POSITIONS};
use crate::model::config::types::{KeySource, LayerAttention};
use ft_base::store::json::short;
use serde_json::{Map, Value};

/// Key of the type of each layer.
pub(in crate::model::config) const TYPES: &str = "layer_types";

impl Keys<'_> {
    /// Attention of each layer.
    pub(in crate::model::config) fn attention(
        &self,
        family: &Family,
        layers: usize,
        (heads, kv_heads, head_dim): (usize, usize, usize),
    ) -> Result<Vec<LayerAttention>> {
        let divisor = match family.score_key {
            Some(key) => self.required(key, 1e-6..=1e9)?,
            None => head_dim as f64,
        };
        let rotates = self.rotates(family, layers)?;
        let windows = self.windows(family, layers, &rotates)?;
        let of = |(window, rotates): (Option<usize>, bool)| LayerAttention {
            window,
            rope: rotates.then_some(usize::from(family.two_ropes && window.is_some())),
            scale: 1.0 / divisor.sqrt(),
            head_dim,
            kv_heads,
            keys: if family.joint_qkv { KeySource::WithQueries } else { KeySource::Own },
        };
        let mut all: Vec<LayerAttention> = windows.into_iter().zip(rotates).map(of).collect();
        if family.by_layer {
            self.by_layer(heads, &mut all)?;
        }
        Ok(all)
    }

    /// For every layer, whether positions enter it.
    fn rotates(&self, family: &Family, layers: usize) -> Result<Vec<bool>> {
        let Some(default) = family.no_rope_interval else { return Ok(vec![true; layers]) };
        let interval = self.some("no_rope_layer_interval", LAYERS)?.unwrap_or(default);
        let Some(list) = self.get("no_rope_layers") else { return Ok(pattern(interval, layers)) };
        match serde_json::from_value::<Vec<usize>>(list.clone()) {
            Ok(list) if list.len() == layers => Ok(list.into_iter().map(|n| n != 0).collect()),
            _ => {
                let why = format!("{}; a list of {layers} entries is wanted, 1 for positions", short(list));
                Err(self.bad("no_rope_layers", why))
            }
        }
    }

    /// Sliding window of each layer; `rotates` says for every layer whether positions enter it.
    fn windows(&self, family: &Family, layers: usize, rotates: &[bool]) -> Result<Vec<Option<usize>>> {
        let (size, listed) = (self.window(family)?, self.listed(family, layers)?);
        let from = self.count("max_window_layers", LAYERS)?.unwrap_or(28);
        let slides: Vec<bool> = match (family.window, listed) {
            (Window::Never, _) => vec![false; layers],
            (Window::Always | Window::AlwaysIf, _) => vec![true; layers],
            (_, Some(list)) if size.is_none() && list.contains(&true) => {
                return Err(self.bad(TYPES, "sliding_attention without a sliding_window that is in use"));
            }
            (_, Some(list)) => list,
            (Window::Listed, None) => vec![true; layers],
            (Window::FromLayer, None) => (0..layers).map(|l| l >= from).collect(),
            (Window::EvenBelow, None) => (0..layers).map(|l| l.is_multiple_of(2) && l < from).collect(),
            (Window::WithoutPositions, None) => rotates.iter().map(|rotates| !rotates).collect(),
            (Window::Pattern(every), None) => {
                let own = if family.reads.contains(&PATTERN) { self.some(PATTERN, LAYERS)? } else { None };
                pattern(own.unwrap_or(every), layers)
            }
        };
        Ok(slides.into_iter().map(|slides| size.filter(|_| slides)).collect())
    }

    /// Size of the sliding windows, if they are in use.
    fn window(&self, family: &Family) -> Result<Option<usize>> {
        const SIZE: &str = "sliding_window";
        let switch = self.flag("use_sliding_window")?;
        // transformers 5 writes 0 for disabled windows.
        let zero = self.get(SIZE).is_some_and(|n| n.as_u64() == Some(0));
        if family.window.has_switch() && switch == Some(false) && zero {
            return Ok(None);
        }
        let size = self.some(SIZE, POSITIONS)?;
        Ok(size.filter(|_| !family.window.has_switch() || switch == Some(true)))
    }

    /// For every layer, whether [`TYPES`] lists a sliding window; `None` without that key.
    fn listed(&self, family: &Family, layers: usize) -> Result<Option<Vec<bool>>> {
        let Some(types) = self.get(TYPES) else { return Ok(None) };
        let list = types
            .as_array()
            .filter(|l| l.len() == layers)
            .ok_or_else(|| self.bad(TYPES, format!("a list of {layers} entries is wanted, one a layer")))?;
        let of = |t: &Value| match t.as_str() {
            Some("full_attention") => Ok(false),
            Some("linear_attention") if family.delta.is_some() => Ok(false),
            Some("sliding_attention") if family.delta.is_some() => {
                Err(self.bad(TYPES, format!("sliding_attention; {} has none", family.model_type)))
            }
            Some("sliding_attention") => Ok(true),
            _ => {
                Err(self.bad(TYPES, format!("{}; full_attention and sliding_attention are built", short(t))))
            }
        };
        list.iter().map(of).collect::<Result<_>>().map(Some)
    }

    /// Notes on keys that give other windows than the layers have: some classes of transformers do not read
    /// [`TYPES`], most not [`PATTERN`], none the second name of it. An error for a key of overrides.
    pub(in crate::model::config) fn unread_windows(
        &self,
        family: &Family,
        attention: &[LayerAttention],
        overrides: &Map<String, Value>,
    ) -> Result<Vec<String>> {
        let differs = |l: &[bool]| l.iter().zip(attention).any(|(slides, a)| *slides != a.window.is_some());
        let (name, layers) = (family.model_type, attention.len());
        let mut notes = Vec::new();
        if self.listed(family, layers)?.is_some_and(|l| differs(&l)) {
            let why = "does not read it, as in transformers: all layers have the same window, or none";
            notes.push(self.note(TYPES, format!("{name} {why}"), overrides.contains_key(TYPES))?);
        }
        for key in [PATTERN, "_sliding_window_pattern"] {
            let Ok(Some(every)) = self.some(key, LAYERS) else { continue };
            if differs(&pattern(every, layers)) {
                let why = format!("{TYPES} or the class of {name} says which layers have windows");
                notes.push(self.without_effect(key, &why, overrides.contains_key(key))?);
            }
        }
        Ok(notes)
    }
}

/// True for all layers but each `every`-th.
pub(super) fn pattern(every: usize, layers: usize) -> Vec<bool> {
    (1..=layers).map(|l| !l.is_multiple_of(every)).collect()
}
