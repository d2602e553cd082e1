//! Sixteen lanes on AVX-512: one register.
//!
//! Parts are read and written by the shortest register that holds them. A masked access touches the
//! cache lines of all its lanes, and what is read next to a masked write waits for it.

use std::arch::x86_64::*;

use super::{Job, Lanes, LANES};

/// Runs `job` with AVX-512F and AVX-512VL.
///
/// # Safety
/// The processor MUST have AVX-512F and AVX-512VL.
#[target_feature(enable = "avx512f,avx512vl")]
pub(super) unsafe fn run<J: Job>(job: J) -> J::Output {
    job.run::<Avx512Lanes>()
}

/// Lanes 0 to 15.
#[derive(Clone, Copy)]
pub(crate) struct Avx512Lanes(__m512);

/// Returns the mask of lanes `0..len`, for `len < 16`.
#[inline(always)]
fn mask(len: usize) -> __mmask16 {
    assert!(len < LANES, "a part has fewer than 16 values");
    (1 << len) - 1
}

impl Lanes for Avx512Lanes {
    #[inline(always)]
    fn splat(value: f32) -> Self {
        // SAFETY: lane code runs only inside `run`, on a processor that has AVX-512F.
        unsafe { Self(_mm512_set1_ps(value)) }
    }

    #[inline(always)]
    fn load(from: &[f32; LANES]) -> Self {
        // SAFETY: 16 values are readable there, no alignment needed; AVX-512F as above.
        unsafe { Self(_mm512_loadu_ps(from.as_ptr())) }
    }

    #[inline(always)]
    fn store(self, to: &mut [f32; LANES]) {
        // SAFETY: 16 values are writable there, no alignment needed; AVX-512F as above.
        unsafe { _mm512_storeu_ps(to.as_mut_ptr(), self.0) }
    }

    #[inline(always)]
    fn stream(self, to: &mut [f32; LANES]) {
        if !to.as_ptr().addr().is_multiple_of(super::LINE_BYTES) {
            return self.store(to);
        }
        // SAFETY: 16 values are writable there, aligned to a line; AVX-512F as above.
        unsafe { _mm512_stream_ps(to.as_mut_ptr(), self.0) }
    }

    #[inline(always)]
    fn load_part(from: &[f32]) -> Self {
        let (mask, from_ptr) = (mask(from.len()), from.as_ptr());
        // SAFETY: masked-off lanes are not accessed, and the mask covers `from.len()` lanes; lanes
        // behind a shorter register become 0; AVX-512F and VL as above.
        unsafe {
            Self(match from.len() {
                0..=4 => _mm512_zextps128_ps512(_mm_maskz_loadu_ps(mask as u8, from_ptr)),
                5..=8 => _mm512_zextps256_ps512(_mm256_maskz_loadu_ps(mask as u8, from_ptr)),
                _ => _mm512_maskz_loadu_ps(mask, from_ptr),
            })
        }
    }

    #[inline(always)]
    fn store_part(self, to: &mut [f32]) {
        let (mask, to_ptr) = (mask(to.len()), to.as_mut_ptr());
        // SAFETY: masked-off lanes are not accessed, and the mask covers `to.len()` lanes;
        // AVX-512F and VL as above.
        unsafe {
            match to.len() {
                0..=4 => _mm_mask_storeu_ps(to_ptr, mask as u8, _mm512_castps512_ps128(self.0)),
                5..=8 => _mm256_mask_storeu_ps(to_ptr, mask as u8, _mm512_castps512_ps256(self.0)),
                _ => _mm512_mask_storeu_ps(to_ptr, mask, self.0),
            }
        }
    }

    #[inline(always)]
    fn from_f32(from: &[u8; 4 * LANES]) -> Self {
        // SAFETY: 64 bytes are readable there, no alignment needed, and x86 is little-endian;
        // AVX-512F as above.
        unsafe { Self(_mm512_loadu_ps(from.as_ptr().cast())) }
    }

    #[inline(always)]
    fn from_bytes(from: &[u8; LANES]) -> Self {
        // SAFETY: 16 bytes are readable there, no alignment needed; AVX-512F as above.
        unsafe {
            let bytes = _mm_loadu_si128(from.as_ptr().cast());
            Self(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes)))
        }
    }

    #[inline(always)]
    fn from_f16(from: &[u8; 2 * LANES]) -> Self {
        // SAFETY: 32 bytes are readable there, no alignment needed; AVX-512F as above.
        unsafe { Self(_mm512_cvtph_ps(_mm256_loadu_si256(from.as_ptr().cast()))) }
    }

    #[inline(always)]
    fn from_bf16(from: &[u8; 2 * LANES]) -> Self {
        // SAFETY: 32 bytes are readable there, no alignment needed; AVX-512F as above.
        unsafe {
            let halves = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.as_ptr().cast()));
            Self(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(halves)))
        }
    }

    #[inline(always)]
    fn lookup(codes: &[u8; LANES], table: &[f32; LANES]) -> Self {
        // SAFETY: 16 bytes and 16 numbers are readable there; the permutation uses the low four
        // bits of a code, so it stays inside the table; AVX-512F as above.
        unsafe {
            let codes = _mm512_cvtepu8_epi32(_mm_loadu_si128(codes.as_ptr().cast()));
            Self(_mm512_permutexvar_ps(codes, _mm512_loadu_ps(table.as_ptr())))
        }
    }

    #[inline(always)]
    fn add(self, other: Self) -> Self {
        // SAFETY: lane code runs only inside `run`, on a processor that has AVX-512F.
        unsafe { Self(_mm512_add_ps(self.0, other.0)) }
    }

    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        // SAFETY: lane code runs only inside `run`, on a processor that has AVX-512F.
        unsafe { Self(_mm512_sub_ps(self.0, other.0)) }
    }

    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        // SAFETY: lane code runs only inside `run`, on a processor that has AVX-512F.
        unsafe { Self(_mm512_mul_ps(self.0, other.0)) }
    }

    #[inline(always)]
    fn div(self, other: Self) -> Self {
        // SAFETY: lane code runs only inside `run`, on a processor that has AVX-512F.
        unsafe { Self(_mm512_div_ps(self.0, other.0)) }
    }

    #[inline(always)]
    fn sqrt(self) -> Self {
        // SAFETY: lane code runs only inside `run`, on a processor that has AVX-512F.
        unsafe { Self(_mm512_sqrt_ps(self.0)) }
    }

    #[inline(always)]
    fn reduce_add(self) -> f32 {
        // SAFETY: lane code runs only inside `run`, on a processor that has AVX-512F.
        unsafe {
            let high = _mm512_extractf64x4_pd::<1>(_mm512_castps_pd(self.0));
            let high = _mm256_castpd_ps(high);
            super::avx2::reduce_eight(_mm256_add_ps(_mm512_castps512_ps256(self.0), high))
        }
    }
}
