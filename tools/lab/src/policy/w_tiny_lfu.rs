//! W-TinyLFU: a small window in front of a segmented LRU, with admission by frequency.
//!
//! New rows enter the window (1 % of the slots). Its oldest competes with the oldest on
//! probation: the one that the sketch has seen more often stays. Rows used on probation are
//! protected, up to 80 % of the rest. The sketch counts to 15 and is halved every ten rows asked
//! for per slot.
//!
//! Source: Einziger, Friedman and Manes, "TinyLFU: A Highly Efficient Cache Admission Policy"
//! (ACM ToS 2017).

use tierbed_core::env::mix64;

use tierbed_cache::policy::list::List;
use tierbed_cache::policy::slots::{SlotMap, SlotState, Slots};
use tierbed_cache::policy::{order_of_leaving, EvictionPolicy, Group};

/// One slot of this many is in the window.
const WINDOW_SHARE: usize = 100;
/// Tenths of the other slots that may be protected.
const PROTECTED_TENTHS: usize = 8;
/// Counters of the sketch per slot, of a byte each, and rows counted per slot between halvings.
const COUNTERS_PER_SLOT: usize = 4;
const SAMPLE_PER_SLOT: usize = 10;
const COUNT_MAX: u8 = 15;

/// Where a row is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Place {
    #[default]
    Window,
    Probation,
    Protected,
}

impl SlotState for Place {
    fn to_bits(self) -> u16 {
        self as u16
    }

    fn from_bits(bits: u16) -> Self {
        match bits {
            0 => Self::Window,
            1 => Self::Probation,
            _ => Self::Protected,
        }
    }
}

/// Counts of rows asked for, never below the truth since the last halving.
#[derive(Debug, Clone, Default)]
struct Sketch {
    counters: Box<[u8]>,
    counted: usize,
    counted_max: usize,
}

impl Sketch {
    fn resize(&mut self, slot_count: usize) {
        self.counters = vec![0; slot_count * COUNTERS_PER_SLOT].into_boxed_slice();
        self.counted = 0;
        self.counted_max = slot_count * SAMPLE_PER_SLOT;
    }

    /// Positions of the four counters of a row.
    fn positions(&self, hash: u32) -> [usize; 4] {
        let position = |salt: u64| {
            let mixed = mix64(u64::from(hash) | (salt << 32));
            (((mixed & 0xFFFF_FFFF) * self.counters.len() as u64) >> 32) as usize
        };
        [1, 2, 3, 4].map(position)
    }

    fn count(&self, hash: u32) -> u8 {
        // Before there are slots there are no counters, and no row was counted.
        let counts = self.positions(hash).map(|at| match self.counters.get(at) {
            Some(counter) => *counter,
            None => 0,
        });
        counts.into_iter().min().unwrap_or(0)
    }

    fn note(&mut self, hash: u32) {
        let count = self.count(hash);
        if count < COUNT_MAX {
            for at in self.positions(hash) {
                if let Some(counter) = self.counters.get_mut(at) {
                    *counter = (*counter).max(count + 1);
                }
            }
        }
        self.counted += 1;
        if self.counted >= self.counted_max {
            self.counters.iter_mut().for_each(|counter| *counter /= 2);
            self.counted /= 2;
        }
    }
}

/// Window, probation, protected rows and the sketch.
#[derive(Debug, Clone, Default)]
pub struct WTinyLfu {
    slots: Slots<Place>,
    /// 32 bits of the hash of each row.
    hashes: SlotMap<u32>,
    window: List,
    probation: List,
    protected: List,
    sketch: Sketch,
}

impl WTinyLfu {
    fn window_len_wanted(&self) -> usize {
        (self.slots.count() / WINDOW_SHARE).max(1)
    }

    fn protected_len_max(&self) -> usize {
        (self.slots.count() - self.window_len_wanted()) * PROTECTED_TENTHS / 10
    }

    fn count(&self, slot: u32) -> u8 {
        self.sketch.count(self.hashes.get(slot))
    }

    fn push(&mut self, slot: u32, place: Place) {
        self.slots.set_state(slot, place);
        let list = match place {
            Place::Window => &mut self.window,
            Place::Probation => &mut self.probation,
            Place::Protected => &mut self.protected,
        };
        list.push_newest(&mut self.slots.links, slot);
    }
}

impl EvictionPolicy for WTinyLfu {
    fn name(&self) -> &'static str {
        "w_tiny_lfu"
    }

    fn bytes_per_slot(&self) -> usize {
        Slots::<Place>::BYTES_PER_SLOT + size_of::<u32>() + COUNTERS_PER_SLOT
    }

    fn bytes_per_slab(&self) -> usize {
        Slots::<Place>::BYTES_PER_SLAB + SlotMap::<u32>::BYTES_PER_SLAB
    }

    fn add_slab(&mut self, slab: u32, slot_count: u32) {
        self.slots.add_slab(slab, slot_count);
        self.hashes.add_slab(slab, slot_count);
        self.sketch.resize(self.slots.count());
    }

    fn drop_slab(&mut self, slab: u32) {
        self.slots.drop_slab(slab);
        self.hashes.drop_slab(slab);
        self.sketch.resize(self.slots.count());
    }

    fn begin_group(&mut self, group: &Group<'_>) {
        group.hashes.iter().for_each(|&hash| self.sketch.note(hash as u32));
    }

    fn touch(&mut self, slot: u32) {
        let place = self.slots.state(slot);
        self.remove(slot);
        match place {
            Place::Window => self.push(slot, Place::Window),
            Place::Probation | Place::Protected => self.push(slot, Place::Protected),
        }
        while self.protected.len() > self.protected_len_max() {
            let Some(oldest) = self.protected.oldest() else { return };
            self.remove(oldest);
            self.push(oldest, Place::Probation);
        }
    }

    fn insert(&mut self, slot: u32, hash: u64, _score: u16) {
        self.hashes.set(slot, hash as u32);
        self.push(slot, Place::Window);
        while self.window.len() > self.window_len_wanted() {
            let Some(oldest) = self.window.oldest() else { return };
            self.remove(oldest);
            self.push(oldest, Place::Probation);
        }
    }

    fn victim(&mut self) -> Option<u32> {
        let candidate = self.window.oldest();
        let Some(settled) = self.probation.oldest().or(self.protected.oldest()) else {
            return candidate;
        };
        // While the window has room its rows do not compete.
        match candidate.filter(|_| self.window.len() >= self.window_len_wanted()) {
            Some(candidate) if self.count(candidate) <= self.count(settled) => Some(candidate),
            _ => Some(settled),
        }
    }

    fn remove(&mut self, slot: u32) -> u16 {
        let list = match self.slots.state(slot) {
            Place::Window => &mut self.window,
            Place::Probation => &mut self.probation,
            Place::Protected => &mut self.protected,
        };
        list.remove(&mut self.slots.links, slot);
        0
    }

    fn dump(&self) -> Vec<u32> {
        order_of_leaving(self.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn note(policy: &mut WTinyLfu, row: u64, times: usize) {
        policy.begin_group(&Group { hashes: &vec![row; times], row_count: 1, hit_count: 0 });
    }

    #[test]
    fn a_row_seen_more_often_takes_the_place_of_the_oldest_on_probation() {
        let mut policy = WTinyLfu::default();
        policy.add_slab(0, 10);
        for slot in 0..10 {
            note(&mut policy, u64::from(slot), 2);
            policy.insert(slot, u64::from(slot), 0);
        }
        let list = |list: &List, policy: &WTinyLfu| -> Vec<u32> {
            list.iter(&policy.slots.links).collect()
        };
        assert_eq!(list(&policy.window, &policy), [9]);
        assert_eq!(list(&policy.probation, &policy), [0, 1, 2, 3, 4, 5, 6, 7, 8]);
        policy.touch(0);
        assert_eq!(list(&policy.protected, &policy), [0]);
        // Equal counts: the newcomer in the window leaves. A third use lets it stay.
        assert_eq!(policy.victim(), Some(9));
        note(&mut policy, 9, 1);
        assert_eq!(policy.victim(), Some(1));
    }

    #[test]
    fn counts_end_at_fifteen_and_are_halved() {
        let mut sketch = Sketch::default();
        sketch.resize(10);
        (0..60).for_each(|_| sketch.note(7));
        assert_eq!((sketch.count(7), sketch.count(8)), (15, 0));
        (0..40).for_each(|_| sketch.note(8));
        assert_eq!(sketch.count(7), 7);
    }
}
