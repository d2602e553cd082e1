//! Scratch files of the pre-pass, written front to back.

use std::sync::Arc;

use tierbed_core::Result;
use tierbed_io::{AlignedBuf, Device, Folder, OpenMode};

/// Bytes gathered before they are written.
pub(crate) const APPEND_BYTES: usize = 256 << 10;

/// Scratch files of a plan; earlier versions noted there how far they go.
const SCRATCH: [&str; 4] = ["note", "rows", "next", "bodies"];

/// Removes the scratch files of a plan, if there are any.
pub(super) fn remove_scratch(folder: &dyn Folder, name: &str) -> Result<()> {
    SCRATCH.iter().try_for_each(|file| folder.remove(&format!("{name}.{file}")))
}

/// A new file that grows at its end.
#[derive(Debug)]
pub(crate) struct Appender {
    device: Arc<dyn Device>,
    buf: AlignedBuf,
    filled: usize,
    written_bytes: u64,
}

impl Appender {
    /// Starts `name` anew.
    ///
    /// # Errors
    /// `Io` or `NoSpace`.
    pub(crate) fn create(folder: &dyn Folder, name: &str) -> Result<Self> {
        let device = folder.open(name, OpenMode::Create)?;
        device.set_len(0)?;
        Ok(Self { device, buf: AlignedBuf::new(APPEND_BYTES), filled: 0, written_bytes: 0 })
    }

    /// Returns the bytes appended so far: where the next ones will lie.
    pub(crate) fn len_bytes(&self) -> u64 {
        self.written_bytes + self.filled as u64
    }

    #[expect(clippy::indexing_slicing, reason = "what is gathered is shorter than the buffer")]
    pub(crate) fn append(&mut self, bytes: &[u8]) -> Result<()> {
        assert!(self.filled < APPEND_BYTES, "a full buffer was not written");
        let mut rest = bytes;
        while !rest.is_empty() {
            let (now, later) = rest.split_at(rest.len().min(APPEND_BYTES - self.filled));
            self.buf[self.filled..self.filled + now.len()].copy_from_slice(now);
            self.filled += now.len();
            rest = later;
            if self.filled == APPEND_BYTES {
                self.flush()?;
            }
        }
        Ok(())
    }

    /// Appends zeros up to the next multiple of `align_bytes`.
    pub(crate) fn pad_to(&mut self, align_bytes: usize) -> Result<()> {
        let over = (self.len_bytes() % align_bytes as u64) as usize;
        if over == 0 {
            return Ok(());
        }
        self.append(&vec![0; align_bytes - over])?;
        assert!(self.len_bytes().is_multiple_of(align_bytes as u64), "padding ends elsewhere");
        Ok(())
    }

    /// Writes what is gathered; returns the file.
    #[expect(clippy::indexing_slicing, reason = "what is gathered is shorter than the buffer")]
    pub(crate) fn flush(&mut self) -> Result<&Arc<dyn Device>> {
        if self.filled > 0 {
            self.device.write_at(self.written_bytes, &self.buf[..self.filled])?;
        }
        self.written_bytes += self.filled as u64;
        self.filled = 0;
        Ok(&self.device)
    }
}

/// Reads `count` little-endian 64-bit words at `offset_bytes` into `words`.
pub(crate) fn read_words(
    device: &dyn Device,
    offset_bytes: u64,
    count: usize,
    words: &mut Vec<u64>,
) -> Result<()> {
    words.resize(count, 0);
    device.read_at(offset_bytes, bytemuck::cast_slice_mut(words))
}
