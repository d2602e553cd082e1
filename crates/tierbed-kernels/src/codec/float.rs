//! Codecs of single numbers: f32, f16, bf16.

use half::{bf16, f16};

use super::decode::{chunk, padded, Decoder};
use crate::simd::{Lanes, LANES};

/// Largest number that half precision keeps.
pub(super) const F16_MAX: f32 = 65_504.0;

pub(super) fn encode_f32(row: &[f32], code: &mut [u8]) {
    for (to, value) in code.as_chunks_mut().0.iter_mut().zip(row) {
        *to = value.to_le_bytes();
    }
}

pub(super) fn encode_f16(row: &[f32], code: &mut [u8]) {
    for (to, &value) in code.as_chunks_mut().0.iter_mut().zip(row) {
        *to = f16::from_f32(value).to_le_bytes();
    }
}

pub(super) fn encode_bf16(row: &[f32], code: &mut [u8]) {
    for (to, &value) in code.as_chunks_mut().0.iter_mut().zip(row) {
        *to = bf16::from_f32(value).to_le_bytes();
    }
}

/// Decodes [`super::Codec::F32`].
#[derive(Clone, Copy)]
pub(super) struct F32;

impl Decoder for F32 {
    type Head = ();

    #[inline(always)]
    fn head(self, _code: &[u8]) {}

    #[inline(always)]
    fn full<L: Lanes>(self, (): (), code: &[u8], at: usize) -> L {
        L::from_f32(chunk(code, 4 * at))
    }

    #[inline(always)]
    fn part<L: Lanes>(self, (): (), code: &[u8], at: usize, len: usize) -> L {
        L::from_f32(&padded::<{ 4 * LANES }>(code, 4 * at, 4 * len))
    }
}

/// Decodes [`super::Codec::F16`].
#[derive(Clone, Copy)]
pub(super) struct F16;

impl Decoder for F16 {
    type Head = ();

    #[inline(always)]
    fn head(self, _code: &[u8]) {}

    #[inline(always)]
    fn full<L: Lanes>(self, (): (), code: &[u8], at: usize) -> L {
        L::from_f16(chunk(code, 2 * at))
    }

    #[inline(always)]
    fn part<L: Lanes>(self, (): (), code: &[u8], at: usize, len: usize) -> L {
        L::from_f16(&padded(code, 2 * at, 2 * len))
    }
}

/// Decodes [`super::Codec::Bf16`].
#[derive(Clone, Copy)]
pub(super) struct Bf16;

impl Decoder for Bf16 {
    type Head = ();

    #[inline(always)]
    fn head(self, _code: &[u8]) {}

    #[inline(always)]
    fn full<L: Lanes>(self, (): (), code: &[u8], at: usize) -> L {
        L::from_bf16(chunk(code, 2 * at))
    }

    #[inline(always)]
    fn part<L: Lanes>(self, (): (), code: &[u8], at: usize, len: usize) -> L {
        L::from_bf16(&padded(code, 2 * at, 2 * len))
    }
}
