//! Bucket pages: ids and their rows, sorted by hash.
//!
//! A page is the record of one row of a hidden table: 4,068 bytes, so that header and record of
//! the `file` store fill 4 KiB. Little-endian; normative:
//! `docs/reference/formats/open-vocabulary.md`.
//!
//! | bytes | field |
//! |---|---|
//! | 0..4 | entries, 0..=169 |
//! | 4..8 | depth: how many first bits of the hash all its ids share |
//! | 8.. | entries of 24 bytes: hash u64, row u64 (all ones: none yet), count f32, seen u32 |
//! | 4064..4068 | zero (the place of a record's use count) |

#![expect(
    clippy::indexing_slicing,
    reason = "a parsed page holds the entries it counts; pages to change have their full length"
)]

use tierbed_core::{Error, Result};

/// Bytes of one entry.
const ENTRY_BYTES: usize = 24;
const HEAD_BYTES: usize = 8;
/// Entries one page holds.
pub(crate) const ENTRIES_MAX: usize = (crate::pages::PAGE_BYTES - 4 - HEAD_BYTES) / ENTRY_BYTES;
/// The row of an id that has none yet.
const NO_ROW: u64 = u64::MAX;

/// One id of a bucket.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Entry {
    pub(crate) hash: u64,
    pub(crate) row: Option<u64>,
    pub(crate) count: f32,
    pub(crate) seen: u32,
}

/// Spreads ids over all 64 bits, one to one: different ids have different hashes, so no two
/// collide and any value is an id.
///
/// Source: Stafford's variant 13 of the MurmurHash3 finaliser, as in SplitMix64.
#[must_use]
pub fn mix(id: i64) -> u64 {
    let mut z = (id as u64).wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Returns the id whose hash is `hash`.
#[must_use]
pub fn unmix(hash: u64) -> i64 {
    let mut z = hash ^ (hash >> 31) ^ (hash >> 62);
    z = z.wrapping_mul(0x3196_42b2_d24d_8ec3);
    z = z ^ (z >> 27) ^ (z >> 54);
    z = z.wrapping_mul(0x96de_1b17_3f11_9089);
    z = z ^ (z >> 30) ^ (z >> 60);
    z.wrapping_sub(0x9e37_79b9_7f4a_7c15) as i64
}

/// A bucket page to read.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bucket<'a> {
    entries: &'a [u8],
    pub(crate) depth: u32,
}

impl<'a> Bucket<'a> {
    /// Reads a page.
    ///
    /// # Errors
    /// `Corruption` when its counts are impossible.
    pub(crate) fn parse(page: &'a [u8]) -> Result<Self> {
        let Some((head, rest)) = page.split_first_chunk::<HEAD_BYTES>() else {
            return Err(Error::corruption("page of a vocabulary is too short"));
        };
        let (count, depth) = (word(head, 0) as usize, word(head, 4));
        let entries = rest.get(..count.min(ENTRIES_MAX) * ENTRY_BYTES);
        match entries {
            Some(entries) if count <= ENTRIES_MAX && depth <= 64 => Ok(Self { entries, depth }),
            _ => Err(Error::corruption("page of a vocabulary has impossible counts")
                .with("entries", count)
                .with("depth", depth)),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len() / ENTRY_BYTES
    }

    /// Returns entry `at`, below [`len`](Self::len).
    pub(crate) fn entry(&self, at: usize) -> Entry {
        let bytes = &self.entries[at * ENTRY_BYTES..(at + 1) * ENTRY_BYTES];
        let row = long(bytes, 8);
        Entry {
            hash: long(bytes, 0),
            row: (row != NO_ROW).then_some(row),
            count: f32::from_bits(word(bytes, 16)),
            seen: word(bytes, 20),
        }
    }

    /// Returns the entry of `hash`, if there is one, and where it is.
    pub(crate) fn entry_of(&self, hash: u64) -> Option<(usize, Entry)> {
        self.find(hash).ok().map(|at| (at, self.entry(at)))
    }

    pub(crate) fn entries(self) -> impl Iterator<Item = Entry> + 'a {
        (0..self.len()).map(move |at| self.entry(at))
    }

    /// Returns where `hash` is, or where it belongs.
    pub(crate) fn find(&self, hash: u64) -> std::result::Result<usize, usize> {
        let (mut low, mut high) = (0, self.len());
        while low < high {
            let middle = low + (high - low) / 2;
            let there = long(self.entries, middle * ENTRY_BYTES);
            match there.cmp(&hash) {
                std::cmp::Ordering::Equal => return Ok(middle),
                std::cmp::Ordering::Less => low = middle + 1,
                std::cmp::Ordering::Greater => high = middle,
            }
        }
        Err(low)
    }
}

/// Overwrites `page` by a bucket of `entries`, sorted by hash.
pub(crate) fn write_bucket(page: &mut [u8], depth: u32, entries: &[Entry]) {
    assert!(entries.len() <= ENTRIES_MAX, "entries fit a page");
    page.fill(0);
    put(page, 0, &(entries.len() as u32).to_le_bytes());
    put(page, 4, &depth.to_le_bytes());
    for (at, entry) in entries.iter().enumerate() {
        set_entry(page, at, entry);
    }
}

/// Overwrites entry `at`.
pub(crate) fn set_entry(page: &mut [u8], at: usize, entry: &Entry) {
    assert!(at < ENTRIES_MAX, "entry {at} fits a page");
    let start = HEAD_BYTES + at * ENTRY_BYTES;
    put(page, start, &entry.hash.to_le_bytes());
    put(page, start + 8, &entry.row.unwrap_or(NO_ROW).to_le_bytes());
    put(page, start + 16, &entry.count.to_bits().to_le_bytes());
    put(page, start + 20, &entry.seen.to_le_bytes());
}

/// Puts `entry` before entry `at` of a bucket that has room.
pub(crate) fn insert_entry(page: &mut [u8], at: usize, entry: &Entry) {
    let count = word(page, 0) as usize;
    assert!(at <= count && count < ENTRIES_MAX, "a bucket with room");
    let (start, end) = (HEAD_BYTES + at * ENTRY_BYTES, HEAD_BYTES + count * ENTRY_BYTES);
    page.copy_within(start..end, start + ENTRY_BYTES);
    set_entry(page, at, entry);
    put(page, 0, &(count as u32 + 1).to_le_bytes());
}

/// Returns the u32 at byte `at`; the caller checked the length.
pub(crate) fn word(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(word)
}

/// Returns the u64 at byte `at`; the caller checked the length.
pub(crate) fn long(bytes: &[u8], at: usize) -> u64 {
    let mut long = [0; 8];
    long.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(long)
}

/// Writes `what` at byte `at`, where there is room.
pub(crate) fn put(bytes: &mut [u8], at: usize, what: &[u8]) {
    bytes[at..at + what.len()].copy_from_slice(what);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pages::PAGE_BYTES;
    use proptest::prelude::*;

    fn entry(hash: u64) -> Entry {
        Entry { hash, row: hash.is_multiple_of(2).then_some(hash / 2), count: 1.5, seen: 7 }
    }

    proptest! {
        #[test]
        fn hashes_are_one_to_one(id: i64) {
            prop_assert_eq!(unmix(mix(id)), id);
        }

        #[test]
        fn random_pages_never_panic(bytes in proptest::collection::vec(any::<u8>(), PAGE_BYTES)) {
            if let Ok(bucket) = Bucket::parse(&bytes) {
                let _ = bucket.find(9);
                prop_assert!(bucket.entries().count() <= ENTRIES_MAX);
            }
        }
    }

    #[test]
    fn extreme_ids_are_ids() {
        for id in [0, -1, 1, i64::MIN, i64::MAX] {
            assert_eq!(unmix(mix(id)), id);
        }
    }

    #[test]
    fn a_page_holds_169_sorted_entries() {
        assert_eq!(ENTRIES_MAX, 169);
        let mut page = vec![0xff; PAGE_BYTES];
        write_bucket(&mut page, 3, &[]);
        // From the outside in, so that every insertion is in the middle.
        for at in 0..ENTRIES_MAX as u64 {
            let hash = if at % 2 == 0 { at } else { 1000 - at };
            let place = Bucket::parse(&page).unwrap().find(hash).unwrap_err();
            insert_entry(&mut page, place, &entry(hash));
        }
        let bucket = Bucket::parse(&page).unwrap();
        assert_eq!((bucket.len(), bucket.depth), (ENTRIES_MAX, 3));
        let hashes: Vec<u64> = bucket.entries().map(|entry| entry.hash).collect();
        assert!(hashes.is_sorted());
        for hash in hashes {
            let at = bucket.find(hash).unwrap();
            assert_eq!(bucket.entry(at), entry(hash));
        }
        assert_eq!(page[PAGE_BYTES - 4..], [0; 4]);
    }

    #[test]
    fn impossible_counts_are_corruption() {
        let mut page = vec![0; PAGE_BYTES];
        put(&mut page, 0, &170u32.to_le_bytes());
        assert!(Bucket::parse(&page).is_err());
        put(&mut page, 0, &1u32.to_le_bytes());
        put(&mut page, 4, &65u32.to_le_bytes());
        assert!(Bucket::parse(&page).is_err());
        assert!(Bucket::parse(&page[..20]).is_err());
    }
}
