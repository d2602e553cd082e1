//! Shared memory of several threads or processes, unmapped by the last of them.
//!
//! Pages cost memory only once they are touched, so a map may be as long as the largest batch
//! that could come. A map between processes is a file without a name (`memfd`): nothing stays
//! behind when the processes die, however they die, and no mount limits its size.

use std::fs::{File, OpenOptions};
use std::io::{Error as OsError, Result as OsResult};
use std::os::fd::{AsRawFd, FromRawFd};
use std::path::Path;
use std::ptr::NonNull;

/// A shared, writable map.
#[derive(Debug)]
pub(crate) struct Map {
    start: NonNull<u8>,
    len_bytes: usize,
    file: Option<File>,
}

// SAFETY: the map is owned until drop, and its addresses mean the same to every thread.
unsafe impl Send for Map {}
// SAFETY: shared access is by atomics, or by the views of `region`, which give each rank its
// rights.
unsafe impl Sync for Map {}

impl Map {
    /// Maps zeros that the threads of this process share.
    pub(crate) fn anonymous(len_bytes: usize) -> OsResult<Self> {
        Self::over(None, len_bytes)
    }

    /// Maps zeros that other processes can [`open`](Self::open).
    pub(crate) fn create(len_bytes: usize) -> OsResult<Self> {
        // SAFETY: the name is a C string; the call makes a new file and touches no memory of ours.
        let fd = unsafe { libc::memfd_create(c"tierbed-exchange".as_ptr(), libc::MFD_CLOEXEC) };
        if fd < 0 {
            return Err(OsError::last_os_error());
        }
        // SAFETY: the descriptor was just made, is open and has no other owner.
        let file = unsafe { File::from_raw_fd(fd) };
        file.set_len(len_bytes as u64)?;
        Self::over(Some(file), len_bytes)
    }

    /// Maps the file that another process created, as long as it is.
    pub(crate) fn open(path: &Path) -> OsResult<Self> {
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        let len_bytes = usize::try_from(file.metadata()?.len())
            .map_err(|_| OsError::other("file does not fit the address space"))?;
        Self::over(Some(file), len_bytes)
    }

    fn over(file: Option<File>, len_bytes: usize) -> OsResult<Self> {
        let backing = if file.is_some() { 0 } else { libc::MAP_ANONYMOUS };
        let fd = file.as_ref().map_or(-1, AsRawFd::as_raw_fd);
        let (access, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_NORESERVE | backing);
        // SAFETY: a fresh map at an address of the kernel's choice aliases no Rust memory.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), len_bytes, access, flags, fd, 0) };
        if start == libc::MAP_FAILED {
            return Err(OsError::last_os_error());
        }
        let start =
            NonNull::new(start.cast()).ok_or_else(|| OsError::other("mapped at address 0"))?;
        Ok(Self { start, len_bytes, file })
    }

    /// Returns the file's descriptor number, for others to open.
    pub(crate) fn descriptor(&self) -> Option<i32> {
        self.file.as_ref().map(AsRawFd::as_raw_fd)
    }

    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }

    pub(crate) fn len_bytes(&self) -> usize {
        self.len_bytes
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: start and length are those of the map; views borrow it, so none is left.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len_bytes) };
    }
}
