//! Working memory of a chunk: its unique rows, their words and their state.
//!
//! Unique rows get a place in the scratch's words; each is filled once, from the cache, from a
//! page, or by the initialiser. Memory is fixed when the scratch is made and counted against the
//! budget.
#![expect(
    clippy::indexing_slicing,
    reason = "positions of unique rows come from the table of this chunk"
)]

use tierbed_cache::Visits;
use tierbed_core::env::mix64;
use tierbed_core::RowKey;
use tierbed_kernels::{Codec, Kernels};

use crate::layers::PagePlace;
use crate::page::PageShape;
use crate::tiers::TierScratch;

/// How a row of the scratch got its words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Filled {
    /// Not yet, and nothing is on its way.
    No,
    /// Not yet: so many pages are still to come, one for each part of the row.
    Reading {
        /// Parts that have not come.
        parts_left: u8,
    },
    /// From a tier of the cache.
    Cached,
    /// From the rows that are always in memory.
    Resident,
    /// By another row, or a coarse code.
    Surrogate,
    /// By the default row of the table.
    Default,
    /// From pages.
    Read,
    /// By the initialiser.
    Initial,
}

impl Filled {
    /// Tells whether all words of the row are there.
    pub(crate) fn is_whole(self) -> bool {
        !matches!(self, Self::No | Self::Reading { .. })
    }
}

/// What a page has of a row.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RowPart<'a> {
    pub(crate) codec: &'a Codec,
    pub(crate) shape: PageShape,
    /// Which part these bytes are.
    pub(crate) part: usize,
    pub(crate) bytes: &'a [u8],
}

/// Words that are written freely, but read only where their rows are whole: by
/// [`Scratch::row`] and [`Scratch::arena`]. An error of a page that got lost on its way cannot
/// become an answer.
#[derive(Debug)]
pub(crate) struct Words(Vec<f32>);

impl Words {
    /// Returns `count` words from `start` on, to be written.
    ///
    /// # Panics
    /// When there are not as many.
    pub(crate) fn row_mut(&mut self, start: usize, count: usize) -> &mut [f32] {
        let len = self.0.len();
        assert!(start + count <= len, "words {start}..+{count} of {len}");
        &mut self.0[start..start + count]
    }
}

/// A row, or a part of one, wanted from a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Wanted {
    /// A [`PagePlace`], packed; below 2^48 a page of the snapshot itself.
    pub(crate) page_id: u64,
    /// Position among the unique rows.
    pub(crate) at: u32,
    pub(crate) part: u32,
}

impl Wanted {
    pub(crate) fn place(&self) -> PagePlace {
        PagePlace::unpacked(self.page_id)
    }
}

/// A row wanted from the pages of a placement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AskedItem {
    pub(crate) placement: u32,
    pub(crate) item: u32,
    /// Position among the unique rows.
    pub(crate) at: u32,
}

/// What the size of a scratch depends on besides its bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ScratchShape {
    /// Words of the longest row.
    pub(crate) row_words_max: usize,
    /// Bytes per row of choosing among pages; 0: nothing is chosen.
    pub(crate) choice_bytes_per_row: usize,
    /// Tiers that are told what was found.
    pub(crate) tier_count: usize,
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
    /// Number of the tier that had each unique row, from 1; 0: none.
    pub(crate) tier_of: Vec<u8>,
    /// Slot of that tier in which it was.
    pub(crate) slot_of: Vec<u32>,
    /// Sample of each unique row that asked for it last, from 1; 0: none yet.
    pub(crate) asked_by: Vec<u32>,
    /// Unique row of each index.
    pub(crate) ats: Vec<u32>,
    /// First word of the row of each index.
    pub(crate) starts: Vec<usize>,
    pub(crate) words: Words,
    words_used: usize,
    pub(crate) wanted: Vec<Wanted>,
    pub(crate) asked: Vec<AskedItem>,
    /// Rows stay as they are coded: of use to who writes them elsewhere.
    pub(crate) keeps_codes: bool,
    kernels: Kernels,
    /// Memory for telling the tiers, and its bytes.
    pub(crate) work: TierScratch,
    work_bytes: u64,
    /// Pages of a placement are chosen in memory of their own, which counts here.
    choice_bytes_per_row: usize,
}

/// Bytes per unique row and index: key, start, state, start of the index, its tier, slot and
/// sample, the position of the index, what a later tier is asked for, the order of the shards.
const ROW_BYTES: usize = 2 * size_of::<RowKey>()
    + 8
    + size_of::<Filled>()
    + 8
    + 1
    + 4
    + 4
    + 4
    + 8
    + Visits::BYTES_PER_KEY;
/// Those besides the words: also the table of places and the page it is on.
const ENTRY_BYTES: usize = ROW_BYTES + PlaceTable::BYTES_PER_KEY + size_of::<Wanted>();
/// Words of a part: what the extra `Wanted`s of large rows are counted by.
const PART_WORDS_MIN: usize = 1000;

impl Scratch {
    /// Lays out `memory_bytes`: half for words, half for the rest, but at least the longest row.
    pub(crate) fn new(memory_bytes: u64, shape: ScratchShape) -> Self {
        let ScratchShape { row_words_max, choice_bytes_per_row, tier_count } = shape;
        let half = usize::try_from(memory_bytes / 2).unwrap_or(usize::MAX / 4);
        let words = (half / size_of::<f32>()).max(row_words_max);
        assert!(words > 0, "a scratch without words");
        let parts_max = words / PART_WORDS_MIN;
        let asked_bytes = if choice_bytes_per_row > 0 { size_of::<AskedItem>() } else { 0 };
        let entry_bytes = ENTRY_BYTES + asked_bytes + choice_bytes_per_row;
        let entries = (half.saturating_sub(parts_max * size_of::<Wanted>()) / entry_bytes).max(1);
        Self {
            index: PlaceTable::with_capacity(entries),
            visits: Visits::with_capacity(entries),
            keys: Vec::with_capacity(entries),
            row_starts: Vec::with_capacity(entries),
            filled: Vec::with_capacity(entries),
            tier_of: Vec::with_capacity(entries),
            slot_of: Vec::with_capacity(entries),
            asked_by: Vec::with_capacity(entries),
            ats: Vec::with_capacity(entries),
            work: TierScratch::default(),
            work_bytes: TierScratch::bytes_for(tier_count, row_words_max),
            starts: Vec::with_capacity(entries),
            words: Words(vec![0.0; words]),
            words_used: 0,
            wanted: Vec::with_capacity(entries + parts_max),
            asked: Vec::with_capacity(if asked_bytes > 0 { entries } else { 0 }),
            keeps_codes: false,
            kernels: Kernels::detect(),
            choice_bytes_per_row,
        }
    }

    /// Returns the bytes held: what counts against the budget.
    pub(crate) fn memory_bytes(&self) -> u64 {
        let entries = self.keys.capacity();
        let bytes = self.index.memory_bytes()
            + entries * ROW_BYTES
            + entries * self.choice_bytes_per_row
            + self.asked.capacity() * size_of::<AskedItem>()
            + self.wanted.capacity() * size_of::<Wanted>()
            + self.words.0.len() * size_of::<f32>();
        bytes as u64 + self.work_bytes
    }

    /// Starts a chunk of `index_count` indices, or as many of them as fit, of decoded rows.
    pub(crate) fn start(&mut self, index_count: usize) {
        self.index.start(index_count.min(self.starts.capacity()));
        self.keys.clear();
        self.row_starts.clear();
        self.filled.clear();
        self.tier_of.clear();
        self.slot_of.clear();
        self.asked_by.clear();
        self.ats.clear();
        self.starts.clear();
        self.wanted.clear();
        self.asked.clear();
        self.words_used = 0;
        self.keeps_codes = false;
    }

    /// Adds an index of row `key`; `false` when the chunk is full.
    pub(crate) fn add(&mut self, key: RowKey, row_words: usize) -> bool {
        if self.starts.len() == self.starts.capacity() {
            return false;
        }
        let is_fitting = self.words_used + row_words <= self.words.0.len();
        let start = match self.index.find_or_add(key, &self.keys, is_fitting) {
            Found::Known(at) => {
                self.ats.push(at);
                self.row_starts[at as usize]
            }
            Found::Full => return false,
            Found::Added => {
                let start = self.words_used;
                self.words_used += row_words;
                self.ats.push(self.keys.len() as u32);
                self.tier_of.push(0);
                self.slot_of.push(0);
                self.asked_by.push(0);
                self.keys.push(key);
                self.row_starts.push(start);
                self.filled.push(Filled::No);
                start
            }
        };
        assert!(self.words_used <= self.words.0.len(), "rows of a chunk beyond its words");
        self.starts.push(start);
        true
    }

    /// Returns the first word of unique row `at`.
    ///
    /// # Panics
    /// When there is no such row.
    pub(crate) fn start_of(&self, at: usize) -> usize {
        assert!(at < self.row_starts.len(), "row {at} of {}", self.row_starts.len());
        self.row_starts[at]
    }

    /// Returns `count` words of unique row `at`, from its `before`-th on, to be filled.
    ///
    /// # Panics
    /// When there is no such row, or it has fewer words.
    pub(crate) fn row_mut(&mut self, at: usize, before: usize, count: usize) -> &mut [f32] {
        let start = self.start_of(at) + before;
        self.words.row_mut(start, count)
    }

    /// Notes that all words of unique row `at` are there.
    pub(crate) fn mark(&mut self, at: usize, filled: Filled) {
        assert!(filled.is_whole(), "a row is marked when it is whole");
        *self.state_mut(at) = filled;
    }

    /// Notes that unique row `at` comes from pages, in `parts` parts.
    ///
    /// # Panics
    /// When the row is filled, or on its way already.
    pub(crate) fn expect(&mut self, at: usize, parts: u8) {
        let state = self.state_mut(at);
        assert!(*state == Filled::No && parts > 0, "row {at} is {state:?}");
        *state = Filled::Reading { parts_left: parts };
    }

    /// Takes a part of unique row `at`; the row has been read when its last part has come.
    ///
    /// # Panics
    /// When no part of the row is expected any more.
    pub(crate) fn take_part(&mut self, at: usize, part: RowPart<'_>) {
        let state = self.state_mut(at);
        *state = match *state {
            Filled::Reading { parts_left: 1 } => Filled::Read,
            Filled::Reading { parts_left } => Filled::Reading { parts_left: parts_left - 1 },
            other => panic!("a part of row {at} comes, which is {other:?}"),
        };
        let (is_last, start) = (*state == Filled::Read, self.start_of(at));
        let RowPart { codec, shape, part, bytes } = part;
        let PageShape { dim, row_bytes, .. } = shape;
        let (kernels, is_code) = (self.kernels, *codec != Codec::F32 && !self.keeps_codes);
        if is_code && bytes.len() == row_bytes {
            kernels.decode_row(codec, bytes, self.words.row_mut(start, dim));
            return;
        }
        // Codes of several pages are no longer than the row, so they gather in its place.
        assert!(self.keeps_codes || row_bytes <= 4 * dim, "{shape:?} has no room for its code");
        let words = self.words.row_mut(start, row_bytes.div_ceil(size_of::<f32>()));
        let code = &mut bytemuck::cast_slice_mut(words)[..row_bytes];
        code[shape.part(part)].copy_from_slice(bytes);
        if is_code && is_last {
            let code = code.to_vec();
            kernels.decode_row(codec, &code, self.words.row_mut(start, dim));
        }
    }

    fn state_mut(&mut self, at: usize) -> &mut Filled {
        assert!(at < self.filled.len(), "row {at} of {}", self.filled.len());
        &mut self.filled[at]
    }

    /// Returns the `dim` words of unique row `at`.
    ///
    /// # Panics
    /// When they are not all there.
    pub(crate) fn row(&self, at: usize, dim: usize) -> &[f32] {
        let state = self.filled[at];
        assert!(state.is_whole(), "row {at} is {state:?}");
        let start = self.start_of(at);
        &self.words.0[start..start + dim]
    }

    /// Returns the words of all rows, each from its start on.
    ///
    /// # Panics
    /// When a row is not whole.
    pub(crate) fn arena(&self) -> &[f32] {
        let missing = self.filled.iter().position(|state| !state.is_whole());
        assert!(missing.is_none(), "row {missing:?} of a chunk is not whole");
        &self.words.0
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
        // A search ends at a free slot.
        assert!(self.mask + 1 > key_count, "{key_count} keys in {} slots", self.mask + 1);
        self.generation = self.generation.wrapping_add(1);
        if self.generation == 0 {
            self.slots.fill((0, 0));
            self.generation = 1;
        }
    }

    /// Finds `key` among `keys`, or gives it the next position if it may be added.
    fn find_or_add(&mut self, key: RowKey, keys: &[RowKey], may_add: bool) -> Found {
        let mut at = mix64((u64::from(key.table.0) << 40) ^ key.row.0) as usize & self.mask;
        loop {
            let slot = &mut self.slots[at];
            if slot.0 != self.generation {
                if !may_add {
                    return Found::Full;
                }
                *slot = (self.generation, keys.len() as u32);
                return Found::Added;
            }
            if keys[slot.1 as usize] == key {
                return Found::Known(slot.1);
            }
            at = (at + 1) & self.mask;
        }
    }
}
