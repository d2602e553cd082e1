//! All rows of a checkpoint, read where they lie: no slots, no training.
//!
//! Window after window, so that each window of the plan is loaded once: the rows of the dumps that
//! wait for it, then its buckets; then span after span, and unplanned rows last. Everything on disk
//! is read once.

#![expect(clippy::indexing_slicing, reason = "every list of a size class has a bucket")]

use std::sync::Arc;

use tierbed_core::{Result, RowId, TableId};
use tierbed_io::{AlignedBuf, Device, Folder, OpenMode, PAGE_BYTES};
use tierbed_store::Manifest;

use super::super::dump::{DumpReader, DUMP_BUF_BYTES};
use super::super::gather::{Gather, GATHER_BYTES_MAX};
use super::super::scan::row_of;
use super::super::stored::{damaged, Stored};
use super::super::EXTENTS_FILE;
use super::RecordSink;
use crate::planned::plan::{EpochPlan, PlanWindow};
use crate::planned::store::extents::{Bucket, Chunk};
use crate::planned::store::lists::split_rows;
use crate::planned::store::size_class::{check_chunk, open_chunk, read_chunk, ENTRY_BYTES};
use crate::planned::store::sizing::{size_classes_of, spans_of};
use crate::planned::store::spans::Spans;
use crate::planned::store::unplanned::open_unplanned;
use crate::planned::store::window_rows::Home;

/// The rows of a checkpoint.
pub(super) struct Resting<'a> {
    folder: Arc<dyn Folder>,
    device: Arc<dyn Device>,
    manifest: &'a Manifest,
    plan: &'a EpochPlan,
    first_window: usize,
    spans: Spans,
    /// For rows of spans, until they are named.
    gather_bytes: usize,
    classes: Vec<RestingClass>,
    homes: Vec<Home>,
    dump_buf_bytes: usize,
    buf: AlignedBuf,
    window: PlanWindow,
}

struct RestingClass {
    record_bytes: usize,
    buckets: Vec<Bucket>,
    unplanned: Bucket,
}

impl<'a> Resting<'a> {
    /// Returns the memory it takes.
    pub(super) fn memory_bytes(&self) -> u64 {
        let chunks = |bucket: &Bucket| bucket.chunks.capacity() * size_of::<Chunk>();
        let class_bytes = |class: &RestingClass| {
            let buckets = class.buckets.iter().chain([&class.unplanned]);
            self.dump_buf_bytes + buckets.map(|b| size_of::<Bucket>() + chunks(b)).sum::<usize>()
        };
        let classes: usize = self.classes.iter().map(class_bytes).sum();
        (classes
            + self.buf.len()
            + self.gather_bytes
            + self.plan.block_bytes_max()
            + 8 * self.plan.entries_max()) as u64
            + self.spans.memory_bytes()
            + self.plan.directory_bytes()
    }

    pub(super) fn open(
        folder: &Arc<dyn Folder>,
        manifest: &'a Manifest,
        plan: &'a EpochPlan,
        stored: &Stored,
        budget_bytes: u64,
    ) -> Result<Self> {
        let (sizes, homes) = size_classes_of(&manifest.schema);
        let spans = spans_of(plan, stored.span_windows(), false);
        let buckets = stored.buckets(sizes.len(), spans.list_count())?;
        let dump_bytes = budget_bytes / 64 / sizes.len().max(1) as u64;
        let classes = sizes.iter().zip(buckets).map(|(size, (buckets, unplanned))| RestingClass {
            record_bytes: 4 * size.words,
            buckets,
            unplanned,
        });
        Ok(Self {
            folder: folder.clone(),
            device: folder.open(EXTENTS_FILE, OpenMode::ReadOnly)?,
            manifest,
            plan,
            first_window: stored.window,
            gather_bytes: match spans.span_windows() {
                0 => 0,
                _ => (budget_bytes / 16).min(GATHER_BYTES_MAX) as usize,
            },
            spans,
            classes: classes.collect(),
            homes,
            dump_buf_bytes: (dump_bytes as usize).clamp(PAGE_BYTES, DUMP_BUF_BYTES) / PAGE_BYTES
                * PAGE_BYTES,
            buf: AlignedBuf::new(stored.chunk_bytes_max()),
            window: PlanWindow::default(),
        })
    }

    /// Hands every row to `sink`, in the same order each time.
    ///
    /// # Errors
    /// `Corruption` for bytes that are not what was written, otherwise those of the devices and
    /// of `sink`.
    pub(super) fn visit(&mut self, sink: &mut RecordSink<'_>) -> Result<()> {
        assert!(self.first_window < self.plan.window_count(), "training stood in no window");
        let mut dumps = self.open_dumps()?;
        // Dumps begin with the rows of the window that was trained on.
        self.visit_dumps(self.first_window, &mut dumps, sink)?;
        for number in 0..self.plan.window_count() {
            self.visit_dumps(number, &mut dumps, sink)?;
            self.visit_buckets(number, sink)?;
        }
        for list in self.spans.window_count()..self.spans.list_count() {
            self.visit_span(list, &mut dumps, sink)?;
        }
        for class in &self.classes {
            for chunk in &class.unplanned.chunks {
                let bytes = read_chunk(&*self.device, chunk, &mut self.buf)?;
                for (table, row, record) in open_unplanned(chunk, bytes, class.record_bytes)? {
                    sink(table, row, record)?;
                }
            }
        }
        match dumps.iter().all(Option::is_none) {
            true => Ok(()),
            false => Err(damaged("has a dump that is out of order")),
        }
    }

    // A size class's dump is named by each of its tables; it stands at its first row.
    fn open_dumps(&self) -> Result<Vec<Option<DumpReader>>> {
        let mut dumps = Vec::new();
        for (at, class) in self.classes.iter().enumerate() {
            let table = self.homes.iter().position(|home| home.class == at);
            let meta = table.and_then(|table| self.manifest.tables.get(table));
            let meta = meta.ok_or_else(|| damaged("names no dump"))?;
            let mut dump =
                DumpReader::open(&*self.folder, meta, class.record_bytes, self.dump_buf_bytes)?;
            dumps.push(dump.advance()?.then_some(dump));
        }
        Ok(dumps)
    }

    fn visit_dumps(
        &mut self,
        number: usize,
        dumps: &mut [Option<DumpReader>],
        sink: &mut RecordSink<'_>,
    ) -> Result<()> {
        let waits_here =
            |dump: &DumpReader| dump.row().is_some_and(|(window, _, _)| window as usize == number);
        let has_bucket = self.classes.iter().any(|class| class.buckets[number].row_count > 0);
        if has_bucket || dumps.iter().flatten().any(waits_here) {
            self.plan.load_entries(number, &mut self.window)?;
        }
        for place in dumps {
            while let Some(dump) = place.as_mut().filter(|dump| waits_here(dump)) {
                if let Some((_, entry, record)) = dump.row() {
                    let (table, row) = self.row_of(entry, record)?;
                    sink(table, row, record)?;
                }
                advance(place)?;
            }
        }
        Ok(())
    }

    // The window is loaded already.
    fn visit_buckets(&mut self, number: usize, sink: &mut RecordSink<'_>) -> Result<()> {
        for class in &self.classes {
            for chunk in &class.buckets[number].chunks {
                let bytes = read_chunk(&*self.device, chunk, &mut self.buf)?;
                for (entry, record) in open_chunk(chunk, bytes, ENTRY_BYTES + class.record_bytes)? {
                    let (table, row) = row_of(&self.window, entry)?;
                    check_length(&self.homes, table, record)?;
                    sink(table, row, record)?;
                }
            }
        }
        Ok(())
    }

    fn visit_span(
        &mut self,
        list: usize,
        dumps: &mut [Option<DumpReader>],
        sink: &mut RecordSink<'_>,
    ) -> Result<()> {
        let homes = &self.homes;
        let sink = &mut |table: TableId, row: RowId, record: &[f32]| {
            let record = bytemuck::cast_slice(record);
            check_length(homes, table, record)?;
            sink(table, row, record)
        };
        let window = &mut self.window;
        for (class, dump) in self.classes.iter().zip(dumps) {
            let record_words = class.record_bytes / 4;
            let mut rows =
                Gather::new(self.plan, &self.spans, list, record_words, self.gather_bytes);
            let mut record = vec![0f32; record_words];
            while let Some((waits_for, entry, bytes)) = dump.as_ref().and_then(DumpReader::row) {
                if waits_for as usize != list {
                    break;
                }
                bytemuck::cast_slice_mut(&mut record).copy_from_slice(bytes);
                rows.add([(entry, record.as_slice())].into_iter(), window, sink)?;
                advance(dump)?;
            }
            for chunk in &class.buckets[list].chunks {
                let bytes = read_chunk(&*self.device, chunk, &mut self.buf)?;
                let found = check_chunk(chunk, bytes, ENTRY_BYTES + class.record_bytes)?;
                let found = split_rows(bytemuck::cast_slice(found), 1 + record_words);
                rows.add(found, window, sink)?;
            }
            rows.hand_on(window, sink)?;
        }
        Ok(())
    }

    // A dump is read before its checksum is known: what it names may be anything.
    fn row_of(&self, entry: u32, record: &[u8]) -> Result<(TableId, RowId)> {
        let (table, row) = row_of(&self.window, entry)?;
        check_length(&self.homes, table, record)?;
        Ok((table, row))
    }
}

// Brings the next row of a dump; behind the last one there is none.
fn advance(place: &mut Option<DumpReader>) -> Result<()> {
    if let Some(dump) = place {
        if !dump.advance()? {
            *place = None;
        }
    }
    Ok(())
}

fn check_length(homes: &[Home], table: TableId, record: &[u8]) -> Result<()> {
    match homes.get(table.0 as usize).is_some_and(|home| 4 * home.words == record.len()) {
        true => Ok(()),
        false => Err(damaged("has a row among those of other tables").with("table", table.0)),
    }
}
