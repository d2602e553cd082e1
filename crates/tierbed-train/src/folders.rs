//! Folder of a closed store: its kept checkpoints, and whether it is whole.

use std::path::Path;
use std::sync::Arc;

use tierbed_core::{Error, Result};
use tierbed_io::{Folder, FsFolder};
use tierbed_store::kept::{self, Kept};
use tierbed_store::CommitLog;

use crate::auto::engine::AutoEngine;
use crate::auto::moving::{has_moved, WINDOW_FOLDER};
use crate::auto::options::OrderConfig;
use crate::engine::TrainEngine;

/// Memory to begin with when a folder is opened to be checked.
const CHECK_BYTES: u64 = 64 << 20;
/// Most memory for that: behind it the store is too large to be checked here.
const CHECK_BYTES_MAX: u64 = 64 << 30;

/// Opens the folder that has the rows of the store at `path`: of a store that left the forward
/// order it is a folder inside.
///
/// # Errors
/// `Invalid` when there is no such folder, `Corruption` when its files are damaged.
pub(crate) fn rows_folder(path: &Path) -> Result<Arc<dyn Folder>> {
    let folder = FsFolder::open(path)?;
    Ok(match has_moved(&folder)? {
        true => Arc::new(FsFolder::open(path.join(WINDOW_FOLDER))?),
        false => Arc::new(folder),
    })
}

/// Lists the kept checkpoints of the store at `path`, the oldest first.
///
/// # Errors
/// `Corruption` when a list is damaged, `Io` from the folder.
pub fn kept_checkpoints(path: &Path) -> Result<Vec<Kept>> {
    let mut all = Vec::new();
    for folder in keeping_folders(path)? {
        all.extend(kept::kept_checkpoints(folder.as_ref())?);
    }
    Ok(all)
}

// The folders that may keep checkpoints: a store that left its plan has those of before, too.
fn keeping_folders(path: &Path) -> Result<Vec<Arc<dyn Folder>>> {
    let whole = FsFolder::open(path)?;
    let inside = match has_moved(&whole)? {
        true => Some(Arc::new(FsFolder::open(path.join(WINDOW_FOLDER))?) as Arc<dyn Folder>),
        false => None,
    };
    Ok(std::iter::once(Arc::new(whole) as Arc<dyn Folder>).chain(inside).collect())
}

// The folder that keeps `name`, else the one with the rows.
pub(crate) fn keeping_folder(path: &Path, name: &str) -> Result<Arc<dyn Folder>> {
    let whole = FsFolder::open(path)?;
    match kept::kept_names(&whole)?.contains(name) {
        true => Ok(Arc::new(whole)),
        false => rows_folder(path),
    }
}

/// Forgets the kept checkpoint `name` of the store at `path`, which must be closed.
///
/// # Errors
/// `Closed` when it is open, `Invalid` when there is none of that name, `Io` from the folder.
pub fn drop_checkpoint(path: &Path, name: &str) -> Result<()> {
    let folder = keeping_folder(path, name)?;
    let _lock = folder.lock()?;
    refuse_half_restored(folder.as_ref())?;
    kept::drop_checkpoint(folder.as_ref(), name)
}

/// Makes the kept checkpoint `name` the last one of the store at `path`, which must be closed.
///
/// # Errors
/// As [`kept::restore_checkpoint`]; `Invalid` when checkpoints would go that were kept after the
/// store left the plan to go back to.
pub fn restore_checkpoint(path: &Path, name: &str) -> Result<()> {
    let folder = keeping_folder(path, name)?;
    let inside = rows_folder(path)?;
    if folder.path() == inside.path() {
        return kept::restore_checkpoint(&folder, name, &check_folder);
    }
    let later = kept::kept_names(inside.as_ref())?;
    if let Some(later) = later.first() {
        return Err(Error::invalid("a checkpoint was kept after the store left its plan")
            .with("name", name)
            .with("kept", later)
            .with(
                "remedy",
                "go back in a copy of the folder, after dropping that checkpoint there",
            ));
    }
    kept::restore_checkpoint(&folder, name, &check_folder)?;
    // Until here the rows inside are in force.
    inside.write_atomic(CommitLog::CURRENT, CommitLog::none_in_force().as_bytes())
}

/// Opens the store in `folder`, which is a view or nobody's, and checks every checksum of it;
/// returns the number of pages checked. Takes as much memory as opening it needs.
///
/// # Errors
/// `Corruption` when something is damaged, `Invalid` when nothing is in force.
pub fn check_folder(folder: &Arc<dyn Folder>) -> Result<u64> {
    if CommitLog::stored_backend(folder.as_ref())?.is_none() {
        return Err(Error::invalid("no checkpoint is in force in this folder"));
    }
    with_enough_memory(&mut |budget_bytes| {
        let config = OrderConfig::new(budget_bytes);
        AutoEngine::open_in(Some(Arc::clone(folder)), &config)?.verify()
    })
}

/// Calls `open` with more and more memory until it no longer asks for more.
///
/// # Errors
/// Those of `open`.
pub(crate) fn with_enough_memory<T>(open: &mut dyn FnMut(u64) -> Result<T>) -> Result<T> {
    let mut budget_bytes = CHECK_BYTES;
    loop {
        let result = open(budget_bytes);
        let Err(error) = &result else { return result };
        if error.minimum_bytes().is_none() || budget_bytes >= CHECK_BYTES_MAX {
            return result;
        }
        budget_bytes *= 4;
    }
}

// A restore that was interrupted may need its kept files: it comes first.
fn refuse_half_restored(folder: &dyn Folder) -> Result<()> {
    if folder.read(kept::RESTORE)?.is_some() {
        return Err(Error::invalid("a checkpoint of this store is being restored")
            .with("remedy", "open the store once, which finishes it, then drop the checkpoint"));
    }
    Ok(())
}
