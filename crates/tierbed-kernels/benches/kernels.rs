//! How many nanoseconds does a row cost? One table per kernel, instruction set and dim.
//!
//! Run with `cargo bench -p tierbed-kernels --bench kernels`. Rows are asked for in random order:
//! "near", 8 Ki rows of 512 KiB of records (with the output, a second-level cache of 1 MiB);
//! "far", 256 Ki rows of 512 MiB. Each number is the best of several rounds.

#![allow(clippy::indexing_slicing, reason = "a bench may panic")]

use std::hint::black_box;

use tierbed_core::env::{Clock, SplitMix64, SystemClock};
use tierbed_core::OptimizerKind;
use tierbed_kernels::{
    fill_initial, BagRange, Codec, Codes, Columns, Groups, Hyper, Isa, Kernels, Occurrence,
    Pooling, Prepared, Rows, Upstream,
};

/// Bytes of records and indices of one call.
#[derive(Clone, Copy)]
struct Place {
    name: &'static str,
    bytes: usize,
    indices: usize,
}

const NEAR: Place = Place { name: "near", bytes: 512 << 10, indices: 1 << 13 };
const FAR: Place = Place { name: "far", bytes: 512 << 20, indices: 1 << 18 };

/// Indices of one bag.
const BAG: usize = 16;
/// Rounds per number.
const ROUNDS: usize = 7;

/// Records in one arena and the order in which they are asked for.
struct Table {
    arena: Vec<f32>,
    starts: Vec<usize>,
    dim: usize,
}

impl Table {
    fn new(dim: usize, state_words: usize, place: Place) -> Self {
        let words = dim + state_words + 1;
        let row_count = place.bytes / (4 * words);
        let mut rng = SplitMix64::new(1);
        let start = |_| rng.below(row_count as u64) as usize * words;
        let starts = (0..place.indices).map(start).collect();
        let arena = (0..row_count * words).map(|i| (i % 97) as f32 * 0.01).collect();
        Self { arena, starts, dim }
    }
}

/// Returns nanoseconds per row of the best round.
fn ns_per_row(rows: usize, mut call: impl FnMut()) -> f64 {
    let clock = SystemClock::default();
    let mut best_us = u64::MAX;
    let mut calls = 1;
    for _ in 0..ROUNDS {
        loop {
            let start_us = clock.now_us();
            (0..calls).for_each(|_| call());
            let us = clock.now_us() - start_us;
            if us >= 2_000 {
                best_us = best_us.min(us * 1_000 / calls);
                break;
            }
            calls *= 2;
        }
    }
    best_us as f64 / rows as f64
}

fn pool(kernels: Kernels, table: &Table, weights: Option<&[f32]>) -> f64 {
    let indices = table.starts.len();
    let offsets: Vec<i64> = (0..=indices).step_by(BAG).map(|at| at as i64).collect();
    let mut out = vec![0.0; indices / BAG * table.dim];
    ns_per_row(table.starts.len(), || {
        let rows = Rows { arena: &table.arena, starts: &table.starts, weights };
        kernels.pool_add(rows, BagRange::whole(&offsets), Columns::whole(table.dim), &mut out);
        black_box(&mut out);
    })
}

fn gather(kernels: Kernels, table: &Table) -> f64 {
    let mut out = vec![0.0; table.starts.len() * table.dim];
    ns_per_row(table.starts.len(), || {
        kernels.gather_rows(&table.arena, &table.starts, table.dim, &mut out);
        black_box(&mut out);
    })
}

/// 2 Ki codes out of as many rows as are "near" uncoded, so that codes and output stay near.
fn decode(kernels: Kernels, codec: &Codec, dim: usize) -> f64 {
    let code_bytes = codec.code_bytes(dim);
    let row_count = NEAR.bytes / (4 * dim);
    let mut rng = SplitMix64::new(1);
    let row: Vec<f32> = (0..dim).map(|i| (i % 97) as f32 * 0.01 - 0.3).collect();
    let mut arena = vec![0; row_count * code_bytes];
    for code in arena.chunks_exact_mut(code_bytes) {
        assert!(codec.encode(&row, code).is_ok(), "the row is finite");
    }
    let start = |_| rng.below(row_count as u64) as usize * code_bytes;
    let starts: Vec<usize> = (0..1 << 11).map(start).collect();
    let mut out = vec![0.0; starts.len() * dim];
    ns_per_row(starts.len(), || {
        let codes = Codes { codec, arena: &arena, starts: &starts, weights: None };
        kernels.decode_rows(codes, dim, &mut out);
        black_box(&mut out);
    })
}

/// Two occurrences per row, one call per row.
fn sum_grads(kernels: Kernels, dim: usize) -> f64 {
    let grad = vec![0.5; 512 * dim];
    let upstream = Upstream {
        grad: &grad,
        columns: Columns::whole(dim),
        pooling: Pooling::Sum,
        offsets: &[],
        weights: None,
    };
    let occurrence = |i: u32| Occurrence { bag: i * 7 % 512, index: i };
    let occurrences: Vec<_> = (0..2048).map(occurrence).collect();
    let mut sum = vec![0.0; dim];
    ns_per_row(1024, || {
        for pair in occurrences.chunks_exact(2) {
            let pair = Groups { occurrences: pair, bounds: &[0, 2] };
            kernels.sum_grads_grouped(&upstream, pair, &mut sum);
            black_box(&mut sum);
        }
    })
}

/// One call per row, as the gradients of rows are summed.
fn apply(kernels: Kernels, kind: OptimizerKind, dim: usize, place: Place) -> f64 {
    let words = dim + kind.state_words(dim);
    let mut table = Table::new(dim, kind.state_words(dim), place);
    let step = Prepared::new(kind, &Hyper::default());
    let grad = vec![0.001; dim];
    ns_per_row(table.starts.len(), || {
        for &start in &table.starts {
            kernels.apply(&step, &mut table.arena[start..][..words], &grad);
        }
        black_box(&mut table.arena);
    })
}

/// 64 rows per call, with their gradients.
fn apply_rows(kernels: Kernels, kind: OptimizerKind, dim: usize, place: Place) -> f64 {
    let mut table = Table::new(dim, kind.state_words(dim), place);
    let step = Prepared::new(kind, &Hyper::default());
    let grads = vec![0.001; 64 * dim];
    ns_per_row(table.starts.len(), || {
        for starts in table.starts.chunks_exact(64) {
            kernels.apply_rows(&step, &mut table.arena, starts, &grads);
        }
        black_box(&mut table.arena);
    })
}

fn initial(spec: tierbed_core::InitSpec, dim: usize) -> f64 {
    let mut row = vec![0.0; dim];
    ns_per_row(1024, || {
        for id in 0..1024 {
            fill_initial(&spec, 1, id, &mut row);
            black_box(&mut row);
        }
    })
}

fn main() {
    println!("ns per row, widest instruction set here: {}", Isa::detect().name());
    println!("{:<24} {:>5} {:>8} {:>8} {:>8}", "kernel", "dim", "scalar", "avx2", "avx512");
    let report = |name: &str, dim: usize, measure: &dyn Fn(Kernels) -> f64| {
        let cell = |isa| match Kernels::with_isa(isa) {
            Some(kernels) => format!("{:8.2}", measure(kernels)),
            None => format!("{:>8}", "-"),
        };
        println!("{name:<24} {dim:>5} {}", Isa::ALL.map(cell).join(" "));
    };
    let weights = vec![0.5; FAR.indices];
    for dim in [32, 36, 64] {
        for place in [NEAR, FAR] {
            let table = Table::new(dim, 0, place);
            let weights = &weights[..place.indices];
            let name = |kernel: &str| format!("{kernel} {}", place.name);
            report(&name("pool sum"), dim, &|k| pool(k, &table, None));
            report(&name("pool weighted"), dim, &|k| pool(k, &table, Some(weights)));
            report(&name("gather"), dim, &|k| gather(k, &table));
        }
        for codec in &Codec::FIXED {
            report(&format!("decode {}", codec.name()), dim, &|k| decode(k, codec, dim));
        }
        report("sum_grads 2 per row", dim, &|k| sum_grads(k, dim));
        for kind in OptimizerKind::ALL {
            report(&format!("{kind:?} near"), dim, &|k| apply(k, kind, dim, NEAR));
        }
        let kind = OptimizerKind::Adagrad;
        report("Adagrad near, by 64", dim, &|k| apply_rows(k, kind, dim, NEAR));
        report("Adagrad far", dim, &|k| apply(k, kind, dim, FAR));
        report("Adagrad far, by 64", dim, &|k| apply_rows(k, kind, dim, FAR));
        let uniform = tierbed_core::InitSpec::Uniform { low: -0.1, high: 0.1 };
        let normal = tierbed_core::InitSpec::Normal { mean: 0.0, std: 0.1 };
        println!("{:<24} {dim:>5} {:>8.2}", "initial uniform", initial(uniform, dim));
        println!("{:<24} {dim:>5} {:>8.2}", "initial normal", initial(normal, dim));
    }
}
