//! In which ways may the disk break under a job, and what must hold then?

use std::fmt::Display;

use tierbed_core::env::SplitMix64;
use tierbed_core::{ErrorKind, Result};

use super::{SimJob, Trained};
use crate::{Chance, FaultPlan, SimFolder};

/// Returns the value; a failure that must not be stops the test.
#[track_caller]
fn must<T>(result: Result<T>, what: impl Display) -> T {
    match result {
        Ok(value) => value,
        Err(error) => panic!("{what}: {error}"),
    }
}

/// Opens `folder`; returns where it stands if every byte verifies.
///
/// # Errors
/// Those of the store. Rows that differ from the oracle's are no error but a panic.
fn inspect<J: SimJob>(job: &J, folder: &SimFolder, what: &str) -> Result<u64> {
    let mut store = job.open(folder)?;
    let at = job.position(&mut store)?;
    job.verify(&mut store)?;
    assert!(job.is_right(&mut store, at)?, "{what}: other rows than the oracle's at step {at}");
    Ok(at)
}

/// Checks that the folder stands at a commit not older than the acknowledged one and at the next
/// at most, that its rows are the oracle's, and that training on from there ends where it should.
///
/// # Panics
/// When one of these does not hold.
pub fn check_recovery<J: SimJob>(job: &J, folder: &SimFolder, acknowledged: u64, what: &str) {
    let at = must(inspect(job, folder, what), what);
    let is_one_of_two = at == acknowledged || at == job.next_commit(acknowledged);
    assert!(is_one_of_two, "{what}: at step {at}, acknowledged {acknowledged}");
    let trained = job.train(folder, job.steps());
    must(trained.result, what);
    assert_eq!(must(inspect(job, folder, what), what), trained.acknowledged, "{what}");
    job.check_folder(folder);
}

/// Cuts the power at every `stride`-th I/O of a run; half of the images keep some of what was
/// not synced, half nothing of it. Returns the number of I/Os of a whole run.
///
/// # Panics
/// When a [recovery](check_recovery) fails, or a run goes on without power.
pub fn check_power_loss<J: SimJob>(job: &J, seed: u64, stride: usize) -> u64 {
    let healthy = SimFolder::default();
    let whole = job.train(&healthy, job.steps());
    must(whole.result, "healthy disk");
    let mut rng = SplitMix64::new(seed);
    for point in (0..healthy.io_count()).step_by(stride) {
        let plan = FaultPlan { seed, crash_after_io: Some(point), ..FaultPlan::default() };
        let folder = SimFolder::new(plan);
        let Trained { acknowledged, result } = job.train(&folder, job.steps());
        assert!(folder.is_crashed() || !job.is_repeatable(), "seed {seed}, I/O {point}");
        // Power that fails while old commits are tidied away changes nothing any more.
        let is_told = result.is_err() || acknowledged == whole.acknowledged;
        assert!(is_told, "seed {seed}, I/O {point}");
        let image = match point % 2 {
            0 => folder.crash(rng.next_u64()),
            _ => folder.crash_to_synced(),
        };
        check_recovery(job, &image, acknowledged, &format!("seed {seed}, I/O {point}"));
    }
    healthy.io_count()
}

/// Cuts the power `rounds` times, each within the next `ios_max` I/Os after the last loss, then
/// lets the job end.
///
/// # Panics
/// When a commit is lost or the end is another than without power loss.
pub fn check_repeated_power_loss<J: SimJob>(job: &J, seed: u64, rounds: u64, ios_max: u64) {
    let mut rng = SplitMix64::new(seed ^ 99);
    let mut folder = SimFolder::default();
    let mut acknowledged = 0;
    for _ in 0..rounds {
        let crash_after_io = Some(rng.below(ios_max));
        folder.set_plan(FaultPlan { seed, crash_after_io, ..FaultPlan::default() });
        acknowledged = job.train(&folder, job.steps()).acknowledged.max(acknowledged);
        folder = folder.crash(rng.next_u64());
    }
    let what = format!("seed {seed}");
    let at = must(inspect(job, &folder, &what), &what);
    assert!(at >= acknowledged, "{what}: at step {at}, acknowledged {acknowledged}");
    let trained = job.train(&folder, job.steps());
    must(trained.result, &what);
    assert_eq!(must(inspect(job, &folder, &what), &what), trained.acknowledged, "{what}");
}

/// Which calls fail, one per run: each kind `count` times, at every so manyth call of its kind.
#[derive(Debug, Clone, Copy)]
pub struct FailedCalls {
    /// Runs per kind.
    pub count: u64,
    /// Writes from one failing write to the next run's.
    pub write_stride: u64,
    /// Reads likewise.
    pub read_stride: u64,
}

/// Lets one sync, folder sync, write or read fail per run; then the power fails, too, or another
/// opener comes. Returns how many runs said so.
///
/// # Panics
/// When a commit is lost.
pub fn check_failed_calls<J: SimJob>(job: &J, seed: u64, calls: FailedCalls) -> u64 {
    let mut failure_count = 0;
    for nth in 0..calls.count {
        for plan in [
            FaultPlan { seed, sync_error: Chance::Nth(nth), ..FaultPlan::default() },
            FaultPlan { seed, folder_sync_error: Chance::Nth(nth), ..FaultPlan::default() },
            FaultPlan {
                seed,
                write_error: Chance::Nth(calls.write_stride * nth),
                ..FaultPlan::default()
            },
            FaultPlan {
                seed,
                read_error: Chance::Nth(calls.read_stride * nth),
                ..FaultPlan::default()
            },
        ] {
            let what = format!("{plan:?}");
            let folder = SimFolder::new(plan);
            let Trained { acknowledged, result } = job.train(&folder, job.steps());
            if result.is_ok() {
                continue;
            }
            failure_count += 1;
            check_recovery(job, &folder.crash(seed ^ nth), acknowledged, &what);
            // Without a power loss the next opener finds all that was written, renamed and cut.
            folder.set_plan(FaultPlan::default());
            check_recovery(job, &folder, acknowledged, &format!("opened again after {what}"));
        }
    }
    failure_count
}

/// Runs on disks of the given sizes. Returns on how many the job did not fit.
///
/// # Panics
/// When a full disk is called something else, or loses a commit once there is room again.
pub fn check_full_disk<J: SimJob>(
    job: &J,
    seed: u64,
    disk_bytes: impl IntoIterator<Item = u64>,
) -> u64 {
    let mut refusal_count = 0;
    for bytes in disk_bytes {
        let plan = FaultPlan { seed, enospc_after_bytes: Some(bytes), ..FaultPlan::default() };
        let folder = SimFolder::new(plan);
        let Trained { acknowledged, result } = job.train(&folder, job.steps());
        if let Err(error) = result {
            assert_eq!(error.kind(), ErrorKind::NoSpace, "disk of {bytes} bytes: {error}");
            refusal_count += 1;
        }
        // Space is freed, the process starts again.
        folder.set_plan(FaultPlan::default());
        check_recovery(job, &folder, acknowledged, &format!("disk of {bytes} bytes"));
    }
    refusal_count
}

/// Returns a plan in which the disk tells one lie; kinds 0 to 3: a lost, misdirected, torn
/// write, a flipped bit of a read. The lie is told at the `nth` call of its kind.
#[must_use]
pub fn lie(kind: u64, nth: u64, seed: u64) -> FaultPlan {
    let lie = Chance::Nth(nth);
    match kind {
        0 => FaultPlan { seed, lost_write: lie, ..FaultPlan::default() },
        1 => FaultPlan { seed, misdirected_write: lie, ..FaultPlan::default() },
        2 => FaultPlan { seed, torn_write: lie, ..FaultPlan::default() },
        _ => FaultPlan { seed, read_bit_flip: lie, ..FaultPlan::default() },
    }
}

/// Who noticed a lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Told {
    /// Nobody: it did no harm.
    Never,
    /// Training did.
    Training,
    /// Training did not, opening and verifying afterwards did.
    Reopening,
}

/// Trains on a disk that lies as in `plan`, then looks at what is there.
///
/// # Panics
/// When rows are others than the oracle's and no checksum says so, or a lie is called something
/// else than damage.
pub fn check_lie<J: SimJob>(job: &J, plan: FaultPlan) -> Told {
    let what = format!("{plan:?}");
    let folder = SimFolder::new(plan);
    let trained = job.train(&folder, job.steps()).result;
    folder.set_plan(FaultPlan::default());
    let found = inspect(job, &folder, &what).map(|_| ());
    for error in [&trained, &found].into_iter().filter_map(|result| result.as_ref().err()) {
        assert!(job.tells_of_damage(error), "{what}: {error}");
    }
    match (trained, found) {
        (Err(_), _) => Told::Training,
        (Ok(()), Err(_)) => Told::Reopening,
        (Ok(()), Ok(())) => Told::Never,
    }
}
