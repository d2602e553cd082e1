//! Pooling to places anywhere against pooling into a matrix, to the last bit.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test may panic")]

mod common;

use common::{all_kernels, assert_same_bits, draw, jagged, Jagged, Numbers};
use proptest::prelude::*;
use tierbed_kernels::{BagRange, Columns, Destination, PoolFeature, Pooling, Rows};

/// Vectors of `dim`, last one first, as no matrix has them.
struct Backwards {
    words: Vec<f32>,
    dim: usize,
}

impl Destination for Backwards {
    fn vector(&mut self, feature: usize, at: usize) -> &mut [f32] {
        assert_eq!(feature, 5);
        let end = self.words.len() - at * self.dim;
        &mut self.words[end - self.dim..end]
    }
}

fn rows(case: &Jagged) -> Rows<'_> {
    Rows { arena: &case.arena, starts: &case.starts, weights: case.weights.as_deref() }
}

fn forwards(backwards: &Backwards) -> Vec<f32> {
    backwards.words.rchunks(backwards.dim).flatten().copied().collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// What was at a place before, NaN or not, must not show.
    #[test]
    fn places_get_the_bits_of_the_matrix(case in jagged(), seed: u64, is_mean: bool) {
        let pooling = if is_mean { Pooling::Mean } else { Pooling::Sum };
        let (dim, offsets) = (case.dim, case.offsets.as_slice());
        let bag_count = offsets.len() - 1;
        for kernels in all_kernels() {
            let mut matrix = vec![0.0; bag_count * dim];
            let bags = BagRange::whole(offsets);
            kernels.pool_add(rows(&case), bags, Columns::whole(dim), &mut matrix);
            if is_mean {
                kernels.mean_scale(offsets, Columns::whole(dim), &mut matrix);
            }
            let words = draw(Numbers::Wild, seed, bag_count * dim);
            let mut to = Backwards { words, dim };
            let of = PoolFeature { feature: 5, offsets, pooling, dim };
            kernels.pool_to(rows(&case), of, &mut to);
            assert_same_bits(&forwards(&to), &matrix, kernels.isa().name());
        }
    }

    #[test]
    fn without_pooling_every_row_gets_its_place(case in jagged()) {
        for kernels in all_kernels() {
            let mut gathered = vec![0.0; case.starts.len() * case.dim];
            kernels.gather_rows(&case.arena, &case.starts, case.dim, &mut gathered);
            let mut to = Backwards { words: vec![7.0; gathered.len()], dim: case.dim };
            let (pooling, dim) = (Pooling::None, case.dim);
            let of = PoolFeature { feature: 5, offsets: &[], pooling, dim };
            kernels.pool_to(rows(&case), of, &mut to);
            assert_same_bits(&forwards(&to), &gathered, kernels.isa().name());
        }
    }
}
