//! Objects in a folder: of this machine, or one that machines share.
//!
//! A small object is replaced by a rename, after a sync; conditional writes take the folder's lock
//! for as long as they compare and rename. Whoever is killed leaves the old object or the new one,
//! and the operating system gives the lock back.

use std::fs::{DirEntry, Metadata};
use std::io::ErrorKind as OsKind;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use tierbed_core::env::{Clock, SystemClock};
use tierbed_core::{Error, ErrorKind, Result};
use tierbed_io::folder::{check_name, LOCK_NAME, TEMPORARY_SUFFIX};
use tierbed_io::{Device, Folder, FolderLock, FsFolder, OpenMode};

use crate::digest::Digest;
use crate::objects::{Chunks, Found, Listed, Objects, Put, Tag, When};

/// How long a write waits for another one; each holds the lock for a few syncs.
const LOCK_WAIT_US: u64 = 30_000_000;
const LOCK_PAUSE: Duration = Duration::from_millis(2);

/// Objects below a folder, which is made by the first write.
#[derive(Debug)]
pub struct FolderObjects {
    root: PathBuf,
    clock: Arc<dyn Clock>,
}

/// Where an object lies.
struct Place<'a> {
    folder: PathBuf,
    file: &'a str,
}

impl Place<'_> {
    fn path(&self) -> PathBuf {
        self.folder.join(self.file)
    }
}

impl FolderObjects {
    /// Returns the objects below `root`.
    #[must_use]
    pub fn new(root: &Path) -> Self {
        Self { root: root.to_owned(), clock: Arc::new(SystemClock::default()) }
    }

    fn place<'a>(&self, name: &'a str) -> Result<Place<'a>> {
        name.split('/').try_for_each(check_name)?;
        let (folders, file) = match name.rsplit_once('/') {
            Some((folders, file)) => (Some(folders), file),
            None => (None, name),
        };
        let folder = folders.map_or_else(|| self.root.clone(), |folders| self.root.join(folders));
        Ok(Place { folder, file })
    }

    /// Takes the lock, and waits for it.
    fn lock(&self) -> Result<FolderLock> {
        let folder = FsFolder::create(&self.root)?;
        let end_us = self.clock.now_us() + LOCK_WAIT_US;
        loop {
            match folder.lock() {
                Err(error) if error.kind() == ErrorKind::Closed && self.clock.now_us() < end_us => {
                    std::thread::sleep(LOCK_PAUSE);
                }
                result => return result,
            }
        }
    }

    fn walk(&self, folder: &Path, prefix: &str, found: &mut Vec<Listed>) -> Result<()> {
        let Some(entries) = present(folder, std::fs::read_dir(folder))? else { return Ok(()) };
        for entry in entries {
            let entry = entry.map_err(|cause| refused(folder, cause))?;
            let Ok(name) = entry.file_name().into_string() else { continue };
            let Some(stat) = stat_of(&entry)? else { continue };
            let is_ours = name != LOCK_NAME && !name.ends_with(TEMPORARY_SUFFIX);
            let name = format!("{prefix}{name}");
            if stat.is_dir() {
                self.walk(&entry.path(), &format!("{name}/"), found)?;
            } else if stat.is_file() && is_ours {
                let modified_s =
                    modified_s(&stat).map_err(|cause| refused(&entry.path(), cause))?;
                found.push(Listed { name, bytes: stat.len(), modified_s });
            }
        }
        Ok(())
    }
}

fn refused(path: &Path, cause: std::io::Error) -> Error {
    Error::os("cannot read folder", cause).with("path", path.display())
}

/// What may be gone meanwhile is `None`.
fn present<T>(path: &Path, result: std::io::Result<T>) -> Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(cause) if cause.kind() == OsKind::NotFound => Ok(None),
        Err(cause) => Err(refused(path, cause)),
    }
}

fn stat_of(entry: &DirEntry) -> Result<Option<Metadata>> {
    present(&entry.path(), entry.metadata())
}

fn modified_s(stat: &Metadata) -> std::io::Result<u64> {
    let since = stat.modified()?.duration_since(UNIX_EPOCH);
    since.map(|since| since.as_secs()).map_err(std::io::Error::other)
}

impl Objects for FolderObjects {
    fn list(&self, folder: Option<&str>) -> Result<Vec<Listed>> {
        let mut found = Vec::new();
        match folder {
            None => self.walk(&self.root, "", &mut found)?,
            Some(name) => {
                let path = self.place(name)?.path();
                self.walk(&path, &format!("{name}/"), &mut found)?;
            }
        }
        found.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        Ok(found)
    }

    fn get(&self, name: &str, bytes_max: u64) -> Result<Option<Found>> {
        let place = self.place(name)?;
        let path = place.path();
        let Some(stat) = present(&path, std::fs::metadata(&path))? else { return Ok(None) };
        if stat.len() > bytes_max {
            return Err(too_long(name, stat.len(), bytes_max));
        }
        let Some(bytes) = FsFolder::open(&place.folder)?.read(place.file)? else { return Ok(None) };
        let tag = Tag(Digest::of(&bytes).to_string());
        Ok(Some(Found { bytes, tag }))
    }

    fn get_range(&self, name: &str, range: Range<u64>) -> Result<Option<Vec<u8>>> {
        let place = self.place(name)?;
        let path = place.path();
        if present(&path, std::fs::metadata(&path))?.is_none() {
            return Ok(None);
        }
        let device = FsFolder::open(&place.folder)?.open(place.file, OpenMode::ReadOnly)?;
        read_range(&*device, range).map(Some)
    }

    fn put(&self, name: &str, bytes: &[u8], when: &When) -> Result<Put> {
        let place = self.place(name)?;
        let _lock = self.lock()?;
        let folder = FsFolder::create(&place.folder)?;
        let found = folder.read(place.file)?;
        let holds = match when {
            When::Always => true,
            When::Absent => found.is_none(),
            When::Unchanged(Tag(tag)) => {
                found.is_some_and(|bytes| Digest::of(&bytes).to_string() == *tag)
            }
        };
        if !holds {
            return Ok(Put::Lost);
        }
        folder.write_atomic(place.file, bytes)?;
        Ok(Put::Done)
    }

    fn put_large(&self, name: &str, chunks: &mut Chunks<'_>) -> Result<()> {
        let place = self.place(name)?;
        let folder = FsFolder::create(&place.folder)?;
        let device = folder.open(place.file, OpenMode::Create)?;
        device.set_len(0)?;
        let mut at = 0;
        for chunk in chunks {
            let chunk = chunk?;
            device.write_at(at, &chunk)?;
            at += chunk.len() as u64;
        }
        device.sync()?;
        folder.sync()
    }

    fn remove(&self, name: &str) -> Result<()> {
        let place = self.place(name)?;
        let _lock = self.lock()?;
        if present(&place.folder, std::fs::metadata(&place.folder))?.is_none() {
            return Ok(());
        }
        let folder = FsFolder::open(&place.folder)?;
        folder.remove(place.file)?;
        // What is removed after this one must not be gone before it.
        folder.sync()?;
        if place.folder != self.root {
            // Only an empty folder can be removed; one that is not goes with its last object.
            let _ = std::fs::remove_dir(&place.folder);
        }
        Ok(())
    }
}

pub(crate) fn too_long(name: &str, bytes: u64, bytes_max: u64) -> Error {
    Error::corruption("object is longer than one can be")
        .with("name", name)
        .with("bytes", bytes)
        .with("bytes_max", bytes_max)
}

/// Reads a range of a file.
pub(crate) fn read_range(device: &dyn Device, range: Range<u64>) -> Result<Vec<u8>> {
    let len = usize::try_from(range.end - range.start)
        .map_err(|_| Error::invalid("range does not fit memory"))?;
    let mut bytes = vec![0; len];
    device.read_at(range.start, &mut bytes)?;
    let len = u32::try_from(len).map_err(|_| Error::invalid("range is too long"))?;
    device.drop_cached(range.start, len);
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_many_writers_one_wins_each_round() {
        let root = tempfile::tempdir().unwrap();
        let objects = FolderObjects::new(root.path());
        assert_eq!(objects.put("HEAD.a.json", b"0", &When::Absent).unwrap(), Put::Done);
        for _ in 0..5 {
            let tag = objects.get("HEAD.a.json", 99).unwrap().unwrap().tag;
            let won = std::thread::scope(|scope| {
                let writers: Vec<_> = (0..8)
                    .map(|writer: u64| {
                        let (objects, when) = (&objects, When::Unchanged(tag.clone()));
                        let nonce = format!("{tag:?}{writer}");
                        scope.spawn(move || {
                            objects.put("HEAD.a.json", nonce.as_bytes(), &when).unwrap()
                        })
                    })
                    .collect();
                let puts = writers.into_iter().map(|writer| writer.join().unwrap());
                puts.filter(|put| *put == Put::Done).count()
            });
            assert_eq!(won, 1);
        }
    }

    #[test]
    fn names_stay_below_the_root() {
        let root = tempfile::tempdir().unwrap();
        let objects = FolderObjects::new(&root.path().join("new"));
        for name in ["../a", "v/../a", "LOCK", "a.tmp", ""] {
            assert!(objects.put(name, b"", &When::Always).is_err(), "{name}");
        }
        assert!(objects.list(None).unwrap().is_empty(), "there is no folder yet");
        objects.put("v/000001/claim", b"x", &When::Absent).unwrap();
        assert_eq!(objects.list(Some("v")).unwrap().len(), 1);
        objects.remove("v/000001/claim").unwrap();
        objects.remove("v/000001/claim").unwrap();
        assert!(!root.path().join("new/v/000001").exists());
        assert!(objects.get("v/000001/claim", 9).unwrap().is_none());
        assert!(objects.get_range("v/000001/claim", 0..1).unwrap().is_none());
    }
}
