//! Blockwise access to CPU tensors: bf16 values are widened and rounded in cache, one block at a time. A full
//! f32 copy would pass through memory three times.

use crate::Tensor;
use crate::cpu::{Float, Halves, View, ghosts_in, map, tensor, vectorised, view};
use crate::cpu::{narrow, wide};
use crate::ledger::Ledger;
use crate::tensor::all_of;
use candle_core::{DType, Device, Result, Shape};
use half::bf16;
use half::vec::HalfBitsVecExt;
use std::ops::Range;

/// Values widened at a time in kernels without rows.
pub const BLOCK: usize = 2048;

/// Whether values of `dtype` are widened on read and rounded on write, block by block.
pub fn by_blocks<T: Float>(dtype: DType) -> bool {
    dtype == DType::BF16 && T::DTYPE == DType::F32
}

/// Values of a tensor in row-major order.
pub enum Values<'a, T> {
    /// Values in the dtype of the arithmetic.
    Whole(View<'a, T>),
    /// bf16 values, widened on read.
    Halves(Halves<'a>),
}

impl<'a, T: Float> Values<'a, T> {
    /// Views a CPU tensor.
    pub fn of(t: &'a Tensor) -> Result<Self> {
        if by_blocks::<T>(t.dtype()) && t.is_contiguous() {
            Halves::of(t).map(Self::Halves)
        } else {
            view(t).map(Self::Whole)
        }
    }

    /// Values in a range; widened values are written to `room`.
    pub fn read<'b>(&'b self, at: Range<usize>, room: &'b mut Vec<T>) -> &'b [T] {
        match self {
            Self::Whole(v) => &v[at],
            Self::Halves(v) => {
                vectorised(|| {
                    room.clear();
                    room.extend(v[at].iter().map(|x| T::widened(wide(*x))));
                });
                room
            }
        }
    }
}

/// Output slices of one task.
pub enum Out<'a, T, const N: usize> {
    /// Slices in the dtype of the arithmetic.
    Whole([&'a mut [T]; N]),
    /// bf16 slices, rounded after each block.
    Halves([&'a mut [bf16]; N]),
}

impl<T: Float, const N: usize> Out<'_, T, N> {
    /// Calls `f` for consecutive blocks of `block` values with the offset inside the
    /// task. `f` must write every value.
    pub fn each(self, block: usize, mut f: impl FnMut(usize, [&mut [T]; N])) {
        let block = block.max(1);
        match self {
            Self::Whole(mut all) => {
                let len = all.first().map_or(0, |a| a.len());
                for at in (0..len).step_by(block) {
                    let own = at..(at + block).min(len);
                    f(at, all.each_mut().map(|a| &mut a[own.clone()]));
                }
            }
            Self::Halves(mut all) => {
                let len = all.first().map_or(0, |a| a.len());
                let mut rooms: [Vec<T>; N] = std::array::from_fn(|_| vec![T::zero(); block.min(len)]);
                for at in (0..len).step_by(block) {
                    let own = at..(at + block).min(len);
                    f(at, rooms.each_mut().map(|r| &mut r[..own.len()]));
                    for (to, from) in all.iter_mut().zip(&rooms) {
                        let to = to[own.clone()].iter_mut().zip(from);
                        vectorised(|| to.for_each(|(to, x)| *to = narrow(x.to_f64() as f32)));
                    }
                }
            }
        }
    }
}

/// Splits vectors into slices of `task` values, one per task.
fn tasks<B, const N: usize>(all: &mut [Vec<B>; N], task: usize) -> Vec<[&mut [B]; N]> {
    let count = all.first().map_or(0, |a| a.len().div_ceil(task));
    let mut parts = all.each_mut().map(|a| a.chunks_mut(task));
    (0..count).map(|_| parts.each_mut().map(|p| p.next().unwrap_or_default())).collect()
}

/// Creates tensors of one shape and dtype on all threads, in tasks of `task` values. `f` receives the offset
/// and the slices of a task; returns the results of `f` in order.
///
/// # Errors
/// Errors of candle.
pub fn written<T: Float, R: Send, const N: usize>(
    (shape, dtype): (&Shape, DType),
    task: usize,
    f: impl Fn(usize, Out<'_, T, N>) -> R + Sync,
) -> Result<([Tensor; N], Vec<R>)> {
    let (len, task) = (shape.elem_count(), task.max(1));
    if by_blocks::<T>(dtype) {
        let mut out: [Vec<bf16>; N] = std::array::from_fn(|_| vec![0u16; len].reinterpret_into());
        let work = |(i, own)| f(i * task, Out::Halves(own));
        let done = map(tasks(&mut out, task).into_iter().enumerate(), work);
        return Ok((all_of(out.map(|v| Tensor::from_vec(v, shape, &Device::Cpu)))?, done));
    }
    let mut out: [Vec<T>; N] = std::array::from_fn(|_| vec![T::zero(); len]);
    let work = |(i, own)| f(i * task, Out::Whole(own));
    let done = map(tasks(&mut out, task).into_iter().enumerate(), work);
    Ok((all_of(out.map(|v| tensor(v, shape, dtype)))?, done))
}

/// Like [`crate::cpu::ghosts`], for kernels that read through [`Values`] and write through [`written`] in
/// blocks of `block` values.
pub fn ghosts<T: Float, const N: usize>(
    reads: &[&Tensor],
    (shape, dtype): (&Shape, DType),
    block: usize,
    during: impl FnOnce(&Ledger),
) -> Option<[Tensor; N]> {
    let widened = reads.iter().filter(|t| by_blocks::<T>(t.dtype()) && t.is_contiguous()).count();
    let rooms = widened + if by_blocks::<T>(dtype) { N } else { 0 };
    let out = std::array::from_fn(|_| (shape.clone(), dtype));
    ghosts_in::<T, N>(by_blocks::<T>, reads, out, |l| {
        let _rooms = l.hold(l.machine().threads * (rooms * block * T::DTYPE.size_in_bytes()) as u64);
        during(l);
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::randn;
    use crate::norm::Scale;
    use crate::{norm, swiglu};

    /// Blockwise conversion gives the same bits as conversion of whole tensors, for sizes around block and
    /// task boundaries.
    #[test]
    fn blocks_change_no_bit() -> Result<()> {
        let bits = |t: &Tensor| -> Result<Vec<u16>> {
            Ok(t.flatten_all()?.to_vec1::<bf16>()?.into_iter().map(bf16::to_bits).collect())
        };
        for (rows, d) in [(1, 1), (33, 62), (1, BLOCK - 1), (1, BLOCK), (3, BLOCK + 1), (70, 512)] {
            let x = [1, 2, 3]
                .map(|seed| randn(seed, (rows, d), DType::F32).and_then(|x| x.to_dtype(DType::BF16)));
            let [g, u, dy] = x;
            let (g, u, dy) = (g?, u?, dy?);
            let w = randn(4, d, DType::F32)?.to_dtype(DType::BF16)?;
            let wide = |t: &Tensor| t.to_dtype(DType::F32);
            let narrow = |t: Tensor| t.to_dtype(DType::BF16);
            let glu = swiglu::Glu::default();
            let back = |g: &Tensor, u: &Tensor, dy: &Tensor| swiglu::backward_pair(glu, g, u, dy);
            let pairs = [
                (swiglu::forward(glu, &g, Some(&u))?, swiglu::forward(glu, &wide(&g)?, Some(&wide(&u)?))?),
                (back(&g, &u, &dy)?.0, back(&wide(&g)?, &wide(&u)?, &wide(&dy)?)?.0),
                (back(&g, &u, &dy)?.1, back(&wide(&g)?, &wide(&u)?, &wide(&dy)?)?.1),
                (
                    norm::forward(&g, Scale::new(&w, 1e-5))?,
                    norm::forward(&wide(&g)?, Scale::new(&wide(&w)?, 1e-5))?,
                ),
            ];
            for (i, (halves, whole)) in pairs.into_iter().enumerate() {
                assert_eq!(bits(&halves)?, bits(&narrow(whole)?)?, "{i}: {rows} x {d}");
            }
            let (dx, dw) = norm::backward(&g, Scale::new(&w, 1e-5), &dy, true)?;
            let (all, all_w) = norm::backward(&wide(&g)?, Scale::new(&wide(&w)?, 1e-5), &wide(&dy)?, true)?;
            assert_eq!(bits(&dx)?, bits(&narrow(all)?)?, "{rows} x {d}");
            let values = |t: Option<Tensor>| t.expect("wanted").to_vec2::<f32>();
            assert_eq!(values(dw)?, values(all_w)?, "{rows} x {d}");
        }
        Ok(())
    }

    /// Several outputs in tasks that are no multiple of a block; results come in order.
    #[test]
    fn tasks_write_their_own_blocks_in_order() -> Result<()> {
        let shape = Shape::from(23);
        for dtype in [DType::F32, DType::BF16] {
            let ([a, b], starts) = written((&shape, dtype), 7, |from, out: Out<'_, f32, 2>| {
                out.each(3, |at, [a, b]| {
                    for (i, (a, b)) in a.iter_mut().zip(b).enumerate() {
                        (*a, *b) = ((from + at + i) as f32, -((from + at + i) as f32));
                    }
                });
                from
            })?;
            assert_eq!(starts, [0, 7, 14, 21]);
            let numbers: Vec<f32> = (0..23).map(|i| i as f32).collect();
            assert_eq!(a.to_dtype(DType::F32)?.to_vec1::<f32>()?, numbers);
            assert_eq!((b * -1.0)?.to_dtype(DType::F32)?.to_vec1::<f32>()?, numbers);
        }
        Ok(())
    }
}
