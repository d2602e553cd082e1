//! Which seat saves most reads now? Replication by marginal gain.
//!
//! After every replica page the queries it helps are served anew, so that no later page is paid for
//! the same saving, and no page is built twice. Part of the budget goes into the home pages: they
//! are built for fewer rows than they hold, and the free seats are filled with whoever saves most
//! there. Short of a whole new page, a seat next to the right rows is the cheapest replica.
//!
//! ```text
//! grow home pages of ceil(d / (1 + r/2)) rows ─▶ replica pages by marginal gain ─▶ seat sweeps
//! ```
//!
//! Differs from MaxEmbed §5.3: its replica pages are chosen independently of each other.

mod pages;
mod seats;

use tierbed_core::Result;

use super::ReplicaBudget;
use crate::hypergraph::Hypergraph;
use crate::partition::grow::{run_blocks, Block, GrowthOptions};
use crate::partition::parallel;
use crate::placement::Placement;
use crate::QueryLog;

/// A block with pages of local rows.
struct Built {
    block: Block,
    pages: Vec<Vec<u32>>,
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
    options.check()?;
    let rows_per_page = options.bisection.rows_per_page;
    let row_count = log.row_count();
    let budget = ReplicaBudget::of_ratio(ratio, row_count, rows_per_page)?;
    let mut graph = Hypergraph::from_log(log)?;
    let lone = graph.take_lone_rows();
    let lone_pages = lone.len().div_ceil(rows_per_page as usize);
    let most = (budget.total_page_count as usize).saturating_sub(lone_pages);
    let full = rows_per_page;
    let rows_at_home = home_rows(rows_per_page, ratio);
    let with_room = if rows_at_home < full {
        let built = home_pages(graph.clone(), options, rows_at_home)?;
        Some(built).filter(|built| page_count(built) <= most)
    } else {
        None
    };
    let mut built = match with_room {
        Some(built) => built,
        None => home_pages(graph, options, full)?,
    };
    if budget.replica_count > 0 {
        let replica_pages = most.saturating_sub(page_count(&built));
        built = replicate(built, options, replica_pages);
    }
    assemble(&built, lone, (row_count, rows_per_page), budget)
}

fn page_count(built: &[Built]) -> usize {
    built.iter().map(|built| built.pages.len()).sum()
}

/// Returns how many rows a home page is built for: half of the budget goes into its free seats.
fn home_rows(rows_per_page: u32, ratio: f64) -> u32 {
    let d = f64::from(rows_per_page);
    let rows = (d / (1.0 + ratio / 2.0) - 1e-9).ceil() as u32;
    let rows = rows.clamp(1, rows_per_page.saturating_sub(1).max(1));
    // One seat of a page may be more than the budget of all pages.
    if d / f64::from(rows) - 1.0 > ratio + 1e-6 {
        rows_per_page
    } else {
        rows
    }
}

fn home_pages(graph: Hypergraph, options: &GrowthOptions, at_home: u32) -> Result<Vec<Built>> {
    let mut options = options.clone();
    options.bisection.rows_per_page = at_home;
    run_blocks(graph, &options, |block| {
        let pages = block.home_pages(&options.bisection);
        Built { block, pages }
    })
}

/// Adds `replica_pages` pages, shared out to blocks by what their queries read beyond one page.
fn replicate(built: Vec<Built>, options: &GrowthOptions, replica_pages: usize) -> Vec<Built> {
    let rows_per_page = options.bisection.rows_per_page as usize;
    let thread_count = options.bisection.thread_count;
    let costs = parallel(built.iter().collect(), thread_count, |built: &Built| {
        let residual = pages::residual_of(&built.block.pins, &built.pages);
        residual.total_reads() - built.block.pins.query_count() as u64
    });
    let total = costs.iter().sum::<u64>().max(1) as u128;
    let mut before = 0u128;
    let mut jobs = Vec::with_capacity(built.len());
    for (built, cost) in built.into_iter().zip(costs) {
        let share = |cost: u128| (replica_pages as u128 * cost / total) as usize;
        let after = before + u128::from(cost);
        jobs.push((built, share(after) - share(before)));
        before = after;
    }
    parallel(jobs, thread_count, |(built, replica_pages): (Built, usize)| {
        let Built { block, mut pages } = built;
        pages::add_pages(&block.pins, &mut pages, rows_per_page, replica_pages);
        seats::sweep(&block.pins, &mut pages, rows_per_page);
        Built { block, pages }
    })
}

/// Puts the blocks' pages together; lone rows fill up what is free, then pages of their own.
///
/// A row's home is its first page; pages without homes come last.
fn assemble(
    built: &[Built],
    lone: Vec<u32>,
    (row_count, rows_per_page): (u32, u32),
    budget: ReplicaBudget,
) -> Result<Placement> {
    let mut builder = Placement::builder(row_count, rows_per_page)?;
    let mut has_home = vec![false; row_count as usize];
    let mut left = budget.replica_count as usize;
    let mut replica_pages = Vec::new();
    let mut lone = lone.as_slice();
    for Built { block, pages } in built {
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
