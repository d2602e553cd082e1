//! The thread-pool I/O engine: `pread` and `pwrite`, the fallback where io_uring is refused.
//!
//! The buffer moves with the request, by ownership: slot ─▶ job ─▶ thread ─▶ finished ─▶ slot.
//! Threads wait for work on a condition variable and never spin. Costs about twice the CPU of
//! io_uring per transfer, at the same rate.

use std::any::Any;
use std::panic::{catch_unwind, resume_unwind, AssertUnwindSafe};
use std::sync::mpsc::{channel, Receiver, Sender, TryRecvError};
use std::sync::Arc;
use std::thread::JoinHandle;

use tierbed_core::handover::Queue;
use tierbed_core::stats::IoStats;
use tierbed_core::{Error, Result};

use super::arena::{count, transfer, Arena, Devices};
use super::{BufId, Completion, DeviceId, EngineOptions, IoEngine, Request};
use crate::buffer::AlignedBuf;
use crate::device::Device;

/// More threads than this cost more memory and switching than they bring.
const THREAD_COUNT_MAX: u32 = 16;
/// A worker needs a few KiB; devices of tests a little more.
const STACK_BYTES: usize = 64 << 10;

/// Serves requests on a pool of threads.
#[derive(Debug)]
pub struct PreadEngine {
    arena: Arena,
    devices: Devices,
    queue: Arc<Queue<Job>>,
    finished: Receiver<Finished>,
    threads: Vec<JoinHandle<()>>,
    /// A forked child has this engine but not its threads.
    owner_pid: u32,
    in_flight_count: usize,
    stats: IoStats,
}

/// A request with everything it needs to be served by another thread.
#[derive(Debug)]
struct Job {
    request: Request,
    device: Arc<dyn Device>,
    buf: AlignedBuf,
}

struct Finished {
    request: Request,
    buf: AlignedBuf,
    /// The outer error is the payload of a panic in the device.
    result: std::result::Result<Result<()>, Box<dyn Any + Send>>,
}

/// A quarter of the requests in flight: a stack weighs as much as sixteen pages, and small queues
/// mean small budgets.
fn thread_count(queue_depth: u32) -> u32 {
    (queue_depth / 4).clamp(queue_depth.min(2), THREAD_COUNT_MAX)
}

impl PreadEngine {
    /// Starts the pool; `fallback_reason` goes into the statistics.
    ///
    /// # Errors
    ///
    /// `Io` when the operating system refuses to start a thread.
    pub fn new(options: &EngineOptions, fallback_reason: String) -> Result<Self> {
        let (sender, finished) = channel();
        let stats = IoStats { engine: "pread_pool", fallback_reason, ..IoStats::default() };
        let mut engine = Self {
            arena: Arena::new(options),
            devices: Devices::default(),
            queue: Arc::default(),
            finished,
            threads: Vec::new(),
            owner_pid: std::process::id(),
            in_flight_count: 0,
            stats,
        };
        for at in 0..thread_count(options.queue_depth) {
            let (queue, sender) = (Arc::clone(&engine.queue), sender.clone());
            let thread = std::thread::Builder::new()
                .name(format!("tierbed-io-{at}"))
                .stack_size(STACK_BYTES)
                .spawn(move || serve(&queue, &sender))
                .map_err(|cause| Error::os("cannot start an I/O thread", cause))?;
            engine.threads.push(thread);
        }
        Ok(engine)
    }

    fn complete(&mut self, finished: Finished) -> Completion {
        let Finished { request, buf, result } = finished;
        self.arena.put_back(request.buf, buf);
        self.in_flight_count -= 1;
        let result = result.unwrap_or_else(|payload| resume_unwind(payload));
        count(&mut self.stats, request.op, request.len_bytes, &result);
        self.stats.submit_count += 1;
        Completion { tag: request.tag, buf: request.buf, op: request.op, result }
    }
}

fn lost() -> Error {
    Error::new(tierbed_core::ErrorKind::Io, "all I/O threads have ended")
}

/// A thread's life: take a job, move its bytes, report.
fn serve(queue: &Queue<Job>, sender: &Sender<Finished>) {
    while let Some(Job { request, device, mut buf }) = queue.take() {
        // A device that panics is a bug; it must surface in wait(), not hang it.
        let served = AssertUnwindSafe(|| transfer(device.as_ref(), &request, buf.as_mut()));
        let result = catch_unwind(served);
        drop(device);
        if sender.send(Finished { request, buf, result }).is_err() {
            return;
        }
    }
}

impl Drop for PreadEngine {
    fn drop(&mut self) {
        if std::process::id() != self.owner_pid {
            // Waiting for threads that did not come along would never end.
            return std::mem::forget(std::mem::take(&mut self.threads));
        }
        self.queue.close();
        for thread in self.threads.drain(..) {
            // A worker cannot panic: what it calls is caught.
            let _ = thread.join();
        }
    }
}

impl IoEngine for PreadEngine {
    fn attach(&mut self, device: Arc<dyn Device>) -> DeviceId {
        self.devices.attach(device)
    }

    fn detach(&mut self, device: DeviceId) {
        self.devices.detach(device);
    }

    fn buf_bytes(&self) -> usize {
        self.arena.buf_bytes()
    }

    fn acquire(&mut self) -> Option<BufId> {
        self.arena.acquire()
    }

    fn release(&mut self, buf: BufId) {
        self.arena.release(buf);
    }

    fn bytes(&self, buf: BufId) -> &[u8] {
        self.arena.bytes(buf)
    }

    fn bytes_mut(&mut self, buf: BufId) -> &mut [u8] {
        self.arena.bytes_mut(buf)
    }

    fn submit(&mut self, request: Request) {
        let device = Arc::clone(self.devices.get(request.device));
        self.arena.take_over(&request);
        let buf = self.arena.take_out(request.buf);
        self.in_flight_count += 1;
        self.queue.push(Job { request, device, buf });
    }

    fn wait(&mut self, done: &mut Vec<Completion>) -> Result<()> {
        if self.in_flight_count == 0 {
            return Ok(());
        }
        let first = self.finished.recv().map_err(|_| lost())?;
        done.push(self.complete(first));
        self.poll(done)
    }

    fn poll(&mut self, done: &mut Vec<Completion>) -> Result<()> {
        loop {
            match self.finished.try_recv() {
                Ok(next) => done.push(self.complete(next)),
                Err(TryRecvError::Empty) => return Ok(()),
                Err(TryRecvError::Disconnected) => return Err(lost()),
            }
        }
    }

    fn in_flight_count(&self) -> usize {
        self.in_flight_count
    }

    fn stats(&self) -> IoStats {
        self.stats.clone()
    }

    fn memory_bytes(&self) -> u64 {
        self.arena.memory_bytes() + (self.threads.len() * STACK_BYTES) as u64
    }
}
