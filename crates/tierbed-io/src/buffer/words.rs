//! Large anonymous memory for rows, backed by huge pages where the kernel gives them.
//!
//! A record that is touched at random costs a walk through the page tables unless the tables are
//! small. Pages of 2 MiB make them five hundred times smaller. Memory is taken from the kernel
//! when it is touched, as zeros.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// Zeroed `f32` words of a fixed number, in large pages where the kernel grants them.
pub struct WordBuf {
    start: NonNull<f32>,
    word_count: usize,
}

impl WordBuf {
    /// Allocates `word_count` zeroed words.
    ///
    /// # Panics
    ///
    /// When the address space cannot hold them.
    #[must_use]
    pub fn new(word_count: usize) -> Self {
        if word_count == 0 {
            return Self::default();
        }
        let len_bytes = bytes_of(word_count);
        let (access, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a fresh private map at an address of the kernel's choice aliases no Rust memory.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), len_bytes, access, flags, -1, 0) };
        assert!(start != libc::MAP_FAILED, "no address space for {len_bytes} bytes");
        // SAFETY: advice about the map just made; a refusal does not matter.
        unsafe { libc::madvise(start, len_bytes, libc::MADV_HUGEPAGE) };
        NonNull::new(start.cast()).map_or_else(Self::default, |start| Self { start, word_count })
    }
}

#[expect(clippy::expect_used, reason = "more words than the address space is a caller's bug")]
fn bytes_of(word_count: usize) -> usize {
    word_count.checked_mul(size_of::<f32>()).expect("words fit the address space")
}

impl Default for WordBuf {
    /// No words.
    fn default() -> Self {
        Self { start: NonNull::dangling(), word_count: 0 }
    }
}

impl Drop for WordBuf {
    fn drop(&mut self) {
        if self.word_count > 0 {
            // SAFETY: start came from mmap with this very length and is unmapped once.
            unsafe { libc::munmap(self.start.as_ptr().cast(), bytes_of(self.word_count)) };
        }
    }
}

impl Deref for WordBuf {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        // SAFETY: start points to word_count readable words owned by self, zero until written,
        // or dangles, aligned, for none.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.word_count) }
    }
}

impl DerefMut for WordBuf {
    fn deref_mut(&mut self) -> &mut [f32] {
        // SAFETY: as in deref, and the borrow of self is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.word_count) }
    }
}

impl fmt::Debug for WordBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WordBuf").field("word_count", &self.word_count).finish_non_exhaustive()
    }
}

// SAFETY: WordBuf owns its memory as a Box<[f32]> does.
unsafe impl Send for WordBuf {}
// SAFETY: shared access only reads.
unsafe impl Sync for WordBuf {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_zeroed_and_writable() {
        for word_count in [0, 1, 1000, 3 << 20] {
            let mut buf = WordBuf::new(word_count);
            assert_eq!(buf.len(), word_count);
            assert!(buf.iter().all(|&word| word.to_bits() == 0));
            buf.fill(7.5);
            assert!(buf.iter().all(|&word| word == 7.5));
        }
    }
}
