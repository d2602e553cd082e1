//! Where do the rows of a pool lie? Slots of one size in slabs of fixed bytes.
#![expect(
    clippy::indexing_slicing,
    reason = "slots are made here; one outside its slab is a programmer error"
)]

/// Bytes of metadata per slot: the key, and the tick where ages are compared.
pub(crate) fn slot_metadata_bytes(has_ticks: bool) -> u64 {
    (size_of::<u64>() + if has_ticks { size_of::<u32>() } else { 0 }) as u64
}

/// Bytes the allocator may add to the blocks of a slab.
pub(crate) const SLAB_OVERHEAD_BYTES: u64 = 4 * 32;
/// Set in the key of an empty slot; no packed key reaches it. The low half is the next empty slot
/// of the pool.
const EMPTY: u64 = 1 << 63;

/// Rows of one size with their keys.
#[derive(Debug)]
pub(crate) struct Slab {
    /// The pool it is in.
    pub(crate) pool: usize,
    row_words: usize,
    keys: Box<[u64]>,
    /// When each row was last asked for; none in a tier of one pool.
    ticks: Box<[u32]>,
    rows: Box<[f32]>,
}

impl Slab {
    pub(crate) fn new(pool: usize, row_words: usize, slot_count: u32, has_ticks: bool) -> Self {
        let slots = slot_count as usize;
        let tick_count = if has_ticks { slots } else { 0 };
        Self {
            pool,
            row_words,
            keys: vec![EMPTY; slots].into_boxed_slice(),
            ticks: vec![0; tick_count].into_boxed_slice(),
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
        let per_slot = slot_metadata_bytes(!self.ticks.is_empty());
        self.slot_count() as u64 * per_slot + SLAB_OVERHEAD_BYTES
    }

    /// Returns the key in a slot, or none when it is empty.
    pub(crate) fn key(&self, at: usize) -> Option<u64> {
        Some(self.keys[at]).filter(|key| key & EMPTY == 0)
    }

    /// Tells whether a slot holds `key`.
    #[inline]
    pub(crate) fn has(&self, at: usize, key: u64) -> bool {
        self.keys[at] == key
    }

    pub(crate) fn set_key(&mut self, at: usize, key: u64) {
        self.keys[at] = key;
    }

    /// Returns the slot after this empty one.
    pub(crate) fn next_free(&self, at: usize) -> u32 {
        self.keys[at] as u32
    }

    /// Empties a slot, in front of `next_free`.
    pub(crate) fn set_free(&mut self, at: usize, next_free: u32) {
        self.keys[at] = EMPTY | u64::from(next_free);
    }

    pub(crate) fn tick(&self, at: usize) -> u32 {
        self.ticks.get(at).copied().unwrap_or(0)
    }

    #[inline]
    pub(crate) fn set_tick(&mut self, at: usize, tick: u32) {
        if let Some(held) = self.ticks.get_mut(at) {
            *held = tick;
        }
    }

    pub(crate) fn row(&self, at: usize) -> &[f32] {
        &self.rows[at * self.row_words..(at + 1) * self.row_words]
    }

    pub(crate) fn set_row(&mut self, at: usize, row: &[f32]) {
        self.rows[at * self.row_words..(at + 1) * self.row_words].copy_from_slice(row);
    }
}
