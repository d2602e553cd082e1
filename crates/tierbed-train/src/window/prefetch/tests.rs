//! Tests: what a store is told of announced batches.

use std::path::Path;
use std::sync::{Arc, Mutex};

use tierbed_core::stats::StoreStats;
use tierbed_core::store::{Ahead, Attachment, CommitInfo, RowSink, RowUses, RowWrite, ScanSink};
use tierbed_core::{Bags, Result, RowKey, RowStore, Schema, TableId, TableSchema, TrainStore};
use tierbed_kernels::{FeatureLayout, Pooling};

use crate::window::options::{Backend, WindowConfig};
use crate::window::tracked::TrackedStore;
use crate::window::WindowEngine;

/// Batches buffered, accesses buffered, samples, unique rows.
type Told = (u32, u64, u64, Vec<RowUses>);

/// Passes everything on and writes down what it is told.
struct Listener {
    store: Box<dyn TrainStore>,
    told: Arc<Mutex<Vec<Told>>>,
}

impl RowStore for Listener {
    fn schema(&self) -> &Schema {
        self.store.schema()
    }
    fn read(&mut self, keys: &[RowKey], sink: &mut RowSink<'_>) -> Result<()> {
        self.store.read(keys, sink)
    }
    fn scan(&mut self, table: TableId, sink: &mut ScanSink<'_>) -> Result<()> {
        self.store.scan(table, sink)
    }
    fn stats(&self) -> StoreStats {
        self.store.stats()
    }
}

impl TrainStore for Listener {
    fn add_table(&mut self, table: TableSchema) -> Result<TableId> {
        self.store.add_table(table)
    }
    fn write(&mut self, rows: &[RowWrite<'_>]) -> Result<()> {
        self.store.write(rows)
    }
    fn commit(&mut self, name: &str, attachments: &[Attachment<'_>]) -> Result<()> {
        self.store.commit(name, attachments)
    }
    fn last_commit(&self) -> Option<&CommitInfo> {
        self.store.last_commit()
    }
    fn attachment_names(&self) -> Result<Vec<String>> {
        Ok(Vec::new())
    }

    fn attachment(&mut self, name: &str) -> Result<Option<Vec<u8>>> {
        self.store.attachment(name)
    }
    fn verify(&mut self) -> Result<u64> {
        self.store.verify()
    }
    fn path(&self) -> Option<&Path> {
        self.store.path()
    }
    fn observe(&mut self, ahead: &Ahead<'_>) -> Result<()> {
        let rows = ahead.unique_rows();
        let told = (ahead.batches_buffered, ahead.accesses_buffered, ahead.sample_count, rows);
        let access_count: u64 = told.3.iter().map(|row| u64::from(row.access_count)).sum();
        assert_eq!(ahead.access_count, access_count);
        self.told.lock().unwrap().push(told);
        Ok(())
    }
}

/// An engine over one table of 100 rows of 4 weights.
fn engine_and_plan() -> (WindowEngine, TableId, FeatureLayout) {
    let config = WindowConfig { backend: Backend::Memory, ..WindowConfig::new(4 << 20) };
    let mut engine = WindowEngine::open(None, &config).unwrap();
    let table = TableSchema::plain("t", 100, 4);
    let id = engine.add_table(table).unwrap();
    let layout = FeatureLayout::new(&engine.schema, &[(id, Pooling::Sum)]).unwrap();
    (engine, id, layout)
}

#[test]
fn a_wrong_batch_ends_the_announcement_before_it() {
    let (mut engine, _, layout) = engine_and_plan();
    let good = Bags::new(&[7, 3], &[0, 1, 2], None, 1).unwrap();
    let wrong = Bags::new(&[7, 100], &[0, 1, 2], None, 1).unwrap();
    assert_eq!(engine.prefetch(&layout, &[good, wrong, good]).unwrap(), 1);
    assert!(engine.prefetch(&layout, &[wrong, good]).is_err());
    engine.lookup(&layout, &good, &mut [0.0; 8]).unwrap();
    assert_eq!(engine.stats().buffer.miss_count, 2);
}

#[test]
fn the_store_is_told_what_was_announced() {
    let (mut engine, id, layout) = engine_and_plan();
    let config = WindowConfig { backend: Backend::Memory, ..WindowConfig::new(4 << 20) };
    let told = Arc::new(Mutex::new(Vec::new()));
    let other = WindowEngine::open(None, &config).unwrap();
    let memory = std::mem::replace(&mut engine.store, other.store);
    let listener = Box::new(Listener { store: Box::new(memory), told: told.clone() });
    engine.store = TrackedStore::open(listener, true, &engine.budget).unwrap();
    let first = Bags::new(&[7, 3, 7], &[0, 2, 3], None, 1).unwrap();
    let second = Bags::new(&[3, 9], &[0, 2], None, 1).unwrap();
    assert_eq!(engine.prefetch(&layout, &[first, second]).unwrap(), 2);
    engine.lookup(&layout, &first, &mut [0.0; 8]).unwrap();
    assert_eq!(engine.prefetch(&layout, &[second]).unwrap(), 1);
    let uses = |pairs: &[(u64, u32)]| -> Vec<RowUses> {
        let key = |row| RowKey::new(id, tierbed_core::RowId(row));
        let uses = |&(row, access_count): &(u64, u32)| RowUses { key: key(row), access_count };
        pairs.iter().map(uses).collect()
    };
    let told = told.lock().unwrap();
    assert_eq!(
        *told,
        [(2, 5, 3, uses(&[(3, 2), (7, 2), (9, 1)])), (2, 4, 1, uses(&[(3, 1), (9, 1)]))]
    );
}
