//! Several collections over one store along a plan: each looks up and steps its part of a batch,
//! and rows have the bits of the same calls in memory.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that panics has failed, as it should"
)]

#[path = "common/auto.rs"]
mod common;

use std::ops::Range;
use std::sync::Arc;

use common::{Batch, Run};
use tierbed_core::env::SplitMix64;
use tierbed_core::{ErrorKind, OptimizerKind, Result, TableId};
use tierbed_io::{Folder, MemoryFolder};
use tierbed_kernels::{FeatureLayout, Pooling};
use tierbed_train::window::update::Grads;
use tierbed_train::{Answer, OnMismatch, Order, OrderConfig, PlanRequest, ShardedEngine};

/// The features of each collection; no two share a table.
const PARTS: [Range<usize>; 3] = [0..3, 3..5, 5..6];

/// Two pooled collections, of which one reads a table twice, and one of sequences.
fn job() -> Run {
    let features = [
        (0, Pooling::Sum),
        (3, Pooling::Mean),
        (0, Pooling::Mean),
        (1, Pooling::Sum),
        (4, Pooling::Sum),
        (2, Pooling::None),
    ];
    Run { features: features.to_vec(), ..Run::pooled(OptimizerKind::Adam) }
}

fn layout(job: &Run, engine: &ShardedEngine, features: &Range<usize>) -> FeatureLayout {
    FeatureLayout::new(engine.engine().schema(), &with_ids(&job.features[features.clone()]))
        .unwrap()
}

fn with_ids(features: &[(u32, Pooling)]) -> Vec<(TableId, Pooling)> {
    features.iter().map(|&(table, pooling)| (TableId(table), pooling)).collect()
}

/// All features, side by side: how they are pooled does not matter.
fn whole(job: &Run, engine: &ShardedEngine) -> FeatureLayout {
    let features = job.features.iter().map(|&(table, _)| (TableId(table), Pooling::Sum));
    FeatureLayout::new(engine.engine().schema(), &features.collect::<Vec<_>>()).unwrap()
}

/// Some features of a batch; the first collection has weights.
fn part_of(batch: &Batch, features: &Range<usize>) -> Batch {
    let samples = (batch.offsets.len() - 1) / batch.feature_count;
    let offsets = &batch.offsets[features.start * samples..=features.end * samples];
    let first = offsets[0];
    let ids = first as usize..offsets[offsets.len() - 1] as usize;
    let weights = batch.weights.as_ref().filter(|_| features.start == 0);
    Batch {
        indices: batch.indices[ids.clone()].to_vec(),
        offsets: offsets.iter().map(|offset| offset - first).collect(),
        weights: weights.map(|weights| weights[ids].to_vec()),
        feature_count: features.len(),
    }
}

/// A batch with one bag per feature.
fn joined(batch: &Batch) -> Batch {
    let offsets = batch.bags().bounds().collect();
    Batch { offsets, indices: batch.indices.clone(), weights: None, ..*batch }
}

fn follow(job: &Run, engine: &mut ShardedEngine) {
    let plan = whole(job, engine);
    let request = PlanRequest { source: "epoch".to_owned(), window_batches_max: 3 };
    if engine.writable().unwrap().follow(&plan, &request).unwrap() == Answer::PlanNeeded {
        engine.writable().unwrap().start_plan(&plan, &request).unwrap();
        for step in 0..job.batches {
            let batch = joined(&job.batch(step));
            engine.writable().unwrap().push_planned(&batch.bags(), true).unwrap();
        }
        engine.writable().unwrap().finish_plan().unwrap();
        let answer = engine.writable().unwrap().follow(&plan, &request).unwrap();
        assert!(matches!(answer, Answer::Following { .. }), "{answer:?}");
    }
}

fn expect(job: &Run, engine: &mut ShardedEngine, batch: &Batch) -> Result<bool> {
    let plan = whole(job, engine);
    engine.single()?.expect_joined(&plan, &joined(batch).bags())
}

/// Ends the batch, stepped or not.
fn end(job: &Run, engine: &mut ShardedEngine, batch: &Batch) -> Result<()> {
    let plan = whole(job, engine);
    match engine.single()?.end_joined()? {
        true => Ok(()),
        false => engine.writable()?.skip(&plan, &joined(batch).bags()),
    }
}

fn lookup(
    job: &Run,
    engine: &mut ShardedEngine,
    batch: &Batch,
    features: &Range<usize>,
    is_training: bool,
) -> Result<Vec<f32>> {
    let (plan, part) = (layout(job, engine, features), part_of(batch, features));
    let mut output = vec![f32::NAN; plan.output_len(&part.bags())];
    engine.engine_mut().lookup(&plan, &part.bags(), &mut output, is_training)?;
    Ok(output)
}

/// Steps some features; returns the gradient of their weights.
fn update(
    job: &Run,
    engine: &mut ShardedEngine,
    batch: &Batch,
    features: &Range<usize>,
    output: &[f32],
) -> Result<Vec<f32>> {
    let (plan, part) = (layout(job, engine, features), part_of(batch, features));
    let grad: Vec<f32> = output.iter().map(|value| value * 0.3 + 0.01).collect();
    let mut of_weights = part.weights.clone().unwrap_or_default();
    let weights = part.weights.is_some().then_some(of_weights.as_mut_slice());
    let grads = Grads { output: &grad, weights };
    engine.writable()?.update(&plan, &part.bags(), grads, None).map(|()| of_weights)
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Looks all parts up, and steps those that `chosen` says, in that order.
fn step(
    job: &Run,
    engine: &mut ShardedEngine,
    batch: &Batch,
    chosen: &[usize],
) -> Result<Vec<Vec<u32>>> {
    let mut outputs = Vec::new();
    for part in &PARTS {
        let output = lookup(job, engine, batch, part, true)?;
        assert!(bits(&lookup(job, engine, batch, part, false)?) == bits(&output));
        outputs.push(output);
    }
    let mut found: Vec<Vec<u32>> = outputs.iter().map(|output| bits(output)).collect();
    for &part in chosen {
        found.push(bits(&update(job, engine, batch, &PARTS[part], &outputs[part])?));
    }
    Ok(found)
}

fn memory_folder() -> Arc<dyn Folder> {
    Arc::new(MemoryFolder::new())
}

/// Which parts a step steps, and in which order: all of them, or some, or none.
fn chosen(rng: &mut SplitMix64) -> Vec<usize> {
    let mut parts: Vec<usize> = (0..PARTS.len()).collect();
    parts.rotate_left(rng.below(3) as usize);
    let count = [3, 3, 3, 2, 1, 0][rng.below(6) as usize];
    parts.truncate(count);
    parts
}

#[test]
fn parts_stepped_in_any_order_have_the_bits_of_memory() {
    let (job, folder) = (job(), memory_folder());
    let config = job.config(Order::Forward, None);
    let mut oracle = job.oracle();
    let mut engine = job.open(Some(folder.clone()), &config).unwrap();
    follow(&job, &mut engine);
    let mut rng = SplitMix64::new(3);
    for at in 0..40 {
        let batch = job.batch(at);
        let chosen = chosen(&mut rng);
        let expected = step(&job, &mut oracle, &batch, &chosen).unwrap();
        assert!(expect(&job, &mut engine, &batch).unwrap());
        assert!(step(&job, &mut engine, &batch, &chosen).unwrap() == expected, "step {at}");
        if at % 7 == 3 {
            // What concerns all rows ends a batch that was stepped in part.
            assert!(job.records(&mut engine).unwrap() == job.records(&mut oracle).unwrap());
        }
        end_unless_over(&job, &mut engine, &batch, at);
        assert_eq!(engine.engine().position().unwrap(), place(&job, at + 1), "step {at}");
        if at % 9 == 8 {
            job.checkpoint(&mut engine, at + 1).unwrap();
            drop(engine);
            engine = job.open(Some(folder.clone()), &config).unwrap();
            follow(&job, &mut engine);
        }
    }
    assert!(job.records(&mut engine).unwrap() == job.records(&mut oracle).unwrap());
}

fn place(job: &Run, steps: u64) -> (u64, u64) {
    (steps / job.batches, steps % job.batches)
}

// As a look-ahead does: a batch that is where it was is passed, or ended.
fn end_unless_over(job: &Run, engine: &mut ShardedEngine, batch: &Batch, at: u64) {
    if engine.engine().position() == Some(place(job, at)) {
        end(job, engine, batch).unwrap();
    }
}

#[test]
fn a_checkpoint_between_two_steps_ends_the_batch() {
    let (job, folder) = (job(), memory_folder());
    let config = job.config(Order::Forward, None);
    let (mut oracle, mut engine) = (job.oracle(), job.open(Some(folder.clone()), &config).unwrap());
    follow(&job, &mut engine);
    let batch = job.batch(0);
    assert!(expect(&job, &mut engine, &batch).unwrap());
    job.checkpoint(&mut engine, 0).unwrap();
    assert_eq!(engine.engine().position(), Some((0, 0)), "no step was made");
    step(&job, &mut oracle, &batch, &[1]).unwrap();
    step(&job, &mut engine, &batch, &[1]).unwrap();
    job.checkpoint(&mut engine, 1).unwrap();
    assert_eq!(engine.engine().position(), Some((0, 1)));
    let late = update(&job, &mut engine, &batch, &PARTS[0], &[0.0; 10_000]);
    assert_eq!(late.unwrap_err().kind(), ErrorKind::Invalid);
    drop(engine);
    let mut engine = job.open(Some(folder), &config).unwrap();
    assert!(job.records(&mut engine).unwrap() == job.records(&mut oracle).unwrap());
}

#[test]
fn what_is_no_part_of_the_batch_is_refused_and_changes_nothing() {
    let job = job();
    let mut engine = job.open(Some(memory_folder()), &job.config(Order::Forward, None)).unwrap();
    follow(&job, &mut engine);
    let (batch, other) = (job.batch(0), job.batch(1));
    let wrong = expect(&job, &mut engine, &other).unwrap_err();
    assert_eq!(wrong.kind(), ErrorKind::Invalid);
    assert!(expect(&job, &mut engine, &batch).unwrap());
    let before = job.records(&mut engine).unwrap();
    assert!(lookup(&job, &mut engine, &other, &PARTS[0], true).is_err());
    // The same ids, of which one is in another bag.
    let mut moved = part_of(&batch, &PARTS[0]);
    let samples = (moved.offsets.len() - 1) / 3;
    moved.offsets[samples] -= 1;
    let plan = layout(&job, &engine, &PARTS[0]);
    let mut output = vec![0.0; plan.output_len(&moved.bags())];
    assert!(engine.engine_mut().lookup(&plan, &moved.bags(), &mut output, true).is_err());
    // Another id in the same bag.
    let mut changed = part_of(&batch, &PARTS[0]);
    changed.indices[0] = (changed.indices[0] + 1) % 300;
    assert!(engine.engine_mut().lookup(&plan, &changed.bags(), &mut output, true).is_err());
    let grads = Grads { output: &output, weights: None };
    assert!(engine.writable().unwrap().update(&plan, &changed.bags(), grads, None).is_err());
    // Two features of the same collection, as if they were another's.
    let plan = layout(&job, &engine, &(1..3));
    let part = part_of(&batch, &(1..3));
    let mut output = vec![0.0; plan.output_len(&part.bags())];
    engine.engine_mut().lookup(&plan, &part.bags(), &mut output, true).unwrap();
    assert!(job.records(&mut engine).unwrap() == before);
    let output = lookup(&job, &mut engine, &batch, &PARTS[0], true).unwrap();
    update(&job, &mut engine, &batch, &PARTS[0], &output).unwrap();
    let again = update(&job, &mut engine, &batch, &PARTS[0], &output).unwrap_err();
    assert_eq!(again.kind(), ErrorKind::Invalid);
}

#[test]
fn rows_leave_the_plan_in_the_middle_of_a_batch() {
    let job = job();
    let config =
        OrderConfig { on_mismatch: Some(OnMismatch::Fallback), ..job.config(Order::Auto, None) };
    let path = tempfile::tempdir().unwrap();
    let folder: Arc<dyn Folder> = Arc::new(tierbed_io::FsFolder::create(path.path()).unwrap());
    let (mut oracle, mut engine) = (job.oracle(), job.open(Some(folder), &config).unwrap());
    follow(&job, &mut engine);
    for at in 0..5 {
        let batch = job.batch(at);
        let expected = step(&job, &mut oracle, &batch, &[0, 1, 2]).unwrap();
        assert!(expect(&job, &mut engine, &batch).unwrap());
        assert!(step(&job, &mut engine, &batch, &[0, 1, 2]).unwrap() == expected);
    }
    let (batch, other) = (job.batch(5), job.batch(9));
    assert!(expect(&job, &mut engine, &batch).unwrap());
    for engine in [&mut oracle, &mut engine] {
        step(&job, engine, &batch, &[2]).unwrap();
        // A second step of the same collection.
        let output = lookup(&job, engine, &other, &PARTS[2], true).unwrap();
        update(&job, engine, &other, &PARTS[2], &output).unwrap();
    }
    assert_eq!(engine.engine().position(), None, "it trains by window");
    assert!(!expect(&job, &mut engine, &other).unwrap());
    for at in 6..20 {
        let expected = step(&job, &mut oracle, &job.batch(at), &[1, 0]).unwrap();
        assert!(step(&job, &mut engine, &job.batch(at), &[1, 0]).unwrap() == expected);
    }
    assert!(job.records(&mut engine).unwrap() == job.records(&mut oracle).unwrap());
}
