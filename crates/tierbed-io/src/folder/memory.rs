//! A folder in this process's memory, for tests and the memory backend.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tierbed_core::{Error, Result};

use super::{check_name, locked_error, Folder, FolderLock, OpenMode};
use crate::device::{Device, MemoryDevice};

/// A folder whose files are [`MemoryDevice`]s. Clones are the same folder.
#[derive(Debug, Clone, Default)]
pub struct MemoryFolder {
    files: Arc<Mutex<BTreeMap<String, Arc<MemoryDevice>>>>,
    is_locked: Arc<AtomicBool>,
}

impl MemoryFolder {
    /// Builds an empty folder.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    fn files(&self) -> MutexGuard<'_, BTreeMap<String, Arc<MemoryDevice>>> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Gives a [`MemoryFolder`] back when dropped.
struct Unlock(Arc<AtomicBool>);

impl Drop for Unlock {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

impl Folder for MemoryFolder {
    fn path(&self) -> Option<&Path> {
        None
    }

    fn open(&self, name: &str, mode: OpenMode) -> Result<Arc<dyn Device>> {
        check_name(name)?;
        let mut files = self.files();
        if let Some(device) = files.get(name) {
            return Ok(Arc::clone(device) as Arc<dyn Device>);
        }
        if mode != OpenMode::Create {
            return Err(Error::invalid("no such file").with("path", name));
        }
        let device = Arc::new(MemoryDevice::new(name));
        files.insert(name.to_owned(), Arc::clone(&device));
        Ok(device)
    }

    fn read(&self, name: &str) -> Result<Option<Vec<u8>>> {
        check_name(name)?;
        Ok(self.files().get(name).map(|device| device.to_vec()))
    }

    fn write_atomic(&self, name: &str, bytes: &[u8]) -> Result<()> {
        check_name(name)?;
        let device = MemoryDevice::new(name);
        device.write_at(0, bytes)?;
        self.files().insert(name.to_owned(), Arc::new(device));
        Ok(())
    }

    fn write_durable(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let device = self.open(name, OpenMode::Create)?;
        device.set_len(0)?;
        device.write_at(0, bytes)
    }

    fn remove(&self, name: &str) -> Result<()> {
        check_name(name)?;
        self.files().remove(name);
        Ok(())
    }

    fn rename(&self, from: &str, to: &str) -> Result<()> {
        check_name(to)?;
        let mut files = self.files();
        let moved = files.remove(from);
        let moved = moved.ok_or_else(|| Error::invalid("no such file").with("path", from))?;
        files.insert(to.to_owned(), moved);
        Ok(())
    }

    fn list(&self) -> Result<Vec<String>> {
        Ok(self.files().keys().cloned().collect())
    }

    fn sync(&self) -> Result<()> {
        Ok(())
    }

    fn lock(&self) -> Result<FolderLock> {
        if self.is_locked.swap(true, Ordering::AcqRel) {
            return Err(locked_error("(memory)", &std::process::id().to_string()));
        }
        Ok(FolderLock::new(Unlock(Arc::clone(&self.is_locked))))
    }
}
