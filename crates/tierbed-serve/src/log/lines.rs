//! A bounded queue of log lines between the server and standard error.
//!
//! A pipe that is not emptied blocks its writer. Here it blocks one thread of its own, and lines
//! beyond the queue are dropped and counted.

use std::io::{self, Write};
use std::sync::mpsc::{sync_channel, Receiver, SyncSender, TrySendError};
use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use tierbed_core::{Error, Result};
use tracing_subscriber::fmt::MakeWriter;

use super::LogTarget;

/// Lines that wait for the log's reader.
const LINES_MAX: usize = 1_024;

/// The writing end of a log.
#[derive(Debug, Clone)]
pub(super) struct Lines {
    queue: Queue,
    dropped: Counter,
}

#[derive(Debug, Clone)]
enum Queue {
    Own(SyncSender<Item>),
    Given(SyncSender<Vec<u8>>),
}

enum Item {
    Line(Vec<u8>),
    /// Answered when all lines before it are written.
    Flush(SyncSender<()>),
}

impl Lines {
    /// # Errors
    /// `Io` when the thread that writes cannot be made.
    pub(super) fn open(target: &LogTarget) -> Result<Self> {
        let queue = match target {
            LogTarget::Queue(queue) => Queue::Given(queue.clone()),
            LogTarget::Stderr => {
                let (queue, items) = sync_channel(LINES_MAX);
                std::thread::Builder::new()
                    .name("tierbed-log".to_owned())
                    .spawn(move || write_all(&items))
                    .map_err(|cause| Error::os("cannot start the log's thread", cause))?;
                Queue::Own(queue)
            }
        };
        Ok(Self { queue, dropped: Counter::default() })
    }

    pub(super) fn dropped(&self) -> Counter {
        self.dropped.clone()
    }

    /// Waits until the lines so far are written, at most `time`; a full queue is not waited for.
    pub(super) fn flush(&self, time: Duration) {
        let Queue::Own(queue) = &self.queue else { return };
        let (written, is_written) = sync_channel(1);
        if queue.try_send(Item::Flush(written)).is_ok() {
            // A reader that takes longer has its lines dropped: they are only a log's.
            let _ = is_written.recv_timeout(time);
        }
    }
}

impl Write for Lines {
    /// Takes one line.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let is_sent = match &self.queue {
            Queue::Own(queue) => queue.try_send(Item::Line(line.to_vec())).is_ok(),
            Queue::Given(queue) => match queue.try_send(line.to_vec()) {
                Ok(()) => true,
                Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => false,
            },
        };
        if !is_sent {
            self.dropped.inc();
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Lines {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

fn write_all(items: &Receiver<Item>) {
    for item in items {
        match item {
            // Where standard error is closed, a line has no reader.
            Item::Line(line) => drop(io::stderr().write_all(&line)),
            Item::Flush(written) => drop(written.try_send(())),
        }
    }
}
