//! One pass over the rows, those with fewest pages first.

use super::{Scratch, Selected};
use crate::index::RowPages;

/// Chooses pages that serve every one of `rows` that lies on a page, none twice.
///
/// Rows are gone through by their number of pages, then by row; of the pages of a row that is still
/// needed, the first with most rows still needed is chosen. `take` is given each page as soon as it
/// is chosen, with the positions in `rows` that it serves.
///
/// Cost: a sort of the rows and of all their pages, and for each chosen page at most `index limit`
/// pages looked up.
/// Source: MaxEmbed §6.1, Figure 6.
pub fn one_pass(
    index: &impl RowPages,
    rows: &[u32],
    scratch: &mut Scratch,
    mut take: impl FnMut(u32, &[u32]),
) -> Selected {
    scratch.start(index, rows);
    let pairs_max = Scratch::pairs_max(rows.len());
    let mut selected = Selected::default();
    let mut end = 0;
    while scratch.needed_count() > 0 {
        let first = end;
        end = scratch.gather(index, first, pairs_max);
        for at in first..end {
            if !scratch.is_needed(at) {
                continue;
            }
            let Some(page) = best_page(index.candidates_of(scratch.row(at)), scratch) else {
                unreachable!("a row that lies on no page is not needed")
            };
            let served = scratch.serve(page);
            selected.page_count += 1;
            selected.row_count += served.len() as u32;
            take(page, served);
        }
    }
    selected
}

/// Returns the first of `pages` that has most rows still needed.
fn best_page(mut pages: impl ExactSizeIterator<Item = u32>, scratch: &Scratch) -> Option<u32> {
    let first = pages.next()?;
    if pages.len() == 0 {
        return Some(first);
    }
    let mut best = (scratch.count_needed(first), first);
    for page in pages {
        // Nothing can be better than a page that serves all that is left.
        if best.0 == scratch.needed_count() {
            break;
        }
        let count = scratch.count_needed(page);
        if count > best.0 {
            best = (count, page);
        }
    }
    Some(best.1)
}
