//! The packed format of products of bf16, and what packs and multiplies it: AVX-512 BF16.
//!
//! A panel is some lines (rows of the left operand, columns of the right one) of some inner values, which lie two by two:
//! word `p * width + l` is values `2 p` (its lower half) and `2 p + 1` of line `l`; what there is none of is zero. So the
//! lines of a pair are one vector, and a pair of one line is one word that fills a vector:
//!
//! ```text
//! sums[row][column] += pair of row * pair of column      vdpbf16ps, 16 columns at a time, in f32
//! ```
//!
//! The instruction takes numbers below the smallest normal one for zero and rounds the sum of both products into the sum
//! as it is, to the nearest.

use crate::gemm::cpu::Mat;
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

/// Rows that are multiplied at once: with two vectors of columns 24 sums, 2 vectors and a filled one are in registers.
pub const ROWS: usize = 12;
/// Columns that are multiplied at once; of a product's last ones half as many where these are enough.
pub const COLUMNS: usize = 2 * LANES;
/// Columns of a vector.
pub const LANES: usize = 16;
/// How far ahead memory is asked for, where inner values are apart and where they are side by side: a weight comes from
/// memory, and the processor does not see by itself where a panel goes on.
const ROWS_AHEAD: usize = 16;
pub const VALUES_AHEAD: usize = 128;

/// Whether this processor has the instructions.
pub fn are_here() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512bf16")
}

/// How lines are cut into panels.
#[derive(Clone, Copy)]
pub struct Shape {
    /// Lines of a panel.
    most: usize,
    /// What the lines of the last one are a multiple of.
    multiple: usize,
}

impl Shape {
    /// Of rows of the left operand.
    pub const LEFT: Self = Self { most: ROWS, multiple: 1 };
    /// Of columns of the right one.
    pub const RIGHT: Self = Self { most: COLUMNS, multiple: LANES };

    /// The first line of each panel of so many, and its width.
    pub fn panels(self, count: usize) -> impl Iterator<Item = (usize, usize)> {
        let width = move |c: usize| (count - c).next_multiple_of(self.multiple).min(self.most);
        (0..count).step_by(self.most).map(move |c| (c, width(c)))
    }
}

/// Columns of the panels that so many columns take.
pub fn width(columns: usize) -> usize {
    columns.next_multiple_of(LANES)
}

/// Packs the inner values `own` of some rows of `m` into panels, one after the other.
///
/// # Safety
/// [`are_here`]; `out` points to as many words of the caller's as `own.len() / 2` (rounded up) times the panels' widths;
/// `rows` and `own` are inside `m`.
pub unsafe fn pack(out: *mut u32, shape: Shape, m: Mat<'_, bf16>, rows: Range<usize>, own: Range<usize>) {
    assert!(rows.end <= m.rows && own.end <= m.cols, "a panel outside of its matrix");
    let (line, step, k) = (m.rs, m.cs, own.len());
    let pairs = k.div_ceil(2);
    // SAFETY: the first value is inside, or none is read.
    let from = unsafe { m.data.as_ptr().cast::<u16>().add(rows.start * line + own.start * step) };
    for (first, width) in shape.panels(rows.len()) {
        let lines = width.min(rows.len() - first);
        // SAFETY: the caller's; Mat::new keeps all values of the matrix inside its slice.
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

/// The lowest bits.
pub fn ones(n: usize) -> u16 {
    (u32::MAX >> (32 - n.min(16) as u32).min(31)) as u16 * u16::from(n > 0)
}

/// Of lines with any strides.
unsafe fn one_by_one(
    out: *mut u32,
    width: usize,
    from: *const u16,
    (lines, line): (usize, usize),
    (k, step): (usize, usize),
) {
    let value = |l: usize, k_: usize| match l < lines && k_ < k {
        // SAFETY: the caller's: value `k_` of line `l` is there.
        true => u32::from(unsafe { *from.add(l * line + k_ * step) }),
        false => 0,
    };
    for p in 0..k.div_ceil(2) {
        for l in 0..width {
            // SAFETY: the caller's: the panel has so many words.
            unsafe { *out.add(p * width + l) = value(l, 2 * p) | value(l, 2 * p + 1) << 16 };
        }
    }
}

/// Of lines whose inner values are side by side: 16 pairs of 16 lines at a time.
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
                // SAFETY: the caller's; the mask leaves out what is beyond the line.
                *v = unsafe {
                    _mm512_maskz_loadu_epi16(mask, from.add((l0 + r) * line + 2 * p0).cast::<i16>())
                };
            }
            let t = transposed(v);
            for (p, t) in t.iter().enumerate().take(pairs - p0) {
                // SAFETY: the caller's; the mask leaves out what is beyond the panel's width.
                unsafe {
                    _mm512_mask_storeu_epi32(out.add((p0 + p) * width + l0).cast::<i32>(), kept, *t);
                }
            }
        }
    }
}

/// A matrix of 16 x 16 words, transposed.
#[inline]
#[target_feature(enable = "avx512f")]
pub fn transposed(v: [__m512i; LANES]) -> [__m512i; LANES] {
    let mut a = v;
    // words, then pairs of words, within each quarter of a vector
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
    // then the quarters: b[4 g + c] has columns c, 4 + c, 8 + c, 12 + c of rows 4 g and on
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

/// Of lines that are side by side, their inner values `step` apart. (All panels of a pair together would read longer rows, and
/// write to places that share lines of the cache: that is slower.)
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn interleave(out: *mut u32, width: usize, from: *const u16, lines: usize, step: usize, k: usize) {
    for p in 0..k.div_ceil(2) {
        for l0 in (0..width).step_by(LANES) {
            let (there, kept) = (ones(lines.saturating_sub(l0)), ones(width - l0));
            let value = |k_: usize| match k_ < k && there != 0 {
                // SAFETY: the caller's; the mask leaves out what is beyond the lines.
                true => _mm512_cvtepu16_epi32(unsafe {
                    _mm256_maskz_loadu_epi16(there, from.add(k_ * step + l0).cast::<i16>())
                }),
                false => _mm512_setzero_si512(),
            };
            for k_ in 2 * p + ROWS_AHEAD..2 * p + ROWS_AHEAD + 2 {
                _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(k_ * step + l0).cast());
            }
            let word = _mm512_or_si512(value(2 * p), _mm512_slli_epi32::<16>(value(2 * p + 1)));
            // SAFETY: the caller's; the mask leaves out what is beyond the panel's width.
            unsafe { _mm512_mask_storeu_epi32(out.add(p * width + l0).cast::<i32>(), kept, word) };
        }
    }
}

/// What becomes of a tile of sums: `sums = alpha sums`, with what `wide` and `half` have added, and where they go.
#[derive(Clone, Copy)]
pub struct Out {
    /// f32, `wide_stride` from row to row.
    pub wide: *mut f32,
    /// Values from row to row.
    pub wide_stride: usize,
    /// bf16, `half_stride` from row to row.
    pub half: *mut bf16,
    /// Values from row to row.
    pub half_stride: usize,
    /// Factor on the sums.
    pub alpha: f32,
    /// Whether what is in `wide` is added.
    pub add_wide: bool,
    /// Whether what is in `half` is added.
    pub add_half: bool,
    /// Whether the result goes to `half`, rounded once; else it goes to `wide`.
    pub to_half: bool,
}

/// Some rows of the left operand.
#[derive(Clone, Copy)]
pub struct Left {
    /// The first pair of the first row.
    pub at: *const u32,
    /// How many rows.
    pub rows: usize,
    /// Values from row to row where they are as the matrix has them; `None` of a panel.
    pub stride: Option<usize>,
}

/// The product of `rows` rows and a panel of `columns` columns, `width` wide, of so many pairs.
///
/// # Safety
/// [`are_here`]; the rows have `pairs` pairs each, and panels `pairs` times their widths of words; what `out` says of `rows` x
/// `columns` values is the caller's to read and write.
pub unsafe fn multiply(
    pairs: usize,
    Left { at, rows, stride }: Left,
    (b, width, columns): (*const u32, usize, usize),
    out: &Out,
) {
    macro_rules! rows {
        ($($m:literal)*) => {
            // SAFETY: the caller's.
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
            // SAFETY: the caller's: the panel of columns has V vectors a pair.
            *right = unsafe { _mm512_loadu_si512(b.add(LANES * v).cast()) };
        }
        for (r, sums) in sums.iter_mut().enumerate() {
            // SAFETY: the caller's: a panel of rows has M words a pair, other rows are `stride` values apart.
            let left = unsafe {
                match PANEL {
                    true => *a.add(r),
                    false => a.cast::<u16>().add(r * stride).cast::<u32>().read_unaligned(),
                }
            };
            let left = _mm512_set1_epi32(left.cast_signed());
            for (sum, right) in sums.iter_mut().zip(right) {
                *sum = _mm512_dpbf16_ps(*sum, pairs_of(left), pairs_of(right));
            }
        }
        // SAFETY: at most one past the ends.
        (a, b) = unsafe { (a.add(if PANEL { M } else { 1 }), b.add(LANES * V)) };
    }
    let alpha = _mm512_set1_ps(out.alpha);
    for (r, sums) in sums.iter().enumerate() {
        for (v, sum) in sums.iter().enumerate() {
            let c = LANES * v;
            let mask = ones(columns.saturating_sub(c));
            let mut x = _mm512_mul_ps(alpha, *sum);
            // SAFETY: the caller's; the mask leaves out what is beyond the columns, where a pointer may be anything.
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

/// The same bits, as pairs.
#[inline(always)]
fn pairs_of(v: __m512i) -> __m512bh {
    // SAFETY: both are 64 bytes without any meaning of their own.
    unsafe { transmute(v) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn widened(v: __m256i) -> __m512 {
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(v)))
}
