//! Neighbours of evicted rows: a small cache of the row that may stand for each of them.
//!
//! A row that leaves the last tier, or stays outside, may be asked for again. Its neighbour, a row
//! like it that is used often, is then likely to be in a tier, and can answer without a read. Who
//! the neighbours are was found offline and lies in a file; a [`KeyCache`] keeps those of rows that
//! left lately, a few bytes each.
//!
//! ```text
//! tiers ─ row leaves ─▶ batch of 50 ─▶ [queue, bounded] ─▶ file: blocks, checked ─▶ key cache
//!                                       └ full: dropped, counted                        │
//! row in no tier ─────────────────────────────────▶ its neighbour ◀── second chance ────┘
//!                                                      └─ in a tier? answers; else the row is read
//! ```
//!
//! Nothing is read for a neighbour, and no lookup waits for the file: threads read it. Told to
//! work inline, a lookup does so itself once its tiers are settled, so that counts repeat. Neither
//! threads nor inline: batches wait until `map_neighbours_now`, so that tests decide when.
//!
//! Source: EVStore §3.3 and §6 (third layer). Differs: what falls from the first tier is in the
//! second one, so only rows that leave the last are mapped; rows that were not admitted too.

mod file;
mod mapper;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Serialize;
use tierbed_core::{Error, Result, RowKey, Schema};
use tierbed_io::{Device, FileDevice, Folder, OpenMode, PAGE_BYTES};

use crate::snapshot::Snapshot;

pub use file::{NeighbourFile, NeighboursOf, NEIGHBOURS_MAGIC};
pub(crate) use mapper::Neighbours;

/// Rows that are mapped at once.
const BATCH_ROWS: usize = 50;
/// Threads that read the file.
const THREADS: usize = 2;

/// Neighbours that answer for rows in no tier.
#[derive(Debug, Clone)]
pub struct NeighbourOptions {
    /// The file of neighbours; tables without an entry there are never answered so.
    pub file: Arc<dyn Device>,
    /// Its part of the cache's bytes, next to the shares of the tiers.
    pub share: f64,
    /// Lookups read the file themselves, so that counts repeat.
    pub is_inline: bool,
    /// Most batches of 50 rows that wait.
    pub waiting_batches_max: usize,
}

impl NeighbourOptions {
    /// Neighbours of `file` in a share of 4, next to tiers of 48 and 48: the paper's
    /// (experiment 11).
    #[must_use]
    pub fn of(file: Arc<dyn Device>) -> Self {
        Self { file, share: 4.0, is_inline: false, waiting_batches_max: 64 }
    }

    /// Opens a file of neighbours; by default the one beside the snapshot in `folder`.
    ///
    /// # Errors
    /// `Invalid` for a folder without a path, and those of opening the file.
    pub fn open_file(folder: &dyn Folder, path: Option<&Path>) -> Result<Arc<dyn Device>> {
        let path = match (path, folder.path()) {
            (Some(path), _) => path.to_owned(),
            (None, Some(snapshot)) => Self::beside(snapshot),
            (None, None) => return Err(Error::invalid("name the file of neighbours")),
        };
        let file = FileDevice::open(path, OpenMode::ReadOnly)
            .map_err(|error| error.with("remedy", "write the neighbours of the snapshot first"))?;
        Ok(Arc::new(file))
    }

    /// Where the neighbours of a snapshot lie if nobody says otherwise.
    #[must_use]
    pub fn beside(snapshot: &Path) -> PathBuf {
        let mut name = snapshot.as_os_str().to_owned();
        name.push(".neighbours");
        PathBuf::from(name)
    }

    /// Parses `neighbours:second_chance:share:inline`, of which parts may be left out at the end,
    /// as a part of the list of tiers; none where the text names something else. The file is the
    /// caller's to open.
    ///
    /// # Errors
    /// `Invalid` for another way to forget, a share that is not above 0, and a last part that is
    /// not `inline`.
    pub fn parse(
        text: &str,
        open: impl FnOnce() -> Result<Arc<dyn Device>>,
    ) -> Result<Option<Self>> {
        let mut parts = text.split(':').map(str::trim);
        if parts.next() != Some("neighbours") {
            return Ok(None);
        }
        let (forgets, share, inline) = (parts.next(), parts.next(), parts.next());
        let share = share.map(|share| share.parse().unwrap_or(f64::NAN));
        let is_known = forgets.is_none_or(|name| name == "second_chance")
            && inline.is_none_or(|inline| inline == "inline")
            && parts.next().is_none();
        if !is_known || share.is_some_and(|share: f64| !(share > 0.0 && share.is_finite())) {
            return Err(Error::invalid("neighbours are written neighbours:second_chance:share")
                .with("found", text)
                .with("example", "neighbours:second_chance:4"));
        }
        let given = Self { is_inline: inline.is_some(), ..Self::of(open()?) };
        Ok(Some(Self { share: share.unwrap_or(given.share), ..given }))
    }

    /// # Errors
    /// `Invalid` for a share that is not above 0 and a queue of no batches.
    pub(super) fn check(&self) -> Result<()> {
        if !(self.share > 0.0 && self.share.is_finite()) {
            return Err(
                Error::invalid("the share of neighbours must be above 0").with("found", self.share)
            );
        }
        if self.waiting_batches_max == 0 {
            return Err(Error::invalid("rows to find neighbours of need room to wait"));
        }
        Ok(())
    }

    /// Bytes besides the cache's: where the file's tables begin, the fullest queue, a batch that is
    /// collected, and what each thread reads into. The queue doubles as it grows.
    pub(super) fn waiting_bytes(&self, schema: &Schema) -> u64 {
        let file_bytes = NeighbourFile::memory_bytes(schema);
        let batch_bytes = BATCH_ROWS * size_of::<RowKey>();
        let queue_bytes = self.waiting_batches_max * (2 * size_of::<Vec<RowKey>>() + batch_bytes);
        let thread_bytes = PAGE_BYTES + 2 * batch_bytes;
        (file_bytes + queue_bytes + batch_bytes + THREADS * thread_bytes) as u64
    }
}

/// What neighbours did, and how many are known.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct NeighbourStats {
    /// Rows in no tier whose neighbour was asked for.
    pub rows_asked: u64,
    /// Of these, rows whose neighbour was known.
    pub rows_known: u64,
    /// Of these, rows that their neighbour answered for: it was in a tier.
    pub rows_answered: u64,
    /// Rows that left the tiers and whose neighbour was to be found.
    pub rows_queued: u64,
    /// Rows that found no room to wait for that, besides.
    pub rows_dropped: u64,
    /// Of the rows queued, those whose neighbour was known still.
    pub rows_again: u64,
    /// Of the rows queued, those whose neighbour was read from the file.
    pub rows_mapped: u64,
    /// Of the rows queued, those that the file has no neighbour of.
    pub rows_alone: u64,
    /// Of the rows queued, those whose part of the file could not be read.
    pub rows_failed: u64,
    /// Blocks of the file that were read.
    pub blocks_read: u64,
    /// Neighbours known now.
    pub key_count: u64,
    /// Most neighbours that can be known at once; 0 where the bytes are too few for any.
    pub key_count_max: u64,
    /// Neighbours that were forgotten for others.
    pub evictions: u64,
    /// Bytes of the cache of keys.
    pub used_bytes: u64,
    /// Bytes it may use.
    pub capacity_bytes: u64,
    /// Why the last part of the file could not be read.
    pub error: Option<String>,
}

impl Snapshot {
    /// Finds the neighbours of rows that left the tiers in threads of their own from now on, until
    /// the snapshot is dropped; nothing where the options name no neighbours, or lookups do it.
    ///
    /// # Errors
    /// `Io` when no thread can be started.
    pub fn map_neighbours_in_background(&self) -> Result<()> {
        self.tiers().neighbours().map_or(Ok(()), Neighbours::map_in_background)
    }

    /// Finds the neighbours of all rows that left the tiers so far, on this thread.
    #[cfg(test)]
    pub(crate) fn map_neighbours_now(&self) {
        if let Some(neighbours) = self.tiers().neighbours() {
            neighbours.map_now();
        }
    }
}

#[cfg(test)]
mod tests;
