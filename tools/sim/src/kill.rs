//! What if the process dies? Real processes and real files, killed at a random moment.
//!
//! A test starts itself again as the *victim*: the same test binary, asked for one test, with a
//! folder in its environment. The victim trains; the test kills it with SIGKILL, looks at what it
//! left, and starts the next one over the same folder. Unlike [`SimFolder::crash`] nothing is
//! modelled: the kernel, its page cache and the file system are the machine's own.
//!
//! [`SimFolder::crash`]: crate::SimFolder::crash

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::{getpid, kill_process, Signal};
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
    let mut child = start(test, folder, job)?;
    match wait(&mut child, delay.min(PATIENCE))? {
        Some(status) if status.success() => Ok(Fate::Finished),
        Some(_) => Err(last_words(child, job)?),
        None => {
            child.kill().map_err(not_run)?;
            child.wait().map_err(not_run)?;
            match delay > PATIENCE {
                true => Err(Error::invalid("the victim hangs").with("job", job)),
                false => Ok(Fate::Killed),
            }
        }
    }
}

/// Runs the test called `test` as [`run_and_kill`] does, as a victim that calls [`die`] where its
/// job says, or ends.
///
/// # Errors
/// As [`run_and_kill`].
pub fn run_to_its_end(test: &str, folder: &Path, job: &str) -> Result<Fate> {
    let mut child = start(test, folder, job)?;
    match wait(&mut child, PATIENCE)? {
        Some(status) if status.success() => Ok(Fate::Finished),
        Some(status) if status.signal() == Some(Signal::KILL.as_raw()) => Ok(Fate::Killed),
        Some(_) => Err(last_words(child, job)?),
        None => {
            child.kill().map_err(not_run)?;
            Err(Error::invalid("the victim hangs").with("job", job))
        }
    }
}

/// Kills this process with SIGKILL.
///
/// # Panics
/// When the kernel does not.
pub fn die() -> ! {
    let killed = kill_process(getpid(), Signal::KILL);
    std::thread::sleep(PATIENCE);
    panic!("a process that was killed is alive: {killed:?}");
}

fn not_run(cause: std::io::Error) -> Error {
    Error::os("could not run the victim", cause)
}

fn start(test: &str, folder: &Path, job: &str) -> Result<Child> {
    let binary = std::env::current_exe().map_err(not_run)?;
    Command::new(binary)
        .args([test, "--exact", "--nocapture", "--include-ignored", "--test-threads=1"])
        .env(FOLDER, folder)
        .env(JOB, job)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(not_run)
}

/// Waits for the end of a victim; `None` when it is alive after `delay`.
fn wait(child: &mut Child, delay: Duration) -> Result<Option<ExitStatus>> {
    let clock = Env::real(0).clock;
    let started_us = clock.now_us();
    loop {
        if let Some(status) = child.try_wait().map_err(not_run)? {
            return Ok(Some(status));
        }
        if Duration::from_micros(clock.now_us() - started_us) >= delay {
            return Ok(None);
        }
        std::thread::sleep(Duration::from_micros(200));
    }
}

fn last_words(child: Child, job: &str) -> Result<Error> {
    let output = child.wait_with_output().map_err(not_run)?;
    let words = String::from_utf8_lossy(&output.stderr).into_owned();
    Ok(Error::invalid("the victim failed by itself").with("job", job).with("said", words))
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
                "die" => die(),
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
        let run = |job| run_to_its_end("kill::tests::victims_end_as_they_do", Path::new("."), job);
        assert_eq!(run("die").unwrap(), Fate::Killed);
        assert_eq!(run("end").unwrap(), Fate::Finished);
        assert!(run("fail").is_err());
    }
}
