//! Who does storage work while the caller trains? One thread, which waits for the [`Ferry`].
//!
//! The ferry travels through channels: whoever has it, has everything it owns, so the compiler
//! proves that the two threads never share a row. The thread sleeps when there is no work.

use std::sync::mpsc::{channel, Receiver, Sender, TryRecvError};
use std::thread::JoinHandle;

use tierbed_core::{Error, ErrorKind, Result};

use super::ferry::Ferry;

/// The work needs little; I/O devices of tests a little more.
pub(crate) const STACK_BYTES: usize = 256 << 10;

type Return = (Box<Ferry>, Result<()>);

/// The thread, and the way there and back.
#[derive(Debug)]
pub(crate) struct Pilot {
    /// `None` only while it is dropped, which ends the thread.
    outward: Option<Sender<Box<Ferry>>>,
    back: Receiver<Return>,
    thread: Option<JoinHandle<()>>,
}

impl Pilot {
    /// Starts the thread.
    ///
    /// # Errors
    /// `Io` when the operating system refuses.
    pub(crate) fn start() -> Result<Self> {
        let (outward, ferries) = channel::<Box<Ferry>>();
        let (returns, back) = channel();
        let serve = move || {
            for mut ferry in ferries {
                let result = ferry.work(usize::MAX, true).map(|_| ());
                if returns.send((ferry, result)).is_err() {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new()
            .name("tierbed-forward".to_owned())
            .stack_size(STACK_BYTES)
            .spawn(serve)
            .map_err(|cause| Error::os("cannot start the storage thread", cause))?;
        Ok(Self { outward: Some(outward), back, thread: Some(thread) })
    }

    /// Lets the thread do all that is to do before the next change of window.
    pub(crate) fn send(&mut self, ferry: Box<Ferry>) -> Result<()> {
        let sent = self.outward.as_ref().map(|outward| outward.send(ferry));
        match sent {
            Some(Ok(())) => Ok(()),
            _ => Err(ended()),
        }
    }

    /// Takes the ferry back, with whether that meant waiting, and what became of the work.
    ///
    /// # Errors
    /// `Io` when the thread has ended, which only a panic in it brings about.
    pub(crate) fn take_back(&mut self) -> Result<(Box<Ferry>, bool, Result<()>)> {
        match self.back.try_recv() {
            Ok((ferry, result)) => Ok((ferry, false, result)),
            Err(TryRecvError::Disconnected) => Err(ended()),
            Err(TryRecvError::Empty) => {
                let (ferry, result) = self.back.recv().map_err(|_| ended())?;
                Ok((ferry, true, result))
            }
        }
    }
}

fn ended() -> Error {
    Error::new(ErrorKind::Io, "the storage thread has ended")
        .with("remedy", "reopen the store; it continues at its last checkpoint")
}

impl Drop for Pilot {
    fn drop(&mut self) {
        self.outward = None;
        if let Some(thread) = self.thread.take() {
            // A panic in it has ended it; there is nothing left to wait for.
            let _ = thread.join();
        }
    }
}
