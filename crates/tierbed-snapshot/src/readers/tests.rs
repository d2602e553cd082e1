use std::sync::mpsc;
use std::time::Duration;

use tierbed_core::{OptimizerKind, RowId, Schema, TableId, TableSchema};
use tierbed_io::{EngineChoice, EngineOptions, Folder, MemoryFolder};

use super::*;
use crate::snapshot::full_reader_count;
use crate::{Snapshot, SnapshotOptions, SnapshotWriter};

const ROWS: u64 = 600;
const SMALL_CALL: usize = 26;

fn open(dram_budget_bytes: u64, reader_count: usize) -> Arc<Snapshot> {
    let folder: Arc<dyn Folder> = Arc::new(MemoryFolder::new());
    let optimizer = OptimizerKind::Sgd;
    let schema =
        Schema::new(vec![TableSchema { optimizer, ..TableSchema::plain("t", ROWS, 16) }]).unwrap();
    let budget = tierbed_core::Budget::new(1 << 20);
    let mut writer = SnapshotWriter::create(Arc::clone(&folder), &schema, &budget).unwrap();
    for row in 0..ROWS {
        writer.push(TableId(0), RowId(row), &[row as f32; 16]).unwrap();
    }
    writer.finish().unwrap();
    let engine = EngineOptions { choice: EngineChoice::Pread, ..EngineOptions::default() };
    let options =
        SnapshotOptions { dram_budget_bytes, reader_count, engine, ..SnapshotOptions::default() };
    Arc::new(Snapshot::open(folder, &options).unwrap())
}

#[test]
fn as_many_small_calls_read_at_once_as_there_are_callers_up_to_the_bound() {
    let full = full_reader_count();
    let bound = full + 6;
    let snapshot = open(256 << 20, bound);
    assert_eq!(snapshot.stats().reader_count, full as u64, "small ones are made when calls meet");
    for _ in 0..3 {
        drop(snapshot.take_reader_for(SMALL_CALL));
        assert_eq!(snapshot.stats().reader_count, full as u64, "one caller needs one reader");
    }
    let mut guards: Vec<_> = (0..bound).map(|_| snapshot.take_reader_for(SMALL_CALL)).collect();
    assert_eq!(snapshot.stats().reader_count, bound as u64);
    assert_eq!(snapshot.stats().reader_error, None);
    let bytes: u64 = guards.iter_mut().map(|guard| guard.get().memory_bytes()).sum();
    let reserved = snapshot.budget_report().parts["readers"].used_bytes;
    assert_eq!(bytes, reserved, "they take what was set aside");
    // One more waits until one comes back.
    let (done, came) = mpsc::channel();
    let other = Arc::clone(&snapshot);
    let thread = std::thread::spawn(move || {
        drop(other.take_reader_for(SMALL_CALL));
        done.send(()).unwrap();
    });
    assert!(came.recv_timeout(Duration::from_millis(50)).is_err());
    guards.pop();
    came.recv_timeout(Duration::from_secs(10)).unwrap();
    thread.join().unwrap();
    drop(guards);
    assert_eq!(snapshot.stats().reader_count, bound as u64);
}

#[test]
fn large_calls_have_full_readers_and_do_not_take_small_ones() {
    let full = full_reader_count();
    let snapshot = open(256 << 20, full + 2);
    let smalls: Vec<_> = (0..full + 2).map(|_| snapshot.take_reader_for(SMALL_CALL)).collect();
    let (done, came) = mpsc::channel();
    let other = Arc::clone(&snapshot);
    let thread = std::thread::spawn(move || {
        let number = other.take_reader_for(1 << 20).get().number;
        done.send(number).unwrap();
    });
    assert!(came.recv_timeout(Duration::from_millis(50)).is_err());
    drop(smalls);
    assert!(came.recv_timeout(Duration::from_secs(10)).unwrap() < full);
    thread.join().unwrap();
}

/// A thread that gives back and asks again would be served before any that has to wake.
#[test]
fn a_call_that_has_waited_is_served_before_one_that_comes() {
    let full = full_reader_count();
    let snapshot = open(256 << 20, full);
    let mut guards: Vec<_> = (0..full).map(|_| snapshot.take_reader_for(SMALL_CALL)).collect();
    let (taken, is_taken) = mpsc::channel();
    let (done, is_done) = mpsc::channel::<()>();
    let other = Arc::clone(&snapshot);
    let thread = std::thread::spawn(move || {
        let guard = other.take_reader_for(SMALL_CALL);
        taken.send(()).unwrap();
        is_done.recv().unwrap();
        drop(guard);
    });
    std::thread::sleep(Duration::from_millis(100));
    guards.pop();
    assert!(snapshot.try_take_reader_for(SMALL_CALL).is_none(), "it is kept for who waits");
    is_taken.recv_timeout(Duration::from_secs(10)).unwrap();
    done.send(()).unwrap();
    thread.join().unwrap();
    assert!(snapshot.try_take_reader_for(SMALL_CALL).is_some());
}

#[test]
fn nobody_is_forgotten_however_calls_of_both_kinds_meet() {
    let snapshot = open(256 << 20, full_reader_count() + 1);
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let snapshot = &snapshot;
            scope.spawn(move || {
                for call in 0..2000 {
                    let is_large = (thread + call) % 3 == 0;
                    let count = if is_large { 1 << 20 } else { SMALL_CALL };
                    let guard = snapshot.take_reader_for(count);
                    if call % 7 == 0 {
                        std::thread::yield_now();
                    }
                    drop(guard);
                }
            });
        }
    });
    let free = std::iter::from_fn(|| snapshot.try_take_reader_for(SMALL_CALL));
    assert_eq!(free.collect::<Vec<_>>().len(), full_reader_count() + 1);
}

#[test]
fn a_small_budget_has_fewer_readers_and_is_kept() {
    for budget in [400 << 10, 2 << 20, 16 << 20] {
        let snapshot = open(budget, 64);
        let report = snapshot.budget_report();
        assert!(report.peak_bytes <= budget, "{report:?}");
    }
}
