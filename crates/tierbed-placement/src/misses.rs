//! Queries behind a row cache: replay of a log that keeps the rows that missed.
//!
//! Only rows that miss the cache are read from pages, so a placement is built from, and judged by,
//! the *miss stream*: the log without its hits. The cache keeps rows, not pages: what comes along
//! on a page is not kept, so hits do not depend on the placement and one replay serves all.
//!
//! ```text
//! earlier queries ──▶ cache (warms up)
//! queries ──▶ batches of b: each row once ──▶ cache ──misses──▶ miss stream, one query per batch
//! ```
//!
//! Source: MaxEmbed §8.3 (evaluation behind a cache; its replicas are chosen without one).

use tierbed_cache::{PolicyKind, ReplayCache};
use tierbed_core::{Error, Result};

use crate::QueryLog;

/// A row cache in front of the pages.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CacheInFront {
    /// Rows it holds, as a share of the table's rows. 0 is no cache.
    pub share: f64,
    /// Who leaves.
    pub policy: PolicyKind,
}

impl CacheInFront {
    /// No cache.
    pub const NONE: Self = Self { share: 0.0, policy: PolicyKind::Lru };

    /// Returns the rows it holds of a table of `row_count`.
    ///
    /// # Errors
    /// `Invalid` for a share outside `0..=1`.
    pub fn capacity_rows(&self, row_count: u32) -> Result<usize> {
        if !(0.0..=1.0).contains(&self.share) {
            return Err(Error::invalid("cache share must be from 0 to 1").with("share", self.share));
        }
        Ok((f64::from(row_count) * self.share) as usize)
    }
}

/// A log without its hits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MissStream {
    /// What missed; one query for each batch of the log, empty where all were hits.
    pub log: QueryLog,
    /// Queries of the log before batches were made.
    pub query_count: u64,
    /// Rows asked for, once per batch.
    pub asked_rows: u64,
    /// Of them, rows that missed.
    pub missed_rows: u64,
}

impl MissStream {
    /// Returns the share of the asked rows that were hits.
    #[must_use]
    pub fn hit_ratio(&self) -> f64 {
        if self.asked_rows == 0 {
            return 0.0;
        }
        1.0 - self.missed_rows as f64 / self.asked_rows as f64
    }
}

/// Replays `log` behind `cache`, warmed by all queries of `earlier`, in batches of
/// `batch_queries`.
///
/// For a miss stream to build from, give the build log as both: the cache is then as full as
/// while serving.
///
/// # Errors
/// `Invalid` for an empty batch, for logs of different tables and for a share outside `0..=1`.
pub fn miss_stream(
    earlier: &QueryLog,
    log: &QueryLog,
    cache: CacheInFront,
    batch_queries: usize,
) -> Result<MissStream> {
    if batch_queries == 0 {
        return Err(Error::invalid("a batch has one query at least"));
    }
    if earlier.row_count() != log.row_count() {
        return Err(Error::invalid("the earlier and the later log are of different tables")
            .with("row_count", earlier.row_count())
            .with("row_count_later", log.row_count()));
    }
    let capacity = cache.capacity_rows(log.row_count())?;
    let mut cache = match capacity {
        0 => None,
        rows => Some(ReplayCache::new(cache.policy, log.row_count() as usize, rows)?),
    };
    let mut batches = Batches::new(log.row_count());
    if let Some(cache) = &mut cache {
        batches.visit(earlier, batch_queries, |rows| cache.ask(rows).map(drop))?;
    }
    let mut missed = QueryLog::builder(log.row_count());
    let mut asked_rows = 0;
    let mut misses = Vec::new();
    batches.visit(log, batch_queries, |rows| {
        asked_rows += rows.len() as u64;
        let Some(cache) = &mut cache else { return missed.push(rows) };
        misses.clear();
        misses.extend(rows.iter().filter(|row| !cache.contains(**row)));
        cache.ask(rows)?;
        missed.push(&misses)
    })?;
    let missed = missed.finish();
    Ok(MissStream {
        query_count: log.query_count() as u64,
        asked_rows,
        missed_rows: missed.pin_count() as u64,
        log: missed,
    })
}

/// Takes queries together, each row once.
struct Batches {
    /// By row: the batch that had it last.
    last_batch: Vec<u64>,
    batch: u64,
    rows: Vec<u32>,
}

impl Batches {
    fn new(row_count: u32) -> Self {
        Self { last_batch: vec![0; row_count as usize], batch: 0, rows: Vec::new() }
    }

    fn visit(
        &mut self,
        log: &QueryLog,
        batch_queries: usize,
        mut take: impl FnMut(&[u32]) -> Result<()>,
    ) -> Result<()> {
        let mut queries = log.iter().peekable();
        while queries.peek().is_some() {
            self.batch += 1;
            self.rows.clear();
            for row in queries.by_ref().take(batch_queries).flatten() {
                let last = self.last_batch.get_mut(*row as usize);
                if last.is_some_and(|last| std::mem::replace(last, self.batch) != self.batch) {
                    self.rows.push(*row);
                }
            }
            take(&self.rows)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log(queries: &[&[u32]]) -> QueryLog {
        QueryLog::from_queries(10, queries).unwrap()
    }

    fn lru(share: f64) -> CacheInFront {
        CacheInFront { share, policy: PolicyKind::Lru }
    }

    #[test]
    fn without_a_cache_batches_are_unions() {
        let later = log(&[&[1, 2], &[2, 3], &[4]]);
        let single = miss_stream(&log(&[]), &later, CacheInFront::NONE, 1).unwrap();
        assert_eq!(single.log, later);
        let pairs = miss_stream(&log(&[]), &later, CacheInFront::NONE, 2).unwrap();
        assert_eq!(pairs.log, log(&[&[1, 2, 3], &[4]]));
        assert_eq!((pairs.query_count, pairs.asked_rows, pairs.missed_rows), (3, 4, 4));
    }

    #[test]
    fn the_cache_is_warm_and_hits_leave_the_query() {
        let earlier = log(&[&[7, 8], &[1, 2]]);
        let later = log(&[&[1, 5], &[5, 2], &[1, 9]]);
        // Two rows: 1, 2 warm. 1 hits, 5 sends 2 away; 5 hits, 2 sends 1 away; both miss.
        let stream = miss_stream(&earlier, &later, lru(0.2), 1).unwrap();
        assert_eq!(stream.log, log(&[&[5], &[2], &[1, 9]]));
        assert!((stream.hit_ratio() - 2.0 / 6.0).abs() < 1e-12);
        let all = miss_stream(&later, &later, lru(1.0), 1).unwrap();
        assert_eq!((all.log.query_count(), all.missed_rows), (3, 0));
    }

    #[test]
    fn wrong_calls_are_refused() {
        let queries = log(&[&[1]]);
        let other = QueryLog::from_queries(11, [[1]]).unwrap();
        assert!(miss_stream(&queries, &other, lru(0.1), 1).is_err());
        assert!(miss_stream(&queries, &queries, lru(0.1), 0).is_err());
        for share in [-0.1, 1.1, f64::NAN] {
            assert!(miss_stream(&queries, &queries, lru(share), 1).is_err());
        }
    }
}
