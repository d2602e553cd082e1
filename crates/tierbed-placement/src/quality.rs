//! Quality of a placement: pages read by later queries, and rows used per page read.
//!
//! Every query of a [miss stream](crate::miss_stream) goes through the same index and page
//! selection that serving uses; pages are counted, none is read.
//!
//! *Useful rows* of a read are those of its rows that the query needed and no page before it
//! brought. Source: MaxEmbed §8.2, Figure 9 ("valid embeddings per read").

use tierbed_core::{Error, Result};

use crate::{Placement, QueryLog};
use tierbed_snapshot::index::{PageIndex, Served};
use tierbed_snapshot::select::{Scratch, Selection};

/// Page reads of some queries.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PageReads {
    /// Reads by number of useful rows: `reads_by_useful_rows[u]` reads served `u` rows.
    pub reads_by_useful_rows: Vec<u64>,
    /// Rows asked for that lie on no page.
    pub absent_rows: u64,
}

impl PageReads {
    /// Returns the pages read.
    #[must_use]
    pub fn page_count(&self) -> u64 {
        self.reads_by_useful_rows.iter().sum()
    }

    /// Returns the rows served.
    #[must_use]
    pub fn row_count(&self) -> u64 {
        (0..).zip(&self.reads_by_useful_rows).map(|(useful, reads): (u64, _)| useful * reads).sum()
    }

    /// Returns the rows a page served on average; 0 without a page.
    #[must_use]
    pub fn useful_rows_per_page(&self) -> f64 {
        self.row_count() as f64 / (self.page_count().max(1)) as f64
    }

    fn note(&mut self, useful_rows: usize) {
        if self.reads_by_useful_rows.len() <= useful_rows {
            self.reads_by_useful_rows.resize(useful_rows + 1, 0);
        }
        if let Some(count) = self.reads_by_useful_rows.get_mut(useful_rows) {
            *count += 1;
        }
    }

    fn add(&mut self, other: &Self) {
        let longest = self.reads_by_useful_rows.len().max(other.reads_by_useful_rows.len());
        self.reads_by_useful_rows.resize(longest, 0);
        for (sum, count) in self.reads_by_useful_rows.iter_mut().zip(&other.reads_by_useful_rows) {
            *sum += count;
        }
        self.absent_rows += other.absent_rows;
    }
}

/// Counts the pages that `queries` read, on `thread_count` threads.
///
/// The counts do not depend on the number of threads.
///
/// # Errors
/// `Invalid` without a thread.
pub fn count_page_reads(
    index: &PageIndex,
    queries: &QueryLog,
    selection: Selection,
    thread_count: usize,
) -> Result<PageReads> {
    if thread_count == 0 {
        return Err(Error::invalid("counting needs one thread at least"));
    }
    // A list of all queries would take more than the ids of short ones.
    let share = queries.query_count().div_ceil(thread_count).max(1);
    let parts = std::thread::scope(|scope| {
        let part_from = |first: usize| queries.iter().skip(first).take(share);
        let workers: Vec<_> = (0..queries.query_count())
            .step_by(share)
            .map(|first| scope.spawn(move || count_reads_of(index, part_from(first), selection)))
            .collect();
        workers.into_iter().map(|worker| worker.join()).collect::<Vec<_>>()
    });
    let mut sum = PageReads::default();
    for part in parts {
        match part {
            Ok(part) => sum.add(&part),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
    Ok(sum)
}

fn count_reads_of<'a>(
    index: &PageIndex,
    queries: impl Iterator<Item = &'a [u32]>,
    selection: Selection,
) -> PageReads {
    let mut reads = PageReads::default();
    let mut scratch = Scratch::default();
    for rows in queries {
        let selected =
            selection.select(index, rows, &mut scratch, |_, served| reads.note(served.len()));
        reads.absent_rows += (rows.len() as u64).saturating_sub(u64::from(selected.row_count));
    }
    reads
}

/// Indexes `placement`, the pages of each row ordered by how often they served `queries`.
///
/// A small index limit then keeps the pages that matter.
///
/// # Errors
/// `Invalid` when the placement has 2^32 seats or more.
pub fn index_by_use(placement: &Placement, queries: &QueryLog) -> Result<PageIndex> {
    let index = PageIndex::new(placement.row_count(), placement.pages())?;
    let mut served = Served::new(&index);
    let mut scratch = Scratch::default();
    for rows in queries.iter() {
        Selection::OnePass.select(&index, rows, &mut scratch, |page, positions| {
            for position in positions {
                if let Some(row) = rows.get(*position as usize) {
                    served.add(&index, *row, page);
                }
            }
        });
    }
    Ok(index.ordered_by(&served))
}

/// Adds up the connectivity of `queries`: on how many home pages their rows live.
///
/// These are the pages that would be read without replicas. Source: MaxEmbed §5.3 (λ).
#[must_use]
pub fn connectivity_sum(placement: &Placement, queries: &QueryLog) -> u64 {
    let homes = placement.home_pages();
    let mut pages: Vec<u32> = Vec::new();
    let mut sum = 0;
    for rows in queries.iter() {
        pages.clear();
        pages.extend(rows.iter().filter_map(|row| homes.get(*row as usize).copied()));
        pages.sort_unstable();
        pages.dedup();
        sum += pages.len() as u64;
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    fn placement() -> Placement {
        let mut builder = Placement::builder(7, 3).unwrap();
        builder.push_home_page(&[0, 1, 2], &[]).unwrap();
        builder.push_home_page(&[3, 4], &[0]).unwrap();
        builder.push_home_page(&[5, 6], &[]).unwrap();
        builder.push_replica_page(&[0, 5, 6]).unwrap();
        builder.finish().unwrap()
    }

    fn log(queries: &[&[u32]]) -> QueryLog {
        QueryLog::from_queries(9, queries).unwrap()
    }

    #[test]
    fn reads_are_counted_by_their_useful_rows() {
        let placement = placement();
        let index = PageIndex::new(placement.row_count(), placement.pages()).unwrap();
        let queries = log(&[&[0, 5, 6], &[0, 3, 5], &[], &[8]]);
        for thread_count in 1..6 {
            let one = count_page_reads(&index, &queries, Selection::OnePass, thread_count).unwrap();
            // {0, 5, 6} in one page; {0, 3} and {5}; row 8 lies nowhere.
            assert_eq!(one.reads_by_useful_rows, [0, 1, 1, 1]);
            assert_eq!((one.page_count(), one.row_count(), one.absent_rows), (3, 6, 1));
            assert!((one.useful_rows_per_page() - 2.0).abs() < 1e-12);
        }
        assert_eq!(connectivity_sum(&placement, &queries), 2 + 3);
        assert!(count_page_reads(&index, &queries, Selection::Greedy, 0).is_err());
        let none = count_page_reads(&index, &log(&[]), Selection::Greedy, 2).unwrap();
        assert_eq!((none.page_count(), none.useful_rows_per_page()), (0, 0.0));
    }

    #[test]
    fn the_page_that_served_a_row_most_comes_first() {
        let placement = placement();
        let plain = PageIndex::new(placement.row_count(), placement.pages()).unwrap();
        let queries = log(&[&[0, 5, 6], &[0, 5, 6], &[0, 1]]);
        let index = index_by_use(&placement, &queries).unwrap();
        assert_eq!((plain.pages_of(0), index.pages_of(0)), (&[0, 1, 3][..], &[3, 0, 1][..]));
        // With one page per row left, what was used most still works.
        let (plain, index) = (plain.limited(Some(1)), index.limited(Some(1)));
        let reads = |index| {
            count_page_reads(index, &queries, Selection::OnePass, 1).map(|reads| reads.page_count())
        };
        assert_eq!((reads(&plain).unwrap(), reads(&index).unwrap()), (5, 4));
    }
}
