//! Background reads of rows that were answered approximately, so that the next answer is exact.
//!
//! A row that a code, a neighbour or a default stood in for is put into a bounded queue, when its
//! table says so. A thread reads what waits, past the tiers and through every check of a page, and
//! offers it to the tiers as if it had been read by a lookup.
//!
//! ```text
//! lookup ─▶ approximate answer
//!             └▶ [queue, bounded] ─▶ known by now? ─▶ read, check ─▶ tiers
//!                  └ full: dropped, counted              └ fails: counted, never a value
//! ```
//!
//! No lookup waits for it, and none fails because of it. Without the thread, rows wait
//! until `refresh_now`, so that tests decide when.
#![expect(clippy::indexing_slicing, reason = "tables are those of the schema")]

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use serde::Serialize;
use tierbed_core::handover::Queue;
use tierbed_core::{Error, Result, RowKey, Schema, TableId};

use crate::layers::Layers;
use crate::reader::Reader;
use crate::scratch::Filled;
use crate::snapshot::Snapshot;
use crate::tiers::Group;

/// Rows that are read at once.
const BATCH_ROWS: usize = 64;

/// Which approximate answers are followed by a read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RefreshOptions {
    /// The tables.
    pub tables: Vec<TableId>,
    /// Most rows that wait.
    pub waiting_rows_max: usize,
}

impl Default for RefreshOptions {
    /// No table; 4096 rows.
    fn default() -> Self {
        Self { tables: Vec::new(), waiting_rows_max: 4096 }
    }
}

impl RefreshOptions {
    /// Those of tables by name; none named is all of them.
    ///
    /// # Errors
    /// `Invalid` for a name that no table has.
    pub fn of_tables(schema: &Schema, names: &[String]) -> Result<Self> {
        let ids = (0..).map(TableId).zip(schema.tables());
        if names.is_empty() {
            return Ok(Self { tables: ids.map(|(id, _)| id).collect(), ..Self::default() });
        }
        let found = names.iter().map(|name| {
            let named = ids.clone().find(|(_, table)| table.name == *name);
            named.map(|(id, _)| id).ok_or_else(|| {
                Error::invalid("no such table to refresh")
                    .with("table", name)
                    .with("remedy", "name tables that the snapshot has")
            })
        });
        Ok(Self { tables: found.collect::<Result<_>>()?, ..Self::default() })
    }
}

/// What became of rows that were answered approximately.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct RefreshStats {
    /// Rows that were put into the queue.
    pub rows_queued: u64,
    /// Rows that found no room there, besides.
    pub rows_dropped: u64,
    /// Of the rows queued, those that waited twice or were in a tier by then.
    pub rows_known: u64,
    /// Of the rows queued, those that were read and offered to the tiers.
    pub rows_read: u64,
    /// Of the rows queued, those that could not be read.
    pub rows_failed: u64,
    /// Pages read for them.
    pub pages_read: u64,
    /// Why the last row could not be read.
    pub error: Option<String>,
}

/// Rows that wait, and the means to read them.
#[derive(Debug)]
pub(crate) struct Refresher {
    queue: Arc<Queue<RowKey>>,
    waiting_rows_max: usize,
    /// By table.
    is_refreshed: Vec<bool>,
    reader: Mutex<Reader>,
    memory_bytes: u64,
    queued: AtomicU64,
    dropped: AtomicU64,
    stats: Mutex<RefreshStats>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Refresher {
    /// # Errors
    /// `Invalid` for unknown tables and a queue of no rows.
    pub(crate) fn new(schema: &Schema, options: &RefreshOptions, reader: Reader) -> Result<Self> {
        if options.waiting_rows_max == 0 {
            return Err(Error::invalid("rows to refresh need room to wait"));
        }
        let mut is_refreshed = vec![false; schema.tables().len()];
        for table in &options.tables {
            schema.table(*table)?;
            is_refreshed[table.0 as usize] = true;
        }
        // A queue that grows doubles.
        let queue_bytes = 2 * options.waiting_rows_max * size_of::<RowKey>();
        Ok(Self {
            memory_bytes: reader.memory_bytes() + queue_bytes as u64,
            queue: Arc::default(),
            waiting_rows_max: options.waiting_rows_max,
            is_refreshed,
            reader: Mutex::new(reader),
            queued: AtomicU64::new(0),
            dropped: AtomicU64::new(0),
            stats: Mutex::default(),
            thread: Mutex::default(),
        })
    }

    /// Bytes of the reader and of the fullest queue.
    pub(crate) fn memory_bytes(&self) -> u64 {
        self.memory_bytes
    }

    /// Reads pages of `layers`, and of no other deltas, from now on.
    pub(crate) fn attach(&self, layers: &Layers) {
        lock(&self.reader).attach(layers);
    }

    /// Puts a row that was answered approximately into the queue, if its table wants that and
    /// there is room.
    pub(crate) fn ask(&self, key: RowKey) {
        // Tables that deltas brought are not refreshed.
        if self.is_refreshed.get(key.table.0 as usize) != Some(&true) {
            return;
        }
        let count = match self.queue.try_push(key, self.waiting_rows_max) {
            true => &self.queued,
            false => &self.dropped,
        };
        count.fetch_add(1, Ordering::Relaxed);
    }
}

impl Drop for Refresher {
    fn drop(&mut self) {
        self.queue.close();
        let thread = lock(&self.thread).take();
        // The thread itself may be the last to let go of the snapshot.
        if let Some(thread) = thread.filter(|t| t.thread().id() != std::thread::current().id()) {
            let _ = thread.join();
        }
    }
}

impl Snapshot {
    /// Reads rows that were answered approximately in a thread of its own from now on, until the
    /// snapshot is dropped; nothing where the options name no table.
    ///
    /// # Errors
    /// `Io` when no thread can be started.
    pub fn refresh_in_background(self: &Arc<Self>) -> Result<()> {
        let Some(refresher) = self.refresher() else { return Ok(()) };
        let mut thread = lock(&refresher.thread);
        if thread.is_some() {
            return Ok(());
        }
        let (queue, weak) = (Arc::clone(&refresher.queue), Arc::downgrade(self));
        let work = move || {
            while let Some(first) = queue.take() {
                let Some(snapshot) = weak.upgrade() else { return };
                snapshot.refresh_batch(first);
            }
        };
        let started = std::thread::Builder::new().name("tierbed-refresh".to_owned()).spawn(work);
        *thread =
            Some(started.map_err(|cause| Error::os("cannot start the refreshing thread", cause))?);
        Ok(())
    }

    /// Reads all rows that wait, on this thread.
    #[cfg(test)]
    pub(crate) fn refresh_now(&self) {
        let Some(refresher) = self.refresher() else { return };
        while let Some(first) = refresher.queue.try_take() {
            self.refresh_batch(first);
        }
    }

    /// Returns what became of rows answered approximately; nothing where none is refreshed.
    #[must_use]
    pub fn refresh_stats(&self) -> Option<RefreshStats> {
        let refresher = self.refresher()?;
        let mut stats = lock(&refresher.stats).clone();
        stats.rows_dropped = refresher.dropped.load(Ordering::Relaxed);
        stats.rows_queued = refresher.queued.load(Ordering::Relaxed);
        Some(stats)
    }

    /// Reads `first` and some of the rows behind it.
    fn refresh_batch(&self, first: RowKey) {
        let Some(refresher) = self.refresher() else { return };
        let layers = self.layers();
        let mut reader = lock(&refresher.reader);
        let (mut keys, mut taken) = (Vec::new(), 0);
        let mut next = Some(first);
        while let Some(key) = next {
            taken += 1;
            if !keys.contains(&key) && !self.tiers().holds(key, &mut reader.scratch.visits) {
                keys.push(key);
            }
            next = if taken < BATCH_ROWS { refresher.queue.try_take() } else { None };
        }
        lock(&refresher.stats).rows_known += (taken - keys.len()) as u64;
        let mut rest = keys.as_slice();
        while !rest.is_empty() {
            let count = self.refresh_rows(&layers, &mut reader, rest);
            (_, rest) = rest.split_at(count);
        }
    }

    /// Reads as many of `keys` as fit the scratch, at least one; returns how many. When one of
    /// them fails, they are read one by one.
    fn refresh_rows(&self, layers: &Layers, reader: &mut Reader, keys: &[RowKey]) -> usize {
        let Some(refresher) = self.refresher() else { return keys.len() };
        reader.scratch.start(keys.len());
        let fitting =
            keys.iter().take_while(|key| reader.scratch.add(**key, self.dim(**key, layers)));
        let count = fitting.count();
        assert!(count > 0, "a row does not fit an empty scratch");
        let read = self.fetch(reader, layers, false).and_then(|read| {
            self.offer_refreshed(reader, layers)?;
            Ok(read)
        });
        match read {
            Ok(read) => {
                let mut stats = lock(&refresher.stats);
                stats.rows_read += count as u64;
                stats.pages_read += read.pages_read;
            }
            Err(_) if count > 1 => {
                for key in keys.iter().take(count) {
                    self.refresh_rows(layers, reader, std::slice::from_ref(key));
                }
            }
            Err(error) => {
                let mut stats = lock(&refresher.stats);
                stats.rows_failed += 1;
                stats.error = Some(error.to_string());
            }
        }
        count
    }

    /// Offers the rows of the scratch to the tiers. Which others their samples asked for is not
    /// known any more: each is a group of its own.
    fn offer_refreshed(&self, reader: &mut Reader, layers: &Layers) -> Result<()> {
        let scratch = &mut reader.scratch;
        for at in 0..scratch.keys.len() {
            if scratch.filled[at] == Filled::Read {
                let group = Group { positions: &[at as u32], row_count: 1, hit_count: 0 };
                self.tiers().settle(&group, scratch, layers)?;
            }
        }
        Ok(())
    }
}

// Numbers are whole after every statement; a reader lands all its pages before it returns.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
