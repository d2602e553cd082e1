//! Deltas applied to an open snapshot, against a map and against the snapshot that is made of both.

use std::sync::atomic::{AtomicBool, Ordering};

use tierbed_cache::PolicyKind;
use tierbed_kernels::Codec;

use super::placed::{place, schema as placed_schema};
use super::tiers::coded;
use super::*;
use crate::delta::apply_delta;
use crate::{CacheTier, PageLayout, PlacedTables, TableCodecs, TierStackOptions};

mod chains;
mod former;
mod live;
mod remedies;

/// What differs between the generations of a snapshot.
pub(super) struct Chain {
    pub(super) folder: Arc<dyn Folder>,
    pub(super) schema: Schema,
    pub(super) codec: Codec,
    /// What it answers: rows as their codec keeps them.
    pub(super) model: Model,
}

impl Chain {
    pub(super) fn publish(schema: Schema, codec: Codec, placed: Vec<PlacedTables>) -> Self {
        let folder = memory_folder();
        let mut chain = Self { folder, schema, codec, model: Model::new() };
        let rows = some_rows(&chain.schema, 1);
        let mut writer = chain.writer(&chain.folder.clone(), placed);
        for (key, row) in &rows {
            writer.push(key.table, key.row, row).unwrap();
        }
        writer.attach("model", b"0").unwrap();
        writer.finish().unwrap();
        chain.take(&rows);
        chain
    }

    fn writer(&self, folder: &Arc<dyn Folder>, placed: Vec<PlacedTables>) -> SnapshotWriter {
        let ids = (0..self.schema.tables().len() as u32).map(TableId);
        let tables = ids.map(|id| (id, self.codec.name()));
        let codecs = TableCodecs::named(tables).unwrap();
        let layout = PageLayout { codecs, placed, ..PageLayout::default() };
        let budget = Budget::new(6 << 20);
        SnapshotWriter::create_placed(Arc::clone(folder), &self.schema, layout, &budget).unwrap()
    }

    fn take(&mut self, rows: &[(RowKey, Vec<f32>)]) {
        for (key, row) in rows {
            let code = coded(&self.codec, row);
            // A code of the initial weights stands for these themselves.
            let initial = coded(&self.codec, &row_of(&self.schema, &Model::new(), *key));
            match code == initial {
                true => self.model.remove(key),
                false => self.model.insert(*key, code),
            };
        }
    }

    /// Writes `rows` as a delta of the snapshot in `base`.
    pub(super) fn delta(
        &mut self,
        base: &Arc<dyn Folder>,
        rows: &[(RowKey, Vec<f32>)],
    ) -> Arc<dyn Folder> {
        let folder = memory_folder();
        let mut writer = self.writer(&folder, Vec::new());
        writer.set_base(&Snapshot::open(Arc::clone(base), &options(8 << 20)).unwrap()).unwrap();
        for (key, row) in rows {
            writer.push(key.table, key.row, row).unwrap();
        }
        writer.attach("model", b"dense").unwrap();
        writer.finish().unwrap();
        self.take(rows);
        folder
    }

    /// Every row that a snapshot with the rows of `first` stores, or that was changed since, as it
    /// is now, and `rows`: what a delta against that snapshot may have.
    pub(super) fn all_since(
        &self,
        first: &Model,
        rows: &[(RowKey, Vec<f32>)],
    ) -> Vec<(RowKey, Vec<f32>)> {
        let keys = first.keys().chain(self.model.keys());
        let now = keys.map(|key| (*key, row_of(&self.schema, &self.model, *key)));
        let mut all: Model = now.collect();
        all.extend(rows.iter().cloned());
        all.into_iter().collect()
    }

    /// Some rows with new weights: stored ones, ones that never were, and freed ones.
    pub(super) fn changes(&self, count: u64, rng: &mut SplitMix64) -> Vec<(RowKey, Vec<f32>)> {
        let mut rows = Model::new();
        for _ in 0..count {
            let id = TableId(rng.below(self.schema.tables().len() as u64) as u32);
            let table = self.schema.table(id).unwrap();
            let key = RowKey::new(id, RowId(rng.below(table.row_count)));
            let mut row: Vec<f32> = (0..table.dim).map(|_| rng.unit_f64() as f32 - 0.5).collect();
            if rng.below(4) == 0 {
                fill_initial(&table.init, table.seed, key.row.0, &mut row);
            }
            rows.insert(key, row);
        }
        rows.into_iter().collect()
    }
}

fn applied(base: &Arc<dyn Folder>, delta: &Arc<dyn Folder>) -> Arc<dyn Folder> {
    let out = memory_folder();
    let base = Arc::new(Snapshot::open(base.clone(), &options(8 << 20)).unwrap());
    let delta = Arc::new(Snapshot::open_any(delta.clone(), &options(8 << 20)).unwrap());
    apply_delta(&base, &delta, &out, &Budget::new(6 << 20)).unwrap();
    out
}

/// The weights of every row that `snapshot` has.
fn every_row(snapshot: &Arc<Snapshot>) -> Vec<(RowKey, Vec<u8>)> {
    let mut rows = SnapshotRows::new(Arc::clone(snapshot));
    let schema = rows.schema().clone();
    let mut found = Vec::new();
    for table in 0..schema.tables().len() as u32 {
        let mut sink = |row: RowId, record: &[u8]| {
            found.push((RowKey::new(TableId(table), row), record.to_vec()));
            Ok(())
        };
        rows.scan(TableId(table), &mut sink).unwrap();
    }
    found
}

/// Bits of the weights that `snapshot` answers for every row of the tables.
pub(super) fn answers(snapshot: &Snapshot) -> Vec<u32> {
    answers_of(&snapshot.view())
}

/// Bits of the weights that a generation answers for every row of its tables.
pub(super) fn answers_of(view: &crate::View<'_>) -> Vec<u32> {
    let mut bits = Vec::new();
    for (table, at) in view.schema().tables().iter().zip(0..) {
        let plan = FeatureLayout::new(view.schema(), &[(TableId(at), Pooling::None)]).unwrap();
        let ids: Vec<i64> = (0..table.row_count as i64).collect();
        let offsets = [0, ids.len() as i64];
        let bags = Bags::new(&ids, &offsets, None, 1).unwrap();
        let mut out = vec![f32::NAN; plan.output_len(&bags)];
        view.lookup(&plan, &bags, &mut out).unwrap();
        bits.extend(out.iter().map(|number| number.to_bits()));
    }
    bits
}

/// Two tiers, of which the second has what falls from the first.
pub(super) fn two_tiers(policy: PolicyKind) -> TierStackOptions {
    let tier = |codec| CacheTier { codec, policy, ..CacheTier::default() };
    TierStackOptions { tiers: vec![tier(Codec::F32), tier(Codec::F32)], ..Default::default() }
}

#[test]
fn overlays_equal_the_applied_snapshot() {
    for (codec, seed) in [(Codec::F32, 1), (Codec::Int8, 2), (Codec::Int4, 3), (Codec::F16, 4)] {
        for backend in [Backend::Direct, Backend::Memory] {
            let mut rng = SplitMix64::new(seed);
            let mut chain = Chain::publish(schema(), codec.clone(), Vec::new());
            let tiers = two_tiers(PolicyKind::Lru);
            let options = SnapshotOptions { backend, tiers, ..options(16 << 20) };
            let served = Arc::new(Snapshot::open(chain.folder.clone(), &options).unwrap());
            let mut whole = chain.folder.clone();
            for number in 1..=4 {
                // What is in the tiers must not answer any more.
                check_lookups(&served, &chain.model, number);
                let rows = chain.changes(400, &mut rng);
                let delta = chain.delta(&whole, &rows);
                whole = applied(&whole, &delta);
                let generation = served.apply(delta.clone()).unwrap();
                assert_eq!((generation.number, generation.delta_count), (number, number));
                assert_eq!(served.apply(delta).unwrap(), generation, "applied already");
                check_lookups(&served, &chain.model, number);
                let expected = Arc::new(Snapshot::open(whole.clone(), &options).unwrap());
                assert!(answers(&served) == answers(&expected), "{} {number}", codec.name());
                assert!(
                    every_row(&served).into_iter().filter(|row| !is_initial(&chain, row)).eq(
                        every_row(&expected).into_iter().filter(|row| !is_initial(&chain, row))
                    ),
                    "rows of {} {number}",
                    codec.name()
                );
                assert_eq!(served.attachment("model").unwrap().unwrap(), b"dense");
                served.verify().unwrap();
            }
            assert!(served.stats().generation.rows_replaced > 0);
            assert!(served.budget_report().peak_bytes <= 16 << 20);
        }
    }
}

/// Whether a row is as good as never written: one side may store it, the other not.
fn is_initial(chain: &Chain, (key, record): &(RowKey, Vec<u8>)) -> bool {
    let initial = coded(&chain.codec, &row_of(&chain.schema, &Model::new(), *key));
    record.starts_with(bytemuck::cast_slice(&initial))
}

#[test]
fn a_stale_replica_never_answers() {
    let mut rng = SplitMix64::new(3);
    for codec in [Codec::F32, Codec::Int8] {
        let tables = |ids: &[u32]| ids.iter().map(|&id| TableId(id)).collect();
        let rows_per_page = if codec == Codec::F32 { [59, 15] } else { [150, 50] };
        let placed = vec![
            PlacedTables {
                tables: tables(&[4, 0, 2]),
                index: place(807, rows_per_page[0], 2.0, &mut rng),
            },
            PlacedTables {
                tables: tables(&[1]),
                index: place(200, rows_per_page[1], 1.0, &mut rng),
            },
        ];
        let mut chain = Chain::publish(placed_schema(), codec, placed);
        let first = chain.model.clone();
        let served = Snapshot::open(chain.folder.clone(), &options(8 << 20)).unwrap();
        for seed in 0..3 {
            check_lookups(&served, &chain.model, seed);
            let rows = chain.changes(150, &mut rng);
            let folder = chain.folder.clone();
            // Against the snapshot itself each time: the last one has them all.
            let all = chain.all_since(&first, &rows);
            let delta = chain.delta(&folder, &all);
            let generation = served.apply(delta.clone()).unwrap();
            assert_eq!((generation.number, generation.delta_count), (seed + 1, 1));
            check_lookups(&served, &chain.model, seed);
            served.verify().unwrap();
            // The page of a changed row is lost: its replicas below hold what it was before.
            let pages = delta.open(PAGES_NAME, OpenMode::ReadWrite).unwrap();
            let mut page = vec![0; 4096];
            pages.read_at(0, &mut page).unwrap();
            let view = crate::page::PageView::parse(&page, 0, &served.page_table().shapes).unwrap();
            let key = RowKey::new(view.owner, view.row(0));
            page[100] ^= 1;
            pages.write_at(0, &page).unwrap();
            let fresh = Snapshot::open(folder, &options(8 << 20)).unwrap();
            assert!(fresh.apply(delta.clone()).is_err(), "a damaged delta is refused");
            let answer = cold_row(&served, key);
            assert!(answer.is_err(), "{key:?} has {answer:?}");
            page[100] ^= 1;
            pages.write_at(0, &page).unwrap();
        }
    }
}

/// A row as the pages have it, past the tiers.
fn cold_row(snapshot: &Snapshot, key: RowKey) -> Result<()> {
    let mut guard = snapshot.take_reader();
    let layers = snapshot.layers();
    let reader = guard.get();
    reader.scratch.start(1);
    assert!(reader.scratch.add(key, snapshot.dim(key, &layers)));
    snapshot.fetch(reader, &layers, false).map(drop)
}

#[test]
fn every_flipped_bit_of_a_delta_is_noticed() {
    let mut rng = SplitMix64::new(9);
    let small = Schema::new(vec![table("t", 60, 16), table("large", 3, 1100)]).unwrap();
    let mut chain = Chain::publish(small, Codec::F32, Vec::new());
    let served = Snapshot::open(chain.folder.clone(), &options(4 << 20)).unwrap();
    let before = answers(&served);
    let base = chain.folder.clone();
    let rows = chain.changes(9, &mut rng);
    let delta = chain.delta(&base, &rows);
    for name in delta.list().unwrap() {
        let bytes = delta.read(&name).unwrap().unwrap();
        // A bit of every byte, and every bit of some.
        let bits = (0..bytes.len() * 8).filter(|bit| bit % 8 == bit / 8 % 8 || bit % 1009 < 8);
        for bit in bits {
            let mut damaged = bytes.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            delta.write_durable(&name, &damaged).unwrap();
            assert!(served.apply(delta.clone()).is_err(), "bit {bit} of {name}");
        }
        for cut in [0, bytes.len() / 2, bytes.len() - 1] {
            delta.write_atomic(&name, &bytes[..cut]).unwrap();
            assert!(served.apply(delta.clone()).is_err(), "{name} cut at {cut}");
        }
        delta.write_atomic(&name, &bytes).unwrap();
    }
    assert!(delta.list().unwrap().iter().any(|name| name.starts_with(ATTACHMENT_PREFIX)));
    assert!(answers(&served) == before, "a refused delta changed an answer");
    assert_eq!(served.generation().number, 0);
    served.apply(delta).unwrap();
    check_lookups(&served, &chain.model, 1);
}

#[test]
fn tables_grow_and_new_ones_come() {
    let mut rng = SplitMix64::new(5);
    let mut chain = Chain::publish(schema(), Codec::F32, Vec::new());
    for policy in [PolicyKind::Lru, PolicyKind::from_name("ev_lfu").unwrap()] {
        let options = SnapshotOptions { tiers: two_tiers(policy), ..options(16 << 20) };
        let served = Snapshot::open(chain.folder.clone(), &options).unwrap();
        let mut tables = schema().tables().to_vec();
        tables[1].row_count = 6000;
        tables.push(table("new", 70, 12));
        let mut grown = Chain {
            folder: chain.folder.clone(),
            schema: Schema::new(tables).unwrap(),
            codec: Codec::F32,
            model: chain.model.clone(),
        };
        let rows = grown.changes(900, &mut rng);
        let base = grown.folder.clone();
        let delta = grown.delta(&base, &rows);
        served.apply(delta).unwrap();
        for _ in 0..2 {
            let expected: Vec<u32> = grown
                .schema
                .tables()
                .iter()
                .zip(0..)
                .flat_map(|(table, id)| {
                    let keys =
                        (0..table.row_count).map(move |row| RowKey::new(TableId(id), RowId(row)));
                    let rows = keys.map(|key| row_of(&grown.schema, &grown.model, key));
                    rows.flatten().map(f32::to_bits).collect::<Vec<_>>()
                })
                .collect();
            assert!(answers(&served) == expected);
        }
    }
    let mut small =
        Chain { schema: Schema::new(schema().tables()[..2].to_vec()).unwrap(), ..chain };
    let base = small.folder.clone();
    let delta = small.delta(&base, &[]);
    chain = Chain { schema: schema(), ..small };
    let served = Snapshot::open(chain.folder, &options(8 << 20)).unwrap();
    assert!(served.apply(delta).unwrap_err().to_string().contains("other tables"));
}

#[test]
fn a_delta_of_something_else_is_refused() {
    let mut rng = SplitMix64::new(5);
    let mut chain = Chain::publish(schema(), Codec::F32, Vec::new());
    let served = Snapshot::open(chain.folder.clone(), &options(8 << 20)).unwrap();
    let refused = |folder: &Arc<dyn Folder>, why: &str| {
        let error = served.apply(folder.clone()).unwrap_err();
        assert!(error.to_string().contains(why), "{error}");
    };
    refused(&chain.folder, "whole snapshot");
    let base = chain.folder.clone();
    let rows = chain.changes(5, &mut rng);
    let first = chain.delta(&base, &rows);
    let whole = applied(&base, &first);
    let rows = chain.changes(5, &mut rng);
    let second = chain.delta(&whole, &rows);
    refused(&second, "what answers now");
    let mut coded = Chain { codec: Codec::Int8, schema: schema(), model: Model::new(), ..chain };
    let other = coded.delta(&base, &[]);
    refused(&other, "another codec");
    served.apply(first.clone()).unwrap();
    served.apply(second).unwrap();
    // Back to the first: what the second changed is as it was.
    let back = served.apply(first).unwrap();
    assert_eq!((back.number, back.delta_count), (3, 1));
    let expected = Snapshot::open(whole, &options(8 << 20)).unwrap();
    assert!(answers(&served) == answers(&expected));
}
