//! Part of a folder: the files whose names begin with a prefix, as a folder of their own.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tierbed_core::Result;

use super::{Folder, FolderLock, OpenMode};
use crate::device::Device;

/// See the module documentation. Whoever has the whole folder locked has this part locked, too.
#[derive(Debug)]
pub struct PartFolder {
    whole: Arc<dyn Folder>,
    prefix: &'static str,
}

impl PartFolder {
    /// Takes the files of `whole` whose names begin with `prefix`, under the rest of their names.
    #[must_use]
    pub fn new(whole: Arc<dyn Folder>, prefix: &'static str) -> Self {
        Self { whole, prefix }
    }

    fn name(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }
}

impl Folder for PartFolder {
    // Nothing but its files belongs to it.
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
        self.whole.read(&self.name(name))
    }

    fn write_atomic(&self, name: &str, bytes: &[u8]) -> Result<()> {
        self.whole.write_atomic(&self.name(name), bytes)
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
        let own = names.iter().filter_map(|name| name.strip_prefix(self.prefix));
        Ok(own.map(str::to_owned).collect())
    }

    fn sync(&self) -> Result<()> {
        self.whole.sync()
    }

    fn lock(&self) -> Result<FolderLock> {
        Ok(FolderLock::new(()))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that panics has failed, as it should")]

    use super::*;
    use crate::folder::MemoryFolder;

    #[test]
    fn a_part_sees_its_own_files_only() {
        let whole: Arc<dyn Folder> = Arc::new(MemoryFolder::new());
        let part = PartFolder::new(Arc::clone(&whole), "ids.");
        whole.write_atomic("CURRENT", b"rows").unwrap();
        part.write_atomic("CURRENT", b"ids").unwrap();
        assert_eq!(part.read("CURRENT").unwrap().unwrap(), b"ids");
        assert_eq!(whole.read("CURRENT").unwrap().unwrap(), b"rows");
        assert_eq!(part.list().unwrap(), ["CURRENT"]);
        assert_eq!(whole.list().unwrap(), ["CURRENT", "ids.CURRENT"]);
        part.remove("CURRENT").unwrap();
        assert!(part.list().unwrap().is_empty() && part.read("CURRENT").unwrap().is_none());
        assert!(whole.read("CURRENT").unwrap().is_some());
    }
}
