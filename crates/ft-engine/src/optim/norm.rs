//! Gradient norm and clipping.

use crate::params::{FlatParam, Params};
use candle_core::Result;
use ft_kernels::Tensor;
use ft_kernels::optimizer::sum_squares;

/// Sum of squares of this rank's shard of all gradients. The shards are the same at every ZeRO stage, and
/// their sum over ranks covers each gradient once.
pub fn grad_squares(params: &Params) -> Result<f64> {
    let mine = |u: &FlatParam| u.grads.as_ref().map(|g| g.of(u.part.clone()));
    let grads: Vec<Tensor> = params.flats.iter().flatten().filter_map(mine).collect::<Result<_>>()?;
    sum_squares(&grads)
}

/// As [`grad_squares`], by the number of the flat buffer: sums over the buffers of several stages in the order of the
/// numbers have the bits of one stage.
pub fn squares_by_flat(params: &Params) -> Result<Vec<(usize, f64)>> {
    let flats = params.flats.iter().enumerate().filter_map(|(i, f)| Some((i, f.as_ref()?)));
    let of = |(i, f): (usize, &FlatParam)| {
        f.grads.as_ref().map(|g| Ok((i, sum_squares(&[g.of(f.part.clone())?])?)))
    };
    flats.filter_map(of).collect()
}

/// Factor to scale a gradient norm down to `clip` (0: no clipping), as in `torch.nn.utils.clip_grad_norm_`.
pub fn clip_factor(norm: f64, clip: f64) -> f64 {
    if clip > 0.0 { (clip / (norm + 1e-6)).min(1.0) } else { 1.0 }
}
