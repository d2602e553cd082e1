//! Sources of queries, and the range of queries that is kept.
//!
//! A [`QuerySource`] hands out one query after the other in bounded memory; [`read_log`] keeps a
//! sample of them. What stays in memory is the kept queries alone: four bytes per pin.

use tierbed_core::env::SplitMix64;
use tierbed_core::{Error, Result};

use super::QueryLog;

/// Queries in order of time, read one by one.
pub trait QuerySource {
    /// Reads the next query into `rows`, which is cleared first. Rows may repeat. False after the
    /// last query.
    ///
    /// # Errors
    /// `Invalid` or `Corruption` naming file and line (or query) for what is no query; `Io`.
    fn next_query(&mut self, rows: &mut Vec<u32>) -> Result<bool>;

    /// Returns how many rows the table has, where the source says so.
    fn row_count(&self) -> Option<u32>;

    /// Returns bytes of the file taken in, and its size.
    fn progress(&self) -> (u64, u64);
}

/// Which queries are kept, and of which table.
#[derive(Debug, Clone, PartialEq)]
pub struct ReadOptions {
    /// Rows of the table. By default what the source says, else one more than the largest row.
    pub row_count: Option<u32>,
    /// Share of the queries kept, each drawn by itself.
    pub sample: f64,
    /// Equal seeds keep equal queries.
    pub seed: u64,
    /// Queries kept at most: the first ones, after sampling.
    pub query_count_max: Option<u64>,
    /// Rows kept of one query at most, the first ones. A few users with thousands of rows would
    /// otherwise weigh more than all others.
    pub query_rows_max: Option<usize>,
}

impl Default for ReadOptions {
    fn default() -> Self {
        Self { row_count: None, sample: 1.0, seed: 0, query_count_max: None, query_rows_max: None }
    }
}

/// Queries between two calls of a progress callback.
const PROGRESS_QUERIES: u64 = 1 << 16;

/// Reads the queries of `source` that `options` keep.
///
/// `progress` is told bytes done and bytes in all, about every 65,536 queries.
///
/// # Errors
/// `Invalid` for a sample outside `0..=1`, for a row beyond the table and when no query is left;
/// what the source and `progress` return.
pub fn read_log(
    source: &mut dyn QuerySource,
    options: &ReadOptions,
    progress: &mut dyn FnMut(u64, u64) -> Result<()>,
) -> Result<QueryLog> {
    if !(0.0..=1.0).contains(&options.sample) {
        return Err(Error::invalid("sample of a query log must be from 0 to 1")
            .with("sample", options.sample));
    }
    let row_count = options.row_count.or_else(|| source.row_count());
    let mut builder = QueryLog::builder(row_count.unwrap_or(u32::MAX));
    let mut luck = SplitMix64::new(options.seed);
    let mut rows = Vec::new();
    let mut read_count = 0_u64;
    let is_full = |kept: usize| options.query_count_max.is_some_and(|max| kept as u64 >= max);
    while !is_full(builder.query_count()) && source.next_query(&mut rows)? {
        read_count += 1;
        if read_count.is_multiple_of(PROGRESS_QUERIES) {
            let (done, total) = source.progress();
            progress(done, total)?;
        }
        if options.sample < 1.0 && luck.unit_f64() >= options.sample {
            continue;
        }
        rows.truncate(options.query_rows_max.unwrap_or(usize::MAX));
        builder.push(&rows)?;
    }
    let (done, total) = source.progress();
    progress(done, total)?;
    let log = builder.finish();
    if log.query_count() == 0 {
        return Err(Error::invalid("query log has no query")
            .with("read", read_count)
            .with("remedy", "check the file and its format, or keep a larger sample"));
    }
    Ok(if row_count.is_none() { log.with_rows_seen() } else { log })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Queries `[at, at + 1]`.
    struct Pairs {
        next: u32,
        count: u32,
        known: Option<u32>,
    }

    impl QuerySource for Pairs {
        fn next_query(&mut self, rows: &mut Vec<u32>) -> Result<bool> {
            rows.clear();
            rows.extend([self.next, self.next + 1]);
            self.next += 1;
            Ok(self.next <= self.count)
        }

        fn row_count(&self) -> Option<u32> {
            self.known
        }

        fn progress(&self) -> (u64, u64) {
            (u64::from(self.next), u64::from(self.count))
        }
    }

    fn read(count: u32, known: Option<u32>, options: &ReadOptions) -> Result<QueryLog> {
        read_log(&mut Pairs { next: 0, count, known }, options, &mut |_, _| Ok(()))
    }

    #[test]
    fn the_table_is_as_large_as_told_or_as_seen() {
        let options = ReadOptions::default();
        assert_eq!(read(5, None, &options).unwrap().row_count(), 6);
        assert_eq!(read(5, Some(40), &options).unwrap().row_count(), 40);
        let told = ReadOptions { row_count: Some(7), ..options };
        assert_eq!(read(5, Some(40), &told).unwrap().row_count(), 7);
        let small = ReadOptions { row_count: Some(5), ..told };
        assert!(read(5, None, &small).unwrap_err().to_string().contains("beyond the table"));
    }

    #[test]
    fn a_sample_keeps_its_share_and_the_order() {
        let options = ReadOptions { sample: 0.25, seed: 3, ..ReadOptions::default() };
        let log = read(20_000, None, &options).unwrap();
        assert!((4_700..5_300).contains(&log.query_count()), "{}", log.query_count());
        let firsts: Vec<u32> = log.iter().map(|query| query[0]).collect();
        assert!(firsts.windows(2).all(|pair| pair[0] < pair[1]));
        assert_eq!(log, read(20_000, None, &options).unwrap());
        assert!(read(9, None, &ReadOptions { sample: 1.5, ..options.clone() }).is_err());
        assert!(read(9, None, &ReadOptions { sample: 0.0, ..options }).is_err());
    }

    #[test]
    fn the_first_queries_and_rows_can_be_asked_for() {
        let options = ReadOptions {
            query_count_max: Some(3),
            query_rows_max: Some(1),
            ..ReadOptions::default()
        };
        let log = read(100, None, &options).unwrap();
        assert_eq!(log.iter().collect::<Vec<_>>(), [[0], [1], [2]]);
    }

    #[test]
    fn progress_can_stop_the_reading() {
        let mut stop = |_: u64, _: u64| Err(Error::invalid("stopped"));
        let mut source = Pairs { next: 0, count: 100_000, known: None };
        let error = read_log(&mut source, &ReadOptions::default(), &mut stop).unwrap_err();
        assert_eq!(error.message(), "stopped");
        assert_eq!(source.next, PROGRESS_QUERIES as u32);
    }
}
