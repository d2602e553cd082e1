//! The free list: a stack of reusable rows, on pages of its own.
//!
//! Page `k` of the hidden table `_ids.f.<table>` holds entries `508 k ..` of the stack, each a
//! row as u64. The number of entries is part of the vocabulary's state; bytes above it mean
//! nothing.

use tierbed_core::{Result, RowId, RowKey, TableId, TrainStore};

use crate::bucket::{long, put};
use crate::pages::{PageCache, PAGE_BYTES};

/// Entries of one page.
pub(crate) const ROWS_PER_PAGE: u64 = ((PAGE_BYTES - 4) / 8) as u64;

/// The stack of table `table`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FreeRows {
    pub(crate) table: TableId,
}

impl FreeRows {
    /// Puts `row` on top of `count` entries.
    ///
    /// # Errors
    /// The store's; growing the table may exceed the budget.
    pub(crate) fn push(
        self,
        pages: &mut PageCache,
        store: &mut dyn TrainStore,
        count: &mut u64,
        row: u64,
    ) -> Result<()> {
        let (key, at) = self.place(*count);
        if at == 0 {
            let page_count = store.schema().table(self.table)?.row_count;
            if key.row.0 >= page_count {
                store.grow_table(self.table, 2 * page_count)?;
            }
            pages.create(store, key)?;
        }
        put(pages.page_mut(store, key)?, at, &row.to_le_bytes());
        *count += 1;
        Ok(())
    }

    /// Takes the top of `count` entries; `None` when there are none.
    ///
    /// # Errors
    /// The store's.
    pub(crate) fn pop(
        self,
        pages: &mut PageCache,
        store: &mut dyn TrainStore,
        count: &mut u64,
    ) -> Result<Option<u64>> {
        let Some(top) = count.checked_sub(1) else { return Ok(None) };
        let (key, at) = self.place(top);
        let row = long(pages.page(store, key)?, at);
        *count = top;
        Ok(Some(row))
    }

    /// Returns entry `at` of the stack, counted from its bottom.
    ///
    /// # Errors
    /// The store's.
    pub(crate) fn entry(
        self,
        pages: &mut PageCache,
        store: &mut dyn TrainStore,
        at: u64,
    ) -> Result<u64> {
        let (key, at) = self.place(at);
        Ok(long(pages.page(store, key)?, at))
    }

    fn place(self, entry: u64) -> (RowKey, usize) {
        let key = RowKey::new(self.table, RowId(entry / ROWS_PER_PAGE));
        let at = 8 * (entry % ROWS_PER_PAGE) as usize;
        assert!(at + 8 <= PAGE_BYTES - 4, "an entry ends before the checksum of its page");
        (key, at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pages::page_table;
    use tierbed_core::Budget;
    use tierbed_store::MemoryStore;

    #[test]
    fn last_in_is_first_out_over_many_pages() {
        let mut store = MemoryStore::new(Budget::unlimited());
        let table = store.add_table(page_table("_ids.f.t".into(), 1)).unwrap();
        let mut pages = PageCache::new(&Budget::unlimited(), 0).unwrap();
        let (free, mut count) = (FreeRows { table }, 0);
        assert_eq!(free.pop(&mut pages, &mut store, &mut count).unwrap(), None);
        for row in 0..20_000 {
            free.push(&mut pages, &mut store, &mut count, 3 * row).unwrap();
        }
        for row in (5_000..20_000).rev() {
            assert_eq!(free.pop(&mut pages, &mut store, &mut count).unwrap(), Some(3 * row));
        }
        free.push(&mut pages, &mut store, &mut count, 1).unwrap();
        assert_eq!(free.pop(&mut pages, &mut store, &mut count).unwrap(), Some(1));
        assert_eq!(free.pop(&mut pages, &mut store, &mut count).unwrap(), Some(3 * 4_999));
    }
}
