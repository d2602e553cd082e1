//! A store of several shards is a store: the bits of one engine in memory, whatever the number
//! of shards, and one checkpoint for all of them.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that panics has failed, as it should"
)]

#[path = "common/auto.rs"]
mod common;

use std::sync::Arc;

use common::Run;
use tierbed_core::{Bags, ErrorKind, OptimizerKind, RowId, TableId};
use tierbed_io::{listed_bytes, Folder, MemoryFolder};
use tierbed_kernels::Pooling;
use tierbed_sim::{Chance, FaultPlan, SimFolder};
use tierbed_snapshot::PageLayout;
use tierbed_train::window::rows::NewRows;
use tierbed_train::window::Backend;
use tierbed_train::{Access, Answer, OnMismatch, Order, OrderConfig, PlanRequest, ShardedEngine};

fn shared(folder: &MemoryFolder) -> Option<Arc<dyn Folder>> {
    Some(Arc::new(folder.clone()))
}

/// Trains `steps` on both and compares outputs, then all rows.
fn compare(
    run: &Run,
    ours: &mut ShardedEngine,
    theirs: &mut ShardedEngine,
    steps: u64,
    told: &str,
) {
    for step in 0..steps {
        let (own, other) = (run.step(ours, step).unwrap(), run.step(theirs, step).unwrap());
        assert!(own == other, "{told}: outputs of step {step}");
    }
    assert!(run.records(ours).unwrap() == run.records(theirs).unwrap(), "{told}: rows");
}

#[test]
fn any_number_of_shards_gives_the_bits_of_memory() {
    for (shards, optimizer) in [
        (1, OptimizerKind::RowWiseAdagrad),
        (2, OptimizerKind::Adagrad),
        (3, OptimizerKind::Adam),
        (5, OptimizerKind::RowWiseAdagrad),
    ] {
        for order in [Order::Forward, Order::Window] {
            for run in [Run::pooled(optimizer), Run::unpooled()] {
                if shards > run.tables.len() as u32 {
                    continue;
                }
                let told = format!("{shards} shards, {order:?}, {} tables", run.tables.len());
                let folder = MemoryFolder::new();
                let config = run.config(order, Some(shards));
                let mut engine = run.open(shared(&folder), &config).unwrap();
                if order == Order::Forward {
                    run.follow(&mut engine).unwrap();
                }
                // Almost two epochs: rows leave memory and come back.
                compare(&run, &mut engine, &mut run.oracle(), 2 * run.batches - 1, &told);
            }
        }
    }
}

#[test]
fn batches_large_enough_for_threads_give_the_same_bits() {
    let run = Run { samples: 700, batches: 4, ..Run::pooled(OptimizerKind::Adagrad) };
    for backend in [None, Some(Backend::Cold), Some(Backend::Memory)] {
        let folder = MemoryFolder::new();
        let budget_bytes = 48 << 20;
        let config = OrderConfig {
            backend,
            dram_budget_bytes: budget_bytes,
            ..run.config(Order::Auto, Some(2))
        };
        let mut engine = run.open(shared(&folder), &config).unwrap();
        if backend.is_none() {
            run.follow(&mut engine).unwrap();
        }
        compare(&run, &mut engine, &mut run.oracle(), 6, &format!("{backend:?}"));
    }
}

#[test]
fn a_reopened_store_goes_on_where_all_shards_stood() {
    let run = Run::pooled(OptimizerKind::RowWiseAdagrad);
    for order in [Order::Forward, Order::Window] {
        let folder = MemoryFolder::new();
        let config = run.config(order, Some(2));
        let (mut oracle, mut kept) = (run.oracle(), Vec::new());
        for (first, saved, lost) in [(0, 5, 8), (5, 14, 15), (14, 20, 20)] {
            let asked = if first == 0 { Some(2) } else { None };
            let config = OrderConfig { shards: asked, ..config.clone() };
            let mut engine = run.open(shared(&folder), &config).unwrap();
            if order == Order::Forward {
                run.follow(&mut engine).unwrap();
                let position = engine.engine().position().unwrap();
                assert_eq!(position, (first / run.batches, first % run.batches));
            }
            assert_eq!(run.steps_done(&mut engine).unwrap(), first);
            for step in first..saved {
                let output = run.step(&mut engine, step).unwrap();
                assert!(output == run.step(&mut oracle, step).unwrap(), "step {step}");
            }
            run.checkpoint(&mut engine, saved).unwrap();
            kept = run.records(&mut engine).unwrap();
            // Steps behind the checkpoint are lost when the process ends.
            for step in saved..lost {
                run.step(&mut engine, step).unwrap();
            }
        }
        let mut engine = run.open(shared(&folder), &run.config(order, Some(2))).unwrap();
        engine.verify().unwrap();
        assert!(run.records(&mut engine).unwrap() == kept);
        assert!(kept == run.records(&mut oracle).unwrap());
    }
}

#[test]
fn another_number_of_shards_is_refused_and_told() {
    let run = Run::pooled(OptimizerKind::Sgd);
    let (sharded, plain) = (MemoryFolder::new(), MemoryFolder::new());
    for (folder, shards) in [(&sharded, Some(2)), (&plain, None)] {
        let mut engine = run.open(shared(folder), &run.config(Order::Window, shards)).unwrap();
        run.step(&mut engine, 0).unwrap();
        run.checkpoint(&mut engine, 1).unwrap();
    }
    let refused = |folder, shards| {
        let opened = run.open(shared(folder), &run.config(Order::Window, Some(shards)));
        opened.err().unwrap()
    };
    for error in [refused(&sharded, 3), refused(&sharded, 1), refused(&plain, 2)] {
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.to_string().contains("another number of shards"), "{error}");
    }
    assert_eq!(refused(&plain, 0).kind(), ErrorKind::Invalid);
    // Fewer tables than shards: told when it is clear which tables there are.
    let folder = MemoryFolder::new();
    let mut engine = run.open(shared(&folder), &run.config(Order::Window, Some(6))).unwrap();
    assert!(run.step(&mut engine, 0).unwrap_err().to_string().contains("at least one table"));
}

#[test]
fn what_several_shards_cannot_do_is_unsupported() {
    let run = Run::pooled(OptimizerKind::Sgd);
    let folder = MemoryFolder::new();
    let config = run.config(Order::Auto, Some(2));
    let moving = OrderConfig { on_mismatch: Some(OnMismatch::Fallback), ..config.clone() };
    let error = run.open(shared(&folder), &moving).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    let mut engine = run.open(shared(&folder), &config).unwrap();
    run.follow(&mut engine).unwrap();
    assert_eq!(engine.single().err().unwrap().kind(), ErrorKind::Unsupported);
    run.step(&mut engine, 0).unwrap();
    run.checkpoint(&mut engine, 1).unwrap();
    drop(engine);
    // Rows would have to move.
    let window = run.config(Order::Window, None);
    let error = run.open(shared(&folder), &window).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
}

#[test]
fn a_batch_that_one_shard_does_not_expect_changes_no_shard() {
    let run = Run::pooled(OptimizerKind::Adagrad);
    let folder = MemoryFolder::new();
    let mut engine = run.open(shared(&folder), &run.config(Order::Forward, Some(3))).unwrap();
    run.follow(&mut engine).unwrap();
    let before = run.records(&mut engine).unwrap();
    // Only the last feature differs, which only one shard reads.
    let (plan, batch) = (run.plan(&engine), run.batch(0));
    let bags = batch.bags();
    let mut indices = bags.indices.to_vec();
    let last = indices.last_mut().unwrap();
    *last = (*last + 1) % 90;
    let other = Bags::new(&indices, bags.offsets, bags.weights, bags.feature_count).unwrap();
    let grad = vec![1.0; plan.output_len(&other)];
    let grads = tierbed_train::window::update::Grads { output: &grad, weights: None };
    let error = engine.writable().unwrap().update(&plan, &other, grads, None).unwrap_err();
    assert!(error.to_string().contains("not the planned one"), "{error}");
    assert!(run.records(&mut engine).unwrap() == before);
    // Nothing is poisoned: the planned batch is taken.
    run.step(&mut engine, 0).unwrap();
}

#[test]
fn an_error_of_one_shard_poisons_all_until_reopened() {
    let run = Run::pooled(OptimizerKind::Adagrad);
    let folder = SimFolder::default();
    let shared = |folder: &SimFolder| Some(Arc::new(folder.clone()) as Arc<dyn Folder>);
    let config = run.config(Order::Window, Some(3));
    let mut engine = run.open(shared(&folder), &config).unwrap();
    run.step(&mut engine, 0).unwrap();
    run.checkpoint(&mut engine, 1).unwrap();
    let kept = run.records(&mut engine).unwrap();
    run.step(&mut engine, 1).unwrap();
    folder.set_plan(FaultPlan { sync_error: Chance::Nth(0), ..FaultPlan::default() });
    assert_eq!(run.checkpoint(&mut engine, 2).unwrap_err().kind(), ErrorKind::Io);
    folder.set_plan(FaultPlan::default());
    assert_eq!(run.checkpoint(&mut engine, 2).unwrap_err().kind(), ErrorKind::Poisoned);
    assert_eq!(run.step(&mut engine, 2).unwrap_err().kind(), ErrorKind::Poisoned);
    drop(engine);
    let mut engine = run.open(shared(&folder), &config).unwrap();
    assert_eq!(run.steps_done(&mut engine).unwrap(), 1);
    assert!(run.records(&mut engine).unwrap() == kept);
}

#[test]
fn look_ahead_fits_what_fits_every_shard_and_changes_no_bit() {
    let run = Run { samples: 64, batches: 40, ..Run::pooled(OptimizerKind::Adagrad) };
    let folder = MemoryFolder::new();
    let config = OrderConfig { dram_budget_bytes: 3 << 20, ..run.config(Order::Window, Some(2)) };
    let mut engine = run.open(shared(&folder), &config).unwrap();
    let (mut oracle, plan) = (run.oracle(), run.plan(&engine));
    let (mut announced, mut shortened) = (0, 0);
    for step in 0..run.batches {
        if announced <= step {
            let batches: Vec<_> = (announced..run.batches).map(|at| run.batch(at)).collect();
            let bags: Vec<_> = batches.iter().map(common::Batch::bags).collect();
            let fitted = engine.engine_mut().prefetch(&plan, &bags).unwrap();
            assert!(fitted > 0, "the next batch always fits");
            shortened += u32::from(fitted < bags.len());
            announced += fitted as u64;
        }
        let output = run.step(&mut engine, step).unwrap();
        assert!(output == run.step(&mut oracle, step).unwrap(), "step {step}");
    }
    assert!(shortened > 0, "the window was never too long");
}

#[test]
fn rows_are_visited_gathered_written_and_published_as_those_of_one_store() {
    let run = Run::pooled(OptimizerKind::RowWiseAdagrad);
    let target = tempfile::tempdir().unwrap();
    let mut found = Vec::new();
    for shards in [1, 2] {
        let folder = MemoryFolder::new();
        let config = run.config(Order::Auto, Some(shards));
        let mut engine = run.open(shared(&folder), &config).unwrap();
        let rows = NewRows { weights: &[0.25; 2 * 64], state: None, use_counts: None };
        let own = engine.writable().unwrap().rows_of(TableId(3), Access::Write).unwrap();
        own.engine.write_rows(own.table, 5, rows).unwrap();
        (0..4).for_each(|step| drop(run.step(&mut engine, step).unwrap()));
        let mut gathered = vec![0.0; 3 * 18];
        let own = engine.engine_mut().rows_of(TableId(4), Access::Read).unwrap();
        own.engine.gather_rows(own.table, &[7, 0, 7], &mut gathered).unwrap();
        let mut scanned: Vec<(TableId, RowId, Vec<u32>)> = Vec::new();
        engine
            .engine_mut()
            .scan_all(&mut |table, row, record| {
                let words = record.iter().map(|word| word.to_bits()).collect();
                scanned.push((table, row, words));
                Ok(())
            })
            .unwrap();
        scanned.sort_unstable();
        let path = target.path().join(shards.to_string());
        let report = engine
            .engine_mut()
            .publish_placed(&path, PageLayout::default(), &[], &mut |_, _| true)
            .unwrap();
        let pages = std::fs::read(path.join("pages")).unwrap_or_default();
        found.push((gathered, scanned, serde_json::to_value(&report).unwrap(), pages));
    }
    assert!(found[0].1 == found[1].1, "scanned rows");
    assert!(found[0] == found[1]);
    assert_eq!(run.features.iter().filter(|(_, pooling)| *pooling == Pooling::Mean).count(), 2);
}

#[test]
fn statistics_are_summed_over_shards() {
    let run = Run::pooled(OptimizerKind::Sgd);
    let folder = MemoryFolder::new();
    let mut engine = run.open(shared(&folder), &run.config(Order::Forward, Some(2))).unwrap();
    run.follow(&mut engine).unwrap();
    run.step(&mut engine, 0).unwrap();
    let stats = engine.engine_mut().stats().unwrap();
    let sum = |name: &str| -> u64 {
        let shards = stats["shards"].as_array().unwrap().iter();
        shards.map(|shard| shard["store"][name].as_u64().unwrap()).sum()
    };
    assert_eq!(stats["store"]["row_update_count"].as_u64().unwrap(), sum("row_update_count"));
    assert!(sum("row_update_count") > 0);
    assert_eq!(stats["order"]["batch"], 1);
    let used = stats["budget"]["limit_bytes"].as_u64().unwrap();
    assert!(used <= run.budget_bytes, "{used}");
}

/// Once the dump of a checkpoint was not among them.
#[test]
fn disk_bytes_along_a_plan_are_those_of_all_files() {
    let run = Run::pooled(OptimizerKind::Adagrad);
    let folder = MemoryFolder::new();
    let mut engine = run.open(shared(&folder), &run.config(Order::Forward, None)).unwrap();
    run.follow(&mut engine).unwrap();
    for step in 0..run.batches + 5 {
        run.step(&mut engine, step).unwrap();
    }
    for _ in 0..2 {
        let stats = engine.engine_mut().stats().unwrap();
        assert_eq!(stats["disk_bytes"], listed_bytes(&folder, |_| true).unwrap());
        run.checkpoint(&mut engine, 0).unwrap();
    }
}

/// A later epoch is told what to do for a plan; why there was none at first stays.
#[test]
fn the_reason_of_the_order_is_that_of_the_first_epoch() {
    let run = Run::pooled(OptimizerKind::Sgd);
    let folder = MemoryFolder::new();
    let mut engine = run.open(shared(&folder), &run.config(Order::Auto, None)).unwrap();
    let reason = "the shuffle has no seed";
    engine.writable().unwrap().note_reason("an earlier obstacle");
    engine.writable().unwrap().note_reason(reason);
    run.step(&mut engine, 0).unwrap();
    let plan = run.plan(&engine);
    let request = PlanRequest { source: "epoch".to_owned(), window_batches_max: 3 };
    for _ in 0..2 {
        let answer = engine.writable().unwrap().follow(&plan, &request).unwrap();
        let Answer::Refused { reason: now } = answer else { panic!("{answer:?}") };
        assert!(now.contains("store.checkpoint"), "{now}");
        engine.writable().unwrap().note_reason("a later obstacle");
        assert_eq!(engine.engine_mut().stats().unwrap()["order"]["reason"], reason);
    }
}

/// Ids that were compared with the plan, by all shards together.
fn ids_checked(engine: &mut ShardedEngine) -> u64 {
    engine.engine_mut().stats().unwrap()["store"]["ids_checked"].as_u64().unwrap()
}

#[test]
fn the_ids_of_a_batch_are_checked_once_a_step() {
    let run = Run::pooled(OptimizerKind::Adagrad);
    for shards in [1, 3] {
        let folder = MemoryFolder::new();
        let config = run.config(Order::Forward, Some(shards));
        let (mut engine, mut oracle) = (run.open(shared(&folder), &config).unwrap(), run.oracle());
        run.follow(&mut engine).unwrap();
        let plan = run.plan(&engine);
        for step in 0..run.batches {
            let (batch, before) = (run.batch(step), ids_checked(&mut engine));
            let bags = batch.bags();
            let ids = bags.indices.len() as u64;
            let mut output = vec![0.0; plan.output_len(&bags)];
            let token = engine.engine_mut().lookup(&plan, &bags, &mut output, true).unwrap();
            assert_eq!(ids_checked(&mut engine), before + ids);
            let has_token = step % 3 != 2;
            let grad = vec![0.25; output.len()];
            let grads = |grad| tierbed_train::window::update::Grads { output: grad, weights: None };
            let given = token.filter(|_| has_token);
            engine.writable().unwrap().update(&plan, &bags, grads(&grad), given).unwrap();
            let checks = if has_token { 1 } else { 2 };
            assert_eq!(ids_checked(&mut engine), before + checks * ids, "step {step}");
            oracle.writable().unwrap().update(&plan, &bags, grads(&grad), None).unwrap();
        }
        assert!(run.records(&mut engine).unwrap() == run.records(&mut oracle).unwrap());
    }
}

#[test]
fn a_token_is_good_for_its_own_batch_and_engine_alone() {
    let run = Run::pooled(OptimizerKind::Sgd);
    for shards in [1, 3] {
        let config = run.config(Order::Forward, Some(shards));
        let folders = [MemoryFolder::new(), MemoryFolder::new()];
        let mut engines = folders.each_ref().map(|folder| {
            let mut engine = run.open(shared(folder), &config).unwrap();
            run.follow(&mut engine).unwrap();
            engine
        });
        let plan = run.plan(&engines[0]);
        let (first, second) = (run.batch(0), run.batch(1));
        let mut output = vec![0.0; plan.output_len(&first.bags())];
        let token = engines[0].engine_mut().lookup(&plan, &first.bags(), &mut output, true);
        let token = token.unwrap();
        assert!(token.is_some());
        let grad = vec![1.0; output.len()];
        let grads = || tierbed_train::window::update::Grads { output: &grad, weights: None };
        // Other bags with it, or another engine: the ids are checked as without a token.
        for engine in &mut engines {
            let error = engine.writable().unwrap().update(&plan, &second.bags(), grads(), token);
            assert_eq!(error.unwrap_err().kind(), ErrorKind::Invalid);
        }
        let before = ids_checked(&mut engines[1]);
        engines[1].writable().unwrap().update(&plan, &first.bags(), grads(), token).unwrap();
        assert!(ids_checked(&mut engines[1]) > before);
        // Behind its step it is spent.
        let engine = engines[0].writable().unwrap();
        engine.update(&plan, &first.bags(), grads(), token).unwrap();
        let error = engine.update(&plan, &first.bags(), grads(), token).unwrap_err();
        assert!(error.to_string().contains("not the planned one"), "{error}");
        run.step(&mut engines[0], 1).unwrap();
    }
}
