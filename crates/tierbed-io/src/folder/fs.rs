//! A folder on a mounted file system.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::FlockOperation;
use rustix::io::Errno;
use tierbed_core::{Error, Result};

use super::{check_name, locked_error, Folder, FolderLock, OpenMode, LOCK_NAME, TEMPORARY_SUFFIX};
use crate::device::file::open_error;
use crate::device::{Device, FileDevice};
use crate::process::hold_open;

/// A real folder; its files are [`FileDevice`]s, its lock is `flock(2)` on the file `LOCK`.
///
/// The lock belongs to the opener, not to the process: a second opener in the same process is
/// refused too. The operating system gives it back when the process ends, however it ends, and
/// though processes forked from it live on: they do not have it.
#[derive(Debug)]
pub struct FsFolder {
    path: PathBuf,
}

impl FsFolder {
    /// Opens the existing folder at `path`.
    ///
    /// # Errors
    ///
    /// `Invalid` when there is no folder at `path`.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        match std::fs::metadata(path) {
            Ok(stat) if stat.is_dir() => Ok(Self { path: path.to_owned() }),
            Ok(_) => Err(Error::invalid("not a folder").with("path", path.display())),
            Err(cause) if cause.kind() == std::io::ErrorKind::NotFound => {
                Err(Error::invalid("no such folder").with("path", path.display()))
            }
            Err(cause) => Err(Error::os("cannot open folder", cause).with("path", path.display())),
        }
    }

    /// Opens the folder at `path`, making it and its parents, durably, where they are missing.
    ///
    /// # Errors
    ///
    /// `Invalid` when `path` is a file, `Io` or `NoSpace` otherwise.
    pub fn create(path: impl AsRef<Path>) -> Result<Self> {
        make_folder(path.as_ref())?;
        Self::open(path)
    }

    fn path_of(&self, name: &str) -> Result<PathBuf> {
        check_name(name)?;
        Ok(self.path.join(name))
    }

    fn locked_file(&self) -> Result<File> {
        let path = self.path.join(LOCK_NAME);
        let failed = |cause| Error::os("cannot lock folder", cause).with("path", path.display());
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(failed)?;
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => {
                let mut holder = String::new();
                // The pid is a courtesy: the holder may be about to write it.
                let _ = (&file).take(32).read_to_string(&mut holder);
                return Err(locked_error(&self.path.display().to_string(), holder.trim()));
            }
            Err(cause) => return Err(failed(cause.into())),
        }
        file.set_len(0)
            .and_then(|()| file.write_all(std::process::id().to_string().as_bytes()))
            .map_err(failed)?;
        Ok(file)
    }
}

/// Makes the folder at `path` and its missing parents; each parent is synced, so that the new
/// name is as durable as what will be put into it.
fn make_folder(path: &Path) -> Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    if let Some(parent) = parent {
        make_folder(parent)?;
    }
    match std::fs::create_dir(path) {
        Ok(()) => sync_folder(parent.unwrap_or(Path::new("."))),
        // Someone else made it first, or it is a file: FsFolder::open tells them apart.
        Err(cause) if cause.kind() == std::io::ErrorKind::AlreadyExists => Ok(()),
        Err(cause) => Err(Error::os("cannot make folder", cause).with("path", path.display())),
    }
}

fn sync_folder(path: &Path) -> Result<()> {
    File::open(path)
        .and_then(|folder| folder.sync_all())
        .map_err(|cause| Error::os("cannot sync folder", cause).with("path", path.display()))
}

fn write_and_sync(path: &Path, bytes: &[u8]) -> Result<()> {
    OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .open(path)
        .and_then(|mut file| {
            file.write_all(bytes)?;
            file.sync_all()
        })
        .map_err(|cause| Error::os("cannot write file", cause).with("path", path.display()))
}

impl Folder for FsFolder {
    fn path(&self) -> Option<&Path> {
        Some(&self.path)
    }

    fn open(&self, name: &str, mode: OpenMode) -> Result<Arc<dyn Device>> {
        Ok(Arc::new(FileDevice::open(self.path_of(name)?, mode)?))
    }

    fn read(&self, name: &str) -> Result<Option<Vec<u8>>> {
        let path = self.path_of(name)?;
        match std::fs::read(&path) {
            Ok(bytes) => Ok(Some(bytes)),
            // A link that leads nowhere is no absence: something was here.
            Err(cause) if cause.kind() == std::io::ErrorKind::NotFound => {
                match std::fs::symlink_metadata(&path) {
                    Ok(_) => Err(Error::corruption("a link in the folder leads nowhere")
                        .with("path", path.display())
                        .with("remedy", "bring back the file that it names")),
                    Err(_) => Ok(None),
                }
            }
            Err(cause) => Err(open_error(&path, cause, "cannot read file")),
        }
    }

    fn write_atomic(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let path = self.path_of(name)?;
        let temporary = self.path.join(format!("{name}{TEMPORARY_SUFFIX}"));
        let replaced = write_and_sync(&temporary, bytes).and_then(|()| {
            std::fs::rename(&temporary, &path).map_err(|cause| {
                Error::os("cannot rename file", cause).with("path", path.display())
            })
        });
        if let Err(error) = replaced {
            // Best effort: give the space back; the next attempt overwrites it anyway.
            let _ = std::fs::remove_file(&temporary);
            return Err(error);
        }
        sync_folder(&self.path)
    }

    fn write_durable(&self, name: &str, bytes: &[u8]) -> Result<()> {
        write_and_sync(&self.path_of(name)?, bytes)
    }

    fn remove(&self, name: &str) -> Result<()> {
        let path = self.path_of(name)?;
        match std::fs::remove_file(&path) {
            Err(cause) if cause.kind() != std::io::ErrorKind::NotFound => {
                Err(Error::os("cannot remove file", cause).with("path", path.display()))
            }
            _ => Ok(()),
        }
    }

    fn link(&self, from: &str, to: &str) -> Result<bool> {
        use std::io::ErrorKind::{PermissionDenied, TooManyLinks, Unsupported};
        let (from, to) = (self.path_of(from)?, self.path_of(to)?);
        let linked = match std::fs::hard_link(&from, &to) {
            Err(cause) if cause.kind() == std::io::ErrorKind::AlreadyExists => {
                std::fs::remove_file(&to).and_then(|()| std::fs::hard_link(&from, &to))
            }
            result => result,
        };
        match linked {
            Ok(()) => Ok(true),
            // File systems without links, or with no more of them.
            Err(cause) if matches!(cause.kind(), PermissionDenied | TooManyLinks | Unsupported) => {
                Ok(false)
            }
            Err(cause) => Err(Error::os("cannot link file", cause).with("path", to.display())),
        }
    }

    fn rename(&self, from: &str, to: &str) -> Result<()> {
        let (from, to) = (self.path_of(from)?, self.path_of(to)?);
        std::fs::rename(&from, &to).map_err(|cause| {
            Error::os("cannot rename file", cause)
                .with("path", from.display())
                .with("to", to.display())
        })
    }

    fn list(&self) -> Result<Vec<String>> {
        let failed =
            |cause| Error::os("cannot list folder", cause).with("path", self.path.display());
        let mut names = Vec::new();
        for entry in std::fs::read_dir(&self.path).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let kind = entry.file_type().map_err(failed)?;
            // A link counts as the file it leads to, also when that is gone.
            let is_link = kind.is_symlink()
                && !std::fs::metadata(entry.path()).is_ok_and(|stat| stat.is_dir());
            let is_file = kind.is_file() || is_link;
            if let (true, Ok(name)) = (is_file, entry.file_name().into_string()) {
                if check_name(&name).is_ok() {
                    names.push(name);
                }
            }
        }
        names.sort_unstable();
        Ok(names)
    }

    fn sync(&self) -> Result<()> {
        sync_folder(&self.path)
    }

    fn lock(&self) -> Result<FolderLock> {
        hold_open(unlock, || self.locked_file()).map(FolderLock::new)
    }
}

// Takes effect though processes that were started meanwhile, without handlers of fork, have the
// file open too.
fn unlock(file: &File) {
    // The system gives the lock back when the file is closed, and at the latest when we end.
    let _ = rustix::fs::flock(file, FlockOperation::Unlock);
}
