//! Layers of a served snapshot: its own pages below, those of deltas above.
//!
//! A row is where the newest layer has it. Layer 0 is the snapshot; its index and placements are
//! asked only for rows that no delta has, so a replica that a delta made stale is never chosen.
//!
//! ```text
//! row ─▶ newest delta ─▶ … ─▶ oldest delta ─▶ the snapshot's own index
//! ```

use std::ops::Deref;
use std::sync::{Arc, OnceLock};

use tierbed_core::handover::{Lease, Leases};
use tierbed_core::{RowKey, Schema};

use crate::overlay::{Change, Overlay};
use crate::published_ids::PublishedIds;
use crate::reader::PageTable;
use crate::snapshot::Place;

/// Bits of a page's number within its layer: no snapshot has more pages.
const LAYER_SHIFT: u32 = 48;

/// Most deltas upon a snapshot.
pub(crate) const OVERLAYS_MAX: usize = 8;

/// What one generation answers from, besides the snapshot.
#[derive(Debug, Clone)]
pub(crate) struct Layers {
    /// Counts generations.
    pub(crate) number: u64,
    /// That of the newest delta, or of the snapshot.
    pub(crate) identity: Arc<str>,
    /// Oldest first.
    pub(crate) overlays: Vec<Arc<Overlay>>,
    /// Deltas that come or go: tiers neither give nor take their rows.
    pub(crate) pending: Vec<Arc<Overlay>>,
    /// That of the newest layer: tables only grow.
    pub(crate) schema: Arc<Schema>,
    /// Its open vocabularies, once somebody asked for them.
    pub(crate) ids: OnceLock<Arc<PublishedIds>>,
    /// Generations before it that still answer, the newest first: rows that changed since are
    /// pending there, so they are read where that generation has them.
    pub(crate) former: Vec<Arc<Layers>>,
}

/// Where a page lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PagePlace {
    /// 0: the snapshot; then its deltas.
    pub(crate) layer: usize,
    pub(crate) page_id: u64,
}

impl PagePlace {
    /// Returns one number for both: pages of one layer follow each other.
    pub(crate) fn packed(self) -> u64 {
        assert!(self.page_id >> LAYER_SHIFT == 0, "page {} of a layer", self.page_id);
        assert!(self.layer <= OVERLAYS_MAX, "layer {} of {OVERLAYS_MAX}", self.layer);
        ((self.layer as u64) << LAYER_SHIFT) | self.page_id
    }

    pub(crate) fn unpacked(number: u64) -> Self {
        let page_id = number & ((1 << LAYER_SHIFT) - 1);
        Self { layer: (number >> LAYER_SHIFT) as usize, page_id }
    }
}

impl Layers {
    /// A snapshot by itself.
    pub(crate) fn alone(schema: &Schema, identity: &str) -> Self {
        Self {
            number: 0,
            identity: identity.into(),
            overlays: Vec::new(),
            pending: Vec::new(),
            schema: Arc::new(schema.clone()),
            ids: OnceLock::new(),
            former: Vec::new(),
        }
    }

    /// Returns the generations before it, to which rows of `pending` are about to change, too.
    pub(crate) fn former_with(&self, pending: &[Arc<Overlay>]) -> Vec<Arc<Self>> {
        let with = |former: &Arc<Self>| {
            let pending = former.pending.iter().chain(pending).cloned().collect();
            Arc::new(Self { pending, ..Self::clone(former) })
        };
        self.former.iter().map(with).collect()
    }

    /// Returns what it becomes when the next generation answers, in which rows of `pending` are
    /// others.
    pub(crate) fn retired(&self, pending: &[Arc<Overlay>]) -> Arc<Self> {
        Arc::new(Self { pending: pending.to_vec(), former: Vec::new(), ..self.clone() })
    }

    /// Returns the delta of layer `layer`, from 1.
    ///
    /// # Panics
    /// When there is none.
    pub(crate) fn overlay(&self, layer: usize) -> &Overlay {
        let overlay = layer.checked_sub(1).and_then(|at| self.overlays.get(at));
        let Some(overlay) = overlay else {
            panic!("layer {layer} of {} deltas", self.overlays.len());
        };
        overlay
    }

    /// Tells where the newest delta that has a row keeps it; `None`: no delta has it.
    pub(crate) fn find(&self, key: RowKey) -> Option<Place> {
        let newest_first = self.overlays.iter().enumerate().rev();
        newest_first
            .filter_map(|(at, overlay)| {
                Some(match overlay.find(key)? {
                    Change::Page(page_id) => Place::Page(PagePlace { layer: at + 1, page_id }),
                    Change::Initial => Place::Nowhere,
                })
            })
            .next()
    }

    /// Tells whether a delta has a row: what was made of the snapshot's own says nothing of it.
    pub(crate) fn is_changed(&self, key: RowKey) -> bool {
        self.find(key).is_some() || self.is_pending(key)
    }

    /// Tells whether tiers neither give nor take a row.
    pub(crate) fn is_pending(&self, key: RowKey) -> bool {
        self.pending.iter().any(|overlay| overlay.find(key).is_some())
    }

    /// Returns how the tables of the newest delta are kept; `None`: as those of the snapshot.
    pub(crate) fn page_table(&self) -> Option<&PageTable> {
        self.overlays.last().map(|overlay| &overlay.page_table)
    }
}

/// Layers that stay as they are while somebody looks: those that answer now, or former ones.
#[derive(Debug, Clone)]
pub(crate) struct LayersLease {
    lease: Lease<Layers>,
    former: Option<Arc<Layers>>,
}

impl LayersLease {
    /// Leases what answers now.
    pub(crate) fn of(leases: &Arc<Leases<Layers>>) -> Self {
        Self { lease: leases.lease(), former: None }
    }

    /// Leases layers that nobody else does.
    pub(crate) fn alone(layers: Layers) -> Self {
        Self::of(&Arc::new(Leases::new(layers)))
    }

    /// Looks at the generation of `identity` from now on, where that still answers.
    pub(crate) fn named(self, identity: &str) -> Option<Self> {
        if *self.lease.identity == *identity {
            return Some(Self { former: None, ..self });
        }
        let former = self.lease.former.iter().find(|former| *former.identity == *identity)?;
        Some(Self { former: Some(Arc::clone(former)), ..self })
    }

    /// Tells whether this is a lease of `leases`.
    pub(crate) fn is_of(&self, leases: &Arc<Leases<Layers>>) -> bool {
        self.lease.is_of(leases)
    }
}

impl Deref for LayersLease {
    type Target = Layers;

    fn deref(&self) -> &Layers {
        self.former.as_deref().unwrap_or(&self.lease)
    }
}
