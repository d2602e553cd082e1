//! How does a mapped store go back to its last commit? Pages are kept as they were.
//!
//! The system may write a changed page of a map back at any time, so before the first change of
//! a page after a commit its committed bytes go to the undo file:
//!
//! ```text
//! pages.undo   entries: | table u32 | crc32c u32 | page u64 | commit u64 | 4096 bytes |
//! boot.undo    boot id of the machine and the commit, as text; there while pages may differ
//! ```
//!
//! The undo file is not synced: it is whole after a crash of the process, not after a power
//! loss. Then the boot id differs, and the store says so instead of opening with a mixture.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;

use tierbed_core::checksum::{crc32c, crc32c_append};
use tierbed_core::{Error, ErrorKind, Result};
use tierbed_io::{Folder, PAGE_BYTES};

pub(crate) const PAGES: &str = "pages.undo";
pub(crate) const BOOT: &str = "boot.undo";
const HEAD_BYTES: usize = 24;

/// The open undo file.
pub(crate) struct Undo {
    file: File,
    len_bytes: u64,
    buffer: Vec<u8>,
    /// What was written in part could not be cut off: entries behind it would never be found.
    is_broken: bool,
}

/// One page as it was at a commit.
pub(crate) struct SavedPage {
    pub(crate) table: u32,
    pub(crate) page: u64,
    pub(crate) commit: u64,
    pub(crate) bytes: [u8; PAGE_BYTES],
}

impl Undo {
    /// Starts an empty undo file.
    ///
    /// # Errors
    /// `Io`, `NoSpace`.
    pub(crate) fn start(folder: &Path) -> Result<Self> {
        let path = folder.join(PAGES);
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .open(&path)
            .map_err(|cause| Error::os("cannot open undo file", cause))?;
        Ok(Self { file, len_bytes: 0, buffer: Vec::new(), is_broken: false })
    }

    /// Adds a page to the next [`flush`](Self::flush).
    pub(crate) fn push(&mut self, table: u32, page: u64, commit: u64, bytes: &[u8]) {
        let head = head_bytes(table, page, commit, bytes);
        self.buffer.extend_from_slice(&head);
        self.buffer.extend_from_slice(bytes);
    }

    /// Hands the added pages to the system; only then may they change.
    ///
    /// # Errors
    /// `NoSpace`, `Io`; none of them must be changed then. `Poisoned` when what was written in part
    /// could not be cut off.
    pub(crate) fn flush(&mut self) -> Result<()> {
        if self.is_broken {
            return Err(broken());
        }
        let written = self.file.write_all(&self.buffer);
        let added = self.buffer.len() as u64;
        self.buffer.clear();
        if let Err(cause) = written {
            let end = self.len_bytes;
            let cut = self.file.set_len(end).and_then(|()| self.file.seek(SeekFrom::Start(end)));
            if let Err(second) = cut {
                self.is_broken = true;
                return Err(broken().with("cause", cause).with("then", second));
            }
            return Err(Error::os("cannot write undo file", cause));
        }
        self.len_bytes += added;
        Ok(())
    }

    /// Returns the bytes it occupies.
    pub(crate) fn len_bytes(&self) -> u64 {
        self.len_bytes
    }
}

fn head_bytes(table: u32, page: u64, commit: u64, bytes: &[u8]) -> [u8; HEAD_BYTES] {
    let mut head = [0; HEAD_BYTES];
    let words = [page.to_le_bytes(), commit.to_le_bytes()].concat();
    let crc = crc32c_append(crc32c_append(crc32c(&table.to_le_bytes()), &words), bytes);
    let parts = table.to_le_bytes().into_iter().chain(crc.to_le_bytes()).chain(words);
    head.iter_mut().zip(parts).for_each(|(place, byte)| *place = byte);
    head
}

fn broken() -> Error {
    Error::new(ErrorKind::Poisoned, "the undo file of a mapped store has a broken entry")
        .with("remedy", "open the store again; it is at its last checkpoint")
}

/// Reads the next entry; `None` at the end, or where an entry was cut short: its page was not
/// changed yet.
///
/// # Errors
/// `Corruption` for a whole entry that is not what was written, `Io` from the file.
pub(crate) fn read_entry(from: &mut impl Read) -> Result<Option<SavedPage>> {
    let mut head = [0; HEAD_BYTES];
    let mut bytes = [0; PAGE_BYTES];
    match from.read_exact(&mut head).and_then(|()| from.read_exact(&mut bytes)) {
        Ok(()) => {}
        Err(cause) if cause.kind() == std::io::ErrorKind::UnexpectedEof => return Ok(None),
        Err(cause) => return Err(Error::os("cannot read undo file", cause)),
    }
    let damaged = || {
        Error::corruption("an entry of the undo file is damaged")
            .with("file", PAGES)
            .with("remedy", "restore the store's folder from a copy, or use the file backend")
    };
    parse_entry(&head, bytes).ok_or_else(damaged).map(Some)
}

fn parse_entry(head: &[u8; HEAD_BYTES], bytes: [u8; PAGE_BYTES]) -> Option<SavedPage> {
    let (table, rest) = head.split_first_chunk::<4>()?;
    let (_, rest) = rest.split_first_chunk::<4>()?;
    let (page, rest) = rest.split_first_chunk::<8>()?;
    let commit = u64::from_le_bytes(*rest.first_chunk::<8>()?);
    let (table, page) = (u32::from_le_bytes(*table), u64::from_le_bytes(*page));
    (*head == head_bytes(table, page, commit, &bytes)).then_some(SavedPage {
        table,
        page,
        commit,
        bytes,
    })
}

/// Notes durably that pages may differ from commit `commit` from now on.
///
/// # Errors
/// `Io`, `NoSpace`.
pub(crate) fn note_boot(folder: &dyn Folder, boot_id: &str, commit: u64) -> Result<()> {
    folder.write_atomic(BOOT, format!("tierbed-undo 1 {commit} {boot_id}\n").as_bytes())
}

/// Says whether the undo file is needed to go back to commit `commit`.
///
/// # Errors
/// `Corruption` when it is needed and the machine was started anew since.
pub(crate) fn is_needed(folder: &dyn Folder, boot_id: &str, commit: u64) -> Result<bool> {
    let Some(note) = folder.read(BOOT)? else { return Ok(false) };
    let text = String::from_utf8_lossy(&note);
    let mut words = text.split_whitespace().skip(2);
    let noted = words.next().and_then(|word| word.parse::<u64>().ok());
    let Some(noted) = noted else {
        return Err(Error::corruption("note of the undo file is damaged").with("file", BOOT));
    };
    if noted != commit {
        return Ok(false);
    }
    if words.next() == Some(boot_id) {
        return Ok(true);
    }
    Err(Error::corruption("the machine stopped between two commits of a mapped store")
        .with("commit", commit)
        .with("remedy", "restore the store's folder from a copy, or use the file backend"))
}

/// Forgets the undo file: a commit is in force.
///
/// # Errors
/// `Io`.
pub(crate) fn forget(folder: &dyn Folder) -> Result<()> {
    folder.remove(BOOT)?;
    folder.remove(PAGES)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_flipped_byte_is_noticed(at in 0usize..HEAD_BYTES + PAGE_BYTES) {
            let page = [7u8; PAGE_BYTES];
            let mut entry = head_bytes(1, 2, 3, &page).to_vec();
            entry.extend_from_slice(&page);
            prop_assert!(read_entry(&mut entry.as_slice()).unwrap().is_some());
            entry[at] ^= 0x10;
            let error = read_entry(&mut entry.as_slice()).err().map(|error| error.kind());
            prop_assert_eq!(error, Some(ErrorKind::Corruption));
            prop_assert!(read_entry(&mut &entry[..at]).unwrap().is_none());
        }
    }

    /// A bad sector once counted as the end of the list: pages behind it stayed as they were
    /// changed, and the store opened.
    #[test]
    fn an_entry_that_cannot_be_read_is_an_error() {
        struct Bad;
        impl Read for Bad {
            fn read(&mut self, _: &mut [u8]) -> std::io::Result<usize> {
                Err(std::io::Error::from_raw_os_error(5))
            }
        }
        assert_eq!(read_entry(&mut Bad).err().map(|error| error.kind()), Some(ErrorKind::Io));
    }

    #[test]
    fn an_entry_that_cannot_be_cut_off_poisons_the_undo_file() {
        let folder = tempfile::tempdir().unwrap();
        let mut undo = Undo::start(folder.path()).unwrap();
        // A file opened for reading only can neither be written nor cut.
        undo.file = File::open(folder.path().join(PAGES)).unwrap();
        for _ in 0..2 {
            undo.push(0, 1, 1, &[3; PAGE_BYTES]);
            assert_eq!(undo.flush().unwrap_err().kind(), ErrorKind::Poisoned);
        }
    }
}
