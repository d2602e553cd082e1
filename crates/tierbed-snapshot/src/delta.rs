//! Deltas: the rows that changed since a snapshot, and how both become the next snapshot.
//!
//! A delta is a snapshot folder whose manifest names the snapshot it was made against: it holds
//! the rows that differ, and all attachments. Applied to that snapshot, and to no other, it gives
//! a whole one, streamed in bounded memory: rows keep the places they had, new ones come last.
//! Codes of rows are carried over as they are. Its attachment [`APPLIED`] names the delta.
//! Ids of open tables that were evicted are gone from the index pages a delta brings, and freed
//! rows come with their initial values: nothing evicted goes on being served. Rows that came out as
//! they were may be among them: a store that noted what it wrote need not look at the snapshot.

pub(crate) mod chain;

use std::sync::Arc;

use tierbed_core::{Budget, Error, Result, RowId, RowKey, RowStore, Schema, TableId};
use tierbed_io::Folder;
use tierbed_kernels::Codec;

use crate::codecs::{InitialCode, PageLayout, TableCodecs};
use crate::manifest::Manifest;
use crate::rows::SnapshotRows;
use crate::snapshot::Snapshot;
use crate::tails::{HeadSize, TableHeads};
use crate::writer::{Report, SnapshotWriter};
use tierbed_io::sorter::{ExternalSorter, SorterOptions, MEMORY_BYTES_MIN};

/// Attachment of a snapshot that a delta was applied to: the delta's identity. A training store
/// knows what changed since the deltas that it published, not since what others made of them.
pub const APPLIED: &str = "_applied";

/// Page of the row in the base, then the row; most significant byte first.
const KEY_BYTES: usize = 8 + 8;

/// Checks that a store of `schema` can be described as a change of a snapshot of `base`: the
/// same tables, where they may have grown and others may have come behind them.
///
/// # Errors
/// `Invalid`, naming the first table that differs.
pub fn check_successor(base: &Schema, schema: &Schema) -> Result<()> {
    for (at, old) in base.tables().iter().enumerate() {
        let new = schema.tables().get(at);
        let is_same = new.is_some_and(|new| {
            (&new.name, new.dim, new.init, new.seed) == (&old.name, old.dim, old.init, old.seed)
                && new.row_count >= old.row_count
        });
        if !is_same {
            return Err(Error::invalid("snapshot is of other tables")
                .with("table", &old.name)
                .with("remedy", "publish in full, or name a snapshot of this store"));
        }
    }
    Ok(())
}

/// Checks that deltas can be made against `base`: tables that share pages are published whole.
///
/// # Errors
/// `Unsupported` when tables of `base` share pages.
pub(crate) fn check_plain(base: &Manifest) -> Result<()> {
    if base.placed.is_none() {
        return Ok(());
    }
    Err(Error::unsupported("snapshots whose tables share pages by a placement have no deltas")
        .with("remedy", "publish in full, with the placement"))
}

/// Returns the identity of the delta that was applied to make `snapshot`.
///
/// # Errors
/// As [`Snapshot::attachment`], and `Corruption` when the name is no text.
fn applied_to_make(snapshot: &Snapshot) -> Result<Option<String>> {
    applied_name(snapshot.attachment(APPLIED)?)
}

fn applied_name(applied: Option<Vec<u8>>) -> Result<Option<String>> {
    let text = |name| {
        String::from_utf8(name).map_err(|cause| {
            Error::corruption("name of the applied delta is no text").with("cause", cause)
        })
    };
    applied.map(text).transpose()
}

/// Writes the snapshot that `delta` makes of `base` into the empty folder `out`.
///
/// # Errors
/// `Invalid` when `delta` is none, or was made against another snapshot than `base`, or `out`
/// is not empty; `Corruption`, `Io` and `NoSpace` from the folders. There is no snapshot then.
pub fn apply_delta(
    base: &Arc<Snapshot>,
    delta: &Arc<Snapshot>,
    out: &Arc<dyn Folder>,
    budget: &Budget,
) -> Result<Report> {
    let wanted = delta.manifest().base.as_deref();
    let found = base.identity()?;
    // What a delta was applied to is the same wherever it was applied.
    let before = delta.manifest().base_delta.as_ref();
    let is_next = before.is_some() && applied_to_make(base)?.as_ref() == before;
    if wanted != Some(found.as_str()) && !is_next {
        return Err(Error::invalid("delta was not made against this snapshot")
            .with("delta_of", wanted.unwrap_or("no snapshot: it is a whole one"))
            .with("snapshot", found)
            .with("remedy", "apply it to the snapshot it names"));
    }
    check_successor(base.schema(), delta.schema())?;
    check_plain(base.manifest())?;
    let codecs = &delta.manifest().codecs;
    check_codecs(base.schema(), &base.manifest().codecs, codecs)?;
    let heads = heads_of(base);
    let layout = PageLayout { codecs: codecs.clone(), heads, ..PageLayout::default() };
    let mut writer =
        SnapshotWriter::create_placed(Arc::clone(out), delta.schema(), layout, budget)?;
    writer.expect_order_of_ids();
    for (table, at) in delta.schema().tables().iter().zip(0..) {
        let table_id = TableId(at);
        let options = SorterOptions {
            key_bytes: KEY_BYTES,
            payload_bytes: codecs.of(table_id).code_bytes(table.dim as usize),
            memory_bytes: (budget.free_bytes() / 2).max(MEMORY_BYTES_MIN),
            scratch_name: "scratch.rows".to_owned(),
        };
        let mut sorter = ExternalSorter::new(Arc::clone(out), &options, budget)?;
        let (codec, mut initial) = (codecs.of(table_id), InitialCode::default());
        let mut push = |row: RowId, record: &[u8], is_new: bool| {
            let key = RowKey::new(table_id, row);
            if !is_new && delta.own_page_of(key)?.is_some() {
                return Ok(());
            }
            let place = place_in(base, key)?;
            let record_bytes = options.payload_bytes + size_of::<u32>();
            assert_eq!(record.len(), record_bytes, "bytes of a record");
            // The use count behind the code is not published.
            let (code, _) = record.split_at(options.payload_bytes);
            if is_new && *codec != Codec::F32 && initial.is(table, codec, row, code) {
                return Ok(());
            }
            sorter.push(&key_of(place, row), code)
        };
        if (at as usize) < base.schema().tables().len() {
            SnapshotRows::coded(Arc::clone(base))
                .scan(table_id, &mut |row, record| push(row, record, false))?;
        }
        SnapshotRows::coded(Arc::clone(delta))
            .scan(table_id, &mut |row, record| push(row, record, true))?;
        let mut sorted = sorter.finish()?;
        while let Some(record) = sorted.next()? {
            writer.push_code(table_id, row_of(record.key)?, record.payload)?;
        }
    }
    for name in delta.attachment_names() {
        let bytes = delta.attachment(&name)?;
        let Some(bytes) = bytes else { panic!("attachment {name} is listed and not there") };
        writer.attach(&name, &bytes)?;
    }
    writer.attach(APPLIED, delta.identity()?.as_bytes())?;
    writer.finish()
}

/// Returns the heads of the tables of `base` that have tails.
fn heads_of(base: &Snapshot) -> TableHeads {
    let tails = base.manifest().tailed.iter().flat_map(|tailed| &tailed.tails);
    TableHeads::new(tails.map(|tail| (TableId(tail.table), HeadSize::Rows(tail.head_rows))))
}

/// Returns the page of a row in `base`; `None` for new ones and those of a tail, which lie by id.
fn place_in(base: &Snapshot, key: RowKey) -> Result<Option<u64>> {
    if !holds(base.schema(), key) {
        return Ok(None);
    }
    let tail_page = base.tails().tail_page(key).unwrap_or(u64::MAX);
    Ok(base.own_page_of(key)?.filter(|&page| page < tail_page))
}

/// Rows of the base and of the delta come to lie on the same pages.
pub(crate) fn check_codecs(schema: &Schema, old: &TableCodecs, new: &TableCodecs) -> Result<()> {
    for (table, at) in schema.tables().iter().zip(0..) {
        let (old, new) = (old.of(TableId(at)), new.of(TableId(at)));
        if old != new {
            return Err(Error::corruption("delta keeps rows in another codec than its snapshot")
                .with("table", &table.name)
                .with("expected", old.name())
                .with("found", new.name())
                .with("remedy", "publish in full, or name a snapshot of this store"));
        }
    }
    Ok(())
}

/// Returns whether `key` is a row of `schema`: tables grow, and new ones come.
#[must_use]
pub fn holds(schema: &Schema, key: RowKey) -> bool {
    schema.table(key.table).is_ok_and(|table| key.row.0 < table.row_count)
}

#[expect(clippy::big_endian_bytes, reason = "keys compare as bytes")]
fn key_of(place: Option<u64>, row: RowId) -> [u8; KEY_BYTES] {
    let mut key = [0; KEY_BYTES];
    let bytes = place.unwrap_or(u64::MAX).to_be_bytes().into_iter().chain(row.0.to_be_bytes());
    key.iter_mut().zip(bytes).for_each(|(place, byte)| *place = byte);
    key
}

#[expect(clippy::big_endian_bytes, reason = "keys compare as bytes")]
fn row_of(key: &[u8]) -> Result<RowId> {
    let row = key.last_chunk().map(|bytes| RowId(u64::from_be_bytes(*bytes)));
    row.ok_or_else(|| Error::corruption("sorted record has a short key"))
}
