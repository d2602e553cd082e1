//! Pages of one request that lie close together: read at once, with the gaps between them.
//!
//! A disk does so many reads a second, however small they are. Rows of a large request lie on many
//! pages of the file, few pages apart: one read of all of these comes sooner than one for each. Of
//! the pages between only the bytes pass; they are neither checked nor looked at.
//!
//! ```text
//! pages wanted   ▮▯▮▮▯▯▮▮▮▮▯▮           ▮        ▮▮
//! reads          [1──────────]           left to the engine, which has many in flight
//! ```

use super::pages::PageJob;

/// Bytes of the largest run.
pub(super) const RUN_BYTES_MAX: u64 = 1 << 20;
/// A request of fewer rows is not looked at: its pages seldom lie together.
pub(super) const ROWS_MIN: usize = 1024;
/// A read of its own costs disk and processor about as much as so many bytes more of another one.
pub(super) const GAP_BYTES_MAX: u64 = 32 << 10;
/// Runs of fewer pages are left to the engine.
pub(super) const PAGES_MIN: usize = 8;

/// Pages of a request, and where they lie in the table's file, in pages.
#[derive(Debug)]
pub(super) struct PlacedJob {
    pub(super) job: PageJob,
    pub(super) position: u64,
    pub(super) page_bytes: u64,
}

/// Pages that are read at once.
#[derive(Debug)]
pub(super) struct Run {
    /// At least one, all of one table, in the order of the file.
    pub(super) jobs: Vec<PlacedJob>,
}

impl Run {
    /// Returns the position of the first page, and how many pages are read from there on.
    pub(super) fn span(&self) -> std::ops::Range<u64> {
        let (Some(first), Some(last)) = (self.jobs.first(), self.jobs.last()) else {
            panic!("a run has no page");
        };
        first.position..last.position + 1
    }
}

/// A request, divided.
#[derive(Debug, Default)]
pub(super) struct Divided {
    pub(super) runs: Vec<Run>,
    /// Pages that lie alone.
    pub(super) left: Vec<PageJob>,
}

impl Divided {
    /// Divides pages into runs of at most `run_bytes`.
    pub(super) fn of(mut placed: Vec<PlacedJob>, run_bytes: u64) -> Self {
        // Both slots of a table's pages come in order each: sorting merges two runs.
        placed.sort_by_key(|placed| (placed.job.table, placed.position));
        let mut divided = Self::default();
        let mut run: Vec<PlacedJob> = Vec::new();
        for next in placed {
            let fits = match (run.first(), run.last()) {
                (Some(first), Some(last)) => {
                    let gap_pages = next.position.saturating_sub(last.position + 1);
                    let span_pages = (next.position + 1).saturating_sub(first.position);
                    first.job.table == next.job.table
                        && gap_pages * next.page_bytes <= GAP_BYTES_MAX
                        && span_pages * next.page_bytes <= run_bytes
                }
                _ => true,
            };
            if !fits {
                divided.end(std::mem::take(&mut run));
            }
            run.push(next);
        }
        divided.end(run);
        divided
    }

    fn end(&mut self, jobs: Vec<PlacedJob>) {
        match jobs.len() < PAGES_MIN {
            true => self.left.extend(jobs.into_iter().map(|placed| placed.job)),
            false => self.runs.push(Run { jobs }),
        }
    }
}

#[cfg(test)]
#[allow(clippy::indexing_slicing, reason = "a test that panics has failed, as it should")]
mod tests {
    use super::*;

    fn placed(table: usize, positions: impl IntoIterator<Item = u64>) -> Vec<PlacedJob> {
        let job = |page| PageJob { table, page, rows: 0..1 };
        let placed = |position| PlacedJob { job: job(position), position, page_bytes: 4096 };
        positions.into_iter().map(placed).collect()
    }

    #[test]
    fn pages_close_together_are_a_run_and_others_are_left() {
        let mut jobs = placed(0, (100..140).step_by(5).chain([200, 300]));
        // The other slot's pages come behind, though they lie before these.
        jobs.extend(placed(0, 0..9));
        jobs.extend(placed(1, 9..16));
        let divided = Divided::of(jobs, 1 << 20);
        let spans: Vec<_> = divided.runs.iter().map(Run::span).collect();
        assert_eq!(spans, [0..9, 100..136]);
        let left: Vec<_> = divided.left.iter().map(|job| (job.table, job.page)).collect();
        assert_eq!(left[..2], [(0, 200), (0, 300)]);
        assert_eq!(left.len(), 9, "seven pages of another table are too few");
    }

    #[test]
    fn a_run_is_no_longer_than_its_memory() {
        let divided = Divided::of(placed(0, 0..100), 20 * 4096);
        assert!(divided.left.is_empty());
        let spans: Vec<_> = divided.runs.iter().map(Run::span).collect();
        assert_eq!(spans, [0..20, 20..40, 40..60, 60..80, 80..100]);
    }
}
