//! Random words for stochastic rounding, and the storage types of weights.

use crate::cpu::Value;
use ft_base::rng::{Purpose, Stream};
use half::{bf16, f16};

/// Random words for rounding: word `first + i` of the stream rounds value i.
#[derive(Clone, Copy, Debug)]
pub struct Draws {
    pub(super) stream: Stream,
    pub(super) first: u64,
}

impl Draws {
    /// Placeholder if nothing is rounded.
    pub(super) const NONE: Self = Self { stream: Stream::NONE, first: 0 };

    /// The words of update `update` (from 1) for the values of a unit's buffer from index `first` on.
    pub fn new(seed: u64, update: u64, unit: usize, first: usize) -> Self {
        Self { stream: Stream::new(seed, Purpose::Rounding, update, unit as u64), first: first as u64 }
    }

    /// The words from value `at` on.
    pub(super) fn from(&self, at: usize) -> Words {
        Words { stream: self.stream, next: self.first + at as u64, block: None }
    }
}

/// Sequential reader of a stream's words.
pub(super) struct Words {
    pub(super) stream: Stream,
    pub(super) next: u64,
    pub(super) block: Option<[u32; 4]>,
}

impl Words {
    #[inline]
    fn take(&mut self) -> u32 {
        let at = (self.next % 4) as usize;
        if at == 0 {
            self.block = None;
        }
        let block = *self.block.get_or_insert_with(|| self.stream.block(self.next / 4));
        self.next += 1;
        block[at]
    }
}

/// Storage dtype of weights.
pub(super) trait Stored: Value {
    /// Exact value in f32.
    fn widen(self) -> f32;
    /// Converts a new value; stochastic if the dtype is narrower than f32.
    fn of(x: f32, words: &mut Words) -> Self;
}

impl Stored for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }
    #[inline(always)]
    fn of(x: f32, _: &mut Words) -> Self {
        x
    }
}

impl Stored for bf16 {
    #[inline]
    fn widen(self) -> f32 {
        self.to_f32()
    }
    /// The low 16 bits of an f32 are the fraction, in 1/65536, of the way to the next bf16 away from
    /// zero.
    #[inline]
    fn of(x: f32, words: &mut Words) -> Self {
        let word = words.take();
        if !x.is_finite() {
            return bf16::from_f32(x);
        }
        bf16::from_bits(((x.to_bits() + (word >> 16)) >> 16) as u16)
    }
}

impl Stored for f16 {
    #[inline]
    fn widen(self) -> f32 {
        self.to_f32()
    }
    #[inline]
    fn of(x: f32, words: &mut Words) -> Self {
        const SMALLEST_NORMAL: f32 = 1.0 / 16_384.0;
        const STEPS: f32 = 16_777_216.0;
        let (word, size) = (words.take(), x.abs());
        if !x.is_finite() {
            return f16::from_f32(x);
        }
        if size >= SMALLEST_NORMAL {
            return f16::from_f32(f32::from_bits((x.to_bits() + (word >> 19)) & !0x1fff));
        }
        // values below the normal range have a spacing of 2^-24
        let (steps, low) = (size * STEPS, (size * STEPS).floor());
        let up = ft_base::rng::unit(word) < steps - low;
        f16::from_f32(((low + f32::from(u8::from(up))) / STEPS).copysign(x))
    }
}

/// Calls `$f::<T>(..)` for a tensor's 16-bit dtype.
macro_rules! on_stored {
    ($t:expr, $f:ident($($arg:expr),* $(,)?)) => {
        match $t.dtype() {
            candle_core::DType::BF16 => $f::<half::bf16>($($arg),*),
            candle_core::DType::F16 => $f::<half::f16>($($arg),*),
            other => candle_core::bail!("weights without f32 copies in {other:?}"),
        }
    };
}
pub(super) use on_stored;
