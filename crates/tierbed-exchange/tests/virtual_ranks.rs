//! Ranks as threads against one process: outputs, rows and gradients of weights, to the last bit.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test may panic")]

mod common;

use std::sync::Arc;

use common::rail::{Network, Rail};
use common::{cuts, exchanges_of_nodes, plan_of, Batch, TestRows};
use tierbed_core::env::SplitMix64;
use tierbed_exchange::{Exchange, ExchangePlan, Sharding, Wants};

const STEPS: usize = 4;
/// Rows of each feature's table.
const ROW_COUNTS: [u64; 4] = [40, 7, 100, 40];

/// What one rank saw and holds in the end.
struct Seen {
    outputs: Vec<Vec<f32>>,
    weight_grads: Vec<Vec<f32>>,
    rows: TestRows,
}

fn upstream(output: &[f32], step: usize) -> Vec<f32> {
    output.iter().map(|value| value * 0.5 + step as f32 * 0.25).collect()
}

/// How ranks train.
#[derive(Debug, Clone, Copy)]
struct How {
    nodes: usize,
    parts: usize,
    /// Batches that are announced before they are looked up.
    window: usize,
    wants_weight_grads: bool,
}

const ONE_NODE: How = How { nodes: 1, parts: 1, window: 0, wants_weight_grads: false };

fn train(mut exchange: Exchange, rail: &Rail, batches: &[Batch], how: How) -> Seen {
    let rows = TestRows::new(exchange.plan(), exchange.rank());
    let mut seen = Seen { outputs: Vec::new(), weight_grads: Vec::new(), rows };
    let wants = Wants { backward: true, weight_grads: how.wants_weight_grads };
    for (step, batch) in batches.iter().enumerate() {
        if how.window > 0 && step % how.window == 0 {
            let coming = &batches[step..(step + how.window).min(batches.len())];
            coming.iter().for_each(|batch| rail.announce(&mut exchange, batch));
        }
        let output = rail.forward(&mut exchange, batch, wants, how.parts, &mut seen.rows).unwrap();
        assert_eq!(output.sample_count, batch.samples());
        let found = exchange.output(&output).to_vec();
        let grad = upstream(&found, step);
        let mut of_weights = vec![f32::NAN; batch.indices.len()];
        let place = how.wants_weight_grads.then_some(of_weights.as_mut_slice());
        rail.backward(&mut exchange, output.step, &grad, place, &mut seen.rows).unwrap();
        seen.outputs.push(found);
        seen.weight_grads.push(of_weights);
    }
    exchange.close().unwrap();
    seen
}

fn run(plan: &ExchangePlan, batches: &[Vec<Batch>], how: How) -> Vec<Seen> {
    let network = Arc::new(Network::default());
    std::thread::scope(|scope| {
        let ranks = exchanges_of_nodes(plan, how.nodes).into_iter().zip(batches);
        let threads: Vec<_> = ranks
            .map(|(exchange, own)| {
                let rail = Rail::new(&network, &exchange);
                scope.spawn(move || train(exchange, &rail, own, how))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Gradients of weights in the order of the joined batch.
fn join_weight_grads(parts: &[Batch], grads: &[&[f32]]) -> Vec<f32> {
    let mut joined = Vec::new();
    for feature in 0..parts[0].features {
        for (part, grads) in parts.iter().zip(grads) {
            let offsets = part.bags().feature_offsets(feature);
            joined.extend(&grads[offsets[0] as usize..offsets[offsets.len() - 1] as usize]);
        }
    }
    joined
}

fn check(name: &str, sharding: impl Fn(usize, u64, usize) -> Sharding, is_weighted: bool) {
    for ranks in [1, 2, 4] {
        let mut rng = SplitMix64::new(ranks as u64);
        // Uneven, and one rank without samples.
        let counts = [5, 0, 9, 2];
        let batches: Vec<Vec<Batch>> = (0..ranks)
            .map(|rank| {
                let draw = |step: usize| {
                    let samples = counts[(rank + step) % 4];
                    Batch::draw(&mut rng, &ROW_COUNTS, samples, 4, is_weighted)
                };
                (0..STEPS).map(draw).collect()
            })
            .collect();
        let plan = plan_of(ranks, |rows, dim| sharding(ranks, rows, dim));
        let wants = is_weighted && !plan.has_columns();
        let of_step =
            |step: usize| -> Vec<Batch> { batches.iter().map(|own| own[step].clone()).collect() };
        let joined: Vec<_> = (0..STEPS).map(|step| Batch::join(&of_step(step))).collect();
        let one = plan_of(1, |_, _| Sharding::Whole { rank: 0 });
        let expected = run(&one, &[joined], How { wants_weight_grads: wants, ..ONE_NODE });
        for how in ways(ranks, wants) {
            let found = run(&plan, &batches, how);
            compare(&plan, &batches, &found, &expected[0], (&format!("{name} {how:?}"), wants));
        }
    }
}

/// All ways of `ranks` ranks: nodes of one, of two and of all; in parts; announced.
fn ways(ranks: usize, wants_weight_grads: bool) -> Vec<How> {
    let nodes = [1, 2, 4].into_iter().filter(|nodes| nodes <= &ranks);
    let how = |nodes| {
        [(1, 0), (3, 0), (1, 3)].map(|(parts, window)| How {
            nodes,
            parts,
            window,
            wants_weight_grads,
        })
    };
    nodes.flat_map(how).collect()
}

fn compare(
    plan: &ExchangePlan,
    batches: &[Vec<Batch>],
    found: &[Seen],
    expected: &Seen,
    (name, wants): (&str, bool),
) {
    let of_step =
        |step: usize| -> Vec<Batch> { batches.iter().map(|own| own[step].clone()).collect() };
    for step in 0..STEPS {
        let whole: Vec<f32> = found.iter().flat_map(|seen| seen.outputs[step].clone()).collect();
        let what = format!("{name}, step {step}");
        assert_eq!(bits(&whole), bits(&expected.outputs[step]), "output of {what}");
        if wants {
            let parts: Vec<&[f32]> =
                found.iter().map(|seen| seen.weight_grads[step].as_slice()).collect();
            let joined = join_weight_grads(&of_step(step), &parts);
            assert_eq!(bits(&joined), bits(&expected.weight_grads[step]), "{what}");
        }
    }
    for (rank, found) in found.iter().enumerate() {
        check_rows(plan, &found.rows, &expected.rows, rank);
    }
}

fn check_rows(plan: &ExchangePlan, found: &TestRows, expected: &TestRows, rank: usize) {
    for member in plan.groups(rank).iter().flat_map(|group| &group.members) {
        let dim = plan.tables()[member.table].dim;
        let held = found.rows.table(member.table).chunks_exact(member.dim);
        let numbers = member.rows.first()..member.rows.end();
        for (row, held) in numbers.zip(held).filter(|(row, _)| member.rows.contains(*row as i64)) {
            let start = row as usize * dim + member.first_column;
            let whole = &expected.rows.table(member.table)[start..start + member.dim];
            assert_eq!(bits(held), bits(whole), "rank {rank} row {row}");
        }
    }
}

#[test]
fn whole_tables_train_as_in_one_process() {
    for is_weighted in [false, true] {
        let holder = |ranks: usize, rows: u64| Sharding::Whole { rank: rows as usize % ranks };
        check("whole", |ranks, rows, _| holder(ranks, rows), is_weighted);
    }
}

#[test]
fn tables_divided_by_rows_train_as_in_one_process() {
    for is_weighted in [false, true] {
        let bounds =
            |ranks, rows| cuts(ranks, rows as usize).iter().map(|&cut| cut as u64).collect();
        check("rows", |ranks, rows, _| Sharding::Rows { bounds: bounds(ranks, rows) }, is_weighted);
    }
}

#[test]
fn tables_divided_by_blocks_of_rows_train_as_in_one_process() {
    for is_weighted in [false, true] {
        for block_rows in [1, 3] {
            check("blocks", |_, _, _| Sharding::Blocks { block_rows }, is_weighted);
        }
    }
}

#[test]
fn tables_divided_by_columns_train_as_in_one_process() {
    for is_weighted in [false, true] {
        let sharding = |ranks, _, dim| Sharding::Columns { bounds: cuts(ranks, dim) };
        check("columns", sharding, is_weighted);
    }
}

#[test]
fn mirrored_tables_train_as_in_one_process() {
    for is_weighted in [false, true] {
        check("mirrored", |_, _, _| Sharding::Mirrored, is_weighted);
    }
}

#[test]
fn tables_divided_in_different_ways_train_together() {
    let sharding = |ranks: usize, rows: u64, dim: usize| match rows {
        7 => Sharding::Mirrored,
        40 => Sharding::Columns { bounds: cuts(ranks, dim) },
        _ => Sharding::Whole { rank: ranks - 1 },
    };
    check("mixed", sharding, false);
    let sharding = |ranks: usize, rows: u64, _: usize| match rows {
        7 => Sharding::Mirrored,
        40 => Sharding::Rows { bounds: cuts(ranks, 40).iter().map(|&cut| cut as u64).collect() },
        _ => Sharding::Whole { rank: ranks - 1 },
    };
    for is_weighted in [false, true] {
        check("mixed rows", sharding, is_weighted);
    }
}
