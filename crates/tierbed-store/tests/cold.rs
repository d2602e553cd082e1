//! Conformance of the cold store, in any budget, on any engine.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    unreachable_pub,
    dead_code,
    reason = "a test that panics has failed, as it should"
)]

mod common;

use std::collections::BTreeMap;
use std::sync::Arc;

use common::tiny;
use tierbed_core::conformance::check_row_store;
use tierbed_core::env::{ManualClock, SplitMix64};
use tierbed_core::store::{Ahead, Attachment};
use tierbed_core::{Budget, ErrorKind, Result, RowKey, RowStore, TableId, TrainStore};
use tierbed_io::{
    EngineChoice, EngineOptions, Folder, FsFolder, MemoryFolder, OpenMode, PAGE_BYTES,
};
use tierbed_sim::rows::{row, table, versions, write_version};
use tierbed_store::cold::{ColdOptions, ColdStore};

fn by_budget(budget_bytes: u64, choice: EngineChoice, queue_depth: u32) -> ColdOptions {
    let engine = EngineOptions { choice, queue_depth, buf_bytes: PAGE_BYTES };
    ColdOptions::new(Budget::new(budget_bytes), engine)
}

#[test]
fn keeps_the_waists_promise_on_every_engine_and_budget() {
    let all = [
        by_budget(400 << 10, EngineChoice::Inline, 4),
        by_budget(600 << 10, EngineChoice::Pread, 3),
        by_budget(4 << 20, EngineChoice::Auto, 16),
        by_budget(256 << 20, EngineChoice::Auto, 64),
    ];
    for (seed, options) in (1..).zip(all) {
        let scratch = tempfile::tempdir().unwrap();
        let open = || -> Result<Box<dyn TrainStore>> {
            let folder = Arc::new(FsFolder::create(scratch.path())?);
            let budget = Budget::new(options.budget.limit_bytes());
            Ok(Box::new(ColdStore::open(folder, ColdOptions { budget, ..options.clone() })?))
        };
        let store = open().unwrap();
        let mut reopen = |old, _| {
            drop(old);
            open()
        };
        check_row_store(store, Some(&mut reopen), seed, 120).unwrap();
    }
}

#[test]
fn keeps_the_waists_promise_while_it_merges_all_the_time() {
    for seed in 1..6 {
        let folder: Arc<dyn Folder> = Arc::new(MemoryFolder::default());
        let open = || -> Result<Box<dyn TrainStore>> {
            Ok(Box::new(ColdStore::open(folder.clone(), tiny(3000))?))
        };
        let store = open().unwrap();
        let mut reopen = |old, _| {
            drop(old);
            open()
        };
        check_row_store(store, Some(&mut reopen), seed, 300).unwrap();
    }
}

/// A store beside a map of row versions.
struct Pair {
    folder: Arc<dyn Folder>,
    options: ColdOptions,
    store: Option<ColdStore>,
    model: BTreeMap<RowKey, u32>,
}

impl Pair {
    fn new(options: ColdOptions, tables: &[(u32, u64)]) -> Self {
        let folder: Arc<dyn Folder> = Arc::new(MemoryFolder::default());
        let mut store = ColdStore::open(folder.clone(), options.clone()).unwrap();
        for (at, (dim, rows)) in tables.iter().enumerate() {
            store.add_table(table(&format!("t{at}"), *dim, *rows)).unwrap();
        }
        Self { folder, options, store: Some(store), model: BTreeMap::new() }
    }

    fn store(&mut self) -> &mut ColdStore {
        self.store.as_mut().unwrap()
    }

    fn write(&mut self, rows: &[RowKey], version: u32) {
        write_version(self.store(), rows, version).unwrap();
        self.model.extend(rows.iter().map(|row| (*row, version)));
    }

    fn check(&mut self, rows: &[RowKey]) {
        let expected: Vec<_> = rows.iter().map(|row| self.model.get(row).copied()).collect();
        assert_eq!(versions(self.store(), rows).unwrap(), expected);
    }

    fn check_scan(&mut self, table: u32) {
        let expected: Vec<_> = self.model.iter().filter(|(key, _)| key.table.0 == table).collect();
        let mut expected = expected.into_iter().map(|(key, version)| (key.row, *version));
        let store = self.store.as_mut().unwrap();
        store
            .scan(TableId(table), &mut |row, record| {
                let version = u32::from_le_bytes(record[..4].try_into().unwrap());
                assert_eq!(Some((row, version)), expected.next());
                Ok(())
            })
            .unwrap();
        assert_eq!(expected.next(), None);
    }

    fn reopen(&mut self) {
        self.store().commit("c", &[]).unwrap();
        self.store = None;
        self.store = Some(ColdStore::open(self.folder.clone(), self.options.clone()).unwrap());
    }
}

fn some_rows(rng: &mut SplitMix64, table: u32, count: u64, bound: u64) -> Vec<RowKey> {
    let mut rows: Vec<_> = (0..count).map(|_| row(table, rng.below(bound))).collect();
    rows.sort_unstable();
    rows.dedup();
    rows
}

#[test]
fn a_long_life_matches_a_map() {
    for seed in 0..4 {
        let mut rng = SplitMix64::new(seed);
        let options = ColdOptions { delta_share: 0.4, ..tiny(6000 + 2000 * seed as usize) };
        let mut pair = Pair::new(options, &[(8, 4000), (36, 900)]);
        for step in 1..150 {
            // Skewed: early rows change often, late ones seldom.
            let bound = if step % 3 == 0 { 4000 } else { 300 };
            let mut rows = some_rows(&mut rng, 0, 60, bound);
            rows.extend(some_rows(&mut rng, 1, 30, 900));
            pair.write(&rows, step);
            let rows = some_rows(&mut rng, 0, 100, 4000);
            pair.check(&rows);
            if step % 40 == 0 {
                pair.check_scan(0);
                pair.reopen();
                pair.store().verify().unwrap();
                pair.check_scan(0);
                pair.check_scan(1);
            }
        }
        let stats = pair.store().cold_stats();
        let all: Vec<_> = pair.model.keys().copied().collect();
        pair.check(&all);
        assert!(stats.ranges_merged > 20 && stats.run_count > 20, "{stats:?}");
    }
}

#[test]
fn runs_of_mostly_outdated_rows_are_given_up() {
    let options = ColdOptions { delta_share: 0.2, ..tiny(12_000) };
    let mut pair = Pair::new(options, &[(36, 6000)]);
    let all: Vec<_> = (0..6000).map(|at| row(0, at)).collect();
    pair.write(&all, 1);
    let mut rng = SplitMix64::new(5);
    for step in 2..200 {
        let rows = some_rows(&mut rng, 0, 40, 400);
        pair.write(&rows, step);
        if step % 4 == 0 {
            let rows = some_rows(&mut rng, 0, 4, 6000);
            pair.write(&rows, step);
        }
    }
    let stats = pair.store().cold_stats();
    assert!(stats.runs_compacted > 0, "{stats:?}");
    pair.check(&all);
    pair.reopen();
    pair.check(&all);
}

#[test]
fn amplifications_stay_bounded() {
    for (seed, is_skewed) in [(1, true), (2, false)] {
        let mut rng = SplitMix64::new(seed);
        let mut options = tiny(64 << 10);
        options.memory.delta_index_bytes = 128 << 10;
        options.memory.extent_bytes = 32 << 10;
        let mut pair = Pair::new(options, &[(36, 20_000)]);
        let all: Vec<_> = (0..20_000).map(|at| row(0, at)).collect();
        pair.write(&all, 1);
        let before = pair.store().cold_stats();
        let mut space_max: f64 = 0.0;
        for step in 2..120 {
            let bound = if is_skewed && rng.below(3) > 0 { 2000 } else { 20_000 };
            let rows = some_rows(&mut rng, 0, 400, bound);
            pair.write(&rows, step);
            let stats = pair.store().stats();
            space_max = space_max.max(stats.disk_bytes as f64 / (20_000.0 * 148.0));
        }
        let stats = pair.store().cold_stats();
        let written =
            stats.run_bytes + stats.merge_write_bytes - before.run_bytes - before.merge_write_bytes;
        let user = stats.user_bytes_written - before.user_bytes_written;
        let amplification = written as f64 / user as f64;
        // Small extents and write buffers cost more than large ones; the bound is what counts.
        assert!(amplification < 7.0, "skewed {is_skewed}: write amplification {amplification}");
        assert!(space_max < 1.45, "skewed {is_skewed}: space amplification {space_max}");
        pair.check(&all);
    }
}

#[test]
fn bases_that_deltas_cover_are_not_read_by_merges() {
    let mut options = tiny(64 << 10);
    options.memory.delta_index_bytes = 128 << 10;
    let mut pair = Pair::new(options, &[(36, 20_000)]);
    let all: Vec<_> = (0..20_000).map(|at| row(0, at)).collect();
    pair.write(&all, 1);
    let before = pair.store().cold_stats();
    (2..5).for_each(|step| pair.write(&all, step));
    let after = pair.store().cold_stats();
    let read = after.merge_read_bytes - before.merge_read_bytes;
    let written = after.merge_write_bytes - before.merge_write_bytes;
    // The deltas alone are as much as the new bases; the old bases would be as much again.
    assert!(written > 0 && read * 4 < written * 6, "{read} read, {written} written");
    pair.check(&all);
}

#[test]
fn rows_never_written_occupy_nothing_and_cost_no_read() {
    let mut pair = Pair::new(tiny(3000), &[(36, 1 << 20)]);
    let rows: Vec<_> = (0..200).map(|at| row(0, at)).collect();
    pair.write(&rows, 1);
    pair.store().commit("c", &[]).unwrap();
    let stats = pair.store().stats();
    assert!(stats.disk_bytes < 200_000, "{stats:?}");
    let far: Vec<_> = (0..500).map(|at| row(0, 500_000 + 7 * at)).collect();
    pair.check(&far);
    let after = pair.store().stats();
    assert_eq!(after.io.read_count, stats.io.read_count);
    assert_eq!(after.rows_absent, stats.rows_absent + 500);
}

#[test]
fn dense_requests_are_swept_and_sparse_ones_probed() {
    let mut pair = Pair::new(tiny(6000), &[(36, 20_000)]);
    let all: Vec<_> = (0..20_000).map(|at| row(0, at)).collect();
    pair.write(&all, 1);
    pair.store().commit("c", &[]).unwrap();
    let mut pages = |step: usize| {
        let rows: Vec<_> = all.iter().copied().step_by(step).collect();
        let before = pair.store().cold_stats();
        pair.check(&rows);
        let after = pair.store().cold_stats();
        (
            after.pages_read - before.pages_read,
            after.request_count - before.request_count,
            after.pages_wanted - before.pages_wanted,
        )
    };
    let (read, requests, wanted) = pages(3000);
    assert_eq!((read, requests), (wanted, wanted), "one page each");
    let (read, requests, wanted) = pages(54);
    assert!(read > wanted && requests < wanted, "{read} {requests} {wanted}");
}

#[test]
fn merges_run_ahead_of_need_when_the_buffered_batches_outlast_them() {
    let clock = Arc::new(ManualClock::default());
    let mut options = ColdOptions { clock: clock.clone(), ..tiny(24 << 10) };
    options.memory.delta_index_bytes = 64 << 10;
    let mut pair = Pair::new(options, &[(36, 20_000)]);
    let all: Vec<_> = (0..20_000).map(|at| row(0, at)).collect();
    pair.write(&all, 1);
    let rows: Vec<_> = (0..1500).map(|at| row(0, 13 * at)).collect();
    pair.write(&rows, 2);
    let announce = |pair: &mut Pair, us: u64, accesses_buffered: u64| {
        clock.advance_us(us);
        let ahead = Ahead {
            batches_buffered: 4,
            accesses_buffered,
            sample_count: 10,
            access_count: accesses_buffered,
            visit_accesses: &|_| {},
        };
        pair.store().observe(&ahead).unwrap();
        let stats = pair.store().cold_stats();
        (stats.ranges_merged, stats.deferred_count)
    };
    let (before, _) = announce(&mut pair, 0, 1000);
    // A thousand accesses in 10 us: nothing that is buffered outlasts a merge.
    let (merged, deferred) = announce(&mut pair, 10, 1000);
    assert_eq!(merged, before);
    assert!(deferred > 0);
    // A step that takes a second leaves time to merge.
    let (merged, _) = announce(&mut pair, 1_000_000, 1000);
    assert!(merged > before, "{merged} > {before}");
    pair.check(&all);
}

#[test]
fn reopens_at_the_last_commit_and_finds_its_attachments() {
    let mut pair = Pair::new(tiny(3000), &[(8, 300)]);
    let rows: Vec<_> = (0..300).map(|at| row(0, at)).collect();
    pair.write(&rows, 1);
    pair.store().commit("one", &[Attachment { name: "dense", bytes: b"abc" }]).unwrap();
    write_version(pair.store(), &rows, 2).unwrap();
    pair.store = None;
    pair.store = Some(ColdStore::open(pair.folder.clone(), pair.options.clone()).unwrap());
    assert_eq!(pair.store().last_commit().unwrap().name, "one");
    assert_eq!(pair.store().attachment("dense").unwrap().as_deref(), Some(&b"abc"[..]));
    pair.check(&rows);
}

#[test]
fn every_flipped_byte_is_found_by_verify() {
    let mut pair = Pair::new(tiny(3000), &[(8, 600)]);
    let mut rng = SplitMix64::new(3);
    for step in 1..30 {
        let rows = some_rows(&mut rng, 0, 60, 600);
        pair.write(&rows, step);
    }
    pair.store().commit("one", &[]).unwrap();
    let device = pair.folder.open("t0.rows", OpenMode::ReadWrite).unwrap();
    let pages = device.len_bytes().unwrap() / PAGE_BYTES as u64;
    let checked = pair.store().verify().unwrap();
    let mut found = 0;
    for page in 0..pages {
        let mut bytes = vec![0; PAGE_BYTES];
        device.read_at(page * PAGE_BYTES as u64, &mut bytes).unwrap();
        bytes[300] ^= 4;
        device.write_at(page * PAGE_BYTES as u64, &bytes).unwrap();
        if let Err(error) = pair.store().verify() {
            assert_eq!(error.kind(), ErrorKind::Corruption);
            assert!(error.to_string().contains("t0.rows"), "{error}");
            found += 1;
        }
        bytes[300] ^= 4;
        device.write_at(page * PAGE_BYTES as u64, &bytes).unwrap();
    }
    // Delta pages that hold newest rows are checked by the scan and as pages of their run.
    assert!(found > 0 && found <= checked, "{found} of {checked}");
    pair.store().verify().unwrap();
}

#[test]
fn the_quota_stops_growth_and_loses_nothing_committed() {
    for quota_bytes in (150_000..450_000).step_by(30_000) {
        check_quota(quota_bytes);
    }
}

fn check_quota(quota_bytes: u64) {
    let options = ColdOptions { disk_quota_bytes: Some(quota_bytes), ..tiny(3000) };
    let mut pair = Pair::new(options, &[(36, 10_000), (36, 10_000)]);
    let rows: Vec<_> = (0..100).map(|at| row(0, at)).collect();
    pair.write(&rows, 1);
    pair.store().commit("one", &[]).unwrap();
    let mut refused = None;
    for at in (100..10_000).step_by(50) {
        let rows: Vec<_> = (at..at + 50).map(|at| row((at / 50 % 2) as u32, at)).collect();
        refused = write_version(pair.store(), &rows, 2).err();
        if refused.is_some() {
            break;
        }
    }
    assert_eq!(refused.unwrap().kind(), ErrorKind::NoSpace);
    let length = |name| pair.folder.open(name, OpenMode::ReadOnly).unwrap().len_bytes().unwrap();
    let file_bytes = length("t0.rows") + length("t1.rows");
    assert!(file_bytes <= quota_bytes, "{file_bytes} bytes within {quota_bytes}");
    assert_eq!(pair.store().stats().disk_bytes, file_bytes);
    pair.check(&rows);
    pair.store = None;
    pair.store = Some(ColdStore::open(pair.folder.clone(), pair.options.clone()).unwrap());
    pair.check(&rows);
    assert_eq!(versions(pair.store(), &[row(0, 100)]).unwrap(), [None]);
}

#[test]
fn a_budget_below_the_minimum_names_it() {
    let open = |bytes| {
        let folder = Arc::new(MemoryFolder::default());
        let mut store = ColdStore::open(folder, by_budget(bytes, EngineChoice::Inline, 4))?;
        store.add_table(table("t", 36, 100_000))?;
        Ok::<_, tierbed_core::Error>(store)
    };
    let error = open(40 << 10).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.to_string().contains("at least"), "{error}");
    let fits = (1..60).find(|eighths| open((eighths * 8) << 10).is_ok()).unwrap();
    assert!(fits * 8 <= 256, "{} KiB", fits * 8);
}

#[test]
fn another_backends_folder_is_refused() {
    let folder: Arc<dyn Folder> = Arc::new(MemoryFolder::default());
    let mut memory = tierbed_store::MemoryStore::open(folder.clone(), Budget::unlimited()).unwrap();
    memory.commit("one", &[]).unwrap();
    drop(memory);
    let error = ColdStore::open(folder, tiny(3000)).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Invalid);
}

#[test]
fn a_store_of_a_large_budget_opens_in_a_smaller_one() {
    let mut pair = Pair::new(by_budget(64 << 20, EngineChoice::Inline, 4), &[(36, 3000)]);
    let rows: Vec<_> = (0..3000).map(|at| row(0, at)).collect();
    pair.write(&rows, 1);
    pair.store().commit("one", &[]).unwrap();
    pair.options = by_budget(2 << 20, EngineChoice::Inline, 4);
    pair.reopen();
    pair.check(&rows);
    pair.write(&rows, 2);
    pair.check(&rows);
    pair.check_scan(0);
}
