//! All rows of a checkpoint in row order: for another store, a file, a snapshot.
//!
//! Rows lie in the order of their next use. One pass per record length reads them where they
//! lie, sorts them by table and row outside memory, and hands them on. Rows that no window ever
//! used are absent, as in every store.

use std::path::Path;
use std::sync::Arc;

use tierbed_core::{Budget, Error, Result, RowId, Schema, TableId};
use tierbed_io::sorter::{ExternalSorter, SorterOptions};
use tierbed_io::{Folder, FsFolder};

use super::super::stored;
use super::super::{check_shape, OpenFolder, PlannedConfig, PlannedEngine};
use super::resting::Resting;
use super::RecordSink;
use crate::planned::plan::Plan;
use crate::planned::store::sizing::shelve;

/// Sort key: table, then row, most significant byte first.
const KEY_BYTES: usize = 4 + 8;

impl PlannedEngine {
    /// Hands every row of the last checkpoint in `folder` to `sink`, tables in id order and rows
    /// ascending, within the budget of `config`. `plan` is the one the checkpoint was made along.
    /// Reads all rows once per record length, and writes and reads them once more to sort them.
    ///
    /// Tables of other record lengths come in turns, so table ids ascend only within one length.
    /// Rows of the window that was being trained on are there even before their first step, with
    /// their initial values and a use count of 0.
    ///
    /// # Errors
    /// `Closed` while the store is open, `Invalid` without a checkpoint, for another plan or
    /// schema or a budget too small, `NoSpace` when the rows do not fit the disk a second time,
    /// `Corruption` for damaged bytes; those of `sink`.
    pub fn export_in(
        folder: Arc<dyn Folder>,
        schema: &Schema,
        plan: &Plan,
        config: &PlannedConfig,
        sink: &mut RecordSink<'_>,
    ) -> Result<()> {
        check_shape(schema, plan)?;
        let site = OpenFolder::open(folder)?;
        let stored = stored::read_stored(&site.log, schema, plan, config)?;
        let manifest = site.log.manifest().ok_or_else(|| {
            Error::invalid("the store has no checkpoint to export")
                .with("remedy", "make a checkpoint first")
        })?;
        let budget = Budget::new(config.dram_budget_bytes);
        let sizes = (schema, config.dram_budget_bytes);
        let mut rows = Resting::open(&site.folder, sizes, (manifest, plan, &stored))?;
        let source_bytes = rows.memory_bytes() + stored.chunk_bytes();
        let _memory = budget.reserve("rows to export", source_bytes)?;
        let (classes, homes) = shelve(schema);
        for (at, class) in classes.iter().enumerate() {
            let options = SorterOptions {
                key_bytes: KEY_BYTES,
                payload_bytes: 4 * class.words,
                memory_bytes: budget.free_bytes(),
                scratch_name: "replan-sort.rows".to_owned(),
            };
            let mut sorter = ExternalSorter::new(site.folder.clone(), &options, &budget)?;
            let is_of_shelf =
                |table: TableId| homes.get(table.0 as usize).is_some_and(|home| home.class == at);
            rows.visit(&mut |table, row, record| match is_of_shelf(table) {
                true => sorter.push(&key_of(table, row), record),
                false => Ok(()),
            })?;
            let mut sorted = sorter.finish()?;
            while let Some(record) = sorted.next()? {
                let (table, row) = name_of(record.key)?;
                sink(table, row, record.payload)?;
            }
        }
        Ok(())
    }

    /// Exports the store at `path`; see [`export_in`](Self::export_in).
    ///
    /// # Errors
    /// As [`export_in`](Self::export_in).
    pub fn export(
        path: &Path,
        schema: &Schema,
        plan: &Plan,
        config: &PlannedConfig,
        sink: &mut RecordSink<'_>,
    ) -> Result<()> {
        Self::export_in(Arc::new(FsFolder::open(path)?), schema, plan, config, sink)
    }
}

#[expect(clippy::big_endian_bytes, reason = "keys compare as bytes")]
fn key_of(table: TableId, row: RowId) -> [u8; KEY_BYTES] {
    let mut key = [0; KEY_BYTES];
    let bytes = table.0.to_be_bytes().into_iter().chain(row.0.to_be_bytes());
    for (place, byte) in key.iter_mut().zip(bytes) {
        *place = byte;
    }
    key
}

#[expect(clippy::big_endian_bytes, reason = "keys compare as bytes")]
fn name_of(key: &[u8]) -> Result<(TableId, RowId)> {
    let short = || Error::corruption("sorted record is too short");
    let (table, row) = key.split_first_chunk::<4>().ok_or_else(short)?;
    let row = row.first_chunk::<8>().ok_or_else(short)?;
    Ok((TableId(u32::from_be_bytes(*table)), RowId(u64::from_be_bytes(*row))))
}
