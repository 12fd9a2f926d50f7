//! Shared parts of the CPU kernels: typed views of tensors, parallel loops in a fixed order, in-place
//! operations.
//!
//! CPU kernels are generic over [`Real`]: training runs them in f32, finite-difference checks in f64. bf16
//! and f16 tensors are widened to f32 on input and rounded on output.

use super::cast;
use super::cuda::launch;
use super::ledger::{Cost, Ledger};
use super::tensor::{Ghost, Real as Values};
use crate::Tensor;
use candle_core::{CpuStorage, DType, Device, InplaceOp1, Layout, Result, Shape, Storage, StorageRef};
use half::{bf16, f16};
use rayon::prelude::*;
use std::cell::RefCell;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::{Deref, Range};

/// Element types that kernels can modify in place.
pub trait Value: candle_core::WithDType {
    /// The vector of a CPU storage, if the type matches.
    fn storage_mut(s: &mut CpuStorage) -> Option<&mut Vec<Self>>;
}

macro_rules! values {
    ($($t:ty: $vector:ident),*) => {
        $(impl Value for $t {
            fn storage_mut(s: &mut CpuStorage) -> Option<&mut Vec<Self>> {
                if let CpuStorage::$vector(v) = s { Some(v) } else { None }
            }
        })*
    };
}
values!(f64: F64, f32: F32, bf16: BF16, f16: F16, u8: U8);

/// Floating-point types of kernel arithmetic.
pub trait Real: Value + std::iter::Sum + std::ops::Neg<Output = Self> {
    /// e^x
    fn exp(self) -> Self;
    /// Natural logarithm.
    fn ln(self) -> Self;
    /// Square root.
    fn sqrt(self) -> Self;
    /// Converts from f64, rounding to nearest.
    fn of(x: f64) -> Self {
        Self::from_f64(x)
    }
    /// Converts from f32, exactly.
    fn widened(x: f32) -> Self {
        Self::of(f64::from(x))
    }
    /// Negative infinity.
    fn lowest() -> Self;
    /// Looks up 4-bit codes in a table of 16 values, as far as a fast path exists;
    /// returns the number of values written.
    fn look_up(_packed: &[u8], _values: &[Self; 16], _out: &mut [Self]) -> usize {
        0
    }
}

/// e^x in f32 within 2 ulp, in a form that compilers vectorize: range reduction by ln 2 and
/// the polynomial of Cephes' `expf`. Results below the smallest normal number are clamped near
/// it; infinities and NaN propagate.
#[inline(always)]
fn exp_f32(x: f32) -> f32 {
    /// 1.5 * 2^23: adding it rounds to an integer, stored in the low bits.
    const ROUND: f32 = 12_582_912.0;
    let low = if x < -87.336_54 { -87.336_54 } else { x };
    let shifted = low * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = low - n * 0.693_359_4 + n * 2.121_944_4e-4;
    let p = 1.987_569_1e-4 * r + 1.398_199_9e-3;
    let p = p * r + 8.333_452e-3;
    let p = p * r + 4.166_579_6e-2;
    let p = p * r + 1.666_666_5e-1;
    let p = p * r + 0.5;
    let y = p * r * r + r + 1.0;
    // 2^n as two factors, since n may be 128 with a finite e^x
    let n = shifted.to_bits().wrapping_sub(ROUND.to_bits()) as i32;
    let half = n >> 1;
    let power = |k: i32| f32::from_bits((k.wrapping_add(127) as u32) << 23);
    let y = y * power(half) * power(n.wrapping_sub(half));
    if x > 88.722_83 { if x.is_nan() { x } else { f32::INFINITY } } else { y }
}

/// Sum in sixteen lanes: vectorizable, and more accurate than a single running sum.
#[inline(always)]
pub fn sum<T: Real>(v: &[T]) -> T {
    let mut lanes = [T::zero(); 16];
    let chunks = v.chunks_exact(16);
    let tail: T = chunks.remainder().iter().copied().sum();
    for c in chunks {
        for i in 0..16 {
            lanes[i] += c[i];
        }
    }
    lanes.into_iter().sum::<T>() + tail
}

/// Maximum, ignoring NaN; the lowest value for an empty slice.
#[inline(always)]
pub fn max<T: Real>(v: &[T]) -> T {
    let bigger = |a: T, b: T| if b > a { b } else { a };
    let mut lanes = [T::lowest(); 16];
    let chunks = v.chunks_exact(16);
    let tail = chunks.remainder().iter().copied().fold(T::lowest(), bigger);
    for c in chunks {
        for i in 0..16 {
            lanes[i] = bigger(lanes[i], c[i]);
        }
    }
    lanes.into_iter().fold(tail, bigger)
}

impl Real for f32 {
    #[inline(always)]
    fn exp(self) -> Self {
        exp_f32(self)
    }
    #[inline(always)]
    fn widened(x: f32) -> Self {
        x
    }
    #[inline]
    fn ln(self) -> Self {
        f32::ln(self)
    }
    #[inline]
    fn sqrt(self) -> Self {
        f32::sqrt(self)
    }
    fn lowest() -> Self {
        f32::NEG_INFINITY
    }
    #[inline]
    fn look_up(packed: &[u8], values: &[f32; 16], out: &mut [f32]) -> usize {
        super::quantized::lookup::f32s(packed, values, out)
    }
}

impl Real for f64 {
    #[inline]
    fn exp(self) -> Self {
        f64::exp(self)
    }
    #[inline]
    fn ln(self) -> Self {
        f64::ln(self)
    }
    #[inline]
    fn sqrt(self) -> Self {
        f64::sqrt(self)
    }
    fn lowest() -> Self {
        f64::NEG_INFINITY
    }
}

/// Calls `$f::<f64>(..)` (a function or a method) for f64 tensors and `$f::<f32>(..)` for all other dtypes.
macro_rules! on_real {
    ($dtype:expr, $($f:ident)::+($($arg:expr),* $(,)?)) => {
        if $dtype == candle_core::DType::F64 { $($f)::+::<f64>($($arg),*) } else { $($f)::+::<f32>($($arg),*) }
    };
    ($dtype:expr, $on:ident.$f:ident($($arg:expr),* $(,)?)) => {
        if $dtype == candle_core::DType::F64 { $on.$f::<f64>($($arg),*) } else { $on.$f::<f32>($($arg),*) }
    };
}
pub(crate) use on_real;

/// Records the memory and work of a CPU kernel for ghosts; returns `None` for tensors with values.
///
/// Memory: a converted copy of each of `reads` that is not row-major or not in the arithmetic dtype;
/// allocations made by `during`; the outputs `out` in the arithmetic dtype, plus one rounded output at a time
/// if the dtypes differ.
pub fn ghosts<T: Real, const N: usize>(
    reads: &[&Tensor],
    out: [(Shape, DType); N],
    during: impl FnOnce(&Ledger),
) -> Option<[Tensor; N]> {
    ghosts_in::<T, N>(|_| false, reads, out, during)
}

/// Like [`ghosts`], for matrix products: see [`launch::ghost_products`].
pub fn ghost_products<T: Real, const N: usize>(
    reads: &[&Tensor],
    out: [(Shape, DType); N],
    during: impl FnOnce(&Ledger),
) -> Option<[Tensor; N]> {
    ghost_products_in::<T, N>(|_| false, reads, out, during)
}

/// Like [`ghosts`], with dtypes that the kernel reads and writes without conversion.
pub(super) fn ghosts_in<T: Real, const N: usize>(
    as_it_is: impl Fn(DType) -> bool,
    reads: &[&Tensor],
    out: [(Shape, DType); N],
    during: impl FnOnce(&Ledger),
) -> Option<[Tensor; N]> {
    let out = ghost_products_in::<T, N>(as_it_is, reads, out, during)?;
    launch::moves(reads.iter().copied().chain(&out));
    Some(out)
}

/// Like [`ghost_products`], with dtypes that the kernel reads and writes without conversion.
pub(super) fn ghost_products_in<T: Real, const N: usize>(
    as_it_is: impl Fn(DType) -> bool,
    reads: &[&Tensor],
    out: [(Shape, DType); N],
    during: impl FnOnce(&Ledger),
) -> Option<[Tensor; N]> {
    let ledger = reads.first()?.ghost()?.ledger();
    let size = T::DTYPE.size_in_bytes();
    let own = |d: DType| d == T::DTYPE || as_it_is(d);
    let copied = reads.iter().filter(|t| !own(t.dtype()) || !t.is_contiguous());
    let _copies = ledger.hold(copied.map(|t| (size * t.elem_count()) as u64).sum());
    let made = out
        .map(|(shape, dtype)| (Ghost::new(ledger, shape, if own(dtype) { dtype } else { T::DTYPE }), dtype));
    during(ledger);
    ledger.work(Cost { started: 1.0, ..Cost::default() });
    Some(made.map(|(made, dtype)| match own(dtype) {
        true => made.into(),
        false => Ghost::new(ledger, made.shape().clone(), dtype).into(),
    }))
}

/// Whether a tensor is on the CPU and uses the CPU kernels.
pub fn is_cpu(t: &Tensor) -> bool {
    t.device().is_cpu()
}

/// Like [`is_cpu`], for operations composed on other devices: see
/// [`On::is_native`](super::tensor::On::is_native).
pub fn is_native(t: &Tensor) -> bool {
    t.device().is_native()
}

/// Values of a CPU tensor in row-major order, borrowed if dtype and layout allow, else converted.
pub enum View<'a, T> {
    /// A range of the tensor's storage.
    Borrowed(StorageRef<'a>, usize, usize, PhantomData<T>),
    /// Converted values.
    Owned(Vec<T>),
}

impl<T: Real> Deref for View<'_, T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        match self {
            View::Borrowed(s, start, end, _) => match &**s {
                Storage::Cpu(s) => s.as_slice::<T>().map(|s| &s[*start..*end]).unwrap_or(&[]),
                _ => &[],
            },
            View::Owned(v) => v,
        }
    }
}

/// Views a CPU tensor as `T`.
pub fn view<T: Real>(t: &Tensor) -> Result<View<'_, T>> {
    let t = t.real()?;
    if t.dtype() == T::DTYPE {
        let (s, l) = t.storage_and_layout();
        if let Some((start, end)) = l.contiguous_offsets() {
            return Ok(View::Borrowed(s, start, end, PhantomData));
        }
    }
    if let Some(v) = widened(t) {
        return Ok(View::Owned(v));
    }
    Ok(View::Owned(t.to_dtype(T::DTYPE)?.flatten_all()?.to_vec1()?))
}

/// Values of a contiguous half-precision tensor, with one copy instead of two.
fn widened<T: Real>(t: &Values) -> Option<Vec<T>> {
    let (s, l) = t.storage_and_layout();
    let (start, end) = l.contiguous_offsets()?;
    match &*s {
        Storage::Cpu(CpuStorage::BF16(v)) => Some(cast::each(&v[start..end], |x| T::widened(cast::wide(*x)))),
        Storage::Cpu(CpuStorage::F16(v)) => Some(cast::each(&v[start..end], |x| T::widened(x.to_f32()))),
        _ => None,
    }
}

/// Values of a contiguous bf16 tensor on the CPU.
pub struct Halves<'a>(StorageRef<'a>, Range<usize>);

impl<'a> Halves<'a> {
    /// Views a tensor.
    ///
    /// # Errors
    /// A tensor that is not contiguous, not bf16, or not on the CPU.
    pub fn of(t: &'a Tensor) -> Result<Self> {
        let (s, l) = t.real()?.storage_and_layout();
        match (&*s, l.contiguous_offsets()) {
            (Storage::Cpu(CpuStorage::BF16(_)), Some((start, end))) => Ok(Self(s, start..end)),
            _ => candle_core::bail!("bf16: a tensor that is not contiguous, or of another type"),
        }
    }
}

impl Deref for Halves<'_> {
    type Target = [bf16];
    fn deref(&self) -> &[bf16] {
        match &*self.0 {
            Storage::Cpu(CpuStorage::BF16(v)) => &v[self.1.clone()],
            _ => &[],
        }
    }
}

/// Creates a CPU tensor of `dtype` from values.
pub fn tensor<T: Real>(v: Vec<T>, shape: impl Into<Shape>, dtype: DType) -> Result<Tensor> {
    cast::to_dtype(&Values::from_vec(v, shape.into(), &Device::Cpu)?, dtype).map(Tensor::Real)
}

/// Dot product in sixteen lanes: vectorizable, and more accurate than a single running sum.
#[inline(always)]
pub fn dot<T: Real>(a: &[T], b: &[T]) -> T {
    let mut lanes = [T::zero(); 16];
    let (ac, bc) = (a.chunks_exact(16), b.chunks_exact(16));
    let tail: T = ac.remainder().iter().zip(bc.remainder()).map(|(x, y)| *x * *y).sum();
    for (x, y) in ac.zip(bc) {
        for i in 0..16 {
            lanes[i] += x[i] * y[i];
        }
    }
    lanes.into_iter().sum::<T>() + tail
}

/// Rows per task of a row-wise kernel. Fixed, so that sums over rows have the same
/// order for any number of threads.
pub const ROWS: usize = 32;

/// Runs `f` compiled for AVX-512 if the CPU supports it and `f` is inlined. The
/// arithmetic and the bits stay the same.
#[inline]
pub fn vectorised<R>(f: impl FnOnce() -> R) -> R {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
        fn widest<R>(f: impl FnOnce() -> R) -> R {
            f()
        }
        let here = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl");
        if here {
            // SAFETY: the check above found every target feature of `widest`.
            return unsafe { widest(f) };
        }
    }
    f()
}

/// Values per task of an elementwise pass.
const CHUNK: usize = 1 << 15;

/// Computes `len` values on all threads; `f` returns an iterator over the values of a range.
///
/// # Panics
/// If `f` yields too few values.
pub fn by_chunks<B: Send + Copy, I: Iterator<Item = B>>(
    len: usize,
    f: impl Fn(Range<usize>) -> I + Sync,
) -> Vec<B> {
    let mut out = Vec::with_capacity(len);
    let chunk = |(i, room): (usize, &mut [MaybeUninit<B>])| {
        let len = room.len();
        let written = vectorised(|| {
            let mut written = 0;
            for (to, x) in room.iter_mut().zip(f(i * CHUNK..i * CHUNK + len)) {
                to.write(x);
                written += 1;
            }
            written
        });
        assert_eq!(written, len, "values that are missing");
    };
    let room = &mut out.spare_capacity_mut()[..len];
    match len <= CHUNK {
        true => chunk((0, room)),
        false => room.par_chunks_mut(CHUNK).enumerate().for_each(chunk),
    }
    // SAFETY: each chunk asserts that it initialized all of its values, and the chunks cover `len` values.
    unsafe { out.set_len(len) };
    out
}

struct Closure<F> {
    name: &'static str,
    f: RefCell<F>,
}

impl<F: FnMut(&mut CpuStorage, &Layout) -> Result<()>> InplaceOp1 for Closure<F> {
    fn name(&self) -> &'static str {
        self.name
    }
    fn cpu_fwd(&self, s: &mut CpuStorage, l: &Layout) -> Result<()> {
        (self.f.borrow_mut())(s, l)
    }
}

/// Modifies the values of a contiguous CPU tensor or view in place.
///
/// # Errors
/// A tensor that is not contiguous or of another dtype; errors of `f`.
pub fn in_place<T: Value>(
    name: &'static str,
    t: &Tensor,
    mut f: impl FnMut(&mut [T]) -> Result<()>,
) -> Result<()> {
    let f = RefCell::new(|s: &mut CpuStorage, l: &Layout| {
        let Some((start, end)) = l.contiguous_offsets() else {
            candle_core::bail!("{name}: the destination is not contiguous");
        };
        match T::storage_mut(s) {
            Some(v) => f(&mut v[start..end]),
            None => candle_core::bail!("{name}: the destination is not {:?}", T::DTYPE),
        }
    });
    t.real()?.inplace_op1(&Closure { name, f })
}

/// A matrix product `[rows, cols]` in `dtype`, plus `sum` if given; in place if `sum` has the arithmetic
/// dtype. `product(dst, add)` overwrites `dst`, or adds to it. If operand `a` is a ghost, `during` records
/// the allocations instead.
pub fn onto<T: Real>(
    name: &'static str,
    a: &Tensor,
    sum: Option<Tensor>,
    (rows, cols): (usize, usize),
    product: impl Fn(&mut [T], bool),
    during: impl FnOnce(&Ledger),
) -> Result<Tensor> {
    let dtype = a.dtype();
    match sum {
        Some(sum) if a.ghost().is_some() && sum.dtype() == T::DTYPE => {
            ghost_products::<T, 0>(&[a], [], during);
            Ok(sum)
        }
        sum if a.ghost().is_some() => {
            match (ghost_products::<T, 1>(&[a], [((rows, cols).into(), dtype)], during), sum) {
                (Some([own]), Some(sum)) => sum + own,
                (Some([own]), None) => Ok(own),
                (None, _) => candle_core::bail!("{name}: no ghost"),
            }
        }
        Some(sum) if sum.dtype() == T::DTYPE => {
            in_place::<T>(name, &sum, |dst| {
                product(dst, true);
                Ok(())
            })?;
            Ok(sum)
        }
        sum => {
            let mut out = vec![T::zero(); rows * cols];
            product(&mut out, false);
            let own = tensor(out, (rows, cols), dtype)?;
            match sum {
                None => Ok(own),
                Some(sum) => sum + own,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_close_everywhere() {
        let mut worst = 0f64;
        for i in -870_000..887_000 {
            let x = i as f32 / 10_000.0;
            let (mine, want) = (f64::from(exp_f32(x)), f64::from(x).exp());
            worst = worst.max((mine - want).abs() / want);
        }
        assert!(worst < 2.5e-7, "{worst:.2e}");
        assert_eq!(exp_f32(0.0), 1.0);
        assert_eq!(exp_f32(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp_f32(89.0), f32::INFINITY);
        assert!(exp_f32(f32::NEG_INFINITY) < 2e-38 && exp_f32(-1e30) < 2e-38);
        assert!(exp_f32(f32::NAN).is_nan());
    }

    #[test]
    fn lanes_see_every_value() {
        for n in [0, 1, 15, 16, 17, 50] {
            let v: Vec<f64> = (0..n).map(|i| f64::from((i * 7) % 13)).collect();
            assert_eq!(sum(&v), v.iter().sum::<f64>());
            assert_eq!(max(&v), v.iter().copied().fold(f64::NEG_INFINITY, f64::max));
            assert_eq!(dot(&v, &v), v.iter().map(|x| x * x).sum::<f64>());
        }
    }
}
