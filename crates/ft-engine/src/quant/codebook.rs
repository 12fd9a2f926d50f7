//! Code tables of the 4-bit types, equal to those of bitsandbytes.

use crate::files::MXFP4_MAGNITUDES;
use candle_core::{Device, Result};
use ft_kernels::Tensor;
use ft_kernels::quantized::Codebook;
use std::sync::Arc;

/// A 4-bit type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Type {
    /// NF4: quantiles of the normal distribution (Dettmers et al., QLoRA, 2023, appendix E).
    Nf4,
    /// FP4: one sign bit, two exponent bits, one mantissa bit, normalized by the largest value.
    /// Dequantization only.
    Fp4,
    /// MXFP4: one sign bit, two exponent bits, one mantissa bit.
    Mxfp4,
}

const NF4: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// FP4 magnitudes by bit pattern, before normalization.
const FP4: [f32; 8] = [0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0];

impl Type {
    /// Name in checkpoints.
    pub fn name(self) -> &'static str {
        match self {
            Type::Nf4 => "nf4",
            Type::Fp4 => "fp4",
            Type::Mxfp4 => "mxfp4",
        }
    }

    /// Values of the 16 codes.
    pub fn table(self) -> [f32; 16] {
        match self {
            Type::Nf4 => NF4,
            Type::Fp4 => std::array::from_fn(|i| {
                let v = FP4[i & 7] / 12.0;
                // In bitsandbytes' table, code 8 is zero without a sign.
                if i <= 8 { v } else { -v }
            }),
            Type::Mxfp4 => std::array::from_fn(|i| {
                let v = MXFP4_MAGNITUDES[i & 7];
                if i < 8 { v } else { -v }
            }),
        }
    }
}

/// Code tables on a model's device, created once and shared by all tensors.
#[derive(Debug)]
pub struct CodeTables {
    /// In the order of [`Type`].
    books: [Arc<Codebook>; 3],
    /// Cache of double-quantization maps by value: checkpoints repeat the same map for every tensor.
    maps: Vec<(Vec<f32>, Tensor)>,
    device: Device,
}

impl CodeTables {
    /// Creates the tables on a device.
    pub fn new(device: &Device) -> Result<Self> {
        let book = |t: Type| Codebook::new(t.table(), device).map(Arc::new);
        let [nf4, fp4, mxfp4] = [Type::Nf4, Type::Fp4, Type::Mxfp4].map(book);
        Ok(Self { books: [nf4?, fp4?, mxfp4?], maps: Vec::new(), device: device.clone() })
    }

    /// Table of a 4-bit type.
    pub fn book(&self, t: Type) -> Arc<Codebook> {
        Arc::clone(&self.books[t as usize])
    }

    /// Uploads a double-quantization map, or returns the cached one.
    pub fn map(&mut self, values: &[f32]) -> Result<Tensor> {
        if let Some((_, t)) = self.maps.iter().find(|(v, _)| v == values) {
            return Ok(t.clone());
        }
        let t = Tensor::new(values, &self.device)?;
        self.maps.push((values.to_vec(), t.clone()));
        Ok(t)
    }

    /// Device of the tables.
    pub fn device(&self) -> &Device {
        &self.device
    }
}
