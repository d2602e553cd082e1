//! EVStore's fixed-range codecs, as its released code has them: for reproduction.
//!
//! 16 bits: 65,001 steps over -0.65 to 0.65; beyond, steps of 0.02 up to 0.99 whose last bit is the
//! sign. 8 bits: 254 steps over -1 to 1. 4 bits: 15 levels, most of them far from small weights.
//! The arithmetic, widths included, is that of the release: a table coded here errs as theirs does.
//!
//! Source: EVStore §4.3 and its artefact's number format.

#![expect(clippy::indexing_slicing, reason = "lengths are checked by the caller")]

use super::decode::{chunk, padded, Decoder};
use crate::simd::{Lanes, LANES};

/// Half the fine range of 16 bits.
const FINE: f64 = 0.65;
/// The last code of the fine range.
const FINE_CODES: u16 = 65_000;
/// Largest magnitude that 16 bits keep.
const COARSE_MAX: f64 = 0.99;

/// Values of four bits, by code.
const LEVELS: [f32; 16] = [
    1.0,
    0.8,
    0.6,
    0.4,
    0.0625,
    0.003_906_25,
    0.000_015_3,
    0.0,
    -0.000_015_3,
    -0.003_906_25,
    -0.0625,
    -0.4,
    -0.6,
    -0.8,
    -1.0,
    0.0,
];
/// From which magnitude on each of the first seven levels is taken (above, not at).
const THRESHOLDS: [f32; 7] = [0.8, 0.6, 0.4, 0.25, 0.015, 0.000_25, 0.0];

pub(super) fn encode16(row: &[f32], code: &mut [u8]) {
    for (to, &value) in code.as_chunks_mut().0.iter_mut().zip(row) {
        *to = code16(f64::from(value)).to_le_bytes();
    }
}

fn code16(value: f64) -> u16 {
    let magnitude = value.abs().min(COARSE_MAX);
    if magnitude <= FINE {
        return ((value + FINE) / (2.0 * FINE) * f64::from(FINE_CODES)) as u16;
    }
    let steps = (100.0 * (magnitude - FINE)) as u16;
    let is_negative = u16::from(value < 0.0);
    // Even is positive, odd is negative; 65,000 itself belongs to the fine range.
    let code = FINE_CODES + (steps & !1) + is_negative;
    if code == FINE_CODES {
        code + 2
    } else {
        code
    }
}

fn value16(code: u16) -> f32 {
    if code <= FINE_CODES {
        return (f64::from(code) * 0.000_02 - FINE) as f32;
    }
    let beyond = f32::from(code - FINE_CODES) / 100.0;
    let magnitude = FINE + f64::from(beyond);
    (if code % 2 == 1 { -magnitude } else { magnitude }) as f32
}

pub(super) fn encode8(row: &[f32], code: &mut [u8]) {
    for (to, &value) in code.iter_mut().zip(row) {
        *to = ((value.clamp(-1.0, 1.0) + 1.0) / 2.0 * 254.0).round() as u8;
    }
}

pub(super) fn encode4(row: &[f32], code: &mut [u8]) {
    code.fill(0);
    for (i, &value) in row.iter().enumerate() {
        // The first of a pair is the high half.
        code[i / 2] |= code4(value) << if i % 2 == 0 { 4 } else { 0 };
    }
}

fn code4(value: f32) -> u8 {
    let level = THRESHOLDS.iter().position(|&least| value.abs() > least).unwrap_or(7) as u8;
    if value < 0.0 {
        14 - level
    } else {
        level
    }
}

/// Decodes [`super::Codec::Evstore16`].
#[derive(Clone, Copy)]
pub(super) struct Evstore16;

impl Decoder for Evstore16 {
    type Head = ();

    #[inline(always)]
    fn head(self, _code: &[u8]) {}

    #[inline(always)]
    fn full<L: Lanes>(self, (): (), code: &[u8], at: usize) -> L {
        let bytes: &[u8; 2 * LANES] = chunk(code, 2 * at);
        lanes16(bytes)
    }

    #[inline(always)]
    fn part<L: Lanes>(self, (): (), code: &[u8], at: usize, len: usize) -> L {
        lanes16(&padded(code, 2 * at, 2 * len))
    }
}

#[inline(always)]
fn lanes16<L: Lanes>(bytes: &[u8; 2 * LANES]) -> L {
    let mut values = [0.0; LANES];
    for (value, from) in values.iter_mut().zip(bytes.as_chunks().0) {
        *value = value16(u16::from_le_bytes(*from));
    }
    L::load(&values)
}

/// Decodes [`super::Codec::Evstore8`].
#[derive(Clone, Copy)]
pub(super) struct Evstore8;

impl Decoder for Evstore8 {
    type Head = ();

    #[inline(always)]
    fn head(self, _code: &[u8]) {}

    #[inline(always)]
    fn full<L: Lanes>(self, (): (), code: &[u8], at: usize) -> L {
        lanes8(chunk(code, at))
    }

    #[inline(always)]
    fn part<L: Lanes>(self, (): (), code: &[u8], at: usize, len: usize) -> L {
        lanes8(&padded(code, at, len))
    }
}

#[inline(always)]
fn lanes8<L: Lanes>(codes: &[u8; LANES]) -> L {
    L::from_bytes(codes).div(L::splat(254.0)).mul(L::splat(2.0)).sub(L::splat(1.0))
}

/// Decodes [`super::Codec::Evstore4`].
#[derive(Clone, Copy)]
pub(super) struct Evstore4;

impl Decoder for Evstore4 {
    type Head = ();

    #[inline(always)]
    fn head(self, _code: &[u8]) {}

    #[inline(always)]
    fn full<L: Lanes>(self, (): (), code: &[u8], at: usize) -> L {
        lanes4(code, at, LANES)
    }

    #[inline(always)]
    fn part<L: Lanes>(self, (): (), code: &[u8], at: usize, len: usize) -> L {
        lanes4(code, at, len)
    }
}

#[inline(always)]
fn lanes4<L: Lanes>(code: &[u8], at: usize, len: usize) -> L {
    let bytes = &code[at / 2..][..len.div_ceil(2)];
    let mut nibbles = [0; LANES];
    for (pair, &byte) in nibbles.as_chunks_mut().0.iter_mut().zip(bytes) {
        *pair = [byte >> 4, byte & 15];
    }
    L::lookup(&nibbles, &LEVELS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sixteen_bits_are_fine_within_and_coarse_beyond() {
        for value in [-0.65, -0.3, 0.0, 0.001, 0.6499] {
            assert!((f64::from(value16(code16(value))) - value).abs() <= 2.1e-5, "{value}");
        }
        for value in [-0.98, -0.7, 0.7, 0.9] {
            assert!((f64::from(value16(code16(value))) - value).abs() <= 0.0201, "{value}");
        }
        assert!(value16(code16(-5.0)) < -0.96);
    }

    #[test]
    fn four_bits_are_the_released_levels() {
        let values = [1.0, 0.7, 0.26, 0.02, 0.001, 0.0001, 0.0, -0.0001, -0.02, -0.9];
        let expected =
            [1.0, 0.8, 0.4, 0.0625, 0.003_906_25, 0.000_015_3, 0.0, -0.000_015_3, -0.0625, -1.0];
        for (value, level) in values.into_iter().zip(expected) {
            assert_eq!(LEVELS[usize::from(code4(value))], level, "{value}");
        }
    }
}
