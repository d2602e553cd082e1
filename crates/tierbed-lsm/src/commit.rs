//! When is what was written really there, and what does a reopened store begin with?
//!
//! A commit makes SSTs and log segments durable, writes the version file, and then switches with
//! the protocol of `tierbed_trainstore::CommitLog`. Files of the commit in force stay until the
//! next one is, also when compactions have replaced them; so a crash finds them whole.

use std::collections::{BTreeMap, BTreeSet};

use tierbed_core::checksum::crc32c;
use tierbed_core::store::Attachment;
use tierbed_core::{Budget, Error, ErrorKind, Result};
use tierbed_io::Folder;
use tierbed_trainstore::{CommitFailure, CommitLog, Manifest, TableMeta};

use crate::options::Durability;
use crate::store::LsmStore;
use crate::version::{decode, encode, encoded_len, SstId, StoredVersion, Version};
use crate::wal::{self, SegmentId, SegmentMeta};

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
            return Ok(StoredVersion {
                version: Version::default(),
                outdated: Vec::new(),
                next_sst: 0,
                next_segment: 0,
                segments: Vec::new(),
                hot_homes: Vec::new(),
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
        self.segments.insert(meta.id, meta);
        self.active.segments.push(meta.id);
        wal::replay(folder.as_ref(), &schema, meta, &mut |key, record| {
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
        match self.put_in_force(name, attachments) {
            Ok(()) => {
                self.stats.commit_count += 1;
                Ok(())
            }
            Err(CommitFailure::Undone(error)) => Err(error),
            Err(CommitFailure::Poisoned(error)) => {
                self.poison = Some(error.to_string());
                Err(error)
            }
        }
    }

    fn put_in_force(
        &mut self,
        name: &str,
        attachments: &[Attachment<'_>],
    ) -> std::result::Result<(), CommitFailure> {
        self.collect().map_err(failure)?;
        match self.options.durability {
            Durability::Commit => self.flush_all().map_err(failure)?,
            // A failed sync leaves open which rows reached the disk; asking again proves nothing.
            // Source: Rebello et al., "Can applications recover from fsync failures?", ATC'20.
            Durability::Step => self.sync_log().map_err(CommitFailure::Poisoned)?,
        }
        let new_bytes = attachments.iter().map(|attachment| attachment.bytes.len() as u64).sum();
        self.check_quota(new_bytes).map_err(failure)?;
        let number = self.log.next_number();
        let segments: Vec<_> = self.segments.values().copied().collect();
        let store_file = self.write_version(number, &segments).map_err(|error| {
            let _ = self.tools.folder.remove(&CommitLog::file_name(number, "version"));
            failure(error)
        })?;
        let manifest = Manifest {
            number,
            name: name.to_owned(),
            backend: "lsm".to_owned(),
            schema: self.schema.clone(),
            tables: Vec::new(),
            store_file: Some(store_file),
            attachments: Vec::new(),
        };
        self.log.put_in_force(manifest, attachments)?;
        self.committed = Committed::of(&self.version, &segments);
        self.remove_garbage();
        Ok(())
    }

    fn write_version(&self, number: u64, segments: &[SegmentMeta]) -> Result<TableMeta> {
        let counts = self.monitor.counts();
        let outdated = |id| (id, counts.get(&id).copied().unwrap_or(0));
        let stored = StoredVersion {
            version: (*self.version).clone(),
            outdated: self.version.ssts().map(|(_, sst)| outdated(sst.id)).collect(),
            next_sst: self.tools.peek_id().0,
            next_segment: self.next_segment,
            segments: segments.to_vec(),
            hot_homes: self.allocator.hot_homes(),
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
            self.segments.keys().copied().chain(committed).map(SegmentId::file_name).collect();
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

// A damaged SST met by a compaction undoes the commit; it says nothing about later syncs.
fn failure(error: Error) -> CommitFailure {
    match error.kind() {
        ErrorKind::Corruption => CommitFailure::Undone(error),
        _ => CommitFailure::of(error),
    }
}
