//! Reader and writer of MaxEmbed's binary log.
//!
//! ```text
//! u64 query_count │ u64 row_count │ u64 offsets[query_count + 1] │ u32 rows[offsets[query_count]]
//! ```
//! Little-endian, no checksum; every number is checked against the others and the file's length.
//! Format: `docs/reference/formats/query-log.md`.

use std::fs::File;
use std::io::{BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use tierbed_core::{Error, Result};

use super::{QueryLog, QuerySource};

/// Bytes before the offsets.
const HEADER_BYTES: u64 = 16;

/// Reads binary logs; two readers walk through the file, one over offsets and one over rows.
#[derive(Debug)]
pub struct PackedQueries {
    path: PathBuf,
    offsets: BufReader<File>,
    rows: BufReader<File>,
    bytes: Vec<u8>,
    file_bytes: u64,
    query_count: u64,
    pin_count: u64,
    row_count: u32,
    next_query: u64,
    next_pin: u64,
}

impl PackedQueries {
    /// Opens the log at `path`.
    ///
    /// # Errors
    /// `Corruption` for a file that is shorter or longer than its numbers say; `Io`.
    pub fn open(path: &Path) -> Result<Self> {
        let failed =
            |cause| Error::os("cannot read binary query log", cause).with("path", path.display());
        let wrong = |what: &str| Error::corruption(what).with("path", path.display());
        let file = File::open(path).map_err(failed)?;
        let file_bytes = file.metadata().map_err(failed)?.len();
        let mut offsets = BufReader::with_capacity(64 << 10, file);
        if file_bytes < HEADER_BYTES + 8 {
            return Err(wrong("file is too short for a binary query log"));
        }
        let query_count = next_u64(&mut offsets).map_err(failed)?;
        let row_count = next_u64(&mut offsets).map_err(failed)?;
        let row_count = u32::try_from(row_count).ok().filter(|count| *count < u32::MAX);
        let row_count = row_count.ok_or_else(|| wrong("binary query log has too many rows"))?;
        let first_offset = next_u64(&mut offsets).map_err(failed)?;
        let offset_bytes = query_count.checked_add(1).and_then(|count| count.checked_mul(8));
        let rows_at = offset_bytes.and_then(|bytes| bytes.checked_add(HEADER_BYTES));
        let pin_bytes = rows_at.and_then(|at| file_bytes.checked_sub(at));
        let (Some(rows_at), Some(pin_bytes), 0) = (rows_at, pin_bytes, first_offset) else {
            return Err(wrong("binary query log is cut short, or is none")
                .with("query_count", query_count)
                .with("file_bytes", file_bytes));
        };
        if pin_bytes % 4 != 0 {
            return Err(wrong("binary query log does not end with a whole row id"));
        }
        let mut rows = File::open(path).map_err(failed)?;
        rows.seek(SeekFrom::Start(rows_at)).map_err(failed)?;
        Ok(Self {
            path: path.to_path_buf(),
            offsets,
            rows: BufReader::with_capacity(256 << 10, rows),
            bytes: Vec::new(),
            file_bytes,
            query_count,
            pin_count: pin_bytes / 4,
            row_count,
            next_query: 0,
            next_pin: 0,
        })
    }

    fn wrong(&self, what: &str) -> Error {
        Error::corruption(what)
            .with("path", self.path.display())
            .with("query", self.next_query)
            .with("pin_count", self.pin_count)
    }

    fn failed(&self, cause: std::io::Error) -> Error {
        Error::os("cannot read binary query log", cause).with("path", self.path.display())
    }
}

impl QuerySource for PackedQueries {
    fn next_query(&mut self, rows: &mut Vec<u32>) -> Result<bool> {
        rows.clear();
        if self.next_query == self.query_count {
            if self.next_pin != self.pin_count {
                return Err(self.wrong("binary query log has rows behind its last query"));
            }
            return Ok(false);
        }
        let end = next_u64(&mut self.offsets).map_err(|cause| self.failed(cause))?;
        if end < self.next_pin || end > self.pin_count {
            return Err(self.wrong("offsets of the binary query log are not ascending"));
        }
        let mut left = end - self.next_pin;
        while left > 0 {
            // In pieces, so that a damaged offset does not ask for all memory at once.
            let piece = left.min(1 << 16);
            self.bytes.resize(piece as usize * 4, 0);
            self.rows.read_exact(&mut self.bytes).map_err(|cause| {
                Error::os("cannot read binary query log", cause).with("path", self.path.display())
            })?;
            rows.extend(self.bytes.as_chunks::<4>().0.iter().map(|id| u32::from_le_bytes(*id)));
            left -= piece;
        }
        if let Some(row) = rows.iter().find(|row| **row >= self.row_count) {
            let error = self.wrong("query asks for a row beyond the table");
            return Err(error.with("row", row).with("row_count", self.row_count));
        }
        self.next_pin = end;
        self.next_query += 1;
        Ok(true)
    }

    fn row_count(&self) -> Option<u32> {
        Some(self.row_count)
    }

    fn progress(&self) -> (u64, u64) {
        let done = HEADER_BYTES + 8 * (self.next_query + 1) + 4 * self.next_pin;
        (done.min(self.file_bytes), self.file_bytes)
    }
}

fn next_u64(source: &mut impl Read) -> std::io::Result<u64> {
    let mut bytes = [0; 8];
    source.read_exact(&mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}

/// Writes `log` as a binary log at `path`.
///
/// # Errors
/// `Io` and `NoSpace` from the disk.
pub fn write_packed(log: &QueryLog, path: &Path) -> Result<()> {
    let write = || -> std::io::Result<()> {
        let mut file = BufWriter::with_capacity(256 << 10, File::create(path)?);
        put_packed(log, &mut file)?;
        file.flush()
    };
    write().map_err(|cause| {
        Error::os("cannot write binary query log", cause).with("path", path.display())
    })
}

/// Returns `log` as the bytes of a binary log.
#[must_use]
pub fn encode_packed(log: &QueryLog) -> Vec<u8> {
    let mut bytes = Vec::new();
    // Memory takes all that is written.
    let _ = put_packed(log, &mut bytes);
    bytes
}

fn put_packed(log: &QueryLog, out: &mut impl Write) -> std::io::Result<()> {
    let (offsets, rows) = log.as_parts();
    out.write_all(&(log.query_count() as u64).to_le_bytes())?;
    out.write_all(&u64::from(log.row_count()).to_le_bytes())?;
    for offset in offsets {
        out.write_all(&offset.to_le_bytes())?;
    }
    for row in rows {
        out.write_all(&row.to_le_bytes())?;
    }
    Ok(())
}

/// Reads the bytes of a binary log.
///
/// # Errors
/// `Corruption` for bytes that are no binary log, or not all of one.
pub fn decode_packed(bytes: &[u8]) -> Result<QueryLog> {
    let wrong = || Error::corruption("these bytes are no binary query log");
    let (words, _) = bytes.as_chunks::<8>();
    let word = |at: usize| words.get(at).map(|word| u64::from_le_bytes(*word));
    let count = |at: usize| word(at).and_then(|count| usize::try_from(count).ok());
    let (query_count, row_count) = (count(0).ok_or_else(wrong)?, word(1).ok_or_else(wrong)?);
    let row_count = u32::try_from(row_count).ok().filter(|count| *count < u32::MAX);
    let mut builder = QueryLog::builder(row_count.ok_or_else(wrong)?);
    let rows_at = query_count.checked_add(3).and_then(|words| words.checked_mul(8));
    let rows = rows_at.and_then(|at| bytes.get(at..)).ok_or_else(wrong)?;
    let (rows, []) = rows.as_chunks::<4>() else { return Err(wrong()) };
    let mut query = Vec::new();
    let mut end = count(2).filter(|&first| first == 0).ok_or_else(wrong)?;
    for at in 0..query_count {
        let begin = std::mem::replace(&mut end, count(at + 3).ok_or_else(wrong)?);
        query.clear();
        let found = rows.get(begin..end).ok_or_else(wrong)?;
        query.extend(found.iter().map(|row| u32::from_le_bytes(*row)));
        builder.push(&query)?;
    }
    if end != rows.len() {
        return Err(wrong());
    }
    Ok(builder.finish())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::query_log::{read_log, ReadOptions};

    fn read(bytes: &[u8]) -> Result<QueryLog> {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(bytes).unwrap();
        let mut source = PackedQueries::open(file.path())?;
        read_log(&mut source, &ReadOptions::default(), &mut |_, _| Ok(()))
    }

    fn bytes_of(log: &QueryLog) -> Vec<u8> {
        let file = tempfile::NamedTempFile::new().unwrap();
        write_packed(log, file.path()).unwrap();
        std::fs::read(file.path()).unwrap()
    }

    #[test]
    fn the_bytes_are_those_of_the_drawing() {
        let log = QueryLog::from_queries(9, [&[5, 1][..], &[8]]).unwrap();
        let words = [2_u64, 9, 0, 2, 3];
        let mut expected: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        expected.extend([5_u32, 1, 8].iter().flat_map(|row| row.to_le_bytes()));
        assert_eq!(bytes_of(&log), expected);
        assert_eq!(read(&expected).unwrap(), log);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn what_was_written_is_read_again(
            queries in proptest::collection::vec(
                proptest::collection::hash_set(0_u32..50, 0..8), 1..40)
        ) {
            let queries: Vec<Vec<u32>> =
                queries.into_iter().map(|query| query.into_iter().collect()).collect();
            let log = QueryLog::from_queries(50, &queries).unwrap();
            prop_assert_eq!(encode_packed(&log), bytes_of(&log));
            prop_assert_eq!(&decode_packed(&bytes_of(&log)).unwrap(), &log);
            prop_assert_eq!(read(&bytes_of(&log)).unwrap(), log);
        }

        #[test]
        fn damaged_bytes_are_an_error_or_another_log(
            at in 0_usize..64, value in any::<u8>(), cut in 0_usize..64
        ) {
            let log = QueryLog::from_queries(9, [&[5, 1][..], &[8], &[2, 3, 4]]).unwrap();
            let mut bytes = bytes_of(&log);
            let at = at % bytes.len();
            bytes[at] = value;
            bytes.truncate(bytes.len() - cut % bytes.len());
            let _ = decode_packed(&bytes);
            if let Ok(read) = read(&bytes) {
                let (_, rows) = read.as_parts();
                prop_assert!(rows.iter().all(|row| *row < read.row_count()));
            }
        }
    }
}
