//! Space that replicas of a placement may take.

use tierbed_core::{Error, Result};

/// How much space replicas may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReplicaBudget {
    /// Replicas at most.
    pub replica_count: u64,
    /// Pages at most that hold no home.
    pub page_count: u64,
    /// Pages at most, home pages included.
    pub total_page_count: u64,
}

impl ReplicaBudget {
    /// Returns what ratio `ratio` allows for `row_count` rows on pages of `rows_per_page`.
    ///
    /// # Errors
    ///
    /// `Invalid` for a ratio that is negative or not a number, and for pages without room.
    pub fn of_ratio(ratio: f64, row_count: u32, rows_per_page: u32) -> Result<Self> {
        if !(ratio >= 0.0 && ratio.is_finite()) {
            return Err(Error::invalid("replication ratio must be 0 or more").with("ratio", ratio));
        }
        if rows_per_page == 0 {
            return Err(Error::invalid("a page must have room for one row at least"));
        }
        // A millionth of a row more: 0.29 * 100 is 28.999999999999996 in binary.
        let replica_count = (ratio * f64::from(row_count) + 1e-6) as u64;
        let page_count = replica_count.div_ceil(u64::from(rows_per_page));
        let home_page_count = u64::from(row_count.div_ceil(rows_per_page));
        Ok(Self { replica_count, page_count, total_page_count: home_page_count + page_count })
    }
}
