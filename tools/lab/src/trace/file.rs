//! The trace file format.
//!
//! ```text
//! page 0   magic "TBtrace1", crc32c of the rest, options, rows and place of each column
//! then     per column its ids, 1 to 4 bytes each (as many as its rows need), page-aligned
//! ```
//! The header is written last: a file without it is unfinished. Format:
//! `docs/reference/formats/trace.md`.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use tierbed_core::checksum::crc32c;
use tierbed_core::{Error, Result};

use super::{TraceOptions, CRITEO_SAMPLES};

const MAGIC: [u8; 8] = *b"TBtrace1";
const PAGE_BYTES: u64 = 4096;
const COLUMN_COUNT: usize = 26;
/// Magic, checksum, two reserved words of 4 bytes in all, seed, scale, samples.
const COLUMNS_AT: usize = 40;
const COLUMN_BYTES: usize = 16;
/// Ids encoded at once.
const CHUNK_LEN: usize = 1 << 16;

/// Rows and place of a column.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Place {
    row_count: u32,
    width_bytes: u32,
    first_byte: u64,
}

fn not_written(cause: std::io::Error) -> Error {
    Error::os("could not write trace", cause)
}

fn not_read(cause: std::io::Error) -> Error {
    Error::os("could not read trace", cause)
}

fn width_of(row_count: u32) -> u32 {
    match row_count {
        0..=0x100 => 1,
        0x101..=0x1_0000 => 2,
        0x1_0001..=0x100_0000 => 3,
        _ => 4,
    }
}

/// Writes a trace column by column.
#[derive(Debug)]
pub(crate) struct TraceWriter {
    file: File,
    options: TraceOptions,
    places: [Place; COLUMN_COUNT],
    end_byte: u64,
}

impl TraceWriter {
    pub(crate) fn create(path: &Path, options: &TraceOptions) -> Result<Self> {
        let file = File::create(path).map_err(|cause| {
            Error::os("could not create trace", cause).with("path", path.display())
        })?;
        let places = [Place::default(); COLUMN_COUNT];
        Ok(Self { file, options: *options, places, end_byte: PAGE_BYTES })
    }

    pub(crate) fn write(&mut self, at: usize, column: &[u32], row_count: u32) -> Result<()> {
        let width = width_of(row_count);
        let mut bytes = Vec::with_capacity(CHUNK_LEN * width as usize);
        let mut next_byte = self.end_byte;
        for ids in column.chunks(CHUNK_LEN) {
            bytes.clear();
            for id in ids {
                bytes.extend(id.to_le_bytes().iter().take(width as usize));
            }
            self.file.write_all_at(&bytes, next_byte).map_err(not_written)?;
            next_byte += bytes.len() as u64;
        }
        if let Some(place) = self.places.get_mut(at) {
            *place = Place { row_count, width_bytes: width, first_byte: self.end_byte };
        }
        self.end_byte = next_byte.next_multiple_of(PAGE_BYTES);
        Ok(())
    }

    pub(crate) fn finish(self) -> Result<()> {
        let mut body = vec![0; 4];
        body.extend(self.options.seed.to_le_bytes());
        body.extend(self.options.scale.to_le_bytes());
        body.extend(self.options.sample_count().to_le_bytes());
        for place in &self.places {
            body.extend(place.row_count.to_le_bytes());
            body.extend(place.width_bytes.to_le_bytes());
            body.extend(place.first_byte.to_le_bytes());
        }
        body.resize(PAGE_BYTES as usize - 12, 0);
        let mut page = [&[0; 12], body.as_slice()].concat();
        mend(&mut page);
        self.file.set_len(self.end_byte).map_err(not_written)?;
        self.file.write_all_at(&page, 0).map_err(not_written)?;
        Ok(())
    }
}

/// Reads batches of a trace, any samples in any order.
#[derive(Debug)]
pub struct TraceReader {
    file: File,
    options: TraceOptions,
    sample_count: u64,
    places: [Place; COLUMN_COUNT],
    bytes: Vec<u8>,
}

impl TraceReader {
    /// Opens the trace at `path`.
    ///
    /// # Errors
    /// `Corruption` for a file that is unfinished, damaged or no trace; `Io` from the disk.
    pub fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(|cause| {
            Error::os("could not open trace", cause).with("path", path.display())
        })?;
        Self::of(file).map_err(|error| error.with("path", path.display()))
    }

    /// Reads the trace in `file`. Errors as [`open`](Self::open).
    pub(crate) fn of(file: File) -> Result<Self> {
        let file_bytes = file.metadata().map_err(not_read)?.len();
        let damaged = || Error::corruption("trace header is damaged");
        let mut page = vec![0; PAGE_BYTES as usize];
        if file_bytes < PAGE_BYTES {
            return Err(damaged());
        }
        file.read_exact_at(&mut page, 0).map_err(not_read)?;
        let (options, sample_count, places) = decode(&page).ok_or_else(damaged)?;
        for place in &places {
            let bytes = sample_count * u64::from(place.width_bytes);
            let is_inside =
                place.first_byte.checked_add(bytes).is_some_and(|end| end <= file_bytes);
            if !is_inside || place.width_bytes != width_of(place.row_count) {
                return Err(damaged().with("file_bytes", file_bytes));
            }
        }
        Ok(Self { file, options, sample_count, places, bytes: Vec::new() })
    }

    /// Returns what the trace was made from.
    #[must_use]
    pub fn options(&self) -> &TraceOptions {
        &self.options
    }

    /// Returns the number of samples.
    #[must_use]
    pub fn sample_count(&self) -> u64 {
        self.sample_count
    }

    /// Returns the rows of the tables of C1..C26; ids are below.
    #[must_use]
    pub fn row_counts(&self) -> [u64; COLUMN_COUNT] {
        self.places.map(|place| u64::from(place.row_count))
    }

    /// Reads the ids of samples `first_sample..first_sample + sample_count` into `ids`,
    /// overwritten: `[26 * B]`, feature-major.
    ///
    /// # Errors
    /// `Invalid` for samples beyond the end, `Corruption` for an id beyond its table, `Io`.
    pub fn read(
        &mut self,
        first_sample: u64,
        sample_count: usize,
        ids: &mut Vec<i64>,
    ) -> Result<()> {
        let end = first_sample.checked_add(sample_count as u64);
        if end.is_none_or(|end| end > self.sample_count) {
            return Err(Error::invalid("samples lie beyond the end of the trace")
                .with("first_sample", first_sample)
                .with("samples", sample_count)
                .with("allowed", self.sample_count));
        }
        ids.clear();
        for (at, place) in self.places.iter().enumerate() {
            let width = place.width_bytes as usize;
            self.bytes.resize(sample_count * width, 0);
            let first_byte = place.first_byte + first_sample * u64::from(place.width_bytes);
            self.file.read_exact_at(&mut self.bytes, first_byte).map_err(not_read)?;
            let mut largest = 0;
            ids.extend(self.bytes.chunks_exact(width).map(|bytes| {
                let id = bytes.iter().rev().fold(0u32, |id, byte| (id << 8) | u32::from(*byte));
                largest = largest.max(id);
                i64::from(id)
            }));
            if sample_count > 0 && largest >= place.row_count {
                return Err(Error::corruption("trace names a row beyond its table")
                    .with("feature", at)
                    .with("row", largest)
                    .with("rows", place.row_count));
            }
        }
        Ok(())
    }
}

/// Puts magic and checksum on a header.
pub(crate) fn mend(page: &mut [u8]) {
    let (_, rest) = page.split_at(page.len().min(12));
    let crc = crc32c(rest).to_le_bytes();
    let head = MAGIC.into_iter().chain(crc);
    page.iter_mut().zip(head).for_each(|(place, byte)| *place = byte);
}

fn decode(page: &[u8]) -> Option<(TraceOptions, u64, [Place; COLUMN_COUNT])> {
    let word = |at: usize| page.get(at..at + 4)?.try_into().ok().map(u32::from_le_bytes);
    let long = |at: usize| page.get(at..at + 8)?.try_into().ok().map(u64::from_le_bytes);
    if !page.starts_with(&MAGIC) || word(8)? != crc32c(page.get(12..)?) {
        return None;
    }
    let options = TraceOptions { seed: long(16)?, scale: f64::from_bits(long(24)?) };
    let sample_count = long(32)?;
    let mut places = [Place::default(); COLUMN_COUNT];
    for (at, place) in places.iter_mut().enumerate() {
        let at = COLUMNS_AT + at * COLUMN_BYTES;
        *place =
            Place { row_count: word(at)?, width_bytes: word(at + 4)?, first_byte: long(at + 8)? };
    }
    (sample_count <= CRITEO_SAMPLES && options.check().is_ok()).then_some((
        options,
        sample_count,
        places,
    ))
}
