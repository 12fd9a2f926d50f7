//! PEFT's tensors of adapters on fused experts (`target_parameters` of PEFT 0.19 and later): A of E experts and LoRA
//! rank r is `[E r, i]`, rows of an expert together; B is `[o, r E]`, columns of a rank together.

use crate::adapters::{Part, Trained};
use candle_core::{DType, Device, Result, Tensor};
use ft_kernels::to_host;
use std::collections::BTreeMap;

/// Shape in the file for an expert's own A or B.
pub(super) fn shape(part: Part, own: &[usize], experts: usize) -> Vec<usize> {
    match (part, own) {
        (Part::A, &[r, i]) => vec![experts * r, i],
        (_, &[o, r]) => vec![o, r * experts],
        _ => own.to_vec(),
    }
}

/// An expert's own B `[o, r]` from the values of the file.
pub(super) fn b_of(all: &[f32], own: &[usize], (expert, experts): (usize, usize)) -> Result<Tensor> {
    let n: usize = own.iter().product();
    let values: Vec<f32> = (0..n).map(|i| all[i * experts + expert]).collect();
    Tensor::from_vec(values, own, &Device::Cpu)
}

/// Tensors for all experts, filled expert by expert.
#[derive(Default)]
pub(super) struct Stacks(BTreeMap<String, (Vec<usize>, Vec<f32>)>);

impl Stacks {
    /// Adds the A or B of an expert, if it is one; returns whether.
    pub(super) fn take(&mut self, key: &str, t: &Trained, value: &Tensor) -> Result<bool> {
        let Some(fused) = &t.fused else { return Ok(false) };
        let own = to_host(value)?.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
        let shape = shape(t.part, value.dims(), fused.experts);
        let size = shape.iter().product();
        let (_, all) = self.0.entry(key.into()).or_insert_with(|| (shape, vec![0.0; size]));
        match t.part {
            Part::A => all[fused.expert * own.len()..][..own.len()].copy_from_slice(&own),
            _ => own.iter().enumerate().for_each(|(i, x)| all[i * fused.experts + fused.expert] = *x),
        }
        Ok(true)
    }

    /// The filled tensors, by key.
    pub(super) fn tensors(self) -> Result<Vec<(String, Tensor)>> {
        let made = |(key, (shape, values))| Ok((key, Tensor::from_vec(values, shape, &Device::Cpu)?));
        self.0.into_iter().map(made).collect()
    }
}
