//! Replay of the seeds of this crate's fuzz targets.

use tierbed_sim::fuzz::replay_seeds;

#[test]
fn seeds_of_every_target_pass() {
    replay_seeds("store_commit", tierbed_store::fuzz::commit);
    replay_seeds("store_map", tierbed_store::fuzz::map);
    replay_seeds("store_page", tierbed_store::fuzz::page);
    replay_seeds("cold_table", tierbed_store::cold::fuzz::table);
    replay_seeds("cold_keys", tierbed_store::cold::fuzz::keys);
}
