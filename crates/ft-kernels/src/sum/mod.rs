//! What ranks give, added on CUDA in the order of the ranks: the bits that a sum on the CPU has.

use super::Tensor;
use super::cuda::launch::{Grid, Launch, compiled};
use candle_core::{DType, Result};

/// Threads of a block, as in sum.cu.
const THREADS: usize = 256;

/// What is to be added to a vector.
#[derive(Debug)]
pub struct Parts {
    /// This rank's part `[n]`, and how many others come before it.
    pub own: Option<(Tensor, usize)>,
    /// Those of the others, end to end `[k n]`, and k.
    pub others: Option<(Tensor, usize)>,
}

impl Parts {
    /// `to += part` for each part in order: `to` `[n]`, f32.
    ///
    /// # Errors
    /// Vectors of other lengths or types; of the device.
    pub fn add_to(&self, to: &Tensor) -> Result<()> {
        let n = to.elem_count();
        let fits = |t: &Tensor, k: usize| t.dtype() == DType::F32 && t.elem_count() == k * n;
        let (own, own_at) = match &self.own {
            Some((own, at)) => (Some(own), u32::try_from(*at).unwrap_or(u32::MAX)),
            None => (None, u32::MAX),
        };
        let (others, k) = self.others.as_ref().map_or((None, 0), |(t, k)| (Some(t), *k));
        if to.dtype() != DType::F32 || own.is_some_and(|t| !fits(t, 1)) || others.is_some_and(|t| !fits(t, k))
        {
            candle_core::bail!("a sum over ranks: parts that are not f32, or not of {n} values");
        }
        let parts = k + usize::from(own.is_some());
        if n == 0 || parts == 0 {
            return Ok(());
        }
        let launch = Launch::named(to, compiled!(SUM), "sum_parts_f32")?
            .maybe(own)?
            .number(own_at)
            .maybe(others)?
            .count(parts)?
            .number(n as u64)
            .tensor(to)?;
        // SAFETY: each part has n values; of `parts` of them one is read as this rank's, where there is one, and so many others
        // as there are.
        unsafe { launch.run(Grid::new(n.div_ceil(THREADS), THREADS as u32)) }
    }
}
