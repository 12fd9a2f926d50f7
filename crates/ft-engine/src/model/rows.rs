//! Rows of the embedding, or of an output head, that train alone: those of new tokens.
//!
//! The table is frozen. What its rows have become is written into it before it is used, so that every product is the
//! table's own; their gradients are summed by token, and for a head by column of the logits' gradient.

use super::sink::Slot;
use ft_kernels::Tensor;
use candle_core::Result;
use std::sync::Arc;

/// Rows of a table [v, d].
#[derive(Clone, Debug)]
pub struct Rows {
    /// Which rows, each once.
    pub ids: Arc<Vec<u32>>,
    /// The same `[n]`, u32, where the table is.
    pub index: Tensor,
    /// Their values [n, d].
    pub values: Tensor,
    /// Where their gradient goes; none when they are only used.
    pub slot: Option<Slot>,
}

impl Rows {
    /// Writes them into the table.
    pub fn write(&self, table: &Tensor) -> Result<()> {
        let mut from = 0;
        for run in self.ids.chunk_by(|a, b| a + 1 == *b) {
            table.slice_set(&self.values.narrow(0, from, run.len())?, 0, run[0] as usize)?;
            from += run.len();
        }
        Ok(())
    }

    /// Their columns [t, n] of the gradient of all logits [t, v].
    pub fn columns(&self, dy: &Tensor) -> Result<Tensor> {
        dy.index_select(&self.index, 1)
    }
}
