//! An open SST: index and filter in memory, blocks on demand.
//!
//! The first key of every rows block (8 bytes per block) and the filter, both counted against
//! the budget. Rows are read through the store's engine and cache.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::Arc;

use tierbed_core::env::Clock;
use tierbed_core::{Budget, Error, Reservation, Result};
use tierbed_io::{AlignedBuf, Device, Folder, OpenMode};

use super::block::{check_block, BlockKind, BlockName, Rows, HEADER_BYTES};
use super::bloom::Bloom;
use super::read_u64;
use crate::key::Key;
use crate::options::LsmOptions;
use crate::version::{SstId, SstMeta};

/// What reading and writing SSTs needs from the store.
#[derive(Debug)]
pub(crate) struct SstTools {
    pub(crate) folder: Arc<dyn Folder>,
    pub(crate) budget: Budget,
    /// Bits per row of new filters; 0 for none.
    pub(crate) filter_bits_per_row: u32,
    /// Bytes moved at once when writing and merging.
    pub(crate) chunk_bytes: usize,
    /// Rows of about this many bytes make one SST of a merge.
    pub(crate) sst_bytes: u64,
    /// Time, for what jobs take.
    pub(crate) clock: Arc<dyn Clock>,
    /// Number of the next SST; the caller and the background thread both take from it.
    next_sst: AtomicU64,
    is_closing: AtomicBool,
}

impl SstTools {
    /// Puts the tools together; `next_sst` is the first number to give.
    pub(crate) fn new(folder: Arc<dyn Folder>, options: &LsmOptions, next_sst: u64) -> Self {
        Self {
            folder,
            budget: options.budget.clone(),
            filter_bits_per_row: options.sst.filter_bits_per_row,
            chunk_bytes: options.sst.chunk_bytes,
            sst_bytes: options.sst.sst_bytes,
            clock: Arc::clone(&options.clock),
            next_sst: AtomicU64::new(next_sst),
            is_closing: AtomicBool::new(false),
        }
    }

    #[cfg(test)]
    pub(crate) fn for_tests(folder: Arc<dyn Folder>, budget: &Budget) -> Self {
        let options = LsmOptions::recdb(budget.clone());
        Self::new(folder, &options, 0)
    }

    /// Takes the next SST number.
    pub(crate) fn next_id(&self) -> SstId {
        SstId(self.next_sst.fetch_add(1, Ordering::Relaxed))
    }

    /// Returns the next SST number without taking it.
    pub(crate) fn peek_id(&self) -> SstId {
        SstId(self.next_sst.load(Ordering::Relaxed))
    }

    /// Asks the background thread to stop: its result is not wanted any more.
    pub(crate) fn close(&self) {
        self.is_closing.store(true, Ordering::Relaxed);
    }

    /// Returns whether [`close`](Self::close) was called.
    pub(crate) fn is_closing(&self) -> bool {
        self.is_closing.load(Ordering::Relaxed)
    }
}

/// One SST, ready to be read.
#[derive(Debug)]
pub(crate) struct OpenSst {
    pub(crate) meta: SstMeta,
    pub(crate) device: Arc<dyn Device>,
    first_keys: Vec<u64>,
    filter: Option<Bloom>,
    _memory: Reservation,
}

impl OpenSst {
    /// Puts the parts together.
    ///
    /// # Errors
    /// `Invalid` when the budget does not hold the index.
    pub(crate) fn new(
        tools: &SstTools,
        meta: SstMeta,
        device: Arc<dyn Device>,
        first_keys: Vec<u64>,
        filter: Option<Bloom>,
    ) -> Result<Self> {
        assert_eq!(first_keys.len(), meta.rows_blocks as usize, "every block has a first key");
        let memory = tools.budget.reserve("block indexes", 8 * first_keys.len() as u64)?;
        Ok(Self { meta, device, first_keys, filter, _memory: memory })
    }

    /// Opens the SST that `meta` describes.
    ///
    /// # Errors
    /// `Corruption` when it is missing, short or damaged, `Invalid` when the budget does not
    /// hold index and filter.
    pub(crate) fn open(tools: &SstTools, meta: SstMeta) -> Result<Self> {
        let file = meta.id.file_name();
        let damaged = |what: &str| Error::corruption(what).with("file", &file);
        let device = tools
            .folder
            .open(&file, OpenMode::ReadOnly)
            .map_err(|error| damaged("SST cannot be opened").with("cause", error))?;
        let found = device.len_bytes()?;
        if found != meta.size_bytes() {
            return Err(damaged("SST has another length than committed")
                .with("expected", meta.size_bytes())
                .with("found", found)
                .with("remedy", "restore the store's folder from a copy"));
        }
        let memory = tools.budget.reserve("filters", meta.filter_bytes)?;
        let index = read_section(&meta, device.as_ref(), BlockKind::Index)?;
        let first_keys: Vec<u64> =
            (0..meta.rows_blocks as usize).map_while(|at| read_u64(&index, 8 * at)).collect();
        let is_ascending = first_keys.windows(2).all(|pair| pair.first() < pair.last());
        let is_whole = first_keys.len() == meta.rows_blocks as usize;
        if !is_whole || !is_ascending || first_keys.first() != Some(&meta.first.get()) {
            return Err(damaged("SST index is malformed"));
        }
        let filter = if meta.filter_bytes > 0 {
            let mut bits = read_section(&meta, device.as_ref(), BlockKind::Filter)?;
            bits.truncate(meta.filter_bytes as usize);
            if bits.len() as u64 != meta.filter_bytes {
                return Err(damaged("SST filter is shorter than committed"));
            }
            Some(Bloom::from_stored(bits, meta.filter_bits_per_row, Some(memory)))
        } else {
            None
        };
        Self::new(tools, meta, device, first_keys, filter)
    }

    /// Returns the block that holds `key` if any does; `None` when the SST certainly has not
    /// got it by its range.
    pub(crate) fn block_of(&self, key: Key) -> Option<u32> {
        if key < self.meta.first || key > self.meta.last {
            return None;
        }
        let after = self.first_keys.partition_point(|first| *first <= key.get());
        u32::try_from(after.checked_sub(1)?).ok()
    }

    /// Returns `false` only when the filter excludes `key`.
    pub(crate) fn may_hold(&self, key: Key) -> bool {
        self.filter.as_ref().is_none_or(|filter| filter.may_hold(key))
    }

    /// Returns the name of rows block `number`.
    pub(crate) fn block_name(&self, number: u32) -> BlockName {
        BlockName { sst: self.meta.id, number, kind: BlockKind::Rows }
    }

    /// Reads blocks `first..first + out.len() / block_bytes` straight from the device.
    ///
    /// # Errors
    /// `Io`, or `Corruption` at the end of the file.
    pub(crate) fn read_blocks(&self, first: u32, out: &mut [u8]) -> Result<()> {
        let is_whole = out.len().is_multiple_of(self.meta.block_bytes as usize);
        assert!(is_whole, "{} bytes are no blocks of {}", out.len(), self.meta.block_bytes);
        let at = u64::from(first) * u64::from(self.meta.block_bytes);
        self.device.read_at(at, out).map_err(|error| error.with("sst_id", self.meta.id.0))
    }
}

// Joins the payloads of all index or filter blocks.
fn read_section(meta: &SstMeta, device: &dyn Device, kind: BlockKind) -> Result<Vec<u8>> {
    let (from, to, entry_bytes) = match kind {
        BlockKind::Rows => (0, 0, 1),
        BlockKind::Index => (meta.rows_blocks, meta.rows_blocks + meta.index_blocks, 8),
        BlockKind::Filter => (meta.rows_blocks + meta.index_blocks, meta.block_count(), 1),
    };
    let mut block = AlignedBuf::new(meta.block_bytes as usize);
    let mut payload = Vec::new();
    for number in from..to {
        device.read_at(u64::from(number) * u64::from(meta.block_bytes), &mut block)?;
        let entries = check_block(&block, BlockName { sst: meta.id, number, kind })?;
        let end = HEADER_BYTES.saturating_add((entries.count as usize).saturating_mul(entry_bytes));
        let part = block.get(HEADER_BYTES..end).ok_or_else(|| {
            Error::corruption("block is malformed").with("sst_id", meta.id.0).with("block", number)
        })?;
        payload.extend_from_slice(part);
    }
    Ok(payload)
}

/// Reads every block of `sst` and checks it; returns the number of blocks.
///
/// # Errors
/// `Corruption` naming the first bad block.
pub(crate) fn verify_sst(sst: &OpenSst) -> Result<u64> {
    let meta = &sst.meta;
    read_section(meta, sst.device.as_ref(), BlockKind::Index)?;
    read_section(meta, sst.device.as_ref(), BlockKind::Filter)?;
    let mut block = AlignedBuf::new(meta.block_bytes as usize);
    let mut row_count = 0;
    for number in 0..meta.rows_blocks {
        sst.read_blocks(number, &mut block)?;
        row_count += Rows::check(&block, sst.block_name(number))?.count() as u64;
    }
    if row_count != meta.row_count {
        return Err(Error::corruption("SST has another number of rows than committed")
            .with("sst_id", meta.id.0)
            .with("expected", meta.row_count)
            .with("found", row_count));
    }
    Ok(u64::from(meta.block_count()))
}
