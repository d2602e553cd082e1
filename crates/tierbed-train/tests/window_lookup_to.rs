//! Pooling to places gives the bits of pooling into a matrix, whether or not the batch fits.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that panics has failed, as it should"
)]

#[path = "common/window.rs"]
mod common;

use common::{bits, memory_config, small_config, Job};
use tierbed_core::{Bags, OptimizerKind};
use tierbed_kernels::Destination;
use tierbed_train::window::{FeatureLayout, WindowEngine};

/// A matrix after all, to compare: where each vector belongs in the output of the plan.
struct Matrix<'a> {
    words: Vec<f32>,
    plan: &'a FeatureLayout,
    bags: Bags<'a>,
}

impl Destination for Matrix<'_> {
    fn vector(&mut self, feature: usize, at: usize) -> &mut [f32] {
        let first = self.plan.range(&self.bags, feature).start;
        let row = if self.plan.is_pooled() { at } else { first + at };
        &mut self.words[self.plan.features()[feature].columns.range(row)]
    }
}

fn check(mut job: Job) {
    job.batch_size = 256;
    for config in [memory_config(), small_config()] {
        let scratch = tempfile::tempdir().unwrap();
        let mut engine = WindowEngine::open(Some(scratch.path()), &config).unwrap();
        let plan = job.set_up(&mut engine).unwrap();
        for step in 0..3 {
            let batch = job.batch(step);
            let bags = batch.bags();
            let mut expected = vec![0.0; plan.output_len(&bags)];
            engine.lookup(&plan, &bags, &mut expected).unwrap();
            let words = vec![f32::NAN; expected.len()];
            let mut to = Matrix { words, plan: &plan, bags };
            engine.lookup_to(&plan, &bags, &mut to).unwrap();
            assert_eq!(bits(&to.words), bits(&expected), "step {step}");
        }
    }
}

#[test]
fn places_get_the_bits_of_a_matrix() {
    for seed in [1, 2] {
        check(Job::pooled(OptimizerKind::Sgd, seed));
        check(Job::unpooled(OptimizerKind::Sgd, seed));
    }
}
