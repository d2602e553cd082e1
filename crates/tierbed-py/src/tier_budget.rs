//! Bytes that the caches of several snapshots share, for Python.

use std::sync::Arc;

use pyo3::prelude::*;
use tierbed_cache::{MemberStats, TierBudget};

use crate::errors::run;
use crate::store::to_json;

/// Bytes that the cached rows of several snapshots share.
#[pyclass(frozen, module = "tierbed._native")]
pub(crate) struct NativeTierBudget {
    budget: Arc<TierBudget>,
}

impl NativeTierBudget {
    pub(crate) fn budget(&self) -> Arc<TierBudget> {
        Arc::clone(&self.budget)
    }
}

#[pymethods]
impl NativeTierBudget {
    #[new]
    #[pyo3(signature = (limit_bytes, epoch_groups))]
    fn new(py: Python<'_>, limit_bytes: u64, epoch_groups: Option<u64>) -> PyResult<Self> {
        let budget = run(py, || match epoch_groups {
            Some(groups) => TierBudget::with_epoch(limit_bytes, groups),
            None => TierBudget::new(limit_bytes),
        })?;
        Ok(Self { budget })
    }

    fn stats_json(&self, py: Python<'_>) -> PyResult<String> {
        run(py, || {
            let stats = self.budget.stats();
            to_json(&serde_json::json!({
                "limit_bytes": stats.limit_bytes,
                "used_bytes": stats.used_bytes,
                "division_count": stats.division_count,
                "bytes_moved": stats.bytes_moved,
                "members": stats.members.iter().map(member_json).collect::<Vec<_>>(),
            }))
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
