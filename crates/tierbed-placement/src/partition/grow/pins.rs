//! Pins of a block: the rows of each query, and the queries of each row.
//!
//! ```text
//! rows of queries   [ 2 0 │ 1 2 │ 0 3 2 ]     a pin is a place in this array
//! pins of row 2     [ 0, 3, 6 ]
//! ```
//!
//! Queries are shuffled once, so that the first ones are a fair sample of all: work on a row that
//! is in very many queries can stop early.

#![expect(clippy::indexing_slicing, reason = "pins, queries and rows come from one block")]

use std::ops::Range;

use tierbed_core::env::SplitMix64;

use crate::hypergraph::{edges, local};
use crate::partition::order::shuffle;

/// Queries of two rows or more over the rows `0..row_count` of a block.
#[derive(Debug)]
pub(crate) struct Pins {
    /// By query: its first pin; one more at the end.
    query_starts: Vec<u32>,
    /// By pin: the row.
    rows: Vec<u32>,
    /// By pin: the query.
    queries: Vec<u32>,
    /// By row: where its pins begin in `of_rows`; one more at the end.
    row_starts: Vec<u32>,
    of_rows: Vec<u32>,
}

impl Pins {
    /// Takes the edges of a hypergraph over `row_count` local rows.
    ///
    /// A block has fewer than 2^32 pins.
    pub(crate) fn new(edge_pins: &[u32], row_count: usize, seed: u64) -> Self {
        let mut order: Vec<&[u32]> = edges(edge_pins).collect();
        shuffle(&mut order, &mut SplitMix64::new(seed));
        let mut query_starts = Vec::with_capacity(order.len() + 1);
        let mut rows = Vec::with_capacity(edge_pins.len());
        let mut queries = Vec::with_capacity(edge_pins.len());
        query_starts.push(0);
        for (query, edge) in order.iter().enumerate() {
            rows.extend(edge.iter().map(|&pin| local(pin) as u32));
            queries.resize(rows.len(), query as u32);
            query_starts.push(rows.len() as u32);
        }
        let mut row_starts = vec![0u32; row_count + 1];
        for &row in &rows {
            row_starts[row as usize + 1] += 1;
        }
        for row in 0..row_count {
            row_starts[row + 1] += row_starts[row];
        }
        let mut next = row_starts.clone();
        let mut of_rows = vec![0u32; rows.len()];
        for (pin, &row) in rows.iter().enumerate() {
            let at = &mut next[row as usize];
            of_rows[*at as usize] = pin as u32;
            *at += 1;
        }
        Self { query_starts, rows, queries, row_starts, of_rows }
    }

    pub(crate) fn row_count(&self) -> usize {
        self.row_starts.len() - 1
    }

    pub(crate) fn query_count(&self) -> usize {
        self.query_starts.len() - 1
    }

    pub(crate) fn pin_count(&self) -> usize {
        self.rows.len()
    }

    /// Returns the pins of a query.
    pub(crate) fn of_query(&self, query: usize) -> Range<usize> {
        self.query_starts[query] as usize..self.query_starts[query + 1] as usize
    }

    /// Returns the pins of a row, by query.
    pub(crate) fn of_row(&self, row: u32) -> &[u32] {
        let row = row as usize;
        &self.of_rows[self.row_starts[row] as usize..self.row_starts[row + 1] as usize]
    }

    /// Returns the rows of a query.
    pub(crate) fn rows_of(&self, query: usize) -> &[u32] {
        &self.rows[self.of_query(query)]
    }

    /// Returns the row of a pin.
    pub(crate) fn row(&self, pin: usize) -> u32 {
        self.rows[pin]
    }

    /// Returns the query of a pin.
    pub(crate) fn query(&self, pin: u32) -> usize {
        self.queries[pin as usize] as usize
    }

    /// Returns in how many queries a row is.
    pub(crate) fn degree(&self, row: u32) -> usize {
        self.of_row(row).len()
    }

    /// Returns before which query a row's sample of about `sample_max` queries ends.
    pub(crate) fn sample_end(&self, row: u32, sample_max: usize) -> usize {
        let degree = self.degree(row);
        if degree <= sample_max {
            return self.query_count();
        }
        (self.query_count() as f64 * sample_max as f64 / degree as f64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hypergraph::Hypergraph;
    use crate::QueryLog;

    #[test]
    fn both_ways_agree() {
        let queries: Vec<Vec<u32>> = (0..50).map(|at| vec![at % 7, 7 + at % 3, at % 5]).collect();
        let log = QueryLog::from_queries(10, &queries).expect("in range");
        let graph = Hypergraph::from_log(log.clone()).expect("few rows");
        let pins = Pins::new(&graph.pins, graph.rows.len(), 3);
        assert_eq!((pins.query_count(), pins.pin_count()), (50, log.pin_count()));
        for row in 0..pins.row_count() as u32 {
            let queries: Vec<usize> = pins.of_row(row).iter().map(|&pin| pins.query(pin)).collect();
            assert!(queries.windows(2).all(|pair| pair[0] < pair[1]));
            assert!(queries.iter().all(|&query| pins.rows_of(query).contains(&row)));
            assert!(pins.of_row(row).iter().all(|&pin| pins.row(pin as usize) == row));
            assert_eq!(queries.len() as u32, log.frequencies()[graph.rows[row as usize] as usize]);
        }
    }

    #[test]
    fn a_sample_is_a_fair_share_of_the_queries() {
        let queries: Vec<[u32; 2]> = (0..1000).map(|at| [0, 1 + at % 10]).collect();
        let graph = Hypergraph::from_log(QueryLog::from_queries(11, queries).expect("in range"))
            .expect("few rows");
        let pins = Pins::new(&graph.pins, graph.rows.len(), 3);
        assert_eq!(pins.sample_end(0, 600), 600);
        assert_eq!(pins.sample_end(1, 600), 1000);
        let in_sample = pins.of_row(1).iter().filter(|&&pin| pins.query(pin) < 600).count();
        assert!((40..80).contains(&in_sample), "{in_sample} of about 60");
    }
}
