//! The byte layout of four-bit codes.
//!
//! In groups of 16, eight bytes each: byte `j` of a group holds number `j` in its low half and
//! number `j + 8` in its high half, so that a mask and a shift of one word undo it. A last group of
//! `n < 16` numbers takes `h = ceil(n / 2)` bytes and holds numbers `j` and `j + h` likewise.

#![expect(clippy::indexing_slicing, reason = "lengths are checked by the caller")]

use super::decode::chunk;
use crate::simd::LANES;

/// Bytes of a whole group.
const GROUP_BYTES: usize = LANES / 2;
/// The low half of every byte of a word.
const LOW: u64 = 0x0f0f_0f0f_0f0f_0f0f;

/// Returns the bytes of `dim` nibbles.
pub(super) const fn bytes(dim: usize) -> usize {
    dim.div_ceil(2)
}

/// Packs one nibble per number, each below 16.
pub(super) fn pack(nibbles: impl Iterator<Item = u8>, dim: usize, to: &mut [u8]) {
    to.fill(0);
    for (i, nibble) in nibbles.enumerate() {
        debug_assert!(nibble < 16);
        let (group, within) = (i / LANES, i % LANES);
        let half = (dim - group * LANES).min(LANES).div_ceil(2);
        let shift = if within < half { 0 } else { 4 };
        to[group * GROUP_BYTES + within % half] |= nibble << shift;
    }
}

/// Returns the nibbles of numbers `at..at + 16`, one a byte.
#[inline(always)]
pub(super) fn full(code: &[u8], at: usize) -> [u8; LANES] {
    let word = u64::from_le_bytes(*chunk(code, at / 2));
    let pair = u128::from(word & LOW) | (u128::from((word >> 4) & LOW) << 64);
    pair.to_le_bytes()
}

/// Returns the nibbles of the last `len` numbers, from `at` on; the others are 0.
#[inline(always)]
pub(super) fn part(code: &[u8], at: usize, len: usize) -> [u8; LANES] {
    let half = len.div_ceil(2);
    let mut nibbles = [0; LANES];
    for (j, &byte) in code[at / 2..][..half].iter().enumerate() {
        nibbles[j] = byte & 15;
        nibbles[j + half] = byte >> 4;
    }
    nibbles
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_length_comes_back() {
        for dim in 1..=50 {
            let nibbles: Vec<u8> = (0..dim).map(|i| (i * 7 % 16) as u8).collect();
            let mut code = vec![0xff; bytes(dim)];
            pack(nibbles.iter().copied(), dim, &mut code);
            let mut found = Vec::new();
            for at in (0..dim).step_by(LANES) {
                let len = (dim - at).min(LANES);
                let group = if len == LANES { full(&code, at) } else { part(&code, at, len) };
                found.extend_from_slice(&group[..len]);
            }
            assert_eq!(found, nibbles, "dim {dim}");
        }
    }
}
