//! A read-only memory-mapped device: the baseline of measurements, not for serving.
//!
//! The kernel decides what stays in memory, outside any budget, unless the map is bounded: then
//! pages that have to leave are given back to it one by one. Invariant: the file does not shrink
//! while it is mapped (touching a lost page, or one that the disk refuses, ends the process with
//! `SIGBUS`). What serves reads through a [`CachedDevice`](super::CachedDevice) instead.

use std::fs::File;
use std::num::NonZeroU64;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use memmap2::{Advice, Mmap, MmapOptions, UncheckedAdvice};
use tierbed_core::{Error, Result};

use super::file::open_error;
use super::window::Window;
use super::{past_the_end, Device};
use crate::buffer::PAGE_BYTES;

/// A read-only map of a whole file.
#[derive(Debug)]
pub struct MmapDevice {
    name: String,
    file: File,
    /// `None` for an empty file, which cannot be mapped.
    map: Option<Mmap>,
    len_bytes: usize,
    /// Pages in memory, when they are bounded.
    window: Option<Mutex<Window>>,
}

impl MmapDevice {
    /// Maps the file at `path` as long as it is now.
    ///
    /// # Errors
    ///
    /// `Invalid` when there is no such file, `Io` otherwise.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let failed = |cause| open_error(path, cause, "cannot map file");
        let file = File::open(path).map_err(failed)?;
        let len_bytes = usize::try_from(file.metadata().map_err(failed)?.len())
            .map_err(|_| Error::unsupported("file does not fit the address space"))?;
        let map = if len_bytes == 0 { None } else { Some(map(&file, len_bytes).map_err(failed)?) };
        Ok(Self { name: path.display().to_string(), file, map, len_bytes, window: None })
    }

    /// Maps the file at `path`, and keeps at most `resident_bytes_max` of it in memory.
    ///
    /// Counts the pages that this device touched; what others cache of the file is let go once.
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open); `Unsupported` for 2^32 pages or more.
    pub fn open_bounded(path: impl AsRef<Path>, resident_bytes_max: u64) -> Result<Self> {
        let mut device = Self::open(path)?;
        let page_count = u32::try_from(device.len_bytes.div_ceil(PAGE_BYTES))
            .map_err(|_| Error::unsupported("a bounded map has fewer than 2^32 pages"))?;
        let page_count_max = resident_bytes_max / PAGE_BYTES as u64;
        let page_count_max = usize::try_from(page_count_max).unwrap_or(usize::MAX);
        device.let_go(0, device.len_bytes);
        device.window = Some(Mutex::new(Window::new(page_count, page_count_max)));
        Ok(device)
    }

    /// Notes a read of a bounded map, and lets the pages go that have to leave for it.
    fn touch(&self, at: usize, len_bytes: usize) {
        let Some(window) = &self.window else { return };
        for page in at / PAGE_BYTES..(at + len_bytes).div_ceil(PAGE_BYTES) {
            // A window is whole after every statement.
            let mut window = window.lock().unwrap_or_else(PoisonError::into_inner);
            let leaving = window.touch(page as u32);
            drop(window);
            if let Some(leaving) = leaving {
                self.let_go(leaving as usize * PAGE_BYTES, PAGE_BYTES);
            }
        }
    }

    /// Gives pages of the map, and what the page cache has of them, back to the kernel.
    fn let_go(&self, at: usize, len_bytes: usize) {
        let Some(map) = &self.map else { return };
        let len_bytes = len_bytes.min(self.len_bytes.saturating_sub(at));
        // SAFETY: a shared map of a file that is read again gets the same bytes again, so readers
        // of these pages notice nothing.
        let _advice_only =
            unsafe { map.unchecked_advise_range(UncheckedAdvice::DontNeed, at, len_bytes) };
        if let Some(len_bytes) = NonZeroU64::new(len_bytes as u64) {
            let advice = rustix::fs::Advice::DontNeed;
            let _advice_only = rustix::fs::fadvise(&self.file, at as u64, Some(len_bytes), advice);
        }
    }

    fn refuse_write(&self) -> Error {
        Error::unsupported("a mapped device is read-only")
            .with("path", &self.name)
            .with("remedy", "open the file as a FileDevice")
    }
}

fn map(file: &File, len_bytes: usize) -> std::io::Result<Mmap> {
    // SAFETY: the file does not shrink while it is mapped, and what is read of it is copied.
    let map = unsafe { MmapOptions::new().len(len_bytes).map(file)? };
    // A refusal does not matter.
    let _advice_only = map.advise(Advice::Random);
    Ok(map)
}

impl Device for MmapDevice {
    fn name(&self) -> &str {
        &self.name
    }

    fn len_bytes(&self) -> Result<u64> {
        Ok(self.len_bytes as u64)
    }

    fn set_len(&self, _len_bytes: u64) -> Result<()> {
        Err(self.refuse_write())
    }

    fn read_at(&self, offset_bytes: u64, out: &mut [u8]) -> Result<()> {
        let past = || past_the_end(&self.name, offset_bytes, out.len());
        let at = usize::try_from(offset_bytes).map_err(|_| past())?;
        let end = at.checked_add(out.len()).ok_or_else(past)?;
        if end > self.len_bytes {
            return Err(past());
        }
        self.touch(at, out.len());
        if let Some(map) = &self.map {
            out.copy_from_slice(map.get(at..end).ok_or_else(past)?);
        }
        Ok(())
    }

    fn write_at(&self, _offset_bytes: u64, _bytes: &[u8]) -> Result<()> {
        Err(self.refuse_write())
    }

    fn sync(&self) -> Result<()> {
        Ok(())
    }

    fn allocated_bytes(&self) -> Result<u64> {
        let stat = self.file.metadata();
        Ok(stat.map_err(|cause| Error::os("cannot read file size", cause))?.blocks() * 512)
    }
}
