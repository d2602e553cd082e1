//! Mapping of evicted rows to their neighbours, in the background or on the calling thread.
//!
//! The file is read with no lock held; the cache is locked to look and to put entries in.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use tierbed_cache::{KeyCache, KeyCacheStats};
use tierbed_core::handover::Queue;
use tierbed_core::{Error, Result, RowKey, Schema};
use tierbed_io::{AlignedBuf, PAGE_BYTES};

use super::{NeighbourFile, NeighbourOptions, NeighbourStats, BATCH_ROWS, THREADS};

/// The neighbours of rows that left the tiers.
#[derive(Debug)]
pub(crate) struct Neighbours {
    shared: Arc<Shared>,
    is_inline: bool,
    waiting_batches_max: usize,
    /// Rows that left and are not a batch yet.
    leaving: Mutex<Vec<RowKey>>,
    queued: AtomicU64,
    dropped: AtomicU64,
    answered: AtomicU64,
    capacity_bytes: u64,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// What threads work on.
#[derive(Debug)]
struct Shared {
    file: NeighbourFile,
    queue: Queue<Vec<RowKey>>,
    cache: Mutex<KeyCache>,
    asked: AtomicU64,
    known: AtomicU64,
    stats: Mutex<NeighbourStats>,
}

impl Neighbours {
    /// Opens the file and makes an empty cache of `capacity_bytes`.
    ///
    /// # Errors
    /// As [`NeighbourFile::open`].
    pub(in crate::tiers) fn new(
        schema: &Schema,
        options: &NeighbourOptions,
        capacity_bytes: u64,
    ) -> Result<Self> {
        let file = NeighbourFile::open(Arc::clone(&options.file), schema)?;
        let tables: Vec<u64> = schema.tables().iter().map(|table| table.row_count).collect();
        let shared = Shared {
            cache: Mutex::new(KeyCache::new(capacity_bytes, &tables)),
            file,
            queue: Queue::default(),
            asked: AtomicU64::new(0),
            known: AtomicU64::new(0),
            stats: Mutex::default(),
        };
        Ok(Self {
            shared: Arc::new(shared),
            is_inline: options.is_inline,
            waiting_batches_max: options.waiting_batches_max,
            leaving: Mutex::new(Vec::with_capacity(BATCH_ROWS)),
            queued: AtomicU64::new(0),
            dropped: AtomicU64::new(0),
            answered: AtomicU64::new(0),
            capacity_bytes,
            threads: Mutex::default(),
        })
    }

    /// Returns the neighbour of a row that is in no tier, if it is known.
    pub(in crate::tiers) fn find(&self, key: RowKey) -> Option<RowKey> {
        if !self.shared.file.has(key.table) {
            return None;
        }
        self.shared.asked.fetch_add(1, Ordering::Relaxed);
        let near = lock(&self.shared.cache).get(key)?;
        self.shared.known.fetch_add(1, Ordering::Relaxed);
        Some(near)
    }

    /// Counts a row that its neighbour answered for.
    pub(in crate::tiers) fn count_answer(&self) {
        self.answered.fetch_add(1, Ordering::Relaxed);
    }

    /// Takes note of a row that is in no tier any more. Reads nothing: it is called under locks.
    pub(in crate::tiers) fn leaves(&self, key: RowKey) {
        if !self.shared.file.has(key.table) {
            return;
        }
        let mut leaving = lock(&self.leaving);
        leaving.push(key);
        if leaving.len() < BATCH_ROWS {
            return;
        }
        let batch = std::mem::replace(&mut *leaving, Vec::with_capacity(BATCH_ROWS));
        drop(leaving);
        self.push(batch);
    }

    fn push(&self, batch: Vec<RowKey>) {
        let count = batch.len() as u64;
        let counter = match self.shared.queue.try_push(batch, self.waiting_batches_max) {
            true => &self.queued,
            false => &self.dropped,
        };
        counter.fetch_add(count, Ordering::Relaxed);
    }

    /// Maps the batches that wait, where lookups do that themselves; called with no lock held.
    pub(in crate::tiers) fn settle(&self) {
        if self.is_inline {
            self.shared.map_all();
        }
    }

    /// Maps all rows that left so far, on this thread.
    #[cfg(test)]
    pub(crate) fn map_now(&self) {
        let rest = std::mem::replace(&mut *lock(&self.leaving), Vec::with_capacity(BATCH_ROWS));
        if !rest.is_empty() {
            self.push(rest);
        }
        self.shared.map_all();
    }

    /// Starts the threads that map rows, unless lookups do that themselves.
    ///
    /// # Errors
    /// `Io` when no thread can be started.
    pub(crate) fn map_in_background(&self) -> Result<()> {
        let mut threads = lock(&self.threads);
        while !self.is_inline && threads.len() < THREADS {
            let shared = Arc::clone(&self.shared);
            let work = move || {
                let mut buffer = AlignedBuf::new(PAGE_BYTES);
                while let Some(batch) = shared.queue.take() {
                    shared.map(&batch, &mut buffer);
                }
            };
            let name = "tierbed-neighbours".to_owned();
            let started = std::thread::Builder::new().name(name).spawn(work);
            threads.push(started.map_err(|cause| {
                Error::os("cannot start a thread that finds neighbours", cause)
            })?);
        }
        Ok(())
    }

    pub(crate) fn stats(&self) -> NeighbourStats {
        let KeyCacheStats { key_count, key_count_max, evictions, used_bytes } =
            lock(&self.shared.cache).stats();
        NeighbourStats {
            rows_asked: self.shared.asked.load(Ordering::Relaxed),
            rows_known: self.shared.known.load(Ordering::Relaxed),
            rows_answered: self.answered.load(Ordering::Relaxed),
            rows_queued: self.queued.load(Ordering::Relaxed),
            rows_dropped: self.dropped.load(Ordering::Relaxed),
            key_count,
            key_count_max,
            evictions,
            used_bytes,
            capacity_bytes: self.capacity_bytes,
            ..lock(&self.shared.stats).clone()
        }
    }
}

impl Drop for Neighbours {
    fn drop(&mut self) {
        self.shared.queue.close();
        for thread in lock(&self.threads).drain(..) {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn map_all(&self) {
        let mut buffer = None;
        while let Some(batch) = self.queue.try_take() {
            let buffer = buffer.get_or_insert_with(|| AlignedBuf::new(PAGE_BYTES));
            self.map(&batch, buffer);
        }
    }

    /// Reads the neighbours of those of `batch` that are not known, each block once, and puts them
    /// into the cache in the order of the batch. A block that cannot be read costs its rows their
    /// neighbours, nothing else.
    #[expect(clippy::indexing_slicing, reason = "places name rows of the batch")]
    fn map(&self, batch: &[RowKey], buffer: &mut [u8]) {
        let mut stats = NeighbourStats::default();
        let mut places: Vec<(u64, usize, usize)> = Vec::with_capacity(batch.len());
        let cache = lock(&self.cache);
        for (at, key) in batch.iter().enumerate() {
            match self.file.place_of(*key) {
                Some(_) if cache.contains(*key) => stats.rows_again += 1,
                Some((block, word)) => places.push((block, word, at)),
                None => stats.rows_alone += 1,
            }
        }
        drop(cache);
        places.sort_unstable();
        let mut found: Vec<Option<RowKey>> = vec![None; batch.len()];
        for asked in places.chunk_by(|a, b| a.0 == b.0) {
            let block = asked[0].0;
            stats.blocks_read += 1;
            let words = self.file.read(block, buffer);
            for &(_, word, at) in asked {
                let (key, place) = (batch[at], &mut found[at]);
                let near = words.as_ref().map_err(ToString::to_string).and_then(|words| {
                    let near = self.file.neighbour(key, words, word);
                    near.map_err(|error| error.to_string())
                });
                match near {
                    Ok(near) => {
                        *place = near;
                        stats.rows_alone += u64::from(near.is_none());
                    }
                    Err(error) => {
                        stats.error = Some(error);
                        stats.rows_failed += 1;
                    }
                }
            }
        }
        let mut cache = lock(&self.cache);
        for (key, near) in batch.iter().zip(found) {
            if let Some(near) = near {
                stats.rows_mapped += 1;
                cache.insert(*key, near);
            }
        }
        drop(cache);
        lock(&self.stats).add(stats);
    }
}

impl NeighbourStats {
    /// Adds what became of a batch.
    fn add(&mut self, batch: Self) {
        self.rows_again += batch.rows_again;
        self.rows_mapped += batch.rows_mapped;
        self.rows_alone += batch.rows_alone;
        self.rows_failed += batch.rows_failed;
        self.blocks_read += batch.blocks_read;
        self.error = batch.error.or(self.error.take());
    }
}

// Entries and counts are whole after every statement, so a panic elsewhere leaves nothing half
// done.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
