//! A consumer works on one part of a batch while rows of the next are still on a slow disk.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test may panic")]

mod common;

use std::sync::mpsc::{channel, Receiver, Sender};
use std::time::Duration;

use common::{cuts, exchanges, plan_of, Batch, TestRows, LIMITS};
use tierbed_core::env::SplitMix64;
use tierbed_core::{Bags, ErrorKind, Result};
use tierbed_exchange::{Exchange, Layout, LookupRows, Sharding, Wants};
use tierbed_kernels::Destination;

const ROW_COUNTS: [u64; 4] = [40, 7, 100, 40];
const TRAIN: Wants = Wants { backward: true, weight_grads: false };
const LONG: Duration = Duration::from_secs(20);

/// Rows on a disk that answers one read at a time, and only when it is told to.
struct SlowRows {
    rows: TestRows,
    may_read: Receiver<()>,
}

impl LookupRows for SlowRows {
    fn lookup(&mut self, group: usize, bags: &Bags<'_>, to: &mut impl Destination) -> Result<()> {
        self.may_read.recv_timeout(LONG).unwrap();
        self.rows.lookup(group, bags, to)
    }
}

fn sharding(name: &str, ranks: usize) -> impl Fn(u64, usize) -> Sharding + '_ {
    move |rows, dim| match (name, rows) {
        ("rows", _) | ("mixed", 100) => Sharding::Rows {
            bounds: cuts(ranks, rows as usize).iter().map(|&cut| cut as u64).collect(),
        },
        ("blocks", _) => Sharding::Blocks { block_rows: 5 },
        ("columns", _) => Sharding::Columns { bounds: cuts(ranks, dim) },
        ("mirrored", _) | ("mixed", 7) => Sharding::Mirrored,
        _ => Sharding::Whole { rank: rows as usize % ranks },
    }
}

fn batches(ranks: usize) -> Vec<Batch> {
    let mut rng = SplitMix64::new(9);
    let draw = |rank| Batch::draw(&mut rng, &ROW_COUNTS, [5, 0, 9, 2][rank], 4, false);
    (0..ranks).map(draw).collect()
}

/// Trains two steps, in parts or at once; returns outputs and rows of each rank.
fn train(name: &str, ranks: usize, parts: Option<usize>) -> Vec<(Vec<u32>, Vec<u32>)> {
    let plan = plan_of(ranks, sharding(name, ranks));
    let layout = Layout::new(&plan, LIMITS).unwrap();
    let work = |mut exchange: Exchange, batch: Batch| {
        let mut rows = TestRows::new(exchange.plan(), exchange.rank());
        let mut seen = Vec::new();
        for _ in 0..2 {
            let output = match parts {
                None => exchange.forward(&batch.bags(), TRAIN, &mut rows).unwrap(),
                Some(parts) => {
                    let arrivals = exchange.forward_parts(&batch.bags(), TRAIN, parts).unwrap();
                    exchange.serve(&mut rows).unwrap();
                    arrivals.output().unwrap()
                }
            };
            let found = exchange.output(&output);
            exchange.backward(output.step, &found, None, &mut rows).unwrap();
            seen.extend(found.iter().map(|value| value.to_bits()));
        }
        exchange.close().unwrap();
        let tables = (0..3).flat_map(|table| rows.rows.table(table).to_vec());
        (seen, tables.map(f32::to_bits).collect())
    };
    std::thread::scope(|scope| {
        let ranks = exchanges(&plan, &layout, 20_000).into_iter().zip(batches(ranks));
        let threads: Vec<_> =
            ranks.map(|(exchange, own)| scope.spawn(move || work(exchange, own))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn parts_have_the_bits_of_the_whole_in_every_sharding() {
    for name in ["whole", "rows", "blocks", "columns", "mirrored", "mixed"] {
        for ranks in [1, 2, 4] {
            let whole = train(name, ranks, None);
            // More parts than samples: some are empty.
            for parts in [1, 3, 12] {
                assert_eq!(train(name, ranks, Some(parts)), whole, "{name} {ranks} {parts}");
            }
        }
    }
}

#[test]
fn a_part_is_complete_before_the_next_one_is_read() {
    const PARTS: usize = 4;
    let plan = plan_of(1, |_, _| Sharding::Whole { rank: 0 });
    let layout = Layout::new(&plan, LIMITS).unwrap();
    let batch = batches(1).remove(0);
    let mut quick = exchanges(&plan, &layout, 20_000).remove(0);
    let mut rows = TestRows::new(&plan, 0);
    let output = quick.forward(&batch.bags(), TRAIN, &mut rows).unwrap();
    let expected = quick.output(&output);

    let mut slow = exchanges(&plan, &layout, 20_000).remove(0);
    let (tell, may_read): (Sender<()>, _) = channel();
    let mut rows = SlowRows { rows: TestRows::new(&plan, 0), may_read };
    let arrivals = slow.forward_parts(&batch.bags(), TRAIN, PARTS).unwrap();
    std::thread::scope(|scope| {
        let serving = scope.spawn(move || {
            slow.serve(&mut rows).unwrap();
            slow
        });
        for part in 0..PARTS {
            // The read of this part is allowed only here, so no later one can have happened.
            tell.send(()).unwrap();
            let found = arrivals.values(part).unwrap();
            let samples = arrivals.samples(part);
            let width = plan.output_dim();
            assert_eq!(found, expected[samples.start * width..samples.end * width], "part {part}");
            assert!(!serving.is_finished() || part + 1 == PARTS);
        }
        serving.join().unwrap().close().unwrap();
    });
}

#[test]
fn parts_that_do_not_fit_together_are_refused() {
    let plan = plan_of(2, |_, _| Sharding::Whole { rank: 0 });
    let layout = Layout::new(&plan, LIMITS).unwrap();
    let batch = batches(1).remove(0);
    std::thread::scope(|scope| {
        for (mut exchange, parts) in exchanges(&plan, &layout, 20_000).into_iter().zip([2, 3]) {
            let batch = &batch;
            scope.spawn(move || {
                let error = exchange.forward_parts(&batch.bags(), TRAIN, parts).unwrap_err();
                let told = error.to_string();
                assert!(told.contains("other parts") || told.contains("failed"), "{told}");
            });
        }
    });
    let plan = plan_of(1, |_, _| Sharding::Whole { rank: 0 });
    let mut alone = exchanges(&plan, &layout, 20_000).remove(0);
    let mut rows = TestRows::new(&plan, 0);
    for parts in [0, 1025] {
        let error = alone.forward_parts(&batch.bags(), TRAIN, parts).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
    }
    let nothing = alone.serve(&mut rows).unwrap_err();
    assert_eq!(nothing.kind(), ErrorKind::Invalid);
    let _arrivals = alone.forward_parts(&batch.bags(), TRAIN, 2).unwrap();
    let early = alone.forward(&batch.bags(), TRAIN, &mut rows).unwrap_err();
    assert!(early.to_string().contains("still to be looked up"), "{early}");
    alone.serve(&mut rows).unwrap();
}
