//! Entries of the fuzz targets of this crate's decoders.
//!
//! Each takes arbitrary bytes, also as the body behind a first line that fits, and decodes them.

use tierbed_core::checksum::crc32c;

use crate::digest::Digest;
use crate::marks;
use crate::{Head, Parts};

fn with_line(magic: &str, body: &[u8]) -> Vec<u8> {
    [format!("{magic} 1 {:08x}\n", crc32c(body)).as_bytes(), body].concat()
}

/// HEAD of a channel.
pub fn head(bytes: &[u8]) {
    let _ = Head::decode(bytes);
    let Ok(head) = Head::decode(&with_line("tierbed-head", bytes)) else { return };
    assert!(head.names(head.seq()), "a channel is at a version of its chain");
    assert!(head.encode().is_ok_and(|bytes| Head::decode(&bytes).is_ok_and(|same| same == head)));
}

/// Files and digests of a version.
pub fn parts(bytes: &[u8]) {
    let _ = Parts::decode(bytes);
    let Ok(parts) = Parts::decode(&with_line("tierbed-parts", bytes)) else { return };
    let ranges = parts.all().filter_map(|at| parts.get(at)).map(|part| part.range);
    let covered: u64 = ranges.map(|range| range.end - range.start).sum();
    assert_eq!(covered, parts.bytes(), "parts make up their files");
    for file in &parts.files {
        assert!(!file.name.contains(['/', '\\', '\0']) && !file.name.starts_with('.'));
    }
}

/// Marks of a download.
pub fn marks(bytes: &[u8]) {
    let of = Digest::of(b"seed");
    let count = marks::decode(bytes, of).len();
    assert!(count * 12 <= bytes.len());
}

#[cfg(test)]
mod tests {
    use tierbed_sim::fuzz::replay_seeds;

    #[test]
    fn seeds_of_every_target_pass() {
        replay_seeds("remote_head", super::head);
        replay_seeds("remote_parts", super::parts);
        replay_seeds("remote_marks", super::marks);
    }
}
