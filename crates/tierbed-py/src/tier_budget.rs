//! Bytes that the caches of several snapshots share, for Python.

use std::sync::{Arc, OnceLock};

use pyo3::prelude::*;
use tierbed_cache::{MemberStats, TierBudget};
use tierbed_core::Result;
use tierbed_io::process::PerProcess;

use crate::errors::run;
use crate::plain::Plain;

/// Bytes that the cached rows of several snapshots share.
#[pyclass(frozen, module = "tierbed._native")]
pub(crate) struct NativeTierBudget {
    budgets: Arc<TierBudgets>,
}

/// The budget of each process: those that a fork made share no memory, so each has the limit.
pub(crate) struct TierBudgets {
    limit_bytes: u64,
    epoch_groups: Option<u64>,
    budget: PerProcess<OnceLock<Arc<TierBudget>>>,
}

impl TierBudgets {
    fn make(&self) -> Result<Arc<TierBudget>> {
        match self.epoch_groups {
            Some(groups) => TierBudget::with_epoch(self.limit_bytes, groups),
            None => TierBudget::new(self.limit_bytes),
        }
    }

    /// Returns this process's budget.
    pub(crate) fn here(&self) -> Result<Arc<TierBudget>> {
        let place = self.budget.get_or_make(OnceLock::new);
        if let Some(budget) = place.get() {
            return Ok(Arc::clone(budget));
        }
        let made = self.make()?;
        Ok(Arc::clone(place.get_or_init(|| made)))
    }
}

impl NativeTierBudget {
    pub(crate) fn budgets(&self) -> Arc<TierBudgets> {
        Arc::clone(&self.budgets)
    }
}

#[pymethods]
impl NativeTierBudget {
    #[new]
    #[pyo3(signature = (limit_bytes, epoch_groups))]
    fn new(py: Python<'_>, limit_bytes: u64, epoch_groups: Option<u64>) -> PyResult<Self> {
        let budget = PerProcess::new(OnceLock::new());
        let budgets = Arc::new(TierBudgets { limit_bytes, epoch_groups, budget });
        run(py, || budgets.here())?;
        Ok(Self { budgets })
    }

    fn stats(&self, py: Python<'_>) -> PyResult<Plain<serde_json::Value>> {
        run(py, || {
            let stats = self.budgets.here()?.stats();
            Ok(Plain(serde_json::json!({
                "limit_bytes": stats.limit_bytes,
                "used_bytes": stats.used_bytes,
                "division_count": stats.division_count,
                "bytes_moved": stats.bytes_moved,
                "members": stats.members.iter().map(member_json).collect::<Vec<_>>(),
            })))
        })
    }
}

fn member_json(member: &MemberStats) -> serde_json::Value {
    serde_json::json!({
        "name": member.name,
        "floor_bytes": member.floor_bytes,
        "capacity_bytes": member.capacity_bytes,
        "used_bytes": member.used_bytes,
        "rows_asked": member.rows_asked,
        "rows_hit": member.rows_hit,
        "row_count": member.tiers.row_count,
        "evictions": member.tiers.evictions,
    })
}
