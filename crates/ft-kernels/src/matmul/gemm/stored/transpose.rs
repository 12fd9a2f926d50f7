//! Widening with transposition: from lines with contiguous inner values to a panel with contiguous lines.

use super::half::Half;
use std::ops::Range;

/// Lines and inner values per square.
const SIDE: usize = 16;

/// Widens inner values `inner` of lines `lines`, each `k` values long, into `to`: value `p` of line `l`
/// goes to `p * lines + l`.
pub fn transpose(values: Half<'_>, (lines, k): (Range<usize>, usize), inner: Range<usize>, to: &mut [f32]) {
    let width = lines.len();
    assert!(lines.end * k <= values.bits.len() && inner.end <= k && to.len() == width * inner.len());
    for l0 in (0..width).step_by(SIDE) {
        let count = SIDE.min(width - l0);
        let from = &values.bits[(lines.start + l0) * k + inner.start..];
        #[cfg(target_arch = "x86_64")]
        if wide::is_here() {
            // SAFETY: the CPU supports the instructions; lengths of lines and panel are asserted above.
            unsafe {
                wide::lines((from.as_ptr(), values.format), (count, k), inner.len(), (&mut to[l0..], width))
            };
            continue;
        }
        for p0 in (0..inner.len()).step_by(SIDE) {
            let some = SIDE.min(inner.len() - p0);
            let mut square = [[0f32; SIDE]; SIDE];
            for (l, row) in square.iter_mut().enumerate().take(count) {
                Half { bits: &from[l * k..], format: values.format }.widen(p0, &mut row[..some]);
            }
            for p in 0..some {
                let to = &mut to[(p0 + p) * width + l0..][..count];
                to.iter_mut().zip(&square).for_each(|(t, row)| *t = row[p]);
            }
        }
    }
}

/// AVX-512: transposes squares in registers.
#[cfg(target_arch = "x86_64")]
mod wide {
    use super::super::half::Format;
    use super::SIDE;
    use crate::matmul::gemm::pairs::panels::{LANES, VALUES_AHEAD, ones, transposed};
    use std::arch::x86_64::{
        __m256i, _MM_HINT_T0, _mm_prefetch, _mm256_maskz_loadu_epi16, _mm512_castps_si512,
        _mm512_cvtepu16_epi32, _mm512_cvtph_ps, _mm512_mask_storeu_epi32, _mm512_setzero_si512,
        _mm512_slli_epi32,
    };

    const _: () = assert!(SIDE == LANES);

    pub fn is_here() -> bool {
        is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
    }

    /// Widens `inner` values of up to 16 lines (stride `k`) into columns of a panel.
    ///
    /// # Safety
    /// [`is_here`]; `from` points to `lines` lines; `to` has `inner` rows with stride `width`, each with
    /// room for `lines` values.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    pub unsafe fn lines(
        (from, format): (*const u16, Format),
        (lines, k): (usize, usize),
        inner: usize,
        (to, width): (&mut [f32], usize),
    ) {
        let kept = ones(lines);
        for p0 in (0..inner).step_by(SIDE) {
            let there = ones(inner - p0);
            let mut v = [_mm512_setzero_si512(); SIDE];
            for (l, v) in v.iter_mut().enumerate().take(lines) {
                _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(l * k + p0 + VALUES_AHEAD).cast());
                // SAFETY: in bounds by contract; the mask excludes values past `inner`.
                let bits: __m256i =
                    unsafe { _mm256_maskz_loadu_epi16(there, from.add(l * k + p0).cast::<i16>()) };
                *v = match format {
                    Format::Bf16 => _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(bits)),
                    Format::F16 => _mm512_castps_si512(_mm512_cvtph_ps(bits)),
                };
            }
            for (p, row) in transposed(v).into_iter().enumerate().take(inner - p0) {
                // SAFETY: in bounds by contract; the mask excludes missing lines.
                unsafe {
                    let to = to.as_mut_ptr().add((p0 + p) * width).cast::<i32>();
                    _mm512_mask_storeu_epi32(to, kept, row);
                }
            }
        }
    }
}
