//! The conformance kit of row stores: checks every [`TrainStore`] against a map.
//!
//! Drives a store with seeded operations beside a plain ordered map and compares after each.
//! Stores of Tierbed and of others run it from their tests; Python reaches it as
//! `tierbed.testing.check_row_store`.

use std::collections::BTreeMap;

use crate::env::SplitMix64;
use crate::store::{Attachment, RowWrite};
use crate::{
    Error, ErrorKind, OptimizerKind, Result, RowId, RowKey, TableId, TableSchema, TrainStore,
};

type Model = BTreeMap<RowKey, Vec<u8>>;

/// Reopens a store as after a clean exit (`false`) or a crash (`true`).
pub type Reopen<'a> = dyn FnMut(Box<dyn TrainStore>, bool) -> Result<Box<dyn TrainStore>> + 'a;

/// Runs `step_count` seeded operations against `store` and a plain map.
///
/// `reopen` is `None` for stores that keep nothing.
///
/// # Errors
/// The store's own errors, or `Corruption` saying where it differed from the map.
pub fn check_row_store(
    mut store: Box<dyn TrainStore>,
    mut reopen: Option<&mut Reopen<'_>>,
    seed: u64,
    step_count: usize,
) -> Result<()> {
    let mut rng = SplitMix64::new(seed);
    let mut tables = add_tables(store.as_mut())?;
    check_refusals(store.as_mut(), &tables)?;
    let mut live = Model::new();
    let mut committed = Model::new();
    let mut committed_tables = tables.clone();
    store.commit("empty", &[])?;
    for step in 0..step_count {
        if rng.below(24) == 0 {
            grow_some(store.as_mut(), &mut tables, &mut rng)?;
        }
        match rng.below(16) {
            0..=6 => write_some(store.as_mut(), &tables, &mut live, &mut rng)?,
            7..=12 => read_some(store.as_mut(), &tables, &live, &mut rng)?,
            13 => check_scan(store.as_mut(), &tables, &live)?,
            14 => {
                let blob = step.to_string();
                store.commit("step", &[Attachment { name: "step", bytes: blob.as_bytes() }])?;
                committed.clone_from(&live);
                committed_tables.clone_from(&tables);
                expect_eq(store.attachment("step")?, Some(blob.into_bytes()), "attachment", step)?;
            }
            _ => {
                if let Some(reopen) = reopen.as_mut() {
                    store = reopen(store, true)?;
                    live.clone_from(&committed);
                    tables.clone_from(&committed_tables);
                    check_scan(store.as_mut(), &tables, &live)?;
                }
            }
        }
    }
    store.verify()?;
    check_scan(store.as_mut(), &tables, &live)
}

fn add_tables(store: &mut dyn TrainStore) -> Result<Vec<(TableId, TableSchema)>> {
    // Odd dims, one row larger than a 4 KiB page, one table of one row.
    let shapes = [
        (1, 700, OptimizerKind::Sgd),
        (9, 5000, OptimizerKind::RowWiseAdagrad),
        (64, 300, OptimizerKind::Adam),
        (1100, 13, OptimizerKind::Sgd),
        (18, 1, OptimizerKind::Adagrad),
    ];
    let mut tables = Vec::new();
    for (dim, row_count, optimizer) in shapes {
        let table =
            TableSchema { optimizer, ..TableSchema::plain(format!("dim{dim}"), row_count, dim) };
        let id = store.add_table(table.clone())?;
        expect_eq(store.add_table(table.clone())?, id, "id of the same table", 0)?;
        tables.push((id, table));
    }
    Ok(tables)
}

// Makes one table longer, unless tables of this store cannot grow.
#[expect(clippy::indexing_slicing, reason = "a random number below the count of tables")]
fn grow_some(
    store: &mut dyn TrainStore,
    tables: &mut [(TableId, TableSchema)],
    rng: &mut SplitMix64,
) -> Result<()> {
    assert!(!tables.is_empty(), "the store was given tables");
    let (id, table) = &mut tables[rng.below(tables.len() as u64) as usize];
    let longer = table.row_count + rng.below(300);
    match store.grow_table(*id, longer) {
        Err(error) if error.kind() == ErrorKind::Unsupported => return Ok(()),
        result => result?,
    }
    table.row_count = longer;
    store.grow_table(*id, 1)?;
    expect_eq(store.schema().table(*id)?, &*table, "schema of a grown table", id.0)?;
    // The new end is there, and the row behind it is not.
    let key = |row| RowKey::new(*id, RowId(row));
    if store.read(&[key(longer)], &mut |_, _| Ok(())).is_ok() {
        return Err(Error::corruption("store accepted a row behind the end of a grown table"));
    }
    store.read(&[key(longer - 1)], &mut |_, _| Ok(()))
}

fn check_refusals(store: &mut dyn TrainStore, tables: &[(TableId, TableSchema)]) -> Result<()> {
    let Some((id, table)) = tables.first() else { return Ok(()) };
    let key = |row| RowKey::new(*id, RowId(row));
    for keys in [vec![key(1), key(1)], vec![key(2), key(1)], vec![key(table.row_count)]] {
        let refused = store.read(&keys, &mut |_, _| Ok(()));
        if refused.is_ok() {
            return Err(
                Error::corruption("store accepted bad keys").with("keys", format_args!("{keys:?}"))
            );
        }
    }
    let short = vec![0; table.record_bytes() - 1];
    if store.write(&[RowWrite { key: key(0), record: &short }]).is_ok() {
        return Err(Error::corruption("store accepted a short record"));
    }
    Ok(())
}

fn some_keys(tables: &[(TableId, TableSchema)], rng: &mut SplitMix64) -> Vec<RowKey> {
    let mut keys = Vec::new();
    for (id, table) in tables {
        let count = rng.below(40);
        // Half of the time a narrow range: neighbours share pages.
        let span = if rng.below(2) == 0 { table.row_count } else { table.row_count.min(50) };
        keys.extend((0..count).map(|_| RowKey::new(*id, RowId(rng.below(span)))));
    }
    keys.sort_unstable();
    keys.dedup();
    keys
}

fn write_some(
    store: &mut dyn TrainStore,
    tables: &[(TableId, TableSchema)],
    live: &mut Model,
    rng: &mut SplitMix64,
) -> Result<()> {
    let mut records = Vec::new();
    for key in some_keys(tables, rng) {
        let bytes = store.schema().table(key.table)?.record_bytes();
        // One record in eight is all zeros: a value like any other, not a sign of absence.
        let fill = if rng.below(8) == 0 { 0 } else { u8::MAX };
        let record: Vec<u8> = (0..bytes).map(|_| (rng.next_u64() as u8) & fill).collect();
        records.push((key, record));
    }
    let rows: Vec<_> = records.iter().map(|(key, record)| RowWrite { key: *key, record }).collect();
    store.write(&rows)?;
    live.extend(records);
    Ok(())
}

fn read_some(
    store: &mut dyn TrainStore,
    tables: &[(TableId, TableSchema)],
    live: &Model,
    rng: &mut SplitMix64,
) -> Result<()> {
    let keys = some_keys(tables, rng);
    let mut seen = vec![0u32; keys.len()];
    store.read(&keys, &mut |at, record| {
        let key = keys.get(at).ok_or_else(|| Error::corruption("sink position out of range"))?;
        if let Some(count) = seen.get_mut(at) {
            *count += 1;
        }
        expect_eq(record, live.get(key).map(Vec::as_slice), "record", format_args!("{key:?}"))
    })?;
    expect_eq(seen.iter().all(|&count| count == 1), true, "each row once", 0)
}

fn check_scan(
    store: &mut dyn TrainStore,
    tables: &[(TableId, TableSchema)],
    live: &Model,
) -> Result<()> {
    for (id, _) in tables {
        let from = RowKey::new(*id, RowId(0));
        let to = RowKey::new(TableId(id.0 + 1), RowId(0));
        let mut expected = live.range(from..to);
        store.scan(*id, &mut |row, record| {
            let found = Some((RowKey::new(*id, row), record));
            let wanted = expected.next().map(|(key, record)| (*key, record.as_slice()));
            expect_eq(found, wanted, "scanned row", row.0)
        })?;
        expect_eq(expected.next().is_none(), true, "scan reaches the end", id.0)?;
    }
    Ok(())
}

fn expect_eq<T: PartialEq + std::fmt::Debug>(
    found: T,
    expected: T,
    what: &'static str,
    at: impl std::fmt::Display,
) -> Result<()> {
    if found == expected {
        return Ok(());
    }
    Err(Error::corruption("store differs from the model")
        .with("what", what)
        .with("at", at)
        .with("expected", format_args!("{expected:?}"))
        .with("found", format_args!("{found:?}")))
}
