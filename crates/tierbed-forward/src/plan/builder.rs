//! Batches in, one after the other; a plan out.

use std::sync::Arc;

use hashbrown::HashMap;
use tierbed_core::checksum::crc32c;
use tierbed_core::{Bags, Error, Result};
use tierbed_io::{AlignedBuf, Folder, OpenMode, PAGE_BYTES};

use super::format::{
    Directory, Header, WindowMeta, BLOCK_BATCH_BYTES, BLOCK_HEAD_BYTES, BLOCK_MAGIC,
    BLOCK_TABLE_BYTES,
};
use super::next_use::Entries;
use super::scratch::{read_words, Appender};
use super::{ids_checksum, PlanOptions, PlanShape};
use crate::bits::{width_of, BitWriter, PAD_BYTES};

/// A window is cut behind the batch with which it has this many indices: 16 MiB of mapping.
const WINDOW_INDICES_MAX: usize = 4 << 20;

/// Which rows of a table are entries of the window already?
#[derive(Debug)]
enum Seen {
    /// Per row the entry it might be; it is when that entry names the row. Never cleared.
    Array(Vec<u32>),
    /// For tables whose array does not fit the memory: only the window's rows.
    Map(HashMap<u64, u32>),
}

/// One table's entries of the window being gathered.
#[derive(Debug)]
struct TableWindow {
    seen: Seen,
    rows: Vec<u64>,
}

impl TableWindow {
    #[inline]
    fn entry_of(&mut self, row: u64) -> u32 {
        let fresh = self.rows.len() as u32;
        let entry = match &mut self.seen {
            Seen::Array(entries) => match entries.get_mut(row as usize) {
                Some(entry) if self.rows.get(*entry as usize) == Some(&row) => *entry,
                Some(entry) => {
                    *entry = fresh;
                    fresh
                }
                None => fresh,
            },
            Seen::Map(entries) => *entries.entry(row).or_insert(fresh),
        };
        if entry == fresh {
            self.rows.push(row);
        }
        entry
    }

    fn clear(&mut self) {
        self.rows.clear();
        if let Seen::Map(entries) = &mut self.seen {
            entries.clear();
        }
    }
}

/// One batch of the window being gathered.
#[derive(Debug, Clone, Copy)]
struct BatchNote {
    index_count: u32,
    checksum: u32,
}

/// Makes a plan from the batches of an epoch. See the module documentation.
#[derive(Debug)]
pub struct PlanBuilder {
    folder: Arc<dyn Folder>,
    name: String,
    shape: PlanShape,
    options: PlanOptions,
    header: Header,
    tables: Vec<TableWindow>,
    batches: Vec<BatchNote>,
    /// Entry, in its table, of each index of the window.
    mapping: Vec<u32>,
    /// Feature of each run of indices: `(feature, indices)`.
    runs: Vec<(u32, u32)>,
    rows: Appender,
    bodies: Appender,
    body_bytes: Vec<u64>,
    batch_counts: Vec<u32>,
    counts: Vec<u32>,
    entries_before: Vec<u64>,
}

impl PlanBuilder {
    /// Starts the plan `name` in `folder`, which also holds scratch files until the plan is
    /// finished. An older plan of that name is gone from now on.
    ///
    /// `source` identifies the batches and their order (a fingerprint of the data, the seed of
    /// the shuffle, the batch size); [`Plan::open_for`](super::Plan::open_for) compares it.
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
        let tables = seen_arrays(&shape, options.memory_bytes / 2);
        let header = Header {
            key: options.key(source),
            table_count: shape.row_counts.len() as u32,
            feature_count: shape.feature_tables.len() as u32,
            ..Header::default()
        };
        Ok(Self {
            rows: Appender::create(&*folder, &format!("{name}.rows"))?,
            bodies: Appender::create(&*folder, &format!("{name}.bodies"))?,
            folder,
            name: name.to_owned(),
            shape,
            options,
            header,
            tables,
            batches: Vec::new(),
            mapping: Vec::new(),
            runs: Vec::new(),
            body_bytes: Vec::new(),
            batch_counts: Vec::new(),
            counts: Vec::new(),
            entries_before: Vec::new(),
        })
    }

    /// Adds the next batch: the ids of each feature, in the order training will see them.
    ///
    /// # Errors
    /// `Invalid` for ids or shapes out of range (the plan is then as it was), otherwise those of
    /// the scratch files.
    pub fn push(&mut self, bags: &Bags<'_>) -> Result<()> {
        self.check(bags)?;
        let batch_size = bags.batch_size();
        let bounds = |feature: usize| bags.offsets.get(feature * batch_size).copied().unwrap_or(0);
        for (feature, table) in self.shape.feature_tables.iter().enumerate() {
            let range = bounds(feature) as usize..bounds(feature + 1) as usize;
            let ids = bags.indices.get(range).unwrap_or(&[]);
            let Some(window) = self.tables.get_mut(table.0 as usize) else { continue };
            self.runs.push((feature as u32, ids.len() as u32));
            self.mapping.extend(ids.iter().map(|&id| window.entry_of(id as u64)));
        }
        let index_count = bags.indices.len() as u32;
        self.batches.push(BatchNote { index_count, checksum: ids_checksum(bags) });
        self.header.batch_count += 1;
        self.header.index_count += u64::from(index_count);
        self.header.batch_indices_max = self.header.batch_indices_max.max(index_count);
        if self.is_window_full() {
            self.cut_window()?;
        }
        Ok(())
    }

    fn check(&self, bags: &Bags<'_>) -> Result<()> {
        if bags.feature_count != self.shape.feature_tables.len() {
            return Err(Error::invalid("batch has another number of features than the plan")
                .with("features", bags.feature_count)
                .with("expected", self.shape.feature_tables.len()));
        }
        if u32::try_from(bags.indices.len()).is_err() {
            return Err(Error::invalid("a batch holds at most 2^32 - 1 indices"));
        }
        for (feature, table) in self.shape.feature_tables.iter().enumerate() {
            let rows = self.shape.row_counts.get(table.0 as usize).copied().unwrap_or(0);
            let offsets = bags.feature_offsets(feature);
            let bound = |offset: Option<&i64>| offset.map_or(0, |&offset| offset as usize);
            let range = bound(offsets.first())..bound(offsets.last());
            let ids = bags.indices.get(range).unwrap_or(&[]);
            if let Some(id) = ids.iter().find(|&&id| id < 0 || id as u64 >= rows) {
                return Err(Error::invalid("row id out of range")
                    .with("feature", feature)
                    .with("row", id)
                    .with("num_embeddings", rows));
            }
        }
        Ok(())
    }

    fn is_window_full(&self) -> bool {
        let bytes = |(table, record_bytes): (&TableWindow, &u32)| {
            table.rows.len() as u64 * u64::from(*record_bytes)
        };
        let entry_bytes: u64 = self.tables.iter().zip(&self.shape.record_bytes).map(bytes).sum();
        entry_bytes >= self.options.window_bytes
            || self.batches.len() >= self.options.window_batches_max as usize
            || self.mapping.len() >= WINDOW_INDICES_MAX
    }

    // Appends the window's rows and the part of its block that the future does not change.
    fn cut_window(&mut self) -> Result<()> {
        self.entries_before.push(self.rows.len_bytes() / 8);
        for table in &mut self.tables {
            self.counts.push(table.rows.len() as u32);
            self.rows.append(bytemuck::cast_slice(&table.rows))?;
        }
        let body = self.encode_batches();
        self.body_bytes.push(body.len() as u64);
        self.bodies.append(&body)?;
        self.batch_counts.push(self.batches.len() as u32);
        self.header.window_count += 1;
        self.tables.iter_mut().for_each(TableWindow::clear);
        self.batches.clear();
        self.mapping.clear();
        self.runs.clear();
        Ok(())
    }

    // Notes of all batches, then their mappings; offsets count from the first mapping.
    fn encode_batches(&self) -> Vec<u8> {
        let widths: Vec<u32> =
            self.tables.iter().map(|table| mapping_width(table.rows.len())).collect();
        let mut notes = Vec::with_capacity(self.batches.len() * BLOCK_BATCH_BYTES);
        let mut packed = Vec::new();
        let (mut entries, mut runs) = (self.mapping.iter(), self.runs.iter());
        for batch in &self.batches {
            notes.extend(batch.index_count.to_le_bytes());
            notes.extend(batch.checksum.to_le_bytes());
            notes.extend((packed.len() as u32).to_le_bytes());
            let mut writer = BitWriter::new(&mut packed);
            for (feature, count) in runs.by_ref().take(self.shape.feature_tables.len()) {
                let table = self.shape.feature_tables.get(*feature as usize);
                let width = table.and_then(|table| widths.get(table.0 as usize));
                let width = width.copied().unwrap_or(0);
                for &entry in entries.by_ref().take(*count as usize) {
                    writer.push(u64::from(entry), width);
                }
            }
            writer.finish();
        }
        notes.extend(packed);
        notes
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
        let next =
            Appender::create(&*self.folder, &format!("{}.next", self.name))?.flush()?.clone();
        next.set_len(self.rows.len_bytes())?;
        let entries = Entries {
            rows: self.rows.flush()?.clone(),
            next,
            entries_before: std::mem::take(&mut self.entries_before),
            counts: std::mem::take(&mut self.counts),
            table_count: self.shape.row_counts.len(),
        };
        entries.link(&self.shape.row_counts, self.options.memory_bytes / 2)?;
        self.write_plan(&entries)?;
        for scratch in ["rows", "next", "bodies"] {
            self.folder.remove(&format!("{}.{scratch}", self.name))?;
        }
        self.folder.sync()
    }

    fn write_plan(&mut self, entries: &Entries) -> Result<()> {
        let bodies = self.bodies.flush()?.clone();
        let mut plan = Appender::create(&*self.folder, &self.name)?;
        plan.append(&[0; PAGE_BYTES])?;
        let table_count = self.shape.row_counts.len();
        let mut windows = Vec::new();
        let (mut rows, mut next, mut entry_at, mut body_at) = (Vec::new(), Vec::new(), 0u64, 0u64);
        for (number, counts) in entries.counts.chunks_exact(table_count).enumerate() {
            let count = counts.iter().map(|&count| count as usize).sum();
            read_words(&*entries.rows, entry_at, count, &mut rows)?;
            read_words(&*entries.next, entry_at, count, &mut next)?;
            entry_at += 8 * count as u64;
            let body_bytes = self.body_bytes.get(number).copied().unwrap_or(0);
            let mut body = vec![0; body_bytes as usize];
            bodies.read_at(body_at, &mut body)?;
            body_at += body_bytes;
            let batch_count = self.batch_counts.get(number).copied().unwrap_or(0);
            let head = BlockHead { number: number as u32, batch_count, counts };
            let block = encode_block(&head, &rows, &next, &body)?;
            let len_bytes = block.len() as u32;
            self.header.block_bytes_max = self.header.block_bytes_max.max(len_bytes);
            windows.push(WindowMeta { offset_bytes: plan.len_bytes(), len_bytes, batch_count });
            plan.append(&block)?;
            plan.pad_to(PAGE_BYTES)?;
        }
        let directory =
            Directory { shape: self.shape.clone(), windows, counts: entries.counts.clone() };
        let bytes = directory.encode();
        self.header.directory_offset_bytes = plan.len_bytes();
        self.header.directory_bytes = bytes.len() as u64;
        self.header.directory_crc32c = crc32c(&bytes);
        plan.append(&bytes)?;
        plan.pad_to(PAGE_BYTES)?;
        let device = plan.flush()?;
        device.sync()?;
        // With the header the plan begins to exist.
        let mut page = AlignedBuf::new(PAGE_BYTES);
        page.copy_from_slice(&self.header.encode());
        device.write_at(0, &page)?;
        device.sync()
    }

    /// Tells whether `name` in `folder` exists at all, finished or not.
    pub(crate) fn exists(folder: &dyn Folder, name: &str) -> Result<bool> {
        match folder.open(name, OpenMode::ReadOnly) {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == tierbed_core::ErrorKind::Invalid => Ok(false),
            Err(error) => Err(error),
        }
    }
}

// Arrays for the tables where they cost least, as far as the memory reaches.
fn seen_arrays(shape: &PlanShape, memory_bytes: u64) -> Vec<TableWindow> {
    let mut by_size: Vec<(u64, usize)> = shape.row_counts.iter().copied().zip(0..).collect();
    by_size.sort_unstable();
    let (mut left, mut has_array) = (memory_bytes / 4, vec![false; by_size.len()]);
    for (rows, at) in by_size {
        if rows > left {
            break;
        }
        left -= rows;
        if let Some(has_array) = has_array.get_mut(at) {
            *has_array = true;
        }
    }
    let seen = |(&rows, has_array): (&u64, bool)| match has_array {
        true => Seen::Array(vec![u32::MAX; rows as usize]),
        false => Seen::Map(HashMap::new()),
    };
    let tables = shape.row_counts.iter().zip(has_array).map(seen);
    tables.map(|seen| TableWindow { seen, rows: Vec::new() }).collect()
}

/// Returns the bits of an entry number in a table of `count` entries.
fn mapping_width(count: usize) -> u32 {
    width_of((count as u64).saturating_sub(1))
}

struct BlockHead<'a> {
    number: u32,
    batch_count: u32,
    counts: &'a [u32],
}

fn encode_block(head: &BlockHead<'_>, rows: &[u64], next: &[u64], body: &[u8]) -> Result<Vec<u8>> {
    let table_bytes = BLOCK_TABLE_BYTES * head.counts.len();
    let mut block =
        Vec::with_capacity(BLOCK_HEAD_BYTES + table_bytes + 8 * rows.len() + body.len());
    block.extend([0; 4]);
    block.extend(BLOCK_MAGIC);
    block.extend(head.number.to_le_bytes());
    block.extend([0; 4]);
    block.extend(head.batch_count.to_le_bytes());
    block.extend((head.counts.len() as u32).to_le_bytes());
    let notes_bytes = BLOCK_BATCH_BYTES * head.batch_count as usize;
    let (notes, packed) = body.split_at_checked(notes_bytes).unwrap_or((&[], &[]));
    let mut sections = Vec::new();
    let mut first = 0;
    for &count in head.counts {
        let range = first..first + count as usize;
        first = range.end;
        let (rows, next) = (rows.get(range.clone()).unwrap_or(&[]), next.get(range).unwrap_or(&[]));
        let columns: [&dyn Fn(usize) -> u64; 3] = [
            &|at| rows.get(at).copied().unwrap_or(0),
            &|at| next.get(at).map_or(0, |next| next >> 32),
            &|at| next.get(at).map_or(0, |next| next & u64::from(u32::MAX)),
        ];
        block.extend(count.to_le_bytes());
        for column in columns {
            // The bits of all values together need as many as the largest.
            let all = (0..rows.len()).fold(0, |all, at| all | column(at));
            let width = width_of(all);
            block.push(width as u8);
            let mut writer = BitWriter::new(&mut sections);
            (0..rows.len()).for_each(|at| writer.push(column(at), width));
            writer.finish();
        }
        block.push(mapping_width(count as usize) as u8);
    }
    block.extend(notes);
    block.extend(sections);
    block.extend(packed);
    block.extend([0; PAD_BYTES]);
    let len = u32::try_from(block.len()).map_err(|_| {
        Error::invalid("a window of the plan is too large").with("remedy", "make windows smaller")
    })?;
    if let Some(place) = block.get_mut(12..16) {
        place.copy_from_slice(&len.to_le_bytes());
    }
    let crc = crc32c(block.get(4..).unwrap_or(&[]));
    if let Some(place) = block.get_mut(..4) {
        place.copy_from_slice(&crc.to_le_bytes());
    }
    Ok(block)
}
