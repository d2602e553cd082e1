//! The delta index: places of delta rows, one sorted list per range, in memory.
//!
//! ```text
//! range 0: rows  3  17  40 ...   u16, position in the range
//!          locs  9 120 121 ...   u32, place of the newest version in the delta pages
//! ```
//!
//! Six bytes per row that has a delta, whatever number of runs hold older versions of it. The
//! length of a range's list is the number of rows of its base that are outdated, which is what
//! the picker wants to know (RecDB's outdated-row monitor). Source: RecDB §4.3.

#![expect(
    clippy::indexing_slicing,
    reason = "ranges come from the table's geometry, which the lists are as long as"
)]

/// Bytes per row.
pub(crate) const ROW_BYTES: u64 = 6;
/// Bytes per range that has a list: the box, two vectors, what the allocator adds.
const LIST_BYTES: u64 = 96;
/// Bytes of a row that starts a list of its own.
pub(crate) const ROW_ALONE_BYTES: usize = (LIST_BYTES + ROW_BYTES) as usize;
/// Bytes per range, list or not.
pub(crate) const RANGE_BYTES: u64 = size_of::<Option<Box<RangeDeltas>>>() as u64;

/// The delta rows of one range, ascending.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct RangeDeltas {
    rows: Vec<u16>,
    locs: Vec<u32>,
}

impl RangeDeltas {
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u16, u32)> + '_ {
        self.rows.iter().copied().zip(self.locs.iter().copied())
    }

    pub(crate) fn len(&self) -> usize {
        self.rows.len()
    }

    fn get(&self, at: u16) -> Option<u32> {
        self.position(at).map(|found| self.locs[found])
    }

    fn position(&self, at: u16) -> Option<usize> {
        self.rows.binary_search(&at).ok()
    }

    fn push(&mut self, row: u16, loc: u32) {
        self.rows.push(row);
        self.locs.push(loc);
    }
}

/// The delta rows of one table.
#[derive(Debug)]
pub(crate) struct DeltaIndex {
    lists: Vec<Option<Box<RangeDeltas>>>,
    row_count: u64,
    list_count: u64,
}

impl DeltaIndex {
    pub(crate) fn new(range_count: u64) -> Self {
        Self { lists: vec![None; range_count as usize], row_count: 0, list_count: 0 }
    }

    /// Makes room for `range_count` ranges.
    pub(crate) fn grow(&mut self, range_count: u64) {
        assert!(range_count >= self.lists.len() as u64, "a table only grows");
        self.lists.resize(range_count as usize, None);
    }

    /// Returns the place of the row at position `at` of `range`, if it has a delta.
    pub(crate) fn get(&self, range: usize, at: u16) -> Option<u32> {
        self.list(range)?.get(at)
    }

    /// Returns the list of `range`, if it has deltas.
    pub(crate) fn list(&self, range: usize) -> Option<&RangeDeltas> {
        self.lists[range].as_deref()
    }

    /// Returns the outdated rows of `range`'s base.
    pub(crate) fn outdated_count(&self, range: usize) -> usize {
        self.list(range).map_or(0, RangeDeltas::len)
    }

    /// Puts `newer` (ascending) into `range`; places it replaces go to `replaced`.
    pub(crate) fn insert(&mut self, range: usize, newer: &[(u16, u32)], replaced: &mut Vec<u32>) {
        assert!(newer.is_sorted_by(|a, b| a.0 < b.0), "rows of a run ascend");
        let place = &mut self.lists[range];
        if newer.is_empty() {
            return;
        }
        let Some(older) = place else {
            // Exact: what the account says is what is held.
            let (mut rows, mut locs) =
                (Vec::with_capacity(newer.len()), Vec::with_capacity(newer.len()));
            rows.extend(newer.iter().map(|(row, _)| *row));
            locs.extend(newer.iter().map(|(_, loc)| *loc));
            *place = Some(Box::new(RangeDeltas { rows, locs }));
            self.row_count += newer.len() as u64;
            self.list_count += 1;
            return;
        };
        let known = |row: &&(u16, u32)| older.rows.binary_search(&row.0).is_ok();
        let replaced_count = newer.iter().filter(known).count();
        let len = older.len() + newer.len() - replaced_count;
        let mut merged =
            RangeDeltas { rows: Vec::with_capacity(len), locs: Vec::with_capacity(len) };
        let mut old = older.iter().peekable();
        for &row in newer {
            while let Some(before) = old.next_if(|old| old.0 < row.0) {
                merged.push(before.0, before.1);
            }
            if let Some(same) = old.next_if(|old| old.0 == row.0) {
                replaced.push(same.1);
            }
            merged.push(row.0, row.1);
        }
        old.for_each(|(row, loc)| merged.push(row, loc));
        assert!(merged.len() == len, "every older and newer row is kept once");
        self.row_count += (len - older.len()) as u64;
        **older = merged;
    }

    /// Removes the row at position `at` of `range` if its place is `loc`; returns whether it was.
    pub(crate) fn remove(&mut self, range: usize, at: u16, loc: u32) -> bool {
        let place = &mut self.lists[range];
        let Some(list) = place else { return false };
        let is_there = |found: &usize| list.locs[*found] == loc;
        let Some(found) = list.position(at).filter(is_there) else { return false };
        list.rows.remove(found);
        list.locs.remove(found);
        self.row_count -= 1;
        if list.rows.is_empty() {
            *place = None;
            self.list_count -= 1;
        }
        true
    }

    /// Takes the list of `range` away: its rows are in the base now.
    pub(crate) fn take(&mut self, range: usize) -> Option<Box<RangeDeltas>> {
        let list = self.lists[range].take()?;
        assert!(self.row_count >= list.len() as u64, "the rows of a list are counted");
        self.row_count -= list.len() as u64;
        self.list_count -= 1;
        Some(list)
    }

    /// Returns the rows that have a delta.
    pub(crate) fn row_count(&self) -> u64 {
        self.row_count
    }

    /// Returns the memory of the lists; [`RANGE_BYTES`] per range come on top.
    pub(crate) fn memory_bytes(&self) -> u64 {
        ROW_BYTES * self.row_count + LIST_BYTES * self.list_count
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    proptest! {
        #[test]
        fn is_a_map_that_tells_what_it_replaced(
            batches in proptest::collection::vec(
                proptest::collection::btree_set(0u16..300, 0..60), 0..12),
            taken in 0usize..3,
        ) {
            let mut index = DeltaIndex::new(3);
            let mut model: BTreeMap<(usize, u16), u32> = BTreeMap::new();
            let mut next = 0u32;
            for (at, rows) in batches.iter().enumerate() {
                let range = at % 3;
                let newer: Vec<_> = rows.iter().map(|&row| { next += 1; (row, next) }).collect();
                let mut replaced = Vec::new();
                index.insert(range, &newer, &mut replaced);
                let old: Vec<_> = newer.iter()
                    .filter_map(|&(row, loc)| model.insert((range, row), loc)).collect();
                prop_assert_eq!(replaced, old);
            }
            index.take(taken);
            model.retain(|(range, _), _| *range != taken);
            let thirds: Vec<_> = model.keys().copied().filter(|key| key.1 % 3 == 0).collect();
            for (range, row) in thirds {
                let loc = model[&(range, row)];
                prop_assert!(!index.remove(range, row, loc + 1));
                prop_assert!(index.remove(range, row, loc));
                model.remove(&(range, row));
            }
            prop_assert_eq!(index.row_count(), model.len() as u64);
            for range in 0..3 {
                for row in 0..300 {
                    prop_assert_eq!(index.get(range, row), model.get(&(range, row)).copied());
                }
            }
            prop_assert!(index.memory_bytes() >= 6 * model.len() as u64);
        }
    }
}
