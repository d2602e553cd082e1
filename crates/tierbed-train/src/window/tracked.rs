//! A training store that notes which rows are written to it; all else goes to the store below.

use std::path::Path;

use tierbed_core::stats::StoreStats;
use tierbed_core::store::{Ahead, Attachment, CommitInfo, RowSink, RowWrite, ScanSink};
use tierbed_core::{
    Budget, Error, ErrorKind, Result, RowStore, Schema, TableId, TableSchema, TrainStore,
};

use super::background::{Finished, FrozenRows};
use super::changes::{Changes, DeltaCount, Room};
use super::changes_file::CHANGES;
use super::publish::PublishProgress;

/// The store below, and the rows written to it since something was published.
pub(crate) struct TrackedStore {
    below: Box<dyn TrainStore>,
    pub(crate) changes: Changes,
    /// Rows that are being published as they were.
    pub(crate) frozen: Option<FrozenRows>,
    /// Whether commits keep the changes: not where there is one for every step.
    is_kept: bool,
}

impl TrackedStore {
    /// Takes over the changes that the last commit knew.
    ///
    /// # Errors
    /// `Io` from the device.
    pub(crate) fn open(
        mut below: Box<dyn TrainStore>,
        is_kept: bool,
        budget: &Budget,
    ) -> Result<Self> {
        let attachment = below.attachment(CHANGES);
        let changes = Changes::open(attachment, below.schema(), Room::of(budget))?;
        Ok(Self { below, changes, frozen: None, is_kept })
    }
}

impl TrackedStore {
    /// Copies the next of `frozen` rows, at most `row_count`.
    ///
    /// # Errors
    /// As [`FrozenRows::copy`].
    pub(crate) fn copy(
        &mut self,
        frozen: &mut FrozenRows,
        row_count: usize,
        progress: &mut PublishProgress<'_>,
    ) -> Result<()> {
        frozen.copy(self.below.as_mut(), row_count, progress)
    }

    /// Copies the next rows that are being published, and hands them out when they are all copied.
    ///
    /// # Errors
    /// `Closed` when there are none, and when `progress` stopped it; those of [`FrozenRows::copy`].
    /// All of them end the publish.
    pub(crate) fn copy_frozen(
        &mut self,
        row_count: usize,
        progress: &mut PublishProgress<'_>,
    ) -> Result<Option<FrozenRows>> {
        let Some(frozen) = &mut self.frozen else {
            return Err(Error::new(ErrorKind::Closed, "no publish of this store is under way")
                .with("remedy", "begin it again, into an empty folder"));
        };
        let copied = frozen.copy(self.below.as_mut(), row_count, progress);
        if let Err(error) = copied {
            self.end_frozen(None);
            return Err(error);
        }
        Ok(if frozen.is_copied() { self.frozen.take() } else { None })
    }

    /// Ends a publish of frozen rows: `None` where it failed.
    pub(crate) fn end_frozen(&mut self, finished: Option<&Finished>) {
        self.frozen = None;
        match finished {
            None => self.changes.forget_begun(),
            Some(Finished { report, is_delta }) => {
                self.changes.name_begun(&report.identity);
                if *is_delta {
                    self.changes.count_delta(DeltaCount::NOTED);
                }
            }
        }
    }
}

impl RowStore for TrackedStore {
    fn schema(&self) -> &Schema {
        self.below.schema()
    }

    fn read(&mut self, keys: &[tierbed_core::RowKey], sink: &mut RowSink<'_>) -> Result<()> {
        self.below.read(keys, sink)
    }

    fn scan(&mut self, table: TableId, sink: &mut ScanSink<'_>) -> Result<()> {
        self.below.scan(table, sink)
    }

    fn stats(&self) -> StoreStats {
        self.below.stats()
    }
}

impl TrainStore for TrackedStore {
    fn add_table(&mut self, table: TableSchema) -> Result<TableId> {
        self.below.add_table(table)
    }

    fn grow_table(&mut self, table: TableId, row_count: u64) -> Result<()> {
        self.below.grow_table(table, row_count)
    }

    fn write(&mut self, rows: &[RowWrite<'_>]) -> Result<()> {
        if let Some(frozen) = &mut self.frozen {
            frozen.copy_before(self.below.as_mut(), rows);
        }
        // Before: a write that fails may have written some of them.
        self.changes.note(rows);
        self.below.write(rows)
    }

    fn write_back(
        &mut self,
        rows: &[RowWrite<'_>],
        is_known: &dyn Fn(usize) -> bool,
    ) -> Result<()> {
        if !(0..rows.len()).any(is_known) {
            return self.write(rows);
        }
        if let Some(frozen) = &mut self.frozen {
            frozen.copy_before(self.below.as_mut(), rows);
        }
        let new = rows.iter().enumerate().filter(|(at, _)| !is_known(*at));
        let new: Vec<RowWrite<'_>> = new.map(|(_, row)| *row).collect();
        self.changes.note(&new);
        self.below.write(rows)
    }

    fn commit(&mut self, name: &str, attachments: &[Attachment<'_>]) -> Result<()> {
        let bytes = if self.is_kept { self.changes.encode() } else { None };
        let Some(bytes) = bytes else { return self.below.commit(name, attachments) };
        let mut all = attachments.to_vec();
        all.push(Attachment { name: CHANGES, bytes: &bytes });
        self.below.commit(name, &all)
    }

    fn last_commit(&self) -> Option<&CommitInfo> {
        self.below.last_commit()
    }

    fn attachment(&mut self, name: &str) -> Result<Option<Vec<u8>>> {
        self.below.attachment(name)
    }

    fn attachment_names(&self) -> Result<Vec<String>> {
        self.below.attachment_names()
    }

    fn verify(&mut self) -> Result<u64> {
        self.below.verify()
    }

    fn growth_bytes_max(&self) -> u64 {
        self.below.growth_bytes_max()
    }

    fn set_kept_bytes(&mut self, bytes: u64) {
        self.below.set_kept_bytes(bytes);
    }

    fn path(&self) -> Option<&Path> {
        self.below.path()
    }

    fn observe(&mut self, ahead: &Ahead<'_>) -> Result<()> {
        self.below.observe(ahead)
    }
}
