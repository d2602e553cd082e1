//! Query log of one table: queries in order of time, each a set of distinct rows.
//!
//! ```text
//! offsets  0     3  4       7        query q is rows[offsets[q]..offsets[q + 1]]
//! rows     5 1 8 │1│ 2 8 9 │
//! ```
//!
//! Four bytes per asked row and eight per query. A row of one query is called a *pin*.

mod packed;
mod source;
mod text;

use std::ops::Range;

use tierbed_core::env::SplitMix64;
use tierbed_core::{Error, Result};

use crate::partition::order::shuffle;
use crate::Placement;

pub use packed::{decode_packed, encode_packed, write_packed, PackedQueries};
pub use source::{read_log, QuerySource, ReadOptions};
pub use text::TextQueries;

/// Queries over the rows `0..row_count` of one table, earliest first.
///
/// Inside a query rows are distinct and keep the order in which they were asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QueryLog {
    offsets: Vec<u64>,
    rows: Vec<u32>,
    row_count: u32,
}

impl QueryLog {
    /// Refuses a placement of another table.
    pub(crate) fn check_rows_of(&self, placement: &Placement) -> Result<()> {
        if self.row_count() == placement.row_count() {
            return Ok(());
        }
        Err(Error::invalid("query log and placement are of different tables")
            .with("rows_of_log", self.row_count())
            .with("rows_of_placement", placement.row_count()))
    }

    /// Starts an empty log over `row_count` rows.
    #[must_use]
    pub fn builder(row_count: u32) -> QueryLogBuilder {
        let log = Self { offsets: vec![0], rows: Vec::new(), row_count };
        QueryLogBuilder { log, seen: Vec::new() }
    }

    /// Builds a log from queries; see [`QueryLogBuilder::push`].
    ///
    /// # Errors
    ///
    /// `Invalid` for a row that is not below `row_count`.
    pub fn from_queries<Q: AsRef<[u32]>>(
        row_count: u32,
        queries: impl IntoIterator<Item = Q>,
    ) -> Result<Self> {
        let mut builder = Self::builder(row_count);
        for query in queries {
            builder.push(query.as_ref())?;
        }
        Ok(builder.finish())
    }

    /// Returns how many rows the table has; rows that were never asked for count.
    #[must_use]
    pub fn row_count(&self) -> u32 {
        self.row_count
    }

    /// Returns how many queries there are; queries without rows count.
    #[must_use]
    pub fn query_count(&self) -> usize {
        self.offsets.len() - 1
    }

    /// Returns how many pins there are: rows over all queries.
    #[must_use]
    pub fn pin_count(&self) -> usize {
        self.rows.len()
    }

    /// Returns where each query begins, `[query_count + 1]`, and the rows, `[pin_count]`.
    #[must_use]
    pub fn as_parts(&self) -> (&[u64], &[u32]) {
        (&self.offsets, &self.rows)
    }

    /// Gives up the log for its offsets, `[query_count + 1]`, and rows, `[pin_count]`.
    #[must_use]
    pub fn into_parts(self) -> (Vec<u64>, Vec<u32>) {
        (self.offsets, self.rows)
    }

    /// Returns the rows of query `query`, or `None` past the end.
    #[must_use]
    pub fn query(&self, query: usize) -> Option<&[u32]> {
        let (&begin, &end) = (self.offsets.get(query)?, self.offsets.get(query + 1)?);
        self.rows.get(begin as usize..end as usize)
    }

    /// Returns the rows of query `query`.
    ///
    /// # Panics
    /// When there is no such query.
    pub(crate) fn rows_of(&self, query: usize) -> &[u32] {
        let rows = self.query(query);
        rows.unwrap_or_else(|| panic!("query {query} of {}", self.query_count()))
    }

    /// Returns the queries, earliest first.
    #[expect(clippy::indexing_slicing, reason = "offsets rise to the number of pins")]
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &[u32]> + Clone {
        self.offsets.windows(2).map(|pair| match *pair {
            [begin, end] => &self.rows[begin as usize..end as usize],
            _ => unreachable!("windows of two offsets"),
        })
    }

    /// Counts in how many queries each row is, `[row_count]`.
    #[must_use]
    #[expect(clippy::indexing_slicing, reason = "a log's rows are below its row count")]
    pub fn frequencies(&self) -> Vec<u32> {
        let mut counts = vec![0u32; self.row_count as usize];
        for &row in &self.rows {
            let count = &mut counts[row as usize];
            *count = count.saturating_add(1);
        }
        counts
    }

    /// Splits by time: the earlier `share` of the queries (rounded down), and the later rest.
    ///
    /// # Errors
    ///
    /// `Invalid` for a share outside `0..=1`.
    pub fn split_by_share(&self, share: f64) -> Result<(Self, Self)> {
        let at = self.count_of_share(share)?;
        Ok((self.slice(0..at), self.slice(at..self.query_count())))
    }

    /// Returns how many queries the earlier `share` of them are, rounded down.
    ///
    /// # Errors
    ///
    /// `Invalid` for a share outside `0..=1`.
    pub(crate) fn count_of_share(&self, share: f64) -> Result<usize> {
        if !(0.0..=1.0).contains(&share) {
            return Err(Error::invalid("share of a split must be from 0 to 1").with("share", share));
        }
        Ok(((self.query_count() as f64 * share) as usize).min(self.query_count()))
    }

    /// Puts the queries into an order drawn by `seed`, for logs whose order is not that of time.
    #[must_use]
    pub fn shuffled(&self, seed: u64) -> Self {
        let mut order: Vec<usize> = (0..self.query_count()).collect();
        shuffle(&mut order, &mut SplitMix64::new(seed));
        let mut shuffled = Self { offsets: vec![0], rows: Vec::new(), row_count: self.row_count };
        for query in order {
            shuffled.push_distinct(self.rows_of(query));
        }
        shuffled
    }

    /// Returns what some of the queries ask of `rows` alone, which are numbered by their place
    /// there.
    #[expect(clippy::indexing_slicing, reason = "a log's rows are below its row count")]
    pub(crate) fn of_rows(&self, rows: &[u32], queries: Range<usize>) -> Self {
        let mut place_of = vec![u32::MAX; self.row_count as usize];
        for (place, &row) in (0..).zip(rows) {
            place_of[row as usize] = place;
        }
        let row_count = rows.len() as u32;
        let mut part = Self { offsets: vec![0], rows: Vec::new(), row_count };
        for query in self.iter().skip(queries.start).take(queries.len()) {
            let places = query.iter().map(|&row| place_of[row as usize]);
            part.rows.extend(places.filter(|&place| place != u32::MAX));
            part.offsets.push(part.rows.len() as u64);
        }
        part
    }

    /// Makes the table as small as the largest row that was asked for.
    pub(crate) fn with_rows_seen(mut self) -> Self {
        self.row_count = self.rows.iter().max().map_or(0, |row| row + 1);
        self
    }

    /// Copies some of the queries.
    ///
    /// # Panics
    /// When there are not as many queries.
    #[expect(clippy::indexing_slicing, reason = "the range is checked against the queries")]
    pub(crate) fn slice(&self, queries: Range<usize>) -> Self {
        let count = self.query_count();
        assert!(queries.start <= queries.end && queries.end <= count, "{queries:?} of {count}");
        let (first, last) = (self.offsets[queries.start], self.offsets[queries.end]);
        let offsets = &self.offsets[queries.start..=queries.end];
        Self {
            offsets: offsets.iter().map(|offset| offset - first).collect(),
            rows: self.rows[first as usize..last as usize].to_vec(),
            row_count: self.row_count,
        }
    }

    /// Draws about `query_count` queries (all, when there are fewer), still in order of time.
    ///
    /// The same seed draws the same queries.
    #[must_use]
    pub fn sample(&self, query_count: usize, seed: u64) -> Self {
        if query_count >= self.query_count() {
            return self.clone();
        }
        let mut rng = SplitMix64::new(seed);
        let mut sampled = Self { offsets: vec![0], rows: Vec::new(), row_count: self.row_count };
        // Selection sampling (Knuth, volume 2, algorithm S): exactly as many as asked for.
        let mut wanted = query_count as u64;
        for (at, query) in self.iter().enumerate() {
            if rng.below((self.query_count() - at) as u64) < wanted {
                sampled.push_distinct(query);
                wanted -= 1;
            }
        }
        sampled
    }

    fn push_distinct(&mut self, rows: &[u32]) {
        self.rows.extend_from_slice(rows);
        self.offsets.push(self.rows.len() as u64);
    }
}

/// Collects queries into a [`QueryLog`].
#[derive(Debug)]
pub struct QueryLogBuilder {
    log: QueryLog,
    /// The rows of the query being pushed, sorted: finds what is asked twice.
    seen: Vec<u32>,
}

impl QueryLogBuilder {
    /// Adds a query. Rows asked for twice count once, at their first place.
    ///
    /// # Errors
    ///
    /// `Invalid` for a row that is not below the row count; the log is then unchanged.
    pub fn push(&mut self, rows: &[u32]) -> Result<()> {
        let row_count = self.log.row_count;
        if let Some(row) = rows.iter().find(|&&row| row >= row_count) {
            return Err(Error::invalid("query asks for a row beyond the table")
                .with("row", row)
                .with("row_count", row_count)
                .with("query", self.log.query_count()));
        }
        self.seen.clear();
        self.seen.extend_from_slice(rows);
        self.seen.sort_unstable();
        self.seen.dedup();
        if self.seen.len() == rows.len() {
            self.log.push_distinct(rows);
            return Ok(());
        }
        for row in rows {
            // A row leaves `seen` when it is met first.
            if let Ok(at) = self.seen.binary_search(row) {
                self.log.rows.push(*row);
                self.seen.remove(at);
            }
        }
        self.log.offsets.push(self.log.rows.len() as u64);
        Ok(())
    }

    /// Returns how many queries were pushed.
    #[must_use]
    pub fn query_count(&self) -> usize {
        self.log.query_count()
    }

    /// Returns the log.
    #[must_use]
    pub fn finish(self) -> QueryLog {
        self.log
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log() -> QueryLog {
        QueryLog::from_queries(10, [&[5, 1, 8][..], &[1], &[], &[2, 8, 9, 2, 8], &[0]])
            .expect("rows are in range")
    }

    #[test]
    fn rows_of_a_query_are_distinct_and_keep_their_order() {
        let log = log();
        let queries: Vec<&[u32]> = log.iter().collect();
        assert_eq!(queries, [&[5, 1, 8][..], &[1], &[], &[2, 8, 9], &[0]]);
        assert_eq!((log.query_count(), log.pin_count()), (5, 8));
        assert_eq!(log.query(3), Some(&[2, 8, 9][..]));
        assert_eq!(log.query(5), None);
        assert_eq!(log.frequencies(), [1, 2, 1, 0, 0, 1, 0, 0, 2, 1]);
    }

    #[test]
    fn a_row_beyond_the_table_is_refused_and_leaves_the_log_alone() {
        let mut builder = QueryLog::builder(3);
        builder.push(&[2]).expect("in range");
        let error = builder.push(&[0, 3]).expect_err("3 is beyond");
        assert!(error.to_string().contains("row: 3"), "{error}");
        assert_eq!(builder.finish().iter().collect::<Vec<_>>(), [&[2]]);
    }

    #[test]
    fn a_split_keeps_all_queries_in_order() {
        let log = log();
        for share in [0.0, 0.3, 0.8, 1.0] {
            let (early, late) = log.split_by_share(share).expect("a share");
            assert_eq!(early.query_count(), (5.0 * share) as usize);
            let both: Vec<&[u32]> = early.iter().chain(late.iter()).collect();
            assert_eq!(both, log.iter().collect::<Vec<_>>());
        }
        assert!(log.split_by_share(1.1).is_err());
        assert!(log.split_by_share(f64::NAN).is_err());
    }

    #[test]
    fn another_order_has_the_same_queries() {
        let log = log();
        let shuffled = log.shuffled(3);
        let sorted = |log: &QueryLog| {
            let mut queries: Vec<Vec<u32>> = log.iter().map(<[u32]>::to_vec).collect();
            queries.sort();
            queries
        };
        assert_eq!(sorted(&shuffled), sorted(&log));
        assert_ne!(shuffled, log);
        assert_eq!(shuffled, log.shuffled(3));
    }

    #[test]
    fn a_sample_has_the_size_asked_for_and_repeats_with_its_seed() {
        let queries: Vec<[u32; 1]> = (0..100).map(|row| [row]).collect();
        let log = QueryLog::from_queries(100, queries).expect("in range");
        let sample = log.sample(30, 7);
        assert_eq!(sample.query_count(), 30);
        let rows: Vec<u32> = sample.iter().flatten().copied().collect();
        assert!(rows.windows(2).all(|pair| pair[0] < pair[1]), "order of time");
        assert_eq!(sample, log.sample(30, 7));
        assert_ne!(sample, log.sample(30, 8));
        assert_eq!(log.sample(100, 1), log);
    }
}
