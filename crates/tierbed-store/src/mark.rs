//! The high-water mark of acknowledged log steps, in a file beside the log.
//!
//! A log that was cut looks like one whose last steps never finished. So behind each sync of the
//! log the number of its last step is written here, without a sync of its own: what is here was
//! in the log before, and a log that ends before it has lost steps that were acknowledged. After
//! power loss the number may be an older one, which only means that less is noticed.
//!
//! | bytes of `steps.mark` | field |
//! |---|---|
//! | 0..8 | magic `TBstpmrk` |
//! | 8..12 | version, 1 |
//! | 12..16 | crc32c of bytes 16..24 |
//! | 16..24 | number of the last step that was acknowledged |

use std::sync::Arc;

use tierbed_core::checksum::crc32c;
use tierbed_core::{Error, Result};
use tierbed_io::{Device, Folder, OpenMode};

/// Name of the file.
pub const MARK_FILE: &str = "steps.mark";
const MAGIC: &[u8; 8] = b"TBstpmrk";
const VERSION: u32 = 1;

/// The open file.
#[derive(Debug)]
pub struct StepMark {
    device: Arc<dyn Device>,
}

impl StepMark {
    /// Opens the file of a store at step `number`, making it where there is none.
    ///
    /// # Errors
    /// `NoSpace`, `Io`.
    pub fn open(folder: &dyn Folder, number: u64) -> Result<Self> {
        let mark = Self { device: folder.open(MARK_FILE, OpenMode::Create)? };
        mark.note(number)?;
        Ok(mark)
    }

    /// Notes that step `number` is durable and acknowledged.
    ///
    /// # Errors
    /// `NoSpace`, `Io`.
    pub fn note(&self, number: u64) -> Result<()> {
        self.device.write_at(0, &encode(number))
    }
}

/// Returns the last step that was acknowledged; `None` when none was noted.
///
/// # Errors
/// `Corruption` when the file is damaged, `Io`.
pub fn read_mark(folder: &dyn Folder) -> Result<Option<u64>> {
    let Some(bytes) = folder.read(MARK_FILE)? else { return Ok(None) };
    // Power was lost before anything was noted.
    if bytes.iter().all(|byte| *byte == 0) {
        return Ok(None);
    }
    decode(&bytes).map(Some).ok_or_else(|| {
        Error::corruption("note of the last step is damaged")
            .with("file", MARK_FILE)
            .with("remedy", "see `tierbed repair FOLDER`, which accepts what the log holds")
    })
}

/// Accepts that the log ends at step `number`, atomically.
///
/// # Errors
/// `NoSpace`, `Io`.
pub fn write_mark(folder: &dyn Folder, number: u64) -> Result<()> {
    folder.write_atomic(MARK_FILE, &encode(number))
}

fn encode(number: u64) -> Vec<u8> {
    let number = number.to_le_bytes();
    let head = [VERSION.to_le_bytes(), crc32c(&number).to_le_bytes()].concat();
    [&MAGIC[..], &head, &number].concat()
}

fn decode(bytes: &[u8]) -> Option<u64> {
    let number = bytes.get(16..24)?.first_chunk().map(|bytes| u64::from_le_bytes(*bytes))?;
    (bytes == encode(number)).then_some(number)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test that panics has failed")]
mod tests {
    use proptest::prelude::*;
    use tierbed_io::MemoryFolder;

    use super::*;

    #[test]
    fn what_was_noted_last_is_read() {
        let folder = MemoryFolder::new();
        assert_eq!(read_mark(&folder).unwrap(), None);
        let mark = StepMark::open(&folder, 3).unwrap();
        mark.note(400).unwrap();
        assert_eq!(read_mark(&folder).unwrap(), Some(400));
        write_mark(&folder, 7).unwrap();
        assert_eq!(read_mark(&folder).unwrap(), Some(7));
        folder.write_durable(MARK_FILE, &[0; 24]).unwrap();
        assert_eq!(read_mark(&folder).unwrap(), None);
    }

    proptest! {
        #[test]
        fn every_flipped_bit_is_noticed(number: u64, bit in 0usize..24 * 8) {
            let mut bytes = encode(number);
            prop_assert_eq!(decode(&bytes), Some(number));
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert_eq!(decode(&bytes), None);
        }

        #[test]
        fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..40)) {
            let _ = decode(&bytes);
        }
    }
}
