//! The background thread.
//!
//! On the caller's (`Inline`: the same calls give the same files) or on one background thread,
//! which sleeps until it gets a job. One job is under way at a time.

use std::sync::Arc;
use std::thread::JoinHandle;

use tierbed_core::handover::{Disconnected, Rendezvous};
use tierbed_core::{Budget, Error, ErrorKind, Reservation, Result};

use super::job::{carry_out, Done, Job};
use crate::sst::SstTools;

/// Where flushes and compactions run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WorkerChoice {
    /// On a thread of their own, beside reads and writes.
    #[default]
    Thread,
    /// On the calling thread, at defined moments: the same calls give the same files.
    Inline,
}

/// A merge needs a few KiB of stack; cursors and writers keep their buffers on the heap.
const STACK_BYTES: usize = 256 << 10;

/// Carries jobs out.
#[derive(Debug)]
pub(crate) enum Worker {
    Inline,
    Thread(Background),
}

/// The background thread, seen from the caller.
#[derive(Debug)]
pub(crate) struct Background {
    rendezvous: Arc<Rendezvous<Job, Done>>,
    thread: Option<JoinHandle<()>>,
    tools: Arc<SstTools>,
    /// A forked child has this handle but not the thread.
    owner_pid: u32,
    _stack: Reservation,
}

impl Worker {
    /// Starts the thread, if there is to be one.
    ///
    /// # Errors
    /// `Invalid` when the budget does not hold its stack, `Io` when the system refuses a thread.
    pub(crate) fn start(
        choice: WorkerChoice,
        tools: &Arc<SstTools>,
        budget: &Budget,
    ) -> Result<Self> {
        if choice == WorkerChoice::Inline {
            return Ok(Self::Inline);
        }
        let stack = budget.reserve("background worker", STACK_BYTES as u64)?;
        let rendezvous = Arc::new(Rendezvous::new());
        let (there, tools_there) = (Arc::clone(&rendezvous), Arc::clone(tools));
        let thread = std::thread::Builder::new()
            .name("tierbed-lsm".to_owned())
            .stack_size(STACK_BYTES)
            .spawn(move || there.serve(|job| carry_out(job, &tools_there)))
            .map_err(|cause| Error::os("cannot start the background worker", cause))?;
        Ok(Self::Thread(Background {
            rendezvous,
            thread: Some(thread),
            tools: Arc::clone(tools),
            owner_pid: std::process::id(),
            _stack: stack,
        }))
    }
}

impl Background {
    fn check_owner(&self) -> Result<()> {
        if std::process::id() == self.owner_pid {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Closed, "store was opened by another process")
            .with("remedy", "open it in the process that uses it"))
    }

    /// Hands a job over. Only when none is under way.
    ///
    /// # Errors
    /// `Closed` in a forked process.
    pub(crate) fn give(&self, job: Job) -> Result<()> {
        self.check_owner()?;
        self.rendezvous.give(job);
        Ok(())
    }

    /// Returns the result if there is one.
    ///
    /// # Errors
    /// `Poisoned` when the thread has ended, `Closed` in a forked process.
    pub(crate) fn collect(&self) -> Result<Option<Done>> {
        self.check_owner()?;
        self.rendezvous.collect().map_err(has_ended)
    }

    /// Waits for the result of the job given.
    ///
    /// # Errors
    /// As [`collect`](Self::collect).
    pub(crate) fn wait(&self) -> Result<Done> {
        self.check_owner()?;
        self.rendezvous.wait().map_err(has_ended)
    }
}

fn has_ended(_: Disconnected) -> Error {
    Error::new(ErrorKind::Poisoned, "the background worker has ended")
        .with("remedy", "reopen the store; it continues at its last checkpoint")
}

impl Drop for Background {
    fn drop(&mut self) {
        let thread = self.thread.take();
        if std::process::id() != self.owner_pid {
            // Waiting for a thread that did not come along would never end.
            return std::mem::forget(thread);
        }
        self.tools.close();
        self.rendezvous.close();
        if let Some(thread) = thread {
            // What it panicked about was a bug of its job; the store is going anyway.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memtable::Memtable;
    use crate::worker::job::{HotKeys, Task};
    use tierbed_io::MemoryFolder;

    fn flush_of_nothing() -> Job {
        Job {
            task: Task::Flush(Arc::new(Memtable::new(1000))),
            hot_keys: HotKeys { hot: vec![] },
            block_bytes: 4096,
        }
    }

    #[test]
    fn a_job_comes_back_done_and_its_stack_is_counted() {
        let budget = Budget::new(1 << 20);
        let tools = Arc::new(SstTools::for_tests(Arc::new(MemoryFolder::default()), &budget));
        let Worker::Thread(background) =
            Worker::start(WorkerChoice::Thread, &tools, &budget).unwrap()
        else {
            panic!("a thread was asked for")
        };
        assert_eq!(budget.report().parts["background worker"].used_bytes, STACK_BYTES as u64);
        background.give(flush_of_nothing()).unwrap();
        let done = background.wait().unwrap();
        assert!(done.result.unwrap().merged.outputs.is_empty());
        assert!(background.collect().unwrap().is_none());
        drop(background);
        assert_eq!(budget.report().parts["background worker"].used_bytes, 0);
    }

    #[test]
    fn a_worker_that_is_gone_is_an_error_and_not_a_wait_for_ever() {
        let budget = Budget::new(1 << 20);
        let tools = Arc::new(SstTools::for_tests(Arc::new(MemoryFolder::default()), &budget));
        let Worker::Thread(background) =
            Worker::start(WorkerChoice::Thread, &tools, &budget).unwrap()
        else {
            panic!("a thread was asked for")
        };
        background.rendezvous.close();
        assert_eq!(background.wait().unwrap_err().kind(), ErrorKind::Poisoned);
        assert_eq!(background.collect().unwrap_err().kind(), ErrorKind::Poisoned);
    }
}
