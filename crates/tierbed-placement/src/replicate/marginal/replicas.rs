//! Share of replica pages of each block, and the block's pages with them.

use tierbed_core::Result;

use super::resume_pages::{append_pages, pages_of, Seats};
use super::{pages, seats, BlockRules, Homes, Pages, HOUSED};
use crate::partition::grow::{Block, Blocks};
use crate::partition::parallel;
use crate::progress::{BuildContext, Meter};

/// What a ratio leaves for replicas.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Room {
    /// No replica at all, not even on home pages with free seats.
    None,
    /// Pages for replicas.
    Pages(usize),
}

/// Adds replica pages to each block and sweeps seats; returns by block, by room, the pages.
pub(super) fn with_replicas(
    blocks: &Blocks<'_>,
    homes: Vec<Homes>,
    rules: BlockRules<'_>,
    rooms: &[Room],
    context: &BuildContext<'_, '_>,
) -> Result<Vec<Vec<Pages>>> {
    let options = rules.options;
    let rows_per_page = options.bisection.rows_per_page as usize;
    let total = homes.iter().map(|homes| u128::from(homes.cost)).sum::<u128>().max(1);
    let row_counts: Vec<usize> = blocks.rows().map(<[u32]>::len).collect();
    let stage = context.stage(HOUSED..1.0, row_counts.iter().sum::<usize>() as u64);
    // One block leaves threads to ratios.
    let thread_count = if blocks.len() == 1 { options.bisection.thread_count } else { 1 };
    blocks.run(homes.into_iter().zip(row_counts), |source, (homes, row_count)| {
        let shares: Vec<Room> = rooms.iter().map(|room| room.share(homes.cost, total)).collect();
        let meter = stage.meter(row_count as u64);
        let mut identity = vec![rules.chosen_by()];
        identity.extend(shares.iter().flat_map(|share| share.identity()));
        let file = blocks.resume_file("seats", source.at, &identity);
        if let Some(numbers) = file.read()? {
            let kept = decode(&numbers, shares.len(), row_count, rows_per_page);
            return kept.ok_or_else(|| file.damaged());
        }
        context.progress.check()?;
        let block = source.block();
        let seating = Seating { rows_per_page, thread_count };
        let by_room = seated(&block, homes.pages, &shares, seating, &meter);
        context.progress.check()?;
        file.write(&encode(&by_room))?;
        Ok(by_room)
    })
}

impl Room {
    /// Returns what a block has of it by its cost. A smaller room gives no block more.
    fn share(self, cost: u64, total: u128) -> Self {
        match self {
            Self::None => Self::None,
            Self::Pages(pages) => Self::Pages((pages as u128 * u128::from(cost) / total) as usize),
        }
    }

    fn identity(self) -> [u32; 2] {
        match self {
            Self::None => [0, 0],
            Self::Pages(pages) => [1, pages as u32],
        }
    }
}

/// How replicas of one block get their seats.
#[derive(Debug, Clone, Copy)]
struct Seating {
    rows_per_page: usize,
    thread_count: usize,
}

/// Adds replica pages to the home pages of a block; returns the pages for each share of room.
fn seated(
    block: &Block,
    mut homes: Pages,
    shares: &[Room],
    seating: Seating,
    meter: &Meter<'_, '_, '_>,
) -> Vec<Pages> {
    let Seating { rows_per_page, thread_count } = seating;
    let home_count = homes.len();
    let counts = shares.iter().filter_map(|share| match share {
        Room::None => None,
        Room::Pages(count) => Some(*count),
    });
    let most = counts.max().unwrap_or(0);
    pages::add_pages(&block.pins, &mut homes, rows_per_page, most, meter);
    let all = homes;
    parallel(shares.to_vec(), thread_count, |share| {
        let mut pages = all.clone();
        match share {
            Room::None => pages.truncate(home_count),
            Room::Pages(count) => {
                pages.truncate(home_count + count);
                seats::sweep(&block.pins, &mut pages, rows_per_page);
            }
        }
        pages
    })
}

/// Returns the pages of each room as numbers: how many follow, then the pages.
fn encode(by_room: &[Pages]) -> Vec<u32> {
    let mut numbers = Vec::new();
    for pages in by_room {
        numbers.push(pages.iter().map(Vec::len).sum::<usize>() as u32);
        append_pages(&mut numbers, pages);
    }
    numbers
}

fn decode(
    mut numbers: &[u32],
    room_count: usize,
    row_count: usize,
    rows_per_page: usize,
) -> Option<Vec<Pages>> {
    let seats = Seats { row_count, rows_per_page, once: false };
    let mut by_room = Vec::with_capacity(room_count);
    for _ in 0..room_count {
        let (&count, behind) = numbers.split_first()?;
        let (of_room, behind) = behind.split_at_checked(count as usize)?;
        by_room.push(pages_of(of_room, seats)?);
        numbers = behind;
    }
    numbers.is_empty().then_some(by_room)
}
