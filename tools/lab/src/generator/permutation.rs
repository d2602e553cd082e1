//! A keyed permutation from popularity ranks to token ids.
//!
//! A seeded permutation of `0..count`, so that an id says nothing about popularity, nor about
//! its place in a hierarchy. Small permutations are tabulated; large ones are computed:
//! a mixer of the next power of two, repeated until it lands inside (on average below two rounds).
//!
//! Source: Black, Rogaway, "Ciphers with arbitrary finite domains" (CT-RSA 2002), cycle walking.

#![expect(
    clippy::indexing_slicing,
    reason = "indices are below the count that the permutation was made for"
)]

use tierbed_core::env::{mix64, SplitMix64};

/// Permutations up to this size are tabulated: 4 bytes an id, 26 features below 512 KiB together.
const TABLE_LEN_MAX: u32 = 1 << 14;

/// A permutation of `0..count`.
#[derive(Debug, Clone)]
pub(crate) enum Permutation {
    Table(Vec<u32>),
    Walk(Walk),
}

/// The computed kind.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Walk {
    count: u32,
    mask: u32,
    shift: u32,
    multipliers: [u32; 3],
    addend: u32,
}

impl Permutation {
    pub(crate) fn new(count: u32, seed: u64) -> Self {
        if count <= TABLE_LEN_MAX {
            let mut table: Vec<u32> = (0..count).collect();
            let mut rng = SplitMix64::new(seed);
            for at in (1..table.len()).rev() {
                table.swap(at, rng.below(at as u64 + 1) as usize);
            }
            return Self::Table(table);
        }
        let bits = count.next_power_of_two().ilog2();
        let word = |salt: u64| mix64(seed ^ mix64(salt)) as u32;
        Self::Walk(Walk {
            count,
            mask: ((1u64 << bits) - 1) as u32,
            shift: bits.div_ceil(2),
            // Odd, hence invertible modulo a power of two.
            multipliers: [word(1) | 1, word(2) | 1, word(3) | 1],
            addend: word(4),
        })
    }

    /// Returns the image of `index`, which is below `count`.
    pub(crate) fn apply(&self, index: u32) -> u32 {
        match self {
            Self::Table(table) => table[index as usize],
            Self::Walk(walk) => walk.apply(index),
        }
    }
}

impl Walk {
    fn apply(&self, index: u32) -> u32 {
        let mut image = index;
        loop {
            image = image.wrapping_add(self.addend) & self.mask;
            for multiplier in self.multipliers {
                image = image.wrapping_mul(multiplier) & self.mask;
                image ^= image >> self.shift;
            }
            if image < self.count {
                return image;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_id_once_and_in_no_order() {
        for count in [1, 2, 3, 1_000, TABLE_LEN_MAX, TABLE_LEN_MAX + 1, 70_000, 131_072] {
            let permutation = Permutation::new(count, 9);
            let ids: Vec<u32> = (0..count).map(|index| permutation.apply(index)).collect();
            let mut sorted = ids.clone();
            sorted.sort_unstable();
            assert!(sorted.into_iter().eq(0..count), "{count}");
            if count >= 1_000 {
                let rising = ids.windows(2).filter(|pair| pair[0] < pair[1]).count();
                let share = rising as f64 / f64::from(count - 1);
                assert!((0.4..0.6).contains(&share), "{count}: {share}");
                let head_mean = ids[..200].iter().map(|id| f64::from(*id)).sum::<f64>() / 200.0;
                let middle = head_mean / f64::from(count);
                assert!((0.4..0.6).contains(&middle), "{count}: {middle}");
            }
        }
    }
}
