//! Tails: rows that lie by id, so that their pages need no entries in an index.
//!
//! The first rows of a table that has a tail are its *head*, most used first; they have entries as
//! rows of other tables do. All others that are stored lie behind them in the order of their ids.
//! The page of a row is its number among those, divided by the rows of a page:
//!
//! ```text
//! row ─▶ stored? its number ─▶ of the head? ─ yes ─▶ entry ─▶ page of the head
//!              └─ no: nowhere        └─ no: number − rows of the head before ─▶ page of the tail
//! ```
//!
//! The file has a bit for each row and one for each stored row, and the entries of the head; a
//! bitmap whose bits would all be alike is left out. Counts that number rows are made when the file
//! is loaded. Normative text: docs/reference/formats/snapshot.md.

mod heads;
pub(crate) mod ranks;
mod shape;
mod writer;

use tierbed_core::{Error, Result, RowKey};
use tierbed_io::Device;

use crate::bits::read_bits;
use crate::blocks::{check_crc, read_blocks};
use ranks::{Bit, Ranks};

pub use heads::{HeadSize, TableHeads};
pub(crate) use shape::{TailShape, TailShapes};
pub(crate) use writer::{HeadAndShape, TailIndexWriter, TailSink, TailWriter};

/// The indexes of an open snapshot's tables that have tails.
#[derive(Debug, Default)]
pub(crate) struct Tails {
    words: Vec<u64>,
    /// By table.
    of_table: Vec<Option<TailIndex>>,
}

#[derive(Debug)]
struct TailIndex {
    shape: TailShape,
    /// `None`: all rows are stored, or none.
    present: Option<Ranks>,
    /// `None`: the head is empty, or all.
    heads: Option<Ranks>,
}

impl Tails {
    /// Reads and checks the file; `crc` is the checksum over the blocks' checksums.
    pub(crate) fn load(shapes: TailShapes, device: &dyn Device, crc: u32) -> Result<Self> {
        let word_count = usize::try_from(shapes.word_count)
            .map_err(|_| Error::invalid("index of tails does not fit the address space"))?;
        let mut words = Vec::with_capacity(word_count);
        let found = read_blocks(device, shapes.block_count(), |of_block| {
            let left = word_count - words.len();
            words.extend(of_block.take(left));
        })?;
        check_crc(device, crc, found)?;
        assert_eq!(words.len(), word_count, "words of the blocks that were read");
        let mut of_table = Vec::new();
        for shape in shapes.tables {
            // In id order: tables between have none.
            of_table.resize_with(shape.table.0 as usize, || None);
            let index = TailIndex::new(shape, &words).map_err(|error| {
                error.with("path", device.name()).with("remedy", "publish the snapshot again")
            })?;
            of_table.push(Some(index));
        }
        Ok(Self { words, of_table })
    }

    /// Returns where a row lies, whose table has a tail; `None` when its table has none.
    pub(crate) fn get(&self, key: RowKey) -> Option<Result<Option<u64>>> {
        let index = self.of_table.get(key.table.0 as usize)?.as_ref()?;
        Some(index.page_of(&self.words, key))
    }

    /// Returns the first page of the tail of a row's table, if it has one.
    pub(crate) fn tail_page(&self, key: RowKey) -> Option<u64> {
        let index = self.of_table.get(key.table.0 as usize)?.as_ref()?;
        Some(index.shape.tail_page())
    }
}

impl TailIndex {
    fn new(shape: TailShape, words: &[u64]) -> Result<Self> {
        let damaged = |what| Error::corruption(what).with("table_id", shape.table.0);
        let present = match shape.has_present() {
            false => None,
            true => {
                let start = shape.present_start as usize;
                let ranks = Ranks::new(words, start, shape.row_count, shape.stored_rows);
                Some(ranks.ok_or_else(|| damaged("index stores other rows than the manifest"))?)
            }
        };
        let heads = match shape.has_heads() {
            false => None,
            true => {
                let start = shape.heads_start as usize;
                let ranks = Ranks::new(words, start, shape.stored_rows, shape.head_rows);
                Some(ranks.ok_or_else(|| damaged("index has another head than the manifest"))?)
            }
        };
        Ok(Self { shape, present, heads })
    }

    /// Returns the first page of a row of the table; `None` when it is not stored.
    fn page_of(&self, words: &[u64], key: RowKey) -> Result<Option<u64>> {
        let shape = &self.shape;
        let number = match &self.present {
            None if shape.stored_rows == 0 => return Ok(None),
            None => key.row.0,
            Some(present) => match present.get(words, key.row.0) {
                Bit { is_set: false, .. } => return Ok(None),
                Bit { rank, .. } => rank,
            },
        };
        let head = match &self.heads {
            Some(heads) => heads.get(words, number),
            // All rows of the head, or none.
            None if shape.head_rows > 0 => Bit { is_set: true, rank: number },
            None => Bit { is_set: false, rank: 0 },
        };
        if !head.is_set {
            return Ok(Some(shape.tail_page() + shape.pages_before(number - head.rank)));
        }
        let bits = shape.entry_bits();
        let entry = match bits {
            0 => 0,
            bits => read_bits(words, 64 * shape.entries_start + head.rank * u64::from(bits), bits),
        };
        if entry >= shape.group_count(shape.head_rows) {
            return Err(Error::corruption("index of tails names a page that does not exist")
                .with("table_id", key.table.0)
                .with("row", key.row.0)
                .with("entry", entry)
                .with("pages", shape.head_pages()));
        }
        Ok(Some(shape.first_page + entry * shape.parts_per_row))
    }
}
