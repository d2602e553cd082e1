//! Pooling to places anywhere against pooling into a matrix, to the last bit.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test may panic")]

mod common;

use common::{all_kernels, assert_same_bits, draw, jagged, Jagged, Numbers};
use proptest::collection::vec;
use proptest::prelude::*;
use tierbed_kernels::{BagRange, Columns, Destination, PoolFeature, Pooling, Rows};

/// Vectors of `dim`, last one first, as no matrix has them.
struct Backwards {
    words: Vec<f32>,
    dim: usize,
    is_far: bool,
}

impl Destination for Backwards {
    fn is_far(&self) -> bool {
        self.is_far
    }

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
    fn places_get_the_bits_of_the_matrix(
        mut case in jagged(), seed: u64, is_mean: bool, is_far: bool, is_one_hot: bool,
    ) {
        if is_one_hot {
            case.offsets = (0..=case.starts.len() as i64).collect();
        }
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
            let mut to = Backwards { words, dim, is_far };
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
            let words = vec![7.0; gathered.len()];
            let mut to = Backwards { words, dim: case.dim, is_far: true };
            let (pooling, dim) = (Pooling::None, case.dim);
            let of = PoolFeature { feature: 5, offsets: &[], pooling, dim };
            kernels.pool_to(rows(&case), of, &mut to);
            assert_same_bits(&forwards(&to), &gathered, kernels.isa().name());
        }
    }
}

/// Features take turns; each vector is the one that the feature has alone.
struct ByFeature {
    features: Vec<Backwards>,
    finished: Vec<(usize, usize)>,
    is_far: bool,
}

impl Destination for ByFeature {
    fn is_far(&self) -> bool {
        self.is_far
    }

    fn vector(&mut self, feature: usize, at: usize) -> &mut [f32] {
        self.features[feature].vector(5, at)
    }

    fn finish(&mut self, feature: usize, at: usize) {
        self.finished.push((feature, at));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn features_that_take_turns_get_what_each_gets_alone(
        cases in vec(jagged(), 1..4), is_far: bool,
    ) {
        for kernels in all_kernels() {
            let bag_counts: Vec<_> = cases.iter().map(|case| case.offsets.len() - 1).collect();
            let place = |case: &Jagged, bags: usize| {
                Backwards { words: vec![f32::NAN; bags * case.dim], dim: case.dim, is_far: false }
            };
            let places = cases.iter().zip(&bag_counts).map(|(case, &bags)| place(case, bags));
            let features = places.collect();
            let mut to = ByFeature { features, finished: Vec::new(), is_far };
            let mut features = Vec::new();
            for (feature, case) in cases.iter().enumerate() {
                let (offsets, dim) = (case.offsets.as_slice(), case.dim);
                let of = PoolFeature { feature, offsets, pooling: Pooling::Sum, dim };
                features.push((rows(case), of));
            }
            kernels.pool_all_to(&features, &mut to);
            to.finished.sort_unstable();
            let each = bag_counts.iter().enumerate();
            let each = each.flat_map(|(feature, &bags)| (0..bags).map(move |bag| (feature, bag)));
            assert_eq!(to.finished, each.collect::<Vec<_>>());
            for (feature, case) in cases.iter().enumerate() {
                let mut alone = place(case, bag_counts[feature]);
                let (offsets, dim) = (case.offsets.as_slice(), case.dim);
                let of = PoolFeature { feature: 5, offsets, pooling: Pooling::Sum, dim };
                kernels.pool_to(rows(case), of, &mut alone);
                assert_same_bits(&to.features[feature].words, &alone.words, kernels.isa().name());
            }
        }
    }
}
