//! Pages of one block of rows.
#![expect(clippy::indexing_slicing, reason = "local rows are below the block's row count")]

use super::page::Growth;
use super::pages_of_order;
use super::pairs::Refinement;
use super::pins::Pins;
use super::residual::Residual;
use super::seeds::grow_pages;
use super::Way;
use crate::hypergraph::{close_edge, edges, local, Hypergraph};
use crate::partition::bisect::{bisect_block, Part};
use crate::partition::BisectionOptions;
use crate::progress::Stage;

/// How much popular rows are held back when home pages grow.
const DAMPING: f32 = 0.5;

/// The queries of rows that were put together, over local rows.
#[derive(Debug)]
pub(crate) struct Block {
    pub(crate) pins: Pins,
    seed: u64,
}

/// Times that each row of a block is counted while home pages are made: grown, then refined.
pub(crate) const UNITS_PER_ROW: u64 = 2;

impl Block {
    /// Takes the edges of a part.
    pub(crate) fn new(part: Part<'_>, seed: u64) -> Self {
        Self { pins: Pins::new(part.pins, part.rows.len(), seed), seed }
    }

    /// Makes home pages of at most `rows_per_page`, of local rows, as few as possible, and refines
    /// them in pairs.
    ///
    /// `stage` counts [`UNITS_PER_ROW`] for each row; pages are of no use when it was stopped.
    pub(crate) fn home_pages(
        &self,
        bisection: &BisectionOptions,
        way: Way,
        stage: &Stage<'_, '_>,
    ) -> Vec<Vec<u32>> {
        let rows_per_page = bisection.rows_per_page as usize;
        let row_count = self.pins.row_count() as u64;
        let mut pages = if way == Way::Grown {
            // The arrays of growth go back before refinement has its own.
            let mut growth = Growth::new(Residual::alone(&self.pins), rows_per_page, DAMPING);
            grow_pages(&mut growth, rows_per_page, &stage.meter(row_count))
        } else {
            stage.advance(row_count);
            Vec::new()
        };
        self.fill(&mut pages, bisection);
        Refinement::new(&self.pins).run(&mut pages, self.seed, &stage.meter(row_count));
        pages
    }

    /// Gives every row that is on no page a seat: first the rest among itself, then in holes.
    fn fill(&self, pages: &mut Vec<Vec<u32>>, bisection: &BisectionOptions) {
        let rows_per_page = bisection.rows_per_page as usize;
        let page_count = self.pins.row_count().div_ceil(rows_per_page);
        let mut rest = self.rest(pages, bisection);
        // Short pages move together when there are more pages than rows fill.
        let rest_pages =
            |holes: usize, rest: usize| rest.saturating_sub(holes).div_ceil(rows_per_page);
        let holes = pages.iter().map(|page| rows_per_page - page.len()).sum();
        if pages.len() + rest_pages(holes, rest.len()) > page_count {
            *pages = join_short_pages(std::mem::take(pages), rows_per_page);
            // The shortest pages give way; they come last.
            let kept_count = page_count.min(pages.len());
            rest.extend(pages.drain(kept_count..).rev().flatten());
        }
        let holes: usize = pages.iter().map(|page| rows_per_page - page.len()).sum();
        // The last rows of the rest occur least with others of it: they go where there is room.
        let mut loose = rest.split_off(rest.len() - holes.min(rest.len()));
        loose.reverse();
        for page in pages.iter_mut() {
            let room = (rows_per_page - page.len()).min(loose.len());
            page.extend(loose.drain(loose.len() - room..));
        }
        pages.extend(pages_of_order(&rest, bisection.rows_per_page));
    }

    /// Bisects the rows that are on no page; rows without a query among them come last.
    fn rest(&self, pages: &[Vec<u32>], bisection: &BisectionOptions) -> Vec<u32> {
        let mut number = vec![u32::MAX; self.pins.row_count()];
        for &row in pages.iter().flatten() {
            number[row as usize] = 0;
        }
        let is_free = |number: &u32| *number == u32::MAX;
        let free = number.iter().enumerate().filter(|(_, number)| is_free(number));
        let rows: Vec<u32> = free.map(|(row, _)| row as u32).collect();
        number.fill(u32::MAX);
        for (at, &row) in rows.iter().enumerate() {
            number[row as usize] = at as u32;
        }
        // Queries among the rows left over: what their other rows need is served already.
        let mut edge_pins = Vec::new();
        for query in 0..self.pins.query_count() {
            let begin = edge_pins.len();
            let numbers = self.pins.rows_of(query).iter().map(|&row| number[row as usize]);
            edge_pins.extend(numbers.filter(|number| *number != u32::MAX));
            close_edge(&mut edge_pins, begin);
        }
        let mut has_edge = vec![false; rows.len()];
        for &pin in edges(&edge_pins).flatten() {
            has_edge[local(pin)] = true;
        }
        let row_count = self.pins.row_count() as u32;
        let ordered = bisect_block(Hypergraph { rows, pins: edge_pins, row_count }, bisection);
        // Stable: rows of one query stay together, and rows without one gather at the end.
        let is_loose = |row: &u32| !has_edge[number[*row as usize] as usize];
        let (loose, mut rest): (Vec<u32>, Vec<u32>) = ordered.into_iter().partition(is_loose);
        rest.extend(loose);
        rest
    }
}

/// Puts short pages onto others where they fit whole, the longest first.
fn join_short_pages(mut pages: Vec<Vec<u32>>, rows_per_page: usize) -> Vec<Vec<u32>> {
    pages.sort_by_key(|page| std::cmp::Reverse(page.len()));
    let mut joined: Vec<Vec<u32>> = Vec::with_capacity(pages.len());
    // By free seats: joined pages with so many.
    let mut with_room: Vec<Vec<usize>> = vec![Vec::new(); rows_per_page + 1];
    for page in pages {
        let len = page.len();
        let tightest = (len..=rows_per_page).find(|&room| !with_room[room].is_empty());
        let at = match tightest.and_then(|room| with_room[room].pop()) {
            Some(at) => {
                joined[at].extend(page);
                at
            }
            None => {
                joined.push(page);
                joined.len() - 1
            }
        };
        with_room[rows_per_page - joined[at].len()].push(at);
    }
    joined
}
