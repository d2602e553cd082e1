//! A memory-mapped file with bounded residency.

use std::fs::File;

use rustix::mm::{MapFlags, ProtFlags};
use tierbed_core::{Error, Result};

/// A whole file, read-only, mapped. The kernel keeps of it what it has room for.
///
/// The file must not be shortened while it is mapped: reading beyond its end kills the process.
/// Vocabulary files are written once under another name and renamed, never changed.
#[derive(Debug)]
pub(crate) struct Mapping {
    start: *mut core::ffi::c_void,
    len: usize,
}

// SAFETY: the mapping is read-only and private; any thread may read or unmap it.
unsafe impl Send for Mapping {}
// SAFETY: as above; there is no way to write through it.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `file`, which is not empty.
    pub(crate) fn of(file: &File) -> Result<Self> {
        let unreadable = |error| Error::os("cannot map file", error);
        let len = usize::try_from(file.metadata().map_err(unreadable)?.len())
            .map_err(|_| Error::unsupported("file is larger than the address space"))?;
        // SAFETY: a new private read-only mapping at an address the kernel chooses touches no
        // memory of ours; it lives until `drop`.
        let start = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), len, ProtFlags::READ, MapFlags::PRIVATE, file, 0)
        };
        let start = start.map_err(|errno| unreadable(errno.into()))?;
        Ok(Self { start, len })
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: `start..start + len` is mapped readable until `drop`, and file pages are
        // initialised bytes.
        unsafe { std::slice::from_raw_parts(self.start.cast::<u8>(), self.len) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this is the range `of` mapped, and no slice of it outlives `self`.
        let unmapped = unsafe { rustix::mm::munmap(self.start, self.len) };
        debug_assert!(unmapped.is_ok());
    }
}
