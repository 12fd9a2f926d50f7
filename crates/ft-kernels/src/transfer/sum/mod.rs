//! Sum of the parts of several ranks on CUDA, in rank order: same bits as a sum on the CPU.

use crate::Tensor;
use crate::cuda::launch::{Grid, Launch, args, compiled};
use candle_core::{DType, Result};

/// Threads per block, same as in sum.cu.
const THREADS: usize = 256;

/// Addends of a sum over ranks.
#[derive(Debug)]
pub struct Parts {
    /// Part of this rank `[n]`, and the number of other parts before it.
    pub own: Option<(Tensor, usize)>,
    /// Parts of other ranks, concatenated `[k n]`, and k.
    pub others: Option<(Tensor, usize)>,
}

impl Parts {
    /// `to += part` for each part in rank order: `to` `[n]`, f32.
    ///
    /// # Errors
    /// Vectors of other lengths or dtypes; errors of the device.
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
        let launch = Launch::named(to, compiled!(SUM), "sum_parts_f32")?;
        let launch = launch.with(args![own, own_at, others, parts, n as u64, to])?;
        // SAFETY: `own` has n values and `others` k * n values, as checked above; the kernel reads `own`
        // once, at index `own_at`, and the k other parts in order.
        unsafe { launch.run(Grid::new(n.div_ceil(THREADS), THREADS as u32)) }
    }
}
