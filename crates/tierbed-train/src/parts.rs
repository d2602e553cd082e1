//! Small values sorted by part without memory: in one scratch file, block by block.
//!
//! Each part has a chain of blocks in the file and one block in memory. Values of a part come
//! back in the order they were added. Checksums of blocks are in memory, so a block that was lost
//! or landed elsewhere is found. Some blocks of a part lie side by side, to be read at once.

#![expect(clippy::indexing_slicing, reason = "parts are counted when the file is made")]

use std::sync::Arc;

use tierbed_core::checksum::crc32c;
use tierbed_core::{Error, Result};
use tierbed_io::{Device, Folder, OpenMode};

const RUN_BLOCKS_MAX: usize = 8;

/// Chains of blocks, one per part, in one scratch file.
#[derive(Debug)]
pub(crate) struct Parts {
    folder: Arc<dyn Folder>,
    name: String,
    device: Arc<dyn Device>,
    block_bytes: usize,
    /// Blocks of a part that lie side by side.
    run_blocks: usize,
    /// Such runs of all parts.
    run_count: u64,
    parts: Vec<Part>,
}

#[derive(Debug, Default)]
struct Part {
    /// Blocks in the file, in order, each with its checksum.
    blocks: Vec<(u64, u32)>,
    /// The block that is being filled, or blocks that are read.
    block: Vec<u8>,
    /// Bytes of it that were read.
    taken: usize,
    /// Blocks of the file that were read.
    next: usize,
    value_count: usize,
}

impl Parts {
    /// Starts the scratch file `name` anew, with `part_count` parts and blocks of `block_bytes`,
    /// a multiple of the values' lengths.
    pub(crate) fn create(
        folder: &Arc<dyn Folder>,
        name: &str,
        part_count: usize,
        block_bytes: usize,
    ) -> Result<Self> {
        assert!(part_count > 0 && block_bytes > 0, "{part_count} parts of {block_bytes} bytes");
        let device = folder.open(name, OpenMode::Create)?;
        device.set_len(0)?;
        let part = || Part { block: Vec::with_capacity(block_bytes), ..Part::default() };
        Ok(Self {
            folder: folder.clone(),
            name: name.to_owned(),
            device,
            block_bytes,
            // No more memory to read a part than blocks of all parts had.
            run_blocks: (part_count / 4).clamp(1, RUN_BLOCKS_MAX),
            run_count: 0,
            parts: std::iter::repeat_with(part).take(part_count).collect(),
        })
    }

    /// Adds a value to part `at`.
    pub(crate) fn add<const N: usize>(&mut self, at: usize, value: [u8; N]) -> Result<()> {
        let Some(part) = self.parts.get(at) else {
            return Err(Error::corruption("a row belongs to no part").with("part", at));
        };
        debug_assert!(self.block_bytes.is_multiple_of(N), "a value would lie in two blocks");
        if part.block.len() + N > self.block_bytes {
            self.write(at)?;
            self.parts[at].block.clear();
        }
        let part = &mut self.parts[at];
        part.block.extend(value);
        part.value_count += 1;
        Ok(())
    }

    /// Returns the number of values in `part`.
    pub(crate) fn value_count(&self, part: usize) -> usize {
        self.parts[part].value_count
    }

    // Appends the block of `part` to its chain.
    fn write(&mut self, part: usize) -> Result<()> {
        let part = &mut self.parts[part];
        let place = match (part.blocks.len() % self.run_blocks, part.blocks.last()) {
            (0, _) | (_, None) => {
                self.run_count += 1;
                (self.run_count - 1) * self.run_blocks as u64
            }
            (_, Some((last, _))) => last + 1,
        };
        self.device.write_at(place * self.block_bytes as u64, &part.block)?;
        part.blocks.push((place, crc32c(&part.block)));
        Ok(())
    }

    /// Writes all that is in memory; reading begins.
    pub(crate) fn seal(&mut self) -> Result<()> {
        for at in 0..self.parts.len() {
            let block = &mut self.parts[at].block;
            assert!(block.len() <= self.block_bytes, "a block grew behind its end");
            // A last block as long as the others, so that all are read alike.
            block.resize(self.block_bytes, END);
            self.write(at)?;
            self.parts[at].taken = self.block_bytes;
        }
        Ok(())
    }

    /// Gives the block of `part` back until its values are taken.
    pub(crate) fn rest(&mut self, part: usize) {
        let part = &mut self.parts[part];
        part.block = Vec::new();
        part.taken = 0;
    }

    /// Takes the next value of `part`; `None` behind the last one. No value is made of bytes
    /// [`END`] alone.
    pub(crate) fn take<const N: usize>(&mut self, part: usize) -> Result<Option<[u8; N]>> {
        let part = &mut self.parts[part];
        if part.taken + N > part.block.len() {
            if part.next == part.blocks.len() {
                return Ok(None);
            }
            let end = (part.next + self.run_blocks).min(part.blocks.len());
            let blocks = &part.blocks[part.next..end];
            part.block.resize(blocks.len() * self.block_bytes, END);
            self.device.read_at(blocks[0].0 * self.block_bytes as u64, &mut part.block)?;
            for (bytes, (_, crc)) in part.block.chunks_exact(self.block_bytes).zip(blocks) {
                if crc32c(bytes) != *crc {
                    return Err(lost_scratch().with("file", &self.name));
                }
            }
            part.next = end;
            part.taken = 0;
        }
        let value = part.block.get(part.taken..).and_then(|rest| rest.first_chunk::<N>());
        part.taken += N;
        Ok(value.copied().filter(|value| *value != [END; N]))
    }

    /// Lets the values of `part` be taken again, from the first one on.
    pub(crate) fn rewind(&mut self, part: usize) {
        self.rest(part);
        self.parts[part].next = 0;
    }

    /// Gives the memory of `part` back.
    pub(crate) fn forget(&mut self, part: usize) {
        if let Some(part) = self.parts.get_mut(part) {
            *part = Part::default();
        }
    }
}

/// Says that scratch is not what was written.
pub(crate) fn lost_scratch() -> Error {
    Error::corruption("scratch block is not what was written")
        .with("remedy", "try again; the store is as it was")
}

/// Fills the last block of a part.
const END: u8 = 0xFF;

impl Drop for Parts {
    fn drop(&mut self) {
        // A scratch file that stays costs space until it is started anew.
        let _ = self.folder.remove(&self.name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tierbed_io::MemoryFolder;

    proptest! {
        #[test]
        fn values_come_back_part_by_part_in_order(
            values in proptest::collection::vec((0usize..4, 0u32..1000), 0..200),
            block in 1usize..9,
            part_count in prop_oneof![Just(4usize), Just(40)],
        ) {
            let folder: Arc<dyn Folder> = Arc::new(MemoryFolder::new());
            let mut parts = Parts::create(&folder, "scratch.rows", part_count, 4 * block).unwrap();
            for &(part, value) in &values {
                parts.add(part, value.to_le_bytes()).unwrap();
            }
            parts.seal().unwrap();
            for part in (0..4).chain(0..4) {
                let mut found = Vec::new();
                while let Some(value) = parts.take::<4>(part).unwrap() {
                    found.push(u32::from_le_bytes(value));
                }
                parts.rewind(part);
                let model = values.iter().filter(|(at, _)| *at == part).map(|(_, value)| *value);
                prop_assert_eq!(parts.value_count(part), found.len());
                prop_assert_eq!(found, model.collect::<Vec<_>>());
            }
            drop(parts);
            prop_assert!(folder.list().unwrap().is_empty());
        }
    }

    #[test]
    fn a_part_that_is_none_is_refused() {
        let folder: Arc<dyn Folder> = Arc::new(MemoryFolder::new());
        let mut parts = Parts::create(&folder, "scratch.rows", 1, 8).unwrap();
        assert!(parts.add(1, [0; 4]).is_err());
    }
}
