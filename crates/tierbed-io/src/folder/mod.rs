//! Folders: file names, atomic replacement of small files, the owner's lock.
//!
//! A store is one flat folder. Large files are [`Device`]s; small ones (manifests, schemas) are
//! read and replaced whole. Invariant: after [`Folder::write_atomic`] a reader, or a restart
//! after power loss, sees the old bytes or the new ones, never a mixture.

pub mod fs;
pub mod held;
pub mod memory;
pub mod part;
pub mod view;

pub use fs::FsFolder;
pub use held::HeldFolder;
pub use memory::MemoryFolder;
pub use part::PartFolder;
pub use view::ViewFolder;

use std::any::Any;
use std::collections::hash_map::RandomState;
use std::fmt::{self, Debug};
use std::hash::BuildHasher;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tierbed_core::{Error, ErrorKind, Result};

use crate::device::Device;

/// Name of the lock file in a folder; not a name a store can use.
pub const LOCK_NAME: &str = "LOCK";
/// Ending of a file that is being replaced; not an ending a store can use.
pub const TEMPORARY_SUFFIX: &str = ".tmp";

/// How to open a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OpenMode {
    /// It must exist; writes fail.
    ReadOnly,
    /// It must exist.
    ReadWrite,
    /// Open it read-write, empty if it did not exist.
    Create,
}

/// A flat set of named files.
///
/// Names are plain (`rows.0`): not empty, no `/`, not `.`, `..` or `LOCK`, not ending in `.tmp`;
/// others are `Invalid`. Creating, renaming and removing last through power loss only after
/// [`Folder::sync`].
pub trait Folder: Send + Sync + Debug {
    /// Returns the path, if it has one.
    fn path(&self) -> Option<&Path>;

    /// Returns the path of the file `name`, for mapping it; `None` where it has none.
    fn file_path(&self, name: &str) -> Option<PathBuf> {
        self.path().map(|path| path.join(name))
    }

    /// Returns whether nothing that is written here lasts: a store is only looked at.
    fn is_view(&self) -> bool {
        false
    }

    /// Opens the large file `name`.
    ///
    /// # Errors
    ///
    /// `Invalid` when there is no such file and `mode` does not create it, `Io` otherwise.
    fn open(&self, name: &str, mode: OpenMode) -> Result<Arc<dyn Device>>;

    /// Reads the small file `name` whole; `None` when there is no such file.
    ///
    /// # Errors
    ///
    /// `Io` when the operating system refuses.
    fn read(&self, name: &str) -> Result<Option<Vec<u8>>>;

    /// Replaces the file `name` by `bytes` at one point in time, durably: temporary file, write,
    /// sync, rename, sync of the folder. Devices open on the old file keep the old file.
    ///
    /// # Errors
    ///
    /// `Io` or `NoSpace`; the old file is then still there, unless it was the folder's sync that
    /// failed, when it is the old one or the new one.
    fn write_atomic(&self, name: &str, bytes: &[u8]) -> Result<()>;

    /// Overwrites the file `name` by `bytes` in place and syncs the file, not the folder. For
    /// new files that a later [`Folder::sync`] or manifest makes visible.
    ///
    /// # Errors
    ///
    /// `Io` or `NoSpace`; the file then holds anything.
    fn write_durable(&self, name: &str, bytes: &[u8]) -> Result<()>;

    /// Removes the file `name`; fine when there is none. Open devices keep working.
    ///
    /// # Errors
    ///
    /// `Io` when the operating system refuses.
    fn remove(&self, name: &str) -> Result<()>;

    /// Gives the file `from` the second name `to`, replacing a file of that name; false, and
    /// nothing done, where the folder cannot. Writing to one of them in place changes both.
    ///
    /// # Errors
    ///
    /// `Io` when the operating system refuses for another reason.
    fn link(&self, from: &str, to: &str) -> Result<bool> {
        let _ = (from, to);
        Ok(false)
    }

    /// Returns a number, not 0, that hardly any other store has: files of two stores are told
    /// apart by it.
    fn draw_store_number(&self) -> u32 {
        let drawn = RandomState::new().hash_one(std::process::id());
        (drawn as u32).max(1)
    }

    /// Gives the file `from` the name `to` instead, replacing a file of that name.
    ///
    /// # Errors
    ///
    /// `Io` when there is no file `from`, or the operating system refuses.
    fn rename(&self, from: &str, to: &str) -> Result<()>;

    /// Lists the names of all files in ascending order, without the lock file and temporaries.
    ///
    /// # Errors
    ///
    /// `Io` when the operating system refuses.
    fn list(&self) -> Result<Vec<String>>;

    /// Makes every name created, renamed or removed so far survive power loss.
    ///
    /// # Errors
    ///
    /// `Io` when the operating system refuses.
    fn sync(&self) -> Result<()>;

    /// Takes the folder for this opener alone, without waiting; given back on drop.
    ///
    /// # Errors
    ///
    /// `Closed` when it is taken, naming the folder and the process that has it.
    fn lock(&self) -> Result<FolderLock>;
}

/// Proof that this opener owns the folder; dropping it gives the folder back.
#[must_use = "the folder is given back when the lock is dropped"]
pub struct FolderLock {
    _guard: Box<dyn Any + Send + Sync>,
}

impl FolderLock {
    /// Wraps what gives the folder back when dropped.
    pub fn new(guard: impl Any + Send + Sync) -> Self {
        Self { _guard: Box::new(guard) }
    }
}

impl Debug for FolderLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FolderLock")
    }
}

/// Checks that `name` is a plain file name a store may use.
///
/// # Errors
///
/// `Invalid` otherwise.
pub fn check_name(name: &str) -> Result<()> {
    let is_plain = !name.is_empty()
        && !name.contains(['/', '\0'])
        && !matches!(name, "." | ".." | LOCK_NAME)
        && !name.ends_with(TEMPORARY_SUFFIX);
    if is_plain {
        return Ok(());
    }
    Err(Error::invalid("not a plain file name").with("name", format_args!("{name:?}")))
}

/// Returns the bytes of the files of `folder` whose names `is_counted` says to count.
///
/// # Errors
/// `Io` when the operating system refuses.
pub fn listed_bytes(folder: &dyn Folder, is_counted: impl Fn(&str) -> bool) -> Result<u64> {
    let names = folder.list()?.into_iter().filter(|name| is_counted(name));
    names.map(|name| folder.open(&name, OpenMode::ReadOnly)?.len_bytes()).sum()
}

/// Builds the error a second opener of a folder gets.
#[must_use]
pub fn locked_error(folder: &str, holder_pid: &str) -> Error {
    let error = |what| Error::new(ErrorKind::Closed, what).with("path", folder);
    let holder = if holder_pid.is_empty() { "unknown" } else { holder_pid };
    if holder == std::process::id().to_string() {
        return error("folder is open in this process already")
            .with("holder_pid", holder)
            .with("remedy", "use what has it open, or close that first; then open it again");
    }
    let pid = holder.parse().ok().and_then(rustix::process::Pid::from_raw);
    let is_gone = |pid| rustix::process::test_kill_process(pid) == Err(rustix::io::Errno::SRCH);
    if pid.is_some_and(is_gone) {
        return error("folder is in use by another opener")
            .with("holder_pid", format_args!("{holder}, which is no process here"))
            .with(
                "remedy",
                "end what that process started, or see which container has the folder",
            );
    }
    error("folder is in use by another opener")
        .with("holder_pid", holder)
        .with("remedy", "close the store there, or end that process, then open it again")
}
