//! The version file of a commit.
//!
//! Little-endian; the manifest holds the checksum of the whole file. Normative text:
//! `docs/reference/formats/lsm.md`.
//!
//! | bytes | field |
//! |---|---|
//! | 0..8 | magic `TBlsmver` |
//! | 8..12 | version, 1 |
//! | 12..16 | zero |
//! | 16..24 | next SST id |
//! | 24..32 | next log segment id |
//! | 32..40 | SST count S |
//! | 40..48 | log segment count W |
//! | 48..56 | hot row count H |
//! | 56.. | S entries of 80 bytes, W of 24, H keys of 8 |

use tierbed_core::{Error, Result};

use super::{SstId, SstMeta, Version, LEVELS_MAX};
use crate::key::Key;
use crate::sst::{read_u32, read_u64};
use crate::wal::{SegmentId, SegmentMeta};

const MAGIC: u64 = u64::from_le_bytes(*b"TBlsmver");
const FORMAT_VERSION: u32 = 1;
const HEADER_BYTES: usize = 56;
const SST_BYTES: usize = 80;
const SEGMENT_BYTES: usize = 24;

/// Everything a commit must remember about the tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StoredVersion {
    pub(crate) version: Version,
    /// Outdated rows known per SST, in the order of [`Version::ssts`].
    pub(crate) outdated: Vec<(SstId, u64)>,
    pub(crate) next_sst: u64,
    pub(crate) next_segment: u64,
    /// Log segments to replay, oldest first.
    pub(crate) segments: Vec<SegmentMeta>,
    /// Rows whose newest version has the hot prefix, ascending.
    pub(crate) hot_keys: Vec<Key>,
}

/// Returns the length of the version file that holds `stored`.
pub(crate) fn encoded_len(stored: &StoredVersion) -> usize {
    HEADER_BYTES
        + SST_BYTES * stored.version.ssts().count()
        + SEGMENT_BYTES * stored.segments.len()
        + 8 * stored.hot_keys.len()
}

/// Writes `stored` as the bytes of a version file.
pub(crate) fn encode(stored: &StoredVersion) -> Vec<u8> {
    let mut out = Vec::with_capacity(encoded_len(stored));
    out.extend(MAGIC.to_le_bytes());
    out.extend(FORMAT_VERSION.to_le_bytes());
    out.extend(0u32.to_le_bytes());
    let counts = [stored.version.ssts().count(), stored.segments.len(), stored.hot_keys.len()];
    for number in [stored.next_sst, stored.next_segment] {
        out.extend(number.to_le_bytes());
    }
    for count in counts {
        out.extend((count as u64).to_le_bytes());
    }
    for ((level, sst), (_, outdated)) in stored.version.ssts().zip(&stored.outdated) {
        for long in [sst.id.0, sst.first.get(), sst.last.get(), sst.row_count, *outdated] {
            out.extend(long.to_le_bytes());
        }
        out.extend(sst.filter_bytes.to_le_bytes());
        let words = [
            level as u32,
            sst.block_bytes,
            sst.rows_blocks,
            sst.index_blocks,
            sst.filter_blocks,
            sst.filter_bits_per_row,
            0,
            0,
        ];
        for word in words {
            out.extend(word.to_le_bytes());
        }
    }
    for segment in &stored.segments {
        for long in [segment.id.0, segment.len_bytes, segment.entry_count] {
            out.extend(long.to_le_bytes());
        }
    }
    for key in &stored.hot_keys {
        out.extend(key.get().to_le_bytes());
    }
    out
}

fn damaged(what: &str) -> Error {
    Error::corruption(format!("version file: {what}"))
        .with("remedy", "restore the store's folder from a copy")
}

/// Reads a version file.
///
/// # Errors
/// `Corruption` when it is malformed, `Invalid` when another format version wrote it.
pub(crate) fn decode(bytes: &[u8]) -> Result<StoredVersion> {
    let long = |at| read_u64(bytes, at).ok_or_else(|| damaged("too short"));
    if long(0)? != MAGIC {
        return Err(damaged("another format"));
    }
    let found = read_u32(bytes, 8).ok_or_else(|| damaged("too short"))?;
    if found != FORMAT_VERSION {
        return Err(Error::invalid("version file has an unsupported format version")
            .with("supported", FORMAT_VERSION)
            .with("found", found)
            .with("remedy", "open it with the version that wrote it"));
    }
    let count = |at| -> Result<usize> {
        let count = usize::try_from(long(at)?).map_err(|_| damaged("too many entries"))?;
        // Every entry has bytes, so a count above the length is a lie; no allocation follows it.
        if count > bytes.len() {
            Err(damaged("too many entries"))
        } else {
            Ok(count)
        }
    };
    let (sst_count, segment_count, hot_count) = (count(32)?, count(40)?, count(48)?);
    let segments_at = HEADER_BYTES + SST_BYTES * sst_count;
    let hot_at = segments_at + SEGMENT_BYTES * segment_count;
    if bytes.len() != hot_at + 8 * hot_count {
        return Err(damaged("another length than its counts say"));
    }
    let (next_sst, next_segment) = (long(16)?, long(24)?);
    let (version, outdated) = decode_ssts(bytes, sst_count, next_sst)?;
    let mut segments = Vec::with_capacity(segment_count);
    for at in (segments_at..hot_at).step_by(SEGMENT_BYTES) {
        let id = SegmentId(long(at)?);
        if id.0 >= next_segment || segments.last().is_some_and(|last: &SegmentMeta| last.id >= id) {
            return Err(damaged("log segments out of order"));
        }
        segments.push(SegmentMeta { id, len_bytes: long(at + 8)?, entry_count: long(at + 16)? });
    }
    let hot_keys: Option<Vec<Key>> = (hot_at..bytes.len())
        .step_by(8)
        .map(|at| Key::from_stored(read_u64(bytes, at)?).filter(|key| key.is_hot()))
        .collect();
    let hot_keys = hot_keys.ok_or_else(|| damaged("a hot row is no key"))?;
    if !hot_keys.is_sorted_by(|one, next| one < next) {
        return Err(damaged("hot rows out of order"));
    }
    Ok(StoredVersion { version, outdated, next_sst, next_segment, segments, hot_keys })
}

fn decode_ssts(
    bytes: &[u8],
    sst_count: usize,
    next_sst: u64,
) -> Result<(Version, Vec<(SstId, u64)>)> {
    let mut levels = vec![Vec::new(); LEVELS_MAX];
    let mut outdated = Vec::with_capacity(sst_count);
    let mut level_before = 0;
    for at in (0..sst_count).map(|sst| HEADER_BYTES + SST_BYTES * sst) {
        let long =
            |field: usize| read_u64(bytes, at + 8 * field).ok_or_else(|| damaged("too short"));
        let word =
            |field: usize| read_u32(bytes, at + 48 + 4 * field).ok_or_else(|| damaged("too short"));
        let key = |field: usize| -> Result<Key> {
            Key::from_stored(long(field)?).ok_or_else(|| damaged("an SST border is no key"))
        };
        let sst = SstMeta {
            id: SstId(long(0)?),
            first: key(1)?,
            last: key(2)?,
            row_count: long(3)?,
            filter_bytes: long(5)?,
            block_bytes: word(1)?,
            rows_blocks: word(2)?,
            index_blocks: word(3)?,
            filter_blocks: word(4)?,
            filter_bits_per_row: word(5)?,
        };
        if sst.id.0 >= next_sst || !is_plausible(&sst) {
            return Err(damaged("malformed SST").with("sst_id", sst.id.0));
        }
        outdated.push((sst.id, long(4)?));
        let level = word(0)? as usize;
        // Counts belong to SSTs by their order, which is that of the levels.
        if level < level_before {
            return Err(damaged("levels out of order").with("level", level));
        }
        level_before = level;
        let place = levels.get_mut(level);
        place.ok_or_else(|| damaged("no such level").with("level", level))?.push(sst);
    }
    Ok((Version::new(levels)?, outdated))
}

// Sizes that no writer produces would make a reader reserve without bound.
fn is_plausible(sst: &SstMeta) -> bool {
    const BLOCK_BYTES_MAX: u32 = 1 << 24;
    let blocks = [sst.rows_blocks, sst.index_blocks, sst.filter_blocks];
    sst.block_bytes.is_multiple_of(4096)
        && sst.block_bytes <= BLOCK_BYTES_MAX
        && blocks.iter().all(|count| *count < 1 << 30)
        && sst.filter_bytes <= u64::from(sst.filter_blocks) * u64::from(sst.block_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tierbed_core::{RowId, RowKey, TableId};

    fn key(row: u64) -> Key {
        Key::cold(RowKey::new(TableId(0), RowId(row)))
    }

    fn sst(id: u64, first: u64, last: u64) -> SstMeta {
        SstMeta {
            id: SstId(id),
            first: key(first),
            last: key(last),
            row_count: 3,
            block_bytes: 4096,
            rows_blocks: 2,
            index_blocks: 1,
            filter_blocks: 1,
            filter_bytes: 8,
            filter_bits_per_row: 10,
        }
    }

    fn stored() -> StoredVersion {
        let levels = vec![vec![sst(5, 0, 90), sst(6, 4, 8)], vec![sst(1, 0, 9), sst(2, 10, 20)]];
        StoredVersion {
            version: Version::new(levels).unwrap(),
            outdated: vec![(SstId(5), 0), (SstId(6), 2), (SstId(1), 7), (SstId(2), 0)],
            next_sst: 7,
            next_segment: 4,
            segments: vec![SegmentMeta { id: SegmentId(3), len_bytes: 100, entry_count: 2 }],
            hot_keys: vec![Key::hot(key(4).row()), Key::hot(key(9).row())],
        }
    }

    #[test]
    fn comes_back_as_it_was() {
        assert_eq!(decode(&encode(&stored())).unwrap(), stored());
        assert_eq!(encode(&stored()).len(), encoded_len(&stored()));
    }

    /// Found by fuzzing: such a file was read, and written again as another one.
    #[test]
    fn levels_out_of_order_are_damage() {
        let mut bytes = encode(&stored());
        let level_at = HEADER_BYTES + 48;
        bytes[level_at..level_at + 4].copy_from_slice(&2u32.to_le_bytes());
        assert!(decode(&bytes).is_err());
    }

    #[test]
    fn a_level_that_overlaps_itself_is_refused() {
        assert!(Version::new(vec![vec![], vec![sst(1, 0, 9), sst(2, 9, 20)]]).is_err());
        assert!(Version::new(vec![vec![sst(1, 0, 9), sst(2, 9, 20)]]).is_ok());
        assert!(Version::new(vec![vec![sst(1, 0, 9)], vec![sst(1, 0, 9)]]).is_err());
    }

    proptest! {
        #[test]
        fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            let _ = decode(&bytes);
        }

        #[test]
        fn changed_bytes_never_panic(at in 0usize..600, value in any::<u8>()) {
            let mut bytes = encode(&stored());
            let at = at % bytes.len();
            bytes[at] = value;
            if let Ok(found) = decode(&bytes) {
                prop_assert_eq!(encode(&found).len(), bytes.len());
            }
        }
    }
}
