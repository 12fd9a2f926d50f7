//! Merged weights in f32, compared bit for bit with the weights on disk, or perturbed.

use super::compare;
use super::weights::Merge;
use crate::train::Error;
use candle_core::{DType, Device, Tensor};
use ft_engine::files::TensorFiles;
use ft_engine::model::decoder::Weights;
use ft_engine::model::embedding::EmbeddingLora;
use ft_engine::model::grad_accumulator::Slot;
use ft_engine::model::linear::{Lora, Weight};
use ft_engine::model::modules::Module;
use rayon::prelude::*;
use std::path::Path;

/// Approximate number of values compared at a time.
const PIECE: usize = 1 << 20;

/// Merged weights in f32, compared with the weights on disk while they are read.
pub struct ExactWeights<'a> {
    merge: &'a Merge<'a>,
    /// Folder named in errors.
    out: &'a Path,
    written: &'a TensorFiles,
    /// Seed of perturbations in place of the comparison: [`compare::perturbed`].
    perturbed: Option<u64>,
    /// Number of tensors read.
    read: u64,
    /// Sums of squares: of the rounding error, and of the weights.
    error: f64,
    norm: f64,
}

impl<'a> ExactWeights<'a> {
    /// Weights to be compared with those `written`; `out` is the folder in errors.
    pub fn new(merge: &'a Merge<'a>, written: &'a TensorFiles, out: &'a Path) -> Self {
        Self { merge, out, written, perturbed: None, read: 0, error: 0.0, norm: 0.0 }
    }

    /// The same weights, perturbed, and not compared.
    pub fn perturbed(self, seed: u64) -> Self {
        Self { perturbed: Some(seed), ..self }
    }

    /// Relative L2 distance of the written weights from the exact ones read so far.
    pub fn rounding(&self) -> f64 {
        (self.error / self.norm).sqrt()
    }

    fn get(&mut self, name: String) -> ft_base::Result<Tensor> {
        let value = self.merge.in_f32(&name)?;
        self.read += 1;
        if let Some(seed) = self.perturbed {
            return Ok(compare::perturbed(&value, seed, self.read)?);
        }
        let (rows, row) = (value.dim(0)?, value.elem_count() / value.dim(0)?.max(1));
        let step = (PIECE / row.max(1)).max(1);
        for first in (0..rows).step_by(step) {
            let n = step.min(rows - first);
            let piece = value.narrow(0, first, n)?.flatten_all()?;
            let [rounded, written] = self.rounded(&name, &piece, first * row)?;
            if rounded != written {
                let (path, name) = (self.out.display().to_string(), name);
                return Err(Error::Unequal { path, name }.into());
            }
            let piece = piece.to_vec1::<f32>()?;
            self.error += squares(&written, &piece);
            self.norm += squares(&piece, &[]);
        }
        Ok(value)
    }

    /// Returns values of a tensor, from element `first`, rounded to the dtype of the file, and the same values on disk,
    /// both as f32.
    fn rounded(&self, name: &str, piece: &Tensor, first: usize) -> ft_base::Result<[Vec<f32>; 2]> {
        let elements = first..first + piece.elem_count();
        let written = self.written.part(name, elements, DType::F32, &Device::Cpu)?;
        let rounded = piece.to_dtype(self.written.dtype_of(name)?)?.to_dtype(DType::F32)?;
        Ok([rounded.to_vec1()?, written.to_vec1()?])
    }
}

/// Sum of squares of `a - b`, or of `a` if `b` is empty, in f64.
fn squares(a: &[f32], b: &[f32]) -> f64 {
    const CHUNK: usize = 1 << 14;
    let square = |x: f32| f64::from(x) * f64::from(x);
    let parts: Vec<f64> = if b.is_empty() {
        a.par_chunks(CHUNK).map(|a| a.iter().map(|x| square(*x)).sum()).collect()
    } else {
        let both = a.par_chunks(CHUNK).zip(b.par_chunks(CHUNK));
        both.map(|(a, b)| a.iter().zip(b).map(|(a, b)| square(a - b)).sum()).collect()
    };
    parts.iter().sum()
}

impl Weights for ExactWeights<'_> {
    fn dtype(&self) -> DType {
        DType::F32
    }

    fn weight(&mut self, m: &Module) -> ft_base::Result<(ft_kernels::Tensor, Option<Slot>)> {
        Ok((self.get(m.weight_name())?.into(), None))
    }

    fn bias(&mut self, m: &Module) -> ft_base::Result<(ft_kernels::Tensor, Option<Slot>)> {
        Ok((self.get(m.bias_name())?.into(), None))
    }

    fn lora(&mut self, _: &Module, _: &Weight) -> ft_base::Result<Option<Lora>> {
        Ok(None)
    }

    fn embedding_lora(&mut self, _: &Module) -> ft_base::Result<Option<EmbeddingLora>> {
        Ok(None)
    }
}
