//! Replay of the seeds of this crate's fuzz targets.

use tierbed_sim::fuzz::replay_seeds;

#[test]
fn seeds_of_every_target_pass() {
    replay_seeds("placement_file", tierbed_placement::fuzz::placement);
    replay_seeds("placement_mapping", tierbed_placement::fuzz::mapping);
    replay_seeds("placement_part", tierbed_placement::fuzz::part);
    replay_seeds("query_log", tierbed_placement::fuzz::query_log);
}
