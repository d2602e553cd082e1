//! Growth of a column's vocabulary: new tokens and repeats.
//!
//! Two-parameter Pitman-Yor process with *discount* `d` and *strength* `s`: after `n` draws of
//! `k` tokens the next draw is a new token with probability `(s + d k) / (s + n)`, and a token
//! seen `c` times with one proportional to `c - d`. So tokens grow like `n^d`, and of many
//! tokens a share of about `d` was seen once.
//!
//! Differs: the probability of a new token uses the mean of `k` at `n`, not `k` itself, because
//! a trace shall have the published number of tokens and not a random one around it. Which
//! tokens are drawn again, given how many there are, does not depend on it.

#![expect(
    clippy::indexing_slicing,
    reason = "a draw is scaled to the number of draws; every token drawn has a count"
)]

use tierbed_core::env::SplitMix64;

/// How the tokens of one column grow and repeat.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Growth {
    /// Share of the draws that take token 0 outright: the missing and the dominant token.
    pub(crate) top_share: f64,
    /// `d`, at least 0, below 1.
    pub(crate) discount: f64,
    /// `s`, above 0.
    pub(crate) strength: f64,
    /// Tokens there are; none is new beyond.
    pub(crate) token_count_max: u32,
}

/// A drawn column.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Tokens {
    /// Token of each draw, `[n]`, numbered by first appearance.
    pub(crate) draws: Vec<u32>,
    /// Distinct tokens.
    pub(crate) token_count: u32,
}

impl Growth {
    /// Draws `draw_count` tokens (below 2^32). Draws of equal seed begin equally.
    pub(crate) fn draw(&self, draw_count: u32, seed: u64) -> Tokens {
        let mut run = Run::new(self, draw_count, seed);
        for _ in 0..draw_count {
            run.step();
        }
        Tokens { draws: run.draws, token_count: run.counts.len() as u32 }
    }

    /// Returns the expected number of tokens after `draw_count` draws beside the top one, and
    /// how many of them were seen once.
    #[cfg(test)]
    pub(crate) fn expect(&self, draw_count: f64) -> (f64, f64) {
        let (d, s, n) = (self.discount, self.strength, draw_count * (1.0 - self.top_share));
        let gamma = |x: f64| libm::lgamma(x);
        let tokens = if d > 0.0 {
            let grown = gamma(s + d + n) - gamma(s + n) + gamma(s + 1.0) - gamma(s + d);
            libm::exp(grown) / d - s / d
        } else {
            s * libm::log(1.0 + n / s)
        };
        let once =
            n * libm::exp(gamma(s + d + n - 1.0) - gamma(s + d) - gamma(s + n) + gamma(s + 1.0));
        (tokens, once)
    }
}

struct Run<'a> {
    growth: &'a Growth,
    rng: SplitMix64,
    /// Of 2^32.
    top_share: u64,
    draws: Vec<u32>,
    /// Draws of each token; token 0's are not counted when it is the top one.
    counts: Vec<u32>,
    /// Draws of the process: those that did not take the top token outright.
    drawn: f64,
    /// Mean number of tokens at `drawn`.
    mean_count: f64,
}

impl<'a> Run<'a> {
    fn new(growth: &'a Growth, draw_count: u32, seed: u64) -> Self {
        Self {
            growth,
            rng: SplitMix64::new(seed),
            top_share: (growth.top_share * 4_294_967_296.0) as u64,
            draws: Vec::with_capacity(draw_count as usize),
            counts: Vec::new(),
            drawn: 0.0,
            mean_count: 0.0,
        }
    }

    fn step(&mut self) {
        let word = self.rng.next_u64();
        // The top token comes first, so that it is token 0.
        if self.top_share > 0 && (self.draws.is_empty() || (word >> 32) < self.top_share) {
            if self.counts.is_empty() {
                self.counts.push(0);
            }
            self.draws.push(0);
            return;
        }
        let Growth { discount, strength, token_count_max, .. } = *self.growth;
        let new_share = (strength + discount * self.mean_count) / (strength + self.drawn);
        self.drawn += 1.0;
        self.mean_count += new_share;
        let is_new = ((word as u32) as f64) * (1.0 / 4_294_967_296.0) < new_share;
        let is_first = self.counts.len() == usize::from(self.top_share > 0);
        let token = if is_first || (is_new && (self.counts.len() as u32) < token_count_max) {
            self.counts.push(1);
            self.counts.len() as u32 - 1
        } else {
            self.known()
        };
        self.draws.push(token);
    }

    /// Picks an earlier draw's token, thinned so that a token's weight is its count less `d`.
    fn known(&mut self) -> u32 {
        loop {
            let word = self.rng.next_u64();
            let at = ((word >> 32) * self.draws.len() as u64) >> 32;
            let token = self.draws[at as usize];
            if token == 0 && self.top_share > 0 {
                continue;
            }
            let count = &mut self.counts[token as usize];
            let share = ((word as u32) as f64) * (1.0 / 4_294_967_296.0);
            if share * f64::from(*count) >= self.growth.discount {
                *count += 1;
                return token;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GROWTH: Growth =
        Growth { top_share: 0.2, discount: 0.7, strength: 30.0, token_count_max: u32::MAX };

    fn counts(tokens: &Tokens) -> Vec<u32> {
        let mut counts = vec![0u32; tokens.token_count as usize];
        for &token in &tokens.draws {
            counts[token as usize] += 1;
        }
        counts
    }

    #[test]
    fn tokens_are_numbered_by_first_appearance() {
        let tokens = GROWTH.draw(5_000, 3);
        let mut next = 0;
        for token in &tokens.draws {
            assert!(*token <= next);
            next = next.max(token + 1);
        }
        assert_eq!(next, tokens.token_count);
    }

    #[test]
    fn tokens_grow_and_repeat_as_expected() {
        let tokens = GROWTH.draw(200_000, 4);
        let (expected, expected_once) = GROWTH.expect(200_000.0);
        let counts = counts(&tokens);
        let once = counts.iter().filter(|count| **count == 1).count() as f64;
        let near = |found: f64, expected: f64| (found / expected - 1.0).abs() < 0.03;
        assert!(near(f64::from(tokens.token_count), expected), "{} {expected}", counts.len());
        assert!(near(once, expected_once), "{once} {expected_once}");
        assert!(near(f64::from(counts[0]), 40_000.0), "{}", counts[0]);
    }

    #[test]
    fn more_draws_begin_like_fewer() {
        let few = GROWTH.draw(1_000, 5);
        assert_eq!(few.draws[..], GROWTH.draw(3_000, 5).draws[..1_000]);
        assert_ne!(few.draws, GROWTH.draw(1_000, 6).draws);
    }

    #[test]
    fn no_token_is_new_beyond_the_last() {
        let growth = Growth { token_count_max: 7, ..GROWTH };
        assert_eq!(growth.draw(10_000, 1).token_count, 7);
        let lonely = Growth { top_share: 0.0, token_count_max: 1, ..GROWTH };
        assert!(lonely.draw(100, 1).draws.iter().all(|token| *token == 0));
    }
}
