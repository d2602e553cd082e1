//! Storage work on a thread of its own: the same bits, and its errors reach the caller.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "a test that panics has failed, as it should"
)]

#[path = "common/planned.rs"]
mod common;

use std::sync::Arc;

use common::{smallest_config, Job};
use tierbed_core::{ErrorKind, OptimizerKind};
use tierbed_io::Folder;
use tierbed_sim::{Chance, FaultPlan, SimFolder};
use tierbed_train::planned::{EpochPlan, Pipeline, PlannedConfig};

fn job_and_plan() -> (Job, EpochPlan) {
    let job = Job::pooled(OptimizerKind::Adagrad, 1);
    let plan = job.plan(3);
    (job, plan)
}

#[test]
fn a_thread_changes_no_bit_and_no_byte_on_disk() {
    let (job, plan) = job_and_plan();
    let features = job.features();
    let pipelined = smallest_config(&job, &plan);
    assert_eq!(pipelined.pipeline, Pipeline::On);
    // The thread's stack is paid for; without it the same memory is left for rows.
    let stack_bytes = 256 << 10;
    let single = PlannedConfig {
        pipeline: Pipeline::Off,
        dram_budget_bytes: pipelined.dram_budget_bytes - stack_bytes,
        ..pipelined.clone()
    };
    let mut dumps = Vec::new();
    for config in [pipelined, single] {
        let folder: Arc<dyn Folder> = Arc::new(SimFolder::default());
        let mut engine = job.open(folder.clone(), &plan, &config).unwrap();
        let mut traces = Vec::new();
        for step in 0..3 * job.batches {
            traces.push(job.step(&mut engine, &features, step).unwrap());
            if step % 7 == 6 {
                engine.checkpoint("c", &[]).unwrap();
            }
        }
        engine.verify().unwrap();
        dumps.push((traces, job.records(&mut engine).unwrap()));
    }
    assert!(dumps[0] == dumps[1]);
}

#[test]
fn a_thread_that_may_be_left_out_never_raises_the_least_budget() {
    let (job, plan) = job_and_plan();
    let open = |pipeline, dram_budget_bytes| {
        let config = PlannedConfig { pipeline, dram_budget_bytes, ..smallest_config(&job, &plan) };
        job.open(Arc::new(SimFolder::default()), &plan, &config)
    };
    let has_thread = |bytes| {
        let engine = open(Pipeline::IfItFits, bytes).unwrap();
        engine.budget().report().parts.contains_key("storage thread")
    };
    let least_bytes = |pipeline| open(pipeline, 1000).unwrap_err().minimum_bytes().unwrap();
    let (without, with) = (least_bytes(Pipeline::Off), least_bytes(Pipeline::On));
    assert!(without < with);
    assert_eq!(least_bytes(Pipeline::IfItFits), without);
    assert!(!has_thread(without) && !has_thread(with - 1) && has_thread(with));
}

#[test]
fn an_error_on_the_thread_poisons_the_store_for_the_caller() {
    let (job, plan) = job_and_plan();
    let (features, config) = (job.features(), smallest_config(&job, &plan));
    let mut failures = 0;
    for nth in [0, 3, 11, 40] {
        for plan_of in [
            FaultPlan { write_error: Chance::Nth(nth), ..FaultPlan::default() },
            FaultPlan { read_error: Chance::Nth(nth), ..FaultPlan::default() },
            FaultPlan { read_bit_flip: Chance::Nth(nth), ..FaultPlan::default() },
        ] {
            let folder = SimFolder::default();
            let opened: Arc<dyn Folder> = Arc::new(folder.clone());
            let mut engine = job.open(opened, &plan, &config).unwrap();
            engine.checkpoint("start", &[]).unwrap();
            folder.set_plan(plan_of);
            let failed = (0..2 * job.batches)
                .find_map(|step| job.step(&mut engine, &features, step).err().map(|e| (step, e)));
            let Some((step, error)) = failed else { continue };
            failures += 1;
            assert!(matches!(error.kind(), ErrorKind::Io | ErrorKind::Corruption), "{error}");
            let again = job.step(&mut engine, &features, step).unwrap_err();
            assert_eq!(again.kind(), ErrorKind::Poisoned, "{again}");
            let again = engine.checkpoint("late", &[]).unwrap_err();
            assert_eq!(again.kind(), ErrorKind::Poisoned, "{again}");
            drop(engine);
            folder.set_plan(FaultPlan::default());
            let opened: Arc<dyn Folder> = Arc::new(folder);
            let engine = job.open(opened, &plan, &config).unwrap();
            assert_eq!((engine.position().epoch, engine.position().batch), (0, 0));
        }
    }
    assert!(failures >= 8, "{failures}");
}

#[test]
fn an_engine_may_be_dropped_while_its_thread_works() {
    let (job, plan) = job_and_plan();
    let (features, config) = (job.features(), smallest_config(&job, &plan));
    for steps in 1..12 {
        let folder: Arc<dyn Folder> = Arc::new(SimFolder::default());
        let mut engine = job.open(folder.clone(), &plan, &config).unwrap();
        for step in 0..steps {
            job.step(&mut engine, &features, step).unwrap();
        }
        drop(engine);
        // The folder is free again: nothing of the thread is left.
        job.open(folder, &plan, &config).unwrap();
    }
}
