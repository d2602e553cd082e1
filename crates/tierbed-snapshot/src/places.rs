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
//! In memory they are [`PackedPages`], made while the numbers come: nothing else is held.
//! Normative text: docs/reference/formats/snapshot.md.

use std::sync::Arc;

use crate::index::{PackedPages, PackedShape, PagesPacker};
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
    let shapes = placed.placements.iter().map(|placement| shape_of(schema, placement));
    shapes.map(|shape| shape.map(|shape| words_of(&shape))).sum()
}

/// Returns the words of one placement.
fn words_of(shape: &PackedShape) -> u64 {
    (u64::from(shape.row_count) + 1 + shape.seat_count).div_ceil(2)
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
        let mut memory = Self::default();
        for placement in &placed.placements {
            let shape = shape_of(&manifest.schema, placement)?;
            let stored = placement.tables.iter().map(|&table| manifest.tables.get(table as usize));
            let present = stored.flatten().map(|table| table.row_count).sum();
            memory.held_bytes += shape.bytes(present);
            // Ends of lists have a bit for each seat until it is known how many they need.
            memory.load_bytes += shape.seat_count.div_ceil(64) * 8;
        }
        Ok(memory)
    }
}

/// Returns what the size of a placement's index follows from.
fn shape_of(schema: &Schema, info: &PlacementInfo) -> Result<PackedShape> {
    let row_count = Numbering::new(schema, &info.tables)?.item_count;
    let PlacementInfo { page_count, seat_count, .. } = *info;
    Ok(PackedShape { row_count, page_count, seat_count })
}

/// One placement of an open snapshot.
#[derive(Debug)]
pub(crate) struct PlacementIndex {
    pub(crate) numbering: Numbering,
    pub(crate) first_page: u64,
    pub(crate) index: PackedPages,
}

/// The placements of an open snapshot.
#[derive(Debug, Default)]
pub(crate) struct Places {
    pub(crate) starts: Starts,
    pub(crate) placements: Vec<PlacementIndex>,
}

impl Places {
    /// Reads and checks the places file; chooses among at most `index_limit` pages of each item.
    pub(crate) fn load(
        schema: &Schema,
        placed: &Placed,
        device: &dyn Device,
        index_limit: Option<u32>,
    ) -> Result<Self> {
        let mut packers = Packers::new(schema, placed, index_limit)?;
        let blocks = places_blocks(schema, placed)?;
        let mut packed = Ok(());
        let found = read_blocks(device, blocks, |mut words| {
            if packed.is_ok() {
                packed = (&mut words).try_for_each(|word| packers.push(word));
            }
        })?;
        check_crc(device, placed.places_crc32c, found)?;
        let indexes = packed.and_then(|()| packers.finish());
        let indexes = indexes.map_err(|error| error.with("path", device.name()))?;
        let mut placements = Vec::with_capacity(placed.placements.len());
        for (info, index) in placed.placements.iter().zip(indexes) {
            let numbering = Numbering::new(schema, &info.tables)?;
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

/// Makes the index of one placement after the other from the words of their file.
#[derive(Debug)]
struct Packers {
    /// Placements to come, the next one last, and their words.
    shapes: Vec<(PackedShape, u64)>,
    index_limit: Option<u32>,
    packer: Option<PagesPacker>,
    /// Words of the placement at work that are to come.
    words_left: u64,
    done: Vec<PackedPages>,
}

impl Packers {
    fn new(schema: &Schema, placed: &Placed, index_limit: Option<u32>) -> Result<Self> {
        let shapes = placed.placements.iter().rev().map(|info| {
            let shape = shape_of(schema, info)?;
            Ok((shape, words_of(&shape)))
        });
        let shapes = shapes.collect::<Result<_>>()?;
        Ok(Self { shapes, index_limit, packer: None, words_left: 0, done: Vec::new() })
    }

    /// Takes the next word; those behind the last placement are padding.
    fn push(&mut self, word: u64) -> Result<()> {
        if self.packer.is_none() {
            let Some((shape, word_count)) = self.shapes.pop() else { return Ok(()) };
            self.packer = Some(PagesPacker::new(shape, self.index_limit)?);
            self.words_left = word_count;
        }
        let Some(packer) = &mut self.packer else { unreachable!("a placement has a word") };
        packer.push(word as u32)?;
        packer.push((word >> 32) as u32)?;
        self.words_left -= 1;
        if self.words_left == 0 {
            self.done.extend(self.packer.take().map(PagesPacker::finish).transpose()?);
        }
        Ok(())
    }

    fn finish(self) -> Result<Vec<PackedPages>> {
        if self.packer.is_some() || !self.shapes.is_empty() {
            return Err(Error::corruption("places file ends within a placement"));
        }
        Ok(self.done)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tierbed_core::TableSchema;

    use super::*;

    fn packers(shapes: &[(u32, u64, u64)]) -> Packers {
        let tables = shapes.iter().zip(0..).map(|(&(row_count, ..), at)| {
            TableSchema::plain(format!("t{at}"), u64::from(row_count), 1)
        });
        let placements = shapes.iter().zip(0..).map(|(&(_, page_count, seat_count), at)| {
            PlacementInfo { tables: vec![at], first_page: 0, page_count, seat_count }
        });
        let placed = Placed { places_crc32c: 0, placements: placements.collect() };
        Packers::new(&Schema::new(tables.collect()).unwrap(), &placed, None).unwrap()
    }

    fn pack(mut packers: Packers, numbers: &[u32]) -> Result<Vec<PackedPages>> {
        for pair in numbers.chunks(2) {
            let high = pair.get(1).map_or(0, |&high| u64::from(high) << 32);
            packers.push(u64::from(pair[0]) | high)?;
        }
        packers.finish()
    }

    fn lists(index: &PackedPages, row_count: u32) -> Vec<Vec<u32>> {
        (0..row_count).map(|row| index.pages_of(row).collect()).collect()
    }

    proptest! {
        #[test]
        fn any_numbers_are_lists_or_an_error(
            numbers in proptest::collection::vec(0u32..40, 0..60),
            row_count in 1u32..20,
            page_count in 1u64..40,
            seat_count in 0u64..40,
        ) {
            let packers = packers(&[(row_count, page_count, seat_count)]);
            if let Ok(indexes) = pack(packers, &numbers) {
                let lists = lists(&indexes[0], row_count);
                prop_assert_eq!(lists.iter().map(Vec::len).sum::<usize>() as u64, seat_count);
                prop_assert!(lists.iter().flatten().all(|&page| u64::from(page) < page_count));
            }
        }
    }

    #[test]
    fn each_placement_begins_with_a_fresh_word() {
        let numbers = [0, 1, 1, 3, 4, 0, 2, 9, 0, 0, 1, 6];
        let indexes = pack(packers(&[(3, 5, 3), (2, 7, 1)]), &numbers).unwrap();
        assert_eq!(lists(&indexes[0], 3), [vec![4], vec![], vec![0, 2]]);
        assert_eq!(lists(&indexes[1], 2), [vec![], vec![6]]);
        let is_refused = |row_count, page_count, seat_count, numbers: &[u32]| {
            pack(packers(&[(row_count, page_count, seat_count)]), numbers).is_err()
        };
        assert!(!is_refused(3, 5, 3, &numbers[..8]));
        assert!(is_refused(3, 4, 3, &numbers), "page 4 of 4");
        assert!(is_refused(3, 5, 4, &numbers));
        assert!(is_refused(3, 5, 3, &numbers[..5]));
        assert!(is_refused(1, 1, 2, &[0, 0]), "no list asks for the missing pages");
        assert!(is_refused(1, 9, 2, &[1, 2, 3, 4]), "the first list begins at 0");
        assert!(is_refused(2, 9, 2, &[0, 2, 1, 3]), "lists do not overlap");
    }
}
