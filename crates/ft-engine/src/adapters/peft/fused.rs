//! Joins A and B of a layer's experts to PEFT's tensors of all experts: see [`Fused`].

use super::format::PREFIX;
use crate::adapters::{Fused, Part, Trained};
use candle_core::{DType, Device, Tensor};
use std::collections::BTreeMap;

/// Parts of one tensor of all experts.
struct FusedTensor {
    part: Part,
    experts: usize,
    rows: usize,
    /// Expert, first row and distance of rows, values.
    parts: Vec<(usize, usize, usize, Tensor)>,
}

/// Tensors of all experts, by name.
#[derive(Default)]
pub(super) struct FusedTensors(BTreeMap<String, FusedTensor>);

impl FusedTensors {
    /// Adds A or B of an expert's linear.
    pub(super) fn add(&mut self, t: &Trained, place: &Fused, value: Tensor) {
        let Some(slice) = &place.parameter.slice else { return };
        let new =
            || FusedTensor { part: t.part, experts: slice.experts, rows: slice.rows, parts: Vec::new() };
        let tensor = self.0.entry(place.name(t.part)).or_insert_with(new);
        tensor.parts.push((place.expert, slice.first, slice.step, value));
    }

    /// The tensors under their keys.
    pub(super) fn tensors(self) -> candle_core::Result<Vec<(String, Tensor)>> {
        self.0.into_iter().map(|(name, tensor)| Ok((format!("{PREFIX}{name}"), tensor.fused()?))).collect()
    }
}

impl FusedTensor {
    fn fused(mut self) -> candle_core::Result<Tensor> {
        self.parts.sort_by_key(|(expert, first, ..)| (*expert, *first));
        if self.part == Part::A {
            let parts: Vec<&Tensor> = self.parts.iter().map(|(.., value)| value).collect();
            return Tensor::cat(&parts, 0);
        }
        let Some((.., one)) = self.parts.first() else { candle_core::bail!("an adapter of no experts") };
        let (dtype, rank) = (one.dtype(), one.dim(1)?);
        let width = rank * self.experts;
        let mut all = vec![0f32; self.rows * width];
        for (expert, first, step, value) in &self.parts {
            for (i, row) in value.to_dtype(DType::F32)?.to_vec2::<f32>()?.iter().enumerate() {
                let to = &mut all[(first + i * step) * width..][..width];
                row.iter().enumerate().for_each(|(r, x)| to[r * self.experts + expert] = *x);
            }
        }
        Tensor::from_vec(all, (self.rows, width), &Device::Cpu)?.to_dtype(dtype)
    }
}
