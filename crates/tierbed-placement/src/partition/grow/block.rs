//! How is one block of rows made into pages?

use tierbed_core::env::mix64;
use tierbed_core::{Error, Result};

use super::page::Growth;
use super::pairs::Refinement;
use super::pins::Pins;
use super::residual::Residual;
use super::seeds::grow_pages;
use super::GrowthOptions;
use crate::hypergraph::{close_edge, edges, local, Hypergraph};
use crate::partition::bisect::{bisect_block, into_blocks};
use crate::partition::{parallel, BisectionOptions};

/// How much popular rows are held back when home pages grow.
const DAMPING: f32 = 0.5;

/// Rows of the table that were put together, and their queries over local rows.
#[derive(Debug)]
pub(crate) struct Block {
    /// By local row: the row of the table.
    pub(crate) rows: Vec<u32>,
    pub(crate) pins: Pins,
    seed: u64,
}

impl Block {
    /// Takes rows and edges of a hypergraph.
    pub(crate) fn new(graph: Hypergraph, seed: u64) -> Self {
        let pins = Pins::new(&graph.pins, graph.rows.len(), seed);
        Self { rows: graph.rows, pins, seed }
    }

    /// Grows home pages of at most `rows_per_page`, of local rows, as few as possible.
    pub(crate) fn home_pages(&self, bisection: &BisectionOptions) -> Vec<Vec<u32>> {
        let rows_per_page = bisection.rows_per_page as usize;
        let mut growth = Growth::new(Residual::alone(&self.pins), rows_per_page, DAMPING);
        let mut pages = grow_pages(&mut growth, rows_per_page);
        self.fill(&mut pages, bisection);
        Refinement::new(&self.pins).run(&mut pages, self.seed);
        pages
    }

    /// Gives every row that is on no page a seat: first the rest among itself, then in holes.
    fn fill(&self, pages: &mut Vec<Vec<u32>>, bisection: &BisectionOptions) {
        let rows_per_page = bisection.rows_per_page as usize;
        let page_count = self.rows.len().div_ceil(rows_per_page);
        let mut rest = self.rest(pages, bisection);
        // Short pages move together when there are more pages than rows fill.
        let rest_pages =
            |holes: usize, rest: usize| rest.saturating_sub(holes).div_ceil(rows_per_page);
        let holes = pages.iter().map(|page| rows_per_page - page.len()).sum();
        if pages.len() + rest_pages(holes, rest.len()) > page_count {
            *pages = join_short_pages(std::mem::take(pages), rows_per_page);
            while pages.len() > page_count {
                rest.extend(pages.pop().unwrap_or_default());
            }
        }
        let holes: usize = pages.iter().map(|page| rows_per_page - page.len()).sum();
        // The last rows of the rest have the fewest friends among it.
        let mut loose = rest.split_off(rest.len() - holes.min(rest.len()));
        loose.reverse();
        for page in pages.iter_mut() {
            let room = (rows_per_page - page.len()).min(loose.len());
            page.extend(loose.drain(loose.len() - room..));
        }
        pages.extend(rest.chunks(rows_per_page).map(<[u32]>::to_vec));
    }

    /// Bisects the rows that are on no page; rows without a query among them come last.
    fn rest(&self, pages: &[Vec<u32>], bisection: &BisectionOptions) -> Vec<u32> {
        let mut number = vec![u32::MAX; self.rows.len()];
        for &row in pages.iter().flatten() {
            if let Some(number) = number.get_mut(row as usize) {
                *number = 0;
            }
        }
        let is_free = |number: &u32| *number == u32::MAX;
        let free = number.iter().enumerate().filter(|(_, number)| is_free(number));
        let rows: Vec<u32> = free.map(|(row, _)| row as u32).collect();
        number.fill(u32::MAX);
        for (at, &row) in rows.iter().enumerate() {
            if let Some(number) = number.get_mut(row as usize) {
                *number = at as u32;
            }
        }
        let mut edge_pins = Vec::new();
        for query in 0..self.pins.query_count() {
            let begin = edge_pins.len();
            let numbers =
                self.pins.rows_of(query).iter().filter_map(|&row| number.get(row as usize));
            edge_pins.extend(numbers.filter(|number| **number != u32::MAX));
            close_edge(&mut edge_pins, begin);
        }
        let mut has_edge = vec![false; rows.len()];
        for &pin in edges(&edge_pins).flatten() {
            if let Some(flag) = has_edge.get_mut(local(pin)) {
                *flag = true;
            }
        }
        let row_count = self.rows.len() as u32;
        let ordered = bisect_block(Hypergraph { rows, pins: edge_pins, row_count }, bisection);
        // Stable: friends stay together, and loose rows gather at the end.
        let is_loose = |row: &u32| {
            let at = number.get(*row as usize).copied().unwrap_or(0);
            !has_edge.get(at as usize).copied().unwrap_or(false)
        };
        let (loose, mut friends): (Vec<u32>, Vec<u32>) = ordered.into_iter().partition(is_loose);
        friends.extend(loose);
        friends
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
        let tightest = (len..=rows_per_page)
            .find(|&room| with_room.get(room).is_some_and(|pages| !pages.is_empty()));
        let target = tightest.and_then(|room| with_room.get_mut(room)?.pop());
        let at = match target.and_then(|at| Some((at, joined.get_mut(at)?))) {
            Some((at, target)) => {
                target.extend(page);
                at
            }
            None => {
                joined.push(page);
                joined.len() - 1
            }
        };
        let room = joined.get(at).map_or(0, |page| rows_per_page - page.len());
        if let Some(pages) = with_room.get_mut(room) {
            pages.push(at);
        }
    }
    joined
}

/// Bisects a hypergraph into blocks and runs `work` on each, on the threads of the options.
///
/// Returns the results in order of blocks.
///
/// # Errors
///
/// `Unsupported` for a block of 2^32 pins or more.
pub(crate) fn run_blocks<T: Send>(
    graph: Hypergraph,
    options: &GrowthOptions,
    work: impl Fn(Block) -> T + Sync,
) -> Result<Vec<T>> {
    let blocks = into_blocks(graph, &options.bisection, options.block_rows);
    let seeds = (0..).map(|at: u64| mix64(options.bisection.seed ^ at));
    let jobs: Vec<(u64, Hypergraph)> = seeds.zip(blocks).collect();
    if let Some((_, block)) = jobs.iter().find(|(_, block)| block.pins.len() >= u32::MAX as usize) {
        return Err(Error::unsupported("a block has too many pins")
            .with("pin_count", block.pins.len())
            .with("remedy", "sample the log or take smaller blocks"));
    }
    Ok(parallel(jobs, options.bisection.thread_count, |(seed, graph)| {
        work(Block::new(graph, seed))
    }))
}
