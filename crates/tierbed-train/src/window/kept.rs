//! Named checkpoints: kept beside later ones, checked, restored.
//!
//! The files are the business of [`tierbed_store::kept`]; here are the calls of an open store.

use std::sync::Arc;

use tierbed_core::store::Attachment;
use tierbed_core::{Error, Result, TrainStore};
use tierbed_io::Folder;
use tierbed_store::kept;

use crate::folders::check_folder;
use crate::window::engine::WindowEngine;

impl WindowEngine {
    /// Checkpoints as [`checkpoint`](Self::checkpoint) does, and keeps it under `name` until it is
    /// dropped; returns its number.
    ///
    /// # Errors
    /// As `checkpoint`; `Invalid` for a name that is taken or not of `[A-Za-z0-9_-]`;
    /// `Unsupported` without a folder or for a backend with folders of its own. When keeping fails
    /// after the commit, the checkpoint is in force and not kept.
    pub fn keep_checkpoint(&mut self, name: &str, attachments: &[Attachment<'_>]) -> Result<u64> {
        let folder = self.keeping_folder()?;
        kept::check_free(folder.as_ref(), name)?;
        let number = self.checkpoint(name, attachments)?;
        kept::check_quota(folder.as_ref(), self.disk_quota_bytes)?;
        kept::keep(folder.as_ref(), name, number)?;
        self.leave_space_to_kept()?;
        Ok(number)
    }

    /// Forgets the kept checkpoint `name` and gives its disk space back.
    ///
    /// # Errors
    /// `Invalid` when there is none of that name, `Unsupported` without a folder, `Io`.
    pub fn drop_checkpoint(&mut self, name: &str) -> Result<()> {
        kept::drop_checkpoint(self.keeping_folder()?.as_ref(), name)?;
        self.leave_space_to_kept()
    }

    /// Bounds the store by what kept checkpoints leave of the disk quota.
    pub(crate) fn leave_space_to_kept(&mut self) -> Result<()> {
        if let (Some(_), Some(folder)) = (self.disk_quota_bytes, &self.folder) {
            self.store.set_kept_bytes(kept::disk_bytes(folder.as_ref())?);
        }
        Ok(())
    }

    fn keeping_folder(&self) -> Result<Arc<dyn Folder>> {
        self.folder.clone().ok_or_else(|| {
            Error::unsupported("this store has no folder to keep a checkpoint in")
                .with("remedy", "open it with a path")
        })
    }

    /// Checks every checksum of the store and of the checkpoints that are kept; returns the number
    /// of pages checked.
    ///
    /// # Errors
    /// `Corruption`, naming the first bad page, or the bad file of a kept checkpoint.
    pub fn verify(&mut self) -> Result<u64> {
        let mut pages = self.store.verify()?;
        if let Some(folder) = &self.folder {
            for name in kept::kept_names(folder.as_ref())? {
                pages += kept::verify_checkpoint(folder, &name, &check_folder)?;
            }
        }
        Ok(pages)
    }
}
