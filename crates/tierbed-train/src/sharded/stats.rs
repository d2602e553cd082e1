//! Counters of a store of several shards: sums over what each has counted.

use serde_json::{json, Value};

use crate::window::ChangeStats;

/// Identities of the snapshots that a shard knows, and their number.
const KNOWN: &str = "/changes/bases";
const KNOWN_COUNT: &str = "/changes/base_count";

/// Returns what a store says whose shards are not open yet.
pub(super) fn no_engine_stats() -> Value {
    json!({"order": {"kind": "window", "reason": null, "fallback_count": 0, "rows_moved": 0,
                     "replan_count": 0}, "changes": ChangeStats::default()})
}

/// Returns the order of the first shard, sums of what was counted, and under `shards` what each
/// has counted.
///
/// # Panics
/// When there is no shard.
pub(super) fn sum_of_shards(stats: Vec<Value>) -> Value {
    let mut shards = stats.iter();
    let first = shards.next();
    assert!(first.is_some(), "a store has shards");
    let mut whole = first.cloned().unwrap_or_default();
    for of_shard in shards {
        for name in ["disk_bytes", "store", "buffer", "budget", "changes"] {
            if let (Some(sum), Some(more)) = (whole.get_mut(name), of_shard.get(name)) {
                add(sum, more);
            }
        }
    }
    // A snapshot is known when every shard knows it.
    let known_by = |of_shard: &Value| of_shard.pointer(KNOWN)?.as_array().cloned();
    let known = stats.iter().filter_map(known_by).reduce(|mut all, more| {
        all.retain(|identity| more.contains(identity));
        all
    });
    if let Some(known) = known {
        for (name, value) in [(KNOWN_COUNT, json!(known.len())), (KNOWN, Value::Array(known))] {
            if let Some(place) = whole.pointer_mut(name) {
                *place = value;
            }
        }
    }
    if let Some(whole) = whole.as_object_mut() {
        whole.insert("shards".to_owned(), Value::Array(stats));
    }
    whole
}

// Adds numbers, however deep; words stay those of the first.
fn add(sum: &mut Value, more: &Value) {
    match (sum, more) {
        (Value::Object(sum), Value::Object(more)) => {
            for (name, value) in more {
                match sum.get_mut(name) {
                    Some(place) => add(place, value),
                    None => {
                        sum.insert(name.clone(), value.clone());
                    }
                }
            }
        }
        (sum, more) => {
            if let (Some(a), Some(b)) = (sum.as_u64(), more.as_u64()) {
                *sum = json!(a + b);
            } else if let (Some(a), Some(b)) = (sum.as_f64(), more.as_f64()) {
                *sum = json!(a + b);
            }
        }
    }
}
