//! Where do buckets go? To the end of the newest file; old versions stay until compaction.
//!
//! A file whose outdated share reaches the limit gives its live buckets to the newest file and
//! goes away; a file that the commit in force needs goes only after the next one.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tierbed_core::{Error, Result};
use tierbed_io::{AlignedBuf, Device, DeviceId, Folder, IoEngine, OpenMode, PAGE_BYTES};

use super::index::{damaged, Place, PLACE_MAX};

/// One append file.
pub(crate) struct BucketFile {
    pub(crate) device: Arc<dyn Device>,
    pub(crate) device_id: DeviceId,
    pub(crate) page_count: u64,
    pub(crate) outdated_pages: u64,
}

/// All files of a store, and the end of the newest.
pub(crate) struct BucketFiles {
    folder: Arc<dyn Folder>,
    files: BTreeMap<u64, BucketFile>,
    /// Files that are live no more, but that the commit in force needs.
    retired: BTreeMap<u64, u64>,
    committed: BTreeSet<u64>,
    changed: BTreeSet<u64>,
    active: Option<u64>,
    next_file: u64,
    file_pages: u64,
    buffer: AlignedBuf,
    filled: usize,
    pub(crate) pages_written: u64,
}

fn file_name(file: u64) -> String {
    format!("{file:08}.bucket")
}

impl BucketFiles {
    /// Files of about `file_bytes`, written `buffer_bytes` at a time.
    pub(crate) fn new(folder: Arc<dyn Folder>, file_bytes: u64, buffer_bytes: usize) -> Self {
        Self {
            folder,
            files: BTreeMap::new(),
            retired: BTreeMap::new(),
            committed: BTreeSet::new(),
            changed: BTreeSet::new(),
            active: None,
            next_file: 1,
            file_pages: (file_bytes / PAGE_BYTES as u64).clamp(1, PLACE_MAX / 2),
            buffer: AlignedBuf::new(buffer_bytes.next_multiple_of(PAGE_BYTES)),
            filled: 0,
            pages_written: 0,
        }
    }

    /// Takes over the files of the commit in force; others are removed.
    ///
    /// # Errors
    /// `Corruption` when one is missing or short.
    pub(crate) fn recover(
        &mut self,
        committed: &[(u64, u64)],
        engine: &mut dyn IoEngine,
    ) -> Result<()> {
        for (file, page_count) in committed {
            let name = file_name(*file);
            let device = self
                .folder
                .open(&name, OpenMode::ReadWrite)
                .map_err(|error| damaged().with("file", &name).with("cause", error))?;
            if device.len_bytes()? < page_count * PAGE_BYTES as u64 {
                return Err(damaged().with("file", &name).with("expected_pages", page_count));
            }
            let device_id = engine.attach(device.clone());
            // Nothing is live until the index says so.
            let (page_count, outdated_pages) = (*page_count, *page_count);
            let open = BucketFile { device, device_id, page_count, outdated_pages };
            self.files.insert(*file, open);
            self.committed.insert(*file);
            self.next_file = self.next_file.max(file + 1);
        }
        for name in self.folder.list()? {
            let number = name.strip_suffix(".bucket").and_then(|stem| stem.parse::<u64>().ok());
            if number.is_some_and(|number| !self.files.contains_key(&number)) {
                self.folder.remove(&name)?;
            }
        }
        Ok(())
    }

    pub(crate) fn get(&self, file: u64) -> Result<&BucketFile> {
        self.files.get(&file).ok_or_else(|| damaged().with("file", file_name(file)))
    }

    /// Counts a place as live, when the index is read.
    pub(crate) fn note_live(&mut self, place: Place) {
        if let Some(file) = self.files.get_mut(&place.file()) {
            file.outdated_pages = file.outdated_pages.saturating_sub(place.page_count() as u64);
        }
    }

    /// Counts a place as outdated: its bucket was written elsewhere.
    pub(crate) fn note_outdated(&mut self, place: Place) {
        if let Some(file) = self.files.get_mut(&place.file()) {
            file.outdated_pages += place.page_count() as u64;
        }
    }

    /// Appends a bucket (whole pages); it is on the device after [`flush`](Self::flush).
    ///
    /// # Errors
    /// `NoSpace`, `Io`.
    pub(crate) fn append(&mut self, bytes: &[u8], engine: &mut dyn IoEngine) -> Result<Place> {
        let page_count = bytes.len() / PAGE_BYTES;
        let is_full = self
            .active
            .and_then(|file| self.files.get(&file))
            .is_none_or(|file| file.page_count + page_count as u64 > self.file_pages.max(1));
        if is_full {
            self.flush()?;
            self.start_file(engine)?;
        }
        let mut rest = bytes;
        let active = self.active.unwrap_or(0);
        let start = self.get(active)?.page_count;
        while !rest.is_empty() {
            if self.filled == self.buffer.len() {
                self.flush()?;
            }
            let (now, later) = rest.split_at(rest.len().min(self.buffer.len() - self.filled));
            if let Some(place) = self.buffer.get_mut(self.filled..self.filled + now.len()) {
                place.copy_from_slice(now);
            }
            self.filled += now.len();
            rest = later;
            if let Some(file) = self.files.get_mut(&active) {
                file.page_count += (now.len() / PAGE_BYTES) as u64;
            }
        }
        Ok(Place::new(active, start, page_count))
    }

    fn start_file(&mut self, engine: &mut dyn IoEngine) -> Result<()> {
        let number = self.next_file;
        if number > PLACE_MAX {
            return Err(Error::invalid("no file numbers left").with("remedy", "copy the store"));
        }
        let device = self.folder.open(&file_name(number), OpenMode::Create)?;
        device.set_len(0)?;
        self.next_file += 1;
        let device_id = engine.attach(device.clone());
        let file = BucketFile { device, device_id, page_count: 0, outdated_pages: 0 };
        self.files.insert(number, file);
        self.active = Some(number);
        Ok(())
    }

    /// Hands appended buckets to the device.
    ///
    /// # Errors
    /// `NoSpace`, `Io`; [`abandon`](Self::abandon) must follow.
    pub(crate) fn flush(&mut self) -> Result<()> {
        let active = self.active.and_then(|number| Some((number, self.files.get(&number)?)));
        let Some((number, file)) = active.filter(|_| self.filled > 0) else { return Ok(()) };
        let start = file.page_count * PAGE_BYTES as u64 - self.filled as u64;
        self.changed.insert(number);
        file.device.write_at(start, self.buffer.get(..self.filled).unwrap_or(&[]))?;
        self.pages_written += (self.filled / PAGE_BYTES) as u64;
        self.filled = 0;
        Ok(())
    }

    /// Gives up what was appended in vain: the buffer, and `places` that no index names. The next
    /// bucket begins a new file.
    pub(crate) fn abandon(&mut self, places: impl Iterator<Item = Place>) {
        let lost_pages = (std::mem::take(&mut self.filled) / PAGE_BYTES) as u64;
        if let Some(file) = self.active.take().and_then(|number| self.files.get_mut(&number)) {
            file.page_count -= lost_pages;
        }
        for place in places {
            if let Some(file) = self.files.get_mut(&place.file()) {
                let lost = place.end_page().saturating_sub(file.page_count);
                file.outdated_pages += (place.page_count() as u64).saturating_sub(lost);
            }
        }
    }

    /// Returns the files, but the newest, whose outdated share is at least `ratio`.
    pub(crate) fn outdated_files(&self, ratio: f64) -> BTreeSet<u64> {
        let is_due = |file: &BucketFile| {
            file.outdated_pages as f64 >= ratio * file.page_count as f64 && file.page_count > 0
        };
        let others = self.files.iter().filter(|(number, _)| Some(**number) != self.active);
        others.filter(|(_, file)| is_due(file)).map(|(number, _)| *number).collect()
    }

    /// Lets go of files without live buckets.
    ///
    /// # Errors
    /// `Io`.
    pub(crate) fn retire(
        &mut self,
        files: &BTreeSet<u64>,
        engine: &mut dyn IoEngine,
    ) -> Result<()> {
        for number in files {
            let Some(file) = self.files.remove(number) else { continue };
            engine.detach(file.device_id);
            self.changed.remove(number);
            if self.committed.contains(number) {
                self.retired.insert(*number, file.page_count);
            } else {
                self.folder.remove(&file_name(*number))?;
            }
        }
        Ok(())
    }

    /// Makes every file changed since the last call durable.
    ///
    /// # Errors
    /// `Io`, `NoSpace`; the store must not be used after either.
    pub(crate) fn sync(&mut self) -> Result<()> {
        for number in &self.changed {
            if let Some(file) = self.files.get(number) {
                file.device.sync()?;
            }
        }
        self.changed.clear();
        Ok(())
    }

    /// Returns every live file and its pages.
    pub(crate) fn list(&self) -> Vec<(u64, u64)> {
        self.files.iter().map(|(number, file)| (*number, file.page_count)).collect()
    }

    /// Notes that the commit of the files there are is in force; older ones are garbage, and
    /// failing to remove them costs space, not correctness.
    pub(crate) fn committed(&mut self) {
        self.committed = self.files.keys().copied().collect();
        for number in std::mem::take(&mut self.retired).into_keys() {
            let _ = self.folder.remove(&file_name(number));
        }
    }

    /// Returns the bytes of all files.
    pub(crate) fn disk_bytes(&self) -> u64 {
        let live: u64 = self.files.values().map(|file| file.page_count).sum();
        (live + self.retired.values().sum::<u64>()) * PAGE_BYTES as u64
    }
}
