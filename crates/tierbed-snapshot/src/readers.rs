//! Pool of page readers: a few full ones for batches, small ones for small concurrent calls.
//!
//! Calls wait for the disk, not for a processor, so as many small calls may read as there are
//! callers, up to a bound. A full reader is made for each processor when the snapshot is opened; a
//! small one is made when a small call finds none free. The memory of all of them is set aside on
//! opening; what is never made is never touched.
//!
//! *Asynchronous* readers are smaller still, and made in the same way. Their calls wait for pages
//! and for other things at once ([`PendingLookup`](crate::PendingLookup)). Where a caller leaves
//! before its pages have come, the reader is free again once they have.

mod queue;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::Thread;

use tierbed_core::env::SystemClock;
use tierbed_core::stats::IoStats;
use tierbed_core::Result;
use tierbed_io::{Device, EngineChoice, EngineOptions};

use self::queue::{Queue, Turn};
use crate::layers::Layers;
use crate::reader::Reader;
use crate::scratch::{Scratch, ScratchShape};

/// Readers of one kind, made when calls need them.
#[derive(Debug, Clone, Copy)]
struct Kind {
    scratch_bytes: u64,
    /// Pages that fly at once.
    queue_depth: u32,
    /// Share of what a budget leaves for readers and cache that all of them take at most.
    share: u64,
}

/// The scratch has 512 rows of 64 elements.
const SMALL: Kind = Kind { scratch_bytes: 256 << 10, queue_depth: 32, share: 16 };
/// For a sample of a ranking model: 128 rows of 32 elements, few of them in no tier. Where there
/// are too few readers, the threads that take the rest contend with the one that reads for the
/// others.
const ASYNC: Kind = Kind { scratch_bytes: 32 << 10, queue_depth: 16, share: 8 };
/// Most asynchronous readers: with more calls at once, it is better to read for many together.
const ASYNC_MAX: usize = 32;

/// How readers are made when calls need them.
pub(crate) struct Maker {
    engine: EngineOptions,
    pages: Arc<dyn Device>,
    scratch: ScratchShape,
    small_count_max: usize,
    async_count_max: usize,
}

impl Maker {
    /// Makes at most `small_count_max` small readers. Only a ring lets a call wait for other
    /// things, too: pages of a map or in memory are read without one.
    pub(crate) fn new(
        engine: &EngineOptions,
        pages: &Arc<dyn Device>,
        scratch: ScratchShape,
        small_count_max: usize,
    ) -> Self {
        let async_count_max = match engine.choice {
            EngineChoice::Auto | EngineChoice::Uring if small_count_max > 0 => ASYNC_MAX,
            _ => 0,
        };
        let (engine, pages) = (engine.clone(), Arc::clone(pages));
        Self { engine, pages, scratch, small_count_max, async_count_max }
    }

    /// Lowers the numbers of readers to what `left_bytes` allow; returns the bytes of all.
    ///
    /// # Errors
    /// As opening an I/O engine.
    pub(crate) fn fit(&mut self, left_bytes: u64) -> Result<u64> {
        let (small_count, small_bytes) = self.fitting(SMALL, self.small_count_max, left_bytes)?;
        let (async_count, async_bytes) = self.fitting(ASYNC, self.async_count_max, left_bytes)?;
        (self.small_count_max, self.async_count_max) = (small_count, async_count);
        Ok(small_bytes + async_bytes)
    }

    /// Returns how many readers of a kind there may be, and their bytes.
    fn fitting(&self, kind: Kind, count_max: usize, left_bytes: u64) -> Result<(usize, u64)> {
        if count_max == 0 {
            return Ok((0, 0));
        }
        let one_bytes = self.make(kind, 0)?.memory_bytes().max(1);
        let fitting = usize::try_from(left_bytes / kind.share / one_bytes).unwrap_or(usize::MAX);
        let count = count_max.min(fitting);
        Ok((count, count as u64 * one_bytes))
    }

    fn make(&self, kind: Kind, number: usize) -> Result<Reader> {
        let scratch = Scratch::new(kind.scratch_bytes, self.scratch);
        let queue_depth = self.engine.queue_depth.min(kind.queue_depth);
        let engine = EngineOptions { queue_depth, ..self.engine.clone() };
        Reader::new(number, &engine, &self.pages, scratch, None)
    }

    /// Tells whether `index_count` indices are one chunk for a small reader.
    fn fits_small(&self, index_count: usize) -> bool {
        let words = SMALL.scratch_bytes as usize / 2 / size_of::<f32>();
        index_count.saturating_mul(self.scratch.row_words_max.max(1)) <= words
    }
}

/// What the engine of a reader did and how deep its queue was, as of its last return.
#[derive(Debug, Clone, Default)]
struct ReaderIo {
    io: IoStats,
    queue_depth: u32,
}

#[derive(Debug)]
struct State {
    idle: Vec<Reader>,
    idle_small: Vec<Reader>,
    #[expect(clippy::vec_box, reason = "readers go from call to call, and are not copied")]
    idle_async: Vec<Box<Reader>>,
    /// Asynchronous readers whose callers left before all pages came.
    #[expect(clippy::vec_box, reason = "as above")]
    landing: Vec<Box<Reader>>,
    /// By number of the reader; full ones come first.
    io: Vec<ReaderIo>,
    full_count: usize,
    small_count: usize,
    small_count_max: usize,
    async_count: usize,
    async_count_max: usize,
    queue: Queue,
    /// Readers that could not be made.
    failed_count: usize,
    /// Why there are fewer readers than there might be.
    error: Option<String>,
}

/// What all readers together did.
#[derive(Debug, Clone, Default)]
pub(crate) struct ReadersStats {
    pub(crate) reader_count: u64,
    pub(crate) queue_depth: u32,
    pub(crate) io: IoStats,
    pub(crate) error: Option<String>,
}

/// The readers of a snapshot.
pub(crate) struct Readers {
    state: Mutex<State>,
    maker: Maker,
}

impl Readers {
    pub(crate) fn new(full: Vec<Reader>, maker: Maker) -> Self {
        let io: Vec<ReaderIo> = full.iter().map(io_of).collect();
        let state = State {
            full_count: full.len(),
            idle: full,
            idle_small: Vec::new(),
            idle_async: Vec::new(),
            landing: Vec::new(),
            io,
            small_count: 0,
            small_count_max: maker.small_count_max,
            async_count: 0,
            async_count_max: maker.async_count_max,
            queue: Queue::new(Arc::new(SystemClock::default())),
            failed_count: 0,
            error: None,
        };
        Self { state: Mutex::new(state), maker }
    }

    /// Takes a full reader, waiting for one if all are busy.
    pub(crate) fn take(&self) -> ReaderGuard<'_> {
        self.take_for(usize::MAX)
    }

    /// Takes a reader for a call of `index_count` indices: a free one, or a new small one if the
    /// call is small; waits if all are busy.
    pub(crate) fn take_for(&self, index_count: usize) -> ReaderGuard<'_> {
        let is_small = self.maker.fits_small(index_count);
        let mut state = lock(&self.state);
        let mut turn = None;
        loop {
            if let Some(reader) = state.take_free(is_small, turn) {
                wake(state.served(turn), state);
                return ReaderGuard { readers: self, reader: Some(reader) };
            }
            if is_small && state.small_count < state.small_count_max {
                state.small_count += 1;
                let made = self.make(SMALL, state);
                state = lock(&self.state);
                if let Some(reader) = made {
                    wake(state.served(turn), state);
                    return ReaderGuard { readers: self, reader: Some(reader) };
                }
                // The call is served all the same, by a reader that comes back.
                state.small_count -= 1;
                state.small_count_max = 0;
                continue;
            }
            if turn.is_none() {
                turn = Some(state.queue.join(is_small));
            }
            drop(state);
            std::thread::park();
            state = lock(&self.state);
        }
    }

    /// Takes a reader that is free now for a call of `index_count` indices; none is made.
    pub(crate) fn try_take_for(&self, index_count: usize) -> Option<ReaderGuard<'_>> {
        let is_small = self.maker.fits_small(index_count);
        let reader = lock(&self.state).take_free(is_small, None)?;
        Some(ReaderGuard { readers: self, reader: Some(reader) })
    }

    /// Takes an asynchronous reader without waiting; `None` where all are in use, or the I/O engine
    /// has no ring.
    pub(crate) fn try_take_async(&self) -> Option<Box<Reader>> {
        let mut state = lock(&self.state);
        if let Some(reader) = state.idle_async.pop() {
            return Some(reader);
        }
        if let Some(at) = state.landing.iter_mut().position(|reader| reader.has_landed()) {
            return Some(state.landing.swap_remove(at));
        }
        if state.async_count >= state.async_count_max {
            return None;
        }
        state.async_count += 1;
        let made = self.make(ASYNC, state);
        if made.as_ref().is_some_and(Reader::has_ring) {
            return made.map(Box::new);
        }
        // No more are made where the kernel refuses rings, or there is no memory.
        let mut state = lock(&self.state);
        state.async_count -= 1;
        state.async_count_max = 0;
        state.failed_count += usize::from(made.is_some());
        None
    }

    /// Makes a reader, for which there is room; `None` where that fails.
    fn make(&self, kind: Kind, mut state: MutexGuard<'_, State>) -> Option<Reader> {
        let number = state.io.len();
        state.io.push(ReaderIo::default());
        drop(state);
        let made = self.maker.make(kind, number);
        if let Err(error) = &made {
            let mut state = lock(&self.state);
            state.failed_count += 1;
            state.error = Some(error.to_string());
        }
        made.ok()
    }

    /// Takes back an asynchronous reader, whose pages may still be on their way.
    pub(crate) fn take_back_async(&self, mut reader: Box<Reader>) {
        let (io, has_landed) = (io_of(&reader), reader.has_landed());
        let mut state = lock(&self.state);
        state.note(&reader, io);
        if has_landed { &mut state.idle_async } else { &mut state.landing }.push(reader);
        let count = state.idle_async.len() + state.landing.len();
        assert!(count <= state.async_count, "an asynchronous reader comes back once");
    }

    /// Takes back a reader of [`take_for`](Self::take_for).
    fn take_back(&self, reader: Reader) {
        let io = io_of(&reader);
        let mut state = lock(&self.state);
        state.note(&reader, io);
        let is_full = reader.number < state.full_count;
        if is_full { &mut state.idle } else { &mut state.idle_small }.push(reader);
        assert!(state.idle.len() <= state.full_count, "a reader comes back once");
        let is_known = state.idle_small.len() <= state.small_count;
        assert!(is_known, "a small reader comes back once");
        wake(state.next(), state);
    }

    /// Lets readers that nobody uses read the pages of `layers` and of no other.
    pub(crate) fn attach_idle(&self, layers: &Layers) {
        let mut state = lock(&self.state);
        let State { idle, idle_small, idle_async, .. } = &mut *state;
        let others = idle_async.iter_mut().map(|reader| &mut **reader);
        let all = idle.iter_mut().chain(idle_small).chain(others);
        all.for_each(|reader| reader.attach(layers));
    }

    pub(crate) fn stats(&self) -> ReadersStats {
        let state = lock(&self.state);
        ReadersStats {
            reader_count: (state.io.len() - state.failed_count) as u64,
            queue_depth: state.io.iter().map(|reader| reader.queue_depth).max().unwrap_or(0),
            io: sum_io(&state.io),
            error: state.error.clone(),
        }
    }
}

impl State {
    /// Notes what a reader did that comes back.
    fn note(&mut self, reader: &Reader, io: ReaderIo) {
        let count = self.io.len();
        let Some(known) = self.io.get_mut(reader.number) else {
            panic!("reader {} of {count}", reader.number);
        };
        *known = io;
    }

    /// Takes a free reader for a call, unless another call waits for it too long already.
    fn take_free(&mut self, is_small: bool, turn: Option<Turn>) -> Option<Reader> {
        let may_take_small = is_small && self.queue.may_take(turn, true);
        let free = if may_take_small { self.idle_small.pop() } else { None };
        free.or_else(|| if self.queue.may_take(turn, false) { self.idle.pop() } else { None })
    }

    /// Notes that a call has its reader. Returns the next call, which what is free still may suit.
    fn served(&mut self, turn: Option<Turn>) -> Option<Thread> {
        self.queue.leave(turn?);
        self.next()
    }

    fn next(&self) -> Option<Thread> {
        self.queue.next(!self.idle_small.is_empty(), !self.idle.is_empty())
    }
}

// A thread that wakes while the lock is held would wait for it at once.
fn wake(next: Option<Thread>, state: MutexGuard<'_, State>) {
    drop(state);
    if let Some(thread) = next {
        thread.unpark();
    }
}

impl std::fmt::Debug for Readers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Readers").field("state", &self.state).finish_non_exhaustive()
    }
}

/// A reader on loan; goes back when dropped.
pub(crate) struct ReaderGuard<'a> {
    readers: &'a Readers,
    /// Some until dropped.
    reader: Option<Reader>,
}

impl ReaderGuard<'_> {
    /// Returns the reader.
    #[expect(clippy::expect_used, reason = "the reader leaves only when the guard is dropped")]
    pub(crate) fn get(&mut self) -> &mut Reader {
        self.reader.as_mut().expect("reader is on loan")
    }
}

impl Drop for ReaderGuard<'_> {
    fn drop(&mut self) {
        let Some(reader) = self.reader.take() else { return };
        self.readers.take_back(reader);
    }
}

fn io_of(reader: &Reader) -> ReaderIo {
    ReaderIo { io: reader.io_stats(), queue_depth: reader.queue_depth() }
}

// The lists and counters are whole after every statement, so a panic elsewhere while a lock was
// held leaves nothing half done.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn sum_io(readers: &[ReaderIo]) -> IoStats {
    let mut sum = readers.first().map(|reader| reader.io.clone()).unwrap_or_default();
    for ReaderIo { io, .. } in readers.iter().skip(1) {
        sum.read_count += io.read_count;
        sum.write_count += io.write_count;
        sum.read_bytes += io.read_bytes;
        sum.write_bytes += io.write_bytes;
        sum.submit_count += io.submit_count;
    }
    sum
}

#[cfg(test)]
mod tests;
