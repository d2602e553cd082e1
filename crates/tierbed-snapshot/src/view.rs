//! A view: one generation of a served snapshot, for as long as somebody looks.
//!
//! Lookups of one view have rows, ids and attachments of one generation, however many deltas are
//! applied meanwhile. A delta that is being applied waits for the views of the generations before,
//! so a view is held for a batch, not for ever.

use std::cell::RefCell;
use std::ops::Deref;
use std::sync::Arc;

use serde::Deserialize;
use tierbed_core::handover::Leases;
use tierbed_core::{Bags, Error, Result, Schema, TableId};
use tierbed_io::Folder;
use tierbed_kernels::FeatureLayout;

use crate::elsewhere::{Ask, Elsewhere};
use crate::layers::{Layers, LayersLease};
use crate::lookup::{Begun, LookupStats};
use crate::manifest::{AttachmentInfo, Manifest};
use crate::published_ids::PublishedIds;
use crate::snapshot::Snapshot;

/// One generation of a snapshot. See the module documentation.
#[derive(Debug)]
pub struct View<'a> {
    snapshot: Of<'a>,
    layers: LayersLease,
    /// Where its rows are, if not in the snapshot.
    elsewhere: Option<Arc<dyn Elsewhere>>,
}

/// The snapshot of a view.
#[derive(Debug)]
enum Of<'a> {
    Lent(&'a Snapshot),
    Shared(Arc<Snapshot>),
}

impl Deref for Of<'_> {
    type Target = Snapshot;

    fn deref(&self) -> &Snapshot {
        match self {
            Self::Lent(snapshot) => snapshot,
            Self::Shared(snapshot) => snapshot,
        }
    }
}

/// The attachment that says when the training step committed.
const COMMITTED_NAME: &str = "committed.json";

/// That attachment.
#[derive(Deserialize)]
struct Committed {
    committed_at_ms: u64,
}

thread_local! {
    /// What snapshots answer from on this thread, while it holds on to a view.
    static HELD: RefCell<Vec<LayersLease>> = const { RefCell::new(Vec::new()) };
}

/// Leases what `leases` answer from on this thread, where it holds on to that.
pub(crate) fn held_here(leases: &Arc<Leases<Layers>>) -> Option<LayersLease> {
    HELD.with_borrow(|held| held.iter().rev().find(|lease| lease.is_of(leases)).cloned())
}

/// Ends the newest hold of this thread.
struct Letting;

impl Drop for Letting {
    fn drop(&mut self) {
        let held = HELD.with_borrow_mut(Vec::pop);
        assert!(held.is_some(), "a thread lets go of a view twice");
    }
}

impl Snapshot {
    /// Returns what answers now, to be looked at as long as the view is held.
    #[must_use]
    pub fn view(&self) -> View<'_> {
        View::of(self, self.layers())
    }

    /// As [`view`](Self::view); the view keeps the snapshot open.
    #[must_use]
    pub fn shared_view(self: &Arc<Self>) -> View<'static> {
        View { snapshot: Of::Shared(Arc::clone(self)), layers: self.layers(), elsewhere: None }
    }

    /// As [`shared_view`](Self::shared_view), of the generation of `identity`: the newest, or one
    /// that [`keep_former`](Self::keep_former) keeps. `None` where it answers no more.
    #[must_use]
    pub fn view_of(self: &Arc<Self>, identity: &str) -> Option<View<'static>> {
        let layers = LayersLease::of(self.leases()).named(identity)?;
        Some(View { snapshot: Of::Shared(Arc::clone(self)), layers, elsewhere: None })
    }
}

impl<'a> View<'a> {
    pub(crate) fn of(snapshot: &'a Snapshot, layers: LayersLease) -> Self {
        Self { snapshot: Of::Lent(snapshot), layers, elsewhere: None }
    }
}

impl View<'static> {
    /// Returns a generation whose rows are elsewhere, under the tables of `schema`; attachments are
    /// those of `head`. Ids of `open` tables are no rows: whoever has the rows translates them.
    #[must_use]
    pub fn elsewhere(
        head: &Arc<Snapshot>,
        schema: Schema,
        open: Vec<TableId>,
        rows: Arc<dyn Elsewhere>,
    ) -> Self {
        let alone = Layers::alone(&schema, rows.identity());
        let ids = Arc::new(PublishedIds::elsewhere(open));
        alone.ids.get_or_init(|| ids);
        let layers = LayersLease::alone(alone);
        Self { snapshot: Of::Shared(Arc::clone(head)), layers, elsewhere: Some(rows) }
    }

    /// Looks at the same generation once more.
    #[must_use]
    pub fn again(&self) -> Self {
        let snapshot = match &self.snapshot {
            Of::Lent(snapshot) => Of::Lent(snapshot),
            Of::Shared(snapshot) => Of::Shared(Arc::clone(snapshot)),
        };
        let layers = self.layers.clone();
        Self { snapshot, layers, elsewhere: self.elsewhere.clone() }
    }
}

impl View<'_> {
    /// Does `work`, in which lookups of the snapshot itself on this thread are those of the view.
    pub fn hold<T>(&self, work: impl FnOnce() -> T) -> T {
        HELD.with_borrow_mut(|held| held.push(self.layers.clone()));
        let letting = Letting;
        let done = work();
        drop(letting);
        done
    }

    /// Returns the open vocabularies; they are read once a generation.
    ///
    /// # Errors
    /// As [`PublishedIds::open`].
    pub fn ids(&self) -> Result<Arc<PublishedIds>> {
        if let Some(ids) = self.layers.ids.get() {
            return Ok(Arc::clone(ids));
        }
        let ids = Arc::new(PublishedIds::open(self)?);
        Ok(Arc::clone(self.layers.ids.get_or_init(|| ids)))
    }

    /// Returns the number of the generation: how many deltas were applied before it.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.layers.number
    }

    /// Returns the tables; a delta may have let them grow, and brought more.
    #[must_use]
    pub fn schema(&self) -> &Schema {
        &self.layers.schema
    }

    /// Returns what tells this generation from every other: the identity of the newest delta, which
    /// names what it was made against, or that of the snapshot.
    #[must_use]
    pub fn identity(&self) -> &Arc<str> {
        &self.layers.identity
    }

    /// Returns the folder of the newest delta, or of the snapshot.
    #[must_use]
    pub fn folder(&self) -> &Arc<dyn Folder> {
        let newest = self.layers.overlays.last();
        newest.map_or_else(|| self.snapshot.folder(), |overlay| &overlay.folder)
    }

    fn manifest(&self) -> &Manifest {
        let newest = self.layers.overlays.last();
        newest.map_or_else(|| self.snapshot.manifest(), |overlay| &overlay.manifest)
    }

    /// Returns the names of the attachments, in order.
    #[must_use]
    pub fn attachment_names(&self) -> Vec<String> {
        self.manifest().attachments.iter().map(|attachment| attachment.name.clone()).collect()
    }

    /// Returns the attachments, in name order.
    #[must_use]
    pub fn attachments(&self) -> &[AttachmentInfo] {
        &self.manifest().attachments
    }

    /// Reads attachment `name`; `None` when there is none of that name. A delta brings all of them.
    ///
    /// # Errors
    /// `Corruption` when the blob is missing or not what was attached, `Io` from the folder.
    pub fn attachment(&self, name: &str) -> Result<Option<Vec<u8>>> {
        self.manifest().read_attachment(self.folder().as_ref(), name)
    }

    /// Returns when the training step of its rows committed, in milliseconds since 1970; `None`
    /// where its publisher did not say.
    ///
    /// # Errors
    /// As [`attachment`](Self::attachment); `Corruption` also for an attachment that says else.
    pub fn committed_at_ms(&self) -> Result<Option<u64>> {
        let Some(bytes) = self.attachment(COMMITTED_NAME)? else { return Ok(None) };
        let Committed { committed_at_ms } = serde_json::from_slice(&bytes).map_err(|cause| {
            Error::corruption("attachment does not say when its training step committed")
                .with("name", COMMITTED_NAME)
                .with("cause", cause)
                .with("remedy", "publish again, without an attachment of that name")
        })?;
        Ok(Some(committed_at_ms))
    }

    /// Pools the rows of a batch into `out`, as [`Snapshot::lookup`] does.
    ///
    /// # Errors
    /// As [`Snapshot::lookup`].
    pub fn lookup(
        &self,
        plan: &FeatureLayout,
        bags: &Bags<'_>,
        out: &mut [f32],
    ) -> Result<LookupStats> {
        match &self.elsewhere {
            None => self.snapshot.lookup_in(&self.layers, plan, bags, out),
            Some(rows) => rows.lookup(self.schema(), &mut [Ask { plan, bags: *bags, out }]),
        }
    }

    /// Returns who has the rows, if they are not here: several lookups are one question to them.
    #[must_use]
    pub fn rows_elsewhere(&self) -> Option<&Arc<dyn Elsewhere>> {
        self.elsewhere.as_ref()
    }

    /// As [`lookup`](Self::lookup), but only where all rows are in memory: in a tier, always there,
    /// or stored nowhere. No page is read and no reader waited for, so threads may ask that have
    /// others to answer. `None` where a row is elsewhere, or another thread is in the way; then
    /// nothing was written, counted, or told to a policy. Calls that do not fit a reader's memory
    /// at once, snapshots with neighbours, and those of a shared budget always get `None`.
    ///
    /// # Errors
    /// As [`Snapshot::lookup`], for shapes and ids.
    pub fn lookup_resident(
        &self,
        plan: &FeatureLayout,
        bags: &Bags<'_>,
        out: &mut [f32],
    ) -> Result<Option<LookupStats>> {
        if self.elsewhere.is_some() {
            return Ok(None);
        }
        self.snapshot.lookup_resident_in(&self.layers, plan, bags, out)
    }

    /// Begins a lookup without waiting: rows in memory are found, and pages of the others are on
    /// their way when this returns. Small lookups of a [`shared_view`](Snapshot::shared_view) are
    /// read so where the I/O engine has a ring; others are answered or left, as by
    /// [`lookup_resident`](Self::lookup_resident). The view need not be held meanwhile.
    ///
    /// # Errors
    /// As [`Snapshot::lookup`], where no page is waited for.
    pub fn begin_lookup(
        &self,
        plan: &FeatureLayout,
        bags: &Bags<'_>,
        out: &mut [f32],
    ) -> Result<Begun> {
        if self.elsewhere.is_some() {
            return Ok(Begun::Left);
        }
        match &self.snapshot {
            Of::Shared(snapshot) => snapshot.begin_lookup(&self.layers, plan, bags, out),
            Of::Lent(_) => {
                let found = self.lookup_resident(plan, bags, out)?;
                Ok(found.map_or(Begun::Left, Begun::Done))
            }
        }
    }
}
