//! Which lock guards this row? Parts behind a lock each, and the positions of a call part by part.
//!
//! The part of a row follows from the hash of its key, so that all threads agree on it, and a part
//! is only reached through its lock: a row is never seen half written. No lock is common to all
//! rows, and nobody holds two.
//!
//! ```text
//! hashes ─▶ arrange ─▶ Visits: [part 0: 3, 7] [part 2: 0, 1] ─▶ by_part: lock, look, unlock
//! ```
//!
//! `tierbed-models` compiles this file over a scheduler that tries every order of events.

use std::ops::DerefMut;
use std::sync::PoisonError;

use super::sync::{Mutex, MutexGuard};

/// Most parts: their numbers are kept in a byte per row of a call.
pub(super) const PARTS_MAX: usize = 256;

/// Parts of something large, each behind its lock.
#[derive(Debug)]
pub(super) struct Parts<T> {
    parts: Vec<Mutex<T>>,
}

impl<T> Parts<T> {
    /// Puts each of `parts`, at most [`PARTS_MAX`], behind a lock.
    pub(super) fn new(parts: impl IntoIterator<Item = T>) -> Self {
        let parts: Vec<_> = parts.into_iter().map(Mutex::new).collect();
        assert!(parts.len() <= PARTS_MAX, "numbers of parts are bytes");
        Self { parts }
    }

    /// Puts the positions of the rows of `hashes` that take part into the order of their parts.
    pub(super) fn arrange(
        &self,
        hashes: impl Iterator<Item = u64>,
        visits: &mut Visits,
        takes_part: impl Fn(usize) -> bool,
    ) {
        visits.homes.clear();
        visits.homes.extend(hashes.map(|hash| self.home(hash)));
        visits.arrange(self.parts.len(), takes_part);
    }

    /// The part of a row. The part's own index looks at other bits.
    fn home(&self, hash: u64) -> u8 {
        let bits = (hash >> 40) & 0xFFFF;
        ((bits * self.parts.len() as u64) >> 16) as u8
    }

    /// Locks every part that has positions in `visits`, one after the other, and gives it out with
    /// them. The next is locked after the one before was dropped.
    pub(super) fn by_part<'a>(
        &'a self,
        visits: &'a Visits,
    ) -> impl Iterator<Item = (impl DerefMut<Target = T> + 'a, &'a [u32])> {
        let visited = self.parts.iter().zip(visits.by_part());
        let visited = visited.filter(|(_, positions)| !positions.is_empty());
        visited.map(|(part, positions)| (lock(part), positions))
    }

    /// Locks every part, one after the other.
    pub(super) fn all(&self) -> impl Iterator<Item = impl DerefMut<Target = T> + '_> {
        self.parts.iter().map(lock)
    }
}

// A panic inside a part is a programmer error that ends the lookup; a tier holds only copies
// that were whole when they were stored, so later lookups may go on.
fn lock<T>(part: &Mutex<T>) -> MutexGuard<'_, T> {
    part.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Which positions of a call belong to which part. The caller keeps it, so that calls allocate
/// nothing.
#[derive(Debug, Default)]
pub struct Visits {
    /// Part of each position.
    homes: Vec<u8>,
    /// Positions, part by part.
    positions: Vec<u32>,
    /// Where each part's positions end.
    ends: Vec<u32>,
}

impl Visits {
    /// Bytes per key of the largest call.
    pub const BYTES_PER_KEY: usize = size_of::<u8>() + size_of::<u32>();

    /// Has room for calls of `key_count` keys.
    #[must_use]
    pub fn with_capacity(key_count: usize) -> Self {
        Self {
            homes: Vec::with_capacity(key_count),
            positions: Vec::with_capacity(key_count),
            ends: Vec::with_capacity(PARTS_MAX),
        }
    }

    /// Sorts the positions that take part by part, each part's ascending: a counting sort.
    fn arrange(&mut self, part_count: usize, takes_part: impl Fn(usize) -> bool) {
        self.ends.clear();
        self.ends.resize(part_count, 0);
        let mut taking_part = 0;
        for (_, &home) in self.homes.iter().enumerate().filter(|(at, _)| takes_part(*at)) {
            if let Some(count) = self.ends.get_mut(usize::from(home)) {
                *count += 1;
            }
            taking_part += 1;
        }
        let mut start = 0;
        for end in &mut self.ends {
            start += std::mem::replace(end, start);
        }
        self.positions.clear();
        self.positions.resize(taking_part, 0);
        for (at, &home) in self.homes.iter().enumerate().filter(|(at, _)| takes_part(*at)) {
            let Some(next) = self.ends.get_mut(usize::from(home)) else { continue };
            if let Some(place) = self.positions.get_mut(*next as usize) {
                *place = at as u32;
            }
            *next += 1;
        }
    }

    fn by_part(&self) -> impl Iterator<Item = &[u32]> {
        let mut start = 0;
        self.ends.iter().map(move |&end| {
            let positions = self.positions.get(start..end as usize).unwrap_or_default();
            start = end as usize;
            positions
        })
    }
}
