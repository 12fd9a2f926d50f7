//! Trained rows of an otherwise frozen embedding or output head: new tokens.
//!
//! The current values are written into the frozen table before use, so products need no special case.
//! Gradients are summed by token; for a head, they use only the matching columns of the logits' gradient.

use crate::model::pass::grad_accumulator::Slot;
use candle_core::Result;
use ft_kernels::Tensor;
use std::sync::Arc;

/// Trained rows of a table `[v, d]`.
#[derive(Clone, Debug)]
pub struct Rows {
    /// Row indices, without duplicates.
    pub ids: Arc<Vec<u32>>,
    /// The same indices `[n]`, u32, on the table's device.
    pub index: Tensor,
    /// Values `[n, d]`.
    pub values: Tensor,
    /// Gradient slot; `None` in inference.
    pub slot: Option<Slot>,
}

impl Rows {
    /// Writes the rows into the table.
    pub fn write(&self, table: &Tensor) -> Result<()> {
        let mut from = 0;
        for run in self.ids.chunk_by(|a, b| a + 1 == *b) {
            table.slice_set(&self.values.narrow(0, from, run.len())?, 0, run[0] as usize)?;
            from += run.len();
        }
        Ok(())
    }

    /// Columns `[t, n]` of these rows in the gradient of the logits `[t, v]`.
    pub fn columns(&self, dy: &Tensor) -> Result<Tensor> {
        dy.index_select(&self.index, 1)
    }
}
