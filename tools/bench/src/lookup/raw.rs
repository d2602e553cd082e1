//! How many pages a second does the device give, with nothing in the way?

use std::path::PathBuf;
use std::sync::Arc;

use serde::Deserialize;
use serde_json::{json, Value};
use tierbed_core::env::SplitMix64;
use tierbed_core::{Error, Result};
use tierbed_io::{
    open_engine, Device, EngineOptions, Folder, FsFolder, Op, OpenMode, Request, PAGE_BYTES,
};
use tierbed_snapshot::manifest::PAGES_NAME;

use super::drive::join;
use crate::meter::Meter;

/// What `raw` is told.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawJob {
    /// Folder of the snapshot whose page file is read.
    snapshot: PathBuf,
    threads: usize,
    queue_depth: u32,
    /// Reads of each thread, at most.
    reads: u64,
    /// Longest time to submit them.
    seconds_max: f64,
    seed: u64,
}

pub(super) fn raw(job: &RawJob) -> Result<Value> {
    let device = FsFolder::open(&job.snapshot)?.open(PAGES_NAME, OpenMode::ReadOnly)?;
    let page_count = device.len_bytes()? / PAGE_BYTES as u64;
    if page_count == 0 {
        return Err(Error::invalid("snapshot has no page").with("path", device.name()));
    }
    let meter = Meter::new();
    let started_us = meter.now_us();
    let reads = std::thread::scope(|scope| {
        let workers = (0..job.threads as u64).map(|thread| {
            let device = Arc::clone(&device);
            scope.spawn(move || read_pages(job, &device, page_count, job.seed + thread))
        });
        workers.collect::<Vec<_>>().into_iter().map(join).sum::<Result<u64>>()
    })?;
    let seconds = (meter.now_us() - started_us) as f64 / 1e6;
    Ok(json!({
        "threads": job.threads,
        "queue_depth": job.queue_depth,
        "reads": reads,
        "seconds": seconds,
        "reads_per_s": reads as f64 / seconds,
    }))
}

/// Reads pages drawn anew; returns how many.
fn read_pages(job: &RawJob, device: &Arc<dyn Device>, page_count: u64, seed: u64) -> Result<u64> {
    let options = EngineOptions { queue_depth: job.queue_depth, ..EngineOptions::default() };
    let mut engine = open_engine(&options)?;
    let attached = engine.attach(Arc::clone(device));
    let mut rng = SplitMix64::new(seed);
    let meter = Meter::new();
    let ends_us = meter.now_us().saturating_add((job.seconds_max * 1e6) as u64);
    let (mut asked, mut landed, mut wanted) = (0, 0, job.reads);
    let mut done = Vec::new();
    while landed < wanted {
        if meter.now_us() >= ends_us {
            wanted = asked;
        }
        if landed == wanted {
            break;
        }
        while asked < wanted {
            let Some(buf) = engine.acquire() else { break };
            engine.submit(Request {
                device: attached,
                op: Op::Read,
                offset_bytes: rng.below(page_count) * PAGE_BYTES as u64,
                len_bytes: PAGE_BYTES as u32,
                buf,
                tag: asked,
            });
            asked += 1;
        }
        engine.wait(&mut done)?;
        for completion in done.drain(..) {
            completion.result?;
            engine.release(completion.buf);
            landed += 1;
        }
    }
    Ok(landed)
}
