//! Merging of several sorted runs into one.
//!
//! Sources are ordered newest first. Of the versions of one key only the newest is kept; and
//! none, when the row's newest version is under the other prefix (`lookahead::key_allocator`).

#![expect(clippy::indexing_slicing, reason = "the chosen source is one of the sources")]

use tierbed_core::Result;

use crate::key::Key;
use crate::sst::RunCursor;

/// Walks several runs at once, newest first.
pub(crate) struct Merge {
    sources: Vec<RunCursor>,
    /// Source with the smallest key, the newest of equals.
    at: Option<usize>,
    /// Rows skipped because a newer version of the same key exists.
    pub(crate) skipped_rows: u64,
    /// Rows visited, skipped ones included.
    pub(crate) visited_rows: u64,
}

impl Merge {
    /// Starts a merge of `sources`, newest first.
    pub(crate) fn new(sources: Vec<RunCursor>) -> Self {
        let mut merge = Self { sources, at: None, skipped_rows: 0, visited_rows: 0 };
        merge.choose();
        merge
    }

    fn choose(&mut self) {
        let mut best: Option<(Key, usize)> = None;
        for (at, source) in self.sources.iter().enumerate() {
            if let Some(key) = source.key() {
                // Strictly smaller: of equal keys the newest source, seen first, stays chosen.
                if best.is_none_or(|(smallest, _)| key < smallest) {
                    best = Some((key, at));
                }
            }
        }
        self.at = best.map(|(_, at)| at);
    }

    /// Returns the newest version of the smallest key; `None` at the end.
    pub(crate) fn row(&self) -> Option<(Key, &[u8])> {
        let source = &self.sources[self.at?];
        Some((source.key()?, source.record()))
    }

    /// Returns the smallest key; `None` at the end.
    pub(crate) fn key(&self) -> Option<Key> {
        self.sources[self.at?].key()
    }

    /// Goes to the next key, past all older versions of this one.
    ///
    /// # Errors
    /// `Io`, `Corruption`.
    pub(crate) fn advance(&mut self) -> Result<()> {
        let Some(key) = self.key() else { return Ok(()) };
        let mut version_count = 0;
        for source in &mut self.sources {
            if source.key() == Some(key) {
                source.advance()?;
                version_count += 1;
            }
        }
        debug_assert!(version_count > 0, "the source with the smallest key is one of the sources");
        self.visited_rows += version_count;
        self.skipped_rows += version_count - 1;
        self.choose();
        debug_assert!(self.key().is_none_or(|next| key < next), "a source goes back");
        Ok(())
    }
}
