//! Storage thread: does the work of the [`RowMover`] while the caller trains.
//!
//! The row mover is handed over by a [`Rendezvous`] and owns all its rows, so the compiler proves
//! that the two threads never share a row. The thread sleeps when there is no work.

use std::sync::Arc;
use std::thread::JoinHandle;

use tierbed_core::handover::{Disconnected, Rendezvous};
use tierbed_core::{Error, ErrorKind, Result};

use super::row_mover::RowMover;

/// The work needs little; I/O devices of tests a little more.
pub(crate) const STACK_BYTES: usize = 256 << 10;

type Return = (Box<RowMover>, Result<()>);

/// The thread, and the way there and back.
#[derive(Debug)]
pub(crate) struct StorageThread {
    rendezvous: Arc<Rendezvous<Box<RowMover>, Return>>,
    /// `None` only while it is dropped.
    thread: Option<JoinHandle<()>>,
}

impl StorageThread {
    /// Starts the thread.
    ///
    /// # Errors
    /// `Io` when the operating system refuses.
    pub(crate) fn start() -> Result<Self> {
        let rendezvous = Arc::new(Rendezvous::new());
        let there = Arc::clone(&rendezvous);
        let thread = std::thread::Builder::new()
            .name("tierbed-storage".to_owned())
            .stack_size(STACK_BYTES)
            .spawn(move || there.serve(work))
            .map_err(|cause| Error::os("cannot start the storage thread", cause))?;
        Ok(Self { rendezvous, thread: Some(thread) })
    }

    /// Lets the thread do all that is to do before the next change of window. Only when the row
    /// mover was taken back.
    pub(crate) fn send(&mut self, mover: Box<RowMover>) {
        self.rendezvous.give(mover);
    }

    /// Takes the row mover back, with whether that meant waiting, and what became of the work.
    ///
    /// # Errors
    /// `Io` when the thread has ended, which only a panic in it brings about.
    pub(crate) fn take_back(&mut self) -> Result<(Box<RowMover>, bool, Result<()>)> {
        let (is_late, returned) = match self.rendezvous.collect().map_err(ended)? {
            Some(returned) => (false, returned),
            None => (true, self.rendezvous.wait().map_err(ended)?),
        };
        let (mover, result) = returned;
        Ok((mover, is_late, result))
    }
}

fn work(mut mover: Box<RowMover>) -> Return {
    let result = mover.work(usize::MAX, true).map(|_| ());
    (mover, result)
}

fn ended(_: Disconnected) -> Error {
    Error::new(ErrorKind::Io, "the storage thread has ended")
        .with("remedy", "reopen the store; it continues at its last checkpoint")
}

impl Drop for StorageThread {
    fn drop(&mut self) {
        self.rendezvous.close();
        if let Some(thread) = self.thread.take() {
            // A panic in it has ended it; there is nothing left to wait for.
            let _ = thread.join();
        }
    }
}
