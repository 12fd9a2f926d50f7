//! Keys of linear attention.

use super::attention::pattern;
use crate::model::config::error::Result;
use crate::model::config::family::Family;
use crate::model::config::keys::Keys;
use crate::model::config::limits::{HEADS, LAYERS};
use crate::model::config::types::Delta;
use ft_kernels::delta::Heads;
use serde_json::Value;

/// Limit on the taps of a convolution.
const TAPS: usize = 64;

impl Keys<'_> {
    /// Linear attention, for families with it, and its layers: by `layer_types`, or all but every
    /// `full_attention_interval`-th.
    pub(in crate::model::config) fn delta(&self, family: &Family, layers: usize) -> Result<Option<Delta>> {
        let Some(projections) = family.delta else { return Ok(None) };
        let heads = Heads {
            keys: self.size("linear_num_key_heads", HEADS)?,
            values: self.size("linear_num_value_heads", HEADS)?,
            key_dim: self.size("linear_key_head_dim", HEADS)?,
            value_dim: self.size("linear_value_head_dim", HEADS)?,
        };
        if !heads.values.is_multiple_of(heads.keys) {
            let why = format!("{}; a multiple of {} key heads is wanted", heads.values, heads.keys);
            return Err(self.bad("linear_num_value_heads", why));
        }
        let interval = self.some("full_attention_interval", LAYERS)?.unwrap_or(4);
        // Checked before, by `Keys::attention`.
        let is_linear = match self.get("layer_types").and_then(Value::as_array) {
            None => pattern(interval, layers),
            Some(types) => types.iter().map(|t| t.as_str() == Some("linear_attention")).collect(),
        };
        let taps = self.size("linear_conv_kernel_dim", TAPS)?;
        Ok(Some(Delta { heads, taps, projections, is_linear }))
    }
}
