//! The rows of a table that one rank holds.

/// Rows that a rank holds: a range, or blocks in turn with other ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RowSet {
    /// Rows that follow each other.
    Range {
        /// The first one.
        first: u64,
        /// The one behind the last.
        end: u64,
    },
    /// Blocks `rank`, `rank + ranks`, `rank + 2 * ranks`, ... of a table that grows.
    Blocks {
        /// Number of the first block.
        rank: u64,
        /// Ranks that take turns.
        ranks: u64,
        /// Rows of a block.
        block_rows: u64,
        /// No row has this number, or a higher one.
        end: u64,
    },
}

impl RowSet {
    /// Returns whether the rank holds row `id`.
    #[must_use]
    pub fn contains(self, id: i64) -> bool {
        let row = id as u64;
        match self {
            Self::Range { first, end } => first <= row && row < end,
            Self::Blocks { rank, ranks, block_rows, end } => {
                row < end && row / block_rows % ranks == rank
            }
        }
    }

    /// Returns the lowest number that a row of it may have.
    #[must_use]
    pub fn first(self) -> u64 {
        match self {
            Self::Range { first, .. } => first,
            Self::Blocks { rank, block_rows, end, .. } => (rank * block_rows).min(end),
        }
    }

    /// Returns the number behind the highest one that a row of it may have.
    #[must_use]
    pub fn end(self) -> u64 {
        match self {
            Self::Range { end, .. } | Self::Blocks { end, .. } => end,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_row_of_a_table_is_held_by_one_rank() {
        let blocks = |rank| RowSet::Blocks { rank, ranks: 3, block_rows: 4, end: 50 };
        let ranges = [(0, 7), (7, 7), (7, 50)].map(|(first, end)| RowSet::Range { first, end });
        for sets in [[0, 1, 2].map(blocks), ranges] {
            for id in 0..50 {
                let holders = sets.iter().filter(|set| set.contains(id));
                assert_eq!(holders.clone().count(), 1, "row {id}");
                assert!(holders.into_iter().all(|set| set.first() <= id as u64));
            }
            assert!(sets.iter().all(|set| !set.contains(-1) && !set.contains(50)));
        }
    }

    #[test]
    fn blocks_take_turns() {
        let second = RowSet::Blocks { rank: 1, ranks: 3, block_rows: 4, end: 50 };
        let held: Vec<i64> = (0..50).filter(|&id| second.contains(id)).collect();
        assert_eq!(held[..8], [4, 5, 6, 7, 16, 17, 18, 19]);
        assert_eq!(second.first(), 4);
        // A table may have fewer blocks than there are ranks.
        let none = RowSet::Blocks { rank: 2, ranks: 3, block_rows: 4, end: 5 };
        assert_eq!((none.first(), none.end()), (5, 5));
    }
}
