//! Bloom filters of SSTs.
//!
//! A plain Bloom filter: `k` bits per key in one bit array, chosen by double hashing. It says
//! "maybe" or "no"; "no" saves a block read. Source: Bloom 1970; Kirsch and Mitzenmacher 2006
//! (two hashes are enough).

#![expect(clippy::indexing_slicing, reason = "probes are below the number of bits")]

use tierbed_core::env::mix64;
use tierbed_core::Reservation;

use crate::key::Key;

/// Filter of one SST, counted against the budget as `filters`.
#[derive(Debug)]
pub(crate) struct Bloom {
    bits: Vec<u8>,
    probe_count: u32,
    _memory: Option<Reservation>,
}

impl Bloom {
    /// Returns the bytes of a filter for `row_count` rows.
    pub(crate) fn bytes_for(row_count: u64, bits_per_row: u32) -> u64 {
        (row_count * u64::from(bits_per_row)).div_ceil(8).max(8)
    }

    /// Builds the filter of `keys`.
    pub(crate) fn build(keys: &[Key], bits_per_row: u32, memory: Option<Reservation>) -> Self {
        assert!(bits_per_row > 0, "a filter without bits admits no key");
        let len_bytes = Self::bytes_for(keys.len() as u64, bits_per_row) as usize;
        let mut bloom = Self::from_stored(vec![0; len_bytes], bits_per_row, memory);
        for key in keys {
            for bit in bloom.probes(*key) {
                bloom.bits[(bit / 8) as usize] |= 1 << (bit % 8);
            }
        }
        bloom
    }

    /// Takes the bits back from where they were stored.
    pub(crate) fn from_stored(
        bits: Vec<u8>,
        bits_per_row: u32,
        memory: Option<Reservation>,
    ) -> Self {
        // The best number of probes is bits per row times ln 2; 0.7 is near enough.
        let probe_count = (bits_per_row * 7 / 10).clamp(1, 16);
        Self { bits, probe_count, _memory: memory }
    }

    /// Returns the bits, to store them.
    pub(crate) fn bits(&self) -> &[u8] {
        &self.bits
    }

    /// Returns `false` only when `key` is certainly not in the SST.
    pub(crate) fn may_hold(&self, key: Key) -> bool {
        // A filter from disk may have no bits at all; the SST's keys say that it has rows.
        !self.bits.is_empty()
            && self.probes(key).all(|bit| self.bits[(bit / 8) as usize] & (1 << (bit % 8)) != 0)
    }

    fn probes(&self, key: Key) -> impl Iterator<Item = u64> + use<> {
        let bit_count = 8 * self.bits.len() as u64;
        let first = mix64(key.get());
        let step = mix64(first) | 1;
        (0..u64::from(self.probe_count)).map(move |probe| {
            // Multiply-shift instead of a division: the same spread, a tenth of the cost.
            let hash = first.wrapping_add(probe.wrapping_mul(step));
            ((u128::from(hash) * u128::from(bit_count)) >> 64) as u64
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tierbed_core::{RowId, RowKey, TableId};

    #[test]
    fn never_denies_its_keys_and_seldom_admits_others() {
        let key = |row| Key::cold(RowKey::new(TableId(1), RowId(row)));
        let keys: Vec<_> = (0..5000).map(|row| key(3 * row)).collect();
        let bloom = Bloom::build(&keys, 10, None);
        assert!(keys.iter().all(|key| bloom.may_hold(*key)));
        let wrong = (0..15_000).filter(|row| row % 3 != 0 && bloom.may_hold(key(*row))).count();
        // Theory says 0.8 % for 10 bits; 2 % leaves room for luck.
        assert!(wrong < 200, "{wrong} of 10,000");
        let stored = Bloom::from_stored(bloom.bits().to_vec(), 10, None);
        assert!(keys.iter().all(|key| stored.may_hold(*key)));
    }

    #[test]
    fn an_empty_filter_from_disk_says_no_and_does_not_panic() {
        let bloom = Bloom::from_stored(Vec::new(), 10, None);
        assert!(!bloom.may_hold(Key::MIN));
    }
}
