//! Clock with adaptive replacement whose mark is the hits of a row's best group.
//!
//! Source: EVStore §4.3.3, with the rule of the text: a row under the hand whose mark is below
//! the hits of the incoming row's group gets one more chance (mark 0), any other is marked down.
//! Differs: marks above 63 fall by a part of themselves, because groups here may be of any size
//! and the hand must end its search.

use super::two_clocks::{MarkRule, TwoClocks};

/// The rule of EV-CAR: the most hits of a group the row was a hit in.
#[derive(Debug, Clone, Default)]
pub struct BestGroup;

impl MarkRule for BestGroup {
    const NAME: &'static str = "ev_car";

    fn touched(mark: u8, hit_count: u32) -> u8 {
        mark.max(hit_count.min(u32::from(u8::MAX)) as u8)
    }

    fn passed(mark: u8, hit_count: u32) -> u8 {
        if hit_count > u32::from(mark) {
            0
        } else {
            mark - (mark / 32).max(1)
        }
    }
}

/// Group-aware CAR.
pub type EvCar = TwoClocks<BestGroup>;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{EvictionPolicy, Group};

    fn group(hit_count: u32) -> Group<'static> {
        Group { hashes: &[], row_count: 26, hit_count }
    }

    #[test]
    fn rows_of_better_groups_stay_longer() {
        let mut policy = EvCar::default();
        policy.add_slab(0, 3);
        (0..3).for_each(|slot| policy.insert(slot, u64::from(slot), 0));
        for (slot, hits) in [(0, 3), (1, 1), (2, 2), (0, 1)] {
            policy.begin_group(&group(hits));
            policy.touch(slot);
        }
        policy.begin_group(&group(0));
        assert_eq!(policy.dump(), [1, 2, 0]);
        // An incoming row of a group with many hits clears every mark below.
        policy.begin_group(&group(9));
        assert_eq!(policy.dump(), [0, 1, 2]);
    }

    #[test]
    fn any_mark_falls_to_nothing_within_some_hundred_passes() {
        let mut mark = BestGroup::touched(0, 10_000);
        let mut passes = 0;
        while mark > 0 {
            mark = BestGroup::passed(mark, 0);
            passes += 1;
        }
        assert!(passes < 150, "{passes}");
    }
}
