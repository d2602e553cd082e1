//! One refinement iteration of a split: exchange of the rows with the highest gains.
//!
//! With `n0` and `n1` rows of a query on the two sides, its probabilistic fanout (p = 1/2) is
//! `2 - 2^-n0 - 2^-n1`. Up to a factor, a row of side 0 that changes sides gains
//! `2^-(n0 - 1) - 2^-n1`: much, when it is the last one there and all others are over there.
//!
//! Gains are those of rows that change sides alone. When circles lie half here, half there, all
//! their rows gain by leaving, and after all have left nothing is better. So an exchange that did
//! not lower the fanout is the last one of its size: from then on half as many pairs change sides,
//! and which rows of equal gain these are is drawn anew each time.
//!
//! Gains are fixed-point integers. Their sum is the same in any order, so threads may share it
//! out as they like.
//!
//! A baseline needs the exchange as it was published, too: [`ExchangeRule::Steady`].

#![expect(clippy::indexing_slicing, reason = "local rows are below the node's row count")]

use std::panic::resume_unwind;
use std::thread;

use tierbed_core::env::mix64;

use super::{BisectionOptions, ExchangeRule};
use crate::hypergraph::{edges, local, runs_of_edges};

/// Binary places of a gain; `2^-21` and less counts as nothing.
const PLACES: usize = 20;

/// Fewer pins than this are not worth a second thread.
const PINS_PER_THREAD_MIN: usize = 1 << 18;

/// `2^-n` in fixed point.
fn half_to_the(n: usize) -> i64 {
    if n > PLACES {
        0
    } else {
        1 << (PLACES - n)
    }
}

/// Arrays of one node's split, reused from node to node.
#[derive(Debug, Default)]
pub(super) struct Exchange {
    /// By local row: true is the right side.
    pub(super) side: Vec<bool>,
    gain: Vec<i64>,
    /// Gains of other threads.
    partial: Vec<Vec<i64>>,
    left: Vec<u64>,
    right: Vec<u64>,
}

impl Exchange {
    /// Exchanges rows until nothing gains, as often as the options say at most. `side` is set.
    pub(super) fn run(&mut self, pins: &[u32], options: &BisectionOptions, thread_count: usize) {
        let is_settling = options.exchange_rule == ExchangeRule::Settling;
        let mut halvings = 0;
        let mut cost_before = i64::MAX;
        for iteration in 1..=options.iteration_count {
            let cost = self.sum_gains(pins, thread_count);
            halvings += u32::from(is_settling && cost >= cost_before);
            cost_before = cost;
            let ties = if is_settling { iteration } else { 0 };
            if self.exchange(thread_count, ties, halvings) == 0 {
                break;
            }
        }
    }

    /// Sums every row's gain over the edges of `pins`; returns their fanout, up to a constant.
    ///
    /// A further thread has an array of its own while these take at most half of the pins'
    /// memory, so memory grows with pins, not with threads times rows.
    fn sum_gains(&mut self, pins: &[u32], thread_count: usize) -> i64 {
        let row_count = self.side.len();
        self.gain.clear();
        self.gain.resize(row_count, 0);
        let affordable = pins.len() / (4 * row_count.max(1)) + 1;
        let worthwhile = pins.len() / PINS_PER_THREAD_MIN + 1;
        let run_count = thread_count.min(affordable).min(worthwhile);
        if run_count < 2 {
            return add_gains(pins, &self.side, &mut self.gain);
        }
        let runs = runs_of_edges(pins, run_count);
        self.partial.resize_with(run_count - 1, Vec::new);
        let side = &self.side;
        let cost = thread::scope(|scope| {
            let mut others = Vec::with_capacity(run_count);
            for (run, partial) in runs.iter().skip(1).zip(&mut self.partial) {
                partial.clear();
                partial.resize(row_count, 0);
                others.push(scope.spawn(move || add_gains(run, side, partial)));
            }
            let own = runs.first().map_or(0, |run| add_gains(run, side, &mut self.gain));
            others.into_iter().fold(own, |sum, other| {
                sum + other.join().unwrap_or_else(|panic| resume_unwind(panic))
            })
        });
        for partial in self.partial.iter().take(runs.len() - 1) {
            for (sum, add) in self.gain.iter_mut().zip(partial) {
                *sum += add;
            }
        }
        cost
    }

    /// Exchanges the i-th best row of the left with the i-th best of the right while the two
    /// gain together; of these pairs the first half, as often as `halvings` says, but one at
    /// least. Returns how many pairs changed sides. `ties` numbers the order of equal gains.
    fn exchange(&mut self, thread_count: usize, ties: u32, halvings: u32) -> usize {
        let of_left = Ties::drawn(2 * u64::from(ties));
        let of_right = Ties::drawn(2 * u64::from(ties) + 1);
        let (gain, side) = (&self.gain, &self.side);
        let best = |right: bool| {
            let of_side = gain.iter().zip(side).filter(|(_, &is_right)| is_right == right);
            of_side.map(|(&gain, _)| gain).max()
        };
        let (Some(best_left), Some(best_right)) = (best(false), best(true)) else { return 0 };
        // A row that gains nothing even with the best of the other side need not be sorted.
        self.left.clear();
        self.right.clear();
        for (row, (&gain, &is_right)) in gain.iter().zip(side).enumerate() {
            if !is_right && gain + best_right > 0 {
                self.left.push(of_left.sort_key(gain, row));
            } else if is_right && gain + best_left > 0 {
                self.right.push(of_right.sort_key(gain, row));
            }
        }
        let (left, right) = (&mut self.left, &mut self.right);
        if thread_count > 1 && left.len() + right.len() > PINS_PER_THREAD_MIN {
            thread::scope(|scope| {
                scope.spawn(|| left.sort_unstable());
                right.sort_unstable();
            });
        } else {
            left.sort_unstable();
            right.sort_unstable();
        }
        let pairs = self.left.iter().zip(&self.right);
        let pairs = pairs.map(|(&a, &b)| (of_left.row_of(a), of_right.row_of(b)));
        let gainful = pairs.clone().take_while(|&(a, b)| self.gain[a] + self.gain[b] > 0).count();
        let pair_count = gainful.unbounded_shr(halvings).max(gainful.min(1));
        for (a, b) in pairs.take(pair_count) {
            self.side[a] = true;
            self.side[b] = false;
        }
        pair_count
    }
}

/// Adds the gains of the edges in `pins`, `[row]`; returns the edges' fanout, up to a constant.
fn add_gains(pins: &[u32], side: &[bool], gain: &mut [i64]) -> i64 {
    let mut together = 0;
    for edge in edges(pins) {
        let right = edge.iter().filter(|&&pin| side[local(pin)]).count();
        let left = edge.len() - right;
        together += half_to_the(left) + half_to_the(right);
        let of_left = half_to_the(left.wrapping_sub(1)) - half_to_the(right);
        let of_right = half_to_the(right.wrapping_sub(1)) - half_to_the(left);
        if of_left == 0 && of_right == 0 {
            continue;
        }
        for &pin in edge {
            let row = local(pin);
            gain[row] += if side[row] { of_right } else { of_left };
        }
    }
    -together
}

/// An order of rows of equal gain, drawn anew for each side and iteration: multiples of an odd
/// number modulo 2^32, which no two rows share.
#[derive(Debug, Clone, Copy)]
struct Ties {
    stride: u32,
    /// The number whose product with `stride` is 1 modulo 2^32.
    back: u32,
}

impl Ties {
    fn drawn(seed: u64) -> Self {
        let stride = mix64(seed) as u32 | 1;
        // Newton: each step doubles the bits that are right, 3 at first.
        let step = |back: u32| back.wrapping_mul(2u32.wrapping_sub(stride.wrapping_mul(back)));
        Self { stride, back: (0..4).fold(stride, |back, _| step(back)) }
    }

    /// Sorts by falling gain. Gains are rounded to f32, which keeps their order.
    fn sort_key(self, gain: i64, row: usize) -> u64 {
        let bits = (gain as f32).to_bits();
        let rising = if bits >> 31 == 0 { bits | 1 << 31 } else { !bits };
        u64::from(!rising) << 32 | u64::from((row as u32).wrapping_mul(self.stride))
    }

    fn row_of(self, key: u64) -> usize {
        (key as u32).wrapping_mul(self.back) as usize
    }
}

#[cfg(test)]
mod tests {
    use tierbed_core::env::SplitMix64;

    use super::*;

    #[test]
    fn keys_fall_with_the_gain_and_keep_the_row() {
        let gains = [1 << 40, 7, 1, 0, -1, -9, -(1 << 40)];
        let ties: Vec<Ties> = (0..20).map(Ties::drawn).collect();
        let keys: Vec<u64> = gains.iter().map(|&gain| ties[3].sort_key(gain, 3)).collect();
        assert!(keys.windows(2).all(|pair| pair[0] < pair[1]));
        for (ties, row) in ties.iter().flat_map(|ties| [0, 1, 77, 1 << 30].map(|row| (ties, row))) {
            assert_eq!(ties.row_of(ties.sort_key(-5, row)), row);
        }
        let is_rising = |ties: &Ties| ties.sort_key(5, 1) < ties.sort_key(5, 2);
        assert!(ties.iter().any(is_rising) && !ties.iter().all(is_rising), "ties are drawn anew");
    }

    #[test]
    fn two_mixed_circles_find_each_other() {
        // Rows 0, 1, 2 are asked for together, so are 3, 4, 5; the first split mixed 2 and 3.
        let marked = 1u32 << 31;
        let pins = [0, 1, 2 | marked, 3, 4, 5 | marked];
        let side = vec![false, false, true, false, true, true];
        let mut exchange = Exchange { side, ..Exchange::default() };
        exchange.run(&pins, &BisectionOptions::new(3), 1);
        assert_eq!(exchange.side, [false, false, false, true, true, true]);
    }

    /// Exchanges all pairs that gain by gains from before, at most `iteration_count` times.
    fn exchange_naively(queries: &[Vec<usize>], side: &mut [bool], iteration_count: u32) {
        let gain_of = |row: usize, side: &[bool]| -> f64 {
            let of_query = |query: &&Vec<usize>| {
                let others = query.iter().filter(|&&other| side[other] != side[row]).count();
                let own = query.len() - others;
                0.5f64.powi(own as i32 - 1) - 0.5f64.powi(others as i32)
            };
            queries.iter().filter(|query| query.contains(&row)).map(|query| of_query(&query)).sum()
        };
        for _ in 0..iteration_count {
            let gains: Vec<f64> = (0..side.len()).map(|row| gain_of(row, side)).collect();
            let sorted = |right: bool| {
                let stride = Ties::drawn(u64::from(right)).stride;
                let mut rows: Vec<usize> = (0..side.len()).filter(|&r| side[r] == right).collect();
                rows.sort_by_key(|&row| (row as u32).wrapping_mul(stride));
                rows.sort_by(|&a, &b| gains[b].total_cmp(&gains[a]));
                rows
            };
            let pairs: Vec<(usize, usize)> = sorted(false).into_iter().zip(sorted(true)).collect();
            let gainful = pairs.iter().take_while(|&&(a, b)| gains[a] + gains[b] > 0.0).count();
            for &(a, b) in &pairs[..gainful] {
                (side[a], side[b]) = (true, false);
            }
        }
    }

    #[test]
    fn the_published_exchange_is_the_naive_one() {
        let mut rng = SplitMix64::new(11);
        let published = BisectionOptions::new(8).as_published();
        let mut differing = 0;
        for _ in 0..60 {
            let row_count = 12 + rng.below(30);
            let mut queries: Vec<Vec<usize>> = Vec::new();
            for _ in 0..40 {
                let mut query: Vec<usize> =
                    (0..2 + rng.below(5)).map(|_| rng.below(row_count) as usize).collect();
                query.sort_unstable();
                query.dedup();
                if query.len() > 1 {
                    queries.push(query);
                }
            }
            let mut pins = Vec::new();
            for query in &queries {
                pins.extend(query.iter().map(|&row| row as u32));
                *pins.last_mut().expect("two rows") |= 1 << 31;
            }
            let begin: Vec<bool> = (0..row_count).map(|row| row >= row_count / 2).collect();
            let run = |options: &BisectionOptions| {
                let mut exchange = Exchange { side: begin.clone(), ..Exchange::default() };
                exchange.run(&pins, options, 1);
                exchange.side
            };
            let mut naive = begin.clone();
            exchange_naively(&queries, &mut naive, 8);
            assert_eq!(run(&published), naive);
            differing += u32::from(run(&BisectionOptions::new(8)) != naive);
        }
        assert!(differing > 10, "the rules must differ: {differing}");
    }

    #[test]
    fn threads_do_not_change_a_gain() {
        let marked = 1u32 << 31;
        let mut pins = Vec::new();
        for edge in 0..400_000u32 {
            pins.extend([edge % 997, 997 + edge % 313, (1310 + edge % 89) | marked]);
        }
        let side: Vec<bool> = (0..1400).map(|row| row % 3 == 0).collect();
        let gains = [1, 2, 5].map(|thread_count| {
            let mut exchange = Exchange { side: side.clone(), ..Exchange::default() };
            exchange.sum_gains(&pins, thread_count);
            exchange.gain
        });
        assert!(gains[0].iter().any(|&gain| gain != 0));
        assert_eq!(gains[0], gains[1]);
        assert_eq!(gains[0], gains[2]);
    }
}
