//! Progress of a build: counted by any thread, reported at intervals, with the way to cancel it.
//!
//! ```text
//! build     0 ─────────── trial ───────────▶ 200 ─ blocks ▶ 250 ── grow ──▶ … 1000
//! stage                                              a share of the thousand, in units of its own
//! meter                                              one thread's units, counted once
//! ```

use std::cell::Cell;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use tierbed_core::{Error, Result};

use crate::partition::LevelReport;

/// Steps of a growing build in all.
pub(crate) const WHOLE: u64 = 1000;

/// How far a build is: levels of a bisection, or about a thousandth of the work each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BuildReport {
    /// Steps that are done.
    pub done: u64,
    /// Steps there will be.
    pub total: u64,
}

/// Progress callback of a build, called on any of its threads; an error cancels the build.
pub type Report<'a> = &'a mut (dyn FnMut(BuildReport) -> Result<()> + Send);

/// Progress of a build under way.
pub(crate) struct Progress<'r> {
    listener: Mutex<Listener<'r>>,
    is_cancelled: AtomicBool,
}

struct Listener<'r> {
    report: Option<Report<'r>>,
    reported: u64,
    /// What the listener returned to stop the build.
    error: Option<Error>,
}

impl<'r> Progress<'r> {
    pub(crate) fn new(report: Report<'r>) -> Self {
        Self::with(Some(report))
    }

    /// A build without progress reports, which is not cancelled.
    pub(crate) fn silent() -> Self {
        Self::with(None)
    }

    fn with(report: Option<Report<'r>>) -> Self {
        let listener = Listener { report, reported: 0, error: None };
        Self { listener: Mutex::new(listener), is_cancelled: AtomicBool::new(false) }
    }

    /// Reports that `done` thousandths are done, unless that was reported before.
    fn report(&self, done: u64) {
        let mut listener = self.listener.lock().unwrap_or_else(PoisonError::into_inner);
        let Listener { report, reported, error } = &mut *listener;
        if done <= *reported || error.is_some() {
            return;
        }
        *reported = done;
        let Some(report) = report else { return };
        if let Err(cause) = report(BuildReport { done, total: WHOLE }) {
            *error = Some(cause);
            self.is_cancelled.store(true, Ordering::Relaxed);
        }
    }

    /// Returns whether the build should end.
    fn is_cancelled(&self) -> bool {
        self.is_cancelled.load(Ordering::Relaxed)
    }

    /// Returns the error that stopped the build, once.
    ///
    /// # Errors
    ///
    /// What the listener returned.
    pub(crate) fn check(&self) -> Result<()> {
        if !self.is_cancelled() {
            return Ok(());
        }
        let mut listener = self.listener.lock().unwrap_or_else(PoisonError::into_inner);
        Err(listener.error.take().unwrap_or_else(|| Error::invalid("the build was stopped")))
    }
}

/// How a build reports progress, and the folder of its resume files.
#[derive(Clone)]
pub(crate) struct BuildContext<'w, 'r> {
    pub(crate) progress: &'w Progress<'r>,
    pub(crate) resume_dir: Option<&'w Path>,
    /// The thousandths of the build that its stages report.
    pub(crate) share: Range<u64>,
}

impl<'w, 'r> BuildContext<'w, 'r> {
    /// A build of its own, without resume files.
    pub(crate) fn alone(progress: &'w Progress<'r>) -> Self {
        Self { progress, resume_dir: None, share: 0..WHOLE }
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
        Stage { progress: self.progress, share, units: units.max(1), done: AtomicU64::new(0) }
    }
}

/// A part of a build, with units of its own.
pub(crate) struct Stage<'w, 'r> {
    progress: &'w Progress<'r>,
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
        self.progress.report(self.share.start + of_share as u64);
        !self.progress.is_cancelled()
    }

    /// Returns what follows the levels of a bisection through the stage, on one thread.
    pub(crate) fn listener(&self) -> impl FnMut(LevelReport) -> Result<()> + use<'_, 'w, 'r> {
        |level| {
            let levels = u64::from(level.levels_done) * self.units / u64::from(level.level_count);
            self.advance(levels.saturating_sub(self.done.load(Ordering::Relaxed)));
            self.progress.check()
        }
    }

    /// Hands out `units` to one thread.
    pub(crate) fn meter(&self, units: u64) -> Meter<'_, 'w, 'r> {
        Meter { stage: Some(self), left: Cell::new(units), unreported: Cell::new(0) }
    }
}

/// Units of one thread. All are counted in the end, whether one by one or not.
pub(crate) struct Meter<'s, 'w, 'r> {
    stage: Option<&'s Stage<'w, 'r>>,
    left: Cell<u64>,
    unreported: Cell<u64>,
}

/// Units that are reported at once.
const REPORT_UNITS: u64 = 256;

impl Meter<'_, '_, '_> {
    /// Counts nothing.
    #[cfg(test)]
    pub(crate) fn silent() -> Self {
        Self { stage: None, left: Cell::new(0), unreported: Cell::new(0) }
    }

    /// Counts units that are done; returns whether the build goes on.
    pub(crate) fn advance(&self, units: u64) -> bool {
        let units = units.min(self.left.get());
        self.left.set(self.left.get() - units);
        self.unreported.set(self.unreported.get() + units);
        if self.unreported.get() < REPORT_UNITS {
            return true;
        }
        self.stage.is_none_or(|stage| stage.advance(self.unreported.take()))
    }
}

impl Drop for Meter<'_, '_, '_> {
    fn drop(&mut self) {
        if let Some(stage) = self.stage {
            stage.advance(self.left.take() + self.unreported.take());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_tell_of_all_units_and_never_back() {
        let mut reported = Vec::new();
        let mut report = |report: BuildReport| {
            reported.push(report.done);
            Ok(())
        };
        let progress = Progress::new(&mut report);
        let context = BuildContext { share: 200..1000, ..BuildContext::alone(&progress) };
        for (places, units) in [(0.0..0.25, 5), (0.25..1.0, 4000)] {
            let stage = context.stage(places, 2 * units);
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
        progress.check().expect("not cancelled");
        drop(progress);
        assert!(reported.len() > 10, "{reported:?}");
        assert!(reported.windows(2).all(|pair| pair[0] < pair[1]), "{reported:?}");
        assert_eq!(reported.last(), Some(&1000));
    }

    #[test]
    fn an_error_of_the_listener_stops_the_build() {
        let mut report = |report: BuildReport| match report.done {
            done if done < 500 => Ok(()),
            done => Err(Error::invalid("enough").with("done", done)),
        };
        let progress = Progress::new(&mut report);
        let stage = BuildContext::alone(&progress).stage(0.0..1.0, 4);
        assert!(stage.advance(1));
        progress.check().expect("goes on");
        assert!(!stage.advance(1));
        assert!(!stage.advance(1));
        assert!(progress.check().expect_err("stopped").to_string().contains("enough"));
        assert!(progress.check().is_err(), "stays stopped");
    }
}
