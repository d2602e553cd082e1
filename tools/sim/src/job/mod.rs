//! Does a store keep its word on a faulty disk? One kit for every store and engine.
//!
//! A [`SimJob`] says how to open, train and look; the checks break the disk under it in every way
//! of [`FaultPlan`](crate::FaultPlan) and hold what is found against the job's oracle. A check
//! that fails panics and names the I/O, so that the seed replays it.
//!
//! ```text
//! train on a faulty disk ─▶ power loss ─▶ open: at a commit, not before the acknowledged one
//!                                           ─▶ verify, rows = oracle ─▶ train on to the same end
//! ```

mod checks;
mod store;
mod suite;
#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test that panics has failed")]
mod tests;

pub use checks::{
    check_failed_calls, check_full_disk, check_lie, check_power_loss, check_recovery,
    check_repeated_power_loss, lie, FailedCalls, Told,
};
pub use store::{check_failed_sync, check_use_after_full_disk, drifting_window, StoreJob};

use tierbed_core::{Error, ErrorKind, Result};

use crate::SimFolder;

/// A seeded job that trains, commits every few steps, and knows what must be on disk.
pub trait SimJob {
    /// What is opened: a store, or an engine with what it needs.
    type Store;

    /// Opens what lies in `folder`.
    ///
    /// # Errors
    /// Those of the store.
    fn open(&self, folder: &SimFolder) -> Result<Self::Store>;

    /// Returns the steps done when the store was committed last.
    ///
    /// # Errors
    /// Those of the store.
    fn position(&self, store: &mut Self::Store) -> Result<u64>;

    /// Trains step `step`.
    ///
    /// # Errors
    /// Those of the store.
    fn step(&self, store: &mut Self::Store, step: u64) -> Result<()>;

    /// Commits after `position` steps.
    ///
    /// # Errors
    /// Those of the store.
    fn commit(&self, store: &mut Self::Store, position: u64) -> Result<()>;

    /// Checks every checksum.
    ///
    /// # Errors
    /// Those of the store.
    fn verify(&self, store: &mut Self::Store) -> Result<()>;

    /// Returns whether all rows are those of the oracle after `position` steps.
    ///
    /// # Errors
    /// Those of the store.
    fn is_right(&self, store: &mut Self::Store, position: u64) -> Result<bool>;

    /// Steps of a whole run.
    fn steps(&self) -> u64;

    /// Steps done at the commit after the one at `position`.
    fn next_commit(&self, position: u64) -> u64;

    /// Whether the same disk gets the same calls in every run.
    fn is_repeatable(&self) -> bool {
        true
    }

    /// Whether `error` says that the disk lied.
    fn tells_of_damage(&self, error: &Error) -> bool {
        error.kind() == ErrorKind::Corruption
    }

    /// Looks at a recovered folder beyond its rows. Panics when something is wrong.
    fn check_folder(&self, _folder: &SimFolder) {}

    /// Trains from the last commit up to `steps` steps.
    fn train(&self, folder: &SimFolder, steps: u64) -> Trained {
        let mut acknowledged = 0;
        let result = train(self, folder, steps, &mut acknowledged);
        Trained { acknowledged, result }
    }
}

/// How a run ended.
#[derive(Debug)]
pub struct Trained {
    /// Steps done at the last commit that was acknowledged.
    pub acknowledged: u64,
    /// Why it ended.
    pub result: Result<()>,
}

fn train<J: SimJob + ?Sized>(
    job: &J,
    folder: &SimFolder,
    steps: u64,
    acknowledged: &mut u64,
) -> Result<()> {
    let mut store = job.open(folder)?;
    *acknowledged = job.position(&mut store)?;
    for step in *acknowledged..steps {
        job.step(&mut store, step)?;
        if job.next_commit(*acknowledged) == step + 1 {
            job.commit(&mut store, step + 1)?;
            *acknowledged = step + 1;
        }
    }
    Ok(())
}

/// Returns the seeds of a simulation suite: `fixed`, or the one in `TIERBED_SIM_SEED`
/// (`cargo x sim --seed N`).
///
/// # Panics
/// When the variable is not a number.
#[must_use]
pub fn seeds(fixed: &[u64]) -> Vec<u64> {
    let Ok(text) = std::env::var("TIERBED_SIM_SEED") else { return fixed.to_vec() };
    let Ok(seed) = text.parse() else { panic!("TIERBED_SIM_SEED is no number: {text}") };
    vec![seed]
}
