//! A file read through the page cache, by calls: what a memory map offers, safely.
//!
//! Touching a map ends the process with `SIGBUS` when the file was cut short or the disk refuses a
//! page, and no check beforehand holds: the file may be cut between the check and the touch.
//! A call returns either as an error. It costs a system call a page.

use std::fs::File;
use std::io::ErrorKind as OsErrorKind;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use rustix::fs::Advice;
use tierbed_core::{Error, Result};

use super::file::open_error;
use super::{past_the_end, Device};

/// A read-only file whose pages the operating system caches.
#[derive(Debug)]
pub struct CachedDevice {
    name: String,
    file: File,
}

impl CachedDevice {
    /// Opens the file at `path`.
    ///
    /// # Errors
    ///
    /// `Invalid` when there is no such file, `Io` otherwise.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let file = File::open(path).map_err(|cause| open_error(path, cause, "cannot open file"))?;
        // Our reads are scattered; reading ahead would fill memory with neighbours.
        let _advice_only = rustix::fs::fadvise(&file, 0, None, Advice::Random);
        Ok(Self { name: path.display().to_string(), file })
    }

    fn refuse_write(&self) -> Error {
        Error::unsupported("a file read through the page cache is read-only")
            .with("path", &self.name)
            .with("remedy", "open the file as a FileDevice")
    }
}

impl Device for CachedDevice {
    fn name(&self) -> &str {
        &self.name
    }

    fn len_bytes(&self) -> Result<u64> {
        let stat = self.file.metadata().map_err(|cause| {
            Error::os("cannot read file length", cause).with("path", &self.name)
        })?;
        Ok(stat.len())
    }

    fn set_len(&self, _len_bytes: u64) -> Result<()> {
        Err(self.refuse_write())
    }

    fn read_at(&self, offset_bytes: u64, out: &mut [u8]) -> Result<()> {
        let len_bytes = out.len();
        self.file.read_exact_at(out, offset_bytes).map_err(|cause| match cause.kind() {
            OsErrorKind::UnexpectedEof => past_the_end(&self.name, offset_bytes, len_bytes),
            _ => Error::os("cannot read", cause)
                .with("path", &self.name)
                .with("offset_bytes", offset_bytes)
                .with("len_bytes", len_bytes),
        })
    }

    fn write_at(&self, _offset_bytes: u64, _bytes: &[u8]) -> Result<()> {
        Err(self.refuse_write())
    }

    fn sync(&self) -> Result<()> {
        Ok(())
    }

    fn allocated_bytes(&self) -> Result<u64> {
        let stat = self
            .file
            .metadata()
            .map_err(|cause| Error::os("cannot read file size", cause).with("path", &self.name))?;
        Ok(stat.blocks() * 512)
    }
}
