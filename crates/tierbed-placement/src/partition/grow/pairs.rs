//! Pairwise refinement: exchange of rows between two pages.
//!
//! Each page meets the pages that share most queries with it. For a pair, rows change sides two by
//! two, the best first even when it loses, and the best moment on the way is kept.
//!
//! What counts are not the reads of the log's queries but those of queries like them: each row of a
//! query is asked for again with a probability of 0.2, so a page that holds `n` of its rows is read
//! with a probability of `1 - 0.8^n`. Exchanges that only fit one query weigh less so.
//!
//! Source: Kernighan and Lin, "An efficient heuristic procedure for partitioning graphs"; the
//! probabilistic fanout of Kabiljo and others, "Social Hash Partitioner", as the gain.

#![expect(clippy::indexing_slicing, reason = "pins, rows and pages come from one block")]

use std::collections::HashMap;

use tierbed_core::env::SplitMix64;

use super::pins::Pins;
use crate::partition::order::shuffle;
use crate::progress::Meter;

/// Pages a page meets in a sweep.
const PARTNER_COUNT: usize = 16;

/// Sweeps over all pages; later ones meet changed pages only.
const SWEEP_COUNT: u64 = 4;

/// Pairs with more pins are left alone: they cost most and move least.
const PAIR_PINS_MAX: usize = 20_000;

/// Queries looked at per row to find a page's partners.
const PARTNER_SAMPLE_MAX: usize = 100;

/// One read, in the fixed point of gains.
const READ: i32 = 1 << 12;

/// A walk that lost this much since its best moment is given up.
const LOSS_MAX: i32 = 40 * READ;

/// From this many rows of a query on, one more or less changes nothing.
const COUNT_MAX: usize = 24;

/// By `n`: `0.8^n` in fixed point, the probability that none of `n` rows is asked for again.
const NONE_ASKED: [i32; COUNT_MAX + 1] = none_asked();

/// The number of a query that has one row of a pair: exchanges do not change its reads.
const SEEN_ONCE: u32 = u32::MAX;

/// Arrays of the refinement, reused from pair to pair.
#[derive(Debug)]
pub(crate) struct Refinement<'a> {
    pins: &'a Pins,
    page_of: Vec<u32>,
    /// By query: its number within the pair, valid where `numbered_in` is the round.
    number: Vec<u32>,
    numbered_in: Vec<u32>,
    round: u32,
    weight: Vec<f32>,
    /// By page: how often it changed.
    change_counts: Vec<u32>,
    /// By pair of pages, the lower first: their change counts when they last met in vain.
    met_in_vain: HashMap<[usize; 2], [u32; 2]>,
    pair: Pair,
}

impl<'a> Refinement<'a> {
    pub(crate) fn new(pins: &'a Pins) -> Self {
        let query_count = pins.query_count();
        Self {
            pins,
            page_of: Vec::new(),
            number: vec![0; query_count],
            numbered_in: vec![0; query_count],
            round: 0,
            weight: Vec::new(),
            change_counts: Vec::new(),
            met_in_vain: HashMap::new(),
            pair: Pair::default(),
        }
    }

    /// Exchanges rows between pages; every page keeps its number of rows.
    ///
    /// `meter` counts every row once, and ends refinement early when the build is cancelled.
    pub(crate) fn run(&mut self, pages: &mut [Vec<u32>], seed: u64, meter: &Meter<'_, '_, '_>) {
        self.page_of = vec![u32::MAX; self.pins.row_count()];
        for (page, rows) in pages.iter().enumerate() {
            self.move_to(rows, page);
        }
        self.weight = vec![0.0; pages.len()];
        self.change_counts = vec![0; pages.len()];
        self.met_in_vain.clear();
        let mut is_active = vec![true; pages.len()];
        for sweep in 0..SWEEP_COUNT {
            let mut order: Vec<usize> = (0..pages.len()).collect();
            shuffle(&mut order, &mut SplitMix64::new(seed ^ (sweep + 5)));
            let mut changed = vec![false; pages.len()];
            let mut saved = 0;
            for page in order {
                if !is_active[page] {
                    continue;
                }
                if !meter.advance(pages[page].len() as u64 / SWEEP_COUNT) {
                    return;
                }
                for partner in self.partners(page, &pages[page]) {
                    let gain = self.meet(pages, page, partner);
                    if gain > 0 {
                        saved += gain as usize;
                        changed[page] = true;
                        changed[partner] = true;
                    }
                }
            }
            is_active = changed;
            // Less than a thousandth of a read per query: further sweeps cost more than they save.
            if saved / READ as usize * 1000 < self.pins.query_count() {
                break;
            }
        }
    }

    fn move_to(&mut self, rows: &[u32], page: usize) {
        for &row in rows {
            self.page_of[row as usize] = page as u32;
        }
    }

    /// Returns the pages that share most queries with `page`, long queries counting less.
    fn partners(&mut self, page: usize, rows: &[u32]) -> Vec<usize> {
        let mut touched = Vec::new();
        for &row in rows {
            let of_row = self.pins.of_row(row);
            // Steps spread the sample over all queries of a popular row.
            for &pin in of_row.iter().step_by((of_row.len() / PARTNER_SAMPLE_MAX).max(1)) {
                let others = self.pins.rows_of(self.pins.query(pin));
                // A query counts as much whatever its length: divided over the rows it brings.
                let weight = 1.0 / (others.len() - 1) as f32;
                for &other in others {
                    let partner = self.page_of[other as usize] as usize;
                    if partner != page && partner < self.weight.len() {
                        if self.weight[partner] == 0.0 {
                            touched.push(partner);
                        }
                        self.weight[partner] += weight;
                    }
                }
            }
        }
        let weight = &self.weight;
        let heavier = |a: &usize, b: &usize| weight[*b].total_cmp(&weight[*a]).then(a.cmp(b));
        let mut best = touched.clone();
        if best.len() > PARTNER_COUNT {
            best.select_nth_unstable_by(PARTNER_COUNT, heavier);
            best.truncate(PARTNER_COUNT);
        }
        best.sort_unstable_by(heavier);
        for partner in touched {
            self.weight[partner] = 0.0;
        }
        best
    }

    /// Refines one pair of pages, unless it gained nothing when both were as they are. Returns what
    /// that gains.
    fn meet(&mut self, pages: &mut [Vec<u32>], a: usize, b: usize) -> i32 {
        let pair = [a.min(b), a.max(b)];
        let change_counts = pair.map(|page| self.change_counts[page]);
        if self.met_in_vain.get(&pair) == Some(&change_counts) {
            return 0;
        }
        let gain = self.refine(pages, a, b);
        if gain > 0 {
            pair.iter().for_each(|&page| self.change_counts[page] += 1);
        } else {
            self.met_in_vain.insert(pair, change_counts);
        }
        gain
    }

    /// Refines one pair of pages. Returns what that gains.
    fn refine(&mut self, pages: &mut [Vec<u32>], a: usize, b: usize) -> i32 {
        let rows: Vec<u32> = pages[a].iter().chain(&pages[b]).copied().collect();
        let pin_count: usize = rows.iter().map(|&row| self.pins.degree(row)).sum();
        if pin_count > PAIR_PINS_MAX {
            return 0;
        }
        self.round += 1;
        let mut query_count = 0;
        self.pair.clear(rows.len());
        // A query gets a number when its second row is met: those with one row of the pair are most
        // of all, and no exchange changes their reads.
        for &pin in rows.iter().flat_map(|&row| self.pins.of_row(row)) {
            let query = self.pins.query(pin);
            if self.numbered_in[query] != self.round {
                self.numbered_in[query] = self.round;
                self.number[query] = SEEN_ONCE;
            } else if self.number[query] == SEEN_ONCE {
                self.number[query] = query_count;
                query_count += 1;
            }
        }
        for (item, &row) in rows.iter().enumerate() {
            for &pin in self.pins.of_row(row) {
                let number = self.number[self.pins.query(pin)];
                if number != SEEN_ONCE {
                    self.pair.add(item, number);
                }
            }
        }
        let gain = self.pair.run(query_count as usize, pages[a].len());
        if gain > 0 {
            let side = &self.pair.best_side;
            let of_side = |right: bool| -> Vec<u32> {
                let items = rows.iter().zip(side).filter(|(_, &is_right)| is_right == right);
                items.map(|(&row, _)| row).collect()
            };
            (pages[a], pages[b]) = (of_side(false), of_side(true));
            let (left, right) = (pages[a].clone(), pages[b].clone());
            self.move_to(&left, a);
            self.move_to(&right, b);
        }
        gain
    }
}

/// Rows and queries of two pages, numbered within the pair.
#[derive(Debug, Default)]
struct Pair {
    /// Memberships: (query, item), then sorted by query.
    members: Vec<(u32, u32)>,
    /// By query: where its items begin in `members`.
    starts: Vec<u32>,
    /// By item: its queries of two items or more.
    queries_of: Vec<Vec<u32>>,
    /// By query: items left and right.
    counts: Vec<[i32; 2]>,
    side: Vec<bool>,
    best_side: Vec<bool>,
    gains: Vec<i32>,
    is_locked: Vec<bool>,
}

impl Pair {
    fn clear(&mut self, item_count: usize) {
        self.members.clear();
        self.queries_of.iter_mut().for_each(Vec::clear);
        self.queries_of.resize_with(item_count, Vec::new);
    }

    fn add(&mut self, item: usize, query: u32) {
        self.members.push((query, item as u32));
    }

    /// Finds the best walk of exchanges; `best_side` is where the items end. Returns its gain.
    fn run(&mut self, query_count: usize, left_count: usize) -> i32 {
        let item_count = self.queries_of.len();
        self.side = (0..item_count).map(|item| item >= left_count).collect();
        self.group_by_query(query_count);
        self.is_locked = vec![false; item_count];
        self.best_side.clone_from(&self.side);
        let (mut gain, mut best) = (0, 0);
        // Exchanges go on when they lose, as a later one may win more: Kernighan and Lin's walk.
        for _ in 0..left_count.min(item_count - left_count) {
            for from_right in [false, true] {
                let Some(item) = self.best_item(from_right) else { return best };
                gain += self.gains[item];
                self.move_item(item);
            }
            if gain > best {
                best = gain;
                self.best_side.clone_from(&self.side);
            } else if gain < best - LOSS_MAX {
                break;
            }
        }
        best
    }

    /// Sorts memberships by query, counts sides, sums first gains.
    fn group_by_query(&mut self, query_count: usize) {
        self.members.sort_unstable();
        self.starts = vec![0; query_count + 1];
        for &(query, _) in &self.members {
            self.starts[query as usize + 1] += 1;
        }
        for query in 0..query_count {
            self.starts[query + 1] += self.starts[query];
        }
        self.counts = vec![[0; 2]; query_count];
        self.gains = vec![0; self.queries_of.len()];
        for query in 0..query_count {
            let range = self.starts[query] as usize..self.starts[query + 1] as usize;
            if range.len() < 2 {
                continue;
            }
            for &(_, item) in &self.members[range.clone()] {
                self.counts[query][usize::from(self.side[item as usize])] += 1;
            }
            for &(_, item) in &self.members[range] {
                self.queries_of[item as usize].push(query as u32);
                let right = usize::from(self.side[item as usize]);
                self.gains[item as usize] += gain_of(self.counts[query], right);
            }
        }
    }

    fn best_item(&self, from_right: bool) -> Option<usize> {
        (0..self.side.len())
            .filter(|&item| !self.is_locked[item] && self.side[item] == from_right)
            .max_by_key(|&item| (self.gains[item], std::cmp::Reverse(item)))
    }

    /// Moves an item for good in this walk and corrects the gains of its neighbours.
    fn move_item(&mut self, item: usize) {
        let from = usize::from(self.side[item]);
        self.is_locked[item] = true;
        self.side[item] = from == 0;
        for &query in &self.queries_of[item] {
            let query = query as usize;
            let before = self.counts[query];
            self.counts[query][from] -= 1;
            self.counts[query][1 - from] += 1;
            // Both probabilities are past the end of the table: no gain changes.
            if before[from] > COUNT_MAX as i32 + 1 && before[1 - from] > COUNT_MAX as i32 {
                continue;
            }
            let range = self.starts[query] as usize..self.starts[query + 1] as usize;
            for &(_, other) in &self.members[range] {
                let other = other as usize;
                let right = usize::from(self.side[other]);
                if other != item {
                    self.gains[other] +=
                        gain_of(self.counts[query], right) - gain_of(before, right);
                }
            }
        }
    }
}

/// Returns what an item on side `side` gains by leaving: its page is read less often without it
/// when few others of the query are there, the other page more often when few are there.
fn gain_of(counts: [i32; 2], side: usize) -> i32 {
    let none_of = |count: i32| NONE_ASKED[(count as usize).min(COUNT_MAX)];
    none_of(counts[side] - 1) - none_of(counts[1 - side])
}

const fn none_asked() -> [i32; COUNT_MAX + 1] {
    let mut powers = [READ; COUNT_MAX + 1];
    let mut n = 1;
    while n <= COUNT_MAX {
        powers[n] = powers[n - 1] * 8 / 10;
        n += 1;
    }
    powers
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hypergraph::Hypergraph;
    use crate::QueryLog;

    /// Circles of `size` rows, each asked for as a whole three times; local rows are the same.
    fn pins_of_circles(circle_count: u32, size: u32) -> Pins {
        let queries: Vec<Vec<u32>> = (0..3 * circle_count)
            .map(|at| (at / 3 * size..(at / 3 + 1) * size).collect())
            .collect();
        let log = QueryLog::from_queries(circle_count * size, &queries).expect("in range");
        let graph = Hypergraph::from_log(log).expect("few rows");
        Pins::new(&graph.pins, graph.rows.len(), 1)
    }

    #[test]
    fn strangers_are_exchanged_and_pages_keep_their_size() {
        let pins = pins_of_circles(2, 4);
        let mut pages = vec![vec![0, 1, 6, 7], vec![4, 5, 2, 3]];
        Refinement::new(&pins).run(&mut pages, 1, &Meter::silent());
        for page in &mut pages {
            page.sort_unstable();
        }
        pages.sort();
        assert_eq!(pages, [[0, 1, 2, 3], [4, 5, 6, 7]]);
    }

    #[test]
    fn gains_after_moves_are_those_counted_anew() {
        let mut pair = Pair::default();
        pair.clear(6);
        for (query, items) in
            [&[0usize, 1, 3][..], &[2, 3], &[0, 4, 5], &[1, 2, 3, 4]].into_iter().enumerate()
        {
            items.iter().for_each(|&item| pair.add(item, query as u32));
        }
        pair.side = vec![false, false, false, true, true, true];
        pair.is_locked = vec![false; 6];
        pair.group_by_query(4);
        for item in [0, 4, 2] {
            pair.move_item(item);
            let kept = pair.gains.clone();
            let mut anew =
                Pair { side: pair.side.clone(), members: pair.members.clone(), ..Pair::default() };
            anew.queries_of.resize_with(6, Vec::new);
            anew.group_by_query(4);
            for other in (0..6).filter(|&other| !pair.is_locked[other]) {
                assert_eq!(kept[other], anew.gains[other], "row {other} after {item} moved");
            }
        }
    }
}
