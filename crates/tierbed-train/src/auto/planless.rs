//! Damaged or missing plan: what is still there, and how training goes on.
//!
//! Where the copy of the plan's rows is whole, all rows come out as ever and only training along
//! the plan waits for the batches. Without it nobody knows which row is which, and the store
//! holds what its checkpoint says beside the rows. Either way `lookahead` with the batches of the
//! plan makes it again; its identity tells that it is the one trained along.

use std::sync::Arc;

use crate::planned::{source_of, EpochPlan, PlanOptions, BACKEND};
use tierbed_core::{Error, ErrorKind, Result, TableId, TableSchema};
use tierbed_io::{Folder, FolderLock};
use tierbed_kernels::FeatureLayout;
use tierbed_store::CommitLog;

use crate::auto::engine::{AutoEngine, State};
use crate::auto::follow::{remove_other_plans, tables_of, PlanOrigin, PlanRequest};
use crate::auto::options::OnMismatch;
use crate::auto::planned::{find_table, Planned};
use crate::auto::tables::Tables;
use crate::engine::TrainEngine;
use crate::hypers::Hypers;

/// A store whose rows cannot be named until its plan is made again.
pub(crate) struct Planless {
    pub(crate) tables: Tables,
    pub(crate) log: CommitLog,
    /// Of the plan that is wanted.
    identity: u64,
    key: String,
    pub(crate) damage: String,
    _lock: FolderLock,
}

/// The plan that is to be made again.
struct Wanted {
    identity: u64,
    key: String,
    hypers: Hypers,
}

impl Planless {
    /// Says what to do.
    pub(crate) fn error(&self) -> Error {
        Error::corruption("rows cannot be found: the plan they lie along is damaged or missing")
            .with("cause", &self.damage)
            .with(
                "remedy",
                "give lookahead the batches of that plan: it is made again and training goes on",
            )
    }

    pub(crate) fn find_table(&self, table: &TableSchema) -> Result<TableId> {
        find_table(&self.tables.schema, table)
    }
}

/// Opens the store in `folder` at its last checkpoint, with as much of its plan as there is; of
/// one that is `known_damaged` only the rows are taken.
pub(crate) fn reopen(
    folder: Arc<dyn Folder>,
    config: &crate::auto::options::OrderConfig,
    known_damaged: Option<Error>,
) -> Result<State> {
    let stored = crate::planned::stored_plan(&folder, known_damaged)?;
    let damage = stored.damage.as_ref().map(Error::to_string);
    let Some(plan) = stored.plan else {
        let lock = folder.lock()?;
        return Ok(State::Planless(Box::new(Planless {
            tables: Tables { schema: stored.schema, hypers: stored.hypers },
            log: CommitLog::open(folder, BACKEND)?,
            identity: stored.identity,
            key: stored.key,
            damage: damage.unwrap_or_default(),
            _lock: lock,
        })));
    };
    let is_whole = plan.has_batches();
    match Planned::start(Arc::clone(&folder), stored.schema, plan.clone(), config) {
        Ok(planned) => Ok(State::Planned(Box::new(Planned { plan_damage: damage, ..planned }))),
        Err(error) => {
            // The windows that are entered first are read when the store is opened.
            match (error.kind(), is_whole, plan.verify()) {
                (ErrorKind::Corruption | ErrorKind::Io, true, Err(damage)) => {
                    drop(error);
                    reopen(folder, config, Some(damage))
                }
                _ => Err(error),
            }
        }
    }
}

impl AutoEngine {
    /// Reads the plan that is followed since the store was opened, once, at rest: what is damaged
    /// is told before training comes there.
    pub(crate) fn check_plan(&mut self) -> Result<()> {
        let State::Planned(planned) = &mut self.state else { return Ok(()) };
        let is_at_rest = planned.is_durable || planned.is_untouched();
        if planned.is_checked || !planned.engine.has_batches() || !is_at_rest {
            return Ok(());
        }
        let damage = match planned.engine.check_plan() {
            Err(error) if matches!(error.kind(), ErrorKind::Corruption | ErrorKind::Io) => error,
            checked => {
                planned.is_checked = checked.is_ok();
                return checked;
            }
        };
        if planned.is_untouched() {
            return self.undecide();
        }
        let hypers = planned.engine.hypers().clone();
        // Gives the folder back.
        self.state = State::lost(&damage);
        self.state = reopen(self.folder()?, &self.config, Some(damage))?;
        self.set_hypers(&hypers)
    }

    fn set_hypers(&mut self, hypers: &Hypers) -> Result<()> {
        assert_eq!(hypers.len(), self.schema().tables().len(), "every table goes on with its own");
        for (table, hyper) in hypers.iter() {
            self.set_hyper(table, *hyper)?;
        }
        Ok(())
    }

    // What the store waits for, if its plan is not there.
    fn wanted(&self) -> Option<Wanted> {
        match &self.state {
            State::Planless(planless) => Some(Wanted {
                identity: planless.identity,
                key: planless.key.clone(),
                hypers: planless.tables.hypers.clone(),
            }),
            State::Planned(planned) if !planned.engine.has_batches() => Some(Wanted {
                identity: planned.engine.plan().identity(),
                key: planned.engine.plan().key().to_owned(),
                hypers: planned.engine.hypers().clone(),
            }),
            _ => None,
        }
    }

    /// Tells whether `request` is for the batches of the plan that is to be made again.
    pub(crate) fn is_wanted(&self, features: &FeatureLayout, request: &PlanRequest) -> bool {
        let has_its_tables = match &self.state {
            State::Planned(planned) => tables_of(features) == planned.engine.planned_tables(),
            _ => true,
        };
        let is_same = |key: &str| key.is_empty() || source_of(key) == request.source;
        has_its_tables && self.wanted().is_some_and(|wanted| is_same(&wanted.key))
    }

    /// Returns the options that the plan in force was made with, where `options` are today's.
    pub(crate) fn options_of_plan(&self, options: PlanOptions) -> PlanOptions {
        let wanted = self.wanted();
        wanted.and_then(|wanted| options.clone().of_plan(&wanted.key)).unwrap_or(options)
    }

    /// Tells which plan of `names` in the folder is the one trained along, and whole.
    pub(crate) fn plan_made_again(
        &self,
        names: &[String],
        origin: PlanOrigin<'_>,
    ) -> Result<Option<EpochPlan>> {
        let Some(wanted) = self.wanted() else { return Ok(None) };
        for name in names {
            let found = self.sound_plan(name, origin)?;
            if let Some(plan) = found.filter(|plan| plan.identity() == wanted.identity) {
                return Ok(Some(plan));
            }
        }
        Ok(None)
    }

    /// Goes on along `plan`, which was made again, from the last checkpoint on.
    pub(crate) fn follow_again(&mut self, plan: EpochPlan) -> Result<()> {
        let Some(wanted) = self.wanted() else { return Ok(()) };
        assert_eq!(plan.identity(), wanted.identity, "rows lie along another plan");
        let (folder, schema) = (self.folder()?, self.schema().clone());
        // Gives the folder back.
        self.state = State::Lost("opening the plan that was made again failed".to_owned());
        let name = plan.file().to_owned();
        let planned = Planned::start(Arc::clone(&folder), schema, plan, &self.config);
        match planned {
            Ok(planned) => {
                self.state = State::Planned(Box::new(Planned { is_checked: true, ..planned }));
                remove_other_plans(&*folder, &name)?;
                self.set_hypers(&wanted.hypers)
            }
            Err(error) => {
                self.state = State::lost(&error);
                Err(error)
            }
        }
    }

    /// Answers a plan that was made again and is another one: the batches are not those that
    /// were trained on.
    pub(crate) fn check_made_again(&mut self, name: &str) -> Result<()> {
        if let State::Planned(planned) = &self.state {
            let plan = planned.engine.plan();
            if planned.engine.has_batches() && self.has_made(plan.identity()) {
                // It was made for other shards, whose plan was damaged.
                return remove_plan(&*self.folder()?, name);
            }
        }
        let (Some(wanted), folder) = (self.wanted(), self.folder()?) else { return Ok(()) };
        if self.has_made(wanted.identity) {
            return Ok(());
        }
        remove_plan(&*folder, name)?;
        let reason = "the plan was damaged, and these batches are not those it was made of";
        if matches!(self.state, State::Planned(_)) && self.config.on_mismatch() != OnMismatch::Error
        {
            return self.move_to_window(reason);
        }
        let damage = match &self.state {
            State::Planned(planned) => planned.plan_damage.clone(),
            State::Planless(planless) => Some(planless.damage.clone()),
            _ => None,
        };
        Err(Error::invalid(reason).with("cause", damage.unwrap_or_default()).with(
            "remedy",
            "give lookahead the batches, in the order, that the store was trained on",
        ))
    }

    fn has_made(&self, identity: u64) -> bool {
        self.made_plan.as_ref().is_some_and(|made| made.identity == identity)
    }

    /// Tells what is wrong with the plan that was followed, if something is.
    pub(crate) fn plan_damage(&self) -> Option<&str> {
        match &self.state {
            State::Planned(planned) => planned.plan_damage.as_deref(),
            State::Planless(planless) => Some(&planless.damage),
            _ => None,
        }
    }
}

fn remove_plan(folder: &dyn Folder, name: &str) -> Result<()> {
    folder.remove(name)?;
    folder.remove(&crate::planned::copy_name(name))
}
