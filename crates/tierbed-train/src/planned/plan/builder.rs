//! Plan builder: batches in, one after the other; a plan out.

#![expect(
    clippy::indexing_slicing,
    reason = "batches are checked, and features read tables of the plan"
)]

use std::ops::Range;
use std::sync::Arc;

use tierbed_core::checksum::crc32c;
use tierbed_core::{Bags, Error, Result, TableId};
use tierbed_io::{Appender, Folder};

use super::columns::mapping_width;
use super::copy::copy_name;
use super::format::{Header, BLOCK_BATCH_BYTES};
use super::scratch::{create, remove_scratch};
use super::seen::Seen;
use super::{ids_checksum, PlanOptions, PlanShape};
use crate::planned::bits::{BitWriter, PAD_BYTES};

/// A window is cut behind the batch with which it has this many indices: 32 MiB of ids.
const WINDOW_INDICES_MAX: usize = 4 << 20;

/// One batch of the window being gathered.
#[derive(Debug, Clone, Copy)]
struct BatchNote {
    index_count: u32,
    checksum: u32,
}

/// Makes a plan from the batches of an epoch. See the module documentation.
#[derive(Debug)]
pub struct PlanBuilder {
    pub(super) folder: Arc<dyn Folder>,
    pub(super) name: String,
    pub(super) shape: PlanShape,
    pub(super) options: PlanOptions,
    pub(super) header: Header,
    tables: Vec<Seen>,
    /// What growing tables may take of the memory for bits.
    bits_left_bytes: u64,
    batches: Vec<BatchNote>,
    /// The window's indices, batch after batch.
    ids: Vec<i64>,
    /// Indices of each feature of each batch of the window.
    runs: Vec<u32>,
    pub(super) rows: Appender,
    pub(super) bodies: Appender,
    pub(super) windows: Vec<ScratchWindow>,
    pub(super) counts: Vec<u32>,
    /// Checksum of the rows of each table in each window, `[K * T]`.
    pub(super) row_crcs: Vec<u32>,
    work_rows: Vec<u64>,
    work_body: Vec<u8>,
}

/// What lies in the scratch files for a window.
#[derive(Debug, Clone, Copy)]
pub(super) struct ScratchWindow {
    pub(super) batch_count: u32,
    pub(super) body_bytes: u32,
    pub(super) body_crc32c: u32,
}

impl PlanBuilder {
    /// Starts the plan `name` in `folder`, which also holds scratch files until the plan is
    /// finished. An older plan of that name is gone from now on.
    ///
    /// `source` identifies the batches and their order (a fingerprint of the data, the seed of
    /// the shuffle, the batch size); [`EpochPlan::open_for`](super::EpochPlan::open_for) compares
    /// it.
    ///
    /// # Errors
    /// `Invalid` for options or a source out of range, otherwise the folder's.
    pub fn new(
        folder: Arc<dyn Folder>,
        name: &str,
        shape: PlanShape,
        source: &str,
        options: PlanOptions,
    ) -> Result<Self> {
        options.check(source)?;
        folder.remove(name)?;
        folder.remove(&copy_name(name))?;
        remove_scratch(&*folder, name)?;
        let header = Header {
            key: options.key(source),
            table_count: shape.row_counts.len() as u32,
            feature_count: shape.feature_tables.len() as u32,
            ..Header::default()
        };
        let rows = create(&*folder, &format!("{name}.rows"))?;
        let bodies = create(&*folder, &format!("{name}.bodies"))?;
        Ok(Self {
            rows,
            bodies,
            folder,
            name: name.to_owned(),
            tables: Seen::of_tables(&shape.row_counts, options.memory_bytes / 2),
            bits_left_bytes: Seen::left_bytes(&shape.row_counts, options.memory_bytes / 2),
            shape,
            options,
            header,
            batches: Vec::new(),
            ids: Vec::new(),
            runs: Vec::new(),
            windows: Vec::new(),
            counts: Vec::new(),
            row_crcs: Vec::new(),
            work_rows: Vec::new(),
            work_body: Vec::new(),
        })
    }

    /// Adds the next batch: the ids of each feature, in the order training will see them.
    ///
    /// # Errors
    /// `Invalid` for ids or shapes out of range (the plan is then as it was), otherwise those of
    /// the scratch files.
    pub fn push(&mut self, bags: &Bags<'_>) -> Result<()> {
        self.push_known_by(bags, ids_checksum(bags))
    }

    /// Checks the next batch, of ids where `is_open` says that a table has rows for any.
    ///
    /// # Errors
    /// `Invalid` for ids or shapes out of range.
    pub(crate) fn check_ids(
        &self,
        bags: &Bags<'_>,
        is_open: &dyn Fn(TableId) -> bool,
    ) -> Result<()> {
        self.check(bags, &|table| !is_open(table))
    }

    /// Adds the next batch, `bags` of rows, which training will know by its ids: by their
    /// `checksum`. Tables that `is_open` names grow with their rows.
    ///
    /// # Errors
    /// As [`push`](Self::push).
    pub(crate) fn push_translated(
        &mut self,
        bags: &Bags<'_>,
        checksum: u32,
        is_open: &dyn Fn(TableId) -> bool,
    ) -> Result<()> {
        self.grow(bags, is_open)?;
        self.push_known_by(bags, checksum)
    }

    // Makes tables as long as the rows of `bags` want them.
    fn grow(&mut self, bags: &Bags<'_>, is_open: &dyn Fn(TableId) -> bool) -> Result<()> {
        self.check_shape(bags)?;
        for (feature, &table) in self.shape.feature_tables.iter().enumerate() {
            let largest = bags.indices[range_of(bags, feature)].iter().max().copied();
            let Some(largest) = largest.and_then(|row| u64::try_from(row).ok()) else { continue };
            let rows = &mut self.shape.row_counts[table.0 as usize];
            if largest >= *rows && is_open(table) {
                *rows = largest + 1;
                self.tables[table.0 as usize].grow(*rows, &mut self.bits_left_bytes);
            }
        }
        Ok(())
    }

    fn push_known_by(&mut self, bags: &Bags<'_>, checksum: u32) -> Result<()> {
        self.check(bags, &|_| true)?;
        for (feature, table) in self.shape.feature_tables.iter().enumerate() {
            let ids = &bags.indices[range_of(bags, feature)];
            self.tables[table.0 as usize].note(ids);
            self.runs.push(ids.len() as u32);
            self.ids.extend_from_slice(ids);
        }
        let index_count = bags.indices.len() as u32;
        self.batches.push(BatchNote { index_count, checksum });
        self.header.batch_count += 1;
        self.header.index_count += u64::from(index_count);
        self.header.batch_indices_max = self.header.batch_indices_max.max(index_count);
        if self.is_window_full() {
            self.cut_window()?;
        }
        Ok(())
    }

    fn check_shape(&self, bags: &Bags<'_>) -> Result<()> {
        if bags.feature_count != self.shape.feature_tables.len() {
            return Err(Error::invalid("batch has another number of features than the plan")
                .with("features", bags.feature_count)
                .with("expected", self.shape.feature_tables.len()));
        }
        if u32::try_from(bags.indices.len()).is_err() {
            return Err(Error::invalid("a batch holds at most 2^32 - 1 indices"));
        }
        Ok(())
    }

    // Checks the shape, and the rows of tables that `has_rows` names.
    fn check(&self, bags: &Bags<'_>, has_rows: &dyn Fn(TableId) -> bool) -> Result<()> {
        self.check_shape(bags)?;
        let features = self.shape.feature_tables.iter().enumerate();
        for (feature, table) in features.filter(|(_, table)| has_rows(**table)) {
            let rows = self.shape.row_counts[table.0 as usize];
            let ids = &bags.indices[range_of(bags, feature)];
            // A negative id is a large one.
            let largest = ids.iter().fold(0, |largest, &id| largest.max(id as u64));
            if largest >= rows && !ids.is_empty() {
                let id = ids.iter().find(|&&id| id as u64 >= rows);
                return Err(Error::invalid("row id out of range")
                    .with("feature", feature)
                    .with("row", id.unwrap_or(&0))
                    .with("num_embeddings", rows));
            }
        }
        Ok(())
    }

    fn is_window_full(&self) -> bool {
        let bytes =
            |(seen, record_bytes): (&Seen, &u32)| seen.count() as u64 * u64::from(*record_bytes);
        let entry_bytes: u64 = self.tables.iter().zip(&self.shape.record_bytes).map(bytes).sum();
        entry_bytes >= self.options.window_bytes
            || self.batches.len() >= self.options.window_batches_max as usize
            || self.ids.len() >= WINDOW_INDICES_MAX
    }

    // Appends the window's rows and the part of its block that the future does not change.
    fn cut_window(&mut self) -> Result<()> {
        assert!(!self.batches.is_empty(), "a window has at least one batch");
        for seen in &mut self.tables {
            self.work_rows.clear();
            seen.number(&mut self.work_rows);
            let bytes: &[u8] = bytemuck::cast_slice(&self.work_rows);
            self.row_crcs.push(crc32c(bytes));
            self.counts.push(self.work_rows.len() as u32);
            self.rows.append(bytes)?;
        }
        self.encode_batches();
        self.bodies.append(&self.work_body)?;
        self.windows.push(ScratchWindow {
            batch_count: self.batches.len() as u32,
            body_bytes: self.work_body.len() as u32,
            body_crc32c: crc32c(&self.work_body),
        });
        self.header.window_count += 1;
        assert_eq!(self.header.window_count as usize, self.windows.len(), "a window is not noted");
        let cells = self.windows.len() * self.tables.len();
        assert_eq!(self.counts.len(), cells, "each table of each window has a count");
        self.tables.iter_mut().for_each(Seen::clear);
        self.batches.clear();
        self.ids.clear();
        self.runs.clear();
        Ok(())
    }

    // Notes of all batches, then their mappings, then room to load words; offsets count from the
    // first mapping.
    fn encode_batches(&mut self) {
        let width = |seen: &Seen| u32::from(mapping_width(seen.count()));
        let widths: Vec<u32> = self.tables.iter().map(width).collect();
        let body = &mut self.work_body;
        body.clear();
        body.resize(BLOCK_BATCH_BYTES * self.batches.len(), 0);
        let mappings_at = body.len();
        let (mut ids, mut runs) = (self.ids.as_slice(), self.runs.iter());
        for (at, batch) in self.batches.iter().enumerate() {
            let mapping_at = (body.len() - mappings_at) as u32;
            let note = &mut body[BLOCK_BATCH_BYTES * at..];
            let words = [batch.index_count, batch.checksum, mapping_at];
            for (place, word) in note.chunks_exact_mut(4).zip(words) {
                place.copy_from_slice(&word.to_le_bytes());
            }
            let mut writer = BitWriter::new(body);
            for (table, &count) in self.shape.feature_tables.iter().zip(runs.by_ref()) {
                let at = table.0 as usize;
                let (now, later) = ids.split_at(count as usize);
                ids = later;
                let width = widths[at];
                self.tables[at].numbers(now, |number| writer.push_short(number, width));
            }
            writer.finish();
        }
        assert!(ids.is_empty() && runs.next().is_none(), "an index of the window has no batch");
        body.extend([0; PAD_BYTES]);
    }

    /// Finds all next uses, writes the plan and removes the scratch files.
    ///
    /// The plan is durable when this returns; until then there is none of that name.
    ///
    /// # Errors
    /// `Invalid` for no batches, otherwise the folder's.
    pub fn finish(mut self) -> Result<()> {
        if !self.batches.is_empty() {
            self.cut_window()?;
        }
        if self.header.batch_count == 0 {
            return Err(Error::invalid("a plan needs at least one batch"));
        }
        self.tables = Vec::new();
        self.ids = Vec::new();
        self.write()
    }
}

// Where the indices of a feature are.
fn range_of(bags: &Bags<'_>, feature: usize) -> Range<usize> {
    let offsets = bags.feature_offsets(feature);
    offsets[0] as usize..offsets[offsets.len() - 1] as usize
}
