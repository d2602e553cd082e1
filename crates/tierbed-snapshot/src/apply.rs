//! Deltas applied to an open snapshot, under lookups, with its cache kept.
//!
//! Nothing is rewritten: the delta is opened beside the snapshot, and rows that it has are looked
//! up there from one moment on. Tiers keep all other rows; those of the delta get their new
//! weights in place. The five steps are those of [`Leases::swap`]:
//!
//! ```text
//! 0 check every page of the delta
//! 1 announce: tiers neither give nor take its rows    2 wait for lookups that began before
//! 3 replace its rows where tiers hold them            4 answer from it    5 wait again
//! ```
//!
//! A row that falls from a tier meanwhile is dropped: its old weights cannot arrive in the next
//! tier behind the replacement.
//!
//! [`Leases::swap`]: tierbed_core::handover::Leases::swap

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use serde::Serialize;
use tierbed_core::{Error, ErrorKind, Reservation, Result, RowKey};
use tierbed_io::{Folder, PAGE_BYTES};

use crate::delta::chain::Below;
use crate::layers::{Layers, LayersLease, OVERLAYS_MAX};
use crate::manifest::Manifest;
use crate::open::{open_pages, Backing};
use crate::overlay::{Overlay, OverlayParts};
use crate::snapshot::Snapshot;
use crate::view::View;

/// Rows that are replaced at once: so long a lock of a tier is held.
const REPLACED_ROWS: usize = 64;
/// Share of the cache that it gives at least for deltas: so it is resized rarely.
const CACHE_SHARE: u64 = 64;

/// Deltas that were applied to an open snapshot.
#[derive(Debug)]
pub(crate) struct Applying {
    /// One delta at a time. A panic within leaves the swap undone: poisoned.
    turn: Mutex<()>,
    cache: Mutex<Reservation>,
    /// Bytes that the cache had at first, or would have had alone.
    cache_bytes_max: u64,
    backing: Backing,
    rows_replaced: AtomicU64,
    /// Generations before the newest that still answer, at most.
    former_max: AtomicUsize,
    mark: OnceLock<Arc<AtomicBool>>,
}

/// Deltas that come upon those that stay.
struct Change {
    before: Layers,
    /// How many deltas stay.
    kept: usize,
    /// Oldest first.
    coming: Vec<Arc<Overlay>>,
}

/// What a snapshot answers from.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Generation {
    /// Deltas applied since the snapshot was opened.
    pub number: u64,
    /// The identity of the newest delta, which names what it was made against, or of the snapshot.
    pub identity: String,
    /// Deltas that lie upon the snapshot.
    pub delta_count: u64,
    /// Their rows.
    pub delta_rows: u64,
    /// Bytes of their pages, on disk.
    pub delta_pages_bytes: u64,
    /// Bytes of what is in memory of them.
    pub delta_memory_bytes: u64,
    /// Rows that tiers held and that got new weights in place, over all deltas.
    pub rows_replaced: u64,
}

impl Applying {
    pub(crate) fn new(cache: Reservation, cache_bytes_max: u64, backing: Backing) -> Self {
        Self {
            turn: Mutex::new(()),
            cache: Mutex::new(cache),
            cache_bytes_max,
            backing,
            rows_replaced: AtomicU64::new(0),
            former_max: AtomicUsize::new(0),
            mark: OnceLock::new(),
        }
    }
}

impl Snapshot {
    /// Answers from the delta in `folder` from now on. Lookups go on meanwhile; each has rows of
    /// one generation. The caller holds no [`View`](crate::View): they are waited for.
    ///
    /// The delta was made against what answers now, or against the snapshot itself; then it takes
    /// the place of those applied before. One that is applied already is left alone. Its memory is
    /// twelve bytes a row, which the cache gives where nothing else is free.
    ///
    /// # Errors
    /// `Invalid` when it was made against something else, or there is no room for it, `Corruption`
    /// when it is not what was written, `Io` from its folder, `Poisoned` behind a panic of an
    /// earlier call. All answers are as before then.
    pub fn apply(&self, folder: Arc<dyn Folder>) -> Result<Generation> {
        self.apply_with(folder, |_| Ok(()))
    }

    /// As [`apply`](Self::apply); `prepare` is given what will answer, before anything changes. It
    /// looks nothing up there.
    ///
    /// # Errors
    /// As [`apply`](Self::apply), and those of `prepare`.
    pub fn apply_with(
        &self,
        folder: Arc<dyn Folder>,
        prepare: impl FnOnce(&View<'_>) -> Result<()>,
    ) -> Result<Generation> {
        let turn = self.turn()?;
        let before = Layers::clone(&self.layers());
        let manifest = Manifest::read(folder.as_ref())?;
        let identity = manifest.identity()?;
        if before.overlays.last().is_some_and(|newest| *newest.identity == *identity) {
            return Ok(self.generation());
        }
        let kept = self.kept_below(&manifest, &before)?;
        let overlay = Arc::new(self.open_overlay(folder, manifest, before.number + 1)?);
        self.change(Change { before, kept, coming: vec![overlay] }, prepare)?;
        drop(turn);
        Ok(self.generation())
    }

    /// Answers from the snapshot and the deltas in `folders` upon it, oldest first, and from no
    /// others: deltas that lie upon it already stay, others leave. So it goes back, too.
    ///
    /// `prepare` is given the snapshot alone, then with each delta; the last one will answer.
    ///
    /// # Errors
    /// As [`apply_with`](Self::apply_with); `Invalid` also when a delta was not made against the
    /// one before it.
    pub fn apply_chain_with(
        &self,
        folders: Vec<Arc<dyn Folder>>,
        mut prepare: impl FnMut(&View<'_>) -> Result<()>,
    ) -> Result<Generation> {
        let turn = self.turn()?;
        let before = Layers::clone(&self.layers());
        let number = before.number + 1;
        let (mut overlays, mut kept) = (Vec::new(), 0);
        for folder in folders {
            let below = self.layers_of(number, &overlays)?;
            prepare(&View::of(self, LayersLease::alone(below.clone())))?;
            let manifest = Manifest::read(folder.as_ref())?;
            let identity = manifest.identity()?;
            let known = before.overlays.get(kept).filter(|_| kept == overlays.len());
            if let Some(known) = known.filter(|known| *known.identity == *identity) {
                kept += 1;
                overlays.push(Arc::clone(known));
                continue;
            }
            if self.kept_below(&manifest, &below)? != overlays.len() {
                return Err(Error::invalid("delta was not made against the one before it")
                    .with("delta", identity)
                    .with("before", below.identity)
                    .with("remedy", "give a snapshot's deltas in the order of their making"));
            }
            overlays.push(Arc::new(self.open_overlay(folder, manifest, number)?));
        }
        if kept == overlays.len() && kept == before.overlays.len() {
            prepare(&self.view())?;
            return Ok(self.generation());
        }
        let coming = overlays.split_off(kept);
        self.change(Change { before, kept, coming }, prepare)?;
        drop(turn);
        Ok(self.generation())
    }

    fn turn(&self) -> Result<MutexGuard<'_, ()>> {
        self.applying().turn.lock().map_err(|_| {
            Error::new(ErrorKind::Poisoned, "an earlier delta was not applied to its end")
                .with("remedy", "open the snapshot again")
        })
    }

    /// Returns what answers with `overlays` upon the snapshot.
    fn layers_of(&self, number: u64, overlays: &[Arc<Overlay>]) -> Result<Layers> {
        let alone = Layers { number, ..Layers::alone(self.schema(), &self.identity()?) };
        let Some(newest) = overlays.last() else { return Ok(alone) };
        Ok(Layers {
            identity: newest.manifest.identity()?.into(),
            overlays: overlays.to_vec(),
            schema: Arc::new(newest.manifest.schema.clone()),
            ..alone
        })
    }

    /// Makes a change, in the five steps of the module documentation.
    fn change(&self, change: Change, prepare: impl FnOnce(&View<'_>) -> Result<()>) -> Result<()> {
        let Change { before, kept, coming } = change;
        let leaving: Vec<Arc<Overlay>> = before.overlays.iter().skip(kept).cloned().collect();
        let overlays = before.overlays.iter().take(kept).chain(&coming).cloned();
        let overlays: Vec<_> = overlays.collect();
        assert!(overlays.len() <= OVERLAYS_MAX, "{} deltas upon a snapshot", overlays.len());
        let pending: Vec<_> = leaving.iter().chain(&coming).cloned().collect();
        let number = before.number + 1;
        let mut next = self.layers_of(number, &overlays)?;
        let former = before.former_with(&pending);
        next.former = former.clone();
        next.former.insert(0, before.retired(&pending));
        // What answers again is not a former one.
        next.former.retain(|former| former.identity != next.identity);
        next.former.truncate(self.applying().former_max.load(Ordering::Relaxed));
        let staged = Layers { pending: pending.clone(), ..next.clone() };
        let staged = View::of(self, LayersLease::alone(staged));
        let ids = staged.ids()?;
        next.ids.get_or_init(|| ids);
        prepare(&staged)?;
        drop(staged);
        if let Some(mark) = self.applying().mark.get() {
            mark.store(true, Ordering::Release);
        }
        let announced = Layers { pending, former, ..before };
        self.leases().swap(announced, || self.replace_rows(&coming, &leaving), next)?;
        assert_eq!(self.layers().number, number, "another delta was applied out of turn");
        // Files of deltas that left close here, not with the next lookup of a reader.
        self.attach_idle(&self.layers());
        Ok(())
    }

    /// Lets up to `count` generations before the newest still answer who asks for them by
    /// [`view_of`](Self::view_of), until [`forget_former`](Self::forget_former). Their deltas stay
    /// open meanwhile. Rows that changed since are read from their pages; all others come from the
    /// same cache.
    pub fn keep_former(&self, count: usize) {
        self.applying().former_max.store(count, Ordering::Relaxed);
    }

    /// Returns the identities of the generations that answer, the newest first.
    #[must_use]
    pub fn generations(&self) -> Vec<String> {
        let layers = LayersLease::of(self.leases());
        let former = layers.former.iter().map(|former| former.identity.to_string());
        std::iter::once(layers.identity.to_string()).chain(former).collect()
    }

    /// Lets the former generation of `identity` answer no more; waits for who looks at it. The
    /// caller holds no [`View`](crate::View).
    ///
    /// # Errors
    /// `Poisoned` behind a panic of an earlier [`apply`](Self::apply).
    pub fn forget_former(&self, identity: &str) -> Result<()> {
        let turn = self.turn()?;
        let before = Layers::clone(&LayersLease::of(self.leases()));
        if !before.former.iter().any(|former| *former.identity == *identity) {
            return Ok(());
        }
        let mut next = before.clone();
        next.former.retain(|former| *former.identity != *identity);
        self.leases().swap(before, || Ok::<(), Error>(()), next)?;
        self.attach_idle(&self.layers());
        drop(turn);
        Ok(())
    }

    /// Sets `mark` before the first delta answers: a forked process reads it, which may ask the
    /// snapshot nothing. Only the first mark is set.
    pub fn mark_deltas_in(&self, mark: &Arc<AtomicBool>) {
        self.applying().mark.get_or_init(|| Arc::clone(mark));
    }

    /// Returns what answers now.
    #[must_use]
    pub fn generation(&self) -> Generation {
        let layers = self.layers();
        let sum = |field: fn(&Overlay) -> u64| -> u64 {
            layers.overlays.iter().map(|overlay| field(overlay)).sum()
        };
        Generation {
            number: layers.number,
            identity: layers.identity.to_string(),
            delta_count: layers.overlays.len() as u64,
            delta_rows: sum(|overlay| overlay.manifest.row_count),
            delta_pages_bytes: sum(|overlay| overlay.manifest.page_count * PAGE_BYTES as u64),
            delta_memory_bytes: sum(Overlay::held_bytes),
            rows_replaced: self.applying().rows_replaced.load(Ordering::Relaxed),
        }
    }

    /// Checks that a delta fits what answers now; returns how many deltas stay below it.
    fn kept_below(&self, manifest: &Manifest, layers: &Layers) -> Result<usize> {
        let newest = layers.overlays.last().map(|newest| &newest.manifest);
        let below = Below { snapshot: self.manifest(), newest, delta_count: layers.overlays.len() };
        below.kept(manifest)
    }

    pub(crate) fn open_overlay(
        &self,
        folder: Arc<dyn Folder>,
        manifest: Manifest,
        number: u64,
    ) -> Result<Overlay> {
        let backing = self.applying().backing;
        let copied_bytes = backing.copied_bytes(manifest.page_count);
        let bytes = Overlay::memory_bytes(&manifest).saturating_add(copied_bytes);
        let memory = self.make_room("deltas", bytes)?;
        let pages = open_pages(folder.as_ref(), manifest.page_count, backing)?;
        Overlay::open(OverlayParts { number, folder, manifest, pages, memory })
    }

    /// Reserves memory for a `part`; the cache gives what is not free.
    pub(crate) fn make_room(&self, part: &'static str, bytes: u64) -> Result<Reservation> {
        let mut cache = self.cache();
        let missing_bytes = bytes.saturating_sub(self.budget().free_bytes());
        if missing_bytes > 0 {
            let given_bytes = missing_bytes.max(cache.bytes() / CACHE_SHARE);
            let Some(left_bytes) = cache.bytes().checked_sub(given_bytes) else {
                return Err(Error::invalid("dram budget too small for what comes upon a snapshot")
                    .with("dram_budget_bytes", self.budget().limit_bytes())
                    .with("missing_bytes", missing_bytes - cache.bytes())
                    .with("part", part)
                    .with("part_bytes", bytes)
                    .with("remedy", "open the snapshot with a larger dram_budget"));
            };
            self.tiers().resize(left_bytes);
            cache.resize(left_bytes)?;
        }
        self.budget().reserve(part, bytes)
    }

    /// Lets the cache have what is free of the budget again, up to what it had at first, or would
    /// have had alone: behind [`open_beside`](Self::open_beside), when the other one is closed.
    ///
    /// # Errors
    /// `Invalid` when somebody else took the memory meanwhile.
    pub fn grow_cache(&self) -> Result<()> {
        let mut cache = self.cache();
        let more_bytes = self.applying().cache_bytes_max.saturating_sub(cache.bytes());
        let bytes = cache.bytes() + more_bytes.min(self.budget().free_bytes());
        cache.resize(bytes)?;
        self.tiers().resize(bytes);
        Ok(())
    }

    /// Returns what is reserved for the cache.
    pub(crate) fn cache(&self) -> MutexGuard<'_, Reservation> {
        // A panic elsewhere leaves a reservation whole.
        self.applying().cache.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Gives rows of `coming` their new weights where tiers hold them; those that only deltas that
    /// leave have are forgotten. Where it fails, tiers hold no row of either.
    fn replace_rows(&self, coming: &[Arc<Overlay>], leaving: &[Arc<Overlay>]) -> Result<()> {
        let is_in = |overlays: &[Arc<Overlay>], key| {
            overlays.iter().any(|overlay| overlay.find(key).is_some())
        };
        for overlay in leaving {
            self.tiers().forget(overlay.keys().filter(|key| !is_in(coming, *key)));
        }
        let mut replaced = self.tiers().replacing(REPLACED_ROWS);
        let mut weights = Vec::new();
        let mut scan = |overlay: &Overlay, newer: &[Arc<Overlay>]| {
            overlay.scan(&mut |key: RowKey, code| {
                if self.tiers().knows(key) && !is_in(newer, key) {
                    overlay.weights(key, code, &mut weights)?;
                    replaced.push(key, &weights);
                }
                Ok(())
            })
        };
        let scanned = (1..).zip(coming).try_for_each(|(newer, overlay)| {
            let (_, newer) = coming.split_at(newer);
            scan(overlay, newer)
        });
        let row_count = replaced.finish();
        self.applying().rows_replaced.fetch_add(row_count, Ordering::Relaxed);
        if scanned.is_err() {
            leaving.iter().chain(coming).for_each(|overlay| self.tiers().forget(overlay.keys()));
        }
        scanned
    }
}
