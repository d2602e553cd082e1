//! A device in this process's memory: the oracle, and the memory backend.

use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use tierbed_core::{Error, Result};

use super::{past_the_end, Device};

/// A device in memory; gone with the process.
#[derive(Debug)]
pub struct MemoryDevice {
    name: String,
    bytes: RwLock<Vec<u8>>,
}

impl MemoryDevice {
    /// Builds an empty device called `name` in messages.
    #[must_use]
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), bytes: RwLock::new(Vec::new()) }
    }

    /// Returns a copy of everything in it.
    #[must_use]
    pub fn to_vec(&self) -> Vec<u8> {
        self.read().clone()
    }

    // Poisoning cannot leave half a byte behind, so a panicked holder does not matter.
    fn read(&self) -> RwLockReadGuard<'_, Vec<u8>> {
        self.bytes.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Vec<u8>> {
        self.bytes.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn range(&self, offset_bytes: u64, len_bytes: usize) -> Result<std::ops::Range<usize>> {
        usize::try_from(offset_bytes)
            .ok()
            .and_then(|start| Some(start..start.checked_add(len_bytes)?))
            .ok_or_else(|| {
                Error::invalid("position does not fit memory")
                    .with("path", &self.name)
                    .with("offset_bytes", offset_bytes)
            })
    }
}

impl Device for MemoryDevice {
    fn name(&self) -> &str {
        &self.name
    }

    fn len_bytes(&self) -> Result<u64> {
        Ok(self.read().len() as u64)
    }

    fn set_len(&self, len_bytes: u64) -> Result<()> {
        let len_bytes = self.range(len_bytes, 0)?.end;
        self.write().resize(len_bytes, 0);
        Ok(())
    }

    fn read_at(&self, offset_bytes: u64, out: &mut [u8]) -> Result<()> {
        let range = self.range(offset_bytes, out.len())?;
        match self.read().get(range) {
            Some(bytes) => out.copy_from_slice(bytes),
            None => return Err(past_the_end(&self.name, offset_bytes, out.len())),
        }
        Ok(())
    }

    fn write_at(&self, offset_bytes: u64, bytes: &[u8]) -> Result<()> {
        if bytes.is_empty() {
            // As a file: nothing written far out does not extend it.
            return Ok(());
        }
        let range = self.range(offset_bytes, bytes.len())?;
        let mut all = self.write();
        if all.len() < range.end {
            all.resize(range.end, 0);
        }
        if let Some(target) = all.get_mut(range) {
            target.copy_from_slice(bytes);
        }
        Ok(())
    }

    fn sync(&self) -> Result<()> {
        Ok(())
    }

    fn allocated_bytes(&self) -> Result<u64> {
        self.len_bytes()
    }
}
