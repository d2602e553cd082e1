//! Memory accounts as JSON.

use std::collections::BTreeMap;

use serde_json::{json, Value};
use tierbed_core::budget::{BudgetReport, PartUse};

/// Describes who holds how much memory; accounts side by side are added.
#[must_use]
pub fn budget_json(reports: &[BudgetReport]) -> Value {
    // Engines side by side have parts of one name.
    let mut sums: BTreeMap<&str, PartUse> = BTreeMap::new();
    for (name, held) in reports.iter().flat_map(|report| &report.parts) {
        let sum = sums.entry(name).or_insert(PartUse { used_bytes: 0, peak_bytes: 0 });
        sum.used_bytes += held.used_bytes;
        sum.peak_bytes += held.peak_bytes;
    }
    let part = |(name, held): (&str, PartUse)| {
        let PartUse { used_bytes, peak_bytes } = held;
        (name.to_owned(), json!({"used_bytes": used_bytes, "peak_bytes": peak_bytes}))
    };
    let parts: serde_json::Map<_, _> = sums.into_iter().map(part).collect();
    let is_kept = |report: &BudgetReport| report.used_bytes <= report.limit_bytes;
    assert!(reports.iter().all(is_kept), "more memory is held than the budget has");
    let sum = |of: fn(&BudgetReport) -> u64| reports.iter().map(of).sum::<u64>();
    json!({
        "limit_bytes": sum(|report| report.limit_bytes),
        "used_bytes": sum(|report| report.used_bytes),
        "peak_bytes": sum(|report| report.peak_bytes),
        "parts": parts,
    })
}
