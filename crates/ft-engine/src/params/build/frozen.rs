//! Sharded or offloaded frozen weights: a unit's tensors end to end in one buffer per dtype; a rank reads and holds a
//! part.
//!
//! Layers get views before anything is read, since a rank's part depends on all tensors of the unit.

use crate::params::Allocate;
use crate::params::buffers::{ALIGN, Buffer, FlatKind, common};
use crate::quant::LazyVector;
use candle_core::{DType, Device, Result};
use ft_kernels::Tensor;
use ft_kernels::resizable::unallocated;

/// Provisional length of a buffer until all tensors are counted; takes no memory.
const MOST: usize = 1 << 48;

/// Location in a unit's frozen buffers.
#[derive(Clone, Copy, Debug)]
pub struct FrozenSlot {
    buffer: usize,
    start: usize,
    len: usize,
}

/// Frozen weights of a unit under construction.
pub struct FrozenUnit<'a> {
    /// Unit of the walk.
    pub unit: usize,
    device: &'a Device,
    /// Buffers with the number of values placed so far, and the ranks with copies.
    buffers: Vec<(Tensor, usize, FlatKind)>,
    unread: Vec<(FrozenSlot, LazyVector<'a>)>,
}

impl<'a> FrozenUnit<'a> {
    /// Starts an empty unit.
    pub fn new(unit: usize, device: &'a Device) -> Self {
        Self { unit, device, buffers: Vec::new(), unread: Vec::new() }
    }

    /// Reserves space for a vector and returns a view.
    pub fn place(&mut self, kind: FlatKind, dtype: DType, len: usize) -> Result<(FrozenSlot, Tensor)> {
        let buffer = match self.buffers.iter().position(|(b, _, k)| b.dtype() == dtype && *k == kind) {
            Some(buffer) => buffer,
            None => {
                self.buffers.push((unallocated(MOST, dtype, self.device)?, 0, kind));
                self.buffers.len() - 1
            }
        };
        let (all, used, _) = &mut self.buffers[buffer];
        let (start, view) = (*used, all.narrow(0, *used, len)?);
        *used = (start + len).next_multiple_of(ALIGN);
        Ok((FrozenSlot { buffer, start, len }, view))
    }

    /// Places a vector to be read by [`FrozenUnit::end`]; returns a view.
    pub fn later(&mut self, kind: FlatKind, unread: LazyVector<'a>) -> Result<Tensor> {
        let (slot, view) = self.place(kind, unread.dtype, unread.len)?;
        self.unread.push((slot, unread));
        Ok(view)
    }

    /// Allocates the buffers and reads this rank's part.
    ///
    /// # Errors
    /// Read errors.
    pub fn end(self, what: Allocate) -> ft_base::Result<Vec<Buffer>> {
        let apart = |(all, used, kind): &(Tensor, usize, FlatKind)| {
            Buffer::apart(all.narrow(0, 0, *used)?, *kind, what)
        };
        let buffers: Vec<Buffer> = self.buffers.iter().map(apart).collect::<Result<_>>()?;
        for (slot, unread) in self.unread {
            let held = &buffers[slot.buffer].held;
            let here = common(&held.at, &(slot.start..slot.start + slot.len));
            if !here.is_empty() {
                let values = (unread.read)(here.start - slot.start..here.end - slot.start)?;
                held.set(here.start, &values)?;
            }
        }
        Ok(buffers)
    }
}

impl FrozenSlot {
    /// Writes the locally held part of a vector into the unit's `buffers`.
    pub fn set(&self, buffers: &[Buffer], values: &ft_kernels::Real) -> Result<()> {
        match buffers.get(self.buffer) {
            Some(buffer) if values.elem_count() == self.len => buffer.held.set(self.start, values),
            _ => candle_core::bail!("{} values for a slot of {}", values.elem_count(), self.len),
        }
    }
}
