//! A folder on a faulty disk.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

use tierbed_core::env::SplitMix64;
use tierbed_core::{Error, Result};
use tierbed_io::folder::{check_name, locked_error, TEMPORARY_SUFFIX};
use tierbed_io::{Device, Folder, FolderLock, OpenMode};

use crate::device::SimDevice;
use crate::disk::{Disk, FileId, SharedDisk};
use crate::plan::{FaultPlan, IoCounts};

/// A simulated folder; see the crate's page for the model. Clones are the same folder.
#[derive(Debug, Clone)]
pub struct SimFolder {
    disk: SharedDisk,
    is_locked: Arc<AtomicBool>,
}

impl Default for SimFolder {
    fn default() -> Self {
        Self::new(FaultPlan::default())
    }
}

impl SimFolder {
    /// Builds an empty folder with the faults of `plan` ahead of it.
    #[must_use]
    pub fn new(plan: FaultPlan) -> Self {
        Self::of(Disk::new(plan))
    }

    fn of(disk: Disk) -> Self {
        Self { disk: SharedDisk::new(disk), is_locked: Arc::default() }
    }

    /// Replaces the faults ahead and counts from 0 again. Power that failed stays off.
    pub fn set_plan(&self, plan: FaultPlan) {
        self.disk.lock().set_plan(plan);
    }

    /// Returns the calls since the plan was set.
    #[must_use]
    pub fn counts(&self) -> IoCounts {
        self.disk.lock().counts()
    }

    /// Returns the number of crash points passed since the plan was set.
    #[must_use]
    pub fn io_count(&self) -> u64 {
        self.counts().change_count
    }

    /// Returns whether power has failed.
    #[must_use]
    pub fn is_crashed(&self) -> bool {
        self.disk.lock().is_crashed()
    }

    /// Returns the folder as it is found after power loss now, without faults ahead and not
    /// locked. This folder goes on as it was; calling again with the same seed gives the same.
    #[must_use]
    pub fn crash(&self, seed: u64) -> Self {
        Self::of(self.disk.lock().crashed(Some(SplitMix64::new(seed))))
    }

    /// Returns the folder as after a power loss that took everything it could: only what was
    /// synced is there.
    #[must_use]
    pub fn crash_to_synced(&self) -> Self {
        Self::of(self.disk.lock().crashed(None))
    }

    fn device(&self, name: &str, file: FileId, mode: OpenMode) -> SimDevice {
        SimDevice { disk: self.disk.clone(), file, name: name.to_owned(), mode }
    }

    /// Makes or empties the file `name`, fills it and syncs it.
    fn fill(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let mut disk = self.disk.lock();
        let file = match disk.find(name)? {
            Some(file) => file,
            None => disk.create(name)?,
        };
        let filled = disk
            .set_len(file, 0)
            .and_then(|()| disk.write(file, 0, bytes))
            .and_then(|()| disk.sync(file));
        filled.map_err(|error| error.with("path", name))
    }
}

/// Gives a [`SimFolder`] back when dropped.
struct Unlock(Arc<AtomicBool>);

impl Drop for Unlock {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

impl Folder for SimFolder {
    fn path(&self) -> Option<&Path> {
        None
    }

    // The same in every run of a seed.
    fn draw_store_number(&self) -> u32 {
        1
    }

    fn open(&self, name: &str, mode: OpenMode) -> Result<Arc<dyn Device>> {
        check_name(name)?;
        let mut disk = self.disk.lock();
        let file = match (disk.find(name)?, mode) {
            (Some(file), _) => file,
            (None, OpenMode::Create) => disk.create(name)?,
            (None, _) => return Err(Error::invalid("no such file").with("path", name)),
        };
        Ok(Arc::new(self.device(name, file, mode)))
    }

    fn read(&self, name: &str) -> Result<Option<Vec<u8>>> {
        check_name(name)?;
        let Some(file) = self.disk.lock().find(name)? else { return Ok(None) };
        let device = self.device(name, file, OpenMode::ReadOnly);
        let mut bytes = vec![0; usize::try_from(device.len_bytes()?).unwrap_or(usize::MAX)];
        device.read_at(0, &mut bytes)?;
        Ok(Some(bytes))
    }

    fn write_atomic(&self, name: &str, bytes: &[u8]) -> Result<()> {
        check_name(name)?;
        let temporary = format!("{name}{TEMPORARY_SUFFIX}");
        if let Err(error) = self.fill(&temporary, bytes) {
            // As the real folder does: give the space back if the disk still listens.
            let _ = self.disk.lock().remove(&temporary);
            return Err(error);
        }
        let mut disk = self.disk.lock();
        disk.rename(&temporary, name)?;
        disk.sync_names()
    }

    fn write_durable(&self, name: &str, bytes: &[u8]) -> Result<()> {
        check_name(name)?;
        self.fill(name, bytes)
    }

    fn remove(&self, name: &str) -> Result<()> {
        check_name(name)?;
        self.disk.lock().remove(name)
    }

    fn rename(&self, from: &str, to: &str) -> Result<()> {
        check_name(from)?;
        check_name(to)?;
        self.disk.lock().rename(from, to)
    }

    fn list(&self) -> Result<Vec<String>> {
        let mut names = self.disk.lock().names()?;
        names.retain(|name| check_name(name).is_ok());
        Ok(names)
    }

    fn sync(&self) -> Result<()> {
        self.disk.lock().sync_names()
    }

    fn lock(&self) -> Result<FolderLock> {
        if self.is_locked.swap(true, Ordering::AcqRel) {
            return Err(locked_error("(simulated)", &std::process::id().to_string()));
        }
        Ok(FolderLock::new(Unlock(Arc::clone(&self.is_locked))))
    }
}
