//! Which rows do the next windows need, and when again? Look-ahead for systems without a plan.
//!
//! A timeline covers some batches. Per window it lists the distinct rows (*entries*, ascending),
//! the window and entry of each one's next use, and every index of every batch as an entry. It is
//! made before measuring, as plans are, and read window by window. Scratch of one run: not a
//! format anybody keeps.
//!
//! ```text
//! head     u32: window batches, indices of a batch; u64: first batch, windows
//! window   u32: entries, indices; entries: row, next window, next entry; indices: entry
//! places   u64 per window: its first byte; behind the windows
//! ```

use std::fs::File;
use std::io::{BufWriter, Read, Seek, SeekFrom, Write};
use std::path::Path;

use tierbed_core::{Error, Result};

use super::job::{Batches, FEATURE_COUNT};

/// No further use within the timeline.
pub(crate) const NEVER: u32 = u32::MAX;
const HEAD_BYTES: u64 = 24;

/// One window.
#[derive(Debug, Default)]
pub(crate) struct Window {
    /// Rows in order, numbered through all tables.
    pub(crate) rows: Vec<u32>,
    /// Window of the next use of each entry, or [`NEVER`].
    pub(crate) next_windows: Vec<u32>,
    /// Its entry there.
    pub(crate) next_entries: Vec<u32>,
    /// Entry of each index, batch by batch.
    pub(crate) entries: Vec<u32>,
}

impl Window {
    /// Entries of the indices of batch `number` of the window, `[E]`.
    pub(crate) fn batch(&self, number: u32, index_count: usize) -> &[u32] {
        let first = number as usize * index_count;
        self.entries.get(first..first + index_count).unwrap_or(&[])
    }
}

/// First number of each table's rows, and the end.
pub(crate) fn first_rows(row_counts: &[u64; FEATURE_COUNT]) -> Vec<u32> {
    let mut first = 0;
    let mut firsts = vec![0];
    for rows in row_counts {
        first += *rows as u32;
        firsts.push(first);
    }
    firsts
}

/// Writes the timeline of `window_count` windows from batch `first` on.
///
/// Needs 8 bytes of memory per row of the tables.
pub(crate) fn write_timeline(
    batches: &mut Batches,
    path: &Path,
    first: u64,
    (window_batches, window_count): (u32, u64),
) -> Result<()> {
    let forward = path.with_extension("forward");
    let firsts = first_rows(&batches.trace().row_counts());
    let row_count = firsts.last().copied().unwrap_or(0) as usize;
    let mut places = Vec::new();
    {
        let mut out = create(&forward)?;
        let mut entry_of_row = vec![NEVER; row_count];
        let mut end = 0;
        for window in 0..window_count {
            let from = first + window * u64::from(window_batches);
            let numbers = from..from + u64::from(window_batches);
            let made = collect(batches, numbers, &firsts, &mut entry_of_row)?;
            places.push(end);
            end += 8 + 4 * (made.rows.len() + made.entries.len()) as u64;
            put(&mut out, &[made.rows.len() as u32, made.entries.len() as u32])?;
            put(&mut out, &made.rows)?;
            put(&mut out, &made.entries)?;
        }
        out.flush().map_err(not_written)?;
    }
    let head = (window_batches, (FEATURE_COUNT * batches.batch_len()) as u32);
    let result = link(&forward, path, &places, head, (first, row_count));
    std::fs::remove_file(&forward).map_err(not_written)?;
    result
}

// Lists the distinct rows of some batches, ascending, and their indices as entries.
fn collect(
    batches: &mut Batches,
    numbers: std::ops::Range<u64>,
    firsts: &[u32],
    entry_of_row: &mut [u32],
) -> Result<Window> {
    let mut window = Window::default();
    let batch_len = batches.batch_len();
    for number in numbers {
        let ids = batches.read(number)?;
        for (ids, first) in ids.chunks(batch_len).zip(firsts) {
            window.entries.extend(ids.iter().map(|id| first + *id as u32));
        }
    }
    for row in &window.entries {
        if let Some(entry) = entry_of_row.get_mut(*row as usize) {
            if *entry == NEVER {
                *entry = 0;
                window.rows.push(*row);
            }
        }
    }
    window.rows.sort_unstable();
    for (at, row) in window.rows.iter().enumerate() {
        if let Some(entry) = entry_of_row.get_mut(*row as usize) {
            *entry = at as u32;
        }
    }
    for row in &mut window.entries {
        *row = entry_of_row.get(*row as usize).copied().unwrap_or(0);
    }
    for row in &window.rows {
        if let Some(entry) = entry_of_row.get_mut(*row as usize) {
            *entry = NEVER;
        }
    }
    Ok(window)
}

// Reads the windows backwards and writes them with the next use of each entry.
fn link(
    forward: &Path,
    path: &Path,
    places: &[u64],
    (window_batches, batch_indices): (u32, u32),
    (first, row_count): (u64, usize),
) -> Result<()> {
    let mut source = File::open(forward).map_err(not_read)?;
    let mut next_use = vec![(NEVER, NEVER); row_count];
    let mut out = create(path)?;
    put(&mut out, &[window_batches, batch_indices])?;
    out.write_all(&first.to_le_bytes()).map_err(not_written)?;
    out.write_all(&(places.len() as u64).to_le_bytes()).map_err(not_written)?;
    let mut end = HEAD_BYTES;
    let mut ends = vec![0; places.len()];
    for (number, place) in places.iter().enumerate().rev() {
        source.seek(SeekFrom::Start(*place)).map_err(not_read)?;
        let sizes = take(&mut source, 2)?;
        let size = |at: usize| sizes.get(at).copied().unwrap_or(0) as usize;
        let rows = take(&mut source, size(0))?;
        let entries = take(&mut source, size(1))?;
        let mut next_windows = Vec::with_capacity(rows.len());
        let mut next_entries = Vec::with_capacity(rows.len());
        for (entry, row) in rows.iter().enumerate() {
            if let Some(next) = next_use.get_mut(*row as usize) {
                next_windows.push(next.0);
                next_entries.push(next.1);
                *next = (number as u32, entry as u32);
            }
        }
        if let Some(slot) = ends.get_mut(number) {
            *slot = end;
        }
        put(&mut out, &sizes)?;
        for part in [&rows, &next_windows, &next_entries, &entries] {
            put(&mut out, part)?;
        }
        end += 8 + 4 * (3 * rows.len() + entries.len()) as u64;
    }
    for place in ends {
        out.write_all(&place.to_le_bytes()).map_err(not_written)?;
    }
    out.flush().map_err(not_written)
}

/// Reads a timeline.
#[derive(Debug)]
pub(crate) struct Timeline {
    file: File,
    places: Vec<u64>,
    window_batches: u32,
    first: u64,
}

impl Timeline {
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let mut file = File::open(path).map_err(not_read)?;
        let sizes = take(&mut file, 6)?;
        let word = |at: usize| u64::from(sizes.get(at).copied().unwrap_or(0));
        let long = |at: usize| word(at) | (word(at + 1) << 32);
        let window_count = long(4);
        let file_bytes = file.metadata().map_err(not_read)?.len();
        let places_bytes = window_count.checked_mul(8).filter(|bytes| *bytes <= file_bytes);
        let Some(places_bytes) = places_bytes.filter(|_| word(0) > 0) else {
            return Err(Error::corruption("timeline is unfinished").with("path", path.display()));
        };
        file.seek(SeekFrom::Start(file_bytes - places_bytes)).map_err(not_read)?;
        let words = take(&mut file, 2 * window_count as usize)?;
        let places = words.as_chunks::<2>().0.iter();
        let places = places.map(|[low, high]| u64::from(*low) | (u64::from(*high) << 32)).collect();
        Ok(Self { file, places, window_batches: word(0) as u32, first: long(2) })
    }

    /// Batches of a window.
    pub(crate) fn window_batches(&self) -> u32 {
        self.window_batches
    }

    /// Number of the first batch.
    #[cfg(test)]
    pub(crate) fn first(&self) -> u64 {
        self.first
    }

    pub(crate) fn window_count(&self) -> u32 {
        self.places.len() as u32
    }

    /// Returns the window of batch `number`, and the batch's number there.
    pub(crate) fn place(&self, number: u64) -> Result<(u32, u32)> {
        let before = || Error::invalid("batch lies before the timeline").with("batch", number);
        let at = number.checked_sub(self.first).ok_or_else(before)?;
        let batches = u64::from(self.window_batches);
        Ok(((at / batches) as u32, (at % batches) as u32))
    }

    pub(crate) fn read(&mut self, number: u32) -> Result<Window> {
        let place = self.places.get(number as usize).copied().ok_or_else(|| {
            Error::invalid("batch lies beyond the timeline")
                .with("window", number)
                .with("windows", self.places.len())
        })?;
        self.file.seek(SeekFrom::Start(place)).map_err(not_read)?;
        let sizes = take(&mut self.file, 2)?;
        let size = |at: usize| sizes.get(at).copied().unwrap_or(0) as usize;
        let mut part = |len: usize| take(&mut self.file, len);
        Ok(Window {
            rows: part(size(0))?,
            next_windows: part(size(0))?,
            next_entries: part(size(0))?,
            entries: part(size(1))?,
        })
    }
}

fn create(path: &Path) -> Result<BufWriter<File>> {
    let file = File::create(path).map_err(not_written)?;
    Ok(BufWriter::with_capacity(1 << 20, file))
}

fn put(out: &mut BufWriter<File>, words: &[u32]) -> Result<()> {
    for word in words {
        out.write_all(&word.to_le_bytes()).map_err(not_written)?;
    }
    Ok(())
}

fn take(file: &mut File, count: usize) -> Result<Vec<u32>> {
    let mut bytes = vec![0; 4 * count];
    file.read_exact(&mut bytes).map_err(not_read)?;
    Ok(bytes.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect())
}

fn not_written(cause: std::io::Error) -> Error {
    Error::os("could not write timeline", cause)
}

fn not_read(cause: std::io::Error) -> Error {
    Error::os("could not read timeline", cause)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use tierbed_lab::trace::{write_trace, TraceOptions};

    use super::*;

    #[test]
    fn windows_name_their_rows_and_next_uses() {
        let folder = tempfile::tempdir().unwrap();
        let trace = folder.path().join("trace");
        let options = TraceOptions { seed: 1, scale: 1e-4 };
        write_trace(&options, &trace, &mut |_| Ok(())).unwrap();
        let mut batches = Batches::open(&trace, 64).unwrap();
        let firsts = first_rows(&batches.trace().row_counts());
        let path = folder.path().join("timeline");
        // Over the end of the trace: batches begin again.
        let first = batches.batch_count() - 5;
        write_timeline(&mut batches, &path, first, (3, 8)).unwrap();
        let mut timeline = Timeline::open(&path).unwrap();
        assert_eq!((timeline.window_batches(), timeline.window_count()), (3, 8));
        assert_eq!(timeline.first(), first);
        let mut next: BTreeMap<u32, (u32, u32)> = BTreeMap::new();
        for number in (0..8).rev() {
            let window = timeline.read(number).unwrap();
            assert!(window.rows.is_sorted_by(|a, b| a < b));
            let mut at = 0;
            for batch in 0..3 {
                let ids = batches.read(first + u64::from(number) * 3 + batch).unwrap();
                for (index, id) in ids.iter().enumerate() {
                    let row = window.rows[window.entries[at] as usize];
                    assert_eq!(row, firsts[index / 64] + *id as u32);
                    at += 1;
                }
            }
            assert_eq!(at, window.entries.len());
            for (entry, row) in window.rows.iter().enumerate() {
                let expected = next.get(row).copied().unwrap_or((NEVER, NEVER));
                assert_eq!((window.next_windows[entry], window.next_entries[entry]), expected);
            }
            for (entry, row) in window.rows.iter().enumerate() {
                next.insert(*row, (number, entry as u32));
            }
        }
        assert!(timeline.read(8).is_err());
    }
}
