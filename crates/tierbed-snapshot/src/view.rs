//! A view: one generation of a served snapshot, for as long as somebody looks.
//!
//! Lookups of one view have rows, ids and attachments of one generation, however many deltas are
//! applied meanwhile. A delta that is being applied waits for the views of the generations before,
//! so a view is held for a batch, not for ever.

use tierbed_core::{Bags, Result, Schema};
use tierbed_kernels::FeatureLayout;

use crate::layers::LayersLease;
use crate::lookup::LookupStats;
use crate::snapshot::Snapshot;

/// One generation of a snapshot. See the module documentation.
#[derive(Debug)]
pub struct View<'a> {
    snapshot: &'a Snapshot,
    layers: LayersLease,
}

impl Snapshot {
    /// Returns what answers now, to be looked at as long as the view is held.
    #[must_use]
    pub fn view(&self) -> View<'_> {
        View { snapshot: self, layers: self.layers() }
    }
}

impl View<'_> {
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
    ///
    /// # Errors
    /// As [`Manifest::encode`](crate::manifest::Manifest::encode).
    pub fn identity(&self) -> Result<String> {
        match self.layers.overlays.last() {
            Some(overlay) => Ok(overlay.identity.clone()),
            None => self.snapshot.identity(),
        }
    }

    /// Returns the names of the attachments, in order.
    #[must_use]
    pub fn attachment_names(&self) -> Vec<String> {
        let manifest = match self.layers.overlays.last() {
            Some(overlay) => &overlay.manifest,
            None => self.snapshot.manifest(),
        };
        manifest.attachments.iter().map(|attachment| attachment.name.clone()).collect()
    }

    /// Reads attachment `name`; `None` when there is none of that name. A delta brings all of them.
    ///
    /// # Errors
    /// `Corruption` when the blob is missing or not what was attached, `Io` from the folder.
    pub fn attachment(&self, name: &str) -> Result<Option<Vec<u8>>> {
        match self.layers.overlays.last() {
            Some(overlay) => overlay.manifest.read_attachment(overlay.folder.as_ref(), name),
            None => self.snapshot.manifest().read_attachment(self.snapshot.folder().as_ref(), name),
        }
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
        self.snapshot.lookup_in(&self.layers, plan, bags, out)
    }
}
