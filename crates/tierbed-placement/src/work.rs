//! Progress of a build: counted by any thread, reported at intervals, with the way to cancel it.
//!
//! ```text
//! build     0 ─────────── trial ───────────▶ 200 ─ blocks ▶ 250 ── grow ──▶ … 1000
//! stage                                              a share of the thousand, in units of its own
//! meter                                              one thread's units, never told twice
//! ```

use std::cell::Cell;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use tierbed_core::{Error, Result};

use crate::partition::LevelReport;

/// What a growing build is told to be in all.
pub(crate) const WHOLE: u64 = 1000;

/// How far a build is: levels of a bisection, or about a thousandth of the work each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BuildReport {
    /// Steps that are done.
    pub done: u64,
    /// Steps there will be.
    pub total: u64,
}

/// Hears how far a build is, on any of its threads; an error stops the build.
pub type Report<'a> = &'a mut (dyn FnMut(BuildReport) -> Result<()> + Send);

/// A build under way.
pub(crate) struct Work<'r> {
    listener: Mutex<Listener<'r>>,
    is_stopped: AtomicBool,
}

struct Listener<'r> {
    report: Option<Report<'r>>,
    told: u64,
    /// What the listener returned to stop the build.
    error: Option<Error>,
}

impl<'r> Work<'r> {
    pub(crate) fn new(report: Report<'r>) -> Self {
        Self::with(Some(report))
    }

    /// A build without progress reports, which is not cancelled.
    pub(crate) fn silent() -> Self {
        Self::with(None)
    }

    fn with(report: Option<Report<'r>>) -> Self {
        let listener = Listener { report, told: 0, error: None };
        Self { listener: Mutex::new(listener), is_stopped: AtomicBool::new(false) }
    }

    /// Tells that `done` thousandths are done, unless that was told before.
    fn tell(&self, done: u64) {
        let mut listener = self.listener.lock().unwrap_or_else(PoisonError::into_inner);
        let Listener { report, told, error } = &mut *listener;
        if done <= *told || error.is_some() {
            return;
        }
        *told = done;
        let Some(report) = report else { return };
        if let Err(cause) = report(BuildReport { done, total: WHOLE }) {
            *error = Some(cause);
            self.is_stopped.store(true, Ordering::Relaxed);
        }
    }

    /// Returns whether the build should end.
    fn is_stopped(&self) -> bool {
        self.is_stopped.load(Ordering::Relaxed)
    }

    /// Returns the error that stopped the build, once.
    ///
    /// # Errors
    ///
    /// What the listener returned.
    pub(crate) fn check(&self) -> Result<()> {
        if !self.is_stopped() {
            return Ok(());
        }
        let mut listener = self.listener.lock().unwrap_or_else(PoisonError::into_inner);
        Err(listener.error.take().unwrap_or_else(|| Error::invalid("the build was stopped")))
    }
}

/// How a build reports progress, and the folder of its resume files.
#[derive(Clone)]
pub(crate) struct Watched<'w, 'r> {
    pub(crate) work: &'w Work<'r>,
    pub(crate) kept: Option<&'w Path>,
    /// The thousandths of the build that are to be told of.
    pub(crate) share: Range<u64>,
}

impl<'w, 'r> Watched<'w, 'r> {
    /// Nobody hears of it and nothing is kept.
    pub(crate) fn alone(work: &'w Work<'r>) -> Self {
        Self { work, kept: None, share: 0..WHOLE }
    }

    /// Returns what watches the build between two places of the share, from 0 to 1.
    pub(crate) fn between(&self, places: Range<f64>) -> Self {
        Self { share: self.part(places), ..self.clone() }
    }

    fn part(&self, places: Range<f64>) -> Range<u64> {
        let width = self.share.end.saturating_sub(self.share.start) as f64;
        let at = |place: f64| self.share.start + (place * width) as u64;
        at(places.start)..at(places.end)
    }

    /// Returns a stage of `units` between two places of the share, from 0 to 1.
    pub(crate) fn stage(&self, places: Range<f64>, units: u64) -> Stage<'w, 'r> {
        let share = self.part(places);
        Stage { work: self.work, share, units: units.max(1), done: AtomicU64::new(0) }
    }
}

/// A part of a build, with units of its own.
pub(crate) struct Stage<'w, 'r> {
    work: &'w Work<'r>,
    share: Range<u64>,
    units: u64,
    done: AtomicU64,
}

impl<'w, 'r> Stage<'w, 'r> {
    /// Counts units that are done; returns whether the build goes on.
    pub(crate) fn advance(&self, units: u64) -> bool {
        let done = (self.done.fetch_add(units, Ordering::Relaxed) + units).min(self.units);
        let width = self.share.end - self.share.start;
        let of_share = u128::from(done) * u128::from(width) / u128::from(self.units);
        self.work.tell(self.share.start + of_share as u64);
        !self.work.is_stopped()
    }

    /// Returns what follows the levels of a bisection through the stage, on one thread.
    pub(crate) fn listener(&self) -> impl FnMut(LevelReport) -> Result<()> + use<'_, 'w, 'r> {
        |level| {
            let levels = u64::from(level.levels_done) * self.units / u64::from(level.level_count);
            self.advance(levels.saturating_sub(self.done.load(Ordering::Relaxed)));
            self.work.check()
        }
    }

    /// Hands out `units` to one thread.
    pub(crate) fn meter(&self, units: u64) -> Meter<'_, 'w, 'r> {
        Meter { stage: Some(self), left: Cell::new(units), untold: Cell::new(0) }
    }
}

/// Units of one thread. All are counted in the end, whether told one by one or not.
pub(crate) struct Meter<'s, 'w, 'r> {
    stage: Option<&'s Stage<'w, 'r>>,
    left: Cell<u64>,
    untold: Cell<u64>,
}

/// Units that are told at once.
const TOLD_UNITS: u64 = 256;

impl Meter<'_, '_, '_> {
    /// Counts nothing.
    #[cfg(test)]
    pub(crate) fn silent() -> Self {
        Self { stage: None, left: Cell::new(0), untold: Cell::new(0) }
    }

    /// Counts units that are done; returns whether the build goes on.
    pub(crate) fn advance(&self, units: u64) -> bool {
        let units = units.min(self.left.get());
        self.left.set(self.left.get() - units);
        self.untold.set(self.untold.get() + units);
        if self.untold.get() < TOLD_UNITS {
            return true;
        }
        self.stage.is_none_or(|stage| stage.advance(self.untold.take()))
    }
}

impl Drop for Meter<'_, '_, '_> {
    fn drop(&mut self) {
        if let Some(stage) = self.stage {
            stage.advance(self.left.take() + self.untold.take());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_tell_of_all_units_and_never_back() {
        let mut told = Vec::new();
        let mut report = |report: BuildReport| {
            told.push(report.done);
            Ok(())
        };
        let work = Work::new(&mut report);
        let watched = Watched { share: 200..1000, ..Watched::alone(&work) };
        for (places, units) in [(0.0..0.25, 5), (0.25..1.0, 4000)] {
            let stage = watched.stage(places, 2 * units);
            std::thread::scope(|scope| {
                for _ in 0..2 {
                    scope.spawn(|| {
                        let meter = stage.meter(units);
                        // More than it has, and not all of it: the sum is right all the same.
                        (0..units / 3).for_each(|_| assert!(meter.advance(2)));
                        assert!(units > 100 || meter.advance(100));
                    });
                }
            });
        }
        work.check().expect("not cancelled");
        drop(work);
        assert!(told.len() > 10, "{told:?}");
        assert!(told.windows(2).all(|pair| pair[0] < pair[1]), "{told:?}");
        assert_eq!(told.last(), Some(&1000));
    }

    #[test]
    fn an_error_of_the_listener_stops_the_build() {
        let mut report = |report: BuildReport| match report.done {
            done if done < 500 => Ok(()),
            done => Err(Error::invalid("enough").with("done", done)),
        };
        let work = Work::new(&mut report);
        let stage = Watched::alone(&work).stage(0.0..1.0, 4);
        assert!(stage.advance(1));
        work.check().expect("goes on");
        assert!(!stage.advance(1));
        assert!(!stage.advance(1));
        assert!(work.check().expect_err("stopped").to_string().contains("enough"));
        assert!(work.check().is_err(), "stays stopped");
    }
}
