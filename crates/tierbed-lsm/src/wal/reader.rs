//! Entries of a log segment, one in memory at a time.
//!
//! Opening has no more memory than training had, and a segment may be as long as a write buffer:
//! a store that read it whole could not be opened with the budget it was trained with.

#![expect(clippy::indexing_slicing, reason = "the buffer was made long enough")]

use std::sync::Arc;

use tierbed_core::{Budget, Reservation, Result};
use tierbed_io::{Device, Folder, OpenMode};

use super::{first_entry, RawEntry, SegmentId, HEADER_BYTES};
use crate::sst::{read_u32, read_u64};

/// Bytes looked through at once for entries behind a broken one.
const SCAN_BYTES: usize = 16 << 10;

/// A segment, read entry by entry.
pub(super) struct LogReader {
    device: Arc<dyn Device>,
    id: SegmentId,
    len_bytes: u64,
    buffer: Vec<u8>,
    memory: Reservation,
}

impl LogReader {
    /// Opens segment `id`; `None` when it is not there.
    ///
    /// # Errors
    /// `Io`.
    pub(super) fn open(
        folder: &dyn Folder,
        id: SegmentId,
        budget: &Budget,
    ) -> Result<Option<Self>> {
        let name = id.file_name();
        if !folder.list()?.contains(&name) {
            return Ok(None);
        }
        let device = folder.open(&name, OpenMode::ReadOnly)?;
        let len_bytes = device.len_bytes()?;
        let memory = budget.reserve("log replay", 0)?;
        Ok(Some(Self { device, id, len_bytes, buffer: Vec::new(), memory }))
    }

    /// Returns the bytes of the segment.
    pub(super) fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// Counts nothing behind `len_bytes`; `false` when the segment is shorter.
    pub(super) fn cut(&mut self, len_bytes: u64) -> bool {
        let is_long_enough = len_bytes <= self.len_bytes;
        self.len_bytes = self.len_bytes.min(len_bytes);
        is_long_enough
    }

    /// Reads the entry at `at`; `None` when it is not whole, or not entry `number`.
    ///
    /// # Errors
    /// `Invalid` when the budget does not hold the entry, `Io`.
    pub(super) fn entry(&mut self, at: u64, number: u64) -> Result<Option<RawEntry<'_>>> {
        let left = self.len_bytes.saturating_sub(at);
        if left < HEADER_BYTES as u64 {
            return Ok(None);
        }
        let mut header = [0; HEADER_BYTES];
        self.device.read_at(at, &mut header)?;
        let Some(len_bytes) = entry_len(&header, self.id, number) else { return Ok(None) };
        if len_bytes as u64 > left {
            return Ok(None);
        }
        if len_bytes > self.buffer.len() {
            self.memory.resize(len_bytes as u64)?;
            self.buffer = vec![0; len_bytes];
        }
        let bytes = &mut self.buffer[..len_bytes];
        self.device.read_at(at, bytes)?;
        Ok(first_entry(bytes, self.id, number))
    }

    /// Returns where, from `at` on, the next bytes lie that may be the header of an entry numbered
    /// above `number`, and its number.
    ///
    /// # Errors
    /// `Invalid` when the budget does not hold the bytes looked through, `Io`.
    pub(super) fn next_header(&mut self, mut at: u64, number: u64) -> Result<Option<(u64, u64)>> {
        if self.buffer.len() < SCAN_BYTES {
            self.memory.resize(SCAN_BYTES as u64)?;
            self.buffer = vec![0; SCAN_BYTES];
        }
        while at + HEADER_BYTES as u64 <= self.len_bytes {
            let len = SCAN_BYTES.min((self.len_bytes - at) as usize);
            let bytes = &mut self.buffer[..len];
            self.device.read_at(at, bytes)?;
            let id = self.id;
            let found = bytes.windows(HEADER_BYTES).zip(at..).find_map(|(header, place)| {
                let found = read_u64(header, 16).filter(|&found| found > number)?;
                entry_len(header, id, found).map(|_| (place, found))
            });
            if found.is_some() {
                return Ok(found);
            }
            at += (len + 1 - HEADER_BYTES) as u64;
        }
        Ok(None)
    }
}

// The bytes of the entry that a header begins; `None` when it is not that of entry `number`.
fn entry_len(header: &[u8], segment: SegmentId, number: u64) -> Option<usize> {
    let is_named = read_u64(header, 8)? == segment.0 && read_u64(header, 16)? == number;
    let payload = (read_u32(header, 4)? & !super::COMMIT_BIT) as usize;
    HEADER_BYTES.checked_add(payload).filter(|_| is_named)
}
