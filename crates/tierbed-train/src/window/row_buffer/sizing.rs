//! Sizes of the row buffer: slots per record length.

#![expect(
    clippy::indexing_slicing,
    reason = "pools are counted by the record lengths of the schema"
)]

use std::collections::BTreeMap;

use tierbed_core::Schema;

use super::pool::RowPool;

/// One pool: record length and number of slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PoolSize {
    pub(super) words: usize,
    pub(super) slots: usize,
}

/// All pools of a buffer.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Sizes {
    pub(super) pools: Vec<PoolSize>,
    pub(super) pool_of_table: Vec<u32>,
    pub(super) memory_bytes: u64,
}

/// Shares `free_bytes` among the record lengths in proportion to the bytes of their rows; a
/// length whose rows all fit gets no more than that, and leaves the rest to the others.
///
/// Every pool gets at least one slot, so the result may need more than `free_bytes`: the
/// reservation that follows then fails and names the minimum.
pub(super) fn share_out(schema: &Schema, free_bytes: u64) -> Sizes {
    let mut rows_of: BTreeMap<usize, u64> = BTreeMap::new();
    // The house's own tables are read past the buffer.
    for table in schema.tables().iter().filter(|table| !table.is_own()) {
        *rows_of.entry(table.record_words()).or_default() += table.row_count;
    }
    let words: Vec<usize> = rows_of.keys().copied().collect();
    let mut pools: Vec<PoolSize> =
        words.iter().map(|&words| PoolSize { words, slots: 1 }).collect();
    // Smallest demand first: what one pool leaves over, the next may use.
    let mut order: Vec<usize> = (0..pools.len()).collect();
    let demand = |words: usize| rows_of[&words];
    let bytes_of = |words: usize, slots: u64| slots.saturating_mul(4 * words as u64);
    order.sort_by_key(|&at| bytes_of(words[at], demand(words[at])));
    let mut left_bytes = free_bytes;
    let mut left_demand: u64 = rows_of.iter().map(|(&words, &rows)| bytes_of(words, rows)).sum();
    for at in order {
        let pool = &mut pools[at];
        let rows = demand(pool.words);
        let wanted = bytes_of(pool.words, rows);
        let share =
            (u128::from(left_bytes) * u128::from(wanted) / u128::from(left_demand.max(1))) as u64;
        pool.slots = slots_within(pool.words, share, rows);
        let used = RowPool::memory_bytes(pool.words, pool.slots) as u64;
        left_bytes = left_bytes.saturating_sub(used);
        left_demand -= wanted;
    }
    assert_eq!(left_demand, 0, "the rows of a record length have no pool");
    let memory_bytes =
        pools.iter().map(|pool| RowPool::memory_bytes(pool.words, pool.slots) as u64).sum();
    let pool_of = |words: usize| {
        let at = pools.iter().position(|pool| pool.words == words);
        at.and_then(|at| u32::try_from(at).ok()).unwrap_or(u32::MAX)
    };
    let pool_of_table = schema.tables().iter().map(|table| pool_of(table.record_words())).collect();
    Sizes { pools, pool_of_table, memory_bytes }
}

// The most slots, up to `rows`, whose pool fits in `bytes`; at least one.
fn slots_within(words: usize, bytes: u64, rows: u64) -> usize {
    let (mut fits, mut high) = (1u64, rows.min(u64::from(u32::MAX)).max(1));
    let is_within = |slots: u64| RowPool::memory_bytes(words, slots as usize) as u64 <= bytes;
    while fits < high {
        let middle = fits + (high - fits).div_ceil(2);
        if is_within(middle) {
            fits = middle;
        } else {
            high = middle - 1;
        }
    }
    fits as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use tierbed_core::TableSchema;

    fn schema(tables: &[(u32, u64)]) -> Schema {
        let table = |(at, &(dim, row_count)): (usize, &(u32, u64))| {
            TableSchema::plain(format!("t{at}"), row_count, dim)
        };
        Schema::new(tables.iter().enumerate().map(table).collect()).unwrap()
    }

    #[test]
    fn stays_within_what_is_free() {
        for free_bytes in [2_000, 100_000, 10_000_000] {
            let sizes = share_out(&schema(&[(16, 5000), (64, 300), (16, 90_000)]), free_bytes);
            assert!(sizes.memory_bytes <= free_bytes, "{sizes:?}");
            assert_eq!(sizes.pool_of_table, [0, 1, 0]);
        }
    }

    #[test]
    fn holds_everything_when_there_is_room() {
        let sizes = share_out(&schema(&[(16, 5000), (64, 300)]), 1 << 30);
        let slots: Vec<_> = sizes.pools.iter().map(|pool| pool.slots).collect();
        assert_eq!(slots, [5000, 300]);
    }

    #[test]
    fn tiny_budgets_still_ask_for_one_slot_each() {
        let sizes = share_out(&schema(&[(16, 5000), (64, 300)]), 10);
        assert!(sizes.pools.iter().all(|pool| pool.slots == 1));
        assert!(sizes.memory_bytes > 10);
    }
}
