//! The shard of each row of a placement, and the file that holds them.
//!
//! `tierbed place --shards` writes it beside the placement; a publish reads it. Normative text:
//! docs/reference/formats/shards.md.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use tierbed_core::checksum::crc32c;
use tierbed_core::{Error, Result};

use super::manifest::SHARDS_MAX;
use super::scatter::Scatter;
use crate::page::le_u32;

const MAGIC: [u8; 8] = *b"TBshards";
/// Magic, checksum, four zero bytes: what the checksum does not cover.
const PREFIX_BYTES: usize = 16;
/// Numbers of rows and of shards.
const HEADER_BYTES: usize = 8;

/// Which shard each row belongs to, by number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowShards {
    shard_count: u32,
    shards: Vec<u16>,
}

impl RowShards {
    /// Takes the shards of rows, `[row_count]`.
    ///
    /// # Errors
    /// `Invalid` for shards that there are not, and for no or too many of them.
    pub fn new(shard_count: u32, shards: Vec<u16>) -> Result<Self> {
        check_shard_count(shard_count)?;
        if let Some(row) = shards.iter().position(|&shard| u32::from(shard) >= shard_count) {
            return Err(Error::invalid("row belongs to a shard that does not exist")
                .with("row", row)
                .with("shards", shard_count));
        }
        Ok(Self { shard_count, shards })
    }

    /// Divides `row_count` rows as a publish by hash does.
    ///
    /// # Errors
    /// `Invalid` for no or too many shards.
    pub fn by_hash(shard_count: u32, row_count: u32) -> Result<Self> {
        check_shard_count(shard_count)?;
        let scatter = Scatter::new(u64::from(row_count).max(1));
        let shard_of = |row| (scatter.place_of(row) % u64::from(shard_count)) as u16;
        Self::new(shard_count, (0..u64::from(row_count)).map(shard_of).collect())
    }

    /// Divides `row_count` rows into ranges of equal size, as a publish by rows does.
    ///
    /// # Errors
    /// `Invalid` for no or too many shards.
    pub fn by_rows(shard_count: u32, row_count: u32) -> Result<Self> {
        check_shard_count(shard_count)?;
        let bounds = even_bounds(u64::from(row_count), shard_count);
        let ranges = (0..).zip(bounds.windows(2)).flat_map(|(shard, range)| match *range {
            [start, end] => std::iter::repeat_n(shard, (end - start) as usize),
            _ => unreachable!("windows of two bounds"),
        });
        Self::new(shard_count, ranges.collect())
    }

    /// Returns how many shards there are.
    #[must_use]
    pub fn shard_count(&self) -> u32 {
        self.shard_count
    }

    /// Returns the shard of each row, `[row_count]`.
    #[must_use]
    pub fn shards(&self) -> &[u16] {
        &self.shards
    }

    /// Returns the file beside the placement at `path`: its name with `.shards` for an ending.
    #[must_use]
    pub fn path_beside(path: &Path) -> PathBuf {
        path.with_extension("shards")
    }

    /// Writes the file. It appears whole or not at all.
    ///
    /// # Errors
    /// `Io` and `NoSpace`.
    pub fn write(&self, path: &Path) -> Result<()> {
        let mut rest = Vec::with_capacity(HEADER_BYTES + 2 * self.shards.len());
        rest.extend((self.shards.len() as u32).to_le_bytes());
        rest.extend(self.shard_count.to_le_bytes());
        rest.extend(self.shards.iter().flat_map(|shard| shard.to_le_bytes()));
        let checksum = crc32c(&rest).to_le_bytes();
        let temporary = path.with_extension("tmp");
        let write = || -> std::io::Result<()> {
            let mut file = BufWriter::new(File::create(&temporary)?);
            file.write_all(&MAGIC)?;
            file.write_all(&checksum)?;
            file.write_all(&[0; 4])?;
            file.write_all(&rest)?;
            file.into_inner()?.sync_all()?;
            std::fs::rename(&temporary, path)
        };
        write().map_err(|cause| {
            Error::os("cannot write the shards of a placement", cause).with("path", path.display())
        })
    }

    /// Reads the file at `path`.
    ///
    /// # Errors
    /// `Invalid` when there is none, `Corruption` for a damaged one, naming it; `Io`.
    pub fn read(path: &Path) -> Result<Self> {
        let bytes = std::fs::read(path).map_err(|cause| match cause.kind() {
            std::io::ErrorKind::NotFound => Error::invalid("the placement has no shards")
                .with("remedy", "place again with --shards, or divide by hash or rows"),
            _ => Error::os("cannot read the shards of a placement", cause),
        });
        bytes
            .and_then(|bytes| Self::decode(&bytes))
            .map_err(|error| error.with("path", path.display()))
    }

    /// Decodes the file.
    ///
    /// # Errors
    /// `Corruption` for any bytes that are none.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let wrong = |what: &str| Error::corruption(what).with("file_bytes", bytes.len());
        let (prefix, rest) = bytes
            .split_at_checked(PREFIX_BYTES)
            .filter(|(prefix, _)| prefix.starts_with(&MAGIC))
            .ok_or_else(|| wrong("file holds no shards of a placement"))?;
        if le_u32(prefix, MAGIC.len()) != crc32c(rest) {
            return Err(wrong("shards of a placement: checksum mismatch"));
        }
        let (header, rest) = rest
            .split_at_checked(HEADER_BYTES)
            .ok_or_else(|| wrong("shards of a placement have no header"))?;
        let (words, tail) = rest.as_chunks::<2>();
        if !tail.is_empty() || words.len() as u64 != u64::from(le_u32(header, 0)) {
            return Err(wrong("shards of a placement have another length than they say"));
        }
        let shards = words.iter().map(|word| u16::from_le_bytes(*word)).collect();
        Self::new(le_u32(header, 4), shards).map_err(|error| {
            wrong("shards of a placement contradict themselves").with("cause", error)
        })
    }
}

/// Returns the bounds of ranges of equal size, `[shard_count + 1]`.
pub(crate) fn even_bounds(row_count: u64, shard_count: u32) -> Vec<u64> {
    let shards = u128::from(shard_count);
    let bound = |shard: u32| (u128::from(row_count) * u128::from(shard) / shards) as u64;
    (0..=shard_count).map(bound).collect()
}

/// Fails for no or too many shards.
pub(crate) fn check_shard_count(shard_count: u32) -> Result<()> {
    if (1..=SHARDS_MAX).contains(&shard_count) {
        return Ok(());
    }
    Err(Error::invalid("number of shards is out of range")
        .with("shards", shard_count)
        .with("allowed", format_args!("1 to {SHARDS_MAX}")))
}

#[cfg(test)]
mod tests {
    use tierbed_core::ErrorKind;

    use super::*;

    #[test]
    fn hash_and_ranges_are_of_equal_size() {
        assert_eq!(RowShards::by_rows(3, 7).unwrap().shards(), [0, 0, 1, 1, 2, 2, 2]);
        let hashed = RowShards::by_hash(4, 4000).unwrap();
        let first = hashed.shards().iter().filter(|&&shard| shard == 0).count();
        assert_eq!((first, hashed.shards().len()), (1000, 4000));
        assert_eq!(RowShards::by_hash(4, 0).unwrap().shards(), [0; 0]);
        assert!(RowShards::by_rows(0, 7).is_err());
    }

    #[test]
    fn shards_come_back_and_damage_is_corruption() {
        let folder = tempfile::tempdir().unwrap();
        let path = RowShards::path_beside(&folder.path().join("placement.tbp"));
        assert!(path.ends_with("placement.shards"));
        assert_eq!(RowShards::read(&path).unwrap_err().kind(), ErrorKind::Invalid);
        let shards = RowShards::new(3, vec![2, 0, 1, 1]).unwrap();
        shards.write(&path).unwrap();
        assert_eq!(RowShards::read(&path).unwrap(), shards);
        let whole = std::fs::read(&path).unwrap();
        for at in (0..whole.len()).filter(|at| !(12..16).contains(at)) {
            let mut damaged = whole.clone();
            damaged[at] ^= 1;
            let error = RowShards::decode(&damaged).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Corruption, "byte {at}");
            assert!(RowShards::decode(&whole[..at]).is_err());
        }
        assert!(RowShards::new(2, vec![2]).is_err());
        assert!(RowShards::new(0, vec![]).is_err());
        assert!(RowShards::new(SHARDS_MAX + 1, vec![]).is_err());
    }
}
