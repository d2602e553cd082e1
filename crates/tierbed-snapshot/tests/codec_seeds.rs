//! Replay of the seeds of the codecs that tiers use.

#![allow(unreachable_pub, reason = "the entry is that of a program of its own, too")]

#[path = "../../../tools/fuzz/entries/codes.rs"]
mod entry;

#[test]
fn seeds_of_the_codecs_pass() {
    tierbed_sim::fuzz::replay_seeds("codec_codes", entry::codes);
}
