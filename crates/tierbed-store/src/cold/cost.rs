//! The I/O cost model: cost of a request and of a byte, and which pages to read together.
//!
//! The device is taken to need `request_us` for a request and `byte_us` for each of its bytes,
//! with as many requests in flight as there are buffers. Both are estimated on line from the
//! time whole reads took, by least squares with forgetting; nothing is kept on disk. Pages that
//! lie near are read in one request when the pages between cost less than a request: few wanted
//! pages become probes, many become one sweep. What is read never depends on it, only when.
//!
//! Source: training.md 3.6 (cost-based probe or sweep).

/// A run of pages read at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PageRun {
    pub(crate) first: u32,
    pub(crate) count: u32,
}

impl PageRun {
    pub(crate) fn end(&self) -> u32 {
        self.first + self.count
    }
}

/// Cost of requests and bytes, as measured so far.
#[derive(Debug, Clone)]
pub(crate) struct CostModel {
    // Sums of the normal equations of time = a * requests + b * bytes.
    requests_sq: f64,
    requests_bytes: f64,
    bytes_sq: f64,
    requests_us: f64,
    bytes_us: f64,
}

/// A start that any measurement soon outweighs: 75,000 reads of 4 KiB per second at random,
/// 1.75 GB/s in sequence (a virtual disk).
const PRIOR_REQUEST_US: f64 = 11.0;
const PRIOR_BYTE_US: f64 = 1.0 / 1750.0;
const PRIOR_REQUESTS: f64 = 16.0;
const PRIOR_BYTES: f64 = 65_536.0 * 4.0;
/// Weight of what was measured before, per measurement.
const KEEP: f64 = 0.98;

impl Default for CostModel {
    fn default() -> Self {
        // One look at requests alone and one at bytes alone.
        Self {
            requests_sq: PRIOR_REQUESTS * PRIOR_REQUESTS,
            requests_bytes: 0.0,
            bytes_sq: PRIOR_BYTES * PRIOR_BYTES,
            requests_us: PRIOR_REQUESTS * PRIOR_REQUESTS * PRIOR_REQUEST_US,
            bytes_us: PRIOR_BYTES * PRIOR_BYTES * PRIOR_BYTE_US,
        }
    }
}

impl CostModel {
    /// Learns that `requests` of `bytes` in all took `us`. Time that stands still teaches nothing.
    pub(crate) fn observe(&mut self, requests: u64, bytes: u64, us: u64) {
        if us == 0 || requests == 0 {
            return;
        }
        let (requests, bytes, us) = (requests as f64, bytes as f64, us as f64);
        for (sum, term) in [
            (&mut self.requests_sq, requests * requests),
            (&mut self.requests_bytes, requests * bytes),
            (&mut self.bytes_sq, bytes * bytes),
            (&mut self.requests_us, requests * us),
            (&mut self.bytes_us, bytes * us),
        ] {
            *sum = KEEP * *sum + term;
        }
    }

    /// Returns microseconds per request and per byte.
    pub(crate) fn estimate(&self) -> (f64, f64) {
        let determinant =
            self.requests_sq * self.bytes_sq - self.requests_bytes * self.requests_bytes;
        // All requests alike: the two costs cannot be separated.
        if determinant <= 1e-9 * self.requests_sq * self.bytes_sq {
            return (PRIOR_REQUEST_US, PRIOR_BYTE_US);
        }
        let request =
            (self.requests_us * self.bytes_sq - self.bytes_us * self.requests_bytes) / determinant;
        let byte = (self.bytes_us * self.requests_sq - self.requests_us * self.requests_bytes)
            / determinant;
        (request.clamp(0.1, 10_000.0), byte.clamp(1e-6, 1.0))
    }

    /// Returns how many unwanted pages cost less than another request.
    pub(crate) fn gap_pages(&self, page_bytes: usize) -> u32 {
        let (request_us, byte_us) = self.estimate();
        (request_us / (byte_us * page_bytes as f64)) as u32
    }
}

/// Covers `pages` (ascending, duplicates allowed) by runs of at most `count_max` pages, reading
/// at most `gap_max` unwanted pages in a row.
pub(crate) fn cover(
    pages: impl Iterator<Item = u32>,
    gap_max: u32,
    count_max: u32,
) -> Vec<PageRun> {
    assert!(count_max > 0, "a request reads a page");
    let mut runs: Vec<PageRun> = Vec::new();
    for page in pages {
        assert!(runs.last().is_none_or(|run| page >= run.first), "pages ascend");
        match runs.last_mut() {
            Some(run) if page < run.end() => {}
            Some(run) if page - run.end() <= gap_max && page - run.first < count_max => {
                run.count = page - run.first + 1;
            }
            _ => runs.push(PageRun { first: page, count: 1 }),
        }
    }
    runs
}

/// Joins `pages`, in any order, where each follows the one before; at most `count_max` together.
pub(crate) fn consecutive(pages: impl Iterator<Item = u32>, count_max: u32) -> Vec<PageRun> {
    let mut runs: Vec<PageRun> = Vec::new();
    for page in pages {
        match runs.last_mut() {
            Some(run) if page == run.end() && run.count < count_max => run.count += 1,
            _ => runs.push(PageRun { first: page, count: 1 }),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn learned(request_us: f64, byte_us: f64) -> (f64, f64) {
        let mut cost = CostModel::default();
        for at in 0..400u64 {
            let requests = 50 + at % 7;
            let bytes = requests * 4096 * (1 + at % 5);
            let us = requests as f64 * request_us + bytes as f64 * byte_us;
            cost.observe(requests, bytes, us as u64);
        }
        cost.estimate()
    }

    #[test]
    fn learns_both_costs() {
        for (request_us, byte_us) in [(13.0, 0.0005), (2.0, 0.0003), (80.0, 0.01)] {
            let (request, byte) = learned(request_us, byte_us);
            assert!((request / request_us - 1.0).abs() < 0.1, "{request} of {request_us}");
            assert!((byte / byte_us - 1.0).abs() < 0.1, "{byte} of {byte_us}");
        }
    }

    #[test]
    fn a_clock_that_stands_still_teaches_nothing() {
        let mut cost = CostModel::default();
        let before = cost.gap_pages(4096);
        (0..100).for_each(|_| cost.observe(64, 1 << 20, 0));
        assert_eq!(cost.gap_pages(4096), before);
        assert_eq!(before, 4, "a probe costs as much as 4.7 pages of a sweep");
    }

    #[test]
    fn few_pages_are_probed_and_many_swept() {
        let run = |first, count| PageRun { first, count };
        assert_eq!(cover([3, 50, 51].into_iter(), 4, 16), [run(3, 1), run(50, 2)]);
        let dense = (0..64).filter(|page| page % 4 == 0);
        assert_eq!(cover(dense, 4, 64), [run(0, 61)]);
        assert_eq!(cover((0..10).filter(|page| page % 2 == 0), 0, 16).len(), 5);
    }

    #[test]
    fn pieces_keep_their_order() {
        let run = |first, count| PageRun { first, count };
        let pages = [8, 9, 10, 2, 3, 4].into_iter();
        assert_eq!(consecutive(pages, 2), [run(8, 2), run(10, 1), run(2, 2), run(4, 1)]);
    }

    proptest! {
        #[test]
        fn every_page_is_covered_once(
            pages in proptest::collection::btree_set(0u32..500, 0..80),
            gap_max in 0u32..9,
            count_max in 1u32..20,
        ) {
            let runs = cover(pages.iter().copied(), gap_max, count_max);
            prop_assert!(runs.iter().all(|run| (1..=count_max).contains(&run.count)));
            prop_assert!(runs.windows(2).all(|pair| pair[0].end() <= pair[1].first));
            for page in pages {
                let covered = runs.iter().filter(|run| (run.first..run.end()).contains(&page));
                prop_assert_eq!(covered.count(), 1);
            }
        }
    }
}
