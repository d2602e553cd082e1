//! The inline I/O engine: one transfer at a time on the calling thread, repeatable.

use std::sync::Arc;

use tierbed_core::stats::IoStats;
use tierbed_core::Result;

use super::arena::{count, Arena, Devices};
use super::{BufId, Completion, DeviceId, EngineOptions, IoEngine, Request};
use crate::device::Device;

/// Serves every request inside [`IoEngine::submit`], in order.
#[derive(Debug)]
pub struct InlineEngine {
    arena: Arena,
    devices: Devices,
    ready: Vec<Completion>,
    stats: IoStats,
}

impl InlineEngine {
    /// Builds the engine.
    #[must_use]
    pub fn new(options: &EngineOptions) -> Self {
        Self {
            arena: Arena::new(options),
            devices: Devices::default(),
            ready: Vec::new(),
            stats: IoStats { engine: "inline", ..IoStats::default() },
        }
    }
}

impl IoEngine for InlineEngine {
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
        self.arena.take_over(&request);
        let device = self.devices.get(request.device);
        let completion = self.arena.run(device.as_ref(), &request);
        count(&mut self.stats, request.op, request.len_bytes, &completion.result);
        self.stats.submit_count += 1;
        self.ready.push(completion);
    }

    fn wait(&mut self, done: &mut Vec<Completion>) -> Result<()> {
        done.append(&mut self.ready);
        Ok(())
    }

    fn poll(&mut self, done: &mut Vec<Completion>) -> Result<()> {
        self.wait(done)
    }

    fn in_flight_count(&self) -> usize {
        self.ready.len()
    }

    fn stats(&self) -> IoStats {
        self.stats.clone()
    }

    fn memory_bytes(&self) -> u64 {
        self.arena.memory_bytes()
    }
}
