//! Upper bounds on the hits of any cache, for a log that is known in full.
//!
//! A row that was asked for at request `s` is a hit at `r` only if it was kept from `s` to `r`:
//! an interval of `r - s` requests in one slot. A request is a perfect hit when all its intervals
//! are kept. [`farthest_next_use`] maximises hits of rows (nearly: it decides row by row);
//! [`perfect_hits`] brackets perfect hits between what a greedy choice of requests reaches and
//! what the area under the capacity allows.
//!
//! Source: Belady, "A study of replacement algorithms for a virtual-storage computer" (1966).
#![expect(
    clippy::indexing_slicing,
    reason = "rows and requests are below the counts their arrays were made with"
)]

use std::collections::BinaryHeap;
use std::ops::Range;

use tierbed_core::{Error, Result};

use tierbed_cache::ReplayCounts;

/// No earlier or later request.
const NEVER: u32 = u32::MAX;

/// A log of requests as two slices; every request asks for distinct rows.
#[derive(Debug, Clone, Copy)]
pub struct Requests<'a> {
    offsets: &'a [u64],
    rows: &'a [u32],
    row_count: usize,
}

impl<'a> Requests<'a> {
    /// Checks `offsets` `[requests + 1]`, `rows` and that all rows are below `row_count`.
    ///
    /// # Errors
    /// `Invalid` when offsets fall or leave the rows, or a row is out of range.
    pub fn new(offsets: &'a [u64], rows: &'a [u32], row_count: usize) -> Result<Self> {
        let ends_fit = offsets.last().is_some_and(|&last| last == rows.len() as u64);
        let starts_at_0 = offsets.first() == Some(&0);
        if !ends_fit || !starts_at_0 || !offsets.is_sorted() || offsets.len() > NEVER as usize {
            return Err(Error::invalid("offsets of the log do not match its rows")
                .with("offsets", offsets.len())
                .with("rows", rows.len()));
        }
        if let Some(row) = rows.iter().find(|&&row| row as usize >= row_count) {
            return Err(Error::invalid("row out of range")
                .with("row", row)
                .with("rows", row_count));
        }
        Ok(Self { offsets, rows, row_count })
    }

    /// Returns how many requests there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.offsets.len() - 1
    }

    /// Tells whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns how many rows there are.
    #[must_use]
    pub fn row_count(&self) -> usize {
        self.row_count
    }

    /// Returns the requests, earliest first.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = &'a [u32]> + ExactSizeIterator + '_ {
        self.offsets.windows(2).map(|pair| &self.rows[pair[0] as usize..pair[1] as usize])
    }
}

/// Replays `requests` from an empty cache of `capacity_rows` that evicts the row needed last,
/// and takes in no row needed later than all it has.
#[must_use]
pub fn farthest_next_use(requests: &Requests<'_>, capacity_rows: usize) -> ReplayCounts {
    let mut next_use = vec![NEVER; requests.row_count];
    let mut later = vec![NEVER; requests.rows.len()];
    let mut at = requests.rows.len();
    for (request, rows) in requests.iter().enumerate().rev() {
        for &row in rows.iter().rev() {
            at -= 1;
            later[at] = std::mem::replace(&mut next_use[row as usize], request as u32);
        }
    }
    // From here on: the next use of rows held, NEVER for those that are not.
    next_use.fill(NEVER);
    let mut farthest: BinaryHeap<(u32, u32)> = BinaryHeap::new();
    let mut counts = ReplayCounts::default();
    let mut held = 0;
    let mut later = later.into_iter();
    for rows in requests.iter() {
        let hits = rows.iter().filter(|&&row| next_use[row as usize] != NEVER).count();
        counts.note(rows.len(), hits);
        for (&row, next) in rows.iter().zip(later.by_ref()) {
            let was_held = std::mem::replace(&mut next_use[row as usize], NEVER) != NEVER;
            held -= usize::from(was_held);
            if next == NEVER {
                continue;
            }
            while held >= capacity_rows {
                match farthest.peek().copied() {
                    // An entry of a row that has been used since, or has left.
                    Some((use_at, old)) if next_use[old as usize] != use_at => {
                        farthest.pop();
                    }
                    Some((use_at, old)) if use_at > next => {
                        farthest.pop();
                        next_use[old as usize] = NEVER;
                        held -= 1;
                    }
                    _ => break,
                }
            }
            if held < capacity_rows {
                next_use[row as usize] = next;
                farthest.push((next, row));
                held += 1;
            }
        }
    }
    counts
}

/// Bounds of perfect hits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PerfectBounds {
    /// Requests.
    pub requests: u64,
    /// Perfect hits of a schedule that exists: requests that need least room first.
    pub greedy: u64,
    /// No cache has more perfect hits: their intervals would not fit into `capacity * requests`.
    pub upper: u64,
    /// Requests that ask for a row for the first time: no cache makes them perfect.
    pub first_seen: u64,
}

/// Brackets the perfect hits of any cache of `capacity_rows` that starts empty.
#[must_use]
pub fn perfect_hits(requests: &Requests<'_>, capacity_rows: usize) -> PerfectBounds {
    let mut last_use = vec![NEVER; requests.row_count];
    let mut last_uses = Vec::with_capacity(requests.rows.len());
    // Slots times requests that each repeatable request needs.
    let mut needs: Vec<(u64, u32)> = Vec::new();
    for (request, rows) in requests.iter().enumerate() {
        let first = last_uses.len();
        for &row in rows {
            last_uses.push(std::mem::replace(&mut last_use[row as usize], request as u32));
        }
        let before = &last_uses[first..];
        if before.iter().all(|&last| last != NEVER) {
            let need = before.iter().map(|&last| request as u64 - u64::from(last)).sum();
            needs.push((need, request as u32));
        }
    }
    needs.sort_unstable();
    let area = capacity_rows as u64 * requests.len() as u64;
    let mut used = 0;
    let upper = needs.iter().take_while(|(need, _)| {
        used += need;
        used <= area
    });
    let upper = upper.count() as u64;
    let mut occupancy = Occupancy::new(requests.len(), capacity_rows);
    let mut greedy = 0;
    for &(_, request) in &needs {
        let at = request as usize;
        let (first, end) = (requests.offsets[at] as usize, requests.offsets[at + 1] as usize);
        greedy += u64::from(occupancy.book(&last_uses[first..end], at));
    }
    let request_count = requests.len() as u64;
    let first_seen = request_count - needs.len() as u64;
    PerfectBounds { requests: request_count, greedy, upper, first_seen }
}

/// Slots in use at each request: a segment tree of maxima under additions to ranges.
#[derive(Debug)]
struct Occupancy {
    leaves: usize,
    capacity: i64,
    /// Maximum below each node, without what was added above it.
    most: Vec<i64>,
    added: Vec<i64>,
}

impl Occupancy {
    fn new(len: usize, capacity: usize) -> Self {
        let leaves = len.next_power_of_two();
        let zeros = vec![0; 2 * leaves];
        Self { leaves, capacity: capacity as i64, most: zeros.clone(), added: zeros }
    }

    /// Keeps rows from each of `from` to request `to`, all or none; tells whether they fit.
    fn book(&mut self, from: &[u32], to: usize) -> bool {
        let all = 0..self.leaves;
        let kept = |start: u32| start as usize + 1..to + 1;
        for (booked, &start) in from.iter().enumerate() {
            if self.most_in(1, &kept(start), all.clone()) >= self.capacity {
                for &start in &from[..booked] {
                    self.add(1, &kept(start), -1, all.clone());
                }
                return false;
            }
            self.add(1, &kept(start), 1, all.clone());
        }
        true
    }

    /// The maximum over `wanted` below `node`, which spans `span`.
    fn most_in(&self, node: usize, wanted: &Range<usize>, span: Range<usize>) -> i64 {
        if wanted.start >= span.end || wanted.end <= span.start {
            return 0;
        }
        if wanted.start <= span.start && span.end <= wanted.end {
            return self.most[node];
        }
        let middle = (span.start + span.end) / 2;
        let left = self.most_in(2 * node, wanted, span.start..middle);
        let right = self.most_in(2 * node + 1, wanted, middle..span.end);
        left.max(right) + self.added[node]
    }

    fn add(&mut self, node: usize, wanted: &Range<usize>, by: i64, span: Range<usize>) {
        if wanted.start >= span.end || wanted.end <= span.start {
            return;
        }
        if wanted.start <= span.start && span.end <= wanted.end {
            self.most[node] += by;
            self.added[node] += by;
            return;
        }
        let middle = (span.start + span.end) / 2;
        self.add(2 * node, wanted, by, span.start..middle);
        self.add(2 * node + 1, wanted, by, middle..span.end);
        self.most[node] = self.most[2 * node].max(self.most[2 * node + 1]) + self.added[node];
    }
}

#[cfg(test)]
mod tests {
    use tierbed_core::env::SplitMix64;

    use super::*;
    use tierbed_cache::{PolicyKind, ReplayCache};

    /// The best perfect hits over every choice of rows kept from request to request.
    fn best_perfect_hits(groups: &[Vec<u32>], row_count: u32, capacity: u32) -> u64 {
        let mut best = std::collections::BTreeMap::from([(0u32, 0u64)]);
        for group in groups {
            let asked: u32 = group.iter().map(|row| 1 << row).sum();
            let mut next = std::collections::BTreeMap::new();
            for (kept, perfect) in best {
                let perfect = perfect + u64::from(kept & asked == asked);
                for choice in 0..1u32 << row_count {
                    if choice & !(kept | asked) == 0 && choice.count_ones() <= capacity {
                        let entry = next.entry(choice).or_insert(0);
                        *entry = perfect.max(*entry);
                    }
                }
            }
            best = next;
        }
        best.into_values().max().unwrap()
    }

    fn random_log(seed: u64, row_count: u32) -> Vec<Vec<u32>> {
        let mut rng = SplitMix64::new(seed);
        let row = |rng: &mut SplitMix64| rng.below(u64::from(row_count)) as u32;
        let group = |rng: &mut SplitMix64| -> std::collections::BTreeSet<u32> {
            (0..3).map(|_| row(rng)).collect()
        };
        (0..14).map(|_| Vec::from_iter(group(&mut rng))).collect()
    }

    fn parts(groups: &[Vec<u32>]) -> (Vec<u64>, Vec<u32>) {
        let mut offsets = vec![0];
        let rows: Vec<u32> = groups.concat();
        offsets.extend(groups.iter().scan(0, |end, group| {
            *end += group.len() as u64;
            Some(*end)
        }));
        (offsets, rows)
    }

    #[test]
    fn bounds_hold_the_best_of_all_schedules_between_them() {
        for seed in 0..12 {
            let groups = random_log(seed, 6);
            let (offsets, rows) = parts(&groups);
            let requests = Requests::new(&offsets, &rows, 6).unwrap();
            let bounds = perfect_hits(&requests, 3);
            let best = best_perfect_hits(&groups, 6, 3);
            assert!(bounds.greedy <= best && best <= bounds.upper, "{bounds:?} {best}");
            assert!(bounds.upper + bounds.first_seen <= bounds.requests);
        }
    }

    #[test]
    fn no_policy_has_more_hits_than_the_farthest_next_use() {
        for seed in 0..12 {
            let groups = random_log(seed, 9);
            let (offsets, rows) = parts(&groups);
            let requests = Requests::new(&offsets, &rows, 9).unwrap();
            let best = farthest_next_use(&requests, 4);
            for kind in PolicyKind::ALL {
                let mut cache = ReplayCache::new(kind, 9, 4).unwrap();
                for group in &groups {
                    cache.ask(group).unwrap();
                }
                assert!(cache.counts().hits <= best.hits, "{kind:?}");
                assert_eq!(cache.counts().rows, best.rows);
            }
        }
    }

    #[test]
    fn the_farthest_next_use_is_counted_by_hand() {
        let (offsets, rows) = parts(&[vec![0], vec![1], vec![2], vec![0], vec![1], vec![2]]);
        let requests = Requests::new(&offsets, &rows, 3).unwrap();
        // One slot: 0 is kept, 1 and 2 are needed later than it.
        let counts = farthest_next_use(&requests, 1);
        assert_eq!((counts.hits, counts.perfect_hits, counts.rows), (1, 1, 6));
        assert_eq!(farthest_next_use(&requests, 3).hits, 3);
        let bounds = perfect_hits(&requests, 3);
        assert_eq!((bounds.greedy, bounds.upper, bounds.first_seen), (3, 3, 3));
    }

    #[test]
    fn wrong_logs_are_refused() {
        assert!(Requests::new(&[0, 2], &[1, 5], 5).is_err());
        assert!(Requests::new(&[0, 3], &[1, 2], 5).is_err());
        assert!(Requests::new(&[], &[], 5).is_err());
        assert!(Requests::new(&[0, 2, 1, 2], &[1, 2], 5).is_err());
    }
}
