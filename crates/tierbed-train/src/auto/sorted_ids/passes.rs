//! Passes over uses: which ids are new, the rows they get, and the row of each use.

#![expect(clippy::indexing_slicing, reason = "runs, tables and ranges are counted before")]

use tierbed_core::checksum::crc32c;
use tierbed_core::Result;
use tierbed_vocab::{unmix, BATCH_BYTES_PER_INDEX, SHARED_ROW};

use super::batches::Joined;
use super::values::{Found, Given, NewId, Use, FOUND_BYTES};
use super::{part_of, BatchSink, IdSorter, Ranges};
use crate::auto::ids::PlannedIds;
use crate::parts::{lost_scratch, Parts};

/// Ids looked for at once, at least.
const FIND_IDS_MIN: usize = 256;
/// Number without a use so far.
const NO_ROW: i64 = -1;

/// What the last pass over parts needs.
pub(super) struct Passed {
    pub(super) uses: Parts,
    pub(super) given: Parts,
    /// Rows of each open table before ids of these batches got some.
    pub(super) old_rows: Vec<u64>,
}

impl IdSorter {
    // Takes all values of a part, sorted.
    fn take_sorted<T: Ord, const N: usize>(
        &mut self,
        parts: &mut Parts,
        part: usize,
        decode: impl Fn([u8; N]) -> T,
    ) -> Result<Vec<T>> {
        let value_count = parts.value_count(part);
        self.hold((value_count * size_of::<T>()) as u64 + self.memory_bytes / 2)?;
        let mut values = Vec::with_capacity(value_count);
        while let Some(bytes) = parts.take::<N>(part)? {
            values.push(decode(bytes));
        }
        assert_eq!(values.len(), value_count, "values of a part are lost");
        values.sort_unstable();
        Ok(values)
    }

    // Finds the row of each distinct id of `uses`, which are of one table and by hash.
    fn rows_of(&self, ids: &mut PlannedIds, uses: &[Use]) -> Result<Vec<i64>> {
        let distinct = uses.chunk_by(|a, b| a.hash == b.hash);
        let mut rows: Vec<i64> = distinct.map(|same| unmix(same[0].hash)).collect();
        let at_once = self.memory_bytes as usize / 16 / BATCH_BYTES_PER_INDEX;
        for some in rows.chunks_mut(at_once.max(FIND_IDS_MIN)) {
            ids.find_known(uses[0].table, some)?;
        }
        Ok(rows)
    }

    /// Notes the first use of each id without a row that a step is made of.
    pub(super) fn find_new(
        &mut self,
        ids: &mut PlannedIds,
        uses: &mut Parts,
        ranges: &Ranges,
    ) -> Result<Parts> {
        let mut new = self.parts("new", ranges.count())?;
        for part in 0..self.part_count {
            let of_part = self.take_sorted(uses, part, Use::decode)?;
            uses.rewind(part);
            for of_table in of_part.chunk_by(|a, b| a.table == b.table) {
                let rows = self.rows_of(ids, of_table)?;
                for (same, row) in of_table.chunk_by(|a, b| a.hash == b.hash).zip(rows) {
                    let first = same.iter().find(|used| self.runs[used.run as usize].is_stepped);
                    let Some(first) = first.filter(|_| row == SHARED_ROW as i64) else { continue };
                    let Use { table, hash, run, number } = *first;
                    new.add(ranges.of(run), NewId { table, run, number, hash }.encode())?;
                }
            }
        }
        new.seal()?;
        (0..ranges.count()).for_each(|range| new.rest(range));
        Ok(new)
    }

    /// Gives rows to new ids in order of first use, behind `old_rows` of each open table.
    pub(super) fn give_rows(
        &mut self,
        ids: &mut PlannedIds,
        new: &mut Parts,
        old_rows: &[u64],
        ranges: &Ranges,
    ) -> Result<Parts> {
        let mut given = self.parts("given", self.part_count)?;
        let mut next_rows = old_rows.to_vec();
        for range in 0..ranges.count() {
            for new in self.take_sorted(new, range, NewId::decode)? {
                let NewId { table, hash, .. } = new;
                let next_row = &mut next_rows[table as usize];
                let value = Given { table, hash, row: *next_row };
                given.add(part_of(hash, self.part_count), value.encode())?;
                *next_row += 1;
            }
            new.forget(range);
        }
        given.seal()?;
        (0..self.part_count).for_each(|part| given.rest(part));
        for (at, (next, old)) in (0u32..).zip(next_rows.iter().zip(old_rows)) {
            let first = ids.set_rows_aside(at, next - old)?;
            assert_eq!(first, *old, "rows were given meanwhile");
        }
        Ok(given)
    }

    /// Brings the rows that were given into the index, and finds the row of each use.
    pub(super) fn insert(
        &mut self,
        ids: &mut PlannedIds,
        passed: Passed,
        ranges: &Ranges,
    ) -> Result<Parts> {
        let Passed { mut uses, mut given, old_rows } = passed;
        let mut found = self.parts("found", ranges.count())?;
        for part in 0..self.part_count {
            let of_part = self.take_sorted(&mut given, part, Given::decode)?;
            given.forget(part);
            for of_table in of_part.chunk_by(|a, b| a.table == b.table) {
                let pairs: Vec<_> = of_table.iter().map(|given| (given.hash, given.row)).collect();
                ids.give(of_table[0].table, &pairs)?;
            }
            drop(of_part);
            let of_part = self.take_sorted(&mut uses, part, Use::decode)?;
            uses.forget(part);
            for of_table in of_part.chunk_by(|a, b| a.table == b.table) {
                let old_rows = old_rows[of_table[0].table as usize];
                let rows = self.rows_of(ids, of_table)?;
                for (same, row) in of_table.chunk_by(|a, b| a.hash == b.hash).zip(rows) {
                    let is_new = row.unsigned_abs() >= old_rows;
                    let first = same.iter().find(|used| self.runs[used.run as usize].is_stepped);
                    assert!(!is_new || first.is_some(), "an id got a row and has no step");
                    for used in same {
                        // Until its first step an id has no row.
                        let is_early = is_new && first.is_some_and(|first| used.run < first.run);
                        let row = if is_early { SHARED_ROW } else { row.unsigned_abs() };
                        let Use { run, number, .. } = *used;
                        found.add(ranges.of(run), Found { run, number, row }.encode())?;
                    }
                }
            }
        }
        found.seal()?;
        (0..ranges.count()).for_each(|range| found.rest(range));
        Ok(found)
    }

    /// Passes batches to `sink`, with rows for ids.
    pub(super) fn pass_on(
        &mut self,
        found: &mut Parts,
        ranges: &Ranges,
        sink: &mut BatchSink<'_>,
    ) -> Result<()> {
        let is_open: Vec<bool> = self.tables.iter().map(Option::is_some).collect();
        let mut joined = Joined::new(&is_open);
        let (mut rows, mut words) = (Vec::new(), Vec::new());
        for range in 0..ranges.count() {
            let runs = ranges.runs(range);
            let mut bases = Vec::with_capacity(runs.len());
            let mut row_count = 0;
            for written in &self.runs[runs.clone()] {
                bases.push(row_count);
                row_count += written.number_count as usize;
            }
            self.hold((size_of::<i64>() * row_count) as u64 + self.memory_bytes / 2)?;
            rows.clear();
            rows.resize(row_count, NO_ROW);
            while let Some(bytes) = found.take::<FOUND_BYTES>(range)? {
                let Found { run, number, row } = Found::decode(bytes);
                rows[bases[run as usize - runs.start] + number as usize] = row as i64;
            }
            found.forget(range);
            if rows.contains(&NO_ROW) {
                return Err(lost_scratch());
            }
            for (written, base) in self.runs[runs].iter().zip(bases) {
                words.resize(written.word_count, 0);
                self.batches.read_at(written.at_bytes, bytemuck::cast_slice_mut(&mut words))?;
                if crc32c(bytemuck::cast_slice(&words)) != written.crc32c {
                    return Err(lost_scratch());
                }
                joined.push(&words, &rows[base..], sink)?;
            }
        }
        assert!(joined.is_whole(), "a batch lacks its end");
        Ok(())
    }
}
