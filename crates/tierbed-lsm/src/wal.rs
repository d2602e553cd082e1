//! What was written since the last flush, if memory is lost?
//!
//! With `Durability::Step` every write is appended to a log segment before it enters the
//! memtable, and a commit syncs the log instead of flushing. The version names the segments and
//! how much of each is committed; what lies behind that is not replayed. Little-endian;
//! normative text: `docs/formats/lsm.md`.
//!
//! | bytes of an entry | field |
//! |---|---|
//! | 0..4 | crc32c of all bytes from 4 to the end of the entry |
//! | 4..8 | bytes of the rows |
//! | 8..16 | segment id |
//! | 16..24 | entry number in the segment, from 0 |
//! | 24.. | rows: key u64, record; the table in the key tells the record's length |

use std::sync::Arc;

use tierbed_core::checksum::crc32c;
use tierbed_core::{Error, Result, Schema};
use tierbed_io::{Device, Folder, OpenMode};

use crate::key::Key;
use crate::sst::{read_u32, read_u64};

const HEADER_BYTES: usize = 24;

/// Number of a log segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct SegmentId(pub(crate) u64);

impl SegmentId {
    pub(crate) fn file_name(self) -> String {
        format!("{:06}.wal", self.0)
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
        let bytes = entry.seal(self.meta.id, self.meta.entry_count);
        self.device.write_at(self.meta.len_bytes, bytes)?;
        self.is_dirty = true;
        self.meta.len_bytes += bytes.len() as u64;
        self.meta.entry_count += 1;
        Ok(())
    }

    /// Makes everything appended survive power loss.
    ///
    /// # Errors
    /// `Io`, `NoSpace`; then nobody knows how much of it is there.
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

    fn seal(&mut self, segment: SegmentId, number: u64) -> &[u8] {
        let rows_bytes = self.bytes.len().saturating_sub(HEADER_BYTES) as u32;
        let header = rows_bytes
            .to_le_bytes()
            .into_iter()
            .chain(segment.0.to_le_bytes())
            .chain(number.to_le_bytes());
        for (place, byte) in self.bytes.iter_mut().skip(4).zip(header) {
            *place = byte;
        }
        let crc = self.bytes.get(4..).map_or(0, crc32c);
        for (place, byte) in self.bytes.iter_mut().zip(crc.to_le_bytes()) {
            *place = byte;
        }
        &self.bytes
    }
}

/// Reads the committed part of segment `meta` and hands every row to `sink`, oldest first.
///
/// # Errors
/// `Corruption` when the segment is missing, short or damaged; errors of the sink pass through.
pub(crate) fn replay(
    folder: &dyn Folder,
    schema: &Schema,
    meta: SegmentMeta,
    sink: &mut dyn FnMut(Key, &[u8]) -> Result<()>,
) -> Result<()> {
    let file = meta.id.file_name();
    let bytes = folder.read(&file)?;
    let len_bytes = usize::try_from(meta.len_bytes).unwrap_or(usize::MAX);
    let committed = bytes.as_deref().and_then(|bytes| bytes.get(..len_bytes));
    let committed = committed.ok_or_else(|| {
        Error::corruption("log segment is missing or shorter than committed")
            .with("file", &file)
            .with("remedy", "restore the store's folder from a copy")
    })?;
    decode_segment(committed, schema, meta, sink).map_err(|error| error.with("file", file))
}

/// Decodes the bytes of a segment.
///
/// # Errors
/// `Corruption` for anything a writer does not leave; errors of the sink pass through.
pub(crate) fn decode_segment(
    mut rest: &[u8],
    schema: &Schema,
    meta: SegmentMeta,
    sink: &mut dyn FnMut(Key, &[u8]) -> Result<()>,
) -> Result<()> {
    let mut number = 0;
    while !rest.is_empty() {
        let damaged = || Error::corruption("log entry is damaged").with("entry", number);
        let rows_bytes = read_u32(rest, 4).ok_or_else(damaged)? as usize;
        let entry_bytes = HEADER_BYTES.checked_add(rows_bytes).ok_or_else(damaged)?;
        let (entry, later) = rest.split_at_checked(entry_bytes).ok_or_else(damaged)?;
        let is_whole = read_u32(entry, 0) == entry.get(4..).map(crc32c);
        let is_named = read_u64(entry, 8) == Some(meta.id.0) && read_u64(entry, 16) == Some(number);
        if !is_whole || !is_named {
            return Err(damaged());
        }
        let mut rows = entry.get(HEADER_BYTES..).unwrap_or(&[]);
        while !rows.is_empty() {
            let key = read_u64(rows, 0).and_then(Key::from_stored).ok_or_else(damaged)?;
            let table = schema.table(key.row().table).map_err(|_| damaged())?;
            let end = 8 + table.record_bytes();
            let (row, later) = rows.split_at_checked(end).ok_or_else(damaged)?;
            if key.row().row.0 >= table.row_count {
                return Err(damaged());
            }
            sink(key, row.get(8..).unwrap_or(&[]))?;
            rows = later;
        }
        number += 1;
        rest = later;
    }
    if number != meta.entry_count {
        return Err(Error::corruption("log segment has another number of entries than committed")
            .with("expected", meta.entry_count)
            .with("found", number));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tierbed_core::{ErrorKind, InitSpec, OptimizerKind, RowId, RowKey, TableId, TableSchema};
    use tierbed_io::MemoryFolder;

    fn schema() -> Schema {
        Schema::new(vec![TableSchema {
            name: "t".into(),
            row_count: 100,
            dim: 1,
            optimizer: OptimizerKind::Sgd,
            state_init: 0.0,
            init: InitSpec::Constant { value: 0.0 },
            seed: 0,
        }])
        .unwrap()
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
        replay(&folder, &schema(), first_two, &mut sink).unwrap();
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
            let error = replay(&folder, &schema(), meta, &mut |_, _| Ok(())).unwrap_err();
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
            let result = decode_segment(&bytes, &schema(), meta, &mut |_, _| Ok(()));
            prop_assert_eq!(result.unwrap_err().kind(), ErrorKind::Corruption);
        }

        #[test]
        fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let meta = SegmentMeta { id: SegmentId(0), len_bytes: 0, entry_count: 0 };
            let _ = decode_segment(&bytes, &schema(), meta, &mut |_, _| Ok(()));
        }
    }
}
