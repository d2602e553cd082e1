//! Line reader of text files, plain or packed, with a resumable position.
//!
//! [`LineReader`] reads one file: plain, gzip (also of several members) or zstd (also of several
//! frames), told apart by their first bytes, never by their name. It holds one block at a time,
//! whatever the size of the file, and knows the number and the byte offset of every line.

#![expect(clippy::indexing_slicing, reason = "start and end lie in the block, in this order")]

use std::fs::File;
use std::io::{BufReader, ErrorKind as IoErrorKind, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

use tierbed_core::{Error, Result};

/// Bytes of decompressed text held at a time.
const BLOCK_BYTES: usize = 256 << 10;
/// Longest line accepted: real lines are below 1 KiB, so this is a wrong file, not a long line.
const LINE_BYTES_MAX: usize = 1 << 20;

/// How a file is packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Packing {
    /// Not at all.
    Plain,
    /// RFC 1952.
    Gzip,
    /// RFC 8878.
    Zstd,
}

impl Packing {
    /// Tells the packing by the first bytes of a file.
    #[must_use]
    pub fn of(first_bytes: &[u8]) -> Self {
        match first_bytes {
            [0x1f, 0x8b, ..] => Self::Gzip,
            [0x28, 0xb5, 0x2f, 0xfd, ..] => Self::Zstd,
            // A zstd file may begin with a skippable frame.
            [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => Self::Zstd,
            _ => Self::Plain,
        }
    }
}

/// Counts the bytes taken from the file, for progress: the size on disk is what is known.
struct CountingFile {
    file: File,
    read_bytes: Arc<AtomicU64>,
}

impl Read for CountingFile {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let read = self.file.read(buffer)?;
        self.read_bytes.fetch_add(read as u64, Ordering::Relaxed);
        Ok(read)
    }
}

/// Reads the lines of one file in bounded memory.
pub struct LineReader {
    path: PathBuf,
    packing: Packing,
    source: Box<dyn Read + Send>,
    file_read_bytes: Arc<AtomicU64>,
    block: Vec<u8>,
    start: usize,
    end: usize,
    is_at_end: bool,
    offset_bytes: u64,
    line_number: u64,
}

impl std::fmt::Debug for LineReader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LineReader")
            .field("path", &self.path)
            .field("packing", &self.packing)
            .field("offset_bytes", &self.offset_bytes)
            .field("line_number", &self.line_number)
            .finish_non_exhaustive()
    }
}

impl LineReader {
    /// Opens `path` at its first line.
    ///
    /// # Errors
    /// `Io` when the file cannot be opened or read.
    pub fn open(path: &Path) -> Result<Self> {
        Self::open_at(path, 0, 0)
    }

    /// Opens `path` at the line that begins at `offset_bytes` of the unpacked text, after
    /// `line_number` lines. Plain files seek; packed ones unpack and drop what is before.
    ///
    /// # Errors
    /// `Io` when the file cannot be opened or read; `Corruption` when it ends before the offset.
    pub fn open_at(path: &Path, offset_bytes: u64, line_number: u64) -> Result<Self> {
        let failed = |error| Error::os("cannot read log file", error).with("path", path.display());
        let mut file = File::open(path).map_err(failed)?;
        let mut first_bytes = Vec::with_capacity(4);
        file.by_ref().take(4).read_to_end(&mut first_bytes).map_err(failed)?;
        let packing = Packing::of(&first_bytes);
        let start_bytes = if packing == Packing::Plain { offset_bytes } else { 0 };
        file.seek(SeekFrom::Start(start_bytes)).map_err(failed)?;
        let file_read_bytes = Arc::new(AtomicU64::new(start_bytes));
        let file = CountingFile { file, read_bytes: Arc::clone(&file_read_bytes) };
        let source: Box<dyn Read + Send> = match packing {
            Packing::Plain => Box::new(file),
            Packing::Gzip => {
                let packed = BufReader::with_capacity(64 << 10, file);
                Box::new(flate2::bufread::MultiGzDecoder::new(packed))
            }
            Packing::Zstd => Box::new(zstd::Decoder::new(file).map_err(failed)?),
        };
        let mut reader = Self {
            path: path.to_path_buf(),
            packing,
            source,
            file_read_bytes,
            block: vec![0; BLOCK_BYTES],
            start: 0,
            end: 0,
            is_at_end: false,
            offset_bytes: start_bytes,
            line_number,
        };
        if packing != Packing::Plain {
            reader.drop_bytes(offset_bytes)?;
        }
        Ok(reader)
    }

    fn drop_bytes(&mut self, mut left_bytes: u64) -> Result<()> {
        while left_bytes > 0 {
            if self.start == self.end && !self.fill()? {
                return Err(Error::corruption("log file ends before the position to resume at")
                    .with("path", self.path.display())
                    .with("missing_bytes", left_bytes)
                    .with("remedy", "resume with the files the position was taken from"));
            }
            let held = self.end - self.start;
            let step = held.min(usize::try_from(left_bytes).unwrap_or(usize::MAX));
            self.start += step;
            self.offset_bytes += step as u64;
            left_bytes -= step as u64;
        }
        Ok(())
    }

    /// Returns the file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns how the file is packed.
    #[must_use]
    pub fn packing(&self) -> Packing {
        self.packing
    }

    /// Returns how many lines were handed out: the 1-based number of the line last returned.
    #[must_use]
    pub fn line_number(&self) -> u64 {
        self.line_number
    }

    /// Returns where the next line begins in the unpacked text.
    #[must_use]
    pub fn offset_bytes(&self) -> u64 {
        self.offset_bytes
    }

    /// Returns how much of the file, as it is on disk, was taken in.
    #[must_use]
    pub fn file_read_bytes(&self) -> u64 {
        self.file_read_bytes.load(Ordering::Relaxed)
    }

    /// Returns the next line without its end (`\n` or `\r\n`), `None` after the last. A last line
    /// without an end counts as a line.
    ///
    /// # Errors
    /// `Io` when reading fails, `Corruption` when unpacking does, `Invalid` for a line above 1 MiB.
    pub fn next_line(&mut self) -> Result<Option<&[u8]>> {
        let mut searched = 0;
        let (length, consumed) = loop {
            let held = &self.block[self.start..self.end];
            if let Some(at) = memchr::memchr(b'\n', &held[searched..]) {
                break (searched + at, searched + at + 1);
            }
            searched = held.len();
            if searched > LINE_BYTES_MAX {
                return Err(Error::invalid("log line is longer than 1 MiB")
                    .with("path", self.path.display())
                    .with("line", self.line_number + 1)
                    .with("remedy", "check that the file is a text log of the stated format"));
            }
            if !self.fill()? {
                if searched == 0 {
                    return Ok(None);
                }
                break (searched, searched);
            }
        };
        let begin = self.start;
        self.start += consumed;
        self.offset_bytes += consumed as u64;
        self.line_number += 1;
        let line = &self.block[begin..begin + length];
        Ok(Some(line.strip_suffix(b"\r").unwrap_or(line)))
    }

    /// Brings more bytes behind those held; tells whether there were any.
    fn fill(&mut self) -> Result<bool> {
        if self.is_at_end {
            return Ok(false);
        }
        if self.start > 0 {
            self.block.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        if self.end == self.block.len() {
            self.block.resize(self.block.len() * 2, 0);
        }
        let room = &mut self.block[self.end..];
        let read = loop {
            match self.source.read(room) {
                Err(error) if error.kind() == IoErrorKind::Interrupted => {}
                other => break other.map_err(|error| self.unreadable(error))?,
            }
        };
        self.end += read;
        self.is_at_end = read == 0;
        Ok(read > 0)
    }

    fn unreadable(&self, error: std::io::Error) -> Error {
        let is_damaged = self.packing != Packing::Plain && error.raw_os_error().is_none();
        let result = if is_damaged {
            let packing = if self.packing == Packing::Gzip { "gzip" } else { "zstd" };
            Error::corruption(format!("log file is damaged or cut short: bad {packing} data"))
                .with("cause", error)
        } else {
            Error::os("cannot read log file", error)
        };
        result.with("path", self.path.display()).with("after_line", self.line_number)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn lines(path: &Path) -> Result<Vec<String>> {
        let mut reader = LineReader::open(path)?;
        let mut lines = Vec::new();
        while let Some(line) = reader.next_line()? {
            lines.push(String::from_utf8(line.to_vec()).unwrap());
        }
        Ok(lines)
    }

    fn gzip(text: &[u8]) -> Vec<u8> {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(text).unwrap();
        encoder.finish().unwrap()
    }

    fn save(folder: &Path, name: &str, bytes: &[u8]) -> PathBuf {
        let path = folder.join(name);
        File::create(&path).unwrap().write_all(bytes).unwrap();
        path
    }

    #[test]
    fn a_packed_file_that_became_shorter_is_read_on_when_it_is_brought_back() {
        let folder = tempfile::tempdir().unwrap();
        let whole = gzip(b"one\ntwo\nthree\n");
        let path = save(folder.path(), "log.gz", &gzip(b"one\n"));
        let error = LineReader::open_at(&path, 8, 2).err().unwrap();
        assert!(error.to_string().contains("files the position was taken from"), "{error}");
        save(folder.path(), "log.gz", &whole);
        let mut reader = LineReader::open_at(&path, 8, 2).unwrap();
        assert_eq!(reader.next_line().unwrap().unwrap(), b"three");
    }

    #[test]
    fn packing_is_told_by_the_first_bytes_not_the_name() {
        let folder = tempfile::tempdir().unwrap();
        let text = b"one\r\ntwo\n\nthree";
        let members = [gzip(b"one\r\ntw"), gzip(b"o\n\nthree")].concat();
        let frames = [
            zstd::encode_all(&b"one\r\ntw"[..], 1).unwrap(),
            zstd::encode_all(&b"o\n\nthree"[..], 1).unwrap(),
        ]
        .concat();
        let files =
            [(text.to_vec(), Packing::Plain), (members, Packing::Gzip), (frames, Packing::Zstd)];
        for (bytes, packing) in files {
            let path = save(folder.path(), "log.gz", &bytes);
            assert_eq!(lines(&path).unwrap(), ["one", "two", "", "three"]);
            assert_eq!(LineReader::open(&path).unwrap().packing(), packing);
        }
    }

    #[test]
    fn every_line_can_be_opened_at() {
        let folder = tempfile::tempdir().unwrap();
        let text: String = (0..30_000).map(|at| format!("line {at}\n")).collect();
        let plain = save(folder.path(), "plain", text.as_bytes());
        let packed = save(folder.path(), "packed", &gzip(text.as_bytes()));
        for path in [plain, packed] {
            let mut reader = LineReader::open(&path).unwrap();
            for _ in 0..25_000 {
                reader.next_line().unwrap().unwrap();
            }
            let (offset, number) = (reader.offset_bytes(), reader.line_number());
            let mut again = LineReader::open_at(&path, offset, number).unwrap();
            while let Some(expected) = reader.next_line().unwrap().map(<[u8]>::to_vec) {
                assert_eq!(again.next_line().unwrap().unwrap(), expected);
                assert_eq!(again.line_number(), reader.line_number());
            }
            assert!(again.next_line().unwrap().is_none());
        }
    }

    #[test]
    fn damage_names_the_file_and_the_line() {
        let folder = tempfile::tempdir().unwrap();
        let text: String = (0..200_000).map(|at| format!("line {at}\n")).collect();
        for mut packed in [gzip(text.as_bytes()), zstd::encode_all(text.as_bytes(), 1).unwrap()] {
            packed.truncate(packed.len() / 2);
            let path = save(folder.path(), "cut", &packed);
            let error = lines(&path).unwrap_err();
            assert_eq!(error.kind(), tierbed_core::ErrorKind::Corruption, "{error}");
            assert!(error.to_string().contains("after_line"), "{error}");
        }
        let error = lines(&folder.path().join("absent")).unwrap_err();
        assert_eq!(error.kind(), tierbed_core::ErrorKind::Io);
        let endless = save(folder.path(), "endless", &vec![b'x'; 3 << 20]);
        assert!(lines(&endless).unwrap_err().to_string().contains("line: 1"));
    }
}
