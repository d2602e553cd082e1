//! The disk space of a whole folder, bounded: extents, checkpoints, and the plan beside them.
//!
//! Extents grow while training goes on, everything else when a checkpoint is made. So the extents
//! are told what everything else takes, and a checkpoint what is left when it begins.

use tierbed_core::{check_disk_quota, Result};
use tierbed_io::{listed_bytes, Folder, OpenMode};
use tierbed_store::kept;

use super::{PlannedEngine, EXTENTS_FILE};

/// What a checkpoint may still write.
#[derive(Debug)]
pub(super) struct DiskQuota {
    limit_bytes: Option<u64>,
    used_bytes: u64,
}

impl DiskQuota {
    /// Counts `bytes` that are about to be written.
    ///
    /// # Errors
    /// `NoSpace` when the folder would be larger than allowed.
    pub(super) fn take(&mut self, bytes: u64) -> Result<()> {
        check_disk_quota(self.limit_bytes, self.used_bytes + bytes)?;
        self.used_bytes += bytes;
        Ok(())
    }
}

impl PlannedEngine {
    /// Returns what the next checkpoint may write: the last one stays beside it for a while.
    ///
    /// # Errors
    /// `Io` from the folder.
    pub(super) fn disk_quota(&mut self) -> Result<DiskQuota> {
        let limit_bytes = self.config.disk_quota_bytes;
        if limit_bytes.is_none() {
            return Ok(DiskQuota { limit_bytes, used_bytes: 0 });
        }
        let mover = self.pipeline.mover()?;
        // A store that was killed may have a longer file than it uses.
        let extents = mover.extents.taken_bytes().max(mover.disk.device().len_bytes()?);
        Ok(DiskQuota { limit_bytes, used_bytes: extents + other_bytes(&*self.folder)? })
    }

    /// Returns the bytes of all files but kept checkpoints.
    ///
    /// # Errors
    /// `Io` from the folder.
    pub(crate) fn disk_bytes(&self) -> Result<u64> {
        listed_bytes(&*self.folder, |name| !kept::is_kept(name))
    }

    /// Leaves to the extents what the other files of the folder do not take.
    ///
    /// # Errors
    /// `Io` from the folder.
    pub(crate) fn bound_extents(&mut self) -> Result<()> {
        if self.config.disk_quota_bytes.is_some() {
            let bytes = other_bytes(&*self.folder)?;
            self.pipeline.mover()?.extents.set_other_bytes(bytes);
        }
        Ok(())
    }
}

/// Returns the bytes of all files but the extents.
///
/// # Errors
/// `Io` from the folder.
pub(super) fn other_bytes(folder: &dyn Folder) -> Result<u64> {
    folder_bytes(folder, |name| name != EXTENTS_FILE)
}

/// Returns the bytes of the files of `folder` that `is_counted` names: what those with holes
/// occupy, rows of the window order and copies of kept checkpoints, and the length of all others.
///
/// # Errors
/// `Io` from the folder.
pub(crate) fn folder_bytes(folder: &dyn Folder, is_counted: impl Fn(&str) -> bool) -> Result<u64> {
    let has_holes = |name: &str| name.ends_with(".rows") && name != EXTENTS_FILE;
    let is_dense = |name: &str| !has_holes(name) && !kept::is_kept(name);
    let dense_bytes = listed_bytes(folder, |name| is_dense(name) && is_counted(name))?;
    let mut bytes = dense_bytes + kept::disk_bytes(folder)?;
    for name in folder.list()?.iter().filter(|name| has_holes(name) && is_counted(name)) {
        bytes += folder.open(name, OpenMode::ReadOnly)?.allocated_bytes()?;
    }
    Ok(bytes)
}
