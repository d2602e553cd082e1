//! Assignment of free seats, and exchange of seats for rows that save more reads.
//!
//! Page by page: a row that a query reads alone, while it reads this page too, would be served
//! along. The row that saves most so gets the next free seat. On a full page it may take the seat
//! of a replica that costs less to lose.

#![expect(clippy::indexing_slicing, reason = "pins, queries, rows and pages come from one block")]

use tierbed_core::env::SplitMix64;

use super::pages::residual_of;
use crate::partition::grow::pins::Pins;
use crate::partition::grow::residual::Residual;
use crate::partition::order::shuffle;

/// Sweeps over all pages; queries are served anew before each.
const SWEEP_COUNT: u64 = 3;

/// A sweep that saves less than this share of a read per query is the last.
const WORTHWHILE: f64 = 0.004;

/// A row must save this many reads more than the one it replaces.
const MARGIN: i64 = 1;

/// Sweeps until the free seats are taken and little is to be gained.
pub(super) fn sweep(pins: &Pins, pages: &mut [Vec<u32>], rows_per_page: usize) {
    for seed in 0..SWEEP_COUNT {
        let mut seats = Seats::new(pins, pages, rows_per_page);
        let before = seats.residual.total_reads();
        seats.run(pages, seed);
        let saved = before.saturating_sub(seats.residual.total_reads());
        if (saved as f64) < pins.query_count() as f64 * WORTHWHILE {
            break;
        }
    }
}

struct Seats<'a> {
    residual: Residual<'a>,
    rows_per_page: usize,
    /// By row: its pages.
    pages_of: Vec<Vec<u32>>,
    /// By page: the queries it serves, some perhaps no more.
    queries_of: Vec<Vec<u32>>,
    is_on_page: Vec<bool>,
    /// By row: reads it would save on the page at hand, and those with any.
    saving: Vec<i64>,
    candidates: Vec<u32>,
    /// By row of the page at hand: reads that its leaving would cost.
    loss: Vec<i64>,
}

impl<'a> Seats<'a> {
    fn new(pins: &'a Pins, pages: &[Vec<u32>], rows_per_page: usize) -> Self {
        let residual = residual_of(pins, pages);
        let row_count = pins.row_count();
        let mut pages_of = vec![Vec::new(); row_count];
        for (page, rows) in pages.iter().enumerate() {
            for &row in rows {
                pages_of[row as usize].push(page as u32);
            }
        }
        let mut queries_of: Vec<Vec<u32>> = vec![Vec::new(); pages.len()];
        for query in 0..pins.query_count() {
            for pin in pins.of_query(query) {
                // Every row of a block has a page.
                if let Some(queries) = queries_of.get_mut(residual.page(pin) as usize) {
                    if queries.last() != Some(&(query as u32)) {
                        queries.push(query as u32);
                    }
                }
            }
        }
        Self {
            residual,
            rows_per_page,
            pages_of,
            queries_of,
            is_on_page: vec![false; row_count],
            saving: vec![0; row_count],
            candidates: Vec::new(),
            loss: vec![0; row_count],
        }
    }

    fn run(&mut self, pages: &mut [Vec<u32>], seed: u64) {
        let mut order: Vec<usize> = (0..pages.len()).collect();
        shuffle(&mut order, &mut SplitMix64::new(seed));
        for page in order {
            let rows = &mut pages[page];
            self.fill(page, rows);
            for _ in 0..self.rows_per_page {
                if !self.replace_one(page, rows) {
                    break;
                }
            }
        }
    }

    /// Gives free seats to the rows that save most. One seat does not change another's worth.
    fn fill(&mut self, page: usize, rows: &mut Vec<u32>) {
        if rows.len() >= self.rows_per_page {
            return;
        }
        self.weigh(page, rows);
        let mut best = std::mem::take(&mut self.candidates);
        best.sort_unstable_by_key(|&row| (-self.saving[row as usize], row));
        best.truncate(self.rows_per_page - rows.len());
        best.retain(|&row| self.saving[row as usize] >= MARGIN);
        for row in best {
            self.seat(page, rows, row);
        }
    }

    /// Lets the best row take the seat of the cheapest replica. Returns whether it did.
    fn replace_one(&mut self, page: usize, rows: &mut Vec<u32>) -> bool {
        if rows.len() < self.rows_per_page
            || rows.iter().all(|&row| self.pages_of[row as usize].len() < 2)
        {
            return false;
        }
        self.weigh(page, rows);
        let best = self.candidates.iter().copied();
        let Some(comes) = best.max_by_key(|&row| (self.saving[row as usize], !row)) else {
            return false;
        };
        let replicas = rows.iter().copied().filter(|&row| self.pages_of[row as usize].len() > 1);
        let Some(goes) = replicas.min_by_key(|&row| (self.loss[row as usize], row)) else {
            return false;
        };
        if self.saving[comes as usize] < self.loss[goes as usize] + MARGIN {
            return false;
        }
        self.unseat(page, rows, goes);
        self.seat(page, rows, comes);
        true
    }

    /// Counts what rows elsewhere would save on `page`, and what rows on it would cost to lose.
    fn weigh(&mut self, page: usize, rows: &[u32]) {
        for row in self.candidates.drain(..) {
            self.saving[row as usize] = 0;
        }
        for &row in rows {
            self.saving[row as usize] = 0;
            self.loss[row as usize] = 0;
            self.is_on_page[row as usize] = true;
        }
        let pins = self.residual.pins;
        for at in 0..self.queries_of[page].len() {
            let query = self.queries_of[page][at] as usize;
            let served = |pin: usize| self.residual.page(pin) == page as u32;
            let served_count = pins.of_query(query).filter(|&pin| served(pin)).count();
            if served_count == 0 {
                continue;
            }
            for pin in pins.of_query(query) {
                let row = pins.row(pin) as usize;
                if self.residual.page(pin) == page as u32 {
                    // Without this row the page is still read for the others.
                    if served_count > 1 && self.other_page_read(query, row, page).is_none() {
                        self.loss[row] += 1;
                    }
                } else if !self.is_on_page[row] && self.residual.group(pin) == 1 {
                    if self.saving[row] == 0 {
                        self.candidates.push(row as u32);
                    }
                    self.saving[row] += 1;
                }
            }
        }
        for &row in rows {
            self.is_on_page[row as usize] = false;
        }
    }

    /// Returns another page of `row` that `query` reads anyway.
    fn other_page_read(&self, query: usize, row: usize, page: usize) -> Option<u32> {
        let mut others = self.pages_of[row].iter().copied().filter(|&other| other != page as u32);
        others.find(|&other| {
            self.residual.pins.of_query(query).any(|pin| self.residual.page(pin) == other)
        })
    }

    fn seat(&mut self, page: usize, rows: &mut Vec<u32>, row: u32) {
        rows.push(row);
        self.pages_of[row as usize].push(page as u32);
        let pins = self.residual.pins;
        for at in 0..self.queries_of[page].len() {
            let query = self.queries_of[page][at] as usize;
            let mut alone = None;
            let mut is_read = false;
            for pin in pins.of_query(query) {
                is_read |= self.residual.page(pin) == page as u32;
                if pins.row(pin) == row && self.residual.group(pin) == 1 {
                    alone = Some(pin);
                }
            }
            if let Some(pin) = alone.filter(|_| is_read) {
                self.residual.serve(pin, page as u32);
                self.residual.regroup(query);
            }
        }
    }

    fn unseat(&mut self, page: usize, rows: &mut Vec<u32>, row: u32) {
        let pins = self.residual.pins;
        for at in 0..self.queries_of[page].len() {
            let query = self.queries_of[page][at] as usize;
            let mut range = pins.of_query(query);
            let served =
                range.find(|&pin| pins.row(pin) == row && self.residual.page(pin) == page as u32);
            let Some(pin) = served else { continue };
            let first = self.pages_of[row as usize].iter().find(|&&other| other != page as u32);
            let other = self.other_page_read(query, row as usize, page).or(first.copied());
            let Some(other) = other else { continue };
            self.residual.serve(pin, other);
            self.queries_of[other as usize].push(query as u32);
            self.residual.regroup(query);
        }
        rows.retain(|&other| other != row);
        self.pages_of[row as usize].retain(|&other| other != page as u32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hypergraph::Hypergraph;
    use crate::QueryLog;

    fn pins(queries: &[&[u32]], row_count: u32) -> Pins {
        let log = QueryLog::from_queries(row_count, queries).expect("in range");
        let graph = Hypergraph::from_log(log).expect("few rows");
        assert!(graph.rows.iter().copied().eq(0..row_count), "local rows are the same");
        Pins::new(&graph.pins, graph.rows.len(), 1)
    }

    #[test]
    fn a_free_seat_goes_to_the_row_that_is_read_alone_most() {
        let pins = pins(&[&[0, 1, 2], &[0, 1, 2], &[0, 2], &[1, 3], &[3, 1], &[0], &[0]], 4);
        let mut pages = vec![vec![0, 1], vec![2], vec![3]];
        sweep(&pins, &mut pages, 3);
        assert!(pages[0].contains(&2), "{pages:?}");
        assert_eq!(residual_of(&pins, &pages).total_reads(), 5);
    }

    #[test]
    fn a_useless_replica_leaves_and_homes_stay() {
        let pins = pins(&[&[0, 1, 2], &[0, 1, 2], &[0, 1], &[3, 2]], 4);
        // 3 has a seat beside 0 and 1, who never need it; 2 would save two reads there.
        let mut pages = vec![vec![0, 1, 3], vec![2], vec![3]];
        sweep(&pins, &mut pages, 3);
        assert_eq!(pages[0], [0, 1, 2]);
        for row in 0..4 {
            assert!(pages.iter().any(|page| page.contains(&row)), "row {row} has a seat");
        }
    }
}
