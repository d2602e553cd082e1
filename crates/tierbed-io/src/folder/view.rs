//! A read-only overlay that shows a folder as it would be with another commit in force.
//!
//! Files may have other names than below, or other bytes. Whatever is written, cut, renamed or
//! removed stays in memory: the folder below is never changed and never locked. So a store can be
//! opened to be looked at, on a disk that cannot be written or beside the process that owns it.
//!
//! ```text
//! view   CURRENT   commit-000003.manifest            t.rows
//!        (memory)          │                           │
//! below  CURRENT   commit-000003.manifest   kept.old.t.rows.kept   t.rows
//! ```

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tierbed_core::{Error, Result};

use super::{check_name, Folder, FolderLock, OpenMode};
use crate::device::{past_the_end, Device, MemoryDevice};

/// Most bytes of changes that a view holds: opening a store writes little.
const CHANGED_BYTES_MAX: u64 = 256 << 20;
/// Changes are kept in blocks of this many bytes.
const BLOCK_BYTES: usize = 4096;

/// See the module documentation.
#[derive(Debug)]
pub struct ViewFolder {
    below: Arc<dyn Folder>,
    files: Mutex<BTreeMap<String, Entry>>,
    changed_bytes: Arc<AtomicU64>,
}

#[derive(Debug, Clone)]
enum Entry {
    /// A file of that name below.
    Below(String),
    Own(Arc<dyn Device>),
}

impl ViewFolder {
    /// Builds a view without files.
    #[must_use]
    pub fn empty(below: Arc<dyn Folder>) -> Self {
        Self { below, files: Mutex::default(), changed_bytes: Arc::default() }
    }

    /// Builds a view with all files that are below now.
    ///
    /// # Errors
    /// Those of listing them.
    pub fn of(below: Arc<dyn Folder>) -> Result<Self> {
        let names = below.list()?;
        let view = Self::empty(below);
        view.files().extend(names.into_iter().map(|name| (name.clone(), Entry::Below(name))));
        Ok(view)
    }

    /// Shows the file `below` as `name`.
    #[must_use]
    pub fn with_name(self, name: &str, below: &str) -> Self {
        self.files().insert(name.to_owned(), Entry::Below(below.to_owned()));
        self
    }

    /// Shows a file `name` that holds `bytes`.
    ///
    /// # Errors
    /// `Unsupported` for more bytes than a view holds.
    pub fn with_bytes(self, name: &str, bytes: &[u8]) -> Result<Self> {
        self.put(name, bytes)?;
        Ok(self)
    }

    fn files(&self) -> MutexGuard<'_, BTreeMap<String, Entry>> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put(&self, name: &str, bytes: &[u8]) -> Result<()> {
        check_name(name)?;
        let own = self.own(name);
        own.write_at(0, bytes)?;
        self.files().insert(name.to_owned(), Entry::Own(own));
        Ok(())
    }

    fn own(&self, name: &str) -> Arc<dyn Device> {
        let counted = Arc::clone(&self.changed_bytes);
        Arc::new(ViewDevice::new(Arc::new(MemoryDevice::new(name)), 0, counted))
    }
}

impl Folder for ViewFolder {
    // Nothing may be written by path.
    fn path(&self) -> Option<&Path> {
        None
    }

    fn file_path(&self, name: &str) -> Option<PathBuf> {
        match self.files().get(name)? {
            Entry::Below(below) => self.below.file_path(below),
            Entry::Own(_) => None,
        }
    }

    fn is_view(&self) -> bool {
        true
    }

    fn open(&self, name: &str, mode: OpenMode) -> Result<Arc<dyn Device>> {
        check_name(name)?;
        let mut files = self.files();
        let device: Arc<dyn Device> = match files.get(name) {
            Some(Entry::Own(device)) => return Ok(Arc::clone(device)),
            Some(Entry::Below(below)) => {
                let device = self.below.open(below, OpenMode::ReadOnly)?;
                if mode == OpenMode::ReadOnly {
                    return Ok(device);
                }
                let len_bytes = device.len_bytes()?;
                Arc::new(ViewDevice::new(device, len_bytes, Arc::clone(&self.changed_bytes)))
            }
            None if mode == OpenMode::Create => self.own(name),
            None => return Err(Error::invalid("no such file").with("path", name)),
        };
        files.insert(name.to_owned(), Entry::Own(Arc::clone(&device)));
        Ok(device)
    }

    fn read(&self, name: &str) -> Result<Option<Vec<u8>>> {
        check_name(name)?;
        let entry = self.files().get(name).cloned();
        match entry {
            None => Ok(None),
            Some(Entry::Below(below)) => self.below.read(&below),
            Some(Entry::Own(device)) => {
                let len_bytes = usize::try_from(device.len_bytes()?).unwrap_or(usize::MAX);
                let mut bytes = vec![0; len_bytes];
                device.read_at(0, &mut bytes)?;
                Ok(Some(bytes))
            }
        }
    }

    fn write_atomic(&self, name: &str, bytes: &[u8]) -> Result<()> {
        self.put(name, bytes)
    }

    fn write_durable(&self, name: &str, bytes: &[u8]) -> Result<()> {
        self.put(name, bytes)
    }

    fn remove(&self, name: &str) -> Result<()> {
        check_name(name)?;
        self.files().remove(name);
        Ok(())
    }

    fn rename(&self, from: &str, to: &str) -> Result<()> {
        check_name(from)?;
        check_name(to)?;
        let mut files = self.files();
        let entry = files.remove(from);
        let entry = entry.ok_or_else(|| Error::invalid("no such file").with("path", from))?;
        files.insert(to.to_owned(), entry);
        Ok(())
    }

    fn list(&self) -> Result<Vec<String>> {
        Ok(self.files().keys().filter(|name| check_name(name).is_ok()).cloned().collect())
    }

    fn sync(&self) -> Result<()> {
        Ok(())
    }

    fn lock(&self) -> Result<FolderLock> {
        Ok(FolderLock::new(()))
    }
}

/// A file below, with what was changed since it was opened.
#[derive(Debug)]
struct ViewDevice {
    below: Arc<dyn Device>,
    state: Mutex<Changes>,
    counted: Arc<AtomicU64>,
}

#[derive(Debug)]
struct Changes {
    len_bytes: u64,
    /// Bytes of the file below that still count.
    below_bytes: u64,
    blocks: BTreeMap<u64, Vec<u8>>,
}

impl ViewDevice {
    fn new(below: Arc<dyn Device>, len_bytes: u64, counted: Arc<AtomicU64>) -> Self {
        let changes = Changes { len_bytes, below_bytes: len_bytes, blocks: BTreeMap::new() };
        Self { below, state: Mutex::new(changes), counted }
    }

    // Every change of the state is whole when the lock is given back.
    fn state(&self) -> MutexGuard<'_, Changes> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn read_below(&self, state: &Changes, offset_bytes: u64, out: &mut [u8]) -> Result<()> {
        let there = state.below_bytes.saturating_sub(offset_bytes).min(out.len() as u64) as usize;
        let (there, beyond) = out.split_at_mut(there);
        beyond.fill(0);
        if there.is_empty() {
            return Ok(());
        }
        self.below.read_at(offset_bytes, there)
    }
}

// Calls `visit(block, from byte, to byte, at byte of the request)` for each block of a request.
fn each_block(
    offset_bytes: u64,
    len: usize,
    mut visit: impl FnMut(u64, std::ops::Range<usize>, usize) -> Result<()>,
) -> Result<()> {
    let mut done = 0;
    while done < len {
        let at = offset_bytes + done as u64;
        let from = (at % BLOCK_BYTES as u64) as usize;
        let count = (BLOCK_BYTES - from).min(len - done);
        visit(at / BLOCK_BYTES as u64, from..from + count, done)?;
        done += count;
    }
    Ok(())
}

impl Device for ViewDevice {
    fn name(&self) -> &str {
        self.below.name()
    }

    fn len_bytes(&self) -> Result<u64> {
        Ok(self.state().len_bytes)
    }

    fn set_len(&self, len_bytes: u64) -> Result<()> {
        let mut state = self.state();
        state.len_bytes = len_bytes;
        state.below_bytes = state.below_bytes.min(len_bytes);
        state.blocks.retain(|block, _| block * (BLOCK_BYTES as u64) < len_bytes);
        let tail = (len_bytes % BLOCK_BYTES as u64) as usize;
        if let Some(block) = state.blocks.get_mut(&(len_bytes / BLOCK_BYTES as u64)) {
            block.iter_mut().skip(tail).for_each(|byte| *byte = 0);
        }
        Ok(())
    }

    fn read_at(&self, offset_bytes: u64, out: &mut [u8]) -> Result<()> {
        let state = self.state();
        let end = offset_bytes.checked_add(out.len() as u64);
        if end.is_none_or(|end| end > state.len_bytes) {
            return Err(past_the_end(self.name(), offset_bytes, out.len()));
        }
        self.read_below(&state, offset_bytes, out)?;
        each_block(offset_bytes, out.len(), |block, range, at| {
            let changed = state.blocks.get(&block).and_then(|block| block.get(range.clone()));
            let place = out.get_mut(at..at + range.len());
            if let (Some(changed), Some(place)) = (changed, place) {
                place.copy_from_slice(changed);
            }
            Ok(())
        })
    }

    fn write_at(&self, offset_bytes: u64, bytes: &[u8]) -> Result<()> {
        let mut state = self.state();
        each_block(offset_bytes, bytes.len(), |block, range, at| {
            if !state.blocks.contains_key(&block) {
                let held = self.counted.fetch_add(BLOCK_BYTES as u64, Ordering::Relaxed);
                if held >= CHANGED_BYTES_MAX {
                    return Err(Error::unsupported("a folder opened to be read takes no more")
                        .with("path", self.name())
                        .with("changed_bytes_max", CHANGED_BYTES_MAX)
                        .with("remedy", "open a copy of the folder for writing"));
                }
                let mut fresh = vec![0; BLOCK_BYTES];
                self.read_below(&state, block * BLOCK_BYTES as u64, &mut fresh)?;
                state.blocks.insert(block, fresh);
            }
            let place = state.blocks.get_mut(&block).and_then(|block| block.get_mut(range.clone()));
            if let (Some(place), Some(part)) = (place, bytes.get(at..at + range.len())) {
                place.copy_from_slice(part);
            }
            Ok(())
        })?;
        if !bytes.is_empty() {
            state.len_bytes = state.len_bytes.max(offset_bytes + bytes.len() as u64);
        }
        Ok(())
    }

    fn sync(&self) -> Result<()> {
        Ok(())
    }

    fn allocated_bytes(&self) -> Result<u64> {
        self.below.allocated_bytes()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test that panics has failed")]
mod tests {
    use tierbed_core::env::SplitMix64;

    use super::*;
    use crate::MemoryFolder;

    fn below() -> Arc<dyn Folder> {
        let folder = MemoryFolder::new();
        folder.write_durable("a", &[7; 10_000]).unwrap();
        folder.write_durable("b", b"bee").unwrap();
        Arc::new(folder)
    }

    #[test]
    fn changes_stay_in_the_view() {
        let below = below();
        let view = ViewFolder::of(Arc::clone(&below)).unwrap();
        let view = view.with_name("c", "b").with_bytes("d", b"dee").unwrap();
        assert_eq!(view.list().unwrap(), ["a", "b", "c", "d"]);
        assert_eq!(view.read("c").unwrap().unwrap(), b"bee");
        view.write_atomic("b", b"other").unwrap();
        view.remove("c").unwrap();
        view.rename("d", "e").unwrap();
        view.open("a", OpenMode::ReadWrite).unwrap().set_len(3).unwrap();
        view.open("f", OpenMode::Create).unwrap().write_at(5, b"x").unwrap();
        assert_eq!(view.list().unwrap(), ["a", "b", "e", "f"]);
        assert_eq!(view.read("a").unwrap().unwrap(), [7; 3]);
        assert_eq!(view.read("b").unwrap().unwrap(), b"other");
        assert_eq!(view.read("f").unwrap().unwrap(), b"\0\0\0\0\0x");
        assert!(view.open("g", OpenMode::ReadWrite).is_err());
        assert!(view.path().is_none() && view.is_view());
        let (_one, _two) = (view.lock().unwrap(), below.lock().unwrap());
        assert_eq!(below.list().unwrap(), ["a", "b"]);
        assert_eq!(below.read("a").unwrap().unwrap(), [7; 10_000]);
        assert_eq!(below.read("b").unwrap().unwrap(), b"bee");
    }

    #[test]
    fn a_changed_file_is_as_one_in_memory() {
        for seed in 0..40 {
            let mut rng = SplitMix64::new(seed);
            let view = ViewFolder::of(below()).unwrap();
            let device = view.open("a", OpenMode::ReadWrite).unwrap();
            let plain = MemoryDevice::new("a");
            plain.write_at(0, &[7; 10_000]).unwrap();
            for _ in 0..20 {
                let (at, len, byte) = (rng.below(15_000), rng.below(6000), rng.below(256) as u8);
                for changed in [&*device, &plain as &dyn Device] {
                    match byte % 4 {
                        0 => changed.set_len(at).unwrap(),
                        _ => changed.write_at(at, &vec![byte; len as usize]).unwrap(),
                    }
                }
                assert_eq!(device.len_bytes().unwrap(), plain.len_bytes().unwrap());
                assert_eq!(view.read("a").unwrap().unwrap(), plain.to_vec(), "seed {seed}");
            }
        }
    }
}
