//! Marks of the parts that were fetched: the file `parts.done` beside them.
//!
//! ```text
//! 0..8  magic "TBpdone1"   8..40  SHA-256 of parts.json   then per part, 12 bytes:
//! 0..4  file   4..8  part   8..12  crc32c of SHA-256, file and part
//! ```
//!
//! A mark is written after its part was synced. What is torn or damaged ends the list: parts
//! behind it are fetched again.

use std::collections::BTreeSet;
use std::sync::Arc;

use tierbed_core::checksum::{crc32c, crc32c_append};
use tierbed_core::Result;
use tierbed_io::{Device, Folder, OpenMode};

use crate::digest::Digest;
use crate::names::MARKS;
use crate::parts::PartAt;

const MAGIC: &[u8; 8] = b"TBpdone1";
const HEADER_BYTES: usize = 40;
const MARK_BYTES: usize = 12;

/// The open file of a download's marks.
pub(crate) struct Marks {
    file: Arc<dyn Device>,
    of: Digest,
    end: u64,
}

impl Marks {
    /// Opens the marks in `folder`; those of other parts than `of` count for nothing.
    pub(crate) fn open(folder: &dyn Folder, of: Digest) -> Result<(Self, BTreeSet<PartAt>)> {
        let done = folder.read(MARKS)?.map_or_else(Vec::new, |bytes| decode(&bytes, of));
        let file = folder.open(MARKS, OpenMode::Create)?;
        let end = (HEADER_BYTES + MARK_BYTES * done.len()) as u64;
        file.set_len(end)?;
        file.write_at(0, &[MAGIC.as_slice(), &of.0].concat())?;
        file.sync()?;
        Ok((Self { file, of, end }, done.into_iter().collect()))
    }

    /// Forgets all marks.
    pub(crate) fn clear(&mut self) -> Result<()> {
        self.end = HEADER_BYTES as u64;
        self.file.set_len(self.end)?;
        self.file.sync()
    }

    /// Marks a part that was synced, durably.
    pub(crate) fn push(&mut self, at: PartAt) -> Result<()> {
        self.file.write_at(self.end, &encode(at, self.of))?;
        self.end += MARK_BYTES as u64;
        self.file.sync()
    }
}

fn encode(at: PartAt, of: Digest) -> [u8; MARK_BYTES] {
    let mut mark = [0; MARK_BYTES];
    let (numbers, crc) = mark.split_at_mut(8);
    let (file, part) = numbers.split_at_mut(4);
    file.copy_from_slice(&at.file.to_le_bytes());
    part.copy_from_slice(&at.part.to_le_bytes());
    crc.copy_from_slice(&crc32c_append(crc32c(&of.0), numbers).to_le_bytes());
    mark
}

/// Returns the parts that are marked, up to the first mark that is none.
pub(crate) fn decode(bytes: &[u8], of: Digest) -> Vec<PartAt> {
    let header = [MAGIC.as_slice(), &of.0].concat();
    let Some(marks) = bytes.strip_prefix(header.as_slice()) else { return Vec::new() };
    let decoded = marks.chunks_exact(MARK_BYTES).map_while(|mark| {
        let (file, rest) = mark.split_first_chunk()?;
        let part = rest.first_chunk()?;
        let at = PartAt { file: u32::from_le_bytes(*file), part: u32::from_le_bytes(*part) };
        (encode(at, of) == mark).then_some(at)
    });
    decoded.collect()
}

#[cfg(test)]
mod tests {
    use tierbed_io::MemoryFolder;

    use super::*;

    fn at(part: u32) -> PartAt {
        PartAt { file: 3, part }
    }

    #[test]
    fn marks_come_back_to_the_parts_that_they_are_of() {
        let folder = MemoryFolder::new();
        let of = Digest::of(b"these");
        let (mut marks, done) = Marks::open(&folder, of).unwrap();
        assert!(done.is_empty());
        for part in 0..5 {
            marks.push(at(part)).unwrap();
        }
        let (_, done) = Marks::open(&folder, of).unwrap();
        assert_eq!(done, (0..5).map(at).collect());
        let bytes = folder.read(MARKS).unwrap().unwrap();
        assert_eq!(decode(&bytes[..bytes.len() - 1], of).len(), 4, "a torn end");
        for bit in 0..bytes.len() * 8 {
            let mut wrong = bytes.clone();
            wrong[bit / 8] ^= 1 << (bit % 8);
            let left = decode(&wrong, of);
            assert!(left.len() < 5 && left.iter().all(|part| done.contains(part)), "bit {bit}");
        }
        let (mut marks, done) = Marks::open(&folder, Digest::of(b"others")).unwrap();
        assert!(done.is_empty(), "marks of another version");
        marks.clear().unwrap();
        assert_eq!(folder.read(MARKS).unwrap().unwrap().len(), HEADER_BYTES);
    }
}
