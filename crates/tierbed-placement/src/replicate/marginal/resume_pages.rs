//! Resume format of a block's pages: rows in sequence, the last one of a page marked.

use super::Pages;
use crate::hypergraph::{close_page, edges, local};

/// What seats there are.
#[derive(Debug, Clone, Copy)]
pub(super) struct Seats {
    /// Rows of the block.
    pub(super) row_count: usize,
    pub(super) rows_per_page: usize,
    /// Every row has one seat; otherwise one at least.
    pub(super) once: bool,
}

/// Appends the rows of pages, page after page. No page is empty.
pub(super) fn append_pages(numbers: &mut Vec<u32>, pages: &[Vec<u32>]) {
    for page in pages {
        numbers.extend_from_slice(page);
        close_page(numbers);
    }
}

/// Returns the pages that were appended; `None` for numbers that are no pages of the block.
pub(super) fn pages_of(numbers: &[u32], seats: Seats) -> Option<Pages> {
    let pages: Pages =
        edges(numbers).map(|page| page.iter().map(|&row| local(row) as u32).collect()).collect();
    let mut seat_counts = vec![0u32; seats.row_count];
    for &row in pages.iter().flatten() {
        *seat_counts.get_mut(row as usize)? += 1;
    }
    let is_sound = pages.iter().map(Vec::len).sum::<usize>() == numbers.len()
        && pages.iter().all(|page| page.len() <= seats.rows_per_page)
        && seat_counts.iter().all(|&count| count == 1 || (count > 1 && !seats.once));
    is_sound.then_some(pages)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_come_back_and_what_are_none_do_not() {
        let pages = vec![vec![2, 0], vec![3], vec![1, 4]];
        let homes = Seats { row_count: 5, rows_per_page: 2, once: true };
        let mut numbers = Vec::new();
        append_pages(&mut numbers, &pages);
        assert_eq!(pages_of(&numbers, homes), Some(pages.clone()));
        assert_eq!(pages_of(&numbers, Seats { row_count: 4, ..homes }), None, "row beyond");
        assert_eq!(pages_of(&numbers, Seats { row_count: 6, ..homes }), None, "row without seat");
        assert_eq!(pages_of(&numbers, Seats { rows_per_page: 1, ..homes }), None, "page too long");
        assert_eq!(pages_of(&numbers[..4], homes), None, "page without end");
        append_pages(&mut numbers, &[vec![4, 0]]);
        assert_eq!(pages_of(&numbers, homes), None, "two seats");
        let with_replicas = pages_of(&numbers, Seats { once: false, ..homes });
        assert_eq!(with_replicas.map(|pages| pages.len()), Some(4));
        assert_eq!(pages_of(&[], Seats { row_count: 0, ..homes }), Some(vec![]));
    }
}
