//! Numbers of any width behind each other in the words of an index.
//!
//! Bit `b` is bit `b % 64` of word `b / 64`; a number may begin in one word and end in the next.
#![expect(clippy::indexing_slicing, reason = "readers ask for bits that the words have")]

use std::sync::Arc;

use tierbed_core::Result;
use tierbed_io::Device;

use crate::blocks::BlockWriter;

/// Writes numbers in the order of their bits, block by block.
#[derive(Debug)]
pub(crate) struct BitWriter {
    blocks: BlockWriter,
    /// Bits written so far, the last few of them in `word`.
    bits_done: u64,
    word: u64,
}

impl BitWriter {
    pub(crate) fn new(device: Arc<dyn Device>) -> Self {
        Self { blocks: BlockWriter::new(device), bits_done: 0, word: 0 }
    }

    pub(crate) fn bits_done(&self) -> u64 {
        self.bits_done
    }

    /// Puts the lower `bits` of `value`, which has no others, at a bit behind those put before.
    pub(crate) fn put(&mut self, at: u64, value: u64, bits: u32) -> Result<()> {
        self.skip_to(at)?;
        let offset = at % 64;
        self.word |= value << offset;
        if offset + u64::from(bits) >= 64 {
            let word = self.word;
            self.blocks.put_word(word)?;
            // The rest of the value starts the next word.
            self.word = if offset == 0 { 0 } else { value >> (64 - offset) };
        }
        self.bits_done = at + u64::from(bits);
        Ok(())
    }

    /// Fills up to bit `end` with zeros and returns the checksum over the blocks' checksums.
    pub(crate) fn finish(mut self, end: u64) -> Result<u32> {
        self.skip_to(end)?;
        self.blocks.finish()
    }

    fn skip_to(&mut self, at: u64) -> Result<()> {
        while self.bits_done / 64 < at / 64 {
            let word = std::mem::take(&mut self.word);
            self.blocks.put_word(word)?;
            self.bits_done = (self.bits_done / 64 + 1) * 64;
        }
        self.bits_done = at;
        Ok(())
    }
}

/// Returns the number of `bits` bits, 1 to 64, that begins at bit `at` of `words`.
///
/// # Panics
/// When the words end before.
pub(crate) fn read_bits(words: &[u64], at: u64, bits: u32) -> u64 {
    let (word, offset) = ((at / 64) as usize, (at % 64) as u32);
    let low = words[word] >> offset;
    let high = match offset {
        0 => 0,
        offset if offset + bits <= 64 => 0,
        offset => words[word + 1] << (64 - offset),
    };
    (low | high) & (u64::MAX >> (64 - bits))
}

/// Flips, in the number of `bits` bits, 1 to 64, that begins at bit `at` of `words`, the bits of
/// `value`, which has no others: puts it where zeros are.
///
/// # Panics
/// When the words end before.
pub(crate) fn xor_bits(words: &mut [u64], at: u64, value: u64, bits: u32) {
    let (word, offset) = ((at / 64) as usize, (at % 64) as u32);
    words[word] ^= value << offset;
    if offset + bits > 64 {
        words[word + 1] ^= value >> (64 - offset);
    }
}
