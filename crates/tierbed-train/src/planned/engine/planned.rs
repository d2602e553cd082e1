//! Plan of a store: which one it follows, and whether a batch is the expected one.

use std::sync::Arc;

use tierbed_core::{Bags, Error, ErrorKind, Result, Schema, TableId};
use tierbed_io::Folder;
use tierbed_kernels::FeatureLayout;
use tierbed_store::CommitLog;

use super::{stored, PlannedEngine, BACKEND};
use crate::hypers::Hypers;
use crate::planned::plan::{copy_name, EpochPlan, PlanStats};

/// Plans in a store's folder end so.
const PLAN_SUFFIX: &str = ".plan";

/// What the last checkpoint says of its plan, and what is there of that plan.
#[derive(Debug)]
pub(crate) struct PlanState {
    /// The tables.
    pub(crate) schema: Schema,
    /// Hyperparameters of each table; `step` is the number of steps done.
    pub(crate) hypers: Hypers,
    /// Tells the plan from any other.
    pub(crate) identity: u64,
    /// What the plan was made of; empty in older checkpoints.
    pub(crate) key: String,
    /// The plan, without batches where these are damaged; `None` when nobody knows any more
    /// which row is which.
    pub(crate) plan: Option<EpochPlan>,
    /// What is wrong, unless the plan is there as far as its directory tells.
    pub(crate) damage: Option<Error>,
}

/// Finds tables and plan of the last checkpoint in `folder`; the plan lies beside the rows, as a
/// file that ends in `.plan`. A plan that is `known_damaged` is taken for its rows only.
///
/// # Errors
/// `Invalid` when there is no checkpoint; `Corruption` for damaged files other than the plan.
pub(crate) fn stored_plan(
    folder: &Arc<dyn Folder>,
    known_damaged: Option<Error>,
) -> Result<PlanState> {
    let log = CommitLog::open(Arc::clone(folder), BACKEND)?;
    let manifest = log.manifest().ok_or_else(|| Error::invalid("store has no checkpoint"))?;
    let state = stored::read_state(&log)?;
    if state.tables.len() != manifest.schema.tables().len() {
        return Err(stored::damaged("does not fit its tables"));
    }
    let names = folder.list()?;
    let (mut plan, mut damage) = (None, known_damaged);
    let is_damaged = damage.is_some();
    for name in names.iter().filter(|name| name.ends_with(PLAN_SUFFIX) && !is_damaged) {
        match EpochPlan::open(&**folder, name) {
            Ok(found) if found.identity() == state.plan_identity => plan = Some(found),
            // Another plan, or one never finished.
            Ok(_) => {}
            // Ours may be the next one.
            Err(error) => damage = damage.or(Some(error)),
        }
    }
    let missing = || {
        Error::corruption("the plan that the store was trained along is missing")
            .with("plan", format_args!("{:016x}", state.plan_identity))
    };
    let damage = match plan {
        Some(_) => None,
        None => Some(damage.unwrap_or_else(missing)),
    };
    if plan.is_none() {
        let copies = copy_name(PLAN_SUFFIX);
        let mut candidates: Vec<_> = names
            .iter()
            .filter(|name| name.ends_with(PLAN_SUFFIX) || name.ends_with(&copies))
            .collect();
        candidates.sort_by_key(|name| name.ends_with(PLAN_SUFFIX));
        // What is wrong with those that do not serve was told above, or they are other plans.
        plan = candidates.into_iter().find_map(|name| {
            let found = EpochPlan::open(&**folder, name).ok()?;
            (found.identity() == state.plan_identity).then(|| found.into_rows_only().ok())?
        });
    }
    Ok(PlanState {
        schema: manifest.schema.clone(),
        hypers: state.tables,
        identity: state.plan_identity,
        key: plan.as_ref().map_or(state.plan_key, |plan| plan.key().to_owned()),
        plan,
        damage,
    })
}

impl PlannedEngine {
    /// Returns the table of each feature of the plan.
    #[must_use]
    pub fn planned_tables(&self) -> &[TableId] {
        &self.pipeline.plan.shape().feature_tables
    }

    /// Tells whether training may go on; without, only the rows of the plan are there.
    #[must_use]
    pub fn has_batches(&self) -> bool {
        self.pipeline.plan.has_batches()
    }

    /// Checks every window of the plan, and that there is a copy of its rows.
    ///
    /// # Errors
    /// `Corruption`, naming file and window, otherwise those of the folder.
    pub fn check_plan(&mut self) -> Result<()> {
        self.check_whole()?;
        let plan = &self.pipeline.plan;
        plan.verify_in(&mut self.scan_window)?;
        plan.ensure_copy(&*self.folder)
    }

    /// Passes over the batches of the plan without a step, up to batch `batch` of an epoch: of
    /// this one, or of the next one when that batch is done. Rows move as if they had been
    /// looked at.
    ///
    /// # Errors
    /// `Invalid` for a batch that the plan does not have, otherwise as [`pass`](Self::pass).
    pub fn pass_to(&mut self, batch: u64) -> Result<()> {
        self.check_whole()?;
        self.check_has_batches()?;
        let batch_count = self.pipeline.plan.stats().batch_count;
        if batch >= batch_count {
            return Err(Error::invalid("the plan has no such batch")
                .with("batch", batch)
                .with("batches", batch_count));
        }
        while self.position().batch != batch {
            self.enter_window()?;
            let in_window =
                u64::from(self.pipeline.current.plan.batch_count() - self.batch_in_window);
            let wanted = match batch.checked_sub(self.batch_in_epoch) {
                Some(more) if more > 0 => in_window.min(more),
                _ => in_window,
            };
            self.batch_in_window += wanted as u32;
            self.batch_in_epoch += wanted;
        }
        Ok(())
    }

    /// Refuses to train where only the rows of a damaged plan are there.
    pub(super) fn check_has_batches(&self) -> Result<()> {
        match self.pipeline.plan.has_batches() {
            true => Ok(()),
            false => Err(Error::invalid("the plan that training follows is damaged or missing")
                .with("rows_from", self.pipeline.plan.file())
                .with(
                    "remedy",
                    "give lookahead the batches of the plan: it is made again and training goes \
                     on; or open the store with order=\"window\"",
                )),
        }
    }

    /// Returns what the plan holds.
    #[must_use]
    pub fn plan_stats(&self) -> PlanStats {
        self.pipeline.plan.stats()
    }

    /// Returns the names of what is attached to the last checkpoint.
    #[must_use]
    pub fn attachment_names(&self) -> Vec<String> {
        let metas = self.log.manifest().into_iter().flat_map(|manifest| &manifest.attachments);
        metas.map(|meta| meta.name.clone()).filter(|name| !name.starts_with('_')).collect()
    }

    /// Tells whether `bags` are the next batch of the plan.
    ///
    /// # Errors
    /// `Invalid` for shapes or ids out of range, otherwise the disk's.
    pub fn is_next(&mut self, plan: &FeatureLayout, bags: &Bags<'_>) -> Result<bool> {
        let found = self.find_batch(plan, bags, plan.output_len(bags));
        match found {
            Ok(_) => Ok(true),
            // If its shapes and ids are right, it is another batch.
            Err(error) if error.kind() == ErrorKind::Invalid => {
                plan.check(&self.schema, bags, plan.output_len(bags)).map(|()| false)
            }
            Err(error) => Err(error),
        }
    }
}
