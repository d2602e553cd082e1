//! Replay of the seeds of this crate's fuzz targets, and of the codecs that its tiers use.

use tierbed_sim::fuzz::replay_seeds;

#[test]
fn seeds_of_every_target_pass() {
    replay_seeds("snapshot_page", tierbed_snapshot::fuzz::page);
    replay_seeds("snapshot_manifest", tierbed_snapshot::fuzz::manifest);
    replay_seeds("snapshot_index", tierbed_snapshot::fuzz::index);
    replay_seeds("snapshot_places", tierbed_snapshot::fuzz::places);
    replay_seeds("codec_codes", tierbed_kernels::fuzz::codes);
}
