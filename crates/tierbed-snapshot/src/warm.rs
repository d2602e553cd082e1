//! Rows that another snapshot was asked for most, read into the cache of one that has none yet.

use std::collections::BTreeMap;

use tierbed_core::{Bags, Result, TableId};
use tierbed_kernels::{FeatureLayout, Pooling};

use crate::delta::holds;
use crate::snapshot::Snapshot;

/// Most rows that are read: about a second of a device's reads, so that lookups have the rest.
const ROWS_MAX: usize = 1 << 16;
/// Rows that are looked up at once.
const CHUNK_ROWS: usize = 256;

impl Snapshot {
    /// Looks up rows that the tiers of `other` hold and would give away last, as many as fit the
    /// tiers of this one, 65,536 at most. Ends early when `goes_on` says so. Returns how many.
    ///
    /// # Errors
    /// As [`lookup`](Self::lookup).
    pub fn warm_from(&self, other: &Self, goes_on: &dyn Fn() -> bool) -> Result<u64> {
        let count = usize::try_from(self.tiers().rows_max()).unwrap_or(usize::MAX).min(ROWS_MAX);
        let mut keys = other.tiers().hottest(count);
        let layers = self.layers();
        keys.retain(|key| holds(&layers.schema, *key));
        // Those to be kept longest last.
        keys.reverse();
        let mut done = 0;
        for chunk in keys.chunks(CHUNK_ROWS) {
            if !goes_on() {
                break;
            }
            let mut tables: BTreeMap<TableId, Vec<i64>> = BTreeMap::new();
            for key in chunk {
                tables.entry(key.table).or_default().push(key.row.0 as i64);
            }
            for (table, rows) in tables {
                let plan = FeatureLayout::new(&layers.schema, &[(table, Pooling::None)])?;
                let offsets = [0, rows.len() as i64];
                let bags = Bags::new(&rows, &offsets, None, 1)?;
                let mut out = vec![0.0; plan.output_len(&bags)];
                self.lookup_in(&layers, &plan, &bags, &mut out)?;
                done += rows.len() as u64;
            }
        }
        Ok(done)
    }
}
