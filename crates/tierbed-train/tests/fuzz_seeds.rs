//! Do the seeds of this crate's fuzz targets still pass?

use tierbed_sim::fuzz::replay_seeds;

#[test]
fn seeds_of_every_target_pass() {
    replay_seeds("forward_plan", tierbed_train::planned::fuzz::plan);
    replay_seeds("forward_chunks", tierbed_train::planned::fuzz::chunks);
}
