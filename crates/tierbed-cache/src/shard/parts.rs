//! Shard locks, and the positions of a call grouped by shard.
//!
//! The part of a row follows from the hash of its key, so that all threads agree on it, and a part
//! is only reached through its lock: a row is never seen half written. No lock is common to all
//! rows, and no thread holds two. No thread waits for a lock while another that it needs is free.
//!
//! ```text
//! hashes ─▶ arrange ─▶ Visits: [part 0: 3, 7] [part 2: 0, 1] ─▶ by_lock: lock, look, unlock
//! ```
//!
//! `tierbed-models` compiles this file over a scheduler that tries every order of events.

use std::ops::DerefMut;
use std::sync::{PoisonError, TryLockError};

use super::sync::{spin_loop, Mutex, MutexGuard, TRIES};

/// Most parts: their numbers are kept in a byte per row of a call.
pub(super) const PARTS_MAX: usize = 256;
/// Most locks: those still to be taken are bits of a word.
const LOCKS_MAX: usize = u64::BITS as usize;

/// Parts of something large, several behind each lock.
#[derive(Debug)]
pub(super) struct Parts<T> {
    locks: Vec<Locked<T>>,
    part_count: usize,
}

/// The parts from `first` to before `end`.
#[derive(Debug)]
struct Locked<T> {
    first: usize,
    end: usize,
    parts: Mutex<Vec<T>>,
}

impl<T> Parts<T> {
    /// Puts `parts`, at most [`PARTS_MAX`], behind `lock_count` locks, or one each where there are
    /// fewer. Locks are dealt out evenly, in the order of the parts.
    pub(super) fn new(parts: impl IntoIterator<Item = T>, lock_count: usize) -> Self {
        let parts: Vec<_> = parts.into_iter().collect();
        let part_count = parts.len();
        assert!(part_count <= PARTS_MAX, "numbers of parts are bytes");
        let lock_count = lock_count.min(part_count).min(LOCKS_MAX);
        let mut parts = parts.into_iter();
        let locks = (0..lock_count).map(|lock| {
            let (first, end) =
                (lock * part_count / lock_count, (lock + 1) * part_count / lock_count);
            Locked { first, end, parts: Mutex::new(parts.by_ref().take(end - first).collect()) }
        });
        Self { locks: locks.collect(), part_count }
    }

    /// Puts the positions of the rows of `hashes` that take part into the order of their parts.
    pub(super) fn arrange(
        &self,
        hashes: impl Iterator<Item = u64>,
        visits: &mut Visits,
        takes_part: impl Fn(usize) -> bool,
    ) {
        visits.part_of.clear();
        visits.part_of.extend(hashes.map(|hash| self.part(hash)));
        visits.arrange(self.part_count, takes_part);
    }

    /// The part of a row. The part's own index looks at other bits.
    fn part(&self, hash: u64) -> u8 {
        let bits = (hash >> 40) & 0xFFFF;
        ((bits * self.part_count as u64) >> 16) as u8
    }

    /// Takes every lock whose parts have positions in `visits`, one after the other, and gives the
    /// parts out with them: in order, but locks that another thread has come later. The next is
    /// taken after the one before was dropped.
    pub(super) fn by_lock<'a>(
        &'a self,
        visits: &'a Visits,
    ) -> impl Iterator<Item = (impl DerefMut<Target = Vec<T>> + 'a, Visited<'a>)> {
        let mut left = self.asked(visits);
        std::iter::from_fn(move || {
            let (at, parts) = self.take_one(left)?;
            let lock = self.locks.get(at)?;
            left &= !(1 << at);
            Some((parts, visits.of_parts(lock.first, lock.end)))
        })
    }

    /// Calls `visit` with what [`by_lock`](Self::by_lock) gives out, but waits for nobody: `false`
    /// when another thread has a lock all the while. Its parts are not visited then.
    pub(super) fn visit_free(
        &self,
        visits: &Visits,
        mut visit: impl FnMut(&mut [T], Visited<'_>),
    ) -> bool {
        let mut left = self.asked(visits);
        for _ in 0..TRIES {
            for (at, lock) in self.locks.iter().enumerate() {
                if left & (1 << at) == 0 {
                    continue;
                }
                if let Some(mut parts) = take_free(&lock.parts) {
                    visit(&mut parts, visits.of_parts(lock.first, lock.end));
                    left &= !(1 << at);
                }
            }
            if left == 0 {
                return true;
            }
            spin_loop();
        }
        false
    }

    /// Returns the set of locks whose parts have positions in `visits`.
    fn asked(&self, visits: &Visits) -> u64 {
        let asked = self.locks.iter().enumerate().filter(|(_, lock)| {
            let (start, end) = visits.range(lock.first, lock.end);
            start < end
        });
        asked.fold(0, |asked, (at, _)| asked | 1 << at)
    }

    /// Takes the first lock of the set `left` that is free, or waits for the first.
    fn take_one(&self, left: u64) -> Option<(usize, MutexGuard<'_, Vec<T>>)> {
        let mut rest = left;
        while rest != 0 {
            let at = rest.trailing_zeros() as usize;
            match take_free(&self.locks.get(at)?.parts) {
                Some(parts) => return Some((at, parts)),
                None => rest &= rest - 1,
            }
        }
        let at = left.trailing_zeros() as usize;
        self.locks.get(at).map(|lock| (at, wait_for(&lock.parts)))
    }

    /// Calls `visit` with every part, one after the other, and gives its lock back after each.
    pub(super) fn for_each(&self, mut visit: impl FnMut(&mut T)) {
        for lock in &self.locks {
            for at in 0..lock.end - lock.first {
                wait_for(&lock.parts).get_mut(at).into_iter().for_each(&mut visit);
            }
        }
    }
}

// A panic inside a part is a programmer error that ends the lookup; a tier holds only copies
// that were whole when they were stored, so later lookups may go on.
fn wait_for<T>(parts: &Mutex<T>) -> MutexGuard<'_, T> {
    parts.lock().unwrap_or_else(PoisonError::into_inner)
}

fn take_free<T>(parts: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match parts.try_lock() {
        Ok(parts) => Some(parts),
        Err(TryLockError::Poisoned(error)) => Some(error.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

/// Which positions of a call belong to which part. The caller keeps it, so that calls allocate
/// nothing.
#[derive(Debug, Default)]
pub struct Visits {
    /// Part of each position.
    part_of: Vec<u8>,
    /// Positions, part by part.
    positions: Vec<u32>,
    /// Where each part's positions end.
    ends: Vec<u32>,
}

#[expect(clippy::indexing_slicing, reason = "a position has a part, a part has an end")]
impl Visits {
    /// Bytes per key of the largest call.
    pub const BYTES_PER_KEY: usize = size_of::<u8>() + size_of::<u32>();

    /// Has room for calls of `key_count` keys.
    #[must_use]
    pub fn with_capacity(key_count: usize) -> Self {
        Self {
            part_of: Vec::with_capacity(key_count),
            positions: Vec::with_capacity(key_count),
            ends: Vec::with_capacity(PARTS_MAX),
        }
    }

    /// Sorts the positions that take part by part, each part's ascending: a counting sort.
    fn arrange(&mut self, part_count: usize, takes_part: impl Fn(usize) -> bool) {
        self.ends.clear();
        self.ends.resize(part_count, 0);
        let mut taking_part = 0;
        for (_, &part) in self.part_of.iter().enumerate().filter(|(at, _)| takes_part(*at)) {
            self.ends[usize::from(part)] += 1;
            taking_part += 1;
        }
        let mut start = 0;
        for end in &mut self.ends {
            start += std::mem::replace(end, start);
        }
        self.positions.clear();
        self.positions.resize(taking_part, 0);
        for (at, &part) in self.part_of.iter().enumerate().filter(|(at, _)| takes_part(*at)) {
            let next = &mut self.ends[usize::from(part)];
            self.positions[*next as usize] = at as u32;
            *next += 1;
        }
    }

    /// Where the positions of the parts from `first` to before `end` stand.
    #[inline]
    fn range(&self, first: usize, end: usize) -> (usize, usize) {
        let end_of = |count: usize| if count == 0 { 0 } else { self.ends[count - 1] as usize };
        (end_of(first), end_of(end))
    }

    fn of_parts(&self, first: usize, end: usize) -> Visited<'_> {
        let (start, stop) = self.range(first, end);
        Visited {
            first,
            start,
            ends: &self.ends[first..end],
            positions: &self.positions[start..stop],
            part_of: &self.part_of,
        }
    }
}

/// The positions of the parts behind one lock, part by part.
#[derive(Debug, Clone, Copy)]
pub(super) struct Visited<'a> {
    /// The lock's first part.
    first: usize,
    /// Where the positions begin among those of all parts.
    start: usize,
    ends: &'a [u32],
    pub(super) positions: &'a [u32],
    part_of: &'a [u8],
}

#[expect(clippy::indexing_slicing, reason = "positions are those of the call")]
impl<'a> Visited<'a> {
    /// Returns which of the lock's parts a position belongs to.
    #[inline]
    pub(super) fn part_of(&self, position: u32) -> usize {
        usize::from(self.part_of[position as usize]) - self.first
    }

    /// Returns those of the lock's `parts` that have positions, with these.
    pub(super) fn by_part<'p, T>(
        &self,
        parts: &'p mut [T],
    ) -> impl Iterator<Item = (&'p mut T, &'a [u32])> + use<'a, 'p, T> {
        let (mut at, start, positions) = (0, self.start, self.positions);
        let visited = parts.iter_mut().zip(self.ends).map(move |(part, &end)| {
            let end = end as usize - start;
            let own = &positions[at..end];
            at = end;
            (part, own)
        });
        visited.filter(|(_, own)| !own.is_empty())
    }
}
