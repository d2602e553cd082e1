//! Which engine has the rows, and what does each call mean to it?

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::planned::PlannedEngine;
use crate::window::{Backend, Durability, Hyper, WindowEngine};
use tierbed_core::store::{Attachment, CommitInfo};
use tierbed_core::{Bags, Error, ErrorKind, Result, Schema, TableId, TableSchema};
use tierbed_io::{Folder, FsFolder, HeldFolder};
use tierbed_kernels::{Destination, FeaturePlan, Grads};
use tierbed_store::kept::{finish_restore, kept_names, verify_checkpoint};
use tierbed_store::CommitLog;

use crate::auto::follow::{MadePlan, Making};
use crate::auto::moving::{self, WINDOW_FOLDER};
use crate::auto::options::{Order, OrderConfig};
use crate::auto::planless::{self, Planless};
use crate::auto::planned::{find_table, Planned};
use crate::folders::check_folder;

/// Training in whichever order is known. Calls need `&mut`: one at a time, in a fixed order, so
/// that equal calls give equal bits.
pub struct AutoEngine {
    pub(crate) config: OrderConfig,
    /// Locked as long as this lives, whichever engine has the rows.
    folder: Option<Arc<dyn Folder>>,
    pub(crate) state: State,
    pub(crate) making: Option<Making>,
    /// The plan made last: it needs no checking.
    pub(crate) made_plan: Option<MadePlan>,
    pub(crate) notes: Notes,
}

/// Who has the rows.
pub(crate) enum State {
    /// Nobody yet: tables may be added, nothing was asked.
    Undecided(Undecided),
    /// The engine that reads rows by number.
    Windowed(Box<Windowed>),
    /// The engine that trains along a plan.
    Planned(Box<Planned>),
    /// Nobody, until the plan is made again: it is damaged, and so is the copy of its rows.
    Planless(Box<Planless>),
    /// A move failed half-way; the last checkpoint is whole.
    Lost(String),
}

/// Tables without an engine.
pub(crate) struct Undecided {
    pub(crate) schema: Schema,
    pub(crate) hypers: Vec<Hyper>,
}

/// The engine that needs no plan.
pub(crate) struct Windowed {
    pub(crate) engine: WindowEngine,
    /// Nothing was written, so that another order may still be chosen.
    pub(crate) is_untouched: bool,
    /// Last checkpoint of the order left, until there is one of this engine.
    pub(crate) past: Option<CommitLog>,
}

/// What is told about the order.
#[derive(Debug, Default)]
pub(crate) struct Notes {
    /// Why the order is not forward.
    pub(crate) reason: Option<String>,
    /// Times that another plan was followed from then on.
    pub(crate) replan_count: u64,
    /// Times that all rows moved to the engine without plan.
    pub(crate) fallback_count: u64,
    /// Rows that moved.
    pub(crate) rows_moved: u64,
}

impl State {
    pub(crate) fn lost(cause: &Error) -> Self {
        Self::Lost(cause.to_string())
    }
}

pub(crate) fn windowed(engine: WindowEngine, is_untouched: bool) -> State {
    State::Windowed(Box::new(Windowed { engine, is_untouched, past: None }))
}

impl AutoEngine {
    /// Opens the store at `path` at its last checkpoint, in the order it was trained in, or
    /// starts one in a new or empty folder. Only a `memory` store may do without a path.
    ///
    /// # Errors
    /// `Closed` when another process owns the folder, `Invalid` for a budget too small (naming
    /// the minimum), a folder that holds something else or an order it cannot follow,
    /// `Corruption` for damaged files.
    pub fn open(path: Option<&Path>, config: &OrderConfig) -> Result<Self> {
        let folder: Option<Arc<dyn Folder>> = match path {
            Some(path) => Some(Arc::new(FsFolder::create(path)?)),
            None => None,
        };
        Self::open_in(folder, config)
    }

    /// Opens the store in `folder`; see [`open`](Self::open).
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_in(folder: Option<Arc<dyn Folder>>, config: &OrderConfig) -> Result<Self> {
        let held = |folder| HeldFolder::of(folder).map(|held| Arc::new(held) as Arc<dyn Folder>);
        let folder = folder.map(held).transpose()?;
        let mut opened = Self {
            config: config.clone(),
            folder,
            state: State::Lost("not opened".to_owned()),
            making: None,
            made_plan: None,
            notes: Notes::default(),
        };
        opened.state = opened.open_state()?;
        if config.order == Order::Window && matches!(opened.state, State::Planned(_)) {
            opened.move_to_window("order is \"window\"")?;
        }
        Ok(opened)
    }

    /// Wraps an engine that is open; it trains by window.
    #[must_use]
    pub fn over(engine: WindowEngine) -> Self {
        Self {
            config: OrderConfig::new(engine.budget().limit_bytes()),
            folder: None,
            state: windowed(engine, false),
            making: None,
            made_plan: None,
            notes: Notes::default(),
        }
    }

    fn open_state(&self) -> Result<State> {
        let asked = self.config.backend;
        if let Some(folder) = &self.folder {
            finish_restore(folder, &check_folder)?;
            if let (true, Some(path)) = (moving::has_moved(&**folder)?, folder.path()) {
                return moving::open_moved(folder, path, &self.config);
            }
        }
        let (folder, backend) = match (&self.folder, asked) {
            (Some(folder), None) => (folder, Backend::File),
            (folder, backend) => {
                if self.config.order == Order::Forward {
                    return Err(Error::invalid("forward order needs a folder and no backend")
                        .with("remedy", "give a path and leave the backend out"));
                }
                let config = self.config.engine(backend.unwrap_or(Backend::Memory));
                return Ok(windowed(WindowEngine::open_in(folder.clone(), &config)?, false));
            }
        };
        // Wrong options are told now, not when the first batch comes.
        self.config.engine(backend).io_options()?;
        let stored = CommitLog::stored_backend(&**folder)?;
        match stored.as_deref() {
            None if self.config.durability == Durability::Step => {
                // Not every backend can, and a plan is checkpointed now and then: told now.
                let config = self.config.engine(Backend::File);
                Ok(windowed(WindowEngine::open_in(Some(Arc::clone(folder)), &config)?, false))
            }
            None => {
                CommitLog::open(Arc::clone(folder), "undecided")?;
                let undecided = Undecided { schema: Schema::default(), hypers: Vec::new() };
                Ok(State::Undecided(undecided))
            }
            Some(crate::planned::BACKEND) => {
                planless::reopen(Arc::clone(folder), &self.config, None)
            }
            Some(stored) => {
                if self.config.order == Order::Forward {
                    return Err(Error::invalid("store was trained in window order")
                        .with("backend", stored)
                        .with("remedy", "open it with order=\"auto\", or start a new folder"));
                }
                let backend = Backend::from_name(stored)?;
                let config = self.config.engine(backend);
                let engine = WindowEngine::open_in(Some(Arc::clone(folder)), &config)?;
                Ok(windowed(engine, false))
            }
        }
    }

    // Opens the engine that needs no plan, when nothing else was decided.
    pub(crate) fn decide(&mut self) -> Result<()> {
        let State::Undecided(_) = &self.state else { return Ok(()) };
        let lost = State::Lost("opening failed".to_owned());
        let State::Undecided(undecided) = std::mem::replace(&mut self.state, lost) else {
            return Ok(());
        };
        match self.open_window(&undecided.schema, &undecided.hypers) {
            Ok(engine) => {
                self.state = windowed(engine, true);
                Ok(())
            }
            Err(error) => {
                self.state = State::Undecided(undecided);
                Err(error)
            }
        }
    }

    fn open_window(&self, schema: &Schema, hypers: &[Hyper]) -> Result<WindowEngine> {
        let config = self.config.engine(Backend::File);
        let mut engine = WindowEngine::open_in(self.folder.clone(), &config)?;
        for (table, hyper) in schema.tables().iter().zip(hypers) {
            let id = engine.add_table(table.clone())?;
            engine.set_hyper(id, *hyper)?;
        }
        Ok(engine)
    }

    /// Goes back to no engine, from one that was never written to.
    pub(crate) fn undecide(&mut self) -> Result<()> {
        let fresh = || Hyper { step: 0, ..Hyper::default() };
        let (schema, hypers) = match &self.state {
            State::Windowed(windowed) if windowed.is_untouched => {
                let schema = windowed.engine.schema().clone();
                let ids = (0..schema.tables().len() as u32).map(TableId);
                let hypers = ids.map(|id| windowed.engine.hyper(id).unwrap_or_else(fresh));
                let hypers = hypers.collect();
                (schema, hypers)
            }
            State::Planned(planned) if planned.is_untouched() => {
                (planned.engine.schema().clone(), hypers_of(&planned.engine))
            }
            _ => return Ok(()),
        };
        self.state = State::Lost("changing the order failed".to_owned());
        let folder = self.folder()?;
        for name in folder.list()? {
            // Nothing is in force, and `CURRENT` says so.
            if !name.starts_with(crate::auto::follow::PLAN_PREFIX) && name != CommitLog::CURRENT {
                folder.remove(&name)?;
            }
        }
        self.state = State::Undecided(Undecided { schema, hypers });
        Ok(())
    }

    pub(crate) fn folder(&self) -> Result<Arc<dyn Folder>> {
        self.folder.clone().ok_or_else(|| Error::invalid("the store has no folder"))
    }

    /// Returns the engine that needs no plan, opening it if nothing was decided; `None` when
    /// training follows a plan.
    pub(crate) fn windowed_mut(&mut self) -> Result<Option<&mut Windowed>> {
        self.decide()?;
        match &mut self.state {
            State::Windowed(windowed) => Ok(Some(windowed)),
            State::Lost(cause) => Err(lost(cause)),
            State::Planless(planless) => Err(planless.error()),
            State::Planned(_) | State::Undecided(_) => Ok(None),
        }
    }

    /// Returns the engine that reads rows by number, for what only it can do.
    ///
    /// # Errors
    /// `Invalid` when training follows a plan, otherwise those of opening it.
    pub fn by_number(&mut self) -> Result<&mut WindowEngine> {
        let planned = || Error::invalid("training follows a plan; rows are not reached by number");
        let windowed = self.windowed_mut()?.ok_or_else(planned)?;
        windowed.is_untouched = false;
        Ok(&mut windowed.engine)
    }

    pub(crate) fn planned_mut(&mut self) -> Option<&mut Planned> {
        match &mut self.state {
            State::Planned(planned) => Some(planned),
            _ => None,
        }
    }

    /// Adds a table, or finds the identical one.
    ///
    /// # Errors
    /// `Invalid` when the stored table of that name differs, the budget is too small, or rows
    /// are planned and the table is new.
    pub fn add_table(&mut self, table: TableSchema) -> Result<TableId> {
        match &mut self.state {
            State::Undecided(undecided) => {
                let known = undecided.schema.tables().len();
                let id = undecided.schema.add(table)?;
                if undecided.schema.tables().len() > known {
                    undecided.hypers.push(Hyper { step: 0, ..Hyper::default() });
                }
                Ok(id)
            }
            State::Windowed(windowed) => windowed.engine.add_table(table),
            State::Planned(planned) => find_table(planned.engine.schema(), &table),
            State::Planless(planless) => planless.find_table(&table),
            State::Lost(cause) => Err(lost(cause)),
        }
    }

    /// Returns the tables.
    #[must_use]
    pub fn schema(&self) -> &Schema {
        match &self.state {
            State::Undecided(undecided) => &undecided.schema,
            State::Windowed(windowed) => windowed.engine.schema(),
            State::Planned(planned) => planned.engine.schema(),
            State::Planless(planless) => &planless.schema,
            State::Lost(_) => &moving::NO_TABLES,
        }
    }

    /// Sets the hyperparameters of `table` from the next step on; `hyper.step` is ignored.
    ///
    /// # Errors
    /// `Invalid` for an unknown table or values that are negative or not finite.
    pub fn set_hyper(&mut self, table: TableId, hyper: Hyper) -> Result<()> {
        match &mut self.state {
            State::Undecided(undecided) => {
                let name = &undecided.schema.table(table)?.name;
                hyper.check().map_err(|error| error.with("table", name))?;
                if let Some(place) = undecided.hypers.get_mut(table.0 as usize) {
                    *place = Hyper { step: 0, ..hyper };
                }
                Ok(())
            }
            State::Windowed(windowed) => windowed.engine.set_hyper(table, hyper),
            State::Planned(planned) => planned.engine.set_hyper(table, hyper),
            State::Planless(planless) => {
                let name = &planless.schema.table(table)?.name;
                hyper.check().map_err(|error| error.with("table", name))?;
                if let Some(place) = planless.hypers.get_mut(table.0 as usize) {
                    *place = Hyper { step: place.step, ..hyper };
                }
                Ok(())
            }
            State::Lost(cause) => Err(lost(cause)),
        }
    }

    /// Returns how many steps `table` did; the next one is one more.
    ///
    /// # Errors
    /// `Invalid` for an unknown table.
    pub fn steps_done(&self, table: TableId) -> Result<u64> {
        self.schema().table(table)?;
        let hyper = match &self.state {
            State::Undecided(undecided) => undecided.hypers.get(table.0 as usize).copied(),
            State::Lost(cause) => return Err(lost(cause)),
            State::Windowed(windowed) => windowed.engine.hyper(table),
            State::Planned(planned) => planned.engine.hyper(table),
            State::Planless(planless) => planless.hypers.get(table.0 as usize).copied(),
        };
        Ok(hyper.map_or(0, |hyper| hyper.step))
    }

    /// Lets `table` have done `steps` steps, as of a run that goes on with rows written by number.
    ///
    /// # Errors
    /// `Invalid` for an unknown table, or along a plan.
    pub fn set_steps_done(&mut self, table: TableId, steps: u64) -> Result<()> {
        if self.planned_mut().is_some() {
            return Err(Error::invalid("steps along a plan are those of its checkpoint")
                .with("remedy", "set them before training, or open with order=\"window\""));
        }
        let Some(windowed) = self.windowed_mut()? else { return Err(lost("no engine")) };
        let hyper = windowed.engine.hyper(table).unwrap_or_default();
        windowed.is_untouched = false;
        windowed.engine.take_over_run(table, Hyper { step: steps, ..hyper })
    }

    /// Pools the rows of `bags` into `out`, overwritten: `[B, output_dim]`, or `[E, D]` without
    /// pooling. With `is_training` a step on the same batch will follow, so the batch must be
    /// the planned one if there is a plan; without, any batch may be asked.
    ///
    /// # Errors
    /// `Invalid` for shapes or ids out of range, or a batch to train on that is not the planned
    /// one: nothing changed then. Otherwise the engine's.
    pub fn lookup(
        &mut self,
        plan: &FeaturePlan,
        bags: &Bags<'_>,
        out: &mut [f32],
        is_training: bool,
    ) -> Result<()> {
        if let Some(planned) = self.planned_mut() {
            if !is_training {
                return planned.lookup_any(plan, bags, out);
            }
            match planned.engine.lookup(plan, bags, out) {
                Err(error) => self.answer_mismatch(plan, bags, error)?,
                done => return done,
            }
        }
        match self.windowed_mut()? {
            Some(windowed) => windowed.engine.lookup(plan, bags, out),
            None => Err(lost("no engine")),
        }
    }

    /// Looks up as [`lookup`](Self::lookup) into the places that `to` says; what was not planned
    /// comes by way of a matrix.
    ///
    /// # Errors
    /// As [`lookup`](Self::lookup).
    pub fn lookup_to(
        &mut self,
        plan: &FeaturePlan,
        bags: &Bags<'_>,
        to: &mut impl Destination,
        is_training: bool,
    ) -> Result<()> {
        if let (true, Some(planned)) = (is_training, self.planned_mut()) {
            match planned.engine.lookup_to(plan, bags, to) {
                Err(error) => self.answer_mismatch(plan, bags, error)?,
                done => return done,
            }
        }
        if self.planned_mut().is_none() {
            if let Some(windowed) = self.windowed_mut()? {
                return windowed.engine.lookup_to(plan, bags, to);
            }
        }
        let mut matrix = vec![0.0; plan.output_len(bags)];
        self.lookup(plan, bags, &mut matrix, is_training)?;
        plan.scatter(bags, &matrix, to);
        Ok(())
    }

    /// Makes sure that `bags` may be stepped next: along a plan they are its next batch, whose
    /// rows are in memory then.
    ///
    /// # Errors
    /// `Invalid` for another batch: nothing changed then. Otherwise the disk's.
    pub(crate) fn expect(&mut self, plan: &FeaturePlan, bags: &Bags<'_>) -> Result<()> {
        self.planned_mut().map_or(Ok(()), |planned| planned.engine.prepare(plan, bags))
    }

    /// Applies one optimizer step for `bags`; in forward order they are the next batch of the
    /// plan, and the batch after it is the next one then.
    ///
    /// # Errors
    /// As [`lookup`](Self::lookup). An error of the disk poisons the engine: reopen it at the
    /// last checkpoint.
    pub fn update(
        &mut self,
        plan: &FeaturePlan,
        bags: &Bags<'_>,
        mut grads: Grads<'_>,
    ) -> Result<()> {
        if let Some(planned) = self.planned_mut() {
            planned.unplanned.clear();
            let weights = grads.weights.as_deref_mut();
            let own = Grads { output: grads.output, weights };
            match planned.engine.update(plan, bags, own) {
                Err(error) => self.answer_mismatch(plan, bags, error)?,
                done => {
                    planned.is_durable = false;
                    return done;
                }
            }
        }
        match self.windowed_mut()? {
            Some(windowed) => {
                windowed.is_untouched = false;
                windowed.engine.update(plan, bags, grads)
            }
            None => Err(lost("no engine")),
        }
    }

    // A batch that was not planned moves the rows, if that is wished; other errors stay errors.
    pub(crate) fn answer_mismatch(
        &mut self,
        plan: &FeaturePlan,
        bags: &Bags<'_>,
        error: Error,
    ) -> Result<()> {
        let may_move = self.config.on_mismatch().backend().is_some();
        let Some(planned) = self.planned_mut() else { return Err(error) };
        if error.kind() != ErrorKind::Invalid || !may_move || planned.engine.is_next(plan, bags)? {
            return Err(error);
        }
        self.move_to_window(&error.to_string())
    }

    /// Makes everything up to the last finished batch durable, with `attachments`, as `name`;
    /// returns the checkpoint's number.
    ///
    /// # Errors
    /// `NoSpace` leaves the last checkpoint in force and training may go on; after `Io` the
    /// store is poisoned: reopen it at the last checkpoint.
    pub fn checkpoint(&mut self, name: &str, attachments: &[Attachment<'_>]) -> Result<u64> {
        if let Some(planned) = self.planned_mut() {
            let number = planned.engine.checkpoint(name, attachments)?;
            planned.is_durable = true;
            return Ok(number);
        }
        match self.windowed_mut()? {
            Some(windowed) => {
                windowed.is_untouched = false;
                let number = windowed.engine.checkpoint(name, attachments)?;
                windowed.past = None;
                Ok(number)
            }
            None => Err(lost("no engine")),
        }
    }

    /// Returns number and name of the last checkpoint.
    #[must_use]
    pub fn last_checkpoint(&self) -> Option<&CommitInfo> {
        match &self.state {
            State::Windowed(windowed) => {
                let past = windowed.past.as_ref().and_then(CommitLog::info);
                windowed.engine.last_checkpoint().or(past)
            }
            State::Planned(planned) => planned.engine.last_checkpoint(),
            State::Planless(planless) => planless.log.info(),
            State::Undecided(_) | State::Lost(_) => None,
        }
    }

    /// Reads an attachment of the last checkpoint.
    ///
    /// # Errors
    /// `Corruption` when it fails its checksum, `Io` from the device.
    pub fn attachment(&mut self, name: &str) -> Result<Option<Vec<u8>>> {
        match &mut self.state {
            State::Windowed(windowed) => match &windowed.past {
                Some(past) => past.attachment(name),
                None => windowed.engine.attachment(name),
            },
            State::Planned(planned) => planned.engine.attachment(name),
            State::Planless(planless) => planless.log.attachment(name),
            State::Undecided(_) => Ok(None),
            State::Lost(cause) => Err(lost(cause)),
        }
    }

    /// Returns the names of the caller's attachments of the last checkpoint.
    ///
    /// # Errors
    /// `Unsupported` by a store that does not know them.
    pub fn attachment_names(&self) -> Result<Vec<String>> {
        match &self.state {
            State::Windowed(windowed) => match &windowed.past {
                Some(past) => {
                    let names = past.attachment_names().into_iter();
                    Ok(names.filter(|name| !name.starts_with('_')).collect())
                }
                None => windowed.engine.attachment_names(),
            },
            State::Planned(planned) => Ok(planned.engine.attachment_names()),
            State::Planless(planless) => {
                let names = planless.log.attachment_names().into_iter();
                Ok(names.filter(|name| !name.starts_with('_')).collect())
            }
            State::Undecided(_) => Ok(Vec::new()),
            State::Lost(cause) => Err(lost(cause)),
        }
    }

    /// Checks every checksum of the store and of what it keeps; returns the number of pages (or
    /// chunks) checked.
    ///
    /// # Errors
    /// `Corruption`, naming the first bad place.
    pub fn verify(&mut self) -> Result<u64> {
        if let Some(windowed) = self.windowed_mut()? {
            return windowed.engine.verify();
        }
        let mut count = self.planned_mut().map_or(Ok(0), |planned| planned.engine.verify())?;
        let folder = self.folder()?;
        for name in kept_names(folder.as_ref())? {
            count += verify_checkpoint(&folder, &name, &check_folder)?;
        }
        Ok(count)
    }

    /// Returns the folder the rows are in now; a move puts them one deeper.
    pub(crate) fn window_folder(&self) -> Result<PathBuf> {
        let path = self.folder.as_ref().and_then(|folder| folder.path());
        let path = path.ok_or_else(|| Error::invalid("the store has no folder of its own"))?;
        Ok(path.join(WINDOW_FOLDER))
    }
}

pub(crate) fn lost(cause: &str) -> Error {
    Error::new(ErrorKind::Poisoned, "changing the order of the store failed half-way")
        .with("cause", cause)
        .with("remedy", "reopen the store; it continues at its last checkpoint")
}

/// Runs of a forward engine: hyperparameters and steps of each table.
pub(crate) fn hypers_of(engine: &PlannedEngine) -> Vec<Hyper> {
    let ids = (0..engine.schema().tables().len() as u32).map(TableId);
    ids.filter_map(|id| engine.hyper(id)).collect()
}
