//! Format of a plan file. Normative text: `docs/reference/formats/plan.md`.

use std::sync::Arc;

use tierbed_core::checksum::crc32c;
use tierbed_core::{Error, Result, TableId};
use tierbed_io::PAGE_BYTES;

use super::columns::Firsts;
use super::PlanShape;

pub(crate) const MAGIC: &[u8; 8] = b"TBplan1\n";
pub(crate) const VERSION: u32 = 2;
pub(crate) const BLOCK_MAGIC: &[u8; 4] = b"TBpw";
/// Longest key: source fingerprint and options.
pub(crate) const KEY_BYTES_MAX: usize = 2048;
/// Where the key starts in the header.
const KEY_AT: usize = 128;
/// Bytes before the per-table words of a window block.
pub(crate) const BLOCK_HEAD_BYTES: usize = 16;
/// Bytes per window in the directory, without the entries of its tables.
const WINDOW_META_BYTES: u64 = 28;
/// Bytes per table in a window block.
pub(crate) const BLOCK_TABLE_BYTES: usize = 16;
/// Bytes per batch in a window block.
pub(crate) const BLOCK_BATCH_BYTES: usize = 12;

/// The first page of a plan.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Header {
    pub(crate) directory_offset_bytes: u64,
    pub(crate) directory_bytes: u64,
    pub(crate) directory_crc32c: u32,
    pub(crate) window_count: u32,
    pub(crate) batch_count: u64,
    pub(crate) index_count: u64,
    pub(crate) table_count: u32,
    pub(crate) feature_count: u32,
    pub(crate) block_bytes_max: u32,
    pub(crate) batch_indices_max: u32,
    /// Distinct rows of all windows; 0 in plans that were not counted.
    pub(crate) row_count: u64,
    pub(crate) key: String,
}

/// Where a window lies and what it holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct WindowMeta {
    pub(crate) offset_bytes: u64,
    pub(crate) len_bytes: u32,
    /// Bytes of its first part, which holds the entries; the batches follow.
    pub(crate) entries_bytes: u32,
    pub(crate) batch_count: u32,
    /// CRC32C of the entries.
    pub(crate) entries_crc32c: u32,
    /// CRC32C of the batches.
    pub(crate) batches_crc32c: u32,
}

/// What follows the windows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Directory {
    pub(crate) shape: PlanShape,
    pub(crate) windows: Vec<WindowMeta>,
    /// Entries of each table in each window, `[K * T]`.
    pub(crate) counts: Vec<u32>,
    pub(crate) firsts: Arc<Firsts>,
}

pub(crate) fn damaged(what: &str) -> Error {
    Error::corruption(format!("plan {what}")).with(
        "remedy",
        "open the store anew and give lookahead the batches of this plan: it is made again",
    )
}

/// Takes little-endian numbers from the front of bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cursor<'a>(pub(crate) &'a [u8]);

impl<'a> Cursor<'a> {
    pub(crate) fn take<const N: usize>(&mut self) -> Result<[u8; N]> {
        let (head, rest) =
            self.0.split_first_chunk::<N>().ok_or_else(|| damaged("ends too early"))?;
        self.0 = rest;
        Ok(*head)
    }

    pub(crate) fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.take()?))
    }

    pub(crate) fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.take()?))
    }
}

impl Header {
    #[expect(clippy::indexing_slicing, reason = "a page was filled")]
    pub(crate) fn encode(&self) -> Vec<u8> {
        assert!(self.key.len() <= KEY_BYTES_MAX, "a key of {} bytes", self.key.len());
        let mut page = Vec::with_capacity(PAGE_BYTES);
        page.extend(MAGIC);
        page.extend([0; 4]);
        page.extend(VERSION.to_le_bytes());
        page.extend(self.directory_offset_bytes.to_le_bytes());
        page.extend(self.directory_bytes.to_le_bytes());
        page.extend(self.directory_crc32c.to_le_bytes());
        page.extend(self.window_count.to_le_bytes());
        page.extend(self.batch_count.to_le_bytes());
        page.extend(self.index_count.to_le_bytes());
        page.extend(self.table_count.to_le_bytes());
        page.extend(self.feature_count.to_le_bytes());
        page.extend(self.block_bytes_max.to_le_bytes());
        page.extend(self.batch_indices_max.to_le_bytes());
        page.extend((self.key.len() as u32).to_le_bytes());
        page.extend(self.row_count.to_le_bytes());
        page.resize(KEY_AT, 0);
        page.extend(self.key.as_bytes());
        page.resize(PAGE_BYTES, 0);
        let crc = crc32c(&page[12..]);
        page[8..12].copy_from_slice(&crc.to_le_bytes());
        page
    }

    /// Reads a header page; `None` when it was never finished.
    pub(crate) fn decode(page: &[u8]) -> Result<Option<Self>> {
        let mut cursor = Cursor(page);
        let magic: [u8; 8] = cursor.take()?;
        if magic == [0; 8] {
            return Ok(None);
        }
        if &magic != MAGIC {
            return Err(Error::invalid("file is no plan of this format")
                .with("remedy", "name a plan, or make one under another name"));
        }
        let crc = cursor.u32()?;
        // Behind the checksum: all that it is of.
        if page.len() != PAGE_BYTES || crc != crc32c(cursor.0) {
            return Err(damaged("header checksum mismatch"));
        }
        let version = cursor.u32()?;
        if version != VERSION {
            return Err(Error::invalid("plan format version is not supported")
                .with("supported", VERSION)
                .with("found", version)
                .with("remedy", "make the plan again"));
        }
        let mut header = Self {
            directory_offset_bytes: cursor.u64()?,
            directory_bytes: cursor.u64()?,
            directory_crc32c: cursor.u32()?,
            window_count: cursor.u32()?,
            batch_count: cursor.u64()?,
            index_count: cursor.u64()?,
            table_count: cursor.u32()?,
            feature_count: cursor.u32()?,
            block_bytes_max: cursor.u32()?,
            batch_indices_max: cursor.u32()?,
            row_count: 0,
            key: String::new(),
        };
        let key_bytes = cursor.u32()? as usize;
        header.row_count = cursor.u64()?;
        let is_damaged = || damaged("key is damaged");
        let key = page.get(KEY_AT..).and_then(|from_key| from_key.get(..key_bytes));
        let key = key.filter(|_| key_bytes <= KEY_BYTES_MAX).ok_or_else(is_damaged)?;
        header.key = String::from_utf8(key.to_vec()).map_err(|_| is_damaged())?;
        Ok(Some(header))
    }
}

impl Directory {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let cells = self.windows.len() * self.shape.row_counts.len();
        assert_eq!(self.counts.len(), cells, "each table of each window has a count");
        let mut bytes = Vec::new();
        for table in &self.shape.feature_tables {
            bytes.extend(table.0.to_le_bytes());
        }
        for (rows, record_bytes) in self.shape.row_counts.iter().zip(&self.shape.record_bytes) {
            bytes.extend(rows.to_le_bytes());
            bytes.extend(record_bytes.to_le_bytes());
        }
        for window in &self.windows {
            bytes.extend(window.offset_bytes.to_le_bytes());
            for word in [
                window.len_bytes,
                window.entries_bytes,
                window.batch_count,
                window.entries_crc32c,
                window.batches_crc32c,
            ] {
                bytes.extend(word.to_le_bytes());
            }
        }
        for count in &self.counts {
            bytes.extend(count.to_le_bytes());
        }
        bytes
    }

    /// Returns the bytes of the directory that `header` announces.
    pub(crate) fn expected_bytes(header: &Header) -> u64 {
        let (tables, features) = (u64::from(header.table_count), u64::from(header.feature_count));
        // Counts that no file has room for stay larger than any file.
        let windows = u64::from(header.window_count).saturating_mul(WINDOW_META_BYTES + 4 * tables);
        windows.saturating_add(4 * features + 12 * tables)
    }

    pub(crate) fn decode(header: &Header, bytes: &[u8]) -> Result<Self> {
        if bytes.len() as u64 != Self::expected_bytes(header)
            || crc32c(bytes) != header.directory_crc32c
        {
            return Err(damaged("directory checksum mismatch"));
        }
        let mut cursor = Cursor(bytes);
        let mut shape = PlanShape {
            feature_tables: Vec::new(),
            row_counts: Vec::new(),
            record_bytes: Vec::new(),
        };
        for _ in 0..header.feature_count {
            shape.feature_tables.push(TableId(cursor.u32()?));
        }
        for _ in 0..header.table_count {
            shape.row_counts.push(cursor.u64()?);
            shape.record_bytes.push(cursor.u32()?);
        }
        let mut windows = Vec::new();
        for _ in 0..header.window_count {
            let window = WindowMeta {
                offset_bytes: cursor.u64()?,
                len_bytes: cursor.u32()?,
                entries_bytes: cursor.u32()?,
                batch_count: cursor.u32()?,
                entries_crc32c: cursor.u32()?,
                batches_crc32c: cursor.u32()?,
            };
            if window.len_bytes > header.block_bytes_max || window.entries_bytes > window.len_bytes
            {
                return Err(damaged("window is longer than the longest"));
            }
            windows.push(window);
        }
        let counts: Result<Vec<u32>> = (0..u64::from(header.window_count)
            * u64::from(header.table_count))
            .map(|_| cursor.u32())
            .collect();
        let counts = counts?;
        let firsts = Arc::new(Firsts::new(&counts, shape.row_counts.len()));
        let directory = Self { shape, windows, counts, firsts };
        if directory.windows.is_empty() || directory.shape.row_counts.is_empty() {
            return Err(damaged("has no window or no table"));
        }
        if directory.shape.feature_tables.iter().any(|table| table.0 >= header.table_count) {
            return Err(damaged("names an unknown table"));
        }
        Ok(directory)
    }
}
