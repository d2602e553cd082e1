//! Forward indexes of all placements: the pages on which each item lies.
//!
//! Numbers of 4 bytes, two to a word, in checksummed [`blocks`](crate::blocks). Each placement
//! starts with a fresh word: where the pages of each item start, then the pages, counted from the
//! placement's first one, each item's most useful page first:
//!
//! ```text
//! | start of item 0 … start of item n-1 | seats | page page page … | padding |
//! ```
//!
//! The inverted index is not stored: it is made from this one, so that the two cannot disagree.
//! Normative text: docs/reference/formats/snapshot.md.

use std::sync::Arc;

use crate::index::{Lists, PageIndex};
use tierbed_core::{Error, Result, Schema};
use tierbed_io::Device;

use crate::blocks::{block_count, check_crc, read_blocks, BlockWriter};
use crate::manifest::{Manifest, Placed, PlacementInfo};
use crate::placed::{Numbering, Starts};

/// Writes numbers of 4 bytes.
#[derive(Debug)]
pub(crate) struct PlacesWriter {
    blocks: BlockWriter,
    half: Option<u32>,
}

impl PlacesWriter {
    pub(crate) fn new(device: Arc<dyn Device>) -> Self {
        Self { blocks: BlockWriter::new(device), half: None }
    }

    pub(crate) fn put(&mut self, number: u32) -> Result<()> {
        match self.half.take() {
            None => self.half = Some(number),
            Some(low) => {
                self.blocks.put_word(u64::from(low) | (u64::from(number) << 32))?;
            }
        }
        Ok(())
    }

    /// Ends a placement: the next one starts with a fresh word.
    pub(crate) fn end_placement(&mut self) -> Result<()> {
        if self.half.is_some() {
            self.put(0)
        } else {
            Ok(())
        }
    }

    /// Writes what is left and returns the checksum over the blocks' checksums.
    pub(crate) fn finish(self) -> Result<u32> {
        assert!(self.half.is_none(), "a placement was not ended");
        self.blocks.finish()
    }
}

/// Returns the words of the places file.
pub(crate) fn word_count(schema: &Schema, placed: &Placed) -> Result<u64> {
    placed.placements.iter().try_fold(0, |sum, placement| {
        let items = Numbering::new(schema, &placement.tables)?.item_count;
        Ok(sum + (u64::from(items) + 1 + placement.seat_count).div_ceil(2))
    })
}

/// Returns the blocks of the places file.
pub(crate) fn places_blocks(schema: &Schema, placed: &Placed) -> Result<u64> {
    Ok(block_count(word_count(schema, placed)?))
}

/// What the indexes of a snapshot's placements take in memory.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct PlacesMemory {
    /// At most, once they are loaded.
    pub(crate) held_bytes: u64,
    /// Besides, while they are loaded.
    pub(crate) load_bytes: u64,
}

impl PlacesMemory {
    pub(crate) fn of(manifest: &Manifest) -> Result<Self> {
        let Some(placed) = &manifest.placed else { return Ok(Self::default()) };
        let mut memory =
            Self { held_bytes: 0, load_bytes: 8 * word_count(&manifest.schema, placed)? };
        for placement in &placed.placements {
            let items = Numbering::new(&manifest.schema, &placement.tables)?.item_count;
            let forward_bytes = Lists::bytes_of(u64::from(items), placement.seat_count);
            memory.held_bytes += forward_bytes;
            memory.held_bytes += Lists::bytes_of(placement.page_count, placement.seat_count);
            // The whole forward index beside the limited one, and where inverted lists end.
            memory.load_bytes += forward_bytes + Lists::bytes_of(placement.page_count, 0);
        }
        Ok(memory)
    }
}

/// One placement of an open snapshot.
#[derive(Debug)]
pub(crate) struct PlacementIndex {
    pub(crate) numbering: Numbering,
    pub(crate) first_page: u64,
    pub(crate) index: PageIndex,
}

/// The placements of an open snapshot.
#[derive(Debug, Default)]
pub(crate) struct Places {
    pub(crate) starts: Starts,
    pub(crate) placements: Vec<PlacementIndex>,
}

impl Places {
    /// Reads and checks the places file; keeps at most `index_limit` pages of each item.
    pub(crate) fn load(
        schema: &Schema,
        placed: &Placed,
        device: &dyn Device,
        index_limit: Option<u32>,
    ) -> Result<Self> {
        let word_count = usize::try_from(word_count(schema, placed)?)
            .map_err(|_| Error::invalid("places file does not fit the address space"))?;
        let mut numbers = Vec::with_capacity(2 * word_count);
        let blocks = places_blocks(schema, placed)?;
        let found = read_blocks(device, blocks, |words| {
            let left = word_count - numbers.len() / 2;
            words.take(left).for_each(|word| numbers.extend([word as u32, (word >> 32) as u32]));
        })?;
        check_crc(device, placed.places_crc32c, found)?;
        assert_eq!(numbers.len(), 2 * word_count, "words of the blocks that were read");
        let mut rest = &numbers[..];
        let mut placements = Vec::with_capacity(placed.placements.len());
        for info in &placed.placements {
            let numbering = Numbering::new(schema, &info.tables)?;
            let (forward, used) = take_lists(rest, numbering.item_count, info)
                .map_err(|error| error.with("path", device.name()))?;
            // An odd end is padded to a word, so `used` numbers are there.
            (_, rest) = rest.split_at(used);
            let index = PageIndex::from_forward(forward).limited(index_limit);
            placements.push(PlacementIndex { numbering, first_page: info.first_page, index });
        }
        let starts = Starts::new(placements.iter().map(|placement| &placement.numbering));
        Ok(Self { starts, placements })
    }

    /// Returns the bytes of the indexes.
    pub(crate) fn memory_bytes(&self) -> u64 {
        self.placements.iter().map(|placement| placement.index.memory_bytes()).sum()
    }

    /// Returns a placement that a page names; `None` when there is no such placement.
    pub(crate) fn get(&self, placement: u32) -> Option<&PlacementIndex> {
        self.placements.get(placement as usize)
    }

    /// Returns a placement that [`Starts::find`] named.
    ///
    /// # Panics
    /// When there is no such placement.
    pub(crate) fn at(&self, placement: u32) -> &PlacementIndex {
        let found = self.get(placement);
        found.unwrap_or_else(|| panic!("placement {placement} of {}", self.placements.len()))
    }
}

/// Takes the lists of one placement off the front of `numbers`; returns how many numbers it used.
pub(crate) fn take_lists(
    numbers: &[u32],
    item_count: u32,
    info: &PlacementInfo,
) -> Result<(Lists, usize)> {
    let starts_len = item_count as usize + 1;
    let seat_count = info.seat_count as usize;
    let (starts, pages) = numbers
        .get(..starts_len + seat_count)
        .and_then(|numbers| numbers.split_at_checked(starts_len))
        .ok_or_else(|| Error::corruption("places file ends within a placement"))?;
    let lists = Lists::from_parts(starts.to_vec(), pages.to_vec())?;
    let outside = lists.items().iter().find(|&&page| u64::from(page) >= info.page_count);
    if let Some(page) = outside {
        return Err(Error::corruption("places file names a page that does not exist")
            .with("page", page)
            .with("pages", info.page_count));
    }
    Ok((lists, (starts_len + seat_count).next_multiple_of(2)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn info(page_count: u64, seat_count: u64) -> PlacementInfo {
        PlacementInfo { tables: vec![0], first_page: 0, page_count, seat_count }
    }

    proptest! {
        #[test]
        fn any_numbers_are_lists_or_an_error(
            numbers in proptest::collection::vec(0u32..40, 0..60),
            item_count in 0u32..20,
            page_count in 1u64..40,
            seat_count in 0u64..40,
        ) {
            let info = info(page_count, seat_count);
            if let Ok((lists, used)) = take_lists(&numbers, item_count, &info) {
                prop_assert_eq!(lists.list_count(), item_count);
                prop_assert!(used <= numbers.len() + 1);
                prop_assert!(lists.items().iter().all(|&page| u64::from(page) < page_count));
            }
        }
    }

    #[test]
    fn lists_come_off_the_front() {
        let numbers = [0, 1, 1, 3, 4, 0, 2, 9, 9];
        let (lists, used) = take_lists(&numbers, 3, &info(5, 3)).unwrap();
        assert_eq!(lists.iter().collect::<Vec<_>>(), [&[4][..], &[], &[0, 2]]);
        assert_eq!(used, 8, "an odd end is padded to a word");
        assert!(take_lists(&numbers, 3, &info(4, 3)).is_err(), "page 4 of 4");
        assert!(take_lists(&numbers, 3, &info(5, 4)).is_err());
        assert!(take_lists(&numbers[..5], 3, &info(5, 3)).is_err());
        assert!(take_lists(&[0], 0, &info(1, 2)).is_err(), "no list asks for the missing pages");
    }
}
