//! How does a file become memory? A writable map of a whole file: shared, or a copy on write.
//!
//! Invariant: nobody shrinks the file while it is mapped (the store's folder lock keeps other
//! openers away); touching a lost page would end the process with `SIGBUS`.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;

/// A writable map of a whole file.
#[derive(Debug)]
pub(crate) struct MappedFile {
    start: NonNull<u8>,
    len_bytes: usize,
}

impl MappedFile {
    /// Maps the first `len_bytes` of `file`, which is at least that long; not 0.
    pub(crate) fn shared(file: &File, len_bytes: usize) -> std::io::Result<Self> {
        Self::new(file, len_bytes, libc::MAP_SHARED)
    }

    /// Maps as [`shared`](Self::shared) does, but what is changed stays in memory.
    pub(crate) fn private(file: &File, len_bytes: usize) -> std::io::Result<Self> {
        Self::new(file, len_bytes, libc::MAP_PRIVATE)
    }

    fn new(file: &File, len_bytes: usize, kind: libc::c_int) -> std::io::Result<Self> {
        let (access, fd) = (libc::PROT_READ | libc::PROT_WRITE, file.as_raw_fd());
        // SAFETY: a fresh map at an address of the kernel's choice aliases no Rust memory.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), len_bytes, access, kind, fd, 0) };
        if start == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error());
        }
        // SAFETY: advice about the map just made; a refusal does not matter.
        unsafe { libc::madvise(start, len_bytes, libc::MADV_RANDOM) };
        let start = NonNull::new(start.cast());
        let start = start.ok_or_else(|| std::io::Error::other("mapped at address 0"))?;
        Ok(Self { start, len_bytes })
    }

    /// Returns the mapped bytes.
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: the map has len_bytes readable bytes until drop; writers need &mut self.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len_bytes) }
    }

    /// Returns the mapped bytes, to change.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in bytes, and the borrow of self is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len_bytes) }
    }

    /// Writes every changed page back to the file, durably.
    pub(crate) fn sync(&self) -> std::io::Result<()> {
        // SAFETY: start and len_bytes are those of the map.
        let code =
            unsafe { libc::msync(self.start.as_ptr().cast(), self.len_bytes, libc::MS_SYNC) };
        if code == 0 {
            return Ok(());
        }
        Err(std::io::Error::last_os_error())
    }
}

impl Drop for MappedFile {
    fn drop(&mut self) {
        // SAFETY: start and len_bytes are those of the map, which nobody borrows any more.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len_bytes) };
    }
}

// SAFETY: MappedFile owns its memory as a Box<[u8]> does.
unsafe impl Send for MappedFile {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_to_the_map_is_in_the_file() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(10_000).unwrap();
        let mut map = MappedFile::shared(&file, 10_000).unwrap();
        assert!(map.bytes().iter().all(|&byte| byte == 0));
        map.bytes_mut()[9_999] = 7;
        map.sync().unwrap();
        let mut last = [0];
        std::os::unix::fs::FileExt::read_at(&file, &mut last, 9_999).unwrap();
        assert_eq!(last, [7]);
        let mut private = MappedFile::private(&file, 10_000).unwrap();
        private.bytes_mut()[9_999] = 8;
        private.sync().unwrap();
        std::os::unix::fs::FileExt::read_at(&file, &mut last, 9_999).unwrap();
        assert_eq!((private.bytes()[9_999], last), (8, [7]));
    }
}
