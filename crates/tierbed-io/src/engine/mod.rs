//! I/O engines: batches of requests in, completions out.
//!
//! An engine owns a fixed set of page-aligned buffers. A caller takes one ([`IoEngine::acquire`]),
//! fills it if it writes, hands it over with a [`Request`], and gets it back with the
//! [`Completion`]; in between no other code can touch it, so a buffer can never be freed or read
//! while the kernel writes into it.
//!
//! ```text
//! acquire ─▶ bytes_mut ─▶ submit ─┬─▶ wait ─▶ Completion ─▶ bytes ─▶ release
//!                                 └─ the engine owns the buffer here
//! ```
//!
//! Requests in flight complete in any order, so two that overlap on one device must not be in
//! flight together unless both read. A write past the end overlaps everything from the old end
//! on; a write that is not made of whole sectors overlaps all pages it touches.

mod arena;
pub mod depth;
pub mod inline;
pub mod pread;
pub mod uring;

use std::fmt;
use std::os::fd::BorrowedFd;
use std::str::FromStr;
use std::sync::Arc;

use tierbed_core::stats::IoStats;
use tierbed_core::{Error, Result};

use crate::buffer::PAGE_BYTES;
use crate::device::Device;

/// A device attached to an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DeviceId(pub u32);

/// A buffer of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BufId(pub u32);

/// Which way the bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Op {
    /// From the device into the buffer.
    Read,
    /// From the buffer to the device.
    Write,
}

/// One transfer between the start of a buffer and a place on a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// The attached device.
    pub device: DeviceId,
    /// Which way.
    pub op: Op,
    /// Place on the device.
    pub offset_bytes: u64,
    /// How much; at most [`IoEngine::buf_bytes`].
    pub len_bytes: u32,
    /// A buffer the caller has acquired.
    pub buf: BufId,
    /// Comes back with the completion; the engine does not look at it.
    pub tag: u64,
}

/// A finished transfer; the buffer is the caller's again.
#[derive(Debug)]
pub struct Completion {
    /// The request's tag.
    pub tag: u64,
    /// The request's buffer.
    pub buf: BufId,
    /// The request's direction.
    pub op: Op,
    /// All bytes moved, or why not (as [`Device::read_at`] and [`Device::write_at`] say it).
    pub result: Result<()>,
}

/// Moves bytes between buffers and devices, many at a time.
///
/// Misuse (a buffer that is not acquired or in flight, a length above the buffer's, an unknown
/// device) is a caller's bug and panics. Dropping an engine waits for what is in flight.
pub trait IoEngine: Send {
    /// Makes `device` known; any device works with any engine.
    fn attach(&mut self, device: Arc<dyn Device>) -> DeviceId;

    /// Forgets a device; its id may be given again. Requests in flight on it still complete.
    fn detach(&mut self, device: DeviceId);

    /// Returns the length of every buffer: a multiple of [`PAGE_BYTES`].
    fn buf_bytes(&self) -> usize;

    /// Takes a free buffer, holding anything; `None` when all are taken.
    fn acquire(&mut self) -> Option<BufId>;

    /// Gives a buffer back.
    fn release(&mut self, buf: BufId);

    /// Returns the contents of a buffer that is not in flight.
    fn bytes(&self, buf: BufId) -> &[u8];

    /// Returns the contents of a buffer that is not in flight, to fill.
    fn bytes_mut(&mut self, buf: BufId) -> &mut [u8];

    /// Queues a transfer; the buffer belongs to the engine until its completion.
    fn submit(&mut self, request: Request);

    /// Hands over everything queued, waits for at least one completion if any transfer is in
    /// flight, and appends all that are ready to `done`.
    ///
    /// # Errors
    ///
    /// When the engine itself fails; a failed transfer is a [`Completion`] with its error.
    fn wait(&mut self, done: &mut Vec<Completion>) -> Result<()>;

    /// Hands over everything queued and appends the completions that are there to `done`,
    /// without waiting for any.
    ///
    /// # Errors
    ///
    /// As [`wait`](Self::wait).
    fn poll(&mut self, done: &mut Vec<Completion>) -> Result<()>;

    /// Returns what becomes readable when a transfer comes back, for callers that wait for other
    /// things, too; they [`poll`](Self::poll) then. `None`: only [`wait`](Self::wait) tells.
    fn ring(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Returns the number of transfers queued, flying, or finished but not yet handed out.
    fn in_flight_count(&self) -> usize;

    /// Returns the counters.
    fn stats(&self) -> IoStats;

    /// Returns the memory that counts against the budget: buffers, rings, thread stacks.
    fn memory_bytes(&self) -> u64;
}

/// Which engine to open.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum EngineChoice {
    /// io_uring, or the pread pool where the kernel refuses it.
    #[default]
    Auto,
    /// io_uring or an error.
    Uring,
    /// A few threads that call `pread` and `pwrite`.
    Pread,
    /// The calling thread, one transfer at a time.
    Inline,
}

impl fmt::Display for EngineChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Uring => "io_uring",
            Self::Pread => "pread",
            Self::Inline => "inline",
        })
    }
}

impl FromStr for EngineChoice {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        match name {
            "auto" => Ok(Self::Auto),
            "io_uring" => Ok(Self::Uring),
            "pread" => Ok(Self::Pread),
            "inline" => Ok(Self::Inline),
            _ => Err(Error::invalid("unknown I/O engine")
                .with("found", format_args!("{name:?}"))
                .with("expected", "auto, io_uring, pread or inline")),
        }
    }
}

/// How to open an engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineOptions {
    /// Which one.
    pub choice: EngineChoice,
    /// Most transfers in flight, which is also the number of buffers: 1..=4096.
    pub queue_depth: u32,
    /// Length of a buffer; rounded up to a multiple of [`PAGE_BYTES`].
    pub buf_bytes: usize,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self { choice: EngineChoice::Auto, queue_depth: 64, buf_bytes: PAGE_BYTES }
    }
}

/// Largest queue depth: the smallest limit of any kernel that has io_uring.
pub const QUEUE_DEPTH_MAX: u32 = 4096;
/// Longest buffer: kernels move at most 2 GiB less a page in one call.
pub const BUF_BYTES_MAX: usize = 1 << 30;

/// Opens an engine.
///
/// # Errors
///
/// `Invalid` for options out of range; `Io` when no thread can be started; `Unsupported` when
/// io_uring was asked for by name and the kernel refuses it.
pub fn open_engine(options: &EngineOptions) -> Result<Box<dyn IoEngine>> {
    let depth = options.queue_depth;
    if !(1..=QUEUE_DEPTH_MAX).contains(&depth) {
        return Err(Error::invalid("queue depth out of range")
            .with("found", depth)
            .with("expected", format_args!("1..={QUEUE_DEPTH_MAX}")));
    }
    if !(1..=BUF_BYTES_MAX).contains(&options.buf_bytes) {
        return Err(Error::invalid("buffer length out of range")
            .with("found", options.buf_bytes)
            .with("expected", format_args!("1..={BUF_BYTES_MAX}")));
    }
    match options.choice {
        EngineChoice::Inline => Ok(Box::new(inline::InlineEngine::new(options))),
        EngineChoice::Pread => Ok(Box::new(pread::PreadEngine::new(options, String::new())?)),
        EngineChoice::Uring => match uring::UringEngine::new(options) {
            Ok(engine) => Ok(Box::new(engine)),
            Err(reason) => Err(Error::unsupported("the kernel refuses io_uring")
                .with("cause", reason)
                .with("remedy", "use the I/O engine `auto` or `pread`")),
        },
        EngineChoice::Auto => match uring::UringEngine::new(options) {
            Ok(engine) => Ok(Box::new(engine)),
            Err(reason) => Ok(Box::new(pread::PreadEngine::new(options, reason)?)),
        },
    }
}
