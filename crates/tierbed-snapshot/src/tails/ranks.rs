//! Counts of the set bits before each bit of a bitmap, in 3.2 % of its bytes.
//!
//! ```text
//! bits    | 512 bits | 512 bits | …                          the words of an index, as they lie
//! blocks  | u16      | u16      |    set before, in the group
//! groups  | u64                                     | u64    set before; a group has 65,536 bits
//! ```
#![expect(clippy::indexing_slicing, reason = "bits are asked for that were counted")]

/// Words of a block, whose bits are counted when they are asked for.
const BLOCK_WORDS: usize = 8;
/// Blocks of a group: what comes before the last one in it still fits 16 bits.
const GROUP_BLOCKS: usize = 128;

/// The counts of a bitmap that lies in the words of an index.
#[derive(Debug)]
pub(crate) struct Ranks {
    /// First word of the bitmap.
    start: usize,
    bit_count: u64,
    blocks: Box<[u16]>,
    groups: Box<[u64]>,
}

impl Ranks {
    /// Returns the bytes of the counts of `bit_count` bits.
    pub(crate) fn bytes_of(bit_count: u64) -> u64 {
        let blocks = bit_count.div_ceil(64 * BLOCK_WORDS as u64);
        2 * blocks + 8 * blocks.div_ceil(GROUP_BLOCKS as u64)
    }

    /// Counts the `bit_count` bits from word `start` of `words` on; `None` when others than
    /// `set_count` are set, or one behind them.
    pub(crate) fn new(words: &[u64], start: usize, bit_count: u64, set_count: u64) -> Option<Self> {
        let bitmap = &words[start..start + bit_count.div_ceil(64) as usize];
        let rest_bits = bit_count % 64;
        if rest_bits > 0 && bitmap.last().is_some_and(|word| word >> rest_bits != 0) {
            return None;
        }
        let (mut blocks, mut groups) = (Vec::new(), Vec::new());
        blocks.reserve_exact(bitmap.len().div_ceil(BLOCK_WORDS));
        let (mut set, mut group_set) = (0u64, 0u64);
        for (at, block) in bitmap.chunks(BLOCK_WORDS).enumerate() {
            if at % GROUP_BLOCKS == 0 {
                groups.push(set);
                group_set = set;
            }
            blocks.push((set - group_set) as u16);
            set += ones(block);
        }
        let (blocks, groups) = (blocks.into_boxed_slice(), groups.into_boxed_slice());
        (set == set_count).then_some(Self { start, bit_count, blocks, groups })
    }

    /// Tells whether bit `at` is set, and how many before it are.
    ///
    /// # Panics
    /// When the bitmap has no such bit.
    pub(crate) fn get(&self, words: &[u64], at: u64) -> Bit {
        assert!(at < self.bit_count, "bit {at} of {}", self.bit_count);
        let word = (at / 64) as usize;
        let block = word / BLOCK_WORDS;
        let bitmap = &words[self.start + block * BLOCK_WORDS..=self.start + word];
        let (last, whole) = (bitmap[bitmap.len() - 1], &bitmap[..bitmap.len() - 1]);
        let in_word = u64::from((last & ((1 << (at % 64)) - 1)).count_ones());
        let before = self.groups[block / GROUP_BLOCKS] + u64::from(self.blocks[block]);
        Bit { is_set: last >> (at % 64) & 1 == 1, rank: before + ones(whole) + in_word }
    }
}

/// A bit of a bitmap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Bit {
    pub(crate) is_set: bool,
    /// Bits before it that are set.
    pub(crate) rank: u64,
}

fn ones(words: &[u64]) -> u64 {
    words.iter().map(|word| u64::from(word.count_ones())).sum()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tierbed_core::env::SplitMix64;

    use super::*;

    #[test]
    fn full_groups_are_counted() {
        let bit_count = 3 * 65_536 + 77;
        let mut words = vec![u64::MAX; bit_count / 64 + 3];
        words[0] = 0;
        words[1 + bit_count / 64] = (1 << 13) - 1;
        let ranks = Ranks::new(&words, 1, bit_count as u64, bit_count as u64).unwrap();
        for at in [0, 511, 512, 65_535, 65_536, bit_count as u64 - 1] {
            assert_eq!(ranks.get(&words, at), Bit { is_set: true, rank: at });
        }
        assert_eq!(Ranks::bytes_of(bit_count as u64), 2 * 385 + 8 * 4);
        assert!(Ranks::new(&words, 0, bit_count as u64, bit_count as u64).is_none());
    }

    #[test]
    fn bits_behind_the_last_one_are_noticed() {
        assert!(Ranks::new(&[0b1011], 0, 4, 3).is_some());
        assert!(Ranks::new(&[0b1011], 0, 4, 2).is_none());
        assert!(Ranks::new(&[0b1011], 0, 3, 3).is_none());
        assert!(Ranks::new(&[], 0, 0, 0).is_some());
    }

    proptest! {
        #[test]
        fn counts_are_those_of_a_loop(
            seed: u64, bit_count in 1u64..200_000, one_in in 1u64..2000,
        ) {
            let mut random = SplitMix64::new(seed);
            let bits: Vec<bool> = (0..bit_count).map(|_| random.below(one_in) == 0).collect();
            let mut words = vec![7; 3];
            words.resize(3 + bits.len().div_ceil(64), 0);
            for (at, _) in bits.iter().enumerate().filter(|(_, bit)| **bit) {
                words[3 + at / 64] |= 1 << (at % 64);
            }
            let set_count = bits.iter().filter(|bit| **bit).count() as u64;
            let ranks = Ranks::new(&words, 3, bit_count, set_count).unwrap();
            let mut rank = 0;
            for (at, is_set) in bits.into_iter().enumerate() {
                prop_assert_eq!(ranks.get(&words, at as u64), Bit { is_set, rank });
                rank += u64::from(is_set);
            }
        }
    }
}
