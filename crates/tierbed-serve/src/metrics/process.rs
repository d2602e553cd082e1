//! Prometheus metrics of the process under their usual names, from `/proc/self`.

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;

/// Reads the process's own figures when asked; says nothing where there is no `/proc`.
#[derive(Debug)]
pub(super) struct ProcessCollector;

/// Figures of a process.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Process {
    resident_bytes: u64,
    virtual_bytes: u64,
    thread_count: u64,
    cpu_s: f64,
    start_s: f64,
}

/// Clock ticks per second in `/proc`: 100 on every Linux platform.
const TICKS_PER_S: f64 = 100.0;

impl Process {
    /// Parses `/proc/self/stat`, `/proc/self/status`, and the boot time of `/proc/stat`.
    fn parse(stat: &str, status: &str, system: &str) -> Option<Self> {
        // The command's name may hold anything; what follows its last parenthesis does not.
        let (_, rest) = stat.rsplit_once(')')?;
        let fields: Vec<&str> = rest.split_whitespace().collect();
        // Field 3 of proc(5), the state, is the first here.
        let field = |number: usize| fields.get(number - 3)?.parse::<u64>().ok();
        let figure = |text: &str, name: &str| {
            let rest = text.lines().find_map(|line| line.strip_prefix(name))?;
            rest.split_whitespace().next()?.parse::<u64>().ok()
        };
        Some(Self {
            cpu_s: (field(14)? + field(15)?) as f64 / TICKS_PER_S,
            start_s: figure(system, "btime ")? as f64 + field(22)? as f64 / TICKS_PER_S,
            thread_count: figure(status, "Threads:")?,
            virtual_bytes: figure(status, "VmSize:")? << 10,
            resident_bytes: figure(status, "VmRSS:")? << 10,
        })
    }

    fn read() -> Option<Self> {
        let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
        let status = std::fs::read_to_string("/proc/self/status").ok()?;
        let system = std::fs::read_to_string("/proc/stat").ok()?;
        Self::parse(&stat, &status, &system)
    }
}

/// Counts the process's open files; `None` where there is no `/proc`.
pub(crate) fn open_files() -> Option<u64> {
    Some(std::fs::read_dir("/proc/self/fd").ok()?.count() as u64)
}

/// Returns the memory of the process; `None` where there is no `/proc`.
pub(crate) fn resident_bytes() -> Option<u64> {
    Process::read().map(|process| process.resident_bytes)
}

impl Collector for ProcessCollector {
    fn encode(&self, mut encoder: DescriptorEncoder) -> Result<(), std::fmt::Error> {
        let mut gauges: Vec<(&str, &str, f64)> = Vec::new();
        if let Some(process) = Process::read() {
            let seconds = ConstCounter::new(process.cpu_s);
            let help = "Processor time of the process";
            let kind = seconds.metric_type();
            let descriptor = encoder.encode_descriptor("process_cpu_seconds", help, None, kind)?;
            seconds.encode(descriptor)?;
            gauges.extend([
                ("process_resident_memory_bytes", "Memory", process.resident_bytes as f64),
                ("process_virtual_memory_bytes", "Address space", process.virtual_bytes as f64),
                ("process_threads", "Threads", process.thread_count as f64),
                ("process_start_time_seconds", "Start since 1970", process.start_s),
            ]);
        }
        if let Some(open_files) = open_files() {
            gauges.push(("process_open_fds", "Open files", open_files as f64));
        }
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
        if let Some(limit) = limit {
            gauges.push(("process_max_fds", "Most open files allowed", limit as f64));
        }
        for (name, help, value) in gauges {
            let gauge = ConstGauge::new(value);
            gauge.encode(encoder.encode_descriptor(name, help, None, gauge.metric_type())?)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_read_behind_any_name() {
        let stat = "7 (a) b) S 1 7 7 0 -1 0 1 2 3 4 150 50 0 0 20 0 9 0 6000 8192 3";
        let status = "Name:\ta) b\nVmSize:\t   8 kB\nVmRSS:\t   4 kB\nThreads:\t9\n";
        let process = Process::parse(stat, status, "cpu 1 2\nbtime 1000\n").unwrap();
        let expected = Process {
            resident_bytes: 4096,
            virtual_bytes: 8192,
            thread_count: 9,
            cpu_s: 2.0,
            start_s: 1060.0,
        };
        assert_eq!(process, expected);
        assert_eq!(Process::parse("cut short", "", ""), None);
        assert!(Process::read().unwrap().resident_bytes > 0 && open_files().unwrap() > 2);
    }
}
