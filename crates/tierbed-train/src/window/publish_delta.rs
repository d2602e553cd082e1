//! Rows that changed since a snapshot.
//!
//! Rows that were noted since the snapshot was published are read and written, and no page of the
//! snapshot is looked at: some may have come out as they were. Where the notes do not reach back to
//! it, all rows are read beside those of the snapshot, in row order, and compared bit by bit, as
//! they are coded. That is right after restarts, evictions, imports and crashes, for any snapshot
//! of the store, at the price of reading both. Upon the snapshot both ways give the same rows.

use std::sync::Arc;

use tierbed_core::store::Attachment;
use tierbed_core::{Error, Reservation, Result, RowId, RowStore, Schema};
use tierbed_io::Folder;
use tierbed_snapshot::delta::check_successor;
use tierbed_snapshot::{BaseChain, PageLayout, Report, Snapshot, SnapshotOptions};

use crate::attachments::check_names;
use crate::window::changes::{Changes, DeltaCount, Since};
use crate::window::changes_file::Rows;
use crate::window::comparer::{ChangeSink, ComparedTable, Comparer, StoredRow};
use crate::window::engine::WindowEngine;
use crate::window::publish::{PublishProgress, Target};
use crate::window::publish_background::Parts;

/// What a delta is made against.
pub struct DeltaBase {
    /// Where the snapshot lies.
    pub folder: Arc<dyn Folder>,
    /// Deltas that lie upon it, oldest first: the new one is made against the last of them.
    pub deltas: Vec<Arc<dyn Folder>>,
    /// How the rows that changed since are found.
    pub find_by: FindBy,
}

/// How a delta finds the rows that changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum FindBy {
    /// By those noted while training, where they reach back to the base; else by comparing.
    #[default]
    Auto,
    /// By those noted while training; refused where they do not reach back to the base.
    Tracked,
    /// By comparing all rows with the base.
    Compared,
}

impl FindBy {
    /// Reads a name: `auto`, `tracked` or `compared`.
    ///
    /// # Errors
    /// `Invalid` for another one.
    pub fn from_name(name: &str) -> Result<Self> {
        match name {
            "auto" => Ok(Self::Auto),
            "tracked" => Ok(Self::Tracked),
            "compared" => Ok(Self::Compared),
            _ => Err(Error::invalid("no such way to find changes")
                .with("changes", name)
                .with("allowed", "auto, tracked, compared")),
        }
    }

    /// Decides, given what is known of changed rows.
    ///
    /// # Errors
    /// `Invalid` when they are to be known and are not; otherwise those of `since`.
    pub(crate) fn decide<T>(self, since: impl FnOnce() -> Result<Since<T>>) -> Result<Found<T>> {
        if self == Self::Compared {
            return Ok(Found { noted: None, reason: None });
        }
        match since()? {
            Since::Known(noted) => Ok(Found { noted: Some(noted), reason: None }),
            Since::Unknown(why) if self == Self::Auto => {
                Ok(Found { noted: None, reason: Some(why) })
            }
            Since::Unknown(why) => {
                Err(Error::invalid("rows changed since this snapshot are not known")
                    .with("cause", why)
                    .with("remedy", "publish with changes=\"auto\", which compares all rows"))
            }
        }
    }
}

/// How a delta finds the rows that changed.
pub(crate) struct Found<T> {
    /// Those noted; `None`: all rows are compared.
    pub(crate) noted: Option<T>,
    /// Why all are, unless it was told to.
    pub(crate) reason: Option<&'static str>,
}

/// The snapshot that a delta is made against, with the deltas upon it.
pub(crate) struct OpenBase {
    given: DeltaBase,
    pub(crate) chain: BaseChain,
}

impl OpenBase {
    /// Reads what the manifests say of the base of a delta of a store of `schema`.
    ///
    /// # Errors
    /// `Invalid` when it is of other tables or a delta itself, or its deltas do not follow each
    /// other, otherwise those of reading them.
    pub(crate) fn open(given: DeltaBase, schema: &Schema) -> Result<Self> {
        let mut chain = BaseChain::read(given.folder.as_ref())?;
        for delta in &given.deltas {
            chain.push(delta.as_ref())?;
        }
        check_successor(chain.schema(), schema)?;
        Ok(Self { given, chain })
    }

    /// Returns how rows of the delta lie on pages.
    pub(crate) fn layout(&self) -> PageLayout {
        PageLayout { codecs: self.chain.codecs().clone(), ..PageLayout::default() }
    }

    /// Decides how the rows that changed are found. `since` is given what the base is known by: the
    /// newest delta upon it, or itself and the delta that was applied to make it.
    ///
    /// # Errors
    /// `Invalid` when they are to be known and are not; otherwise those of `since`.
    pub(crate) fn find<T>(
        &self,
        since: impl FnOnce(&[String]) -> Result<Since<T>>,
    ) -> Result<Found<T>> {
        self.find_as(self.given.find_by, since)
    }

    fn find_as<T>(
        &self,
        find_by: FindBy,
        since: impl FnOnce(&[String]) -> Result<Since<T>>,
    ) -> Result<Found<T>> {
        let mut identities = vec![self.chain.identity()?];
        identities.extend(self.chain.delta_identity()?);
        find_by.decide(|| since(&identities))
    }

    /// Returns the rows noted since the base, by table.
    ///
    /// # Errors
    /// `Invalid` when they are not known.
    pub(crate) fn noted_in(&self, changes: &mut Changes) -> Result<Rows> {
        let mut tracked = self.given.find_by;
        if tracked == FindBy::Auto {
            tracked = FindBy::Tracked;
        }
        let found = self.find_as(tracked, |identities| Ok(changes.rows_since(identities)))?;
        found.noted.ok_or_else(|| {
            Error::unsupported("comparing all rows with a snapshot needs training to stand still")
                .with("remedy", "publish in the foreground, or with changes=\"tracked\"")
        })
    }

    /// Opens the snapshot, to compare rows with its own.
    ///
    /// # Errors
    /// Those of opening it and its deltas.
    pub(crate) fn open_rows(&self, dram_budget_bytes: u64) -> Result<Comparer> {
        let options =
            SnapshotOptions { dram_budget_bytes, reader_count: 1, ..SnapshotOptions::default() };
        let snapshot = Snapshot::open(Arc::clone(&self.given.folder), &options)?;
        for delta in &self.given.deltas {
            snapshot.apply(Arc::clone(delta))?;
        }
        Ok(Comparer::new(Arc::new(snapshot)))
    }
}

/// A snapshot to compare all rows with.
pub(crate) struct Compared {
    comparer: Comparer,
    /// Why all rows, unless it was told to.
    reason: Option<&'static str>,
    _memory: Reservation,
}

/// Takes the number of a row that was looked at.
pub(crate) type SeenSink<'a> = dyn FnMut(RowId) -> Result<()> + 'a;

impl WindowEngine {
    /// Publishes to `folder` what changed since the snapshot in `base`, which may be any snapshot
    /// of this store; see [`publish`](Self::publish) and `tierbed_snapshot::delta`. Rows are coded
    /// as those of the snapshot; tables that are new since are f32.
    ///
    /// Of the snapshot only manifests are read where the rows that changed were noted; otherwise it
    /// is read in a quarter of the memory: its index, and its pages.
    ///
    /// # Errors
    /// `Invalid` when `base` is of other tables or a delta itself, or changes since are to be known
    /// and are not; otherwise as [`publish`](Self::publish).
    pub fn publish_delta(
        &mut self,
        folder: Arc<dyn Folder>,
        base: DeltaBase,
        attachments: &[Attachment<'_>],
        progress: &mut PublishProgress<'_>,
    ) -> Result<Report> {
        self.poison.check()?;
        check_names(attachments)?;
        let base = OpenBase::open(base, &self.schema)?;
        let layout = base.layout();
        let ids = self.flush_vocabularies()?;
        self.make_room_to_publish(&layout)?;
        let found = base.find(|identities| Ok(self.store.changes.since(identities)))?;
        let target = Target { layout, base: Some(base) };
        match found.noted {
            Some(_) => {
                let parts = Parts { ids, attachments };
                self.publish_noted(folder, target, parts, progress)
            }
            None => self.publish_to(folder, target, attachments, progress),
        }
    }

    /// Opens `base` to compare all rows with it: changes since are not known, or it was told so.
    pub(crate) fn compared(&mut self, base: &OpenBase) -> Result<Compared> {
        let found = base.find(|identities| Ok(self.store.changes.since(identities)))?;
        assert!(found.noted.is_none(), "rows that are known are not compared");
        let dram_budget_bytes = self.budget.free_bytes() / 4;
        let memory = self.budget.reserve("base snapshot", dram_budget_bytes)?;
        Ok(Compared {
            comparer: base.open_rows(dram_budget_bytes)?,
            reason: found.reason,
            _memory: memory,
        })
    }

    /// Hands the rows of `table` that differ from the snapshot to `sink`, and the numbers of those
    /// it looks at to `seen`.
    pub(crate) fn visit_changes(
        &mut self,
        table: ComparedTable<'_>,
        compared: &mut Compared,
        sink: &mut ChangeSink<'_>,
        seen: &mut SeenSink<'_>,
    ) -> Result<()> {
        let comparer = &mut compared.comparer;
        comparer.begin_table(table.schema);
        self.store.scan(table.id, &mut |row, record| {
            comparer.add(table, StoredRow::of(table, row, record)?, sink)?;
            seen(row)
        })?;
        comparer.end_table(table, sink)
    }

    /// Counts a delta that was published.
    pub(crate) fn count_compared(&mut self, compared: &Compared) {
        let pages_read = compared.comparer.pages_read();
        self.store.changes.count_delta(DeltaCount::compared(compared.reason, pages_read));
    }
}
