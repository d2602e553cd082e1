//! The table file of a commit: ranges, extents of runs, runs. No row, no key.
//!
//! Little-endian words; normative: `docs/reference/formats/cold.md`. The checksum is in the
//! manifest.

use std::collections::{BTreeMap, BTreeSet};

use crate::HEADER_BYTES;
use tierbed_core::{Error, Result, TableSchema};

use crate::cold::cost::PageRun;
use crate::cold::geometry::Geometry;
use crate::cold::run::Run;
use crate::cold::table::{BaseRange, ColdTable};

const MAGIC: [u8; 8] = *b"TBcoldtb";
const VERSION: u32 = 1;
const NO_EXTENT: u32 = u32::MAX;

/// A table as a commit has it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct StoredTable {
    pub(crate) geometry: Geometry,
    pub(crate) next_version: u32,
    pub(crate) file_extents: u32,
    pub(crate) open: Option<(u32, u32)>,
    pub(crate) bases: Vec<(u64, BaseRange)>,
    pub(crate) parts: Vec<(u32, Vec<(u32, u32)>)>,
    pub(crate) runs: Vec<Run>,
}

/// Returns the bytes that every table file begins with.
pub(crate) fn head() -> Vec<u8> {
    [MAGIC.as_slice(), &VERSION.to_le_bytes()].concat()
}

/// Encodes what a commit of `table` consists of.
pub(crate) fn encode(table: &ColdTable) -> Vec<u8> {
    let mut bytes = head();
    let mut put = |value: u32| bytes.extend(value.to_le_bytes());
    let (open_extent, open_used) = table.open.unwrap_or((NO_EXTENT, 0));
    put(table.geometry.page_bytes() as u32);
    put(table.geometry.range_pages as u32);
    put(table.next_version);
    put(table.file_extents);
    put(open_extent);
    put(open_used);
    let bases = || (0u64..).zip(&table.ranges).filter(|(_, base)| base.extent().is_some());
    put(bases().count() as u32);
    for (range, base) in bases() {
        [range as u32, (range >> 32) as u32].into_iter().for_each(&mut put);
        [base.extent().unwrap_or(NO_EXTENT), base.version].into_iter().for_each(&mut put);
        [base.pages as u32, (base.pages >> 32) as u32].into_iter().for_each(&mut put);
    }
    put(table.delta_parts().count() as u32);
    for (extent, parts) in table.delta_parts() {
        [extent, parts.len() as u32].into_iter().for_each(&mut put);
        parts.iter().flat_map(|&(first, version)| [first, version]).for_each(&mut put);
    }
    put(table.runs.len() as u32);
    for run in table.runs.values() {
        let segments = run.segments.iter().flat_map(|segment| [segment.first, segment.count]);
        [run.version, run.row_count, run.key_bytes, run.segments.len() as u32]
            .into_iter()
            .chain(segments)
            .for_each(&mut put);
    }
    bytes
}

/// Decodes and checks what [`encode`] wrote for `table`.
///
/// # Errors
/// `Corruption` for anything that no table can be.
pub(crate) fn decode(bytes: &[u8], table: &TableSchema) -> Result<StoredTable> {
    let words = bytes.strip_prefix(&MAGIC).filter(|words| words.len() % 4 == 0);
    let mut words = Words { words: words.ok_or_else(damaged)? };
    if words.take()? != VERSION {
        return Err(Error::invalid("format version of a cold table is not supported")
            .with("remedy", "open it with the version that wrote it"));
    }
    let page_bytes = words.take()?;
    let geometry = Geometry::with_range_pages(table, u64::from(words.take()?));
    geometry.check()?;
    if page_bytes as usize != geometry.page_bytes() {
        return Err(damaged().with("page_bytes", page_bytes));
    }
    let (next_version, file_extents) = (words.take()?, words.take()?);
    let (extent, used) = (words.take()?, words.take()?);
    let open = (extent != NO_EXTENT).then_some((extent, used));
    let mut stored = StoredTable {
        geometry,
        next_version,
        file_extents,
        open,
        bases: Vec::new(),
        parts: Vec::new(),
        runs: Vec::new(),
    };
    for _ in 0..words.take()? {
        let range = words.take_u64()?;
        let (extent, version) = (words.take()?, words.take()?);
        stored.bases.push((range, BaseRange::new(extent, version, words.take_u64()?)));
    }
    for _ in 0..words.take()? {
        let extent = words.take()?;
        let parts = words.take_pairs()?;
        stored.parts.push((extent, parts));
    }
    for _ in 0..words.take()? {
        let (version, row_count, key_bytes) = (words.take()?, words.take()?, words.take()?);
        let pairs = words.take_pairs()?;
        let segments = pairs.into_iter().map(|(first, count)| PageRun { first, count }).collect();
        stored.runs.push(Run { version, row_count, live_rows: 0, key_bytes, segments });
    }
    match words.words.is_empty() && stored.is_possible() {
        true => Ok(stored),
        false => Err(damaged()),
    }
}

fn damaged() -> Error {
    Error::corruption("table file of a commit is damaged")
        .with("remedy", "restore the store's folder from a copy")
}

/// What is left to decode.
struct Words<'a> {
    words: &'a [u8],
}

impl Words<'_> {
    fn take(&mut self) -> Result<u32> {
        let (word, rest) = self.words.split_first_chunk::<4>().ok_or_else(damaged)?;
        self.words = rest;
        Ok(u32::from_le_bytes(*word))
    }

    fn take_u64(&mut self) -> Result<u64> {
        Ok(u64::from(self.take()?) | u64::from(self.take()?) << 32)
    }

    fn take_pairs(&mut self) -> Result<Vec<(u32, u32)>> {
        (0..self.take()?).map(|_| Ok((self.take()?, self.take()?))).collect()
    }
}

impl StoredTable {
    // Everything that arithmetic elsewhere takes for granted.
    fn is_possible(&self) -> bool {
        let range_pages = self.geometry.range_pages;
        let mut extents = BTreeSet::new();
        let mut is_new = |extent: u32| extent < self.file_extents && extents.insert(extent);
        let is_version = |version: u32| (1..self.next_version).contains(&version);
        let no_page_beyond = |pages: u64| range_pages == 64 || pages >> range_pages == 0;
        let bases = self.bases.iter().all(|(range, base)| {
            *range < self.geometry.range_count()
                && base.extent().is_some_and(&mut is_new)
                && is_version(base.version)
                && no_page_beyond(base.pages)
        });
        let parts = self.parts.iter().all(|(extent, parts)| {
            is_new(*extent)
                && parts
                    .iter()
                    .all(|(first, version)| u64::from(*first) < range_pages && is_version(*version))
                && parts.is_sorted_by(|a, b| a.0 < b.0)
        });
        let open = self.open.is_none_or(|(extent, used)| {
            u64::from(used) <= range_pages && self.parts.iter().any(|part| part.0 == extent)
        });
        self.file_extents <= self.geometry.extents_max().saturating_add(1 << 8)
            && self.bases.is_sorted_by(|a, b| a.0 < b.0)
            && self.runs.is_sorted_by(|a, b| a.version < b.version)
            && bases
            && parts
            && open
            && self.runs.iter().all(|run| is_version(run.version) && self.is_possible_run(run))
            && self.has_own_keys()
    }

    // Whether every key page lies in an extent of runs, in the part of its own run. Record pages
    // need not: those whose rows are all outdated may be another run's by now.
    fn has_own_keys(&self) -> bool {
        let parts: BTreeMap<u32, &[(u32, u32)]> =
            self.parts.iter().map(|(extent, parts)| (*extent, parts.as_slice())).collect();
        let owner_of = |page: u32| {
            let extent = self.geometry.extent_of(page);
            let parts = parts.get(&extent)?;
            let at = page - self.geometry.first_page(extent);
            let after = parts.partition_point(|(first, _)| *first <= at);
            parts.get(after.checked_sub(1)?).map(|(_, version)| *version)
        };
        let payload_bytes = self.geometry.page_bytes() - HEADER_BYTES;
        self.runs.iter().all(|run| {
            let mut keys = run.pages().take(run.key_page_count(payload_bytes));
            keys.all(|page| owner_of(page) == Some(run.version))
        })
    }

    fn is_possible_run(&self, run: &Run) -> bool {
        let range_pages = self.geometry.range_pages as u32;
        let file_pages = u64::from(self.file_extents) * self.geometry.range_pages;
        let in_one_extent = |segment: &PageRun| {
            (1..=range_pages).contains(&segment.count)
                && segment.first % range_pages + segment.count <= range_pages
                && u64::from(segment.first) + u64::from(segment.count) <= file_pages
        };
        let key_pages = run.key_page_count(self.geometry.page_bytes() - HEADER_BYTES) as u64;
        let record_pages = u64::from(run.row_count.div_ceil(self.geometry.delta_slots));
        run.row_count > 0
            && run.segments.iter().all(in_one_extent)
            && run.page_count() == key_pages + record_pages
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn schema() -> TableSchema {
        TableSchema::plain("t", 10_000, 9)
    }

    proptest! {
        #[test]
        fn random_words_never_panic(words in proptest::collection::vec(0u32..6, 0..60)) {
            let mut bytes = Vec::from(MAGIC);
            bytes.extend([VERSION, 4096, 4].iter().chain(&words).flat_map(|w| w.to_le_bytes()));
            let _ = decode(&bytes, &schema());
        }

        #[test]
        fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            prop_assert!(decode(&bytes, &schema()).is_err());
        }
    }

    #[test]
    fn key_pages_lie_in_the_part_of_their_run() {
        let decoded = |segment: [u32; 2], version: u32| {
            let mut bytes = Vec::from(MAGIC);
            // Extents of 4 pages, 8 of them; extent 5 has run 3 from its page 1 on.
            let head = [VERSION, 4096, 4, 9, 8, u32::MAX, 0, 0, 1, 5, 1, 1, 3];
            // A page of keys and one of records.
            let run = [1, version, 1, 1, 1, segment[0], segment[1]];
            bytes.extend(head.iter().chain(&run).flat_map(|word| word.to_le_bytes()));
            decode(&bytes, &schema())
        };
        assert_eq!(decoded([21, 2], 3).unwrap().runs.len(), 1);
        for (segment, version, why) in [
            ([20, 2], 3, "page before the part"),
            ([21, 2], 4, "part of another run"),
            ([24, 2], 3, "extent of no run"),
        ] {
            let error = decoded(segment, version).unwrap_err();
            assert_eq!(error.kind(), tierbed_core::ErrorKind::Corruption, "{why}");
        }
    }

    #[test]
    fn impossible_tables_are_refused() {
        let bytes = |words: &[u32]| {
            let mut bytes = Vec::from(MAGIC);
            bytes.extend(words.iter().flat_map(|word| word.to_le_bytes()));
            bytes
        };
        let none = u32::MAX;
        // Version, page bytes, range pages, next version, extents, open, bases...
        let head = [VERSION, 4096, 4, 9, 8, none, 0];
        let with = |rest: &[u32]| decode(&bytes(&[&head, rest].concat()), &schema());
        with(&[1, 0, 0, 3, 5, 15, 0, 0, 0]).unwrap();
        for (rest, why) in [
            (vec![1, 0, 0, 8, 5, 15, 0, 0, 0], "extent beyond the file"),
            (vec![1, 0, 0, 3, 9, 15, 0, 0, 0], "version of the future"),
            (vec![1, 0, 0, 3, 5, 16, 0, 0, 0], "page beyond the range"),
            (vec![1, 9999, 0, 3, 5, 15, 0, 0, 0], "range beyond the table"),
            (vec![1, 0, 0, 3, 5, 15, 0, 1, 3, 1, 0, 5, 0], "extent twice"),
            (vec![0, 0, 1, 5, 10, 10, 1, 0, 9], "more pages than rows"),
            (vec![0, 0, 0, 7], "bytes behind the end"),
        ] {
            let error = with(&rest).unwrap_err();
            assert_eq!(error.kind(), tierbed_core::ErrorKind::Corruption, "{why}");
        }
    }
}
