//! Recursive bisection that minimises the probabilistic fanout.
//!
//! All rows that were asked for are one node. A node is split into two of about equal size, so
//! that queries are cut as little as possible, until a node fits a page:
//!
//! ```text
//! level 0   [ . . . . . . . . . . . . . . . . . . . . ]      rows in one array, a node is a range
//! level 1   [ . . . . . . . . ][ . . . . . . . . . . . ]     sizes are whole pages: only the last
//! level 2   [ . . . . ][ . . . . ][ . . . . ][ . . . . . ]   page of all can be short
//! ```
//!
//! A split starts at random and exchanges, per iteration, the rows that gain most on either side
//! ([`exchange`]). Afterwards the node's pins are divided between its children, and queries that
//! a child sees only one row of are dropped ([`divide`]). Rows of a node are numbered from 0, so
//! its arrays are as small as the node.
//!
//! What always holds: gains are integers and ties go by a hash of the row, so the result depends
//! on the log, the options and the seed, never on threads; sizes of nodes follow from the number of
//! rows.
//!
//! Source: MaxEmbed §5 ("vanilla SHP"), and Kabiljo and others, "Social Hash Partitioner", for
//! the objective with p = 0.5. Differs: pairs of rows are exchanged in order of gain instead of
//! by a coin per histogram bin, because that is exactly balanced and needs no luck.

mod divide;
mod exchange;
mod levels;
mod parts;
mod state;
mod subtree;

use std::path::Path;

use tierbed_core::{Error, Result};

use levels::Fill;
pub(crate) use levels::PartLimits;
pub(crate) use parts::{rows_of_parts, Part, Parts};
pub(crate) use state::identity_of;
use state::State;
pub use subtree::{order_of_parts, Subtree};

use super::{Placement, QueryLog};
use crate::hypergraph::Hypergraph;

/// Which of the pairs of rows that gain change sides, by gains from before the exchange.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExchangeRule {
    /// All, but half as many after each exchange that did not help; which rows of equal gain these
    /// are is drawn anew each time. Reads fewer pages.
    Settling,
    /// All of them every time, equal gains in the same order: the exchange of MaxEmbed's programs.
    Steady,
}

/// How to bisect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BisectionOptions {
    /// Rows a page holds.
    pub rows_per_page: u32,
    /// Exchanges per split at most; a split that exchanges nothing ends earlier. MaxEmbed's code
    /// uses 8; the default of 16 reads up to 2 % fewer pages.
    pub iteration_count: u32,
    /// Which rows change sides in an exchange.
    pub exchange_rule: ExchangeRule,
    /// Where splits start.
    pub seed: u64,
    /// Threads at work; they change the time, never the result.
    pub thread_count: usize,
}

impl BisectionOptions {
    /// The defaults for pages of `rows_per_page`: 16 iterations, seed 1, one thread.
    #[must_use]
    pub fn new(rows_per_page: u32) -> Self {
        let exchange_rule = ExchangeRule::Settling;
        Self { rows_per_page, iteration_count: 16, exchange_rule, seed: 1, thread_count: 1 }
    }

    /// The same with the exchange that was published: 8 times at most, all pairs that gain.
    #[must_use]
    pub fn as_published(&self) -> Self {
        Self { iteration_count: 8, exchange_rule: ExchangeRule::Steady, ..self.clone() }
    }

    /// The same on one thread.
    pub(crate) fn on_one_thread(&self) -> Self {
        Self { thread_count: 1, ..self.clone() }
    }

    pub(crate) fn check(&self) -> Result<()> {
        if self.rows_per_page == 0 {
            return Err(Error::invalid("a page must have room for one row at least"));
        }
        if self.thread_count == 0 {
            return Err(Error::invalid("bisection needs one thread at least"));
        }
        Ok(())
    }
}

/// How far a bisection is: reported after each level.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LevelReport {
    /// Levels that are done, from 1.
    pub levels_done: u32,
    /// Levels there will be.
    pub level_count: u32,
    /// Pins that later levels still look at.
    pub pin_count: u64,
}

/// Partitions the rows of `log` onto pages; rows never asked for come last.
///
/// Takes the log by value because its pins are reused: peak memory is about 4 bytes per pin, as
/// much again at worst for one side of the first split, and 25 bytes per row.
///
/// # Errors
///
/// `Invalid` for options out of range, `Unsupported` for 2^31 rows or more.
pub fn bisect(log: QueryLog, options: &BisectionOptions) -> Result<Placement> {
    options.check()?;
    place_full(Hypergraph::from_log(log)?, options)
}

/// Partitions as [`bisect`] does, and keeps at `state` what is needed to go on after a crash.
///
/// `report` is called after each level. The file is written after the first twelve and the last;
/// without one nothing is kept. The result is the same however often the bisection was
/// interrupted.
///
/// # Errors
///
/// As [`bisect`]; `Invalid` for a state of another log or other options, `Corruption` for a
/// damaged one, `Io` and `NoSpace`; what `report` returns.
pub fn bisect_resumable(
    log: QueryLog,
    options: &BisectionOptions,
    state: Option<&Path>,
    report: &mut dyn FnMut(LevelReport) -> Result<()>,
) -> Result<Placement> {
    options.check()?;
    let graph = Hypergraph::from_log(log)?;
    let row_count = graph.row_count;
    let state = State::new(state, &graph, identity_of(&graph, options));
    let mut order =
        state.go_on(report, |known, keep| levels::go_on(graph, options, known, keep))?;
    push_unseen(&mut order, row_count);
    Placement::from_order(&order, options.rows_per_page)
}

/// Fills page after page; rows never asked for come last.
fn place_full(graph: Hypergraph, options: &BisectionOptions) -> Result<Placement> {
    let row_count = graph.row_count;
    let page_count = graph.rows.len().div_ceil(options.rows_per_page as usize);
    let (mut order, _) = levels::split(graph, page_count, Fill::Full, options);
    push_unseen(&mut order, row_count);
    Placement::from_order(&order, options.rows_per_page)
}

/// Partitions the rows of `log` onto at most `page_count` pages, those that were asked for
/// about equally full; rows never asked for come last, on full pages of their own.
///
/// # Errors
///
/// `Invalid` for options out of range and for fewer pages than the rows fill, `Unsupported` for
/// 2^31 rows or more.
pub fn bisect_evenly(
    log: QueryLog,
    options: &BisectionOptions,
    page_count: u64,
) -> Result<Placement> {
    options.check()?;
    let page = options.rows_per_page as usize;
    let graph = Hypergraph::from_log(log)?;
    let row_count = graph.row_count;
    let seen_count = graph.rows.len();
    let unseen_pages = (row_count as usize - seen_count).div_ceil(page);
    let even_pages = (page_count as usize).saturating_sub(unseen_pages).min(seen_count);
    if page_count < u64::from(row_count.div_ceil(options.rows_per_page)) {
        return Err(Error::invalid("rows do not fit the pages")
            .with("row_count", row_count)
            .with("page_count", page_count)
            .with("rows_per_page", page));
    }
    if even_pages < seen_count.div_ceil(page) {
        // No room to spare: unseen rows must share the last page of the others.
        return place_full(graph, options);
    }
    let (mut order, sizes) = levels::split(graph, even_pages, Fill::Even, options);
    push_unseen(&mut order, row_count);
    let mut builder = Placement::builder(row_count, options.rows_per_page)?;
    let mut rest = order.as_slice();
    for size in sizes {
        let (rows, behind) = rest.split_at(size);
        builder.push_home_page(rows, &[])?;
        rest = behind;
    }
    for rows in rest.chunks(page) {
        builder.push_home_page(rows, &[])?;
    }
    builder.finish()
}

/// Splits the rows of `graph` into `part_count` parts of about equal size; there may be fewer rows.
///
/// Returns the rows that were asked for, part after part, and how many each has.
pub(crate) fn split_evenly(
    graph: Hypergraph,
    part_count: usize,
    options: &BisectionOptions,
) -> (Vec<u32>, Vec<usize>) {
    let part_count = part_count.min(graph.rows.len());
    match part_count {
        0 => (Vec::new(), Vec::new()),
        _ => levels::split(graph, part_count, Fill::Even, options),
    }
}

/// Returns all rows of `graph`, page after page, on the calling thread.
pub(crate) fn bisect_block(graph: Hypergraph, options: &BisectionOptions) -> Vec<u32> {
    let page_count = graph.rows.len().div_ceil(options.rows_per_page as usize);
    levels::split(graph, page_count, Fill::Full, &options.on_one_thread()).0
}

/// Bisects a hypergraph into parts within `limits`; `state_path` is the resume file.
///
/// # Errors
///
/// As [`bisect_resumable`]; what `report` returns.
pub(crate) fn into_parts(
    graph: Hypergraph,
    limits: PartLimits,
    options: &BisectionOptions,
    state_path: Option<&Path>,
    report: &mut dyn FnMut(LevelReport) -> Result<()>,
) -> Result<Parts> {
    let mut identity = identity_of(&graph, options);
    identity.extend([limits.rows, limits.pins, limits.unit_rows]);
    let state = State::new(state_path, &graph, identity);
    state.go_on(report, |known, keep| Parts::split(graph, limits, options, known, keep))
}

/// Appends the rows that `order` lacks, highest first.
#[expect(clippy::indexing_slicing, reason = "rows of an order are below the row count")]
fn push_unseen(order: &mut Vec<u32>, row_count: u32) {
    let mut is_placed = vec![false; row_count as usize];
    for &row in order.iter() {
        is_placed[row as usize] = true;
    }
    let unseen = is_placed.iter().enumerate().rev().filter(|(_, placed)| !**placed);
    order.extend(unseen.map(|(row, _)| row as u32));
}

#[cfg(test)]
mod tests;
