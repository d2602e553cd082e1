//! The file `shards.json`: which snapshots are the shards of one publish, and who has which rows.
//!
//! One line `tierbed-shards <version> <crc32c of the rest, 8 hex digits>`, then JSON. It is written
//! last: a folder without it holds no shards. Normative text: docs/reference/formats/shards.md.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use tierbed_core::checksum::crc32c;
use tierbed_core::schema::ROW_COUNT_MAX;
use tierbed_core::{Error, Result};
use tierbed_io::checked_text::Refused;
use tierbed_io::{CheckedText, Folder};

/// The name of the file.
pub const SHARDS_NAME: &str = "shards.json";
/// Version of the format.
pub const SHARDS_VERSION: u32 = 1;
/// Most shards of one publish.
pub const SHARDS_MAX: u32 = 4096;
/// A publish's number is below this, so that every reader of JSON reads it whole.
pub const PUBLISH_END: u64 = 1 << 53;
/// The first line.
pub(crate) const TEXT: CheckedText =
    CheckedText { magic: "tierbed-shards", versions: SHARDS_VERSION..=SHARDS_VERSION };

/// What `shards.json` says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardsManifest {
    /// The publish: the snapshots of its shards carry this number in their attachment `shard`.
    pub publish: u64,
    /// Servers of each shard that are wanted.
    pub replicas: u32,
    /// The snapshots, by the number of the shard.
    pub shards: Vec<ShardInfo>,
    /// The tables, in the order that they have in every shard's snapshot.
    pub tables: Vec<DividedTable>,
}

/// The snapshot of one shard.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardInfo {
    /// Its folder beside `shards.json`, and the name of the model that it is.
    pub folder: String,
    /// What tells the snapshot from every other.
    pub identity: String,
    /// Bytes of its files.
    pub file_bytes: u64,
}

/// A table, and how its rows are divided.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DividedTable {
    /// Its name.
    pub name: String,
    /// Rows over all shards; ids run from 0 to `row_count - 1`.
    pub row_count: u64,
    /// Elements of a row.
    pub dim: u32,
    /// Who has which rows.
    pub divided: Division,
}

/// How the rows of a table are divided.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "by")]
pub enum Division {
    /// One shard has all, by their ids.
    Whole {
        /// The shard.
        shard: u32,
    },
    /// Every shard has all, by their ids.
    Everywhere,
    /// Each shard has a range of ids.
    Rows {
        /// `[shard_count + 1]`: shard `s` has the ids from `bounds[s]` to `bounds[s + 1] - 1`.
        bounds: Vec<u64>,
    },
    /// By a fixed shuffle of the ids: place `p` of it is row `p / shard_count` of shard
    /// `p % shard_count`.
    Hash,
    /// By a map; each shard has its rows in the order of their ids.
    Placed {
        /// The map's file, beside `shards.json`.
        file: String,
        /// CRC32C over the checksums of its blocks.
        crc32c: u32,
    },
}

impl Division {
    /// Returns the word by which `shards.json` calls it.
    #[must_use]
    pub fn word(&self) -> &'static str {
        match self {
            Self::Whole { .. } => "whole",
            Self::Everywhere => "everywhere",
            Self::Rows { .. } => "rows",
            Self::Hash => "hash",
            Self::Placed { .. } => "placed",
        }
    }

    /// Fails for a division that is none of `row_count` rows among `shard_count` shards.
    fn check(&self, row_count: u64, shard_count: u32) -> std::result::Result<(), &'static str> {
        match self {
            Self::Whole { shard } if *shard >= shard_count => Err("no such shard has the table"),
            Self::Rows { bounds } => {
                let is_whole = bounds.len() as u64 == u64::from(shard_count) + 1
                    && bounds.first() == Some(&0)
                    && bounds.last() == Some(&row_count)
                    && bounds.is_sorted();
                is_whole.then_some(()).ok_or("bounds of rows are not those of the table")
            }
            Self::Placed { file, .. } => {
                tierbed_io::folder::check_name(file).map_err(|_| "map has a name of no file")
            }
            Self::Whole { .. } | Self::Everywhere | Self::Hash => Ok(()),
        }
    }
}

impl ShardsManifest {
    /// Returns how many shards there are.
    #[must_use]
    pub fn shard_count(&self) -> u32 {
        self.shards.len() as u32
    }

    /// Returns what tells these shards from all others: the publish, and a checksum of the file.
    ///
    /// # Errors
    /// As [`encode`](Self::encode).
    pub fn identity(&self) -> Result<String> {
        Ok(format!("{:014x}{:08x}", self.publish, crc32c(&self.encode()?)))
    }

    /// Encodes the file.
    ///
    /// # Errors
    /// `Invalid` when it contradicts itself.
    pub fn encode(&self) -> Result<Vec<u8>> {
        self.check()
            .map_err(|what| Error::invalid("shards contradict each other").with("what", what))?;
        let mut body = serde_json::to_vec_pretty(self)
            .map_err(|cause| Error::invalid("cannot encode the shards").with("cause", cause))?;
        body.push(b'\n');
        Ok(TEXT.encode(SHARDS_VERSION, &body))
    }

    /// Decodes and checks the file.
    ///
    /// # Errors
    /// `Invalid` for files of another format or version, `Corruption` for other bytes than were
    /// written.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let (_, body) = TEXT.decode(bytes).map_err(refusal)?;
        let manifest: Self = serde_json::from_slice(body).map_err(|cause| {
            Error::corruption("shards.json is not the expected JSON").with("cause", cause)
        })?;
        match manifest.check() {
            Ok(()) => Ok(manifest),
            Err(what) => Err(Error::corruption("shards.json contradicts itself")
                .with("what", what)
                .with("remedy", "publish the snapshot again")),
        }
    }

    /// Reads the file of `folder`.
    ///
    /// # Errors
    /// `Invalid` when there is none, else as [`decode`](Self::decode).
    pub fn read(folder: &dyn Folder) -> Result<Self> {
        let path =
            folder.path().map_or_else(|| "(memory)".into(), |path| path.display().to_string());
        let Some(bytes) = folder.read(SHARDS_NAME)? else {
            return Err(Error::invalid("the folder holds no shards")
                .with("path", path)
                .with("expected", SHARDS_NAME)
                .with("remedy", "publish with --shards, into a new or empty folder"));
        };
        Self::decode(&bytes).map_err(|error| error.with("path", path))
    }

    fn check(&self) -> std::result::Result<(), String> {
        let shard_count = self.shards.len();
        if shard_count == 0 || shard_count > SHARDS_MAX as usize {
            return Err(format!("{shard_count} shards"));
        }
        if self.replicas == 0 || self.publish >= PUBLISH_END {
            return Err("replicas or publish are out of range".to_owned());
        }
        let (mut folders, mut names) = (BTreeSet::new(), BTreeSet::new());
        for shard in &self.shards {
            let is_plain = tierbed_io::folder::check_name(&shard.folder).is_ok();
            if !is_plain || !folders.insert(&shard.folder) {
                return Err(format!("folder {:?} of a shard", shard.folder));
            }
        }
        for table in &self.tables {
            let is_sized = (1..=ROW_COUNT_MAX).contains(&table.row_count) && table.dim > 0;
            if !is_sized || !names.insert(&table.name) {
                return Err(format!("table {:?}", table.name));
            }
            let checked = table.divided.check(table.row_count, shard_count as u32);
            checked.map_err(|what| format!("table {:?}: {what}", table.name))?;
        }
        Ok(())
    }
}

fn refusal(refused: Refused) -> Error {
    match refused {
        Refused::Foreign(found) => {
            Error::invalid("not a list of shards").with("found", format_args!("{found:?}"))
        }
        Refused::Version(found) => Error::invalid("shards have another format version")
            .with("expected", SHARDS_VERSION)
            .with("found", found)
            .with("remedy", "publish it again with this version, or read it with that one"),
        Refused::Damaged { found, body_crc32c } => {
            Error::corruption("shards.json checksum mismatch")
                .with("expected", format_args!("{body_crc32c:08x}"))
                .with("found", format_args!("{found:?}"))
                .with("remedy", "publish the snapshot again")
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use tierbed_core::ErrorKind;

    use super::*;

    pub(crate) fn manifest(shard_count: u32, tables: &[(&str, u64, Division)]) -> ShardsManifest {
        let shard = |shard| ShardInfo {
            folder: format!("shard.{shard}"),
            identity: format!("{shard:024x}"),
            file_bytes: 1,
        };
        let table = |(name, row_count, divided): &(&str, u64, Division)| DividedTable {
            name: (*name).to_owned(),
            row_count: *row_count,
            dim: 8,
            divided: divided.clone(),
        };
        ShardsManifest {
            publish: 77,
            replicas: 2,
            shards: (0..shard_count).map(shard).collect(),
            tables: tables.iter().map(table).collect(),
        }
    }

    #[test]
    fn what_is_written_comes_back() {
        let placed = Division::Placed { file: "places".to_owned(), crc32c: 9 };
        let written = manifest(
            2,
            &[
                ("a", 10, Division::Rows { bounds: vec![0, 4, 10] }),
                ("b", 3, Division::Whole { shard: 1 }),
                ("c", 3, Division::Everywhere),
                ("d", 3, Division::Hash),
                ("e", 3, placed),
            ],
        );
        let bytes = written.encode().unwrap();
        assert!(bytes.starts_with(b"tierbed-shards 1 "));
        assert_eq!(ShardsManifest::decode(&bytes).unwrap(), written);
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 4;
            assert!(ShardsManifest::decode(&damaged).is_err(), "byte {at}");
        }
        let text = String::from_utf8(bytes).unwrap();
        assert!(text.contains("\"by\": \"everywhere\""), "{text}");
    }

    #[test]
    fn contradictions_are_refused_and_are_corruption_with_a_checksum() {
        let rows = |bounds: &[u64]| Division::Rows { bounds: bounds.to_vec() };
        let bad = [
            manifest(0, &[]),
            manifest(2, &[("a", 10, Division::Whole { shard: 2 })]),
            manifest(2, &[("a", 10, rows(&[0, 10]))]),
            manifest(2, &[("a", 10, rows(&[0, 7, 9]))]),
            manifest(2, &[("a", 10, rows(&[0, 11, 10]))]),
            manifest(2, &[("a", 10, rows(&[1, 4, 10]))]),
            manifest(2, &[("a", 0, Division::Hash)]),
            manifest(2, &[("a", 4, Division::Hash), ("a", 4, Division::Hash)]),
            manifest(2, &[("a", 4, Division::Placed { file: "a/b".to_owned(), crc32c: 0 })]),
            ShardsManifest { publish: PUBLISH_END, ..manifest(1, &[]) },
            ShardsManifest { replicas: 0, ..manifest(1, &[]) },
        ];
        for manifest in bad {
            assert_eq!(manifest.encode().unwrap_err().kind(), ErrorKind::Invalid, "{manifest:?}");
            let bytes = TEXT.encode(SHARDS_VERSION, &serde_json::to_vec(&manifest).unwrap());
            let error = ShardsManifest::decode(&bytes).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Corruption, "{manifest:?}");
        }
        let other = ShardsManifest::decode(b"tierbed-snapshot 1 00000000\n{}").unwrap_err();
        assert_eq!(other.kind(), ErrorKind::Invalid);
    }
}
