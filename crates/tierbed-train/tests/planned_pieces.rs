//! A planned batch that is looked up and stepped piece by piece has the bits of the window engine,
//! which does the same pieces; a batch stepped in part is never kept.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that panics has failed, as it should"
)]

#[path = "common/planned.rs"]
mod common;

use std::sync::Arc;

use common::{memory_folder, smallest_config, Batch, Job};
use tierbed_core::{Bags, ErrorKind, OptimizerKind, TableId};
use tierbed_io::{Folder, MemoryFolder};
use tierbed_kernels::{Destination, FeatureLayout, Grads, Pooling};
use tierbed_train::planned::{
    EpochPlan, Piece, PlanBuilder, PlanOptions, PlanShape, PlannedConfig, PlannedEngine,
};
use tierbed_train::window::WindowEngine;

/// Features of the job by piece: each table in one of them.
const PIECES: [&[usize]; 3] = [&[0, 2], &[1, 3, 5], &[4, 6]];

/// A batch of the job, whole and in pieces.
struct InPieces {
    /// One bag per feature, piece after piece.
    whole: Batch,
    pieces: Vec<Batch>,
}

struct Matrix {
    values: Vec<f32>,
    starts: Vec<usize>,
    dims: Vec<usize>,
    width: usize,
}

impl Matrix {
    fn new(layout: &FeatureLayout, bags: &Bags<'_>) -> Self {
        let columns = |at: usize| layout.features()[at].columns;
        let count = layout.features().len();
        Self {
            values: vec![f32::NAN; layout.output_len(bags)],
            starts: (0..count).map(|at| columns(at).first).collect(),
            dims: (0..count).map(|at| columns(at).dim).collect(),
            width: layout.output_dim(),
        }
    }
}

impl Destination for Matrix {
    fn vector(&mut self, feature: usize, at: usize) -> &mut [f32] {
        let first = at * self.width + self.starts[feature];
        &mut self.values[first..first + self.dims[feature]]
    }
}

fn layout_of(job: &Job, features: &[usize], pooling: Option<Pooling>) -> FeatureLayout {
    let of = |&at: &usize| {
        let (table, own) = job.features[at];
        (TableId(table as u32), pooling.unwrap_or(own))
    };
    FeatureLayout::new(&job.schema(), &features.iter().map(of).collect::<Vec<_>>()).unwrap()
}

/// Some features and samples of a batch.
fn select(batch: &Batch, features: &[usize], samples: std::ops::Range<usize>) -> Batch {
    let bags = batch.bags();
    let mut own = Batch {
        indices: Vec::new(),
        offsets: vec![0],
        weights: batch.weights.as_ref().map(|_| Vec::new()),
        ..batch.clone()
    };
    own.feature_count = features.len();
    for &feature in features {
        for bounds in bags.feature_offsets(feature)[samples.start..=samples.end].windows(2) {
            let range = bounds[0] as usize..bounds[1] as usize;
            own.indices.extend(&batch.indices[range.clone()]);
            if let (Some(to), Some(from)) = (&mut own.weights, &batch.weights) {
                to.extend(&from[range]);
            }
            own.offsets.push(own.indices.len() as i64);
        }
    }
    own
}

impl InPieces {
    fn of(job: &Job, step: u64) -> Self {
        let batch = job.batch(step);
        let pieces = PIECES.map(|features| select(&batch, features, 0..job.batch_size)).to_vec();
        let mut whole = Batch { indices: Vec::new(), offsets: vec![0], weights: None, ..batch };
        whole.feature_count = PIECES.concat().len();
        for (piece, features) in pieces.iter().zip(PIECES) {
            for at in 0..features.len() {
                let bounds = piece.bags().feature_offsets(at).to_vec();
                let range = bounds[0] as usize..bounds[job.batch_size] as usize;
                whole.indices.extend(&piece.indices[range]);
                whole.offsets.push(whole.indices.len() as i64);
            }
        }
        Self { whole, pieces }
    }
}

fn plan_of(job: &Job) -> EpochPlan {
    let folder: Arc<dyn Folder> = Arc::new(MemoryFolder::new());
    let tables: Vec<_> =
        PIECES.concat().iter().map(|&at| TableId(job.features[at].0 as u32)).collect();
    let shape = PlanShape::new(&job.schema(), &tables).unwrap();
    let options = PlanOptions { window_batches_max: 3, ..PlanOptions::default() };
    let mut builder = PlanBuilder::new(folder.clone(), "plan", shape, "pieces", options).unwrap();
    for step in 0..job.batches {
        builder.push(&InPieces::of(job, step).whole.bags()).unwrap();
    }
    builder.finish().unwrap();
    EpochPlan::open(&*folder, "plan").unwrap()
}

fn first_feature(piece: usize) -> usize {
    PIECES[..piece].iter().map(|features| features.len()).sum()
}

fn gradient(output: &[f32]) -> Vec<f32> {
    output.iter().map(|value| value * 0.25 + 0.0625).collect()
}

/// Looks up and steps all pieces of batch `step` in both engines, and compares.
fn step_both(job: &Job, engine: &mut PlannedEngine, oracle: &mut WindowEngine, step: u64) {
    let batch = InPieces::of(job, step);
    let joined = layout_of(job, &PIECES.concat(), Some(Pooling::Sum));
    engine.prepare(&joined, &batch.whole.bags()).unwrap();
    let mut outputs = Vec::new();
    for (at, features) in PIECES.iter().enumerate() {
        let layout = layout_of(job, features, None);
        // Parts first, as of ranks that begin with some samples.
        let whole = 0..job.batch_size;
        for samples in [0..3, 3..job.batch_size, 2..2, whole] {
            let own = select(&job.batch(step), features, samples);
            let bags = own.bags();
            let mut found = Matrix::new(&layout, &bags);
            let first = first_feature(at);
            let piece = Piece {
                batch: Some(&batch.whole.indices),
                first_feature: first,
                layout: &layout,
                bags: &bags,
            };
            engine.lookup_piece(piece, &mut found).unwrap();
            let mut expected = vec![0.0; layout.output_len(&bags)];
            oracle.lookup(&layout, &bags, &mut expected).unwrap();
            assert!(found.values == expected, "piece {at} of step {step}");
            if bags.batch_size() == job.batch_size {
                outputs.push(found.values);
            }
        }
    }
    // As a backward of its own: the batch is expected again.
    engine.prepare(&joined, &batch.whole.bags()).unwrap();
    for (at, (own, output)) in batch.pieces.iter().zip(&outputs).enumerate() {
        let layout = layout_of(job, PIECES[at], None);
        let (bags, grad) = (own.bags(), gradient(output));
        let mut weights = [vec![0.0; own.indices.len()], vec![0.0; own.indices.len()]];
        let [found, expected] = &mut weights;
        let is_weighted = own.weights.is_some();
        let piece = Piece {
            // Whole features were compared before, or are compared here.
            batch: (at % 2 == 0).then_some(batch.whole.indices.as_slice()),
            first_feature: first_feature(at),
            layout: &layout,
            bags: &bags,
        };
        let place = is_weighted.then_some(found.as_mut_slice());
        engine.update_piece(piece, Grads { output: &grad, weights: place }).unwrap();
        let place = is_weighted.then_some(expected.as_mut_slice());
        oracle.update(&layout, &bags, Grads { output: &grad, weights: place }).unwrap();
        assert!(found == expected, "gradients of weights, piece {at} of step {step}");
    }
    engine.finish_pieces().unwrap();
}

fn open(job: &Job) -> (PlannedEngine, WindowEngine, PlannedConfig) {
    let plan = plan_of(job);
    let config = smallest_config(job, &plan);
    (job.open(memory_folder(), &plan, &config).unwrap(), job.open_oracle(), config)
}

#[test]
fn pieces_have_the_bits_of_the_window_engine() {
    for (seed, optimizer) in OptimizerKind::ALL.into_iter().enumerate() {
        let job = Job::pooled(optimizer, seed as u64);
        let (mut engine, mut oracle, _) = open(&job);
        for step in 0..2 * job.batches + 5 {
            step_both(&job, &mut engine, &mut oracle, step);
        }
        assert_eq!(engine.stats().step_count, 2 * job.batches + 5);
        assert!(job.records(&mut engine).unwrap() == job.oracle_records(&mut oracle));
    }
}

#[test]
fn a_batch_that_is_stepped_in_part_is_never_kept() {
    let job = Job::pooled(OptimizerKind::Adam, 3);
    let (mut engine, mut oracle, _) = open(&job);
    step_both(&job, &mut engine, &mut oracle, 0);
    let batch = InPieces::of(&job, 1);
    let joined = layout_of(&job, &PIECES.concat(), Some(Pooling::Sum));
    engine.prepare(&joined, &batch.whole.bags()).unwrap();
    let layout = layout_of(&job, PIECES[0], None);
    let bags = batch.pieces[0].bags();
    let piece =
        Piece { batch: Some(&batch.whole.indices), first_feature: 0, layout: &layout, bags: &bags };
    let grad = vec![0.5; layout.output_len(&bags)];
    engine.update_piece(piece, Grads { output: &grad, weights: None }).unwrap();
    // The other pieces never come.
    let error = engine.checkpoint("half", &[]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Poisoned, "{error}");
    let error = engine.prepare(&joined, &batch.whole.bags()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Poisoned, "{error}");
}

#[test]
fn pieces_of_no_batch_and_of_other_batches_are_refused() {
    let job = Job::pooled(OptimizerKind::Sgd, 5);
    let (mut engine, mut oracle, _) = open(&job);
    let layout = layout_of(&job, PIECES[1], None);
    let joined = layout_of(&job, &PIECES.concat(), Some(Pooling::Sum));
    let (batch, other) = (InPieces::of(&job, 0), InPieces::of(&job, 1));
    let bags = batch.pieces[1].bags();
    let first_feature = first_feature(1);
    let piece =
        Piece { batch: Some(&batch.whole.indices), first_feature, layout: &layout, bags: &bags };
    let grad = vec![0.5; layout.output_len(&bags)];
    let grads = || Grads { output: &grad, weights: None };
    let mut matrix = Matrix::new(&layout, &bags);

    // Nothing was expected.
    let error = engine.lookup_piece(piece, &mut matrix).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    assert_eq!(engine.update_piece(piece, grads()).unwrap_err().kind(), ErrorKind::Invalid);
    assert_eq!(engine.finish_pieces().unwrap_err().kind(), ErrorKind::Invalid);
    // Another batch than the planned one.
    let error = engine.prepare(&joined, &other.whole.bags()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");

    engine.prepare(&joined, &batch.whole.bags()).unwrap();
    // A piece behind the last feature, ids that the batch has not, and a step of some ids only.
    let beyond = Piece { first_feature: 5, ..piece };
    assert!(engine.lookup_piece(beyond, &mut matrix).is_err());
    let mut foreign = batch.pieces[1].clone();
    foreign.indices[0] = (foreign.indices[0] + 1) % 40;
    let foreign_bags = foreign.bags();
    assert!(engine.update_piece(Piece { bags: &foreign_bags, ..piece }, grads()).is_err());
    let short =
        Piece { batch: None, bags: &Bags { indices: &[], offsets: &[0, 0], ..bags }, ..piece };
    assert!(engine.lookup_piece(short, &mut matrix).is_err());
    assert!(engine.update_piece(short, grads()).is_err());
    // Nothing was stepped by any of them.
    step_both(&job, &mut engine, &mut oracle, 0);
    assert!(job.records(&mut engine).unwrap() == job.oracle_records(&mut oracle));
}
