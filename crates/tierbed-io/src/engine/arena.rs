//! What all I/O engines share: fixed buffers, attached devices, counters.

use std::sync::Arc;

use tierbed_core::stats::IoStats;
use tierbed_core::Result;

use super::{BufId, Completion, DeviceId, EngineOptions, Op, Request};
use crate::buffer::{AlignedBuf, PAGE_BYTES};
use crate::device::Device;

/// Where a buffer is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Free,
    Caller,
    Engine,
}

#[derive(Debug)]
struct Slot {
    /// `None` while the buffer travels with a request (pread pool).
    buf: Option<AlignedBuf>,
    place: Place,
}

/// The buffers of one engine.
#[derive(Debug)]
pub(super) struct Arena {
    slots: Vec<Slot>,
    free: Vec<BufId>,
    buf_bytes: usize,
}

impl Arena {
    pub(super) fn new(options: &EngineOptions) -> Self {
        let buf_bytes = options.buf_bytes.next_multiple_of(PAGE_BYTES);
        let slot = |_| Slot { buf: Some(AlignedBuf::new(buf_bytes)), place: Place::Free };
        let slots = (0..options.queue_depth).map(slot).collect();
        // Lowest first, so that a caller with few requests touches few pages of memory.
        let free = (0..options.queue_depth).rev().map(BufId).collect();
        Self { slots, free, buf_bytes }
    }

    pub(super) fn buf_bytes(&self) -> usize {
        self.buf_bytes
    }

    pub(super) fn memory_bytes(&self) -> u64 {
        (self.slots.len() * (self.buf_bytes + size_of::<Slot>() + size_of::<BufId>())) as u64
    }

    pub(super) fn acquire(&mut self) -> Option<BufId> {
        let buf = self.free.pop()?;
        self.slot_mut(buf).place = Place::Caller;
        Some(buf)
    }

    pub(super) fn release(&mut self, buf: BufId) {
        let slot = self.slot_mut(buf);
        assert_eq!(slot.place, Place::Caller, "release of a buffer the caller does not have");
        slot.place = Place::Free;
        self.free.push(buf);
    }

    #[expect(clippy::expect_used, reason = "using a buffer in flight is a caller's bug")]
    pub(super) fn bytes(&self, buf: BufId) -> &[u8] {
        let slot = self.slot(buf);
        assert_eq!(slot.place, Place::Caller, "read of a buffer the caller does not have");
        slot.buf.as_ref().expect("a caller's buffer is in its slot")
    }

    #[expect(clippy::expect_used, reason = "using a buffer in flight is a caller's bug")]
    pub(super) fn bytes_mut(&mut self, buf: BufId) -> &mut [u8] {
        let slot = self.slot_mut(buf);
        assert_eq!(slot.place, Place::Caller, "write to a buffer the caller does not have");
        slot.buf.as_mut().expect("a caller's buffer is in its slot")
    }

    /// Moves the request's buffer from the caller to the engine.
    pub(super) fn take_over(&mut self, request: &Request) {
        assert!(request.len_bytes as usize <= self.buf_bytes, "request longer than its buffer");
        let slot = self.slot_mut(request.buf);
        assert_eq!(slot.place, Place::Caller, "submit of a buffer the caller does not have");
        slot.place = Place::Engine;
    }

    /// Moves the buffer of a finished request back to the caller.
    pub(super) fn hand_back(&mut self, buf: BufId) {
        let slot = self.slot_mut(buf);
        assert!(slot.place == Place::Engine && slot.buf.is_some(), "buffer is not in flight");
        slot.place = Place::Caller;
    }

    /// Takes the buffer itself out of its slot, to travel with its request.
    #[expect(clippy::expect_used, reason = "take_over made sure that the buffer is here")]
    pub(super) fn take_out(&mut self, buf: BufId) -> AlignedBuf {
        self.slot_mut(buf).buf.take().expect("an untravelled buffer is in its slot")
    }

    /// Puts a buffer that travelled back and hands it to the caller.
    pub(super) fn put_back(&mut self, buf: BufId, travelled: AlignedBuf) {
        self.slot_mut(buf).buf = Some(travelled);
        self.hand_back(buf);
    }

    /// Returns the address of a buffer the engine has, for the kernel.
    #[expect(clippy::expect_used, reason = "take_over made sure that the buffer is here")]
    pub(super) fn raw_ptr(&self, buf: BufId) -> *mut u8 {
        let slot = self.slot(buf);
        assert_eq!(slot.place, Place::Engine, "only the engine's buffers go to the kernel");
        slot.buf.as_ref().expect("an untravelled buffer is in its slot").as_raw_ptr()
    }

    /// Moves `request`'s bytes on the calling thread and hands the buffer back.
    #[expect(clippy::expect_used, reason = "take_over checked the slot and the length")]
    pub(super) fn run(&mut self, device: &dyn Device, request: &Request) -> Completion {
        let slot = self.slot_mut(request.buf);
        let buf = slot.buf.as_mut().expect("an untravelled buffer is in its slot");
        let result = transfer(device, request, buf);
        self.hand_back(request.buf);
        Completion { tag: request.tag, buf: request.buf, op: request.op, result }
    }

    #[expect(clippy::expect_used, reason = "a buffer id of another engine is a caller's bug")]
    fn slot(&self, buf: BufId) -> &Slot {
        self.slots.get(buf.0 as usize).expect("buffer id of this engine")
    }

    #[expect(clippy::expect_used, reason = "a buffer id of another engine is a caller's bug")]
    fn slot_mut(&mut self, buf: BufId) -> &mut Slot {
        self.slots.get_mut(buf.0 as usize).expect("buffer id of this engine")
    }
}

/// Moves one request's bytes between the start of `buf` and `device`.
#[expect(clippy::indexing_slicing, reason = "Arena::take_over checked the length")]
pub(super) fn transfer(device: &dyn Device, request: &Request, buf: &mut [u8]) -> Result<()> {
    let bytes = &mut buf[..request.len_bytes as usize];
    match request.op {
        Op::Read => device.read_at(request.offset_bytes, bytes),
        Op::Write => device.write_at(request.offset_bytes, bytes),
    }
}

/// The devices attached to one engine.
#[derive(Debug, Default)]
pub(super) struct Devices {
    slots: Vec<Option<Arc<dyn Device>>>,
}

impl Devices {
    pub(super) fn attach(&mut self, device: Arc<dyn Device>) -> DeviceId {
        let vacant = self.slots.iter_mut().enumerate().find(|(_, slot)| slot.is_none());
        let at = if let Some((at, slot)) = vacant {
            *slot = Some(device);
            at
        } else {
            self.slots.push(Some(device));
            self.slots.len() - 1
        };
        DeviceId(u32::try_from(at).unwrap_or(u32::MAX))
    }

    pub(super) fn detach(&mut self, device: DeviceId) {
        let slot = self.slots.get_mut(device.0 as usize).and_then(Option::take);
        assert!(slot.is_some(), "detach of a device that is not attached");
    }

    #[expect(clippy::expect_used, reason = "an id that is not attached is a caller's bug")]
    pub(super) fn get(&self, device: DeviceId) -> &Arc<dyn Device> {
        self.slots
            .get(device.0 as usize)
            .and_then(Option::as_ref)
            .expect("device attached to this engine")
    }
}

/// Counts a finished request; failed ones moved nothing that counts.
pub(super) fn count(stats: &mut IoStats, op: Op, len_bytes: u32, result: &Result<()>) {
    if result.is_err() {
        return;
    }
    match op {
        Op::Read => {
            stats.read_count += 1;
            stats.read_bytes += u64::from(len_bytes);
        }
        Op::Write => {
            stats.write_count += 1;
            stats.write_bytes += u64::from(len_bytes);
        }
    }
}
