//! Read-only view of a store that another process owns, or that cannot be written.
//!
//! In a view: what is in force when it is opened is pinned, everything else is read from the files
//! below, and what opening writes stays in memory. The owner leaves the files of the commit in
//! force alone until the next one is. When that happens under the reader, what it read may be of
//! neither: it fails by checksums, and is done again at the commit that is in force then.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tierbed_core::{Error, ErrorKind, Result};
use tierbed_io::{Folder, FolderLock, ViewFolder};
use tierbed_store::kept::{self, kept_names};
use tierbed_store::shards::SHARDS_FILE;
use tierbed_store::CommitLog;

use crate::auto::ids::IDS_PREFIX;
use crate::folders::{keeping_folder, rows_folder};

/// How often reading is begun again because the owner has committed.
pub(crate) const ATTEMPTS_MAX: usize = 20;

/// What was in force when a store was opened to be read.
pub(crate) struct Look {
    path: PathBuf,
    seen: Seen,
    /// Of a mapped store: nobody may change it meanwhile.
    _lock: Option<FolderLock>,
}

/// What a commit changes.
#[derive(Debug, PartialEq, Eq)]
struct Seen {
    pointer: Option<Vec<u8>>,
    /// That of the index of ids beside a plan, which is committed before the plan is.
    ids_pointer: Option<Vec<u8>>,
    kept: BTreeSet<String>,
}

/// A folder to open, and what was seen there.
pub(crate) struct Looking {
    pub(crate) view: Arc<dyn Folder>,
    pub(crate) look: Look,
}

impl Look {
    /// Shows the store at `path` as it is now.
    ///
    /// # Errors
    /// `Invalid` when there is no store with a checkpoint, `Closed` for a mapped store that a
    /// process has open.
    pub(crate) fn begin(path: &Path) -> Result<Looking> {
        let below = rows_folder(path)?;
        let seen = Seen::of(below.as_ref())?;
        let name = pointer_of(below.as_ref())?;
        let view = ViewFolder::of(Arc::clone(&below))?;
        let view: Arc<dyn Folder> = match &seen.pointer {
            Some(pointer) => Arc::new(view.with_bytes(name, pointer)?),
            None => {
                CommitLog::check_new(below.as_ref())?;
                return Err(no_checkpoint(path));
            }
        };
        let lock = match name {
            SHARDS_FILE => None,
            // What fails here fails again when the view is opened.
            _ => match CommitLog::stored_backend(view.as_ref()) {
                Ok(None) => return Err(no_checkpoint(path)),
                Ok(Some(backend)) if backend == "mmap" => lock_if_possible(below.as_ref())?,
                Ok(Some(_)) | Err(_) => None,
            },
        };
        let look = Self { path: path.to_owned(), seen, _lock: lock };
        Ok(Looking { view, look })
    }

    /// Shows the store at `path` as the kept checkpoint `name` has it; it is the caller's to see
    /// that nobody drops it meanwhile.
    ///
    /// # Errors
    /// `Invalid` when there is none of that name, `Corruption` when its list is damaged.
    pub(crate) fn at_kept(path: &Path, name: &str) -> Result<Looking> {
        let folder = keeping_folder(path, name)?;
        let seen = Seen::of(folder.as_ref())?;
        let view = kept::view_of(&folder, &kept::read(folder.as_ref(), name)?)?;
        Ok(Looking { view, look: Self { path: path.to_owned(), seen, _lock: None } })
    }

    /// Returns the path that is looked at.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Tells whether the owner has committed, kept or dropped something since.
    ///
    /// # Errors
    /// Those of the folder.
    pub(crate) fn is_outdated(&self) -> Result<bool> {
        Ok(Seen::of(rows_folder(&self.path)?.as_ref())? != self.seen)
    }
}

impl Seen {
    fn of(folder: &dyn Folder) -> Result<Self> {
        let pointer = folder.read(pointer_of(folder)?)?;
        // Read behind it: rows never need ids of a later commit.
        let ids_pointer = folder.read(&format!("{IDS_PREFIX}{}", CommitLog::CURRENT))?;
        Ok(Self { pointer, ids_pointer, kept: kept_names(folder)? })
    }
}

fn pointer_of(folder: &dyn Folder) -> Result<&'static str> {
    Ok(match folder.read(SHARDS_FILE)? {
        Some(_) => SHARDS_FILE,
        None => CommitLog::CURRENT,
    })
}

/// Locks `folder`, unless nothing can be written there: then nobody changes anything.
///
/// # Errors
/// `Closed` when a process has it locked.
pub(crate) fn lock_if_possible(folder: &dyn Folder) -> Result<Option<FolderLock>> {
    match folder.lock() {
        Err(error) if error.kind() == ErrorKind::Io => Ok(None),
        locked => locked.map(Some),
    }
}

fn no_checkpoint(path: &Path) -> Error {
    Error::invalid("no store with a checkpoint lies in this folder")
        .with("path", path.display())
        .with("remedy", "name the folder of a store, or open it for training to begin one")
}

/// Builds the error of a reader that the owner does not let finish.
pub(crate) fn never_at_rest() -> Error {
    Error::new(ErrorKind::Closed, "the store is committed to faster than it can be read")
        .with("remedy", "look at it when training rests, or close the store there")
}

/// Builds the error of a change to a store that was opened to be read.
pub(crate) fn read_only() -> Error {
    Error::unsupported("this store was opened to be read only")
        .with("remedy", "open it without read_only to train or to checkpoint")
}

#[cfg(test)]
mod tests {
    use tierbed_io::MemoryFolder;

    use super::*;

    #[test]
    fn commits_of_rows_and_of_ids_are_seen() {
        let folder = MemoryFolder::default();
        let mut seen = Seen::of(&folder).unwrap();
        for name in ["CURRENT", "vocabulary.CURRENT", "SHARDS"] {
            for bytes in [b"one", b"two"] {
                folder.write_atomic(name, bytes).unwrap();
                let now = Seen::of(&folder).unwrap();
                assert_ne!(now, seen, "{name}");
                seen = now;
            }
        }
        folder.write_atomic("plan", b"of the owner").unwrap();
        assert_eq!(Seen::of(&folder).unwrap(), seen);
    }
}
