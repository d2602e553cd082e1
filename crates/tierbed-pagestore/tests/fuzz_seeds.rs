//! Do the seeds of the fuzz targets still pass? They are pieces of files that the stores wrote,
//! and every input that once crashed a decoder.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that panics has failed, as it should"
)]

use std::path::Path;

/// Runs `decode` on every seed of `target` and on beginnings of it; returns how many seeds.
fn replay(target: &str, decode: fn(&[u8])) -> usize {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds").join(target);
    let seeds = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    seeds
        .map(|path| std::fs::read(path).unwrap())
        .inspect(|bytes| {
            decode(bytes);
            (0..bytes.len()).step_by(bytes.len() / 40 + 1).for_each(|end| decode(&bytes[..end]));
        })
        .count()
}

#[test]
fn seeds_of_every_target_pass() {
    assert!(replay("snapshot_page", tierbed_pagestore::fuzz::page) > 0);
    assert!(replay("snapshot_manifest", tierbed_pagestore::fuzz::manifest) > 0);
    assert!(replay("snapshot_index", tierbed_pagestore::fuzz::index) > 0);
    assert!(replay("snapshot_places", tierbed_pagestore::fuzz::places) > 0);
}
