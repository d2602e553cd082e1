//! A plan says what a naive oracle says, whatever memory it was made with.

use std::collections::BTreeMap;
use std::sync::Arc;

use proptest::prelude::*;
use tierbed_core::env::SplitMix64;
use tierbed_core::{Bags, ErrorKind, TableId};
use tierbed_io::{Folder, MemoryFolder, OpenMode};

use super::*;

/// A small trace: features read tables 0, 1, 0.
struct Trace {
    batches: Vec<(Vec<i64>, Vec<i64>)>,
    shape: PlanShape,
}

fn trace(seed: u64, batch_count: usize, rows: u64) -> Trace {
    let mut rng = SplitMix64::new(seed);
    let shape = PlanShape {
        feature_tables: vec![TableId(0), TableId(1), TableId(0)],
        row_counts: vec![rows, 7, 50],
        record_bytes: vec![40, 8, 12],
    };
    let batches = (0..batch_count)
        .map(|_| {
            let (mut indices, mut offsets) = (vec![], vec![0]);
            for table in &shape.feature_tables {
                for _ in 0..3 {
                    for _ in 0..rng.below(4) {
                        let rows = shape.row_counts[table.0 as usize];
                        let span = if rng.below(2) == 0 { rows } else { 3 };
                        indices.push(rng.below(span) as i64);
                    }
                    offsets.push(indices.len() as i64);
                }
            }
            (indices, offsets)
        })
        .collect();
    Trace { batches, shape }
}

fn build(trace: &Trace, options: &PlanOptions) -> (Arc<dyn Folder>, EpochPlan) {
    let folder: Arc<dyn Folder> = Arc::new(MemoryFolder::new());
    let shape = trace.shape.clone();
    let mut builder = PlanBuilder::new(folder.clone(), "p", shape, "s", options.clone()).unwrap();
    for (indices, offsets) in &trace.batches {
        builder.push(&Bags::new(indices, offsets, None, 3).unwrap()).unwrap();
    }
    builder.finish().unwrap();
    assert_eq!(folder.list().unwrap(), ["p", "p.ids"], "scratch files are gone");
    let plan = EpochPlan::open(&*folder, "p").unwrap();
    (folder, plan)
}

/// A row of a table.
type Row = (usize, u64);

fn check_against_oracle(trace: &Trace, plan: &EpochPlan) {
    let mut windows: Vec<PlanWindow> = Vec::new();
    for number in 0..plan.window_count() {
        let mut window = PlanWindow::default();
        plan.load(number, &mut window).unwrap();
        windows.push(window);
    }
    // Uses of each row: (window, entry), in order.
    let mut uses: BTreeMap<Row, Vec<(u64, u64)>> = BTreeMap::new();
    for (number, window) in windows.iter().enumerate() {
        for (table, entries) in window.tables().iter().enumerate() {
            for (at, row) in window.rows(entries).enumerate() {
                let entry = u64::from(entries.first) + at as u64;
                uses.entry((table, row)).or_default().push((number as u64, entry));
            }
        }
    }
    assert_eq!(plan.row_count_max(), uses.len() as u64);
    for (number, window) in windows.iter().enumerate() {
        for (table, entries) in window.tables().iter().enumerate() {
            let next = window.next_uses(entries);
            assert_eq!(window.rows(entries).count(), entries.count as usize);
            for (at, row) in window.rows(entries).enumerate() {
                let all = &uses[&(table, row)];
                let entry = (number as u64, u64::from(entries.first) + at as u64);
                let position = all.iter().position(|known| *known == entry).unwrap();
                let (next_window, next_entry) = next.get(at).unwrap();
                assert_eq!(
                    (next_window as u64, u64::from(next_entry)),
                    all[(position + 1) % all.len()],
                    "row {row} of table {table}"
                );
            }
        }
    }
    let mut batches = trace.batches.iter();
    for window in &windows {
        for at in 0..window.batch_count() {
            let (indices, offsets) = batches.next().unwrap();
            let mut batch = window.batch(at).unwrap();
            assert_eq!(batch.index_count as usize, indices.len());
            let bags = Bags::new(indices, offsets, None, 3).unwrap();
            assert_eq!(batch.checksum, ids_checksum(&bags));
            for (feature, table) in trace.shape.feature_tables.iter().enumerate() {
                let bounds = bags.feature_offsets(feature);
                let ids = &indices[bounds[0] as usize..*bounds.last().unwrap() as usize];
                let entries = window.tables()[table.0 as usize];
                let mapping = window.mapping(&mut batch, table.0 as usize, ids.len());
                for (at, id) in ids.iter().enumerate() {
                    let entry = mapping.get(at).unwrap() as usize;
                    assert_eq!(window.rows(&entries).nth(entry), Some(*id as u64));
                }
            }
        }
    }
    assert!(batches.next().is_none(), "every batch is in a window");
}

fn options(window_batches_max: u32, window_bytes: u64, memory_bytes: u64) -> PlanOptions {
    PlanOptions { window_bytes, window_batches_max, memory_bytes }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn equals_the_oracle(
        seed in any::<u64>(),
        batches in 1usize..40,
        window in 1u32..9,
        bytes in 1u64..2000,
    ) {
        let trace = trace(seed, batches, 200);
        let (_, plan) = build(&trace, &options(window, bytes, 1 << 20));
        check_against_oracle(&trace, &plan);
    }
}

#[test]
fn little_memory_makes_the_same_plan() {
    let trace = trace(5, 60, 3000);
    let bytes_of = |memory_bytes| {
        let (folder, plan) = build(&trace, &options(4, 1 << 30, memory_bytes));
        check_against_oracle(&trace, &plan);
        folder.read("p").unwrap().unwrap()
    };
    let large = bytes_of(1 << 20);
    for memory_bytes in [0, 64, 1000, 20_000] {
        assert!(bytes_of(memory_bytes) == large, "memory {memory_bytes}");
    }
}

#[test]
fn windows_are_cut_by_bytes_and_by_batches() {
    let trace = trace(6, 64, 500);
    let (_, one) = build(&trace, &options(1 << 20, u64::MAX, 1 << 20));
    assert_eq!(one.window_count(), 1);
    let (_, all) = build(&trace, &options(1, u64::MAX, 1 << 20));
    assert_eq!(all.window_count(), 64);
    let (_, some) = build(&trace, &options(1 << 20, 2000, 1 << 20));
    assert!((4..64).contains(&some.window_count()), "{}", some.window_count());
}

#[test]
fn a_plan_of_another_origin_is_not_taken() {
    let trace = trace(7, 8, 100);
    let made = options(2, 4000, 1 << 20);
    let (folder, _) = build(&trace, &made);
    let open = |name: &str, source: &str, options: &PlanOptions| {
        EpochPlan::open_for(&*folder, name, &trace.shape, source, options).unwrap()
    };
    assert!(open("p", "s", &made).is_some());
    assert!(open("p", "s", &PlanOptions { memory_bytes: 7, ..made.clone() }).is_some());
    assert!(open("p", "other", &made).is_none());
    assert!(open("absent", "s", &made).is_none());
    assert!(open("p", "s", &options(3, 4000, 1 << 20)).is_none());
}

#[test]
fn damage_is_an_error() {
    let trace = trace(8, 20, 300);
    let (folder, plan) = build(&trace, &options(4, 1 << 30, 1 << 20));
    let good = folder.read("p").unwrap().unwrap();
    let check = |bytes: &[u8]| {
        folder.remove("p").unwrap();
        folder.write_durable("p", bytes).unwrap();
        EpochPlan::open(&*folder, "p").and_then(|plan| plan.verify())
    };
    assert!(check(&good).is_ok());
    for cut in (0..plan.stats().file_bytes as usize).step_by(509) {
        assert!(check(&good[..cut]).is_err(), "cut at {cut}");
    }
    let mut missed = 0;
    for bit in (0..good.len() * 8).step_by(61) {
        let mut bytes = good.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        match check(&bytes) {
            // Padding between blocks is the only place where a bit means nothing.
            Ok(_) => {
                assert!(good[bit / 8] == 0);
                missed += 1;
            }
            Err(error) => assert!(
                matches!(error.kind(), ErrorKind::Corruption | ErrorKind::Invalid),
                "{error}"
            ),
        }
    }
    assert!(missed < good.len() * 8 / 61);
}

#[test]
fn an_unfinished_plan_is_none() {
    let trace = trace(9, 3, 100);
    let folder: Arc<dyn Folder> = Arc::new(MemoryFolder::new());
    let made = options(2, 4000, 1 << 20);
    let shape = trace.shape.clone();
    let mut builder = PlanBuilder::new(folder.clone(), "p", shape, "s", made.clone()).unwrap();
    let (indices, offsets) = &trace.batches[0];
    builder.push(&Bags::new(indices, offsets, None, 3).unwrap()).unwrap();
    drop(builder);
    folder.open("p", OpenMode::Create).unwrap().set_len(8192).unwrap();
    assert!(EpochPlan::open(&*folder, "p").is_err());
    assert!(EpochPlan::open_for(&*folder, "p", &trace.shape, "s", &made).unwrap().is_none());
}

#[test]
fn ids_out_of_range_are_refused() {
    let trace = trace(10, 1, 100);
    let folder: Arc<dyn Folder> = Arc::new(MemoryFolder::new());
    let mut builder =
        PlanBuilder::new(folder, "p", trace.shape, "s", PlanOptions::default()).unwrap();
    for id in [-1, 100] {
        let bags = Bags::new(std::slice::from_ref(&id), &[0, 1, 1, 1], None, 3).unwrap();
        assert_eq!(builder.push(&bags).unwrap_err().kind(), ErrorKind::Invalid);
    }
    assert_eq!(builder.finish().unwrap_err().kind(), ErrorKind::Invalid);
}

#[test]
fn power_loss_leaves_a_whole_plan_or_none() {
    use tierbed_sim::{FaultPlan, SimFolder};
    let trace = trace(11, 12, 80);
    let made = options(3, 1 << 30, 1 << 20);
    let make = |folder: &SimFolder| {
        let folder: Arc<dyn Folder> = Arc::new(folder.clone());
        let mut builder = PlanBuilder::new(folder, "p", trace.shape.clone(), "s", made.clone())?;
        for (indices, offsets) in &trace.batches {
            builder.push(&Bags::new(indices, offsets, None, 3)?)?;
        }
        builder.finish()
    };
    let healthy = SimFolder::default();
    make(&healthy).unwrap();
    let mut whole = 0;
    for point in 0..healthy.io_count() {
        let fault = FaultPlan { crash_after_io: Some(point), ..FaultPlan::default() };
        let folder = SimFolder::new(fault);
        let _ = make(&folder);
        let image = folder.crash(point);
        if let Some(plan) = EpochPlan::open_for(&image, "p", &trace.shape, "s", &made).unwrap() {
            check_against_oracle(&trace, &plan);
            whole += 1;
        }
        make(&image).unwrap();
        check_against_oracle(&trace, &EpochPlan::open(&image, "p").unwrap());
    }
    assert!(whole < healthy.io_count());
}

/// Found by fuzzing: the header's longest block was allocated unseen, 4 GiB for a page of damage.
#[test]
fn a_block_longer_than_the_file_is_damage() {
    let (folder, _) = build(&trace(1, 4, 30), &PlanOptions::default());
    let mut bytes = folder.read("p").unwrap().unwrap();
    bytes[64..68].copy_from_slice(&u32::MAX.to_le_bytes());
    let crc = tierbed_core::checksum::crc32c(&bytes[12..tierbed_io::PAGE_BYTES]);
    bytes[8..12].copy_from_slice(&crc.to_le_bytes());
    folder.write_durable("damaged", &bytes).unwrap();
    let error = EpochPlan::open(&*folder, "damaged").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corruption, "{error}");
}

/// Makes the plan anew, whatever an earlier attempt left.
fn make(
    folder: &tierbed_sim::SimFolder,
    trace: &Trace,
    made: &PlanOptions,
) -> tierbed_core::Result<()> {
    let folder: Arc<dyn Folder> = Arc::new(folder.clone());
    let mut builder = PlanBuilder::new(folder, "p", trace.shape.clone(), "s", made.clone())?;
    for (indices, offsets) in &trace.batches {
        builder.push(&Bags::new(indices, offsets, None, 3)?)?;
    }
    builder.finish()
}

#[test]
fn a_killed_pre_pass_leaves_the_whole_plan_or_none_and_is_made_again() {
    use tierbed_sim::{FaultPlan, SimFolder};
    let trace = trace(12, 23, 400);
    let bytes_of = |folder: &SimFolder| folder.read("p").unwrap().unwrap();
    // All tables at once; groups of tables; ranges of a table.
    for memory_bytes in [1 << 20, 3400, 900] {
        let made = options(3, 1 << 30, memory_bytes);
        let healthy = SimFolder::default();
        make(&healthy, &trace, &made).unwrap();
        let whole = bytes_of(&healthy);
        let (mut absent, mut ready) = (0, 0);
        for point in 0..healthy.io_count() {
            let fault = FaultPlan { crash_after_io: Some(point), ..FaultPlan::default() };
            let folder = SimFolder::new(fault);
            let _ = make(&folder, &trace, &made);
            let image = if point % 2 == 0 { folder.crash(point) } else { folder.crash_to_synced() };
            let found = EpochPlan::open_for(&image, "p", &trace.shape, "s", &made).unwrap();
            absent += u32::from(found.is_none());
            if let Some(found) = found {
                ready += 1;
                found.verify().unwrap();
                assert!(bytes_of(&image) == whole, "io {point}");
            }
            make(&image, &trace, &made).unwrap();
            assert!(bytes_of(&image) == whole, "io {point}");
            assert_eq!(Folder::list(&image).unwrap(), ["p", "p.ids"], "scratch files are gone");
        }
        assert!(absent > 10 && ready > 0, "{absent} {ready}");
    }
}

#[test]
fn scratch_of_an_earlier_version_is_removed() {
    let trace = trace(13, 20, 300);
    let folder = tierbed_sim::SimFolder::default();
    folder.write_durable("p.note", b"how far the scratch files go").unwrap();
    make(&folder, &trace, &options(3, 1 << 30, 1 << 20)).unwrap();
    assert_eq!(Folder::list(&folder).unwrap(), ["p", "p.ids"]);
}

#[test]
fn lost_scratch_is_corruption_or_the_same_plan() {
    use tierbed_sim::{Chance, FaultPlan, SimFolder};
    let trace = trace(14, 23, 400);
    let made = options(3, 1 << 30, 900);
    let healthy = SimFolder::default();
    make(&healthy, &trace, &made).unwrap();
    let whole = healthy.read("p").unwrap().unwrap();
    let mut found = 0;
    for luck in 0..160 {
        let lie = Chance::Nth(luck / 4);
        let plan = match luck % 4 {
            0 => FaultPlan { seed: luck, lost_write: lie, ..FaultPlan::default() },
            1 => FaultPlan { seed: luck, misdirected_write: lie, ..FaultPlan::default() },
            2 => FaultPlan { seed: luck, torn_write: lie, ..FaultPlan::default() },
            _ => FaultPlan { seed: luck, read_bit_flip: lie, ..FaultPlan::default() },
        };
        let folder = SimFolder::new(plan);
        let result = make(&folder, &trace, &made);
        folder.set_plan(FaultPlan::default());
        let bytes = folder.read("p").unwrap();
        match result.and_then(|_| EpochPlan::open(&folder, "p")).and_then(|plan| plan.verify()) {
            Ok(_) => assert!(
                bytes.is_some_and(
                    |bytes| bytes.len() == whole.len() && bytes[..4096] == whole[..4096]
                ),
                "luck {luck}"
            ),
            Err(error) => {
                let is_told = [ErrorKind::Corruption, ErrorKind::Invalid].contains(&error.kind());
                assert!(is_told, "{error}");
                found += 1;
                make(&folder, &trace, &made).unwrap();
                assert!(folder.read("p").unwrap().unwrap() == whole, "luck {luck}");
            }
        }
    }
    assert!(found > 10, "{found}");
}
