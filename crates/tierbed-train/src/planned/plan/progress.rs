//! Progress of a pre-pass that survives a kill: scratch files, and a note of how far they go.
//!
//! The note is replaced atomically, after what it speaks of is durable. It has the key and shape
//! of the plan, so that it is never continued with the batches of another source.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tierbed_core::checksum::crc32c;
use tierbed_core::{Error, Result};
use tierbed_io::Folder;

use super::builder::{PlanSpec, ScratchFiles, ScratchWindow};
use super::format::Header;
use super::scratch::Appender;
use super::{EpochPlan, PlanBuilder, PlanOptions, PlanShape};

/// Scratch files of a plan, besides the note.
pub(super) const SCRATCH: [&str; 3] = ["rows", "next", "bodies"];
/// Bytes appended to scratch files between two notes.
const NOTE_BYTES: u64 = 64 << 20;

/// A plan that is there, or one to be made.
#[derive(Debug)]
pub enum Prepared {
    /// It was finished before, for the same source, options and shape.
    Ready(EpochPlan),
    /// Push the batches from [`PlanBuilder::batch_count`] on, then finish.
    Unfinished(Box<PlanBuilder>),
}

/// How far the scratch files go.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Note {
    key: String,
    feature_tables: Vec<u32>,
    row_counts: Vec<u64>,
    record_bytes: Vec<u32>,
    batch_count: u64,
    index_count: u64,
    batch_indices_max: u32,
    rows_bytes: u64,
    bodies_bytes: u64,
    windows: Vec<ScratchWindow>,
    counts: Vec<u32>,
    row_crcs: Vec<u32>,
    linked: Linked,
}

/// Which groups of tables have their next uses.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Linked {
    /// Memory by which tables were grouped.
    pub(super) memory_bytes: u64,
    pub(super) group_count: usize,
    /// Checksum of the next uses of each table in each window, `[K * T]`.
    pub(super) crcs: Vec<u32>,
}

fn note_name(name: &str) -> String {
    format!("{name}.note")
}

impl PlanBuilder {
    /// Opens the plan `name` in `folder` if it is finished, goes on with it if it was left
    /// unfinished, or starts it.
    ///
    /// # Errors
    /// `Invalid` when a plan or an unfinished one of that name is of another source, with other
    /// options or for another shape: nothing is touched then. Otherwise as [`new`](Self::new).
    pub fn prepare(
        folder: Arc<dyn Folder>,
        name: &str,
        shape: PlanShape,
        source: &str,
        options: PlanOptions,
    ) -> Result<Prepared> {
        options.check(source)?;
        let key = options.key(source);
        if let Some(plan) = EpochPlan::find(&*folder, name)? {
            let found = Origin { key: plan.key(), shape: plan.shape() };
            check_origin(name, found, Origin { key: &key, shape: &shape })?;
            plan.ensure_copy(&*folder)?;
            remove_scratch(&*folder, name)?;
            return Ok(Prepared::Ready(plan));
        }
        let Some(note) = read_note(&*folder, name)? else {
            let builder = Self::new(folder, name, shape, source, options)?;
            return Ok(Prepared::Unfinished(Box::new(builder)));
        };
        let found = Origin { key: &note.key, shape: &note.shape() };
        check_origin(name, found, Origin { key: &key, shape: &shape })?;
        let spec = PlanSpec { folder, name: name.to_owned(), shape, options };
        let builder = Self::resume(spec, note)?;
        Ok(Prepared::Unfinished(Box::new(builder)))
    }

    fn resume(spec: PlanSpec, note: Note) -> Result<Self> {
        if !note.is_consistent() {
            return Err(damaged(&spec.name));
        }
        let reopen = |file: &str, bytes: u64| {
            Appender::reopen(&*spec.folder, &format!("{}.{file}", spec.name), bytes)
        };
        let scratch = ScratchFiles {
            rows: reopen("rows", note.rows_bytes)?,
            bodies: reopen("bodies", note.bodies_bytes)?,
        };
        let header = Header {
            key: note.key,
            table_count: spec.shape.row_counts.len() as u32,
            feature_count: spec.shape.feature_tables.len() as u32,
            window_count: note.windows.len() as u32,
            batch_count: note.batch_count,
            index_count: note.index_count,
            batch_indices_max: note.batch_indices_max,
            ..Header::default()
        };
        let mut builder = Self::with_scratch(spec, header, scratch);
        builder.windows = note.windows;
        builder.counts = note.counts;
        builder.row_crcs = note.row_crcs;
        builder.linked = note.linked;
        Ok(builder)
    }

    /// Returns the batches it holds: the source goes on with the batch of this number.
    #[must_use]
    pub fn batch_count(&self) -> u64 {
        self.header.batch_count
    }

    /// Makes all whole windows durable, so that [`prepare`](Self::prepare) goes on behind them
    /// after a crash. Happens by itself from time to time.
    ///
    /// # Errors
    /// Those of the scratch files.
    pub fn save(&mut self) -> Result<()> {
        self.rows.flush()?.sync()?;
        self.bodies.flush()?.sync()?;
        self.folder.sync()?;
        self.noted_bytes = self.scratch_bytes();
        let note = Note {
            key: self.header.key.clone(),
            feature_tables: self.shape.feature_tables.iter().map(|table| table.0).collect(),
            row_counts: self.shape.row_counts.clone(),
            record_bytes: self.shape.record_bytes.clone(),
            batch_count: self.whole_batches(),
            index_count: self.header.index_count - self.pending_indices(),
            batch_indices_max: self.header.batch_indices_max,
            rows_bytes: self.rows.len_bytes(),
            bodies_bytes: self.bodies.len_bytes(),
            windows: self.windows.clone(),
            counts: self.counts.clone(),
            row_crcs: self.row_crcs.clone(),
            linked: self.linked.clone(),
        };
        assert!(note.is_consistent(), "the scratch files are not what was counted");
        let body = serde_json::to_string(&note)
            .map_err(|cause| Error::invalid("note cannot be written").with("cause", cause))?;
        let text = format!("{:08x}\n{body}", crc32c(body.as_bytes()));
        self.folder.write_atomic(&note_name(&self.name), text.as_bytes())
    }

    pub(super) fn save_when_due(&mut self) -> Result<()> {
        match self.scratch_bytes() - self.noted_bytes >= NOTE_BYTES {
            true => self.save(),
            false => Ok(()),
        }
    }

    fn scratch_bytes(&self) -> u64 {
        self.rows.len_bytes() + self.bodies.len_bytes()
    }
}

impl Note {
    // Tells whether the scratch files are as long as the windows say, and each count has its
    // checksums.
    fn is_consistent(&self) -> bool {
        let body_bytes = self.windows.iter().map(|window| u64::from(window.body_bytes)).sum();
        let entries: u64 = self.counts.iter().map(|&count| u64::from(count)).sum();
        let (counts, crcs) = (self.counts.len(), self.linked.crcs.len());
        counts == self.windows.len() * self.row_counts.len()
            && (self.bodies_bytes, self.rows_bytes) == (body_bytes, 8 * entries)
            && self.row_crcs.len() == counts
            && (crcs == counts || (crcs, self.linked.group_count) == (0, 0))
    }

    fn shape(&self) -> PlanShape {
        PlanShape {
            feature_tables: self
                .feature_tables
                .iter()
                .map(|&at| tierbed_core::TableId(at))
                .collect(),
            row_counts: self.row_counts.clone(),
            record_bytes: self.record_bytes.clone(),
        }
    }
}

/// Removes note and scratch files of a plan, if there are any.
pub(super) fn remove_scratch(folder: &dyn Folder, name: &str) -> Result<()> {
    // The note first: without it the others mean nothing.
    folder.remove(&note_name(name))?;
    SCRATCH.iter().try_for_each(|file| folder.remove(&format!("{name}.{file}")))
}

/// What a plan was made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Origin<'a> {
    key: &'a str,
    shape: &'a PlanShape,
}

fn check_origin(name: &str, found: Origin<'_>, wanted: Origin<'_>) -> Result<()> {
    if found == wanted {
        return Ok(());
    }
    Err(Error::invalid("a plan of this name was made of other batches, options or tables")
        .with("plan", name)
        .with("found", found.key)
        .with("wanted", wanted.key)
        .with("same_tables", found.shape == wanted.shape)
        .with("remedy", "name another plan, or delete this one to make it again"))
}

fn damaged(name: &str) -> Error {
    Error::corruption("note of an unfinished plan is damaged")
        .with("file", note_name(name))
        .with("remedy", "delete it and make the plan again")
}

fn read_note(folder: &dyn Folder, name: &str) -> Result<Option<Note>> {
    match folder.read(&note_name(name))? {
        Some(bytes) => parse_note(&bytes).ok_or_else(|| damaged(name)).map(Some),
        None => Ok(None),
    }
}

fn parse_note(bytes: &[u8]) -> Option<Note> {
    let (crc, body) = std::str::from_utf8(bytes).ok()?.split_once('\n')?;
    let is_whole = u32::from_str_radix(crc, 16).ok()? == crc32c(body.as_bytes());
    serde_json::from_str(body).ok().filter(|_| is_whole)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn random_notes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
            let _ = parse_note(&bytes);
            let mut text = format!("{:08x}\n", crc32c(&bytes)).into_bytes();
            text.extend(&bytes);
            let _ = parse_note(&text);
        }
    }
}
