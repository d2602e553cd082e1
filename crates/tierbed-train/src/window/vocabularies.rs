//! Raw ids in, rows out: the open tables of an engine.
//!
//! [`WindowEngine::translate`] turns the ids of a batch into rows once; lookup, update, prefetch,
//! and the plans of the forward order then see dense tables. Only translating *for training* counts
//! appearances and gives rows; translating to *find* changes nothing, so looking ahead cannot
//! change which row an id gets. Index pages are rows of hidden tables in the same store: one
//! commit holds both (`tierbed-vocab`).

#![expect(
    clippy::indexing_slicing,
    reason = "vocabularies are counted, positions are those of the batch"
)]

use serde::Serialize;
use tierbed_core::{
    Bags, Error, Reservation, Result, RowStore, Schema, TableId, TableSchema, TrainStore,
};
use tierbed_kernels::FeatureLayout;
use tierbed_vocab::attachments::{States, DIRECTORY, STATES};
use tierbed_vocab::{
    Evicted, FreedSink, PageCache, Policy, Scratch, State, Vocabulary, BATCH_BYTES_PER_INDEX,
};

use crate::window::engine::WindowEngine;
use crate::window::options::WindowConfig;
use crate::window::vocabulary_parts::write_initial;

/// Rows of an open table at first.
const ROWS_MIN: u64 = 1024;
/// The share of the budget for index pages, unless told otherwise.
const PAGES_SHARE: u64 = 16;

/// What a batch is translated for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Translate {
    /// To look: ids without a row read the shared row, nothing changes.
    Find,
    /// To train: each different id appears once more, new ids get rows as their table's policy
    /// says. `now` is the time in the unit of the policy's `ttl`.
    Train {
        /// The time.
        now: u32,
    },
}

/// What open vocabularies hold, and what finding rows cost.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct VocabularyStats {
    /// One per open table.
    pub tables: Vec<State>,
    /// Index pages asked for.
    pub pages_asked: u64,
    /// Index pages read.
    pub pages_read: u64,
}

/// The open tables and the memory they share.
#[derive(Debug)]
pub(crate) struct Vocabularies {
    all: Vec<Vocabulary>,
    pages: Option<PageCache>,
    pages_bytes: u64,
    scratch: Scratch,
    scratch_memory: Option<Reservation>,
}

impl Vocabularies {
    pub(crate) fn new(config: &WindowConfig) -> Self {
        let pages_bytes = config.dram_budget_bytes / PAGES_SHARE;
        Self {
            all: Vec::new(),
            pages: None,
            pages_bytes: config.vocabulary_bytes.unwrap_or(pages_bytes),
            scratch: Scratch::default(),
            scratch_memory: None,
        }
    }

    /// Returns the vocabulary of the table called `name`.
    pub(crate) fn find(&self, name: &str) -> Option<&Vocabulary> {
        self.all.iter().find(|vocabulary| vocabulary.state().table == name)
    }

    fn position(&self, table: TableId) -> Option<usize> {
        self.all.iter().position(|vocabulary| vocabulary.table() == table)
    }

    pub(crate) fn stats(&self) -> VocabularyStats {
        let (pages_asked, pages_read) = self.pages.as_ref().map_or((0, 0), PageCache::counts);
        let tables = self.all.iter().map(|vocabulary| vocabulary.state().clone()).collect();
        VocabularyStats { tables, pages_asked, pages_read }
    }
}

/// The index of an open table, and what it needs.
pub(super) struct WithIndex<'a> {
    pub(super) index: &'a mut Vocabulary,
    pub(super) pages: &'a mut PageCache,
    pub(super) store: &'a mut dyn TrainStore,
}

/// Says that a dense table has the name.
pub(crate) fn not_open(name: &str) -> Error {
    Error::invalid("table exists and its vocabulary is not open")
        .with("table", name)
        .with("remedy", "give its num_embeddings, or choose another name")
}

/// Says that a dense table cannot have the name of an open table.
pub(crate) fn name_of_open_table(name: &str) -> Error {
    Error::invalid("name belongs to an open table or to its index")
        .with("table", name)
        .with("remedy", "leave num_embeddings away, or choose another name")
}

impl WindowEngine {
    /// Adds a table of open vocabulary, or finds it; `table.row_count` is ignored, the table
    /// grows with its ids. The policy given last counts.
    ///
    /// # Errors
    /// `Invalid` when the stored table of that name differs or is not open, `Unsupported` when
    /// tables of the backend cannot grow.
    pub fn add_open_table(&mut self, table: TableSchema, policy: Policy) -> Result<TableId> {
        self.poison.check()?;
        policy.check()?;
        if let Some(id) = self.schema.id_of(&table.name) {
            let stored_rows = self.schema.table(id)?.row_count;
            let Some(at) = self.vocabularies.position(id) else {
                return Err(not_open(&table.name).with("num_embeddings", stored_rows));
            };
            let id = self.store.add_table(TableSchema { row_count: stored_rows, ..table })?;
            if let Some(vocabulary) = self.vocabularies.all.get_mut(at) {
                vocabulary.set_policy(policy)?;
            }
            return Ok(id);
        }
        if table.is_own() {
            return Err(Error::invalid("name belongs to the index of an open table")
                .with("table", &table.name)
                .with("remedy", "choose another name"));
        }
        self.release_buffer()?;
        let result = self.create_vocabulary(table, policy);
        self.poison.on_any(result)
    }

    fn create_vocabulary(&mut self, table: TableSchema, policy: Policy) -> Result<TableId> {
        self.ensure_pages()?;
        let id = self.store.add_table(TableSchema { row_count: ROWS_MIN, ..table })?;
        // Says so now if tables of this backend cannot grow.
        self.store.grow_table(id, ROWS_MIN)?;
        if let Some(pages) = &mut self.vocabularies.pages {
            let store = &mut self.store;
            let made = Vocabulary::create(pages, store, id, policy, &self.budget)?;
            self.vocabularies.all.push(made);
        }
        self.refresh_schema();
        Ok(id)
    }

    fn ensure_pages(&mut self) -> Result<()> {
        if self.vocabularies.pages.is_none() {
            let pages = PageCache::new(&self.budget, self.vocabularies.pages_bytes)?;
            self.vocabularies.pages = Some(pages);
        }
        Ok(())
    }

    /// Returns what is known of open table `table`; `None` when its vocabulary is not open.
    #[must_use]
    pub fn vocabulary(&self, table: TableId) -> Option<&State> {
        let at = self.vocabularies.position(table)?;
        self.vocabularies.all.get(at).map(Vocabulary::state)
    }

    /// Writes to `rows`, `[E]`, the row of every id of `bags`; ids of tables that are not open
    /// are rows already.
    ///
    /// Rows stay good until the next [`evict`](Self::evict).
    ///
    /// # Errors
    /// `Invalid` for shapes, or when the budget does not reach for more rows; otherwise the
    /// store's. An error in the middle of training poisons the engine.
    pub fn translate(
        &mut self,
        layout: &FeatureLayout,
        bags: &Bags<'_>,
        how: Translate,
        rows: &mut [i64],
    ) -> Result<()> {
        self.poison.check()?;
        if rows.len() != bags.indices.len() || bags.feature_count != layout.features().len() {
            return Err(Error::invalid(
                "translation needs one row per index, and the layout's features",
            )
            .with("indices", bags.indices.len())
            .with("rows", rows.len()));
        }
        rows.copy_from_slice(bags.indices);
        for table in layout.tables() {
            let Some(at) = self.vocabularies.position(table) else { continue };
            let features = layout.features().iter().enumerate();
            let ranges: Vec<_> = features
                .filter(|(_, feature)| feature.table == table)
                .map(|(feature, _)| layout.range(bags, feature))
                .collect();
            self.translate_ranges(at, &ranges, how, rows)?;
        }
        Ok(())
    }

    /// Replaces `ids`, any number, of table `table` by their rows; see
    /// [`translate`](Self::translate).
    ///
    /// # Errors
    /// As [`translate`](Self::translate).
    pub fn translate_ids(&mut self, table: TableId, how: Translate, ids: &mut [i64]) -> Result<()> {
        self.poison.check()?;
        self.schema.table(table)?;
        if u32::try_from(ids.len()).is_err() {
            return Err(Error::invalid("a batch holds at most 2^32 - 1 indices"));
        }
        let Some(at) = self.vocabularies.position(table) else { return Ok(()) };
        self.translate_ranges(at, std::slice::from_ref(&(0..ids.len())), how, ids)
    }

    // Replaces the ids at `ranges` of `rows` by rows of vocabulary `at`.
    fn translate_ranges(
        &mut self,
        at: usize,
        ranges: &[std::ops::Range<usize>],
        how: Translate,
        rows: &mut [i64],
    ) -> Result<()> {
        let index_count: usize = ranges.iter().map(ExactSizeIterator::len).sum();
        assert!(index_count <= rows.len(), "{index_count} ids are translated of {}", rows.len());
        self.ensure_scratch(index_count)?;
        self.ensure_pages()?;
        let scratch = &mut self.vocabularies.scratch;
        scratch.clear();
        for range in ranges {
            let ids = &rows[range.clone()];
            for (&id, position) in ids.iter().zip(range.start..) {
                scratch.push(id, position as u32);
            }
        }
        let id_count = scratch.sort();
        if matches!(how, Translate::Train { .. }) {
            self.ensure_room(at, id_count)?;
        }
        let Vocabularies { all, pages, scratch, .. } = &mut self.vocabularies;
        let Some(pages) = pages else { panic!("pages of the index are there") };
        let (vocabulary, store) = (&mut all[at], &mut self.store);
        let result = match how {
            Translate::Find => vocabulary.find(pages, store, scratch),
            Translate::Train { now } => vocabulary.train(pages, store, scratch, now),
        };
        if matches!(how, Translate::Train { .. }) {
            self.poison.on_any(result)?;
            // Splits may have lengthened the index.
            if self.schema.as_ref() != self.store.schema() {
                self.refresh_schema();
            }
        } else {
            result?;
        }
        self.vocabularies.scratch.for_each(|position, row| {
            rows[position as usize] = row as i64;
        });
        Ok(())
    }

    // Tables, index and directory must have room before anything is changed. The row buffer
    // holds all memory that is free, so it gives way; tables double, so that is rare.
    fn ensure_room(&mut self, at: usize, id_count: u64) -> Result<()> {
        let growth = self.vocabularies.all[at].growth(&self.schema, id_count)?;
        let Some(growth) = growth else { return Ok(()) };
        self.release_buffer()?;
        self.vocabularies.all[at].grow(&mut self.store, growth)?;
        self.refresh_schema();
        Ok(())
    }

    fn ensure_scratch(&mut self, index_count: usize) -> Result<()> {
        let wanted = (index_count * BATCH_BYTES_PER_INDEX) as u64;
        let held = self.vocabularies.scratch_memory.as_ref().map_or(0, Reservation::bytes);
        if wanted <= held {
            return Ok(());
        }
        self.release_buffer()?;
        self.vocabularies.scratch_memory = None;
        self.vocabularies.scratch = Scratch::default();
        let memory = self.budget.reserve("vocabulary batch", wanted.next_power_of_two())?;
        self.vocabularies.scratch_memory = Some(memory);
        Ok(())
    }

    /// Takes the rows of ids of open table `table` that its policy judges at time `now`.
    ///
    /// Freed rows start again from their initial values, without optimizer state, whoever gets
    /// them; an id that comes back is a new one. To be called between steps.
    ///
    /// # Errors
    /// `Invalid` when the table's vocabulary is not open; otherwise the store's, and the engine
    /// is poisoned.
    pub fn evict(&mut self, table: TableId, now: u32) -> Result<Evicted> {
        let schema = self.schema.clone();
        self.evict_with(table, now, &mut |store, rows| write_initial(store, &schema, table, rows))
    }

    /// As [`evict`](Self::evict), where `freed` gives rows their initial values.
    pub(super) fn evict_with(
        &mut self,
        table: TableId,
        now: u32,
        freed: &mut FreedSink<'_>,
    ) -> Result<Evicted> {
        self.with_index(table)?;
        // What is dirty in the buffer must not be written over the initial values later.
        self.release_buffer()?;
        let WithIndex { index, pages, store } = self.with_index(table)?;
        let result = index.evict(pages, store, now, freed);
        self.refresh_schema();
        self.poison.on_any(result)
    }

    /// Returns the index of open table `table`, and what it needs.
    ///
    /// # Errors
    /// `Invalid` when the table is not open or the budget does not reach.
    pub(super) fn with_index(&mut self, table: TableId) -> Result<WithIndex<'_>> {
        self.poison.check()?;
        let Some(at) = self.vocabularies.position(table) else {
            return Err(Error::invalid("table has no open vocabulary")
                .with("table", &self.schema.table(table)?.name));
        };
        self.ensure_pages()?;
        let Vocabularies { all, pages, .. } = &mut self.vocabularies;
        let Some(pages) = pages else { panic!("pages of the index are there") };
        Ok(WithIndex { index: &mut all[at], pages, store: &mut self.store })
    }

    /// Makes room for `id_count` ids more in the index of open table `table`.
    ///
    /// # Errors
    /// As [`with_index`](Self::with_index), otherwise the store's.
    pub(super) fn make_id_room(&mut self, table: TableId, id_count: u64) -> Result<()> {
        self.with_index(table)?;
        let at = self.vocabularies.position(table);
        at.map_or(Ok(()), |at| self.ensure_room(at, id_count))
    }

    /// Visits (id, row) of every id of open table `table` that has a row, in hash order.
    ///
    /// # Errors
    /// As [`translate`](Self::translate), and the visitor's.
    pub fn visit_ids(
        &mut self,
        table: TableId,
        visit: &mut dyn FnMut(i64, u64) -> Result<()>,
    ) -> Result<()> {
        self.poison.check()?;
        self.ensure_pages()?;
        let Some(at) = self.vocabularies.position(table) else { return Ok(()) };
        let Vocabularies { all, pages, .. } = &mut self.vocabularies;
        match (all.get(at), pages) {
            (Some(vocabulary), Some(pages)) => vocabulary.scan(pages, &mut self.store, visit),
            _ => Ok(()),
        }
    }

    /// Writes changed index pages to the store; returns what must be committed with them.
    pub(crate) fn flush_vocabularies(&mut self) -> Result<Vec<(String, Vec<u8>)>> {
        let Vocabularies { all, pages, .. } = &mut self.vocabularies;
        if all.is_empty() {
            return Ok(Vec::new());
        }
        if let Some(pages) = pages {
            pages.flush(&mut self.store)?;
        }
        let states = States { vocabularies: all.iter().map(|one| one.state().clone()).collect() };
        let json = serde_json::to_vec(&states).map_err(|cause| {
            Error::invalid("vocabularies cannot be written").with("cause", cause)
        })?;
        let directories = all.iter().enumerate();
        let directories = directories
            .map(|(at, vocabulary)| (format!("{DIRECTORY}{at}"), vocabulary.directory_bytes()));
        Ok(std::iter::once((STATES.to_owned(), json)).chain(directories).collect())
    }

    /// Takes over the vocabularies of the last checkpoint.
    pub(crate) fn restore_vocabularies(&mut self) -> Result<()> {
        let Some(json) = self.store.attachment(STATES)? else { return Ok(()) };
        let damaged =
            || Error::corruption("the engine's attachment is damaged").with("name", STATES);
        let states: States =
            serde_json::from_slice(&json).map_err(|cause| damaged().with("cause", cause))?;
        let schema: Schema = self.store.schema().clone();
        for (at, state) in states.vocabularies.into_iter().enumerate() {
            let name = format!("{DIRECTORY}{at}");
            let bytes = self.store.attachment(&name)?.ok_or_else(damaged)?;
            self.vocabularies.all.push(Vocabulary::open(&schema, state, &bytes, &self.budget)?);
        }
        self.ensure_pages()
    }
}
