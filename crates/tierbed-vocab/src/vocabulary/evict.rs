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

/// An eviction in progress.
struct Pass {
    /// The time, in the unit of the policy's `ttl`.
    now: u32,
    /// Rows that the ids of the current bucket lost.
    rows: Vec<u64>,
    evicted: Evicted,
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
        let mut pass = Pass { now, rows: Vec::new(), evicted: Evicted::default() };
        let mut slot = 0;
        while self.state.policy.counts_all_uses() {
            let keys = self.bring_next(pages, store, &mut slot)?;
            if keys.is_empty() {
                break;
            }
            for key in keys {
                self.evict_bucket(pages, store, key, &mut pass)?;
                for row in &pass.rows {
                    self.free.push(pages, store, &mut self.state.free_count, *row)?;
                }
                pass.rows.sort_unstable();
                if !pass.rows.is_empty() {
                    freed(store, &pass.rows)?;
                }
            }
        }
        let evicted = pass.evicted;
        // Saturating: pages of a damaged commit may name more ids than its state counts.
        self.state.id_count = self.state.id_count.saturating_sub(evicted.id_count);
        self.state.waiting_count = self.state.waiting_count.saturating_sub(evicted.waiting_count);
        Ok(evicted)
    }

    // Applies the policy to the ids of bucket page `key`; the rows they lose replace `pass.rows`.
    fn evict_bucket(
        &self,
        pages: &mut PageCache,
        store: &mut dyn TrainStore,
        key: RowKey,
        pass: &mut Pass,
    ) -> Result<()> {
        let Pass { now, rows, evicted } = pass;
        rows.clear();
        let bucket = Bucket::parse(pages.page(store, key)?)?;
        let (mut kept, mut is_changed) = (Vec::new(), false);
        for mut entry in bucket.entries() {
            let before = entry.count;
            if !self.state.policy.eviction.judge(&mut entry.count, entry.seen, *now) {
                is_changed |= before.to_bits() != entry.count.to_bits();
                kept.push(entry);
            } else if let Some(row) = entry.row {
                rows.push(self.checked_row(row)?);
            } else {
                evicted.waiting_count += 1;
            }
        }
        evicted.id_count += rows.len() as u64;
        if is_changed || kept.len() < bucket.len() {
            let depth = bucket.depth;
            write_bucket(pages.page_mut(store, key)?, depth, &kept);
        }
        Ok(())
    }
}
