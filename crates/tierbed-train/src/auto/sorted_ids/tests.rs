//! The model: maps from ids to rows, batch after batch.

use std::collections::HashMap;

use tierbed_core::env::SplitMix64;
use tierbed_core::{ErrorKind, Schema, TableSchema};
use tierbed_io::MemoryFolder;
use tierbed_vocab::{Policy, SHARED_ROW};

use super::*;
use crate::auto::options::OrderConfig;

const OPEN: [TableId; 2] = [TableId(2), TableId(0)];
const DENSE: TableId = TableId(1);
const FEATURES: [TableId; 4] = [OPEN[0], DENSE, OPEN[1], OPEN[0]];

struct Batch {
    ids: Vec<i64>,
    offsets: Vec<i64>,
    is_stepped: bool,
}

impl Batch {
    fn new(rng: &mut SplitMix64, span: u64) -> Self {
        let (mut ids, mut offsets) = (Vec::new(), vec![0]);
        let most = if rng.below(8) == 0 { 1 } else { 40 };
        for _ in 0..2 * FEATURES.len() {
            for _ in 0..rng.below(most) {
                let id = rng.below(span).min(rng.below(span)) as i64;
                ids.push(id.wrapping_mul(0x1234_5678_9abc_def1));
            }
            offsets.push(ids.len() as i64);
        }
        Self { ids, offsets, is_stepped: rng.below(4) > 0 }
    }

    fn bags(&self) -> Bags<'_> {
        Bags::new(&self.ids, &self.offsets, None, FEATURES.len()).unwrap()
    }
}

#[derive(Default)]
struct Model {
    rows: HashMap<(u32, i64), u64>,
    next: HashMap<u32, u64>,
}

impl Model {
    fn rows_of(&mut self, batch: &Batch) -> Vec<i64> {
        let Self { rows, next } = self;
        let bags = batch.bags();
        let bounds: Vec<i64> = bags.bounds().collect();
        let mut found = Vec::new();
        for (table, range) in FEATURES.iter().zip(bounds.windows(2)) {
            for &id in &batch.ids[range[0] as usize..range[1] as usize] {
                if *table == DENSE {
                    found.push(id);
                    continue;
                }
                let key = (table.0, id);
                if batch.is_stepped && !rows.contains_key(&key) {
                    let next = next.entry(table.0).or_insert(SHARED_ROW + 1);
                    rows.insert(key, *next);
                    *next += 1;
                }
                found.push(rows.get(&key).copied().unwrap_or(SHARED_ROW) as i64);
            }
        }
        found
    }
}

fn index(folder: &Arc<dyn Folder>) -> PlannedIds {
    let tables = ["a", "dense", "b"].map(|name| TableSchema::plain(name, 4, 4));
    let schema = Schema::new(tables.to_vec()).unwrap();
    let config = OrderConfig { has_open_tables: true, ..OrderConfig::new(4 << 20) };
    let mut ids = PlannedIds::open(folder, &config, config.ids_planning_bytes()).unwrap();
    OPEN.iter().for_each(|&table| ids.add(&schema, table, Policy::default()).unwrap());
    ids
}

fn sorter(folder: &Arc<dyn Folder>, ids: &PlannedIds, memory_bytes: u64) -> IdSorter {
    let mut sorter = IdSorter::new(folder.clone(), "plan", FEATURES.to_vec(), ids).unwrap();
    assert!(sorter.memory_bytes >= 400 << 10, "{}", sorter.memory_bytes);
    sorter.memory_bytes = memory_bytes;
    sorter
}

type Planned = Vec<(Vec<i64>, Vec<i64>, u32)>;

fn plan(sorter: &mut IdSorter, ids: &mut PlannedIds, batches: &[Batch]) -> Result<Planned> {
    let mut planned = Vec::new();
    let mut sink = |bags: &Bags<'_>, checksum: u32| {
        planned.push((bags.indices.to_vec(), bags.bounds().collect(), checksum));
        Ok(())
    };
    for batch in batches {
        sorter.push(ids, &batch.bags(), batch.is_stepped, &mut sink)?;
    }
    sorter.flush(ids, &mut sink)?;
    Ok(planned)
}

fn expected(model: &mut Model, batches: &[Batch]) -> Planned {
    let one = |batch: &Batch| {
        let bounds = batch.bags().bounds().collect();
        (model.rows_of(batch), bounds, ids_checksum(&batch.bags()))
    };
    batches.iter().map(one).collect()
}

#[test]
fn rows_are_those_that_ids_get_batch_by_batch() {
    for (seed, memory_bytes) in [(1, 400 << 10), (2, 40_000), (3, 9_000), (4, 2_000)] {
        let mut rng = SplitMix64::new(seed);
        let folder: Arc<dyn Folder> = Arc::new(MemoryFolder::new());
        let (mut ids, mut model) = (index(&folder), Model::default());
        // A later plan finds ids of the first one.
        for span in [1500, 2500] {
            let mut batches: Vec<Batch> = (0..120).map(|_| Batch::new(&mut rng, span)).collect();
            batches.push(Batch { ids: vec![], offsets: vec![0; 9], is_stepped: true });
            let mut sorter = sorter(&folder, &ids, memory_bytes);
            let planned = plan(&mut sorter, &mut ids, &batches).unwrap();
            assert_eq!(planned, expected(&mut model, &batches), "{memory_bytes} bytes");
            drop(sorter);
            let next: Vec<u64> = OPEN.iter().map(|table| model.next[&table.0]).collect();
            assert_eq!(ids.next_rows(), next);
            assert_eq!(ids.id_count(), model.rows.len() as u64);
            assert!(!folder.list().unwrap().iter().any(|name| name.starts_with("plan")));
        }
        for (&(table, id), &row) in &model.rows {
            let at = OPEN.iter().position(|open| open.0 == table).unwrap() as u32;
            let mut found = [id];
            ids.find_known(at, &mut found).unwrap();
            assert_eq!(found, [row as i64]);
        }
        ids.checkpoint().unwrap();
        ids.verify().unwrap();
    }
}

#[test]
fn lost_scratch_is_told_and_another_try_gives_the_same_rows() {
    let mut rng = SplitMix64::new(5);
    let batches: Vec<Batch> = (0..40).map(|_| Batch::new(&mut rng, 900)).collect();
    let wanted = expected(&mut Model::default(), &batches);
    for name in ["plan.batches", "plan.uses"] {
        let folder: Arc<dyn Folder> = Arc::new(MemoryFolder::new());
        let mut ids = index(&folder);
        ids.checkpoint().unwrap();
        let mut first = sorter(&folder, &ids, 60_000);
        let mut sink = |_: &Bags<'_>, _: u32| Ok(());
        for batch in &batches {
            first.push(&mut ids, &batch.bags(), batch.is_stepped, &mut sink).unwrap();
        }
        let file = folder.open(name, OpenMode::Create).unwrap();
        assert!(file.len_bytes().unwrap() > 0, "{name} was not written");
        file.write_at(8, &[0xA5; 64]).unwrap();
        let error = first.flush(&mut ids, &mut sink).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corruption, "{name}: {error}");
        assert!(error.to_string().contains("try again; the store is as it was"), "{error}");
        drop((first, ids));
        // As a plan is begun again: the index stands at its checkpoint.
        let mut ids = index(&folder);
        let mut second = sorter(&folder, &ids, 60_000);
        assert_eq!(plan(&mut second, &mut ids, &batches).unwrap(), wanted);
    }
}
