//! Changes of what a server answers from, to a version of a channel.
//!
//! A batch takes snapshot, generation and model once, so an answer is of one version.

use std::sync::Arc;

use tierbed_core::Result;
use tierbed_remote::Link;
use tierbed_snapshot::{Snapshot, View};

use super::begin::{in_background, newest, not_named, Folders};
use super::Opener;
use crate::generation::{Carried, Parts};
use crate::routes::Service;

/// Makes of a chain what a server needs of its last version: what one does not bring goes on from
/// those before it.
struct Walk<'a> {
    service: &'a Service,
    left: usize,
    carried: Carried,
    link: &'a Link,
    made: Option<Arc<Parts>>,
}

impl<'a> Walk<'a> {
    fn new(service: &'a Service, chain: &'a [Link]) -> Self {
        let link = newest(chain);
        Self { service, left: chain.len(), carried: Carried::default(), link, made: None }
    }

    fn step(&mut self, view: &View<'_>) -> Result<()> {
        let generations = &self.service.generations;
        self.carried = generations.carried(view, &self.carried)?;
        self.left -= 1;
        if self.left == 0 {
            if **view.identity() != *self.link.identity {
                return Err(not_named(self.link, view.identity()));
            }
            self.made = Some(generations.made(view, self.carried.clone())?);
        }
        Ok(())
    }

    fn end(self) -> Arc<Parts> {
        let Some(made) = self.made else { panic!("the last version of a chain is prepared") };
        made
    }
}

impl Service {
    /// Answers from a chain upon the snapshot that answers already.
    pub(super) fn change_deltas(&self, chain: &[Link], folders: Folders) -> Result<()> {
        let mut walk = Walk::new(self, chain);
        let prepare = |view: &View<'_>| {
            walk.step(view)?;
            if let Some(made) = &walk.made {
                self.generations.put(Arc::clone(made));
            }
            Ok(())
        };
        let changed = self.snapshot().apply_chain_with(folders.deltas, prepare);
        if changed.is_err() {
            // Of what still answers it is made again.
            self.generations.forget(&newest(chain).identity);
        }
        changed?;
        self.activated(&walk.end());
        Ok(())
    }

    /// Answers from another snapshot, which is opened in the memory of the one before; returns that
    /// one, which batches may still have.
    pub(super) fn swap(
        &self,
        chain: &[Link],
        folders: Folders,
        opener: &Opener,
        share: f64,
    ) -> Result<Arc<Snapshot>> {
        let Folders { base, deltas } = folders;
        let before = self.snapshot();
        let options = opener.options(&base)?;
        let next = Arc::new(before.open_beside(Arc::new(base), &options, share)?);
        let mut walk = Walk::new(self, chain);
        let prepared = next
            .apply_chain_with(deltas, |view| walk.step(view))
            .and_then(|_| in_background(&next));
        if let Err(error) = prepared {
            drop(next);
            return match before.grow_cache() {
                Ok(()) => Err(error),
                Err(other) => Err(error.with("cache_not_grown", other)),
            };
        }
        self.answering.keep_former_of(&next);
        self.warm(&next, &before);
        let made = walk.end();
        self.generations.put(Arc::clone(&made));
        drop(self.answering.swap(next));
        self.activated(&made);
        Ok(before)
    }

    /// Brings rows that are asked for into the cache of what answers next. A row that cannot be
    /// read fails those who ask for it.
    fn warm(&self, next: &Snapshot, before: &Snapshot) {
        if let Err(error) = next.warm_from(before, &|| !*self.stopping.borrow()) {
            self.log.not_warmed(&error);
        }
    }
}
