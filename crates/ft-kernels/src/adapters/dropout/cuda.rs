//! Dropout on CUDA, with random numbers drawn on the fly.

use crate::Tensor;
use crate::cuda::launch::{Argument, Grid, Launch, args, compiled, empty};
use crate::tensor::{Ghost, hold_copies, moves, row_stride, started};
use candle_core::Result;
use ft_base::rng::Stream;

/// Threads per block, same as in dropout.cu.
const THREADS: usize = 256;

/// Parameters of a mask.
#[derive(Debug)]
pub struct Drawn {
    pub(super) stream: Stream,
    pub(super) first: usize,
    /// Row numbers `[rows]` u32, if not consecutive.
    pub(super) list: Option<Tensor>,
    /// First column, and number of all columns.
    pub(super) columns: (usize, usize),
    /// Elements with a 24-bit number below this are dropped.
    pub(super) threshold: u32,
    /// Factor on kept elements.
    pub(super) keep: f32,
}

/// Threshold for 24-bit numbers: n / 2^24 < p if and only if n < ceil(p 2^24).
pub fn threshold(p: f64) -> u32 {
    (p * 16_777_216.0).ceil() as u32
}

impl Drawn {
    /// `x * mask` for `x` `[rows, width]`, plus `add` if given.
    pub fn apply(&self, x: &Tensor, add: Option<&Tensor>) -> Result<Tensor> {
        let (rows, width) = x.dims2()?;
        if self.list.as_ref().is_some_and(|l| l.elem_count() != rows)
            || add.is_some_and(|a| a.shape() != x.shape() || a.dtype() != x.dtype())
        {
            candle_core::bail!(
                "dropout: {:?} with {:?} and {:?}",
                x.shape(),
                self.list,
                add.map(Tensor::shape)
            );
        }
        // rows of `x` may have a larger stride, in a matrix with room
        let apart = row_stride(x.layout());
        let reads: Vec<&Tensor> = apart.is_none().then_some(x).into_iter().chain(add).collect();
        if let Some(g) = x.ghost() {
            let _copies = hold_copies(g.ledger(), &reads);
            started(g.ledger());
            let y = Ghost::new(g.ledger(), x.shape().clone(), x.dtype()).into();
            moves([x, &y].into_iter().chain(add));
            return Ok(y);
        }
        let x = if apart.is_some() { x.clone() } else { x.contiguous()? };
        let (apart, add) = (apart.unwrap_or(width), add.map(Tensor::contiguous).transpose()?);
        let y = empty(&x, x.shape(), x.dtype())?;
        let [key0, key1, high0, high1] = self.stream.words();
        let launch = Launch::of(&x, compiled!(DROPOUT), "dropout")?;
        let launch = launch.with(args![Argument::Rows(&x), add.as_ref(), self.list.as_ref(), &y, width])?;
        let launch = launch.with(args![apart, self.first as u64, self.keep, key0, key1, high0, high1])?;
        let launch = launch.with(args![self.threshold, self.columns.0, self.columns.1])?;
        let parts = (width * x.dtype().size_in_bytes()).div_ceil(16 * THREADS);
        // SAFETY: x, `add` and y have `rows` rows of `width` values, as checked above; `apart` is the row
        // stride of x; the list has `rows` numbers.
        unsafe { launch.run(Grid::new(rows, THREADS as u32).by(parts)) }?;
        Ok(y)
    }
}
