//! Import of plain tables into a snapshot.
//!
//! Tables that were trained elsewhere lie as matrices, in memory or mapped from a file. Tables with
//! pages of their own are written in row order; those of a placement page by page, each row as
//! often as it has pages. Nothing is sorted and nothing is held but the indexes.
#![expect(clippy::indexing_slicing, reason = "keys are of the schema that the tables gave")]

use std::sync::Arc;

use tierbed_core::{Budget, Error, Result, RowId, RowKey, Schema, TableId, TableSchema};
use tierbed_io::Folder;

use crate::codecs::PageLayout;
use crate::writer::{Report, SnapshotWriter};

/// A table as a matrix.
#[derive(Debug, Clone, Copy)]
pub struct PlainTable<'a> {
    /// Its name.
    pub name: &'a str,
    /// Elements of a row.
    pub dim: u32,
    /// The rows one after the other, `[rows, dim]`.
    pub weights: &'a [f32],
}

/// Writes a snapshot of `tables` into the empty folder `out`, on pages as `layout` says. Tables are
/// numbered in the order given.
///
/// # Errors
/// `Invalid` for a table without rows or of another length than rows of `dim`, and as
/// [`SnapshotWriter::create_placed`]; `NoSpace` and `Io` from the folder. There is no snapshot
/// then.
pub fn import_tables(
    out: Arc<dyn Folder>,
    tables: &[PlainTable<'_>],
    layout: impl Into<PageLayout>,
    budget: &Budget,
) -> Result<Report> {
    let layout = layout.into();
    let schema = Schema::new(tables.iter().map(schema_of).collect::<Result<_>>()?)?;
    let groups: Vec<Vec<TableId>> = layout.placed.iter().map(|at| at.tables.clone()).collect();
    let row_of = |key: RowKey| {
        let table = &tables[key.table.0 as usize];
        let dim = table.dim as usize;
        let start = key.row.0 as usize * dim;
        &table.weights[start..start + dim]
    };
    let mut writer = SnapshotWriter::create_placed(out, &schema, layout, budget)?;
    writer.expect_order_of_ids();
    for (placement, _) in groups.iter().enumerate() {
        writer.fill(placement, &mut |key, place| {
            place.copy_from_slice(row_of(key));
            Ok(true)
        })?;
    }
    for (table, at) in schema.tables().iter().zip(0..) {
        let id = TableId(at);
        if groups.iter().any(|tables| tables.contains(&id)) {
            continue;
        }
        for row in (0..table.row_count).map(RowId) {
            writer.push(id, row, row_of(RowKey::new(id, row)))?;
        }
    }
    writer.finish()
}

fn schema_of(table: &PlainTable<'_>) -> Result<TableSchema> {
    let row_count = (table.weights.len() as u64).checked_div(u64::from(table.dim)).unwrap_or(0);
    if row_count == 0 || row_count * u64::from(table.dim) != table.weights.len() as u64 {
        return Err(Error::invalid("a table must be rows of `dim` elements, one at least")
            .with("table", table.name)
            .with("dim", table.dim)
            .with("elements", table.weights.len()));
    }
    Ok(TableSchema::plain(table.name, row_count, table.dim))
}

#[cfg(test)]
mod tests {
    use crate::index::PageIndex;
    use tierbed_core::Bags;
    use tierbed_io::MemoryFolder;
    use tierbed_kernels::{FeatureLayout, Pooling};

    use super::*;
    use crate::placed::PlacedTables;
    use crate::snapshot::{Snapshot, SnapshotOptions};

    #[test]
    fn every_row_of_every_table_comes_back() {
        let weights: [Vec<f32>; 3] =
            [(0..40), (100..148), (200..230)].map(|range| range.map(|at| at as f32).collect());
        let dims = [4, 4, 6];
        let tables: Vec<PlainTable<'_>> = ["a", "b", "c"]
            .iter()
            .zip(dims)
            .zip(&weights)
            .map(|((name, dim), weights)| PlainTable { name, dim, weights })
            .collect();
        let rows: Vec<u32> = (0..22).rev().collect();
        let index = PageIndex::new(22, rows.chunks(8).chain([&rows[3..9]])).unwrap();
        let placed = vec![PlacedTables { tables: vec![TableId(1), TableId(0)], index }];
        let folder: Arc<dyn Folder> = Arc::new(MemoryFolder::new());
        let budget = Budget::unlimited();
        let report = import_tables(Arc::clone(&folder), &tables, placed, &budget).unwrap();
        assert_eq!((report.row_count, report.replica_count), (10 + 12 + 5, 6));
        let snapshot = Snapshot::open(folder, &SnapshotOptions::default()).unwrap();
        snapshot.verify().unwrap();
        for ((at, dim), weights) in (0..).zip(dims).zip(&weights) {
            let plan = [(TableId(at), Pooling::None)];
            let plan = FeatureLayout::new(snapshot.schema(), &plan).unwrap();
            let indices: Vec<i64> = (0..weights.len() as i64 / i64::from(dim)).collect();
            let offsets = [0, indices.len() as i64];
            let bags = Bags::new(&indices, &offsets, None, 1).unwrap();
            let mut out = vec![0.0; weights.len()];
            snapshot.lookup(&plan, &bags, &mut out).unwrap();
            assert_eq!(&out, weights);
        }
    }

    #[test]
    fn what_is_no_table_is_refused() {
        for (dim, len) in [(0, 4), (4, 0), (4, 7)] {
            let weights = vec![0.0; len];
            let table = PlainTable { name: "t", dim, weights: &weights };
            let folder: Arc<dyn Folder> = Arc::new(MemoryFolder::new());
            let error =
                import_tables(folder, &[table], Vec::new(), &Budget::unlimited()).unwrap_err();
            assert!(error.to_string().contains("table: t"), "{error}");
        }
    }
}
