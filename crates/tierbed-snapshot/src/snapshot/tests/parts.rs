//! Rows of several pages: a bad part is told wherever it lies, in whatever way the row is read.
//!
//! A row once counted as read with its first part, and the error of a later part was dropped: the
//! answer lacked that part, and applying a delta copied it under valid checksums.

use tierbed_sim::{Chance, FaultPlan, SimFolder};

use super::*;
use crate::delta::apply_delta;

const DIM: u32 = 2100;
const PARTS: u64 = 3;
const ROWS: u64 = 5;

fn publish_large(folder: &Arc<dyn Folder>) -> Schema {
    let schema = Schema::new(vec![table("large", ROWS, DIM)]).unwrap();
    let rows: Vec<_> = (0..ROWS)
        .map(|row| (RowKey::new(TableId(0), RowId(row)), vec![row as f32 + 1.0; DIM as usize]))
        .collect();
    assert_eq!(publish(folder, &schema, &rows).page_count, ROWS * PARTS);
    schema
}

/// Looks up all rows, one by one and together; returns the first error.
fn lookup_all(snapshot: &Snapshot) -> Result<()> {
    let plan = FeatureLayout::new(snapshot.schema(), &[(TableId(0), Pooling::None)]).unwrap();
    let every: Vec<i64> = (0..ROWS as i64).collect();
    for rows in every.chunks(1).chain([&every[..]]) {
        let offsets = [0, rows.len() as i64];
        let mut out = vec![0.0; DIM as usize * rows.len()];
        let bags = Bags::new(rows, &offsets, None, 1).unwrap();
        snapshot.lookup(&plan, &bags, &mut out)?;
        for (vector, row) in out.chunks(DIM as usize).zip(rows) {
            assert!(vector.iter().all(|&word| word == *row as f32 + 1.0), "row {row}");
        }
    }
    Ok(())
}

fn read_all(snapshot: Snapshot) -> Result<()> {
    let keys: Vec<RowKey> = (0..ROWS).map(|row| RowKey::new(TableId(0), RowId(row))).collect();
    SnapshotRows::new(Arc::new(snapshot)).read(&keys, &mut |_, _| Ok(()))
}

#[test]
fn a_flipped_bit_in_any_part_is_corruption_in_every_backend() {
    let temporary = tempfile::tempdir().unwrap();
    let folder: Arc<dyn Folder> = Arc::new(FsFolder::create(temporary.path().join("s")).unwrap());
    publish_large(&folder);
    let device = folder.open(PAGES_NAME, OpenMode::ReadWrite).unwrap();
    let whole = folder.read(PAGES_NAME).unwrap().unwrap();
    let mut rng = SplitMix64::new(11);
    for page in 0..ROWS * PARTS {
        let at = page * 4096 + rng.below(4096);
        let byte = whole[at as usize];
        device.write_at(at, &[byte ^ (1 << rng.below(8))]).unwrap();
        for backend in [Backend::Direct, Backend::Mmap, Backend::Memory] {
            for choice in [EngineChoice::Inline, EngineChoice::Pread, EngineChoice::Auto] {
                for cache_bytes_max in [None, Some(0)] {
                    let small = options(4 << 20);
                    let mut options = SnapshotOptions { backend, cache_bytes_max, ..small };
                    options.engine.choice = choice;
                    let snapshot = Snapshot::open(Arc::clone(&folder), &options).unwrap();
                    let error = lookup_all(&snapshot).unwrap_err();
                    assert_eq!(error.kind(), ErrorKind::Corruption, "page {page} {backend:?}");
                    assert!(error.to_string().contains(&format!("page_id: {page}")), "{error}");
                    lookup_all(&snapshot).unwrap_err();
                    read_all(snapshot).unwrap_err();
                }
            }
        }
        device.write_at(at, &[byte]).unwrap();
    }
    lookup_all(&Snapshot::open(folder, &options(4 << 20)).unwrap()).unwrap();
}

#[test]
fn a_read_error_in_any_part_is_told_and_the_next_call_works() {
    let sim = SimFolder::new(FaultPlan::default());
    let folder: Arc<dyn Folder> = Arc::new(sim.clone());
    publish_large(&folder);
    let options = SnapshotOptions { cache_bytes_max: Some(0), ..options(4 << 20) };
    let snapshot = Snapshot::open(folder, &options).unwrap();
    for part in 0..ROWS * PARTS {
        sim.set_plan(FaultPlan { read_error: Chance::Nth(part), ..FaultPlan::default() });
        let error = lookup_all(&snapshot).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Io, "page {part}: {error}");
        lookup_all(&snapshot).unwrap();
    }
}

#[test]
fn a_delta_with_a_bad_part_is_not_applied() {
    let (base, delta) = (memory_folder(), memory_folder());
    let schema = publish_large(&base);
    let base = Arc::new(Snapshot::open(base, &options(4 << 20)).unwrap());
    let budget = Budget::new(4 << 20);
    let mut writer = SnapshotWriter::create(Arc::clone(&delta), &schema, &budget).unwrap();
    writer.push(TableId(0), RowId(2), &vec![7.0; DIM as usize]).unwrap();
    writer.set_base(&base).unwrap();
    writer.finish().unwrap();
    let device = delta.open(PAGES_NAME, OpenMode::ReadWrite).unwrap();
    for part in 0..PARTS {
        let at = part * 4096 + 2000;
        let mut byte = [0];
        device.read_at(at, &mut byte).unwrap();
        device.write_at(at, &[byte[0] ^ 2]).unwrap();
        let damaged = Snapshot::open_any(Arc::clone(&delta), &options(4 << 20)).unwrap();
        let out = memory_folder();
        let error = apply_delta(&base, &Arc::new(damaged), &out, &budget).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corruption, "part {part}");
        Snapshot::open(out, &options(4 << 20)).unwrap_err();
        device.write_at(at, &byte).unwrap();
    }
}
