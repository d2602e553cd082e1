//! What does a small training job look up? Tables with an optimizer, and seeded batches.

use tierbed_core::env::SplitMix64;
use tierbed_core::{Bags, InitSpec, OptimizerKind, TableSchema};

/// One batch, owned.
#[derive(Debug, Clone)]
pub struct Batch {
    /// Ids, feature after feature, sample after sample.
    pub indices: Vec<i64>,
    /// Bounds of the bags, `[features * samples + 1]`.
    pub offsets: Vec<i64>,
    /// One per index.
    pub weights: Option<Vec<f32>>,
    /// Number of features.
    pub feature_count: usize,
}

impl Batch {
    /// Draws bags of up to five skewed ids, duplicates and empty bags among them: `samples` of
    /// each feature, whose tables have `row_counts` rows. Weights are from -1 to 1.
    pub fn draw(
        rng: &mut SplitMix64,
        row_counts: impl IntoIterator<Item = u64>,
        samples: usize,
        is_weighted: bool,
    ) -> Self {
        let (mut indices, mut offsets, mut feature_count) = (Vec::new(), vec![0], 0);
        for row_count in row_counts {
            feature_count += 1;
            for _ in 0..samples {
                for _ in 0..rng.below(6) {
                    // Most uses are of few rows.
                    let few = (row_count / 20).max(1);
                    let bound = if rng.below(3) == 0 { row_count } else { few };
                    indices.push(rng.below(bound) as i64);
                }
                offsets.push(indices.len() as i64);
            }
        }
        let weight = |_: &i64| rng.unit_f64() as f32 * 2.0 - 1.0;
        let weights = is_weighted.then(|| indices.iter().map(weight).collect());
        Self { indices, offsets, weights, feature_count }
    }

    /// Returns its bags.
    ///
    /// # Panics
    /// When its parts do not belong together.
    #[must_use]
    #[expect(clippy::expect_used, reason = "a test that panics has failed, as it should")]
    pub fn bags(&self) -> Bags<'_> {
        Bags::new(&self.indices, &self.offsets, self.weights.as_deref(), self.feature_count)
            .expect("a batch that was drawn is one")
    }
}

/// Describes table `t0`, `t1`, ... of a job: dim and rows, drawn from -0.5 to 0.5.
#[must_use]
pub fn trained_table(
    at: usize,
    (dim, row_count): (u32, u64),
    optimizer: OptimizerKind,
    seed: u64,
) -> TableSchema {
    TableSchema {
        name: format!("t{at}"),
        row_count,
        dim,
        optimizer,
        state_init: 0.1,
        init: InitSpec::Uniform { low: -0.5, high: 0.5 },
        seed,
    }
}
