//! What if the process dies? Real processes and real files, killed at a random moment.
//!
//! A test starts itself again as the *victim*: the same test binary, asked for one test, with a
//! folder in its environment. The victim trains; the test kills it with SIGKILL, looks at what it
//! left, and starts the next one over the same folder. Unlike [`SimFolder::crash`] nothing is
//! modelled: the kernel, its page cache and the file system are the machine's own.
//!
//! [`SimFolder::crash`]: crate::SimFolder::crash

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use tierbed_core::env::Env;
use tierbed_core::{Error, Result};

const FOLDER: &str = "TIERBED_VICTIM_FOLDER";
const JOB: &str = "TIERBED_VICTIM_JOB";
/// A victim that works longer than this hangs.
const PATIENCE: Duration = Duration::from_secs(120);

/// How a victim ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// Killed while it worked.
    Killed,
    /// It had ended before.
    Finished,
}

/// Returns the folder and the job of this process if it is a victim.
#[must_use]
pub fn victim() -> Option<(PathBuf, String)> {
    let folder = std::env::var_os(FOLDER)?;
    Some((PathBuf::from(folder), std::env::var(JOB).unwrap_or_default()))
}

/// Runs the test called `test` of this test binary as a victim over `folder` and kills it `delay`
/// after its start, unless it ends before.
///
/// # Errors
/// `Io` when it cannot be started, `Invalid` with its last words when it failed by itself or hung.
pub fn run_and_kill(test: &str, folder: &Path, job: &str, delay: Duration) -> Result<Fate> {
    let not_run = |cause| Error::os("could not run the victim", cause);
    let binary = std::env::current_exe().map_err(not_run)?;
    let mut child = Command::new(binary)
        .args([test, "--exact", "--nocapture", "--include-ignored", "--test-threads=1"])
        .env(FOLDER, folder)
        .env(JOB, job)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(not_run)?;
    let clock = Env::real(0).clock;
    let started_us = clock.now_us();
    loop {
        let ended = child.try_wait().map_err(not_run)?;
        let age = Duration::from_micros(clock.now_us() - started_us);
        match ended {
            Some(status) if status.success() => return Ok(Fate::Finished),
            Some(_) => break,
            None if age >= delay.min(PATIENCE) => {
                child.kill().map_err(not_run)?;
                child.wait().map_err(not_run)?;
                return match delay > PATIENCE {
                    true => Err(Error::invalid("the victim hangs").with("job", job)),
                    false => Ok(Fate::Killed),
                };
            }
            None => std::thread::sleep(Duration::from_micros(200)),
        }
    }
    let output = child.wait_with_output().map_err(not_run)?;
    let words = String::from_utf8_lossy(&output.stderr).into_owned();
    Err(Error::invalid("the victim failed by itself").with("job", job).with("said", words))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that panics has failed, as it should")]
mod tests {
    use super::*;

    #[test]
    fn victims_end_as_they_do() {
        if let Some((_, job)) = victim() {
            match job.as_str() {
                "sleep" => std::thread::sleep(Duration::from_secs(60)),
                "fail" => panic!("these are my last words"),
                _ => {}
            }
            return;
        }
        let run = |job: &str, delay| {
            let test = "kill::tests::victims_end_as_they_do";
            run_and_kill(test, Path::new("."), job, delay)
        };
        assert_eq!(run("sleep", Duration::from_millis(30)).unwrap(), Fate::Killed);
        assert_eq!(run("end", Duration::from_secs(60)).unwrap(), Fate::Finished);
        let error = run("fail", Duration::from_secs(60)).unwrap_err();
        assert!(error.to_string().contains("these are my last words"), "{error}");
    }
}
