//! Ids of open tables along a plan: their index is a store of its own beside the rows.
//!
//! Rows in forward order lie where the plan needs them next, and nothing is found there by number.
//! So the index of ids has files of its own in the same folder; their names begin with
//! `vocabulary.`.
//!
//! Ids get their rows while a plan is made, in the order in which training will see them. The index
//! is committed before the plan is, and then stays as it is until the next plan. Every id gets a
//! row at once and keeps it, so a plan that is made again, after a crash or since it is damaged,
//! gives the same rows. Until training comes to an id, it counts for one without a row.

#![expect(clippy::indexing_slicing, reason = "tables are those of the index, bounds of the batch")]

use std::sync::Arc;

use tierbed_core::env::unix_ms;
use tierbed_core::{Bags, Budget, Error, Result, Schema, TableId, TableSchema};
use tierbed_io::{Folder, PartFolder};
use tierbed_store::CommitLog;
use tierbed_vocab::{bucket_table, is_free_table, Policy, State, SHARED_ROW};

use crate::auto::noting::NotingEngine;
use crate::auto::options::OrderConfig;
use crate::auto::windowed::Windowed;
use crate::engine::TrainEngine;
use crate::planned::AnySink;
use crate::window::changes::Since;
use crate::window::changes_file::Rows;
use crate::window::vocabularies::VocabularyStats;
use crate::window::vocabulary_parts::IndexPart;
use crate::window::{Backend, IdEntry, Translate, WindowConfig, WindowEngine};

/// Names of the files of the index begin so.
pub(crate) const IDS_PREFIX: &str = "vocabulary.";
/// What the index calls its checkpoints.
const CHECKPOINT: &str = "ids";
/// Entries copied at once.
const CHUNK_IDS: usize = 4096;
const MS_PER_MINUTE: u64 = 60_000;
/// Rows of a table before ids have any: the shared row.
const ROWS_MIN: u64 = SHARED_ROW + 1;

/// See the module documentation.
pub(crate) struct PlannedIds {
    windowed: Windowed,
    /// Of the store.
    config: OrderConfig,
    tables: Vec<OpenTable>,
    work: Vec<i64>,
}

/// An open table: its number in the store, and in the index.
#[derive(Debug, Clone, Copy)]
struct OpenTable {
    id: TableId,
    here: TableId,
}

fn part_of(folder: &Arc<dyn Folder>) -> Arc<dyn Folder> {
    Arc::new(PartFolder::new(Arc::clone(folder), IDS_PREFIX))
}

impl PlannedIds {
    /// Tells whether `folder` has an index.
    ///
    /// # Errors
    /// `Corruption` when its commit is damaged, otherwise the folder's.
    pub(crate) fn exists(folder: &Arc<dyn Folder>) -> Result<bool> {
        Ok(CommitLog::stored_backend(&*part_of(folder))?.is_some())
    }

    /// Removes the index of `folder`: no plan needs it.
    ///
    /// # Errors
    /// Those of the folder.
    pub(crate) fn remove(folder: &Arc<dyn Folder>) -> Result<()> {
        let part = part_of(folder);
        // Without it the rest is garbage.
        part.remove(CommitLog::CURRENT)?;
        part.list()?.iter().try_for_each(|name| part.remove(name))
    }

    /// Opens the index in `folder` at its last checkpoint, or begins one, with `memory_bytes`.
    ///
    /// # Errors
    /// As [`WindowEngine::open_in`].
    pub(crate) fn open(
        folder: &Arc<dyn Folder>,
        config: &OrderConfig,
        memory_bytes: u64,
    ) -> Result<Self> {
        assert!(
            memory_bytes >= config.ids_bytes(),
            "{memory_bytes} bytes are too few for an index"
        );
        // Pages get half, and a quarter of what is more than usual, which is for sorting.
        let usual_bytes = config.ids_bytes();
        let vocabulary_bytes = usual_bytes / 2 + (memory_bytes - usual_bytes) / 4;
        let own = WindowConfig {
            io_engine: config.io_engine.clone(),
            queue_depth: config.queue_depth,
            disk_quota_bytes: config.disk_quota_bytes,
            vocabulary_bytes: Some(vocabulary_bytes),
            backend: Backend::File,
            ..WindowConfig::new(memory_bytes)
        };
        let engine = WindowEngine::open_in(Some(part_of(folder)), &own)
            .map_err(|error| name_least(error, config, memory_bytes))?;
        let windowed = Windowed::opened(engine);
        Ok(Self { windowed, config: config.clone(), tables: Vec::new(), work: Vec::new() })
    }

    /// Returns `error`, and where the memory of the index was too small, what the store needs.
    pub(crate) fn name_least(&self, error: Error) -> Error {
        name_least(error, &self.config, self.budget().limit_bytes())
    }

    fn engine(&self) -> &WindowEngine {
        &self.windowed.engine
    }

    /// Adds the open table `table` of `schema`, or finds it.
    ///
    /// # Errors
    /// As [`WindowEngine::add_open_table`].
    pub(crate) fn add(&mut self, schema: &Schema, table: TableId, policy: Policy) -> Result<()> {
        // Its rows lie elsewhere: here it has none, only numbers.
        let numbers = TableSchema::plain(schema.table(table)?.name.clone(), 1, 1);
        let here = self.windowed.engine.add_open_table(numbers, policy);
        let here = here.map_err(|error| self.name_least(error))?;
        if self.here(table).is_none() {
            self.tables.push(OpenTable { id: table, here });
        }
        Ok(())
    }

    /// Finds the tables of an index that was opened in `schema`, the store's; returns them.
    ///
    /// # Errors
    /// `Corruption` when one is missing there.
    pub(crate) fn find_tables(&mut self, schema: &Schema) -> Result<Vec<(TableId, Policy)>> {
        let mut found = Vec::new();
        for State { table, policy, .. } in self.states().tables {
            let missing = || Error::corruption("the store lacks a table that its ids are of");
            let id = schema.id_of(&table).ok_or_else(|| missing().with("table", &table))?;
            self.add(schema, id, policy)?;
            found.push((id, policy));
        }
        Ok(found)
    }

    fn here(&self, table: TableId) -> Option<TableId> {
        self.tables.iter().find(|open| open.id == table).map(|open| open.here)
    }

    /// Returns what is known of the tables.
    pub(crate) fn states(&self) -> VocabularyStats {
        self.engine().stats().vocabularies
    }

    /// Returns the same of ids with a row below `next_row`, as training in another order has them.
    pub(crate) fn states_below(&self, next_row: &dyn Fn(TableId) -> u64) -> VocabularyStats {
        let mut stats = self.states();
        for state in &mut stats.tables {
            let here = self.engine().schema().id_of(&state.table);
            let table = self.tables.iter().find(|open| Some(open.here) == here);
            let Some(open) = table else { panic!("the index of {} has no table", state.table) };
            // Along a plan no row is free, and no id waits.
            state.next_row = next_row(open.id);
            state.id_count = state.next_row - 1;
        }
        stats
    }

    /// Returns the rows that table `table` needs for all ids; `None` when it is not open.
    pub(crate) fn row_count(&self, table: TableId) -> Option<u64> {
        self.engine().vocabulary(self.here(table)?).map(|state| state.next_row)
    }

    /// Returns the open tables; others of these methods count them in this order.
    pub(crate) fn open_tables(&self) -> impl Iterator<Item = TableId> + '_ {
        self.tables.iter().map(|open| open.id)
    }

    /// Returns the next new row of each open table.
    pub(crate) fn next_rows(&self) -> Vec<u64> {
        self.tables.iter().map(|open| self.next_row(*open)).collect()
    }

    fn next_row(&self, open: OpenTable) -> u64 {
        match self.engine().vocabulary(open.here) {
            Some(state) => state.next_row,
            None => panic!("an open table has no index"),
        }
    }

    /// Returns how many ids have rows.
    pub(crate) fn id_count(&self) -> u64 {
        self.next_rows().iter().map(|next_row| next_row - ROWS_MIN).sum()
    }

    /// Replaces `ids` of open table `at` by their rows, unknown ones by the shared row.
    ///
    /// # Errors
    /// As [`WindowEngine::translate_ids`].
    pub(crate) fn find_known(&mut self, at: u32, ids: &mut [i64]) -> Result<()> {
        let open = self.tables[at as usize];
        if self.next_row(open) == ROWS_MIN {
            ids.fill(SHARED_ROW as i64);
            return Ok(());
        }
        self.windowed.engine.translate_ids(open.here, Translate::Find, ids)
    }

    /// Sets `count` rows of open table `at` aside, to be given to ids; returns the first one.
    ///
    /// # Errors
    /// As [`WindowEngine::set_rows_aside`].
    pub(crate) fn set_rows_aside(&mut self, at: u32, count: u64) -> Result<u64> {
        self.windowed.engine.set_rows_aside(self.tables[at as usize].here, count)
    }

    /// Gives new ids of open table `at` rows that were set aside: (hash, row) of each, by rising
    /// hashes.
    ///
    /// # Errors
    /// As [`WindowEngine::give_rows`].
    pub(crate) fn give(&mut self, at: u32, given: &[(u64, u64)]) -> Result<()> {
        let now = (unix_ms() / MS_PER_MINUTE) as u32;
        let here = self.tables[at as usize].here;
        // Room is made for some at a time.
        given.chunks(CHUNK_IDS).try_for_each(|some| self.windowed.engine.give_rows(here, some, now))
    }

    /// Writes to `rows`, `[E]`, the rows of the ids of `bags`, as [`find`](Self::find) does for
    /// one table.
    ///
    /// # Errors
    /// As [`find`](Self::find).
    pub(crate) fn find_all(
        &mut self,
        tables: &[TableId],
        bags: &Bags<'_>,
        rows: &mut [i64],
        next_row: &dyn Fn(TableId) -> u64,
    ) -> Result<()> {
        let found = self.each_table(tables, bags, rows, |engine, open, ids| {
            engine.translate_ids(open.here, Translate::Find, ids)?;
            share_unknown(ids, next_row(open.id));
            Ok(())
        });
        found.map_err(|error| self.name_least(error))
    }

    // Replaces the ids of each open table, of all features at once, by what `translate` makes of
    // them; other ids are rows already.
    fn each_table(
        &mut self,
        tables: &[TableId],
        bags: &Bags<'_>,
        rows: &mut [i64],
        translate: impl Fn(&mut WindowEngine, OpenTable, &mut [i64]) -> Result<()>,
    ) -> Result<()> {
        assert_eq!(tables.len(), bags.feature_count, "each feature reads a table");
        if rows.len() != bags.indices.len() {
            return Err(Error::invalid("translation needs one row per index")
                .with("indices", bags.indices.len())
                .with("rows", rows.len()));
        }
        rows.copy_from_slice(bags.indices);
        let bounds: Vec<usize> = bags.bounds().map(|bound| bound as usize).collect();
        for &open in &self.tables {
            let reads = tables.iter().zip(bounds.windows(2));
            let ranges = reads.filter(|(table, _)| **table == open.id).map(|(_, at)| at[0]..at[1]);
            let ranges: Vec<_> = ranges.collect();
            self.work.clear();
            ranges.iter().for_each(|range| self.work.extend_from_slice(&rows[range.clone()]));
            translate(&mut self.windowed.engine, open, &mut self.work)?;
            let mut found = self.work.as_slice();
            for range in ranges {
                let (now, later) = found.split_at(range.len());
                rows[range].copy_from_slice(now);
                found = later;
            }
        }
        Ok(())
    }

    /// Replaces `ids` of table `table` by their rows below `next_row`; others get the shared row.
    ///
    /// # Errors
    /// As [`WindowEngine::translate_ids`].
    pub(crate) fn find(&mut self, table: TableId, next_row: u64, ids: &mut [i64]) -> Result<()> {
        let Some(here) = self.here(table) else { return Ok(()) };
        let found = self.windowed.engine.translate_ids(here, Translate::Find, ids);
        found.map_err(|error| self.name_least(error))?;
        share_unknown(ids, next_row);
        Ok(())
    }

    /// Visits (id, row) of every id of table `table` with a row below `next_row`.
    ///
    /// # Errors
    /// As [`WindowEngine::visit_ids`].
    pub(crate) fn visit_ids(
        &mut self,
        table: TableId,
        next_row: u64,
        visit: &mut dyn FnMut(i64, u64) -> Result<()>,
    ) -> Result<()> {
        let Some(here) = self.here(table) else { return Ok(()) };
        self.windowed.engine.visit_ids(here, &mut |id, row| match row < next_row {
            true => visit(id, row),
            false => Ok(()),
        })
    }

    /// Makes everything that planning did durable.
    ///
    /// # Errors
    /// As [`WindowEngine::checkpoint`].
    pub(crate) fn checkpoint(&mut self) -> Result<()> {
        self.windowed.engine.checkpoint(CHECKPOINT, &[]).map(drop)
    }

    /// Checks every checksum; returns the number of pages checked.
    ///
    /// # Errors
    /// `Corruption`, naming the first bad place.
    pub(crate) fn verify(&mut self) -> Result<u64> {
        self.windowed.engine.verify()
    }

    /// Returns the account of its memory.
    pub(crate) fn budget(&self) -> &Budget {
        self.engine().budget()
    }

    /// Returns the bytes on disk.
    pub(crate) fn disk_bytes(&self) -> u64 {
        self.engine().stats().store.disk_bytes
    }

    /// Returns `schema` with as many rows and index pages as a snapshot needs.
    ///
    /// # Errors
    /// `Corruption` when the store lacks a table of the index.
    pub(crate) fn published_schema(&self, schema: &Schema) -> Result<Schema> {
        let mut tables = schema.tables().to_vec();
        for table in &mut tables {
            let found = self.engine().schema().id_of(&table.name);
            let Some(found) = found else { continue };
            let needed = match self.engine().vocabulary(found) {
                Some(state) => state.next_row,
                None => self.engine().schema().table(found)?.row_count,
            };
            table.row_count = table.row_count.max(needed);
        }
        Schema::new(tables)
    }

    /// Returns what a snapshot keeps of the index besides its pages.
    ///
    /// # Errors
    /// Those of writing changed pages.
    pub(crate) fn attachments(&mut self) -> Result<Vec<(String, Vec<u8>)>> {
        self.windowed.engine.flush_vocabularies()
    }

    // The table of the store that table `here` of the index is the pages of; `None` for those that
    // serving does not need.
    fn pages_of(&self, schema: &Schema, here: TableId) -> Result<Option<TableId>> {
        let table = self.engine().schema().table(here)?;
        if !table.is_own() || is_free_table(&table.name) {
            return Ok(None);
        }
        let missing = || Error::corruption("the store lacks the pages of its ids");
        schema.id_of(&table.name).ok_or_else(missing).map(Some)
    }

    fn all_pages_of(&self, schema: &Schema) -> Result<Vec<Option<TableId>>> {
        let here = (0..self.engine().schema().tables().len() as u32).map(TableId);
        here.map(|here| self.pages_of(schema, here)).collect()
    }

    /// Visits the pages that serving needs, as rows of the hidden tables of `schema`.
    ///
    /// # Errors
    /// The store's and those of `sink`.
    pub(crate) fn scan_pages(&mut self, schema: &Schema, sink: &mut AnySink<'_>) -> Result<()> {
        let pages_of = self.all_pages_of(schema)?;
        self.windowed.scan_all(&mut |here, row, record| match pages_of[here.0 as usize] {
            Some(table) => sink(table, row, record),
            None => Ok(()),
        })
    }

    /// Returns the pages that changed since what has any of `identities` was published.
    ///
    /// # Errors
    /// As [`NotingEngine::noted_since`].
    pub(crate) fn noted_since(
        &mut self,
        schema: &Schema,
        identities: &[String],
    ) -> Result<Since<Rows>> {
        let pages_of = self.all_pages_of(schema)?;
        Ok(match self.windowed.noted_since(identities)? {
            Since::Unknown(why) => Since::Unknown(why),
            Since::Known(noted) => Since::Known(
                noted
                    .into_iter()
                    .filter_map(|(here, rows)| Some((pages_of[here as usize]?.0, rows)))
                    .collect(),
            ),
        })
    }

    /// Visits those pages among `noted`, rows of the tables of `schema`.
    ///
    /// # Errors
    /// The store's and those of `sink`.
    pub(crate) fn scan_noted(
        &mut self,
        schema: &Schema,
        noted: &Rows,
        sink: &mut AnySink<'_>,
    ) -> Result<()> {
        let pages_of = self.all_pages_of(schema)?;
        let mut pages = Rows::new();
        for (here, table) in (0..).zip(&pages_of) {
            if let Some(rows) = table.and_then(|table| noted.get(&table.0)) {
                pages.insert(here, rows.clone());
            }
        }
        self.windowed.scan_noted(&pages, &mut |here, row, record| match pages_of[here.0 as usize] {
            Some(table) => sink(table, row, record),
            None => Ok(()),
        })
    }

    /// Begins to note anew: what has `identity` holds every page as it is now.
    ///
    /// # Errors
    /// As [`NotingEngine::note_published`], and those of a checkpoint that says so.
    pub(crate) fn note_published(&mut self, identity: &str) -> Result<()> {
        self.windowed.note_published(identity)?;
        self.checkpoint()
    }

    /// Copies the ids with a row below `next_row` into `engine`, whose open tables have none yet.
    ///
    /// # Errors
    /// As [`WindowEngine::copy_index`].
    pub(crate) fn copy_to(
        &mut self,
        engine: &mut WindowEngine,
        next_row: &dyn Fn(TableId) -> u64,
    ) -> Result<()> {
        for OpenTable { id, here } in self.tables.clone() {
            let (next_row, all_rows) = (next_row(id), self.row_count(id));
            engine.copy_index(id, IndexPart::NextRow(next_row))?;
            // Rows that the plan has brought ahead come along, with their initial values.
            engine.grow_open_table(id, all_rows.map_or(next_row, |all| all.max(next_row)))?;
            let mut chunk: Vec<IdEntry> = Vec::with_capacity(CHUNK_IDS);
            self.windowed.engine.visit_entries(here, &mut |entry| {
                if entry.row.is_none_or(|row| row >= next_row) {
                    return Ok(());
                }
                chunk.push(entry);
                if chunk.len() < CHUNK_IDS {
                    return Ok(());
                }
                engine.copy_index(id, IndexPart::Entries(&chunk))?;
                chunk.clear();
                Ok(())
            })?;
            engine.copy_index(id, IndexPart::Entries(&chunk))?;
            engine.copy_index(id, IndexPart::End)?;
        }
        Ok(())
    }
}

// The index names the least memory of its own, which is a part of the store's.
fn name_least(error: Error, config: &OrderConfig, own_bytes: u64) -> Error {
    let Some(named_bytes) = error.minimum_bytes() else { return error };
    // Pages take up to half of what is added, and sorting three quarters of the rest.
    let wanted_bytes = own_bytes + 8 * named_bytes.saturating_sub(own_bytes);
    let least_bytes = config.least_for_ids(wanted_bytes, own_bytes > config.ids_bytes());
    Error::new(error.kind(), error.message())
        .with_minimum_bytes(least_bytes)
        .with("dram_budget_bytes", config.dram_budget_bytes)
        .with("remedy", format_args!("raise dram_budget to at least {least_bytes} bytes"))
}

// The plan has given rows to ids that training has not come to.
fn share_unknown(rows: &mut [i64], next_row: u64) {
    rows.iter_mut()
        .filter(|row| row.unsigned_abs() >= next_row)
        .for_each(|row| *row = SHARED_ROW as i64);
}

/// Returns the tables of the index of open table `name`, as a store without engine has them.
pub(crate) fn index_tables(name: &str) -> [TableSchema; 2] {
    [bucket_table(name), tierbed_vocab::free_table(name)]
}
