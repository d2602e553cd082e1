use tierbed_core::env::SplitMix64;

use super::*;
use crate::index::{PackedPages, PageIndex};

const ROWS: u32 = 12;

/// A small placement: home pages of three rows, then some replica pages; rows 10 and 11 nowhere.
fn small_index(rng: &mut SplitMix64) -> PageIndex {
    let mut rows: Vec<u32> = (0..ROWS - 2).collect();
    for at in (1..rows.len()).rev() {
        rows.swap(at, rng.below(at as u64 + 1) as usize);
    }
    let mut pages: Vec<Vec<u32>> = rows.chunks(3).map(<[u32]>::to_vec).collect();
    for _ in 0..rng.below(5) {
        let mut page: Vec<u32> = (0..3).map(|_| rng.below(u64::from(ROWS - 2)) as u32).collect();
        page.sort_unstable();
        page.dedup();
        pages.push(page);
    }
    PageIndex::new(ROWS, pages.iter().map(Vec::as_slice)).unwrap()
}

/// Checks one selection and returns how many pages it took.
fn check(index: &PageIndex, rows: &[u32], selection: Selection, scratch: &mut Scratch) -> usize {
    let (mut pages, mut positions) = (Vec::new(), Vec::new());
    let selected = selection.select(index, rows, scratch, |page, served| {
        assert!(!served.is_empty(), "a page that serves nothing is not read");
        for &position in served {
            let row = rows[position as usize];
            assert!(index.rows_of(page).contains(&row), "page {page} holds row {row}");
        }
        pages.push(page);
        positions.extend_from_slice(served);
    });
    assert_eq!(selected.page_count as usize, pages.len());
    assert_eq!(selected.row_count as usize, positions.len());
    let mut distinct = pages.clone();
    distinct.sort_unstable();
    distinct.dedup();
    assert_eq!(distinct.len(), pages.len(), "a page is read once");
    // Each row that lies somewhere is served once, at its first position.
    let first = |at: &u32| rows.iter().position(|row| *row == rows[*at as usize]);
    let is_wanted = |at: &u32| {
        first(at) == Some(*at as usize) && !index.pages_of(rows[*at as usize]).is_empty()
    };
    let wanted: Vec<u32> = (0..rows.len() as u32).filter(is_wanted).collect();
    positions.sort_unstable();
    assert_eq!(positions, wanted);
    pages.len()
}

/// The fewest pages that serve `rows`, by trying every set of pages.
fn fewest_pages(index: &PageIndex, rows: &[u32]) -> usize {
    let page_count = index.inverted().list_count();
    let serves = |set: u32, row: u32| {
        let pages = index.pages_of(row);
        pages.is_empty() || pages.iter().any(|&page| set & (1 << page) != 0)
    };
    let sets = (0u32..1 << page_count).filter(|&set| rows.iter().all(|&row| serves(set, row)));
    sets.map(u32::count_ones).min().unwrap() as usize
}

#[test]
fn every_small_query_is_covered_once_and_greedy_is_near_the_fewest() {
    let mut rng = SplitMix64::new(7);
    let mut scratch = Scratch::default();
    let mut greedy_is_fewest = 0;
    for _ in 0..6 {
        let index = small_index(&mut rng);
        for set in 0u32..1 << ROWS {
            if set % 7 != 0 && set.count_ones() > 3 {
                continue; // every small query, and a seventh of the others
            }
            let rows: Vec<u32> = (0..ROWS).filter(|row| set & (1 << row) != 0).collect();
            let fewest = fewest_pages(&index, &rows);
            let one_pass = check(&index, &rows, Selection::OnePass, &mut scratch);
            let greedy = check(&index, &rows, Selection::Greedy, &mut scratch);
            let bound = fewest as f64 * (1.0 + (rows.len().max(1) as f64).ln());
            assert!(greedy as f64 <= bound, "{greedy} pages where {fewest} do");
            assert!(one_pass >= fewest && greedy >= fewest);
            greedy_is_fewest += usize::from(greedy == fewest);
        }
    }
    assert!(greedy_is_fewest > 1000);
}

#[test]
fn rows_with_one_page_choose_first_and_bring_others_along() {
    // Row 1 lies with 0 and with 2; both of those have one page only.
    let index = PageIndex::new(4, [&[0, 1][..], &[2], &[1, 3]]).unwrap();
    let mut scratch = Scratch::default();
    let mut taken = Vec::new();
    one_pass(&index, &[1, 0, 2], &mut scratch, |page, served| taken.push((page, served.to_vec())));
    assert_eq!(taken, [(0, vec![1, 0]), (1, vec![2])]);
}

#[test]
fn of_equal_pages_the_first_is_chosen_and_of_unequal_ones_the_fuller() {
    let index = PageIndex::new(4, [&[0, 1][..], &[0, 2], &[1, 2, 3], &[3]]).unwrap();
    let mut scratch = Scratch::default();
    let mut taken = Vec::new();
    one_pass(&index, &[0], &mut scratch, |page, _| taken.push(page));
    one_pass(&index, &[2, 1, 3], &mut scratch, |page, _| taken.push(page));
    assert_eq!(taken, [0, 2]);
}

#[test]
fn queries_of_a_batch_share_pages_and_a_row_asked_twice_is_served_once() {
    let mut rng = SplitMix64::new(3);
    let mut scratch = Scratch::default();
    for _ in 0..200 {
        let index = small_index(&mut rng);
        let query = |rng: &mut SplitMix64| -> Vec<u32> {
            (0..1 + rng.below(5)).map(|_| rng.below(u64::from(ROWS)) as u32).collect()
        };
        let queries = [query(&mut rng), query(&mut rng), query(&mut rng)];
        for selection in [Selection::OnePass, Selection::Greedy] {
            let alone = queries.iter().map(|rows| check(&index, rows, selection, &mut scratch));
            let alone: usize = alone.sum();
            let together = check(&index, &queries.concat(), selection, &mut scratch);
            assert!(together <= alone, "{together} pages together, {alone} alone");
        }
    }
}

#[test]
fn a_row_is_found_on_a_page_that_the_index_limit_left_out() {
    // Row 3 keeps page 0 only, but page 1, read for row 1, holds it too: one read (Figure 7).
    let pages = [&[0, 3][..], &[1, 3], &[2]];
    let index = PageIndex::new(4, pages).unwrap().limited(Some(1));
    assert_eq!(index.pages_of(3), [0]);
    for selection in [Selection::OnePass, Selection::Greedy] {
        assert_eq!(check(&index, &[3, 1], selection, &mut Scratch::default()), 1);
        assert_eq!(check(&index, &[3, 2], selection, &mut Scratch::default()), 2);
    }
}

#[test]
fn a_large_call_and_then_a_small_one_use_the_same_scratch() {
    let pages: Vec<Vec<u32>> =
        (0..2000).map(|page| (15 * page..15 * page + 15).collect()).collect();
    let index = PageIndex::new(30_000, pages.iter().map(Vec::as_slice)).unwrap();
    let mut scratch = Scratch::default();
    let rows: Vec<u32> = (0..30_000).rev().collect();
    assert_eq!(check(&index, &rows[..3000], Selection::OnePass, &mut scratch), 200);
    assert_eq!(check(&index, &[5, 29_999, 6], Selection::OnePass, &mut scratch), 2);
    assert_eq!(check(&index, &[], Selection::Greedy, &mut scratch), 0);
}

/// Chooses pages of both indexes for `rows`, and checks that they are the same.
fn taken(
    index: &PageIndex,
    limit: Option<u32>,
    rows: &[u32],
    selection: Selection,
) -> Vec<(u32, Vec<u32>)> {
    let (mut plain, mut packed) = (Vec::new(), Vec::new());
    let mut scratch = Scratch::default();
    let page_count = u64::from(index.page_count());
    let small = PackedPages::of(index.forward(), page_count, limit).unwrap();
    selection.select(&small, rows, &mut scratch, |page, at| packed.push((page, at.to_vec())));
    let index = index.clone().limited(limit);
    selection.select(&index, rows, &mut scratch, |page, at| plain.push((page, at.to_vec())));
    assert_eq!(plain, packed);
    plain
}

/// One pass by the rows of each page, as if these were known.
fn one_pass_of_pages(index: &PageIndex, limit: usize, rows: &[u32]) -> Vec<(u32, Vec<u32>)> {
    let candidates = |row: u32| {
        let pages = index.pages_of(row);
        &pages[..pages.len().min(limit)]
    };
    let mut needed: Vec<u32> = rows.to_vec();
    needed.sort_unstable();
    needed.dedup();
    needed.retain(|&row| !candidates(row).is_empty());
    needed.sort_by_key(|&row| (candidates(row).len(), row));
    let mut taken = Vec::new();
    while let Some(&row) = needed.first() {
        let count = |page: u32| {
            needed.iter().filter(|row| index.rows_of(page).binary_search(row).is_ok()).count()
        };
        let most = candidates(row).iter().map(|&page| count(page)).max();
        let page = *candidates(row).iter().find(|&&page| Some(count(page)) == most).unwrap();
        let served = index.rows_of(page).iter().filter(|row| needed.contains(row));
        let position = |row: &u32| rows.iter().position(|asked| asked == row).unwrap() as u32;
        taken.push((page, served.map(position).collect()));
        needed.retain(|row| !index.rows_of(page).contains(row));
    }
    taken
}

#[test]
fn pages_are_those_of_a_choice_that_knows_the_rows_of_every_page() {
    let mut rng = SplitMix64::new(11);
    for round in 0..60 {
        // The first rows lie on most pages; a call of all rows needs windows.
        let (row_count, page_rows) = (40 + 400 * u64::from(round % 4 == 0), 2 + rng.below(20));
        let pages: Vec<Vec<u32>> = (0..row_count)
            .map(|_| {
                let mut row = || {
                    let below = 1 + rng.below(row_count);
                    rng.below(below) as u32
                };
                let mut page: Vec<u32> = (0..page_rows).map(|_| row()).collect();
                page.sort_unstable();
                page.dedup();
                page
            })
            .collect();
        let index = PageIndex::new(row_count as u32, pages.iter().map(Vec::as_slice)).unwrap();
        let mut rows: Vec<u32> = (0..row_count as u32).rev().collect();
        rows.truncate(1 + rng.below(row_count) as usize);
        rows.extend([0, 1, 0, row_count as u32 + 5]);
        for limit in [None, Some(1), Some(3), Some(10)] {
            let found = taken(&index, limit, &rows, Selection::OnePass);
            let limit_rows = limit.map_or(usize::MAX, |limit| limit as usize);
            assert_eq!(found, one_pass_of_pages(&index, limit_rows, &rows), "limit {limit:?}");
            taken(&index, limit, &rows, Selection::Greedy);
        }
    }
}
