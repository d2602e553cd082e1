//! Choice between the window and the planned engine, and the state of a store without one.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tierbed_core::{Bags, Error, ErrorKind, Result, TableId, TableSchema};
use tierbed_io::{Folder, FsFolder, HeldFolder};
use tierbed_kernels::{Destination, FeatureLayout};
use tierbed_store::kept::finish_restore;
use tierbed_store::CommitLog;
use tierbed_vocab::Policy;

use crate::auto::follow::{Making, PlanIdentity};
use crate::auto::ids::PlannedIds;
use crate::auto::joined::JoinedBatch;
use crate::auto::moving::{self, WINDOW_FOLDER};
use crate::auto::moving_to_plan::{sweep_plan_rows, sweep_window};
use crate::auto::noting::NotingEngine;
use crate::auto::options::{Order, OrderConfig};
use crate::auto::planless::{self, Planless};
use crate::auto::planned::Planned;
use crate::auto::tables::Tables;
use crate::auto::windowed::{Standing, Windowed};
use crate::batch_token::BatchToken;
use crate::engine::TrainEngine;
use crate::folders::check_folder;
use crate::window::{Backend, Durability, WindowEngine};

/// Training in whichever order is known. Calls need `&mut`: one at a time, in a fixed order, so
/// that equal calls give equal bits.
pub struct AutoEngine {
    pub(crate) config: OrderConfig,
    /// Locked as long as this lives, whichever engine has the rows.
    pub(crate) folder: Option<Arc<dyn Folder>>,
    pub(crate) state: State,
    pub(crate) making: Option<Making>,
    /// The plan made last: it needs no checking.
    pub(crate) made_plan: Option<PlanIdentity>,
    pub(crate) notes: Notes,
    /// Tables of open vocabulary, as far as this engine was told or found them along a plan.
    pub(crate) open: BTreeMap<TableId, Policy>,
    /// Their index beside a plan that is followed or being made.
    pub(crate) ids: Option<PlannedIds>,
    /// The batch that several collections look up and step.
    pub(crate) joined: Option<JoinedBatch>,
}

/// Who has the rows.
pub(crate) enum State {
    /// Nobody yet: tables may be added, nothing was asked.
    Undecided(Box<Tables>),
    /// The engine that reads rows by number.
    Windowed(Box<Windowed>),
    /// The engine that trains along a plan.
    Planned(Box<Planned>),
    /// Nobody, until the plan is made again: it is damaged, and so is the copy of its rows.
    Planless(Box<Planless>),
    /// A move failed half-way; the last checkpoint is whole.
    Lost(String),
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

fn windowed(engine: WindowEngine) -> State {
    State::Windowed(Box::new(Windowed::opened(engine)))
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
            open: BTreeMap::new(),
            ids: None,
            joined: None,
        };
        if let Some(folder) = &opened.folder {
            opened.config.has_open_tables = PlannedIds::exists(folder)?;
        }
        opened.state = opened.open_state()?;
        opened.open_ids()?;
        if config.order == Order::Window && matches!(opened.state, State::Planned(_)) {
            opened.move_to_window("order is \"window\"")?;
        }
        assert!(!matches!(opened.state, State::Lost(_)), "a store was opened and has no rows");
        Ok(opened)
    }

    /// Wraps an engine that is open; it trains by window.
    #[must_use]
    pub fn over(engine: WindowEngine) -> Self {
        Self {
            config: OrderConfig::new(engine.budget().limit_bytes()),
            folder: None,
            state: windowed(engine),
            making: None,
            made_plan: None,
            notes: Notes::default(),
            open: BTreeMap::new(),
            ids: None,
            joined: None,
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
                return Ok(windowed(WindowEngine::open_in(folder.clone(), &config)?));
            }
        };
        // Wrong options are told now, not when the first batch comes.
        self.config.engine(backend).io_options()?;
        let stored = CommitLog::stored_backend(&**folder)?;
        match stored.as_deref() {
            None if self.config.durability == Durability::Step => {
                // Not every backend can, and a plan is checkpointed now and then: told now.
                let config = self.config.engine(Backend::File);
                Ok(windowed(WindowEngine::open_in(Some(Arc::clone(folder)), &config)?))
            }
            None => {
                CommitLog::open(Arc::clone(folder), "undecided")?;
                Ok(State::Undecided(Box::default()))
            }
            Some(crate::planned::BACKEND) => {
                let state = planless::reopen(Arc::clone(folder), &self.config, None)?;
                if let State::Planned(planned) = &state {
                    sweep_window(folder, planned.engine.schema())?;
                }
                Ok(state)
            }
            Some(stored) => {
                let backend = Backend::from_name(stored)?;
                let config = self.config.engine(backend);
                let engine = WindowEngine::open_in(Some(Arc::clone(folder)), &config)?;
                sweep_plan_rows(&**folder, engine.schema());
                Ok(windowed(engine))
            }
        }
    }

    // Opens the engine that needs no plan, when nothing else was decided.
    pub(crate) fn decide(&mut self) -> Result<()> {
        if matches!(self.state, State::Undecided(_)) {
            self.drop_ids()?;
        }
        if let State::Undecided(tables) = &self.state {
            let engine = self.open_window(tables)?;
            let standing = Standing::Untouched;
            self.state = State::Windowed(Box::new(Windowed { engine, standing, past: None }));
        }
        Ok(())
    }

    fn open_window(&self, tables: &Tables) -> Result<WindowEngine> {
        let config = self.config.engine(Backend::File);
        let mut engine = WindowEngine::open_in(self.folder.clone(), &config)?;
        for (expected, table, hyper) in tables.iter().filter(|(_, table, _)| !table.is_own()) {
            let id = self.add_again(&mut engine, expected, table)?;
            engine.set_hyper(id, hyper)?;
        }
        Ok(engine)
    }

    // Adds a table, whose number is `expected`, to an engine that has those before it.
    pub(crate) fn add_again(
        &self,
        engine: &mut WindowEngine,
        expected: TableId,
        table: &TableSchema,
    ) -> Result<TableId> {
        let id = match self.open.get(&expected) {
            Some(&policy) => engine.add_open_table(table.clone(), policy)?,
            None => engine.add_table(table.clone())?,
        };
        assert_eq!(id, expected, "a new engine numbers its tables in another order");
        Ok(id)
    }

    /// Goes back to no engine, from one that was never written to.
    pub(crate) fn undecide(&mut self) -> Result<()> {
        let tables = match &self.state {
            State::Windowed(windowed) if windowed.is_untouched() => windowed.tables(),
            State::Planned(planned) if planned.is_untouched() => planned.tables(),
            _ => return Ok(()),
        };
        let tables = self.without_ids(tables)?;
        let is_unstepped = tables.hypers.iter().all(|(_, hyper)| hyper.step == 0);
        assert!(is_unstepped, "a store that nothing was written to has done steps");
        self.state = State::Lost("changing the order failed".to_owned());
        crate::auto::follow::remove_uncommitted(&*self.folder()?)?;
        self.state = State::Undecided(Box::new(tables));
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
        windowed.standing = Standing::Changed;
        Ok(&mut windowed.engine)
    }

    /// Returns the engine that can publish while it trains; `None` along a plan, and before
    /// anything was written.
    pub fn background_mut(&mut self) -> Option<&mut WindowEngine> {
        match &mut self.state {
            State::Windowed(windowed) if !windowed.is_untouched() => Some(&mut windowed.engine),
            _ => None,
        }
    }

    pub(crate) fn planned_mut(&mut self) -> Option<&mut Planned> {
        match &mut self.state {
            State::Planned(planned) => Some(planned),
            _ => None,
        }
    }

    /// Returns the engine that has the rows, opening the one that needs no plan if nothing was
    /// decided.
    ///
    /// # Errors
    /// Those of opening it, or why there is none.
    pub(crate) fn engine(&mut self) -> Result<&mut dyn NotingEngine> {
        self.decide()?;
        match &mut self.state {
            State::Windowed(windowed) => Ok(windowed.as_mut()),
            State::Planned(planned) => Ok(planned.as_mut()),
            State::Planless(planless) => Err(planless.error()),
            State::Lost(cause) => Err(lost(cause)),
            State::Undecided(_) => Err(lost("no engine")),
        }
    }

    /// Does `work` on the engine that has the rows; when `bags` are not the planned batch and
    /// rows may leave the plan, they move and it is done by the other engine.
    ///
    /// # Errors
    /// Those of `work`, or of moving the rows.
    pub(crate) fn planned_or_moved<T>(
        &mut self,
        plan: &FeatureLayout,
        bags: &Bags<'_>,
        mut work: impl FnMut(&mut dyn TrainEngine) -> Result<T>,
    ) -> Result<T> {
        if let Some(planned) = self.planned_mut() {
            match work(planned) {
                Err(error) => self.answer_mismatch(plan, bags, error)?,
                done => return done,
            }
        }
        work(self.engine()?)
    }

    /// Looks up as [`lookup`](Self::lookup) into the places that `to` says; what was not planned
    /// comes by way of a matrix.
    ///
    /// # Errors
    /// As [`lookup`](Self::lookup).
    pub fn lookup_to(
        &mut self,
        plan: &FeatureLayout,
        bags: &Bags<'_>,
        to: &mut impl Destination,
        is_training: bool,
    ) -> Result<Option<BatchToken>> {
        if let (true, Some(planned)) = (is_training, self.planned_mut()) {
            match planned.engine.lookup_to(plan, bags, to) {
                Err(error) => self.answer_mismatch(plan, bags, error)?,
                done => return done.map(Some),
            }
        }
        if self.planned_mut().is_none() {
            if let Some(windowed) = self.windowed_mut()? {
                return windowed.engine.lookup_to(plan, bags, to).map(|()| None);
            }
        }
        let mut matrix = vec![0.0; plan.output_len(bags)];
        let token = self.lookup(plan, bags, &mut matrix, is_training)?;
        plan.scatter(bags, &matrix, to);
        Ok(token)
    }

    // A batch that was not planned moves the rows, if that is wished; other errors stay errors.
    pub(crate) fn answer_mismatch(
        &mut self,
        plan: &FeatureLayout,
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
