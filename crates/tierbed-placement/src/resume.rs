//! Resume files of a long build: results of finished steps that outlive the process.
//!
//! ```text
//! magic │ crc32c │ identity │ numbers
//! ```
//!
//! All is u32, little-endian, but for the magic's 8 bytes; the checksum covers what follows it. The
//! *identity* names the log, the options and the step: numbers are those of this step or none. A
//! file appears whole or not at all, and may be deleted at any time: then its step is done again.
//! A damaged one is an error that names it, because a disk that lies should not go unnoticed.
//! Format: `docs/reference/formats/placement.md`.

use std::fs::File;
use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use tierbed_core::checksum::{crc32c, crc32c_append};
use tierbed_core::{Error, Result};

const MAGIC: [u8; 8] = *b"TBkept_1";
/// Magic and checksum.
const PREFIX_BYTES: usize = 12;
/// Numbers that are summed up and written at once.
const PIECE: usize = 1 << 14;

/// A file for the result of one step of a build, or none, when nothing is kept.
#[derive(Debug)]
pub(crate) struct ResumeFile {
    path: Option<PathBuf>,
    identity: Vec<u32>,
}

impl ResumeFile {
    /// Names the file of a step: without a path nothing is kept.
    pub(crate) fn new(path: Option<PathBuf>, identity: Vec<u32>) -> Self {
        Self { path, identity }
    }

    /// Returns the kept numbers, or makes and keeps them.
    ///
    /// # Errors
    ///
    /// Those of [`read`](Self::read), [`write`](Self::write) and `make`.
    pub(crate) fn get_or_make(&self, make: impl FnOnce() -> Result<Vec<u32>>) -> Result<Vec<u32>> {
        if let Some(numbers) = self.read()? {
            return Ok(numbers);
        }
        let numbers = make()?;
        self.write(&numbers)?;
        Ok(numbers)
    }

    /// Reads the numbers; `None` without a file.
    ///
    /// # Errors
    ///
    /// `Corruption` for a damaged file, `Invalid` for one of another identity, `Io`; all name it.
    pub(crate) fn read(&self) -> Result<Option<Vec<u32>>> {
        let Some(path) = &self.path else { return Ok(None) };
        match std::fs::read(path) {
            Ok(bytes) => self.decode(&bytes).map(Some).map_err(|error| named(path, error)),
            Err(cause) if cause.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(cause) => Err(named(path, Error::os("cannot read what a build kept", cause))),
        }
    }

    fn decode(&self, bytes: &[u8]) -> Result<Vec<u32>> {
        let (prefix, rest) = bytes.split_at_checked(PREFIX_BYTES).ok_or_else(damaged)?;
        let (magic, checksum) = prefix.split_at_checked(MAGIC.len()).ok_or_else(damaged)?;
        let (numbers, tail) = rest.as_chunks::<4>();
        if magic != MAGIC || checksum != crc32c(rest).to_le_bytes() || !tail.is_empty() {
            return Err(damaged());
        }
        let mut numbers = numbers.iter().map(|number| u32::from_le_bytes(*number));
        if !self.identity.iter().all(|&expected| numbers.next() == Some(expected)) {
            return Err(Error::invalid("what a build kept is of another log or other options")
                .with("remedy", "delete the file, or name another folder"));
        }
        Ok(numbers.collect())
    }

    /// Writes the numbers.
    ///
    /// # Errors
    ///
    /// `Io` and `NoSpace`, naming the file.
    pub(crate) fn write(&self, numbers: &[u32]) -> Result<()> {
        let Some(path) = &self.path else { return Ok(()) };
        let temporary = path.with_extension("tmp");
        let write = || -> std::io::Result<()> {
            if let Some(folder) = path.parent() {
                std::fs::create_dir_all(folder)?;
            }
            let mut file = BufWriter::new(File::create(&temporary)?);
            file.write_all(&[0; PREFIX_BYTES])?;
            let mut checksum = 0;
            let mut bytes = Vec::with_capacity(4 * PIECE);
            for piece in self.identity.chunks(PIECE).chain(numbers.chunks(PIECE)) {
                bytes.clear();
                bytes.extend(piece.iter().flat_map(|number| number.to_le_bytes()));
                checksum = crc32c_append(checksum, &bytes);
                file.write_all(&bytes)?;
            }
            file.seek(SeekFrom::Start(0))?;
            file.write_all(&MAGIC)?;
            file.write_all(&checksum.to_le_bytes())?;
            file.into_inner()?.sync_all()?;
            std::fs::rename(&temporary, path)
        };
        write().map_err(|cause| named(path, Error::os("cannot keep what a build did", cause)))
    }

    /// Returns the error for numbers that cannot be those that were written.
    pub(crate) fn damaged(&self) -> Error {
        self.path.as_deref().map_or_else(damaged, |path| named(path, damaged()))
    }
}

fn damaged() -> Error {
    Error::corruption("what a build kept is damaged")
        .with("remedy", "delete the file: its step is done again")
}

fn named(path: &Path, error: Error) -> Error {
    error.with("path", path.display())
}

/// Sums up numbers, for identities.
pub(crate) fn checksum_of(numbers: &[u32]) -> u32 {
    let mut bytes = Vec::with_capacity(4 * PIECE);
    numbers.chunks(PIECE).fold(0, |checksum, piece| {
        bytes.clear();
        bytes.extend(piece.iter().flat_map(|number| number.to_le_bytes()));
        crc32c_append(checksum, &bytes)
    })
}

/// Returns the low and the high half of a number.
pub(crate) fn halves(number: u64) -> [u32; 2] {
    [number as u32, (number >> 32) as u32]
}

/// Returns the number of two halves.
pub(crate) fn whole([low, high]: [u32; 2]) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

#[cfg(test)]
mod tests {
    use tierbed_core::ErrorKind;

    use super::*;

    #[test]
    fn numbers_come_back_and_are_made_once() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("kept").join("step");
        let file = ResumeFile::new(Some(path.clone()), vec![1, 2]);
        let numbers: Vec<u32> = (0..70_000).collect();
        assert_eq!(file.read().expect("no file"), None);
        assert_eq!(file.get_or_make(|| Ok(numbers.clone())).expect("space"), numbers);
        let again = file.get_or_make(|| Err(Error::invalid("made twice")));
        assert_eq!(again.expect("kept"), numbers);
        assert_eq!(whole(halves(7 << 40 | 3)), 7 << 40 | 3);
    }

    #[test]
    fn nothing_is_kept_without_a_path() {
        let file = ResumeFile::new(None, vec![1]);
        assert_eq!(file.get_or_make(|| Ok(vec![4])).expect("made"), [4]);
        assert_eq!(file.read().expect("nothing"), None);
    }

    #[test]
    fn damaged_files_and_those_of_something_else_are_told_by_name() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("step");
        let file = ResumeFile::new(Some(path.clone()), vec![1, 2]);
        file.write(&[5, 6, 7]).expect("space");
        let other = ResumeFile::new(Some(path.clone()), vec![1, 3]);
        assert_eq!(other.read().expect_err("another").kind(), ErrorKind::Invalid);
        let bytes = std::fs::read(&path).expect("written");
        let damage = |bytes: &[u8]| {
            File::create(&path).and_then(|mut file| file.write_all(bytes)).expect("space");
            let error = file.read().expect_err("damaged");
            assert_eq!(error.kind(), ErrorKind::Corruption);
            assert!(error.to_string().contains("step"), "{error}");
        };
        for at in 0..bytes.len() {
            let mut wrong = bytes.clone();
            wrong[at] ^= 1;
            damage(&wrong);
        }
        for len in 0..bytes.len() {
            damage(&bytes[..len]);
        }
        // The remedy of both.
        std::fs::remove_file(&path).expect("there");
        assert_eq!(file.get_or_make(|| Ok(vec![8])).expect("made"), [8]);
        assert_eq!(file.read().expect("whole"), Some(vec![8]));
    }
}
