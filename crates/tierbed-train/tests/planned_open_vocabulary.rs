//! Raw ids of an open vocabulary, translated in the pre-pass, train along a plan to the bits of
//! training on the raw ids themselves.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "a test that panics has failed, as it should"
)]

#[path = "common/planned.rs"]
mod common;

use common::{bits, memory_folder, smallest_config, Batch, Job};
use tierbed_core::{Bags, OptimizerKind, TableId};
use tierbed_kernels::{FeatureLayout, Pooling};
use tierbed_train::planned::{EpochPlan, Grads, PlanBuilder, PlanOptions};
use tierbed_train::window::{Eviction, Policy, Translate, WindowConfig, WindowEngine};

const BATCHES: u64 = 60;

fn gradient(output: &[f32]) -> Vec<f32> {
    output.iter().map(|value| value * 0.3 + 0.01).collect()
}

fn direct_step(
    engine: &mut WindowEngine,
    features: &FeatureLayout,
    (rows, batch): (&[i64], &Batch),
) -> Vec<u32> {
    let bags = Bags::new(rows, &batch.offsets, batch.weights.as_deref(), 2).unwrap();
    let mut output = vec![0.0; features.output_len(&bags)];
    engine.lookup(features, &bags, &mut output).unwrap();
    let grads = tierbed_train::window::update::Grads { output: &gradient(&output), weights: None };
    engine.update(features, &bags, grads).unwrap();
    bits(&output)
}

#[test]
fn ids_translated_in_the_pre_pass_train_to_the_same_bits() {
    for (seed, admit_after) in [(1, 1), (2, 3)] {
        // Ids far apart and of both signs; table 0 is open, with 2,000 different ids.
        let job = Job {
            tables: vec![(9, 2000)],
            features: vec![(0, Pooling::Sum), (0, Pooling::Mean)],
            batches: BATCHES,
            ..Job::pooled(OptimizerKind::Adam, seed)
        };
        let raw_batch = |step: u64| {
            let mut batch = job.batch(step);
            for id in &mut batch.indices {
                *id = (*id - 1000).wrapping_mul(-7_046_029_254_386_353_131);
            }
            batch
        };
        let policy = Policy { admit_after, eviction: Eviction::Never };
        let open = |bytes| {
            let mut engine =
                WindowEngine::open_in(Some(memory_folder()), &WindowConfig::new(bytes)).unwrap();
            let table = engine.add_open_table(job.table(0), policy).unwrap();
            engine.set_hyper(table, job.hyper(0)).unwrap();
            engine
        };
        let features = job.features();
        let translate = |engine: &mut WindowEngine, step| {
            let batch = raw_batch(step);
            let mut rows = vec![0; batch.indices.len()];
            engine
                .translate(&features, &batch.bags(), Translate::Train { now: 0 }, &mut rows)
                .unwrap();
            (rows, batch)
        };

        // Training on raw ids, one batch after the other.
        let mut direct = open(1 << 20);
        let outputs: Vec<Vec<u32>> = (0..BATCHES)
            .map(|step| {
                let (rows, batch) = translate(&mut direct, step);
                direct_step(&mut direct, &features, (&rows, &batch))
            })
            .collect();

        let mut prepass = open(1 << 20);
        let translated: Vec<_> = (0..BATCHES).map(|step| translate(&mut prepass, step)).collect();
        let folder = memory_folder();
        let options = PlanOptions { window_batches_max: 7, ..PlanOptions::default() };
        let shape = job.shape();
        let mut builder = PlanBuilder::new(folder.clone(), "plan", shape, "open", options).unwrap();
        for (rows, batch) in &translated {
            builder.push(&Bags::new(rows, &batch.offsets, None, 2).unwrap()).unwrap();
        }
        builder.finish().unwrap();
        let plan = EpochPlan::open(&*folder, "plan").unwrap();
        let config = smallest_config(&job, &plan);
        let mut forward = job.open(memory_folder(), &plan, &config).unwrap();
        for ((rows, batch), expected) in translated.iter().zip(&outputs) {
            let bags = Bags::new(rows, &batch.offsets, batch.weights.as_deref(), 2).unwrap();
            let mut output = vec![0.0; FeatureLayout::output_len(&features, &bags)];
            forward.lookup(&features, &bags, &mut output).unwrap();
            assert_eq!(&bits(&output), expected, "seed {seed}");
            let grads = Grads { output: &gradient(&output), weights: None };
            forward.update(&features, &bags, grads, None).unwrap();
        }
        // The open table is as long as it needs to be.
        let rows = direct.vocabulary(TableId(0)).unwrap().next_row;
        let used = Job { tables: vec![(9, rows)], ..job.clone() };
        let found = used.records(&mut forward).unwrap();
        assert!(found == used.oracle_records(&mut direct));
        assert!(rows > 100, "{rows}");
    }
}
