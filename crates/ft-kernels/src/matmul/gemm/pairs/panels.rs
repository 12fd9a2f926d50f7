//! Packing format and micro-kernels of bf16 products with AVX-512 BF16.
//!
//! A panel holds a few lines (rows of the left operand, columns of the right one) over a range of the
//! inner dimension, in pairs of inner values: word `p * width + l` is the pair `2 p` (low half),
//! `2 p + 1` of line `l`; missing values are zero. All lines of a pair form vectors, and one word is
//! broadcast from a single line:
//!
//! ```text
//! sums[row][column] += pair of row * pair of column      vdpbf16ps, 16 columns at a time, in f32
//! ```
//!
//! The instruction flushes subnormal inputs to zero, and adds the sum of both products with
//! round-to-nearest, whatever the MXCSR rounding mode.

use super::partition::{COLUMNS, ROWS};
use crate::matmul::gemm::cpu::Mat;
use half::bf16;
use std::arch::x86_64::{
    __m256bh, __m256i, __m512, __m512bh, __m512i, _MM_HINT_T0, _mm_prefetch, _mm256_mask_storeu_epi16,
    _mm256_maskz_loadu_epi16, _mm512_add_ps, _mm512_castsi512_ps, _mm512_cvtepu16_epi32, _mm512_cvtneps_pbh,
    _mm512_dpbf16_ps, _mm512_loadu_si512, _mm512_mask_storeu_epi32, _mm512_mask_storeu_ps,
    _mm512_maskz_loadu_epi16, _mm512_maskz_loadu_ps, _mm512_mul_ps, _mm512_or_si512, _mm512_set1_epi32,
    _mm512_set1_ps, _mm512_setzero_ps, _mm512_setzero_si512, _mm512_shuffle_i32x4, _mm512_slli_epi32,
    _mm512_unpackhi_epi32, _mm512_unpackhi_epi64, _mm512_unpacklo_epi32, _mm512_unpacklo_epi64,
};
use std::mem::transmute;
use std::ops::Range;

/// Columns per vector.
pub const LANES: usize = 16;
// Two vectors of columns use 24 registers for sums, 2 for columns and 1 for the broadcast.
const _: () = assert!(ROWS == 12 && COLUMNS == 2 * LANES);
/// Prefetch distance, with strided and with contiguous inner values. Weights come from memory, and the
/// hardware prefetcher does not follow from panel to panel.
const ROWS_AHEAD: usize = 16;
pub const VALUES_AHEAD: usize = 128;

/// Whether the CPU supports the instructions used here.
pub fn are_here() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512bf16")
}

/// Partition of lines into panels.
#[derive(Clone, Copy)]
pub struct Shape {
    /// Lines per panel.
    most: usize,
    /// Granularity of the last panel's width.
    multiple: usize,
}

impl Shape {
    /// Rows of the left operand.
    pub const LEFT: Self = Self { most: ROWS, multiple: 1 };
    /// Columns of the right operand.
    pub const RIGHT: Self = Self { most: COLUMNS, multiple: LANES };

    /// First line and width of each panel over `count` lines.
    pub fn panels(self, count: usize) -> impl Iterator<Item = (usize, usize)> {
        let width = move |c: usize| (count - c).next_multiple_of(self.multiple).min(self.most);
        (0..count).step_by(self.most).map(move |c| (c, width(c)))
    }
}

/// Total width of the panels of `columns` columns.
pub fn width(columns: usize) -> usize {
    columns.next_multiple_of(LANES)
}

/// Packs the inner values `own` of rows `rows` of `m` into consecutive panels.
///
/// # Safety
/// [`are_here`]; `out` points to `own.len() / 2` (rounded up) words per line of panel width, exclusive to
/// the caller; `rows` and `own` are inside `m`.
pub unsafe fn pack(out: *mut u32, shape: Shape, m: Mat<'_, bf16>, rows: Range<usize>, own: Range<usize>) {
    assert!(rows.end <= m.rows && own.end <= m.cols, "a panel outside of its matrix");
    let (line, step, k) = (m.rs, m.cs, own.len());
    let pairs = k.div_ceil(2);
    // SAFETY: asserted to be in bounds; if a range is empty, the pointer may dangle but nothing is read.
    let from = unsafe { m.data.as_ptr().cast::<u16>().add(rows.start * line + own.start * step) };
    for (first, width) in shape.panels(rows.len()) {
        let lines = width.min(rows.len() - first);
        // SAFETY: `out` is valid by contract; Mat::new keeps all values of the matrix inside its slice.
        unsafe {
            let (out, from) = (out.add(first * pairs), from.add(first * line));
            match (step, line) {
                (1, _) => transpose(out, width, from, lines, line, k),
                (_, 1) => interleave(out, width, from, lines, step, k),
                _ => one_by_one(out, width, from, (lines, line), (k, step)),
            }
        }
    }
}

/// A mask of the `n` lowest bits, at most 16.
pub fn ones(n: usize) -> u16 {
    (u32::MAX >> (32 - n.min(16) as u32).min(31)) as u16 * u16::from(n > 0)
}

/// Packs lines with arbitrary strides.
unsafe fn one_by_one(
    out: *mut u32,
    width: usize,
    from: *const u16,
    (lines, line): (usize, usize),
    (k, step): (usize, usize),
) {
    let value = |l: usize, k_: usize| {
        if l < lines && k_ < k {
            // SAFETY: by contract, line `l` has value `k_`.
            u32::from(unsafe { *from.add(l * line + k_ * step) })
        } else {
            0
        }
    };
    for p in 0..k.div_ceil(2) {
        for l in 0..width {
            // SAFETY: by contract, the panel has `width` words per pair.
            unsafe { *out.add(p * width + l) = value(l, 2 * p) | value(l, 2 * p + 1) << 16 };
        }
    }
}

/// Packs lines with contiguous inner values, 16 pairs of 16 lines at a time.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn transpose(out: *mut u32, width: usize, from: *const u16, lines: usize, line: usize, k: usize) {
    let pairs = k.div_ceil(2);
    for l0 in (0..width).step_by(LANES) {
        let kept = ones(width - l0);
        for p0 in (0..pairs).step_by(LANES) {
            let left = (k - 2 * p0).min(2 * LANES);
            let mask = u32::MAX >> (2 * LANES - left);
            let mut v = [_mm512_setzero_si512(); LANES];
            for (r, v) in v.iter_mut().enumerate().take(lines.saturating_sub(l0)) {
                _mm_prefetch::<_MM_HINT_T0>(
                    from.wrapping_add((l0 + r) * line + 2 * p0 + VALUES_AHEAD).cast(),
                );
                // SAFETY: in bounds by contract; the mask excludes values past the end of the line.
                *v = unsafe {
                    _mm512_maskz_loadu_epi16(mask, from.add((l0 + r) * line + 2 * p0).cast::<i16>())
                };
            }
            let t = transposed(v);
            for (p, t) in t.iter().enumerate().take(pairs - p0) {
                // SAFETY: in bounds by contract; the mask excludes words past the panel's width.
                unsafe {
                    _mm512_mask_storeu_epi32(out.add((p0 + p) * width + l0).cast::<i32>(), kept, *t);
                }
            }
        }
    }
}

/// Transposes 16 x 16 words.
#[inline]
#[target_feature(enable = "avx512f")]
pub fn transposed(v: [__m512i; LANES]) -> [__m512i; LANES] {
    let mut a = v;
    // words, then pairs of words, within each 128-bit lane
    for i in (0..LANES).step_by(2) {
        (a[i], a[i + 1]) = (_mm512_unpacklo_epi32(v[i], v[i + 1]), _mm512_unpackhi_epi32(v[i], v[i + 1]));
    }
    let mut b = a;
    for i in (0..LANES).step_by(4) {
        b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
        b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
        b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
        b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
    // then the lanes: b[4 g + c] has columns c, 4 + c, 8 + c, 12 + c of rows 4 g and on
    let mut out = b;
    for c in 0..4 {
        let low = _mm512_shuffle_i32x4::<0b1000_1000>(b[c], b[4 + c]);
        let high = _mm512_shuffle_i32x4::<0b1101_1101>(b[c], b[4 + c]);
        let low2 = _mm512_shuffle_i32x4::<0b1000_1000>(b[8 + c], b[12 + c]);
        let high2 = _mm512_shuffle_i32x4::<0b1101_1101>(b[8 + c], b[12 + c]);
        out[c] = _mm512_shuffle_i32x4::<0b1000_1000>(low, low2);
        out[8 + c] = _mm512_shuffle_i32x4::<0b1101_1101>(low, low2);
        out[4 + c] = _mm512_shuffle_i32x4::<0b1000_1000>(high, high2);
        out[12 + c] = _mm512_shuffle_i32x4::<0b1101_1101>(high, high2);
    }
    out
}

/// Packs adjacent lines with inner stride `step`. (Handling all panels of a pair together would read
/// longer rows, but is slower: the writes conflict in the cache.)
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn interleave(out: *mut u32, width: usize, from: *const u16, lines: usize, step: usize, k: usize) {
    for p in 0..k.div_ceil(2) {
        for l0 in (0..width).step_by(LANES) {
            let (there, kept) = (ones(lines.saturating_sub(l0)), ones(width - l0));
            let value = |k_: usize| {
                if k_ < k && there != 0 {
                    // SAFETY: in bounds by contract; the mask excludes missing lines.
                    _mm512_cvtepu16_epi32(unsafe {
                        _mm256_maskz_loadu_epi16(there, from.add(k_ * step + l0).cast::<i16>())
                    })
                } else {
                    _mm512_setzero_si512()
                }
            };
            for k_ in 2 * p + ROWS_AHEAD..2 * p + ROWS_AHEAD + 2 {
                _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(k_ * step + l0).cast());
            }
            let word = _mm512_or_si512(value(2 * p), _mm512_slli_epi32::<16>(value(2 * p + 1)));
            // SAFETY: in bounds by contract; the mask excludes words past the panel's width.
            unsafe { _mm512_mask_storeu_epi32(out.add(p * width + l0).cast::<i32>(), kept, word) };
        }
    }
}

/// Epilogue of a tile: `alpha sums`, plus the destination's previous values if requested.
#[derive(Clone, Copy)]
pub struct Out {
    /// f32 destination.
    pub wide: *mut f32,
    /// Row stride of `wide`.
    pub wide_stride: usize,
    /// bf16 destination.
    pub half: *mut bf16,
    /// Row stride of `half`.
    pub half_stride: usize,
    /// Factor on the sums.
    pub alpha: f32,
    /// Whether to add the values in `wide`.
    pub add_wide: bool,
    /// Whether to add the values in `half`.
    pub add_half: bool,
    /// Whether to store to `half`, rounded once, instead of `wide`.
    pub to_half: bool,
}

/// A few rows of the left operand.
#[derive(Clone, Copy)]
pub struct Left {
    /// First pair of the first row.
    pub at: *const u32,
    /// Number of rows.
    pub rows: usize,
    /// Row stride in values, for unpacked rows; `None` for a panel.
    pub stride: Option<usize>,
}

/// Multiplies `rows` rows with a panel of `columns` columns (padded to `width`), over `pairs` pairs.
///
/// # Safety
/// [`are_here`]; rows have `pairs` pairs, panels `pairs` x width words; the caller has
/// exclusive access to the `rows` x `columns` values `out` refers to.
pub unsafe fn multiply(
    pairs: usize,
    Left { at, rows, stride }: Left,
    (b, width, columns): (*const u32, usize, usize),
    out: &Out,
) {
    macro_rules! rows {
        ($($m:literal)*) => {
            // SAFETY: the contract of this function.
            unsafe {
                match (rows, width, stride) {
                    $(($m, COLUMNS, None) => tile::<$m, 2, true>(pairs, (at, 0), b, columns, out),
                      ($m, _, None) => tile::<$m, 1, true>(pairs, (at, 0), b, columns, out),
                      ($m, COLUMNS, Some(s)) => tile::<$m, 2, false>(pairs, (at, s), b, columns, out),
                      ($m, _, Some(s)) => tile::<$m, 1, false>(pairs, (at, s), b, columns, out),)*
                    _ => {}
                }
            }
        };
    }
    rows!(1 2 3 4 5 6 7 8 9 10 11 12);
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn tile<const M: usize, const V: usize, const PANEL: bool>(
    pairs: usize,
    (mut a, stride): (*const u32, usize),
    mut b: *const u32,
    columns: usize,
    out: &Out,
) {
    let mut sums = [[_mm512_setzero_ps(); V]; M];
    for _ in 0..pairs {
        let mut right = [_mm512_setzero_si512(); V];
        for (v, right) in right.iter_mut().enumerate() {
            // SAFETY: by contract, the column panel has V vectors per pair.
            *right = unsafe { _mm512_loadu_si512(b.add(LANES * v).cast()) };
        }
        for (r, sums) in sums.iter_mut().enumerate() {
            // SAFETY: by contract, a row panel has M words per pair, and unpacked rows have stride
            // `stride`.
            let left = unsafe {
                if PANEL { *a.add(r) } else { a.cast::<u16>().add(r * stride).cast::<u32>().read_unaligned() }
            };
            let left = _mm512_set1_epi32(left.cast_signed());
            for (sum, right) in sums.iter_mut().zip(right) {
                *sum = _mm512_dpbf16_ps(*sum, pairs_of(left), pairs_of(right));
            }
        }
        // SAFETY: at most one past the end.
        (a, b) = unsafe { (a.add(if PANEL { M } else { 1 }), b.add(LANES * V)) };
    }
    let alpha = _mm512_set1_ps(out.alpha);
    for (r, sums) in sums.iter().enumerate() {
        for (v, sum) in sums.iter().enumerate() {
            let c = LANES * v;
            let mask = ones(columns.saturating_sub(c));
            let mut x = _mm512_mul_ps(alpha, *sum);
            // SAFETY: valid by contract; the mask excludes missing columns, so pointers there are never
            // dereferenced.
            unsafe {
                let wide = out.wide.wrapping_add(r * out.wide_stride + c);
                let half = out.half.wrapping_add(r * out.half_stride + c).cast::<i16>();
                if out.add_wide {
                    x = _mm512_add_ps(x, _mm512_maskz_loadu_ps(mask, wide));
                }
                if out.add_half {
                    x = _mm512_add_ps(x, widened(_mm256_maskz_loadu_epi16(mask, half)));
                }
                if out.to_half {
                    _mm256_mask_storeu_epi16(
                        half,
                        mask,
                        transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(x)),
                    );
                } else {
                    _mm512_mask_storeu_ps(wide, mask, x);
                }
            }
        }
    }
}

/// Reinterprets the vector as bf16 pairs.
#[inline(always)]
fn pairs_of(v: __m512i) -> __m512bh {
    // SAFETY: both types are 64 bytes of plain data.
    unsafe { transmute(v) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn widened(v: __m256i) -> __m512 {
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(v)))
}
