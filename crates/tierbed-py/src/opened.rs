//! A snapshot that every process opens for itself.
//!
//! What a forked child has of the snapshot of its parent cannot be used: threads and rings are not
//! there, and mutexes may be held for ever. Rows of a snapshot never change, so the child opens
//! the folder anew when it is first asked, with the same options and a budget of its own. Deltas
//! that were applied are not in that folder: behind them the child is refused.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tierbed_core::{Error, ErrorKind, Result};
use tierbed_io::process::PerProcess;
use tierbed_snapshot::Snapshot;

type Open = Box<dyn Fn() -> Result<Arc<Snapshot>> + Send + Sync>;

/// See the module documentation.
pub(crate) struct OpenedSnapshot {
    slot: PerProcess<Mutex<Slot>>,
    /// Before a fork, perhaps: then it is closed in the child.
    is_closed: AtomicBool,
    /// Before a fork, perhaps.
    has_deltas: Arc<AtomicBool>,
    identity: String,
    open: Open,
}

enum Slot {
    Open(Arc<Snapshot>),
    Closed,
    /// Not asked for yet in this process.
    Absent,
}

impl OpenedSnapshot {
    /// Opens a snapshot by `open`, which is called again in forked children.
    pub(crate) fn new(
        open: impl Fn() -> Result<Arc<Snapshot>> + Send + Sync + 'static,
    ) -> Result<Self> {
        let snapshot = open()?;
        let has_deltas = Arc::default();
        snapshot.mark_deltas_in(&has_deltas);
        Ok(Self {
            has_deltas,
            identity: snapshot.identity()?,
            slot: PerProcess::new(Mutex::new(Slot::Open(snapshot))),
            is_closed: AtomicBool::new(false),
            open: Box::new(open),
        })
    }

    fn slot(&self) -> MutexGuard<'_, Slot> {
        let slot = self.slot.get_or_make(|| {
            Mutex::new(match self.is_closed.load(Ordering::Acquire) {
                true => Slot::Closed,
                false => Slot::Absent,
            })
        });
        // Every change of it is one assignment.
        slot.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the snapshot, shared; lookups run side by side.
    ///
    /// # Errors
    /// `Closed` behind [`close`](Self::close), and in a forked child when the folder holds another
    /// snapshot by now, or deltas were applied; in a child also those of opening.
    pub(crate) fn shared(&self) -> Result<Arc<Snapshot>> {
        let mut slot = self.slot();
        match &*slot {
            Slot::Open(snapshot) => Ok(Arc::clone(snapshot)),
            Slot::Closed => {
                Err(Error::new(ErrorKind::Closed, "snapshot is closed")
                    .with("remedy", "open it again"))
            }
            Slot::Absent => {
                let snapshot = self.open_again()?;
                *slot = Slot::Open(Arc::clone(&snapshot));
                Ok(snapshot)
            }
        }
    }

    fn open_again(&self) -> Result<Arc<Snapshot>> {
        if self.has_deltas.load(Ordering::Acquire) {
            return Err(Error::new(ErrorKind::Closed, "deltas were applied before the fork")
                .with("remedy", "open what Snapshot.apply makes of them in the worker"));
        }
        let snapshot = (self.open)()?;
        let found = snapshot.identity()?;
        if found == self.identity {
            snapshot.mark_deltas_in(&self.has_deltas);
            return Ok(snapshot);
        }
        let path = snapshot.folder().path().map(|path| path.display().to_string());
        Err(Error::new(ErrorKind::Closed, "folder holds another snapshot than before the fork")
            .with("path", path.unwrap_or_default())
            .with("expected", &self.identity)
            .with("found", found)
            .with("remedy", "publish into a new folder, or open the snapshot in the worker"))
    }

    /// Gives back memory and files of this process.
    pub(crate) fn close(&self) {
        self.is_closed.store(true, Ordering::Release);
        let before = std::mem::replace(&mut *self.slot(), Slot::Closed);
        drop(before);
    }
}
