use super::*;
use crate::key::Key;
use tierbed_core::{RowId, RowKey, TableId};

fn key(row: u64) -> Key {
    Key::cold(RowKey::new(TableId(0), RowId(row)))
}

/// An SST of `blocks` blocks of 4 KiB over rows `first..=last`.
fn sst(id: u64, first: u64, last: u64, blocks: u32) -> SstMeta {
    SstMeta {
        id: SstId(id),
        first: key(first),
        last: key(last),
        row_count: 10,
        block_bytes: 4096,
        rows_blocks: blocks,
        index_blocks: 0,
        filter_blocks: 0,
        filter_bytes: 0,
        filter_bits_per_row: 0,
    }
}

const SHAPE: TreeShape =
    TreeShape { l0_trigger: 2, l0_stop: 4, level1_bytes: 4 * 4096, level_ratio: 10 };

fn version(levels: Vec<Vec<SstMeta>>) -> Version {
    Version::new(levels).unwrap()
}

fn input(picker: Picker, outdated: &OutdatedCounts) -> PickerInput<'_> {
    PickerInput { picker, outdated, merge_us_per_byte: 0.001 }
}

fn pick(version: &Version, picker: Picker, outdated: &[(u64, u64)]) -> Pick {
    let outdated = outdated.iter().map(|(id, count)| (SstId(*id), *count)).collect();
    pick_compaction(version, &SHAPE, &input(picker, &outdated))
}

fn picked(pick: &Pick) -> (usize, Vec<u64>, Vec<u64>) {
    let Pick::Merge(merge) = pick else { panic!("no merge: {pick:?}") };
    let ids = |ssts: &[SstMeta]| ssts.iter().map(|sst| sst.id.0).collect();
    (merge.input_level, ids(&merge.inputs), ids(&merge.overlapping))
}

#[test]
fn the_papers_figure_4_largest_frees_one_row_and_the_picker_two() {
    // Left: file 1 is the largest of L1 and meets 3 and 4; right: file 2, smaller, meets 5 and 6
    // and has two outdated rows.
    let levels = vec![
        vec![],
        vec![sst(1, 0, 40, 3), sst(2, 50, 90, 2)],
        vec![sst(3, 0, 20, 2), sst(4, 21, 45, 2), sst(5, 46, 70, 2), sst(6, 71, 99, 2)],
    ];
    let version = version(levels);
    let outdated = [(1, 1), (2, 2)];
    assert_eq!(picked(&pick(&version, Picker::Largest, &outdated)), (1, vec![1], vec![3, 4]));
    assert_eq!(picked(&pick(&version, Picker::MostOutdated, &outdated)), (1, vec![2], vec![5, 6]));
}

#[test]
fn equation_1_divides_by_the_time_of_the_whole_merge() {
    let outdated = OutdatedCounts::from([(SstId(1), 40)]);
    let input = input(Picker::MostOutdated, &outdated);
    let alone = compaction_score(&sst(1, 0, 9, 1), &[], &input);
    // 40 rows / (0.001 us per byte x 4,096 bytes)
    assert!((alone - 40.0 / 4.096).abs() < 1e-9, "{alone}");
    let merged = compaction_score(&sst(1, 0, 9, 1), &[sst(2, 0, 9, 3)], &input);
    assert!((merged - alone / 4.0).abs() < 1e-9, "{merged}");
    let fresh = compaction_score(&sst(9, 0, 9, 1), &[], &input);
    assert!(fresh.abs() < 1e-12);
}

#[test]
fn level_0_goes_whole_with_all_it_overlaps() {
    let two = vec![vec![sst(8, 0, 30, 1), sst(9, 60, 70, 1)], vec![sst(1, 20, 25, 1)]];
    // The hull 0..=70 is one run, so what lies in its gap takes part too.
    assert_eq!(picked(&pick(&version(two), Picker::Largest, &[])), (0, vec![8, 9], vec![1]));
    let one = vec![vec![sst(8, 0, 30, 1)]];
    assert_eq!(pick(&version(one), Picker::Largest, &[]), Pick::Idle);
}

#[test]
fn the_most_overdue_level_goes_first_but_a_full_level_0_before_all() {
    // Level 1 holds 8 of 4 blocks: twice due; level 0 holds 3 of 2: 1.5 times.
    let l0: Vec<_> = (0..3).map(|at| sst(10 + at, 0, 9, 1)).collect();
    let deeper = [vec![sst(1, 0, 9, 4), sst(2, 10, 19, 4)], vec![sst(3, 0, 19, 1)]];
    let levels = |l0: &[SstMeta]| [vec![l0.to_vec()], deeper.to_vec()].concat();
    assert_eq!(picked(&pick(&version(levels(&l0)), Picker::Largest, &[])).0, 1);
    let full = [l0.clone(), vec![sst(13, 0, 9, 1)]].concat();
    assert_eq!(picked(&pick(&version(levels(&full)), Picker::Largest, &[])).0, 0);
}

#[test]
fn a_level_that_is_as_overdue_as_a_full_level_0_does_not_wait() {
    let is_urgent = |blocks| {
        let levels = vec![vec![], vec![sst(1, 0, 9, blocks)], vec![sst(3, 0, 19, 1)]];
        let Pick::Merge(merge) = pick(&version(levels), Picker::Largest, &[]) else { panic!() };
        merge.is_urgent
    };
    // Level 1 should hold 4 blocks; l0_stop / l0_trigger is 2.
    assert!(!is_urgent(7));
    assert!(is_urgent(8));
}

#[test]
fn an_sst_that_meets_nothing_below_is_moved() {
    let levels = vec![vec![], vec![sst(1, 0, 9, 5)], vec![sst(3, 50, 60, 1)]];
    let expected = Pick::Move { sst: sst(1, 0, 9, 5), input_level: 1 };
    assert_eq!(pick(&version(levels), Picker::MostOutdated, &[]), expected);
}

#[test]
fn algorithm_1_takes_the_best_score_of_level_2_or_deeper_with_level_0_only() {
    let levels = vec![
        vec![sst(20, 0, 99, 1), sst(21, 0, 99, 1)],
        vec![sst(1, 0, 99, 1)],
        vec![sst(2, 0, 49, 2), sst(3, 50, 99, 1)],
        vec![sst(4, 0, 99, 9), sst(5, 200, 300, 1)],
    ];
    let version = version(levels);
    // 1 lies too high, 5 out of reach; 3 frees 10 per block, 2 frees 8, 4 frees 3.
    let outdated = [(1, 99), (2, 16), (3, 10), (4, 27), (5, 99)];
    let Pick::Merge(merge) = pick(&version, Picker::MostOutdated, &outdated) else { panic!() };
    assert_eq!(merge.rewrite.map(|(level, sst)| (level, sst.id)), Some((2, SstId(3))));
    assert_eq!(merge.size_bytes(), (2 + 1 + 1) * 4096);
    let Pick::Merge(merge) = pick(&version, Picker::MostOutdated, &[(1, 5)]) else { panic!() };
    assert_eq!(merge.rewrite, None, "nothing outdated, nothing to rewrite");
    let Pick::Merge(merge) = pick(&version, Picker::Largest, &outdated) else { panic!() };
    assert_eq!(merge.rewrite, None);
}
