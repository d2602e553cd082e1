//! The write-ahead log: rows written since the last flush.
//!
//! With `Durability::Step` every write is appended to a log segment before it enters the
//! memtable, and a commit appends one entry more and syncs, instead of flushing (`tail`). The
//! version names the segments and how much of each is committed; behind that only whole step
//! commits count. Little-endian; normative text: `docs/reference/formats/lsm.md`.
//!
//! | bytes of an entry | field |
//! |---|---|
//! | 0..4 | crc32c of all bytes from 4 to the end of the entry |
//! | 4..8 | bytes of the payload; bit 31: the entry is a step commit |
//! | 8..16 | segment id |
//! | 16..24 | entry number in the segment, from 0 |
//! | 24.. | rows: key u64, record; the table in the key tells the record's length. Or a commit |

#![expect(clippy::indexing_slicing, reason = "entries begin with a header, rows with a key")]

mod reader;
mod tail;

use std::sync::Arc;

use tierbed_core::checksum::crc32c;
use tierbed_core::{Budget, Error, Result, Schema};
use tierbed_io::{Device, Folder, OpenMode};

use crate::key::Key;
use crate::sst::{read_u32, read_u64};

use reader::LogReader;
pub(crate) use tail::{find_tail, StepCommit};

const HEADER_BYTES: usize = 24;
/// Set in the length of an entry that is a step commit.
const COMMIT_BIT: u32 = 1 << 31;

/// Number of a log segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct SegmentId(pub(crate) u64);

impl SegmentId {
    pub(crate) fn file_name(self) -> String {
        format!("{:06}.wal", self.0)
    }

    /// Returns the segment a file holds, if it is one.
    pub(crate) fn of_file(name: &str) -> Option<Self> {
        name.strip_suffix(".wal")?.parse().ok().map(Self)
    }
}

/// A segment as a version names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SegmentMeta {
    pub(crate) id: SegmentId,
    pub(crate) len_bytes: u64,
    pub(crate) entry_count: u64,
}

/// A segment that can be appended to.
#[derive(Debug)]
pub(crate) struct Segment {
    pub(crate) meta: SegmentMeta,
    device: Arc<dyn Device>,
    is_dirty: bool,
}

impl Segment {
    /// Starts segment `id`.
    ///
    /// # Errors
    /// `Io`, `NoSpace`.
    pub(crate) fn create(folder: &dyn Folder, id: SegmentId) -> Result<Self> {
        let device = folder.open(&id.file_name(), OpenMode::Create)?;
        device.set_len(0)?;
        let meta = SegmentMeta { id, len_bytes: 0, entry_count: 0 };
        Ok(Self { meta, device, is_dirty: false })
    }

    /// Appends one entry; `entry` comes from [`Entry`]. After an error nothing was appended.
    ///
    /// # Errors
    /// `Io`, `NoSpace`.
    pub(crate) fn append(&mut self, entry: &mut Entry) -> Result<()> {
        self.append_payload(entry, 0)
    }

    /// Appends a step commit; `entry` holds its payload. After an error nothing was appended.
    ///
    /// # Errors
    /// `Io`, `NoSpace`.
    pub(crate) fn append_commit(&mut self, entry: &mut Entry) -> Result<()> {
        self.append_payload(entry, COMMIT_BIT)
    }

    fn append_payload(&mut self, entry: &mut Entry, kind: u32) -> Result<()> {
        let bytes = entry.seal(self.meta.id, self.meta.entry_count, kind);
        self.device.write_at(self.meta.len_bytes, bytes)?;
        self.is_dirty = true;
        self.meta.len_bytes += bytes.len() as u64;
        self.meta.entry_count += 1;
        Ok(())
    }

    /// Makes everything appended survive power loss.
    ///
    /// # Errors
    /// `Io`, `NoSpace`; how much of it survives is unknown then.
    pub(crate) fn sync(&mut self) -> Result<()> {
        if self.is_dirty {
            self.device.sync()?;
            self.is_dirty = false;
        }
        Ok(())
    }
}

/// Rows of one entry, being gathered.
#[derive(Debug, Default)]
pub(crate) struct Entry {
    bytes: Vec<u8>,
}

impl Entry {
    /// Forgets the rows.
    pub(crate) fn clear(&mut self) {
        self.bytes.clear();
        self.bytes.resize(HEADER_BYTES, 0);
    }

    /// Adds a row.
    pub(crate) fn push(&mut self, key: Key, record: &[u8]) {
        self.bytes.extend(key.get().to_le_bytes());
        self.bytes.extend_from_slice(record);
    }

    /// Adds bytes of a commit.
    pub(crate) fn extend(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    fn seal(&mut self, segment: SegmentId, number: u64, kind: u32) -> &[u8] {
        assert!(self.bytes.len() >= HEADER_BYTES, "an entry is cleared before it is filled");
        let payload_bytes = self.bytes.len() - HEADER_BYTES;
        assert!(payload_bytes < COMMIT_BIT as usize, "an entry of {payload_bytes} bytes");
        let payload_bytes = payload_bytes as u32;
        let header = (payload_bytes | kind)
            .to_le_bytes()
            .into_iter()
            .chain(segment.0.to_le_bytes())
            .chain(number.to_le_bytes());
        for (place, byte) in self.bytes[4..HEADER_BYTES].iter_mut().zip(header) {
            *place = byte;
        }
        let crc = crc32c(&self.bytes[4..]);
        self.bytes[..4].copy_from_slice(&crc.to_le_bytes());
        &self.bytes
    }
}

/// Reads the committed part of segment `meta` and hands every row to `sink`, oldest first.
///
/// # Errors
/// `Corruption` when the segment is missing, short or damaged, `Invalid` when the budget does not
/// hold its longest entry for a moment; errors of the sink pass through.
pub(crate) fn replay(
    folder: &dyn Folder,
    schema: &Schema,
    meta: SegmentMeta,
    budget: &Budget,
    sink: &mut dyn FnMut(Key, &[u8]) -> Result<()>,
) -> Result<()> {
    let file = meta.id.file_name();
    let short = || {
        Error::corruption("log segment is missing or shorter than committed")
            .with("file", &file)
            .with("remedy", "restore the store's folder from a copy")
    };
    let mut log = LogReader::open(folder, meta.id, budget)?.ok_or_else(short)?;
    if !log.cut(meta.len_bytes) {
        return Err(short());
    }
    let (mut at, mut number) = (0, 0);
    while at < log.len_bytes() {
        let damaged =
            || Error::corruption("log entry is damaged").with("entry", number).with("file", &file);
        let entry = log.entry(at, number)?.ok_or_else(damaged)?;
        let decoded = decode_rows(entry, schema, number, sink);
        decoded.map_err(|error| error.with("file", &file))?;
        at += entry.len_bytes as u64;
        number += 1;
    }
    check_count(number, meta).map_err(|error| error.with("file", &file))
}

/// One entry as it lies in a segment.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RawEntry<'a> {
    is_commit: bool,
    payload: &'a [u8],
    /// Bytes of the whole entry.
    len_bytes: usize,
}

/// Reads the entry that `bytes` begin with; `None` when it is not whole, or not entry `number`
/// of `segment`.
fn first_entry(bytes: &[u8], segment: SegmentId, number: u64) -> Option<RawEntry<'_>> {
    let length = read_u32(bytes, 4)?;
    let len_bytes = HEADER_BYTES.checked_add((length & !COMMIT_BIT) as usize)?;
    let entry = bytes.get(..len_bytes)?;
    let is_named = read_u64(entry, 8)? == segment.0 && read_u64(entry, 16)? == number;
    if !is_named || read_u32(entry, 0) != entry.get(4..).map(crc32c) {
        return None;
    }
    let payload = entry.get(HEADER_BYTES..)?;
    Some(RawEntry { is_commit: length & COMMIT_BIT != 0, payload, len_bytes })
}

fn check_count(number: u64, meta: SegmentMeta) -> Result<()> {
    if number == meta.entry_count {
        return Ok(());
    }
    Err(Error::corruption("log segment has another number of entries than committed")
        .with("expected", meta.entry_count)
        .with("found", number))
}

// Hands the rows of entry `number` to `sink`.
fn decode_rows(
    entry: RawEntry<'_>,
    schema: &Schema,
    number: u64,
    sink: &mut dyn FnMut(Key, &[u8]) -> Result<()>,
) -> Result<()> {
    let damaged = || Error::corruption("log entry is damaged").with("entry", number);
    let mut rows = if entry.is_commit { &[] } else { entry.payload };
    while !rows.is_empty() {
        let key = read_u64(rows, 0).and_then(Key::from_stored).ok_or_else(damaged)?;
        let table = schema.table(key.row().table).map_err(|_| damaged())?;
        let end = 8 + table.record_bytes();
        let (row, later) = rows.split_at_checked(end).ok_or_else(damaged)?;
        if key.row().row.0 >= table.row_count {
            return Err(damaged());
        }
        sink(key, &row[8..])?;
        rows = later;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tierbed_core::{ErrorKind, RowId, RowKey, TableId, TableSchema};
    use tierbed_io::MemoryFolder;

    fn schema() -> Schema {
        Schema::new(vec![TableSchema::plain("t", 100, 1)]).unwrap()
    }

    fn key(row: u64) -> Key {
        Key::cold(RowKey::new(TableId(0), RowId(row)))
    }

    fn written(folder: &MemoryFolder) -> SegmentMeta {
        let mut segment = Segment::create(folder, SegmentId(4)).unwrap();
        let mut entry = Entry::default();
        for row in 0..3 {
            entry.clear();
            entry.push(key(row), &[row as u8; 8]);
            entry.push(key(row + 50), &[9; 8]);
            segment.append(&mut entry).unwrap();
        }
        segment.sync().unwrap();
        segment.meta
    }

    #[test]
    fn replays_what_is_committed_and_nothing_behind_it() {
        let folder = MemoryFolder::default();
        let meta = written(&folder);
        let mut rows = Vec::new();
        let mut sink = |key: Key, record: &[u8]| {
            rows.push((key.row().row.0, record[0]));
            Ok(())
        };
        let first_two = SegmentMeta { len_bytes: meta.len_bytes / 3 * 2, entry_count: 2, ..meta };
        replay(&folder, &schema(), first_two, &Budget::unlimited(), &mut sink).unwrap();
        assert_eq!(rows, [(0, 0), (50, 9), (1, 1), (51, 9)]);
    }

    #[test]
    fn a_short_missing_or_foreign_segment_is_corruption() {
        let folder = MemoryFolder::default();
        let meta = written(&folder);
        let wrong = [
            SegmentMeta { len_bytes: meta.len_bytes + 1, ..meta },
            SegmentMeta { len_bytes: meta.len_bytes - 1, ..meta },
            SegmentMeta { entry_count: 4, ..meta },
            SegmentMeta { id: SegmentId(5), ..meta },
        ];
        for meta in wrong {
            let budget = Budget::unlimited();
            let error = replay(&folder, &schema(), meta, &budget, &mut |_, _| Ok(())).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Corruption, "{meta:?}");
        }
    }

    proptest! {
        #[test]
        fn damaged_bytes_never_panic_and_are_noticed(bit in 0usize..3 * 56 * 8) {
            let folder = MemoryFolder::default();
            let meta = written(&folder);
            let mut bytes = folder.read("000004.wal").unwrap().unwrap();
            bytes[bit / 8] ^= 1 << (bit % 8);
            folder.write_durable("000004.wal", &bytes).unwrap();
            let budget = Budget::unlimited();
            let result = replay(&folder, &schema(), meta, &budget, &mut |_, _| Ok(()));
            prop_assert_eq!(result.unwrap_err().kind(), ErrorKind::Corruption);
        }

        #[test]
        fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let folder = MemoryFolder::default();
            folder.write_durable("000000.wal", &bytes).unwrap();
            let len_bytes = bytes.len() as u64;
            let meta = SegmentMeta { id: SegmentId(0), len_bytes, entry_count: 0 };
            let _ = replay(&folder, &schema(), meta, &Budget::unlimited(), &mut |_, _| Ok(()));
        }
    }
}
