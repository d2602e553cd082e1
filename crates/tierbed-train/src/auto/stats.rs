//! What was counted, and who holds how much memory?

use crate::window::vocabularies::VocabularyStats;
use crate::window::Kernels;
use serde_json::{json, Value};
use tierbed_core::budget::{BudgetReport, PartUse};
use tierbed_core::{Error, Result};

use crate::auto::engine::{AutoEngine, State};
use crate::auto::planned::Planned;

impl AutoEngine {
    /// Returns everything that was counted, as JSON: `order`, `steps`, `isa`, `disk_bytes`,
    /// `store`, `buffer`, `budget`.
    ///
    /// # Errors
    /// The store's, when nothing was opened yet.
    pub fn stats(&mut self) -> Result<Value> {
        let mut order = json!({
            "kind": "window",
            "reason": self.notes.reason,
            "fallback_count": self.notes.fallback_count,
            "rows_moved": self.notes.rows_moved,
            "replan_count": self.notes.replan_count,
            "plan_damage": self.plan_damage(),
        });
        if let State::Planless(_) = &self.state {
            merge(&mut order, &json!({"kind": "forward"}));
            return Ok(json!({"order": order, "budget": budget_json(&[])}));
        }
        if let State::Planned(planned) = &self.state {
            let position = planned.engine.position();
            merge(
                &mut order,
                &json!({
                    "kind": "forward",
                    "epoch": position.epoch,
                    "batch": position.batch,
                    "plan": planned.engine.plan_stats(),
                    "unplanned_scan_count": planned.scan_count,
                }),
            );
            return planned_stats(planned, order);
        }
        let Some(windowed) = self.windowed_mut()? else { return Ok(json!({"order": order})) };
        let stats = windowed.engine.stats();
        Ok(json!({
            "order": order,
            "steps": stats.step_count,
            "isa": stats.isa,
            "disk_bytes": stats.store.disk_bytes,
            "store": stats.store,
            "buffer": stats.buffer,
            "vocabularies": stats.vocabularies,
            "budget": budget_json(&[windowed.engine.budget().report()]),
        }))
    }
}

impl AutoEngine {
    /// Returns what open vocabularies hold and read; none along a plan.
    #[must_use]
    pub fn vocabularies(&self) -> VocabularyStats {
        match &self.state {
            State::Windowed(windowed) => windowed.engine.stats().vocabularies,
            _ => VocabularyStats::default(),
        }
    }
}

fn planned_stats(planned: &Planned, order: Value) -> Result<Value> {
    let stats = planned.engine.stats();
    let store = serde_json::to_value(&stats)
        .map_err(|cause| Error::invalid("counters cannot be written").with("cause", cause))?;
    Ok(json!({
        "order": order,
        "steps": stats.step_count,
        "isa": Kernels::detect().isa().name(),
        "disk_bytes": stats.file_bytes + planned.engine.plan_stats().file_bytes,
        "store": store,
        "buffer": {},
        "budget": budget_json(&[planned.engine.budget().report(), planned.aside.report()]),
    }))
}

fn merge(into: &mut Value, from: &Value) {
    if let (Some(into), Some(from)) = (into.as_object_mut(), from.as_object()) {
        into.extend(from.iter().map(|(name, value)| (name.clone(), value.clone())));
    }
}

/// Describes who holds how much memory; accounts side by side are added.
#[must_use]
pub fn budget_json(reports: &[BudgetReport]) -> Value {
    let parts: serde_json::Map<_, _> = reports
        .iter()
        .flat_map(|report| &report.parts)
        .map(|(name, held)| {
            let PartUse { used_bytes, peak_bytes } = *held;
            ((*name).to_owned(), json!({"used_bytes": used_bytes, "peak_bytes": peak_bytes}))
        })
        .collect();
    let sum = |of: fn(&BudgetReport) -> u64| reports.iter().map(of).sum::<u64>();
    json!({
        "limit_bytes": sum(|report| report.limit_bytes),
        "used_bytes": sum(|report| report.used_bytes),
        "peak_bytes": sum(|report| report.peak_bytes),
        "parts": parts,
    })
}
