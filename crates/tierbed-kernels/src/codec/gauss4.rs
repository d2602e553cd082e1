//! Four-bit codec: 16 levels that err least on normal numbers, times a scale per row.

#![expect(clippy::indexing_slicing, reason = "lengths are checked by the caller")]

use half::bf16;

use super::decode::{chunk, Decoder};
use super::int8::from_bf16;
use super::nibbles;
use crate::simd::{Lanes, LANES};

/// Bytes of the scale.
pub(super) const HEAD_BYTES: usize = 2;

/// The positive half of the levels; the others are their negatives.
///
/// Source: J. Max, "Quantizing for Minimum Distortion", 1960, table I, N = 16.
const POSITIVE: [f32; 8] = [0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733];

/// Levels of codes 0 to 15, rising.
const LEVELS: [f32; LANES] = {
    let mut levels = [0.0; LANES];
    let mut i = 0;
    while i < 8 {
        levels[8 + i] = POSITIVE[i];
        levels[7 - i] = -POSITIVE[i];
        i += 1;
    }
    levels
};

/// Rounds of choosing codes for a scale and fitting the scale to the codes.
const ROUNDS: usize = 3;

/// Returns the code whose level is nearest to `value / scale`.
fn nearest(value: f32, scale: f32) -> u8 {
    let target = if scale > 0.0 { value / scale } else { 0.0 };
    let is_below = |pair: &[f32]| (pair[0] + pair[1]) / 2.0 < target;
    LEVELS.windows(2).filter(|pair| is_below(pair)).count() as u8
}

/// Returns the scale as it can be kept.
fn rounded(scale: f64) -> f32 {
    bf16::from_f64(scale.max(0.0)).to_f32()
}

pub(super) fn encode(row: &[f32], code: &mut [u8]) {
    let squares: f64 = row.iter().map(|&value| f64::from(value) * f64::from(value)).sum();
    let mut scale = rounded((squares / row.len() as f64).sqrt());
    for _ in 0..ROUNDS {
        let (mut products, mut level_squares) = (0.0, 0.0);
        for &value in row {
            let level = f64::from(LEVELS[usize::from(nearest(value, scale))]);
            products += level * f64::from(value);
            level_squares += level * level;
        }
        scale = rounded(products / level_squares);
    }
    code[..HEAD_BYTES].copy_from_slice(&bf16::from_f32(scale).to_le_bytes());
    let codes = row.iter().map(|&value| nearest(value, scale));
    nibbles::pack(codes, row.len(), &mut code[HEAD_BYTES..]);
}

/// Decodes [`super::Codec::Gauss4`].
#[derive(Clone, Copy)]
pub(super) struct Gauss4;

impl Decoder for Gauss4 {
    type Head = f32;

    #[inline(always)]
    fn head(self, code: &[u8]) -> f32 {
        let &[low, high] = chunk(code, 0);
        from_bf16(low, high)
    }

    #[inline(always)]
    fn full<L: Lanes>(self, scale: f32, code: &[u8], at: usize) -> L {
        L::lookup(&nibbles::full(&code[HEAD_BYTES..], at), &LEVELS).mul(L::splat(scale))
    }

    #[inline(always)]
    fn part<L: Lanes>(self, scale: f32, code: &[u8], at: usize, len: usize) -> L {
        L::lookup(&nibbles::part(&code[HEAD_BYTES..], at, len), &LEVELS).mul(L::splat(scale))
    }
}
