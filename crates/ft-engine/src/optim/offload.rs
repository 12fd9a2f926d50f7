//! Optimizer step with master weights and moments, or the compute buffer, on the host: ZeRO-Offload (Ren et
//! al., 2021) on one rank.
//!
//! ```text
//! for each piece of a parameter group:
//!     gradients -> device of the states;  AdamW there;  new values -> compute buffer
//! ```
//!
//! Gradients accumulate on the device over the micro-batches, and their norm is computed there; they move to
//! the host only for the step. The host computes the same elementwise arithmetic as the CPU backend, so CPU
//! runs with and without offload have the same bits.
//!
//! The piece size bounds the transfer buffers. On CUDA, transfers overlap with arithmetic: during the update
//! of a piece, the gradients of the next piece and the values of the previous one are copied.

use super::update::Update;
use crate::params::buffers::ALIGN;
use candle_core::Result;

/// Values of a piece: 64 MiB of gradients.
pub use ft_kernels::optimizer::PIECE;
/// Values of a piece on CUDA, with two buffers in each direction.
pub const STAGED: usize = PIECE / 4;

impl Update<'_> {
    /// Whether the states are on the host and the gradients on a device.
    fn crosses(&self) -> Result<bool> {
        Ok(self.flat.master.values.real()?.device().is_cpu() && !self.grads.values.device().is_cpu())
    }
}

/// Applies updates with states or compute buffer on the host, in pieces of at most `piece` values, rounded up
/// to a multiple of `ALIGN`. `longest` bounds the length of any update, in this and later calls. `pin`
/// page-locks the transfer buffers.
pub(super) fn step(
    updates: &[Update<'_>],
    piece: usize,
    (longest, pin): (usize, bool),
    staged: &Staged,
) -> Result<()> {
    let (mut pieces, piece) = (Vec::new(), piece.next_multiple_of(ALIGN));
    for u in updates {
        for start in u.range.clone().step_by(piece) {
            let range = start..u.range.end.min(start + piece);
            pieces.push(Update { range, ..u.clone() });
        }
    }
    if pieces.first().map_or(Ok(false), Update::crosses)? {
        return staged.step(&pieces, longest.min(piece), pin);
    }
    for p in &pieces {
        p.apply(&p.grads()?, None)?;
        p.flat.refresh(p.range.clone())?;
    }
    Ok(())
}

/// Transfer buffers, allocated at the first step.
#[derive(Debug, Default)]
pub(super) struct Staged {
    #[cfg(feature = "cuda")]
    buffers: std::sync::Mutex<Option<ft_kernels::cuda::staging::Staging>>,
}

#[cfg(not(feature = "cuda"))]
impl Staged {
    fn step(&self, _: &[Update<'_>], _: usize, _: bool) -> Result<()> {
        candle_core::bail!("a device that this build does not have")
    }
}

#[cfg(feature = "cuda")]
impl Staged {
    fn step(&self, pieces: &[Update<'_>], longest: usize, pin: bool) -> Result<()> {
        use ft_kernels::cuda::staging::Staging;
        let Some(first) = pieces.first() else { return Ok(()) };
        let compute = first.flat.compute.whole.real()?;
        let host = first.flat.compute.held.values.device().is_cpu();
        let mut buffers = self.buffers.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let staging = match &mut *buffers {
            Some(s) => s,
            none => none.insert(Staging::new(compute.device(), longest.max(1), compute.dtype(), pin)?),
        };
        staging.begin()?;
        staging.fetch(0, first.grads()?.real()?)?;
        for (i, p) in pieces.iter().enumerate() {
            let grads = staging.fetched(i, p.range.len())?;
            if let Some(next) = pieces.get(i + 1) {
                staging.fetch(i + 1, next.grads()?.real()?)?;
            }
            p.apply(&grads.into(), None)?;
            if p.is_rounded() {
                continue;
            }
            if host {
                p.flat.refresh(p.range.clone())?;
                continue;
            }
            let values = p.master()?;
            let to = p.compute()?.real()?.clone();
            staging.to_send(i, p.range.len())?.slice_set(&values.real()?.to_dtype(to.dtype())?, 0, 0)?;
            staging.send(i, &to)?;
        }
        staging.end()
    }
}

#[cfg(test)]
mod tests {
    use crate::adapters::{Part, Trained};
    use crate::model::modules::CutAlong;
    use crate::optim::Optimizer;
    use crate::params::buffers::moments::{Moments, MomentsView};
    use crate::params::{Allocate, Params};
    use candle_core::{DType, Device, Result};
    use ft_kernels::Tensor;
    use ft_kernels::check::{randn, values};
    use ft_recipe::Recipe;

    const SIZES: [[usize; 2]; 5] = [[7, 300], [1, 640], [5, 1021], [5, 77], [90, 100]];

    fn params(dtype: DType, offload: bool, eight_bit: bool, rounding: Option<u64>) -> Result<Params> {
        let tensor = |(i, shape): (usize, &[usize; 2])| Trained {
            name: format!("{i}"),
            module: format!("{i}"),
            part: Part::Weight,
            shape: shape.to_vec(),
            unit: i / 3,
            expert: None,
            cut: CutAlong::Nothing,
            lr_scale: if i == 1 { 0.5 } else { 1.0 },
            fused: None,
            plus: false,
            matrix: true,
        };
        let tensors = SIZES.iter().enumerate().map(tensor).collect();
        let p = Params::new(
            tensors,
            2,
            dtype,
            &Device::Cpu,
            Allocate { train: true, offload, eight_bit, rounding, ..Allocate::default() },
        )?;
        for (i, [a, b]) in SIZES.iter().enumerate() {
            p.set(i, randn(i as u64, (*a, *b), DType::F32)?.real()?)?;
        }
        Ok(p)
    }

    /// Offload and piece size do not change the bits of weights, moments or compute buffer.
    #[test]
    fn offloaded_steps_have_the_same_bits() -> anyhow::Result<()> {
        let recipe = "[model]\nsource = \"m\"\n[[train]]\nmodules = [\"mlp\"]\n[[data.train]]\nsource = \"d\"\n\
                      format = \"text\"\n[optimizer]\nweight_decay = 0.1\n";
        let recipe = Recipe::parse(recipe, "r.toml", &[])?;
        for (dtype, eight_bit, rounding) in [
            (DType::F32, false, None),
            (DType::F32, true, None),
            (DType::BF16, false, None),
            (DType::BF16, true, None),
            (DType::BF16, false, Some(3)),
            (DType::BF16, true, Some(3)),
            (DType::F16, true, Some(3)),
        ] {
            let run = |offload: bool, piece: usize| -> anyhow::Result<Vec<Vec<f64>>> {
                let p = params(dtype, offload, eight_bit, rounding)?;
                assert_eq!(p.stored(0)? == DType::F32, rounding.is_none());
                let mut optimizer = Optimizer::new(&p, &recipe.optimizer);
                optimizer.piece = piece;
                assert_eq!(optimizer.groups.len(), 3);
                for t in 1..=3 {
                    for (u, g) in p.grads().into_iter().flatten().enumerate() {
                        g.slice_set(&randn(10 * t + u as u64, g.elem_count(), DType::F32)?, 0, 0)?;
                    }
                    optimizer.step(&p, &crate::ranks::alone(), t, &|_| 1e-2, 0.7)?;
                }
                let mut out = Vec::new();
                for i in 0..SIZES.len() {
                    let (slot, moments) = (&p.slots[i], p.flat(&p.slots[i])?.moments.as_ref());
                    let of = |m: &Moments| m.of(slot.range());
                    let moments = match moments.map(of).transpose()? {
                        Some(MomentsView::F32(all)) => all.to_vec(),
                        Some(MomentsView::EightBit(all)) => [all.codes, all.scales].concat(),
                        None => Vec::new(),
                    };
                    assert_eq!(moments.len() == 4, eight_bit && slot.range().len() >= 4096);
                    let all = [p.view(i)?, p.master(i)?].into_iter().chain(moments);
                    out.extend(all.map(|t: Tensor| values(&t)));
                }
                Ok(out)
            };
            let want = run(false, 1)?;
            for piece in [1, 512, 1000, super::PIECE] {
                let told = format!("{dtype:?}, 8 bits {eight_bit}, pieces of {piece}, rounding {rounding:?}");
                assert!(run(true, piece)? == want, "{told}");
            }
            assert_ne!(want[0], values(&params(dtype, false, eight_bit, rounding)?.view(0)?));
        }
        Ok(())
    }
}
