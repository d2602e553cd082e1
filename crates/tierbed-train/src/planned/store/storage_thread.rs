//! Storage thread: does the work of the [`RowMover`] while the caller trains.
//!
//! The row mover goes over a [`Desk`]: whoever has it, has everything it owns, so the compiler
//! proves that the two threads never share a row. The thread sleeps when there is no work.

use std::sync::Arc;
use std::thread::JoinHandle;

use tierbed_core::handover::{Deserted, Desk};
use tierbed_core::{Error, ErrorKind, Result};

use super::row_mover::RowMover;

/// The work needs little; I/O devices of tests a little more.
pub(crate) const STACK_BYTES: usize = 256 << 10;

type Return = (Box<RowMover>, Result<()>);

/// The thread, and the way there and back.
#[derive(Debug)]
pub(crate) struct StorageThread {
    desk: Arc<Desk<Box<RowMover>, Return>>,
    /// `None` only while it is dropped.
    thread: Option<JoinHandle<()>>,
}

impl StorageThread {
    /// Starts the thread.
    ///
    /// # Errors
    /// `Io` when the operating system refuses.
    pub(crate) fn start() -> Result<Self> {
        let desk = Arc::new(Desk::new());
        let there = Arc::clone(&desk);
        let thread = std::thread::Builder::new()
            .name("tierbed-storage".to_owned())
            .stack_size(STACK_BYTES)
            .spawn(move || there.serve(work))
            .map_err(|cause| Error::os("cannot start the storage thread", cause))?;
        Ok(Self { desk, thread: Some(thread) })
    }

    /// Lets the thread do all that is to do before the next change of window. Only when the row
    /// mover was taken back.
    pub(crate) fn send(&mut self, mover: Box<RowMover>) {
        self.desk.give(mover);
    }

    /// Takes the row mover back, with whether that meant waiting, and what became of the work.
    ///
    /// # Errors
    /// `Io` when the thread has ended, which only a panic in it brings about.
    pub(crate) fn take_back(&mut self) -> Result<(Box<RowMover>, bool, Result<()>)> {
        let (is_late, returned) = match self.desk.collect().map_err(ended)? {
            Some(returned) => (false, returned),
            None => (true, self.desk.wait().map_err(ended)?),
        };
        let (mover, result) = returned;
        Ok((mover, is_late, result))
    }
}

fn work(mut mover: Box<RowMover>) -> Return {
    let result = mover.work(usize::MAX, true).map(|_| ());
    (mover, result)
}

fn ended(_: Deserted) -> Error {
    Error::new(ErrorKind::Io, "the storage thread has ended")
        .with("remedy", "reopen the store; it continues at its last checkpoint")
}

impl Drop for StorageThread {
    fn drop(&mut self) {
        self.desk.close();
        if let Some(thread) = self.thread.take() {
            // A panic in it has ended it; there is nothing left to wait for.
            let _ = thread.join();
        }
    }
}
