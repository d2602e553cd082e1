//! How fast would a device be that reads vectors? Query logs on a simulated SSD.
//!
//! Times are simulated; equal logs and options give equal results.

mod host;
#[cfg(test)]
mod tests;

use serde::Deserialize;
use serde_json::{json, Value};
use tierbed_core::env::SplitMix64;
use tierbed_core::{Error, Result};
use tierbed_lab::bounds::Requests;

use host::{Host, SYSTEMS};

/// What to simulate, as JSON.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct Options {
    /// From the cells of a flash page to its buffer.
    read_us: u64,
    /// Queries of a batch.
    batch: usize,
    /// Bytes of a row.
    vector_bytes: u32,
    /// Bytes of the caches, as a share of the table's.
    cache_share: f64,
    /// Uses from which on a row enters the cache, 1 to 3; 0: always.
    admit_from: u8,
    /// Parts of a batch in the pipeline.
    sub_batches: usize,
    /// Host time per row: index, copy, pool.
    row_ns: u64,
    /// Host time per block read: page fault, file system, block layer, interrupt.
    block_host_ns: u64,
    /// Host time of a batch for all but lookups.
    dense_us: u64,
    /// Share of the batches that pass before counting.
    warm_share: f64,
}

/// Sends `requests` through every system in turn.
///
/// Returns one object per system: `system`, `lookup_us` (mean per batch), `lookup_us_p99`,
/// `total_us` (with the dense part), `host_bytes` and `flash_pages` per batch, `hit_rate`.
///
/// # Errors
/// `Invalid` for options that make no sense, or a log without a batch to count.
pub fn replay(requests: &Requests<'_>, options: &str) -> Result<Value> {
    let options: Options = serde_json::from_str(options)
        .map_err(|cause| Error::invalid("options of the simulated SSD").with("cause", cause))?;
    let shares = [options.cache_share, options.warm_share];
    if options.batch == 0 || shares.iter().any(|share| !(0.0..1.0).contains(share)) {
        return Err(Error::invalid("a batch has queries, and shares are at least 0 and below 1")
            .with("batch", options.batch)
            .with("cache_share", options.cache_share)
            .with("warm_share", options.warm_share));
    }
    // Rows are numbered by first use; on the device they lie anywhere.
    let places = shuffled(requests.row_count());
    let place = |row: &u32| places.get(*row as usize).copied().unwrap_or(*row);
    let queries: Vec<Vec<u32>> =
        requests.iter().map(|rows| rows.iter().map(place).collect()).collect();
    let systems = SYSTEMS.into_iter().map(|system| {
        let mut host = Host::new(system, &options, requests.row_count())?;
        let mut row = run(&mut host, &queries, &options)?;
        if let Some(fields) = row.as_object_mut() {
            fields.insert("system".to_owned(), json!(system.name()));
        }
        Ok(row)
    });
    Ok(Value::Array(systems.collect::<Result<_>>()?))
}

fn run(host: &mut Host, queries: &[Vec<u32>], options: &Options) -> Result<Value> {
    let batch_count = queries.len() / options.batch;
    let warm = (batch_count as f64 * options.warm_share) as usize;
    let mut took_ns = Vec::with_capacity(batch_count - warm);
    let mut before = host.counts();
    for (at, batch) in queries.chunks_exact(options.batch).enumerate() {
        if at == warm {
            before = host.counts();
        }
        let batch: Vec<&[u32]> = batch.iter().map(Vec::as_slice).collect();
        let batch_ns = host.ask(&batch)?;
        if at >= warm {
            took_ns.push(batch_ns);
        }
    }
    took_ns.sort_unstable();
    let Some(&p99_ns) = took_ns.get(took_ns.len() * 99 / 100) else {
        return Err(Error::invalid("the log has no whole batch").with("queries", queries.len()));
    };
    let count = took_ns.len() as f64;
    let mean_us = took_ns.iter().sum::<u64>() as f64 / count / 1000.0;
    let (hits, asked, host_bytes, flash_pages) = host.counts();
    Ok(json!({
        "lookup_us": mean_us,
        "lookup_us_p99": p99_ns as f64 / 1000.0,
        "total_us": mean_us + options.dense_us as f64,
        "host_bytes": (host_bytes - before.2) as f64 / count,
        "flash_pages": (flash_pages - before.3) as f64 / count,
        "hit_rate": (hits - before.0) as f64 / (asked - before.1).max(1) as f64,
    }))
}

fn shuffled(row_count: usize) -> Vec<u32> {
    let mut places: Vec<u32> = (0..row_count as u32).collect();
    let mut rng = SplitMix64::new(11);
    for at in (1..places.len()).rev() {
        let other = rng.below(at as u64 + 1) as usize;
        places.swap(at, other);
    }
    places
}
