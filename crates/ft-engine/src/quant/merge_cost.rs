//! Precision lost by merging an adapter into the base: rounding to bf16, and quantization to NF4.
//!
//! A merged linear layer has the weight `M = W + s B A` (DoRA: rows times `g = m / |W + s B A|`). Writing M
//! in bf16, or quantizing it again for a 4-bit base, adds an error. Merging makes sense if this error is
//! small relative to the update `M - W`.

use super::codebook::CodeTables;
use super::encode::Encoded;
use candle_core::{DType, Device, Result};
use ft_kernels::tensor::Real;

/// Squared Frobenius norms, additive over layers.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct MergeCost {
    /// Merged weights.
    pub merged: f64,
    /// Update: merged minus base.
    pub update: f64,
    /// Error of rounding the merged weights to bf16.
    pub bf16: f64,
    /// Error of quantizing the merged weights, rounded to bf16, to NF4.
    pub nf4: f64,
}

impl MergeCost {
    /// Computes the cost of one matrix from merged and base values in f32.
    ///
    /// # Errors
    /// Non-finite merged value; tensor errors.
    pub fn of(name: &str, merged: &Real, base: &Real) -> ft_base::Result<Self> {
        let square = |t: Real| -> Result<f64> { t.to_dtype(DType::F64)?.sqr()?.sum_all()?.to_scalar() };
        let host = |t: &Real| t.to_dtype(DType::F32)?.to_device(&Device::Cpu);
        let (merged, base) = (host(merged)?, host(base)?);
        let bf16 = merged.to_dtype(DType::BF16)?.to_dtype(DType::F32)?;
        let values = bf16.flatten_all()?.to_vec1::<f32>()?;
        let encoded = Encoded::new(name, &values, bf16.dims2()?, DType::BF16)?;
        let nf4 = encoded.into_matrix(true, DType::F32, &mut CodeTables::new(&Device::Cpu)?)?.dequantize()?;
        let nf4 = nf4.real()?;
        Ok(Self {
            update: square((&merged - base)?)?,
            bf16: square((bf16 - &merged)?)?,
            nf4: square((nf4 - &merged)?)?,
            merged: square(merged)?,
        })
    }

    /// Adds two costs.
    pub fn plus(self, o: Self) -> Self {
        Self {
            merged: self.merged + o.merged,
            update: self.update + o.update,
            bf16: self.bf16 + o.bf16,
            nf4: self.nf4 + o.nf4,
        }
    }

    /// Relative L2 error of rounding to bf16, with respect to the update.
    pub fn bf16_of_update(self) -> f64 {
        share(self.bf16, self.update)
    }

    /// Relative L2 error of quantizing to NF4, with respect to the update.
    pub fn nf4_of_update(self) -> f64 {
        share(self.nf4, self.update)
    }
}

fn share(error: f64, whole: f64) -> f64 {
    if error == 0.0 { 0.0 } else { (error / whole).sqrt() }
}
