//! A serving snapshot of rows that come in no order: the same rows, the same bytes.
//!
//! All rows are sorted at once, by table, use count and row, in the memory that is given. They wait
//! on disk as the snapshot codes them, each in the bytes of its own table, and give that space back
//! as they are written, so that the disk never holds much more than the rows once.

#![expect(clippy::indexing_slicing, reason = "records are of the length that the schema says")]

use std::sync::Arc;

use tierbed_core::store::Attachment;
use tierbed_core::{Budget, Error, ErrorKind, Result, RowId, RowKey, Schema, TableId};
use tierbed_io::sorter::{ExternalSorter, PayloadClasses, SorterOptions};
use tierbed_io::{Folder, PAGE_BYTES};
use tierbed_snapshot::shards::PublishWriter;
use tierbed_snapshot::{BaseChain, PageLayout, Report};

use crate::attachments::check_names;
use crate::planned::AnySink;
use crate::sort_keys::SortKeys;
use crate::window::publish::PublishProgress;

/// Rows between two progress calls.
const PROGRESS_ROWS: u64 = 1 << 16;
/// Half of so much memory is kept for rows before the writer takes its own.
const AMPLE_BYTES: u64 = 8 << 20;

/// What is published where, and the memory for sorting it.
pub(crate) struct Publication<'a> {
    pub(crate) schema: Schema,
    pub(crate) folder: Arc<dyn Folder>,
    pub(crate) memory: Budget,
    pub(crate) layout: PageLayout,
    /// In a delta: the snapshot it changes.
    pub(crate) base: Option<&'a BaseChain>,
    /// What the engine attaches itself: names and bytes.
    pub(crate) own: &'a [(String, Vec<u8>)],
}

/// Publishes what `scan` hands out in any order: whole records, each row once.
pub(crate) fn publish_unsorted(
    publication: Publication<'_>,
    attachments: &[Attachment<'_>],
    progress: &mut PublishProgress<'_>,
    scan: &mut dyn FnMut(&mut AnySink<'_>) -> Result<()>,
) -> Result<Report> {
    check_names(attachments)?;
    let own = publication.own.iter().map(|(name, bytes)| Attachment { name, bytes });
    let all: Vec<_> = own.chain(attachments.iter().copied()).collect();
    let tables = publication.schema.tables();
    let row_count: u64 = tables.iter().map(|table| table.row_count).sum();
    let mut rows = UnsortedRows::new(publication, u64::MAX)?;
    scan(&mut |table, row, record| {
        let weights: &[u8] = bytemuck::cast_slice(&record[..rows.dim_of(table)]);
        rows.push(table, row, record[record.len() - 1].to_bits(), weights)?;
        if rows.pushed.is_multiple_of(PROGRESS_ROWS) {
            show(progress, rows.pushed / 2, row_count)?;
        }
        Ok(())
    })?;
    let pushed = rows.pushed;
    rows.finish(&all, &mut |written| match written == pushed {
        true => show(progress, row_count, row_count),
        false => show(progress, (pushed + written) / 2, row_count),
    })
}

/// Tells `progress` how much is done.
///
/// # Errors
/// `Closed` when it stops the publish.
pub(crate) fn show(progress: &mut PublishProgress<'_>, done: u64, total: u64) -> Result<()> {
    if progress(done.min(total), total) {
        return Ok(());
    }
    Err(Error::new(ErrorKind::Closed, "publish was stopped")
        .with("remedy", "publish again into an empty folder"))
}

/// Rows on their way into a snapshot.
pub(crate) struct UnsortedRows {
    writer: PublishWriter,
    sorter: ExternalSorter,
    keys: SortKeys,
    dims: Vec<usize>,
    memory: Budget,
    /// The writer takes no more memory while it takes rows, but a page for each table.
    is_plain: bool,
    /// Of the row that is being added.
    waiting: Vec<u8>,
    weights: Vec<f32>,
    /// Rows added, in all and of each table.
    pushed: u64,
    row_counts: Vec<u64>,
}

impl UnsortedRows {
    /// Begins the snapshot, and sorts in at most `sort_bytes_max` of the memory.
    ///
    /// # Errors
    /// Those of [`PublishWriter::create`], `Invalid` when the memory does not reach.
    pub(crate) fn new(publication: Publication<'_>, sort_bytes_max: u64) -> Result<Self> {
        let Publication { schema, folder, memory, layout, base, own: _ } = publication;
        let is_plain = layout.more_bytes_min(&schema) == 0;
        // The writer sorts its index in half of what is free, and rows are more than that.
        let is_ample = is_plain && layout.placed.is_empty() && memory.free_bytes() >= AMPLE_BYTES;
        let kept_bytes = if is_ample { (memory.free_bytes() / 2).min(sort_bytes_max) } else { 0 };
        let kept = memory.reserve("sorter", kept_bytes)?;
        let mut writer = PublishWriter::create(Arc::clone(&folder), &schema, layout, &memory)?;
        drop(kept);
        if let Some(base) = base {
            writer.set_chain(base)?;
        }
        let keys = SortKeys::of_publish(&schema);
        let ids = (0..).map(TableId).zip(schema.tables());
        let payload_bytes =
            ids.map(|(id, _)| writer.waiting_bytes(id)).collect::<Result<Vec<_>>>()?;
        let longest = payload_bytes.iter().copied().max().unwrap_or(0);
        let least_bytes = ExternalSorter::memory_bytes_min(keys.key_bytes() + longest);
        let sort_bytes = kept_bytes.max(memory.free_bytes() / 2).min(sort_bytes_max);
        let options = SorterOptions {
            key_bytes: keys.key_bytes(),
            payload_bytes: longest,
            memory_bytes: sort_bytes.max(least_bytes),
            scratch_name: "scratch.rows".to_owned(),
        };
        let classes = PayloadClasses { class_bytes: keys.table_bytes(), payload_bytes };
        let sorter = ExternalSorter::of_classes(folder, &options, &classes, &memory)?;
        let dims: Vec<usize> = schema.tables().iter().map(|table| table.dim as usize).collect();
        Ok(Self {
            writer,
            sorter,
            keys,
            memory,
            is_plain,
            waiting: Vec::new(),
            weights: Vec::new(),
            pushed: 0,
            row_counts: vec![0; dims.len()],
            dims,
        })
    }

    pub(crate) fn dim_of(&self, table: TableId) -> usize {
        self.dims[table.0 as usize]
    }

    /// Returns how many rows were added.
    pub(crate) fn pushed(&self) -> u64 {
        self.pushed
    }

    /// Adds a row, as it was used `count` times.
    ///
    /// # Errors
    /// `Io` and `NoSpace` from the folder, `Invalid` for numbers that the codec cannot keep.
    pub(crate) fn push(
        &mut self,
        table: TableId,
        row: RowId,
        count: u32,
        weights: &[u8],
    ) -> Result<()> {
        assert_eq!(weights.len(), 4 * self.dim_of(table), "weights of a row");
        self.weights.clear();
        self.weights.extend(weights.as_chunks().0.iter().map(|word| f32::from_le_bytes(*word)));
        self.waiting.resize(self.writer.waiting_bytes(table)?, 0);
        let key = RowKey::new(table, row);
        if self.writer.prepare(key, &self.weights, &mut self.waiting)? {
            self.sorter.push(self.keys.encode(key, Some(count)).bytes(), &self.waiting)?;
        }
        self.pushed += 1;
        self.row_counts[table.0 as usize] += 1;
        Ok(())
    }

    /// Writes the snapshot. Tells `written` how many rows are, now and then and at the end.
    ///
    /// # Errors
    /// Those of [`PublishWriter`] and of `written`.
    pub(crate) fn finish(
        self,
        attachments: &[Attachment<'_>],
        written: &mut dyn FnMut(u64) -> Result<()>,
    ) -> Result<Report> {
        let Self { mut writer, sorter, keys, memory, is_plain, pushed, row_counts, .. } = self;
        let pages_bytes = (PAGE_BYTES * row_counts.len()) as u64;
        let more_bytes = memory.free_bytes().saturating_sub(pages_bytes) / 4 * 3;
        let mut sorted = sorter.finish_with(if is_plain { more_bytes } else { 0 })?;
        for (table, row_count) in (0..).map(TableId).zip(row_counts) {
            writer.expect_rows(table, row_count)?;
        }
        let mut count = 0u64;
        while let Some(record) = sorted.next()? {
            let RowKey { table, row } = keys.decode(record.key);
            writer.push_prepared(table, row, record.payload)?;
            count += 1;
            if count.is_multiple_of(PROGRESS_ROWS) {
                written(count)?;
            }
        }
        assert_eq!(count, sorted.stats().record_count, "a row was lost while rows were sorted");
        // Its memory and its scratch file.
        drop(sorted);
        for attachment in attachments {
            writer.attach(attachment.name, attachment.bytes)?;
        }
        written(pushed)?;
        writer.finish()
    }
}
