//! The read-only index of a published table.
//!
//! A snapshot holds the bucket pages as rows of the hidden table, and state and directory as
//! attachments: the very index of training. Many threads may ask at once.

#![expect(
    clippy::indexing_slicing,
    reason = "positions come from the ids themselves; a page was asked for every id"
)]

use tierbed_core::{Budget, Result, Schema, TableId};

use crate::bucket::{mix, Bucket};
use crate::directory::Directory;
use crate::pages::PAGE_WORDS;
use crate::vocabulary::{State, Vocabulary, SHARED_ROW};

/// Pages asked for at once: 256 KiB.
const PAGES_AT_ONCE: usize = 64;

/// Brings pages: numbers, increasing, and where their words go, `[N, 1016]`.
pub type PageSource<'a> = dyn FnMut(&[i64], &mut [f32]) -> Result<()> + 'a;

/// The index of one table of a snapshot.
#[derive(Debug)]
pub struct Published {
    vocabulary: Vocabulary,
}

impl Published {
    /// Opens the index of a published table: its `state` and its directory's bytes.
    ///
    /// # Errors
    /// As [`Vocabulary::open`].
    pub fn open(schema: &Schema, state: State, directory: &[u8], budget: &Budget) -> Result<Self> {
        Vocabulary::open(schema, state, directory, budget).map(|vocabulary| Self { vocabulary })
    }

    /// Returns the table.
    #[must_use]
    pub fn table(&self) -> TableId {
        self.vocabulary.table()
    }

    /// Returns the hidden table of its bucket pages.
    #[must_use]
    pub fn bucket_table(&self) -> TableId {
        self.vocabulary.bucket_table()
    }

    /// Replaces `ids` by their rows; an id without a row gets the shared one.
    ///
    /// # Errors
    /// Those of `pages`, `Corruption` for damaged pages.
    pub fn translate(&self, ids: &mut [i64], pages: &mut PageSource<'_>) -> Result<()> {
        let directory: &Directory = self.vocabulary.directory();
        let mut order: Vec<(u64, usize)> =
            ids.iter().enumerate().map(|(at, &id)| (mix(id), at)).collect();
        order.sort_unstable();
        let mut rest = order.as_slice();
        let mut words = Vec::new();
        while !rest.is_empty() {
            let (mut numbers, mut count) = (Vec::new(), 0);
            // Hashes in order: the ids of one bucket are neighbours.
            for &(hash, _) in rest {
                let bucket = i64::from(directory.bucket(hash));
                if numbers.last() != Some(&bucket) {
                    if numbers.len() == PAGES_AT_ONCE {
                        break;
                    }
                    numbers.push(bucket);
                }
                count += 1;
            }
            numbers.sort_unstable();
            words.resize(numbers.len() * PAGE_WORDS, 0.0f32);
            pages(&numbers, &mut words)?;
            let (now, later) = rest.split_at(count);
            for &(hash, at) in now {
                let number = i64::from(directory.bucket(hash));
                let Ok(place) = numbers.binary_search(&number) else {
                    panic!("the page of bucket {number} was asked for")
                };
                let page = &words[place * PAGE_WORDS..(place + 1) * PAGE_WORDS];
                ids[at] = self.row(bytemuck::cast_slice(page), hash)? as i64;
            }
            rest = later;
        }
        Ok(())
    }

    fn row(&self, page: &[u8], hash: u64) -> Result<u64> {
        let found = Bucket::parse(page)?.entry_of(hash);
        match found.and_then(|(_, entry)| entry.row) {
            Some(row) => self.vocabulary.checked_row(row),
            None => Ok(SHARED_ROW),
        }
    }
}
