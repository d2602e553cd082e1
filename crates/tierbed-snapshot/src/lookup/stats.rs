//! Statistics of one lookup.

use serde::Serialize;

use crate::scratch::Filled;

/// What one lookup did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct LookupStats {
    /// Indices asked for.
    pub index_count: u64,
    /// Rows fetched: unique in each chunk.
    pub row_count: u64,
    /// Of these, found in a tier of the row cache.
    pub rows_cached: u64,
    /// Of these, always in memory.
    pub rows_resident: u64,
    /// Of these, answered by a coarse code or another row.
    pub rows_surrogate: u64,
    /// Of these, answered by the default row of their table.
    pub rows_default: u64,
    /// Of these, read from pages.
    pub rows_read: u64,
    /// Of these, never written: their initial values were computed.
    pub rows_initial: u64,
    /// Pages read.
    pub pages_read: u64,
    /// Of these, pages that could not be read or failed their checks.
    pub pages_failed: u64,
    /// Rows of such pages that replicas on other pages gave.
    pub rows_recovered: u64,
    /// Chunks the batch was handled in.
    pub chunk_count: u64,
}

impl LookupStats {
    pub(crate) fn add(&mut self, other: &Self) {
        self.index_count += other.index_count;
        self.row_count += other.row_count;
        self.rows_cached += other.rows_cached;
        self.rows_resident += other.rows_resident;
        self.rows_surrogate += other.rows_surrogate;
        self.rows_default += other.rows_default;
        self.rows_read += other.rows_read;
        self.rows_initial += other.rows_initial;
        self.pages_read += other.pages_read;
        self.pages_failed += other.pages_failed;
        self.rows_recovered += other.rows_recovered;
        self.chunk_count += other.chunk_count;
    }

    /// Counts how each row got its words.
    ///
    /// # Panics
    /// When a row is not whole.
    pub(super) fn count_rows(&mut self, filled: &[Filled]) {
        for state in filled {
            self.row_count += 1;
            match state {
                Filled::Cached => self.rows_cached += 1,
                Filled::Resident => self.rows_resident += 1,
                Filled::Surrogate => self.rows_surrogate += 1,
                Filled::Default => self.rows_default += 1,
                Filled::Read => self.rows_read += 1,
                Filled::Initial => self.rows_initial += 1,
                Filled::No | Filled::Reading { .. } => panic!("a row of a chunk is {state:?}"),
            }
        }
    }
}
