//! Merge picker: ranges where a byte moved removes most outdated rows come first.
//!
//! RecDB scores a file by its outdated rows per time to merge it; here the unit is a base range,
//! the outdated rows are exact, and the time is the bytes the merge moves. Pure functions.
//! Source: RecDB §4.3, Eq. 1.
//! Differs: ranges instead of files, because a base has no levels.

#![expect(clippy::indexing_slicing, reason = "a chunk has at least one pick")]

use std::cmp::Ordering;
use std::collections::BinaryHeap;

/// Most ranges picked at once; bounds the picker's memory.
pub(crate) const PICKS_MAX: usize = 512;

/// A range that might be merged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Candidate {
    pub(crate) table: u32,
    pub(crate) range: u32,
    /// Rows of its base that are outdated.
    pub(crate) outdated: u32,
    /// Bytes its merge moves.
    pub(crate) cost_bytes: u64,
    /// Bytes of delta rows that its merge makes worthless.
    pub(crate) freed_bytes: u64,
}

/// Memory of a picker at work.
pub(crate) const MEMORY_BYTES: usize = PICKS_MAX * 2 * size_of::<Candidate>();

// Worst first, so that a heap gives it up first.
#[derive(PartialEq, Eq)]
struct WorstFirst(Candidate);

impl Ord for WorstFirst {
    fn cmp(&self, other: &Self) -> Ordering {
        by_score(&other.0, &self.0)
    }
}

impl PartialOrd for WorstFirst {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

// Outdated rows per byte, compared without dividing; ties by place, so that choices repeat.
fn by_score(a: &Candidate, b: &Candidate) -> Ordering {
    let left = u128::from(a.freed_bytes) * u128::from(b.cost_bytes);
    let right = u128::from(b.freed_bytes) * u128::from(a.cost_bytes);
    left.cmp(&right).then((b.table, b.range).cmp(&(a.table, a.range)))
}

/// Picks the best of `candidates` until `freed_bytes` of deltas are covered, `cost_bytes_max` is
/// spent or [`PICKS_MAX`] reached; in order of table and range. At least one if there is any.
pub(crate) fn pick(
    candidates: impl Iterator<Item = Candidate>,
    freed_bytes: u64,
    cost_bytes_max: u64,
) -> Vec<Candidate> {
    let mut heap = BinaryHeap::new();
    for candidate in candidates.filter(|candidate| candidate.outdated > 0) {
        assert!(candidate.cost_bytes > 0, "a merge that moves nothing: {candidate:?}");
        if heap.len() == PICKS_MAX {
            let is_worse = |worst: &WorstFirst| by_score(&candidate, &worst.0).is_le();
            if heap.peek().is_some_and(is_worse) {
                continue;
            }
            heap.pop();
        }
        heap.push(WorstFirst(candidate));
    }
    let mut best: Vec<_> = heap.into_iter().map(|worst| worst.0).collect();
    best.sort_unstable_by(|a, b| by_score(b, a));
    assert!(best.len() <= PICKS_MAX, "the picker's memory is bounded");
    let (mut freed, mut cost) = (0, 0);
    let enough = best.iter().take_while(|candidate| {
        let goes_on = cost == 0 || (freed < freed_bytes && cost < cost_bytes_max);
        freed += candidate.freed_bytes;
        cost += candidate.cost_bytes;
        goes_on
    });
    let count = enough.count();
    best.truncate(count);
    best.sort_unstable_by_key(|candidate| (candidate.table, candidate.range));
    best
}

/// Ranges of one table that are merged together.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Group {
    pub(crate) table: u32,
    pub(crate) ranges: Vec<usize>,
}

/// Cuts picks (in order) into groups that fit into an image of `ranges_max` ranges. Ranges of a
/// group need not be neighbours: what counts is that their reads, and then their writes, are in
/// flight together.
pub(crate) fn group(picks: &[Candidate], ranges_max: impl Fn(u32) -> usize) -> Vec<Group> {
    let mut groups = Vec::new();
    for same_table in picks.chunk_by(|a, b| a.table == b.table) {
        let table = same_table[0].table;
        for together in same_table.chunks(ranges_max(table).max(1)) {
            let ranges = together.iter().map(|pick| pick.range as usize).collect();
            groups.push(Group { table, ranges });
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(range: u32, outdated: u32, cost_bytes: u64) -> Candidate {
        let freed_bytes = u64::from(outdated) * 100;
        Candidate { table: 0, range, outdated, cost_bytes, freed_bytes }
    }

    fn ranges(picks: &[Candidate]) -> Vec<u32> {
        picks.iter().map(|pick| pick.range).collect()
    }

    #[test]
    fn most_outdated_rows_per_byte_first() {
        let all = [candidate(0, 10, 1000), candidate(1, 30, 1000), candidate(2, 30, 6000)];
        assert_eq!(ranges(&pick(all.into_iter(), 1, u64::MAX)), [1]);
        assert_eq!(ranges(&pick(all.into_iter(), 3001, u64::MAX)), [0, 1]);
        assert_eq!(ranges(&pick(all.into_iter(), u64::MAX, u64::MAX)), [0, 1, 2]);
        assert_eq!(ranges(&pick(all.into_iter(), u64::MAX, 1)), [1], "one at least");
    }

    #[test]
    fn ranges_without_outdated_rows_are_left_alone() {
        assert!(pick([candidate(0, 0, 1000)].into_iter(), u64::MAX, u64::MAX).is_empty());
    }

    #[test]
    fn many_candidates_leave_the_best() {
        let all = (0..3 * PICKS_MAX as u32).map(|at| candidate(at, 1 + at, 1000));
        let picked = pick(all, u64::MAX, u64::MAX);
        assert_eq!(picked.len(), PICKS_MAX);
        assert!(picked.iter().all(|pick| pick.range >= 2 * PICKS_MAX as u32));
    }

    #[test]
    fn ranges_of_a_table_are_merged_together_as_many_as_an_image_holds() {
        let mut picks: Vec<_> = [3, 4, 6, 9].map(|range| candidate(range, 1, 1)).into();
        picks.push(Candidate { table: 1, ..candidate(2, 1, 1) });
        let groups = group(&picks, |_| 3);
        let groups: Vec<_> = groups.into_iter().map(|group| (group.table, group.ranges)).collect();
        assert_eq!(groups, [(0, vec![3, 4, 6]), (0, vec![9]), (1, vec![2])]);
    }
}
