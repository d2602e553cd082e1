//! Growth of replica pages.
#![expect(clippy::indexing_slicing, reason = "local rows are below the block's row count")]

use crate::partition::grow::page::Growth;
use crate::partition::grow::pins::Pins;
use crate::partition::grow::residual::{Residual, NO_PAGE};
use crate::partition::grow::seeds::Seeds;
use crate::progress::Meter;
use tierbed_snapshot::index::PageIndex;
use tierbed_snapshot::select::{greedy, Scratch};

/// How much popular rows are held back when replica pages grow.
const DAMPING: f32 = 0.3;

/// How much popular rows are held back as seeds.
const SEED_DAMPING: f32 = 0.5;

/// A promise this much too high is worth a second look at the heap.
const STALE_SHARE: f32 = 0.98;

/// What a seed promises at most after it has had a page.
const AGAIN_SHARE: f32 = 0.9;

/// A seed that promises less is forgotten.
const PROMISE_MIN: f32 = 0.01;

/// Serves every query from as few of `pages` as greedy cover finds.
pub(super) fn residual_of<'a>(pins: &'a Pins, pages: &[Vec<u32>]) -> Residual<'a> {
    let seat_count: usize = pages.iter().map(Vec::len).sum();
    if seat_count <= pins.row_count() {
        return residual_of_homes(pins, pages);
    }
    let mut residual = Residual::alone(pins);
    let row_count = pins.row_count() as u32;
    let index = PageIndex::new(row_count, pages.iter().map(Vec::as_slice));
    let index = index.unwrap_or_else(|error| panic!("a block has fewer than 2^32 seats: {error}"));
    let mut scratch = Scratch::default();
    for query in 0..pins.query_count() {
        let first = pins.of_query(query).start;
        greedy(&index, pins.rows_of(query), &mut scratch, |page, positions| {
            for &position in positions {
                residual.serve(first + position as usize, page);
            }
        });
        residual.regroup(query);
    }
    residual
}

/// Serves every query from the only page of each row: there is nothing to choose.
fn residual_of_homes<'a>(pins: &'a Pins, pages: &[Vec<u32>]) -> Residual<'a> {
    let mut home = vec![NO_PAGE; pins.row_count()];
    for (page, rows) in (0..).zip(pages) {
        for &row in rows {
            home[row as usize] = page;
        }
    }
    let mut residual = Residual::alone(pins);
    for query in 0..pins.query_count() {
        for pin in pins.of_query(query) {
            let page = home[pins.row(pin) as usize];
            if page != NO_PAGE {
                residual.serve(pin, page);
            }
        }
        residual.regroup(query);
    }
    residual
}

/// Adds at most `page_count` pages, each grown from the seed that owes most at that moment.
///
/// `meter` counts their rows; no more pages come when it says so.
pub(super) fn add_pages(
    pins: &Pins,
    pages: &mut Vec<Vec<u32>>,
    rows_per_page: usize,
    page_count: usize,
    meter: &Meter<'_, '_, '_>,
) {
    let mut growth = Growth::new(residual_of(pins, pages), rows_per_page, DAMPING);
    let promise = |growth: &Growth<'_>, row: u32| {
        growth.owed(row) * (pins.degree(row).max(1) as f32).powf(-SEED_DAMPING)
    };
    let mut seeds = Seeds::default();
    for row in 0..pins.row_count() as u32 {
        let promised = promise(&growth, row);
        if promised > PROMISE_MIN {
            seeds.push(row, promised);
        }
    }
    let most = pages.len() + page_count;
    while pages.len() < most {
        let Some((row, promised)) = seeds.pop() else { break };
        let kept = promise(&growth, row);
        if kept < promised * STALE_SHARE && seeds.best().is_some_and(|best| kept < best) {
            if kept > PROMISE_MIN {
                seeds.push(row, kept);
            }
            continue;
        }
        let grown = growth.grow(row, rows_per_page, None);
        if grown.saving < 1.0 {
            continue;
        }
        growth.accept(&grown.rows, pages.len() as u32);
        let is_enough = !meter.advance(grown.rows.len() as u64);
        pages.push(grown.rows);
        if is_enough {
            break;
        }
        let again = promise(&growth, row).min(promised * AGAIN_SHARE);
        if again > PROMISE_MIN {
            seeds.push(row, again);
        }
    }
}
