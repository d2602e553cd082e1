//! A folder whose lock is already held and handed to the next opener.
//!
//! A store may change its engine while it is open. Were the folder given back by the one and taken
//! by the other, a second opener could come in between.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tierbed_core::Result;

use super::{Folder, FolderLock, OpenMode};
use crate::device::Device;

/// A folder that is locked while this lives; [`Folder::lock`] shares the lock.
#[derive(Debug)]
pub struct HeldFolder {
    folder: Arc<dyn Folder>,
    lock: Arc<FolderLock>,
}

impl HeldFolder {
    /// Locks `folder`.
    ///
    /// # Errors
    /// Those of [`Folder::lock`].
    pub fn of(folder: Arc<dyn Folder>) -> Result<Self> {
        let lock = Arc::new(folder.lock()?);
        Ok(Self { folder, lock })
    }
}

impl Folder for HeldFolder {
    fn path(&self) -> Option<&Path> {
        self.folder.path()
    }

    fn file_path(&self, name: &str) -> Option<PathBuf> {
        self.folder.file_path(name)
    }

    fn is_view(&self) -> bool {
        self.folder.is_view()
    }

    fn draw_store_number(&self) -> u32 {
        self.folder.draw_store_number()
    }

    fn open(&self, name: &str, mode: OpenMode) -> Result<Arc<dyn Device>> {
        self.folder.open(name, mode)
    }

    fn read(&self, name: &str) -> Result<Option<Vec<u8>>> {
        self.folder.read(name)
    }

    fn write_atomic(&self, name: &str, bytes: &[u8]) -> Result<()> {
        self.folder.write_atomic(name, bytes)
    }

    fn write_durable(&self, name: &str, bytes: &[u8]) -> Result<()> {
        self.folder.write_durable(name, bytes)
    }

    fn remove(&self, name: &str) -> Result<()> {
        self.folder.remove(name)
    }

    fn link(&self, from: &str, to: &str) -> Result<bool> {
        self.folder.link(from, to)
    }

    fn rename(&self, from: &str, to: &str) -> Result<()> {
        self.folder.rename(from, to)
    }

    fn list(&self) -> Result<Vec<String>> {
        self.folder.list()
    }

    fn sync(&self) -> Result<()> {
        self.folder.sync()
    }

    fn lock(&self) -> Result<FolderLock> {
        Ok(FolderLock::new(Arc::clone(&self.lock)))
    }
}
