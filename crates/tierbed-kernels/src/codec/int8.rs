//! Eight-bit codec between the least and the greatest number of a row.

#![expect(clippy::indexing_slicing, reason = "lengths are checked by the caller")]

use half::bf16;

use super::decode::{chunk, padded, Decoder};
use crate::simd::{Lanes, LANES};

/// Bytes of scale and bias.
pub(super) const HEAD_BYTES: usize = 4;
/// Steps between the least and the greatest code.
const STEPS: f32 = 255.0;

/// What a code means: `value = code * scale + bias`.
#[derive(Clone, Copy)]
pub(super) struct Affine {
    pub(super) scale: f32,
    pub(super) bias: f32,
}

impl Affine {
    /// Reads scale and bias.
    #[inline(always)]
    pub(super) fn read(code: &[u8]) -> Self {
        let &[s0, s1, b0, b1] = chunk(code, 0);
        Self { scale: from_bf16(s0, s1), bias: from_bf16(b0, b1) }
    }

    /// Writes scale and bias, which are bf16 already.
    pub(super) fn write(self, code: &mut [u8]) {
        code[..2].copy_from_slice(&bf16::from_f32(self.scale).to_le_bytes());
        code[2..4].copy_from_slice(&bf16::from_f32(self.bias).to_le_bytes());
    }

    /// Returns the code, 0 to `steps`, whose value is nearest to `value`.
    pub(super) fn nearest(self, value: f32, steps: f32) -> u8 {
        if self.scale <= 0.0 {
            return 0;
        }
        // A float-to-integer cast saturates; the clamp makes it exact.
        ((value - self.bias) / self.scale).round_ties_even().clamp(0.0, steps) as u8
    }

    /// Returns the value of `code`.
    pub(super) fn value(self, code: u8) -> f32 {
        f32::from(code) * self.scale + self.bias
    }

    /// Returns the values of 16 codes.
    #[inline(always)]
    pub(super) fn lanes<L: Lanes>(self, codes: &[u8; LANES]) -> L {
        L::from_bytes(codes).mul(L::splat(self.scale)).add(L::splat(self.bias))
    }
}

/// Returns the bf16 of these two bytes as f32: its upper half.
#[inline(always)]
pub(super) fn from_bf16(low: u8, high: u8) -> f32 {
    f32::from_bits(u32::from_le_bytes([0, 0, low, high]))
}

/// Returns the greatest bf16 not above `value`, as f32; `value` is finite.
pub(super) fn bf16_down(value: f32) -> f32 {
    let cut = f32::from_bits(value.to_bits() & 0xffff_0000);
    if cut > value {
        // Negative, and cut towards 0: one step further.
        f32::from_bits(cut.to_bits() + 0x1_0000)
    } else {
        cut
    }
}

/// Returns the least bf16 not below `value`, as f32; `value` is finite.
pub(super) fn bf16_up(value: f32) -> f32 {
    -bf16_down(-value)
}

/// Returns the least and the greatest number of `row`.
pub(super) fn bounds(row: &[f32]) -> (f32, f32) {
    row.iter().fold((f32::INFINITY, f32::NEG_INFINITY), |(low, high), &v| (low.min(v), high.max(v)))
}

pub(super) fn encode(row: &[f32], code: &mut [u8]) {
    let (low, high) = bounds(row);
    // A zero of either sign is one number here.
    let bias = bf16_down(low) + 0.0;
    let affine = Affine { scale: bf16_up((high - bias) / STEPS), bias };
    affine.write(code);
    for (to, &value) in code[HEAD_BYTES..].iter_mut().zip(row) {
        *to = affine.nearest(value, STEPS);
    }
}

/// Decodes [`super::Codec::Int8`].
#[derive(Clone, Copy)]
pub(super) struct Int8;

impl Decoder for Int8 {
    type Head = Affine;

    #[inline(always)]
    fn head(self, code: &[u8]) -> Affine {
        Affine::read(code)
    }

    #[inline(always)]
    fn full<L: Lanes>(self, head: Affine, code: &[u8], at: usize) -> L {
        head.lanes(chunk(code, HEAD_BYTES + at))
    }

    #[inline(always)]
    fn part<L: Lanes>(self, head: Affine, code: &[u8], at: usize, len: usize) -> L {
        head.lanes(&padded(code, HEAD_BYTES + at, len))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_bounds_enclose_and_are_near() {
        for value in [0.0, -0.0, 1.0, -1.0, 1.001, -1.001, 3.1e-4, -3.1e-4, 1e-40, -1e-40, 9e37] {
            let (down, up) = (bf16_down(value), bf16_up(value));
            assert!(down <= value && value <= up, "{value}: {down} {up}");
            assert!(up - down <= value.abs() / 64.0 + 1e-38, "{value}: {down} {up}");
            assert_eq!(bf16::from_f32(down).to_f32(), down);
            assert_eq!(bf16::from_f32(up).to_f32(), up);
        }
    }

    #[test]
    fn errs_by_half_a_step_at_most() {
        let row = [-0.3, -0.1, 0.0, 0.017, 0.29];
        let mut code = [0; HEAD_BYTES + 5];
        encode(&row, &mut code);
        let affine = Affine::read(&code);
        for (value, &byte) in row.iter().zip(&code[HEAD_BYTES..]) {
            assert!((affine.value(byte) - value).abs() <= 0.501 * affine.scale);
        }
        assert!(affine.scale < 0.6 / 255.0 * 1.02);
    }
}
