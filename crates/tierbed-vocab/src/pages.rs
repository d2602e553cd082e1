//! The page cache of an index over the store that holds its pages.
//!
//! Pages are records of hidden tables. The cache holds the only copy of a page in memory; changed
//! pages are written back when their frame is needed or at a checkpoint, sorted, together.
//! Eviction: CLOCK (second chance). It is our own, because an eviction writes to the store, which
//! may fail, and because the pages of one call must stay until it ends.

#![expect(
    clippy::indexing_slicing,
    reason = "the map and the free list hold numbers of frames, and each frame has a page"
)]

use hashbrown::HashMap;
use tierbed_core::{Budget, Error, Reservation, Result, RowKey, RowWrite, TableSchema, TrainStore};

/// Elements of a hidden table's rows: with the use count, a record fills a 4 KiB page of the
/// `file` store (24 bytes of header, 4 of presence bits).
pub(crate) const PAGE_WORDS: usize = 1016;
/// Bytes of a page: of a hidden table's record.
pub const PAGE_BYTES: usize = 4 * PAGE_WORDS + 4;
/// Fewer frames cannot hold what one insertion touches.
const FRAMES_MIN: usize = 8;
/// A page, its frame, its place in the map.
const FRAME_BYTES: usize = PAGE_BYTES + size_of::<Frame>() + 2 * (size_of::<RowKey>() + 8);

#[derive(Debug, Clone, Copy, Default)]
struct Frame {
    key: Option<RowKey>,
    is_dirty: bool,
    is_used: bool,
    round: u32,
}

/// The cache. See the module documentation.
#[derive(Debug)]
pub struct PageCache {
    frames: Vec<Frame>,
    bytes: Vec<u8>,
    at_of: HashMap<RowKey, u32>,
    free: Vec<u32>,
    hand: usize,
    round: u32,
    asked_count: u64,
    read_count: u64,
    _memory: Reservation,
}

/// Builds the schema of a hidden table of `page_count` pages.
pub(crate) fn page_table(name: String, page_count: u64) -> TableSchema {
    TableSchema::plain(name, page_count, PAGE_WORDS as u32)
}

impl PageCache {
    /// Builds a cache of about `memory_bytes`, at least eight pages.
    ///
    /// # Errors
    /// `Invalid` when the budget does not reach.
    pub fn new(budget: &Budget, memory_bytes: u64) -> Result<Self> {
        let count = (memory_bytes / FRAME_BYTES as u64).clamp(FRAMES_MIN as u64, 1 << 24) as usize;
        let memory = budget.reserve("vocabulary pages", (count * FRAME_BYTES) as u64)?;
        Ok(Self {
            frames: vec![Frame::default(); count],
            bytes: vec![0; count * PAGE_BYTES],
            at_of: HashMap::with_capacity(count),
            free: (0..count as u32).rev().collect(),
            hand: 0,
            round: 0,
            asked_count: 0,
            read_count: 0,
            _memory: memory,
        })
    }

    /// Returns pages asked for, and pages read from the store.
    #[must_use]
    pub fn counts(&self) -> (u64, u64) {
        (self.asked_count, self.read_count)
    }

    /// Returns how many pages are worth bringing at once.
    pub(crate) fn batch_max(&self) -> usize {
        self.frames.len() / 2
    }

    /// Brings the pages `keys` (increasing, at most [`batch_max`](Self::batch_max)) in one read.
    ///
    /// # Errors
    /// `Corruption` when a page was never written, otherwise the store's.
    pub(crate) fn bring(&mut self, store: &mut dyn TrainStore, keys: &[RowKey]) -> Result<()> {
        assert!(keys.is_sorted_by(|a, b| a < b), "pages are asked for in order, each once");
        self.round = self.round.wrapping_add(1);
        self.asked_count += keys.len() as u64;
        let mut missing = Vec::new();
        for &key in keys {
            match self.at_of.get(&key) {
                Some(&at) => self.touch(at),
                None => missing.push(key),
            }
        }
        if missing.is_empty() {
            return Ok(());
        }
        self.read_count += missing.len() as u64;
        let mut places = Vec::with_capacity(missing.len());
        for &key in &missing {
            match self.take_frame(store, key) {
                Ok(at) => places.push(at),
                Err(error) => {
                    self.forget(&places);
                    return Err(error);
                }
            }
        }
        let bytes = &mut self.bytes;
        let result = store.read(&missing, &mut |at, record| {
            let frame = places[at] as usize;
            match record {
                Some(record) if record.len() == PAGE_BYTES => {
                    bytes[frame * PAGE_BYTES..(frame + 1) * PAGE_BYTES].copy_from_slice(record);
                    Ok(())
                }
                _ => Err(Error::corruption("page of a vocabulary is missing")
                    .with("page", missing[at].row.0)),
            }
        });
        if result.is_err() {
            self.forget(&places);
        }
        result
    }

    /// Returns page `key`, which must have been brought.
    ///
    /// # Errors
    /// Those of reading it again, where the cache is too small to have kept it.
    pub(crate) fn page(&mut self, store: &mut dyn TrainStore, key: RowKey) -> Result<&mut [u8]> {
        let at = match self.at_of.get(&key) {
            Some(&at) => at,
            None => {
                self.bring(store, &[key])?;
                self.at_of[&key]
            }
        };
        self.touch(at);
        let start = at as usize * PAGE_BYTES;
        Ok(&mut self.bytes[start..start + PAGE_BYTES])
    }

    /// Returns page `key` for changing it.
    ///
    /// # Errors
    /// As [`page`](Self::page).
    pub(crate) fn page_mut(
        &mut self,
        store: &mut dyn TrainStore,
        key: RowKey,
    ) -> Result<&mut [u8]> {
        self.page(store, key)?;
        self.frames[self.at_of[&key] as usize].is_dirty = true;
        self.page(store, key)
    }

    /// Makes page `key`, all zeros, whatever the store holds there.
    ///
    /// # Errors
    /// Those of writing back a page whose frame is taken.
    pub(crate) fn create(&mut self, store: &mut dyn TrainStore, key: RowKey) -> Result<&mut [u8]> {
        if !self.at_of.contains_key(&key) {
            self.round = self.round.wrapping_add(1);
            self.take_frame(store, key)?;
        }
        let page = self.page_mut(store, key)?;
        page.fill(0);
        Ok(page)
    }

    /// Writes every changed page.
    ///
    /// # Errors
    /// The store's; pages not written stay changed.
    pub fn flush(&mut self, store: &mut dyn TrainStore) -> Result<()> {
        let all: Vec<u32> = (0..self.frames.len() as u32).collect();
        self.write_back(store, &all)
    }

    fn touch(&mut self, at: u32) {
        let frame = &mut self.frames[at as usize];
        frame.is_used = true;
        frame.round = self.round;
    }

    // Gives `key` a frame holding anything.
    fn take_frame(&mut self, store: &mut dyn TrainStore, key: RowKey) -> Result<u32> {
        if self.free.is_empty() {
            self.evict(store)?;
        }
        let Some(at) = self.free.pop() else {
            return Err(Error::invalid("page cache is too small for one batch of pages"));
        };
        assert!(self.frames[at as usize].key.is_none(), "a free frame holds no page");
        self.frames[at as usize] =
            Frame { key: Some(key), is_dirty: false, is_used: true, round: self.round };
        let before = self.at_of.insert(key, at);
        assert!(before.is_none(), "a page has one frame");
        Ok(at)
    }

    fn evict(&mut self, store: &mut dyn TrainStore) -> Result<()> {
        let wanted = (self.frames.len() / 8).max(1);
        let mut victims = Vec::with_capacity(wanted);
        for _ in 0..2 * self.frames.len() {
            if victims.len() == wanted {
                break;
            }
            let at = self.hand;
            self.hand = (self.hand + 1) % self.frames.len();
            let frame = &mut self.frames[at];
            if frame.key.is_none() || frame.round == self.round {
                continue;
            }
            if std::mem::take(&mut frame.is_used) {
                continue;
            }
            victims.push(at as u32);
        }
        victims.sort_unstable();
        victims.dedup();
        assert!(victims.len() <= wanted, "no more than an eighth is evicted");
        self.write_back(store, &victims)?;
        self.forget(&victims);
        Ok(())
    }

    fn write_back(&mut self, store: &mut dyn TrainStore, places: &[u32]) -> Result<()> {
        let mut dirty: Vec<(RowKey, u32)> = places
            .iter()
            .filter_map(|&at| {
                let frame = self.frames[at as usize];
                frame.key.filter(|_| frame.is_dirty).map(|key| (key, at))
            })
            .collect();
        dirty.sort_unstable();
        let record = |at: u32| {
            let start = at as usize * PAGE_BYTES;
            &self.bytes[start..start + PAGE_BYTES]
        };
        let rows: Vec<RowWrite<'_>> =
            dirty.iter().map(|&(key, at)| RowWrite { key, record: record(at) }).collect();
        if rows.is_empty() {
            return Ok(());
        }
        store.write(&rows)?;
        for (_, at) in dirty {
            self.frames[at as usize].is_dirty = false;
        }
        Ok(())
    }

    // Gives frames back without writing them.
    fn forget(&mut self, places: &[u32]) {
        for &at in places {
            if let Some(key) = std::mem::take(&mut self.frames[at as usize]).key {
                self.at_of.remove(&key);
                self.free.push(at);
            }
        }
        let is_counted = self.free.len() + self.at_of.len() == self.frames.len();
        assert!(is_counted, "a frame is free or has a page");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tierbed_core::env::SplitMix64;
    use tierbed_core::{RowId, RowStore, TableId};
    use tierbed_store::MemoryStore;

    #[test]
    fn pages_keep_what_was_written_however_few_frames_there_are() {
        let mut store = MemoryStore::new(Budget::unlimited());
        let table = store.add_table(page_table("_ids.b.t".into(), 100)).unwrap();
        assert_eq!(store.schema().table(table).unwrap().record_bytes(), PAGE_BYTES);
        let key = |row| RowKey::new(table, RowId(row));
        let mut pages = PageCache::new(&Budget::unlimited(), 0).unwrap();
        let mut model = [0u8; 100];
        for row in 0..100 {
            assert!(pages.create(&mut store, key(row)).unwrap().iter().all(|&byte| byte == 0));
        }
        let mut rng = SplitMix64::new(3);
        for step in 0..2000 {
            let row = rng.below(100);
            let page = pages.page_mut(&mut store, key(row)).unwrap();
            assert_eq!(page[77], model[row as usize]);
            page[77] = step as u8;
            model[row as usize] = step as u8;
            if step % 100 == 0 {
                let some: Vec<RowKey> = (0..4).map(|at| key(20 * at + 3)).collect();
                pages.bring(&mut store, &some).unwrap();
                pages.flush(&mut store).unwrap();
            }
        }
        pages.flush(&mut store).unwrap();
        let mut fresh = PageCache::new(&Budget::unlimited(), 1 << 20).unwrap();
        for row in 0..100 {
            assert_eq!(fresh.page(&mut store, key(row)).unwrap()[77], model[row as usize]);
        }
    }

    #[test]
    fn a_page_never_written_is_corruption() {
        let mut store = MemoryStore::new(Budget::unlimited());
        let table = store.add_table(page_table("_ids.b.t".into(), 10)).unwrap();
        let mut pages = PageCache::new(&Budget::unlimited(), 0).unwrap();
        for _ in 0..20 {
            let error = pages.page(&mut store, RowKey::new(table, RowId(4))).unwrap_err();
            assert_eq!(error.kind(), tierbed_core::ErrorKind::Corruption);
        }
        let nowhere = RowKey::new(TableId(7), RowId(0));
        assert!(pages.page(&mut store, nowhere).is_err());
        assert_eq!(pages.free.len(), FRAMES_MIN, "failed reads keep no frames");
    }
}
