use proptest::collection::btree_set;
use proptest::prelude::*;
use tierbed_core::env::SplitMix64;

use super::*;

fn packed(lists: &[Vec<u32>], page_count: u64) -> PackedPages {
    let lists = Lists::gather(lists.iter().map(Vec::as_slice)).unwrap();
    PackedPages::of(&lists, page_count, None).unwrap()
}

fn check(lists: &[Vec<u32>], page_count: u64) -> PackedPages {
    let index = packed(lists, page_count);
    for (row, list) in (0..).zip(lists) {
        let pages = index.pages_of(row);
        assert_eq!(pages.len(), list.len(), "row {row}");
        assert_eq!(&pages.collect::<Vec<_>>(), list, "row {row}");
        assert_eq!(index.is_present(row), !list.is_empty());
    }
    for row in [lists.len() as u32, u32::MAX] {
        assert!(index.pages_of(row).next().is_none() && !index.is_present(row));
    }
    let seat_count = lists.iter().map(Vec::len).sum::<usize>() as u64;
    let shape = PackedShape { row_count: lists.len() as u32, page_count, seat_count };
    let present = lists.iter().filter(|list| !list.is_empty()).count() as u64;
    let (held, told) = (index.memory_bytes(), shape.bytes(present));
    let list_count = lists.iter().filter(|list| list.len() > 1).count() as u64;
    let spared = (seat_count - present).div_ceil(32) - list_count.div_ceil(32);
    assert_eq!(held, told - 4 * spared, "what is told before is the most that is held");
    index
}

#[test]
fn pages_have_the_fewest_bits_of_every_width() {
    for bits in 0..=32 {
        let last = (1_u64 << bits) - 1;
        let pages = [last as u32, 0, (last / 2) as u32];
        let lists: Vec<_> = (0..300).map(|row| pages[..row % 4].to_vec()).collect();
        check(&lists, last + 1);
        if last > 0 {
            check(&lists.iter().map(|list| vec![0; list.len()]).collect::<Vec<_>>(), last);
        }
    }
}

#[test]
fn long_lists_end_where_they_end_and_no_list_is_empty_too() {
    check(&[], 1);
    check(&[vec![], vec![]], 1);
    check(&vec![vec![0]; 200], 1);
    let mut lists = vec![vec![]; 500];
    for (row, page_count) in [(0, 5000), (1, 64), (2, 65), (63, 129), (64, 1), (499, 10_000)] {
        lists[row] = (0..page_count).rev().collect();
    }
    check(&lists, 10_000);
}

#[test]
fn a_row_takes_bits_of_a_page_and_a_replica_two_more_and_a_page_one() {
    let (rows, pages) = (64_000, 1 << 20);
    let one: Vec<_> = (0..rows).map(|row| vec![row]).collect();
    assert_eq!(check(&one, pages).memory_bytes(), u64::from(rows) * 21 / 8);
    let two: Vec<_> = (0..rows).map(|row| vec![row, row + 1]).collect();
    let per_row = check(&two, pages).memory_bytes() as f64 / f64::from(rows);
    let page_bits_per_row = pages as f64 / f64::from(rows);
    let bits = 21.0 + 1.04 + 20.0 + 1.0 + 1.0 + page_bits_per_row;
    assert!(per_row <= bits / 8.0, "{per_row} bytes");
    // A table of 2^32 rows on 2^26 pages, a replica for each row.
    let shape = PackedShape { row_count: u32::MAX, page_count: 1 << 26, seat_count: 2 * (1 << 32) };
    let alone = PackedShape { seat_count: 1 << 32, ..shape };
    let present = u64::from(u32::MAX);
    assert!(alone.bytes(present) <= 4 << 32);
    assert!(shape.bytes(present) - alone.bytes(present) <= 4 << 32);
}

#[test]
fn a_page_beyond_the_last_one_is_corruption() {
    let lists = Lists::gather([&[3, 4][..]]).unwrap();
    assert!(PackedPages::of(&lists, 5, None).is_ok());
    assert!(PackedPages::of(&lists, 4, None).is_err());
}

#[test]
fn a_limit_bounds_what_is_chosen_among() {
    let lists = Lists::gather([&[3, 1, 4, 0, 2][..], &[], &[0]]).unwrap();
    let index = PackedPages::of(&lists, 5, Some(2)).unwrap();
    let candidates = |row| index.candidates_of(row).collect::<Vec<_>>();
    assert_eq!([candidates(0), candidates(1), candidates(2)], [vec![3, 1], vec![], vec![0]]);
    assert_eq!(index.all_pages_of(0).collect::<Vec<_>>(), [3, 1, 0, 2, 4], "the rest ascends");
}

proptest! {
    #[test]
    fn lists_are_those_of_vectors(
        seed: u64, row_count in 0usize..3000, page_bits in 0u32..=32, skew in 1u64..40,
    ) {
        let mut random = SplitMix64::new(seed);
        let page_count = 1 + random.below(1 << page_bits);
        let lists: Vec<Vec<u32>> = (0..row_count).map(|_| {
            let longest = if random.below(skew) == 0 { 1 + random.below(200) } else { 2 };
            let len = random.below(longest + 1);
            (0..len).map(|_| random.below(page_count) as u32).collect()
        }).collect();
        check(&lists, page_count);
    }

    #[test]
    fn pages_beyond_the_limit_are_found(
        lists in proptest::collection::vec(btree_set(0u32..600, 0..300), 1..6),
        limit in 1u32..30,
        asked in btree_set(0u32..600, 0..80),
        seed: u64,
    ) {
        let mut random = SplitMix64::new(seed);
        let lists: Vec<Vec<u32>> = lists.into_iter().map(|list| {
            let mut list: Vec<u32> = list.into_iter().collect();
            for at in (1..list.len()).rev() {
                list.swap(at, random.below(at as u64 + 1) as usize);
            }
            list
        }).collect();
        let gathered = Lists::gather(lists.iter().map(Vec::as_slice)).unwrap();
        let index = PackedPages::of(&gathered, 600, Some(limit)).unwrap();
        let mut pages = PageSet::default();
        pages.assign(asked.iter().copied());
        for (row, list) in (0..).zip(&lists) {
            let (first, rest) = list.split_at(list.len().min(limit as usize));
            prop_assert_eq!(index.candidates_of(row).collect::<Vec<_>>(), first);
            let mut found = Vec::new();
            index.find_beyond(row, &pages, &mut found);
            let mut expected: Vec<u32> = rest.to_vec();
            expected.retain(|page| asked.contains(page));
            expected.sort_unstable();
            prop_assert!(rest.iter().all(|&page| index.may_be_beyond(page)));
            prop_assert_eq!(found, expected);
        }
    }
}
