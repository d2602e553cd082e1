//! A serving snapshot of rows that come in no order: the same rows, the same bytes.
//!
//! All rows are sorted at once, by table, use count and row, in the memory that is given.

#![expect(clippy::indexing_slicing, reason = "records are of the length that the schema says")]

use std::sync::Arc;

use tierbed_core::store::Attachment;
use tierbed_core::{Budget, Error, ErrorKind, Result, RowId, Schema, TableId};
use tierbed_io::sorter::{ExternalSorter, SorterOptions};
use tierbed_io::Folder;
use tierbed_snapshot::shards::PublishWriter;
use tierbed_snapshot::{BaseChain, PageLayout, Report};

use crate::attachments::check_names;
use crate::planned::AnySink;
use crate::window::publish::PublishProgress;

/// Sort key: table, use count inverted, row; most significant byte first.
const KEY_BYTES: usize = 4 + 4 + 8;
/// Rows between two progress calls.
const PROGRESS_ROWS: u64 = 1 << 16;

/// What is published where, and the memory for sorting it.
pub(crate) struct Publication<'a> {
    pub(crate) schema: Schema,
    pub(crate) folder: Arc<dyn Folder>,
    pub(crate) memory: Budget,
    pub(crate) layout: PageLayout,
    /// In a delta: the snapshot it changes.
    pub(crate) base: Option<&'a BaseChain>,
}

/// Publishes what `scan` hands out in any order: whole records, each row once.
pub(crate) fn publish_unsorted(
    publication: Publication<'_>,
    attachments: &[Attachment<'_>],
    progress: &mut PublishProgress<'_>,
    scan: &mut dyn FnMut(&mut AnySink<'_>) -> Result<()>,
) -> Result<Report> {
    check_names(attachments)?;
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
    rows.finish(attachments, &mut |written| match written == pushed {
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
    dims: Vec<usize>,
    payload: Vec<u8>,
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
        let Publication { schema, folder, memory, layout, base } = publication;
        let dims: Vec<usize> = schema.tables().iter().map(|table| table.dim as usize).collect();
        let target = Arc::clone(&folder);
        let mut writer = PublishWriter::create(target, &schema, layout, &memory)?;
        if let Some(base) = base {
            writer.set_chain(base)?;
        }
        let payload_bytes = 4 * dims.iter().copied().max().unwrap_or(0);
        let least_bytes = ExternalSorter::memory_bytes_min(KEY_BYTES + payload_bytes);
        let options = SorterOptions {
            key_bytes: KEY_BYTES,
            payload_bytes,
            memory_bytes: (memory.free_bytes() / 2).min(sort_bytes_max).max(least_bytes),
            scratch_name: "scratch.rows".to_owned(),
        };
        let sorter = ExternalSorter::new(folder, &options, &memory)?;
        let (payload, row_counts) = (vec![0; payload_bytes], vec![0; dims.len()]);
        Ok(Self { writer, sorter, dims, payload, pushed: 0, row_counts })
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
    /// `Io` and `NoSpace` from the folder.
    pub(crate) fn push(
        &mut self,
        table: TableId,
        row: RowId,
        count: u32,
        weights: &[u8],
    ) -> Result<()> {
        assert_eq!(weights.len(), 4 * self.dim_of(table), "weights of a row");
        self.payload[..weights.len()].copy_from_slice(weights);
        self.sorter.push(&key_of(table, count, row), &self.payload)?;
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
        let Self { mut writer, sorter, dims, pushed, row_counts, .. } = self;
        let mut sorted = sorter.finish()?;
        for (table, row_count) in (0..).map(TableId).zip(row_counts) {
            writer.expect_rows(table, row_count)?;
        }
        let mut count = 0u64;
        while let Some(record) = sorted.next()? {
            let (table, row) = place_of(record.key)?;
            let bytes = &record.payload[..4 * dims[table.0 as usize]];
            let weights: Vec<f32> = bytemuck::pod_collect_to_vec(bytes);
            writer.push(table, row, &weights)?;
            count += 1;
            if count.is_multiple_of(PROGRESS_ROWS) {
                written(count)?;
            }
        }
        assert_eq!(count, pushed, "a row was lost while rows were sorted");
        for attachment in attachments {
            writer.attach(attachment.name, attachment.bytes)?;
        }
        written(count)?;
        writer.finish()
    }
}

#[expect(clippy::big_endian_bytes, reason = "keys compare as bytes")]
fn key_of(table: TableId, count: u32, row: RowId) -> [u8; KEY_BYTES] {
    let mut key = [0; KEY_BYTES];
    let head = table.0.to_be_bytes().into_iter().chain((u32::MAX - count).to_be_bytes());
    for (place, byte) in key.iter_mut().zip(head.chain(row.0.to_be_bytes())) {
        *place = byte;
    }
    key
}

#[expect(clippy::big_endian_bytes, reason = "keys compare as bytes")]
fn place_of(key: &[u8]) -> Result<(TableId, RowId)> {
    let table = key.first_chunk().map(|bytes| TableId(u32::from_be_bytes(*bytes)));
    let row = key.last_chunk().map(|bytes| RowId(u64::from_be_bytes(*bytes)));
    let short = || Error::corruption("sorted record has a short key");
    Ok((table.ok_or_else(short)?, row.ok_or_else(short)?))
}
