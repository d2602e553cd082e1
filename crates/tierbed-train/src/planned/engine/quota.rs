//! The disk space of a whole folder, bounded: extents, checkpoints, and the plan beside them.
//!
//! Extents grow while training goes on, everything else when a checkpoint is made. So the extents
//! are told what everything else takes, and a checkpoint what is left when it begins.

use tierbed_core::{check_disk_quota, Result};
use tierbed_io::{listed_bytes, Folder};
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
    // Copies of kept checkpoints have holes, all else is dense.
    let own_bytes = listed_bytes(folder, |name| name != EXTENTS_FILE && !kept::is_kept(name))?;
    Ok(own_bytes + kept::disk_bytes(folder)?)
}
