//! How does a small log speak of a large table? Clones of its rows, asked for unevenly.
//!
//! The table is the log's rows again and again, clone after clone. A query is one of the log's, of
//! a clone drawn with Zipf weights: the clones are as uneven as rows of a real table are, and
//! within a clone nothing changes. A placement of the log is cloned likewise ([`Clones::index`]),
//! which is what placing the cloned log would give, since no query asks for rows of two clones.

use tierbed_core::env::SplitMix64;
use tierbed_core::{Error, Result};
use tierbed_snapshot::index::{Lists, PageIndex};

/// Clones of a table, side by side.
#[derive(Debug, Clone)]
pub struct Clones {
    /// Rows of one clone.
    row_count: u32,
    /// Share of queries of the clones up to each, the last 1.
    shares: Vec<f64>,
}

impl Clones {
    /// Makes `count` clones of `row_count` rows; clone `i` is asked for with weight
    /// `1 / (i + 1)^skew`.
    ///
    /// # Errors
    /// `Invalid` without a clone, and when the clones have 2^32 - 1 rows or more.
    pub fn new(row_count: u32, count: u32, skew: f64) -> Result<Self> {
        let all = u64::from(row_count) * u64::from(count);
        if all == 0 || all >= u64::from(u32::MAX) {
            return Err(Error::invalid("clones must have 1 to 2^32 - 2 rows together")
                .with("rows", row_count)
                .with("clones", count));
        }
        let weights = (1..=count).map(|rank| f64::from(rank).powf(-skew));
        let total: f64 = weights.clone().sum();
        let mut sum = 0.0;
        let shares = weights.map(|weight| {
            sum += weight / total;
            sum
        });
        Ok(Self { row_count, shares: shares.collect() })
    }

    /// Returns the rows of all clones.
    #[must_use]
    pub fn row_count(&self) -> u32 {
        self.row_count * self.shares.len() as u32
    }

    /// Draws a clone and returns its first row.
    pub fn draw(&self, rng: &mut SplitMix64) -> u32 {
        let at = rng.unit_f64();
        let clone = self.shares.partition_point(|&share| share < at).min(self.shares.len() - 1);
        clone as u32 * self.row_count
    }

    /// Returns the rows of all clones, most used first, by the uses of each row of one clone.
    #[must_use]
    pub fn rows_by_use(&self, uses: &[u32]) -> Vec<u32> {
        let before = std::iter::once(0.0).chain(self.shares.iter().copied());
        let shares = self.shares.iter().zip(before).map(|(share, before)| share - before);
        let mut ranked: Vec<(f64, u32)> = Vec::with_capacity(self.row_count() as usize);
        for (clone, share) in (0..).zip(shares) {
            let rows = (clone * self.row_count..).zip(uses);
            ranked.extend(rows.map(|(row, &uses)| (share * f64::from(uses), row)));
        }
        ranked.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        ranked.into_iter().map(|(_, row)| row).collect()
    }

    /// Returns the index of the clones of a placed table, each on pages of its own.
    ///
    /// # Errors
    /// `Invalid` when there are 2^32 seats or more, or the index is of another table.
    pub fn index(&self, one: &PageIndex) -> Result<PageIndex> {
        let (forward, page_count) = (one.forward(), one.page_count());
        let seats = u64::from(forward.item_count()) * self.shares.len() as u64;
        if forward.list_count() != self.row_count || seats >= u64::from(u32::MAX) {
            return Err(Error::invalid("placement cannot be cloned")
                .with("rows", forward.list_count())
                .with("expected", self.row_count)
                .with("seats", seats));
        }
        let mut starts = Vec::with_capacity(self.row_count() as usize + 1);
        let mut pages = Vec::with_capacity(seats as usize);
        starts.push(0);
        for clone in 0..self.shares.len() as u32 {
            let (seats_before, pages_before) = (clone * forward.item_count(), clone * page_count);
            starts.extend(forward.starts().iter().skip(1).map(|start| start + seats_before));
            pages.extend(forward.items().iter().map(|page| page + pages_before));
        }
        Ok(PageIndex::from_forward(Lists::from_parts(starts, pages)?))
    }
}
