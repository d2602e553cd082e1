//! The comparison computes what the product computes.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test may panic")]

mod common;

use common::{exchanges, plan_of, Batch, TestRows, LIMITS};
use tierbed_core::env::SplitMix64;
use tierbed_exchange::{Exchange, Layout, Sharding, Wants};

fn compare(mut exchange: Exchange, batch: &Batch) {
    let mut rows = TestRows::new(exchange.plan(), exchange.rank());
    let wants = Wants { backward: false, weight_grads: false };
    let mut step = exchange.begin(&batch.bags(), wants).unwrap();
    let width = exchange.pooled_width(exchange.rank()).unwrap();
    let mut local = vec![f32::NAN; step.sample_count() * width];
    for _ in 0..3 {
        let output = exchange.exchange(&mut step, &mut rows).unwrap();
        let one_sided = exchange.output(&output).to_vec();
        exchange.compute_only(&step, &mut rows, &mut local).unwrap();
        exchange.all_to_all(&mut step, &local).unwrap();
        let mut unpacked = vec![f32::NAN; one_sided.len()];
        exchange.unpack(&step, &mut unpacked).unwrap();
        assert_eq!(unpacked, one_sided);
    }
    exchange.close().unwrap();
}

#[test]
fn a_collective_exchange_gives_the_same_output() {
    let plan = plan_of(3, |rows, _| Sharding::Whole { rank: rows as usize % 3 });
    let layout = Layout::new(&plan, LIMITS).unwrap();
    let mut rng = SplitMix64::new(3);
    std::thread::scope(|scope| {
        for (exchange, samples) in exchanges(&plan, &layout, 20_000).into_iter().zip([4, 0, 7]) {
            let batch = Batch::draw(&mut rng, &[40, 7, 100, 40], samples, 4, false);
            scope.spawn(move || compare(exchange, &batch));
        }
    });
}
