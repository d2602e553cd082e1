//! Large anonymous memory for rows, backed by huge pages where the kernel gives them.
//!
//! A record that is touched at random costs a walk through the page tables unless the tables are
//! small. Pages of 2 MiB make them five hundred times smaller. Memory is taken from the kernel
//! when it is touched, as zeros.

use std::fmt;
use std::ops::{Deref, DerefMut};

use memmap2::{Advice, MmapMut};

/// Zeroed `f32` words of a fixed number, in large pages where the kernel grants them.
#[derive(Default)]
pub struct WordBuf {
    /// None for no words.
    memory: Option<MmapMut>,
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
        let memory = word_count.checked_mul(size_of::<f32>()).map(MmapMut::map_anon);
        let Some(Ok(memory)) = memory else {
            panic!("no address space for {word_count} words");
        };
        // A refusal does not matter.
        let _advice_only = memory.advise(Advice::HugePage);
        Self { memory: Some(memory), word_count }
    }
}

impl Deref for WordBuf {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        let Some(memory) = &self.memory else { return &[] };
        // SAFETY: the map is aligned to a page, has word_count words, is zero until written, and
        // any bytes are an f32.
        unsafe { std::slice::from_raw_parts(memory.as_ptr().cast(), self.word_count) }
    }
}

impl DerefMut for WordBuf {
    fn deref_mut(&mut self) -> &mut [f32] {
        let Some(memory) = &mut self.memory else { return &mut [] };
        // SAFETY: as in deref, and the borrow of self is exclusive.
        unsafe { std::slice::from_raw_parts_mut(memory.as_mut_ptr().cast(), self.word_count) }
    }
}

impl fmt::Debug for WordBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WordBuf").field("word_count", &self.word_count).finish_non_exhaustive()
    }
}

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
