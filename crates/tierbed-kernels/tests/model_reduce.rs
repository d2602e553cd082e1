//! Sums of products in the documented order, on every instruction set.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test may panic")]

mod common;

use common::{all_kernels, assert_same_bits, dot_in_order, draw, numbers, Numbers};
use proptest::prelude::*;

proptest! {
    #[test]
    fn dot_follows_the_documented_order(
        len in 0usize..=300, shift in 0usize..5, numbers in numbers(), seed: u64,
    ) {
        let (a, b) = (draw(numbers, seed, len + shift), draw(numbers, seed ^ 1, len));
        let a = &a[shift..];
        let expected = [dot_in_order(a, &b), dot_in_order(&b, &b)];
        for kernels in all_kernels() {
            let found = [kernels.dot(a, &b), kernels.dot(&b, &b)];
            assert_same_bits(&found, &expected, kernels.isa().name());
        }
    }
}

#[test]
fn dot_is_close_to_the_exact_sum() {
    let (a, b) = (draw(Numbers::Tame, 1, 1000), draw(Numbers::Tame, 2, 1000));
    let exact: f64 = a.iter().zip(&b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
    for kernels in all_kernels() {
        assert!((f64::from(kernels.dot(&a, &b)) - exact).abs() < 1e-3);
    }
}
