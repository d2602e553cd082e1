//! Rows for the ids of many batches at once, by sorting outside memory.
//!
//! When the index is far larger than memory, to look for the ids of a batch reads a page at random
//! for nearly each of them. So batches wait in a scratch file until they have about as many ids as
//! the index. Then each page is read once for all of them:
//!
//! 1. Batches are written as runs of words. The distinct ids of a run are numbered in order of
//!    first use, and numbers replace ids. Each is noted as a use, in parts by hash.
//! 2. Part by part, the first uses of ids without a row are noted, by ranges of runs.
//! 3. Range by range, these ids get rows in order of first use: those that they would have got
//!    batch by batch.
//! 4. Part by part, these rows go into the index, and each use finds its row, by ranges of runs.
//! 5. Range by range, rows replace numbers, and batches go on to the plan.
//!
//! A batch without a step gives no rows. All its ids that come first in a later batch, or never,
//! read the shared row.

mod batches;
mod passes;
mod run;
mod values;

#[cfg(test)]
mod tests;

use std::ops::Range;
use std::sync::Arc;

use tierbed_core::checksum::crc32c;
use tierbed_core::{Bags, Reservation, Result, TableId};
use tierbed_io::{Device, Folder, OpenMode};

use crate::auto::ids::PlannedIds;
use crate::parts::Parts;
use crate::planned::plan::ids_checksum;
use passes::Passed;
use run::{Run, WrittenRun, RUN_BYTES_PER_WORD};
use values::{NewId, Use, BLOCK_UNIT};

/// Memory that the index keeps, unless that is more than half of it.
const KEPT_BYTES: u64 = 512 << 10;
/// Least memory to sort with.
const MEMORY_MIN_BYTES: u64 = 32 << 10;
const BLOCK_BYTES_MAX: u64 = 64 << 10;
const BLOCK_BYTES_MIN: u64 = 4 * BLOCK_UNIT as u64;

/// Takes the rows of a batch, and the checksum of its ids.
pub(crate) type BatchSink<'a> = dyn FnMut(&Bags<'_>, u32) -> Result<()> + 'a;

/// See the module documentation.
pub(crate) struct IdSorter {
    folder: Arc<dyn Folder>,
    name: String,
    /// Open table that each feature reads, `[F]`.
    tables: Vec<Option<u32>>,
    memory_bytes: u64,
    memory: Reservation,
    run: Run,
    runs: Vec<WrittenRun>,
    batches: Arc<dyn Device>,
    end_bytes: u64,
    uses: Option<Parts>,
    part_count: usize,
    id_count: u64,
    /// With more ids, batches get their rows.
    id_max: u64,
}

#[expect(clippy::indexing_slicing, reason = "bounds are those of the batch")]
impl IdSorter {
    /// Begins scratch files in `folder`, whose names begin with `name`, for batches whose features
    /// read `tables`. Of the memory that `ids` has free, half to three quarters are for sorting.
    ///
    /// # Errors
    /// `Invalid` when too little is free, otherwise the folder's.
    pub(crate) fn new(
        folder: Arc<dyn Folder>,
        name: &str,
        tables: Vec<TableId>,
        ids: &PlannedIds,
    ) -> Result<Self> {
        let free_bytes = ids.budget().free_bytes();
        // The index grows meanwhile, and looks for ids.
        let kept_bytes = (free_bytes / 4).max(KEPT_BYTES.min(free_bytes / 2));
        let memory_bytes = (free_bytes - kept_bytes).max(MEMORY_MIN_BYTES);
        let memory = ids.budget().reserve("ids of a plan", memory_bytes)?;
        let open: Vec<TableId> = ids.open_tables().collect();
        let number = |table| open.iter().position(|open| *open == table).map(|at| at as u32);
        let tables = tables.into_iter().map(number).collect();
        let batches = folder.open(&format!("{name}.batches"), OpenMode::Create)?;
        Ok(Self {
            folder,
            name: name.to_owned(),
            tables,
            memory_bytes,
            memory,
            run: Run::default(),
            runs: Vec::new(),
            batches,
            end_bytes: 0,
            uses: None,
            part_count: 0,
            id_count: 0,
            id_max: 0,
        })
    }

    /// Adds a batch of raw ids, which is stepped or not; those that have waited long enough go to
    /// `sink`.
    ///
    /// # Errors
    /// Those of the scratch files, the index and `sink`.
    pub(crate) fn push(
        &mut self,
        ids: &mut PlannedIds,
        bags: &Bags<'_>,
        is_stepped: bool,
        sink: &mut BatchSink<'_>,
    ) -> Result<()> {
        assert_eq!(self.tables.len(), bags.feature_count, "each feature reads a table");
        if self.run.is_stepped != is_stepped {
            self.end_run(ids)?;
        }
        if self.id_count > self.id_max {
            self.flush(ids, sink)?;
        }
        self.run.is_stepped = is_stepped;
        let bounds: Vec<i64> = bags.bounds().collect();
        self.push_words(ids, None, &[i64::from(ids_checksum(bags))])?;
        self.push_words(ids, None, &bounds)?;
        for (feature, range) in bounds.windows(2).enumerate() {
            let found = &bags.indices[range[0] as usize..range[1] as usize];
            self.push_words(ids, self.tables[feature], found)?;
        }
        self.id_count += bags.indices.len() as u64;
        Ok(())
    }

    // Adds words to the run, and ends it as often as it is full.
    fn push_words(&mut self, ids: &PlannedIds, table: Option<u32>, words: &[i64]) -> Result<()> {
        let word_max = (self.memory_bytes / 4 / RUN_BYTES_PER_WORD).max(1) as usize;
        let mut rest = words;
        while !rest.is_empty() {
            let (now, later) = rest.split_at(rest.len().min(word_max - self.run.words().len()));
            self.run.push(table, now);
            rest = later;
            if self.run.words().len() == word_max {
                self.end_run(ids)?;
            }
        }
        Ok(())
    }

    // Reserves `bytes`, if that is more than was needed so far.
    fn hold(&mut self, bytes: u64) -> Result<()> {
        match bytes > self.memory.bytes() {
            true => self.memory.resize(bytes),
            false => Ok(()),
        }
    }

    // Writes the run and notes its ids.
    fn end_run(&mut self, ids: &PlannedIds) -> Result<()> {
        if self.run.words().is_empty() {
            return Ok(());
        }
        let run = self.runs.len() as u32;
        if self.uses.is_none() {
            self.begin(ids)?;
        }
        let Some(uses) = &mut self.uses else { panic!("parts were made") };
        let mut number_count = 0;
        for table in 0..ids.open_tables().count() as u32 {
            let mut note = |hash, number| {
                let used = Use { table, hash, run, number };
                uses.add(part_of(hash, self.part_count), used.encode())
            };
            number_count = self.run.number(table, number_count, &mut note)?;
        }
        let words = self.run.words();
        let bytes: &[u8] = bytemuck::cast_slice(words);
        self.batches.write_at(self.end_bytes, bytes)?;
        self.runs.push(WrittenRun {
            at_bytes: self.end_bytes,
            word_count: words.len(),
            crc32c: crc32c(bytes),
            number_count,
            is_stepped: self.run.is_stepped,
        });
        self.end_bytes += bytes.len() as u64;
        self.run.clear();
        Ok(())
    }

    // As many ids as the index has, in parts that fit a fifth of the memory each, and have a block
    // each in a quarter of it.
    fn begin(&mut self, ids: &PlannedIds) -> Result<()> {
        let part_uses = (self.memory_bytes / 5 / size_of::<Use>() as u64).max(1);
        let part_max = (self.memory_bytes / 4 / BLOCK_BYTES_MIN).max(1);
        let wanted = ids.id_count().max(self.memory_bytes / 8);
        self.id_max = wanted.min(part_uses * part_max);
        self.part_count = self.id_max.div_ceil(part_uses).max(1) as usize;
        self.uses = Some(self.parts("uses", self.part_count)?);
        Ok(())
    }

    fn parts(&self, kind: &str, part_count: usize) -> Result<Parts> {
        let bytes = (self.memory_bytes / 4 / part_count as u64).min(BLOCK_BYTES_MAX) as usize;
        let bytes = (bytes / BLOCK_UNIT).max(1) * BLOCK_UNIT;
        Parts::create(&self.folder, &format!("{}.{kind}", self.name), part_count, bytes)
    }

    /// Gives rows to the ids of all batches that wait, and passes them to `sink`.
    ///
    /// # Errors
    /// As [`push`](Self::push).
    pub(crate) fn flush(&mut self, ids: &mut PlannedIds, sink: &mut BatchSink<'_>) -> Result<()> {
        self.end_run(ids)?;
        let Some(mut uses) = self.uses.take() else { return Ok(()) };
        uses.seal()?;
        (0..self.part_count).for_each(|part| uses.rest(part));
        let ranges = self.ranges();
        let old_rows = ids.next_rows();
        let mut new = self.find_new(ids, &mut uses, &ranges)?;
        let given = self.give_rows(ids, &mut new, &old_rows, &ranges)?;
        let mut found = self.insert(ids, Passed { uses, given, old_rows }, &ranges)?;
        self.pass_on(&mut found, &ranges, sink)?;
        self.runs.clear();
        self.batches.set_len(0)?;
        (self.end_bytes, self.id_count) = (0, 0);
        Ok(())
    }

    // Runs that follow each other and whose rows and new ids fit a quarter of the memory.
    fn ranges(&self) -> Ranges {
        let bytes_per_number = (size_of::<NewId>() + size_of::<u64>()) as u64;
        let number_max = self.memory_bytes / 4 / bytes_per_number;
        let (mut firsts, mut of_run, mut number_count) = (vec![0], Vec::new(), 0);
        for (run, written) in self.runs.iter().enumerate() {
            number_count += u64::from(written.number_count);
            if number_count > number_max && firsts.last() != Some(&run) {
                firsts.push(run);
                number_count = u64::from(written.number_count);
            }
            of_run.push(firsts.len() as u32 - 1);
        }
        firsts.push(self.runs.len());
        Ranges { firsts, of_run }
    }
}

/// Runs that are worked on together.
struct Ranges {
    /// First run of each range, and the number of runs.
    firsts: Vec<usize>,
    of_run: Vec<u32>,
}

#[expect(clippy::indexing_slicing, reason = "runs and ranges are counted when they are made")]
impl Ranges {
    fn count(&self) -> usize {
        self.firsts.len() - 1
    }

    fn of(&self, run: u32) -> usize {
        self.of_run[run as usize] as usize
    }

    fn runs(&self, range: usize) -> Range<usize> {
        self.firsts[range]..self.firsts[range + 1]
    }
}

// Parts are of neighbouring hashes, as pages of the index are.
fn part_of(hash: u64, part_count: usize) -> usize {
    ((u128::from(hash) * part_count as u128) >> 64) as usize
}

impl Drop for IdSorter {
    fn drop(&mut self) {
        // A scratch file that stays costs space until the next plan of the name.
        let _ = self.folder.remove(&format!("{}.batches", self.name));
    }
}
