//! A serving snapshot from either order: the same rows, the same bytes.
//!
//! Along a plan rows come in no order, so all of them are sorted at once, by table, use count and
//! row, in the memory kept aside.

#![expect(clippy::indexing_slicing, reason = "records are of the length that the schema says")]

use std::sync::Arc;

use crate::attachments::check_names;
use crate::planned::AnySink;
use crate::window::publish::PublishProgress;
use tierbed_core::store::Attachment;
use tierbed_core::{Budget, Error, ErrorKind, Result, RowId, Schema, TableId};
use tierbed_io::sorter::{ExternalSorter, SorterOptions, MEMORY_BYTES_MIN};
use tierbed_io::Folder;
use tierbed_snapshot::{BaseChain, PageLayout, Report, SnapshotWriter};
use tierbed_store::kept;

use crate::auto::engine::{lost, AutoEngine, State};
use crate::engine::TrainEngine;

/// Sort key: table, use count inverted, row; most significant byte first.
const KEY_BYTES: usize = 4 + 4 + 8;
/// Rows between two progress calls.
const PROGRESS_ROWS: u64 = 1 << 16;

impl AutoEngine {
    /// Checkpoints and keeps the checkpoint under `name`; returns its number.
    ///
    /// # Errors
    /// As [`crate::window::WindowEngine::keep_checkpoint`].
    pub fn keep_checkpoint(&mut self, name: &str, attachments: &[Attachment<'_>]) -> Result<u64> {
        // Along a plan, and of a store that left one, checkpoints are kept in its own folder.
        if let Some(folder) = &self.folder {
            kept::check_free(folder.as_ref(), name)?;
        }
        if self.planned_mut().is_some() {
            let folder = self.folder()?;
            let number = self.checkpoint(name, attachments)?;
            kept::check_quota(folder.as_ref(), self.config.disk_quota_bytes)?;
            kept::keep(folder.as_ref(), name, number)?;
            if let Some(planned) = self.planned_mut() {
                planned.engine.bound_extents()?;
            }
            return Ok(number);
        }
        match self.windowed_mut()? {
            Some(windowed) => {
                windowed.is_untouched = false;
                let number = windowed.engine.keep_checkpoint(name, attachments)?;
                windowed.past = None;
                Ok(number)
            }
            None => Err(lost("no engine")),
        }
    }

    /// Forgets the kept checkpoint `name` and gives its disk space back.
    ///
    /// # Errors
    /// `Invalid` when there is none of that name, `Unsupported` without a folder, `Io`.
    pub fn drop_checkpoint(&mut self, name: &str) -> Result<()> {
        let is_here = match &self.folder {
            Some(folder) => kept::kept_names(folder.as_ref())?.contains(name),
            None => false,
        };
        match &mut self.state {
            State::Windowed(windowed) if !is_here => windowed.engine.drop_checkpoint(name),
            State::Lost(cause) => Err(lost(cause)),
            state => {
                let Some(folder) = &self.folder else {
                    return Err(Error::invalid("the store has no folder"));
                };
                kept::drop_checkpoint(folder.as_ref(), name)?;
                match state {
                    State::Windowed(windowed) => windowed.engine.leave_space_to_kept(),
                    _ => Ok(()),
                }
            }
        }
    }
}

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
    let Publication { schema, folder, memory, layout, base } = publication;
    let dims: Vec<usize> = schema.tables().iter().map(|table| table.dim as usize).collect();
    let dim_of = |table: TableId| dims[table.0 as usize];
    let target = Arc::clone(&folder);
    let mut writer = SnapshotWriter::create_placed(target, &schema, layout, &memory)?;
    if let Some(base) = base {
        writer.set_chain(base)?;
    }
    let row_count: u64 = schema.tables().iter().map(|table| table.row_count).sum();
    let mut show = |done: u64| match progress(done.min(row_count), row_count) {
        true => Ok(()),
        false => Err(Error::new(ErrorKind::Closed, "publish was stopped")
            .with("remedy", "publish again into an empty folder")),
    };
    let options = SorterOptions {
        key_bytes: KEY_BYTES,
        payload_bytes: 4 * dims.iter().copied().max().unwrap_or(0),
        memory_bytes: (memory.free_bytes() / 2).max(MEMORY_BYTES_MIN),
        scratch_name: "scratch.rows".to_owned(),
    };
    let mut sorter = ExternalSorter::new(Arc::clone(&folder), &options, &memory)?;
    let (mut seen, mut payload) = (0u64, vec![0; options.payload_bytes]);
    scan(&mut |table, row, record| {
        let count = record[record.len() - 1].to_bits();
        let weights: &[u8] = bytemuck::cast_slice(&record[..dim_of(table)]);
        payload[..weights.len()].copy_from_slice(weights);
        sorter.push(&key_of(table, count, row), &payload)?;
        seen += 1;
        if seen.is_multiple_of(PROGRESS_ROWS) {
            show(seen / 2)?;
        }
        Ok(())
    })?;
    let mut sorted = sorter.finish()?;
    let mut written = 0u64;
    while let Some(record) = sorted.next()? {
        let (table, row) = place_of(record.key)?;
        let bytes = &record.payload[..4 * dim_of(table)];
        let weights: Vec<f32> = bytemuck::pod_collect_to_vec(bytes);
        writer.push(table, row, &weights)?;
        written += 1;
        if written.is_multiple_of(PROGRESS_ROWS) {
            show((seen + written) / 2)?;
        }
    }
    assert_eq!(written, seen, "a row was lost while rows were sorted");
    for attachment in attachments {
        writer.attach(attachment.name, attachment.bytes)?;
    }
    show(row_count)?;
    writer.finish()
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
