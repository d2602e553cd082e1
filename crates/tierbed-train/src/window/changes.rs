//! Rows written since something was published, so that a delta reads these and no others.
//!
//! Every change of a row, by gradients, imports, evictions and index pages alike, is a write to the
//! store, and before a publish or a commit all that is dirty is written. So the rows noted since a
//! publish are all that can differ from it, and some that do not. A delta has all of them.
//!
//! ```text
//! publish a ──rows──▶ publish b ──rows──▶ now       a delta against a: the rows of both sets
//! ```
//!
//! These sets are committed with the rows, as an attachment: a store that is reopened has those of
//! its last commit, which are whole. What was published after that commit is unknown to them. A
//! delta against what they do not know, or against a set dropped for its size, compares all rows.

use std::collections::BTreeSet;

use roaring::RoaringTreemap;
use serde::Serialize;
use tierbed_core::store::RowWrite;
use tierbed_core::{Budget, ErrorKind, Reservation, Result, Schema, TableId};

use super::changes_file::{decode, encode, ChangeSet, Rows};

/// Sets kept. One more joins the second to the oldest: that is what deltas are made against which
/// grow until the next whole snapshot.
const SETS_MAX: usize = 8;
/// One part in so many of the budget is set aside for the sets, and for joining those of a table.
const MEMORY_SHARE: u64 = 32;
/// The same of memory that is kept aside for this and for publishing.
const ASIDE_SHARE: u64 = 8;
/// A list of numbers that grows may have twice the memory it needs, and so may what is joined.
const GROWTH: u64 = 4;
/// Rows noted between two looks at the memory.
const ROWS_PER_LOOK: usize = 4096;

const NOT_PUBLISHED: &str = "nothing is known of what was written since";
const DROPPED: &str = "the changed rows needed more than their share of the budget";
const DAMAGED: &str = "the list of changed rows in the last checkpoint was damaged";

/// What of changed rows is known, and what deltas made of it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct ChangeStats {
    /// Snapshots and deltas against which a delta reads changed rows only.
    pub base_count: u64,
    /// Their identities, oldest first.
    pub bases: Vec<String>,
    /// Rows noted, as often as they are in a set.
    pub row_count: u64,
    /// Bytes of the sets.
    pub set_bytes: u64,
    /// Sets dropped because there was no memory for them.
    pub sets_dropped: u64,
    /// Deltas that read changed rows only.
    pub deltas_tracked: u64,
    /// Deltas that compared all rows.
    pub deltas_compared: u64,
    /// Why the last of these did, unless it was told to.
    pub reason: Option<String>,
    /// Pages of snapshots, and of their indexes, read by deltas that compared all rows. A delta of
    /// changed rows reads none.
    pub base_pages_read: u64,
}

/// Memory that sets may be given.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Room<'a> {
    budget: &'a Budget,
    bytes: u64,
}

impl<'a> Room<'a> {
    /// In a budget that trains and publishes.
    pub(crate) fn of(budget: &'a Budget) -> Self {
        Self { budget, bytes: budget.limit_bytes() / MEMORY_SHARE }
    }

    /// In a budget kept aside, of which publishing needs `least_bytes`.
    pub(crate) fn beside(budget: &'a Budget, least_bytes: u64) -> Self {
        let limit_bytes = budget.limit_bytes();
        let bytes = (limit_bytes / ASIDE_SHARE).min(limit_bytes.saturating_sub(least_bytes));
        Self { budget, bytes }
    }
}

/// What is known of the rows that changed since a snapshot.
#[derive(Debug)]
pub(crate) enum Since<T> {
    /// They were noted.
    Known(T),
    /// They were not, and why.
    Unknown(&'static str),
}

/// What a delta was made of, to be counted.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DeltaCount {
    /// Changed rows only.
    pub(crate) is_tracked: bool,
    /// Why all rows, unless it was told to.
    pub(crate) reason: Option<&'static str>,
    pub(crate) base_pages_read: u64,
}

impl DeltaCount {
    /// A delta of the rows noted.
    pub(crate) const NOTED: Self = Self { is_tracked: true, reason: None, base_pages_read: 0 };

    /// A delta of the rows that differ from a snapshot.
    pub(crate) fn compared(reason: Option<&'static str>, base_pages_read: u64) -> Self {
        Self { is_tracked: false, reason, base_pages_read }
    }
}

/// The sets of a store, the newest last.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    sets: Vec<ChangeSet>,
    /// Taken with the first set.
    memory: Option<Reservation>,
    noted: usize,
    is_damaged: bool,
    counts: ChangeStats,
}

impl Changes {
    /// Takes over the sets of a commit, as its attachment was read. Where that is damaged, what was
    /// published before is unknown; the store is not given up.
    ///
    /// # Errors
    /// `Io` from the device.
    pub(crate) fn open(
        attachment: Result<Option<Vec<u8>>>,
        schema: &Schema,
        room: Room<'_>,
    ) -> Result<Self> {
        let mut changes = Self::default();
        let bytes = match attachment {
            Ok(None) => return Ok(changes),
            Ok(Some(bytes)) => bytes,
            Err(error) if error.kind() == ErrorKind::Corruption => {
                changes.is_damaged = true;
                return Ok(changes);
            }
            Err(error) => return Err(error),
        };
        changes.set_aside(room);
        if bytes.len() as u64 > changes.bytes_max() {
            changes.counts.sets_dropped += 1;
        } else {
            match decode(&bytes, schema) {
                Ok(sets) => changes.sets = sets,
                Err(_) => changes.is_damaged = true,
            }
        }
        if changes.sets.is_empty() {
            changes.memory = None;
        }
        Ok(changes)
    }

    /// Goes on in other memory.
    pub(crate) fn moved_to(mut self, room: Room<'_>) -> Self {
        self.memory = None;
        if !self.sets.is_empty() {
            self.set_aside(room);
            self.bound();
        }
        self
    }

    /// Returns the attachment; `None` without sets.
    pub(crate) fn encode(&self) -> Option<Vec<u8>> {
        (!self.sets.is_empty()).then(|| encode(&self.sets))
    }

    /// Notes rows that are about to be written.
    pub(crate) fn note(&mut self, rows: &[RowWrite<'_>]) {
        let Some(set) = self.sets.last_mut() else { return };
        for same in rows.chunk_by(|a, b| a.key.table == b.key.table) {
            let Some(first) = same.first() else { continue };
            let table = set.rows.entry(first.key.table.0).or_default();
            table.extend(same.iter().map(|row| row.key.row.0));
        }
        self.look_after(rows.len());
    }

    /// Notes rows of `table`.
    pub(crate) fn note_rows(&mut self, table: TableId, rows: RoaringTreemap) {
        let Some(set) = self.sets.last_mut() else { return };
        let row_count = rows.len() as usize;
        *set.rows.entry(table.0).or_default() |= rows;
        self.look_after(row_count);
    }

    /// Tells whether what changes from here on is of use.
    pub(crate) fn is_noting(&self) -> bool {
        !self.sets.is_empty()
    }

    fn look_after(&mut self, row_count: usize) {
        self.noted += row_count;
        if self.noted >= ROWS_PER_LOOK {
            self.noted = 0;
            self.bound();
        }
    }

    /// Begins a set: what has `identity` holds every row as it is now.
    pub(crate) fn published(&mut self, identity: &str, room: Room<'_>) {
        self.set_aside(room);
        if self.memory.is_none() {
            self.counts.sets_dropped += 1;
            return;
        }
        let last = self.sets.last();
        if last.is_some_and(|set| set.since == identity && set.rows.is_empty()) {
            return;
        }
        if self.sets.len() == SETS_MAX {
            let joined = self.sets.remove(1);
            if let Some(oldest) = self.sets.first_mut() {
                for (table, rows) in joined.rows {
                    *oldest.rows.entry(table).or_default() |= rows;
                }
            }
        }
        self.sets.push(ChangeSet { since: identity.to_owned(), rows: Rows::new() });
        self.bound();
    }

    /// Finds the sets since what has any of these identities.
    pub(crate) fn since(&self, identities: &[String]) -> Since<usize> {
        let is_asked = |set: &ChangeSet| identities.contains(&set.since);
        match self.sets.iter().rposition(is_asked) {
            Some(first) => Since::Known(first),
            None => Since::Unknown(self.why_unknown()),
        }
    }

    /// Returns the rows noted since what has any of these identities.
    pub(crate) fn rows_since(&self, identities: &[String]) -> Since<Rows> {
        let first = match self.since(identities) {
            Since::Known(first) => first,
            Since::Unknown(why) => return Since::Unknown(why),
        };
        let sets = self.sets.iter().skip(first);
        let tables: BTreeSet<u32> = sets.flat_map(|set| set.rows.keys().copied()).collect();
        let rows = |table| (table, self.rows(first, TableId(table)));
        Since::Known(tables.into_iter().map(rows).collect())
    }

    /// Returns the rows of `table` in the sets from `first` on.
    pub(crate) fn rows(&self, first: usize, table: TableId) -> RoaringTreemap {
        let sets = self.sets.iter().skip(first);
        let mut all = RoaringTreemap::new();
        sets.filter_map(|set| set.rows.get(&table.0)).for_each(|rows| all |= rows);
        all
    }

    // Says why the sets do not reach back to a snapshot.
    fn why_unknown(&self) -> &'static str {
        match (self.is_damaged, self.counts.sets_dropped) {
            (true, _) => DAMAGED,
            (false, 0) => NOT_PUBLISHED,
            (false, _) => DROPPED,
        }
    }

    /// Counts a delta that was published.
    pub(crate) fn count_delta(&mut self, delta: DeltaCount) {
        match delta.is_tracked {
            true => self.counts.deltas_tracked += 1,
            false => self.counts.deltas_compared += 1,
        }
        self.counts.base_pages_read += delta.base_pages_read;
        self.counts.reason = delta.reason.map(str::to_owned);
    }

    pub(crate) fn stats(&self) -> ChangeStats {
        let rows = self.sets.iter().flat_map(|set| set.rows.values());
        ChangeStats {
            base_count: self.sets.len() as u64,
            bases: self.sets.iter().map(|set| set.since.clone()).collect(),
            row_count: rows.map(RoaringTreemap::len).sum(),
            set_bytes: self.sets.iter().map(ChangeSet::bytes).sum(),
            ..self.counts.clone()
        }
    }

    // Nothing is noted in a budget that has no room to spare: training needs it more.
    fn set_aside(&mut self, room: Room<'_>) {
        let Room { budget, bytes } = room;
        if self.memory.is_none() && bytes > 0 && budget.free_bytes() / 4 > bytes {
            self.memory = budget.reserve("changed rows", bytes).ok();
        }
    }

    fn bytes_max(&self) -> u64 {
        self.memory.as_ref().map_or(0, Reservation::bytes) / GROWTH
    }

    // Drops the oldest sets until the others fit; the newest too, if it is too large by itself.
    fn bound(&mut self) {
        let mut bytes: u64 = self.sets.iter().map(ChangeSet::bytes).sum();
        while bytes > self.bytes_max() {
            bytes -= self.sets.remove(0).bytes();
            self.counts.sets_dropped += 1;
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test that panics has failed")]
mod tests {
    use tierbed_core::{RowId, RowKey};

    use super::*;

    fn write(changes: &mut Changes, rows: std::ops::Range<u64>) {
        let key = |row| RowKey::new(TableId(1), RowId(row));
        let rows: Vec<_> = rows.map(|row| RowWrite { key: key(row), record: &[] }).collect();
        changes.note(&rows);
    }

    fn rows_since(changes: &Changes, identity: &str) -> Option<Vec<u64>> {
        match changes.rows_since(&[identity.to_owned()]) {
            Since::Known(rows) => {
                Some(rows.get(&1).into_iter().flat_map(RoaringTreemap::iter).collect())
            }
            Since::Unknown(_) => None,
        }
    }

    #[test]
    fn a_delta_against_any_publish_has_all_rows_since() {
        let (mut changes, budget) = (Changes::default(), Budget::new(1 << 20));
        write(&mut changes, 0..9);
        assert_eq!(changes.stats(), ChangeStats::default(), "nothing was published");
        changes.published("a", Room::of(&budget));
        write(&mut changes, 3..5);
        changes.published("b", Room::of(&budget));
        write(&mut changes, 4..7);
        assert_eq!(rows_since(&changes, "a").unwrap(), [3, 4, 5, 6]);
        assert_eq!(rows_since(&changes, "b").unwrap(), [4, 5, 6]);
        assert_eq!(rows_since(&changes, "c"), None);
        assert!(changes.rows(0, TableId(0)).is_empty());
    }

    #[test]
    fn the_oldest_and_the_newest_publishes_stay_known() {
        let (mut changes, budget) = (Changes::default(), Budget::new(1 << 20));
        for at in 0..20 {
            changes.published(&format!("p{at}"), Room::of(&budget));
            write(&mut changes, at..at + 1);
        }
        assert_eq!(changes.stats().base_count, SETS_MAX as u64);
        let all: Vec<u64> = (0..20).collect();
        assert_eq!(rows_since(&changes, "p0").unwrap(), all);
        for at in 13..20 {
            assert_eq!(rows_since(&changes, &format!("p{at}")).unwrap(), all[at..]);
        }
        assert!((1..13).all(|at| rows_since(&changes, &format!("p{at}")).is_none()));
    }

    #[test]
    fn sets_stay_in_their_share_of_the_budget() {
        let (mut changes, budget) = (Changes::default(), Budget::new(64 << 10));
        changes.published("a", Room::of(&budget));
        changes.published("b", Room::of(&budget));
        assert_eq!(budget.free_bytes(), (64 << 10) - (2 << 10));
        // Every other row: a list of them has two bytes for each.
        for row in (0..2 * ROWS_PER_LOOK as u64).step_by(2) {
            write(&mut changes, row..row + 1);
        }
        assert!(rows_since(&changes, "b").is_none());
        assert_eq!((changes.stats().sets_dropped, changes.why_unknown()), (2, DROPPED));
        // A budget without room notes nothing.
        let full = budget.reserve("training", budget.free_bytes() - 100).unwrap();
        let mut changes = Changes::default();
        changes.published("a", Room::of(&budget));
        assert!(rows_since(&changes, "a").is_none() && changes.stats().sets_dropped == 1);
        drop(full);
    }
}
