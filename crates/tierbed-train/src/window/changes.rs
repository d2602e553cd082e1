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
//!
//! Training pays for this with each write: rows [wait](waiting), as a bit each, and join the newest
//! set many at a time. Only then sizes are looked at.

mod waiting;

use std::collections::BTreeSet;

use roaring::RoaringTreemap;
use serde::Serialize;
use tierbed_core::store::RowWrite;
use tierbed_core::{Budget, ErrorKind, Reservation, Result, RowKey, Schema, TableId};

use super::changes_file::{decode, encode, ChangeSet, Rows};
use waiting::{WaitingRoom, WaitingRows};

/// Sets kept. One more joins the second to the oldest: that is what deltas are made against which
/// grow until the next whole snapshot.
const SETS_MAX: usize = 8;
/// One part in so many of the budget is set aside for the sets, and for joining those of a table.
const MEMORY_SHARE: u64 = 32;
/// The same of memory that is kept aside for this and for publishing.
const ASIDE_SHARE: u64 = 8;
/// A list of numbers that grows may have twice the memory it needs, and so may what is joined.
const GROWTH: u64 = 4;

/// Stands for what is being published: no identity has these letters.
const UNNAMED: &str = "------------------------";

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
    /// Of rows that wait, besides.
    waiting_bytes: u64,
}

impl<'a> Room<'a> {
    /// In a budget that trains and publishes.
    pub(crate) fn of(budget: &'a Budget) -> Self {
        let bytes = budget.limit_bytes() / MEMORY_SHARE;
        Self { budget, bytes, waiting_bytes: bytes / 2 }
    }

    /// In a budget kept aside, of which publishing needs `least_bytes`.
    pub(crate) fn beside(budget: &'a Budget, least_bytes: u64) -> Self {
        let limit_bytes = budget.limit_bytes();
        let bytes = (limit_bytes / ASIDE_SHARE).min(limit_bytes.saturating_sub(least_bytes));
        // Along a plan rows are noted by whole windows, and wait for nothing.
        Self { budget, bytes, waiting_bytes: 0 }
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
    /// Beside it, where rows are noted one by one.
    waiting_memory: Option<Reservation>,
    /// Rows that are to join the newest set.
    waiting: WaitingRows,
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
                Ok(sets) => {
                    changes.sets = sets;
                    // A publish that the process did not live to end.
                    changes.forget_begun();
                }
                Err(_) => changes.is_damaged = true,
            }
        }
        if changes.sets.is_empty() {
            (changes.memory, changes.waiting_memory) = (None, None);
        }
        Ok(changes)
    }

    /// Goes on in other memory.
    pub(crate) fn moved_to(mut self, room: Room<'_>) -> Self {
        self.settle();
        (self.memory, self.waiting_memory) = (None, None);
        if !self.sets.is_empty() {
            self.set_aside(room);
            self.bound();
        }
        self
    }

    /// Returns the attachment; `None` without sets.
    pub(crate) fn encode(&mut self) -> Option<Vec<u8>> {
        self.settle();
        (!self.sets.is_empty()).then(|| encode(&self.sets))
    }

    /// Notes rows that are about to be written.
    pub(crate) fn note(&mut self, rows: &[RowWrite<'_>]) {
        let mut left = rows;
        while self.is_noting() && !left.is_empty() {
            let (now, later) = left.split_at(left.len().min(self.waiting.room()));
            self.waiting.note(now);
            left = later;
            if self.waiting.room() == 0 {
                self.settle();
            }
        }
    }

    /// Notes rows that are changed and not written yet.
    pub(crate) fn note_keys(&mut self, mut keys: impl Iterator<Item = RowKey>) {
        while self.is_noting() {
            let some = keys.by_ref().take(self.waiting.room().max(1));
            let mut some: Vec<_> = some.map(|key| RowWrite { key, record: &[] }).collect();
            if some.is_empty() {
                return;
            }
            some.sort_unstable_by_key(|row| row.key);
            self.note(&some);
        }
    }

    /// Notes rows of `table`, many at a time.
    pub(crate) fn note_rows(&mut self, table: TableId, rows: RoaringTreemap) {
        let Some(set) = self.sets.last_mut() else { return };
        set.join(Rows::from([(table.0, rows)]));
        self.bound();
    }

    /// Tells whether what changes from here on is of use.
    pub(crate) fn is_noting(&self) -> bool {
        !self.sets.is_empty()
    }

    // Joins the rows that wait to the newest set.
    fn settle(&mut self) {
        let rows = self.waiting.take();
        if let Some(set) = self.sets.last_mut().filter(|_| !rows.is_empty()) {
            set.join(rows);
            self.bound();
        }
    }

    /// Begins a set: what has `identity` holds every row as it is now.
    pub(crate) fn published(&mut self, identity: &str, room: Room<'_>) {
        self.settle();
        self.set_aside(room);
        if self.memory.is_none() {
            self.counts.sets_dropped += 1;
            return;
        }
        let last = self.sets.last();
        if last.is_some_and(|set| set.since == identity && set.rows().is_empty()) {
            return;
        }
        if self.sets.len() == SETS_MAX {
            let joined = self.sets.remove(1);
            if let Some(oldest) = self.sets.first_mut() {
                oldest.join(joined.into_rows());
            }
        }
        self.sets.push(ChangeSet::new(identity.to_owned(), Rows::new()));
        self.bound();
    }

    /// Begins a set: what is being published will hold every row as it is now. Until it is
    /// [`named`](Self::name_begun) no delta is made against it.
    pub(crate) fn begin(&mut self, room: Room<'_>) {
        self.published(UNNAMED, room);
    }

    /// Names what was being published.
    pub(crate) fn name_begun(&mut self, identity: &str) {
        if let Some(set) = self.sets.iter_mut().rfind(|set| set.since == UNNAMED) {
            identity.clone_into(&mut set.since);
        }
    }

    /// Joins the set of what was being published, and failed, to the one before.
    pub(crate) fn forget_begun(&mut self) {
        self.settle();
        let Some(at) = self.sets.iter().rposition(|set| set.since == UNNAMED) else { return };
        let begun = self.sets.remove(at);
        if let Some(before) = at.checked_sub(1).and_then(|at| self.sets.get_mut(at)) {
            before.join(begun.into_rows());
        }
    }

    /// Finds the sets since what has any of these identities.
    pub(crate) fn since(&mut self, identities: &[String]) -> Since<usize> {
        self.settle();
        let is_asked = |set: &ChangeSet| identities.contains(&set.since);
        match self.sets.iter().rposition(is_asked) {
            Some(first) => Since::Known(first),
            None => Since::Unknown(self.why_unknown()),
        }
    }

    /// Returns the rows noted since what has any of these identities.
    pub(crate) fn rows_since(&mut self, identities: &[String]) -> Since<Rows> {
        let first = match self.since(identities) {
            Since::Known(first) => first,
            Since::Unknown(why) => return Since::Unknown(why),
        };
        let sets = self.sets.iter().skip(first);
        let tables: BTreeSet<u32> = sets.flat_map(|set| set.rows().keys().copied()).collect();
        let rows = |table| (table, self.rows(first, TableId(table)));
        Since::Known(tables.into_iter().map(rows).collect())
    }

    /// Returns the rows of `table` in the sets from `first` on, and those noted since.
    pub(crate) fn rows(&self, first: usize, table: TableId) -> RoaringTreemap {
        let sets = self.sets.iter().skip(first);
        let mut all = self.waiting.rows(table);
        sets.filter_map(|set| set.rows().get(&table.0)).for_each(|rows| all |= rows);
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
        let rows = self.sets.iter().flat_map(|set| set.rows().values());
        let newest = self.sets.last().map(ChangeSet::rows);
        let fresh = self.waiting.tables().map(|table| {
            let waiting = self.waiting.rows(table);
            match newest.and_then(|rows| rows.get(&table.0)) {
                Some(rows) => waiting.difference_len(rows),
                None => waiting.len(),
            }
        });
        let bases = self.sets.iter().map(|set| &set.since).filter(|since| *since != UNNAMED);
        let bases: Vec<String> = bases.cloned().collect();
        ChangeStats {
            base_count: bases.len() as u64,
            bases,
            row_count: rows.map(RoaringTreemap::len).sum::<u64>() + fresh.sum::<u64>(),
            set_bytes: self.sets.iter().map(ChangeSet::bytes).sum(),
            ..self.counts.clone()
        }
    }

    // Nothing is noted in a budget that has no room to spare: training needs it more.
    fn set_aside(&mut self, room: Room<'_>) {
        let Room { budget, bytes, waiting_bytes } = room;
        if self.memory.is_none() && bytes > 0 && budget.free_bytes() / 4 > bytes {
            self.memory = budget.reserve("changed rows", bytes).ok();
            let memory = self.memory.as_ref().filter(|_| waiting_bytes > 0);
            self.waiting_memory =
                memory.and_then(|_| budget.reserve("changed rows", waiting_bytes).ok());
            self.waiting = WaitingRows::within(WaitingRoom {
                waiting_bytes: self.waiting_memory.as_ref().map_or(0, Reservation::bytes),
                set_bytes: self.bytes_max(),
            });
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
mod tests;
