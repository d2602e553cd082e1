//! Shared memory of several threads or processes, unmapped by the last of them.
//!
//! Pages cost memory only once they are touched, so a map may be as long as the largest batch
//! that could come. A map between processes is a file without a name (`memfd`): nothing stays
//! behind when the processes die, however they die, and no mount limits its size.

use std::fs::{File, OpenOptions};
use std::io::{Error as OsError, Result as OsResult};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::ptr::NonNull;

use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{memfd_create, MemfdFlags};

/// A shared, writable map. What of it who may read or write is said by the views of `region`.
#[derive(Debug)]
pub(crate) struct Map {
    memory: MmapRaw,
    file: Option<File>,
}

impl Map {
    /// Maps zeros that the threads of this process share.
    pub(crate) fn anonymous(len_bytes: usize) -> OsResult<Self> {
        let Self { memory, .. } = Self::create(len_bytes)?;
        Ok(Self { memory, file: None })
    }

    /// Maps zeros that other processes can [`open`](Self::open).
    pub(crate) fn create(len_bytes: usize) -> OsResult<Self> {
        let file = File::from(memfd_create("tierbed-exchange", MemfdFlags::CLOEXEC)?);
        file.set_len(len_bytes as u64)?;
        Self::over(file, len_bytes)
    }

    /// Maps the file that another process created, as long as it is.
    pub(crate) fn open(path: &Path) -> OsResult<Self> {
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        let len_bytes = usize::try_from(file.metadata()?.len())
            .map_err(|_| OsError::other("file does not fit the address space"))?;
        Self::over(file, len_bytes)
    }

    fn over(file: File, len_bytes: usize) -> OsResult<Self> {
        let memory = MmapOptions::new().len(len_bytes).no_reserve_swap().map_raw(&file)?;
        Ok(Self { memory, file: Some(file) })
    }

    /// Returns the file's descriptor number, for others to open.
    pub(crate) fn descriptor(&self) -> Option<i32> {
        self.file.as_ref().map(AsRawFd::as_raw_fd)
    }

    /// Returns the address of byte `at`.
    #[expect(clippy::expect_used, reason = "the kernel maps nothing at address 0 unasked")]
    pub(crate) fn at(&self, at: usize) -> NonNull<u8> {
        assert!(at <= self.len_bytes(), "an address lies in its map");
        NonNull::new(self.memory.as_mut_ptr().wrapping_add(at)).expect("a map is not at address 0")
    }

    pub(crate) fn len_bytes(&self) -> usize {
        self.memory.len()
    }
}
