//! A matrix of zeros with some rows filled in parts.

use crate::Tensor;
use crate::cpu::is_cpu;
use crate::cuda::launch::{Grid, Launch, args, compiled};
use crate::tensor::ghosts;
use candle_core::Result;

/// A matrix `[t, d]`, zero except for rows supplied in parts. On CUDA each part is scattered at once.
#[derive(Debug)]
pub struct Spread {
    like: Tensor,
    /// The output, on CUDA.
    whole: Option<Tensor>,
    /// The parts so far, on the CPU.
    parts: Vec<Tensor>,
}

impl Spread {
    /// Creates a matrix with the shape, dtype and device of `like`.
    pub fn new(like: &Tensor) -> Result<Self> {
        let whole = if is_cpu(like) { None } else { Some(like.zeros_like()?) };
        Ok(Self { like: like.clone(), whole, parts: Vec::new() })
    }

    /// Sets the rows `index` `[n]` (u32) to `part` `[n, d]`. Each row may be set once.
    pub fn put(&mut self, index: &Tensor, part: Tensor) -> Result<()> {
        let Some(whole) = &self.whole else {
            self.parts.push(part);
            return Ok(());
        };
        let ((t, width), (n, d)) = (whole.dims2()?, part.dims2()?);
        if width != d || index.dims() != [n] || whole.dtype() != part.dtype() {
            candle_core::bail!("rows: {:?} into {:?} by {:?}", part.shape(), whole.shape(), index.shape());
        }
        if ghosts(&[&part], [], |_| ()).is_some() {
            return Ok(());
        }
        let launch = Launch::of(&part, compiled!(SPREAD), "spread")?;
        let launch = launch.with(args![index, &part, t as u64, d as u64, whole])?;
        // SAFETY: the kernel reads n indices and n rows of d values, and skips indices
        // of t or more; one block per row.
        unsafe { launch.run(Grid::new(n, THREADS)) }
    }

    /// Returns the matrix; `index` `[n]` holds the rows of all parts in order.
    pub fn whole(self, index: &Tensor) -> Result<Tensor> {
        match self.whole {
            Some(whole) => Ok(whole),
            None if self.parts.is_empty() => self.like.zeros_like(),
            None => {
                let zeros = self.like.zeros_like()?;
                zeros.index_add(index, &Tensor::end_to_end(&self.parts, index.dim(0)?)?, 0)
            }
        }
    }
}

/// Threads per block, same as in spread.cu.
const THREADS: u32 = 256;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{randn, values};
    use candle_core::{DType, Device};

    #[test]
    fn parts_are_spread_to_their_rows() -> Result<()> {
        let like = randn(1, (5, 3), DType::F32)?;
        let index = Tensor::new(&[4u32, 0, 3], &Device::Cpu)?;
        let rows = randn(2, (3, 3), DType::F32)?;
        let mut s = Spread::new(&like)?;
        s.put(&index.narrow(0, 0, 2)?, rows.narrow(0, 0, 2)?)?;
        s.put(&index.narrow(0, 2, 1)?, rows.narrow(0, 2, 1)?)?;
        let (all, r) = (s.whole(&index)?.to_vec2::<f32>()?, rows.to_vec2::<f32>()?);
        assert_eq!(all, [r[1].clone(), vec![0.0; 3], vec![0.0; 3], r[2].clone(), r[0].clone()]);
        let none = Spread::new(&like)?.whole(&index.narrow(0, 0, 0)?)?;
        assert!(values(&none).iter().all(|x| *x == 0.0));
        Ok(())
    }
}
