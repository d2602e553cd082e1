//! Row writes: log, memtable, flush.
//!
//! ```text
//! rows ─▶ key of each (hot prefix or not) ─▶ log entry (Durability::Step) ─▶ active memtable
//!                                              active full: seal ─▶ flush ─▶ SST on level 0
//! ```

use std::sync::Arc;

use tierbed_core::{Result, RowWrite};

use crate::memtable::Memtable;
use crate::options::Durability;
use crate::store::LsmStore;
use crate::wal::{Segment, SegmentId};

/// Rows of about this many bytes make one log entry.
pub(crate) const GROUP_BYTES: usize = 64 * 1024;

impl LsmStore {
    pub(crate) fn write_rows(&mut self, mut rows: &[RowWrite<'_>]) -> Result<()> {
        while !rows.is_empty() {
            let group_len = self.group_len(rows);
            let (group, later) = rows.split_at(group_len);
            if group.is_empty() {
                // The active memtable is full; a fresh one takes at least one row.
                assert!(!self.active.is_empty(), "a row is larger than a memtable");
                self.seal()?;
                continue;
            }
            self.write_group(group)?;
            rows = later;
        }
        if self.options.works_on_write {
            self.work_until_idle()?;
        }
        Ok(())
    }

    // How many rows fit into the active memtable and one log entry.
    fn group_len(&self, rows: &[RowWrite<'_>]) -> usize {
        let (mut count, mut bytes) = (0, 0);
        for row in rows {
            bytes += row.record.len();
            if !self.active.fits(count + 1, bytes) || (count > 0 && bytes > GROUP_BYTES) {
                break;
            }
            count += 1;
        }
        count
    }

    fn write_group(&mut self, rows: &[RowWrite<'_>]) -> Result<()> {
        if self.options.durability == Durability::Step {
            self.log_group(rows)?;
        }
        for row in rows {
            let keys = self.allocator.write_keys(row.key);
            self.monitor.note_write(keys.old);
            if keys.key != keys.old {
                match keys.key.is_hot() {
                    true => self.lsm.rows_promoted += 1,
                    false => self.lsm.rows_demoted += 1,
                }
            }
            self.active.insert(keys.key, row.record);
            self.allocator.wrote(keys.key);
            self.lsm.user_bytes_written += row.record.len() as u64;
        }
        self.stats.rows_written += rows.len() as u64;
        let bytes: usize = rows.iter().map(|row| row.record.len()).sum();
        self.scheduler.observe_client(bytes as u64);
        Ok(())
    }

    fn log_group(&mut self, rows: &[RowWrite<'_>]) -> Result<()> {
        self.entry.clear();
        for row in rows {
            self.entry.push(self.allocator.write_keys(row.key).key, row.record);
        }
        let bytes: usize = rows.iter().map(|row| 8 + row.record.len()).sum();
        self.check_quota(bytes as u64)?;
        let mut entry = std::mem::take(&mut self.entry);
        let appended = self.append_log(|segment| segment.append(&mut entry));
        self.entry = entry;
        appended
    }

    /// Appends to the open segment, or to a new one.
    pub(crate) fn append_log(
        &mut self,
        append: impl FnOnce(&mut Segment) -> Result<()>,
    ) -> Result<()> {
        let mut segment = match self.open_segment.take() {
            Some(segment) => segment,
            None => {
                let id = SegmentId(self.next_segment);
                let last = self.segments.last_key_value();
                assert!(last.is_none_or(|(last, _)| *last < id), "{id:?} comes after {last:?}");
                self.has_new_segments = true;
                let segment = Segment::create(self.tools.folder.as_ref(), id)?;
                // Not before: opening walks the log by numbers without a gap.
                self.next_segment += 1;
                self.active.segments.push(id);
                segment
            }
        };
        let before = segment.meta.len_bytes;
        let appended = append(&mut segment);
        let bytes = segment.meta.len_bytes - before;
        self.lsm.wal_bytes += bytes;
        self.log_bytes += bytes;
        self.segments.insert(segment.meta.id, segment.meta);
        self.log_segments.insert(segment.meta.id, segment.meta);
        self.open_segment = Some(segment);
        appended
    }

    /// Syncs the log.
    ///
    /// # Errors
    /// `Io`, `NoSpace`; the store must not be used after either.
    pub(crate) fn sync_log(&mut self) -> Result<()> {
        self.open_segment.as_mut().map_or(Ok(()), Segment::sync)
    }

    /// Closes the active memtable and begins another; flushes first if too many wait.
    pub(crate) fn seal(&mut self) -> Result<()> {
        while self.sealed.len() >= self.options.memory.sealed_memtables_max {
            self.flush_oldest()?;
        }
        let synced = self.sync_log();
        self.poison.on_any(synced)?;
        self.open_segment = None;
        let fresh = Memtable::new(self.options.memory.memtable_bytes);
        self.sealed.push_back(Arc::new(std::mem::replace(&mut self.active, fresh)));
        let sealed_max = self.options.memory.sealed_memtables_max;
        assert!(self.sealed.len() <= sealed_max, "{} of {sealed_max} memtables", self.sealed.len());
        Ok(())
    }

    pub(crate) fn flush_all(&mut self) -> Result<()> {
        while !self.sealed.is_empty() {
            self.flush_oldest()?;
        }
        if !self.active.is_empty() {
            self.seal()?;
            self.flush_oldest()?;
        }
        Ok(())
    }

    /// Lets go of log segments whose rows are all in SSTs.
    pub(crate) fn forget_flushed_segments(&mut self) {
        let memtables = self.sealed.iter().map(Arc::as_ref).chain([&self.active]);
        let needed: Vec<SegmentId> =
            memtables.flat_map(|memtable| memtable.segments.iter().copied()).collect();
        self.segments.retain(|id, _| needed.contains(id));
    }
}
