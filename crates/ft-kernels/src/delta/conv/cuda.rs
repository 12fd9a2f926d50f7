//! The convolution on CUDA, one launch per direction.

use super::sizes;
use crate::Tensor;
use crate::attention::{self, Sequences};
use crate::cuda::launch::{Grid, Launch, args, compiled, empty};
use crate::tensor::{ghosts, ghosts_and};
use candle_core::{DType, Result, Shape, bail};

/// Threads per block, and most taps, same as in delta_conv.cu.
const THREADS: usize = 128;
const TAPS: usize = 8;

fn check(x: &Tensor, w: &Tensor) -> Result<(usize, usize, usize)> {
    let (t, c, taps) = sizes(x, w)?;
    if taps > TAPS || w.dtype() != x.dtype() {
        bail!(
            "convolution: {taps} taps in {:?}, with inputs in {:?}; up to {TAPS} on CUDA",
            w.dtype(),
            x.dtype()
        );
    }
    Ok((t, c, taps))
}

/// Tiles of tokens, and their number.
fn tiles(seqs: Option<&Sequences>, tokens: usize) -> Result<(Option<&Tensor>, usize)> {
    match seqs {
        None => Ok((None, tokens.div_ceil(attention::ROWS))),
        Some(seqs) => {
            let tiles = seqs.query_tiles()?;
            Ok((Some(tiles), tiles.dims()[0]))
        }
    }
}

/// See [`super::forward`].
pub fn forward(x: &Tensor, w: &Tensor, seqs: Option<&Sequences>) -> Result<Tensor> {
    let (t, c, taps) = check(x, w)?;
    if let Some([y]) = ghosts(&[x, w], [(x.shape().clone(), x.dtype())], |_| ()) {
        return Ok(y);
    }
    let (x, w) = (x.contiguous()?, w.contiguous()?);
    let (y, (tiles, blocks)) = (empty(&x, x.shape(), x.dtype())?, tiles(seqs, t)?);
    let launch = Launch::of(&x, compiled!(DELTA_CONV), "delta_conv_forward")?;
    let launch = launch.with(args![&x, &w, tiles, &y, t, c, taps])?;
    // SAFETY: x and y have t rows of c values, w has c rows of `taps`, as checked above; the tiles cover x.
    unsafe { launch.run(Grid::new(blocks, THREADS as u32).by(c.div_ceil(THREADS))) }?;
    Ok(y)
}

/// See [`super::backward`].
pub fn backward(
    x: &Tensor,
    w: &Tensor,
    dy: &Tensor,
    seqs: &Sequences,
    want_dw: bool,
) -> Result<(Tensor, Option<Tensor>)> {
    let (t, c, taps) = check(x, w)?;
    let own = (x.shape().clone(), x.dtype());
    let of_w = |parts: usize| (Shape::from((parts, c * taps)), DType::F32);
    let planned = want_dw.then(|| of_w(seqs.tiles()));
    if let Some(([dx], dw)) = ghosts_and(&[x, w, dy], [own.clone()], planned) {
        return Ok((dx, dw));
    }
    let (x, w, dy) = (x.contiguous()?, w.contiguous()?, dy.contiguous()?);
    let (tiles, blocks) = tiles(Some(seqs), t)?;
    let dx = empty(&x, own.0, x.dtype())?;
    let dw = if want_dw { Some(empty(&x, of_w(blocks).0, DType::F32)?) } else { None };
    let launch = Launch::of(&x, compiled!(DELTA_CONV), "delta_conv_backward")?;
    let launch = launch.with(args![&x, &w, &dy, tiles, &dx, dw.as_ref(), t, c, taps])?;
    // SAFETY: as in `forward`; dy and dx have the shape of x, and every tile has a row of `dw`.
    unsafe { launch.run(Grid::new(blocks, THREADS as u32).by(c.div_ceil(THREADS))) }?;
    Ok((dx, dw))
}
