//! What does a bucket look like on disk? The rows of one hash value, sorted, with a checksum.
//!
//! ```text
//! | crc32c u32 | table u32 | bucket u64 | row_count u32 | record_bytes u32 | row u64 x n |
//! | records |
//! ```
//!
//! padded with zeros to a whole page; the checksum covers everything behind it but the padding.

use tierbed_core::checksum::crc32c;
use tierbed_core::{Error, Result, TableId};
use tierbed_io::PAGE_BYTES;
use tierbed_store::page_owner;

/// Bytes before the row ids.
pub(crate) const HEAD_BYTES: usize = 24;

/// A bucket's name: which table, which number, and which store's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct BucketId {
    pub(crate) table: u32,
    pub(crate) bucket: u64,
    pub(crate) store: u32,
}

impl BucketId {
    fn owner(self) -> u32 {
        page_owner(self.store, TableId(self.table))
    }
}

/// A checked bucket's bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bucket<'a> {
    rows: &'a [u8],
    records: &'a [u8],
    record_bytes: usize,
}

/// Returns the pages of a bucket of `row_count` rows.
pub(crate) fn pages_of(row_count: usize, record_bytes: usize) -> usize {
    (HEAD_BYTES + row_count * (8 + record_bytes)).div_ceil(PAGE_BYTES)
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

impl<'a> Bucket<'a> {
    /// A bucket without rows.
    pub(crate) fn empty(record_bytes: usize) -> Self {
        Self { rows: &[], records: &[], record_bytes }
    }

    /// Checks bytes read from disk.
    ///
    /// # Errors
    /// `Corruption`, naming the bucket.
    pub(crate) fn check(bytes: &'a [u8], id: BucketId, record_bytes: usize) -> Result<Self> {
        Self::parse(bytes, id, record_bytes).ok_or_else(|| {
            Error::corruption("bucket checksum mismatch")
                .with("table_id", id.table)
                .with("bucket", id.bucket)
                .with("remedy", "restore the store's folder from a copy")
        })
    }

    fn parse(bytes: &'a [u8], id: BucketId, record_bytes: usize) -> Option<Self> {
        let row_count = u32_at(bytes, 16)? as usize;
        let ids_end = HEAD_BYTES.checked_add(row_count.checked_mul(8)?)?;
        let end = ids_end.checked_add(row_count.checked_mul(record_bytes)?)?;
        let is_ours = u32_at(bytes, 4)? == id.owner()
            && u64_at(bytes, 8)? == id.bucket
            && u32_at(bytes, 20)? as usize == record_bytes;
        if !is_ours || crc32c(bytes.get(4..end)?) != u32_at(bytes, 0)? {
            return None;
        }
        let (rows, records) = (bytes.get(HEAD_BYTES..ids_end)?, bytes.get(ids_end..end)?);
        Some(Self { rows, records, record_bytes })
    }

    fn row(&self, at: usize) -> Option<u64> {
        u64_at(self.rows, 8 * at)
    }

    fn record(&self, at: usize) -> &'a [u8] {
        let start = at * self.record_bytes;
        self.records.get(start..start + self.record_bytes).unwrap_or(&[])
    }

    /// Returns the number of rows.
    pub(crate) fn row_count(&self) -> usize {
        self.rows.len() / 8
    }

    /// Visits rows in order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u64, &'a [u8])> + use<'a> {
        let bucket = *self;
        (0..self.row_count()).filter_map(move |at| Some((bucket.row(at)?, bucket.record(at))))
    }

    /// Finds a row.
    pub(crate) fn get(&self, row: u64) -> Option<&'a [u8]> {
        let (mut low, mut high) = (0, self.row_count());
        while low < high {
            let middle = usize::midpoint(low, high);
            match self.row(middle)?.cmp(&row) {
                std::cmp::Ordering::Less => low = middle + 1,
                std::cmp::Ordering::Greater => high = middle,
                std::cmp::Ordering::Equal => return Some(self.record(middle)),
            }
        }
        None
    }

    /// Writes the bucket with `changes` (ascending rows) over it into `out`, padded to a page.
    pub(crate) fn merge_into<'c>(
        &self,
        id: BucketId,
        changes: impl Iterator<Item = (u64, &'c [u8])>,
        out: &mut Vec<u8>,
    ) where
        'a: 'c,
    {
        let rows: Vec<(u64, &'c [u8])> = merged(self.iter(), changes);
        out.clear();
        out.extend_from_slice(&[0; 4]);
        out.extend_from_slice(&id.owner().to_le_bytes());
        out.extend_from_slice(&id.bucket.to_le_bytes());
        out.extend_from_slice(&(rows.len() as u32).to_le_bytes());
        out.extend_from_slice(&(self.record_bytes as u32).to_le_bytes());
        rows.iter().for_each(|(row, _)| out.extend_from_slice(&row.to_le_bytes()));
        rows.iter().for_each(|(_, record)| out.extend_from_slice(record));
        let crc = crc32c(out.get(4..).unwrap_or(&[])).to_le_bytes();
        out.iter_mut().zip(crc).for_each(|(place, byte)| *place = byte);
        out.resize(out.len().next_multiple_of(PAGE_BYTES), 0);
    }
}

// Joins two ascending sequences; of equal rows the change stays.
fn merged<'a>(
    old: impl Iterator<Item = (u64, &'a [u8])>,
    changes: impl Iterator<Item = (u64, &'a [u8])>,
) -> Vec<(u64, &'a [u8])> {
    let (mut old, mut changes) = (old.peekable(), changes.peekable());
    let mut rows = Vec::new();
    loop {
        match (old.peek(), changes.peek()) {
            (Some((kept, _)), Some((changed, _))) if kept < changed => rows.extend(old.next()),
            (Some((kept, _)), Some((changed, _))) => {
                if kept == changed {
                    old.next();
                }
                rows.extend(changes.next());
            }
            (Some(_), None) => rows.extend(old.next()),
            (None, Some(_)) => rows.extend(changes.next()),
            (None, None) => return rows,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    const ID: BucketId = BucketId { table: 3, bucket: 77, store: 9 };

    proptest! {
        #[test]
        fn a_bucket_holds_what_a_map_holds(
            steps in proptest::collection::vec(
                proptest::collection::btree_map(0u64..60, any::<[u8; 8]>(), 0..20), 1..6),
        ) {
            let mut model: BTreeMap<u64, [u8; 8]> = BTreeMap::new();
            let (mut bytes, mut next) = (Vec::new(), Vec::new());
            Bucket::empty(8).merge_into(ID, std::iter::empty(), &mut bytes);
            for step in steps {
                let changes = step.iter().map(|(row, record)| (*row, &record[..]));
                Bucket::check(&bytes, ID, 8).unwrap().merge_into(ID, changes, &mut next);
                std::mem::swap(&mut bytes, &mut next);
                model.extend(step);
            }
            let bucket = Bucket::check(&bytes, ID, 8).unwrap();
            prop_assert_eq!(bytes.len(), PAGE_BYTES * pages_of(model.len(), 8));
            for row in 0..61 {
                prop_assert_eq!(bucket.get(row), model.get(&row).map(|record| &record[..]));
            }
            prop_assert!(bucket.iter().map(|(row, _)| row).eq(model.keys().copied()));
        }

        #[test]
        fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            prop_assert!(Bucket::check(&bytes, ID, 8).is_err());
        }

        #[test]
        fn every_flipped_bit_is_noticed(bit in 0usize..8 * (HEAD_BYTES + 32)) {
            let mut bytes = Vec::new();
            let rows = [(1u64, &[1u8; 8][..]), (9, &[2; 8])];
            Bucket::empty(8).merge_into(ID, rows.into_iter(), &mut bytes);
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(Bucket::check(&bytes, ID, 8).is_err());
        }
    }
}
