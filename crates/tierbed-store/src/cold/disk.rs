//! Page I/O of the table files: many requests in flight, timed for the cost model.

#![expect(
    clippy::indexing_slicing,
    reason = "a completion's tag holds the positions that its request was made of"
)]

use std::sync::Arc;

use tierbed_core::env::Clock;
use tierbed_core::stats::IoStats;
use tierbed_core::{Error, Result};
use tierbed_io::{
    open_engine, BufId, Completion, Device, DeviceId, EngineOptions, IoEngine, Op, Request,
};

use crate::cold::cost::{CostModel, PageRun};

/// A file of pages.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PageFile {
    pub(crate) device: DeviceId,
    pub(crate) page_bytes: usize,
}

/// Runs of pages of one file.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FileRuns<'a> {
    pub(crate) file: PageFile,
    pub(crate) runs: &'a [PageRun],
}

/// Takes pages read: positions of the part and of the run in it, and their bytes.
pub(crate) type PageSink<'a> = dyn FnMut(usize, usize, &[u8]) -> Result<()> + 'a;

/// A buffer, and what its completion is recognised by.
#[derive(Debug, Clone, Copy)]
struct TaggedBuf {
    buf: BufId,
    tag: u64,
}

/// The I/O engine and its requests in flight.
pub(crate) struct Disk {
    engine: Box<dyn IoEngine>,
    options: EngineOptions,
    before: IoStats,
    clock: Arc<dyn Clock>,
    pub(crate) cost: CostModel,
    done: Vec<Completion>,
    write_failure: Option<Error>,
}

impl Disk {
    pub(crate) fn new(options: EngineOptions, clock: Arc<dyn Clock>) -> Result<Self> {
        Ok(Self {
            engine: open_engine(&options)?,
            options,
            before: IoStats::default(),
            clock,
            cost: CostModel::default(),
            done: Vec::new(),
            write_failure: None,
        })
    }

    /// Replaces the engine by one whose buffers hold `page_bytes`; devices are to be attached
    /// again.
    pub(crate) fn grow(&mut self, page_bytes: usize) -> Result<()> {
        assert!(self.engine.in_flight_count() == 0, "an engine is replaced at rest");
        let options = EngineOptions { buf_bytes: page_bytes, ..self.options.clone() };
        let engine = open_engine(&options)?;
        self.before = self.stats();
        self.engine = engine;
        self.options = options;
        Ok(())
    }

    pub(crate) fn attach(&mut self, device: Arc<dyn Device>) -> DeviceId {
        self.engine.attach(device)
    }

    pub(crate) fn memory_bytes(&self) -> u64 {
        self.engine.memory_bytes()
    }

    pub(crate) fn buf_bytes(&self) -> usize {
        self.engine.buf_bytes()
    }

    pub(crate) fn stats(&self) -> IoStats {
        self.engine.stats().behind(&self.before)
    }

    /// Returns how many pages of `file` one request may move.
    pub(crate) fn pages_max(&self, file: PageFile) -> u32 {
        (self.buf_bytes() / file.page_bytes).max(1) as u32
    }

    /// Returns how many unwanted pages of `file` cost less to read than another request.
    pub(crate) fn gap_pages(&self, file: PageFile) -> u32 {
        self.cost.gap_pages(file.page_bytes)
    }

    /// Reads the runs of every part and gives each, by the positions of part and run, to `visit`,
    /// in any order. New requests go out by the half queue: one call into the kernel, and one
    /// into a virtual machine's host, for many.
    ///
    /// # Errors
    /// The first that a read or `visit` has; nothing is in flight afterwards.
    pub(crate) fn read(&mut self, parts: &[FileRuns<'_>], visit: &mut PageSink<'_>) -> Result<()> {
        assert!(self.engine.in_flight_count() == 0, "writes are finished before reads begin");
        let began_us = self.clock.now_us();
        let refill_below = (self.options.queue_depth as usize / 2).max(1);
        let mut waiting = (0u64..).zip(parts).flat_map(|(part, of)| {
            (0u64..).zip(of.runs).map(move |(at, run)| (part << 32 | at, of.file, *run))
        });
        let (mut count, mut bytes, mut result) = (0, 0, Ok(()));
        loop {
            let is_low = self.engine.in_flight_count() <= refill_below && result.is_ok();
            while let Some(buf) = is_low.then(|| self.engine.acquire()).flatten() {
                let Some((tag, file, run)) = waiting.next() else {
                    self.engine.release(buf);
                    break;
                };
                bytes += u64::from(run.count) * file.page_bytes as u64;
                self.submit(Op::Read, file, run, TaggedBuf { buf, tag });
                count += 1;
            }
            if self.engine.in_flight_count() == 0 {
                break;
            }
            self.engine.wait(&mut self.done)?;
            for completion in self.done.drain(..) {
                let (part, at) = ((completion.tag >> 32) as usize, completion.tag as u32 as usize);
                if result.is_ok() {
                    let FileRuns { file, runs } = parts[part];
                    let len_bytes = runs[at].count as usize * file.page_bytes;
                    let pages = &self.engine.bytes(completion.buf)[..len_bytes];
                    result = completion.result.and_then(|()| visit(part, at, pages));
                }
                self.engine.release(completion.buf);
            }
        }
        self.cost.observe(count, bytes, self.clock.now_us() - began_us);
        result
    }

    fn submit(&mut self, op: Op, file: PageFile, pages: PageRun, to: TaggedBuf) {
        assert!((1..=self.pages_max(file)).contains(&pages.count), "a request fits one buffer");
        self.engine.submit(Request {
            device: file.device,
            op,
            offset_bytes: u64::from(pages.first) * file.page_bytes as u64,
            len_bytes: pages.count * file.page_bytes as u32,
            buf: to.buf,
            tag: to.tag,
        });
    }

    /// Takes a buffer to write from, waiting for one if need be.
    ///
    /// # Errors
    /// When the engine cannot wait; failed writes are those of
    /// [`finish_writes`](Self::finish_writes).
    pub(crate) fn write_buf(&mut self) -> Result<BufId> {
        loop {
            if let Some(buf) = self.engine.acquire() {
                return Ok(buf);
            }
            self.wait_writes()?;
        }
    }

    pub(crate) fn bytes_mut(&mut self, buf: BufId) -> &mut [u8] {
        self.engine.bytes_mut(buf)
    }

    /// Starts to write the first pages of `buf` as `pages`.
    pub(crate) fn write(&mut self, file: PageFile, pages: PageRun, buf: BufId) {
        self.submit(Op::Write, file, pages, TaggedBuf { buf, tag: 0 });
    }

    /// Waits until no write is in flight.
    ///
    /// # Errors
    /// The first of a write since the last call.
    pub(crate) fn finish_writes(&mut self) -> Result<()> {
        while self.engine.in_flight_count() > 0 {
            self.wait_writes()?;
        }
        self.write_failure.take().map_or(Ok(()), Err)
    }

    fn wait_writes(&mut self) -> Result<()> {
        self.engine.wait(&mut self.done)?;
        for completion in self.done.drain(..) {
            self.engine.release(completion.buf);
            if let (Err(error), None) = (completion.result, &self.write_failure) {
                self.write_failure = Some(error);
            }
        }
        Ok(())
    }
}

impl std::fmt::Debug for Disk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Disk").field("options", &self.options).finish_non_exhaustive()
    }
}
