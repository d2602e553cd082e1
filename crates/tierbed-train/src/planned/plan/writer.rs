//! Plan writer: from scratch files to a plan; next uses found, blocks packed, header last.

#![expect(clippy::indexing_slicing, reason = "rows and next uses are as many as the counts say")]

use tierbed_core::checksum::crc32c;
use tierbed_core::{Error, Result};
use tierbed_io::{AlignedBuf, Appender, OpenMode, PAGE_BYTES};

use super::columns::{encode_columns, Firsts, TableFirsts, TableUses};
use super::format::{Directory, WindowMeta, BLOCK_HEAD_BYTES, BLOCK_MAGIC, BLOCK_TABLE_BYTES};
use super::next_use::{check, groups, Entries, Pass, NONE};
use super::scratch::{create, read_words, remove_scratch};
use super::{EpochPlan, PlanBuilder};
use crate::planned::bits::PAD_BYTES;

/// What is known of the next uses in the scratch file.
struct NextUses {
    /// Checksum of those of each table in each window, `[K * T]`.
    crcs: Vec<u32>,
    /// First use of each row of each table, where last uses do not say it yet.
    first_uses: Option<Vec<Vec<u64>>>,
}

impl PlanBuilder {
    /// Turns the scratch files into the plan.
    pub(super) fn write(mut self) -> Result<()> {
        let next = self.folder.open(&format!("{}.next", self.name), OpenMode::Create)?;
        next.set_len(0)?;
        next.set_len(self.rows.end_bytes())?;
        let table_count = self.shape.row_counts.len();
        let rows = self.rows.flush()?.clone();
        let (counts, row_crcs) = (self.counts.clone(), self.row_crcs.clone());
        let entries = Entries::new(rows, next, counts, row_crcs, table_count);
        let next_uses = self.link(&entries)?;
        self.write_plan(&entries, &next_uses)?;
        // The plan has its name before its sources go.
        self.folder.sync()?;
        EpochPlan::open(&*self.folder, &self.name)?.ensure_copy(&*self.folder)?;
        remove_scratch(&*self.folder, &self.name)?;
        self.folder.sync()
    }

    // Links group after group; a single one leaves its first uses for the end.
    fn link(&self, entries: &Entries) -> Result<NextUses> {
        let row_counts = &self.shape.row_counts;
        let groups = groups(row_counts, (self.options.memory_bytes / 8).max(1));
        let is_only = groups.len() == 1;
        let (mut crcs, mut first_uses) = (vec![0; self.counts.len()], None);
        for group in groups {
            let mut pass = Pass::new(entries, group, row_counts, &mut crcs);
            pass.link_backwards()?;
            match is_only {
                true => first_uses = Some(pass.into_first_uses()),
                false => pass.close_rings()?,
            }
        }
        Ok(NextUses { crcs, first_uses })
    }

    fn write_plan(&mut self, entries: &Entries, next_uses: &NextUses) -> Result<()> {
        let bodies = self.bodies.flush()?.clone();
        let mut plan = create(&*self.folder, &self.name)?;
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
            let at = number as usize * table_count;
            check(&rows, counts, &self.row_crcs[at..at + table_count])?;
            check(&next, counts, &next_uses.crcs[at..at + table_count])?;
            if let Some(first_uses) = &next_uses.first_uses {
                close_rings(&rows, &mut next, counts, first_uses);
            }
            // A row's last use is followed by one that is not later.
            let is_last = |next: &&u64| **next >> 32 <= u64::from(number);
            self.header.row_count += next.iter().filter(is_last).count() as u64;
            entry_at += 8 * count as u64;
            body.resize(scratch.body_bytes as usize, 0);
            bodies.read_at(body_at, &mut body)?;
            body_at += u64::from(scratch.body_bytes);
            if crc32c(&body) != scratch.body_crc32c {
                return Err(lost_scratch());
            }
            block.clear();
            let uses = TableUses { rows: &rows, next: &next };
            let window = WindowEntries { number, batch_count: scratch.batch_count, counts, uses };
            encode_entries(&window, &firsts, &mut block)?;
            let entries_bytes = block.len();
            let len_bytes = u32::try_from(entries_bytes + body.len()).map_err(|_| {
                Error::invalid("a window of the plan is too large")
                    .with("remedy", "make windows smaller")
            })?;
            self.header.block_bytes_max = self.header.block_bytes_max.max(len_bytes);
            windows.push(WindowMeta {
                offset_bytes: plan.end_bytes(),
                len_bytes,
                entries_bytes: entries_bytes as u32,
                batch_count: scratch.batch_count,
                entries_crc32c: crc32c(&block),
                batches_crc32c: scratch.body_crc32c,
            });
            plan.append(&block)?;
            plan.append(&body)?;
            plan.pad()?;
        }
        assert_eq!(entry_at, self.rows.end_bytes(), "the windows have all rows");
        assert_eq!(body_at, self.bodies.end_bytes(), "the windows have all batches");
        self.write_directory(plan, windows, entries.counts.clone(), firsts)
    }

    fn write_directory(
        &mut self,
        mut plan: Appender,
        windows: Vec<WindowMeta>,
        counts: Vec<u32>,
        firsts: Firsts,
    ) -> Result<()> {
        assert_eq!(windows.len(), self.header.window_count as usize, "every window was written");
        let directory =
            Directory { shape: self.shape.clone(), windows, counts, firsts: firsts.into() };
        let bytes = directory.encode();
        self.header.directory_offset_bytes = plan.end_bytes();
        self.header.directory_bytes = bytes.len() as u64;
        self.header.directory_crc32c = crc32c(&bytes);
        plan.append(&bytes)?;
        plan.pad()?;
        let device = plan.flush()?;
        device.sync()?;
        // With the header the plan begins to exist.
        let mut page = AlignedBuf::new(PAGE_BYTES);
        page.copy_from_slice(&self.header.encode());
        device.write_at(0, &page)?;
        device.sync()
    }
}

// The last use of a row in an epoch is followed by its first in the next one.
fn close_rings(rows: &[u64], next: &mut [u64], counts: &[u32], first_uses: &[Vec<u64>]) {
    let mut entries = rows.iter().zip(next);
    for (&count, first_uses) in counts.iter().zip(first_uses) {
        for (&row, next) in entries.by_ref().take(count as usize) {
            if *next == NONE {
                *next = first_uses[row as usize];
                debug_assert_ne!(*next, NONE, "a row that was used has a first use");
            }
        }
    }
}

/// A scratch file does not hold what was written to it.
pub(super) fn lost_scratch() -> Error {
    Error::corruption("scratch file of a plan is not what was written")
        .with("remedy", "make the plan again")
}

/// What the first part of a window's block holds.
struct WindowEntries<'a> {
    number: u32,
    batch_count: u32,
    /// Entries of each table.
    counts: &'a [u32],
    /// Of all tables, one after the other.
    uses: TableUses<'a>,
}

// Head, shapes of the columns, columns, room to load words.
fn encode_entries(window: &WindowEntries<'_>, firsts: &Firsts, block: &mut Vec<u8>) -> Result<()> {
    let WindowEntries { number, batch_count, counts, uses } = *window;
    block.extend(BLOCK_MAGIC);
    block.extend(number.to_le_bytes());
    block.extend(batch_count.to_le_bytes());
    block.extend((counts.len() as u32).to_le_bytes());
    block.resize(BLOCK_HEAD_BYTES + BLOCK_TABLE_BYTES * counts.len(), 0);
    let mut first = 0;
    for (table, &count) in counts.iter().enumerate() {
        let range = first..first + count as usize;
        first = range.end;
        let uses = TableUses { rows: &uses.rows[range.clone()], next: &uses.next[range] };
        let columns = encode_columns(uses, TableFirsts { firsts, table }, block)?;
        let at = BLOCK_HEAD_BYTES + BLOCK_TABLE_BYTES * table;
        block[at..at + BLOCK_TABLE_BYTES].copy_from_slice(&columns.encode());
    }
    block.extend([0; PAD_BYTES]);
    Ok(())
}
