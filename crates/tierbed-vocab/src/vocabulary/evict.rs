//! Eviction of ids, bucket after bucket.

use serde::Serialize;
use tierbed_core::{Result, RowKey, TrainStore};

use super::Vocabulary;
use crate::bucket::{write_bucket, Bucket};
use crate::pages::PageCache;

/// Takes rows that eviction freed, increasing, and gives them their initial values in the store.
pub type FreedSink<'a> = dyn FnMut(&mut dyn TrainStore, &[u64]) -> Result<()> + 'a;

/// What an eviction did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Evicted {
    /// Ids that lost their row.
    pub id_count: u64,
    /// Ids forgotten before they had one.
    pub waiting_count: u64,
}

impl Vocabulary {
    /// Takes the rows of ids that the policy judges, at time `now`, and hands the rows, some at
    /// a time and increasing, to `freed`, which must give them their initial values.
    ///
    /// # Errors
    /// As [`train`](Self::train).
    pub fn evict(
        &mut self,
        pages: &mut PageCache,
        store: &mut dyn TrainStore,
        now: u32,
        freed: &mut FreedSink<'_>,
    ) -> Result<Evicted> {
        let mut evicted = Evicted::default();
        let (mut slot, mut rows) = (0, Vec::new());
        while self.state.policy.counts_everybody() {
            let keys = self.bring_next(pages, store, &mut slot)?;
            if keys.is_empty() {
                break;
            }
            for key in keys {
                evicted.waiting_count += self.evict_bucket(pages, store, (key, now), &mut rows)?;
                evicted.id_count += rows.len() as u64;
                for row in &rows {
                    self.free.push(pages, store, &mut self.state.free_count, *row)?;
                }
                rows.sort_unstable();
                if !rows.is_empty() {
                    freed(store, &rows)?;
                }
            }
        }
        self.state.id_count = self.state.id_count.saturating_sub(evicted.id_count);
        self.state.waiting_count = self.state.waiting_count.saturating_sub(evicted.waiting_count);
        Ok(evicted)
    }

    // Judges the ids of one bucket; their rows replace `rows`. Returns how many had none.
    fn evict_bucket(
        &self,
        pages: &mut PageCache,
        store: &mut dyn TrainStore,
        (key, now): (RowKey, u32),
        rows: &mut Vec<u64>,
    ) -> Result<u64> {
        rows.clear();
        let bucket = Bucket::parse(pages.page(store, key)?)?;
        let (mut kept, mut waiting, mut is_changed) = (Vec::new(), 0, false);
        for mut entry in bucket.entries() {
            let before = entry.count;
            if !self.state.policy.eviction.judge(&mut entry.count, entry.seen, now) {
                is_changed |= before.to_bits() != entry.count.to_bits();
                kept.push(entry);
            } else if let Some(row) = entry.row {
                rows.push(self.checked_row(row)?);
            } else {
                waiting += 1;
            }
        }
        if is_changed || kept.len() < bucket.len() {
            let depth = bucket.depth;
            write_bucket(pages.page_mut(store, key)?, depth, &kept);
        }
        Ok(waiting)
    }
}
