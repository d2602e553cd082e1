//! Epoch plans of a store: finding one, making one, training along it.
//!
//! Plans lie in the store's folder, named after the batches they were made from, and are used
//! again by the next run and after a restart.

use std::sync::Arc;

use crate::planned::{folder_bytes, EpochPlan, PlanBuilder, PlanOptions, PlanShape, Position};
use serde::Serialize;
use tierbed_core::checksum::crc32c;
use tierbed_core::{check_disk_quota, Bags, Error, ErrorKind, Reservation, Result, TableId};
use tierbed_io::Folder;
use tierbed_kernels::FeatureLayout;
use tierbed_store::{kept, CommitLog};

use crate::auto::engine::{lost, AutoEngine, State};
use crate::auto::ids::IDS_PREFIX;
use crate::auto::options::{OnMismatch, Order};
use crate::auto::planned::Planned;
use crate::auto::sorted_ids::IdSorter;
use crate::engine::{PlanFollower, TrainEngine};

/// Names of plans, and of their scratch files, start so.
pub(crate) const PLAN_PREFIX: &str = "order-";
/// A window's rows take at most this share of the memory: two windows are always there.
const WINDOW_SHARE: u64 = 12;
const WINDOW_MIN_BYTES: u64 = 4096;

/// Which batches a plan is wanted for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlanRequest {
    /// Identifies the batches and their order.
    pub source: String,
    /// Most batches of a window; at least 1.
    pub window_batches_max: u32,
}

/// What came of a request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "answer")]
pub enum Answer {
    /// Training follows the plan and stands here.
    Following {
        /// Epochs done.
        epoch: u64,
        /// Batches of this epoch done.
        batch: u64,
        /// Batches of an epoch.
        batch_count: u64,
    },
    /// There is no such plan, or none that is whole: push all batches.
    PlanNeeded,
    /// No plan can be followed.
    Refused {
        /// Why.
        reason: String,
    },
}

/// A plan that is being made.
pub(crate) struct Making {
    builder: PlanBuilder,
    name: String,
    /// Finds rows of ids, where there are open tables.
    sorter: Option<IdSorter>,
    /// Taken from the window engine, where it has rows.
    _memory: Option<Reservation>,
}

/// What a plan is made of.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PlanOrigin<'a> {
    shape: &'a PlanShape,
    source: &'a str,
    options: &'a PlanOptions,
}

impl<'a> PlanOrigin<'a> {
    fn of(request: &'a PlanRequest, shape: &'a PlanShape, options: &'a PlanOptions) -> Self {
        Self { shape, source: &request.source, options }
    }
}

/// A plan that was made since the store was opened.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct PlanIdentity {
    file: String,
    pub(crate) identity: u64,
}

impl PlanIdentity {
    fn of(plan: &EpochPlan) -> Self {
        Self { file: plan.file().to_owned(), identity: plan.identity() }
    }
}

impl PlanFollower for AutoEngine {
    fn follow(&mut self, features: &FeatureLayout, request: &PlanRequest) -> Result<Answer> {
        self.end_joined()?;
        let answer = self.find_plan(features, request)?;
        if let Answer::Refused { reason } = &answer {
            if self.config.order == Order::Forward {
                return Err(Error::invalid("the forward order cannot be followed")
                    .with("reason", reason)
                    .with("remedy", "give the batches of the plan, or open with order=\"auto\""));
            }
            self.note_reason(reason);
        }
        Ok(answer)
    }

    fn start_plan(&mut self, features: &FeatureLayout, request: &PlanRequest) -> Result<()> {
        self.making = None;
        self.undecide()?;
        if let State::Lost(cause) = &self.state {
            return Err(lost(cause));
        }
        if let Some(reason) = self.why_by_window()? {
            return Err(
                Error::invalid("no plan is made that rows may not follow").with("reason", reason)
            );
        }
        self.begin_ids()?;
        let folder = self.folder()?;
        let (shape, mut options) = self.shape_of(features, request)?;
        let memory = self.memory_to_plan()?;
        if let Some(memory) = &memory {
            options.memory_bytes = memory.bytes();
        }
        // A plan that rows lie along stays until the new one is whole, damaged or not.
        let [name, other] = plan_names(request);
        let is_taken = |name: &str| match &self.state {
            State::Planned(planned) => planned.engine.plan().file().starts_with(name),
            _ => false,
        };
        let name = if is_taken(&name) { other } else { name };
        assert!(!is_taken(&name), "the plan that rows lie along would be written over");
        let builder =
            PlanBuilder::new(Arc::clone(&folder), &name, shape, &request.source, options)?;
        let sorter = self.ids.as_ref().map(|ids| {
            let sorter = IdSorter::new(folder, &name, tables_of(features), ids);
            sorter.map_err(|error| ids.name_least(error))
        });
        let sorter = sorter.transpose()?;
        self.making = Some(Making { builder, name, sorter, _memory: memory });
        Ok(())
    }

    fn push_planned(&mut self, bags: &Bags<'_>, is_stepped: bool) -> Result<()> {
        let Self { making, ids, open, .. } = self;
        let making = making.as_mut().ok_or_else(|| Error::invalid("no plan is being made"))?;
        let Making { builder, sorter, .. } = making;
        let (Some(ids), Some(sorter)) = (ids, sorter) else { return builder.push(bags) };
        let is_open = |table| open.contains_key(&table);
        builder.check_ids(bags, &is_open)?;
        let pushed = sorter.push(ids, bags, is_stepped, &mut |bags, checksum| {
            builder.push_translated(bags, checksum, &is_open)
        });
        pushed.map_err(|error| ids.name_least(error))
    }

    fn finish_plan(&mut self) -> Result<()> {
        let making = self.making.take();
        let Making { mut builder, name, sorter, _memory } =
            making.ok_or_else(|| Error::invalid("no plan is being made"))?;
        if let (Some(ids), Some(mut sorter)) = (&mut self.ids, sorter) {
            let flushed = sorter.flush(ids, &mut |bags, checksum| {
                builder.push_translated(bags, checksum, &|table| self.open.contains_key(&table))
            });
            flushed.map_err(|error| ids.name_least(error))?;
        }
        // Rows of ids that are not durable are nobody's; ids that no plan uses only wait.
        self.commit_ids()?;
        builder.finish()?;
        let plan = EpochPlan::open(&*self.folder()?, &name)?;
        self.check_plan_fits(plan.file())?;
        self.made_plan = Some(PlanIdentity::of(&plan));
        self.check_made_again(&name)
    }

    fn note_reason(&mut self, reason: &str) {
        let stays = match &self.state {
            State::Planned(_) => true,
            // Later epochs only find that rows were trained by window, not why.
            State::Windowed(windowed) => !windowed.is_untouched() && self.notes.reason.is_some(),
            _ => false,
        };
        if !stays {
            self.notes.reason = Some(reason.to_owned());
        }
    }
}

impl AutoEngine {
    fn find_plan(&mut self, features: &FeatureLayout, request: &PlanRequest) -> Result<Answer> {
        let refused = |reason: &str| Ok(Answer::Refused { reason: reason.to_owned() });
        if self.config.order == Order::Window {
            return refused("the store was opened with order=\"window\"");
        }
        if let Some(reason) = self.no_plan_of_ids(features)? {
            return Ok(Answer::Refused { reason });
        }
        self.check_plan()?;
        if let State::Planless(planless) = &self.state {
            return match self.is_wanted(features, request) {
                true => self.find_made_again(features, request),
                false => Err(planless.error()),
            };
        }
        if let State::Planned(planned) = &self.state {
            let tables = planned.engine.planned_tables();
            if planned.source == request.source && tables_of(features) == tables {
                return match planned.engine.has_batches() {
                    true => Ok(self.following()),
                    false => self.find_made_again(features, request),
                };
            }
            if planned.is_durable {
                return self.follow_another(features, request);
            }
            if planned.is_untouched() {
                self.undecide()?;
                return self.find_plan(features, request);
            }
            let reason = "the order of the batches changes behind steps without a checkpoint";
            if self.config.on_mismatch() == OnMismatch::Error {
                return Err(Error::invalid(reason).with(
                    "remedy",
                    "call store.checkpoint before the batches of another order, or give the \
                     batches of the plan",
                ));
            }
            self.move_to_window(reason)?;
            return refused(reason);
        }
        if self.config.backend.is_some() {
            return refused("the store was opened with a backend");
        }
        self.undecide()?;
        if let State::Lost(cause) = &self.state {
            return Err(lost(cause));
        }
        if let Some(reason) = self.why_by_window()? {
            return Ok(Answer::Refused { reason });
        }
        self.find_ids()?;
        let (shape, options) = self.shape_of(features, request)?;
        match (self.find_sound(request, &shape, &options)?, &self.state) {
            (None, _) => Ok(Answer::PlanNeeded),
            (Some(plan), State::Windowed(_)) => self.move_to_plan(plan),
            (Some(plan), _) => self.start_planned(plan),
        }
    }

    /// Refuses a step without a plan where one is insisted on.
    ///
    /// # Errors
    /// `Invalid`, which says what to do.
    pub(crate) fn check_may_step(&self) -> Result<()> {
        let insists =
            self.config.order == Order::Forward && self.config.on_mismatch() == OnMismatch::Error;
        match &self.state {
            State::Undecided(_) | State::Windowed(_) if insists => {
                Err(Error::invalid("a step without a plan, in a store that insists on one").with(
                    "remedy",
                    "iterate tierbed.lookahead(loader, model) for the batches, or open the store \
                     with order=\"auto\"",
                ))
            }
            _ => Ok(()),
        }
    }

    // Follows the plan that was damaged, if it was made again.
    fn find_made_again(
        &mut self,
        features: &FeatureLayout,
        request: &PlanRequest,
    ) -> Result<Answer> {
        let (shape, options) = self.shape_of(features, request)?;
        let names = plan_names(request);
        let made = self.plan_made_again(&names, PlanOrigin::of(request, &shape, &options))?;
        let Some(plan) = made else { return Ok(Answer::PlanNeeded) };
        self.follow_again(plan)?;
        Ok(self.following())
    }

    /// Opens the plan `name` if it is the wanted one and every window of it is whole; one that
    /// is damaged counts for none.
    pub(crate) fn sound_plan(
        &self,
        name: &str,
        origin: PlanOrigin<'_>,
    ) -> Result<Option<EpochPlan>> {
        let PlanOrigin { shape, source, options } = origin;
        let check = |plan: EpochPlan| match self.made_plan == Some(PlanIdentity::of(&plan)) {
            true => Ok(plan),
            false => plan.verify().map(|_| plan),
        };
        let found = EpochPlan::open_for(&*self.folder()?, name, shape, source, options);
        match found.and_then(|plan| plan.map(check).transpose()) {
            // It is made again: whatever is wrong with it, its batches give it back.
            Err(error) if is_damage(&error) => Ok(None),
            found => found,
        }
    }

    /// Finds a plan that is whole.
    pub(crate) fn find_sound(
        &self,
        request: &PlanRequest,
        shape: &PlanShape,
        options: &PlanOptions,
    ) -> Result<Option<EpochPlan>> {
        // Without the index nobody knows which ids its rows are of.
        if !self.open.is_empty() && self.ids.is_none() {
            return Ok(None);
        }
        for name in plan_names(request) {
            let plan = self.sound_plan(&name, PlanOrigin::of(request, shape, options))?;
            if plan.is_some() {
                return Ok(plan);
            }
        }
        Ok(None)
    }

    /// Tells whether there is a plan for `request`, or it is followed already.
    pub(crate) fn has_plan(
        &mut self,
        features: &FeatureLayout,
        request: &PlanRequest,
    ) -> Result<bool> {
        self.check_plan()?;
        let is_wanted = self.is_wanted(features, request);
        match &self.state {
            State::Planless(_) | State::Planned(_) if is_wanted => {
                let (shape, options) = self.shape_of(features, request)?;
                let names = plan_names(request);
                let made =
                    self.plan_made_again(&names, PlanOrigin::of(request, &shape, &options))?;
                return Ok(made.is_some());
            }
            State::Planned(planned) if planned.source == request.source => return Ok(true),
            State::Undecided(_) | State::Planned(_) => {}
            State::Windowed(_) if self.why_by_window()?.is_none() => {}
            // The answer will be a refusal, or an error.
            State::Windowed(_) | State::Lost(_) | State::Planless(_) => return Ok(true),
        }
        let (shape, options) = self.shape_of(features, request)?;
        Ok(self.find_sound(request, &shape, &options)?.is_some())
    }

    // Goes on along another plan: every row is moved once, behind a checkpoint that is there.
    fn follow_another(
        &mut self,
        features: &FeatureLayout,
        request: &PlanRequest,
    ) -> Result<Answer> {
        let folder = self.folder()?;
        let (shape, options) = self.shape_of(features, request)?;
        let plan = self.find_sound(request, &shape, &options)?;
        let Some(plan) = plan else { return Ok(Answer::PlanNeeded) };
        let name = plan.file().to_owned();
        let lost = State::Lost("changing the plan failed".to_owned());
        let State::Planned(planned) = std::mem::replace(&mut self.state, lost) else {
            return Err(Error::invalid("no plan is followed"));
        };
        match planned.replan(plan, &self.config) {
            Ok(planned) => {
                self.state = State::Planned(Box::new(planned));
                self.notes.replan_count += 1;
                remove_other_plans(&*folder, &name)?;
                Ok(self.following())
            }
            Err(error) => {
                self.state = State::lost(&error);
                Err(error)
            }
        }
    }

    pub(crate) fn following(&self) -> Answer {
        let State::Planned(planned) = &self.state else {
            return Answer::Refused { reason: "no plan is followed".to_owned() };
        };
        let Position { epoch, batch } = planned.engine.position();
        Answer::Following { epoch, batch, batch_count: planned.engine.plan_stats().batch_count }
    }

    // From no engine to the forward engine. A plan that does not fit the memory is a refusal:
    // the other order may manage.
    fn start_planned(&mut self, plan: EpochPlan) -> Result<Answer> {
        let State::Undecided(tables) = &self.state else {
            return Err(Error::invalid("the order of the store is decided"));
        };
        let folder = self.folder()?;
        // As long as the plan found that they must be.
        let tables = tables.grown(&plan)?;
        match Planned::open(Arc::clone(&folder), &tables, plan, &self.config) {
            Ok(planned) => {
                self.state = State::Planned(Box::new(Planned { is_checked: true, ..planned }));
                self.notes.reason = None;
                Ok(self.following())
            }
            Err(error) => {
                remove_uncommitted(&*folder)?;
                match error.kind() {
                    ErrorKind::Invalid if self.config.order == Order::Auto => {
                        Ok(Answer::Refused { reason: error.to_string() })
                    }
                    _ => Err(error),
                }
            }
        }
    }

    pub(crate) fn shape_of(
        &self,
        features: &FeatureLayout,
        request: &PlanRequest,
    ) -> Result<(PlanShape, PlanOptions)> {
        let mut shape = PlanShape::new(self.schema(), &tables_of(features))?;
        if !self.is_wanted(features, request) {
            for (table, rows) in (0..).map(TableId).zip(&mut shape.row_counts) {
                *rows = self.planned_row_count(table, *rows);
            }
        }
        let bytes = self.config.forward_bytes();
        let options = PlanOptions {
            window_bytes: (bytes / WINDOW_SHARE).max(WINDOW_MIN_BYTES),
            window_batches_max: request.window_batches_max,
            memory_bytes: match &self.state {
                // All but what is kept aside is taken.
                State::Planned(_) => self.config.aside_bytes(),
                _ if self.ids.is_some() => {
                    self.config.dram_budget_bytes - self.config.ids_planning_bytes()
                }
                _ => self.config.dram_budget_bytes,
            },
        };
        let options = match self.is_wanted(features, request) {
            true => self.options_of_plan(options),
            false => options,
        };
        Ok((shape, options))
    }

    fn check_plan_fits(&self, file: &str) -> Result<()> {
        let folder = self.folder()?;
        let quota = self.config.disk_quota_bytes;
        if quota.is_none() {
            return Ok(());
        }
        let bytes = folder_bytes(&*folder, |_| true)?;
        check_disk_quota(quota, bytes).map_err(|error| {
            // What cannot be removed is written over by the next plan; the error says so.
            let error = error.with("file", file);
            match folder.remove(file) {
                Ok(()) => error,
                Err(cause) => error.with("not_removed", cause),
            }
        })
    }
}

fn is_damage(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Corruption | ErrorKind::Io | ErrorKind::Invalid)
}

/// Removes what an engine that never committed left in `folder`: neither plans and the ids of
/// their rows, nor kept checkpoints, nor `CURRENT`, which says that nothing is in force.
pub(crate) fn remove_uncommitted(folder: &dyn Folder) -> Result<()> {
    for name in folder.list()? {
        let is_planned = name.starts_with(PLAN_PREFIX) || name.starts_with(IDS_PREFIX);
        if !is_planned && !kept::is_kept(&name) && name != CommitLog::CURRENT {
            folder.remove(&name)?;
        }
    }
    Ok(())
}

/// Removes all plans and their scratch files.
pub(crate) fn remove_plans(folder: &dyn Folder) -> Result<()> {
    let names = folder.list()?;
    let mut plans = names.iter().filter(|name| name.starts_with(PLAN_PREFIX));
    plans.try_for_each(|name| folder.remove(name))
}

/// Removes all plans and their scratch files but `name` and its copy.
pub(crate) fn remove_other_plans(folder: &dyn Folder, name: &str) -> Result<()> {
    assert!(name.starts_with(PLAN_PREFIX), "plan {name} would be removed with the others");
    for old in folder.list()? {
        if old.starts_with(PLAN_PREFIX) && !old.starts_with(name) {
            // Left-overs cost space, not correctness.
            let _ = folder.remove(&old);
        }
    }
    Ok(())
}

pub(crate) fn tables_of(features: &FeatureLayout) -> Vec<TableId> {
    features.features().iter().map(|feature| feature.table).collect()
}

// The second name is for a plan that is made again while the first is still needed.
fn plan_names(request: &PlanRequest) -> [String; 2] {
    let source = crc32c(request.source.as_bytes());
    ["", ".again"].map(|again| format!("{PLAN_PREFIX}{source:08x}{again}.plan"))
}
