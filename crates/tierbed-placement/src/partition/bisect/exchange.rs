//! Who gains most from changing sides? One iteration of a split.
//!
//! With `n0` and `n1` rows of a query on the two sides, its probabilistic fanout (p = 1/2) is
//! `2 - 2^-n0 - 2^-n1`. Up to a factor, a row of side 0 that changes sides gains
//! `2^-(n0 - 1) - 2^-n1`: much, when it is the last one there and its friends are over there.
//!
//! Gains are fixed-point integers. Their sum is the same in any order, so threads may share it
//! out as they like.

#![expect(clippy::indexing_slicing, reason = "local rows are below the node's row count")]

use std::thread;

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
    /// Exchanges rows until nothing gains, `iteration_count` times at most. `side` is set.
    pub(super) fn run(&mut self, pins: &[u32], iteration_count: u32, thread_count: usize) {
        for _ in 0..iteration_count {
            self.sum_gains(pins, thread_count);
            if self.exchange(thread_count) == 0 {
                break;
            }
        }
    }

    /// Sums every row's gain over the edges of `pins`.
    ///
    /// A further thread has an array of its own while these take at most half of the pins'
    /// memory, so memory grows with pins, not with threads times rows.
    fn sum_gains(&mut self, pins: &[u32], thread_count: usize) {
        let row_count = self.side.len();
        self.gain.clear();
        self.gain.resize(row_count, 0);
        let affordable = pins.len() / (4 * row_count.max(1)) + 1;
        let worthwhile = pins.len() / PINS_PER_THREAD_MIN + 1;
        let run_count = thread_count.min(affordable).min(worthwhile);
        if run_count < 2 {
            add_gains(pins, &self.side, &mut self.gain);
            return;
        }
        let runs = runs_of_edges(pins, run_count);
        self.partial.resize_with(run_count - 1, Vec::new);
        let side = &self.side;
        thread::scope(|scope| {
            for (run, partial) in runs.iter().skip(1).zip(&mut self.partial) {
                partial.clear();
                partial.resize(row_count, 0);
                scope.spawn(move || add_gains(run, side, partial));
            }
            if let Some(run) = runs.first() {
                add_gains(run, side, &mut self.gain);
            }
        });
        for partial in self.partial.iter().take(runs.len() - 1) {
            for (sum, add) in self.gain.iter_mut().zip(partial) {
                *sum += add;
            }
        }
    }

    /// Exchanges the i-th best row of the left with the i-th best of the right while the two
    /// gain together. Returns how many pairs changed sides.
    fn exchange(&mut self, thread_count: usize) -> usize {
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
                self.left.push(sort_key(gain, row));
            } else if is_right && gain + best_left > 0 {
                self.right.push(sort_key(gain, row));
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
        let mut pair_count = 0;
        for (&a, &b) in self.left.iter().zip(&self.right) {
            let (a, b) = (a as u32 as usize, b as u32 as usize);
            if self.gain[a] + self.gain[b] <= 0 {
                break;
            }
            self.side[a] = true;
            self.side[b] = false;
            pair_count += 1;
        }
        pair_count
    }
}

/// Adds the gains of the edges in `pins`, `[row]`.
fn add_gains(pins: &[u32], side: &[bool], gain: &mut [i64]) {
    for edge in edges(pins) {
        let right = edge.iter().filter(|&&pin| side[local(pin)]).count();
        let left = edge.len() - right;
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
}

/// Sorts by falling gain, then by row. Gains are rounded to f32, which keeps their order.
fn sort_key(gain: i64, row: usize) -> u64 {
    let bits = (gain as f32).to_bits();
    let rising = if bits >> 31 == 0 { bits | 1 << 31 } else { !bits };
    u64::from(!rising) << 32 | row as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_fall_with_the_gain_and_rise_with_the_row() {
        let gains = [1 << 40, 7, 1, 0, -1, -9, -(1 << 40)];
        let keys: Vec<u64> = gains.iter().map(|&gain| sort_key(gain, 3)).collect();
        assert!(keys.windows(2).all(|pair| pair[0] < pair[1]));
        assert!(sort_key(5, 1) < sort_key(5, 2));
    }

    #[test]
    fn two_mixed_circles_find_each_other() {
        // Rows 0, 1, 2 are asked for together, so are 3, 4, 5; the first split mixed 2 and 3.
        let marked = 1u32 << 31;
        let pins = [0, 1, 2 | marked, 3, 4, 5 | marked];
        let side = vec![false, false, true, false, true, true];
        let mut exchange = Exchange { side, ..Exchange::default() };
        exchange.run(&pins, 8, 1);
        assert_eq!(exchange.side, [false, false, false, true, true, true]);
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
