//! The window engine's part in a publish while it trains.

use std::sync::Arc;

use tierbed_core::store::Attachment;
use tierbed_core::{Budget, Error, Result};
use tierbed_io::Folder;
use tierbed_snapshot::{PageLayout, Report};

use crate::attachments::check_names;
use crate::unsorted::{Publication, UnsortedRows};
use crate::window::background::{Copied, FrozenRows, Freezing};
use crate::window::changes::{DeltaCount, Room};
use crate::window::changes_file::Rows;
use crate::window::engine::WindowEngine;
use crate::window::publish_delta::{DeltaBase, FindBy, OpenBase};

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
                .with("remedy", "wait for it, or publish in the foreground"));
        }
        if let Some(buffer) = &mut self.buffer {
            buffer.flush(&mut self.store)?;
        }
        let mut all = self.flush_vocabularies()?;
        all.extend(attachments.iter().map(|one| (one.name.to_owned(), one.bytes.to_vec())));
        let bytes = (self.budget.limit_bytes() / PUBLISH_SHARE).max(2 * self.publish_bytes_min());
        if self.budget.free_bytes() < bytes {
            self.release_buffer()?;
        }
        self.name_least(bytes + self.growth_bytes_max());
        let reservation = self.budget.reserve("publish", bytes)?;
        let memory = Budget::new(bytes);
        let (base, noted) = match &published {
            Published::Whole(_) => (None, None),
            Published::Delta(_) => {}
        };
        Ok(())
    }
}
