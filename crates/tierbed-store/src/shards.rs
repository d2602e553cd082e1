//! The shards file: one atomic file that puts the commits of all shards in force.
//!
//! A store of several shards keeps the `CURRENT` of each shard in it, so that replacing it puts
//! all of them in force at once.
//!
//! ```text
//! SHARDS    "tierbed-shards 1 <crc32c of the rest>\n" + JSON
//! ```
//!
//! Normative: `docs/reference/formats/store.md`.

use serde::{Deserialize, Serialize};
use tierbed_core::{Error, Result, Schema};
use tierbed_io::checked_text::Refused;
use tierbed_io::{CheckedText, Folder};

use crate::commit::CommitLog;

/// Name of the file; a folder that has it is a store of several shards.
pub const SHARDS_FILE: &str = "SHARDS";
const TEXT: CheckedText = CheckedText { magic: "tierbed-shards", versions: 1..=1 };
/// Most shards of a store: a thread each.
pub const SHARDS_MAX: usize = 64;

/// What all shards have in force.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ShardsFile {
    /// All tables.
    pub schema: Schema,
    /// Shard of each table, in id order.
    pub shard_of: Vec<u32>,
    /// What would be the `CURRENT` of each shard by itself.
    pub currents: Vec<String>,
}

impl ShardsFile {
    /// Returns the number of shards.
    #[must_use]
    pub fn shard_count(&self) -> usize {
        self.currents.len()
    }

    /// Returns whether no commit is in force yet.
    #[must_use]
    pub fn is_new(&self) -> bool {
        let none = CommitLog::none_in_force();
        self.currents.iter().all(|current| *current == none)
    }

    fn is_whole(&self) -> bool {
        let count = self.shard_count();
        (2..=SHARDS_MAX).contains(&count)
            && self.shard_of.len() == self.schema.tables().len()
            && (0..count).all(|shard| self.shard_of.contains(&(shard as u32)))
            && self.shard_of.iter().all(|&shard| (shard as usize) < count)
    }
}

/// Returns what the names of files of `shard` begin with.
#[must_use]
pub fn prefix(shard: usize) -> String {
    format!("shard{shard}.")
}

/// Returns the shard that the file `name` belongs to.
#[must_use]
pub fn shard_of_name(name: &str) -> Option<usize> {
    let (shard, _) = name.strip_prefix("shard")?.split_once('.')?;
    shard.parse().ok()
}

/// Reads the file; `None` when the store has no shards, or no checkpoint yet.
///
/// # Errors
/// `Corruption` when it is damaged, `Io` from the folder.
pub fn read_file(folder: &dyn Folder) -> Result<Option<ShardsFile>> {
    let Some(bytes) = folder.read(SHARDS_FILE)? else { return Ok(None) };
    let file = decode(&bytes).map_err(|error| {
        error.with("file", SHARDS_FILE).with("remedy", "restore the store's folder from a copy")
    })?;
    Ok(Some(file))
}

/// Puts `file` in force, atomically.
///
/// # Errors
/// Those of the folder.
pub fn write_file(folder: &dyn Folder, file: &ShardsFile) -> Result<()> {
    folder.write_atomic(SHARDS_FILE, &encode_file(file)?)
}

/// Returns the bytes of `file`.
///
/// # Errors
/// `Invalid` when it cannot be written as JSON.
pub fn encode_file(file: &ShardsFile) -> Result<Vec<u8>> {
    let body = serde_json::to_string_pretty(file)
        .map_err(|cause| Error::invalid("shards cannot be written").with("cause", cause))?;
    Ok(mended(body.as_bytes()))
}

fn decode(bytes: &[u8]) -> Result<ShardsFile> {
    let unreadable = || Error::corruption("file of shards is unreadable");
    let (_, body) = TEXT.decode(bytes).map_err(|refused| match refused {
        Refused::Foreign(_) => unreadable(),
        Refused::Version(found) => {
            Error::unsupported("file of shards has another version").with("found", found)
        }
        Refused::Damaged { found, body_crc32c } => {
            Error::corruption("file of shards does not have its checksum")
                .with("expected", format_args!("{body_crc32c:08x}"))
                .with("found", found)
        }
    })?;
    serde_json::from_slice(body).ok().filter(ShardsFile::is_whole).ok_or_else(unreadable)
}

/// Returns the file whose first line fits `body`.
pub(crate) fn mended(body: &[u8]) -> Vec<u8> {
    TEXT.encode(1, body)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that panics has failed, as it should")]
mod tests {
    use tierbed_core::{ErrorKind, TableSchema};
    use tierbed_io::MemoryFolder;

    use super::*;

    fn schema(tables: u64) -> Schema {
        let table = |at| TableSchema::plain(format!("t{at}"), 10 + at, 4);
        Schema::new((0..tables).map(table).collect()).unwrap()
    }

    fn written() -> (MemoryFolder, ShardsFile) {
        let currents = vec!["tierbed-current 1 3 00000000\n".to_owned(); 2];
        let file = ShardsFile { schema: schema(2), shard_of: vec![0, 1], currents };
        let folder = MemoryFolder::new();
        assert!(read_file(&folder).unwrap().is_none());
        write_file(&folder, &file).unwrap();
        (folder, file)
    }

    #[test]
    fn what_was_written_is_read() {
        let (folder, file) = written();
        assert_eq!(read_file(&folder).unwrap().unwrap(), file);
    }

    #[test]
    fn every_flipped_bit_is_noticed() {
        let (folder, _) = written();
        let bytes = folder.read(SHARDS_FILE).unwrap().unwrap();
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1 << (at % 8);
            let kind = decode(&damaged).unwrap_err().kind();
            assert!(matches!(kind, ErrorKind::Corruption | ErrorKind::Unsupported), "byte {at}");
        }
    }

    #[test]
    fn a_table_without_its_shard_is_refused() {
        let (_, file) = written();
        for shard_of in [vec![0], vec![0, 2], vec![0, 0], vec![0, 1, 1]] {
            let body = serde_json::to_string(&ShardsFile { shard_of, ..file.clone() }).unwrap();
            assert!(decode(&mended(body.as_bytes())).is_err());
        }
    }
}
