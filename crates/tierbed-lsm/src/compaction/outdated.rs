//! Outdated rows per SST.
//!
//! Training reads a row and writes it soon after. So when a row that was read from an SST is
//! written, that SST holds one more outdated row. Source: RecDB §3.2.3 and §4.3 (OD Monitor).
//!
//! Differs: the paper counts at the read, which also counts rows that are only evaluated and
//! counts a row twice that is read twice before its update. Here the read only remembers where
//! the row was found (bounded), and the write counts. Rows written without being read are not
//! counted; so the count is a lower bound, as in the paper ("at least").

use std::collections::BTreeMap;

use hashbrown::HashMap;
use tierbed_core::{Budget, Reservation, Result};

use crate::key::Key;
use crate::version::{SstId, SstMeta};

/// Bytes one remembered read costs.
const ENTRY_BYTES: u64 = 32;

/// Outdated rows known per SST; SSTs without any may be missing.
pub type OutdatedCounts = BTreeMap<SstId, u64>;

/// Returns the outdated rows known of `sst`; none were counted for one that is missing.
pub(crate) fn outdated_rows(counts: &OutdatedCounts, sst: SstId) -> u64 {
    match counts.get(&sst) {
        Some(count) => *count,
        None => 0,
    }
}

/// Watches reads and writes. See the module documentation.
#[derive(Debug)]
pub(crate) struct OutdatedMonitor {
    counts: OutdatedCounts,
    found_in: HashMap<Key, SstId>,
    capacity: usize,
    _memory: Reservation,
}

impl OutdatedMonitor {
    /// Builds a monitor that remembers at most `capacity` reads.
    ///
    /// # Errors
    /// `Invalid` when the budget does not hold them.
    pub(crate) fn new(capacity: usize, counts: OutdatedCounts, budget: &Budget) -> Result<Self> {
        let memory = budget.reserve("outdated monitor", ENTRY_BYTES * capacity as u64)?;
        Ok(Self { counts, found_in: HashMap::new(), capacity, _memory: memory })
    }

    /// Remembers that `key` was found in `sst`; when memory is full, the read is not remembered.
    pub(crate) fn note_read(&mut self, key: Key, sst: SstId) {
        if self.found_in.len() < self.capacity || self.found_in.contains_key(&key) {
            self.found_in.insert(key, sst);
        }
    }

    /// Counts the old version, under `key`, as outdated where it was read from.
    pub(crate) fn note_write(&mut self, key: Key) {
        if let Some(sst) = self.found_in.remove(&key) {
            *self.counts.entry(sst).or_default() += 1;
        }
    }

    /// Returns the counts.
    pub(crate) fn counts(&self) -> &OutdatedCounts {
        &self.counts
    }

    /// Moves what is left of the counts of merged SSTs, and reads that found rows there, to what
    /// they became: outdated rows that the merge could not know to be outdated are still there,
    /// spread by rows.
    pub(crate) fn replace(&mut self, inputs: &[SstId], outputs: &[SstMeta], dropped: u64) {
        let known: u64 = inputs.iter().filter_map(|id| self.counts.remove(id)).sum();
        let left = known.saturating_sub(dropped);
        let rows: u64 = outputs.iter().map(|sst| sst.row_count).sum();
        let is_apart = outputs.is_sorted_by(|one, next| one.last < next.first);
        assert!(is_apart, "a row may lie in two outputs of a merge");
        for sst in outputs {
            let share = u128::from(left) * u128::from(sst.row_count) / u128::from(rows.max(1));
            if share > 0 {
                self.counts.insert(sst.id, share as u64);
            }
        }
        // A row that was read is in the output that spans its key; it will be written yet.
        self.found_in.retain(|key, sst| {
            if inputs.contains(sst) {
                let spans = |output: &&SstMeta| output.first <= *key && *key <= output.last;
                match outputs.iter().find(spans) {
                    Some(output) => *sst = output.id,
                    None => return false,
                }
            }
            true
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tierbed_core::{RowId, RowKey, TableId};

    fn key(row: u64) -> Key {
        Key::cold(RowKey::new(TableId(0), RowId(row)))
    }

    fn sst(id: u64, row_count: u64) -> SstMeta {
        SstMeta {
            id: SstId(id),
            first: key(0),
            last: key(9),
            row_count,
            block_bytes: 4096,
            rows_blocks: 1,
            index_blocks: 1,
            filter_blocks: 0,
            filter_bytes: 0,
            filter_bits_per_row: 0,
        }
    }

    #[test]
    fn the_papers_example_file_three_goes_from_30_to_31() {
        let counts = OutdatedCounts::from([(SstId(3), 30)]);
        let mut monitor = OutdatedMonitor::new(8, counts, &Budget::unlimited()).unwrap();
        monitor.note_read(key(7), SstId(3));
        assert_eq!(monitor.counts()[&SstId(3)], 30, "read, not updated yet");
        monitor.note_write(key(7));
        assert_eq!(monitor.counts()[&SstId(3)], 31);
        monitor.note_write(key(7));
        monitor.note_write(key(8));
        assert_eq!(monitor.counts()[&SstId(3)], 31, "only what was read counts, and once");
    }

    #[test]
    fn memory_is_bounded() {
        let mut monitor = OutdatedMonitor::new(1, [].into(), &Budget::unlimited()).unwrap();
        monitor.note_read(key(1), SstId(3));
        monitor.note_read(key(2), SstId(3));
        monitor.note_write(key(2));
        assert!(monitor.counts().is_empty());
        assert!(OutdatedMonitor::new(1000, [].into(), &Budget::new(100)).is_err());
    }

    #[test]
    fn what_a_merge_could_not_drop_stays_counted() {
        let counts = OutdatedCounts::from([(SstId(1), 10), (SstId(2), 5), (SstId(3), 1)]);
        let mut monitor = OutdatedMonitor::new(8, counts, &Budget::unlimited()).unwrap();
        monitor.note_read(key(1), SstId(2));
        let (low, high) =
            (SstMeta { last: key(4), ..sst(7, 300) }, SstMeta { first: key(5), ..sst(8, 100) });
        monitor.replace(&[SstId(1), SstId(2)], &[low, high], 7);
        let expected = OutdatedCounts::from([(SstId(3), 1), (SstId(7), 6), (SstId(8), 2)]);
        assert_eq!(monitor.counts(), &expected);
        monitor.note_write(key(1));
        assert_eq!(monitor.counts()[&SstId(7)], 7, "the row read before the merge lies there now");
    }

    /// Compactions begin right after a window was read; once that forgot the whole window.
    #[test]
    fn a_merge_between_read_and_write_forgets_no_row_that_its_outputs_hold() {
        let mut monitor = OutdatedMonitor::new(8, [].into(), &Budget::unlimited()).unwrap();
        let (low, high) =
            (SstMeta { last: key(4), ..sst(7, 5) }, SstMeta { first: key(6), ..sst(8, 4) });
        for row in [2, 5, 9] {
            monitor.note_read(key(row), SstId(1));
        }
        monitor.replace(&[SstId(1)], &[low, high], 0);
        (0..10).for_each(|row| monitor.note_write(key(row)));
        assert_eq!(monitor.counts(), &OutdatedCounts::from([(SstId(7), 1), (SstId(8), 1)]));
    }
}
