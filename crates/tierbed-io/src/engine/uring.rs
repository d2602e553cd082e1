//! The io_uring engine: many transfers in flight, one system call per [`IoEngine::wait`].
//!
//! A plain ring: handing over in batches is worth more than registering buffers and files, and
//! kernel-side polling is harmful on few cores. `submit` writes a submission entry, which costs
//! no system call; `wait` hands all of them over and sleeps for the first completion in one call.
//!
//! Safety invariant: an entry points into a buffer of the arena and names a descriptor of a
//! device. Both must live, and no code may touch the buffer, until the kernel has reported the
//! entry's completion. So a `Flight` holds its device, the arena lends no buffer in flight,
//! and dropping the engine first waits for every flight. Entries carry the buffer's number, and
//! a buffer has at most one flight, so the ring can never be too small.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;

use io_uring::{opcode, types, IoUring, Probe};
use tierbed_core::stats::IoStats;
use tierbed_core::{Error, Result};

use super::arena::{count, Arena, Devices};
use super::{BufId, Completion, DeviceId, EngineOptions, IoEngine, Op, Request};
use crate::device::{past_the_end, Device};

/// Times one transfer is started again after the kernel put it off.
const RETRY_COUNT_MAX: u32 = 64;
/// What to sleep when the kernel is out of request memory and nothing of ours is flying.
const BUSY_WAIT_US: u64 = 100;
/// The entry that checks the ring; no buffer has this number.
const CHECK_TAG: u64 = u64::MAX;

/// A transfer that the kernel has, or will have at the next wait.
#[derive(Debug)]
struct Flight {
    request: Request,
    /// Keeps the descriptor open.
    device: Arc<dyn Device>,
    /// Moved so far; the kernel may move less than asked.
    done_bytes: u32,
    retry_count: u32,
}

/// Drives devices that have a descriptor through one ring, the others on the calling thread.
pub struct UringEngine {
    ring: IoUring,
    /// `None` only when drop had to leave it to the kernel.
    arena: Option<Box<Arena>>,
    devices: Devices,
    /// By buffer number.
    flights: Vec<Option<Flight>>,
    flying_count: usize,
    /// A forked child has this engine but not the ring's memory.
    owner_pid: u32,
    ready: Vec<Completion>,
    /// Scratch for one round of completions: entry tag and result.
    reaped: Vec<(u64, i32)>,
    stats: IoStats,
}

impl std::fmt::Debug for UringEngine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("UringEngine")
            .field("arena", &self.arena)
            .field("flying_count", &self.flying_count)
            .finish_non_exhaustive()
    }
}

impl UringEngine {
    /// Sets up the ring and sends one empty entry through it.
    ///
    /// # Errors
    ///
    /// Why the kernel refuses, e.g. `io_uring_setup: Operation not permitted (EPERM)` in a
    /// container.
    pub fn new(options: &EngineOptions) -> std::result::Result<Self, String> {
        let mut ring = IoUring::builder()
            .dontfork()
            .build(options.queue_depth.next_power_of_two())
            .map_err(|cause| refusal("io_uring_setup", &cause))?;
        check_ring(&mut ring)?;
        Ok(Self {
            ring,
            arena: Some(Box::new(Arena::new(options))),
            devices: Devices::default(),
            flights: (0..options.queue_depth).map(|_| None).collect(),
            flying_count: 0,
            owner_pid: std::process::id(),
            ready: Vec::new(),
            reaped: Vec::new(),
            stats: IoStats { engine: "io_uring", ..IoStats::default() },
        })
    }

    #[expect(clippy::expect_used, reason = "only drop takes the arena")]
    fn arena(&self) -> &Arena {
        self.arena.as_ref().expect("arena is there until drop")
    }

    #[expect(clippy::expect_used, reason = "only drop takes the arena")]
    fn arena_mut(&mut self) -> &mut Arena {
        self.arena.as_mut().expect("arena is there until drop")
    }

    /// Writes the submission entry of the rest of a flight and remembers the flight.
    #[expect(clippy::expect_used, reason = "fd and ring space were checked; flights are by buffer")]
    fn launch(&mut self, flight: Flight) {
        let Flight { request, done_bytes, .. } = flight;
        let fd = types::Fd(raw_fd(flight.device.as_ref()).expect("submit checked the descriptor"));
        let offset_bytes = request.offset_bytes + u64::from(done_bytes);
        let len_bytes = request.len_bytes - done_bytes;
        let start = self.arena().raw_ptr(request.buf);
        // SAFETY: take_over checked len_bytes <= buf_bytes, and done_bytes < len_bytes.
        let start = unsafe { start.add(done_bytes as usize) };
        let entry = match request.op {
            Op::Read => opcode::Read::new(fd, start, len_bytes).offset(offset_bytes).build(),
            Op::Write => opcode::Write::new(fd, start, len_bytes).offset(offset_bytes).build(),
        };
        let entry = entry.user_data(u64::from(request.buf.0));
        let slot = self.flights.get_mut(request.buf.0 as usize).expect("one flight slot a buffer");
        assert!(slot.is_none(), "one flight a buffer");
        *slot = Some(flight);
        self.flying_count += 1;
        // SAFETY: the flight just stored keeps the descriptor open; the arena keeps the buffer
        // and does not lend it until hand_back, which follows the completion; drop waits.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        pushed.expect("the ring has one entry for every buffer");
    }

    /// Makes one system call: hands over what is queued and waits for `want` completions.
    fn enter(&mut self, want: usize) -> Result<()> {
        self.stats.submit_count += 1;
        match self.ring.submit_and_wait(want) {
            Ok(_) => Ok(()),
            // Interrupted, or out of request memory until something completes.
            Err(cause) => match cause.raw_os_error() {
                Some(libc::EINTR) => Ok(()),
                Some(libc::EAGAIN | libc::EBUSY) => {
                    std::thread::sleep(std::time::Duration::from_micros(BUSY_WAIT_US));
                    Ok(())
                }
                _ => Err(Error::os("io_uring_enter failed", cause)
                    .with("remedy", "reopen with the I/O engine `pread`")),
            },
        }
    }

    /// Takes every completion the kernel has posted. Transfers that moved all their bytes, or
    /// failed, become ready; the others are launched again.
    fn reap(&mut self) {
        let mut reaped = std::mem::take(&mut self.reaped);
        reaped.extend(self.ring.completion().map(|entry| (entry.user_data(), entry.result())));
        for (tag, moved) in reaped.drain(..) {
            let at = usize::try_from(tag).unwrap_or(usize::MAX);
            if let Some(flight) = self.flights.get_mut(at).and_then(Option::take) {
                self.flying_count -= 1;
                self.land(flight, moved);
            }
        }
        self.reaped = reaped;
    }

    /// Decides what one completion means. `moved`: bytes, or a negated error number.
    fn land(&mut self, mut flight: Flight, moved: i32) {
        let request = flight.request;
        let Ok(moved) = u32::try_from(moved) else {
            return self.land_error(flight, -moved);
        };
        flight.done_bytes += moved;
        if flight.done_bytes == request.len_bytes {
            self.arena_mut().hand_back(request.buf);
            if request.op == Op::Read {
                flight.device.drop_cached(request.offset_bytes, request.len_bytes);
            }
            return self.ready(&request, Ok(()));
        }
        if moved == 0 {
            let error = match request.op {
                Op::Read => past_the_end(
                    flight.device.name(),
                    request.offset_bytes,
                    request.len_bytes as usize,
                ),
                Op::Write => transfer_error(&flight, std::io::ErrorKind::WriteZero.into()),
            };
            self.arena_mut().hand_back(request.buf);
            return self.ready(&request, Err(error));
        }
        if (flight.done_bytes as usize).is_multiple_of(flight.device.fd_align_bytes()) {
            return self.launch(flight);
        }
        // A direct transfer that stopped at an odd place, as at the end of the file, cannot go
        // on by itself; the device knows the slow way and the right error.
        let completion = self.arena_mut().run(flight.device.as_ref(), &request);
        self.ready(&request, completion.result);
    }

    fn land_error(&mut self, mut flight: Flight, errno: i32) {
        // The kernel cancels what a thread had queued when that thread ends; the engine may have
        // moved to another one since.
        let is_put_off = matches!(errno, libc::EINTR | libc::EAGAIN | libc::ECANCELED);
        if is_put_off && flight.retry_count < RETRY_COUNT_MAX {
            flight.retry_count += 1;
            return self.launch(flight);
        }
        let error = transfer_error(&flight, std::io::Error::from_raw_os_error(errno));
        self.arena_mut().hand_back(flight.request.buf);
        self.ready(&flight.request, Err(error));
    }

    fn ready(&mut self, request: &Request, result: Result<()>) {
        count(&mut self.stats, request.op, request.len_bytes, &result);
        let Request { tag, buf, op, .. } = *request;
        self.ready.push(Completion { tag, buf, op, result });
    }
}

fn raw_fd(device: &dyn Device) -> Option<i32> {
    device.fd().map(|fd| fd.as_raw_fd())
}

/// Returns whether the ring can take the request: there is a descriptor, and it likes the
/// request's alignment.
fn ring_takes(device: &dyn Device, request: &Request) -> bool {
    let align = device.fd_align_bytes();
    request.len_bytes > 0
        && (request.len_bytes as usize).is_multiple_of(align)
        && request.offset_bytes.is_multiple_of(align as u64)
        && device.fd().is_some()
}

fn transfer_error(flight: &Flight, cause: std::io::Error) -> Error {
    let what = match flight.request.op {
        Op::Read => "cannot read",
        Op::Write => "cannot write",
    };
    Error::os(what, cause)
        .with("path", flight.device.name())
        .with("offset_bytes", flight.request.offset_bytes)
        .with("len_bytes", flight.request.len_bytes)
}

/// Sends an empty entry through a new ring: some sandboxes let a ring be made and not be used.
fn check_ring(ring: &mut IoUring) -> std::result::Result<(), String> {
    let mut probe = Probe::new();
    ring.submitter()
        .register_probe(&mut probe)
        .map_err(|cause| refusal("io_uring_register", &cause))?;
    if !(probe.is_supported(opcode::Read::CODE) && probe.is_supported(opcode::Write::CODE)) {
        return Err("io_uring: the kernel is older than 5.6 and has no read and write".to_owned());
    }
    let entry = opcode::Nop::new().build().user_data(CHECK_TAG);
    // SAFETY: an empty entry names no memory and no descriptor.
    let pushed = unsafe { ring.submission().push(&entry) };
    pushed.map_err(|_| "io_uring: a new ring has no room".to_owned())?;
    loop {
        match ring.submit_and_wait(1) {
            Err(cause) if cause.raw_os_error() == Some(libc::EINTR) => {}
            Err(cause) => return Err(refusal("io_uring_enter", &cause)),
            Ok(_) => {}
        }
        if let Some(entry) = ring.completion().next() {
            return match (entry.user_data(), entry.result()) {
                (CHECK_TAG, 0) => Ok(()),
                (tag, result) => Err(format!("io_uring: empty entry came back as {tag}/{result}")),
            };
        }
    }
}

/// Describes a refusal as people search for it: `call: text (NAME)`.
fn refusal(call: &str, cause: &std::io::Error) -> String {
    let name = match cause.raw_os_error() {
        Some(libc::EPERM) => "EPERM",
        Some(libc::ENOSYS) => "ENOSYS",
        Some(libc::ENOMEM) => "ENOMEM",
        Some(libc::EACCES) => "EACCES",
        Some(libc::EINVAL) => "EINVAL",
        Some(libc::EMFILE) => "EMFILE",
        _ => return format!("{call}: {cause}"),
    };
    let text = cause.to_string();
    let text = text.split(" (os error").next().unwrap_or_default();
    format!("{call}: {text} ({name})")
}

impl Drop for UringEngine {
    fn drop(&mut self) {
        while self.flying_count > 0 {
            if std::process::id() != self.owner_pid || self.enter(1).is_err() {
                // The kernel may still write: memory it can reach must stay for ever.
                std::mem::forget(self.arena.take());
                std::mem::forget(std::mem::take(&mut self.flights));
                return;
            }
            self.reap();
        }
    }
}

impl IoEngine for UringEngine {
    fn attach(&mut self, device: Arc<dyn Device>) -> DeviceId {
        self.devices.attach(device)
    }

    fn detach(&mut self, device: DeviceId) {
        self.devices.detach(device);
    }

    fn buf_bytes(&self) -> usize {
        self.arena().buf_bytes()
    }

    fn acquire(&mut self) -> Option<BufId> {
        self.arena_mut().acquire()
    }

    fn release(&mut self, buf: BufId) {
        self.arena_mut().release(buf);
    }

    fn bytes(&self, buf: BufId) -> &[u8] {
        self.arena().bytes(buf)
    }

    fn bytes_mut(&mut self, buf: BufId) -> &mut [u8] {
        self.arena_mut().bytes_mut(buf)
    }

    fn submit(&mut self, request: Request) {
        let device = Arc::clone(self.devices.get(request.device));
        self.arena_mut().take_over(&request);
        if ring_takes(device.as_ref(), &request) {
            return self.launch(Flight { request, device, done_bytes: 0, retry_count: 0 });
        }
        let completion = self.arena_mut().run(device.as_ref(), &request);
        self.stats.submit_count += 1;
        self.ready(&request, completion.result);
    }

    fn wait(&mut self, done: &mut Vec<Completion>) -> Result<()> {
        self.reap();
        while self.flying_count > 0 {
            let has_queued = !self.ring.submission().is_empty();
            if !self.ready.is_empty() && !has_queued {
                break;
            }
            self.enter(usize::from(self.ready.is_empty()))?;
            self.reap();
        }
        done.append(&mut self.ready);
        Ok(())
    }

    fn poll(&mut self, done: &mut Vec<Completion>) -> Result<()> {
        self.reap();
        // A transfer that moved part of its bytes is queued again. Nobody would wake a caller who
        // waits for the ring if it stayed there.
        while !self.ring.submission().is_empty() {
            self.enter(0)?;
            self.reap();
        }
        done.append(&mut self.ready);
        Ok(())
    }

    fn ring(&self) -> Option<BorrowedFd<'_>> {
        // SAFETY: the ring owns its descriptor, and is borrowed as long as what is returned.
        Some(unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) })
    }

    fn in_flight_count(&self) -> usize {
        self.flying_count + self.ready.len()
    }

    fn stats(&self) -> IoStats {
        self.stats.clone()
    }

    fn memory_bytes(&self) -> u64 {
        let params = self.ring.params();
        let ring_bytes = params.sq_entries() as usize * (size_of::<io_uring::squeue::Entry>() + 4)
            + params.cq_entries() as usize * size_of::<io_uring::cqueue::Entry>();
        let flight_bytes = self.flights.len() * size_of::<Option<Flight>>();
        self.arena().memory_bytes() + (ring_bytes + flight_bytes) as u64
    }
}
