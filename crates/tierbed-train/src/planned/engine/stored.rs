//! Contents of a checkpoint besides rows: position, plan, hyperparameters, and which chunks.

use serde::{Deserialize, Serialize};
use tierbed_core::{Error, Result, Schema};
use tierbed_io::PAGE_BYTES;
use tierbed_store::CommitLog;
use tierbed_vocab::SHARED_ROW;

use super::{PlannedConfig, Position};
use crate::hypers::Hypers;
use crate::planned::plan::EpochPlan;
use crate::planned::store::extents::{Bucket, Chunk};
use crate::planned::store::size_class::SizeClass;

pub(super) const STATE: &str = "_forward.json";
pub(super) const CHUNKS: &str = "_forward.chunks";

/// What a chunk list calls the list of rows that wait for no window.
const UNPLANNED: usize = u32::MAX as usize;

/// Where training stood, and with what.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct State {
    pub(super) position: Position,
    pub(super) window: usize,
    pub(super) batch_in_window: u32,
    pub(super) plan_identity: u64,
    /// What the plan was made of, so that it can be made again; absent in older checkpoints.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(super) plan_key: String,
    pub(super) extent_bytes: usize,
    /// Windows of a span; 0 when every window has a bucket of its own.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub(super) span_windows: usize,
    pub(super) tables: Hypers,
    /// Of each table, the first row whose id training has not come to; none without open tables.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) next_rows: Vec<u64>,
}

fn is_zero(count: &usize) -> bool {
    *count == 0
}

/// What the last checkpoint says, or a fresh start.
#[derive(Debug, Default)]
pub(crate) struct Stored {
    pub(super) position: Position,
    pub(super) window: usize,
    pub(super) batch_in_window: u32,
    state: Option<State>,
    /// Of a run of another engine, whose rows are to be moved here.
    arriving: Option<Hypers>,
    /// SizeClass, list ([`UNPLANNED`] for unplanned rows), bucket.
    pub(crate) buckets: Vec<(usize, usize, Bucket)>,
    /// All rows get new places: the buckets are there only to be left alone.
    is_moving: bool,
}

/// A size class's buckets, list after list, and its unplanned rows.
pub(super) type ClassBuckets = (Vec<Bucket>, Bucket);

impl Stored {
    pub(super) fn chunks(&self) -> impl Iterator<Item = &Chunk> {
        self.buckets.iter().flat_map(|(_, _, bucket)| &bucket.chunks)
    }

    pub(super) fn chunk_bytes(&self) -> u64 {
        (self.chunks().count() * size_of::<Chunk>()) as u64
    }

    /// Returns the longest chunk: I/O buffers must hold it.
    pub(super) fn chunk_bytes_max(&self) -> usize {
        self.chunks().map(Chunk::len_bytes).max().unwrap_or(0)
    }

    pub(super) fn extent_bytes(&self, wanted: usize) -> usize {
        let stored = self.state.as_ref().map(|state| state.extent_bytes);
        stored.unwrap_or(wanted.next_multiple_of(PAGE_BYTES))
    }

    /// Returns the windows of the spans that rows wait in; 0 without.
    pub(super) fn span_windows(&self) -> usize {
        let state = self.state.as_ref().filter(|_| !self.is_moving);
        state.map_or(0, |state| state.span_windows)
    }

    pub(super) fn hypers(&self, schema: &Schema) -> Hypers {
        let stored = self.state.as_ref().map(|state| &state.tables);
        let stored = stored.or(self.arriving.as_ref()).cloned();
        stored.unwrap_or_else(|| Hypers::fresh(schema.tables().len()))
    }

    /// Returns the first row of each table whose id training has not come to.
    pub(super) fn next_rows(&self, schema: &Schema) -> Result<Vec<u64>> {
        let table_count = schema.tables().len();
        match self.state.as_ref().map(|state| &state.next_rows) {
            Some(rows) if rows.len() == table_count => Ok(rows.clone()),
            Some(rows) if !rows.is_empty() => Err(damaged("has rows of other tables")),
            // Nothing was trained, or no table is open: behind the shared row.
            _ => Ok(vec![SHARED_ROW + 1; table_count]),
        }
    }

    /// Returns a start along another plan: rows still to be moved, steps and extents as they are.
    pub(super) fn moving(self) -> Self {
        let Self { state, buckets, .. } = self;
        Self { state, buckets, is_moving: true, ..Self::default() }
    }

    /// Returns the start of a run of another engine, whose rows are still to be moved.
    pub(super) fn arriving(hypers: Hypers) -> Self {
        Self { arriving: Some(hypers), is_moving: true, ..Self::default() }
    }

    pub(super) fn is_moving(&self) -> bool {
        self.is_moving
    }

    /// Returns the buckets of each size class.
    pub(crate) fn buckets(
        &self,
        class_count: usize,
        list_count: usize,
    ) -> Result<Vec<ClassBuckets>> {
        let mut classes =
            vec![(vec![Bucket::default(); list_count], Bucket::default()); class_count];
        for (class, list, bucket) in self.buckets.iter().filter(|_| !self.is_moving) {
            let place = classes.get_mut(*class).and_then(|(buckets, unplanned)| match *list {
                UNPLANNED => Some(unplanned),
                list => buckets.get_mut(list),
            });
            *place.ok_or_else(|| damaged("names an unknown bucket"))? = bucket.clone();
        }
        Ok(classes)
    }
}

pub(super) fn damaged(what: &str) -> Error {
    Error::corruption(format!("checkpoint {what}"))
        .with("remedy", "restore the store's folder from a copy")
}

/// Reads what the checkpoint in force says, and checks that schema and plan are its own.
pub(super) fn read_stored(
    log: &CommitLog,
    schema: &Schema,
    plan: &EpochPlan,
    config: &PlannedConfig,
) -> Result<Stored> {
    if config.extent_bytes == 0 {
        return Err(Error::invalid("extents must not be empty"));
    }
    let Some(manifest) = log.manifest() else { return Ok(Stored::default()) };
    if &manifest.schema != schema {
        return Err(Error::invalid("store holds other tables")
            .with("stored_tables", manifest.schema.tables().len())
            .with("tables", schema.tables().len())
            .with("remedy", "open it with the tables it was made with"));
    }
    let state = read_state(log)?;
    if state.plan_identity != plan.identity() {
        return Err(Error::invalid("store was trained along another plan")
            .with("remedy", "open it with the plan it was trained along, or move it to another"));
    }
    let bytes = log.attachment(CHUNKS)?.ok_or_else(|| damaged("has no chunk lists"))?;
    let buckets = decode_buckets(&bytes)?;
    let is_sane = state.window < plan.window_count()
        && state.tables.len() == schema.tables().len()
        && state.extent_bytes >= PAGE_BYTES
        && state.extent_bytes.is_multiple_of(PAGE_BYTES);
    if !is_sane {
        return Err(damaged("does not fit the plan"));
    }
    Ok(Stored {
        position: state.position,
        window: state.window,
        batch_in_window: state.batch_in_window,
        state: Some(state),
        buckets,
        ..Stored::default()
    })
}

pub(super) fn read_state(log: &CommitLog) -> Result<State> {
    let bytes = log.attachment(STATE)?.ok_or_else(|| damaged("has no state"))?;
    serde_json::from_slice(&bytes).map_err(|cause| damaged("is damaged").with("cause", cause))
}

/// Returns the identity of the plan that the checkpoint in force was made along.
pub(super) fn plan_identity(log: &CommitLog) -> Result<Option<u64>> {
    match log.manifest() {
        Some(_) => Ok(Some(read_state(log)?.plan_identity)),
        None => Ok(None),
    }
}

pub(super) fn encode_buckets(classes: &[SizeClass]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (at, class) in (0u32..).zip(classes) {
        let unplanned = (UNPLANNED as u32, class.unplanned());
        for (list, bucket) in (0u32..).zip(class.buckets()).chain([unplanned]) {
            let row_count: usize = bucket.chunks.iter().map(|chunk| chunk.row_count as usize).sum();
            assert_eq!(row_count, bucket.row_count, "list {list} has other rows than its chunks");
            if bucket.chunks.is_empty() {
                continue;
            }
            for word in [at, list, bucket.chunks.len() as u32] {
                bytes.extend(word.to_le_bytes());
            }
            for chunk in &bucket.chunks {
                for word in [chunk.page, chunk.page_count, chunk.row_count, chunk.crc32c] {
                    bytes.extend(word.to_le_bytes());
                }
            }
        }
    }
    bytes
}

pub(crate) fn decode_buckets(bytes: &[u8]) -> Result<Vec<(usize, usize, Bucket)>> {
    let short = || damaged("ends too early");
    let mut words = bytes.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word));
    let mut buckets = Vec::new();
    while let Some(class) = words.next() {
        let (window, count) = (words.next().ok_or_else(short)?, words.next().ok_or_else(short)?);
        let mut bucket = Bucket::default();
        for _ in 0..count {
            let mut word = || words.next().ok_or_else(short);
            let (page, page_count, row_count, crc32c) = (word()?, word()?, word()?, word()?);
            if page.checked_add(page_count).is_none() || page_count == 0 {
                return Err(damaged("names a chunk that cannot be"));
            }
            bucket.push(Chunk { page, page_count, row_count, crc32c });
        }
        buckets.push((class as usize, window as usize, bucket));
    }
    Ok(buckets)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn random_chunk_lists_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = decode_buckets(&bytes);
        }
    }
}
