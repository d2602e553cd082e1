//! How does one walk through a run of SSTs in key order?
//!
//! A few blocks at a time in one buffer, straight from the device: merges and scans must not
//! push the rows that reads need out of the block cache.

use std::sync::Arc;

use tierbed_core::{Error, Result};
use tierbed_io::AlignedBuf;

use super::block::Rows;
use super::reader::OpenSst;
use crate::key::Key;
use crate::version::SstId;

/// Walks SSTs with disjoint, ascending ranges from one key to another.
pub(crate) struct RunCursor {
    ssts: Vec<Arc<OpenSst>>,
    last: Key,
    buffer: AlignedBuf,
    sst_at: usize,
    /// First block in the buffer, and how many blocks are there.
    window: (u32, u32),
    block: u32,
    row: usize,
    current: Option<Key>,
}

impl RunCursor {
    /// Starts at the first row not before `range.0`; `chunk_bytes` are read at once.
    ///
    /// # Errors
    /// `Io`, `Corruption`.
    pub(crate) fn new(
        ssts: Vec<Arc<OpenSst>>,
        range: (Key, Key),
        chunk_bytes: usize,
    ) -> Result<Self> {
        let (first, last) = range;
        let largest = ssts.iter().map(|sst| sst.meta.block_bytes as usize).max().unwrap_or(1);
        let mut cursor = Self {
            sst_at: ssts.partition_point(|sst| sst.meta.last < first),
            ssts,
            last,
            buffer: AlignedBuf::new(chunk_bytes.max(largest)),
            window: (0, 0),
            block: 0,
            row: 0,
            current: None,
        };
        if let Some(sst) = cursor.ssts.get(cursor.sst_at) {
            cursor.block = sst.block_of(first).unwrap_or(0);
        }
        cursor.settle()?;
        while cursor.current.is_some_and(|key| key < first) {
            cursor.advance()?;
        }
        Ok(cursor)
    }

    /// Returns the key the cursor stands at; `None` at the end.
    pub(crate) fn key(&self) -> Option<Key> {
        self.current
    }

    /// Returns record and SST of the row the cursor stands at.
    pub(crate) fn record(&self) -> Option<(&[u8], SstId)> {
        let sst = self.ssts.get(self.sst_at)?;
        let (_, record) = Rows::trusted(self.block_bytes()?)?.row(self.row)?;
        Some((record, sst.meta.id))
    }

    /// Goes to the next row.
    ///
    /// # Errors
    /// `Io`, `Corruption`.
    pub(crate) fn advance(&mut self) -> Result<()> {
        self.row += 1;
        self.settle()
    }

    fn block_bytes(&self) -> Option<&[u8]> {
        let sst = self.ssts.get(self.sst_at)?;
        let block_bytes = sst.meta.block_bytes as usize;
        let at = self.block.checked_sub(self.window.0)? as usize * block_bytes;
        self.buffer.get(at..at + block_bytes)
    }

    // Makes `current` the row at (sst_at, block, row), moving on over borders.
    fn settle(&mut self) -> Result<()> {
        self.current = None;
        loop {
            let Some(sst) = self.ssts.get(self.sst_at).cloned() else { return Ok(()) };
            if self.block >= sst.meta.rows_blocks {
                self.sst_at += 1;
                (self.block, self.row, self.window) = (0, 0, (0, 0));
                continue;
            }
            if self.block >= self.window.0 + self.window.1 || self.block < self.window.0 {
                self.load(&sst)?;
            }
            let rows = self.block_bytes().and_then(Rows::trusted);
            match rows.and_then(|rows| rows.row(self.row)) {
                Some((key, _)) => {
                    self.current = (key <= self.last).then_some(key);
                    return Ok(());
                }
                None => {
                    self.block += 1;
                    self.row = 0;
                }
            }
        }
    }

    fn load(&mut self, sst: &OpenSst) -> Result<()> {
        let block_bytes = sst.meta.block_bytes as usize;
        let room = (self.buffer.len() / block_bytes) as u32;
        let count = room.min(sst.meta.rows_blocks - self.block);
        self.window = (self.block, 0);
        let bytes = self.buffer.get_mut(..count as usize * block_bytes).ok_or_else(|| {
            Error::corruption("SST blocks are larger than the buffer").with("sst_id", sst.meta.id.0)
        })?;
        sst.read_blocks(self.block, bytes)?;
        for (number, block) in (self.block..).zip(bytes.chunks_exact(block_bytes)) {
            Rows::check(block, sst.block_name(number))?;
        }
        self.window.1 = count;
        Ok(())
    }
}
