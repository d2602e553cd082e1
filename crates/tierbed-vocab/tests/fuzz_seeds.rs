//! Replay of the seeds of this crate's fuzz targets.

use tierbed_sim::fuzz::replay_seeds;

#[test]
fn seeds_of_every_target_pass() {
    replay_seeds("vocab_pages", tierbed_vocab::fuzz::pages);
    replay_seeds("vocab_directory", tierbed_vocab::fuzz::directory);
}
