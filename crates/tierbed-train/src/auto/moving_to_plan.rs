//! Move of all rows from the window engine to a plan.
//!
//! The other way round than [`moving`](crate::auto::moving). Rows must stand as in the last
//! checkpoint: it is made again along the plan, and comes into force in place of the old one. The
//! window engine stays whole until then, so a plan that does not fit changes nothing. The disk
//! holds the rows twice for that time.

use std::sync::Arc;

use tierbed_core::store::Attachment;
use tierbed_core::{Budget, Error, ErrorKind, Reservation, Result, Schema, TableId};
use tierbed_io::{Folder, FsFolder};
use tierbed_kernels::FeatureLayout;
use tierbed_store::{kept, CommitLog};

use crate::auto::engine::{AutoEngine, State};
use crate::auto::follow::{remove_other_plans, Answer, PlanRequest};
use crate::auto::ids::IDS_PREFIX;
use crate::auto::moving::{has_moved, WINDOW_FOLDER};
use crate::auto::options::{Order, OrderConfig};
use crate::auto::planned::{name_least, room_of, Planned};
use crate::auto::tables::Tables;
use crate::auto::windowed::{Standing, Windowed};
use crate::engine::TrainEngine;
use crate::planned::{
    folder_bytes, Arrival, EpochPlan, NotArrived, PlannedEngine, RecordSink, EXTENTS_FILE,
};
use crate::window::changes::Changes;
use crate::window::Backend;

/// Most memory that reading the rows of a store may take beside what it has; and one part in so
/// many of the budget.
const READING_BYTES_MAX: u64 = 4 << 20;
const READING_SHARE: u64 = 16;

impl AutoEngine {
    /// Tells why rows that were trained without a plan stay where they are, if they do.
    ///
    /// # Errors
    /// Those of the folder.
    pub(crate) fn why_by_window(&self) -> Result<Option<String>> {
        let State::Windowed(windowed) = &self.state else { return Ok(None) };
        if !self.has_rows_without_plan() {
            return Ok(None);
        }
        // Rows that left a plan would come and go, with every epoch or every session.
        if let (true, Some(reason)) = (self.notes.fallback_count > 0, &self.notes.reason) {
            return Ok(Some(reason.clone()));
        }
        let is_inside = self.folder.is_some() && self.folder_inside()?.is_some();
        let schema = windowed.schema();
        let why = if self.folder.is_none() {
            "the store has no folder for a plan"
        } else if windowed.standing != Standing::Durable {
            "rows were trained without a plan before, and have changed since the last checkpoint: \
             call store.checkpoint before the batches of a plan"
        } else if !matches!(windowed.engine.backend(), Backend::File | Backend::Cold) {
            "rows were trained without a plan before, in a backend that they do not leave"
        } else if windowed.has_open_tables() {
            "rows of an open vocabulary were trained without a plan before"
        } else if windowed.engine.store.frozen.is_some() {
            "rows were trained without a plan before, and are being published"
        } else if schema.tables().iter().any(|table| rows_file(&table.name) == EXTENTS_FILE) {
            "a table named \"forward\" would share its file with the rows of a plan"
        } else if !self.may_hold_twice(windowed)? {
            "disk_quota does not hold the rows twice, as it must while they come to a plan"
        } else if is_inside && self.config.order != Order::Forward {
            "rows of this store have left a plan: open it with order=\"forward\" for another one"
        } else if self.keeps_inside()? {
            "checkpoints were kept since rows left a plan: drop them before another plan"
        } else {
            return Ok(None);
        };
        Ok(Some(why.to_owned()))
    }

    /// Tells whether rows were trained, and without a plan.
    pub(crate) fn has_rows_without_plan(&self) -> bool {
        matches!(&self.state, State::Windowed(windowed) if !windowed.is_untouched())
    }

    // Of two slots a page uses one at least.
    fn may_hold_twice(&self, windowed: &Windowed) -> Result<bool> {
        let Some(quota) = self.config.disk_quota_bytes else { return Ok(true) };
        let own_bytes = windowed.engine.stats().store.disk_bytes;
        let outside_bytes = if self.folder_inside()?.is_some() { own_bytes } else { 0 };
        let used_bytes = folder_bytes(&*self.folder()?, |_| true)? + outside_bytes;
        Ok(used_bytes + own_bytes / 2 <= quota)
    }

    fn keeps_inside(&self) -> Result<bool> {
        match self.folder_inside()? {
            Some(inside) => Ok(!kept::kept_names(&inside)?.is_empty()),
            None => Ok(false),
        }
    }

    // The folder that rows are in since they left a plan.
    fn folder_inside(&self) -> Result<Option<FsFolder>> {
        match has_moved(&*self.folder()?)? {
            true => FsFolder::open(self.window_folder()?).map(Some),
            false => Ok(None),
        }
    }

    /// Takes the memory to make a plan from the window engine, half of what its rows had.
    ///
    /// # Errors
    /// Those of writing its rows.
    pub(crate) fn memory_to_plan(&mut self) -> Result<Option<Reservation>> {
        let State::Windowed(windowed) = &mut self.state else { return Ok(None) };
        windowed.engine.release_buffer()?;
        let budget = windowed.engine.budget();
        budget.reserve("plan", budget.free_bytes() / 2).map(Some)
    }

    /// Checks that rows which were trained without a plan have the memory to come to that of
    /// `request`, if there is one: of several shards either all move or none.
    ///
    /// # Errors
    /// `Invalid` for a budget too small, naming the minimum; otherwise those of the folder.
    pub(crate) fn check_move_to_plan(
        &mut self,
        features: &FeatureLayout,
        request: &PlanRequest,
    ) -> Result<()> {
        let (shape, options) = self.shape_of(features, request)?;
        let folder = self.folder()?;
        if !self.has_rows_without_plan() {
            return Ok(());
        }
        let plan = self.find_sound(request, &shape, &options)?;
        let (State::Windowed(windowed), Some(plan)) = (&mut self.state, plan) else {
            return Ok(());
        };
        windowed.engine.release_buffer()?;
        let budget = windowed.engine.budget();
        let source_bytes = budget.limit_bytes() - rest_of(budget)?.bytes();
        let (schema, config) = (windowed.schema(), self.config.forward());
        let checked = PlannedEngine::check_arrival(&*folder, &plan, &config, schema, source_bytes);
        sweep_plan_rows(&*folder, schema);
        checked.map_err(|error| name_least(error, &self.config))
    }

    /// Moves every row to its first use along `plan`. Where the plan does not fit memory or disk,
    /// it is a refusal: the order of now may manage.
    ///
    /// # Errors
    /// As long as the window engine is in force, those of reading it; behind that the store must
    /// be reopened.
    pub(crate) fn move_to_plan(&mut self, plan: EpochPlan) -> Result<Answer> {
        let (folder, inside) = (self.folder()?, self.folder_inside()?);
        let name = plan.file().to_owned();
        let State::Windowed(windowed) = &mut self.state else {
            return Err(Error::invalid("no rows were trained without a plan"));
        };
        let moved = move_rows(&folder, windowed, plan, &self.config, inside.is_some());
        match moved {
            Ok((planned, row_count)) => {
                let schema = windowed.schema().clone();
                if let Some(inside) = &inside {
                    // Until here the rows inside are in force.
                    let none = CommitLog::none_in_force();
                    let written = inside.write_atomic(CommitLog::CURRENT, none.as_bytes());
                    if let Err(error) = written {
                        self.state = State::lost(&error);
                        return Err(error);
                    }
                }
                self.state = State::Planned(Box::new(planned));
                sweep_window(&folder, &schema)?;
                remove_other_plans(&*folder, &name)?;
                self.notes.reason = None;
                self.notes.replan_count += 1;
                self.notes.rows_moved += row_count;
                Ok(self.following())
            }
            Err(NotArrived::AsBefore(error)) => {
                sweep_plan_rows(&*folder, windowed.schema());
                match (error.kind(), self.config.order) {
                    (ErrorKind::Invalid | ErrorKind::NoSpace, Order::Auto) => {
                        Ok(Answer::Refused { reason: error.to_string() })
                    }
                    _ => Err(error),
                }
            }
            Err(NotArrived::InDoubt(error)) => {
                self.state = State::lost(&error);
                Err(error)
            }
        }
    }
}

// Returns the engine along the plan, and how many rows came to it.
fn move_rows(
    folder: &Arc<dyn Folder>,
    windowed: &mut Windowed,
    plan: EpochPlan,
    config: &OrderConfig,
    is_inside: bool,
) -> std::result::Result<(Planned, u64), NotArrived> {
    assert_eq!(windowed.standing, Standing::Durable, "rows changed behind the last checkpoint");
    let aside = Budget::new(config.aside_bytes().min(config.dram_budget_bytes));
    let left = Left::of(windowed, &aside).map_err(NotArrived::AsBefore)?;
    if is_inside {
        // Kept checkpoints may lie there without it.
        begin_commits(&**folder).map_err(NotArrived::AsBefore)?;
    }
    let engine = &mut windowed.engine;
    let (budget, outside_bytes) = (
        engine.budget().clone(),
        match is_inside {
            true => engine.stats().store.disk_bytes,
            false => 0,
        },
    );
    let rest = rest_of(&budget).map_err(NotArrived::AsBefore)?;
    let table_count = left.tables.schema.tables().len() as u32;
    let mut row_count = 0;
    let source = &mut |sink: &mut RecordSink<'_>| {
        row_count = 0;
        (0..table_count).map(TableId).try_for_each(|table| {
            engine.scan_rows(table, &mut |row, record| {
                row_count += 1;
                sink(table, row, record)
            })
        })
    };
    let attachments: Vec<_> =
        left.attached.iter().map(|(name, bytes)| Attachment { name, bytes }).collect();
    let Tables { schema, hypers } = left.tables;
    let arrival = Arrival {
        schema,
        hypers,
        source,
        source_bytes: budget.limit_bytes() - rest.bytes(),
        outside_bytes,
        number: left.number,
        name: &left.name,
        attachments: &attachments,
        changes: left.changes,
    };
    let arrived = PlannedEngine::arrive(folder, plan, &config.forward(), arrival);
    let arrived = arrived.map_err(|failed| match failed {
        NotArrived::AsBefore(error) => NotArrived::AsBefore(name_least(error, config)),
        in_doubt @ NotArrived::InDoubt(_) => in_doubt,
    })?;
    let planned = Planned::around(arrived, aside).map_err(NotArrived::InDoubt)?;
    Ok((Planned { is_checked: true, ..planned }, row_count))
}

// Takes what reading rows does not need from the window engine: it belongs to the other one.
fn rest_of(budget: &Budget) -> Result<Reservation> {
    let (limit_bytes, free_bytes) = (budget.limit_bytes(), budget.free_bytes());
    let reading_bytes = free_bytes.min(READING_BYTES_MAX).min(limit_bytes / READING_SHARE);
    budget.reserve("rows of a plan", free_bytes - reading_bytes)
}

/// What the window engine leaves beside its rows.
struct Left {
    tables: Tables,
    /// Of the last checkpoint.
    number: u64,
    name: String,
    /// Name and bytes.
    attached: Vec<(String, Vec<u8>)>,
    changes: Changes,
}

impl Left {
    fn of(windowed: &mut Windowed, aside: &Budget) -> Result<Self> {
        windowed.engine.release_buffer()?;
        let tables = windowed.tables();
        let mut attached = Vec::new();
        for name in windowed.attachment_names()? {
            let bytes = windowed.attachment(&name)?;
            let missing = || Error::corruption("an attachment is missing").with("name", &name);
            attached.push((name.clone(), bytes.ok_or_else(missing)?));
        }
        let Some(last) = windowed.last_checkpoint() else {
            panic!("rows that are durable have a checkpoint")
        };
        let (number, name) = (last.number, last.name.clone());
        let noted = windowed.engine.store.changes.encode();
        let changes = Changes::open(Ok(noted), &tables.schema, room_of(aside))?;
        Ok(Self { tables, number, name, attached, changes })
    }
}

// A folder whose rows are in one inside may have no commits.
fn begin_commits(folder: &dyn Folder) -> Result<()> {
    match folder.read(CommitLog::CURRENT)? {
        Some(_) => Ok(()),
        None => folder.write_atomic(CommitLog::CURRENT, CommitLog::none_in_force().as_bytes()),
    }
}

fn rows_file(table: &str) -> String {
    format!("{table}.rows")
}

/// Removes what the window engine left in the folder of a store that follows a plan. Files that
/// cannot be removed cost space, not correctness.
///
/// # Errors
/// Those of looking into the folder inside; `Corruption` when its commit is damaged.
pub(crate) fn sweep_window(folder: &Arc<dyn Folder>, schema: &Schema) -> Result<()> {
    let files = schema.tables().iter().map(|table| rows_file(&table.name));
    for file in files.filter(|file| file != EXTENTS_FILE && !file.starts_with(IDS_PREFIX)) {
        let _ = folder.remove(&file);
    }
    let inside = folder.path().map(|path| path.join(WINDOW_FOLDER));
    let Some(inside) = inside.filter(|inside| inside.is_dir()) else { return Ok(()) };
    let inside = FsFolder::open(inside)?;
    let is_over = match inside.read(CommitLog::CURRENT)? {
        Some(current) => CommitLog::names_none(&current)?,
        None => false,
    };
    if !is_over {
        return Ok(());
    }
    for name in inside.list()? {
        // It says that nothing is in force, as long as anything lies there.
        if name != CommitLog::CURRENT {
            let _ = inside.remove(&name);
        }
    }
    Ok(())
}

/// Removes the rows of a plan that never came into force from the folder of a store of tables
/// `schema` that follows none.
pub(crate) fn sweep_plan_rows(folder: &dyn Folder, schema: &Schema) {
    if schema.tables().iter().all(|table| rows_file(&table.name) != EXTENTS_FILE) {
        let _ = folder.remove(EXTENTS_FILE);
    }
}
