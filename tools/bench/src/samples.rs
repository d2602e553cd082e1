//! Queries from samples: a line of a Criteo-shaped log asks for one row per column.
//!
//! ```text
//! label  13 numbers  26 tokens        tab-separated; the tokens of a line are its query
//! ```
//! Each column has rows of its own, numbered over all columns in the order in which they appear.
//! A missing token is a row too, as in training, once its column has had any token: columns that
//! are empty throughout are no features.

use std::collections::HashMap;
use std::path::Path;

use tierbed_core::{Error, Result};
use tierbed_io::lines::LineReader;
use tierbed_placement::QuerySource;

/// Columns before the tokens: the label and the numbers.
const COLUMNS_BEFORE: usize = 14;
/// Token columns of the layout.
const TOKEN_COLUMNS: usize = 26;

/// Reads samples in Criteo's layout as queries over one table of all columns' rows.
#[derive(Debug)]
pub struct SampleQueries {
    lines: LineReader,
    file_bytes: u64,
    /// Rows by token, of each column.
    columns: Vec<HashMap<Box<[u8]>, u32>>,
    /// Column of each row.
    column_of: Vec<u16>,
}

impl SampleQueries {
    /// Opens a log in Criteo's layout; plain, gzip or zstd.
    ///
    /// # Errors
    /// `Io` when the file cannot be opened.
    pub fn open(path: &Path) -> Result<Self> {
        let lines = LineReader::open(path)?;
        let file_bytes = std::fs::metadata(path)
            .map_err(|cause| Error::os("cannot read log file", cause).with("path", path.display()))?
            .len();
        let columns = vec![HashMap::new(); TOKEN_COLUMNS];
        Ok(Self { lines, file_bytes, columns, column_of: Vec::new() })
    }

    /// Returns the column of each row so far, numbered from 0, `[rows]`.
    #[must_use]
    pub fn column_of_rows(&self) -> &[u16] {
        &self.column_of
    }

    /// Tells whether the first line of the file is in this layout.
    ///
    /// # Errors
    /// `Io` when the file cannot be read.
    pub fn is_layout_of(path: &Path) -> Result<bool> {
        let mut lines = LineReader::open(path)?;
        let first = lines.next_line()?.unwrap_or_default();
        Ok(first.split(|&byte| byte == b'\t').count() == COLUMNS_BEFORE + TOKEN_COLUMNS)
    }
}

impl QuerySource for SampleQueries {
    fn next_query(&mut self, rows: &mut Vec<u32>) -> Result<bool> {
        rows.clear();
        let number = self.lines.line_number() + 1;
        let path = self.lines.path().to_owned();
        let Some(line) = self.lines.next_line()? else { return Ok(false) };
        let mut tokens = line.split(|&byte| byte == b'\t').skip(COLUMNS_BEFORE);
        for (at, column) in self.columns.iter_mut().enumerate() {
            let token = tokens.next().ok_or_else(|| {
                Error::invalid("line has fewer than 26 token columns")
                    .with("path", path.display())
                    .with("line", number)
            })?;
            if token.is_empty() && column.is_empty() {
                continue;
            }
            let row = match column.get(token) {
                Some(&row) => row,
                None => {
                    let row = self.column_of.len() as u32;
                    self.column_of.push(at as u16);
                    column.insert(token.into(), row);
                    row
                }
            };
            rows.push(row);
        }
        Ok(true)
    }

    fn row_count(&self) -> Option<u32> {
        None
    }

    fn progress(&self) -> (u64, u64) {
        (self.lines.file_read_bytes(), self.file_bytes)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use tierbed_placement::{read_log, ReadOptions};

    fn save(lines: &[&[&str]]) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        for tokens in lines {
            let numbers = "\t".repeat(COLUMNS_BEFORE);
            writeln!(file, "0{}{}", &numbers[..COLUMNS_BEFORE], tokens.join("\t")).unwrap();
        }
        file
    }

    fn line<'a>(first: &'a str, second: &'a str) -> Vec<&'a str> {
        let mut tokens = vec![""; TOKEN_COLUMNS];
        (tokens[0], tokens[25]) = (first, second);
        tokens
    }

    #[test]
    fn columns_have_rows_of_their_own_and_empty_ones_have_none() {
        let lines = [line("a", "a"), line("a", ""), line("b", "a"), line("", "")];
        let lines: Vec<&[&str]> = lines.iter().map(Vec::as_slice).collect();
        let file = save(&lines);
        assert!(SampleQueries::is_layout_of(file.path()).unwrap());
        let mut source = SampleQueries::open(file.path()).unwrap();
        let log = read_log(&mut source, &ReadOptions::default(), &mut |_, _| Ok(())).unwrap();
        let queries: Vec<&[u32]> = log.iter().collect();
        assert_eq!(queries, [[0, 1], [0, 2], [3, 1], [4, 2]]);
        assert_eq!(source.column_of_rows(), [0, 25, 25, 0, 0]);
    }

    #[test]
    fn a_short_line_is_named() {
        let file = save(&[&line("a", "b"), &["x", "y"]]);
        let mut source = SampleQueries::open(file.path()).unwrap();
        let mut rows = Vec::new();
        assert!(source.next_query(&mut rows).unwrap());
        let error = source.next_query(&mut rows).unwrap_err().to_string();
        assert!(error.contains("line: 2"), "{error}");
    }
}
