//! The log reader: lines to batches.
//!
//! A [`LogReader`] goes through a list of files in order, line by line, and fills batches whose
//! tokens a [`Vocabulary`] has turned into row ids; or it feeds the tokens to a
//! [`VocabularyBuilder`]. It holds one block of text and one batch. Its [`Position`] is where the
//! next sample begins, so a run can be resumed at exactly that sample.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tierbed_core::{Error, Result};

use crate::batch::SampleBatch;
use crate::layout::{BadLine, LogFormat, Parser, Sample};
use crate::vocabulary::{Vocabulary, VocabularyBuilder};
use tierbed_io::lines::LineReader;

/// What to do with a line that is not of the stated format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BadLines {
    /// Stop with an error naming file, line and what was found.
    Fail,
    /// Leave the line out and count it.
    Skip,
}

/// How to read a log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReaderOptions {
    /// Layout of the lines.
    pub format: LogFormat,
    /// Treatment of malformed lines.
    #[serde(default = "fail")]
    pub bad_lines: BadLines,
}

fn fail() -> BadLines {
    BadLines::Fail
}

/// Where a reader is: the next sample begins here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Position {
    /// Samples handed out or passed over.
    pub sample_count: u64,
    /// Index of the current file in the list.
    pub file_index: usize,
    /// Offset of the next line in that file's unpacked text.
    pub offset_bytes: u64,
    /// Lines of that file already read.
    pub line_number: u64,
    /// Malformed lines left out so far, in all files.
    pub skipped_line_count: u64,
}

/// How much of the files was read, in bytes as they are on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Bytes read.
    pub done_bytes: u64,
    /// Bytes of all files.
    pub total_bytes: u64,
}

/// Reads a list of log files as one stream of samples.
#[derive(Debug)]
pub struct LogReader {
    paths: Vec<PathBuf>,
    file_sizes_bytes: Vec<u64>,
    options: ReaderOptions,
    parser: Parser,
    lines: Option<LineReader>,
    position: Position,
    sample: Sample,
    fingerprints: Vec<u64>,
}

impl LogReader {
    /// Opens the files in the order given; the first is the oldest.
    ///
    /// # Errors
    /// `Invalid` when there is no file or the first has a wrong header; `Io` when one is missing.
    pub fn open(paths: Vec<PathBuf>, options: ReaderOptions) -> Result<Self> {
        let Some(first) = paths.first() else {
            return Err(Error::invalid("no log file given")
                .with("remedy", "name at least one file, or check the pattern"));
        };
        let file_sizes_bytes =
            paths.iter().map(|path| file_size_bytes(path)).collect::<Result<_>>()?;
        let parser = match options.format {
            LogFormat::Criteo => Parser::criteo(),
            LogFormat::Avazu => avazu_parser(first)?,
        };
        let sample = Sample::new(parser.shape());
        Ok(Self {
            paths,
            file_sizes_bytes,
            options,
            parser,
            lines: None,
            position: Position::default(),
            sample,
            fingerprints: Vec::new(),
        })
    }

    /// Returns the parser: feature names and shape of the samples.
    #[must_use]
    pub fn parser(&self) -> &Parser {
        &self.parser
    }

    /// Returns where the next sample begins.
    #[must_use]
    pub fn position(&self) -> Position {
        self.position
    }

    /// Returns how much was read.
    #[must_use]
    pub fn progress(&self) -> Progress {
        let before: u64 = self.file_sizes_bytes.iter().take(self.position.file_index).sum();
        let here = self.lines.as_ref().map_or(0, LineReader::file_read_bytes);
        let total_bytes = self.file_sizes_bytes.iter().sum();
        Progress { done_bytes: (before + here).min(total_bytes), total_bytes }
    }

    /// Goes to a position taken from a reader of the same files.
    ///
    /// # Errors
    /// `Invalid` when there is no such file; `Corruption` when the file ends before the offset.
    pub fn seek(&mut self, position: Position) -> Result<()> {
        self.lines = match self.paths.get(position.file_index) {
            None if position.file_index == self.paths.len() => None,
            None => {
                return Err(Error::invalid("position is beyond the list of log files")
                    .with("file_index", position.file_index)
                    .with("files", self.paths.len()))
            }
            Some(path) if position.line_number > 0 => {
                Some(LineReader::open_at(path, position.offset_bytes, position.line_number)?)
            }
            Some(_) => None,
        };
        self.position = position;
        Ok(())
    }

    /// Fills `batch` with the next samples, at most `sample_count_max`; fewer only at the end of
    /// the log. Returns how many.
    ///
    /// # Errors
    /// `Invalid` for a malformed line (unless skipped) or a vocabulary of other features; errors
    /// of the files. The position then is behind the last good sample of no batch: seek before
    /// reading on.
    pub fn next_batch(
        &mut self,
        vocabulary: &Vocabulary,
        sample_count_max: usize,
        batch: &mut SampleBatch,
    ) -> Result<usize> {
        let shape = self.parser.shape();
        if vocabulary.feature_count() != shape.feature_count || batch.shape() != shape {
            return Err(Error::invalid("vocabulary or batch does not fit the log's features")
                .with("expected", shape.feature_count)
                .with("found", vocabulary.feature_count())
                .with("remedy", "use the vocabulary built from logs of this format"));
        }
        self.fingerprints.clear();
        batch.label.clear();
        batch.dense.clear();
        while batch.label.len() < sample_count_max && self.advance()? {
            batch.label.push(self.sample.label);
            batch.dense.extend_from_slice(&self.sample.dense);
            self.fingerprints.extend_from_slice(&self.sample.fingerprints);
        }
        let sample_count = batch.label.len();
        batch.resize(sample_count);
        if sample_count > 0 {
            for (feature, ids) in batch.values.chunks_exact_mut(sample_count).enumerate() {
                let column = self.fingerprints.iter().skip(feature).step_by(shape.feature_count);
                vocabulary.look_up(feature, column.copied(), ids);
            }
        }
        Ok(sample_count)
    }

    /// Counts the tokens of the next samples, at most `sample_count_max`. Returns how many
    /// samples were taken; 0 at the end of the log.
    ///
    /// # Errors
    /// As [`Self::next_batch`], and those of the builder's scratch files.
    pub fn count_tokens(
        &mut self,
        builder: &mut VocabularyBuilder,
        sample_count_max: usize,
    ) -> Result<usize> {
        let mut sample_count = 0;
        while sample_count < sample_count_max && self.advance()? {
            builder.add_sample(&self.sample.fingerprints)?;
            sample_count += 1;
        }
        Ok(sample_count)
    }

    /// Passes over samples without parsing them (or parsing, where bad lines are skipped). Returns
    /// how many were there.
    ///
    /// # Errors
    /// As [`Self::next_batch`]; where bad lines fail, they fail when they are read.
    pub fn skip(&mut self, sample_count_max: u64) -> Result<u64> {
        let mut sample_count = 0;
        if self.options.bad_lines == BadLines::Skip {
            while sample_count < sample_count_max && self.advance()? {
                sample_count += 1;
            }
            return Ok(sample_count);
        }
        while sample_count < sample_count_max && self.open_lines()? {
            let Some(lines) = &mut self.lines else { break };
            if lines.next_line()?.is_some() {
                sample_count += 1;
                self.position.sample_count += 1;
            } else {
                self.next_file();
            }
        }
        self.note_line();
        Ok(sample_count)
    }

    /// Parses the next good line into `self.sample`; `false` at the end of the log.
    fn advance(&mut self) -> Result<bool> {
        while self.open_lines()? {
            let Some(lines) = &mut self.lines else { break };
            let Some(line) = lines.next_line()? else {
                self.next_file();
                continue;
            };
            let parsed = self.parser.parse(line, &mut self.sample);
            match parsed {
                Ok(()) => self.position.sample_count += 1,
                Err(bad) if self.options.bad_lines == BadLines::Fail => {
                    return Err(self.refuse(&bad))
                }
                Err(_) => self.position.skipped_line_count += 1,
            }
            self.note_line();
            if parsed.is_ok() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn note_line(&mut self) {
        if let Some(lines) = &self.lines {
            self.position.offset_bytes = lines.offset_bytes();
            self.position.line_number = lines.line_number();
        }
    }

    fn next_file(&mut self) {
        self.lines = None;
        self.position.file_index += 1;
        self.position.offset_bytes = 0;
        self.position.line_number = 0;
    }

    /// Makes sure a file is open; `false` when there is none left.
    fn open_lines(&mut self) -> Result<bool> {
        if self.lines.is_some() {
            return Ok(true);
        }
        // A position behind the last file is the end of the log.
        let path = match self.paths.get(self.position.file_index) {
            Some(path) => path,
            None => return Ok(false),
        };
        let mut lines = LineReader::open(path)?;
        if self.options.format == LogFormat::Avazu {
            check_header(&mut lines, &self.parser)?;
        }
        self.lines = Some(lines);
        self.note_line();
        Ok(true)
    }

    fn refuse(&self, bad: &BadLine) -> Error {
        let (path, line) = self
            .lines
            .as_ref()
            .map_or((Path::new(""), 0), |lines| (lines.path(), lines.line_number()));
        let mut error = Error::invalid("malformed log line")
            .with("path", path.display())
            .with("line", line)
            .with("expected", bad.expected);
        if bad.field > 0 {
            error = error.with("field", bad.field);
        }
        error
            .with("found", format_args!("{:?}", bad.found))
            .with("remedy", "repair the line, or set bad_lines to skip")
    }
}

fn file_size_bytes(path: &Path) -> Result<u64> {
    let failed = |error| Error::os("cannot open log file", error).with("path", path.display());
    let metadata = std::fs::metadata(path).map_err(failed)?;
    if metadata.is_dir() {
        return Err(Error::invalid("log path is a folder, not a file")
            .with("path", path.display())
            .with("remedy", "name the files inside, in time order"));
    }
    Ok(metadata.len())
}

fn avazu_parser(path: &Path) -> Result<Parser> {
    let mut lines = LineReader::open(path)?;
    let parsed = match lines.next_line()? {
        Some(header) => Parser::avazu(header),
        None => Err(Error::invalid("log file is empty where a header was expected")),
    };
    parsed.map_err(|error| error.with("path", path.display()))
}

fn check_header(lines: &mut LineReader, expected: &Parser) -> Result<()> {
    let found = match lines.next_line()? {
        Some(header) => Parser::avazu(header)?,
        None => return Ok(()),
    };
    if found.has_columns_of(expected) {
        return Ok(());
    }
    Err(Error::invalid("log file has another header than the first one")
        .with("path", lines.path().display())
        .with("expected", expected.feature_names().join(","))
        .with("found", found.feature_names().join(",")))
}

#[cfg(test)]
mod tests;
