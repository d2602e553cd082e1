//! Page-aligned memory for direct I/O.
//!
//! `O_DIRECT` hands the memory to the device as it is, so its address must be a multiple of the
//! device's block. A page border satisfies every device.

mod words;

pub use words::WordBuf;

use std::alloc::{alloc_zeroed, dealloc, handle_alloc_error, Layout};
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// Smallest unit a disk promises to write whole.
pub const SECTOR_BYTES: usize = 512;
/// Unit of placement and checksums in every Tierbed page format, and alignment of I/O memory.
pub const PAGE_BYTES: usize = 4096;

const _: () = assert!(PAGE_BYTES.is_multiple_of(SECTOR_BYTES));

/// Zeroed memory of a fixed length, aligned to [`PAGE_BYTES`].
pub struct AlignedBuf {
    start: NonNull<u8>,
    len_bytes: usize,
}

impl AlignedBuf {
    /// Allocates `len_bytes` zeroed bytes (any length, 0 too).
    ///
    /// # Panics
    ///
    /// On a length above `isize::MAX`; aborts when memory is exhausted.
    #[must_use]
    pub fn new(len_bytes: usize) -> Self {
        let layout = layout_of(len_bytes);
        // SAFETY: layout_of never returns a layout of zero size.
        let start = unsafe { alloc_zeroed(layout) };
        let Some(start) = NonNull::new(start) else { handle_alloc_error(layout) };
        Self { start, len_bytes }
    }

    /// Returns the address of the first byte, for an engine that hands it to the kernel. Making
    /// the pointer borrows no contents.
    pub(crate) fn as_raw_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }
}

#[expect(clippy::expect_used, reason = "a length above isize::MAX is a caller's bug")]
fn layout_of(len_bytes: usize) -> Layout {
    Layout::from_size_align(len_bytes.max(1), PAGE_BYTES).expect("buffer length fits isize")
}

impl Drop for AlignedBuf {
    fn drop(&mut self) {
        // SAFETY: start came from alloc_zeroed with this very layout and is freed once.
        unsafe { dealloc(self.start.as_ptr(), layout_of(self.len_bytes)) }
    }
}

impl Deref for AlignedBuf {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: start points to len_bytes initialised (zeroed) bytes owned by self; the borrow
        // of self keeps writers away (engines give no borrow while the kernel writes).
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len_bytes) }
    }
}

impl DerefMut for AlignedBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in deref, and the borrow of self is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len_bytes) }
    }
}

impl fmt::Debug for AlignedBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AlignedBuf").field("len_bytes", &self.len_bytes).finish_non_exhaustive()
    }
}

// SAFETY: AlignedBuf owns its memory as a Box<[u8]> does.
unsafe impl Send for AlignedBuf {}
// SAFETY: shared access only reads.
unsafe impl Sync for AlignedBuf {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_aligned_zeroed_and_writable() {
        for len_bytes in [0, 1, SECTOR_BYTES, PAGE_BYTES, PAGE_BYTES + 1, 1 << 20] {
            let mut buf = AlignedBuf::new(len_bytes);
            assert_eq!(buf.as_ptr() as usize % PAGE_BYTES, 0);
            assert_eq!(buf.len(), len_bytes);
            assert!(buf.iter().all(|&byte| byte == 0));
            buf.fill(7);
            assert!(buf.iter().all(|&byte| byte == 7));
        }
    }
}
