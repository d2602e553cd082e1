//! Replication by marginal gain: each copy goes where it saves most reads.
//!
//! After every replica page the queries it helps are served anew, so that no later page is paid for
//! the same saving, and no page is built twice. Then seats of replicas go to the rows that save
//! more there.
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
#![expect(
    clippy::indexing_slicing,
    reason = "blocks have pages for each ratio, and rows below the table's row count"
)]

mod pages;
mod replicas;
mod resume_pages;
mod seats;

use tierbed_core::{Error, Result};

use crate::hypergraph::Hypergraph;
use crate::partition::grow::blocks::BISECTED;
use crate::partition::grow::{
    bisected_pages, try_on_part, Block, Blocks, GrowthOptions, Way, UNITS_PER_ROW,
};
use crate::progress::{BuildContext, Progress};
use crate::resume::{halves, whole};
use crate::trial::TrialReads;
use crate::QueryLog;
use crate::ReplicaBudget;
use replicas::{with_replicas, Room};
use resume_pages::{append_pages, pages_of, Seats};
use tierbed_snapshot::Placement;

/// Place of a build, from 0 to 1, where all rows have homes and replicas are wanted.
const HOUSED: f64 = 0.6;

/// Pages of local rows.
type Pages = Vec<Vec<u32>>;

/// How pages of blocks are made.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BlockRules<'a> {
    pub(crate) options: &'a GrowthOptions,
    /// Each block is made in the way that reads fewest pages in a trial of its own.
    pub(crate) is_guarded: bool,
}

impl BlockRules<'_> {
    /// Names what says how home pages are made: a trial, or the options.
    fn chosen_by(self) -> u32 {
        match self.options.way {
            _ if self.is_guarded => 1,
            Way::Grown => 0,
            Way::Refined => 2,
            Way::Bisected => 3,
        }
    }
}

/// A block's home pages.
struct Homes {
    pages: Pages,
    /// Reads of its queries beyond one page each.
    cost: u64,
    /// What later queries read of pages made in each way; nothing without a trial.
    trial: TrialReads,
}

/// Grows home pages for the rows of `log` and adds what replicas `ratio` allows.
///
/// `log` should be the miss stream of the cache that will stand in front.
///
/// # Errors
///
/// `Invalid` for a bad ratio or options out of range, `Unsupported` for 2^31 rows or more.
pub fn by_marginal_gain(log: QueryLog, options: &GrowthOptions, ratio: f64) -> Result<Placement> {
    let progress = Progress::silent();
    let context = &BuildContext::alone(&progress);
    let rules = BlockRules { options, is_guarded: false };
    let (mut placements, _) = by_marginal_gain_in(log, rules, &[ratio], context)?;
    placements.pop().ok_or_else(|| Error::invalid("no ratio"))
}

/// Grows home pages once and adds what replicas each of `ratios` allows; the placements are in
/// the order of ratios, each as [`by_marginal_gain`] makes it. Reports progress, and resumes an
/// earlier run. Where
/// the rules are guarded, blocks are bisected if that reads less; returns what all trials read.
///
/// # Errors
///
/// As [`by_marginal_gain`]; those of kept files, and what stops the build.
pub(crate) fn by_marginal_gain_in(
    log: QueryLog,
    rules: BlockRules<'_>,
    ratios: &[f64],
    context: &BuildContext<'_, '_>,
) -> Result<(Vec<Placement>, TrialReads)> {
    let options = rules.options;
    options.check()?;
    let rows_per_page = options.bisection.rows_per_page;
    let row_count = log.row_count();
    let budget_of = |&ratio: &f64| ReplicaBudget::of_ratio(ratio, row_count, rows_per_page);
    let budgets = ratios.iter().map(budget_of).collect::<Result<Vec<_>>>()?;
    let mut graph = Hypergraph::from_log(log)?;
    let lone = graph.take_lone_rows();
    let lone_pages = lone.len().div_ceil(rows_per_page as usize);
    let blocks = Blocks::split(graph, options, context)?;
    let has_replicas = budgets.iter().any(|budget| budget.replica_count > 0);
    let housed = if has_replicas { HOUSED } else { 1.0 };
    let homes = home_pages(&blocks, rules, context, housed)?;
    let trial = homes.iter().fold(TrialReads::default(), |sum, homes| sum.plus(homes.trial));
    let home_count = lone_pages + homes.iter().map(|homes| homes.pages.len()).sum::<usize>();
    let rooms: Vec<Room> = budgets
        .iter()
        .map(|budget| match budget.replica_count {
            0 => Room::None,
            _ => Room::Pages((budget.total_page_count as usize).saturating_sub(home_count)),
        })
        .collect();
    let by_block = if has_replicas {
        with_replicas(&blocks, homes, rules, &rooms, context)?
    } else {
        homes.into_iter().map(|homes| vec![homes.pages; rooms.len()]).collect()
    };
    let place = |(at, budget): (usize, &ReplicaBudget)| {
        let pages = by_block.iter().map(|of_block| of_block[at].as_slice());
        assemble(blocks.rows().zip(pages), &lone, row_count, rows_per_page, *budget)
    };
    let placements = budgets.iter().enumerate().map(place).collect::<Result<Vec<_>>>()?;
    Ok((placements, trial))
}

/// Makes the home pages of each block; progress then stands at `housed`.
fn home_pages(
    blocks: &Blocks<'_>,
    rules: BlockRules<'_>,
    context: &BuildContext<'_, '_>,
    housed: f64,
) -> Result<Vec<Homes>> {
    let options = rules.options;
    let rows_per_page = options.bisection.rows_per_page as usize;
    let row_counts: Vec<usize> = blocks.rows().map(<[u32]>::len).collect();
    let units = row_counts.iter().sum::<usize>() as u64 * UNITS_PER_ROW;
    let stage = context.stage(BISECTED..housed, units);
    blocks.run(row_counts, |source, row_count| {
        let file = blocks.resume_file("homes", source.at, &[rules.chosen_by()]);
        if let Some(numbers) = file.read()? {
            stage.advance(row_count as u64 * UNITS_PER_ROW);
            let seats = Seats { row_count, rows_per_page, once: true };
            return Homes::decode(&numbers, seats).ok_or_else(|| file.damaged());
        }
        context.progress.check()?;
        let homes = source.with(|part, scale| {
            let bisection = &options.bisection;
            let (mut trial, mut way) = (TrialReads::default(), options.way);
            if rules.is_guarded {
                trial = try_on_part(part, bisection, source.seed);
                way = trial.way();
                context.progress.check()?;
            }
            let block = Block::new(part, source.seed);
            let pages = match way {
                Way::Bisected => {
                    let pages = bisected_pages(part, bisection);
                    stage.advance(row_count as u64 * UNITS_PER_ROW);
                    pages
                }
                _ => block.home_pages(bisection, way, &stage),
            };
            context.progress.check()?;
            let reads = pages::residual_of(&block.pins, &pages).total_reads();
            let further = reads.saturating_sub(block.pins.query_count() as u64);
            Ok(Homes { pages, cost: (further as f64 * scale) as u64, trial })
        })?;
        file.write(&homes.encode())?;
        Ok(homes)
    })
}

impl Homes {
    /// Returns trial, cost and pages as numbers.
    fn encode(&self) -> Vec<u32> {
        let mut numbers = self.trial.encode();
        numbers.extend(halves(self.cost));
        append_pages(&mut numbers, &self.pages);
        numbers
    }

    fn decode(numbers: &[u32], seats: Seats) -> Option<Self> {
        let (trial, behind) = numbers.split_first_chunk::<6>()?;
        let (&cost, pages) = behind.split_first_chunk::<2>()?;
        let pages = pages_of(pages, seats)?;
        Some(Self { pages, cost: whole(cost), trial: TrialReads::decode(trial) })
    }
}

/// Puts the blocks' pages together; lone rows fill up what is free, then pages of their own.
///
/// Blocks are rows and pages of local rows. A row's home is its first page; pages without homes
/// come last.
fn assemble<'a>(
    blocks: impl Iterator<Item = (&'a [u32], &'a [Vec<u32>])>,
    lone: &[u32],
    row_count: u32,
    rows_per_page: u32,
    budget: ReplicaBudget,
) -> Result<Placement> {
    let mut builder = Placement::builder(row_count, rows_per_page)?;
    let mut has_home = vec![false; row_count as usize];
    let mut left = budget.replica_count as usize;
    let mut replica_pages = Vec::new();
    let mut lone = lone;
    for (rows_of_block, pages) in blocks {
        for page in pages {
            let rows = page.iter().map(|&row| rows_of_block[row as usize]);
            let (mut homes, mut replicas): (Vec<u32>, Vec<u32>) =
                rows.partition(|&row| !std::mem::replace(&mut has_home[row as usize], true));
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

#[cfg(test)]
mod tests;
