//! The optimizer's step where master weights and moments live on the host: what ZeRO-Offload (Ren et al., 2021) does
//! on one rank.
//!
//! ```text
//! for each piece of a group:  gradients -> host;  AdamW there, by the CPU's kernel;  new values -> device
//! ```
//!
//! Gradients stay on the device until the step: they are summed there over the micro-batches, and their norm is taken
//! there. The arithmetic is the CPU's, whatever the device, and by element: on the CPU a run with and one without
//! offload have the same bits.
//!
//! A piece bounds what is on its way at once. The copies go through pageable memory and wait for one another: pinned
//! buffers, and copies that hide behind the arithmetic, are not built yet.

use crate::kernel::Tensor;
use crate::kernel::optimizer::{AdamW, adamw, by_pieces};
use crate::kernel::to_host;
use candle_core::{DType, Result};

/// Values of a piece: 64 MiB of gradients.
pub use crate::kernel::optimizer::PIECE;

/// One update of values that take one learning rate: `compute` and `grads` `[n]` on the device; master weights and both
/// moments `[n]`, f32, on the host.
pub(super) fn step(
    compute: &Tensor,
    grads: &Tensor,
    states: [&Tensor; 3],
    piece: usize,
    k: &AdamW,
) -> Result<()> {
    by_pieces(compute.elem_count(), piece, &|start, len| {
        let part = |x: &Tensor| x.narrow(0, start, len);
        let [p, m, v] = states.map(part);
        let p = p?;
        adamw(&p, &m?, &v?, &to_host(part(grads)?.real()?)?.into(), None, k)?;
        let values = match compute.dtype() {
            // a tensor of its own: between devices candle copies all of what a view looks into
            DType::F32 => p.force_contiguous()?,
            dtype => p.to_dtype(dtype)?,
        };
        let to = compute.real()?;
        to.slice_set(&values.real()?.to_device(to.device())?, 0, start)
    })
}

#[cfg(test)]
mod tests {
    use crate::adapt::params::{Allocate, Params};
    use crate::adapt::selection::{Part, Trained};
    use crate::kernel::Tensor;
    use crate::kernel::check::{randn, values};
    use crate::optim::Optimizer;
    use crate::recipe::Recipe;
    use candle_core::{DType, Device, Result};

    const SIZES: [[usize; 2]; 4] = [[7, 30], [1, 64], [5, 77], [9, 100]];

    fn params(dtype: DType, offload: bool) -> Result<Params> {
        let tensor = |(i, shape): (usize, &[usize; 2])| Trained {
            name: format!("{i}"),
            module: format!("{i}"),
            part: Part::Weight,
            shape: shape.to_vec(),
            unit: i / 3,
            lr_scale: if i == 1 { 0.5 } else { 1.0 },
            matrix: true,
        };
        let tensors = SIZES.iter().enumerate().map(tensor).collect();
        let p = Params::new(
            tensors,
            2,
            dtype,
            &Device::Cpu,
            Allocate { train: true, offload, ..Allocate::default() },
        )?;
        for (i, [a, b]) in SIZES.iter().enumerate() {
            p.set(i, randn(i as u64, (*a, *b), DType::F32)?.real()?)?;
        }
        Ok(p)
    }

    /// With states on the host or not, in pieces of any size: the same bits, in what the layers compute with too.
    #[test]
    fn offloaded_steps_have_the_same_bits() -> anyhow::Result<()> {
        let recipe = "[model]\nsource = \"m\"\n[[train]]\nmodules = [\"mlp\"]\n[[data.train]]\nsource = \"d\"\n\
                      format = \"text\"\n[optimizer]\nweight_decay = 0.1\n";
        let recipe = Recipe::parse(recipe, "r.toml", &[])?;
        for dtype in [DType::F32, DType::BF16] {
            let run = |offload: bool, piece: usize| -> anyhow::Result<Vec<Vec<f64>>> {
                let p = params(dtype, offload)?;
                let optimizer = Optimizer { piece, ..Optimizer::new(&p, &recipe.optimizer) };
                assert_eq!(optimizer.groups.len(), 4);
                for t in 1..=3 {
                    for (u, g) in p.grads().into_iter().flatten().enumerate() {
                        g.slice_set(&randn(10 * t + u as u64, g.elem_count(), DType::F32)?, 0, 0)?;
                    }
                    optimizer.step(&p, &crate::comm::alone(), t, &|_| 1e-2, 0.7)?;
                }
                let mut out = Vec::new();
                for i in 0..SIZES.len() {
                    let moments = p.moments(i)?.map(|(m, v)| [m, v]).into_iter().flatten();
                    let all = [p.view(i)?, p.master(i)?].into_iter().chain(moments);
                    out.extend(all.map(|t: Tensor| values(&t)));
                }
                Ok(out)
            };
            let want = run(false, 1)?;
            for piece in [1, 64, 100, super::PIECE] {
                assert!(run(true, piece)? == want, "{dtype:?}, pieces of {piece}");
            }
            assert_ne!(want[0], values(&params(dtype, false)?.view(0)?));
        }
        Ok(())
    }
}
