//! The page with most rows still needed, again and again.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::{Scratch, Selected};
use crate::index::RowPages;

/// Chooses pages that serve every one of `rows` that lies on a page, none twice, at most
/// `ln(rows) + 1` times as many as the fewest possible.
///
/// Each time the page with most rows still needed is chosen, the lowest of equals. `take` as in
/// [`one_pass`](super::one_pass).
///
/// Cost: all pages of all rows are looked at at least once. How many rows of a page are needed only
/// falls, so that counts are taken from a heap and mended when they come up.
/// Source: MaxEmbed §6 (greedy set cover).
pub fn greedy(
    index: &impl RowPages,
    rows: &[u32],
    scratch: &mut Scratch,
    mut take: impl FnMut(u32, &[u32]),
) -> Selected {
    scratch.start(index, rows);
    scratch.gather_all(index);
    let mut candidates = std::mem::take(&mut scratch.candidates);
    candidates.clear();
    candidates.extend(scratch.pages().map(|page| (scratch.count_needed(page), Reverse(page))));
    let mut heap = BinaryHeap::from(candidates);
    let mut selected = Selected::default();
    while scratch.needed_count() > 0 {
        let Some((count, page)) = heap.pop() else { break };
        let found = scratch.count_needed(page.0);
        if found < count {
            if found > 0 {
                heap.push((found, page));
            }
            continue;
        }
        let served = scratch.serve(page.0);
        selected.page_count += 1;
        selected.row_count += served.len() as u32;
        take(page.0, served);
    }
    scratch.candidates = heap.into_vec();
    selected
}
