//! Which score did a row leave with? For scores that no record can keep.
//!
//! Sets of eight entries, found by hash; the lowest of a set makes room. Rows that are forgotten
//! begin anew.
//!
//! ```text
//! entry:  bit 31 ........ 16  15 ........ 0
//!             hash bits        score, 0: empty
//! ```
#![expect(clippy::indexing_slicing, reason = "set numbers are scaled to the table's length")]

/// Entries of a set: a cache line's half.
const WAYS: usize = 8;

/// Scores of rows that are not here.
#[derive(Debug, Clone, Default)]
pub(crate) struct ScoreTable {
    sets: Box<[[u32; WAYS]]>,
}

impl ScoreTable {
    /// Bytes per entry.
    pub(crate) const ENTRY_BYTES: usize = size_of::<u32>();

    /// Bytes of a table with room for `entries` scores.
    pub(crate) fn bytes_for(entries: u64) -> u64 {
        entries.div_ceil(WAYS as u64) * (WAYS * Self::ENTRY_BYTES) as u64
    }

    /// Makes room for about `entries` scores; forgets all.
    pub(crate) fn resize(&mut self, entries: usize) {
        self.sets = vec![[0; WAYS]; entries.div_ceil(WAYS)].into_boxed_slice();
    }

    /// Makes room for about `entries` scores; those of the highest `rank` stay.
    pub(crate) fn refit(&mut self, entries: usize, rank: impl Fn(u16) -> u16) {
        let old = std::mem::take(&mut self.sets);
        self.resize(entries);
        let (from, to) = (old.len(), self.sets.len());
        if from == 0 {
            return;
        }
        for (at, set) in self.sets.iter_mut().enumerate() {
            // The rows of a set were in the old sets that lie over it.
            let overlapping = &old[at * from / to..=((at + 1) * from - 1) / to];
            let known = overlapping.iter().flatten().filter(|&&entry| entry as u16 != 0);
            known.for_each(|&entry| put_in(set, entry, &rank));
        }
    }

    /// Returns the score of the row of `hash`, 0 when it is not remembered.
    pub(crate) fn get(&self, hash: u64) -> u16 {
        let Some(set) = self.sets.get(self.set_of(hash)) else { return 0 };
        set.iter().find(|&&entry| entry >> 16 == tag(hash)).map_or(0, |&entry| entry as u16)
    }

    /// Remembers `score`. `rank` orders scores: the lowest of the set is forgotten for it.
    pub(crate) fn put(&mut self, hash: u64, score: u16, rank: impl Fn(u16) -> u16) {
        let at = self.set_of(hash);
        let Some(set) = self.sets.get_mut(at) else { return };
        put_in(set, (tag(hash) << 16) | u32::from(score), rank);
    }

    fn set_of(&self, hash: u64) -> usize {
        (((hash & 0xFFFF_FFFF) * self.sets.len() as u64) >> 32) as usize
    }
}

/// Puts an entry in the place of its row, or of the entry of the lowest rank.
fn put_in(set: &mut [u32; WAYS], entry: u32, rank: impl Fn(u16) -> u16) {
    let known = set.iter().position(|&held| held >> 16 == entry >> 16 && held as u16 != 0);
    let lowest = || {
        (0..WAYS).min_by_key(|&way| match set[way] as u16 {
            0 => 0,
            score => u32::from(rank(score)) + 1,
        })
    };
    if let Some(way) = known.or_else(lowest) {
        set[way] = entry;
    }
}

fn tag(hash: u64) -> u32 {
    (hash >> 48) as u32
}

#[cfg(test)]
mod tests {
    use tierbed_core::env::mix64;

    use super::*;

    #[test]
    fn the_lowest_of_a_set_is_forgotten_first() {
        let mut table = ScoreTable::default();
        assert_eq!(table.get(5), 0);
        table.resize(8);
        for row in 1..=8 {
            table.put(mix64(row), 100 + row as u16, |score| score);
        }
        table.put(mix64(3), 500, |score| score);
        table.put(mix64(9), 50, |score| score);
        let scores: Vec<u16> = (1..=9).map(|row| table.get(mix64(row))).collect();
        assert_eq!(scores, [0, 102, 500, 104, 105, 106, 107, 108, 50]);
    }

    #[test]
    fn scores_outlive_a_change_of_size() {
        let mut table = ScoreTable::default();
        table.resize(8000);
        (1..=1000).for_each(|row| table.put(mix64(row), row as u16, |score| score));
        let known = |table: &ScoreTable, from| {
            (from..=1000).filter(|&row| table.get(mix64(row)) == row as u16).count()
        };
        for entries in [9000, 5000, 7777] {
            table.refit(entries, |score| score);
            assert!(known(&table, 1) >= 970, "{entries}: {}", known(&table, 1));
        }
        // With less room the highest stay.
        table.refit(800, |score| score);
        assert!(known(&table, 600) >= 360, "{}", known(&table, 600));
        table.refit(0, |score| score);
        table.refit(80, |score| score);
        assert_eq!(known(&table, 1), 0);
    }
}
