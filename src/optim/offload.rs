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
//! A piece bounds what is on its way at once. From and to CUDA pieces cross beside the arithmetic: while one is updated,
//! the gradients of the next come and the values of the one before go.

use super::Update;
use crate::kernel::Tensor;
use crate::kernel::optimizer::adamw;
use crate::kernel::to_host;
use candle_core::{DType, Result};

/// Values of a piece: 64 MiB of gradients.
pub use crate::kernel::optimizer::PIECE;
/// Values of a piece from and to CUDA, of which there are two each way.
pub const STAGED: usize = PIECE / 4;

impl Update<'_> {
    /// Updates the states from gradients on the host; gives the new values.
    fn on_host(&self, grads: &Tensor) -> Result<Tensor> {
        let [p, m, v] = self.states()?;
        adamw(&p, &m, &v, grads, None, &self.k)?;
        Ok(p)
    }
}

/// Updates whose master weights and moments live on the host, at most `piece` values at a time.
pub(super) fn step(updates: &[Update<'_>], piece: usize, staged: &Staged) -> Result<()> {
    let mut pieces = Vec::new();
    for u in updates {
        for start in u.range.clone().step_by(piece.max(1)) {
            let range = start..u.range.end.min(start + piece.max(1));
            pieces.push(Update { range, ..u.clone() });
        }
    }
    if pieces.first().is_some_and(|p| !p.unit.compute.whole.device().is_cpu()) {
        return staged.step(&pieces);
    }
    for p in &pieces {
        let values = p.on_host(&to_host(p.grads()?.real()?)?.into())?;
        let values = match p.unit.compute.whole.dtype() {
            // a tensor of its own: the master weights are another
            DType::F32 => values.force_contiguous()?,
            dtype => values.to_dtype(dtype)?,
        };
        p.compute()?.slice_set(&values, 0, 0)?;
    }
    Ok(())
}

/// The buffers that pieces cross by, made at the first step.
#[derive(Debug, Default)]
pub(super) struct Staged {
    #[cfg(feature = "cuda")]
    buffers: std::sync::Mutex<Option<crate::kernel::cuda::staging::Staging>>,
}

#[cfg(not(feature = "cuda"))]
impl Staged {
    fn step(&self, _: &[Update<'_>]) -> Result<()> {
        candle_core::bail!("a device that this build does not have")
    }
}

#[cfg(feature = "cuda")]
impl Staged {
    fn step(&self, pieces: &[Update<'_>]) -> Result<()> {
        use crate::kernel::cuda::staging::Staging;
        let Some(first) = pieces.first() else { return Ok(()) };
        let (compute, longest) =
            (first.unit.compute.whole.real()?, pieces.iter().map(|p| p.range.len()).max());
        let mut buffers = self.buffers.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let staging = match &mut *buffers {
            Some(s) => s,
            none => none.insert(Staging::new(compute.device(), longest.unwrap_or(1), compute.dtype())?),
        };
        staging.begin()?;
        staging.fetch(0, first.grads()?.real()?)?;
        for (i, p) in pieces.iter().enumerate() {
            let grads = staging.fetched(i, p.range.len())?;
            if let Some(next) = pieces.get(i + 1) {
                staging.fetch(i + 1, next.grads()?.real()?)?;
            }
            let values = p.on_host(&grads.into())?;
            let to = p.compute()?.real()?.clone();
            staging.to_send(i, p.range.len())?.slice_set(&values.real()?.to_dtype(to.dtype())?, 0, 0)?;
            staging.send(i, &to)?;
        }
        staging.end()
    }
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
                let mut optimizer = Optimizer::new(&p, &recipe.optimizer);
                optimizer.piece = piece;
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
