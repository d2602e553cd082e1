//! Entries of the fuzz targets, compiled into the crate: any bytes given to its decoders.
//!
//! Each takes arbitrary bytes, mends their checksum where there is one so that what lies behind is
//! reached, and decodes them. Damage is an error, which is fine; anything else is a bug.

use tierbed_core::checksum::crc32c;

use crate::mapping::decode_mapping;
use crate::partition::{BisectionOptions, Subtree};
use crate::{decode_packed, Placement};
use tierbed_snapshot::placement::decode_placement;

/// Puts the checksum of what follows byte `end` at the four bytes before `at + 4`.
fn mended(magic: &[u8], bytes: &[u8], at: usize, end: usize) -> Vec<u8> {
    let mut mended = magic.to_vec();
    mended.extend_from_slice(bytes);
    mended.resize(mended.len().max(end), 0);
    let (header, body) = mended.split_at_mut(end);
    let (_, place) = header.split_at_mut(at);
    let (place, _) = place.split_at_mut(size_of::<u32>());
    place.copy_from_slice(&crc32c(body).to_le_bytes());
    mended
}

fn check(placement: &Placement) {
    let mut seat_count = 0;
    for page in placement.pages() {
        assert!((1..=placement.rows_per_page() as usize).contains(&page.len()), "page capacity");
        seat_count += page.len() as u64;
    }
    for (row, &page) in (0u32..).zip(placement.home_pages()) {
        assert!(placement.page(page).is_some_and(|rows| rows.contains(&row)), "row is at home");
    }
    let homes = u64::from(placement.row_count());
    assert_eq!(seat_count - homes, placement.replica_count(), "every other seat is a replica");
}

/// A placement file.
pub fn placement(bytes: &[u8]) {
    let _ = decode_placement(bytes);
    if let Ok((placement, _)) = decode_placement(&mended(b"TBplace1", bytes, 8, 16)) {
        check(&placement);
    }
}

/// A mapping, the format of MaxEmbed's programs.
pub fn mapping(bytes: &[u8]) {
    for rows_per_page in [0, 1, 4, 16] {
        if let Ok(placement) = decode_mapping(bytes, rows_per_page) {
            check(&placement);
        }
    }
}

/// A binary query log.
pub fn query_log(bytes: &[u8]) {
    let Ok(log) = decode_packed(bytes) else { return };
    assert!(log.iter().flatten().all(|row| *row < log.row_count()));
}

/// A part of a bisection.
pub fn part(bytes: &[u8]) {
    let _ = Subtree::decode(bytes);
    let Ok(part) = Subtree::decode(&mended(b"TBtree_1", bytes, 32, 36)) else { return };
    let options = BisectionOptions { iteration_count: 2, ..BisectionOptions::new(4) };
    if let Ok(Some(children)) = part.clone().split(&options) {
        let pages: usize = children.iter().map(Subtree::page_count).sum();
        assert_eq!(pages, part.page_count());
        let parts = children.map(|child| child.order(&options));
        assert!(parts.iter().all(Result::is_ok), "what is split can be split on");
    }
}

#[cfg(test)]
mod tests {
    use tierbed_sim::fuzz::replay_seeds;

    #[test]
    fn seeds_of_every_target_pass() {
        replay_seeds("placement_file", super::placement);
        replay_seeds("placement_mapping", super::mapping);
        replay_seeds("placement_part", super::part);
        replay_seeds("query_log", super::query_log);
    }
}
