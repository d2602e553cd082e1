//! Sixteen lanes on AVX2: two registers of eight.

use std::arch::x86_64::*;

use super::{Job, Lanes, LANES};

/// Runs `job` with AVX2 and half-precision conversion.
///
/// # Safety
/// The processor MUST have AVX2 and F16C.
#[target_feature(enable = "avx2,f16c")]
pub(super) unsafe fn run<J: Job>(job: J) -> J::Output {
    job.run::<Avx2Lanes>()
}

/// Lanes 0 to 7 and 8 to 15.
#[derive(Clone, Copy)]
pub(crate) struct Avx2Lanes(__m256, __m256);

/// Eight words of -1, then eight of 0: read from `8 - len` for a mask of the first `len` lanes.
static MASK_WORDS: [i32; LANES] = [-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0];

/// Returns the masks of lanes `0..len` in the low and the high register, for `len < 16`.
#[inline(always)]
fn masks(len: usize) -> (__m256i, __m256i) {
    assert!(len < LANES, "a part has fewer than 16 values");
    let (low, high) = (len.min(8), len.saturating_sub(8));
    // SAFETY: `8 - low` and `8 - high` are 0 to 8, so eight words from there are inside the
    // table of 16; AVX2 as for all lane code.
    unsafe {
        let words = MASK_WORDS.as_ptr();
        (
            _mm256_loadu_si256(words.add(8 - low).cast()),
            _mm256_loadu_si256(words.add(8 - high).cast()),
        )
    }
}

/// Applies one instruction to both halves.
macro_rules! both {
    ($op:ident, $a:expr, $b:expr) => {{
        // SAFETY: lane code runs only inside `run`, on a processor that has AVX2.
        unsafe { Avx2Lanes($op($a.0, $b.0), $op($a.1, $b.1)) }
    }};
}

impl Lanes for Avx2Lanes {
    #[inline(always)]
    fn splat(value: f32) -> Self {
        // SAFETY: lane code runs only inside `run`, on a processor that has AVX2.
        let lanes = unsafe { _mm256_set1_ps(value) };
        Self(lanes, lanes)
    }

    #[inline(always)]
    fn load(from: &[f32; LANES]) -> Self {
        let from = from.as_ptr();
        // SAFETY: 16 values are readable there, no alignment needed; AVX2 as above.
        unsafe { Self(_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))) }
    }

    #[inline(always)]
    fn store(self, to: &mut [f32; LANES]) {
        let to = to.as_mut_ptr();
        // SAFETY: 16 values are writable there, no alignment needed; AVX2 as above.
        unsafe {
            _mm256_storeu_ps(to, self.0);
            _mm256_storeu_ps(to.add(8), self.1);
        }
    }

    #[inline(always)]
    fn stream(self, to: &mut [f32; LANES]) {
        if !to.as_ptr().addr().is_multiple_of(super::LINE_BYTES) {
            return self.store(to);
        }
        let to = to.as_mut_ptr();
        // SAFETY: 16 values are writable there, aligned to a line; AVX2 as above.
        unsafe {
            _mm256_stream_ps(to, self.0);
            _mm256_stream_ps(to.add(8), self.1);
        }
    }

    #[inline(always)]
    fn load_part(from: &[f32]) -> Self {
        let (low, high) = masks(from.len());
        let from = from.as_ptr();
        // SAFETY: masked-off lanes are not accessed, and the mask covers `from.len()` lanes; the
        // address of the high half may lie outside the slice, so it is made without `add`.
        unsafe {
            Self(_mm256_maskload_ps(from, low), _mm256_maskload_ps(from.wrapping_add(8), high))
        }
    }

    #[inline(always)]
    fn store_part(self, to: &mut [f32]) {
        let (low, high) = masks(to.len());
        let to = to.as_mut_ptr();
        // SAFETY: as in `load_part`, for writes.
        unsafe {
            _mm256_maskstore_ps(to, low, self.0);
            _mm256_maskstore_ps(to.wrapping_add(8), high, self.1);
        }
    }

    #[inline(always)]
    fn from_f32(from: &[u8; 4 * LANES]) -> Self {
        let from = from.as_ptr();
        // SAFETY: 64 bytes are readable there, no alignment needed, and x86 is little-endian;
        // AVX2 as above.
        unsafe {
            let high = from.add(2 * LANES).cast();
            Self(_mm256_loadu_ps(from.cast()), _mm256_loadu_ps(high))
        }
    }

    #[inline(always)]
    fn from_bytes(from: &[u8; LANES]) -> Self {
        // SAFETY: 16 bytes are readable there, no alignment needed; AVX2 as above.
        unsafe {
            let bytes = _mm_loadu_si128(from.as_ptr().cast());
            Self(
                _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)),
                _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128::<8>(bytes))),
            )
        }
    }

    #[inline(always)]
    fn from_f16(from: &[u8; 2 * LANES]) -> Self {
        let from = from.as_ptr();
        // SAFETY: 32 bytes are readable there, no alignment needed; AVX2 and F16C as above.
        unsafe {
            Self(
                _mm256_cvtph_ps(_mm_loadu_si128(from.cast())),
                _mm256_cvtph_ps(_mm_loadu_si128(from.add(LANES).cast())),
            )
        }
    }

    #[inline(always)]
    fn from_bf16(from: &[u8; 2 * LANES]) -> Self {
        let from = from.as_ptr();
        // SAFETY: 32 bytes are readable there, no alignment needed; AVX2 as above.
        unsafe {
            let low = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
            let high = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.add(LANES).cast()));
            Self(
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)),
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high)),
            )
        }
    }

    #[inline(always)]
    fn lookup(codes: &[u8; LANES], table: &[f32; LANES]) -> Self {
        // SAFETY: 16 bytes and 16 numbers are readable there; each permutation uses the low three
        // bits of a code, so it stays inside its half of the table; AVX2 as above.
        unsafe {
            let bytes = _mm_loadu_si128(codes.as_ptr().cast());
            let low = _mm256_loadu_ps(table.as_ptr());
            let high = _mm256_loadu_ps(table.as_ptr().add(8));
            let eight = |codes: __m256i| {
                // Bit 3 of the code, moved to the sign, chooses the half.
                let is_high = _mm256_castsi256_ps(_mm256_slli_epi32::<28>(codes));
                let from_low = _mm256_permutevar8x32_ps(low, codes);
                let from_high = _mm256_permutevar8x32_ps(high, codes);
                _mm256_blendv_ps(from_low, from_high, is_high)
            };
            Self(
                eight(_mm256_cvtepu8_epi32(bytes)),
                eight(_mm256_cvtepu8_epi32(_mm_srli_si128::<8>(bytes))),
            )
        }
    }

    #[inline(always)]
    fn add(self, other: Self) -> Self {
        both!(_mm256_add_ps, self, other)
    }

    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        both!(_mm256_sub_ps, self, other)
    }

    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        both!(_mm256_mul_ps, self, other)
    }

    #[inline(always)]
    fn div(self, other: Self) -> Self {
        both!(_mm256_div_ps, self, other)
    }

    #[inline(always)]
    fn sqrt(self) -> Self {
        // SAFETY: lane code runs only inside `run`, on a processor that has AVX2.
        unsafe { Self(_mm256_sqrt_ps(self.0), _mm256_sqrt_ps(self.1)) }
    }

    #[inline(always)]
    fn reduce_add(self) -> f32 {
        // SAFETY: lane code runs only inside `run`, on a processor that has AVX2.
        unsafe { reduce_eight(_mm256_add_ps(self.0, self.1)) }
    }
}

/// Adds eight lanes by the tree of [`Lanes::reduce_add`]: 4 apart, then 2, then 1.
///
/// # Safety
/// The processor MUST have AVX.
#[inline(always)]
pub(super) unsafe fn reduce_eight(sums: __m256) -> f32 {
    // SAFETY: the caller sees to AVX.
    unsafe {
        let four = _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps::<1>(sums));
        let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
    }
}
