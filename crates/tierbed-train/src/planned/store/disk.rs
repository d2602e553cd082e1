//! Reads and writes of chunks: many at a time, in buffers of the I/O engine.

use std::ops::Range;
use std::sync::Arc;

use tierbed_core::stats::IoStats;
use tierbed_core::Result;
use tierbed_io::{
    open_engine, BufId, Completion, Device, DeviceId, EngineOptions, IoEngine, Op, Request,
    PAGE_BYTES,
};

use super::extents::Extents;

/// The file of extents and what is in flight to and from it.
pub(crate) struct Disk {
    engine: Box<dyn IoEngine>,
    device: Arc<dyn Device>,
    device_id: DeviceId,
    depth: usize,
    writes_in_flight: usize,
    reads_in_flight: usize,
    done: Vec<Completion>,
    /// Reads that arrived during a wait for writes.
    early: Vec<Arrived>,
    wait_count: u64,
    is_dirty: bool,
    /// Until the device refused once.
    takes_space_ahead: bool,
}

/// A read that arrived.
#[derive(Debug)]
pub(crate) struct Arrived {
    pub(crate) buf: BufId,
    pub(crate) tag: u64,
}

impl Disk {
    pub(crate) fn new(device: Arc<dyn Device>, options: &EngineOptions) -> Result<Self> {
        let mut engine = open_engine(options)?;
        let device_id = engine.attach(device.clone());
        Ok(Self {
            engine,
            device,
            device_id,
            depth: options.queue_depth as usize,
            writes_in_flight: 0,
            reads_in_flight: 0,
            done: Vec::new(),
            early: Vec::new(),
            wait_count: 0,
            is_dirty: false,
            takes_space_ahead: true,
        })
    }

    pub(crate) fn memory_bytes(&self) -> u64 {
        self.engine.memory_bytes()
    }

    pub(crate) fn buf_bytes(&self) -> usize {
        self.engine.buf_bytes()
    }

    pub(crate) fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// Returns how often the caller had to wait for the device.
    pub(crate) fn wait_count(&self) -> u64 {
        self.wait_count
    }

    pub(crate) fn stats(&self) -> IoStats {
        self.engine.stats()
    }

    /// Returns how many transfers there are buffers for.
    pub(crate) fn depth(&self) -> usize {
        self.depth
    }

    /// Takes a buffer to write from, waiting for one if need be. Reads must not have them all.
    pub(crate) fn write_buf(&mut self) -> Result<BufId> {
        loop {
            if let Some(buf) = self.try_write_buf()? {
                return Ok(buf);
            }
            self.settle_writes(true)?;
        }
    }

    /// Takes a buffer to write from if one is free.
    pub(crate) fn try_write_buf(&mut self) -> Result<Option<BufId>> {
        if let Some(buf) = self.engine.acquire() {
            return Ok(Some(buf));
        }
        self.settle_writes(false)?;
        Ok(self.engine.acquire())
    }

    pub(crate) fn bytes_mut(&mut self, buf: BufId) -> &mut [u8] {
        self.engine.bytes_mut(buf)
    }

    /// Returns what a read brought.
    pub(crate) fn bytes(&self, buf: BufId) -> &[u8] {
        self.engine.bytes(buf)
    }

    pub(crate) fn release(&mut self, buf: BufId) {
        self.engine.release(buf);
    }

    /// Takes the space that `extents` grew by, so that writes need not. Where the device cannot,
    /// they do: a disk that is full is told by a write.
    pub(crate) fn take_space(&mut self, extents: &mut Extents) {
        if let Some(range) = extents.take_growth().filter(|_| self.takes_space_ahead) {
            self.takes_space_ahead = self.device.preallocate(range.start, range.end - range.start);
        }
    }

    pub(crate) fn write(&mut self, buf: BufId, offset_bytes: u64, len_bytes: usize) {
        self.submit(Op::Write, buf, offset_bytes..offset_bytes + len_bytes as u64, 0);
        self.writes_in_flight += 1;
        self.is_dirty = true;
    }

    /// Starts a read if a buffer is free; `false` when none is.
    pub(crate) fn try_read(&mut self, offset_bytes: u64, len_bytes: usize, tag: u64) -> bool {
        let Some(buf) = self.engine.acquire() else { return false };
        self.submit(Op::Read, buf, offset_bytes..offset_bytes + len_bytes as u64, tag);
        self.reads_in_flight += 1;
        true
    }

    fn submit(&mut self, op: Op, buf: BufId, bytes: Range<u64>, tag: u64) {
        let len_bytes = bytes.end - bytes.start;
        let is_in_pages = (bytes.start | bytes.end).is_multiple_of(PAGE_BYTES as u64);
        assert!(is_in_pages, "{op:?} of {bytes:?}, which are no whole pages");
        let buf_bytes = self.engine.buf_bytes() as u64;
        assert!(len_bytes <= buf_bytes, "{op:?} of {len_bytes} bytes in buffers of {buf_bytes}");
        self.engine.submit(Request {
            device: self.device_id,
            op,
            offset_bytes: bytes.start,
            len_bytes: len_bytes as u32,
            buf,
            tag,
        });
    }

    pub(crate) fn reads_in_flight(&self) -> usize {
        self.reads_in_flight
    }

    pub(crate) fn writes_in_flight(&self) -> usize {
        self.writes_in_flight
    }

    /// Waits for at least one transfer if any is in flight and no read has arrived before; adds
    /// reads to `arrived`.
    ///
    /// # Errors
    /// The first that failed; the buffers of the others are given back.
    pub(crate) fn wait(&mut self, arrived: &mut Vec<Arrived>) -> Result<()> {
        if !self.early.is_empty() {
            return self.poll(arrived);
        }
        self.wait_count += u64::from(self.writes_in_flight + self.reads_in_flight > 0);
        self.engine.wait(&mut self.done)?;
        self.sort_out(arrived)
    }

    /// Starts what is queued and adds the reads that are there to `arrived`, without waiting.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    pub(crate) fn poll(&mut self, arrived: &mut Vec<Arrived>) -> Result<()> {
        arrived.append(&mut self.early);
        self.engine.poll(&mut self.done)?;
        self.sort_out(arrived)
    }

    fn sort_out(&mut self, arrived: &mut Vec<Arrived>) -> Result<()> {
        let mut result = Ok(());
        for completion in self.done.drain(..) {
            let in_flight = match completion.op {
                Op::Write => &mut self.writes_in_flight,
                Op::Read => &mut self.reads_in_flight,
            };
            assert!(*in_flight > 0, "a {:?} completed that was never submitted", completion.op);
            *in_flight -= 1;
            if completion.op == Op::Read && completion.result.is_ok() && result.is_ok() {
                arrived.push(Arrived { buf: completion.buf, tag: completion.tag });
                continue;
            }
            self.engine.release(completion.buf);
            result = result.and(completion.result);
        }
        if result.is_err() {
            arrived.drain(..).for_each(|read| self.engine.release(read.buf));
        }
        result
    }

    /// Waits until no write is in flight.
    pub(crate) fn finish_writes(&mut self) -> Result<()> {
        while self.writes_in_flight > 0 {
            self.settle_writes(true)?;
        }
        Ok(())
    }

    /// Tells whether no write is in flight, after waiting for that if it may.
    pub(crate) fn writes_done(&mut self, may_wait: bool) -> Result<bool> {
        match may_wait {
            true => self.finish_writes()?,
            false => self.poll_writes()?,
        }
        Ok(self.writes_in_flight == 0)
    }

    /// Takes note of the writes that are done, without waiting.
    pub(crate) fn poll_writes(&mut self) -> Result<()> {
        self.settle_writes(false)
    }

    // Reads that arrive meanwhile are handed out by the next poll or wait.
    fn settle_writes(&mut self, may_wait: bool) -> Result<()> {
        if may_wait {
            self.wait_count += u64::from(self.writes_in_flight + self.reads_in_flight > 0);
            self.engine.wait(&mut self.done)?;
        } else {
            self.engine.poll(&mut self.done)?;
        }
        let mut early = std::mem::take(&mut self.early);
        let result = self.sort_out(&mut early);
        self.early = early;
        result
    }

    /// Makes every write survive power loss.
    ///
    /// # Panics
    /// When writes are in flight: [`finish_writes`](Self::finish_writes) comes before.
    pub(crate) fn sync(&mut self) -> Result<()> {
        assert_eq!(self.writes_in_flight, 0, "a sync would miss writes");
        if self.is_dirty {
            self.device.sync()?;
            self.is_dirty = false;
        }
        Ok(())
    }
}

impl std::fmt::Debug for Disk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Disk").field("device", &self.device).finish_non_exhaustive()
    }
}
