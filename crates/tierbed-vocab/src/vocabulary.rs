//! The index of one open table: extendible hashing from ids to rows.
//!
//! A batch is translated as a whole: its ids are sorted by hash and probed bucket after bucket;
//! then those that get a row are given one in the order in which they first appear in the batch;
//! then index pages are changed, in hash order. So the same batches give the same rows, however
//! much memory there is and whatever was looked up or fetched ahead in between.

#![expect(clippy::indexing_slicing, reason = "groups are visited by positions within them")]

mod copy;
mod evict;
mod give;
mod scratch;

use serde::{Deserialize, Serialize};
use tierbed_core::{
    Budget, Error, Reservation, Result, RowId, RowKey, Schema, TableId, TableSchema, TrainStore,
};

use crate::bucket::{insert_entry, set_entry, write_bucket, Bucket, Entry, ENTRIES_MAX};
use crate::directory::Directory;
use crate::free_rows::FreeRows;
use crate::pages::{page_table, PageCache};
use crate::policy::Policy;

pub use copy::IdEntry;
pub use evict::{Evicted, FreedSink};
pub use scratch::Scratch;
use scratch::{Group, Todo};

/// The row of every id without a row of its own.
pub const SHARED_ROW: u64 = 0;
/// Memory a [`Scratch`] takes per index of a batch: sorted ids (16), groups (40), pending (8).
pub const BATCH_BYTES_PER_INDEX: usize = 64;
/// Pages of an index at first.
const PAGES_MIN: u64 = 16;
/// The least memory a directory keeps.
const DIRECTORY_BYTES_MIN: u64 = 1024;

/// What a vocabulary is beside its pages and its directory; committed as JSON.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    /// Name of the open table.
    pub table: String,
    /// Admission and eviction.
    pub policy: Policy,
    /// Rows ever given, the shared one included: the next new row.
    pub next_row: u64,
    /// Rows given back and not given again.
    pub free_count: u64,
    /// Ids that have a row.
    pub id_count: u64,
    /// Ids seen too rarely for one.
    pub waiting_count: u64,
}

/// Room an insertion of new ids needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Growth {
    rows: u64,
    pages: u64,
    directory_bytes: u64,
}

/// The index of one open table. See the module documentation.
#[derive(Debug)]
pub struct Vocabulary {
    table: TableId,
    buckets: TableId,
    free: FreeRows,
    state: State,
    directory: Directory,
    memory: Reservation,
}

/// Returns the hidden table of the buckets of table `name`.
#[must_use]
pub fn bucket_table(name: &str) -> TableSchema {
    page_table(format!("{}b.{name}", tierbed_core::schema::OWN_PREFIX), PAGES_MIN)
}

/// Returns the hidden table of the free rows of table `name`.
#[must_use]
pub fn free_table(name: &str) -> TableSchema {
    page_table(format!("{}f.{name}", tierbed_core::schema::OWN_PREFIX), 1)
}

/// Returns whether `name` is that of a hidden table of free rows, which serving does not need.
#[must_use]
pub fn is_free_table(name: &str) -> bool {
    name.strip_prefix(tierbed_core::schema::OWN_PREFIX).is_some_and(|rest| rest.starts_with("f."))
}

impl Vocabulary {
    /// Makes the vocabulary of `table`, which is in the store already; adds its hidden tables.
    ///
    /// # Errors
    /// `Invalid` for a bad policy or a budget too small, otherwise the store's.
    pub fn create(
        pages: &mut PageCache,
        store: &mut dyn TrainStore,
        table: TableId,
        policy: Policy,
        budget: &Budget,
    ) -> Result<Self> {
        policy.check()?;
        let name = store.schema().table(table)?.name.clone();
        let buckets = store.add_table(bucket_table(&name))?;
        let free = FreeRows { table: store.add_table(free_table(&name))? };
        let memory = budget.reserve("vocabulary directory", DIRECTORY_BYTES_MIN)?;
        let first = pages.create(store, RowKey::new(buckets, RowId(0)))?;
        write_bucket(first, 0, &[]);
        let state = State {
            table: name,
            policy,
            next_row: SHARED_ROW + 1,
            free_count: 0,
            id_count: 0,
            waiting_count: 0,
        };
        Ok(Self { table, buckets, free, state, directory: Directory::new(), memory })
    }

    /// Finds the vocabulary of a commit again: its `state` and its directory's bytes.
    ///
    /// # Errors
    /// `Corruption` when they do not belong to the tables of `schema`, `Invalid` when the budget
    /// does not reach.
    pub fn open(schema: &Schema, state: State, directory: &[u8], budget: &Budget) -> Result<Self> {
        let damaged = |what: &str| {
            Error::corruption(format!("vocabulary {what}")).with("table", &state.table)
        };
        let find = |name: &str| schema.id_of(name).ok_or_else(|| damaged("lacks its tables"));
        let table = find(&state.table)?;
        let buckets = find(&bucket_table(&state.table).name)?;
        let free = FreeRows { table: find(&free_table(&state.table).name)? };
        if state.next_row == 0
            || state.next_row > schema.table(table)?.row_count
            || state.id_count.checked_add(state.free_count) != Some(state.next_row - 1)
            || state.policy.check().is_err()
        {
            return Err(damaged("has counts that do not add up"));
        }
        let bytes = Directory::decoded_bytes(directory)?.max(DIRECTORY_BYTES_MIN);
        let memory = budget.reserve("vocabulary directory", bytes)?;
        let directory =
            Directory::decode(directory).map_err(|error| error.with("table", &state.table))?;
        if u64::from(directory.bucket_count()) > schema.table(buckets)?.row_count {
            return Err(damaged("has more buckets than pages"));
        }
        Ok(Self { table, buckets, free, state, directory, memory })
    }

    /// Returns the open table.
    #[must_use]
    pub fn table(&self) -> TableId {
        self.table
    }

    /// Returns what is committed beside the pages.
    #[must_use]
    pub fn state(&self) -> &State {
        &self.state
    }

    /// Returns the directory's bytes, to be committed.
    #[must_use]
    pub fn directory_bytes(&self) -> Vec<u8> {
        self.directory.encode()
    }

    /// Replaces admission and eviction, from the next batch on.
    ///
    /// # Errors
    /// `Invalid` for a bad policy.
    pub fn set_policy(&mut self, policy: Policy) -> Result<()> {
        policy.check()?;
        self.state.policy = policy;
        Ok(())
    }

    /// Returns the room that `id_count` new ids would need and that is not there; `None` when
    /// there is enough.
    ///
    /// # Errors
    /// `Invalid` when a table is unknown.
    pub fn growth(&self, schema: &Schema, id_count: u64) -> Result<Option<Growth>> {
        let have = Growth {
            rows: schema.table(self.table)?.row_count,
            pages: schema.table(self.buckets)?.row_count,
            directory_bytes: self.memory.bytes(),
        };
        let grown = |have: u64, need: u64| if need > have { need.max(2 * have) } else { have };
        // A split leaves two half-full pages; one doubling of the directory is kept ready.
        let pages = u64::from(self.directory.bucket_count()) + id_count / 64 + 8;
        let want = Growth {
            rows: grown(have.rows, self.state.next_row + id_count),
            pages: grown(have.pages, pages),
            directory_bytes: (2 * self.directory.memory_bytes()).max(have.directory_bytes),
        };
        Ok((want != have).then_some(want))
    }

    /// Makes room. The caller sees to it that the budget has some.
    ///
    /// # Errors
    /// `Invalid` when the budget does not reach, otherwise the store's.
    pub fn grow(&mut self, store: &mut dyn TrainStore, growth: Growth) -> Result<()> {
        self.memory.resize(growth.directory_bytes)?;
        store.grow_table(self.buckets, growth.pages)?;
        store.grow_table(self.table, growth.rows)
    }

    /// Finds the rows of the sorted ids of `scratch`; ids without one get the shared row.
    ///
    /// # Errors
    /// The store's, `Corruption` for damaged pages.
    pub fn find(
        &self,
        pages: &mut PageCache,
        store: &mut dyn TrainStore,
        scratch: &mut Scratch,
    ) -> Result<()> {
        self.each_piece(pages, store, &mut scratch.groups, |this, pages, store, group| {
            let bucket = Bucket::parse(pages.page(store, this.page_of(group.hash))?)?;
            let found = bucket.entry_of(group.hash);
            if let Some(row) = found.and_then(|(_, entry)| entry.row) {
                group.row = this.checked_row(row)?;
            }
            Ok(())
        })
    }

    /// Translates the sorted ids of `scratch` as one step of training: counts them, and gives
    /// rows to those that have earned one. `now` is the time in the unit of the policy's `ttl`.
    ///
    /// # Errors
    /// As [`find`](Self::find); the vocabulary is then half-way and must be reopened.
    pub fn train(
        &mut self,
        pages: &mut PageCache,
        store: &mut dyn TrainStore,
        scratch: &mut Scratch,
        now: u32,
    ) -> Result<()> {
        self.each_piece(pages, store, &mut scratch.groups, |this, pages, store, group| {
            this.count(pages, store, group, now)
        })?;
        self.assign(pages, store, scratch)?;
        let mut changed: Vec<Group> = Vec::new();
        changed.extend(scratch.groups.iter().filter(|group| group.todo != Todo::Nothing));
        let mut first = 0;
        while first < changed.len() {
            let end = self.bring_piece(pages, store, &changed, first)?;
            assert!(end > first, "a piece has a group");
            for group in &changed[first..end] {
                self.insert(pages, store, group, now)?;
            }
            first = end;
        }
        Ok(())
    }

    // Rows for the admitted, in order of first appearance.
    fn assign(
        &mut self,
        pages: &mut PageCache,
        store: &mut dyn TrainStore,
        scratch: &mut Scratch,
    ) -> Result<()> {
        let Scratch { groups, pending, .. } = scratch;
        pending.clear();
        let admitted = groups.iter().zip(0u32..).filter(|(group, _)| group.todo == Todo::Admit);
        pending.extend(admitted.map(|(group, at)| (group.first, at)));
        pending.sort_unstable();
        let row_count = store.schema().table(self.table)?.row_count;
        for &(_, at) in pending.iter() {
            let row = match self.free.pop(pages, store, &mut self.state.free_count)? {
                Some(row) => self.checked_row(row)?,
                None => {
                    assert!(self.state.next_row < row_count, "no room was made for a new row");
                    self.state.next_row += 1;
                    self.state.next_row - 1
                }
            };
            self.state.id_count += 1;
            groups[at as usize].row = row;
        }
        Ok(())
    }

    fn count(
        &self,
        pages: &mut PageCache,
        store: &mut dyn TrainStore,
        group: &mut Group,
        now: u32,
    ) -> Result<()> {
        let policy = self.state.policy;
        let key = self.page_of(group.hash);
        let bucket = Bucket::parse(pages.page(store, key)?)?;
        let Some((at, mut entry)) = bucket.entry_of(group.hash) else {
            group.todo = if policy.admit_after <= 1 { Todo::Admit } else { Todo::Wait };
            return Ok(());
        };
        if let Some(row) = entry.row {
            group.row = self.checked_row(row)?;
            if !policy.counts_all_uses() {
                return Ok(());
            }
        }
        (entry.count, entry.seen) = (entry.count + 1.0, now);
        set_entry(pages.page_mut(store, key)?, at, &entry);
        if entry.row.is_none() && entry.count >= policy.admit_after as f32 {
            group.todo = Todo::Admit;
        }
        Ok(())
    }

    fn insert(
        &mut self,
        pages: &mut PageCache,
        store: &mut dyn TrainStore,
        group: &Group,
        now: u32,
    ) -> Result<()> {
        let row = (group.todo == Todo::Admit).then_some(group.row);
        assert!(row != Some(SHARED_ROW), "an id that is admitted has a row of its own");
        let fresh = Entry { hash: group.hash, row, count: 1.0, seen: now };
        if self.place(pages, store, &fresh)? {
            self.state.waiting_count += u64::from(row.is_none());
            return Ok(());
        }
        // It has waited for its row.
        let page = pages.page_mut(store, self.page_of(group.hash))?;
        let waiting = Bucket::parse(page)?.entry_of(group.hash);
        let Some((at, waiting)) = waiting else { panic!("an id that is there is found") };
        set_entry(page, at, &Entry { row, ..waiting });
        self.state.waiting_count = self.state.waiting_count.saturating_sub(1);
        Ok(())
    }

    // Puts an id into its bucket, which is split where it is full; false when the id is there.
    fn place(
        &mut self,
        pages: &mut PageCache,
        store: &mut dyn TrainStore,
        entry: &Entry,
    ) -> Result<bool> {
        loop {
            let page = pages.page_mut(store, self.page_of(entry.hash))?;
            let bucket = Bucket::parse(page)?;
            match bucket.find(entry.hash) {
                Ok(_) => return Ok(false),
                Err(at) if bucket.len() < ENTRIES_MAX => {
                    insert_entry(page, at, entry);
                    return Ok(true);
                }
                Err(_) => self.split(pages, store, entry.hash)?,
            }
        }
    }

    fn split(
        &mut self,
        pages: &mut PageCache,
        store: &mut dyn TrainStore,
        hash: u64,
    ) -> Result<()> {
        let old = self.page_of(hash);
        let bucket = Bucket::parse(pages.page(store, old)?)?;
        let depth = bucket.depth;
        let entries: Vec<Entry> = bucket.entries().collect();
        if self.directory.must_double(depth) {
            let wanted = 2 * self.directory.memory_bytes();
            self.memory.resize(wanted.max(self.memory.bytes()))?;
        }
        let new = RowKey::new(self.buckets, RowId(self.directory.split(hash, depth)?.into()));
        let page_count = store.schema().table(self.buckets)?.row_count;
        if new.row.0 >= page_count {
            store.grow_table(self.buckets, 2 * page_count)?;
        }
        let is_low = |entry: &Entry| entry.hash >> (63 - depth) & 1 == 0;
        let (low, high) = entries.split_at(entries.partition_point(is_low));
        write_bucket(pages.create(store, new)?, depth + 1, high);
        write_bucket(pages.page_mut(store, old)?, depth + 1, low);
        Ok(())
    }

    /// Visits (id, row) of every id that has a row, in the order of their hashes.
    ///
    /// # Errors
    /// As [`find`](Self::find), and the visitor's.
    pub fn scan(
        &self,
        pages: &mut PageCache,
        store: &mut dyn TrainStore,
        visit: &mut dyn FnMut(i64, u64) -> Result<()>,
    ) -> Result<()> {
        self.visit_entries(pages, store, &mut |entry| match entry.row {
            Some(row) => visit(entry.id, row),
            None => Ok(()),
        })
    }

    // Brings the next buckets in hash order, from directory slot `slot` on; none at the end.
    fn bring_next(
        &self,
        pages: &mut PageCache,
        store: &mut dyn TrainStore,
        slot: &mut usize,
    ) -> Result<Vec<RowKey>> {
        let mut keys = Vec::new();
        while keys.len() < pages.batch_max() {
            let Some(bucket) = self.directory.next_bucket(slot) else { break };
            keys.push(RowKey::new(self.buckets, RowId(bucket.into())));
        }
        let mut sorted = keys.clone();
        sorted.sort_unstable();
        pages.bring(store, &sorted)?;
        Ok(keys)
    }

    // Brings the pages of `groups` from `first` on, as many as are worth it; returns their end.
    fn bring_piece(
        &self,
        pages: &mut PageCache,
        store: &mut dyn TrainStore,
        groups: &[Group],
        first: usize,
    ) -> Result<usize> {
        let (mut keys, mut end) = (Vec::new(), first);
        // Hashes in order: the ids of one bucket are neighbours.
        for group in &groups[first..] {
            let key = self.page_of(group.hash);
            if keys.last() != Some(&key) {
                if keys.len() == pages.batch_max() {
                    break;
                }
                keys.push(key);
            }
            end += 1;
        }
        keys.sort_unstable();
        pages.bring(store, &keys)?;
        Ok(end)
    }

    fn each_piece(
        &self,
        pages: &mut PageCache,
        store: &mut dyn TrainStore,
        groups: &mut [Group],
        mut work: impl FnMut(&Self, &mut PageCache, &mut dyn TrainStore, &mut Group) -> Result<()>,
    ) -> Result<()> {
        let mut first = 0;
        while first < groups.len() {
            let end = self.bring_piece(pages, store, groups, first)?;
            for group in &mut groups[first..end] {
                work(self, pages, store, group)?;
            }
            first = end;
        }
        Ok(())
    }

    fn page_of(&self, hash: u64) -> RowKey {
        RowKey::new(self.buckets, RowId(self.directory.bucket(hash).into()))
    }

    /// Returns the hidden table of the buckets.
    pub(crate) fn bucket_table(&self) -> TableId {
        self.buckets
    }

    pub(crate) fn directory(&self) -> &Directory {
        &self.directory
    }

    pub(crate) fn checked_row(&self, row: u64) -> Result<u64> {
        if row > SHARED_ROW && row < self.state.next_row {
            return Ok(row);
        }
        Err(Error::corruption("vocabulary names a row it never gave")
            .with("table", &self.state.table)
            .with("row", row)
            .with("rows", self.state.next_row))
    }
}

#[cfg(test)]
mod tests;
