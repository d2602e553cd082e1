//! Open tables in whichever order: what is asked of the window engine, of the index beside a plan,
//! or of nobody yet.

use tierbed_core::{Bags, Error, Result, Schema, TableId, TableSchema};
use tierbed_kernels::FeatureLayout;
use tierbed_vocab::{Evicted, Policy, State as VocabularyState, SHARED_ROW};

use crate::auto::engine::{AutoEngine, State};
use crate::auto::follow::{remove_plans, tables_of};
use crate::auto::ids::{index_tables, PlannedIds};
use crate::auto::planned::find_table;
use crate::auto::tables::Tables;
use crate::engine::TrainEngine;
use crate::window::vocabularies::{not_open, VocabularyStats};
use crate::window::Translate;

/// Rows of an open table before ids have any: the shared row.
const ROWS_MIN: u64 = SHARED_ROW + 1;

impl AutoEngine {
    /// Adds a table of open vocabulary, or finds it; `table.row_count` is ignored, the table grows
    /// with its ids. The policy given last counts, from the next plan or batch on.
    ///
    /// # Errors
    /// `Invalid` when the stored table of that name differs or is not open, or rows are planned
    /// and the table is new; `Unsupported` when tables of the backend cannot grow.
    pub fn add_open_table(&mut self, table: TableSchema, policy: Policy) -> Result<TableId> {
        policy.check()?;
        let name = table.name.clone();
        let id = match &mut self.state {
            State::Undecided(tables) => {
                let is_new = tables.schema.id_of(&name).is_none();
                let id = tables.add(with_rows(table, &tables.schema, ROWS_MIN))?;
                match (is_new, self.open.contains_key(&id)) {
                    (true, _) => {
                        for own in index_tables(&name) {
                            tables.add(own)?;
                        }
                    }
                    (false, true) => {}
                    (false, false) => return Err(not_open(&name)),
                }
                id
            }
            State::Planned(_) | State::Planless(_) => {
                let schema = self.schema().clone();
                let id = find_table(&schema, &with_rows(table, &schema, ROWS_MIN))?;
                let Some(ids) = self.ids.as_mut().filter(|_| self.open.contains_key(&id)) else {
                    return Err(not_open(&name));
                };
                ids.add(&schema, id, policy)?;
                id
            }
            _ => {
                let Some(windowed) = self.windowed_mut()? else { return Err(not_open(&name)) };
                windowed.engine.add_open_table(table, policy)?
            }
        };
        self.open.insert(id, policy);
        self.config.has_open_tables = true;
        Ok(id)
    }

    /// Writes to `rows`, `[E]`, the row of every id of `bags`; ids of tables that are not open
    /// are rows already. Rows stay good until the next eviction.
    ///
    /// Along a plan the ids to train on must be its next batch, which says what rows they have.
    ///
    /// # Errors
    /// As [`WindowEngine::translate`](crate::window::WindowEngine::translate); `Invalid` for a
    /// batch that was not planned, where the plan may not be left.
    pub fn translate(
        &mut self,
        layout: &FeatureLayout,
        bags: &Bags<'_>,
        how: Translate,
        rows: &mut [i64],
    ) -> Result<()> {
        if how == Translate::Find {
            return self.find_rows(layout, bags, rows);
        }
        if let (Some(_), State::Planned(planned)) = (&self.ids, &mut self.state) {
            if planned.engine.translate(layout, bags, rows)? {
                planned.engine.note_reached(layout, bags, rows);
                return Ok(());
            }
            let error = planned.engine.other_batch(layout, bags)?;
            self.leave_plan(error)?;
        }
        self.by_number()?.translate(layout, bags, how, rows)
    }

    // A batch that was not planned moves the rows, if that is wished.
    fn leave_plan(&mut self, error: Error) -> Result<()> {
        match self.config.on_mismatch().backend() {
            Some(_) => self.move_to_window(&error.to_string()),
            None => Err(error),
        }
    }

    fn find_rows(
        &mut self,
        layout: &FeatureLayout,
        bags: &Bags<'_>,
        rows: &mut [i64],
    ) -> Result<()> {
        if let (Some(ids), State::Planned(planned)) = (&mut self.ids, &mut self.state) {
            layout.check_shape(bags, layout.output_len(bags))?;
            let tables = tables_of(layout);
            ids.find_all(&tables, bags, rows, &|table| planned.engine.next_row(table))?;
            return planned.engine.confirm(layout, bags, rows);
        }
        match self.windowed_mut()? {
            Some(windowed) => windowed.engine.translate(layout, bags, Translate::Find, rows),
            // A plan without open tables: ids are rows.
            None => {
                rows.copy_from_slice(bags.indices);
                Ok(())
            }
        }
    }

    /// Passes the next batch of the plan, of ids, without a step.
    ///
    /// # Errors
    /// As [`TrainEngine::skip`].
    pub(crate) fn skip_ids(&mut self, layout: &FeatureLayout, ids: &Bags<'_>) -> Result<()> {
        let State::Planned(planned) = &mut self.state else { return Ok(()) };
        let mut rows = vec![0; ids.indices.len()];
        if planned.engine.translate(layout, ids, &mut rows)? {
            return planned.skip(layout, &Bags { indices: &rows, ..*ids });
        }
        let error = planned.engine.other_batch(layout, ids)?;
        self.leave_plan(error)
    }

    /// Replaces `ids`, any number, of table `table` by their rows; see
    /// [`translate`](Self::translate). To give rows to ids, a plan is left.
    ///
    /// # Errors
    /// As [`translate`](Self::translate).
    pub fn translate_ids(&mut self, table: TableId, how: Translate, ids: &mut [i64]) -> Result<()> {
        self.schema().table(table)?;
        if let (Some(index), State::Planned(planned)) = (&mut self.ids, &self.state) {
            if how == Translate::Find {
                return index.find(table, planned.engine.next_row(table), ids);
            }
            self.leave_plan(along_a_plan("rows are given to ids while a plan is made"))?;
        }
        match how {
            Translate::Train { .. } => self.by_number()?.translate_ids(table, how, ids),
            Translate::Find => match self.windowed_mut()? {
                Some(windowed) => windowed.engine.translate_ids(table, how, ids),
                // A plan without open tables.
                None => Ok(()),
            },
        }
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
        self.schema().table(table)?;
        match (&mut self.ids, &self.state) {
            (Some(ids), State::Planned(planned)) => {
                ids.visit_ids(table, planned.engine.next_row(table), visit)
            }
            _ => match self.windowed_mut()? {
                Some(windowed) => windowed.engine.visit_ids(table, visit),
                None => Ok(()),
            },
        }
    }

    /// Takes the rows of ids of open table `table` that its policy judges at time `now`. Along a
    /// plan ids keep their rows, unless a policy was given since that takes them: the plan is left
    /// then.
    ///
    /// # Errors
    /// As [`WindowEngine::evict`](crate::window::WindowEngine::evict).
    pub fn evict(&mut self, table: TableId, now: u32) -> Result<Evicted> {
        let is_plain = self.open.get(&table).is_some_and(Policy::is_plain);
        if self.ids.is_some() && matches!(self.state, State::Planned(_)) {
            if is_plain {
                return Ok(Evicted::default());
            }
            self.leave_plan(along_a_plan("ids keep their rows along a plan"))?;
        }
        self.by_number()?.evict(table, now)
    }

    /// Returns what open vocabularies hold.
    pub(crate) fn open_vocabularies(&self) -> VocabularyStats {
        let tables = |tables: &Tables| {
            let all = (0..).map(TableId).zip(tables.schema.tables());
            let states = all.filter_map(|(id, table)| {
                Some(VocabularyState {
                    table: table.name.clone(),
                    policy: *self.open.get(&id)?,
                    next_row: ROWS_MIN,
                    free_count: 0,
                    id_count: 0,
                    waiting_count: 0,
                })
            });
            VocabularyStats { tables: states.collect(), ..VocabularyStats::default() }
        };
        match (&self.state, &self.ids) {
            (State::Windowed(windowed), _) => windowed.vocabularies(),
            (State::Planned(planned), Some(ids)) => {
                ids.states_below(&|table| planned.engine.next_row(table))
            }
            (State::Planless(_), Some(ids)) => ids.states(),
            (State::Undecided(undecided), _) => tables(undecided),
            _ => VocabularyStats::default(),
        }
    }

    /// Tells why no plan can be made of batches of these features, if that is so.
    ///
    /// # Errors
    /// `Invalid` for an unknown table.
    pub(crate) fn no_plan_of_ids(&self, features: &FeatureLayout) -> Result<Option<String>> {
        let is_plain = |table: &TableId| self.open.get(table).is_none_or(Policy::is_plain);
        if let Some(table) = features.tables().into_iter().find(|table| !is_plain(table)) {
            let name = &self.schema().table(table)?.name;
            return Ok(Some(format!(
                "ids of table {name} wait for their rows or lose them, as its policy says, which \
                 no plan knows before"
            )));
        }
        let is_short = !self.open.is_empty() && self.config.forward_bytes() == 0;
        Ok(is_short.then(|| {
            let least_bytes = self.config.least_bytes(1);
            format!(
                "dram_budget has no room for an index of ids beside a plan: raise it above \
                 {least_bytes} bytes"
            )
        }))
    }

    /// Opens the index beside the plan that the store follows, if it has open tables.
    ///
    /// # Errors
    /// `Corruption` when the index is missing or of other tables.
    pub(crate) fn open_ids(&mut self) -> Result<()> {
        if !matches!(self.state, State::Planned(_) | State::Planless(_)) {
            return Ok(());
        }
        let schema = self.schema().clone();
        if !schema.tables().iter().any(TableSchema::is_own) {
            return Ok(());
        }
        let folder = self.folder()?;
        if !PlannedIds::exists(&folder)? {
            return Err(Error::corruption("the index of ids is missing").with(
                "remedy",
                "bring back the files of the store's folder whose names begin with vocabulary.",
            ));
        }
        let mut ids = PlannedIds::open(&folder, &self.config, self.config.ids_bytes())?;
        self.open.extend(ids.find_tables(&schema)?);
        self.ids = Some(ids);
        Ok(())
    }

    /// Opens the index that a plan of an undecided store may have left.
    ///
    /// # Errors
    /// As [`PlannedIds::open`].
    pub(crate) fn find_ids(&mut self) -> Result<()> {
        let State::Undecided(tables) = &self.state else { return Ok(()) };
        if self.open.is_empty() || self.ids.is_some() {
            return Ok(());
        }
        if PlannedIds::exists(&self.folder()?)? {
            self.ids = Some(self.ids_of(tables, self.config.ids_bytes())?);
        }
        Ok(())
    }

    // Opens the index in the folder, or begins one, for the open ones of `tables`.
    fn ids_of(&self, tables: &Tables, memory_bytes: u64) -> Result<PlannedIds> {
        let mut ids = PlannedIds::open(&self.folder()?, &self.config, memory_bytes)?;
        for (&table, &policy) in &self.open {
            ids.add(&tables.schema, table, policy)?;
        }
        Ok(ids)
    }

    /// Begins an index for the plan of an undecided store; what was planned before is gone.
    ///
    /// # Errors
    /// As [`PlannedIds::open`].
    pub(crate) fn begin_ids(&mut self) -> Result<()> {
        if !matches!(self.state, State::Undecided(_)) || self.open.is_empty() {
            return Ok(());
        }
        self.drop_ids()?;
        // Their rows are those of ids that are forgotten.
        remove_plans(&*self.folder()?)?;
        let State::Undecided(tables) = &self.state else { return Ok(()) };
        let mut ids = self.ids_of(tables, self.config.ids_planning_bytes())?;
        ids.checkpoint()?;
        self.ids = Some(ids);
        Ok(())
    }

    /// Makes the ids of a plan durable. The first plan of a store had more memory for them, which
    /// rows need from now on.
    ///
    /// # Errors
    /// As [`PlannedIds::checkpoint`] and [`PlannedIds::open`].
    pub(crate) fn commit_ids(&mut self) -> Result<()> {
        let Some(ids) = &mut self.ids else { return Ok(()) };
        ids.checkpoint()?;
        let State::Undecided(tables) = &self.state else { return Ok(()) };
        // The folder belongs to one at a time.
        self.ids = None;
        self.ids = Some(self.ids_of(tables, self.config.ids_bytes())?);
        Ok(())
    }

    /// Forgets the index beside a plan: the window engine has its own, or nothing was trained.
    ///
    /// # Errors
    /// Those of the folder.
    pub(crate) fn drop_ids(&mut self) -> Result<()> {
        self.ids = None;
        match &self.folder {
            Some(folder) if self.config.has_open_tables => PlannedIds::remove(folder),
            _ => Ok(()),
        }
    }

    /// Returns `tables` as before ids had rows.
    pub(crate) fn without_ids(&self, mut tables: Tables) -> Result<Tables> {
        let mut all = tables.schema.tables().to_vec();
        for (id, table) in (0..).map(TableId).zip(&mut all) {
            if self.open.contains_key(&id) {
                table.row_count = ROWS_MIN;
            }
        }
        tables.schema = Schema::new(all)?;
        Ok(tables)
    }

    /// Returns the rows of each table that a plan made now is for.
    pub(crate) fn planned_row_count(&self, table: TableId, row_count: u64) -> u64 {
        let needed = self.ids.as_ref().and_then(|ids| ids.row_count(table));
        needed.map_or(row_count, |needed| needed.max(row_count))
    }
}

// `table` with as many rows as `schema` says, else `row_count`.
fn with_rows(table: TableSchema, schema: &Schema, row_count: u64) -> TableSchema {
    let known = schema.id_of(&table.name).and_then(|id| schema.table(id).ok());
    TableSchema { row_count: known.map_or(row_count, |known| known.row_count), ..table }
}

// Says that something takes leaving the plan.
fn along_a_plan(what: &'static str) -> Error {
    Error::invalid(what).with("remedy", "open the store with order=\"auto\", which leaves the plan")
}
