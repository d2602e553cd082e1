//! A page file that is cut short while it serves: lookups fail, the process goes on.
//!
//! Touching a map of such a file ends the process with `SIGBUS`.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::ScopedJoinHandle;

use super::*;

const ROWS: u64 = 4000;

#[test]
fn a_page_file_cut_short_while_lookups_run_is_an_error_in_every_backend() {
    for backend in [Backend::Direct, Backend::Mmap, Backend::Memory] {
        let temporary = tempfile::tempdir().unwrap();
        let path = temporary.path().join("s");
        let folder: Arc<dyn Folder> = Arc::new(FsFolder::create(&path).unwrap());
        let schema = Schema::new(vec![table("plain", ROWS, 16)]).unwrap();
        let rows: Vec<_> = (0..ROWS)
            .map(|row| (RowKey::new(TableId(0), RowId(row)), vec![row as f32; 16]))
            .collect();
        publish(&folder, &schema, &rows);
        let options = SnapshotOptions { backend, cache_bytes_max: Some(0), ..options(8 << 20) };
        let snapshot = Snapshot::open(folder, &options).unwrap();
        let counts = Counts::default();
        std::thread::scope(|scope| {
            let (snapshot, counts) = (&snapshot, &counts);
            let threads =
                [1, 2].map(|seed| scope.spawn(move || counts.look_up_until_over(snapshot, seed)));
            // A thread that ends by itself has failed, and the scope tells it.
            let is_failed = || threads.iter().any(ScopedJoinHandle::is_finished);
            wait_until(|| is_failed() || counts.answered.load(Ordering::Relaxed) >= 20);
            let pages = std::fs::OpenOptions::new().write(true).open(path.join(PAGES_NAME));
            pages.unwrap().set_len(3 * 4096).unwrap();
            // A copy in memory has lost nothing.
            let is_kept = backend == Backend::Memory;
            wait_until(|| is_kept || is_failed() || counts.refused.load(Ordering::Relaxed) >= 20);
            counts.is_over.store(true, Ordering::Relaxed);
        });
        lookup_one(&snapshot, 0).unwrap();
        assert_eq!(lookup_one(&snapshot, ROWS - 1).is_ok(), backend == Backend::Memory);
    }
}

#[derive(Default)]
struct Counts {
    answered: AtomicU64,
    refused: AtomicU64,
    is_over: AtomicBool,
}

impl Counts {
    fn look_up_until_over(&self, snapshot: &Snapshot, seed: u64) {
        let mut rng = SplitMix64::new(seed);
        while !self.is_over.load(Ordering::Relaxed) {
            match lookup_one(snapshot, rng.below(ROWS)) {
                Ok(()) => self.answered.fetch_add(1, Ordering::Relaxed),
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Corruption, "{error}");
                    assert!(error.to_string().contains(PAGES_NAME), "{error}");
                    self.refused.fetch_add(1, Ordering::Relaxed)
                }
            };
        }
    }
}

fn wait_until(is_so: impl Fn() -> bool) {
    while !is_so() {
        std::thread::yield_now();
    }
}

fn lookup_one(snapshot: &Snapshot, row: u64) -> Result<()> {
    let plan = FeatureLayout::new(snapshot.schema(), &[(TableId(0), Pooling::None)]).unwrap();
    let (indices, mut out) = ([row as i64], [0.0; 16]);
    let bags = Bags::new(&indices, &[0, 1], None, 1).unwrap();
    snapshot.lookup(&plan, &bags, &mut out)?;
    assert_eq!(out, [row as f32; 16]);
    Ok(())
}
