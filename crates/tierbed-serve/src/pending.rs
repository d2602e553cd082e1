//! Requests whose rows come while the thread that received them answers others.
//!
//! ```text
//! pages asked for ─▶ the runtime watches the ring ─▶ it has something ─▶ all here? ─▶ answer
//!                            ▲                                            │ no
//!                            └────────────────────────────────────────────┘
//! ```
//!
//! Rows of a gateway come from shards in the same way: the runtime watches the connections to them.
//! No thread is woken to read and none to answer. A request whose client leaves, or whose time is
//! over, is dropped: its rows come for nobody.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use tierbed_snapshot::PendingLookup;
use tokio::io::unix::AsyncFd;
use tokio::io::Interest;

use crate::answer::Refusal;
use crate::batch::guarded;
use crate::gateway::{Asking, ShardedRows};
use crate::generation::Serving;
use crate::inline::Times;
use crate::job::{Checked, Made};
use crate::spans::Steps;

/// What a request waits for, without a thread.
pub(crate) enum Awaited {
    /// Pages that the disk reads.
    Pages(PendingLookup),
    /// Answers of shards.
    Shards { rows: Arc<ShardedRows>, asking: Asking },
}

/// A request whose rows are on their way.
pub(crate) struct PendingRequest<'a, P> {
    pub(crate) serving: Serving<'a>,
    pub(crate) times: Times,
    pub(crate) prepared: P,
    pub(crate) awaited: Awaited,
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
    /// Waits for the rows, and answers.
    ///
    /// # Errors
    /// Those of the lookup, and of what is made of its rows.
    pub(crate) async fn answer(self, steps: &Steps) -> Result<Made, Refusal> {
        let Self { serving, times, mut prepared, awaited } = self;
        let mut default_rows = 0;
        let answered = match awaited {
            Awaited::Pages(pages) => {
                let pages = landed(&serving, pages).await?;
                guarded(&serving, || {
                    let stats = prepared.query().finish(pages)?;
                    prepared.found(&stats, &serving, steps)
                })
            }
            Awaited::Shards { rows, asking } => {
                let answers = rows.answers(asking).await;
                guarded(&serving, || {
                    let schema = serving.view.schema();
                    let stats = prepared.query().finish_elsewhere(&rows, answers, schema)?;
                    default_rows = stats.rows_default;
                    prepared.found(&stats, &serving, steps)
                })
            }
        }?;
        let mut made = times.made(&serving, steps, answered);
        made.phases.default_rows = default_rows;
        Ok(made)
    }
}

/// Waits until the pages are here, or may be waited for by this thread.
async fn landed(serving: &Serving<'_>, mut pages: PendingLookup) -> Result<PendingLookup, Refusal> {
    while !guarded(serving, || Ok(pages.land()))? {
        if let Err(cause) = has_more(serving.number, &mut pages).await {
            // The runtime cannot watch the ring, or ends: this thread waits for the pages.
            serving.faults.note("ring", &cause.to_string());
            break;
        }
    }
    Ok(pages)
}

async fn has_more(server: u64, pages: &mut PendingLookup) -> io::Result<()> {
    let is_ours = |ring: &Ring| ring.server == server;
    let ring = pages.notifier(is_ours, |ring| Ring::new(server, ring))?;
    ring.has_more().await
}
