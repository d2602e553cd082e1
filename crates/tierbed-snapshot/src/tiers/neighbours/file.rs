//! File of neighbours: for each row, another row that may stand for it.
//!
//! The blocks of the other indexes ([`crate::blocks`]), each with its number and a checksum:
//!
//! ```text
//! header   magic, tables, crc of their names | of each: rows, dim and whether it has neighbours
//! entries  from the next block on, of every table that has: a word for each of its rows,
//!          40 bits of row below the table's number; all ones: nothing stands for it
//! ```
//!
//! Normative text: docs/reference/formats/neighbours.md.

use std::sync::Arc;

use tierbed_core::checksum::crc32c_append;
use tierbed_core::{Error, Result, RowId, RowKey, Schema, TableId};
use tierbed_io::{AlignedBuf, Device, PAGE_BYTES};

use crate::blocks::{block_count, check_block, BlockWriter, BLOCK_WORDS};
use crate::page::le_u64;

/// The first word of the file.
pub const NEIGHBOURS_MAGIC: u64 = u64::from_le_bytes(*b"TBnear_1");
/// Words of the header before those of the tables.
const HEAD_WORDS: usize = 3;
/// Nothing stands for the row.
const NONE: u64 = u64::MAX;
/// Bits of a row; the table's number is above.
const ROW_BITS: u32 = 40;

/// The neighbours of some tables, `[row_count]` each.
pub type NeighboursOf<'a> = &'a dyn Fn(RowKey) -> Option<RowKey>;

/// Where the entries of a file of neighbours lie, and its checked header.
#[derive(Debug)]
pub struct NeighbourFile {
    device: Arc<dyn Device>,
    /// By table.
    tables: Vec<TableEntries>,
}

#[derive(Debug, Clone, Copy)]
struct TableEntries {
    row_count: u64,
    dim: u32,
    /// The word of its first row, where it has neighbours.
    start: Option<u64>,
}

impl NeighbourFile {
    /// Opens the file of neighbours of a snapshot of `schema` and checks its header.
    ///
    /// # Errors
    /// `Invalid` when it is another file or of other tables, `Corruption` when its header is not
    /// what was written or it has another length; `Io` from the device.
    pub fn open(device: Arc<dyn Device>, schema: &Schema) -> Result<Self> {
        let mut buffer = AlignedBuf::new(PAGE_BYTES);
        if device.len_bytes()? < PAGE_BYTES as u64 {
            return Err(refuse(&device, "file is too short to hold neighbours"));
        }
        let header = header_words(schema);
        let mut flags = Vec::new();
        for block in 0..block_count(header.len() as u64) {
            device.read_at(block * PAGE_BYTES as u64, &mut buffer)?;
            if block == 0 && le_u64(&buffer, crate::blocks::BLOCK_HEADER_BYTES) != NEIGHBOURS_MAGIC
            {
                return Err(refuse(&device, "file does not hold neighbours"));
            }
            let words = check_block(device.as_ref(), block, &buffer).map_err(damaged)?;
            let expected = header.iter().enumerate().skip(block as usize * BLOCK_WORDS);
            for ((at, expected), found) in expected.zip(words.chunks_exact(8)) {
                let found = le_u64(found, 0);
                let flag = if has_flag(at) { found & 1 } else { 0 };
                if *expected != found - flag {
                    return Err(refuse(&device, "neighbours are of other tables"));
                }
                if has_flag(at) {
                    flags.push(flag == 1);
                }
            }
        }
        let mut end = block_count(header.len() as u64) * BLOCK_WORDS as u64;
        let tables = schema.tables().iter().zip(flags).map(|(table, has_neighbours)| {
            let start = has_neighbours.then_some(end);
            end += if has_neighbours { table.row_count } else { 0 };
            TableEntries { row_count: table.row_count, dim: table.dim, start }
        });
        let file = Self { tables: tables.collect(), device };
        let (expected, found) = (block_count(end) * PAGE_BYTES as u64, file.device.len_bytes()?);
        if expected != found {
            return Err(damaged(
                Error::corruption("file of neighbours has the wrong length")
                    .with("path", file.device.name())
                    .with("expected_bytes", expected)
                    .with("found_bytes", found),
            ));
        }
        Ok(file)
    }

    /// Writes the file of neighbours of the tables that `has_neighbours`, of a snapshot of `schema`
    /// to `device`, which is empty; `neighbour` gives what stands for each of their rows, of any
    /// table of the same dim.
    ///
    /// # Errors
    /// `Invalid` for neighbours that no table has or of another dim; `Io` and `NoSpace`.
    pub fn write(
        device: &Arc<dyn Device>,
        schema: &Schema,
        has_neighbours: impl Fn(TableId) -> bool,
        neighbour: NeighboursOf<'_>,
    ) -> Result<()> {
        let mut blocks = BlockWriter::new(Arc::clone(device));
        let mut header = header_words(schema);
        let words = header.iter_mut().enumerate().filter(|(at, _)| has_flag(*at));
        for (id, (_, word)) in (0..).map(TableId).zip(words) {
            *word |= u64::from(has_neighbours(id));
        }
        let padded = block_count(header.len() as u64) as usize * BLOCK_WORDS;
        header.resize(padded, 0);
        header.iter().try_for_each(|word| blocks.put_word(*word))?;
        for (id, table) in (0..).map(TableId).zip(schema.tables()) {
            for row in (0..table.row_count).filter(|_| has_neighbours(id)) {
                let key = RowKey::new(id, RowId(row));
                let word = match neighbour(key) {
                    None => NONE,
                    Some(near) => {
                        check(schema, table.dim, near)
                            .map_err(|error| error.with("table", &table.name).with("row", row))?;
                        u64::from(near.table.0) << ROW_BITS | near.row.0
                    }
                };
                blocks.put_word(word)?;
            }
        }
        blocks.finish()?;
        device.sync()
    }

    /// Tells whether rows of a table have neighbours.
    #[must_use]
    pub fn has(&self, table: TableId) -> bool {
        self.tables.get(table.0 as usize).is_some_and(|entries| entries.start.is_some())
    }

    /// Returns the bytes that the file of a snapshot of `schema` takes in memory.
    pub(super) fn memory_bytes(schema: &Schema) -> usize {
        schema.tables().len() * size_of::<TableEntries>()
    }

    /// Returns the block and the word in it that tell the neighbour of `key`.
    pub(super) fn place_of(&self, key: RowKey) -> Option<(u64, usize)> {
        let entries = self.tables.get(key.table.0 as usize)?;
        let word = entries.start?.checked_add(key.row.0)?;
        let place = (word / BLOCK_WORDS as u64, (word % BLOCK_WORDS as u64) as usize);
        (key.row.0 < entries.row_count).then_some(place)
    }

    /// Reads block `number` into `buffer`, a page, and returns its words.
    ///
    /// # Errors
    /// `Corruption` when it is not what was written, `Io` from the device.
    pub(super) fn read<'a>(&self, number: u64, buffer: &'a mut [u8]) -> Result<&'a [u8]> {
        assert_eq!(buffer.len(), PAGE_BYTES, "bytes of a block");
        self.device.read_at(number * PAGE_BYTES as u64, buffer)?;
        check_block(self.device.as_ref(), number, buffer).map_err(damaged)
    }

    /// Returns the neighbour of `key` that word `at` of its block tells; none where it has none.
    ///
    /// # Errors
    /// `Corruption` for rows that no table has or of another dim.
    pub(super) fn neighbour(&self, key: RowKey, words: &[u8], at: usize) -> Result<Option<RowKey>> {
        assert!(at < BLOCK_WORDS, "word {at} of a block");
        let word = le_u64(words, 8 * at);
        if word == NONE {
            return Ok(None);
        }
        let table = TableId(u32::try_from(word >> ROW_BITS).unwrap_or(u32::MAX));
        let near = RowKey::new(table, RowId(word & ((1 << ROW_BITS) - 1)));
        let dim_of = |key: RowKey| {
            let entries = self.tables.get(key.table.0 as usize)?;
            (key.row.0 < entries.row_count).then_some(entries.dim)
        };
        if dim_of(near).is_none() || dim_of(near) != dim_of(key) {
            return Err(damaged(
                Error::corruption("neighbour is no row of the snapshot")
                    .with("path", self.device.name())
                    .with("table", key.table.0)
                    .with("row", key.row.0),
            ));
        }
        // A row that is missing cannot stand for itself.
        Ok((near != key).then_some(near))
    }
}

/// The header's words of `schema`, no table having neighbours.
fn header_words(schema: &Schema) -> Vec<u64> {
    let names = schema.tables().iter().map(|table| &table.name);
    // Lengths too, so that names do not run together.
    let crc = names.fold(0, |crc, name| {
        let crc = crc32c_append(crc, &(name.len() as u32).to_le_bytes());
        crc32c_append(crc, name.as_bytes())
    });
    let mut words = vec![NEIGHBOURS_MAGIC, schema.tables().len() as u64, u64::from(crc)];
    for table in schema.tables() {
        words.extend([table.row_count, u64::from(table.dim) << 1]);
    }
    words
}

/// Tells whether the lowest bit of a word of the header says that a table has neighbours: of its
/// second word.
fn has_flag(at: usize) -> bool {
    at > HEAD_WORDS && !(at - HEAD_WORDS).is_multiple_of(2)
}

/// # Errors
/// `Invalid` when `near` is no row of `dim`.
fn check(schema: &Schema, dim: u32, near: RowKey) -> Result<()> {
    let table = schema.tables().get(near.table.0 as usize);
    if table.is_some_and(|table| table.dim == dim && near.row.0 < table.row_count) {
        return Ok(());
    }
    Err(Error::invalid("neighbour is no row of a table of the same dim")
        .with("neighbour_table", near.table.0)
        .with("neighbour_row", near.row.0))
}

fn refuse(device: &Arc<dyn Device>, what: &'static str) -> Error {
    Error::invalid(what)
        .with("path", device.name())
        .with("remedy", "write the neighbours of this snapshot, or open it without them")
}

fn damaged(error: Error) -> Error {
    error.with("remedy", "write the neighbours again")
}
