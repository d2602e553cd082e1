//! How many random 4 KiB reads a second, at which queue depth and engine?
//!
//! `cargo run --release -p tierbed-io --example random_reads [FOLDER] [MIB]`: writes a file of
//! MIB (default 1024) in FOLDER (default `.`), reads from it for about a second a line, and
//! removes it.

use std::path::PathBuf;
use std::sync::Arc;

use tierbed_core::env::{Clock, SplitMix64, SystemClock};
use tierbed_core::Result;
use tierbed_io::{
    open_engine, Device, EngineChoice, EngineOptions, FileDevice, Op, OpenMode, Request, PAGE_BYTES,
};

const CHUNK_BYTES: usize = 1 << 20;
const RUN_US: u64 = 1_000_000;

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let folder = args.next().map_or_else(|| PathBuf::from("."), PathBuf::from);
    let mib = args.next().and_then(|mib| mib.parse().ok()).unwrap_or(1024_u64);
    let path = folder.join(format!("random_reads.{}", std::process::id()));
    let measured = measure(&path, mib);
    // The file is a leftover whether or not the measurement worked.
    let _ = std::fs::remove_file(&path);
    measured
}

fn measure(path: &std::path::Path, mib: u64) -> Result<()> {
    let file = FileDevice::open(path, OpenMode::Create)?;
    println!(
        "direct: {}, {}",
        file.is_direct(),
        file.buffered_reason().unwrap_or("past the cache")
    );
    let mut chunk = tierbed_io::AlignedBuf::new(CHUNK_BYTES);
    let mut rng = SplitMix64::new(1);
    for at in 0..mib {
        chunk.iter_mut().for_each(|byte| *byte = rng.next_u64() as u8);
        file.write_at(at * CHUNK_BYTES as u64, &chunk)?;
    }
    file.sync()?;
    let device: Arc<dyn Device> = Arc::new(file);
    println!("engine      depth   reads/s   mean_us   calls/read");
    for choice in [EngineChoice::Uring, EngineChoice::Pread, EngineChoice::Inline] {
        for queue_depth in [1, 8, 32, 64] {
            run(choice, queue_depth, &device)?;
        }
    }
    Ok(())
}

fn run(choice: EngineChoice, queue_depth: u32, device: &Arc<dyn Device>) -> Result<()> {
    let mut engine = open_engine(&EngineOptions { choice, queue_depth, buf_bytes: PAGE_BYTES })?;
    let page_count = device.len_bytes()? / PAGE_BYTES as u64;
    let device = engine.attach(Arc::clone(device));
    let (clock, mut rng) = (SystemClock::default(), SplitMix64::new(2));
    let (start_us, mut done) = (clock.now_us(), Vec::new());
    while clock.now_us() - start_us < RUN_US || engine.in_flight_count() > 0 {
        let is_over = clock.now_us() - start_us >= RUN_US;
        while let Some(buf) = if is_over { None } else { engine.acquire() } {
            let offset_bytes = rng.below(page_count) * PAGE_BYTES as u64;
            let (op, len_bytes) = (Op::Read, PAGE_BYTES as u32);
            engine.submit(Request { device, op, offset_bytes, len_bytes, buf, tag: 0 });
        }
        engine.wait(&mut done)?;
        for completion in done.drain(..) {
            completion.result?;
            engine.release(completion.buf);
        }
    }
    let (stats, seconds) = (engine.stats(), (clock.now_us() - start_us) as f64 / 1e6);
    let per_s = stats.read_count as f64 / seconds;
    println!(
        "{:<10} {queue_depth:>6} {per_s:>9.0} {:>9.0} {:>12.2}",
        stats.engine,
        f64::from(queue_depth) * 1e6 / per_s,
        stats.submit_count as f64 / stats.read_count as f64,
    );
    Ok(())
}
