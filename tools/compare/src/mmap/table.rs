//! Where is a row in the mapped file? By arithmetic, and a bit says whether it is there.
//!
//! ```text
//! <table>.dense   | presence bits, row_count / 8, padded to a page | records, row order | pad |
//! ```
//!
//! The file is sparse: what was never written occupies nothing. Space is allocated before a page
//! is touched, because a store into a hole of a full disk would end the process (`SIGBUS`).

use std::fs::{File, OpenOptions};
use std::ops::Range;
use std::os::unix::fs::MetadataExt;

use rustix::fs::FallocateFlags;
use tierbed_core::{Budget, Error, Reservation, Result, RowId, TableSchema};
use tierbed_io::{Folder, PAGE_BYTES};

use crate::ffi::map::MappedFile;

/// Space is allocated in pieces of this many bytes.
const PIECE_BYTES: usize = 64 << 10;

/// One table's map.
pub(crate) struct DenseTable {
    map: MappedFile,
    file: File,
    name: String,
    record_bytes: usize,
    row_count: usize,
    records_at: usize,
    /// Rows whose bit is set.
    pub(crate) present_rows: u64,
    /// One bit per page: its content at the last commit is in the undo file.
    saved: Vec<u64>,
    /// One bit per piece: its space was allocated since the table was opened.
    allocated: Vec<u64>,
    /// What is changed never reaches the file.
    is_private: bool,
    _memory: Reservation,
}

/// Returns the name of a table's file.
pub(crate) fn file_name(table: &TableSchema) -> String {
    format!("{}.dense", table.name)
}

fn missing(file: &str) -> Error {
    Error::corruption("file of the commit in force is missing")
        .with("file", file)
        .with("remedy", "restore the store's folder from a copy")
}

fn bit(words: &[u64], at: usize) -> bool {
    words.get(at / 64).is_some_and(|word| word >> (at % 64) & 1 == 1)
}

fn set_bit(words: &mut [u64], at: usize) {
    if let Some(word) = words.get_mut(at / 64) {
        *word |= 1 << (at % 64);
    }
}

impl DenseTable {
    /// Opens the file of a committed table, or makes it anew.
    ///
    /// # Errors
    /// `Corruption` when a committed file is missing or has another length, `Invalid` when the
    /// table does not fit the address space or the budget, `Unsupported` for a new table in a
    /// folder that is only looked at, `Io`, `NoSpace`.
    pub(crate) fn open(
        folder: &dyn Folder,
        table: &TableSchema,
        is_committed: bool,
        budget: &Budget,
    ) -> Result<Self> {
        let name = file_name(table);
        let too_large =
            || Error::invalid("table too large to be mapped").with("table", &table.name);
        let row_count = usize::try_from(table.row_count).map_err(|_| too_large())?;
        let records_at = row_count.div_ceil(8).next_multiple_of(PAGE_BYTES);
        let record_bytes = table.record_bytes();
        let len_bytes = row_count
            .checked_mul(record_bytes)
            .and_then(|bytes| bytes.checked_add(records_at))
            .filter(|bytes| *bytes < isize::MAX as usize / 2)
            .ok_or_else(too_large)?
            .next_multiple_of(PAGE_BYTES);
        let words = |bits: usize| bits.div_ceil(64);
        let (pages, pieces) = (len_bytes / PAGE_BYTES, len_bytes.div_ceil(PIECE_BYTES));
        let memory = budget.reserve("mmap bits", 8 * (words(pages) + words(pieces)) as u64)?;
        let is_private = folder.is_view();
        let path = folder.file_path(&name).ok_or_else(|| match is_committed {
            true => missing(&name),
            false => Error::unsupported("a folder that is only looked at takes no new table")
                .with("table", &table.name),
        })?;
        let failed =
            |cause| Error::os("cannot open table file", cause).with("path", path.display());
        let mut options = OpenOptions::new();
        options.read(true).write(!is_private).create(!is_committed).truncate(!is_committed);
        let file = options.open(&path).map_err(|cause| match is_committed {
            true => missing(&name).with("cause", cause),
            false => failed(cause),
        })?;
        if is_committed {
            let found = file.metadata().map_err(failed)?.len();
            if found != len_bytes as u64 {
                return Err(Error::corruption("table file has another length than committed")
                    .with("file", &name)
                    .with("expected", len_bytes)
                    .with("found", found)
                    .with("remedy", "restore the store's folder from a copy"));
            }
        } else {
            file.set_len(len_bytes as u64).map_err(failed)?;
        }
        let map = match is_private {
            true => MappedFile::private(&file, len_bytes),
            false => MappedFile::shared(&file, len_bytes),
        };
        let map = map.map_err(failed)?;
        Ok(Self {
            map,
            file,
            name,
            record_bytes,
            row_count,
            records_at,
            present_rows: 0,
            saved: vec![0; words(pages)],
            allocated: vec![0; words(pieces)],
            is_private,
            _memory: memory,
        })
    }

    fn place(&self, row: RowId) -> Range<usize> {
        let start = self.records_at + row.0 as usize * self.record_bytes;
        start..start + self.record_bytes
    }

    /// Returns the record of `row`, unless never written.
    pub(crate) fn get(&self, row: RowId) -> Option<&[u8]> {
        let bits = self.map.bytes().get(row.0 as usize / 8)?;
        let is_present = bits >> (row.0 % 8) & 1 == 1;
        if is_present {
            self.map.bytes().get(self.place(row))
        } else {
            None
        }
    }

    /// Overwrites the record of `row`; its pages were saved and allocated before.
    pub(crate) fn put(&mut self, row: RowId, record: &[u8]) {
        let place = self.place(row);
        let bytes = self.map.bytes_mut();
        if let Some(old) = bytes.get_mut(place) {
            old.copy_from_slice(record);
        }
        if let Some(bits) = bytes.get_mut(row.0 as usize / 8) {
            let mask = 1 << (row.0 % 8);
            self.present_rows += u64::from(*bits & mask == 0);
            *bits |= mask;
        }
    }

    /// Returns the pages a write of `row` touches.
    pub(crate) fn pages_of(&self, row: RowId) -> impl Iterator<Item = usize> {
        let place = self.place(row);
        let records = place.start / PAGE_BYTES..(place.end - 1) / PAGE_BYTES + 1;
        std::iter::once(row.0 as usize / 8 / PAGE_BYTES).chain(records)
    }

    /// Returns whether a page's committed content is in the undo file already.
    pub(crate) fn is_saved(&self, page: usize) -> bool {
        bit(&self.saved, page)
    }

    pub(crate) fn set_saved(&mut self, page: usize) {
        set_bit(&mut self.saved, page);
    }

    /// Forgets which pages were saved: a commit is in force.
    pub(crate) fn forget_saved(&mut self) {
        self.saved.fill(0);
    }

    /// Returns a page's bytes; empty outside the file.
    pub(crate) fn page(&self, page: usize) -> &[u8] {
        let start = page.saturating_mul(PAGE_BYTES);
        self.map.bytes().get(start..start.saturating_add(PAGE_BYTES)).unwrap_or(&[])
    }

    /// Puts a page back as it was.
    ///
    /// # Errors
    /// `Corruption` when there is no such page, `NoSpace`, `Io`.
    pub(crate) fn restore_page(&mut self, page: usize, bytes: &[u8]) -> Result<()> {
        self.allocate(page)?;
        let start = page.saturating_mul(PAGE_BYTES);
        let place = self.map.bytes_mut().get_mut(start..start.saturating_add(PAGE_BYTES));
        match place {
            Some(place) if place.len() == bytes.len() => place.copy_from_slice(bytes),
            _ => return Err(Error::corruption("undo file names no page").with("page_id", page)),
        }
        Ok(())
    }

    /// Takes disk space for the piece around `page`; returns whether it had not been taken.
    ///
    /// # Errors
    /// `NoSpace` on a full disk, `Unsupported` where the file system cannot allocate ahead.
    pub(crate) fn allocate(&mut self, page: usize) -> Result<()> {
        let piece = page * PAGE_BYTES / PIECE_BYTES;
        if self.is_private || bit(&self.allocated, piece) {
            return Ok(());
        }
        let start = piece * PIECE_BYTES;
        let len = PIECE_BYTES.min(self.map.bytes().len().saturating_sub(start));
        let taken =
            rustix::fs::fallocate(&self.file, FallocateFlags::empty(), start as u64, len as u64);
        taken.map_err(|errno| match errno {
            rustix::io::Errno::OPNOTSUPP => {
                Error::unsupported("the file system cannot allocate space ahead")
                    .with("file", &self.name)
                    .with("remedy", "use the file backend, or another file system")
            }
            _ => Error::os("cannot allocate space", errno.into()).with("file", &self.name),
        })?;
        set_bit(&mut self.allocated, piece);
        Ok(())
    }

    /// Returns the bytes that `pages` would take at most, beside what is allocated.
    pub(crate) fn new_bytes(&self, pages: &[usize]) -> u64 {
        let mut pieces: Vec<_> = pages.iter().map(|page| page * PAGE_BYTES / PIECE_BYTES).collect();
        pieces.dedup();
        pieces.iter().filter(|piece| !bit(&self.allocated, **piece)).count() as u64
            * PIECE_BYTES as u64
    }

    /// Visits present rows in order.
    pub(crate) fn rows(&self) -> impl Iterator<Item = (RowId, &[u8])> {
        let bits = self.map.bytes().get(..self.row_count.div_ceil(8)).unwrap_or(&[]);
        let set = bits.iter().enumerate().filter(|(_, byte)| **byte != 0);
        set.flat_map(|(at, _)| (8 * at as u64)..(8 * at as u64 + 8))
            .filter(|row| *row < self.row_count as u64)
            .filter_map(|row| self.get(RowId(row)).map(|record| (RowId(row), record)))
    }

    /// Counts the set bits anew.
    ///
    /// # Errors
    /// `Corruption` when their number is not `expected` or a bit beyond the last row is set.
    pub(crate) fn count_present(&mut self, expected: u64) -> Result<()> {
        let area = self.map.bytes().get(..self.records_at).unwrap_or(&[]);
        let all: u64 = area.iter().map(|byte| u64::from(byte.count_ones())).sum();
        let found = self.rows().count() as u64;
        if all != found || found != expected {
            return Err(Error::corruption("presence bits are not those of the commit")
                .with("file", &self.name)
                .with("expected", expected)
                .with("found", all)
                .with("remedy", "restore the store's folder from a copy"));
        }
        self.present_rows = found;
        Ok(())
    }

    /// Makes the table's pages durable.
    ///
    /// # Errors
    /// `Io`, `NoSpace`.
    pub(crate) fn sync(&self) -> Result<()> {
        let synced = self.map.sync();
        synced.map_err(|cause| Error::os("cannot sync", cause).with("file", &self.name))
    }

    /// Returns the bytes the file occupies.
    pub(crate) fn disk_bytes(&self) -> u64 {
        self.file.metadata().map_or(0, |stat| stat.blocks() * 512)
    }

    /// Returns the number of pages.
    pub(crate) fn page_count(&self) -> u64 {
        (self.map.bytes().len() / PAGE_BYTES) as u64
    }
}
