//! What merging an adapter into its base loses: rounding to bf16, and quantization to NF4.
//!
//! A merged linear has the weight `M = W + s B A` (DoRA: each row times `g = m / |W + s B A|`). Written in bf16, or
//! quantized anew onto a 4-bit base, it is no longer M; how much of the update `M - W` that error is decides
//! whether merging makes sense.

use ft_kernels::tensor::Real;
use ft_engine::quant::{CodeBooks, Encoded};
use candle_core::{DType, Device, Result};

/// Squared norms, which add up over linears.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct MergeCost {
    /// Of the merged weights.
    pub merged: f64,
    /// Of the update, merged less base.
    pub update: f64,
    /// Of what rounding the merged weights to bf16 changes.
    pub bf16: f64,
    /// Of what quantizing them (rounded to bf16) to NF4 changes.
    pub nf4: f64,
}

impl MergeCost {
    /// The cost of one matrix, from its merged values and the base's, f32.
    ///
    /// # Errors
    /// A merged value that is not finite, named; what candle says.
    pub fn of(name: &str, merged: &Real, base: &Real) -> ft_base::Result<Self> {
        let square = |t: Real| -> Result<f64> { t.to_dtype(DType::F64)?.sqr()?.sum_all()?.to_scalar() };
        let host = |t: &Real| t.to_dtype(DType::F32)?.to_device(&Device::Cpu);
        let (merged, base) = (host(merged)?, host(base)?);
        let bf16 = merged.to_dtype(DType::BF16)?.to_dtype(DType::F32)?;
        let values = bf16.flatten_all()?.to_vec1::<f32>()?;
        let encoded = Encoded::new(name, &values, bf16.dims2()?, DType::BF16)?;
        let nf4 = encoded.into_matrix(true, DType::F32, &mut CodeBooks::new(&Device::Cpu)?)?.dequantize()?;
        let nf4 = nf4.real()?;
        Ok(Self {
            update: square((&merged - base)?)?,
            bf16: square((bf16 - &merged)?)?,
            nf4: square((nf4 - &merged)?)?,
            merged: square(merged)?,
        })
    }

    /// The costs of two sets of linears together.
    pub fn plus(self, o: Self) -> Self {
        Self {
            merged: self.merged + o.merged,
            update: self.update + o.update,
            bf16: self.bf16 + o.bf16,
            nf4: self.nf4 + o.nf4,
        }
    }

    /// Error of rounding to bf16, as a share of the update (relative L2).
    pub fn bf16_of_update(self) -> f64 {
        share(self.bf16, self.update)
    }

    /// Error of quantizing to NF4, as a share of the update.
    pub fn nf4_of_update(self) -> f64 {
        share(self.nf4, self.update)
    }

    /// Error of quantizing to NF4, as a share of the merged weights.
    pub fn nf4_of_merged(self) -> f64 {
        share(self.nf4, self.merged)
    }
}

fn share(error: f64, whole: f64) -> f64 {
    if error == 0.0 { 0.0 } else { (error / whole).sqrt() }
}
