//! Requests made again: how often, and after which pauses.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tierbed_core::{Error, ErrorKind, Result};

/// Longest sleep between two looks at whether to stop.
const SLICE: Duration = Duration::from_millis(50);

/// How requests that fail are made again. Refusals and full disks are not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retry {
    /// Tries in all.
    pub try_count: u32,
    /// Pause after the first try; each later one is twice as long.
    pub pause: Duration,
}

impl Default for Retry {
    fn default() -> Self {
        Self { try_count: 5, pause: Duration::from_millis(200) }
    }
}

impl Retry {
    /// Runs `work` until it succeeds, fails for good, or `stop` is set.
    pub(crate) fn run<T>(
        &self,
        stop: &AtomicBool,
        mut work: impl FnMut() -> Result<T>,
    ) -> Result<T> {
        let mut pause = self.pause;
        for tried in 1.. {
            match work() {
                Err(error) if may_pass(&error) && tried < self.try_count => sleep(pause, stop)?,
                Err(error) if may_pass(&error) => return Err(error.with("tries", tried)),
                result => return result,
            }
            pause = pause.saturating_mul(2);
        }
        unreachable!("tries are counted")
    }
}

/// Whether the next try may do better: the way here garbles bytes, and stores are busy.
fn may_pass(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Io | ErrorKind::Corruption)
}

/// Sleeps, unless `stop` is set.
pub(crate) fn sleep(pause: Duration, stop: &AtomicBool) -> Result<()> {
    let mut left = pause;
    loop {
        if stop.load(Ordering::Relaxed) {
            return Err(stopped());
        }
        if left.is_zero() {
            return Ok(());
        }
        let slice = left.min(SLICE);
        std::thread::sleep(slice);
        left -= slice;
    }
}

/// The error of a thread that another one's error stopped; nobody sees it.
pub(crate) fn stopped() -> Error {
    Error::new(ErrorKind::Closed, "stopped")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_may_pass_is_tried_again_and_no_more_than_said() {
        let retry = Retry { try_count: 3, pause: Duration::ZERO };
        let run = |kind, good_at: u32| {
            let mut tried = 0;
            let result = retry.run(&AtomicBool::new(false), || {
                tried += 1;
                if tried >= good_at {
                    Ok(())
                } else {
                    Err(Error::new(kind, "busy"))
                }
            });
            (result.is_ok(), tried)
        };
        assert_eq!(run(ErrorKind::Io, 3), (true, 3));
        assert_eq!(run(ErrorKind::Corruption, 4), (false, 3));
        assert_eq!(run(ErrorKind::NoSpace, 2), (false, 1));
        assert_eq!(run(ErrorKind::Invalid, 2), (false, 1));
        let stop = AtomicBool::new(true);
        assert!(retry.run(&stop, || Err::<(), _>(Error::new(ErrorKind::Io, "busy"))).is_err());
    }
}
