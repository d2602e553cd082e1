//! The window engine's part in a publish while it trains.

use std::sync::Arc;

use tierbed_core::store::Attachment;
use tierbed_core::{Budget, Error, Result};
use tierbed_io::Folder;
use tierbed_snapshot::PageLayout;

use crate::attachments::check_names;
use crate::unsorted::{Publication, UnsortedRows};
use crate::window::background::{Finished, Freezing, FrozenRows};
use crate::window::changes::Room;
use crate::window::engine::WindowEngine;
use crate::window::publish::PublishProgress;
use crate::window::publish_delta::{DeltaBase, OpenBase};

/// One part in so many of the budget that a publish beside training has.
const PUBLISH_SHARE: u64 = 8;
/// Most memory for sorting, so that training never waits long for a sorted run.
const SORT_BYTES_MAX: u64 = 8 << 20;

/// What is published beside training.
pub enum Published {
    /// All rows, on pages as the layout says.
    Whole(PageLayout),
    /// Those that were noted since a snapshot.
    Delta(DeltaBase),
}

impl WindowEngine {
    /// Begins to publish to `folder`, which is new or empty, what the tables are now, while
    /// training goes on; see [`background`](crate::window::background).
    ///
    /// A share of the budget is kept for it. The row buffer is built anew in the rest when that is
    /// not free.
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
        check_names(attachments)?;
        if self.store.frozen.is_some() {
            return Err(Error::invalid("another publish of this store is under way")
                .with("remedy", "wait for it to end"));
        }
        if let Some(buffer) = &mut self.buffer {
            buffer.flush(&mut self.store)?;
        }
        let mut all = self.flush_vocabularies()?;
        all.extend(attachments.iter().map(|one| (one.name.to_owned(), one.bytes.to_vec())));
        let (layout, base) = match published {
            Published::Whole(layout) => (layout, None),
            Published::Delta(base) => {
                let base = OpenBase::open(base, &self.schema)?;
                (base.layout(), Some(base))
            }
        };
        let changes = &mut self.store.changes;
        let noted = base.as_ref().map(|base| base.noted_in(changes)).transpose()?;
        let least_bytes = 2 * (self.publish_bytes_min() + layout.tails_bytes_min(&self.schema));
        let bytes = (self.budget.limit_bytes() / PUBLISH_SHARE).max(least_bytes);
        if self.budget.free_bytes() < bytes + self.growth_bytes_max() {
            self.release_buffer()?;
        }
        self.name_least(bytes + self.growth_bytes_max());
        let reservation = self.budget.reserve("publish", bytes)?;
        let memory = Budget::new(bytes);
        let noted_bytes: usize =
            noted.iter().flatten().map(|(_, rows)| rows.serialized_size()).sum();
        let noted_memory = memory.reserve("changed rows", 2 * noted_bytes as u64)?;
        let publication = Publication {
            schema: self.schema.as_ref().clone(),
            folder,
            memory,
            layout,
            base: base.as_ref().map(|base| &base.chain),
        };
        let rows = UnsortedRows::new(publication, SORT_BYTES_MAX)?;
        let Self { store, budget, schema, .. } = self;
        store.changes.begin(Room::of(budget));
        store.frozen = Some(FrozenRows::new(Freezing {
            schema: Arc::clone(schema),
            noted,
            rows,
            attachments: all,
            memory: [reservation, noted_memory],
        }));
        Ok(())
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
