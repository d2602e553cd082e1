//! One pass over the rows, those with fewest pages first.

use super::{Scratch, Selected};
use crate::index::PageIndex;

/// Chooses pages that serve every one of `rows` that lies on a page, none twice.
///
/// Rows are gone through by their number of pages, then by row; of the pages of a row that is still
/// needed, the first with most rows still needed is chosen. `take` is given each page as soon as it
/// is chosen, with the positions in `rows` that it serves.
///
/// Cost: a sort of the rows, and for each chosen page at most `index limit` pages looked at.
/// Source: MaxEmbed §6.1, Figure 6.
pub fn one_pass(
    index: &PageIndex,
    rows: &[u32],
    scratch: &mut Scratch,
    mut take: impl FnMut(u32, &[u32]),
) -> Selected {
    scratch.start(index, rows);
    warm(index, rows);
    let mut order = std::mem::take(&mut scratch.order);
    order.clear();
    let needed = (0..).zip(rows).filter(|(position, _)| scratch.is_needed(*position));
    order.extend(needed.map(|(position, &row)| {
        let page_count = index.pages_of(row).len() as u64;
        ((page_count << 32) | u64::from(row), position)
    }));
    order.sort_unstable();
    let mut selected = Selected::default();
    for &(rank, position) in &order {
        if !scratch.is_needed(position) {
            continue;
        }
        let Some(page) = best_page(index, index.pages_of(rank as u32), scratch) else {
            unreachable!("a row that lies on no page is not needed")
        };
        let served = scratch.serve(index.rows_of(page));
        selected.page_count += 1;
        selected.row_count += served.len() as u32;
        take(page, served);
    }
    scratch.order = order;
    selected
}

/// Reads the lists that will be asked for, all at once: the choice then waits for memory twice
/// instead of row by row.
fn warm(index: &PageIndex, rows: &[u32]) {
    let pages = || rows.iter().flat_map(|&row| index.pages_of(row));
    std::hint::black_box(pages().fold(0, |all, page| all ^ page));
    let first = |&page: &u32| index.rows_of(page).first().copied().unwrap_or(0);
    std::hint::black_box(pages().fold(0, |all, page| all ^ first(page)));
}

/// Returns the first of `pages` that has most rows still needed.
fn best_page(index: &PageIndex, pages: &[u32], scratch: &Scratch) -> Option<u32> {
    let (&first, others) = pages.split_first()?;
    if others.is_empty() {
        return Some(first);
    }
    let mut best = (scratch.count_needed(index.rows_of(first)), first);
    for &page in others {
        // Nothing can be better than a page that serves all that is left.
        if best.0 == scratch.needed_count() {
            break;
        }
        let count = scratch.count_needed(index.rows_of(page));
        if count > best.0 {
            best = (count, page);
        }
    }
    Some(best.1)
}
