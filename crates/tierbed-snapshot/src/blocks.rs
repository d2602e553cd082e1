//! Checksummed 4 KiB blocks of 8-byte words, in which the indexes of a snapshot lie.
//!
//! Blocks of 4 KiB, each with its number and a checksum:
//!
//! ```text
//! | crc32c | block number | 511 words of 8 bytes |
//! 0        4              8                      4096
//! ```
//!
//! Normative text: docs/reference/formats/snapshot.md.
#![expect(clippy::indexing_slicing, reason = "offsets are reduced to the buffer and the block")]

use std::sync::Arc;

use tierbed_core::checksum::{crc32c, crc32c_append};
use tierbed_core::{Error, Result};
use tierbed_io::{AlignedBuf, Device, PAGE_BYTES};

use crate::page::{le_u32, le_u64};

/// Words of an index in one block.
pub const BLOCK_WORDS: usize = (PAGE_BYTES - BLOCK_HEADER_BYTES) / 8;
/// Bytes before a block's words.
pub const BLOCK_HEADER_BYTES: usize = 8;
/// Blocks written or read at once.
const BLOCKS_AT_ONCE: usize = 16;
/// Memory a writer or the loading of an index needs besides the index.
pub(crate) const BUFFER_BYTES: u64 = (BLOCKS_AT_ONCE * PAGE_BYTES) as u64;

/// Writes words, block by block.
#[derive(Debug)]
pub(crate) struct BlockWriter {
    device: Arc<dyn Device>,
    buffer: AlignedBuf,
    /// Words in the buffer.
    buffered: usize,
    blocks_done: u64,
    crc: u32,
}

impl BlockWriter {
    pub(crate) fn new(device: Arc<dyn Device>) -> Self {
        let buffer = AlignedBuf::new(BUFFER_BYTES as usize);
        Self { device, buffer, buffered: 0, blocks_done: 0, crc: 0 }
    }

    pub(crate) fn put_word(&mut self, word: u64) -> Result<()> {
        if self.buffered == BLOCKS_AT_ONCE * BLOCK_WORDS {
            self.flush()?;
        }
        let (block, at) = (self.buffered / BLOCK_WORDS, self.buffered % BLOCK_WORDS);
        let start = block * PAGE_BYTES + BLOCK_HEADER_BYTES + 8 * at;
        self.buffer[start..start + 8].copy_from_slice(&word.to_le_bytes());
        self.buffered += 1;
        Ok(())
    }

    /// Writes what is left, the last block padded with zeros, and returns the checksum over the
    /// blocks' checksums.
    pub(crate) fn finish(mut self) -> Result<u32> {
        if !self.buffered.is_multiple_of(BLOCK_WORDS) {
            let missing = BLOCK_WORDS - self.buffered % BLOCK_WORDS;
            for _ in 0..missing {
                self.put_word(0)?;
            }
        }
        self.flush()?;
        Ok(self.crc)
    }

    fn flush(&mut self) -> Result<()> {
        assert!(
            self.buffered.is_multiple_of(BLOCK_WORDS),
            "{} words are not whole blocks",
            self.buffered
        );
        let block_count = self.buffered / BLOCK_WORDS;
        let first = self.blocks_done;
        let used = &mut self.buffer[..block_count * PAGE_BYTES];
        for (at, block) in used.chunks_exact_mut(PAGE_BYTES).enumerate() {
            block[4..BLOCK_HEADER_BYTES].copy_from_slice(&block_number(first, at).to_le_bytes());
            let crc = crc32c(&block[4..]);
            self.crc = crc32c_append(self.crc, &crc.to_le_bytes());
            block[..4].copy_from_slice(&crc.to_le_bytes());
        }
        self.device.write_at(first * PAGE_BYTES as u64, used)?;
        used.fill(0);
        self.blocks_done += block_count as u64;
        self.buffered = 0;
        Ok(())
    }
}

/// Returns the blocks that hold `word_count` words.
pub(crate) fn block_count(word_count: u64) -> u64 {
    word_count.div_ceil(BLOCK_WORDS as u64)
}

/// Blocks are numbered modulo 2^32.
fn block_number(first: u64, at: usize) -> u32 {
    (first + at as u64) as u32
}

/// Reads `block_count` blocks, checks each, hands its words over and returns the checksum over
/// the checksums.
pub(crate) fn read_blocks(
    device: &dyn Device,
    block_count: u64,
    mut take: impl FnMut(&mut dyn Iterator<Item = u64>),
) -> Result<u32> {
    let mut buffer = AlignedBuf::new(BUFFER_BYTES as usize);
    let mut crc = 0;
    let mut first = 0;
    while first < block_count {
        let count = (block_count - first).min(BLOCKS_AT_ONCE as u64) as usize;
        let blocks = &mut buffer[..count * PAGE_BYTES];
        device.read_at(first * PAGE_BYTES as u64, blocks)?;
        for (at, block) in blocks.chunks_exact(PAGE_BYTES).enumerate() {
            let number = first + at as u64;
            let words = check_block(device, number, block)
                .map_err(|error| error.with("remedy", "publish the snapshot again"))?;
            crc = crc32c_append(crc, &le_u32(block, 0).to_le_bytes());
            take(&mut words.chunks_exact(8).map(|word| le_u64(word, 0)));
        }
        first += count as u64;
    }
    Ok(crc)
}

/// Returns the words of a block that was read as the `number`-th of `device`.
///
/// # Errors
/// `Corruption` when it fails its checksum or is another block.
///
/// # Panics
/// When `block` is not [`PAGE_BYTES`] long.
pub(crate) fn check_block<'a>(
    device: &dyn Device,
    number: u64,
    block: &'a [u8],
) -> Result<&'a [u8]> {
    assert_eq!(block.len(), PAGE_BYTES, "bytes of a block");
    let (stored, computed) = (le_u32(block, 0), crc32c(&block[4..]));
    if stored != computed || le_u32(block, 4) != block_number(number, 0) {
        return Err(Error::corruption("index block fails its checksum")
            .with("path", device.name())
            .with("block", number)
            .with("expected", format_args!("{stored:#010x}"))
            .with("found", format_args!("{computed:#010x}")));
    }
    Ok(&block[BLOCK_HEADER_BYTES..])
}

/// Fails when the checksum over the blocks of an index is not the manifest's.
pub(crate) fn check_crc(device: &dyn Device, expected: u32, found: u32) -> Result<()> {
    if found == expected {
        return Ok(());
    }
    Err(Error::corruption("index belongs to another snapshot")
        .with("path", device.name())
        .with("expected", format_args!("{expected:#010x}"))
        .with("found", format_args!("{found:#010x}")))
}
