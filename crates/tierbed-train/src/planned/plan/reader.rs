//! A finished plan, read window by window.

use std::sync::Arc;

use serde::Serialize;
use tierbed_core::checksum::crc32c;
use tierbed_core::{Error, ErrorKind, Result};
use tierbed_io::{AlignedBuf, Device, Folder, OpenMode, PAGE_BYTES};

use super::format::{damaged, Directory, Header, WindowMeta};
use super::window::{ExpectedBlock, Part, PlanWindow};
use super::{PlanOptions, PlanShape};

/// An open plan.
#[derive(Debug, Clone)]
pub struct EpochPlan {
    device: Arc<dyn Device>,
    /// Name of its file, for messages.
    file: Arc<str>,
    header: Header,
    directory: Arc<Directory>,
    /// The [copy of its rows](super::copy), for windows whose own entries are damaged.
    spare: Option<Arc<dyn Device>>,
    /// Only the entries are there: rows can be named, batches cannot be trained.
    is_rows_only: bool,
}

/// What a plan holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct PlanStats {
    /// Windows.
    pub window_count: u32,
    /// Batches.
    pub batch_count: u64,
    /// Indices of all batches, duplicates counted.
    pub index_count: u64,
    /// Distinct rows per window, summed.
    pub entry_count: u64,
    /// Bytes of the plan file.
    pub file_bytes: u64,
}

impl EpochPlan {
    /// Opens the plan `name` in `folder`.
    ///
    /// # Errors
    /// `Invalid` when there is no finished plan, `Corruption` when it is damaged.
    pub fn open(folder: &dyn Folder, name: &str) -> Result<Self> {
        let device = folder.open(name, OpenMode::ReadOnly)?;
        Self::read(folder, device, name)?.ok_or_else(|| {
            Error::invalid("plan was never finished")
                .with("plan", name)
                .with("remedy", "make it again")
        })
    }

    /// Opens the plan `name` if it was made from `source` with `options` for `shape`; `None` when
    /// there is none, or one of another origin: make it then.
    ///
    /// # Errors
    /// `Corruption` when it is damaged, otherwise the folder's.
    pub fn open_for(
        folder: &dyn Folder,
        name: &str,
        shape: &PlanShape,
        source: &str,
        options: &PlanOptions,
    ) -> Result<Option<Self>> {
        let device = match folder.open(name, OpenMode::ReadOnly) {
            // No such file.
            Err(error) if error.kind() == ErrorKind::Invalid => return Ok(None),
            opened => opened?,
        };
        let is_same = |plan: &Self| plan.header.key == options.key(source) && plan.shape() == shape;
        Ok(Self::read(folder, device, name)?.filter(is_same))
    }

    /// Returns what it was made of: window options and source.
    #[must_use]
    pub fn key(&self) -> &str {
        &self.header.key
    }

    /// Takes only the rows of it, as [`has_batches`](Self::has_batches) tells from then on.
    ///
    /// # Errors
    /// `Corruption` when the rows of a window are damaged.
    pub fn into_rows_only(self) -> Result<Self> {
        let mut window = PlanWindow::default();
        for number in 0..self.window_count() {
            self.load_part(number, &mut window, Part::Entries)?;
        }
        Ok(Self { is_rows_only: true, ..self })
    }

    /// Tells whether it says which batches come; the rows of a damaged plan are there without.
    #[must_use]
    pub fn has_batches(&self) -> bool {
        !self.is_rows_only
    }

    /// Returns the name of its file.
    #[must_use]
    pub fn file(&self) -> &str {
        &self.file
    }

    fn read(folder: &dyn Folder, device: Arc<dyn Device>, file: &str) -> Result<Option<Self>> {
        let plan = Self::read_device(device, file).map_err(|error| error.with("file", file))?;
        // Where there is no copy, or not yet, the plan has to do; what is read is checked.
        let spare = folder.open(&super::copy_name(file), OpenMode::ReadOnly).ok();
        Ok(plan.map(|plan| Self { spare, ..plan }))
    }

    fn read_device(device: Arc<dyn Device>, file: &str) -> Result<Option<Self>> {
        let file_bytes = device.len_bytes()?;
        if file_bytes < PAGE_BYTES as u64 {
            return Ok(None);
        }
        let mut page = AlignedBuf::new(PAGE_BYTES);
        device.read_at(0, &mut page)?;
        let Some(header) = Header::decode(&page)? else { return Ok(None) };
        let end = header.directory_offset_bytes.checked_add(header.directory_bytes);
        if end.is_none_or(|end| end > file_bytes)
            || u64::from(header.block_bytes_max) > file_bytes
            || header.directory_bytes != Directory::expected_bytes(&header)
        {
            return Err(damaged("is shorter than its header says"));
        }
        let mut bytes = vec![0; header.directory_bytes as usize];
        device.read_at(header.directory_offset_bytes, &mut bytes)?;
        let directory = Arc::new(Directory::decode(&header, &bytes)?);
        Ok(Some(Self {
            device,
            file: file.into(),
            header,
            directory,
            spare: None,
            is_rows_only: false,
        }))
    }

    /// Returns the tables and features it is for.
    #[must_use]
    pub fn shape(&self) -> &PlanShape {
        &self.directory.shape
    }

    /// Returns what identifies its batches and their order, as given to the builder.
    #[must_use]
    pub fn source(&self) -> &str {
        super::source_of(&self.header.key)
    }

    /// Returns what it holds.
    #[must_use]
    pub fn stats(&self) -> PlanStats {
        let entry_count = self.directory.counts.iter().map(|&count| u64::from(count)).sum();
        PlanStats {
            window_count: self.header.window_count,
            batch_count: self.header.batch_count,
            index_count: self.header.index_count,
            entry_count,
            file_bytes: self.header.directory_offset_bytes + self.header.directory_bytes,
        }
    }

    /// Returns what tells this plan from any other: the checksums of its directory and its key.
    #[must_use]
    pub fn identity(&self) -> u64 {
        let key = crc32c(self.header.key.as_bytes());
        u64::from(self.header.directory_crc32c) << 32 | u64::from(key)
    }

    pub(crate) fn window_count(&self) -> usize {
        self.directory.windows.len()
    }

    pub(crate) fn block_bytes_max(&self) -> usize {
        (self.header.block_bytes_max as usize).next_multiple_of(PAGE_BYTES)
    }

    pub(crate) fn batch_indices_max(&self) -> usize {
        self.header.batch_indices_max as usize
    }

    pub(crate) fn directory_bytes(&self) -> u64 {
        // As it was read, and the first entries.
        self.header.directory_bytes
            + 4 * u64::from(self.header.window_count) * (u64::from(self.header.table_count) + 1)
    }

    /// Returns how many rows the windows use, or at most use where that was not counted.
    pub(crate) fn row_count_max(&self) -> u64 {
        match self.header.row_count {
            0 => u64::MAX,
            count => count,
        }
    }

    /// Returns the entries of the largest window.
    pub(crate) fn entries_max(&self) -> usize {
        self.counts()
            .map(|counts| counts.iter().map(|&count| count as usize).sum())
            .max()
            .unwrap_or(0)
    }

    /// Returns the entries of each table, window after window.
    pub(crate) fn counts(&self) -> impl Iterator<Item = &[u32]> {
        self.directory.counts.chunks_exact(self.shape().row_counts.len().max(1))
    }

    /// Reads window `number` into `window`, reusing its memory; without batches where only rows
    /// are there.
    ///
    /// # Errors
    /// `Corruption` when the block is not what was written there.
    pub(crate) fn load(&self, number: usize, window: &mut PlanWindow) -> Result<()> {
        let part = if self.is_rows_only { Part::Entries } else { Part::All };
        self.load_part(number, window, part)
    }

    /// Reads the entries of window `number` without its batches, and unpacks their row ids.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub(crate) fn load_entries(&self, number: usize, window: &mut PlanWindow) -> Result<()> {
        self.load_part(number, window, Part::Entries)?;
        window.unpack_rows()
    }

    /// Reads the entries of window `number`, to [find rows](PlanWindow::entries_of) among them.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub(crate) fn load_packed_entries(&self, number: usize, window: &mut PlanWindow) -> Result<()> {
        self.load_part(number, window, Part::Entries)
    }

    fn load_part(&self, number: usize, window: &mut PlanWindow, part: Part) -> Result<()> {
        let Err(error) = self.read_part(&*self.device, number, window, part) else { return Ok(()) };
        let has_spare = |spare: &&Arc<dyn Device>| {
            part == Part::Entries && self.read_part(&***spare, number, window, part).is_ok()
        };
        match self.spare.as_ref().filter(has_spare) {
            Some(_) => Ok(()),
            None => Err(error.with("file", &self.file)),
        }
    }

    fn read_part(
        &self,
        device: &dyn Device,
        number: usize,
        window: &mut PlanWindow,
        part: Part,
    ) -> Result<()> {
        let meta = self.window_meta(number)?;
        if window.buf.len() < self.block_bytes_max() {
            window.buf = AlignedBuf::new(self.block_bytes_max());
        }
        let padded = part.len_bytes(meta).next_multiple_of(PAGE_BYTES);
        let buf = window.buf.get_mut(..padded).ok_or_else(|| damaged("window is too long"))?;
        device.read_at(meta.offset_bytes, buf)?;
        window.parse(ExpectedBlock {
            meta,
            number: number as u32,
            part,
            table_count: self.shape().row_counts.len(),
            firsts: &self.directory.firsts,
        })
    }

    fn window_meta(&self, number: usize) -> Result<&WindowMeta> {
        let meta = self.directory.windows.get(number);
        meta.ok_or_else(|| damaged("has no such window").with("window", number))
    }

    /// Reads all windows as training does, each index twice; returns the sum of what was read.
    /// For measuring.
    ///
    /// # Errors
    /// `Corruption`, as [`verify`](Self::verify).
    #[doc(hidden)]
    pub fn read_all(&self) -> Result<u64> {
        let mut window = PlanWindow::default();
        let too_early = || damaged("window ends too early");
        let (mut sum, features) = (0u64, &self.shape().feature_tables);
        for number in 0..self.window_count() {
            self.load(number, &mut window)?;
            for table in window.tables() {
                let next = window.next_uses(table);
                for at in 0..table.count as usize {
                    let (window, entry) = next.get(at).ok_or_else(too_early)?;
                    sum += window as u64 + u64::from(entry);
                }
            }
            for at in 0..2 * window.batch_count() {
                let mut batch = window.batch(at / 2).ok_or_else(too_early)?;
                let count = batch.index_count as usize / features.len();
                for table in features {
                    let mapping = window.mapping(&mut batch, table.0 as usize, count);
                    for at in 0..count {
                        sum += mapping.get(at).ok_or_else(too_early)?;
                    }
                }
            }
        }
        Ok(sum)
    }

    /// Checks every window; returns how many there are.
    ///
    /// # Errors
    /// `Corruption`, naming the first bad window.
    pub fn verify(&self) -> Result<u64> {
        self.verify_in(&mut PlanWindow::default())?;
        Ok(self.window_count() as u64)
    }

    /// Checks every window in the memory of `window`.
    pub(crate) fn verify_in(&self, window: &mut PlanWindow) -> Result<()> {
        (0..self.window_count()).try_for_each(|number| {
            let loaded = self.load_part(number, window, Part::All);
            loaded.map_err(|error| error.with("at_window", number))
        })
    }

    /// Reads and checks the entries of window `number`; returns them as they lie, up to the end
    /// of their last page, zeros behind them.
    pub(super) fn raw_entries<'a>(
        &self,
        number: usize,
        window: &'a mut PlanWindow,
    ) -> Result<&'a [u8]> {
        self.load_part(number, window, Part::Entries)?;
        let meta = self.window_meta(number)?;
        let len_bytes = meta.entries_bytes as usize;
        let padded = window.buf.get_mut(..len_bytes.next_multiple_of(PAGE_BYTES));
        let padded = padded.ok_or_else(|| damaged("window is too long"))?;
        padded.iter_mut().skip(len_bytes).for_each(|byte| *byte = 0);
        Ok(padded)
    }

    /// Makes the plan's [copy of the rows](super::copy) if there is none that is whole.
    ///
    /// # Errors
    /// `Corruption` when the plan is damaged, otherwise the folder's.
    pub fn ensure_copy(&self, folder: &dyn Folder) -> Result<()> {
        super::copy::ensure(folder, self)
    }

    pub(super) fn header(&self) -> &Header {
        &self.header
    }

    pub(super) fn directory(&self) -> &Directory {
        &self.directory
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn random_headers_never_panic(
            bytes in proptest::collection::vec(any::<u8>(), 0..200),
            (windows, tables, features) in (0u32..4, 0u32..3, 0u32..3),
        ) {
            let _ = Header::decode(&bytes);
            let header = Header {
                window_count: windows,
                table_count: tables,
                feature_count: features,
                directory_crc32c: crc32c(&bytes),
                block_bytes_max: u32::MAX,
                ..Header::default()
            };
            let _ = Directory::decode(&header, &bytes);
            let mut bytes = bytes;
            bytes.resize(Directory::expected_bytes(&header) as usize, 7);
            let header = Header { directory_crc32c: crc32c(&bytes), ..header };
            let _ = Directory::decode(&header, &bytes);
        }
    }
}
