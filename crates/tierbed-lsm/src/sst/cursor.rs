//! A cursor over a run of SSTs in key order.
//!
//! A few blocks at a time in one buffer, straight from the device: merges and scans must not
//! push the rows that reads need out of the block cache.

#![expect(
    clippy::indexing_slicing,
    reason = "a window of blocks fits the buffer, and blocks are checked when they are loaded"
)]

use std::ops::{Range, RangeInclusive};
use std::sync::Arc;

use tierbed_core::{Error, Result};
use tierbed_io::AlignedBuf;

use super::block::{RowPlaces, Rows};
use super::reader::OpenSst;
use crate::key::Key;

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
    /// Place of the block in the buffer, and of its rows in it; default between blocks.
    block_at: usize,
    places: RowPlaces,
    current: Option<Key>,
    /// Place of the current record in the buffer.
    record: Range<usize>,
}

impl RunCursor {
    /// Starts at the first row of `range`; `chunk_bytes` are read at once.
    ///
    /// # Errors
    /// `Io`, `Corruption`.
    pub(crate) fn new(
        ssts: Vec<Arc<OpenSst>>,
        range: &RangeInclusive<Key>,
        chunk_bytes: usize,
    ) -> Result<Self> {
        let (first, last) = (*range.start(), *range.end());
        let ascends = ssts.is_sorted_by(|one, next| one.meta.last < next.meta.first);
        assert!(ascends, "the SSTs of a run overlap, or are out of order");
        let largest = ssts.iter().map(|sst| sst.meta.block_bytes as usize).max().unwrap_or(1);
        let mut cursor = Self {
            sst_at: ssts.partition_point(|sst| sst.meta.last < first),
            ssts,
            last,
            buffer: AlignedBuf::new(chunk_bytes.max(largest)),
            window: (0, 0),
            block: 0,
            row: 0,
            block_at: 0,
            places: RowPlaces::default(),
            current: None,
            record: 0..0,
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

    /// Returns the record of the row the cursor stands at.
    pub(crate) fn record(&self) -> &[u8] {
        &self.buffer[self.record.clone()]
    }

    /// Goes to the next row.
    ///
    /// # Errors
    /// `Io`, `Corruption`.
    pub(crate) fn advance(&mut self) -> Result<()> {
        self.row += 1;
        self.settle()
    }

    // Makes `current` the row at (sst_at, block, row), moving on over borders.
    fn settle(&mut self) -> Result<()> {
        loop {
            let block = &self.buffer[self.block_at..];
            if let Some((key, place)) = self.places.row(block, self.row) {
                self.record = self.block_at + place.start..self.block_at + place.end;
                let is_later = self.current.is_none_or(|before| before < key);
                debug_assert!(is_later, "a run goes back from {:?} to {key:?}", self.current);
                self.current = (key <= self.last).then_some(key);
                return Ok(());
            }
            self.current = None;
            if self.places != RowPlaces::default() {
                self.places = RowPlaces::default();
                self.block += 1;
                self.row = 0;
            }
            if !self.enter_block()? {
                return Ok(());
            }
        }
    }

    // Makes `places` those of block (sst_at, block); `false` when there are no more blocks.
    fn enter_block(&mut self) -> Result<bool> {
        let count = self.ssts.len();
        if self.sst_at < count && self.block >= self.ssts[self.sst_at].meta.rows_blocks {
            self.sst_at += 1;
            (self.block, self.window) = (0, (0, 0));
        }
        if self.sst_at == count {
            return Ok(false);
        }
        let sst = Arc::clone(&self.ssts[self.sst_at]);
        if self.block >= self.window.0 + self.window.1 || self.block < self.window.0 {
            self.load(&sst)?;
        }
        self.block_at = (self.block - self.window.0) as usize * sst.meta.block_bytes as usize;
        let block = &self.buffer[self.block_at..];
        let rows = Rows::trusted(block)
            .ok_or_else(|| Error::corruption("block is malformed").with("sst_id", sst.meta.id.0))?;
        self.places = rows.places();
        Ok(true)
    }

    fn load(&mut self, sst: &OpenSst) -> Result<()> {
        assert!(self.block < sst.meta.rows_blocks, "block {} of {:?}", self.block, sst.meta);
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
