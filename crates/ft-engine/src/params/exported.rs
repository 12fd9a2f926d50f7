//! Conversion between trained tensors and adapters of the original base, for a base-derived `lora.init`.

use super::Params;
use crate::adapters::{Part, Trained};
use crate::load::Factors;
use candle_core::Tensor;

impl Params {
    /// Initial factors subtracted from the base for a trained tensor, with the dimension of concatenation
    /// at export.
    fn lacking(&self, index: usize) -> Option<(std::sync::Arc<Factors>, usize)> {
        let t = &self.tensors[index];
        let dim = match t.part {
            Part::A => 0,
            Part::B => 1,
            _ => return None,
        };
        Some((self.initials.as_ref()?.subtracted(&t.module)?, dim))
    }

    /// Converts a trained tensor for the original base: appends the initial factors to `value`.
    ///
    /// # Errors
    /// A shape other than the tensor's.
    pub fn exported(&self, index: usize, value: &Tensor) -> candle_core::Result<Tensor> {
        match self.lacking(index) {
            None => Ok(value.clone()),
            Some((f, 0)) => Tensor::cat(&[value, &f.a.to_device(value.device())?], 0),
            Some((f, dim)) => Tensor::cat(&[value, &f.b.neg()?.to_device(value.device())?], dim),
        }
    }

    /// Descriptor of the exported tensor.
    pub fn exported_tensor(&self, index: usize) -> Trained {
        let mut t = self.tensors[index].clone();
        if let Some((_, dim)) = self.lacking(index) {
            t.shape[dim] *= 2;
        }
        t
    }

    /// Inverse of [`Params::exported`]: extracts the trained part; `None` if the rest differs from the
    /// initial factors.
    ///
    /// # Errors
    /// A shape other than that of [`Params::exported`].
    pub fn trained_of(&self, index: usize, held: &Tensor) -> candle_core::Result<Option<Tensor>> {
        let Some((f, dim)) = self.lacking(index) else { return Ok(Some(held.clone())) };
        let rank = held.dim(dim)? / 2;
        let rest = held.narrow(dim, rank, rank)?.flatten_all()?.to_vec1::<f32>()?;
        let lacks = if dim == 0 { f.a.clone() } else { f.b.neg()? };
        let same = rest == lacks.flatten_all()?.to_vec1::<f32>()?;
        same.then(|| held.narrow(dim, 0, rank)?.contiguous()).transpose()
    }
}
