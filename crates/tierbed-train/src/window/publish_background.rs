//! The window engine's part in a publish while it trains.

use std::sync::Arc;

use tierbed_core::store::Attachment;
use tierbed_core::{Budget, Error, Reservation, Result};
use tierbed_io::Folder;
use tierbed_snapshot::{PageLayout, Report};

use crate::attachments::check_names;
use crate::unsorted::{Publication, UnsortedRows};
use crate::window::background::{Finished, Freezing, FrozenRows};
use crate::window::changes::{DeltaCount, Room};
use crate::window::engine::WindowEngine;
use crate::window::noted::NOTED_ROWS;
use crate::window::publish::{PublishProgress, Target};
use crate::window::publish_delta::{DeltaBase, OpenBase};

/// One part in so many of the budget that such a publish has.
const PUBLISH_SHARE: u64 = 8;
/// One part in so many of that is left free, for the store to read rows.
const READ_SHARE: u64 = 8;
/// Most memory for sorting, so that training never waits long for a sorted run.
const SORT_BYTES_MAX: u64 = 8 << 20;

/// What happens meanwhile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Training {
    /// Steps, which need the row buffer.
    GoesOn,
    /// Nothing.
    StandsStill,
}

/// What is published beside training.
pub enum Published {
    /// All rows, on pages as the layout says.
    Whole(PageLayout),
    /// Those that were noted since a snapshot.
    Delta(DeltaBase),
}

/// What goes along with rows.
pub(crate) struct Parts<'a> {
    /// Of the vocabularies.
    pub(crate) ids: Vec<(String, Vec<u8>)>,
    pub(crate) attachments: &'a [Attachment<'a>],
}

/// Memory of a publish.
struct Wanted {
    least_bytes: u64,
    bytes: u64,
}

impl WindowEngine {
    /// Begins to publish to `folder`, which is new or empty, what the tables are now, while
    /// training goes on; see [`background`](crate::window::background).
    ///
    /// A share of the budget is left to publishes from the first one on, which writes what is dirty
    /// and builds the row buffer anew in the rest. Later ones copy what is dirty.
    ///
    /// # Errors
    /// `Invalid` while another such publish is under way, when the budget does not reach for both,
    /// or when a delta's changes are not known; otherwise as [`publish`](Self::publish).
    pub fn begin_publish(
        &mut self,
        folder: Arc<dyn Folder>,
        published: Published,
        attachments: &[Attachment<'_>],
    ) -> Result<()> {
        self.poison.check()?;
        if self.store.frozen.is_some() {
            return Err(Error::invalid("another publish of this store is under way")
                .with("remedy", "wait for it to end"));
        }
        let (layout, base) = match published {
            Published::Whole(layout) => (layout, None),
            Published::Delta(base) => {
                let base = OpenBase::open(base, &self.schema)?;
                (base.layout(), Some(base))
            }
        };
        check_names(attachments)?;
        let ids = self.flush_vocabularies()?;
        self.make_room_to_publish(&layout)?;
        let frozen = self.freeze(Target { layout, base }, folder, Training::GoesOn)?;
        let frozen = frozen.with_attachments(ids, attachments);
        self.store.changes.begin(Room::of(&self.budget));
        self.store.frozen = Some(frozen);
        Ok(())
    }

    /// Publishes to `folder` the rows noted since a base. Rows in memory are neither read nor
    /// written to the store first; `ids` are those of the vocabularies.
    ///
    /// # Errors
    /// As [`publish_delta`](Self::publish_delta).
    pub(crate) fn publish_noted(
        &mut self,
        folder: Arc<dyn Folder>,
        target: Target,
        parts: Parts<'_>,
        progress: &mut PublishProgress<'_>,
    ) -> Result<Report> {
        let Parts { ids, attachments } = parts;
        let frozen = self.freeze(target, folder, Training::StandsStill)?;
        let mut frozen = frozen.with_attachments(ids, attachments);
        while !frozen.is_copied() {
            self.store.copy(&mut frozen, NOTED_ROWS, progress)?;
        }
        let Finished { report, .. } = frozen.finish(progress)?;
        self.store.changes.published(&report.identity, Room::of(&self.budget));
        self.store.changes.count_delta(DeltaCount::NOTED);
        Ok(report)
    }

    // Nothing is written to the store here, so that what was known of changes stays so.
    fn freeze(
        &mut self,
        target: Target,
        folder: Arc<dyn Folder>,
        training: Training,
    ) -> Result<FrozenRows> {
        let Target { layout, base } = target;
        let reservation = self.reserve_to_publish(&layout, training)?;
        let memory = Budget::new(reservation.bytes());
        let changes = &mut self.store.changes;
        let noted = base.as_ref().map(|base| base.noted_in(changes)).transpose()?;
        let noted_bytes: usize =
            noted.iter().flatten().map(|(_, rows)| rows.serialized_size()).sum();
        let noted_memory = memory.reserve("changed rows", 2 * noted_bytes as u64)?;
        let publication = Publication {
            schema: self.schema.as_ref().clone(),
            folder,
            memory,
            layout,
            base: base.as_ref().map(|base| &base.chain),
            own: &[],
        };
        let sort_bytes_max = match training {
            Training::GoesOn => SORT_BYTES_MAX,
            Training::StandsStill => u64::MAX,
        };
        let mut frozen = FrozenRows::new(Freezing {
            schema: Arc::clone(&self.schema),
            noted,
            rows: UnsortedRows::new(publication, sort_bytes_max)?,
            memory: [reservation, noted_memory],
        });
        if let Some(buffer) = &mut self.buffer {
            buffer.publish_dirty(&mut |key, record| frozen.copy_dirty(key, record))?;
        }
        Ok(frozen)
    }

    /// Frees a share of the budget, which is left to publishes from then on: only the first one
    /// writes what is dirty, to make room. What still is dirty is noted.
    pub(crate) fn make_room_to_publish(&mut self, layout: &PageLayout) -> Result<()> {
        let growth_bytes = self.growth_bytes_max();
        let Wanted { least_bytes, bytes } = self.wanted_to_publish(layout);
        if self.budget.free_bytes() < bytes + growth_bytes {
            self.release_buffer()?;
        }
        if bytes > 2 * least_bytes {
            self.publish_bytes = bytes;
        }
        if let Some(buffer) = &self.buffer {
            self.store.changes.note_keys(buffer.unpublished_keys());
        }
        Ok(())
    }

    fn wanted_to_publish(&self, layout: &PageLayout) -> Wanted {
        let least_bytes = self.publish_bytes_min() + layout.more_bytes_min(&self.schema);
        let share_bytes = self.budget.limit_bytes() / PUBLISH_SHARE;
        Wanted { least_bytes, bytes: share_bytes.max(2 * least_bytes) }
    }

    fn reserve_to_publish(
        &mut self,
        layout: &PageLayout,
        training: Training,
    ) -> Result<Reservation> {
        let growth_bytes = self.growth_bytes_max();
        let Wanted { least_bytes, bytes } = self.wanted_to_publish(layout);
        let free_bytes = self.budget.free_bytes().saturating_sub(growth_bytes);
        let bytes = match training {
            Training::GoesOn => bytes,
            Training::StandsStill if self.buffer.is_none() => free_bytes / 2,
            Training::StandsStill => bytes.min(free_bytes),
        };
        let bytes = (bytes - bytes / READ_SHARE).max(least_bytes);
        self.name_least(bytes + growth_bytes);
        self.budget.reserve("publish", bytes)
    }

    /// Copies the next rows of the publish under way, at most `row_count`. When none are left it is
    /// taken out of the engine, to be [finished](FrozenRows::finish) without it; until then `None`.
    ///
    /// # Errors
    /// `Closed` when none is under way, and when `progress` stopped it; otherwise those of the
    /// store and of the folder, also of rows that steps wrote meanwhile. The publish has ended
    /// then; training has not.
    pub fn copy_published(
        &mut self,
        row_count: usize,
        progress: &mut PublishProgress<'_>,
    ) -> Result<Option<FrozenRows>> {
        self.poison.check()?;
        self.store.copy_frozen(row_count, progress)
    }

    /// Ends the publish that was taken: deltas against it are made of what changes from its
    /// beginning on. `None` where it failed.
    pub fn end_publish(&mut self, finished: Option<&Finished>) {
        self.store.end_frozen(finished);
    }
}
