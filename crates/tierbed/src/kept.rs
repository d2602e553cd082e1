//! How does a checkpoint outlive the next one? Copies of its files beside the store's.
//!
//! A commit makes its predecessor's files garbage. Keeping a checkpoint gives its files second
//! names in the same folder: files never rewritten (commits, SSTs) are linked and cost nothing,
//! files rewritten in place are copied, without their holes. Restoring gives them their first names
//! back. Both stream; both are whole after power loss, or have not happened.
//!
//! ```text
//! kept.<name>.<file>.kept    the files           written first
//! kept.<name>.list           what belongs to it  written last, removed first
//! RESTORE                    the checkpoint that is being restored: go on at the next opening
//! ```
//!
//! Normative: `docs/formats/store.md`.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tierbed_core::checksum::crc32c;
use tierbed_core::store::Attachment;
use tierbed_core::{Error, Result};
use tierbed_io::{AlignedBuf, Folder, OpenMode};

use crate::engine::Engine;

const PREFIX: &str = "kept.";
/// Stores sweep away files of their own endings.
const KEPT_SUFFIX: &str = ".kept";
const RESTORE: &str = "RESTORE";
const CURRENT: &str = "CURRENT";
const MAGIC: &str = "tierbed-kept 1";
/// Bytes copied at once.
const CHUNK_BYTES: usize = 1 << 20;
/// Holes of this size and more are kept.
const HOLE_BYTES: usize = 64 << 10;

/// A kept checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Kept {
    /// Its name.
    pub name: String,
    /// Number of its commit.
    pub number: u64,
    /// The bytes of `CURRENT`.
    current: String,
    /// Its files.
    files: Vec<KeptFile>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct KeptFile {
    name: String,
    bytes: u64,
}

impl Kept {
    /// Returns the length of its files, holes included.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }

    fn encode(&self) -> Result<Vec<u8>> {
        let body = serde_json::to_string_pretty(self).map_err(|cause| {
            Error::invalid("list of files cannot be written").with("cause", cause)
        })?;
        Ok(format!("{MAGIC} {:08x}\n{body}", crc32c(body.as_bytes())).into_bytes())
    }

    fn decode(bytes: &[u8]) -> Result<Self> {
        let damaged = || Error::corruption("list of a kept checkpoint is damaged");
        let text = std::str::from_utf8(bytes).map_err(|_| damaged())?;
        let (head, body) = text.split_once('\n').ok_or_else(damaged)?;
        if head != format!("{MAGIC} {:08x}", crc32c(body.as_bytes())) {
            return Err(damaged());
        }
        serde_json::from_str(body).map_err(|cause| damaged().with("cause", cause))
    }
}

impl Engine {
    /// Checkpoints as [`checkpoint`](Self::checkpoint) does, and keeps it under `name` until it is
    /// dropped; returns its number.
    ///
    /// # Errors
    /// As `checkpoint`; `Invalid` for a name that is taken or not of `[A-Za-z0-9_-]`;
    /// `Unsupported` without a folder or for a backend with folders of its own. When keeping fails
    /// after the commit, the checkpoint is in force and not kept.
    pub fn keep_checkpoint(&mut self, name: &str, attachments: &[Attachment<'_>]) -> Result<u64> {
        let Some(folder) = self.folder.clone() else {
            return Err(Error::unsupported("this store has no folder to keep a checkpoint in")
                .with("remedy", "open it with a path"));
        };
        check_name(name)?;
        if read_list(folder.as_ref(), name)?.is_some() {
            return Err(Error::invalid("a checkpoint of that name is kept already")
                .with("name", name)
                .with("remedy", "drop it first, or choose another name"));
        }
        let number = self.checkpoint(name, attachments)?;
        let kept = keep(folder.as_ref(), name, number);
        if kept.is_err() {
            remove_files(folder.as_ref(), name)?;
        }
        kept.map(|()| number)
    }
}

/// Lists the kept checkpoints of `folder`, by number.
///
/// # Errors
/// `Corruption` when a list is damaged, `Io` from the folder.
pub fn kept_checkpoints(folder: &dyn Folder) -> Result<Vec<Kept>> {
    let mut all = Vec::new();
    for file in folder.list()? {
        let name = file.strip_prefix(PREFIX).and_then(|rest| rest.strip_suffix(".list"));
        if let Some(name) = name.filter(|name| !name.contains('.')) {
            all.extend(read_list(folder, name)?);
        }
    }
    all.sort_by_key(|kept: &Kept| kept.number);
    Ok(all)
}

/// Forgets the kept checkpoint `name` and gives its disk space back.
///
/// # Errors
/// `Invalid` when there is none of that name, `Io` from the folder.
pub fn drop_checkpoint(folder: &dyn Folder, name: &str) -> Result<()> {
    check_name(name)?;
    if folder.read(&list_name(name))?.is_none() {
        return Err(unknown(folder, name)?);
    }
    // Without its list a checkpoint is garbage: after this nobody restores half of it.
    folder.remove(&list_name(name))?;
    folder.sync()?;
    remove_files(folder, name)
}

/// Makes the kept checkpoint `name` the store's last checkpoint; what came after it is gone.
///
/// The store must be closed.
///
/// # Errors
/// `Closed` when it is open, `Invalid` when there is no such checkpoint, `NoSpace` and `Io` from
/// the folder: opening the store then goes on with it.
pub fn restore_checkpoint(folder: &Arc<dyn Folder>, name: &str) -> Result<()> {
    check_name(name)?;
    let _lock = folder.lock()?;
    finish_restore_locked(folder.as_ref())?;
    if read_list(folder.as_ref(), name)?.is_none() {
        return Err(unknown(folder.as_ref(), name)?);
    }
    folder.write_atomic(RESTORE, name.as_bytes())?;
    finish_restore_locked(folder.as_ref())
}

/// Goes on with a restore that was interrupted, if there is one.
pub(crate) fn finish_restore(folder: &Arc<dyn Folder>) -> Result<()> {
    if folder.read(RESTORE)?.is_none() {
        return Ok(());
    }
    let _lock = folder.lock()?;
    finish_restore_locked(folder.as_ref())
}

fn finish_restore_locked(folder: &dyn Folder) -> Result<()> {
    let Some(name) = folder.read(RESTORE)? else { return Ok(()) };
    let name = String::from_utf8_lossy(&name).into_owned();
    check_name(&name)?;
    let Some(kept) = read_list(folder, &name)? else { return Err(unknown(folder, &name)?) };
    // Nobody may take a mixture for a store.
    folder.remove(CURRENT)?;
    folder.sync()?;
    for file in folder.list()? {
        if !is_beside(&file) {
            folder.remove(&file)?;
        }
    }
    for file in &kept.files {
        give_name(folder, &kept_name(&name, &file.name), &file.name)?;
    }
    folder.sync()?;
    folder.write_atomic(CURRENT, kept.current.as_bytes())?;
    folder.remove(RESTORE)?;
    folder.sync()
}

fn keep(folder: &dyn Folder, name: &str, number: u64) -> Result<()> {
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
            let bytes = give_name(folder, &file, &kept_name(name, &file))?;
            files.push(KeptFile { name: file, bytes });
        }
    }
    folder.sync()?;
    let kept = Kept { name: name.to_owned(), number, current, files };
    folder.write_atomic(&list_name(name), &kept.encode()?)
}

// Gives the bytes of `from` a second name; returns how many they are.
fn give_name(folder: &dyn Folder, from: &str, to: &str) -> Result<u64> {
    let source = folder.open(from, OpenMode::ReadOnly)?;
    let len_bytes = source.len_bytes()?;
    if is_immutable(from) && folder.link(from, to)? {
        return Ok(len_bytes);
    }
    let target = folder.open(to, OpenMode::Create)?;
    target.set_len(0)?;
    target.set_len(len_bytes)?;
    let mut chunk = AlignedBuf::new(CHUNK_BYTES);
    let mut at = 0;
    while at < len_bytes {
        let count = (len_bytes - at).min(CHUNK_BYTES as u64) as usize;
        let bytes = chunk.get_mut(..count).unwrap_or_default();
        source.read_at(at, bytes)?;
        for (part, place) in bytes.chunks(HOLE_BYTES).zip((at..).step_by(HOLE_BYTES)) {
            if part.iter().any(|byte| *byte != 0) {
                target.write_at(place, part)?;
            }
        }
        at += count as u64;
    }
    target.sync()?;
    Ok(len_bytes)
}

// Files that are written once, under a name used once, and then only removed.
fn is_immutable(file: &str) -> bool {
    let plain = file.strip_prefix(PREFIX).and_then(|rest| rest.strip_suffix(KEPT_SUFFIX));
    let file = plain.and_then(|rest| rest.split_once('.')).map_or(file, |(_, file)| file);
    file.starts_with("commit-") || file.ends_with(".sst")
}

fn is_beside(file: &str) -> bool {
    file.starts_with(PREFIX) || file == RESTORE
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
    let kept = Kept::decode(&bytes).map_err(|error| error.with("file", file))?;
    Ok(Some(kept))
}

fn remove_files(folder: &dyn Folder, name: &str) -> Result<()> {
    let prefix = format!("{PREFIX}{name}.");
    for file in folder.list()?.iter().filter(|file| file.starts_with(&prefix)) {
        folder.remove(file)?;
    }
    folder.sync()
}

fn unknown(folder: &dyn Folder, name: &str) -> Result<Error> {
    let names: Vec<String> = kept_checkpoints(folder)?.into_iter().map(|kept| kept.name).collect();
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
