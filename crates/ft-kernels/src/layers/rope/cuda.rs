//! Head norms and rotary embedding on CUDA, one launch per direction for queries and keys together.

use super::norms::Norms;
use crate::Tensor;
use crate::cuda::launch::{Grid, Launch, args, compiled, empty};
use crate::padded::{Padded, stride};
use crate::tensor::{all_of, ghosts, ghosts_and};
use candle_core::{DType, Result, Shape};

/// Values of half a head per lane, of heads of up to 256 channels and of wide ones, and warps per block, same as in
/// rope.cu.
const N: [usize; 2] = [4, 8];
const WARPS: usize = 4;
const WARP: usize = 32;
/// Maximum number of partial sums of the weight gradients.
const PARTS: usize = 256;

/// Sizes of queries and keys.
struct Sizes {
    tokens: usize,
    heads: usize,
    kv_heads: usize,
    half: usize,
    /// Half of the rotated channels.
    rotated: usize,
    lanes: usize,
}

impl Sizes {
    fn of(q: &Tensor, k: &Tensor, cos: &Tensor, sin: &Tensor, norms: Option<&Norms<'_>>) -> Result<Self> {
        let ((tokens, heads, c), (other, kv_heads, kc)) = (q.dims3()?, k.dims3()?);
        let half = c / 2;
        let weights = norms.is_none_or(|n| {
            [n.q, n.k].iter().all(|s| s.weight.dims() == [c] && s.weight.dtype() == q.dtype())
        });
        let rotated = cos.dim(1)?;
        let tables = [cos, sin].iter().all(|t| t.dims() == [tokens, rotated] && t.dtype() == DType::F32);
        let fits = c == kc && c == 2 * half && half > 0 && half <= N[1] * WARP && rotated <= half;
        let weights = weights && norms.is_none_or(|n| n.q.plus == n.k.plus);
        if !fits || tokens != other || q.dtype() != k.dtype() || !weights || !tables {
            candle_core::bail!(
                "rope: {:?} and {:?} with tables {:?} and {:?}",
                q.shape(),
                k.shape(),
                cos.shape(),
                sin.shape()
            );
        }
        let n = N[usize::from(half > N[0] * WARP)];
        Ok(Self { tokens, heads, kv_heads, half, rotated, lanes: half.div_ceil(n).next_power_of_two() })
    }

    /// Name of the kernel of a direction.
    fn kernel(&self, narrow: &'static str, wide: &'static str) -> &'static str {
        if self.half > N[0] * WARP { wide } else { narrow }
    }

    fn counts<'a>(&self, launch: Launch<'a>) -> Result<Launch<'a>> {
        launch.with(args![self.tokens, self.heads, self.kv_heads, self.half, self.rotated, self.lanes])
    }
}

/// Layout of an output: rows `[t, h c]` with room for `rank` columns.
struct Out {
    dims: (usize, usize),
    apart: usize,
    dtype: DType,
}

impl Out {
    fn of(t: &Tensor, rank: usize) -> Result<Self> {
        let (tokens, h, c) = t.dims3()?;
        Ok(Self { dims: (tokens, h * c), apart: stride(h * c, rank), dtype: t.dtype() })
    }

    fn shape(&self) -> (Shape, DType) {
        ((self.dims.0, self.apart).into(), self.dtype)
    }

    fn empty(&self, on: &Tensor) -> Result<Tensor> {
        empty(on, self.shape().0, self.dtype)
    }
}

/// Wraps the outputs for queries and keys.
fn pair(of: &[Out; 2], [a, b]: [Tensor; 2]) -> Result<[Padded; 2]> {
    Ok([Padded::within(a, of[0].dims)?, Padded::within(b, of[1].dims)?])
}

/// Normalizes and rotates queries and keys, or rotates back with `sign` -1: rows `[t, h c]` with room for
/// `ranks` columns.
pub fn forward(
    [q, k]: [&Tensor; 2],
    norms: Option<&Norms<'_>>,
    cos: &Tensor,
    sin: &Tensor,
    sign: f32,
    ranks: [usize; 2],
) -> Result<[Padded; 2]> {
    let sizes = Sizes::of(q, k, cos, sin, norms)?;
    let of = [Out::of(q, ranks[0])?, Out::of(k, ranks[1])?];
    if let Some(out) = ghosts(&[q, k, cos, sin], [of[0].shape(), of[1].shape()], |_| ()) {
        return pair(&of, out);
    }
    let (q, k, cos, sin) = (q.contiguous()?, k.contiguous()?, cos.contiguous()?, sin.contiguous()?);
    let out = [of[0].empty(&q)?, of[1].empty(&k)?];
    let launch = Launch::of(&q, compiled!(ROPE), sizes.kernel("rope_forward", "rope_forward_wide"))?;
    let [wq, wk] = [norms.map(|n| n.q.weight), norms.map(|n| n.k.weight)];
    let [eps_q, eps_k, plus] = norms.map_or([0.0; 3], |n| [n.q.eps, n.k.eps, n.q.plus].map(|x| x as f32));
    let launch = launch.with(args![&q, &k, wq, wk, &cos, &sin, &out[0], &out[1]])?;
    let launch = sizes.counts(launch)?.with(args![sign, eps_q, eps_k, of[0].apart, of[1].apart, plus])?;
    // SAFETY: `Sizes::of` has checked the shapes; outputs have the shapes of the inputs with stride `apart`
    // between tokens; one warp per token, below `tokens`.
    unsafe { launch.run(Grid::new(sizes.tokens.div_ceil(WARPS), (WARPS * WARP) as u32).by(2)) }?;
    pair(&of, out)
}

/// Gradients of queries and keys before the norms, as rows `[t, h c]` with room for `ranks`
/// columns, from the gradients of the outputs of [`forward`]; if requested, partial sums `[p, c]`
/// of the weight gradients in f32.
pub fn backward(
    [q, k]: [&Tensor; 2],
    norms: &Norms<'_>,
    cos: &Tensor,
    sin: &Tensor,
    [dyq, dyk]: [&Tensor; 2],
    want_dw: bool,
    ranks: [usize; 2],
) -> Result<([Padded; 2], Option<[Tensor; 2]>)> {
    let sizes = Sizes::of(q, k, cos, sin, Some(norms))?;
    let of = [Out::of(q, ranks[0])?, Out::of(k, ranks[1])?];
    let [of_q, of_k] = [of[0].shape(), of[1].shape()];
    if dyq.shape() != q.shape()
        || dyk.shape() != k.shape()
        || [dyq, dyk].iter().any(|d| d.dtype() != q.dtype())
    {
        candle_core::bail!("rope: {:?} with a gradient {:?}", q.shape(), dyq.shape());
    }
    // a token a warp, unless there would be too many partial sums
    let per = if want_dw { sizes.tokens.div_ceil(PARTS).max(WARPS) } else { WARPS };
    let per = per.min(sizes.tokens.max(1));
    let (parts, c) = (sizes.tokens.div_ceil(per), 2 * sizes.half);
    let of_w = want_dw.then(|| (Shape::from((2, parts, c)), DType::F32));
    let split = |dw: &Tensor| -> Result<[Tensor; 2]> {
        let one = |i| dw.narrow(0, i, 1)?.reshape((parts, c));
        Ok([one(0)?, one(1)?])
    };
    let reads = [q, k, cos, sin, dyq, dyk];
    if let Some((out, dw)) = ghosts_and(&reads, [of_q, of_k], of_w.clone()) {
        return Ok((pair(&of, out)?, dw.as_ref().map(split).transpose()?));
    }
    let [q, k, cos, sin, dyq, dyk] = all_of(reads.map(Tensor::contiguous))?;
    let out = [of[0].empty(&q)?, of[1].empty(&k)?];
    let dw = of_w.map(|(shape, dtype)| empty(&q, shape, dtype)).transpose()?;
    let launch = Launch::of(&q, compiled!(ROPE), sizes.kernel("rope_backward", "rope_backward_wide"))?;
    let launch = launch.with(args![&q, &k, norms.q.weight, norms.k.weight, &cos, &sin, &dyq, &dyk])?;
    let launch = launch.with(args![&out[0], &out[1], dw.as_ref()])?;
    let launch = sizes.counts(launch)?.with(args![per, norms.q.eps as f32, norms.k.eps as f32])?;
    let launch = launch.with(args![of[0].apart, of[1].apart, norms.q.plus as f32])?;
    // SAFETY: as in `forward`; `dyq` and `dyk` have the shapes of q and k, and each block owns one partial
    // sum of c values.
    unsafe { launch.run(Grid::new(parts, (WARPS * WARP) as u32).by(2)) }?;
    Ok((pair(&of, out)?, dw.as_ref().map(split).transpose()?))
}
