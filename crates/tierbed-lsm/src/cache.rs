//! The block cache: recently read blocks of SSTs.
//!
//! Least recently used blocks leave when the bytes run out. Blocks are checked before they
//! enter. The capacity is reserved from the budget as `block cache`. Source: RecDB §2.2 and
//! §5.1.4 (LRU block cache beside the write buffers).

use std::collections::BTreeMap;
use std::sync::Arc;

use hashbrown::HashMap;

use crate::version::SstId;

/// Bytes one block costs beside its contents: two map entries.
const ENTRY_BYTES: usize = 128;

type BlockPlace = (SstId, u32);

/// Blocks in memory, at most `capacity_bytes` of them.
#[derive(Debug)]
pub(crate) struct BlockCache {
    capacity_bytes: usize,
    used_bytes: usize,
    blocks: HashMap<BlockPlace, (u64, Arc<[u8]>)>,
    by_use: BTreeMap<u64, BlockPlace>,
    next_use: u64,
}

impl BlockCache {
    /// Builds an empty cache.
    pub(crate) fn new(capacity_bytes: usize) -> Self {
        let (blocks, by_use) = (HashMap::new(), BTreeMap::new());
        Self { capacity_bytes, used_bytes: 0, blocks, by_use, next_use: 0 }
    }

    /// Returns a block and marks it as just used.
    pub(crate) fn get(&mut self, place: BlockPlace) -> Option<Arc<[u8]>> {
        let (used, block) = self.blocks.get_mut(&place)?;
        let ordered = self.by_use.remove(used);
        assert_eq!(ordered, Some(place), "a block has one place in the order of use");
        *used = self.next_use;
        self.by_use.insert(self.next_use, place);
        self.next_use += 1;
        Some(Arc::clone(block))
    }

    /// Takes a block in; the longest unused ones leave. A block larger than the cache stays out.
    pub(crate) fn insert(&mut self, place: BlockPlace, block: Arc<[u8]>) {
        let bytes = block.len() + ENTRY_BYTES;
        self.remove(place);
        if bytes > self.capacity_bytes {
            return;
        }
        while self.used_bytes + bytes > self.capacity_bytes {
            let Some((_, oldest)) = self.by_use.first_key_value() else {
                panic!("{} bytes are used by no block", self.used_bytes)
            };
            self.remove(*oldest);
        }
        self.used_bytes += bytes;
        self.by_use.insert(self.next_use, place);
        self.blocks.insert(place, (self.next_use, block));
        self.next_use += 1;
        assert!(self.used_bytes <= self.capacity_bytes, "the cache keeps to its bytes");
        assert_eq!(self.blocks.len(), self.by_use.len(), "every block is in the order of use");
    }

    /// Forgets the blocks `0..block_count` of an SST that is gone.
    pub(crate) fn remove_sst(&mut self, sst: SstId, block_count: u32) {
        (0..block_count).for_each(|block| self.remove((sst, block)));
    }

    fn remove(&mut self, place: BlockPlace) {
        if let Some((used, block)) = self.blocks.remove(&place) {
            let ordered = self.by_use.remove(&used);
            assert_eq!(ordered, Some(place), "a block has one place in the order of use");
            self.used_bytes -= block.len() + ENTRY_BYTES;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(byte: u8) -> Arc<[u8]> {
        vec![byte; 100].into()
    }

    #[test]
    fn the_longest_unused_block_leaves_and_bytes_stay_below_the_capacity() {
        let mut cache = BlockCache::new(2 * (100 + ENTRY_BYTES));
        let place = |number| (SstId(1), number);
        cache.insert(place(1), block(1));
        cache.insert(place(2), block(2));
        assert!(cache.get(place(1)).is_some());
        cache.insert(place(3), block(3));
        assert!(cache.get(place(2)).is_none());
        assert_eq!(cache.get(place(1)).unwrap()[0], 1);
        cache.insert(place(3), block(4));
        assert_eq!(cache.get(place(3)).unwrap()[0], 4);
        assert!(cache.used_bytes <= cache.capacity_bytes);
        cache.remove_sst(SstId(1), 4);
        assert_eq!((cache.used_bytes, cache.by_use.len()), (0, 0));
        BlockCache::new(10).insert(place(1), block(1));
    }
}
