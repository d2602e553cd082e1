//! Ghost entries: compact fingerprints of rows that were evicted lately.
//!
//! Ghosts of one policy share a table of sets; a way of a set is a print of 16 bits and a stamp,
//! the number of the ghost in its list. A list is a ring of bits, one per stamp between its oldest
//! and newest: set while that ghost is remembered. To forget the oldest is to clear a bit; its way
//! is found to be dead when the set needs one.
//!
//! ```text
//! set:   prints u16 x 16 | stamps u24 x 16     bit 23 of a stamp: which list
//! ring:  ..0 0 1 1 0 1 1 1 0 0..               first: the oldest remembered
//! ```
//!
//! Stamps count on for as many laps of the ring as 23 bits allow, so that one of an earlier lap is
//! known to be dead.
//!
//! Two rows of one set and one print are taken for the same: one question in 4,000 is answered
//! wrongly, which costs a hit at most. A set that is full of ghosts forgets its oldest: one in
//! eighty goes too early.
//!
//! Source: the ghosts of S3-FIFO (SOSP 2023, §4.2) are a table of prints and times like this one.
#![expect(clippy::indexing_slicing, reason = "places and ways are reduced to their arrays")]

use tierbed_core::env::mix64;

/// Ways of a set.
const WAYS: usize = 16;
/// Ways per ghost, and places per ghost in the ring of a list, in halves.
const SLACK_HALVES: usize = 3;
/// Which list, in a stamp; numbers end below.
const LIST_AT: u32 = 23;
const PLACES_MAX: usize = 1 << LIST_AT;
/// The print of a way without a ghost.
const NO_PRINT: u16 = 0;

#[derive(Debug, Clone, Copy, Default)]
struct Set {
    prints: [u16; WAYS],
    stamps: [[u8; 3]; WAYS],
}

impl Set {
    /// A bit for each way with this print, that of the first is bit 1: as in `SlotIndex`.
    #[inline]
    fn ways_of(&self, print: u16) -> u32 {
        let (mut bits, mut way) = (0, 0);
        while way < WAYS {
            bits |= u32::from(self.prints[way] == print) << (way + 1);
            way += 1;
        }
        bits
    }

    #[inline]
    fn list_and_stamp(&self, way: usize) -> (usize, u32) {
        let [low, middle, high] = self.stamps[way];
        let packed = u32::from_le_bytes([low, middle, high, 0]);
        ((packed >> LIST_AT) as usize, packed & ((1 << LIST_AT) - 1))
    }
}

/// The first of some ways, of which there is one.
#[inline]
fn first_way(ways: u32) -> usize {
    (ways.trailing_zeros() - 1) as usize % WAYS
}

/// The order of one list: a bit per place of the ring, set while its ghost is remembered.
#[derive(Debug, Clone, Default)]
struct Ring {
    bits: Box<[u64]>,
    place_count: u32,
    /// Stamps count to here and begin anew: a multiple of the places.
    stamp_count: u32,
    /// The oldest ghost's stamp, its place, and stamps from there to the newest.
    first: u32,
    first_place: u32,
    used: u32,
    len: usize,
}

impl Ring {
    fn new(place_count: usize) -> Self {
        let laps = PLACES_MAX / place_count.max(1);
        Self {
            bits: vec![0; place_count.div_ceil(64)].into_boxed_slice(),
            place_count: place_count as u32,
            stamp_count: (place_count * laps) as u32,
            ..Self::default()
        }
    }

    /// The place of the ghost so many stamps after the oldest, fewer than there are places. By that
    /// and not by the stamp: a remainder costs more than all else here.
    #[inline]
    fn place(&self, since: u32) -> usize {
        let place = self.first_place + since;
        wrapped(place, self.place_count) as usize
    }

    /// How many stamps after the oldest.
    #[inline]
    fn since_first(&self, stamp: u32) -> u32 {
        wrapped(stamp + self.stamp_count - self.first, self.stamp_count)
    }

    /// How many stamps ago the ghost of a stamp came; 0: it is not remembered. Without a branch:
    /// which stamps are, nobody can guess.
    #[inline]
    fn age(&self, stamp: u32) -> u32 {
        let age = self.used.saturating_sub(self.since_first(stamp));
        age * u32::from(self.is_set(self.used - age))
    }

    /// Tells whether the ghost so many stamps after the oldest is remembered, `used` at most.
    #[inline]
    fn is_set(&self, since: u32) -> bool {
        let place = self.place(since);
        self.bits[place / 64] >> (place % 64) & 1 == 1
    }

    /// Gives out the stamp after the newest; the oldest ghost goes when the ring is full.
    fn open(&mut self) -> u32 {
        if self.used == self.place_count {
            self.clear(self.first);
        }
        let place = self.place(self.used);
        self.bits[place / 64] |= 1 << (place % 64);
        let stamp = self.first + self.used;
        self.used += 1;
        self.len += 1;
        wrapped(stamp, self.stamp_count)
    }

    fn clear(&mut self, stamp: u32) {
        let place = self.place(self.since_first(stamp));
        self.bits[place / 64] &= !(1 << (place % 64));
        self.len -= 1;
        while self.used > 0 && !self.is_set(0) {
            self.first = wrapped(self.first + 1, self.stamp_count);
            self.first_place = wrapped(self.first_place + 1, self.place_count);
            self.used -= 1;
        }
    }
}

/// A number below twice `count`, less `count` if it is not below that. The lesser of two, not an
/// `if`: compilers make a branch of that, and places before and behind the end cannot be guessed.
#[inline]
fn wrapped(number: u32, count: u32) -> u32 {
    number.min(number.wrapping_sub(count))
}

/// Rows that left, in `LISTS` lists, oldest to newest, with a note on each.
#[derive(Debug, Clone)]
pub struct Ghosts<T = (), const LISTS: usize = 1> {
    sets: Box<[Set]>,
    rings: [Ring; LISTS],
    /// Notes by place in the ring, list after list.
    notes: Box<[T]>,
    /// Most ghosts of one list.
    capacity: usize,
}

impl<T: Copy + Default, const LISTS: usize> Default for Ghosts<T, LISTS> {
    fn default() -> Self {
        let rings = [(); LISTS].map(|()| Ring::default());
        Self { sets: Box::default(), rings, notes: Box::default(), capacity: 0 }
    }
}

impl<T: Copy + Default, const LISTS: usize> Ghosts<T, LISTS> {
    /// Returns the bytes of room for `ghosts` in all lists together, and for as many in each.
    const fn bytes_for(ghosts: usize) -> usize {
        let places = ghosts * SLACK_HALVES / 2;
        let ways = places * size_of::<Set>() / WAYS;
        ways + LISTS * (places / 8 + places * size_of::<T>())
    }

    /// Bytes per ghost there is room for.
    pub const BYTES: usize = Self::bytes_for(128).div_ceil(128);

    /// Changes how many each list, and all lists together, should remember. The table follows in
    /// steps of about a tenth, and forgets all when it does.
    pub fn resize(&mut self, capacity: usize) {
        self.capacity = capacity.min(PLACES_MAX / SLACK_HALVES * 2);
        let place_count = (rounded_down(self.capacity) * SLACK_HALVES).div_ceil(2);
        if place_count != self.rings[0].place_count as usize {
            self.sets = vec![Set::default(); place_count.div_ceil(WAYS)].into_boxed_slice();
            self.rings = [(); LISTS].map(|()| Ring::new(place_count));
            self.notes = vec![T::default(); LISTS * place_count].into_boxed_slice();
        }
        for list in 0..LISTS {
            while self.len(list) > self.capacity {
                self.pop_oldest(list);
            }
        }
    }

    /// Returns the rows that `list` remembers.
    pub fn len(&self, list: usize) -> usize {
        self.rings[list].len
    }

    /// Reads where ghosts of `hashes` would be, all at once.
    pub fn warm(&self, hashes: &[u64]) {
        let sets = hashes.iter().filter_map(|&hash| self.sets.get(self.set_of(mix64(hash))));
        // A set begins in one line of the processor's cache and may end in the next.
        let words = sets.map(|set| set.prints[0] ^ u16::from(set.stamps[WAYS - 1][2]));
        std::hint::black_box(words.fold(0, |all, word| all ^ word));
    }

    /// Returns the list that remembers the row of `hash`.
    pub fn list_of(&self, hash: u64) -> Option<usize> {
        self.find(mix64(hash)).map(|found| found.list)
    }

    /// Remembers the row of `hash` as the newest of `list`, and of this list alone. When there is
    /// no room the oldest is forgotten.
    pub fn push(&mut self, list: usize, hash: u64, note: T) {
        if self.capacity == 0 {
            return;
        }
        let mixed = mix64(hash);
        self.take_mixed(mixed);
        if self.len(list) >= self.capacity {
            self.pop_oldest(list);
        }
        let set = self.set_of(mixed);
        let way = self.free_way(set);
        let stamp = self.rings[list].open();
        let note_at = self.note_at(list, stamp);
        self.notes[note_at] = note;
        let [low, middle, high, _] = (stamp | (list as u32) << LIST_AT).to_le_bytes();
        self.sets[set].prints[way] = print_of(mixed);
        self.sets[set].stamps[way] = [low, middle, high];
    }

    /// Forgets the row of `hash`; returns the list that remembered it.
    pub fn take(&mut self, hash: u64) -> Option<usize> {
        self.take_mixed(mix64(hash))
    }

    fn take_mixed(&mut self, mixed: u64) -> Option<usize> {
        let found = self.find(mixed)?;
        self.sets[found.set].prints[found.way] = NO_PRINT;
        self.rings[found.list].clear(found.stamp);
        Some(found.list)
    }

    /// Returns the note on the oldest row that `list` remembers.
    pub fn oldest(&self, list: usize) -> Option<T> {
        let ring = &self.rings[list];
        (ring.used > 0).then(|| self.notes[self.note_at(list, ring.first)])
    }

    /// Forgets the oldest row of `list`.
    pub fn pop_oldest(&mut self, list: usize) {
        let ring = &mut self.rings[list];
        if ring.used > 0 {
            ring.clear(ring.first);
        }
    }

    fn note_at(&self, list: usize, stamp: u32) -> usize {
        let ring = &self.rings[list];
        list * ring.place_count as usize + ring.place(ring.since_first(stamp))
    }

    fn set_of(&self, mixed: u64) -> usize {
        (((mixed & 0xFFFF_FFFF) * self.sets.len() as u64) >> 32) as usize
    }

    fn find(&self, mixed: u64) -> Option<Found> {
        let set = self.set_of(mixed);
        let mut ways = self.sets.get(set)?.ways_of(print_of(mixed));
        while ways != 0 {
            let found = self.living(set, first_way(ways));
            if found.is_some() {
                return found;
            }
            ways &= ways - 1;
        }
        None
    }

    /// The ghost of a way, unless it has been forgotten.
    fn living(&self, set: usize, way: usize) -> Option<Found> {
        let (list, stamp) = self.sets[set].list_and_stamp(way);
        let is_living = self.sets[set].prints[way] != NO_PRINT && self.rings[list].age(stamp) > 0;
        is_living.then_some(Found { set, way, list, stamp })
    }

    /// A way for one more ghost; the set's oldest goes when all are of living ones.
    fn free_way(&mut self, set: usize) -> usize {
        let free = self.sets[set].ways_of(NO_PRINT);
        if free != 0 {
            return first_way(free);
        }
        // All dead ones leave at once; the oldest is found on the way.
        let (mut held, mut oldest) = (self.sets[set], 0);
        for way in 0..WAYS {
            let (list, stamp) = held.list_and_stamp(way);
            let age = self.rings[list].age(stamp);
            held.prints[way] *= u16::from(age > 0);
            oldest = oldest.max(age * WAYS as u32 + (WAYS - 1 - way) as u32);
        }
        self.sets[set].prints = held.prints;
        let free = held.ways_of(NO_PRINT);
        if free != 0 {
            return first_way(free);
        }
        let way = WAYS - 1 - oldest as usize % WAYS;
        let (list, stamp) = held.list_and_stamp(way);
        self.rings[list].clear(stamp);
        way
    }
}

/// Where a ghost is.
#[derive(Debug, Clone, Copy)]
struct Found {
    set: usize,
    way: usize,
    list: usize,
    stamp: u32,
}

/// The print of a hash, never [`NO_PRINT`]. The low half says which set.
fn print_of(mixed: u64) -> u16 {
    ((mixed >> 48) as u16).max(1)
}

/// The first four binary digits of a number that has more.
fn rounded_down(number: usize) -> usize {
    let bits = (usize::BITS - number.leading_zeros()).saturating_sub(4);
    number >> bits << bits
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use tierbed_core::env::SplitMix64;

    use super::*;

    /// The oracle is a queue per list, searched from end to end; a set holds all there is.
    #[test]
    fn remembers_the_newest_and_forgets_what_is_taken() {
        let mut ghosts = Ghosts::<u32, 2>::default();
        ghosts.resize(8);
        let mut queues = [VecDeque::new(), VecDeque::new()];
        let mut rng = SplitMix64::new(11);
        for step in 0..20_000u32 {
            let (row, list) = (rng.below(20), rng.below(2) as usize);
            let holds = |queue: &VecDeque<(u64, u32)>| queue.iter().any(|entry| entry.0 == row);
            let known = queues.iter().position(holds);
            assert_eq!(ghosts.list_of(mix64(row)), known);
            queues.iter_mut().for_each(|queue| queue.retain(|entry| entry.0 != row));
            match rng.below(5) {
                0 => assert_eq!(ghosts.take(mix64(row)), known),
                1 => {
                    ghosts.take(mix64(row));
                    ghosts.pop_oldest(list);
                    queues[list].pop_front();
                }
                _ => {
                    ghosts.push(list, mix64(row), step);
                    queues[list].push_back((row, step));
                    // Twelve places: many taken in a row make the ring forget early.
                    if queues[list].len() > 8 || ghosts.len(list) < queues[list].len() {
                        queues[list].pop_front();
                    }
                }
            }
            for list in [0, 1] {
                assert_eq!(ghosts.len(list), queues[list].len());
                assert_eq!(ghosts.oldest(list), queues[list].front().map(|entry| entry.1));
            }
        }
    }

    /// A full memory: sets overflow, and one in eighty is forgotten before its time.
    #[test]
    fn few_are_forgotten_early_and_few_are_mistaken() {
        let mut ghosts = Ghosts::<(), 2>::default();
        ghosts.resize(16_000);
        for row in 0..100_000 {
            ghosts.push((row % 2) as usize, mix64(row), ());
            if ghosts.len(0) + ghosts.len(1) > 16_000 {
                ghosts.pop_oldest((row % 2) as usize);
            }
        }
        let due = (84_000..100_000).filter(|&row| ghosts.list_of(mix64(row)).is_some()).count();
        assert!(due > 15_700, "{due} of 16,000 are remembered");
        let mistaken = (0..80_000).filter(|&row| ghosts.list_of(mix64(row)).is_some()).count();
        assert!(mistaken < 60, "{mistaken} of 80,000 that left are taken for others");
    }

    #[test]
    fn the_table_follows_the_capacity_in_steps() {
        let mut ghosts = Ghosts::<(), 1>::default();
        ghosts.push(0, 1, ());
        assert_eq!((ghosts.len(0), ghosts.list_of(1)), (0, None));
        ghosts.resize(1000);
        (0..1000).for_each(|row| ghosts.push(0, row, ()));
        assert!(ghosts.len(0) > 970);
        ghosts.resize(970);
        assert_eq!(ghosts.len(0), 970);
        ghosts.resize(500);
        assert_eq!(ghosts.len(0), 0);
    }
}
