//! Replay of the seeds of this crate's fuzz targets.

use tierbed_sim::fuzz::replay_seeds;

#[test]
fn seeds_of_every_target_pass() {
    replay_seeds("lsm_rows", tierbed_lsm::fuzz::rows_block);
    replay_seeds("lsm_version", tierbed_lsm::fuzz::version);
    replay_seeds("lsm_log", tierbed_lsm::fuzz::log);
}
