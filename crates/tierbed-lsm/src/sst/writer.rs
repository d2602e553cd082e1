//! Building of an SST from a sorted stream of rows.
//!
//! Rows are gathered into blocks, blocks into chunks, chunks are written one after the other;
//! index and filter follow, then one sync. The file counts for nothing until a version names it.

#![expect(
    clippy::indexing_slicing,
    reason = "a chunk is whole blocks; filled_bytes is at most its length"
)]

use std::sync::Arc;

use tierbed_core::{Reservation, Result};
use tierbed_io::{AlignedBuf, Device, OpenMode};

use super::block::{rows_per_block, seal_block, BlockKind, BlockName, Entries, HEADER_BYTES};
use super::bloom::Bloom;
use super::reader::{OpenSst, SstTools};
use crate::key::Key;
use crate::version::{SstId, SstMeta};

/// Writes one SST, rows in ascending key order.
pub(crate) struct SstWriter<'a> {
    tools: &'a SstTools,
    id: SstId,
    device: Arc<dyn Device>,
    chunk: AlignedBuf,
    filled_bytes: usize,
    written_bytes: u64,
    block_bytes: usize,
    keys: Vec<Key>,
    records: Vec<u8>,
    first_keys: Vec<u64>,
    filter_keys: Vec<Key>,
    filter_memory: Option<Reservation>,
    first: Option<Key>,
    last: Key,
    row_count: u64,
}

impl<'a> SstWriter<'a> {
    /// Starts SST `id` with blocks of `block_bytes`.
    ///
    /// # Errors
    /// `Io`, `NoSpace`.
    pub(crate) fn create(tools: &'a SstTools, id: SstId, block_bytes: usize) -> Result<Self> {
        assert!(rows_per_block(block_bytes, 1) > 0, "blocks of {block_bytes} bytes hold no row");
        let device = tools.folder.open(&id.file_name(), OpenMode::Create)?;
        device.set_len(0)?;
        let filter_memory = match tools.filter_bits_per_row {
            0 => None,
            _ => Some(tools.budget.reserve("compaction buffers", 0)?),
        };
        Ok(Self {
            tools,
            id,
            device,
            chunk: AlignedBuf::new(tools.chunk_bytes.next_multiple_of(block_bytes)),
            filled_bytes: 0,
            written_bytes: 0,
            block_bytes,
            keys: Vec::new(),
            records: Vec::new(),
            first_keys: Vec::new(),
            filter_keys: Vec::new(),
            filter_memory,
            first: None,
            last: Key::MIN,
            row_count: 0,
        })
    }

    /// Adds a row; keys strictly ascending.
    ///
    /// # Errors
    /// `Io`, `NoSpace`; `Invalid` when the budget does not hold the keys for the filter.
    pub(crate) fn push(&mut self, key: Key, record: &[u8]) -> Result<()> {
        assert!(self.first.is_none() || self.last < key, "rows of an SST ascend");
        assert!(rows_per_block(self.block_bytes, record.len()) > 0, "a record fits into a block");
        if !self.takes(key, record.len()) {
            self.finish_block()?;
        }
        self.keys.push(key);
        self.records.extend_from_slice(record);
        self.first.get_or_insert(key);
        self.last = key;
        self.row_count += 1;
        if let Some(memory) = &mut self.filter_memory {
            if self.filter_keys.len() == self.filter_keys.capacity() {
                let wanted = (2 * self.filter_keys.len()).max(1024);
                memory.resize(8 * wanted as u64)?;
                self.filter_keys.reserve_exact(wanted - self.filter_keys.len());
            }
            self.filter_keys.push(key);
        }
        Ok(())
    }

    // Whether the block being gathered can take one more row.
    fn takes(&self, key: Key, record_bytes: usize) -> bool {
        let Some(first) = self.keys.first() else { return true };
        let is_near = u32::try_from(key.get() - first.get()).is_ok();
        let is_room = self.keys.len() < rows_per_block(self.block_bytes, record_bytes);
        first.shares_blocks_with(key) && is_near && is_room
    }

    /// Returns the bytes of the rows so far.
    pub(crate) fn data_bytes(&self) -> u64 {
        self.first_keys.len() as u64 * self.block_bytes as u64 + self.records.len() as u64
    }

    fn finish_block(&mut self) -> Result<()> {
        let Some(first) = self.keys.first().copied() else { return Ok(()) };
        let number = self.first_keys.len() as u32;
        let count = self.keys.len() as u32;
        let is_even = self.records.len().is_multiple_of(self.keys.len());
        assert!(is_even, "records of one block have one length");
        let record_bytes = self.records.len() as u32 / count;
        let deltas: Vec<u8> = self
            .keys
            .iter()
            .flat_map(|key| ((key.get() - first.get()) as u32).to_le_bytes())
            .collect();
        let records = std::mem::take(&mut self.records);
        let entries = Entries { count, record_bytes, first_key: first.get() };
        self.put_block(BlockKind::Rows, number, entries, &[&deltas, &records])?;
        self.records = records;
        self.records.clear();
        self.keys.clear();
        self.first_keys.push(first.get());
        Ok(())
    }

    fn put_block(
        &mut self,
        kind: BlockKind,
        number: u32,
        entries: Entries,
        parts: &[&[u8]],
    ) -> Result<()> {
        let at = self.filled_bytes;
        let block = &mut self.chunk[at..at + self.block_bytes];
        block.fill(0);
        let part_bytes: usize = parts.iter().map(|part| part.len()).sum();
        assert!(HEADER_BYTES + part_bytes <= self.block_bytes, "entries fit into the block");
        let mut filled = HEADER_BYTES;
        for part in parts {
            block[filled..filled + part.len()].copy_from_slice(part);
            filled += part.len();
        }
        seal_block(block, BlockName { sst: self.id, number, kind }, entries);
        self.filled_bytes += self.block_bytes;
        if self.filled_bytes == self.chunk.len() {
            self.write_chunk()?;
        }
        Ok(())
    }

    fn write_chunk(&mut self) -> Result<()> {
        let full = &self.chunk[..self.filled_bytes];
        if !full.is_empty() {
            if self.written_bytes == 0 {
                // Blocks that are taken ahead need not be taken write by write; `finish` gives
                // back what was too much. Where it cannot be, writes do it.
                let _ = self.device.preallocate(0, self.tools.sst_bytes);
            }
            self.device.write_at(self.written_bytes, full)?;
        }
        self.written_bytes += self.filled_bytes as u64;
        self.filled_bytes = 0;
        Ok(())
    }

    // Cuts `bytes` into blocks of `kind`; returns how many.
    fn put_section(&mut self, kind: BlockKind, bytes: &[u8], entry_bytes: usize) -> Result<u32> {
        let payload_bytes = (self.block_bytes - HEADER_BYTES) / entry_bytes * entry_bytes;
        let mut count = 0;
        for part in bytes.chunks(payload_bytes) {
            let number = (self.written_bytes + self.filled_bytes as u64) / self.block_bytes as u64;
            let entries =
                Entries { count: (part.len() / entry_bytes) as u32, ..Entries::default() };
            self.put_block(kind, number as u32, entries, &[part])?;
            count += 1;
        }
        Ok(count)
    }

    /// Writes what is left, index and filter, and syncs the file.
    ///
    /// # Errors
    /// `Io`, `NoSpace`; `Invalid` when the budget does not hold index and filter.
    ///
    /// # Panics
    /// Without a row.
    #[expect(clippy::expect_used, reason = "an SST without rows is a caller's bug")]
    pub(crate) fn finish(mut self) -> Result<OpenSst> {
        let first = self.first.expect("an SST has rows");
        self.finish_block()?;
        let index: Vec<u8> = self.first_keys.iter().flat_map(|key| key.to_le_bytes()).collect();
        let index_blocks = self.put_section(BlockKind::Index, &index, 8)?;
        let filter = self.build_filter()?;
        let bits = filter.as_ref().map_or(&[][..], Bloom::bits);
        let filter_blocks = self.put_section(BlockKind::Filter, bits, 1)?;
        let meta = SstMeta {
            id: self.id,
            first,
            last: self.last,
            row_count: self.row_count,
            block_bytes: self.block_bytes as u32,
            rows_blocks: self.first_keys.len() as u32,
            index_blocks,
            filter_blocks,
            filter_bytes: bits.len() as u64,
            filter_bits_per_row: filter.as_ref().map_or(0, |_| self.tools.filter_bits_per_row),
        };
        self.write_chunk()?;
        assert_eq!(self.written_bytes, meta.size_bytes(), "an SST is its blocks");
        self.device.set_len(self.written_bytes)?;
        self.device.sync()?;
        OpenSst::new(self.tools, meta, self.device, std::mem::take(&mut self.first_keys), filter)
    }

    fn build_filter(&self) -> Result<Option<Bloom>> {
        if self.tools.filter_bits_per_row == 0 {
            return Ok(None);
        }
        let bits_per_row = self.tools.filter_bits_per_row;
        let key_count = self.filter_keys.len() as u64;
        assert_eq!(key_count, self.row_count, "a filter that lacks a row denies it");
        let bytes = Bloom::bytes_for(key_count, bits_per_row);
        let memory = self.tools.budget.reserve("filters", bytes)?;
        Ok(Some(Bloom::build(&self.filter_keys, bits_per_row, Some(memory))))
    }
}
