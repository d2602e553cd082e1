//! Rows for ids in an order of the caller's, who knows the ids of many batches.

use tierbed_core::{Result, TrainStore};

use super::scratch::{Group, Todo};
use super::Vocabulary;
use crate::bucket::Entry;
use crate::pages::PageCache;

impl Vocabulary {
    /// Sets `count` new rows aside, to be [given](Self::give) to ids; returns the first one. No
    /// commit may come before all are given.
    ///
    /// # Panics
    /// When rows are free: those would be given first.
    pub fn set_rows_aside(&mut self, count: u64) -> u64 {
        assert_eq!(self.state.free_count, 0, "free rows are given before new ones");
        self.state.next_row += count;
        self.state.next_row - count
    }

    /// Gives new ids rows that were set aside: (hash, row) of each, by rising hashes. The caller
    /// has made [room](Self::growth) for as many. `now` is the time in the unit of the policy's
    /// `ttl`.
    ///
    /// # Errors
    /// `Corruption` for a row that was not set aside; otherwise as [`train`](Self::train).
    ///
    /// # Panics
    /// When hashes do not rise, or an id is there already.
    #[expect(clippy::indexing_slicing, reason = "pieces end within the groups")]
    pub fn give(
        &mut self,
        pages: &mut PageCache,
        store: &mut dyn TrainStore,
        given: &[(u64, u64)],
        now: u32,
    ) -> Result<()> {
        assert!(given.is_sorted_by(|a, b| a.0 < b.0), "hashes rise");
        let group = |&(hash, row): &(u64, u64)| {
            let row = self.checked_row(row)?;
            Ok(Group { hash, first: 0, row, todo: Todo::Admit })
        };
        let groups = given.iter().map(group).collect::<Result<Vec<_>>>()?;
        let mut first = 0;
        while first < groups.len() {
            let end = self.bring_piece(pages, store, &groups, first)?;
            assert!(end > first, "a piece has a group");
            for group in &groups[first..end] {
                let Group { hash, row, .. } = *group;
                let entry = Entry { hash, row: Some(row), count: 1.0, seen: now };
                let is_new = self.place(pages, store, &entry)?;
                assert!(is_new, "an id got two rows");
                self.state.id_count += 1;
            }
            first = end;
        }
        Ok(())
    }
}
