//! Popularity distributions of tokens.
//!
//! Rank 0 has a share of its own; rank `r >= 1` has a weight of
//! `(r + 1 + q)^-s1 * (1 + r / R)^-(s2 - s1)`: Zipf-Mandelbrot with a second slope beyond `R`.
//! Ranks are cut into buckets of at most 1/16 of an octave, drawn by an alias table and evenly
//! inside, so a draw costs one 64-bit random word, two multiplications and one load, for any
//! number of ranks.
//!
//! Source: Walker, "An efficient method for generating discrete random variables with general
//! distributions" (TOMS 1977); Vose's construction (1991).

#![expect(
    clippy::indexing_slicing,
    reason = "buckets and shares have one length; products are scaled to it"
)]

/// The parameters of one feature's popularity.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Shape {
    /// Share of rank 0.
    pub(crate) top_share: f64,
    /// Flattening of the head, `q`.
    pub(crate) shift: f64,
    /// Slope before the knee, `s1`.
    pub(crate) head_slope: f64,
    /// Rank of the knee, `R`; infinite for one slope only.
    pub(crate) knee: f64,
    /// Slope beyond the knee, `s2`.
    pub(crate) tail_slope: f64,
}

impl Shape {
    fn weight(&self, rank: f64) -> f64 {
        let head = libm::pow(rank + 1.0 + self.shift, -self.head_slope);
        head * libm::pow(1.0 + rank / self.knee, self.head_slope - self.tail_slope)
    }
}

#[derive(Debug, Clone, Copy, Default)]
struct Bucket {
    /// Draws of this bucket below the threshold (of 2^32) stay, others go to `other`.
    threshold: u32,
    other: u32,
    first_rank: u32,
    rank_count: u32,
}

/// Draws ranks of one feature.
#[derive(Debug, Clone)]
pub(crate) struct Popularity {
    buckets: Vec<Bucket>,
}

impl Popularity {
    /// Prepares draws from `0..rank_count`; `rank_count` is at least 1.
    pub(crate) fn new(shape: &Shape, rank_count: u32) -> Self {
        let mut buckets = Vec::new();
        let mut shares = Vec::new();
        let mut first = 0u32;
        while first < rank_count {
            let count = (first / 16).clamp(1, rank_count - first);
            let middle = f64::from(first) + f64::from(count - 1) / 2.0;
            buckets.push(Bucket { threshold: 0, other: 0, first_rank: first, rank_count: count });
            shares.push(shape.weight(middle) * f64::from(count));
            first += count;
        }
        let rest: f64 = shares.iter().skip(1).sum();
        for (at, share) in shares.iter_mut().enumerate() {
            *share = match at {
                0 if rest > 0.0 => shape.top_share,
                0 => 1.0,
                _ => *share / rest * (1.0 - shape.top_share),
            };
        }
        fill_alias(&mut buckets, &shares);
        Self { buckets }
    }

    /// Returns the rank that the 64 random bits `word` stand for.
    pub(crate) fn rank(&self, word: u64) -> u32 {
        let product = (word >> 32) * self.buckets.len() as u64;
        let mut drawn = self.buckets[(product >> 32) as usize];
        if product as u32 >= drawn.threshold {
            drawn = self.buckets[drawn.other as usize];
        }
        let inside = ((word & 0xffff_ffff) * u64::from(drawn.rank_count)) >> 32;
        drawn.first_rank + inside as u32
    }
}

/// Cuts the shares (summing to 1) into columns of equal height, two buckets to a column.
fn fill_alias(buckets: &mut [Bucket], shares: &[f64]) {
    assert!(buckets.len() == shares.len(), "a share per bucket");
    let count = shares.len() as f64;
    let mut heights: Vec<f64> = shares.iter().map(|share| share * count).collect();
    let (mut small, mut large): (Vec<usize>, Vec<usize>) =
        (0..heights.len()).partition(|&at| heights[at] < 1.0);
    while let (Some(&low), Some(&high)) = (small.last(), large.last()) {
        small.pop();
        let low_height = heights[low];
        buckets[low].threshold = (low_height * 4_294_967_296.0) as u32;
        buckets[low].other = high as u32;
        heights[high] -= 1.0 - low_height;
        if heights[high] < 1.0 {
            large.pop();
            small.push(high);
        }
    }
    // What is left is full up to rounding: it keeps its column to itself.
    for at in small.into_iter().chain(large) {
        buckets[at].threshold = u32::MAX;
        buckets[at].other = at as u32;
    }
}

#[cfg(test)]
mod tests {
    use tierbed_core::env::SplitMix64;

    use super::*;

    #[test]
    fn draws_follow_the_weights() {
        let shape =
            Shape { top_share: 0.1, shift: 1.0, head_slope: 0.5, knee: 100.0, tail_slope: 1.5 };
        let popularity = Popularity::new(&shape, 5_000);
        let mut rng = SplitMix64::new(1);
        let draw_count = 400_000;
        let mut counts = vec![0u32; 5_000];
        for _ in 0..draw_count {
            counts[popularity.rank(rng.next_u64()) as usize] += 1;
        }
        let total: f64 = (1..5_000).map(|rank| shape.weight(f64::from(rank))).sum();
        for ranks in [0..1, 1..2, 2..10, 10..100, 100..1_000, 1_000..5_000] {
            let expected: f64 = ranks
                .clone()
                .map(|rank: u32| match rank {
                    0 => 0.1,
                    _ => shape.weight(f64::from(rank)) / total * 0.9,
                })
                .sum();
            let drawn: u32 = counts[ranks.start as usize..ranks.end as usize].iter().sum();
            let found = f64::from(drawn) / f64::from(draw_count);
            assert!((found / expected - 1.0).abs() < 0.05, "{ranks:?}: {found} vs {expected}");
        }
    }

    #[test]
    fn small_and_extreme_tables_stay_in_range() {
        let shape = Shape {
            top_share: 0.5,
            shift: 0.0,
            head_slope: 9.0,
            knee: f64::INFINITY,
            tail_slope: 9.0,
        };
        for rank_count in [1, 2, 3, 17, 40] {
            let popularity = Popularity::new(&shape, rank_count);
            for word in [0, 1, u64::MAX, u64::MAX << 32, 0xffff_ffff, 1 << 63] {
                assert!(popularity.rank(word) < rank_count);
            }
        }
    }
}
