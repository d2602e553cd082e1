//! Can training continue from here, in the middle of an epoch, bit for bit?
//!
//! A checkpoint is a dump of the rows in memory (each with the window and entry it waits for),
//! the chunk lists of all buckets, and the position, put in force by the commit protocol of
//! `tierbed-trainstore`. Its cost depends on the memory, not on the tables. The rows of the
//! current window wait for that very window, so reopening is entering it again. Rows read ahead
//! for the next window are still in their bucket and need no dump.
//! Normative: `docs/formats/forward.md`.

use serde::{Deserialize, Serialize};
use tierbed_core::checksum::crc32c_append;
use tierbed_core::store::{Attachment, CommitInfo};
use tierbed_core::{Error, Result, Schema};
use tierbed_io::{AlignedBuf, Device, Folder, OpenMode, PAGE_BYTES};
use tierbed_kernels::Hyper;
use tierbed_trainstore::{CommitFailure, CommitLog, Manifest, TableMeta};

use super::{ForwardConfig, ForwardEngine, Position, BACKEND};
use crate::plan::Plan;
use crate::store::extents::{Bucket, Chunk};
use crate::store::shelf::open_chunk;

const STATE: &str = "_forward.json";
const CHUNKS: &str = "_forward.chunks";
/// Bytes gathered before a dump is written on.
pub(super) const DUMP_BUF_BYTES: usize = 64 << 10;
/// Window and entry before each record of a dump.
const DUMP_HEAD_BYTES: usize = 8;

#[derive(Debug, Clone, Serialize, Deserialize)]
struct State {
    position: Position,
    window: usize,
    batch_in_window: u32,
    plan_identity: u64,
    extent_bytes: usize,
    tables: Vec<Run>,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct Run {
    step: u64,
    lr: f64,
    eps: f64,
    beta1: f64,
    beta2: f64,
    weight_decay: f64,
}

/// What the last checkpoint says, or a fresh start.
#[derive(Debug, Default)]
pub(super) struct Stored {
    pub(super) position: Position,
    pub(super) window: usize,
    pub(super) batch_in_window: u32,
    state: Option<State>,
    buckets: Vec<(usize, usize, Bucket)>,
}

impl Stored {
    pub(super) fn chunks(&self) -> impl Iterator<Item = &Chunk> {
        self.buckets.iter().flat_map(|(_, _, bucket)| &bucket.chunks)
    }

    pub(super) fn chunk_bytes(&self) -> u64 {
        (self.chunks().count() * size_of::<Chunk>()) as u64
    }

    /// Returns the longest chunk: I/O buffers must hold it.
    pub(super) fn chunk_bytes_max(&self) -> usize {
        self.chunks().map(Chunk::len_bytes).max().unwrap_or(0)
    }

    pub(super) fn extent_bytes(&self, wanted: usize) -> usize {
        let stored = self.state.as_ref().map(|state| state.extent_bytes);
        stored.unwrap_or(wanted.next_multiple_of(PAGE_BYTES))
    }

    pub(super) fn hypers(&self, schema: &Schema) -> Vec<Hyper> {
        let fresh = Hyper { step: 0, ..Hyper::default() };
        let Some(state) = &self.state else { return vec![fresh; schema.tables().len()] };
        let hyper = |run: &Run| {
            let Run { step, lr, eps, beta1, beta2, weight_decay } = *run;
            Hyper { lr, eps, beta1, beta2, weight_decay, step }
        };
        state.tables.iter().map(hyper).collect()
    }

    /// Returns the buckets of each shelf, window after window.
    pub(super) fn buckets(
        &self,
        shelf_count: usize,
        window_count: usize,
    ) -> Result<Vec<Vec<Bucket>>> {
        let mut shelves = vec![vec![Bucket::default(); window_count]; shelf_count];
        for (shelf, window, bucket) in &self.buckets {
            let place = shelves.get_mut(*shelf).and_then(|shelf| shelf.get_mut(*window));
            *place.ok_or_else(|| damaged("names an unknown bucket"))? = bucket.clone();
        }
        Ok(shelves)
    }
}

fn damaged(what: &str) -> Error {
    Error::corruption(format!("checkpoint {what}"))
        .with("remedy", "restore the store's folder from a copy")
}

/// Reads what the checkpoint in force says, and checks that schema and plan are its own.
pub(super) fn read_stored(
    log: &CommitLog,
    schema: &Schema,
    plan: &Plan,
    config: &ForwardConfig,
) -> Result<Stored> {
    if config.extent_bytes == 0 {
        return Err(Error::invalid("extents must not be empty"));
    }
    let Some(manifest) = log.manifest() else { return Ok(Stored::default()) };
    if &manifest.schema != schema {
        return Err(Error::invalid("store holds other tables")
            .with("stored_tables", manifest.schema.tables().len())
            .with("tables", schema.tables().len())
            .with("remedy", "open it with the tables it was made with"));
    }
    let bytes = log.attachment(STATE)?.ok_or_else(|| damaged("has no state"))?;
    let state: State = serde_json::from_slice(&bytes)
        .map_err(|cause| damaged("is damaged").with("cause", cause))?;
    if state.plan_identity != plan.identity() {
        return Err(Error::invalid("store was trained along another plan")
            .with("remedy", "open it with the plan it was trained along"));
    }
    let bytes = log.attachment(CHUNKS)?.ok_or_else(|| damaged("has no chunk lists"))?;
    let buckets = decode_buckets(&bytes)?;
    let is_sane = state.window < plan.window_count()
        && state.tables.len() == schema.tables().len()
        && state.extent_bytes >= PAGE_BYTES
        && state.extent_bytes.is_multiple_of(PAGE_BYTES);
    if !is_sane {
        return Err(damaged("does not fit the plan"));
    }
    Ok(Stored {
        position: state.position,
        window: state.window,
        batch_in_window: state.batch_in_window,
        state: Some(state),
        buckets,
    })
}

fn encode_buckets(shelves: &[crate::store::shelf::Shelf]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (shelf, buckets) in (0u32..).zip(shelves.iter().map(|shelf| shelf.buckets())) {
        for (window, bucket) in (0u32..).zip(buckets) {
            if bucket.chunks.is_empty() {
                continue;
            }
            for word in [shelf, window, bucket.chunks.len() as u32] {
                bytes.extend(word.to_le_bytes());
            }
            for chunk in &bucket.chunks {
                for word in [chunk.page, chunk.page_count, chunk.row_count, chunk.crc32c] {
                    bytes.extend(word.to_le_bytes());
                }
            }
        }
    }
    bytes
}

fn decode_buckets(bytes: &[u8]) -> Result<Vec<(usize, usize, Bucket)>> {
    let short = || damaged("ends too early");
    let mut words = bytes.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word));
    let mut buckets = Vec::new();
    while let Some(shelf) = words.next() {
        let (window, count) = (words.next().ok_or_else(short)?, words.next().ok_or_else(short)?);
        let mut bucket = Bucket::default();
        for _ in 0..count {
            let mut word = || words.next().ok_or_else(short);
            let (page, page_count, row_count, crc32c) = (word()?, word()?, word()?, word()?);
            if page.checked_add(page_count).is_none() || page_count == 0 {
                return Err(damaged("names a chunk that cannot be"));
            }
            bucket.row_count += row_count as usize;
            bucket.chunks.push(Chunk { page, page_count, row_count, crc32c });
        }
        buckets.push((shelf as usize, window as usize, bucket));
    }
    Ok(buckets)
}

impl ForwardEngine {
    /// Makes everything up to the last finished batch durable, with `attachments`, as `name`;
    /// returns the checkpoint's number.
    ///
    /// # Errors
    /// `NoSpace` leaves the last checkpoint in force and training may go on; after `Io` the
    /// store is poisoned: reopen it at the last checkpoint.
    pub fn checkpoint(&mut self, name: &str, attachments: &[Attachment<'_>]) -> Result<u64> {
        self.check_alive()?;
        if let Some(own) = attachments.iter().find(|given| given.name.starts_with('_')) {
            return Err(Error::invalid("attachment names must not start with '_'")
                .with("attachment", own.name));
        }
        let settled = self.settle_disk();
        self.poison_on_error(settled)?;
        let number = self.log.next_number();
        let result = self.put_in_force(number, name, attachments);
        match result {
            Ok(()) => {}
            Err(CommitFailure::Undone(error)) => {
                self.remove_dumps(number);
                return Err(error);
            }
            Err(CommitFailure::Poisoned(error)) => return self.poison_on_error(Err(error)),
        }
        let chunks = self.river.shelves.iter().flat_map(|shelf| shelf.buckets());
        self.river.extents.commit(chunks.flat_map(|bucket| &bucket.chunks));
        self.counters.checkpoint_count += 1;
        Ok(number)
    }

    // A failed sync leaves open what is on disk: no retry. Source: Rebello et al., ATC'20.
    fn settle_disk(&mut self) -> Result<()> {
        self.river.finish_reads()?;
        self.river.disk.finish_writes()?;
        self.river.disk.sync()
    }

    fn put_in_force(
        &mut self,
        number: u64,
        name: &str,
        attachments: &[Attachment<'_>],
    ) -> std::result::Result<(), CommitFailure> {
        let tables = self.write_dumps(number).map_err(CommitFailure::of)?;
        let state = self.state_json().map_err(CommitFailure::of)?;
        let chunks = encode_buckets(&self.river.shelves);
        let mut all = vec![
            Attachment { name: STATE, bytes: state.as_bytes() },
            Attachment { name: CHUNKS, bytes: &chunks },
        ];
        all.extend_from_slice(attachments);
        let manifest = Manifest {
            number,
            name: name.to_owned(),
            backend: BACKEND.to_owned(),
            schema: (*self.schema).clone(),
            tables,
            attachments: Vec::new(),
        };
        self.log.put_in_force(manifest, &all)
    }

    fn state_json(&self) -> Result<String> {
        let run = |hyper: &Hyper| {
            let Hyper { lr, eps, beta1, beta2, weight_decay, step } = *hyper;
            Run { step, lr, eps, beta1, beta2, weight_decay }
        };
        let state = State {
            position: Position { epoch: self.epoch, batch: self.batch_in_epoch },
            window: self.river.current.number,
            batch_in_window: self.batch_in_window,
            plan_identity: self.river.plan.identity(),
            extent_bytes: self.extent_bytes,
            tables: self.hypers.iter().map(run).collect(),
        };
        serde_json::to_string(&state)
            .map_err(|cause| Error::invalid("state cannot be written").with("cause", cause))
    }

    // One dump per shelf; each table names the dump its rows are in.
    fn write_dumps(&mut self, number: u64) -> Result<Vec<TableMeta>> {
        let mut metas = Vec::with_capacity(self.river.shelves.len());
        for shelf in 0..self.river.shelves.len() {
            let file = CommitLog::file_name(number, &format!("rows{shelf}.dump"));
            metas.push(self.write_dump(shelf, file)?);
        }
        let shelf_of = self.river.shelf_of_table.iter();
        Ok(shelf_of.filter_map(|&shelf| metas.get(shelf).cloned()).collect())
    }

    fn remove_dumps(&self, number: u64) {
        for shelf in 0..self.river.shelves.len() {
            // Left-overs cost space, not correctness.
            let _ = self.folder.remove(&CommitLog::file_name(number, &format!("rows{shelf}.dump")));
        }
    }

    fn write_dump(&mut self, at: usize, file: String) -> Result<TableMeta> {
        let mut dump = DumpWriter::create(&*self.folder, file)?;
        let river = &self.river;
        let Some(shelf) = river.shelves.get(at) else { return Ok(dump.meta) };
        let now = river.current.number;
        for (table, _) in
            river.current.plan.tables().iter().zip(&river.shelf_of_table).filter(|(_, s)| **s == at)
        {
            let entries = table.first..table.first + table.count;
            let slots = river.current.slots.get(table.first as usize..).unwrap_or(&[]);
            for (entry, &slot) in entries.zip(slots) {
                dump.add(now as u32, entry, shelf.record(slot))?;
            }
        }
        for window in 0..river.plan.window_count() {
            for waiting in shelf.lists().iter(window) {
                dump.add(window as u32, waiting.entry, shelf.record(waiting.slot))?;
            }
        }
        let (meta, bytes) = dump.finish()?;
        self.counters.dump_bytes += bytes;
        Ok(meta)
    }

    /// Lets the rows of the checkpoint in force wait in memory; training goes on at `window`.
    pub(super) fn restore_rows(&mut self, window: usize) -> Result<()> {
        for shelf in 0..self.river.shelves.len() {
            let Some((meta, stored_bytes)) = self.dump_of(shelf) else { continue };
            let record_bytes = stored_bytes - crate::store::shelf::ENTRY_BYTES;
            let river = &mut self.river;
            read_dump(&*self.folder, &meta, record_bytes, &mut |waits_for, entry, record| {
                river.restore(shelf, (window, waits_for as usize, entry), record)
            })?;
        }
        Ok(())
    }

    // The dump that holds the rows of a shelf: that of any of its tables.
    fn dump_of(&self, shelf: usize) -> Option<(TableMeta, usize)> {
        let manifest = self.log.manifest()?;
        let table = self.river.shelf_of_table.iter().position(|&at| at == shelf)?;
        let meta = manifest.tables.get(table)?.clone();
        Some((meta, self.river.shelves.get(shelf)?.stored_bytes()))
    }

    /// Returns number and name of the last checkpoint.
    #[must_use]
    pub fn last_checkpoint(&self) -> Option<&CommitInfo> {
        self.log.info()
    }

    /// Reads an attachment of the last checkpoint.
    ///
    /// # Errors
    /// `Corruption` when it fails its checksum, `Io` from the device.
    pub fn attachment(&self, name: &str) -> Result<Option<Vec<u8>>> {
        self.log.attachment(name)
    }

    /// Checks every checksum of store and plan; returns the number of chunks checked.
    ///
    /// # Errors
    /// `Corruption`, naming the first bad place.
    pub fn verify(&mut self) -> Result<u64> {
        self.check_alive()?;
        let settled = self.settle_disk();
        self.poison_on_error(settled)?;
        self.log.verify()?;
        self.river.plan.verify()?;
        for shelf in 0..self.river.shelves.len() {
            let Some((meta, stored_bytes)) = self.dump_of(shelf) else { continue };
            let record_bytes = stored_bytes - crate::store::shelf::ENTRY_BYTES;
            read_dump(&*self.folder, &meta, record_bytes, &mut |_, _, _| Ok(()))?;
        }
        let mut checked = 0;
        for shelf in &self.river.shelves {
            for chunk in shelf.buckets().iter().flat_map(|bucket| &bucket.chunks) {
                let bytes = self.scan_buf.get_mut(..chunk.len_bytes());
                let bytes = bytes.ok_or_else(|| damaged("names a chunk that is too long"))?;
                self.river.disk.device().read_at(chunk.offset_bytes(), bytes)?;
                let _rows = open_chunk(chunk, bytes, shelf.stored_bytes())?;
                checked += 1;
            }
        }
        Ok(checked)
    }
}

/// Writes the rows of a dump in whole blocks.
struct DumpWriter {
    device: std::sync::Arc<dyn Device>,
    buf: AlignedBuf,
    filled: usize,
    at_bytes: u64,
    meta: TableMeta,
}

impl DumpWriter {
    fn create(folder: &dyn Folder, file: String) -> Result<Self> {
        let device = folder.open(&file, OpenMode::Create)?;
        device.set_len(0)?;
        let meta = TableMeta { file, crc32c: 0, entry_count: 0 };
        Ok(Self { device, buf: AlignedBuf::new(DUMP_BUF_BYTES), filled: 0, at_bytes: 0, meta })
    }

    fn add(&mut self, window: u32, entry: u32, record: &[f32]) -> Result<()> {
        self.meta.entry_count += 1;
        self.append(&window.to_le_bytes())?;
        self.append(&entry.to_le_bytes())?;
        self.append(bytemuck::cast_slice(record))
    }

    fn append(&mut self, bytes: &[u8]) -> Result<()> {
        let mut rest = bytes;
        while !rest.is_empty() {
            let (now, later) = rest.split_at(rest.len().min(DUMP_BUF_BYTES - self.filled));
            if let Some(place) = self.buf.get_mut(self.filled..self.filled + now.len()) {
                place.copy_from_slice(now);
            }
            self.filled += now.len();
            rest = later;
            if self.filled == DUMP_BUF_BYTES {
                self.flush()?;
            }
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        let Some(bytes) = self.buf.get(..self.filled) else { return Ok(()) };
        self.meta.crc32c = crc32c_append(self.meta.crc32c, bytes);
        let padded = self.filled.next_multiple_of(PAGE_BYTES);
        if let Some(bytes) = self.buf.get_mut(..padded) {
            bytes.iter_mut().skip(self.filled).for_each(|byte| *byte = 0);
            self.device.write_at(self.at_bytes, bytes)?;
        }
        self.at_bytes += padded as u64;
        self.filled = 0;
        Ok(())
    }

    fn finish(mut self) -> Result<(TableMeta, u64)> {
        if self.filled > 0 {
            self.flush()?;
        }
        self.device.sync()?;
        Ok((self.meta, self.at_bytes))
    }
}

/// Takes the rows of a dump: window, entry, record.
type DumpSink<'a> = dyn FnMut(u32, u32, &[u8]) -> Result<()> + 'a;

// Hands every row of a dump on and checks the checksum at the end.
fn read_dump(
    folder: &dyn Folder,
    meta: &TableMeta,
    record_bytes: usize,
    sink: &mut DumpSink<'_>,
) -> Result<()> {
    let damaged = |what: &str| damaged(what).with("file", &meta.file);
    let device = folder
        .open(&meta.file, OpenMode::ReadOnly)
        .map_err(|error| damaged("has lost its dump").with("cause", error))?;
    let row_bytes = DUMP_HEAD_BYTES + record_bytes;
    let len_bytes = meta.entry_count.checked_mul(row_bytes as u64);
    let len_bytes = len_bytes.filter(|&len| device.len_bytes().is_ok_and(|found| len <= found));
    let len_bytes = len_bytes.ok_or_else(|| damaged("has a dump that is too short"))?;
    let mut buf = AlignedBuf::new(DUMP_BUF_BYTES);
    let (mut at, mut crc, mut row) = (0u64, 0, Vec::with_capacity(row_bytes));
    while at < len_bytes {
        let now = (len_bytes - at).min(DUMP_BUF_BYTES as u64) as usize;
        let padded = now.next_multiple_of(PAGE_BYTES);
        device.read_at(at, buf.get_mut(..padded).unwrap_or(&mut []))?;
        at += now as u64;
        let mut rest = buf.get(..now).unwrap_or(&[]);
        crc = crc32c_append(crc, rest);
        while !rest.is_empty() {
            let (part, later) = rest.split_at(rest.len().min(row_bytes - row.len()));
            row.extend_from_slice(part);
            rest = later;
            if row.len() < row_bytes {
                break;
            }
            let words: &[u8] = &row;
            if let Some((head, record)) = words.split_first_chunk::<DUMP_HEAD_BYTES>() {
                let [a, b, c, d, e, f, g, h] = *head;
                sink(u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h]), record)?;
            }
            row.clear();
        }
    }
    if crc != meta.crc32c {
        return Err(damaged("has a dump with a wrong checksum"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn random_chunk_lists_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = decode_buckets(&bytes);
        }
    }
}
