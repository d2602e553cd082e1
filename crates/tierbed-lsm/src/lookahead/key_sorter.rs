//! Read order of a request's rows.
//!
//! In the order of the tree: rows of one block follow each other, so a block is loaded once
//! however small the cache is. Pure. Source: RecDB §4.2 (Key Sorter).

use crate::key::Key;

/// Returns the positions of `keys` in the order in which to read them; equal keys keep theirs.
#[must_use]
pub fn read_order(keys: &[Key]) -> Vec<usize> {
    let mut order: Vec<(Key, usize)> = keys.iter().copied().zip(0..).collect();
    // Requests through the waist come sorted by row and are nearly sorted here.
    order.sort_unstable();
    order.into_iter().map(|(_, at)| at).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use tierbed_core::{RowId, RowKey, TableId};

    #[test]
    fn the_papers_example_loads_each_block_once() {
        // RecDB Fig. 3: requests jump between blocks (here of 100 rows); sorted, each block's
        // requests are neighbours.
        let rows = [89u64, 264, 5, 110, 64, 133];
        let keys: Vec<_> =
            rows.iter().map(|row| Key::cold(RowKey::new(TableId(0), RowId(*row)))).collect();
        let switches = |order: &[usize]| {
            let blocks: Vec<_> = order.iter().map(|at| rows[*at] / 100).collect();
            blocks.windows(2).filter(|pair| pair[0] != pair[1]).count()
        };
        let order = read_order(&keys);
        assert_eq!(switches(&[0, 1, 2, 3, 4, 5]), 5);
        assert_eq!(switches(&order), 2);
    }

    #[test]
    fn hot_rows_come_first_and_equal_keys_keep_their_order() {
        let row = |row| RowKey::new(TableId(0), RowId(row));
        let keys = [Key::cold(row(1)), Key::hot(row(9)), Key::cold(row(1)), Key::cold(row(0))];
        assert_eq!(read_order(&keys), [1, 3, 0, 2]);
        assert!(read_order(&[]).is_empty());
    }
}
