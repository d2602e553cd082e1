//! Time and memory of placing a log of Criteo-Kaggle's shape and size.
//!
//! Generates the log at each scale, places its rows by all but its last hundredth, and prints time,
//! processor time, threads, the largest resident set, and the home pages that the queries held out
//! read, beside those of pages by frequency. One process per scale, because peaks do not shrink.
//!
//! ```text
//! cargo run --release -p tierbed-bench --example partition_scale -- \
//!     FOLDER SCALE [THREADS [METHOD [RATIO]]]
//! for scale in 0.01 0.1 1; do
//!     cargo run --release -p tierbed-bench --example partition_scale -- scratch $scale 2
//! done
//! ```
//!
//! Scale 1 is 45.8 M queries of 26 rows over 33.8 M rows. The log needs about 60 bytes a query in
//! FOLDER and is deleted at the end; a run that was stopped goes on where it was. METHOD is `shp`
//! without another, RATIO is 0.
//!
//! Source: MaxEmbed §8, Table 1 (time to partition).

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use tierbed_core::env::{Clock, Env};
use tierbed_core::{Error, Result};
use tierbed_lab::trace::{write_trace, TraceOptions, TraceReader};
use tierbed_placement::partition::{bisect_resumable, by_frequency, BisectionOptions};
use tierbed_placement::{build, connectivity_sum, BuildInput, Method, Placement, QueryLog};

const ROWS_PER_PAGE: u32 = 16;
const FEATURES: usize = 26;
/// Share of the queries to partition; the later rest judges.
const BUILD_SHARE: f64 = 0.99;
/// Samples read at once.
const BATCH: u64 = 1 << 14;

struct Wanted {
    folder: PathBuf,
    scale: f64,
    threads: usize,
    method: Method,
    ratio: f64,
}

impl Wanted {
    fn of(words: &[String]) -> Option<Self> {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        Some(Self {
            folder: PathBuf::from(words.first()?),
            scale: words.get(1)?.parse().ok()?,
            threads: words.get(2).map_or(Some(threads), |word| word.parse().ok())?,
            method: words
                .get(3)
                .map_or(Some(Method::Bisected), |word| Method::from_name(word).ok())?,
            ratio: words.get(4).map_or(Some(0.0), |word| word.parse().ok())?,
        })
    }
}

/// Time and processor time since some moment.
struct Watch {
    clock: Arc<dyn Clock>,
    began_us: u64,
    began_cpu_s: f64,
}

impl Watch {
    fn start() -> Self {
        let clock = Env::real(0).clock;
        Self { began_us: clock.now_us(), began_cpu_s: process_cpu_s(), clock }
    }

    /// Prints what the step took, in seconds, and the largest resident set so far.
    fn tell(&self, step: &str) {
        let seconds = (self.clock.now_us() - self.began_us) as f64 / 1e6;
        let cpu_seconds = process_cpu_s() - self.began_cpu_s;
        let peak_gib = peak_resident_kib() as f64 / (1u64 << 20) as f64;
        println!("{step}: {seconds:.1} s, {cpu_seconds:.1} s of CPU, peak {peak_gib:.2} GiB");
    }
}

/// Processor time of all threads of this process, in seconds; the kernel counts hundredths.
fn process_cpu_s() -> f64 {
    let told = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields = told.rsplit(')').next().unwrap_or_default().split_whitespace();
    fields.skip(11).take(2).filter_map(|ticks| ticks.parse::<f64>().ok()).sum::<f64>() / 100.0
}

/// The largest resident set of this process.
fn peak_resident_kib() -> u64 {
    let told = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = told.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.and_then(|rest| rest.split_whitespace().next()?.parse().ok()).unwrap_or(0)
}

/// Reads samples `samples` of the trace as queries over one table of all columns' rows.
fn read_log(trace: &mut TraceReader, samples: std::ops::Range<u64>) -> Result<QueryLog> {
    let (mut row_count, mut firsts) = (0u32, Vec::with_capacity(FEATURES));
    for rows in trace.row_counts() {
        firsts.push(row_count);
        row_count += rows as u32;
    }
    let mut builder = QueryLog::builder(row_count);
    let (mut ids, mut query) = (Vec::new(), Vec::with_capacity(FEATURES));
    let mut next = samples.start;
    while next < samples.end {
        let count = BATCH.min(samples.end - next) as usize;
        trace.read(next, count, &mut ids)?;
        for sample in 0..count {
            query.clear();
            let of_sample = ids.iter().skip(sample).step_by(count);
            query.extend(of_sample.zip(&firsts).map(|(&id, first)| first + id as u32));
            builder.push(&query)?;
        }
        next += count as u64;
    }
    Ok(builder.finish())
}

fn run(wanted: &Wanted) -> Result<()> {
    let path = wanted.folder.join(format!("criteo-{}.trace", wanted.scale));
    let watch = Watch::start();
    if !path.exists() {
        let options = TraceOptions { seed: 1, scale: wanted.scale };
        let unfinished = path.with_extension("unfinished");
        write_trace(&options, &unfinished, &mut |_| Ok(()))?;
        std::fs::rename(&unfinished, &path)
            .map_err(|cause| Error::os("cannot rename trace", cause))?;
    }
    let mut trace = TraceReader::open(&path)?;
    let built = (trace.sample_count() as f64 * BUILD_SHARE) as u64;
    let log = read_log(&mut trace, 0..built)?;
    let (count, pins, rows) = (log.query_count(), log.pin_count(), log.row_count());
    println!("{count} queries, {pins} pins, {rows} rows, {} threads", wanted.threads);
    watch.tell("log");
    let frequent = by_frequency(&log, ROWS_PER_PAGE)?;
    let watch = Watch::start();
    let options =
        BisectionOptions { thread_count: wanted.threads, ..BisectionOptions::new(ROWS_PER_PAGE) };
    let placed = place(log, wanted, &options, (&path, &watch))?;
    watch.tell(wanted.method.name());
    let all = trace.sample_count();
    let later = read_log(&mut trace, built..all)?;
    let pages = |placement| connectivity_sum(placement, &later) as f64 / later.query_count() as f64;
    println!("pages per later query: {:.3}, by frequency {:.3}", pages(&placed), pages(&frequent));
    remove(&path)
}

fn place(
    log: QueryLog,
    wanted: &Wanted,
    options: &BisectionOptions,
    (path, watch): (&Path, &Watch),
) -> Result<Placement> {
    if wanted.method == Method::Bisected {
        // The pins of the log are reused.
        let state = path.with_extension("state");
        let placed = bisect_resumable(log, options, Some(&state), &mut |level| {
            watch.tell(&format!(
                "level {} of {}, {} pins left",
                level.levels_done, level.level_count, level.pin_count
            ));
            Ok(())
        })?;
        remove(&state)?;
        return Ok(placed);
    }
    let kept = path.with_extension("kept");
    let input = BuildInput { resume_dir: Some(&kept), ..BuildInput::of(&log) };
    let mut told = 0;
    let placed = build(input, wanted.method, options, wanted.ratio, &mut |report| {
        if report.done * 20 >= told + report.total {
            told = report.done * 20;
            watch.tell(&format!("{} of {}", report.done, report.total));
        }
        Ok(())
    })?;
    if kept.exists() {
        std::fs::remove_dir_all(&kept).map_err(|cause| Error::os("cannot remove folder", cause))?;
    }
    Ok(placed)
}

fn remove(path: &Path) -> Result<()> {
    std::fs::remove_file(path).map_err(|cause| Error::os("cannot remove trace", cause))
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let Some(wanted) = Wanted::of(&words) else {
        eprintln!("usage: partition_scale FOLDER SCALE [THREADS [METHOD [RATIO]]]");
        return ExitCode::from(2);
    };
    match run(&wanted) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
