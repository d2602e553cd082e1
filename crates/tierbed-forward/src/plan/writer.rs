//! From scratch files to a plan: next uses found, blocks packed, header written last.

use tierbed_core::checksum::crc32c;
use tierbed_core::{Error, Result};
use tierbed_io::{AlignedBuf, PAGE_BYTES};

use super::columns::{encode_columns, Firsts};
use super::format::{Directory, WindowMeta, BLOCK_HEAD_BYTES, BLOCK_MAGIC, BLOCK_TABLE_BYTES};
use super::next_use::Entries;
use super::scratch::{read_words, Appender};
use super::PlanBuilder;
use crate::bits::PAD_BYTES;

impl PlanBuilder {
    /// Turns the scratch files into the plan.
    pub(super) fn write(&mut self) -> Result<()> {
        let next =
            Appender::create(&*self.folder, &format!("{}.next", self.name))?.flush()?.clone();
        next.set_len(self.rows.len_bytes())?;
        let table_count = self.shape.row_counts.len();
        let counts = std::mem::take(&mut self.counts);
        let mut entries = Entries::new(self.rows.flush()?.clone(), next, counts, table_count);
        entries.link(&self.shape.row_counts, self.options.memory_bytes / 2)?;
        self.write_plan(&entries)?;
        for scratch in ["rows", "next", "bodies"] {
            self.folder.remove(&format!("{}.{scratch}", self.name))?;
        }
        self.folder.sync()
    }

    fn write_plan(&mut self, entries: &Entries) -> Result<()> {
        let bodies = self.bodies.flush()?.clone();
        let mut plan = Appender::create(&*self.folder, &self.name)?;
        plan.append(&[0; PAGE_BYTES])?;
        let table_count = self.shape.row_counts.len();
        let firsts = Firsts::new(&entries.counts, table_count);
        let mut windows = Vec::new();
        let (mut rows, mut next, mut body) = (Vec::new(), Vec::new(), Vec::new());
        let (mut entry_at, mut body_at, mut block) = (0u64, 0u64, Vec::new());
        let all_counts = entries.counts.chunks_exact(table_count);
        for ((number, counts), scratch) in (0u32..).zip(all_counts).zip(&self.windows) {
            let count = counts.iter().map(|&count| count as usize).sum();
            read_words(&*entries.rows, entry_at, count, &mut rows)?;
            read_words(&*entries.next, entry_at, count, &mut next)?;
            entry_at += 8 * count as u64;
            body.resize(scratch.body_bytes as usize, 0);
            bodies.read_at(body_at, &mut body)?;
            body_at += u64::from(scratch.body_bytes);
            if crc32c(&body) != scratch.body_crc32c {
                return Err(lost_scratch());
            }
            block.clear();
            encode_entries(
                (number, scratch.batch_count, counts),
                (&rows, &next),
                &firsts,
                &mut block,
            )?;
            let entries_bytes = block.len();
            let len_bytes = u32::try_from(entries_bytes + body.len()).map_err(|_| {
                Error::invalid("a window of the plan is too large")
                    .with("remedy", "make windows smaller")
            })?;
            self.header.block_bytes_max = self.header.block_bytes_max.max(len_bytes);
            windows.push(WindowMeta {
                offset_bytes: plan.len_bytes(),
                len_bytes,
                entries_bytes: entries_bytes as u32,
                batch_count: scratch.batch_count,
                entries_crc32c: crc32c(&block),
                batches_crc32c: scratch.body_crc32c,
            });
            plan.append(&block)?;
            plan.append(&body)?;
            plan.pad_to(PAGE_BYTES)?;
        }
        let counts = entries.counts.clone();
        let directory =
            Directory { shape: self.shape.clone(), windows, counts, firsts: firsts.into() };
        let bytes = directory.encode();
        self.header.directory_offset_bytes = plan.len_bytes();
        self.header.directory_bytes = bytes.len() as u64;
        self.header.directory_crc32c = crc32c(&bytes);
        plan.append(&bytes)?;
        plan.pad_to(PAGE_BYTES)?;
        let device = plan.flush()?;
        device.sync()?;
        // With the header the plan begins to exist.
        let mut page = AlignedBuf::new(PAGE_BYTES);
        page.copy_from_slice(&self.header.encode());
        device.write_at(0, &page)?;
        device.sync()
    }
}

/// A scratch file does not hold what was written to it.
pub(super) fn lost_scratch() -> Error {
    Error::corruption("scratch file of a plan is not what was written")
        .with("remedy", "make the plan again")
}

// Head, shapes of the columns, columns, room to load words.
fn encode_entries(
    (number, batch_count, counts): (u32, u32, &[u32]),
    (rows, next): (&[u64], &[u64]),
    firsts: &Firsts,
    block: &mut Vec<u8>,
) -> Result<()> {
    block.extend(BLOCK_MAGIC);
    block.extend(number.to_le_bytes());
    block.extend(batch_count.to_le_bytes());
    block.extend((counts.len() as u32).to_le_bytes());
    block.resize(BLOCK_HEAD_BYTES + BLOCK_TABLE_BYTES * counts.len(), 0);
    let mut first = 0;
    for (table, &count) in counts.iter().enumerate() {
        let range = first..first + count as usize;
        first = range.end;
        let (rows, next) = (rows.get(range.clone()).unwrap_or(&[]), next.get(range).unwrap_or(&[]));
        let columns = encode_columns((rows, next), (table, firsts), block)?;
        let at = BLOCK_HEAD_BYTES + BLOCK_TABLE_BYTES * table;
        if let Some(place) = block.get_mut(at..at + BLOCK_TABLE_BYTES) {
            place.copy_from_slice(&columns.encode());
        }
    }
    block.extend([0; PAD_BYTES]);
    Ok(())
}
