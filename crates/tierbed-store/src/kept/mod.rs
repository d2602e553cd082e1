//! Named checkpoints: copies of a commit's files beside the store's.
//!
//! A commit makes its predecessor's files garbage. Keeping a checkpoint gives its files second
//! names in the same folder: files never rewritten (commits, SSTs) are linked and cost nothing,
//! files rewritten in place are copied, without their holes. [`restore`] gives them their first
//! names back. Both stream; both are whole after power loss, or have not happened.
//!
//! ```text
//! kept.<name>.<file>.kept    the files           written first
//! kept.<name>.list           what belongs to it  written last, removed first
//! ```
//!
//! Normative: `docs/reference/formats/store.md`.

mod list;
mod restore;

use std::collections::BTreeSet;
use std::sync::Arc;

use tierbed_core::checksum::{crc32c, crc32c_append};
use tierbed_core::{Error, ErrorKind, Result};
use tierbed_io::{AlignedBuf, Folder, OpenMode, ViewFolder, PAGE_BYTES};

pub use list::Kept;
use list::KeptFile;
pub use restore::{can_be_finished, finish_restore, give_up_restore, restore_checkpoint, RESTORE};
pub(crate) use restore::{is_staged, remove_staged};

use crate::commit::CommitLog;

const PREFIX: &str = "kept.";
/// Stores sweep away files of their own endings.
const KEPT_SUFFIX: &str = ".kept";
const CURRENT: &str = CommitLog::CURRENT;
/// Bytes copied at once.
const CHUNK_BYTES: usize = 1 << 20;
/// Holes of this size and more are kept.
const HOLE_BYTES: usize = 64 << 10;

/// Opens the store in a folder and checks every checksum there; returns the pages checked.
pub type Check<'a> = &'a dyn Fn(&Arc<dyn Folder>) -> Result<u64>;

/// Keeps the commit in force, number `number`, under `name`.
///
/// # Errors
/// `Unsupported` for a store that is more than its folder's files; `NoSpace`, `Io`: nothing is
/// kept then.
pub fn keep(folder: &dyn Folder, name: &str, number: u64) -> Result<()> {
    let kept = keep_files(folder, name, number);
    if kept.is_err() {
        remove_files(folder, name)?;
    }
    kept
}

/// Checks that a checkpoint may be kept under `name`.
///
/// # Errors
/// `Invalid` for a name that is taken or not of `[A-Za-z0-9_-]`.
pub fn check_free(folder: &dyn Folder, name: &str) -> Result<()> {
    check_name(name)?;
    if read_list(folder, name)?.is_some() {
        return Err(Error::invalid("a checkpoint of that name is kept already")
            .with("name", name)
            .with("remedy", "drop it first, or choose another name"));
    }
    Ok(())
}

/// Returns the disk space of all kept checkpoints. A file that is shared with the store counts:
/// it stays when the store has no more use for it.
///
/// # Errors
/// `Io` from the folder.
pub fn disk_bytes(folder: &dyn Folder) -> Result<u64> {
    allocated_bytes(folder, is_kept)
}

/// Checks that the commit in force can be kept within `quota_bytes`, beside all that is there.
///
/// # Errors
/// `NoSpace` when it cannot, `Io` from the folder.
pub fn check_quota(folder: &dyn Folder, quota_bytes: Option<u64>) -> Result<()> {
    let Some(quota) = quota_bytes else { return Ok(()) };
    let own_bytes = allocated_bytes(folder, |file| !is_beside(file))?;
    let wanted_bytes = allocated_bytes(folder, |_| true)? + own_bytes;
    if wanted_bytes <= quota {
        return Ok(());
    }
    Err(Error::new(ErrorKind::NoSpace, "disk quota reached")
        .with("disk_quota_bytes", quota)
        .with("needed_bytes", wanted_bytes)
        .with("kept_bytes", own_bytes)
        .with("remedy", "raise disk_quota, or drop a checkpoint"))
}

fn allocated_bytes(folder: &dyn Folder, is_counted: impl Fn(&str) -> bool) -> Result<u64> {
    let names = folder.list()?.into_iter().filter(|name| is_counted(name));
    names.map(|name| folder.open(&name, OpenMode::ReadOnly)?.allocated_bytes()).sum()
}

/// Lists the kept checkpoints of `folder`, by number.
///
/// # Errors
/// `Corruption` when a list is damaged, `Io` from the folder.
pub fn kept_checkpoints(folder: &dyn Folder) -> Result<Vec<Kept>> {
    let mut all = Vec::new();
    for name in kept_names(folder)? {
        all.extend(read_list(folder, &name)?);
    }
    all.sort_by_key(|kept: &Kept| kept.number);
    Ok(all)
}

/// Returns the names of checkpoints that have a list, whole or not.
///
/// # Errors
/// `Io` from the folder.
pub fn kept_names(folder: &dyn Folder) -> Result<BTreeSet<String>> {
    let name_of = |file: &String| {
        let name = file.strip_prefix(PREFIX)?.strip_suffix(".list")?;
        (!name.contains('.')).then(|| name.to_owned())
    };
    Ok(folder.list()?.iter().filter_map(name_of).collect())
}

/// Checks every file of the kept checkpoint `name`: that it is there, its length and its bytes.
/// `check` is asked where files have checksums of their own only. Returns the pages checked.
///
/// # Errors
/// `Corruption` naming file and checkpoint.
pub fn verify_checkpoint(folder: &Arc<dyn Folder>, name: &str, check: Check<'_>) -> Result<u64> {
    let kept = read(folder.as_ref(), name)?;
    check_lengths(folder.as_ref(), &kept)?;
    for file in &kept.files {
        if let Some(expected) = file.crc32c {
            let device = folder.open(&kept_name(name, &file.name), OpenMode::ReadOnly)?;
            let found = visit_chunks(device.as_ref(), file.bytes, &mut |_, _| Ok(()))?;
            check_crc(&kept, file, expected, found)?;
        }
    }
    check_unlisted(folder, &kept, check)?;
    Ok(kept.files.iter().map(|file| file.bytes.div_ceil(PAGE_BYTES as u64)).sum())
}

/// Reads the list of the kept checkpoint `name`.
///
/// # Errors
/// `Invalid` when there is none of that name, `Corruption` when its list is damaged.
pub fn read(folder: &dyn Folder, name: &str) -> Result<Kept> {
    match read_list(folder, name)? {
        Some(kept) => Ok(kept),
        None => Err(unknown(folder, name)?),
    }
}

/// Shows the folder as it would be with the kept checkpoint in force; nothing below changes.
///
/// # Errors
/// As [`ViewFolder::with_bytes`].
pub fn view_of(folder: &Arc<dyn Folder>, kept: &Kept) -> Result<Arc<dyn Folder>> {
    let mut view = ViewFolder::empty(Arc::clone(folder));
    for file in &kept.files {
        view = view.with_name(&file.name, &kept_name(&kept.name, &file.name));
    }
    Ok(Arc::new(view.with_bytes(CURRENT, kept.current.as_bytes())?))
}

/// Forgets the kept checkpoint `name` and gives its disk space back; the folder is the caller's.
///
/// # Errors
/// `Invalid` when there is none of that name, `Io` from the folder.
pub fn drop_checkpoint(folder: &dyn Folder, name: &str) -> Result<()> {
    check_name(name)?;
    if folder.read(&list_name(name))?.is_none() {
        return Err(unknown(folder, name)?);
    }
    // Without its list a checkpoint is garbage: after this no restore takes half of it.
    folder.remove(&list_name(name))?;
    folder.sync()?;
    remove_files(folder, name)
}

fn keep_files(folder: &dyn Folder, name: &str, number: u64) -> Result<()> {
    let current = folder.read(CURRENT)?.and_then(|bytes| String::from_utf8(bytes).ok());
    let Some(current) = current else {
        return Err(Error::unsupported("checkpoints of this backend cannot be kept")
            .with("remedy", "choose the backend `file`"));
    };
    // Left-overs of a keeping that was cut short.
    remove_files(folder, name)?;
    let mut files = Vec::new();
    for file in folder.list()? {
        if !is_beside(&file) && file != CURRENT {
            let has_own = has_own_checksums(&file);
            let given = give_name(folder, &file, &kept_name(name, &file), !has_own)?;
            files.push(KeptFile { name: file, bytes: given.bytes, crc32c: given.crc32c });
        }
    }
    folder.sync()?;
    let kept = Kept { name: name.to_owned(), number, current, files };
    folder.write_atomic(&list_name(name), &kept.encode()?)
}

/// A file that has two names now.
struct Given {
    bytes: u64,
    /// Of all its bytes, where they were read.
    crc32c: Option<u32>,
}

// Gives the bytes of `from` a second name. A link is not read unless `reads_links`.
fn give_name(folder: &dyn Folder, from: &str, to: &str, reads_links: bool) -> Result<Given> {
    let source = folder.open(from, OpenMode::ReadOnly)?;
    let bytes = source.len_bytes()?;
    if is_immutable(from) && folder.link(from, to)? {
        let crc32c = match reads_links {
            true => Some(visit_chunks(source.as_ref(), bytes, &mut |_, _| Ok(()))?),
            false => None,
        };
        return Ok(Given { bytes, crc32c });
    }
    let target = folder.open(to, OpenMode::Create)?;
    target.set_len(0)?;
    target.set_len(bytes)?;
    let crc = visit_chunks(source.as_ref(), bytes, &mut |at, chunk| {
        for (part, place) in chunk.chunks(HOLE_BYTES).zip((at..).step_by(HOLE_BYTES)) {
            if part.iter().any(|byte| *byte != 0) {
                target.write_at(place, part)?;
            }
        }
        Ok(())
    })?;
    target.sync()?;
    Ok(Given { bytes, crc32c: Some(crc) })
}

// Reads a file from its begin to its end; returns the checksum of all its bytes.
fn visit_chunks(
    device: &dyn tierbed_io::Device,
    len_bytes: u64,
    visit: &mut dyn FnMut(u64, &[u8]) -> Result<()>,
) -> Result<u32> {
    let mut chunk = AlignedBuf::new(CHUNK_BYTES);
    let (mut at, mut crc) = (0, crc32c(&[]));
    while at < len_bytes {
        let count = (len_bytes - at).min(CHUNK_BYTES as u64) as usize;
        let (bytes, _) = chunk.split_at_mut(count);
        device.read_at(at, bytes)?;
        crc = crc32c_append(crc, bytes);
        visit(at, bytes)?;
        at += count as u64;
    }
    Ok(crc)
}

fn check_lengths(folder: &dyn Folder, kept: &Kept) -> Result<()> {
    let present: BTreeSet<String> = folder.list()?.into_iter().collect();
    for file in &kept.files {
        let name = kept_name(&kept.name, &file.name);
        if !present.contains(&name) {
            return Err(damaged(kept, file).with("cause", "it is missing"));
        }
        let found = folder.open(&name, OpenMode::ReadOnly)?.len_bytes()?;
        if found != file.bytes {
            return Err(damaged(kept, file)
                .with("expected_bytes", file.bytes)
                .with("found_bytes", found));
        }
    }
    Ok(())
}

fn check_crc(kept: &Kept, file: &KeptFile, expected: u32, found: u32) -> Result<()> {
    if expected == found {
        return Ok(());
    }
    Err(damaged(kept, file)
        .with("expected", format_args!("{expected:08x}"))
        .with("found", format_args!("{found:08x}")))
}

// Opens the checkpoint beside the store where the list does not hold the checksum of every file.
fn check_unlisted(folder: &Arc<dyn Folder>, kept: &Kept, check: Check<'_>) -> Result<()> {
    if kept.files.iter().all(|file| file.crc32c.is_some()) {
        return Ok(());
    }
    check(&view_of(folder, kept)?).map(drop).map_err(|error| match error.kind() {
        ErrorKind::Corruption => error
            .with("checkpoint", &kept.name)
            .with("remedy", "open the store at its last checkpoint, or drop the kept one"),
        _ => error.with("checkpoint", &kept.name),
    })
}

fn damaged(kept: &Kept, file: &KeptFile) -> Error {
    Error::corruption("a file of a kept checkpoint is not as it was kept")
        .with("checkpoint", &kept.name)
        .with("file", kept_name(&kept.name, &file.name))
        .with("remedy", "open the store at its last checkpoint, or bring the file back from a copy")
}

// Files that are written once, under a name used once, and then only removed.
fn is_immutable(file: &str) -> bool {
    let file = first_name(file);
    file.starts_with("commit-") || has_own_checksums(file)
}

// Every byte of them is covered by a checksum inside.
fn has_own_checksums(file: &str) -> bool {
    first_name(file).ends_with(".sst")
}

// The name in the store of a file that may be kept or staged.
fn first_name(file: &str) -> &str {
    let kept = file.strip_prefix(PREFIX).and_then(|rest| rest.strip_suffix(KEPT_SUFFIX));
    let kept = kept.and_then(|rest| rest.split_once('.')).map(|(_, file)| file);
    kept.or_else(|| restore::first_name(file)).unwrap_or(file)
}

/// Tells whether a file of the folder is none of the commit in force.
fn is_beside(file: &str) -> bool {
    file.starts_with(PREFIX) || file == RESTORE || is_staged(file)
}

/// Tells whether a file belongs to a kept checkpoint.
pub fn is_kept(file: &str) -> bool {
    file.starts_with(PREFIX)
}

fn list_name(name: &str) -> String {
    format!("{PREFIX}{name}.list")
}

fn kept_name(name: &str, file: &str) -> String {
    format!("{PREFIX}{name}.{file}{KEPT_SUFFIX}")
}

fn read_list(folder: &dyn Folder, name: &str) -> Result<Option<Kept>> {
    let file = list_name(name);
    let Some(bytes) = folder.read(&file)? else { return Ok(None) };
    let kept =
        Kept::decode(&bytes).and_then(|kept| match kept.name == name {
            true => Ok(kept),
            false => Err(Error::corruption("list is that of another kept checkpoint")
                .with("found", kept.name)),
        });
    kept.map(Some).map_err(|error| {
        error
            .with("checkpoint", name)
            .with("file", file)
            .with("remedy", "drop this checkpoint, or bring the file back from a copy")
    })
}

fn remove_files(folder: &dyn Folder, name: &str) -> Result<()> {
    let prefix = format!("{PREFIX}{name}.");
    for file in folder.list()?.iter().filter(|file| file.starts_with(&prefix)) {
        folder.remove(file)?;
    }
    folder.sync()
}

fn unknown(folder: &dyn Folder, name: &str) -> Result<Error> {
    let names: Vec<String> = kept_names(folder)?.into_iter().collect();
    Ok(Error::invalid("no kept checkpoint of that name")
        .with("name", name)
        .with("kept", names.join(", ")))
}

fn check_name(name: &str) -> Result<()> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
    if name.is_empty() || name.len() > 64 || !name.chars().all(is_plain) {
        return Err(Error::invalid("a kept checkpoint's name must be 1 to 64 of [A-Za-z0-9_-]")
            .with("name", name));
    }
    Ok(())
}
