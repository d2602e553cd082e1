//! Which bucket holds a row, and where is that bucket? The first level, in memory.
//!
//! Rows are hashed inside ranges of about a megabyte of records: row order is lost for pages, as
//! in every hash store, but a scan in row order needs one range in memory, not the table. Eight
//! bytes per bucket say file, page and length.

use tierbed_core::env::mix64;
use tierbed_core::{Budget, Error, Reservation, Result, TableSchema};
use tierbed_io::PAGE_BYTES;

use super::bucket::{BucketId, HEAD_BYTES};

/// Records of one hashed range.
pub(crate) const RANGE_BYTES: usize = 1 << 20;
const MAGIC: &[u8; 8] = b"TBhashi1";

/// Where a bucket is: file (24 bits), page in the file (24), pages (16); 0 pages: no rows yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Place(u64);

/// Most files and pages per file that a [`Place`] can name.
pub(crate) const PLACE_MAX: u64 = (1 << 24) - 1;
/// Most pages of a bucket.
pub(crate) const BUCKET_PAGES_MAX: usize = (1 << 16) - 1;

impl Place {
    pub(crate) const NONE: Self = Self(0);

    pub(crate) fn new(file: u64, page: u64, page_count: usize) -> Self {
        Self((file << 40) | (page << 16) | page_count as u64)
    }

    pub(crate) fn file(self) -> u64 {
        self.0 >> 40
    }

    pub(crate) fn offset_bytes(self) -> u64 {
        (self.0 >> 16 & PLACE_MAX) * PAGE_BYTES as u64
    }

    pub(crate) fn page_count(self) -> usize {
        (self.0 & 0xFFFF) as usize
    }

    pub(crate) fn end_page(self) -> u64 {
        (self.0 >> 16 & PLACE_MAX) + self.page_count() as u64
    }
}

/// The buckets of one table.
pub(crate) struct TableIndex {
    pub(crate) record_bytes: usize,
    /// Nominal pages of a bucket.
    bucket_pages: u32,
    pub(crate) rows_per_range: u64,
    pub(crate) buckets_per_range: u64,
    places: Vec<Place>,
    memory: Reservation,
}

/// Buckets are planned to be this full, so that most keep their nominal pages.
const FILL_PERCENT: usize = 80;

impl TableIndex {
    /// Plans buckets of `bucket_pages` nominal pages for `table`.
    ///
    /// # Errors
    /// `Invalid` when the budget does not hold the index.
    pub(crate) fn new(table: &TableSchema, bucket_pages: u32, budget: &Budget) -> Result<Self> {
        let (rows_per_range, buckets_per_range) = shape(table, bucket_pages);
        let bucket_count = bucket_count(table, bucket_pages);
        // Once for the index, once for the copy that a commit writes.
        let memory = budget.reserve("hash index", 16 * bucket_count)?;
        let count = usize::try_from(bucket_count)
            .map_err(|_| Error::invalid("table too large").with("table", &table.name))?;
        Ok(Self {
            record_bytes: table.record_bytes(),
            bucket_pages,
            rows_per_range,
            buckets_per_range,
            places: vec![Place::NONE; count],
            memory,
        })
    }

    /// Makes room for the buckets of `table`, which has grown; ranges stay as they are.
    ///
    /// # Errors
    /// `Invalid` when the budget does not hold the longer index.
    pub(crate) fn grow(&mut self, table: &TableSchema) -> Result<()> {
        let bucket_count = bucket_count(table, self.bucket_pages);
        self.memory.resize(16 * bucket_count)?;
        self.places.resize(bucket_count as usize, Place::NONE);
        Ok(())
    }

    /// Returns the bucket of a row.
    pub(crate) fn bucket_of(&self, row: u64) -> u64 {
        let range = row / self.rows_per_range;
        range * self.buckets_per_range + mix64(row) % self.buckets_per_range
    }

    /// Returns the number of buckets, with rows or without.
    pub(crate) fn buckets_total(&self) -> u64 {
        self.places.len() as u64
    }

    pub(crate) fn place(&self, bucket: u64) -> Place {
        self.places.get(bucket as usize).copied().unwrap_or(Place::NONE)
    }

    /// Puts a bucket elsewhere and returns where it was.
    pub(crate) fn set_place(&mut self, bucket: u64, place: Place) -> Place {
        self.places
            .get_mut(bucket as usize)
            .map_or(Place::NONE, |old| std::mem::replace(old, place))
    }

    /// Visits the buckets that have rows.
    pub(crate) fn buckets(
        &self,
        table: u32,
        store: u32,
    ) -> impl Iterator<Item = (BucketId, Place)> + '_ {
        let places = self.places.iter().enumerate();
        places
            .filter(|(_, place)| **place != Place::NONE)
            .map(move |(bucket, place)| (BucketId { table, bucket: bucket as u64, store }, *place))
    }

    /// Appends the table's part of the index file.
    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.bucket_pages.to_le_bytes());
        out.extend_from_slice(&(self.places.len() as u64).to_le_bytes());
        self.places.iter().for_each(|place| out.extend_from_slice(&place.0.to_le_bytes()));
    }

    /// Reads what [`encode`](Self::encode) wrote and leaves the rest.
    ///
    /// # Errors
    /// `Corruption` for anything else, `Invalid` when the budget does not hold it.
    pub(crate) fn decode(bytes: &mut &[u8], table: &TableSchema, budget: &Budget) -> Result<Self> {
        let bucket_pages = u32::from_le_bytes(take(bytes)?);
        let count = u64::from_le_bytes(take(bytes)?);
        let is_sane = (1..=BUCKET_PAGES_MAX as u32 / 4).contains(&bucket_pages);
        if !is_sane || count != bucket_count(table, bucket_pages) {
            return Err(damaged());
        }
        let mut index = Self::new(table, bucket_pages, budget)?;
        for place in &mut index.places {
            *place = Place(u64::from_le_bytes(take(bytes)?));
        }
        Ok(index)
    }
}

/// Returns rows and buckets of a range.
fn shape(table: &TableSchema, bucket_pages: u32) -> (u64, u64) {
    let room = bucket_pages as usize * PAGE_BYTES - HEAD_BYTES;
    let rows_per_bucket = (room * FILL_PERCENT / 100 / (8 + table.record_bytes())).max(1);
    let buckets = (RANGE_BYTES / table.record_bytes() / rows_per_bucket).max(1);
    ((rows_per_bucket * buckets) as u64, buckets as u64)
}

/// Returns the buckets that `table` has at `bucket_pages` nominal pages each.
pub(crate) fn bucket_count(table: &TableSchema, bucket_pages: u32) -> u64 {
    let (rows, buckets) = shape(table, bucket_pages);
    table.row_count.div_ceil(rows) * buckets
}

pub(crate) fn damaged() -> Error {
    Error::corruption("hash index is damaged")
        .with("remedy", "restore the store's folder from a copy")
}

fn take<const N: usize>(bytes: &mut &[u8]) -> Result<[u8; N]> {
    let (head, rest) = bytes.split_first_chunk::<N>().ok_or_else(damaged)?;
    *bytes = rest;
    Ok(*head)
}

/// Writes the index file: magic, files with their pages, then every table.
pub(crate) fn encode_index(files: &[(u64, u64)], tables: &[TableIndex]) -> Vec<u8> {
    let mut out = MAGIC.to_vec();
    out.extend_from_slice(&(files.len() as u64).to_le_bytes());
    for (file, pages) in files {
        out.extend_from_slice(&file.to_le_bytes());
        out.extend_from_slice(&pages.to_le_bytes());
    }
    tables.iter().for_each(|table| table.encode(&mut out));
    out
}

/// An index file as read: every file's number and pages, and every table's index.
pub(crate) type ReadIndex = (Vec<(u64, u64)>, Vec<TableIndex>);

/// Reads the index file of `tables`: the files with their pages, and every table's index.
///
/// # Errors
/// `Corruption` for anything [`encode_index`] did not write, `Invalid` for a small budget.
pub(crate) fn decode_index(
    mut bytes: &[u8],
    tables: &[TableSchema],
    budget: &Budget,
) -> Result<ReadIndex> {
    if take::<8>(&mut bytes)? != *MAGIC {
        return Err(damaged());
    }
    let file_count = u64::from_le_bytes(take(&mut bytes)?);
    let mut files: Vec<(u64, u64)> = Vec::new();
    for _ in 0..file_count {
        let file = u64::from_le_bytes(take(&mut bytes)?);
        let pages = u64::from_le_bytes(take(&mut bytes)?);
        if file > PLACE_MAX || pages > PLACE_MAX || files.last().is_some_and(|old| old.0 >= file) {
            return Err(damaged());
        }
        files.push((file, pages));
    }
    let decoded: Result<Vec<_>> =
        tables.iter().map(|table| TableIndex::decode(&mut bytes, table, budget)).collect();
    let decoded = decoded?;
    let is_inside = |place: Place| {
        let at = files.binary_search_by_key(&place.file(), |file| file.0);
        at.ok().and_then(|at| files.get(at)).is_some_and(|file| place.end_page() <= file.1)
    };
    let is_fine = |(_, place): (BucketId, Place)| place.page_count() > 0 && is_inside(place);
    let are_fine = decoded.iter().flat_map(|table| table.buckets(0, 0)).all(is_fine);
    if !bytes.is_empty() || !are_fine {
        return Err(damaged());
    }
    Ok((files, decoded))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tierbed_core::OptimizerKind;

    fn table(dim: u32, row_count: u64) -> TableSchema {
        TableSchema {
            optimizer: OptimizerKind::RowWiseAdagrad,
            ..TableSchema::plain("t", row_count, dim)
        }
    }

    #[test]
    fn buckets_are_even_and_ranges_keep_their_rows() {
        let schema = table(36, 100_000);
        let index = TableIndex::new(&schema, 1, &Budget::unlimited()).unwrap();
        let mut counts = vec![0u32; index.places.len()];
        for row in 0..100_000 {
            let bucket = index.bucket_of(row);
            assert_eq!(bucket / index.buckets_per_range, row / index.rows_per_range);
            counts[bucket as usize] += 1;
        }
        // One page holds 25 such rows; 80 % full, few buckets need a second page.
        let overfull = counts.iter().filter(|count| **count > 25).count();
        assert!(overfull * 5 < counts.len(), "{overfull} of {}", counts.len());
    }

    #[test]
    fn an_index_is_read_as_written() {
        let schema = table(36, 5000);
        let mut index = TableIndex::new(&schema, 2, &Budget::unlimited()).unwrap();
        index.set_place(1, Place::new(7, 5, 2));
        let bytes = encode_index(&[(7, 100)], std::slice::from_ref(&index));
        let schemas = [schema];
        let (files, read) = decode_index(&bytes, &schemas, &Budget::unlimited()).unwrap();
        assert_eq!(files, [(7, 100)]);
        assert_eq!((read[0].place(1), read[0].place(0)), (Place::new(7, 5, 2), Place::NONE));
        for cut in 0..bytes.len() {
            assert!(decode_index(&bytes[..cut], &schemas, &Budget::unlimited()).is_err());
        }
        let outside = encode_index(&[(7, 6)], std::slice::from_ref(&index));
        assert!(decode_index(&outside, &schemas, &Budget::unlimited()).is_err());
    }

    proptest! {
        #[test]
        fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut framed = MAGIC.to_vec();
            framed.extend_from_slice(&bytes);
            let _ = decode_index(&framed, &[table(3, 100)], &Budget::new(1 << 20));
        }
    }
}
