//! Queries from text, one query per line.
//!
//! ```text
//! # comments and empty lines are skipped
//! 5 1 8
//! 2,8,9          spaces, tabs and commas separate
//! ```
//! Plain, gzip or zstd, told by the first bytes. MaxEmbed's text begins with a line
//! `base row_count query_count pin_count`, and its ids begin at `base`.
//!
//! A folder is a log in several files, in order of their names: what servers record.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};

use tierbed_core::{Error, Result};
use tierbed_io::lines::LineReader;

use super::QuerySource;

/// What MaxEmbed's first line says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Header {
    base: u32,
    row_count: u32,
    query_count: u64,
    pin_count: u64,
}

/// Reads text logs.
#[derive(Debug)]
pub struct TextQueries {
    lines: LineReader,
    /// Files still to come.
    rest: VecDeque<PathBuf>,
    /// Bytes of files that are read.
    before_bytes: u64,
    /// Bytes of all files.
    file_bytes: u64,
    header: Option<Header>,
    query_count: u64,
    pin_count: u64,
}

impl TextQueries {
    /// Opens a log of one query per line, ids from 0: a file, or a folder of files.
    ///
    /// # Errors
    /// `Io` when the file cannot be opened, `Invalid` for a folder without files.
    pub fn open(path: &Path) -> Result<Self> {
        let failed = |cause| Error::os("cannot read log file", cause).with("path", path.display());
        let mut rest = VecDeque::new();
        let mut file_bytes = 0;
        if path.is_dir() {
            for entry in std::fs::read_dir(path).map_err(failed)? {
                let entry = entry.map_err(failed)?;
                let is_whole = !entry.file_name().to_string_lossy().ends_with(".tmp");
                let found = entry.metadata().map_err(failed)?;
                if is_whole && found.is_file() {
                    file_bytes += found.len();
                    rest.push_back(entry.path());
                }
            }
            rest.make_contiguous().sort_unstable();
        } else {
            file_bytes = std::fs::metadata(path).map_err(failed)?.len();
            rest.push_back(path.to_path_buf());
        }
        let Some(first) = rest.pop_front() else {
            return Err(Error::invalid("folder holds no query log").with("path", path.display()));
        };
        let lines = LineReader::open(&first)?;
        let (before_bytes, header) = (0, None);
        Ok(Self { lines, rest, before_bytes, file_bytes, header, query_count: 0, pin_count: 0 })
    }

    /// Goes on with the next file that is still there; `false` after the last one. A server that
    /// records may remove its oldest ones at any time.
    fn next_file(&mut self) -> Result<bool> {
        while let Some(path) = self.rest.pop_front() {
            if path.exists() {
                self.before_bytes += self.lines.file_read_bytes();
                self.lines = LineReader::open(&path)?;
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Opens MaxEmbed's text: a first line of base, rows, queries and pins, then the queries.
    ///
    /// # Errors
    /// `Io` when the file cannot be opened, `Invalid` for another first line.
    pub fn open_with_header(path: &Path) -> Result<Self> {
        let mut source = Self::open(path)?;
        let line = source.lines.next_line()?.unwrap_or_default();
        let mut numbers = Vec::new();
        let bad = parse_row_ids(line, &mut numbers);
        let header = match (bad, numbers.as_slice()) {
            (None, &[base, row_count, query_count, pin_count]) => Header {
                base,
                row_count,
                query_count: u64::from(query_count),
                pin_count: u64::from(pin_count),
            },
            _ => {
                return Err(Error::invalid(
                    "first line of the log is not: base, rows, queries, pins",
                )
                .with("path", path.display())
                .with("line", 1)
                .with("remedy", "read it as text without such a line"))
            }
        };
        source.header = Some(header);
        Ok(source)
    }

    fn here(&self, error: Error) -> Error {
        error.with("path", self.lines.path().display()).with("line", self.lines.line_number())
    }

    /// Subtracts the base, and counts.
    fn accept(&mut self, rows: &mut [u32]) -> Result<()> {
        self.query_count += 1;
        self.pin_count += rows.len() as u64;
        let Some(header) = self.header else { return Ok(()) };
        for row in rows.iter_mut() {
            let Some(from_zero) = row.checked_sub(header.base) else {
                return Err(self.here(
                    Error::invalid("id is below the base of the first line")
                        .with("id", *row)
                        .with("base", header.base),
                ));
            };
            *row = from_zero;
        }
        match rows.iter().find(|row| **row >= header.row_count) {
            Some(row) => Err(self.here(
                Error::invalid("query asks for a row beyond the table")
                    .with("row", row)
                    .with("row_count", header.row_count),
            )),
            None => Ok(()),
        }
    }

    /// Compares what was read with the first line.
    fn check_end(&self) -> Result<()> {
        let Some(header) = self.header else { return Ok(()) };
        if (header.query_count, header.pin_count) == (self.query_count, self.pin_count) {
            return Ok(());
        }
        Err(self.here(
            Error::corruption("log has more or fewer queries than its first line says")
                .with("queries", self.query_count)
                .with("queries_promised", header.query_count)
                .with("pins", self.pin_count)
                .with("pins_promised", header.pin_count),
        ))
    }
}

impl QuerySource for TextQueries {
    fn next_query(&mut self, rows: &mut Vec<u32>) -> Result<bool> {
        loop {
            rows.clear();
            let Some(line) = self.lines.next_line()? else {
                if self.next_file()? {
                    continue;
                }
                self.check_end()?;
                return Ok(false);
            };
            if line.first() == Some(&b'#') {
                continue;
            }
            if let Some(found) = parse_row_ids(line, rows) {
                return Err(self.here(
                    Error::invalid("line is no query: row ids are whole numbers below 2^32 - 1")
                        .with("found", found),
                ));
            }
            if rows.is_empty() {
                continue;
            }
            self.accept(rows)?;
            return Ok(true);
        }
    }

    fn row_count(&self) -> Option<u32> {
        self.header.map(|header| header.row_count)
    }

    fn progress(&self) -> (u64, u64) {
        (self.before_bytes + self.lines.file_read_bytes(), self.file_bytes)
    }
}

/// Appends the numbers of `line`; returns the first word that is none.
fn parse_row_ids(line: &[u8], rows: &mut Vec<u32>) -> Option<String> {
    let words = line.split(|byte| matches!(byte, b' ' | b'\t' | b','));
    for word in words.filter(|word| !word.is_empty()) {
        let mut value = 0_u64;
        let is_short = word.len() <= 10;
        let is_number = is_short && word.iter().all(u8::is_ascii_digit);
        for digit in word.iter().take(10) {
            value = value * 10 + u64::from(digit.wrapping_sub(b'0'));
        }
        match u32::try_from(value) {
            Ok(row) if is_number && row < u32::MAX => rows.push(row),
            _ => {
                let (start, _) = word.split_at(word.len().min(20));
                return Some(String::from_utf8_lossy(start).into_owned());
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::query_log::{read_log, QueryLog, ReadOptions};

    fn save(text: &[u8]) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(text).unwrap();
        file
    }

    fn all(source: Result<TextQueries>) -> Result<QueryLog> {
        read_log(&mut source?, &ReadOptions::default(), &mut |_, _| Ok(()))
    }

    #[test]
    fn a_line_is_a_query_whatever_separates_its_rows() {
        let text = b"# recorded\n5 1 8\r\n\n2,8,\t9\n4294967294\n7 7";
        let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        packed.write_all(text).unwrap();
        for bytes in [text.to_vec(), packed.finish().unwrap()] {
            let file = save(&bytes);
            let log = all(TextQueries::open(file.path())).unwrap();
            let queries: Vec<&[u32]> = log.iter().collect();
            assert_eq!(queries, [&[5, 1, 8][..], &[2, 8, 9], &[4_294_967_294], &[7]]);
        }
    }

    #[test]
    fn what_is_no_query_is_named_with_its_line() {
        for (text, found) in [
            ("1 2\n3 x4\n", "x4"),
            ("1 2\n-3\n", "-3"),
            ("1 2\n4294967295\n", "4294967295"),
            ("1 2\n12345678901\n", "12345678901"),
            ("1 2\n1.5\n", "1.5"),
        ] {
            let file = save(text.as_bytes());
            let told = all(TextQueries::open(file.path())).unwrap_err().to_string();
            assert!(told.contains("line: 2") && told.contains(found), "{told}");
        }
        assert!(all(TextQueries::open(save(b"").path())).is_err());
    }

    #[test]
    fn the_header_of_maxembed_gives_base_and_rows() {
        let file = save(b"1 9 2 5\n1 2 9\n4 5\n");
        let log = all(TextQueries::open_with_header(file.path())).unwrap();
        assert_eq!(log.row_count(), 9);
        assert_eq!(log.iter().collect::<Vec<_>>(), [&[0, 1, 8][..], &[3, 4]]);
        for (text, told) in [
            (&b"1 9 3 5\n1 2 9\n4 5\n"[..], "more or fewer"),
            (b"1 9 2 5\n1 2 0\n4 5\n", "below the base"),
            (b"1 9 2 5\n1 2 10\n4 5\n", "beyond the table"),
            (b"1 2 3\n", "base, rows"),
            (b"", "base, rows"),
        ] {
            let file = save(text);
            let error = all(TextQueries::open_with_header(file.path())).unwrap_err();
            assert!(error.to_string().contains(told), "{error}");
        }
    }

    #[test]
    fn a_folder_is_a_log_in_order_of_its_files_names() {
        let folder = tempfile::tempdir().unwrap();
        let put = |name: &str, text: &str| {
            let mut file = std::fs::File::create(folder.path().join(name)).unwrap();
            file.write_all(text.as_bytes()).unwrap();
        };
        assert!(all(TextQueries::open(folder.path()))
            .unwrap_err()
            .to_string()
            .contains("no query"));
        put("queries-00000010.txt", "5\n");
        put("queries-00000009.txt", "1 2\n3\n");
        put("queries-00000011.txt.tmp", "torn");
        put("queries-00000012.txt", "6 7\n");
        let mut source = TextQueries::open(folder.path()).unwrap();
        let mut rows = Vec::new();
        assert!(source.next_query(&mut rows).unwrap());
        // A server that records makes room.
        std::fs::remove_file(folder.path().join("queries-00000010.txt")).unwrap();
        let mut found = vec![rows.clone()];
        while source.next_query(&mut rows).unwrap() {
            found.push(rows.clone());
        }
        assert_eq!(found, [vec![1, 2], vec![3], vec![6, 7]]);
    }
}
