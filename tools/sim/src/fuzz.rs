//! Do the seeds of the fuzz targets still pass? They are pieces of files that the stores wrote,
//! and every input that once crashed a decoder.

use std::path::Path;

/// Beginnings of each seed that are tried too.
const CUTS: usize = 40;

/// Runs `decode` on every seed of `tools/fuzz/seeds/<target>` and on beginnings of it.
///
/// # Panics
/// When there is no seed, or `decode` panics.
pub fn replay_seeds(target: &str, decode: fn(&[u8])) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/seeds").join(target);
    let mut seed_count = 0;
    for entry in std::fs::read_dir(&folder).into_iter().flatten().flatten() {
        let bytes = match std::fs::read(entry.path()) {
            Ok(bytes) => bytes,
            Err(error) => panic!("{}: {error}", entry.path().display()),
        };
        decode(&bytes);
        for end in (0..bytes.len()).step_by(bytes.len() / CUTS + 1) {
            decode(bytes.get(..end).unwrap_or_default());
        }
        seed_count += 1;
    }
    assert!(seed_count > 0, "no seeds in {}", folder.display());
}
