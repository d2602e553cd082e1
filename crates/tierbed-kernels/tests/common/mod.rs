//! Shared parts of the kernel tests: awkward numbers, and equality to the last bit.

#![allow(dead_code, reason = "each test binary uses a part")]

use proptest::prelude::*;
use tierbed_core::env::SplitMix64;
use tierbed_kernels::{Isa, Kernels};

/// The kernels of every instruction set this machine has.
pub(crate) fn all_kernels() -> Vec<Kernels> {
    Isa::available().into_iter().map(|isa| Kernels::with_isa(isa).unwrap()).collect()
}

/// Which numbers a case is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Numbers {
    /// Of order 1, both signs.
    Tame,
    /// Tame, mixed with NaN, infinities, denormals, both zeros and the largest values.
    Wild,
}

/// Draws a kind of numbers.
pub(crate) fn numbers() -> impl Strategy<Value = Numbers> {
    prop_oneof![Just(Numbers::Tame), Just(Numbers::Wild)]
}

const AWKWARD: [f32; 10] = [
    f32::NAN,
    f32::INFINITY,
    f32::NEG_INFINITY,
    0.0,
    -0.0,
    1e-40,
    -1e-45,
    f32::MIN_POSITIVE,
    f32::MAX,
    f32::MIN,
];

/// Returns `len` numbers of `seed`.
pub(crate) fn draw(numbers: Numbers, seed: u64, len: usize) -> Vec<f32> {
    let mut rng = SplitMix64::new(seed);
    let mut one = || match numbers {
        Numbers::Wild if rng.below(12) == 0 => AWKWARD[rng.below(10) as usize],
        _ => (rng.unit_f64() * 4.0 - 2.0) as f32,
    };
    (0..len).map(|_| one()).collect()
}

/// Fails unless both are equal to the last bit; any NaN equals any NaN.
#[track_caller]
pub(crate) fn assert_same_bits(found: &[f32], expected: &[f32], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}: length");
    for (at, (found, expected)) in found.iter().zip(expected).enumerate() {
        let same = found.to_bits() == expected.to_bits() || (found.is_nan() && expected.is_nan());
        assert!(same, "{what}: element {at}: found {found:e}, expected {expected:e}");
    }
}

/// The sum of products in the documented order, one number at a time.
pub(crate) fn dot_in_order(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0f32; 16];
    for (at, (a, b)) in a.iter().zip(b).enumerate() {
        sums[at % 16] += a * b;
    }
    for apart in [8, 4, 2, 1] {
        for lane in 0..apart {
            sums[lane] += sums[lane + apart];
        }
    }
    sums[0]
}

/// Jagged bags over rows that lie in random, repeating places of an arena.
#[derive(Debug, Clone)]
pub(crate) struct Jagged {
    pub(crate) dim: usize,
    pub(crate) arena: Vec<f32>,
    pub(crate) starts: Vec<usize>,
    pub(crate) offsets: Vec<i64>,
    pub(crate) weights: Option<Vec<f32>>,
    pub(crate) stride: usize,
    pub(crate) first: usize,
}

/// Draws bags of 0 to 9 indices over few rows (so duplicates are the rule), at any alignment, with
/// or without weights.
pub(crate) fn jagged() -> impl Strategy<Value = Jagged> {
    let shape = (1usize..=130, prop::collection::vec(0usize..10, 0..8), 1u64..6, 0usize..5);
    (shape, numbers(), any::<bool>(), 0usize..4, any::<u64>()).prop_map(
        |((dim, lengths, row_count, shift), numbers, is_weighted, first, seed)| {
            let words = dim + 1;
            let mut rng = SplitMix64::new(seed);
            let mut offsets = vec![0i64];
            for length in &lengths {
                offsets.push(offsets.last().unwrap() + *length as i64);
            }
            let index_count = lengths.iter().sum();
            let start = |_| shift + rng.below(row_count) as usize * words;
            let starts: Vec<_> = (0..index_count).map(start).collect();
            let arena = draw(numbers, seed ^ 1, shift + row_count as usize * words);
            let weights = is_weighted.then(|| draw(numbers, seed ^ 2, index_count));
            Jagged { dim, arena, starts, offsets, weights, stride: dim + first + 2, first }
        },
    )
}
