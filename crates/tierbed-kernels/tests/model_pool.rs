//! Pooling against the loop anyone would write, to the last bit, on every instruction set.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test may panic")]

mod common;

use common::{all_kernels, assert_same_bits, draw, jagged, Jagged, Numbers};
use proptest::prelude::*;
use tierbed_kernels::{BagRange, Columns, Rows};

/// Adds every row of every bag, element by element, in index order.
fn pool_plainly(case: &Jagged, out: &mut [f32]) {
    for (bag, bounds) in case.offsets.windows(2).enumerate() {
        for index in bounds[0] as usize..bounds[1] as usize {
            for column in 0..case.dim {
                let x = case.arena[case.starts[index] + column];
                let term = case.weights.as_ref().map_or(x, |weights| weights[index] * x);
                out[bag * case.stride + case.first + column] += term;
            }
        }
    }
}

fn columns(case: &Jagged) -> Columns {
    Columns { stride: case.stride, first: case.first, dim: case.dim }
}

fn piece(case: &Jagged, from: usize, to: usize) -> (Rows<'_>, BagRange<'_>) {
    let weights = case.weights.as_ref().map(|weights| &weights[from..to]);
    let rows = Rows { arena: &case.arena, starts: &case.starts[from..to], weights };
    (rows, BagRange { offsets: &case.offsets, first_index: from })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Starts from values that are already there, so that a kernel which overwrites, or touches
    /// columns beside its own, is caught.
    #[test]
    fn pool_add_equals_the_plain_loop(case in jagged(), seed: u64) {
        let before = draw(Numbers::Tame, seed, case.stride * (case.offsets.len() - 1));
        let mut expected = before.clone();
        pool_plainly(&case, &mut expected);
        for kernels in all_kernels() {
            let mut out = before.clone();
            let (rows, bags) = piece(&case, 0, case.starts.len());
            kernels.pool_add(rows, bags, columns(&case), &mut out);
            assert_same_bits(&out, &expected, kernels.isa().name());
        }
    }

    /// Rows arrive in pieces when they come from disk; the bits must not tell.
    #[test]
    fn pooling_in_pieces_equals_pooling_at_once(
        case in jagged(),
        cuts in prop::collection::vec(0usize..64, 0..5),
    ) {
        let index_count = case.starts.len();
        let mut cuts: Vec<_> = cuts.into_iter().map(|cut| cut.min(index_count)).collect();
        cuts.extend([0, index_count]);
        cuts.sort_unstable();
        let zeros = vec![0.0; case.stride * (case.offsets.len() - 1)];
        for kernels in all_kernels() {
            let (mut at_once, mut in_pieces) = (zeros.clone(), zeros.clone());
            let (rows, bags) = piece(&case, 0, index_count);
            kernels.pool_add(rows, bags, columns(&case), &mut at_once);
            for cut in cuts.windows(2) {
                let (rows, bags) = piece(&case, cut[0], cut[1]);
                kernels.pool_add(rows, bags, columns(&case), &mut in_pieces);
            }
            assert_same_bits(&in_pieces, &at_once, kernels.isa().name());
        }
    }

    #[test]
    fn mean_divides_by_the_index_count_and_leaves_empty_bags(case in jagged(), seed: u64) {
        let before = draw(Numbers::Wild, seed, case.stride * (case.offsets.len() - 1));
        let mut expected = before.clone();
        for (bag, bounds) in case.offsets.windows(2).enumerate() {
            let count = (bounds[1] - bounds[0]) as f32;
            for value in &mut expected[columns(&case).range(bag)] {
                *value = if count > 0.0 { *value / count } else { *value };
            }
        }
        for kernels in all_kernels() {
            let mut out = before.clone();
            kernels.mean_scale(&case.offsets, columns(&case), &mut out);
            assert_same_bits(&out, &expected, kernels.isa().name());
        }
    }

    #[test]
    fn gather_copies_each_row(case in jagged()) {
        let row = |&start: &usize| case.arena[start..][..case.dim].to_vec();
        let expected: Vec<f32> = case.starts.iter().flat_map(row).collect();
        for kernels in all_kernels() {
            let mut out = vec![7.0; expected.len()];
            kernels.gather_rows(&case.arena, &case.starts, case.dim, &mut out);
            assert_same_bits(&out, &expected, kernels.isa().name());
        }
    }
}

/// The random cases may miss a width; this one visits each of them, in every register shape.
#[test]
fn every_dim_up_to_130_pools_alike() {
    for dim in 1..=130 {
        let arena = draw(Numbers::Wild, dim as u64, 5 * (dim + 1));
        let starts: Vec<_> = [4, 0, 2, 2, 1, 3, 0].iter().map(|row| row * (dim + 1)).collect();
        let offsets = vec![0, 3, 3, 7];
        let case = Jagged { dim, arena, starts, offsets, weights: None, stride: dim + 1, first: 1 };
        let mut expected = vec![0.0; 3 * case.stride];
        pool_plainly(&case, &mut expected);
        for kernels in all_kernels() {
            let mut out = vec![0.0; 3 * case.stride];
            let (rows, bags) = piece(&case, 0, 7);
            kernels.pool_add(rows, bags, columns(&case), &mut out);
            assert_same_bits(&out, &expected, &format!("{} dim {dim}", kernels.isa().name()));
        }
    }
}

/// Arenas beyond the caches take the prefetching path.
#[test]
fn a_far_arena_pools_alike() {
    let dim = 37;
    let row_count = 8_000;
    let arena = draw(Numbers::Tame, 1, row_count * (dim + 1));
    let starts: Vec<_> = (0..200).map(|i| i * 7_919 % row_count * (dim + 1)).collect();
    let offsets: Vec<i64> = (0..=20).map(|bag| bag * 10).collect();
    for weights in [None, Some(draw(Numbers::Tame, 2, 200))] {
        let case = Jagged {
            dim,
            arena: arena.clone(),
            starts: starts.clone(),
            offsets: offsets.clone(),
            weights,
            stride: dim,
            first: 0,
        };
        let mut expected = vec![0.0; 20 * dim];
        pool_plainly(&case, &mut expected);
        let gathered: Vec<f32> =
            starts.iter().flat_map(|&at| arena[at..][..dim].to_vec()).collect();
        for kernels in all_kernels() {
            let mut out = vec![0.0; 20 * dim];
            let (rows, bags) = piece(&case, 0, 200);
            kernels.pool_add(rows, bags, columns(&case), &mut out);
            assert_same_bits(&out, &expected, kernels.isa().name());
            let mut rows = vec![0.0; 200 * dim];
            kernels.gather_rows(&arena, &starts, dim, &mut rows);
            assert_same_bits(&rows, &gathered, kernels.isa().name());
        }
    }
}

#[test]
fn offsets_that_start_inside_a_batch_are_understood() {
    let arena = [1.0, 2.0, 4.0, 8.0];
    let mut out = [0.0; 3];
    let rows = Rows { arena: &arena, starts: &[0, 1, 2, 3], weights: None };
    for kernels in all_kernels() {
        out.fill(0.0);
        kernels.pool_add(rows, BagRange::whole(&[40, 41, 41, 44]), Columns::whole(1), &mut out);
        assert_eq!(out, [1.0, 0.0, 14.0]);
    }
}

#[test]
fn a_row_outside_the_arena_panics_on_every_instruction_set() {
    for kernels in all_kernels() {
        for start in [30, 31, usize::MAX - 8, usize::MAX] {
            let result = std::panic::catch_unwind(|| {
                let mut out = [0.0; 20];
                let rows = Rows { arena: &[0.0; 49], starts: &[start], weights: None };
                kernels.pool_add(rows, BagRange::whole(&[0, 1]), Columns::whole(20), &mut out);
            });
            assert!(result.is_err(), "{} start {start}", kernels.isa().name());
        }
    }
}
