//! Joins A and B of a layer's experts to PEFT's tensors of all experts: see [`Fused`].

use crate::adapters::{Fused, Part, Trained};
use candle_core::{DType, Device, Tensor};
use ft_kernels::to_host;

/// One tensor of all experts, in parts.
pub(super) struct FusedTensor {
    part: Part,
    experts: usize,
    /// Output rows of an expert.
    rows: usize,
    /// Expert, first row and distance of rows, values.
    parts: Vec<(usize, usize, usize, Tensor)>,
}

impl FusedTensor {
    /// The tensor of A or B of an expert's linear, still without values.
    pub(super) fn new(t: &Trained, place: &Fused) -> Self {
        let slice = place.parameter.slice.as_ref();
        let (experts, rows) = slice.map_or((1, 0), |s| (s.experts, s.rows));
        Self { part: t.part, experts, rows, parts: Vec::new() }
    }

    /// Adds A or B of an expert's linear.
    pub(super) fn add(&mut self, place: &Fused, value: Tensor) {
        let (first, step) = place.parameter.slice.as_ref().map_or((0, 1), |s| (s.first, s.step));
        self.parts.push((place.expert, first, step, value));
    }

    /// Dtype, and shape: A `[e r, i]`, B `[o, r e]`.
    ///
    /// # Errors
    /// No expert.
    pub(super) fn entry(&self) -> candle_core::Result<(DType, [usize; 2])> {
        let Some((.., one)) = self.parts.first() else { candle_core::bail!("an adapter of no experts") };
        let (height, width) = one.dims2()?;
        let shape = match self.part {
            Part::A => [self.experts * height, width],
            _ => [self.rows, width * self.experts],
        };
        Ok((one.dtype(), shape))
    }

    /// The joined values, on the host.
    pub(super) fn joined(&self) -> candle_core::Result<Tensor> {
        let (dtype, [height, width]) = self.entry()?;
        let mut all = vec![0f32; height * width];
        for (expert, first, step, value) in &self.parts {
            let (rows, cols) = value.dims2()?;
            let values = to_host(value)?.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
            if self.part == Part::A {
                all[expert * rows * width..][..values.len()].copy_from_slice(&values);
                continue;
            }
            for (i, row) in values.chunks(cols).enumerate() {
                let to = &mut all[(first + i * step) * width..][..width];
                row.iter().enumerate().for_each(|(r, x)| to[r * self.experts + expert] = *x);
            }
        }
        Tensor::from_vec(all, (height, width), &Device::Cpu)?.to_dtype(dtype)
    }
}
