//! Gradients of rows against the plain loop, to the last bit, and against the forward.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test may panic")]

mod common;

use common::{all_kernels, assert_same_bits, draw, jagged, Jagged, Numbers};
use proptest::prelude::*;
use tierbed_core::{Bags, ErrorKind};
use tierbed_kernels::{
    BagRange, Columns, Grads, Groups, Kernels, Occurrence, Pooling, Rows, Upstream,
};

/// The rows of a batch with their occurrences in index order.
struct Occurring {
    starts: Vec<usize>,
    occurrences: Vec<Occurrence>,
    bounds: Vec<usize>,
}

fn occurring(case: &Jagged) -> Occurring {
    let mut starts = case.starts.clone();
    starts.sort_unstable();
    starts.dedup();
    let (mut occurrences, mut bounds) = (vec![], vec![0]);
    for &start in &starts {
        for (bag, bag_bounds) in (0u32..).zip(case.offsets.windows(2)) {
            let indices = bag_bounds[0] as u32..bag_bounds[1] as u32;
            let of_row = indices.filter(|&index| case.starts[index as usize] == start);
            occurrences.extend(of_row.map(|index| Occurrence { bag, index }));
        }
        bounds.push(occurrences.len());
    }
    Occurring { starts, occurrences, bounds }
}

fn upstream<'a>(case: &'a Jagged, pooling: Pooling, grad: &'a [f32]) -> Upstream<'a> {
    Upstream {
        grad,
        columns: Columns { stride: case.stride, first: case.first, dim: case.dim },
        pooling,
        offsets: &case.offsets,
        weights: case.weights.as_deref(),
    }
}

/// Sums the gradient of one row as the table in the module's head says.
fn sum_plainly(upstream: &Upstream<'_>, occurrences: &[Occurrence], sum: &mut [f32]) {
    for occurrence in occurrences {
        let (bag, index) = (occurrence.bag as usize, occurrence.index as usize);
        for (column, sum) in sum.iter_mut().enumerate() {
            let at = |row: usize| upstream.grad[upstream.columns.start(row) + column];
            let weigh = |g: f32| upstream.weights.map_or(g, |weights| weights[index] * g);
            let count = (upstream.offsets[bag + 1] - upstream.offsets[bag]) as f32;
            *sum += match upstream.pooling {
                Pooling::Sum => weigh(at(bag)),
                Pooling::Mean => weigh(at(bag)) / count,
                Pooling::None => at(index),
            };
        }
    }
}

const POOLINGS: [Pooling; 3] = [Pooling::Sum, Pooling::Mean, Pooling::None];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn sums_of_gradients_equal_the_plain_loop(
        case in jagged(),
        numbers in common::numbers(),
        seed: u64,
    ) {
        let rows = occurring(&case);
        // One matrix tall enough for bags and, with "none", for indices.
        let height = (case.offsets.len() - 1).max(case.starts.len());
        let grad = draw(numbers, seed, height * case.stride);
        for pooling in POOLINGS {
            let upstream = upstream(&case, pooling, &grad);
            let before = draw(Numbers::Tame, seed ^ 1, rows.starts.len() * case.dim);
            let (mut expected, mut fresh) = (before.clone(), vec![0.0; before.len()]);
            for sums in [&mut expected, &mut fresh] {
                for (sum, bounds) in sums.chunks_mut(case.dim).zip(rows.bounds.windows(2)) {
                    sum_plainly(&upstream, &rows.occurrences[bounds[0]..bounds[1]], sum);
                }
            }
            for kernels in all_kernels() {
                let what = format!("{} {pooling:?}", kernels.isa().name());
                let mut sums = vec![f32::NAN; before.len()];
                let groups = Groups { occurrences: &rows.occurrences, bounds: &rows.bounds };
                kernels.sum_grads_grouped(&upstream, groups, &mut sums);
                assert_same_bits(&sums, &fresh, &what);
                let mut sums = before.clone();
                for (sum, bounds) in sums.chunks_mut(case.dim).zip(rows.bounds.windows(2)) {
                    let occurrences = &rows.occurrences[bounds[0]..bounds[1]];
                    kernels.add_grads(&upstream, occurrences, sum);
                }
                assert_same_bits(&sums, &expected, &what);
            }
        }
    }

    /// Pooling is linear in the rows, so for any upstream gradient `G`:
    /// `sum(pooled * G)` over bags equals `sum(row * gradient of row)` over rows.
    #[test]
    fn gradients_are_the_adjoint_of_pooling(case in jagged(), seed: u64) {
        let finite = |values: &[f32]| values.iter().all(|value| value.abs() < 1e3);
        prop_assume!(finite(&case.arena) && case.weights.as_deref().is_none_or(finite));
        let rows = occurring(&case);
        let bag_count = case.offsets.len() - 1;
        let grad = draw(Numbers::Tame, seed, bag_count * case.stride);
        for pooling in [Pooling::Sum, Pooling::Mean] {
            let upstream = upstream(&case, pooling, &grad);
            let kernels = Kernels::detect();
            let mut out = vec![0.0; grad.len()];
            let weights = case.weights.as_deref();
            let all = Rows { arena: &case.arena, starts: &case.starts, weights };
            let columns = upstream.columns;
            kernels.pool_add(all, BagRange::whole(&case.offsets), columns, &mut out);
            if pooling == Pooling::Mean {
                kernels.mean_scale(&case.offsets, columns, &mut out);
            }
            let mut sums = vec![0.0; rows.starts.len() * case.dim];
            let groups = Groups { occurrences: &rows.occurrences, bounds: &rows.bounds };
            kernels.sum_grads_grouped(&upstream, groups, &mut sums);
            let product = |a: &[f32], b: &[f32]| -> f64 {
                a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
            };
            // Columns beside the feature's stay 0 in `out`.
            let forwards = product(&out, &grad);
            let backwards: f64 = rows
                .starts
                .iter()
                .zip(sums.chunks(case.dim))
                .map(|(&start, sum)| product(&case.arena[start..][..case.dim], sum))
                .sum();
            let scale = (case.starts.len() * case.dim) as f64;
            prop_assert!((forwards - backwards).abs() <= 1e-5 * scale, "{forwards} {backwards}");
        }
    }
}

#[test]
fn a_row_shared_by_two_features_sums_over_both() {
    let grad = [1.0, 10.0, 2.0, 20.0];
    let feature = |first, pooling| Upstream {
        grad: &grad,
        columns: Columns { stride: 2, first, dim: 1 },
        pooling,
        offsets: &[0, 4, 5],
        weights: None,
    };
    for kernels in all_kernels() {
        let mut sum = [f32::NAN];
        let both = [Occurrence { bag: 0, index: 0 }, Occurrence { bag: 1, index: 4 }];
        let groups = Groups { occurrences: &both, bounds: &[0, 2] };
        kernels.sum_grads_grouped(&feature(0, Pooling::Sum), groups, &mut sum);
        kernels.add_grads(&feature(1, Pooling::Mean), &both, &mut sum);
        assert_eq!(sum, [1.0 + 2.0 + 10.0 / 4.0 + 20.0]);
        let none = Groups { occurrences: &[], bounds: &[0, 0] };
        kernels.sum_grads_grouped(&feature(0, Pooling::Sum), none, &mut sum);
        assert_eq!(sum[0].to_bits(), 0);
    }
}

#[test]
fn a_gradient_or_weight_that_is_no_number_is_refused_wherever_it_lies() {
    let (indices, offsets) = (vec![0i64; 5000], vec![0i64, 5000]);
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for at in [0, 2047, 2048, 4999] {
            let mut holds_bad = vec![1.0; 5000];
            holds_bad[at] = bad;
            let weights = vec![f32::MAX; 5000];
            for (grad, weights) in [(&holds_bad, &weights), (&weights, &holds_bad)] {
                let bags = Bags::new(&indices, &offsets, Some(weights), 1).unwrap();
                let error = Grads { output: grad, weights: None }.check(&bags).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Invalid);
                assert!(error.to_string().contains("nan or inf"), "{error}");
            }
        }
    }
    let finite = vec![f32::MIN; 5000];
    let bags = Bags::new(&indices, &offsets, Some(&finite), 1).unwrap();
    Grads { output: &finite, weights: None }.check(&bags).unwrap();
}
