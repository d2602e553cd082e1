//! Resident rows: the most used rows of a table, and codes that stand for all others.
//!
//! The *head* of a table is its most used rows: a bit per row says which, and their codes lie in
//! the order of the rows, so that a row costs its code and nothing else. The *tail* stands for all
//! rows: a code each, mostly of a product codec.
//!
//! ```text
//! bit per row   0 1 0 0 1 1 0 …          rank of row 4 = rank of its block + bits before it
//! codes             c1    c4 c5          code of row 4 = codes[rank]
//! ```
#![expect(
    clippy::indexing_slicing,
    reason = "heads and tails are checked against the schema when given"
)]

use std::sync::Arc;

use tierbed_core::{Error, Result, RowKey, Schema, TableId};
use tierbed_kernels::{Codec, Kernels};

/// Words of the bitmap per rank.
const BLOCK_WORDS: usize = 8;

/// What of a table is in memory as long as the snapshot is open.
#[derive(Debug, Clone)]
pub struct ResidentTable {
    /// The table.
    pub table: TableId,
    /// Its most used rows.
    pub head: Option<HeadRows>,
    /// What stands for rows that are in no tier.
    pub tail: Option<Tail>,
    /// Answers for rows that nothing else stands for, `[dim]`; zeroes without it.
    pub default_row: Option<Vec<f32>>,
}

/// What stands for every row of a table: a code each.
#[derive(Debug, Clone)]
pub struct Tail {
    /// How rows are coded.
    pub codec: Codec,
    /// The code of every row, `[row_count, code_bytes]`.
    pub codes: Vec<u8>,
}

/// Some rows of a table in a codec, without metadata per row.
#[derive(Debug, Clone)]
pub struct HeadRows {
    codec: Codec,
    code_bytes: usize,
    is_here: Box<[u64]>,
    /// Rows before each block of the bitmap.
    ranks: Box<[u32]>,
    codes: Vec<u8>,
}

impl HeadRows {
    /// Keeps `rows`, ascending, of a table of `row_count` rows of `dim`, whose codes are `codes`,
    /// `[rows, code_bytes]`.
    ///
    /// # Errors
    /// `Invalid` for rows out of order or range, and codes of another length.
    pub fn new(
        codec: Codec,
        row_count: u64,
        dim: usize,
        rows: &[u64],
        codes: Vec<u8>,
    ) -> Result<Self> {
        codec.check_dim(dim)?;
        let code_bytes = codec.code_bytes(dim);
        let is_ascending = rows.is_sorted_by(|a, b| a < b);
        if !is_ascending || rows.last().is_some_and(|&row| row >= row_count) {
            return Err(Error::invalid("rows kept in memory must ascend within their table")
                .with("row_count", row_count));
        }
        if codes.len() != rows.len() * code_bytes {
            return Err(Error::invalid("codes kept in memory have the wrong length")
                .with("found_bytes", codes.len())
                .with("expected_bytes", rows.len() * code_bytes));
        }
        let words = usize::try_from(row_count.div_ceil(64)).unwrap_or(usize::MAX);
        let mut is_here = vec![0u64; words].into_boxed_slice();
        for &row in rows {
            is_here[(row / 64) as usize] |= 1 << (row % 64);
        }
        let mut before = 0;
        let ranks = is_here.chunks(BLOCK_WORDS).map(|block| {
            let rank = before;
            before += block.iter().map(|word| word.count_ones()).sum::<u32>();
            rank
        });
        let ranks = ranks.collect();
        assert_eq!(before as usize, rows.len(), "a bit per row of the head");
        Ok(Self { codec, code_bytes, is_here, ranks, codes })
    }

    /// Returns the code of `row` if it is here.
    fn code(&self, row: u64) -> Option<&[u8]> {
        let at = (row / 64) as usize;
        assert!(at < self.is_here.len(), "row {row} is beyond its table");
        let (word, bit) = (self.is_here[at], row % 64);
        if word >> bit & 1 == 0 {
            return None;
        }
        let block = at / BLOCK_WORDS;
        let words = &self.is_here[block * BLOCK_WORDS..at];
        let before: u32 = words.iter().map(|word| word.count_ones()).sum();
        let rank = self.ranks[block] + before + (word & ((1 << bit) - 1)).count_ones();
        let start = rank as usize * self.code_bytes;
        Some(&self.codes[start..start + self.code_bytes])
    }

    fn memory_bytes(&self) -> usize {
        size_of_val(&*self.is_here) + size_of_val(&*self.ranks) + self.codes.capacity()
    }
}

/// The resident rows of all tables.
#[derive(Debug, Default)]
pub(super) struct Resident {
    /// By table.
    tables: Vec<Option<Arc<ResidentTable>>>,
    bytes: u64,
}

impl Resident {
    /// # Errors
    /// `Invalid` when a table is unknown, named twice, or its parts are of another table.
    pub(super) fn new(schema: &Schema, given: &[Arc<ResidentTable>]) -> Result<Self> {
        let mut tables: Vec<Option<Arc<ResidentTable>>> = vec![None; schema.tables().len()];
        for resident in given {
            check(schema, resident)?;
            let place = &mut tables[resident.table.0 as usize];
            if place.replace(Arc::clone(resident)).is_some() {
                return Err(Error::invalid("rows of a table are kept in memory twice")
                    .with("table", resident.table.0));
            }
        }
        Ok(Self { tables, bytes: resident_bytes(given) })
    }

    pub(super) fn memory_bytes(&self) -> u64 {
        self.bytes
    }

    /// Tells whether anything of a table is in memory.
    pub(super) fn has(&self, table: TableId) -> bool {
        self.tables.get(table.0 as usize).is_some_and(Option::is_some)
    }

    /// Decodes the row of `key` to `out` if it is in the head.
    pub(super) fn head(&self, kernels: Kernels, key: RowKey, out: &mut [f32]) -> bool {
        let head = self.table(key).and_then(|table| table.head.as_ref());
        let Some((codec, code)) = head.and_then(|h| Some((&h.codec, h.code(key.row.0)?))) else {
            return false;
        };
        kernels.decode_row(codec, code, out);
        true
    }

    /// Decodes what stands for `key` to `out`, if anything does.
    pub(super) fn surrogate(&self, kernels: Kernels, key: RowKey, out: &mut [f32]) -> bool {
        let Some(tail) = self.table(key).and_then(|table| table.tail.as_ref()) else {
            return false;
        };
        let code_bytes = tail.codec.code_bytes(out.len());
        let start = key.row.0 as usize * code_bytes;
        assert!(start + code_bytes <= tail.codes.len(), "{key:?} is beyond its table");
        kernels.decode_row(&tail.codec, &tail.codes[start..start + code_bytes], out);
        true
    }

    /// Writes the default row of a table to `out`.
    pub(super) fn default_row(&self, key: RowKey, out: &mut [f32]) {
        match self.table(key).and_then(|table| table.default_row.as_ref()) {
            Some(row) => {
                assert_eq!(row.len(), out.len(), "elements of the default row");
                out.copy_from_slice(row);
            }
            None => out.fill(0.0),
        }
    }

    fn table(&self, key: RowKey) -> Option<&ResidentTable> {
        self.tables.get(key.table.0 as usize)?.as_deref()
    }
}

/// Checks the lengths of what is kept of a table.
fn check(schema: &Schema, resident: &ResidentTable) -> Result<()> {
    let table = schema.table(resident.table)?;
    let (dim, row_count) = (table.dim as usize, table.row_count);
    let refuse = |what: &'static str, found: usize, expected: u64| {
        Err(Error::invalid(what)
            .with("table", &table.name)
            .with("found", found)
            .with("expected", expected))
    };
    if let Some(head) = &resident.head {
        head.codec.check_dim(dim)?;
        if head.code_bytes != head.codec.code_bytes(dim)
            || head.is_here.len() as u64 != row_count.div_ceil(64)
        {
            return refuse("head is of another table", head.is_here.len(), row_count.div_ceil(64));
        }
    }
    if let Some(Tail { codec, codes }) = &resident.tail {
        codec.check_dim(dim)?;
        let expected = row_count.saturating_mul(codec.code_bytes(dim) as u64);
        if codes.len() as u64 != expected {
            return refuse("tail must have a code for every row", codes.len(), expected);
        }
    }
    match &resident.default_row {
        Some(row) if row.len() != dim => refuse("default row must be [dim]", row.len(), dim as u64),
        _ => Ok(()),
    }
}

/// Bytes of all parts; codebooks that tables share count once.
pub(crate) fn resident_bytes(tables: &[Arc<ResidentTable>]) -> u64 {
    let mut codebooks: Vec<(*const tierbed_kernels::ProductQuantizer, usize)> = Vec::new();
    let mut bytes = 0;
    for table in tables {
        bytes += size_of::<ResidentTable>();
        bytes += table.head.as_ref().map_or(0, HeadRows::memory_bytes);
        bytes += table.default_row.as_ref().map_or(0, |row| size_of_val(row.as_slice()));
        bytes += table.tail.as_ref().map_or(0, |tail| tail.codes.capacity());
        let tail_codec = table.tail.as_ref().map(|tail| &tail.codec);
        let head_codec = table.head.as_ref().map(|head| &head.codec);
        for codec in [head_codec, tail_codec].into_iter().flatten() {
            if let Codec::Product(quantizer) = codec {
                let place = Arc::as_ptr(quantizer);
                if codebooks.iter().all(|(known, _)| *known != place) {
                    codebooks.push((place, quantizer.codebook_bytes()));
                }
            }
        }
    }
    (bytes + codebooks.iter().map(|(_, held)| held).sum::<usize>()) as u64
}
