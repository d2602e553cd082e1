//! Inverted query log: the queries in which each row occurs.

#![expect(clippy::indexing_slicing, reason = "a log's rows are below its row count")]

use tierbed_core::{Error, Result};

use crate::QueryLog;

/// By row: the queries that ask for it, earliest first. Four bytes per pin.
#[derive(Debug)]
pub(crate) struct Incidence {
    offsets: Vec<u64>,
    queries: Vec<u32>,
}

impl Incidence {
    /// Turns the queries of `wanted` rows around. Of a row with more than `sample_min` queries
    /// every `(count / sample_min)`-th is kept.
    ///
    /// # Errors
    ///
    /// `Unsupported` for 2^32 queries or more.
    pub(crate) fn sampled(
        log: &QueryLog,
        sample_min: u32,
        wanted: impl Fn(u32) -> bool,
    ) -> Result<Self> {
        if u32::try_from(log.query_count()).is_err() {
            return Err(Error::unsupported("placement takes fewer than 2^32 queries")
                .with("query_count", log.query_count())
                .with("remedy", "sample the log"));
        }
        let frequencies = log.frequencies();
        let steps: Vec<u32> =
            frequencies.iter().map(|&count| (count / sample_min).max(1)).collect();
        let mut offsets = vec![0u64; frequencies.len() + 1];
        for (row, (&count, &step)) in frequencies.iter().zip(&steps).enumerate() {
            let kept = if wanted(row as u32) { count.div_ceil(step) } else { 0 };
            offsets[row + 1] = offsets[row] + u64::from(kept);
        }
        let mut queries = vec![0u32; offsets[frequencies.len()] as usize];
        let mut seen = frequencies;
        seen.fill(0);
        for (query, rows) in log.iter().enumerate() {
            for &row in rows {
                let row = row as usize;
                let (at, step) = (seen[row], steps[row]);
                seen[row] += 1;
                if at % step == 0 && offsets[row] < offsets[row + 1] {
                    queries[offsets[row] as usize + (at / step) as usize] = query as u32;
                }
            }
        }
        Ok(Self { offsets, queries })
    }

    /// Returns the queries of `row`.
    pub(crate) fn queries(&self, row: u32) -> &[u32] {
        let row = row as usize;
        &self.queries[self.offsets[row] as usize..self.offsets[row + 1] as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_know_their_queries() {
        let log = QueryLog::from_queries(4, [&[0, 2][..], &[2], &[3, 0], &[2, 0], &[0]])
            .expect("in range");
        let all = Incidence::sampled(&log, u32::MAX, |_| true).expect("few queries");
        assert_eq!(all.queries(0), [0, 2, 3, 4]);
        assert_eq!(all.queries(1), [0u32; 0]);
        assert_eq!(all.queries(2), [0, 1, 3]);
        // Row 0 has 4 queries: every second one. Row 2 has 3: all. Row 3 is not wanted.
        let some = Incidence::sampled(&log, 2, |row| row != 3).expect("few queries");
        assert_eq!(some.queries(0), [0, 3]);
        assert_eq!(some.queries(2), [0, 1, 3]);
        assert_eq!(some.queries(3), [0u32; 0]);
    }
}
