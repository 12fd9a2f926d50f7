//! Frozen weights that come and go, because ranks split them or they live on the host: a unit's tensors end to end in a
//! buffer for each dtype, of which a rank reads and holds its part.
//!
//! Layers get views before anything is read: what a rank's part is follows from all of the unit's tensors.

use super::buffer::{ALIGN, Buffer, common};
use super::params::Allocate;
use ft_kernels::Tensor;
use ft_kernels::vacant::vacant;
use crate::quant::Unread;
use candle_core::{DType, Device, Result};

/// Values of a buffer whose tensors are not counted yet: none of them is in memory.
const MOST: usize = 1 << 48;

/// A place in a unit's frozen buffers.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    buffer: usize,
    start: usize,
    len: usize,
}

/// A unit's frozen weights while it is built.
pub struct Split<'a> {
    /// Which unit.
    pub unit: usize,
    device: &'a Device,
    /// Each with the values that it has so far.
    buffers: Vec<(Tensor, usize)>,
    unread: Vec<(Place, Unread<'a>)>,
}

impl<'a> Split<'a> {
    /// Of a unit without any.
    pub fn new(unit: usize, device: &'a Device) -> Self {
        Self { unit, device, buffers: Vec::new(), unread: Vec::new() }
    }

    /// Room for a vector, and a view of it.
    pub fn place(&mut self, dtype: DType, len: usize) -> Result<(Place, Tensor)> {
        let buffer = match self.buffers.iter().position(|(b, _)| b.dtype() == dtype) {
            Some(buffer) => buffer,
            None => {
                self.buffers.push((vacant(MOST, dtype, self.device)?, 0));
                self.buffers.len() - 1
            }
        };
        let (all, used) = &mut self.buffers[buffer];
        let (start, view) = (*used, all.narrow(0, *used, len)?);
        *used = (start + len).next_multiple_of(ALIGN);
        Ok((Place { buffer, start, len }, view))
    }

    /// A view of a vector that is read at the [end](Split::end).
    pub fn later(&mut self, unread: Unread<'a>) -> Result<Tensor> {
        let (place, view) = self.place(unread.dtype, unread.len)?;
        self.unread.push((place, unread));
        Ok(view)
    }

    /// The buffers, with this rank's part read.
    ///
    /// # Errors
    /// Those of reading.
    pub fn end(self, what: Allocate) -> ft_base::Result<Vec<Buffer>> {
        let apart = |(all, used): &(Tensor, usize)| Buffer::apart(all.narrow(0, 0, *used)?, what);
        let buffers: Vec<Buffer> = self.buffers.iter().map(apart).collect::<Result<_>>()?;
        for (place, unread) in self.unread {
            let held = &buffers[place.buffer].held;
            let here = common(&held.at, &(place.start..place.start + place.len));
            if !here.is_empty() {
                let values = (unread.read)(here.start - place.start..here.end - place.start)?;
                held.set(here.start, &values)?;
            }
        }
        Ok(buffers)
    }
}

impl Place {
    /// Sets the values of a vector, as far as they are here, in its unit's `buffers`.
    pub fn set(&self, buffers: &[Buffer], values: &ft_kernels::Real) -> Result<()> {
        match buffers.get(self.buffer) {
            Some(buffer) if values.elem_count() == self.len => buffer.held.set(self.start, values),
            _ => candle_core::bail!("{} values for a place of {}", values.elem_count(), self.len),
        }
    }
}
