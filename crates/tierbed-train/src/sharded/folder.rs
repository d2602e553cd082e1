//! The folder of one shard: names with a prefix in the folder of the store.
//!
//! `CURRENT` is no file of its own here: it is read from what all shards have in force, and
//! written by a vote of theirs.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tierbed_core::Result;
use tierbed_io::{Device, Folder, FolderLock, OpenMode};
use tierbed_store::shards::prefix;
use tierbed_store::CommitLog;

use super::coordinator::CommitCoordinator;

/// See the module documentation. The store's lock is held by whoever has all shards.
#[derive(Debug)]
pub(crate) struct ShardFolder {
    whole: Arc<dyn Folder>,
    coordinator: Arc<CommitCoordinator>,
    shard: usize,
    prefix: String,
}

impl ShardFolder {
    /// Names the part of `whole` that belongs to `shard`.
    pub(crate) fn new(
        whole: Arc<dyn Folder>,
        coordinator: Arc<CommitCoordinator>,
        shard: usize,
    ) -> Self {
        Self { whole, coordinator, shard, prefix: prefix(shard) }
    }

    fn name(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }
}

impl Folder for ShardFolder {
    // Nothing but its files belongs to a shard.
    fn path(&self) -> Option<&Path> {
        None
    }

    fn file_path(&self, name: &str) -> Option<PathBuf> {
        self.whole.file_path(&self.name(name))
    }

    fn is_view(&self) -> bool {
        self.whole.is_view()
    }

    fn draw_store_number(&self) -> u32 {
        self.whole.draw_store_number()
    }

    fn open(&self, name: &str, mode: OpenMode) -> Result<Arc<dyn Device>> {
        self.whole.open(&self.name(name), mode)
    }

    fn read(&self, name: &str) -> Result<Option<Vec<u8>>> {
        match name {
            CommitLog::CURRENT => Ok(self.coordinator.current(self.shard)),
            name => self.whole.read(&self.name(name)),
        }
    }

    fn write_atomic(&self, name: &str, bytes: &[u8]) -> Result<()> {
        match name {
            CommitLog::CURRENT => self.coordinator.vote(self.shard, bytes),
            name => self.whole.write_atomic(&self.name(name), bytes),
        }
    }

    fn write_durable(&self, name: &str, bytes: &[u8]) -> Result<()> {
        self.whole.write_durable(&self.name(name), bytes)
    }

    fn remove(&self, name: &str) -> Result<()> {
        self.whole.remove(&self.name(name))
    }

    fn link(&self, from: &str, to: &str) -> Result<bool> {
        self.whole.link(&self.name(from), &self.name(to))
    }

    fn rename(&self, from: &str, to: &str) -> Result<()> {
        self.whole.rename(&self.name(from), &self.name(to))
    }

    fn list(&self) -> Result<Vec<String>> {
        let names = self.whole.list()?;
        let own = names.iter().filter_map(|name| name.strip_prefix(&self.prefix));
        Ok(own.map(str::to_owned).collect())
    }

    fn sync(&self) -> Result<()> {
        self.whole.sync()
    }

    fn lock(&self) -> Result<FolderLock> {
        Ok(FolderLock::new(()))
    }
}
