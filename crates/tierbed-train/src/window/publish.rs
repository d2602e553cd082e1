//! The newest version of every written row, into a serving snapshot.
//!
//! Per table: rows are scanned in file order, sorted by use count outside memory, and written
//! most used first, so that rows often wanted share pages. The row buffer's memory is lent to
//! the sorter meanwhile: publishing needs no more than training did. Rows never written are not
//! published either; the snapshot computes their initial values, as training does.

use std::sync::Arc;

use tierbed_core::store::Attachment;
use tierbed_core::{Error, Reservation, Result, RowId, RowStore, TableId, TableSchema};
use tierbed_io::sorter::{ExternalSorter, SortedRecords, SorterOptions};
use tierbed_io::{Folder, PAGE_BYTES};
use tierbed_snapshot::shards::PublishWriter;
use tierbed_snapshot::{PageLayout, Report, SnapshotWriter};

use crate::attachments::check_names;
use crate::unsorted::show;
use crate::window::changes::Room;
use crate::window::comparer::{ComparedTable, StoredRow};
use crate::window::engine::WindowEngine;
use crate::window::publish_delta::{Compared, OpenBase};

/// Called with (work done, work in all), in rows; `false` stops the publish.
pub type PublishProgress<'a> = dyn FnMut(u64, u64) -> bool + 'a;

/// Sort key: use count inverted, then row, most significant byte first.
const KEY_BYTES: usize = 4 + 8;
/// Rows between two progress calls.
const PROGRESS_ROWS: u64 = 1 << 16;

impl WindowEngine {
    /// Publishes to `folder`, which is new or empty, together with `attachments`, on pages as
    /// `layout` says.
    ///
    /// # Errors
    /// `Invalid` when the folder holds something, a placement is not one of its tables or a row
    /// cannot be coded, `NoSpace` and `Io` from either disk, `Corruption` from the store; `Closed`
    /// when `progress` stopped it. A failed publish leaves no snapshot, and training as it was.
    pub fn publish(
        &mut self,
        folder: Arc<dyn Folder>,
        layout: PageLayout,
        attachments: &[Attachment<'_>],
        progress: &mut PublishProgress<'_>,
    ) -> Result<Report> {
        self.poison.check()?;
        self.publish_to(folder, Target { layout, base: None }, attachments, progress)
    }

    pub(crate) fn publish_to(
        &mut self,
        folder: Arc<dyn Folder>,
        target: Target,
        attachments: &[Attachment<'_>],
        progress: &mut PublishProgress<'_>,
    ) -> Result<Report> {
        check_names(attachments)?;
        let Target { layout, base } = target;
        self.release_buffer()?;
        let ids = self.flush_vocabularies()?;
        let mut compared = base.as_ref().map(|base| self.compared(base)).transpose()?;
        let schema = self.schema.clone();
        let target = Arc::clone(&folder);
        self.name_least_to_publish(layout.more_bytes_min(&schema));
        let scan_memory = self.reserve_for_scan()?;
        let mut writer = PublishWriter::create(target, &schema, layout, &self.budget)?;
        drop(scan_memory);
        if let Some(base) = &base {
            writer.set_chain(&base.chain)?;
        }
        let mut meter = Meter {
            progress,
            done: 0,
            total: schema.tables().iter().map(|table| table.row_count).sum(),
        };
        for (table, at) in schema.tables().iter().zip(0..) {
            let id = TableId(at);
            if tierbed_vocab::is_free_table(&table.name) {
                meter.done += table.row_count;
                continue;
            }
            let (mut sorted, row_count) =
                self.sort_rows(id, &folder, compared.as_mut(), &mut meter)?;
            writer.expect_rows(id, row_count)?;
            let mut written = 0u64;
            while let Some(record) = sorted.next()? {
                let row = row_of(record.key)?;
                let weights: &[f32] = &bytemuck::pod_collect_to_vec(record.payload);
                writer.push(id, row, weights)?;
                written += 1;
                if written.is_multiple_of(PROGRESS_ROWS) {
                    let rows = u128::from(table.row_count) * u128::from(written);
                    let share = rows / u128::from(row_count) / 2;
                    meter.show(table.row_count / 2 + share as u64)?;
                }
            }
            assert_eq!(written, row_count, "a row was lost while rows were sorted");
            meter.done += table.row_count;
        }
        for (name, bytes) in &ids {
            writer.attach(name, bytes)?;
        }
        for attachment in attachments {
            writer.attach(attachment.name, attachment.bytes)?;
        }
        meter.show(0)?;
        let report = writer.finish()?;
        self.store.changes.published(&report.identity, Room::of(&self.budget));
        if let Some(compared) = &compared {
            self.count_compared(compared);
        }
        Ok(report)
    }

    // Sorters take half of what is free; this much is kept from them, because the store needs
    // some to scan its rows.
    fn reserve_for_scan(&self) -> Result<Reservation> {
        let bytes = self.growth_bytes_max().min(self.budget.free_bytes() / 2);
        self.budget.reserve("publish", bytes)
    }

    /// Makes errors name a budget that suffices to the end, a publish included: its parts ask for
    /// memory one after the other. Tails need `tails_bytes`.
    pub(crate) fn name_least_to_publish(&self, tails_bytes: u64) {
        self.name_least(self.publish_bytes_min() + tails_bytes + self.growth_bytes_max());
    }

    /// Returns the least memory of a publish without tails.
    pub(crate) fn publish_bytes_min(&self) -> u64 {
        let weight_bytes = |table: &TableSchema| 4 * table.dim as usize;
        let largest = self.schema.tables().iter().map(weight_bytes).max().unwrap_or(0);
        let sorter_bytes = ExternalSorter::memory_bytes_min(KEY_BYTES + largest);
        let pages_bytes = (PAGE_BYTES * self.schema.tables().len()) as u64;
        SnapshotWriter::MEMORY_BYTES_MIN + pages_bytes + sorter_bytes
    }

    // Brings the written rows of `table` into the order of pages; returns them and their number.
    fn sort_rows(
        &mut self,
        table: TableId,
        folder: &Arc<dyn Folder>,
        compared: Option<&mut Compared>,
        meter: &mut Meter<'_, '_>,
    ) -> Result<(SortedRecords, u64)> {
        let schema = Arc::clone(&self.schema);
        let shape = schema.table(table)?;
        let own = ComparedTable { id: table, schema: shape };
        let weight_bytes = 4 * shape.dim as usize;
        let scan_memory = self.reserve_for_scan()?;
        let least_bytes = ExternalSorter::memory_bytes_min(KEY_BYTES + weight_bytes);
        let options = SorterOptions {
            key_bytes: KEY_BYTES,
            payload_bytes: weight_bytes,
            memory_bytes: (self.budget.free_bytes() / 2).max(least_bytes),
            scratch_name: "scratch.rows".to_owned(),
        };
        let mut sorter = ExternalSorter::new(Arc::clone(folder), &options, &self.budget)?;
        drop(scan_memory);
        let (mut row_count, mut scanned) = (0u64, 0u64);
        let mut push = |count: u32, row: RowId, weights: &[u8]| {
            row_count += 1;
            sorter.push(&key_of(count, row), weights)
        };
        let mut seen = |row: RowId| {
            scanned += 1;
            if scanned.is_multiple_of(PROGRESS_ROWS) {
                return meter.show(row.0 / 2);
            }
            Ok(())
        };
        match compared {
            Some(compared) => self.visit_changes(own, compared, &mut push, &mut seen)?,
            None => self.store.scan(table, &mut |row, record| {
                let StoredRow { count, weights, .. } = StoredRow::of(own, row, record)?;
                push(count, row, weights)?;
                seen(row)
            })?,
        }
        Ok((sorter.finish()?, row_count))
    }
}

/// What is published.
pub(crate) struct Target {
    pub(crate) layout: PageLayout,
    /// The snapshot a delta is made against.
    pub(crate) base: Option<OpenBase>,
}

/// How much is done.
struct Meter<'a, 'b> {
    progress: &'a mut PublishProgress<'b>,
    done: u64,
    total: u64,
}

impl Meter<'_, '_> {
    fn show(&mut self, in_table: u64) -> Result<()> {
        show(self.progress, self.done + in_table, self.total)
    }
}

#[expect(clippy::big_endian_bytes, reason = "keys compare as bytes")]
fn key_of(count: u32, row: RowId) -> [u8; KEY_BYTES] {
    let mut key = [0; KEY_BYTES];
    let bytes = (u32::MAX - count).to_be_bytes().into_iter().chain(row.0.to_be_bytes());
    for (place, byte) in key.iter_mut().zip(bytes) {
        *place = byte;
    }
    key
}

#[expect(clippy::big_endian_bytes, reason = "keys compare as bytes")]
fn row_of(key: &[u8]) -> Result<RowId> {
    let row = key.last_chunk().map(|bytes| RowId(u64::from_be_bytes(*bytes)));
    row.ok_or_else(|| Error::corruption("sorted record has a short key"))
}
