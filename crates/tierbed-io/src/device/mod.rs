//! Block devices: files, memory, memory maps.
//!
//! A [`Device`] answers one call at a time, from any thread; [`crate::IoEngine`] keeps many
//! calls in flight on top of it. Invariant: a read returns what the last completed write put
//! there; only [`Device::sync`] promises that it is still there after power loss.

pub mod cached;
pub mod file;
pub mod memory;
pub mod mmap;
mod window;

pub use cached::CachedDevice;
pub use file::FileDevice;
pub use memory::MemoryDevice;
pub use mmap::MmapDevice;

use std::fmt::Debug;
use std::os::fd::BorrowedFd;

use tierbed_core::{Error, Result};

/// Bytes with a length: a file on disk, in memory, or simulated.
///
/// All positions and lengths are in bytes and may be odd; page-aligned ones are fastest.
pub trait Device: Send + Sync + Debug {
    /// Returns the path or name, for messages.
    fn name(&self) -> &str;

    /// Returns the length.
    ///
    /// # Errors
    ///
    /// `Io` when the operating system refuses.
    fn len_bytes(&self) -> Result<u64>;

    /// Cuts or extends to `len_bytes`; new bytes read as zeros and take no space until written.
    ///
    /// # Errors
    ///
    /// `Io` or `NoSpace`.
    fn set_len(&self, len_bytes: u64) -> Result<()>;

    /// Fills `out` from `offset_bytes`.
    ///
    /// # Errors
    ///
    /// `Corruption` when the device ends before `out` is full, `Io` otherwise; `out` then holds
    /// anything.
    fn read_at(&self, offset_bytes: u64, out: &mut [u8]) -> Result<()>;

    /// Writes all of `bytes` at `offset_bytes`, extending the device if needed. Two calls at
    /// the same time must not overlap; a write not made of whole sectors overlaps whole pages.
    ///
    /// # Errors
    ///
    /// `NoSpace` on a full disk, `Io` otherwise; the range then holds anything.
    fn write_at(&self, offset_bytes: u64, bytes: &[u8]) -> Result<()>;

    /// Makes everything written so far, and the length, survive power loss.
    ///
    /// # Errors
    ///
    /// `Io` or `NoSpace`. After an error the writes since the last good sync may be gone even
    /// though a second call succeeds (the kernel forgets failed pages): poison, do not retry.
    fn sync(&self) -> Result<()>;

    /// Returns the descriptor io_uring can drive, if there is one.
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Returns the alignment that positions, lengths and addresses need on [`Device::fd`]; 1
    /// where any will do.
    fn fd_align_bytes(&self) -> usize {
        1
    }

    /// Lets go of what the operating system cached of a range; engines call it after a read on
    /// [`Device::fd`].
    fn drop_cached(&self, _offset_bytes: u64, _len_bytes: u32) {}

    /// Takes disk space for a range in advance and extends the device to its end, so that later
    /// writes change no metadata; `false` where that cannot be done, be it for lack of space:
    /// then writes take space as they come. New bytes read as zeros.
    fn preallocate(&self, _offset_bytes: u64, _len_bytes: u64) -> bool {
        false
    }

    /// Gives the disk space of a range of whole pages back, which holds anything from then on; the
    /// length stays. `false` where that cannot be done, and the range keeps its space.
    fn discard(&self, _offset_bytes: u64, _len_bytes: u64) -> bool {
        false
    }

    /// Returns the bytes really occupied, which is less than the length of a sparse file.
    ///
    /// # Errors
    ///
    /// `Io` when the operating system refuses.
    fn allocated_bytes(&self) -> Result<u64>;
}

/// Builds the error of a read past the end of `device`.
#[must_use]
pub fn past_the_end(device: &str, offset_bytes: u64, len_bytes: usize) -> Error {
    Error::corruption("file is shorter than expected")
        .with("path", device)
        .with("offset_bytes", offset_bytes)
        .with("expected_bytes", len_bytes)
        .with("remedy", "restore the file from a checkpoint")
}
