//! Checkpoints in the middle of an epoch, from which training continues bit for bit.
//!
//! A checkpoint is a dump of the rows in memory (each with the window and entry it waits for),
//! the chunk lists of all buckets, and the position, put in force by the commit protocol of
//! `tierbed-store`. Its cost depends on the memory, not on the tables. The rows of the
//! current window wait for that very window, so reopening is entering it again. Rows read ahead
//! for the next window are still in their bucket and need no dump.
//! Normative: `docs/reference/formats/forward.md`.

use tierbed_core::store::{Attachment, CommitInfo};
use tierbed_core::{Error, Result};
use tierbed_store::{CommitFailure, CommitLog, Manifest, TableMeta};

use super::dump::{read_dump, DumpWriter};
use super::quota::DiskQuota;
use super::stored::{encode_buckets, State, CHUNKS, STATE};
use super::{PlannedEngine, Position};
use crate::attachments::check_names;
use crate::planned::store::lists::split_rows;
use crate::planned::store::row_mover::RowMover;
use crate::planned::store::size_class::{open_rows, read_chunk, SizeClass, ENTRY_BYTES};
use crate::planned::store::spans::ListPlace;
use crate::planned::store::unplanned::UNPLANNED_HEAD_BYTES;
use crate::planned::store::window_rows::Place;
use crate::window::changes_file::CHANGES;

impl PlannedEngine {
    /// Makes everything up to the last finished batch durable, with `attachments`, as `name`;
    /// returns the checkpoint's number.
    ///
    /// # Errors
    /// `NoSpace` leaves the last checkpoint in force and training may go on; after `Io` the
    /// store is poisoned: reopen it at the last checkpoint.
    pub fn checkpoint(&mut self, name: &str, attachments: &[Attachment<'_>]) -> Result<u64> {
        self.check_whole()?;
        check_names(attachments)?;
        self.bring_back()?;
        let settled = self.settle_disk();
        self.poison.on_any(settled)?;
        let number = self.log.next_number();
        let result = self.put_in_force(number, name, attachments);
        match result {
            Ok(()) => {}
            Err(CommitFailure::Undone(error)) => {
                self.remove_dumps(number);
                return Err(error);
            }
            Err(CommitFailure::Poisoned(error)) => return self.poison.on_any(Err(error)),
        }
        let RowMover { classes, extents, .. } = self.pipeline.mover()?;
        let buckets = classes.iter().flat_map(SizeClass::all_buckets);
        extents.commit(buckets.flat_map(|bucket| &bucket.chunks));
        let bounded = self.bound_extents();
        self.poison.on_any(bounded)?;
        self.counters.checkpoint_count += 1;
        Ok(number)
    }

    // A failed sync leaves open what is on disk: no retry. Source: Rebello et al., ATC'20.
    fn settle_disk(&mut self) -> Result<()> {
        let mover = self.pipeline.mover()?;
        mover.settle()?;
        mover.disk.finish_writes()?;
        mover.disk.sync()
    }

    fn put_in_force(
        &mut self,
        number: u64,
        name: &str,
        attachments: &[Attachment<'_>],
    ) -> std::result::Result<(), CommitFailure> {
        let mut quota = self.disk_quota().map_err(CommitFailure::of)?;
        let tables = self.write_dumps(number, &mut quota).map_err(CommitFailure::of)?;
        assert_eq!(tables.len(), self.schema.tables().len(), "every table names a dump");
        let state = self.state_json().map_err(CommitFailure::of)?;
        let chunks = encode_buckets(self.pipeline.classes());
        let mut all = vec![
            Attachment { name: STATE, bytes: state.as_bytes() },
            Attachment { name: CHUNKS, bytes: &chunks },
        ];
        let changes = self.changes.encode();
        all.extend(changes.as_deref().map(|bytes| Attachment { name: CHANGES, bytes }));
        all.extend_from_slice(attachments);
        let bytes = all.iter().map(|attachment| attachment.bytes.len() as u64).sum();
        quota.take(bytes).map_err(CommitFailure::of)?;
        let manifest = Manifest { tables, ..self.log.next_manifest(name, &self.schema) };
        self.log.put_in_force(manifest, &all)
    }

    fn state_json(&self) -> Result<String> {
        assert_eq!(self.hypers.len(), self.schema.tables().len(), "every table has its steps");
        let state = State {
            position: Position { epoch: self.epoch, batch: self.batch_in_epoch },
            window: self.pipeline.current.number,
            batch_in_window: self.batch_in_window,
            plan_identity: self.pipeline.plan.identity(),
            plan_key: self.pipeline.plan.key().to_owned(),
            extent_bytes: self.extent_bytes,
            span_windows: self.pipeline.span_windows(),
            tables: self.hypers.clone(),
            next_rows: if self.has_open_tables { self.next_rows.clone() } else { Vec::new() },
        };
        serde_json::to_string(&state)
            .map_err(|cause| Error::invalid("state cannot be written").with("cause", cause))
    }

    // One dump per size class; each table names the dump its rows are in.
    fn write_dumps(&mut self, number: u64, quota: &mut DiskQuota) -> Result<Vec<TableMeta>> {
        let mut metas = Vec::with_capacity(self.pipeline.classes().len());
        for class in 0..self.pipeline.classes().len() {
            let file = CommitLog::file_name(number, &format!("rows{class}.dump"));
            metas.push(self.write_dump(class, file, quota)?);
        }
        let homes = self.pipeline.homes.iter();
        Ok(homes.filter_map(|home| metas.get(home.class).cloned()).collect())
    }

    fn remove_dumps(&self, number: u64) {
        for class in 0..self.pipeline.classes().len() {
            // Left-overs cost space, not correctness.
            let _ = self.folder.remove(&CommitLog::file_name(number, &format!("rows{class}.dump")));
        }
    }

    fn write_dump(&mut self, at: usize, file: String, quota: &mut DiskQuota) -> Result<TableMeta> {
        let mut dump = DumpWriter::create(&*self.folder, file, quota)?;
        let homes = self.pipeline.homes.clone();
        let is_of_class = |table: usize| homes.get(table).is_some_and(|home| home.class == at);
        // The current window first, then window after window: so a reader needs each of them once.
        self.pipeline.visit_current(&mut |spot, record| {
            let Place { window, entry } = spot.waits_for;
            if is_of_class(spot.table) {
                dump.add(window, entry, record)
            } else {
                Ok(())
            }
        })?;
        let mover = self.pipeline.mover()?;
        let mut between = Vec::new();
        mover.visit_back(&mut |spot, _| {
            if is_of_class(spot.table) {
                between.push((spot.waits_for, spot.known_as.entry));
            }
            Ok(())
        })?;
        between.sort_unstable_by_key(|(place, _)| (place.window, place.entry));
        let mut between = between.into_iter().peekable();
        let Some(class) = mover.classes.get(at) else { panic!("no size class {at}") };
        for window in 0..mover.plan.window_count() as u32 {
            while let Some((place, here)) = between.next_if(|(place, _)| place.window == window) {
                dump.add(window, place.entry, mover.back.record(here))?;
            }
            for (entry, record) in class.lists().iter(window as usize) {
                dump.add(window, entry, record)?;
            }
        }
        // Then span after span, among them what is on the way from a span to its windows.
        let spans = mover.splitter.spans();
        for list in spans.window_count()..spans.list_count() {
            let staged = split_rows(mover.splitter.rows_of(at, list), 1 + class.words());
            for (entry, record) in staged.chain(class.lists().iter(list)) {
                dump.add(list as u32, entry, record)?;
            }
        }
        let (meta, bytes) = dump.finish()?;
        self.counters.dump_bytes += bytes;
        Ok(meta)
    }

    /// Lets the rows of the checkpoint in force wait in memory; before the river starts.
    pub(super) fn restore_rows(&mut self) -> Result<()> {
        for class in 0..self.pipeline.classes().len() {
            let Some((meta, stored_bytes)) = self.dump_of(class) else { continue };
            let record_bytes = stored_bytes - ENTRY_BYTES;
            let pipeline = &mut self.pipeline;
            read_dump(&*self.folder, &meta, record_bytes, &mut |list, entry, record| {
                pipeline.restore(class, ListPlace { list, entry }, record)
            })?;
        }
        Ok(())
    }

    // The dump that holds the rows of a size class: that of any of its tables.
    fn dump_of(&self, class: usize) -> Option<(TableMeta, usize)> {
        let manifest = self.log.manifest()?;
        let table = self.pipeline.homes.iter().position(|home| home.class == class)?;
        let meta = manifest.tables.get(table)?.clone();
        Some((meta, self.pipeline.classes().get(class)?.stored_bytes()))
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
        self.check_whole()?;
        let settled = self.settle_disk();
        self.poison.on_any(settled)?;
        self.log.verify()?;
        self.pipeline.plan.verify()?;
        for class in 0..self.pipeline.classes().len() {
            let Some((meta, stored_bytes)) = self.dump_of(class) else { continue };
            let record_bytes = stored_bytes - ENTRY_BYTES;
            read_dump(&*self.folder, &meta, record_bytes, &mut |_, _, _| Ok(()))?;
        }
        let mut checked = 0;
        let mover = self.pipeline.mover()?;
        for class in &mover.classes {
            let unplanned_bytes = UNPLANNED_HEAD_BYTES + 4 * class.words();
            let unplanned = class.unplanned().chunks.iter().zip(std::iter::repeat(unplanned_bytes));
            let waiting = class.buckets().iter().flat_map(|bucket| &bucket.chunks);
            for (chunk, row_bytes) in
                waiting.zip(std::iter::repeat(class.stored_bytes())).chain(unplanned)
            {
                let bytes = read_chunk(&**mover.disk.device(), chunk, &mut self.scan_buf)?;
                let _rows = open_rows(chunk, bytes, row_bytes)?;
                checked += 1;
            }
        }
        Ok(checked)
    }
}
