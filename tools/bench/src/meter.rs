//! What did it take? Time, processor time and memory of this process.

use std::sync::Arc;

use tierbed_core::env::{Clock, Env};

/// Measures steps.
#[derive(Debug)]
pub(crate) struct Meter {
    clock: Arc<dyn Clock>,
}

impl Meter {
    pub(crate) fn new() -> Self {
        Self { clock: Env::real(0).clock }
    }

    pub(crate) fn now_us(&self) -> u64 {
        self.clock.now_us()
    }
}

/// Processor time of all threads of this process, nanoseconds.
pub(crate) fn process_cpu_ns() -> u64 {
    cpu_ns(rustix::time::ClockId::ProcessCPUTime)
}

/// Processor time of the calling thread, nanoseconds.
pub(crate) fn thread_cpu_ns() -> u64 {
    cpu_ns(rustix::time::ClockId::ThreadCPUTime)
}

fn cpu_ns(clock: rustix::time::ClockId) -> u64 {
    let time = rustix::time::clock_gettime(clock);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Bytes that this process had read from devices, mapped pages included; 0 where the kernel tells
/// none.
pub(crate) fn process_read_bytes() -> u64 {
    let told = std::fs::read_to_string("/proc/self/io").unwrap_or_default();
    let line = told.lines().find_map(|line| line.strip_prefix("read_bytes: "));
    line.and_then(|bytes| bytes.parse().ok()).unwrap_or(0)
}

/// Resident set of this process: now and at its largest, bytes; 0 where the kernel tells none.
pub(crate) fn resident_bytes() -> (u64, u64) {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let field = |name: &str| -> u64 {
        let line = status.lines().find(|line| line.starts_with(name));
        let kib = line.and_then(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
        kib.unwrap_or(0) * 1024
    };
    (field("VmRSS:"), field("VmHWM:"))
}
