//! How do the pages of one call come in? One engine and one scratch per concurrent call.
//!
//! A call handles its indices in chunks that fit the scratch: unique rows get a place in the
//! scratch's words, then each is filled from the cache, from a page, or from the initialiser.
//! Memory is fixed when the reader is made and counted against the budget.

use std::sync::Arc;

use tierbed_cache::Visits;
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
    index: PlaceTable,
    pub(crate) visits: Visits,
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
/// order of the cache's shards, the table of places, the page it is on.
const ENTRY_BYTES: usize = size_of::<RowKey>()
    + 8
    + 1
    + 8
    + Visits::BYTES_PER_KEY
    + PlaceTable::BYTES_PER_KEY
    + size_of::<Wanted>();
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
            index: PlaceTable::with_capacity(entries),
            visits: Visits::with_capacity(entries),
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
        let bytes = self.index.memory_bytes()
            + entries * (size_of::<RowKey>() + 8 + 1 + 8 + Visits::BYTES_PER_KEY)
            + self.wanted.capacity() * size_of::<Wanted>()
            + self.words.len() * size_of::<f32>();
        bytes as u64
    }

    /// Starts a chunk of `index_count` indices, or as many of them as fit.
    pub(crate) fn start(&mut self, index_count: usize) {
        self.index.start(index_count.min(self.starts.capacity()));
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
        let is_fitting = self.words_used + row_words <= self.words.len();
        let start = match self.index.find_or_add(key, &self.keys, is_fitting) {
            Found::Known(at) => self.row_starts.get(at as usize).copied().unwrap_or(0),
            Found::Full => return false,
            Found::Added => {
                let start = self.words_used;
                self.words_used += row_words;
                self.keys.push(key);
                self.row_starts.push(start);
                self.filled.push(Filled::No);
                start
            }
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

/// Which unique row has which position? Open addressing; starting over costs nothing.
///
/// A chunk uses the first slots only, as many as it needs, and what earlier chunks left there has
/// another generation.
#[derive(Debug)]
struct PlaceTable {
    /// Generation and position.
    slots: Box<[(u32, u32)]>,
    generation: u32,
    mask: usize,
}

enum Found {
    Known(u32),
    Added,
    Full,
}

impl PlaceTable {
    /// At most: two slots a key, rounded up to a power of two.
    const BYTES_PER_KEY: usize = 4 * size_of::<(u32, u32)>();

    fn with_capacity(key_count: usize) -> Self {
        let slots = vec![(0, 0); (2 * key_count).next_power_of_two()].into_boxed_slice();
        Self { slots, generation: 0, mask: 0 }
    }

    fn memory_bytes(&self) -> usize {
        size_of_val(&*self.slots)
    }

    /// Forgets everything and makes ready for `key_count` keys.
    fn start(&mut self, key_count: usize) {
        self.mask = (2 * key_count).next_power_of_two().min(self.slots.len()) - 1;
        self.generation = self.generation.wrapping_add(1);
        if self.generation == 0 {
            self.slots.fill((0, 0));
            self.generation = 1;
        }
    }

    /// Finds `key` among `keys`, or gives it the next position if it may be added.
    fn find_or_add(&mut self, key: RowKey, keys: &[RowKey], may_add: bool) -> Found {
        let mut at = mix64((u64::from(key.table.0) << 40) ^ key.row.0) as usize & self.mask;
        while let Some(slot) = self.slots.get_mut(at) {
            if slot.0 != self.generation {
                if !may_add {
                    break;
                }
                *slot = (self.generation, keys.len() as u32);
                return Found::Added;
            }
            if keys.get(slot.1 as usize) == Some(&key) {
                return Found::Known(slot.1);
            }
            at = (at + 1) & self.mask;
        }
        Found::Full
    }
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
