//! How do the pages of one call come in? One engine and one scratch per concurrent call.
//!
//! A call handles its indices in chunks that fit the scratch: unique rows get a place in the
//! scratch's words, then each is filled from the cache, from a page, or from the initialiser.
//! Memory is fixed when the reader is made and counted against the budget.

use std::sync::Arc;

use hashbrown::HashTable;
use tierbed_core::env::mix64;
use tierbed_core::stats::IoStats;
use tierbed_core::{Error, Result, RowKey};
use tierbed_io::{open_engine, Device, DeviceId, EngineOptions, IoEngine, Op, Request, PAGE_BYTES};

use crate::page::{PageShape, PageView};

/// How a row of the scratch got its words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Filled {
    /// Not yet.
    No,
    /// From the cache.
    Cached,
    /// From pages.
    Read,
    /// By the initialiser.
    Initial,
}

/// A row, or a part of one, wanted from a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Wanted {
    pub(crate) page_id: u64,
    /// Position among the unique rows.
    pub(crate) at: u32,
    pub(crate) part: u32,
}

/// The unique rows of a chunk and their words.
#[derive(Debug)]
pub(crate) struct Scratch {
    index: HashTable<u32>,
    pub(crate) keys: Vec<RowKey>,
    /// First word of each unique row.
    pub(crate) row_starts: Vec<usize>,
    pub(crate) filled: Vec<Filled>,
    /// First word of the row of each index.
    pub(crate) starts: Vec<usize>,
    pub(crate) words: Vec<f32>,
    words_used: usize,
    pub(crate) wanted: Vec<Wanted>,
}

/// Bytes per unique row and index besides the words: key, start, state, start of the index, the
/// cache's shard number, the hash table (5 bytes, 16/7 buckets), the page it is on.
const ENTRY_BYTES: usize = size_of::<RowKey>() + 8 + 1 + 8 + 1 + 12 + size_of::<Wanted>();
/// Words of a part: what the extra `Wanted`s of large rows are counted by.
const PART_WORDS_MIN: usize = 1000;

impl Scratch {
    /// Lays out `memory_bytes`: half for words, half for the rest, but at least one row of
    /// `row_words_max`.
    pub(crate) fn new(memory_bytes: u64, row_words_max: usize) -> Self {
        let half = usize::try_from(memory_bytes / 2).unwrap_or(usize::MAX / 4);
        let words = (half / size_of::<f32>()).max(row_words_max);
        let parts_max = words / PART_WORDS_MIN;
        let entries = (half.saturating_sub(parts_max * size_of::<Wanted>()) / ENTRY_BYTES).max(1);
        Self {
            index: HashTable::with_capacity(entries),
            keys: Vec::with_capacity(entries),
            row_starts: Vec::with_capacity(entries),
            filled: Vec::with_capacity(entries),
            starts: Vec::with_capacity(entries),
            words: vec![0.0; words],
            words_used: 0,
            wanted: Vec::with_capacity(entries + parts_max),
        }
    }

    /// Returns the bytes held: what counts against the budget.
    pub(crate) fn memory_bytes(&self) -> u64 {
        let entries = self.keys.capacity();
        let bytes = self.index.allocation_size()
            + entries * (size_of::<RowKey>() + 8 + 1 + 8 + 1)
            + self.wanted.capacity() * size_of::<Wanted>()
            + self.words.len() * size_of::<f32>();
        bytes as u64
    }

    pub(crate) fn clear(&mut self) {
        self.index.clear();
        self.keys.clear();
        self.row_starts.clear();
        self.filled.clear();
        self.starts.clear();
        self.wanted.clear();
        self.words_used = 0;
    }

    /// Adds an index of row `key`; `false` when the chunk is full.
    pub(crate) fn add(&mut self, key: RowKey, row_words: usize) -> bool {
        if self.starts.len() == self.starts.capacity() {
            return false;
        }
        let (keys, hash) = (&self.keys, hash_of(key));
        let is_same = |at: &u32| keys.get(*at as usize) == Some(&key);
        let start = if let Some(&at) = self.index.find(hash, is_same) {
            self.row_starts.get(at as usize).copied().unwrap_or(0)
        } else {
            let start = self.words_used;
            if start + row_words > self.words.len() {
                return false;
            }
            let keys = &self.keys;
            let rehash = |at: &u32| keys.get(*at as usize).map_or(0, |key| hash_of(*key));
            self.index.insert_unique(hash, keys.len() as u32, rehash);
            self.words_used += row_words;
            self.keys.push(key);
            self.row_starts.push(start);
            self.filled.push(Filled::No);
            start
        };
        self.starts.push(start);
        true
    }

    /// Returns the words of unique row `at`, from its `before`-th on.
    pub(crate) fn row_mut(&mut self, at: usize, before: usize, count: usize) -> &mut [f32] {
        let start = self.row_starts.get(at).copied().unwrap_or(usize::MAX / 2) + before;
        self.words.get_mut(start..start + count).unwrap_or_default()
    }

    pub(crate) fn mark(&mut self, at: usize, filled: Filled) {
        if let Some(state) = self.filled.get_mut(at) {
            *state = filled;
        }
    }
}

fn hash_of(key: RowKey) -> u64 {
    mix64((u64::from(key.table.0) << 40) ^ key.row.0)
}

/// An engine over the page file, and a scratch.
pub(crate) struct Reader {
    /// Its place among the readers of a snapshot.
    pub(crate) number: usize,
    engine: Box<dyn IoEngine>,
    device: DeviceId,
    pub(crate) scratch: Scratch,
    done: Vec<tierbed_io::Completion>,
}

impl Reader {
    pub(crate) fn new(
        number: usize,
        options: &EngineOptions,
        pages: &Arc<dyn Device>,
        scratch: Scratch,
    ) -> Result<Self> {
        let mut engine = open_engine(options)?;
        let device = engine.attach(Arc::clone(pages));
        Ok(Self { number, engine, device, scratch, done: Vec::new() })
    }

    pub(crate) fn memory_bytes(&self) -> u64 {
        self.engine.memory_bytes() + self.scratch.memory_bytes()
    }

    pub(crate) fn io_stats(&self) -> IoStats {
        self.engine.stats()
    }

    /// Reads every page named in the scratch's `wanted` once and copies the wanted rows into its
    /// words. Returns the number of pages read.
    ///
    /// # Errors
    /// `Corruption` for a page that fails its checks or lacks a row the index promised, `Io`
    /// from the device.
    pub(crate) fn read_wanted(&mut self, pages: &PageTable) -> Result<u64> {
        self.scratch.wanted.sort_unstable();
        let mut next = 0;
        let mut page_count = 0;
        let mut failed = None;
        while (next < self.scratch.wanted.len() && failed.is_none())
            || self.engine.in_flight_count() > 0
        {
            // After a failure nothing new is submitted, but what flies must land: the engine is
            // used by the next call.
            while failed.is_none() {
                let Some(first) = self.scratch.wanted.get(next).copied() else { break };
                let Some(buf) = self.engine.acquire() else { break };
                self.engine.submit(Request {
                    device: self.device,
                    op: Op::Read,
                    offset_bytes: first.page_id * PAGE_BYTES as u64,
                    len_bytes: PAGE_BYTES as u32,
                    buf,
                    tag: next as u64,
                });
                page_count += 1;
                next += group_len(&self.scratch.wanted, next);
            }
            if let Err(error) = self.land(pages) {
                failed.get_or_insert(error);
            }
        }
        failed.map_or(Ok(page_count), Err)
    }

    /// Waits for pages and takes the rows out of them.
    fn land(&mut self, pages: &PageTable) -> Result<()> {
        let mut done = std::mem::take(&mut self.done);
        let mut result = self.engine.wait(&mut done);
        for completion in done.drain(..) {
            if result.is_ok() {
                result = completion.result.and_then(|()| {
                    let bytes = self.engine.bytes(completion.buf);
                    let bytes = bytes.get(..PAGE_BYTES).unwrap_or_default();
                    take_rows(&mut self.scratch, completion.tag as usize, bytes, pages)
                });
            }
            self.engine.release(completion.buf);
        }
        self.done = done;
        result
    }
}

impl std::fmt::Debug for Reader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reader").field("number", &self.number).finish_non_exhaustive()
    }
}

/// What a reader must know of the page file.
#[derive(Debug)]
pub(crate) struct PageTable {
    pub(crate) shapes: Vec<PageShape>,
    pub(crate) path: String,
}

fn group_len(wanted: &[Wanted], first: usize) -> usize {
    let rest = wanted.get(first..).unwrap_or_default();
    let page = rest.first().map(|wanted| wanted.page_id);
    rest.iter().take_while(|wanted| Some(wanted.page_id) == page).count()
}

fn take_rows(scratch: &mut Scratch, first: usize, bytes: &[u8], pages: &PageTable) -> Result<()> {
    let page_id = scratch.wanted.get(first).map_or(0, |wanted| wanted.page_id);
    let named =
        |error: Error| error.with("path", &pages.path).with("remedy", "publish the snapshot again");
    let page = PageView::parse(bytes, page_id, &pages.shapes).map_err(named)?;
    for entry in first..first + group_len(&scratch.wanted, first) {
        let Some(wanted) = scratch.wanted.get(entry).copied() else { break };
        let at = wanted.at as usize;
        let Some(key) = scratch.keys.get(at).copied() else { break };
        let weights = (page.table == key.table && page.part == wanted.part as usize)
            .then(|| page.find(key.row))
            .flatten();
        let Some(weights) = weights else {
            return Err(named(
                Error::corruption("page lacks a row that the forward index puts there")
                    .with("page_id", page_id)
                    .with("table_id", key.table.0)
                    .with("row", key.row.0),
            ));
        };
        let shape = pages.shapes.get(key.table.0 as usize);
        let (before, count) = shape.map_or((0, 0), |shape| shape.part_words(page.part));
        let out: &mut [u8] = bytemuck::cast_slice_mut(scratch.row_mut(at, before, count));
        if out.len() == weights.len() {
            out.copy_from_slice(weights);
        }
        scratch.mark(at, Filled::Read);
    }
    Ok(())
}
