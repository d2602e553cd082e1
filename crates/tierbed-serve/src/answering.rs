//! The snapshot that answers now, its version, and how old what it says is.
//!
//! Whoever answers takes the snapshot once, for all of an answer.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use tierbed_core::env::{unix_ms, Clock};
use tierbed_core::Result;
use tierbed_snapshot::{Snapshot, View};

/// Generations before the newest that may answer at once, of a snapshot's deltas. Deltas may come
/// many times a second, and who asks follows later where processors are busy.
pub(crate) const FORMER_MAX: usize = 16;
/// Snapshots before the newest that may answer, each with memory of its own.
const FORMER_SNAPSHOTS_MAX: usize = 4;

/// No number is known.
const NONE: u64 = u64::MAX;

/// See the module documentation.
#[derive(Debug)]
pub(crate) struct Answering {
    snapshot: RwLock<Arc<Snapshot>>,
    clock: Arc<dyn Clock>,
    committed_at_ms: AtomicU64,
    version: AtomicU64,
    /// When the version was seen to be the channel's.
    in_step_us: AtomicU64,
    /// How long generations before the newest answer after the last who asked for them; 0: no
    /// longer.
    grace_us: AtomicU64,
    former: Mutex<Former>,
}

/// Generations before the newest.
#[derive(Debug, Default)]
struct Former {
    /// Whole snapshots, the newest first.
    snapshots: Vec<Arc<Snapshot>>,
    /// When each was last asked for, or ceased to be the newest.
    used_us: BTreeMap<String, u64>,
}

fn some(number: &AtomicU64) -> Option<u64> {
    Some(number.load(Ordering::Relaxed)).filter(|&number| number != NONE)
}

impl Answering {
    pub(crate) fn new(snapshot: Arc<Snapshot>, clock: &Arc<dyn Clock>) -> Self {
        Self {
            snapshot: RwLock::new(snapshot),
            clock: Arc::clone(clock),
            committed_at_ms: AtomicU64::new(NONE),
            version: AtomicU64::new(NONE),
            in_step_us: AtomicU64::new(NONE),
            grace_us: AtomicU64::new(0),
            former: Mutex::default(),
        }
    }

    /// Lets generations before the newest answer for `grace_us` after the last who asked for them.
    pub(crate) fn keep_former(&self, grace_us: u64) {
        self.grace_us.store(grace_us, Ordering::Relaxed);
        self.keep_former_of(&self.snapshot());
    }

    /// Lets a snapshot that will answer keep its generations, too.
    pub(crate) fn keep_former_of(&self, snapshot: &Snapshot) {
        let keeps = self.grace_us.load(Ordering::Relaxed) > 0;
        snapshot.keep_former(if keeps { FORMER_MAX } else { 0 });
    }

    /// Returns the generation of `identity`, if it answers.
    pub(crate) fn view_of(&self, identity: &str) -> Option<View<'static>> {
        let newest = self.snapshot().shared_view();
        if **newest.identity() == *identity {
            return Some(newest);
        }
        let mut former = self.former();
        let kept = [self.snapshot()].into_iter().chain(former.snapshots.iter().cloned());
        let view = kept.filter_map(|snapshot| snapshot.view_of(identity)).next()?;
        former.used_us.insert(identity.to_owned(), self.clock.now_us());
        Some(view)
    }

    /// Returns all generations that answer, the newest first.
    pub(crate) fn views(&self) -> Vec<View<'static>> {
        let former = self.former();
        let kept = [self.snapshot()].into_iter().chain(former.snapshots.iter().cloned());
        let views = kept.flat_map(|snapshot| {
            let identities = snapshot.generations().into_iter();
            identities.filter_map(move |identity| snapshot.view_of(&identity)).collect::<Vec<_>>()
        });
        views.collect()
    }

    /// Lets generations answer no more that nobody has asked for lately. Waits for who looks at
    /// them.
    ///
    /// # Errors
    /// Those of [`Snapshot::forget_former`].
    pub(crate) fn forget_unused(&self) -> Result<()> {
        let (now_us, snapshot) = (self.clock.now_us(), self.snapshot());
        let grace_us = self.grace_us.load(Ordering::Relaxed);
        let deltas: Vec<String> = snapshot.generations().split_off(1);
        let mut left = Vec::new();
        {
            let mut guard = self.former();
            let Former { snapshots, used_us } = &mut *guard;
            let mut is_unused = |identity: &str| {
                let used_us = *used_us.entry(identity.to_owned()).or_insert(now_us);
                now_us.saturating_sub(used_us) > grace_us
            };
            let unused: Vec<_> = deltas.iter().filter(|identity| is_unused(identity)).collect();
            snapshots.retain(|snapshot| {
                let of_it = snapshot.generations();
                let unused = of_it.iter().filter(|identity| is_unused(identity)).count();
                unused < of_it.len()
            });
            left.extend(unused.into_iter().cloned());
            let newest = snapshot.generations();
            used_us.retain(|identity, _| {
                let has = |snapshot: &Arc<Snapshot>| snapshot.generations().contains(identity);
                newest.contains(identity) || snapshots.iter().any(has)
            });
        }
        left.iter().try_for_each(|identity| snapshot.forget_former(identity))
    }

    // The lists are whole after every statement.
    fn former(&self) -> MutexGuard<'_, Former> {
        self.former.lock().unwrap_or_else(PoisonError::into_inner)
    }

    // The place is whole after every statement.
    pub(crate) fn snapshot(&self) -> Arc<Snapshot> {
        Arc::clone(&self.snapshot.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Answers from another snapshot; returns the one before.
    pub(crate) fn swap(&self, next: Arc<Snapshot>) -> Arc<Snapshot> {
        let mut place = self.snapshot.write().unwrap_or_else(PoisonError::into_inner);
        let before = std::mem::replace(&mut *place, next);
        drop(place);
        if self.grace_us.load(Ordering::Relaxed) > 0 {
            let mut former = self.former();
            former.snapshots.insert(0, Arc::clone(&before));
            former.snapshots.truncate(FORMER_SNAPSHOTS_MAX);
        }
        before
    }

    /// Notes when the training step of what answers committed, where that is known.
    pub(crate) fn committed(&self, at_ms: Option<u64>) {
        self.committed_at_ms.store(at_ms.unwrap_or(NONE), Ordering::Relaxed);
    }

    /// Notes the version of a channel that answers.
    pub(crate) fn is_at(&self, version: u64) {
        self.version.store(version, Ordering::Relaxed);
    }

    /// Notes that the channel was just seen at the version that answers. A server that starts
    /// notes it, too: its lag counts from there.
    pub(crate) fn in_step(&self) {
        self.in_step_us.store(self.clock.now_us(), Ordering::Relaxed);
    }

    /// Returns the version that answers, where a channel is followed.
    pub(crate) fn version(&self) -> Option<u64> {
        some(&self.version)
    }

    /// Returns the seconds since the training step of what answers.
    pub(crate) fn freshness_s(&self) -> Option<f64> {
        let at_ms = some(&self.committed_at_ms)?;
        Some(unix_ms().saturating_sub(at_ms) as f64 / 1e3)
    }

    /// Returns the seconds since the channel was seen to be at the version that answers.
    pub(crate) fn lag_s(&self) -> Option<f64> {
        let at_us = some(&self.in_step_us)?;
        Some(self.clock.now_us().saturating_sub(at_us) as f64 / 1e6)
    }
}
