//! The page map: which of a page's two slots, A or B, is the current one.
//!
//! Every page has two slots in its file, A and B. The page map keeps one 16-bit word per page
//! in memory; it is written out with every commit.
//!
//! ```text
//! bit 15     slot     which slot is current, 0 is A
//! bit 14     moved    written since the last commit: the other slot is the committed one
//! bit 13     both     both slots occupy disk
//! bits 0-12  generation of the current write, 0 = never written, wraps from 8191 to 1
//! ```
//!
//! The first write of a page after a commit goes to the other slot, later ones rewrite that
//! one in place. So the committed slot is never touched until the next commit is in force.

#![expect(
    clippy::indexing_slicing,
    reason = "pages are below the map's page count, which get and set assert by indexing"
)]

use tierbed_core::{Error, Result};

const SLOT_B: u16 = 1 << 15;
const MOVED: u16 = 1 << 14;
const BOTH: u16 = 1 << 13;
const GENERATION: u16 = BOTH - 1;

/// One page's word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct PageWord(u16);

impl PageWord {
    /// Returns the generation of the current write; 0 when the page was never written.
    pub(super) fn generation(self) -> u16 {
        self.0 & GENERATION
    }

    /// Returns whether the page was ever written.
    pub(super) fn is_written(self) -> bool {
        self.generation() != 0
    }

    /// Returns the current slot: 0 for A, 1 for B.
    pub(super) fn slot(self) -> u64 {
        u64::from(self.0 & SLOT_B != 0)
    }

    /// Returns whether the page was written since the last commit.
    pub(super) fn is_moved(self) -> bool {
        self.0 & MOVED != 0
    }

    /// Returns how many slots occupy disk.
    pub(super) fn used_slot_count(self) -> u64 {
        match (self.is_written(), self.0 & BOTH != 0) {
            (false, _) => 0,
            (true, false) => 1,
            (true, true) => 2,
        }
    }

    /// Returns the word after the page's next write.
    pub(super) fn next_write(self) -> Self {
        let generation = if self.generation() == GENERATION { 1 } else { self.generation() + 1 };
        let slots = self.0 & (SLOT_B | BOTH);
        let slots = match (self.is_written(), self.is_moved()) {
            (false, _) => 0,
            (true, true) => slots,
            (true, false) => (slots ^ SLOT_B) | BOTH,
        };
        Self(generation | slots | MOVED)
    }
}

/// The words of one table's pages.
#[derive(Debug)]
pub(super) struct PageMap {
    words: Vec<u16>,
    used_slot_count: u64,
    is_dirty: bool,
}

impl PageMap {
    /// Returns the memory a map of `page_count` pages takes.
    pub(super) fn memory_bytes(page_count: u64) -> u64 {
        2 * page_count
    }

    /// Builds the map of a table never written. Untouched parts stay uncommitted memory.
    pub(super) fn new(page_count: u64) -> Result<Self> {
        let page_count = usize::try_from(page_count)
            .map_err(|_| Error::invalid("table has too many pages").with("pages", page_count))?;
        // A new file's length must be durable before a commit may speak of it.
        Ok(Self { words: vec![0; page_count], used_slot_count: 0, is_dirty: true })
    }

    /// Makes the map `page_count` pages long; new ones were never written.
    pub(super) fn grow(&mut self, page_count: u64) -> Result<()> {
        let page_count = usize::try_from(page_count)
            .map_err(|_| Error::invalid("table has too many pages").with("pages", page_count))?;
        assert!(page_count >= self.words.len(), "a table only grows");
        self.words.resize(page_count, 0);
        // The file's new length must be durable before a commit may speak of it.
        self.is_dirty = true;
        Ok(())
    }

    /// Rebuilds a map from committed words.
    ///
    /// # Errors
    /// `Corruption` when a word says a write is in flight, which no commit contains.
    pub(super) fn from_words(words: Vec<u16>) -> Result<Self> {
        if let Some(page) = words
            .iter()
            .position(|word| word & MOVED != 0 || (*word != 0 && word & GENERATION == 0))
        {
            return Err(Error::corruption("page map holds an impossible word").with("page", page));
        }
        let used_slot_count = words.iter().map(|word| PageWord(*word).used_slot_count()).sum();
        Ok(Self { words, used_slot_count, is_dirty: false })
    }

    /// Returns the word of `page`.
    pub(super) fn get(&self, page: u64) -> PageWord {
        PageWord(self.words[page as usize])
    }

    /// Records a completed write.
    pub(super) fn set(&mut self, page: u64, word: PageWord) {
        assert!(word.is_written() && word.is_moved(), "a completed write moved the page");
        let old = self.get(page);
        assert!(word == old.next_write(), "page {page} goes from one write to the next");
        self.used_slot_count =
            self.used_slot_count - old.used_slot_count() + word.used_slot_count();
        self.is_dirty = true;
        self.words[page as usize] = word.0;
    }

    /// Returns whether pages were written since the last commit.
    pub(super) fn is_dirty(&self) -> bool {
        self.is_dirty
    }

    /// Returns how many slots occupy disk.
    pub(super) fn used_slot_count(&self) -> u64 {
        self.used_slot_count
    }

    /// Returns the number of pages.
    pub(super) fn page_count(&self) -> u64 {
        self.words.len() as u64
    }

    /// Returns the words as a commit stores them: nothing in flight.
    pub(super) fn committed_words(&self) -> impl Iterator<Item = u16> + '_ {
        self.words.iter().map(|word| word & !MOVED)
    }

    /// Makes the current slots the committed ones.
    pub(super) fn commit(&mut self) {
        if self.is_dirty {
            for word in &mut self.words {
                if *word & MOVED != 0 {
                    *word &= !MOVED;
                }
            }
            self.is_dirty = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_moves_once_per_commit() {
        let mut map = PageMap::new(1).unwrap();
        map.set(0, map.get(0).next_write());
        assert_eq!((map.get(0).slot(), map.get(0).used_slot_count()), (0, 1));
        map.set(0, map.get(0).next_write());
        assert_eq!((map.get(0).slot(), map.get(0).generation()), (0, 2));
        map.commit();
        map.set(0, map.get(0).next_write());
        assert_eq!((map.get(0).slot(), map.used_slot_count()), (1, 2));
        map.set(0, map.get(0).next_write());
        assert_eq!(map.get(0).slot(), 1, "the second write stays where the first went");
        map.commit();
        map.set(0, map.get(0).next_write());
        assert_eq!((map.get(0).slot(), map.used_slot_count()), (0, 2));
    }

    #[test]
    fn generations_wrap_and_never_reach_zero() {
        let mut word = PageWord::default();
        for _ in 0..20_000 {
            word = word.next_write();
            assert!(word.is_written());
        }
    }

    #[test]
    fn a_map_from_disk_is_checked() {
        assert!(PageMap::from_words(vec![0, 5, SLOT_B | BOTH | 7]).is_ok());
        assert!(PageMap::from_words(vec![MOVED | 5]).is_err());
        assert!(PageMap::from_words(vec![SLOT_B]).is_err());
    }
}
