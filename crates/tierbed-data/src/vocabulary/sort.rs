//! Sorting of counted tokens in bounded memory, by fingerprint or by first appearance.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

use tierbed_core::{Budget, Result};
use tierbed_io::sorter::{ExternalSorter, SortStats, SortedRecords, SorterOptions};
use tierbed_io::{Folder, FsFolder};

/// Bytes of a record in memory.
pub(crate) const RECORD_BYTES: usize = size_of::<Record>();
const FEATURE_SHIFT: u32 = 48;

/// A token's record. `tagged` holds the feature in the upper 16 bits and a number (count or id)
/// in the lower 48.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Record {
    pub(crate) fingerprint: u64,
    pub(crate) first: u64,
    pub(crate) tagged: u64,
}

impl Record {
    pub(crate) fn new(feature: u16, fingerprint: u64, first: u64, number: u64) -> Self {
        Self { fingerprint, first, tagged: (u64::from(feature) << FEATURE_SHIFT) | number }
    }

    pub(crate) fn feature(self) -> u16 {
        (self.tagged >> FEATURE_SHIFT) as u16
    }

    pub(crate) fn number(self) -> u64 {
        self.tagged & ((1 << FEATURE_SHIFT) - 1)
    }
}

/// What records are sorted by, after the feature.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    Fingerprint,
    First,
}

/// Sorts a stream of records; its scratch files go with it.
///
/// Keys compare as bytes: the feature, then what is sorted by, most significant byte first.
///
/// ```text
/// key [10]: feature u16 | fingerprint or first u64        payload [14]: the other u64 | number u48
/// ```
#[derive(Debug)]
pub(crate) struct Sorter {
    order: Order,
    inner: ExternalSorter,
}

impl Sorter {
    pub(crate) fn new(order: Order, folder: &Path, memory_bytes: u64) -> Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let folder: Arc<dyn Folder> = Arc::new(FsFolder::open(folder)?);
        let options = SorterOptions {
            key_bytes: 10,
            payload_bytes: 14,
            memory_bytes,
            scratch_name: format!("tierbed-vocabulary-{}-{number}", std::process::id()),
        };
        let inner = ExternalSorter::new(folder, &options, &Budget::unlimited())?;
        Ok(Self { order, inner })
    }

    pub(crate) fn push(&mut self, record: Record) -> Result<()> {
        let (by, other) = match self.order {
            Order::Fingerprint => (record.fingerprint, record.first),
            Order::First => (record.first, record.fingerprint),
        };
        let (mut key, mut payload) = ([0; 10], [0; 14]);
        key[..2].copy_from_slice(&record.feature().to_le_bytes());
        key[..2].reverse();
        key[2..].copy_from_slice(&by.to_le_bytes());
        key[2..].reverse();
        payload[..8].copy_from_slice(&other.to_le_bytes());
        payload[8..].copy_from_slice(&record.tagged.to_le_bytes()[..6]);
        self.inner.push(&key, &payload)
    }

    pub(crate) fn finish(self) -> Result<Sorted> {
        Ok(Sorted { order: self.order, inner: self.inner.finish()? })
    }
}

/// Hands out the records in order.
#[derive(Debug)]
pub(crate) struct Sorted {
    order: Order,
    inner: SortedRecords,
}

impl Sorted {
    pub(crate) fn next(&mut self) -> Result<Option<Record>> {
        let Some(found) = self.inner.next()? else { return Ok(None) };
        let number =
            |bytes: &[u8]| bytes.iter().fold(0, |number: u64, byte| number << 8 | u64::from(*byte));
        let back = |bytes: &[u8]| {
            bytes.iter().rev().fold(0, |number: u64, byte| number << 8 | u64::from(*byte))
        };
        let (feature, by) = found.key.split_at(2);
        let (other, count) = found.payload.split_at(8);
        let (by, other) = (number(by), back(other));
        let (fingerprint, first) = match self.order {
            Order::Fingerprint => (by, other),
            Order::First => (other, by),
        };
        Ok(Some(Record::new(number(feature) as u16, fingerprint, first, back(count))))
    }

    pub(crate) fn stats(&self) -> SortStats {
        self.inner.stats()
    }
}

#[cfg(test)]
mod tests {
    use tierbed_core::env::SplitMix64;

    use super::*;

    #[test]
    fn many_passes_sort_like_memory_does() {
        let folder = tempfile::tempdir().unwrap();
        let mut rng = SplitMix64::new(3);
        let mut records: Vec<_> = (0..50_000)
            .map(|at| Record::new(rng.below(3) as u16, rng.next_u64(), at, rng.below(1 << 48)))
            .collect();
        for order in [Order::Fingerprint, Order::First] {
            let mut sorter = Sorter::new(order, folder.path(), 32 << 10).unwrap();
            records.iter().for_each(|record| sorter.push(*record).unwrap());
            let mut sorted = sorter.finish().unwrap();
            assert!(sorted.stats().run_count > 30, "{:?}", sorted.stats());
            assert!(sorted.stats().merge_pass_count > 1, "{:?}", sorted.stats());
            match order {
                Order::Fingerprint => records.sort_by_key(|it| (it.feature(), it.fingerprint)),
                Order::First => records.sort_by_key(|it| (it.feature(), it.first)),
            }
            records.iter().for_each(|it| assert_eq!(sorted.next().unwrap(), Some(*it)));
            assert_eq!(sorted.next().unwrap(), None);
        }
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "scratch is removed");
    }
}
