//! Which plan does a store follow, and is this the batch it expects?

use std::sync::Arc;

use tierbed_core::{Bags, Error, ErrorKind, Result, Schema, TableId};
use tierbed_io::Folder;
use tierbed_kernels::FeaturePlan;
use tierbed_trainstore::CommitLog;

use super::{stored, ForwardEngine, BACKEND};
use crate::plan::{Plan, PlanStats};

/// Plans in a store's folder end so.
const PLAN_SUFFIX: &str = ".plan";

/// Finds tables and plan of the last checkpoint in `folder`; the plan lies beside the rows, as a
/// file that ends in `.plan`.
///
/// # Errors
/// `Invalid` when there is no checkpoint, or no such plan; `Corruption` for damaged files.
pub fn stored_plan(folder: &Arc<dyn Folder>) -> Result<(Schema, Plan)> {
    let log = CommitLog::open(Arc::clone(folder), BACKEND)?;
    let manifest = log.manifest().ok_or_else(|| Error::invalid("store has no checkpoint"))?;
    let identity = stored::plan_identity(&log)?;
    let mut found = None;
    for name in folder.list()?.iter().filter(|name| name.ends_with(PLAN_SUFFIX)) {
        match Plan::open(&**folder, name) {
            Ok(plan) if Some(plan.identity()) == identity => found = Some(plan),
            // Another plan, or one never finished, or damaged: ours may be the next one.
            Ok(_) | Err(_) => {}
        }
    }
    let missing = || {
        Error::new(ErrorKind::Corruption, "the plan that the store was trained along is missing")
            .with("remedy", "restore the store's folder from a copy")
    };
    Ok((manifest.schema.clone(), found.ok_or_else(missing)?))
}

impl ForwardEngine {
    /// Returns the table of each feature of the plan.
    #[must_use]
    pub fn planned_tables(&self) -> &[TableId] {
        &self.river.plan.shape().feature_tables
    }

    /// Returns what the plan holds.
    #[must_use]
    pub fn plan_stats(&self) -> PlanStats {
        self.river.plan.stats()
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
    pub fn is_next(&mut self, plan: &FeaturePlan, bags: &Bags<'_>) -> Result<bool> {
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
