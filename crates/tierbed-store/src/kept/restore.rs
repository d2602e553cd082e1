//! Restore of a named checkpoint, atomic under power loss.
//!
//! Everything that can fail comes first. Each file is checked and made ready under a name of its
//! own; then one small file, `RESTORE`, says that the kept checkpoint is in force. What is left is
//! to rename and to remove, and may be done as often as power fails.
//!
//! ```text
//! kept.<name>.<file>.kept ──link, copy──▶ restore.<file>.staged      may fail: nothing has changed
//! RESTORE   the list of the files                                    from here on it is in force
//! restore.<file>.staged ──rename──▶ <file>;  CURRENT;  the rest goes;  RESTORE goes
//! ```

use std::collections::BTreeSet;
use std::sync::Arc;

use tierbed_core::{Error, Result};
use tierbed_io::{Folder, OpenMode};

use super::list::{Kept, Restore};
use super::{
    check_crc, check_lengths, check_name, check_unlisted, give_name, is_beside, kept_name, read,
    Check, CURRENT,
};

/// Name of the file that says that a kept checkpoint is in force, and is being given back.
pub const RESTORE: &str = "RESTORE";
const PREFIX: &str = "restore.";
const SUFFIX: &str = ".staged";

/// Makes the kept checkpoint `name` the store's last checkpoint; what came after it is gone.
///
/// The store must be closed. `check` is asked where the list of files has no checksum of each.
///
/// # Errors
/// `Closed` when it is open, `Invalid` when there is no such checkpoint, `Corruption` when a file
/// of it is missing or damaged, `NoSpace` and `Io` from the folder. As long as the restored
/// checkpoint is not in force, the one before it is.
pub fn restore_checkpoint(folder: &Arc<dyn Folder>, name: &str, check: Check<'_>) -> Result<()> {
    check_name(name)?;
    let _lock = folder.lock()?;
    finish_locked(folder, check)?;
    restore_locked(folder, name, check)
}

/// Goes on with a restore that was interrupted, if there is one.
///
/// # Errors
/// As [`restore_checkpoint`].
pub fn finish_restore(folder: &Arc<dyn Folder>, check: Check<'_>) -> Result<()> {
    if folder.read(RESTORE)?.is_none() {
        return Ok(());
    }
    let _lock = folder.lock()?;
    finish_locked(folder, check)
}

/// Tells whether opening the store finishes the restore that was interrupted in `folder`.
///
/// # Errors
/// `Io` from the folder.
pub fn can_be_finished(folder: &dyn Folder) -> Result<bool> {
    let Some(bytes) = folder.read(RESTORE)? else { return Ok(true) };
    match Restore::decode(&bytes) {
        Ok(Restore::Staged(kept)) => {
            let present: BTreeSet<String> = folder.list()?.into_iter().collect();
            Ok(kept.files.iter().all(|file| {
                present.contains(&staged_name(&file.name))
                    || check_arrived(folder, &kept, &file.name, file.bytes).is_ok()
            }))
        }
        Ok(Restore::Named(name)) => {
            let kept = check_name(&name).and_then(|()| read(folder, &name));
            Ok(kept.is_ok_and(|kept| check_lengths(folder, &kept).is_ok()))
        }
        Err(_) => Ok(false),
    }
}

/// Forgets a restore that cannot be finished, when another commit is in force.
///
/// # Errors
/// `Io` from the folder.
pub fn give_up_restore(folder: &dyn Folder) -> Result<()> {
    folder.remove(RESTORE)?;
    folder.sync()?;
    remove_staged(folder)
}

/// Tells whether a file was made ready for a restore.
pub(crate) fn is_staged(file: &str) -> bool {
    first_name(file).is_some()
}

/// Returns the name in the store of a file that was made ready.
pub(super) fn first_name(file: &str) -> Option<&str> {
    file.strip_prefix(PREFIX)?.strip_suffix(SUFFIX)
}

fn staged_name(file: &str) -> String {
    format!("{PREFIX}{file}{SUFFIX}")
}

fn finish_locked(folder: &Arc<dyn Folder>, check: Check<'_>) -> Result<()> {
    let Some(bytes) = folder.read(RESTORE)? else { return Ok(()) };
    match Restore::decode(&bytes)? {
        Restore::Staged(kept) => roll_forward(folder.as_ref(), &kept),
        // Begun in place by an earlier version: its files may be half there, the kept ones are.
        Restore::Named(name) => {
            check_name(&name)?;
            restore_locked(folder, &name, check)
        }
    }
}

fn restore_locked(folder: &Arc<dyn Folder>, name: &str, check: Check<'_>) -> Result<()> {
    let kept = read(folder.as_ref(), name)?;
    check_lengths(folder.as_ref(), &kept)?;
    check_unlisted(folder, &kept, check)?;
    remove_staged(folder.as_ref())?;
    let staged = stage(folder.as_ref(), &kept);
    if staged.is_err() {
        remove_staged(folder.as_ref())?;
    }
    staged?;
    folder.write_atomic(RESTORE, &kept.encode_restore()?)?;
    roll_forward(folder.as_ref(), &kept)
}

fn stage(folder: &dyn Folder, kept: &Kept) -> Result<()> {
    for file in &kept.files {
        let from = kept_name(&kept.name, &file.name);
        let given = give_name(folder, &from, &staged_name(&file.name), file.crc32c.is_some())?;
        if let (Some(expected), Some(found)) = (file.crc32c, given.crc32c) {
            check_crc(kept, file, expected, found)?;
        }
    }
    folder.sync()
}

fn roll_forward(folder: &dyn Folder, kept: &Kept) -> Result<()> {
    let present: BTreeSet<String> = folder.list()?.into_iter().collect();
    for file in &kept.files {
        let staged = staged_name(&file.name);
        if present.contains(&staged) {
            folder.rename(&staged, &file.name)?;
        } else {
            check_arrived(folder, kept, &file.name, file.bytes)?;
        }
    }
    folder.sync()?;
    folder.write_atomic(CURRENT, kept.current.as_bytes())?;
    let own: BTreeSet<&str> = kept.files.iter().map(|file| file.name.as_str()).collect();
    for file in folder.list()? {
        if !is_beside(&file) && file != CURRENT && !own.contains(file.as_str()) {
            folder.remove(&file)?;
        }
    }
    // A file that the store shares with the kept one has both names still.
    remove_staged(folder)?;
    folder.sync()?;
    folder.remove(RESTORE)?;
    folder.sync()
}

// What is not ready any more has its name already.
fn check_arrived(folder: &dyn Folder, kept: &Kept, file: &str, bytes: u64) -> Result<()> {
    let found = folder.open(file, OpenMode::ReadOnly).and_then(|device| device.len_bytes());
    if matches!(found, Ok(found) if found == bytes) {
        return Ok(());
    }
    Err(Error::corruption("a file of the checkpoint that is being restored is missing")
        .with("checkpoint", &kept.name)
        .with("file", file)
        .with("remedy", "see `tierbed repair FOLDER` for the commits that are whole"))
}

/// Removes what was made ready for a restore that never came into force.
pub(crate) fn remove_staged(folder: &dyn Folder) -> Result<()> {
    for file in folder.list()?.iter().filter(|file| is_staged(file)) {
        folder.remove(file)?;
    }
    Ok(())
}
