//! Which seat saves most reads now? Replication by marginal gain.
//!
//! After every replica page the queries it helps are served anew, so that no later page is paid for
//! the same saving, and no page is built twice. Then seats of replicas go to whoever saves more
//! there.
//!
//! ```text
//! grow full home pages ─▶ replica pages by marginal gain ─▶ seat sweeps, for each ratio
//!                         a lower ratio takes fewer of them
//! ```
//!
//! Home pages are full: room left on all of them would mostly lie on pages that are seldom read,
//! while replicas of popular rows want pages of their own.
//!
//! Differs from MaxEmbed §5.3: its replica pages are chosen independently of each other.

mod pages;
mod seats;

use tierbed_core::{Error, Result};

use super::ReplicaBudget;
use crate::hypergraph::Hypergraph;
use crate::partition::grow::{run_blocks, Block, GrowthOptions};
use crate::partition::parallel;
use crate::placement::Placement;
use crate::QueryLog;

/// A block with pages of local rows.
struct Built {
    block: Block,
    /// Home pages, then replica pages, the most gainful first.
    pages: Vec<Vec<u32>>,
    home_page_count: usize,
    /// Reads of its queries beyond one page each, without replicas.
    cost: u64,
}

/// Grows home pages for the rows of `log` and adds what replicas `ratio` allows.
///
/// `log` should be the miss stream of the cache that will stand in front.
///
/// # Errors
///
/// `Invalid` for a bad ratio or options out of range, `Unsupported` for 2^31 rows or more and for
/// blocks of 2^32 pins or more.
pub fn by_marginal_gain(log: QueryLog, options: &GrowthOptions, ratio: f64) -> Result<Placement> {
    let mut placements = by_marginal_gain_each(log, options, &[ratio])?;
    placements.pop().ok_or_else(|| Error::invalid("no ratio"))
}

/// Grows home pages once and adds what replicas each of `ratios` allows; the placements are in
/// the order of ratios, each as [`by_marginal_gain`] makes it.
///
/// # Errors
///
/// As [`by_marginal_gain`].
pub fn by_marginal_gain_each(
    log: QueryLog,
    options: &GrowthOptions,
    ratios: &[f64],
) -> Result<Vec<Placement>> {
    options.check()?;
    let rows_per_page = options.bisection.rows_per_page;
    let row_count = log.row_count();
    let budget_of = |&ratio: &f64| ReplicaBudget::of_ratio(ratio, row_count, rows_per_page);
    let budgets = ratios.iter().map(budget_of).collect::<Result<Vec<_>>>()?;
    let mut graph = Hypergraph::from_log(log)?;
    let lone = graph.take_lone_rows();
    let lone_pages = lone.len().div_ceil(rows_per_page as usize);
    let mut built = home_pages(graph, options)?;
    let home_pages = lone_pages + built.iter().map(|built| built.home_page_count).sum::<usize>();
    let room = |budget: &ReplicaBudget| match budget.replica_count {
        0 => 0,
        _ => (budget.total_page_count as usize).saturating_sub(home_pages),
    };
    built = add_replica_pages(built, options, budgets.iter().map(room).max().unwrap_or(0));
    let place = |budget: &ReplicaBudget| {
        let pages = pages_within(&built, options, room(budget), budget.replica_count > 0);
        assemble(&built, &pages, &lone, (row_count, rows_per_page), *budget)
    };
    // One block leaves threads to ratios.
    let thread_count = if built.len() == 1 { options.bisection.thread_count } else { 1 };
    parallel(budgets.iter().collect(), thread_count, place).into_iter().collect()
}

fn home_pages(graph: Hypergraph, options: &GrowthOptions) -> Result<Vec<Built>> {
    run_blocks(graph, options, |block| {
        let pages = block.home_pages(&options.bisection);
        let reads = pages::residual_of(&block.pins, &pages).total_reads();
        let cost = reads.saturating_sub(block.pins.query_count() as u64);
        Built { home_page_count: pages.len(), block, pages, cost }
    })
}

/// Shares `replica_pages` out to blocks by their cost; a smaller number gives none of them more.
fn shares(built: &[Built], replica_pages: usize) -> Vec<usize> {
    let total = built.iter().map(|built| u128::from(built.cost)).sum::<u128>().max(1);
    let share = |cost: u128| (replica_pages as u128 * cost / total) as usize;
    built.iter().map(|built| share(u128::from(built.cost))).collect()
}

fn add_replica_pages(built: Vec<Built>, options: &GrowthOptions, most: usize) -> Vec<Built> {
    let rows_per_page = options.bisection.rows_per_page as usize;
    let jobs: Vec<(usize, Built)> = shares(&built, most).into_iter().zip(built).collect();
    parallel(jobs, options.bisection.thread_count, |(share, mut built)| {
        pages::add_pages(&built.block.pins, &mut built.pages, rows_per_page, share);
        built
    })
}

/// Returns the pages of each block with at most `replica_pages` over all blocks, seats swept.
fn pages_within(
    built: &[Built],
    options: &GrowthOptions,
    replica_pages: usize,
    has_replicas: bool,
) -> Vec<Vec<Vec<u32>>> {
    let rows_per_page = options.bisection.rows_per_page as usize;
    let jobs: Vec<(usize, &Built)> = shares(built, replica_pages).into_iter().zip(built).collect();
    parallel(jobs, options.bisection.thread_count, |(share, built)| {
        let mut pages = built.pages.clone();
        pages.truncate(built.home_page_count + share);
        if has_replicas {
            seats::sweep(&built.block.pins, &mut pages, rows_per_page);
        }
        pages
    })
}

/// Puts the blocks' pages together; lone rows fill up what is free, then pages of their own.
///
/// A row's home is its first page; pages without homes come last.
fn assemble(
    built: &[Built],
    pages: &[Vec<Vec<u32>>],
    lone: &[u32],
    (row_count, rows_per_page): (u32, u32),
    budget: ReplicaBudget,
) -> Result<Placement> {
    let mut builder = Placement::builder(row_count, rows_per_page)?;
    let mut has_home = vec![false; row_count as usize];
    let mut left = budget.replica_count as usize;
    let mut replica_pages = Vec::new();
    let mut lone = lone;
    for (Built { block, .. }, pages) in built.iter().zip(pages) {
        for page in pages {
            let rows = page.iter().filter_map(|&row| block.rows.get(row as usize)).copied();
            let (mut homes, mut replicas): (Vec<u32>, Vec<u32>) = rows.partition(|&row| {
                let slot = has_home.get_mut(row as usize);
                slot.is_some_and(|has_home| !std::mem::replace(has_home, true))
            });
            if homes.is_empty() {
                replica_pages.push(replicas);
                continue;
            }
            replicas.truncate(left);
            left -= replicas.len();
            if budget.replica_count == 0 {
                let room = (rows_per_page as usize - homes.len()).min(lone.len());
                let (here, behind) = lone.split_at(room);
                homes.extend_from_slice(here);
                lone = behind;
            }
            builder.push_home_page(&homes, &replicas)?;
        }
    }
    for rows in lone.chunks(rows_per_page as usize) {
        builder.push_home_page(rows, &[])?;
    }
    for mut page in replica_pages {
        page.truncate(left);
        left -= page.len();
        if !page.is_empty() {
            builder.push_replica_page(&page)?;
        }
    }
    builder.finish()
}
