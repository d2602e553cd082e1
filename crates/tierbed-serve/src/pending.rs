//! Requests whose pages are read while the thread that received them answers others.
//!
//! ```text
//! pages asked for ─▶ the runtime watches the ring ─▶ it has something ─▶ all here? ─▶ answer
//!                            ▲                                            │ no
//!                            └────────────────────────────────────────────┘
//! ```
//!
//! No thread is woken to read and none to answer. A request whose client leaves, or whose time is
//! over, is dropped: its pages come for nobody.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use tierbed_snapshot::PendingLookup;
use tokio::io::unix::AsyncFd;
use tokio::io::Interest;

use crate::answer::Refusal;
use crate::batch::guarded;
use crate::generation::Serving;
use crate::inline::Times;
use crate::job::{Checked, Made};
use crate::spans::Steps;

/// A request whose pages are on their way.
pub(crate) struct PendingRequest<'a, P> {
    pub(crate) serving: Serving<'a>,
    pub(crate) times: Times,
    pub(crate) prepared: P,
    pub(crate) pending: PendingLookup,
}

/// The ring of a reader, as the runtime of one server watches it.
struct Ring {
    /// Number of the server.
    server: u64,
    watched: AsyncFd<OwnedFd>,
}

impl Ring {
    /// Watches a ring, by a descriptor of its own.
    fn new(server: u64, ring: BorrowedFd<'_>) -> io::Result<Self> {
        let ring = ring.try_clone_to_owned()?;
        #[expect(deprecated, reason = "for descriptors that change; an `OwnedFd` does not")]
        let watched = AsyncFd::with_interest(ring, Interest::READABLE)?;
        Ok(Self { server, watched })
    }

    /// Waits until the ring has something that was not there before.
    async fn has_more(&self) -> io::Result<()> {
        self.watched.readable().await?.clear_ready();
        Ok(())
    }
}

impl<P: Checked> PendingRequest<'_, P> {
    /// Waits for the pages, and answers.
    ///
    /// # Errors
    /// Those of the lookup, and of what is made of its rows.
    pub(crate) async fn answer(mut self, steps: &Steps) -> Result<Made, Refusal> {
        while !self.land()? {
            if let Err(cause) = self.has_more().await {
                // The runtime cannot watch the ring, or ends: this thread waits for the pages.
                self.serving.faults.note("ring", &cause.to_string());
                break;
            }
        }
        let Self { serving, times, mut prepared, pending } = self;
        let answered = guarded(&serving, || {
            let stats = prepared.finish(pending)?;
            prepared.found(&stats, &serving, steps)
        })?;
        Ok(times.made(&serving, steps, answered))
    }

    fn land(&mut self) -> Result<bool, Refusal> {
        let Self { serving, pending, .. } = self;
        guarded(serving, || Ok(pending.land()))
    }

    async fn has_more(&mut self) -> io::Result<()> {
        let server = self.serving.number;
        let is_ours = |ring: &Ring| ring.server == server;
        let ring = self.pending.notifier(is_ours, |ring| Ring::new(server, ring))?;
        ring.has_more().await
    }
}
