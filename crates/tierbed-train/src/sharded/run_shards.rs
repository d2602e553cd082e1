//! Scoped threads: all shards work at the same time.
//!
//! Each on a thread of its own, the first on the caller's. Threads live as long as a call, so
//! that a batch is borrowed and never copied for them; that costs some ten microseconds, which
//! a small batch is not worth.

use std::panic::{catch_unwind, AssertUnwindSafe};

use tierbed_core::{Error, ErrorKind, Result};

/// Does `work` for every member and its job; returns what came of it, member by member. When
/// `is_small`, one after another on the caller's thread: the results are the same.
///
/// # Errors
/// The first that is no consequence of another member's; a panic is an error of kind `Poisoned`.
///
/// # Panics
/// When there is not one job for each member.
pub(crate) fn run_shards<M: Send, J: Send, T: Send>(
    members: &mut [M],
    is_small: bool,
    jobs: Vec<J>,
    work: impl Fn(&mut M, J) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    assert_eq!(members.len(), jobs.len(), "there is one job for each shard");
    let pairs = members.iter_mut().zip(jobs);
    if is_small {
        return first_cause(pairs.map(|(member, job)| guarded(&work, member, job)).collect());
    }
    let done = std::thread::scope(|scope| {
        let (mut pairs, work) = (pairs, &work);
        let first = pairs.next();
        let started: Vec<_> = (1..)
            .zip(pairs)
            .map(|(shard, (member, job))| {
                let named = std::thread::Builder::new().name(format!("tierbed-shard-{shard}"));
                named.spawn_scoped(scope, move || guarded(work, member, job))
            })
            .collect();
        let mut done: Vec<Result<T>> = Vec::with_capacity(1 + started.len());
        done.extend(first.map(|(member, job)| guarded(work, member, job)));
        done.extend(started.into_iter().map(|thread| match thread {
            Ok(thread) => thread.join().unwrap_or_else(|_| Err(panicked())),
            Err(cause) => Err(Error::os("cannot start the thread of a shard", cause)),
        }));
        done
    });
    first_cause(done)
}

fn guarded<M, J, T>(work: &impl Fn(&mut M, J) -> Result<T>, member: &mut M, job: J) -> Result<T> {
    // Whoever panicked is not used again: its store is poisoned.
    catch_unwind(AssertUnwindSafe(|| work(member, job))).unwrap_or_else(|_| Err(panicked()))
}

fn panicked() -> Error {
    Error::new(ErrorKind::Poisoned, "the thread of a shard panicked")
        .with("remedy", "reopen the store; it continues at its last checkpoint")
}

// Those who only heard of a failure say `Poisoned`.
fn first_cause<T>(done: Vec<Result<T>>) -> Result<Vec<T>> {
    let (mut results, mut cause) = (Vec::with_capacity(done.len()), None);
    for result in done {
        match result {
            Err(error) if cause.is_none() && error.kind() != ErrorKind::Poisoned => {
                cause = Some(error);
            }
            result => results.push(result),
        }
    }
    match cause {
        Some(error) => Err(error),
        None => results.into_iter().collect(),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that panics has failed, as it should")]
mod tests {
    use super::*;

    #[test]
    fn every_member_does_its_own_job_once() {
        for is_small in [false, true] {
            let mut members = [10, 20, 30];
            let results = run_shards(&mut members, is_small, vec![1, 2, 3], |member, job| {
                *member += job;
                Ok(*member)
            });
            assert_eq!(results.unwrap(), [11, 22, 33]);
            assert_eq!(members, [11, 22, 33]);
        }
    }

    #[test]
    fn a_panic_of_a_shard_is_an_error() {
        for (is_small, culprit) in [(false, 0), (false, 2), (true, 1)] {
            let work = |member: &mut usize, ()| {
                assert_ne!(*member, culprit, "a bug in a shard");
                Ok(())
            };
            let error = run_shards(&mut [0, 1, 2], is_small, vec![(); 3], work).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Poisoned);
            assert!(error.to_string().contains("panicked"));
        }
    }

    #[test]
    fn the_cause_is_told_before_its_consequences() {
        let kinds = vec![ErrorKind::Poisoned, ErrorKind::NoSpace, ErrorKind::Io];
        let work = |_: &mut (), kind| -> Result<()> { Err(Error::new(kind, "failed")) };
        let error = run_shards(&mut [(), (), ()], false, kinds, work).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NoSpace);
    }
}
