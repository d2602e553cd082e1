//! Hypergraph of a query log: queries as edges over renumbered rows.
//!
//! Only queries of two rows or more say anything about neighbours; the others are dropped. Rows
//! that were asked for are renumbered by falling frequency, so that what is touched most lies
//! together in memory. An edge ends with a marked pin, which saves an array of offsets:
//!
//! ```text
//! queries  7 4 │ 9 4 7 │ 4 │          rows = [4, 7, 9] (asked for 3, 2 and 1 times)
//! pins     1 0*  2 0 1*               4 bytes a pin, * is the top bit
//! ```

use tierbed_core::env::SplitMix64;
use tierbed_core::{Error, Result};

use crate::QueryLog;

/// Marks the last pin of an edge.
const LAST: u32 = 1 << 31;

/// Edges over *local* rows: `0..rows.len()`, most frequent first.
#[derive(Debug, Clone)]
pub(crate) struct Hypergraph {
    /// By local row: the row of the table.
    pub(crate) rows: Vec<u32>,
    /// Local rows of all edges, the last pin of each marked; see [`edges`].
    pub(crate) pins: Vec<u32>,
    /// Rows of the table, those never asked for included.
    pub(crate) row_count: u32,
}

impl Hypergraph {
    /// Takes a log apart; its pins are reused, so memory does not grow by another copy.
    ///
    /// # Errors
    ///
    /// `Unsupported` for 2^31 rows or more.
    #[expect(clippy::indexing_slicing, reason = "a log's rows are below its row count")]
    pub(crate) fn from_log(log: QueryLog) -> Result<Self> {
        let row_count = log.row_count();
        if row_count >= LAST {
            return Err(Error::unsupported("partitioning takes fewer than 2^31 rows")
                .with("row_count", row_count));
        }
        let frequencies = log.frequencies();
        let mut rows: Vec<u32> =
            (0..row_count).filter(|&row| frequencies[row as usize] > 0).collect();
        rows.sort_by_key(|&row| (std::cmp::Reverse(frequencies[row as usize]), row));
        let mut local_of = frequencies;
        for (local, &row) in rows.iter().enumerate() {
            local_of[row as usize] = local as u32;
        }
        let (offsets, mut pins) = log.into_parts();
        let mut end = 0;
        for pair in offsets.windows(2) {
            let (from, to) = (pair[0] as usize, pair[1] as usize);
            if to - from < 2 {
                continue;
            }
            // What is written lies at or before what is read.
            for at in from..to {
                pins[end] = local_of[pins[at] as usize];
                end += 1;
            }
            pins[end - 1] |= LAST;
        }
        pins.truncate(end);
        pins.shrink_to_fit();
        Ok(Self { rows, pins, row_count })
    }

    /// Takes out the rows that no edge has; the others keep their order. Returns rows of the
    /// table: those asked for alone, most frequent first, then those never asked for.
    #[expect(clippy::indexing_slicing, reason = "pins are local rows")]
    pub(crate) fn take_lone_rows(&mut self) -> Vec<u32> {
        let mut number = vec![LAST; self.rows.len()];
        for &pin in &self.pins {
            number[local(pin)] = 0;
        }
        let mut is_seen = vec![false; self.row_count as usize];
        let (mut kept, mut lone) = (Vec::new(), Vec::new());
        for (number, &row) in number.iter_mut().zip(&self.rows) {
            is_seen[row as usize] = true;
            if *number == LAST {
                lone.push(row);
            } else {
                *number = kept.len() as u32;
                kept.push(row);
            }
        }
        for pin in &mut self.pins {
            *pin = number[local(*pin)] | (*pin & LAST);
        }
        self.rows = kept;
        lone.extend((0..self.row_count).rev().filter(|&row| !is_seen[row as usize]));
        lone
    }
}

/// Walks the edges of `pins` in order; the local rows of an edge come through [`local`].
pub(crate) fn edges(pins: &[u32]) -> Edges<'_> {
    Edges { rest: pins }
}

/// The walk of [`edges`].
#[derive(Debug, Clone)]
pub(crate) struct Edges<'a> {
    rest: &'a [u32],
}

impl<'a> Iterator for Edges<'a> {
    type Item = &'a [u32];

    fn next(&mut self) -> Option<&'a [u32]> {
        let last = self.rest.iter().position(|pin| pin & LAST != 0)?;
        let (edge, behind) = self.rest.split_at(last + 1);
        self.rest = behind;
        Some(edge)
    }
}

/// Returns the local row of a pin, without the mark.
pub(crate) fn local(pin: u32) -> usize {
    (pin & !LAST) as usize
}

/// Marks the last of the pins written since `begin`; takes back a lone one.
pub(crate) fn close_edge(pins: &mut Vec<u32>, begin: usize) {
    match pins.get_mut(begin..) {
        Some([_, .., last]) => *last |= LAST,
        _ => pins.truncate(begin),
    }
}

/// Marks the last pin written, whatever is before it: the end of a page of any length.
pub(crate) fn close_page(pins: &mut [u32]) {
    if let Some(last) = pins.last_mut() {
        *last |= LAST;
    }
}

/// Draws edges of together about `pins_max` pins, in their order; equal seeds draw the same ones.
pub(crate) fn sample_edges(pins: &[u32], pins_max: u32, seed: u64) -> Vec<u32> {
    let mut rng = SplitMix64::new(seed);
    let share = f64::from(pins_max) / pins.len().max(1) as f64;
    edges(pins).filter(|_| rng.unit_f64() < share).flatten().copied().collect()
}

/// Cuts `pins` into at most `count` runs of whole edges, of about equal length.
pub(crate) fn runs_of_edges(pins: &[u32], count: usize) -> Vec<&[u32]> {
    let mut runs = Vec::with_capacity(count);
    let mut rest = pins;
    for left in (1..=count).rev() {
        let aim = rest.len() / left;
        let (_, behind) = rest.split_at(aim);
        let to_end =
            behind.iter().position(|pin| pin & LAST != 0).map_or(behind.len(), |at| at + 1);
        let (run, after) = rest.split_at(if left == 1 { rest.len() } else { aim + to_end });
        if !run.is_empty() {
            runs.push(run);
        }
        rest = after;
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    fn locals(pins: &[u32]) -> Vec<Vec<usize>> {
        edges(pins).map(|edge| edge.iter().map(|&pin| local(pin)).collect()).collect()
    }

    #[test]
    fn rows_are_renumbered_by_frequency_and_lone_rows_dropped() {
        let log = QueryLog::from_queries(10, [&[7, 4][..], &[9, 4, 7], &[4], &[], &[2]])
            .expect("in range");
        let graph = Hypergraph::from_log(log).expect("few rows");
        assert_eq!(graph.rows, [4, 7, 2, 9]);
        assert_eq!(locals(&graph.pins), [vec![1, 0], vec![3, 0, 1]]);
        assert_eq!(graph.row_count, 10);
    }

    #[test]
    fn runs_hold_whole_edges_and_all_of_them() {
        let queries: Vec<Vec<u32>> = (2..40).map(|len| (0..len).collect()).collect();
        let graph = Hypergraph::from_log(QueryLog::from_queries(40, &queries).expect("in range"))
            .expect("few rows");
        for count in 1..6 {
            let runs = runs_of_edges(&graph.pins, count);
            assert!(runs.len() <= count);
            let walked: Vec<_> = runs.iter().flat_map(|run| locals(run)).collect();
            assert_eq!(walked, locals(&graph.pins), "{count} runs");
        }
        assert!(runs_of_edges(&[], 3).is_empty());
    }

    #[test]
    fn a_sample_has_whole_edges_and_about_the_pins_asked_for() {
        let queries: Vec<Vec<u32>> = (0..3000).map(|at| (0..2 + at % 5).collect()).collect();
        let log = QueryLog::from_queries(7, &queries).expect("in range");
        let graph = Hypergraph::from_log(log).expect("few rows");
        let all = locals(&graph.pins);
        let sample = sample_edges(&graph.pins, 3000, 5);
        assert!((2700..3300).contains(&sample.len()), "{} pins", sample.len());
        let mut rest = all.iter();
        assert!(locals(&sample).iter().all(|edge| rest.any(|other| other == edge)), "in order");
        assert_eq!(sample, sample_edges(&graph.pins, 3000, 5));
        assert_ne!(sample, sample_edges(&graph.pins, 3000, 6));
        assert_eq!(sample_edges(&graph.pins, u32::MAX, 5), graph.pins);
    }

    #[test]
    fn an_edge_of_one_pin_is_taken_back() {
        let mut pins = vec![];
        for edge in [&[1, 2][..], &[3], &[], &[4, 5, 6]] {
            let begin = pins.len();
            pins.extend_from_slice(edge);
            close_edge(&mut pins, begin);
        }
        assert_eq!(locals(&pins), [vec![1, 2], vec![4, 5, 6]]);
    }
}
