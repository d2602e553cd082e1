//! Replay of the seeds of this crate's fuzz targets.

use tierbed_sim::fuzz::replay_seeds;

#[test]
fn seeds_of_every_target_pass() {
    replay_seeds("trace", tierbed_lab::fuzz::trace);
}
