//! Replay of the seeds of this crate's fuzz targets.

use tierbed_sim::fuzz::replay_seeds;

#[test]
fn seeds_of_every_target_pass() {
    replay_seeds("cold_table", tierbed_cold::fuzz::table);
    replay_seeds("cold_keys", tierbed_cold::fuzz::keys);
}
