//! A file device: direct I/O where the file system allows it.
//!
//! `O_DIRECT` keeps the operating system from holding a second copy of our pages outside the
//! memory budget. Where the file system refuses it, reads go through the page cache and are
//! dropped from it right after (`posix_fadvise`).
//!
//! Two descriptors of one file: the direct one takes aligned calls, the buffered one the odd
//! ones (a log's tail, a header). Linux keeps the two coherent for calls that follow each other:
//! a direct call first writes back and drops the cached pages of its range. It does not for
//! calls that meet: a direct write that finds its page dirtied by an odd write in the meantime
//! marks the file as failed, and the next sync returns `EIO` (observed on ext4). Hence the rule
//! that odd writes overlap whole pages.

use std::fs::{File, OpenOptions};
use std::io::ErrorKind as OsErrorKind;
use std::num::NonZeroU64;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::result::Result as StdResult;

use rustix::fs::{Advice, AtFlags, FallocateFlags, OFlags, StatxFlags};
use tierbed_core::{Error, Result};

use super::{past_the_end, Device};
use crate::buffer::PAGE_BYTES;
use crate::folder::OpenMode;

/// A file on a mounted file system.
#[derive(Debug)]
pub struct FileDevice {
    path: PathBuf,
    name: String,
    buffered: File,
    direct: StdResult<Direct, String>,
}

/// The way past the page cache.
#[derive(Debug)]
struct Direct {
    file: File,
    align_bytes: usize,
}

impl FileDevice {
    /// Opens the file at `path`, direct if the file system takes it.
    ///
    /// # Errors
    ///
    /// `Invalid` when there is no such file and `mode` does not create it, `Io` otherwise.
    pub fn open(path: impl AsRef<Path>, mode: OpenMode) -> Result<Self> {
        Self::open_with(path.as_ref(), mode, true)
    }

    /// Opens the file at `path` through the page cache, as where `O_DIRECT` is refused.
    ///
    /// # Errors
    ///
    /// As [`FileDevice::open`].
    pub fn open_buffered(path: impl AsRef<Path>, mode: OpenMode) -> Result<Self> {
        Self::open_with(path.as_ref(), mode, false)
    }

    fn open_with(path: &Path, mode: OpenMode, want_direct: bool) -> Result<Self> {
        let buffered = options(mode)
            .open(path)
            .map_err(|cause| open_error(path, cause, "cannot open file"))?;
        let direct = if want_direct {
            open_direct(path, mode, &buffered)
        } else {
            // Our reads are scattered; reading ahead would fill memory with neighbours.
            let _advice_only = rustix::fs::fadvise(&buffered, 0, None, Advice::Random);
            Err("asked for buffered I/O".to_owned())
        };
        Ok(Self { path: path.to_owned(), name: path.display().to_string(), buffered, direct })
    }

    /// Returns the file's path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns whether aligned calls go past the page cache.
    #[must_use]
    pub fn is_direct(&self) -> bool {
        self.direct.is_ok()
    }

    /// Returns why calls go through the page cache; `None` when they do not.
    #[must_use]
    pub fn buffered_reason(&self) -> Option<&str> {
        self.direct.as_ref().err().map(String::as_str)
    }

    /// Chooses the descriptor for one call.
    fn file_for(&self, offset_bytes: u64, bytes: &[u8]) -> (&File, bool) {
        match &self.direct {
            Ok(direct) if direct.takes(offset_bytes, bytes) => (&direct.file, true),
            _ => (&self.buffered, false),
        }
    }

    fn os_error(&self, what: &str, offset_bytes: u64, len: usize, cause: std::io::Error) -> Error {
        Error::os(what, cause)
            .with("path", &self.name)
            .with("offset_bytes", offset_bytes)
            .with("len_bytes", len)
    }

    /// Asks the kernel to forget clean cached pages that touch the range (0 length: to the end).
    fn forget_cached(&self, offset_bytes: u64, len_bytes: usize) {
        let start = offset_bytes - offset_bytes % PAGE_BYTES as u64;
        let end = (offset_bytes + len_bytes as u64).next_multiple_of(PAGE_BYTES as u64);
        let len = if len_bytes == 0 { None } else { NonZeroU64::new(end - start) };
        let _advice_only = rustix::fs::fadvise(&self.buffered, start, len, Advice::DontNeed);
    }
}

impl Direct {
    fn takes(&self, offset_bytes: u64, bytes: &[u8]) -> bool {
        let align = self.align_bytes;
        !bytes.is_empty()
            && offset_bytes.is_multiple_of(align as u64)
            && bytes.len().is_multiple_of(align)
            && (bytes.as_ptr() as usize).is_multiple_of(align)
    }
}

fn options(mode: OpenMode) -> OpenOptions {
    let mut options = OpenOptions::new();
    options.read(true);
    match mode {
        OpenMode::ReadOnly => {}
        OpenMode::ReadWrite => {
            options.write(true);
        }
        OpenMode::Create => {
            options.write(true).create(true).truncate(false);
        }
    }
    options
}

pub(crate) fn open_error(path: &Path, cause: std::io::Error, what: &str) -> Error {
    if cause.kind() == OsErrorKind::NotFound {
        return Error::invalid("no such file").with("path", path.display());
    }
    Error::os(what, cause).with("path", path.display())
}

/// Opens a second, direct descriptor of the file that `buffered` has open.
fn open_direct(path: &Path, mode: OpenMode, buffered: &File) -> StdResult<Direct, String> {
    let flags = i32::try_from(OFlags::DIRECT.bits()).unwrap_or_default();
    let file = options(mode)
        .custom_flags(flags)
        .open(path)
        .map_err(|cause| format!("open with O_DIRECT: {cause}"))?;
    let (ours, theirs) = (buffered.metadata(), file.metadata());
    let same =
        matches!((&ours, &theirs), (Ok(a), Ok(b)) if a.dev() == b.dev() && a.ino() == b.ino());
    if !same {
        return Err("file was replaced while it was being opened".to_owned());
    }
    Ok(Direct { align_bytes: direct_align_bytes(&file)?, file })
}

/// Asks the kernel which alignment direct calls need. Kernels before 6.1 and some file systems
/// do not say; a page is then right for every disk.
fn direct_align_bytes(file: &File) -> StdResult<usize, String> {
    let Ok(stat) = rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN) else {
        return Ok(PAGE_BYTES);
    };
    if stat.stx_mask & StatxFlags::DIOALIGN.bits() == 0 {
        return Ok(PAGE_BYTES);
    }
    match stat.stx_dio_offset_align.max(stat.stx_dio_mem_align) as usize {
        0 => Err("file system takes no direct I/O on this file".to_owned()),
        align if align <= PAGE_BYTES && align.is_power_of_two() => Ok(align),
        align => Err(format!("direct I/O needs an alignment of {align} bytes")),
    }
}

impl Device for FileDevice {
    fn name(&self) -> &str {
        &self.name
    }

    fn len_bytes(&self) -> Result<u64> {
        let stat = self.buffered.metadata();
        Ok(stat.map_err(|cause| self.os_error("cannot read file length", 0, 0, cause))?.len())
    }

    fn set_len(&self, len_bytes: u64) -> Result<()> {
        self.buffered
            .set_len(len_bytes)
            .map_err(|cause| self.os_error("cannot set file length", len_bytes, 0, cause))
    }

    fn read_at(&self, offset_bytes: u64, out: &mut [u8]) -> Result<()> {
        let len_bytes = out.len();
        let (mut rest, mut at_bytes) = (out, offset_bytes);
        while !rest.is_empty() {
            // A short read may leave an odd rest, which then goes through the buffered file.
            let (file, is_direct) = self.file_for(at_bytes, rest);
            match file.read_at(rest, at_bytes) {
                Ok(0) => return Err(past_the_end(&self.name, offset_bytes, len_bytes)),
                Ok(read) => {
                    if !is_direct {
                        self.forget_cached(at_bytes, read);
                    }
                    at_bytes += read as u64;
                    rest = std::mem::take(&mut rest).split_at_mut(read).1;
                }
                Err(cause) if cause.kind() == OsErrorKind::Interrupted => {}
                Err(cause) => {
                    return Err(self.os_error("cannot read", offset_bytes, len_bytes, cause))
                }
            }
        }
        Ok(())
    }

    fn write_at(&self, offset_bytes: u64, bytes: &[u8]) -> Result<()> {
        let (mut rest, mut at_bytes) = (bytes, offset_bytes);
        while !rest.is_empty() {
            let (file, _) = self.file_for(at_bytes, rest);
            match file.write_at(rest, at_bytes) {
                Ok(0) => {
                    let cause = std::io::Error::from(OsErrorKind::WriteZero);
                    return Err(self.os_error("cannot write", offset_bytes, bytes.len(), cause));
                }
                Ok(written) => {
                    at_bytes += written as u64;
                    rest = rest.split_at(written).1;
                }
                Err(cause) if cause.kind() == OsErrorKind::Interrupted => {}
                Err(cause) => {
                    return Err(self.os_error("cannot write", offset_bytes, bytes.len(), cause))
                }
            }
        }
        Ok(())
    }

    fn sync(&self) -> Result<()> {
        self.buffered.sync_data().map_err(|cause| self.os_error("cannot sync", 0, 0, cause))?;
        self.forget_cached(0, 0);
        Ok(())
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(match &self.direct {
            Ok(direct) => direct.file.as_fd(),
            Err(_) => self.buffered.as_fd(),
        })
    }

    fn fd_align_bytes(&self) -> usize {
        self.direct.as_ref().map_or(1, |direct| direct.align_bytes)
    }

    fn drop_cached(&self, offset_bytes: u64, len_bytes: u32) {
        if !self.is_direct() && len_bytes > 0 {
            self.forget_cached(offset_bytes, len_bytes as usize);
        }
    }

    fn preallocate(&self, offset_bytes: u64, len_bytes: u64) -> bool {
        let flags = FallocateFlags::empty();
        rustix::fs::fallocate(&self.buffered, flags, offset_bytes, len_bytes).is_ok()
    }

    fn discard(&self, offset_bytes: u64, len_bytes: u64) -> bool {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&self.buffered, flags, offset_bytes, len_bytes).is_ok()
    }

    fn allocated_bytes(&self) -> Result<u64> {
        let stat = self.buffered.metadata();
        Ok(stat.map_err(|cause| self.os_error("cannot read file size", 0, 0, cause))?.blocks()
            * 512)
    }
}
