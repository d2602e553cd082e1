//! Commits and recovery of the tree.
//!
//! A commit makes SSTs and log segments durable, writes the version file, and then switches with
//! the protocol of `tierbed_store::CommitLog`. Files of the commit in force stay until the
//! next one is, also when compactions have replaced them; so a crash finds them whole.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tierbed_core::checksum::crc32c;
use tierbed_core::store::{Attachment, CommitInfo};
use tierbed_core::{Budget, Error, Result};
use tierbed_io::{Folder, OpenMode};
use tierbed_store::mark::read_mark;
use tierbed_store::{check_attachments, CommitFailure, CommitLog, Manifest, TableMeta};

use crate::compaction::outdated::outdated_rows;
use crate::options::Durability;
use crate::store::LsmStore;
use crate::version::{decode, encode, encoded_len, SstId, StoredVersion, Version};
use crate::wal::{self, find_tail, Entry, SegmentId, SegmentMeta, StepCommit};

/// A commit with more bytes of attachments is a full one; dense layers belong to files.
const STEP_BYTES_MAX: usize = 256 << 10;

/// The files that the commit in force needs.
#[derive(Debug, Default)]
pub(crate) struct Committed {
    pub(crate) ssts: BTreeMap<SstId, u64>,
    pub(crate) segments: Vec<SegmentMeta>,
}

impl Committed {
    pub(crate) fn of(version: &Version, segments: &[SegmentMeta]) -> Self {
        let ssts = version.ssts().map(|(_, sst)| (sst.id, sst.size_bytes())).collect();
        Self { ssts, segments: segments.to_vec() }
    }
}

impl LsmStore {
    /// Reads the version of the commit in force; an empty one when there is none.
    pub(crate) fn read_version(
        folder: &dyn Folder,
        log: &CommitLog,
        budget: &Budget,
    ) -> Result<StoredVersion> {
        let Some(manifest) = log.manifest() else {
            // SSTs and log segments hold their ids: those of two stores differ.
            let first_id = u64::from(log.store()) << 32;
            return Ok(StoredVersion {
                version: Version::default(),
                outdated: Vec::new(),
                next_sst: first_id,
                next_segment: first_id,
                segments: Vec::new(),
                hot_keys: Vec::new(),
            });
        };
        let Some(meta) = &manifest.store_file else {
            return Err(Error::corruption("manifest names no version file"));
        };
        let bytes = folder.read(&meta.file)?.ok_or_else(|| {
            Error::corruption("file of the commit in force is missing").with("file", &meta.file)
        })?;
        let _memory = budget.reserve("tree metadata", 2 * bytes.len() as u64)?;
        let found = crc32c(&bytes);
        if found != meta.crc32c {
            return Err(Error::corruption("version file checksum mismatch")
                .with("file", &meta.file)
                .with("expected", format_args!("{:08x}", meta.crc32c))
                .with("found", format_args!("{found:08x}"))
                .with("remedy", "restore the store's folder from a copy"));
        }
        decode(&bytes)
    }

    /// Applies the committed part of a log segment again.
    pub(crate) fn replay(&mut self, meta: SegmentMeta) -> Result<()> {
        let folder = self.tools.folder.clone();
        let schema = self.schema.clone();
        let budget = self.options.budget.clone();
        self.segments.insert(meta.id, meta);
        self.active.segments.push(meta.id);
        wal::replay(folder.as_ref(), &schema, meta, &budget, &mut |key, record| {
            if !self.active.fits(1, record.len()) {
                self.seal()?;
                self.active.segments.push(meta.id);
            }
            self.active.insert(key, record);
            self.allocator.wrote(key);
            Ok(())
        })
    }

    pub(crate) fn commit_all(&mut self, name: &str, attachments: &[Attachment<'_>]) -> Result<()> {
        let result = match self.takes_step(name, attachments) {
            true => self.commit_step(name, attachments),
            false => self.put_in_force(name, attachments),
        };
        result.map_err(|failure| failure.into_error(&mut self.poison))?;
        self.stats.commit_count += 1;
        Ok(())
    }

    // Whether the commit may be an entry of the log. It may not when something changed that only
    // a version and a manifest hold, or when the log has become long.
    fn takes_step(&self, name: &str, attachments: &[Attachment<'_>]) -> bool {
        let bytes = StepCommit::payload_len(name, attachments);
        let stored = self.log.manifest().map(|manifest| &manifest.schema);
        self.options.durability == Durability::Step
            && stored == Some(&self.schema)
            && bytes <= STEP_BYTES_MAX
            && self.log_bytes + bytes as u64 <= self.log_bytes_max()
    }

    // The log is replayed into memtables at opening; more of it than one holds would be flushed.
    fn log_bytes_max(&self) -> u64 {
        self.options.memory.memtable_bytes as u64
    }

    fn commit_step(
        &mut self,
        name: &str,
        attachments: &[Attachment<'_>],
    ) -> std::result::Result<(), CommitFailure> {
        check_attachments(attachments).map_err(CommitFailure::of_merge)?;
        let bytes = StepCommit::payload_len(name, attachments) as u64;
        self.check_quota(bytes).map_err(CommitFailure::of_merge)?;
        let info = CommitInfo { number: self.log.next_number(), name: name.to_owned() };
        // The entry being built, the one in force, and what is kept of this one.
        let held_bytes = self.step_memory.bytes();
        self.step_memory.resize(held_bytes + 2 * bytes).map_err(CommitFailure::of_merge)?;
        let mut entry = Entry::default();
        StepCommit::encode(&mut entry, &info, attachments);
        let appended = self.append_log(|segment| segment.append_commit(&mut entry));
        appended.map_err(CommitFailure::of)?;
        self.sync_log().map_err(CommitFailure::Poisoned)?;
        if self.has_new_segments {
            self.tools.folder.sync().map_err(CommitFailure::Poisoned)?;
            self.has_new_segments = false;
        }
        if let Some(mark) = &self.mark {
            mark.note(info.number).map_err(CommitFailure::Poisoned)?;
        }
        self.log.note_later(info.number);
        assert!(self.log.next_number() > info.number, "the number of a step is taken");
        let keep = |blob: &Attachment<'_>| (blob.name.to_owned(), blob.bytes.to_vec());
        self.step = Some(StepCommit { info, attachments: attachments.iter().map(keep).collect() });
        // Less than a moment ago, so it fits.
        let _ = self.step_memory.resize(bytes);
        self.committed.segments = self.log_segments.values().copied().collect();
        self.lsm.step_commit_count += 1;
        Ok(())
    }

    /// Finds the step commits behind the full commit whose version names `base`, cuts off what
    /// no step commits, and returns the segments to replay.
    pub(crate) fn find_steps(&mut self, base: &[SegmentMeta]) -> Result<Vec<SegmentMeta>> {
        let folder = Arc::clone(&self.tools.folder);
        let number = self.log.info().map_or(0, |info| info.number);
        let budget = &self.options.budget;
        // Before the log: beside a process that trains, steps come behind what is read here.
        let acknowledged = read_mark(folder.as_ref())?;
        let tail = find_tail(folder.as_ref(), base, self.next_segment, number, budget)?;
        let reached = tail.commit.as_ref().map_or(number, |step| step.info.number);
        check_reached(reached, acknowledged)?;
        let mut is_changed = false;
        for name in folder.list()? {
            let Some(id) = SegmentId::of_file(&name) else { continue };
            let Some(segment) = tail.segments.iter().find(|segment| segment.id == id) else {
                folder.remove(&name)?;
                is_changed = true;
                continue;
            };
            let device = folder.open(&name, OpenMode::ReadWrite)?;
            if device.len_bytes()? > segment.len_bytes {
                device.set_len(segment.len_bytes)?;
                device.sync()?;
            }
        }
        // Else a later commit could find the old ends again, behind its own entries.
        if is_changed {
            folder.sync()?;
        }
        self.next_segment = tail.next_segment;
        self.log_bytes = tail.len_bytes;
        self.log_segments = tail.segments.iter().map(|segment| (segment.id, *segment)).collect();
        if let Some(step) = tail.commit {
            let kept = |(name, bytes): &(String, Vec<u8>)| name.len() + bytes.len();
            let bytes: usize = step.attachments.iter().map(kept).sum();
            self.step_memory.resize(bytes as u64)?;
            self.log.note_later(step.info.number);
            self.step = Some(step);
        }
        Ok(tail.segments)
    }

    fn put_in_force(
        &mut self,
        name: &str,
        attachments: &[Attachment<'_>],
    ) -> std::result::Result<(), CommitFailure> {
        self.collect().map_err(CommitFailure::of_merge)?;
        match self.options.durability {
            Durability::Commit => self.flush_all().map_err(CommitFailure::of_merge)?,
            // A failed sync leaves open which rows reached the disk; asking again proves nothing.
            // Source: Rebello et al., "Can applications recover from fsync failures?", ATC'20.
            Durability::Step if self.log_bytes <= self.log_bytes_max() => {
                self.sync_log().map_err(CommitFailure::Poisoned)?;
            }
            // With the memtables the log is empty, too.
            Durability::Step => self.flush_all().map_err(CommitFailure::of_merge)?,
        }
        let new_bytes = attachments.iter().map(|attachment| attachment.bytes.len() as u64).sum();
        self.check_quota(new_bytes).map_err(CommitFailure::of_merge)?;
        let is_all_on_disk = self.sealed.is_empty() && self.active.is_empty();
        assert!(is_all_on_disk || !self.segments.is_empty(), "rows in memory are in no log");
        let number = self.log.next_number();
        let segments: Vec<_> = self.segments.values().copied().collect();
        let store_file = self.write_version(number, &segments).map_err(|error| {
            let _ = self.tools.folder.remove(&CommitLog::file_name(number, "version"));
            CommitFailure::of_merge(error)
        })?;
        let manifest =
            Manifest { store_file: Some(store_file), ..self.log.next_manifest(name, &self.schema) };
        self.log.put_in_force(manifest, attachments)?;
        self.step = None;
        let _ = self.step_memory.resize(0);
        self.log_segments = segments.iter().map(|segment| (segment.id, *segment)).collect();
        self.log_bytes = 0;
        self.has_new_segments = false;
        self.committed = Committed::of(&self.version, &segments);
        self.remove_garbage();
        Ok(())
    }

    fn write_version(&self, number: u64, segments: &[SegmentMeta]) -> Result<TableMeta> {
        let counts = self.monitor.counts();
        let outdated = |id| (id, outdated_rows(counts, id));
        let stored = StoredVersion {
            version: (*self.version).clone(),
            outdated: self.version.ssts().map(|(_, sst)| outdated(sst.id)).collect(),
            next_sst: self.tools.peek_id().0,
            next_segment: self.next_segment,
            segments: segments.to_vec(),
            hot_keys: self.allocator.hot_keys(),
        };
        let bytes_max = encoded_len(&stored) as u64;
        let _memory = self.options.budget.reserve("tree metadata", 2 * bytes_max)?;
        let bytes = encode(&stored);
        let file = CommitLog::file_name(number, "version");
        self.tools.folder.write_durable(&file, &bytes)?;
        let entry_count = stored.outdated.len() as u64;
        Ok(TableMeta { file, crc32c: crc32c(&bytes), entry_count, ..TableMeta::default() })
    }

    // Whether the background thread may be writing this file.
    fn is_under_way(&self, name: &str) -> bool {
        let Some(job) = self.under_way else { return false };
        let id = name.strip_suffix(".sst").and_then(|number| number.parse().ok());
        id.is_none_or(|id| SstId(id) >= job.first_new)
    }

    // Files that neither the version nor the commit in force needs are garbage; failing to
    // remove them costs space, not correctness.
    pub(crate) fn remove_garbage(&self) {
        let ssts: BTreeSet<String> =
            self.ssts.keys().chain(self.committed.ssts.keys()).map(|id| id.file_name()).collect();
        let committed = self.committed.segments.iter().map(|segment| segment.id);
        let segments: BTreeSet<String> =
            self.log_segments.keys().copied().chain(committed).map(SegmentId::file_name).collect();
        for name in self.tools.folder.list().unwrap_or_default() {
            let is_garbage =
                (name.ends_with(".sst") && !ssts.contains(&name) && !self.is_under_way(&name))
                    || (name.ends_with(".wal") && !segments.contains(&name));
            if is_garbage {
                let _ = self.tools.folder.remove(&name);
            }
        }
    }
}

// Nothing has been cut off yet.
fn check_reached(reached: u64, acknowledged: Option<u64>) -> Result<()> {
    let lost = acknowledged.unwrap_or(0).saturating_sub(reached);
    if lost == 0 {
        return Ok(());
    }
    Err(Error::corruption("the log ends before the last step that was acknowledged")
        .with("last_step", reached)
        .with("acknowledged", reached + lost)
        .with("steps_lost", lost)
        .with(
            "remedy",
            "bring the .wal files back from a copy, or go on without these steps: `tierbed repair \
             FOLDER`",
        ))
}
