//! Parallel replay of one log through many caches.
//!
//! ```text
//! a piece of the log ─▶ threads: each takes the next replay and asks it for the whole piece
//! ```
//!
//! A replay sees the pieces in their order whatever the threads are, so counts are those of one
//! cache that is asked alone. The log is needed piece by piece, not as a whole.

use std::slice::IterMut;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use tierbed_cache::{PolicyKind, ReplayCache, ReplayCounts};
use tierbed_core::Result;

/// Caches that are asked the same groups.
#[derive(Debug)]
pub struct Replays {
    replays: Vec<Replay>,
    /// Groups asked for before counting begins, and those that were asked for.
    first: u64,
    asked: u64,
}

#[derive(Debug)]
struct Replay {
    cache: ReplayCache,
    /// What was counted of the groups before the first.
    before: ReplayCounts,
}

impl Replay {
    /// Asks for `groups`; those from `first` on count.
    fn ask(&mut self, groups: &[&[u32]], first: usize) -> Result<()> {
        let (before, counted) = groups.split_at(first.min(groups.len()));
        for group in before {
            self.cache.ask(group)?;
        }
        if !before.is_empty() {
            self.before = self.cache.counts();
        }
        counted.iter().try_for_each(|group| self.cache.ask(group).map(drop))
    }
}

impl Replays {
    /// Builds empty caches, each of a policy and so many rows, over rows of `tables`, the table of
    /// each row `[row_count]`. Groups count from number `first` on.
    ///
    /// # Errors
    /// As of [`ReplayCache::new`].
    pub fn new(caches: &[(PolicyKind, usize)], tables: &Arc<[u16]>, first: u64) -> Result<Self> {
        let replays = caches.iter().map(|&(kind, capacity_rows)| {
            let cache = ReplayCache::new(kind, tables.len(), capacity_rows)?;
            let cache = cache.with_tables(Arc::clone(tables))?;
            Ok(Replay { cache, before: ReplayCounts::default() })
        });
        Ok(Self { replays: replays.collect::<Result<_>>()?, first, asked: 0 })
    }

    /// Asks every cache for `groups`, in their order, on `threads` threads.
    ///
    /// # Errors
    /// `Invalid` when a row is out of range.
    pub fn ask(&mut self, groups: &[&[u32]], threads: usize) -> Result<()> {
        let first = usize::try_from(self.first.saturating_sub(self.asked)).unwrap_or(usize::MAX);
        self.asked += groups.len() as u64;
        let threads = threads.clamp(1, self.replays.len().max(1));
        let waiting = Mutex::new(self.replays.iter_mut());
        let work = || ask_next(&waiting, groups, first);
        thread::scope(|scope| {
            let others: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
            let mine = work();
            others.into_iter().fold(mine, |result, other| {
                result.and(other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            })
        })
    }

    /// Returns what was counted from the first group on, of each cache.
    #[must_use]
    pub fn counts(&self) -> Vec<ReplayCounts> {
        self.replays.iter().map(|replay| replay.cache.counts().since(replay.before)).collect()
    }
}

/// Asks the replays that wait, one after the other.
fn ask_next(waiting: &Mutex<IterMut<'_, Replay>>, groups: &[&[u32]], first: usize) -> Result<()> {
    let next = || waiting.lock().unwrap_or_else(PoisonError::into_inner).next();
    while let Some(replay) = next() {
        replay.ask(groups, first)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use tierbed_core::env::SplitMix64;

    use super::*;

    #[test]
    fn pieces_and_threads_change_no_count() {
        let mut rng = SplitMix64::new(5);
        let mut draw = |start: u32| start + (rng.unit_f64().powi(3) * 500.0) as u32;
        let groups: Vec<[u32; 2]> = (0..3000).map(|_| [draw(0), draw(500)]).collect();
        let groups: Vec<&[u32]> = groups.iter().map(|group| &group[..]).collect();
        let tables: Arc<[u16]> = (0..1000).map(|row| row / 500).collect();
        let caches: Vec<_> =
            PolicyKind::ALL.into_iter().flat_map(|kind| [(kind, 50), (kind, 300)]).collect();
        for (first, piece, threads) in [(0, 3000, 1), (1000, 7, 3), (1001, 1000, 2), (2999, 400, 9)]
        {
            let mut replays = Replays::new(&caches, &tables, first).unwrap();
            groups.chunks(piece).for_each(|piece| replays.ask(piece, threads).unwrap());
            for (&(kind, capacity_rows), counts) in caches.iter().zip(replays.counts()) {
                let mut cache = ReplayCache::new(kind, 1000, capacity_rows).unwrap();
                cache = cache.with_tables(Arc::clone(&tables)).unwrap();
                let mut expected = ReplayCounts::default();
                for (at, group) in groups.iter().enumerate() {
                    let hit_count = cache.ask(group).unwrap();
                    if at as u64 >= first {
                        expected.note(group.len(), hit_count as usize);
                    }
                }
                assert_eq!(counts, expected, "{kind:?} {capacity_rows} from {first}");
            }
        }
    }

    #[test]
    fn wrong_rows_are_refused_on_any_thread() {
        let tables: Arc<[u16]> = [0, 0].into();
        let mut replays = Replays::new(&[(PolicyKind::Lru, 1); 3], &tables, 0).unwrap();
        assert!(replays.ask(&[&[1, 2]], 2).is_err());
        assert!(Replays::new(&[(PolicyKind::Lru, 0)], &tables, 0).is_err());
    }
}
