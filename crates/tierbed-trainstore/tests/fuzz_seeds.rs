//! Replay of the seeds of this crate's fuzz targets.

use tierbed_sim::fuzz::replay_seeds;

#[test]
fn seeds_of_every_target_pass() {
    replay_seeds("store_commit", tierbed_trainstore::fuzz::commit);
    replay_seeds("store_map", tierbed_trainstore::fuzz::map);
    replay_seeds("store_page", tierbed_trainstore::fuzz::page);
}
