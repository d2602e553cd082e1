//! Narrow vectors: rounded once, so the same for any number of ranks, and near to f32.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test may panic")]

mod common;

use common::{cuts, exchanges, plan_of, Batch, TestRows, LIMITS};
use tierbed_core::env::SplitMix64;
use tierbed_core::ErrorKind;
use tierbed_exchange::{Exchange, Layout, Precision, Sharding, Wants};
use tierbed_kernels::Kernels;

const ROW_COUNTS: [u64; 4] = [40, 7, 100, 40];

fn by_rows(ranks: usize, rows: u64) -> Sharding {
    Sharding::Rows { bounds: cuts(ranks, rows as usize).iter().map(|&cut| cut as u64).collect() }
}

/// One step; returns the outputs of all ranks, joined, and the rows of table 0 after it.
fn step(ranks: usize, is_by_rows: bool, outputs: Precision, rows: Precision) -> [Vec<f32>; 2] {
    let whole = |rows: u64| Sharding::Whole { rank: rows as usize % ranks };
    let plan =
        plan_of(ranks, |rows, _| if is_by_rows { by_rows(ranks, rows) } else { whole(rows) });
    let plan = plan.with_precision(outputs, rows).unwrap();
    let layout = Layout::new(&plan, LIMITS).unwrap();
    // Four batches; fewer ranks have more of them each.
    let mut rng = SplitMix64::new(5);
    let parts: Vec<Batch> =
        [5, 0, 9, 2].map(|count| Batch::draw(&mut rng, &ROW_COUNTS, count, 4, false)).into();
    let batches = parts.chunks(4 / ranks).map(Batch::join);
    let work = |mut exchange: Exchange, batch: Batch| {
        let mut rows = TestRows::new(exchange.plan(), exchange.rank());
        let wants = Wants { backward: true, weight_grads: false };
        let output = exchange.forward(&batch.bags(), wants, &mut rows).unwrap();
        let found = exchange.output(&output);
        exchange.backward(output.step, &found, None, &mut rows).unwrap();
        exchange.close().unwrap();
        (found, rows.rows.table(0).to_vec())
    };
    let found: Vec<_> = std::thread::scope(|scope| {
        let ranks = exchanges(&plan, &layout, 20_000).into_iter().zip(batches);
        let threads: Vec<_> =
            ranks.map(|(exchange, own)| scope.spawn(move || work(exchange, own))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let (outputs, rows): (Vec<_>, Vec<_>) = found.into_iter().unzip();
    [outputs.concat(), rows.concat()]
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn narrow_vectors_have_the_same_bits_on_any_number_of_ranks() {
    for is_by_rows in [false, true] {
        for (outputs, rows) in [
            (Precision::F16, Precision::F32),
            (Precision::Bf16, Precision::F16),
            (Precision::F32, Precision::Bf16),
            (Precision::F32, Precision::Int8),
            (Precision::F16, Precision::Int8),
        ] {
            let one = step(1, is_by_rows, outputs, rows);
            for ranks in [2, 4] {
                let many = step(ranks, is_by_rows, outputs, rows);
                let what = format!("{outputs:?} {rows:?} {ranks} ranks");
                assert_eq!(many.map(|of| bits(&of)), one.clone().map(|of| bits(&of)), "{what}");
            }
        }
    }
}

/// The largest distance from f32, over magnitudes of at most `4 * 0.5`.
fn distance(outputs: Precision, rows: Precision) -> f32 {
    let [exact, _] = step(2, true, Precision::F32, Precision::F32);
    let [narrow, _] = step(2, true, outputs, rows);
    assert_eq!(exact.len(), narrow.len());
    exact.iter().zip(&narrow).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

#[test]
fn narrow_vectors_are_as_near_as_documented() {
    // Sums of at most 4 values below 0.5: below 2, so a rounding errs by half a unit in that place.
    let f16 = distance(Precision::F16, Precision::F32);
    assert!(f16 > 0.0 && f16 <= 2.0 / 2048.0, "{f16}");
    let bf16 = distance(Precision::Bf16, Precision::F32);
    assert!(bf16 > f16 && bf16 <= 2.0 / 256.0, "{bf16}");
    // Four roundings of values below 0.5.
    let rows = distance(Precision::F32, Precision::F16);
    assert!(rows > 0.0 && rows <= 4.0 * 0.5 / 2048.0, "{rows}");
    let rows = distance(Precision::F32, Precision::Bf16);
    assert!(rows > 0.0 && rows <= 4.0 * 0.5 / 256.0, "{rows}");
    // Four rows over a range of at most 1, bounds included.
    let rows = distance(Precision::F32, Precision::Int8);
    assert!(rows > 0.0 && rows <= 4.0 * (1.0 / 500.0 + 0.5 / 128.0), "{rows}");
}

#[test]
fn a_vector_is_read_as_it_was_written() {
    let vector = [0.5, -1.25, 3.0, -0.0, 65_504.0];
    for precision in [Precision::F32, Precision::F16] {
        let mut words = [0u32; 5];
        let bytes = &mut bytemuck::cast_slice_mut::<u32, u8>(&mut words)
            [..precision.vector_bytes(vector.len())];
        precision.write(&vector, bytes).unwrap();
        let found = precision.read(Kernels::detect(), bytes, 1, vector.len());
        assert_eq!(bits(&found), bits(&vector));
    }
    let mut halves = [0u16; 2];
    let bytes = bytemuck::cast_slice_mut(&mut halves);
    Precision::F16.write(&[1e6, f32::NEG_INFINITY], bytes).unwrap();
    let found = Precision::F16.read(Kernels::detect(), bytes, 1, 2);
    assert_eq!(found, [f32::INFINITY, f32::NEG_INFINITY]);
}

#[test]
fn what_int8_cannot_carry_is_an_error_and_sums_do_not_travel_in_it() {
    let mut code = [0; 6];
    let error = Precision::Int8.write(&[1.0, f32::NAN], &mut code).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    let plan = plan_of(1, |_, _| Sharding::Mirrored);
    assert!(plan.with_precision(Precision::Int8, Precision::F32).is_err());
    assert!(Precision::by_name("f8").is_err());
    for precision in Precision::ALL {
        assert_eq!(Precision::by_name(precision.name()).unwrap(), precision);
    }
}
