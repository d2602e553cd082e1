//! The page map: which of a page's two slots, A or B, is the current one.
//!
//! Every page has two homes in its file, plane 0 and plane 1. The page map keeps one 16-bit
//! word per page in memory; it is written out with every commit.
//!
//! ```text
//! bit 15     plane    which home is current
//! bit 14     moved    written since the last commit: the other home is the committed one
//! bit 13     both     both homes occupy disk
//! bits 0-12  generation of the current write, 0 = never written, wraps from 8191 to 1
//! ```
//!
//! The first write of a page after a commit goes to the other home, later ones rewrite that
//! one in place. So the committed home is never touched until the next commit is in force.

use tierbed_core::{Error, Result};

const PLANE: u16 = 1 << 15;
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

    /// Returns the plane of the current home.
    pub(super) fn plane(self) -> u64 {
        u64::from(self.0 & PLANE != 0)
    }

    /// Returns whether the page was written since the last commit.
    pub(super) fn is_moved(self) -> bool {
        self.0 & MOVED != 0
    }

    /// Returns how many homes occupy disk.
    pub(super) fn home_count(self) -> u64 {
        match (self.is_written(), self.0 & BOTH != 0) {
            (false, _) => 0,
            (true, false) => 1,
            (true, true) => 2,
        }
    }

    /// Returns the word after the page's next write.
    pub(super) fn next_write(self) -> Self {
        let generation = if self.generation() == GENERATION { 1 } else { self.generation() + 1 };
        let homes = self.0 & (PLANE | BOTH);
        let homes = match (self.is_written(), self.is_moved()) {
            (false, _) => 0,
            (true, true) => homes,
            (true, false) => (homes ^ PLANE) | BOTH,
        };
        Self(generation | homes | MOVED)
    }
}

/// The words of one table's pages.
#[derive(Debug)]
pub(super) struct PageMap {
    words: Vec<u16>,
    home_count: u64,
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
        Ok(Self { words: vec![0; page_count], home_count: 0, is_dirty: true })
    }

    /// Makes the map `page_count` pages long; new ones were never written.
    pub(super) fn grow(&mut self, page_count: u64) -> Result<()> {
        let page_count = usize::try_from(page_count)
            .map_err(|_| Error::invalid("table has too many pages").with("pages", page_count))?;
        self.words.resize(page_count.max(self.words.len()), 0);
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
        let home_count = words.iter().map(|word| PageWord(*word).home_count()).sum();
        Ok(Self { words, home_count, is_dirty: false })
    }

    /// Returns the word of `page`.
    pub(super) fn get(&self, page: u64) -> PageWord {
        PageWord(self.words.get(page as usize).copied().unwrap_or(0))
    }

    /// Records a completed write.
    pub(super) fn set(&mut self, page: u64, word: PageWord) {
        let old = self.get(page);
        self.home_count = self.home_count - old.home_count() + word.home_count();
        self.is_dirty = true;
        if let Some(place) = self.words.get_mut(page as usize) {
            *place = word.0;
        }
    }

    /// Returns whether pages were written since the last commit.
    pub(super) fn is_dirty(&self) -> bool {
        self.is_dirty
    }

    /// Returns how many homes occupy disk.
    pub(super) fn home_count(&self) -> u64 {
        self.home_count
    }

    /// Returns the number of pages.
    pub(super) fn page_count(&self) -> u64 {
        self.words.len() as u64
    }

    /// Returns the words as a commit stores them: nothing in flight.
    pub(super) fn committed_words(&self) -> impl Iterator<Item = u16> + '_ {
        self.words.iter().map(|word| word & !MOVED)
    }

    /// Makes the current homes the committed ones.
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
        assert_eq!((map.get(0).plane(), map.get(0).home_count()), (0, 1));
        map.set(0, map.get(0).next_write());
        assert_eq!((map.get(0).plane(), map.get(0).generation()), (0, 2));
        map.commit();
        map.set(0, map.get(0).next_write());
        assert_eq!((map.get(0).plane(), map.home_count()), (1, 2));
        map.set(0, map.get(0).next_write());
        assert_eq!(map.get(0).plane(), 1, "the second write stays where the first went");
        map.commit();
        map.set(0, map.get(0).next_write());
        assert_eq!((map.get(0).plane(), map.home_count()), (0, 2));
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
        assert!(PageMap::from_words(vec![0, 5, PLANE | BOTH | 7]).is_ok());
        assert!(PageMap::from_words(vec![MOVED | 5]).is_err());
        assert!(PageMap::from_words(vec![PLANE]).is_err());
    }
}
