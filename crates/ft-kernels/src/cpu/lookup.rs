//! Vectorized lookup of 4-bit codes in a table of sixteen f32, by register permutation if the CPU
//! supports it. Table values are copied, so results do not depend on the CPU.

/// Looks up the codes of `packed`, high half of each byte first, in whole vector steps. Returns the
/// number of values written.
#[cfg(target_arch = "x86_64")]
pub fn f32s(packed: &[u8], values: &[f32; 16], out: &mut [f32]) -> usize {
    if is_x86_feature_detected!("avx512f") {
        // SAFETY: the CPU feature was detected.
        unsafe { x86::by_sixteen(packed, values, out) }
    } else if is_x86_feature_detected!("avx2") {
        // SAFETY: as above.
        unsafe { x86::by_eight(packed, values, out) }
    } else {
        0
    }
}

/// Returns 0: no vectorized lookup for this architecture.
#[cfg(not(target_arch = "x86_64"))]
pub fn f32s(_packed: &[u8], _values: &[f32; 16], _out: &mut [f32]) -> usize {
    0
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    #[target_feature(enable = "avx512f")]
    pub fn by_sixteen(packed: &[u8], values: &[f32; 16], out: &mut [f32]) -> usize {
        // SAFETY: reads 16 of 16 values.
        let table = unsafe { _mm512_loadu_ps(values.as_ptr()) };
        let shift = _mm512_setr_epi32(4, 0, 4, 0, 4, 0, 4, 0, 4, 0, 4, 0, 4, 0, 4, 0);
        let mut done = 0;
        for (o, p) in out.as_chunks_mut::<16>().0.iter_mut().zip(packed.as_chunks::<8>().0) {
            // duplicate each byte and shift the wanted half down; the permutation uses the low four bits
            let bytes = _mm_cvtsi64_si128(i64::from_le_bytes(*p));
            let twice = _mm512_cvtepu8_epi32(_mm_unpacklo_epi8(bytes, bytes));
            let v = _mm512_permutexvar_ps(_mm512_srlv_epi32(twice, shift), table);
            // SAFETY: writes 16 of 16 values.
            unsafe { _mm512_storeu_ps(o.as_mut_ptr(), v) };
            done += 16;
        }
        done
    }

    #[target_feature(enable = "avx2")]
    pub fn by_eight(packed: &[u8], values: &[f32; 16], out: &mut [f32]) -> usize {
        // SAFETY: reads two halves of 16 values.
        let (low, high) =
            unsafe { (_mm256_loadu_ps(values.as_ptr()), _mm256_loadu_ps(values.as_ptr().add(8))) };
        let shift = _mm256_setr_epi32(4, 0, 4, 0, 4, 0, 4, 0);
        let mut done = 0;
        for (o, p) in out.as_chunks_mut::<8>().0.iter_mut().zip(packed.as_chunks::<4>().0) {
            let bytes = _mm_cvtsi32_si128(i32::from_le_bytes(*p));
            let twice = _mm256_cvtepu8_epi32(_mm_unpacklo_epi8(bytes, bytes));
            let code = _mm256_srlv_epi32(twice, shift);
            // the permutation uses three bits; the fourth, moved to the sign bit, selects the half of the
            // table
            let upper = _mm256_castsi256_ps(_mm256_slli_epi32(code, 28));
            let (a, b) = (_mm256_permutevar8x32_ps(low, code), _mm256_permutevar8x32_ps(high, code));
            // SAFETY: writes 8 of 8 values.
            unsafe { _mm256_storeu_ps(o.as_mut_ptr(), _mm256_blendv_ps(a, b, upper)) };
            done += 8;
        }
        done
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;

    type LookUp<'a> = &'a dyn Fn(&[u8], &[f32; 16], &mut [f32]) -> usize;

    #[test]
    fn every_code_is_looked_up_at_every_length() {
        let values: [f32; 16] = std::array::from_fn(|i| (i as f32 - 7.3) / 8.7);
        let packed: Vec<u8> = (0..=255).chain((0..=255).rev()).collect();
        let want: Vec<f32> =
            packed.iter().flat_map(|p| [values[(p >> 4) as usize], values[(p & 15) as usize]]).collect();
        for n in [0, 1, 7, 8, 15, 16, 17, 100, 1024] {
            let check = |f: LookUp<'_>, step: usize| {
                let mut out = vec![f32::NAN; n];
                let done = f(&packed, &values, &mut out);
                assert!(step == 0 || done == n / step * step, "{done} of {n}");
                assert_eq!(out[..done], want[..done]);
                assert!(out[done..].iter().all(|x| x.is_nan()));
            };
            check(&f32s, 0);
            if is_x86_feature_detected!("avx2") {
                // SAFETY: the CPU feature was detected.
                check(&|p, v, o| unsafe { x86::by_eight(p, v, o) }, 8);
            }
            if is_x86_feature_detected!("avx512f") {
                // SAFETY: the CPU feature was detected.
                check(&|p, v, o| unsafe { x86::by_sixteen(p, v, o) }, 16);
            }
        }
    }
}
