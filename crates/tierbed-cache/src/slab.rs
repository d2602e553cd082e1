//! Where do the rows of a pool lie? Slots of one size in slabs of fixed bytes.
#![expect(
    clippy::indexing_slicing,
    reason = "slots are made here; one outside its slab is a programmer error"
)]

/// Bytes of metadata per slot: the key and the tick.
pub(crate) const SLOT_METADATA_BYTES: usize = size_of::<u64>() + size_of::<u32>();
/// Bytes the allocator may add to the four blocks of a slab.
pub(crate) const SLAB_OVERHEAD_BYTES: u64 = 4 * 32;
/// The key of an empty slot; no packed key reaches it.
pub(crate) const EMPTY_KEY: u64 = u64::MAX;

/// Rows of one size with their keys.
#[derive(Debug)]
pub(crate) struct Slab {
    /// The pool it is in.
    pub(crate) pool: usize,
    row_words: usize,
    keys: Box<[u64]>,
    /// Occupied: when the row was last asked for. Empty: the next free slot of the pool.
    ticks: Box<[u32]>,
    rows: Box<[f32]>,
}

impl Slab {
    pub(crate) fn new(pool: usize, row_words: usize, slot_count: u32) -> Self {
        let slots = slot_count as usize;
        Self {
            pool,
            row_words,
            keys: vec![EMPTY_KEY; slots].into_boxed_slice(),
            ticks: vec![0; slots].into_boxed_slice(),
            rows: vec![0.0; slots * row_words].into_boxed_slice(),
        }
    }

    pub(crate) fn slot_count(&self) -> usize {
        self.keys.len()
    }

    pub(crate) fn row_words(&self) -> usize {
        self.row_words
    }

    pub(crate) fn row_bytes_total(&self) -> u64 {
        size_of_val(&*self.rows) as u64
    }

    pub(crate) fn metadata_bytes(&self) -> u64 {
        (self.slot_count() * SLOT_METADATA_BYTES) as u64 + SLAB_OVERHEAD_BYTES
    }

    pub(crate) fn key(&self, at: usize) -> u64 {
        self.keys[at]
    }

    pub(crate) fn set_key(&mut self, at: usize, key: u64) {
        self.keys[at] = key;
    }

    pub(crate) fn tick(&self, at: usize) -> u32 {
        self.ticks[at]
    }

    pub(crate) fn set_tick(&mut self, at: usize, tick: u32) {
        self.ticks[at] = tick;
    }

    pub(crate) fn row(&self, at: usize) -> &[f32] {
        &self.rows[at * self.row_words..(at + 1) * self.row_words]
    }

    pub(crate) fn set_row(&mut self, at: usize, row: &[f32]) {
        self.rows[at * self.row_words..(at + 1) * self.row_words].copy_from_slice(row);
    }
}
