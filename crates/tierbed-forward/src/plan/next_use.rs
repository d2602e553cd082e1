//! From every use of a row to its next: one pass forwards for first uses, one backwards.
//!
//! Works on one table at a time, and on one range of its rows at a time when an array over all
//! of them is larger than the memory it may use. Memory therefore never depends on the tables.

use std::sync::Arc;

use tierbed_core::Result;
use tierbed_io::Device;

use super::scratch::read_words;

/// No use seen yet.
const NONE: u64 = u64::MAX;

/// The entries of all windows as the first pass left them.
#[derive(Debug)]
pub(crate) struct Entries {
    /// Rows of all entries, `u64` each, window after window, table after table.
    pub(crate) rows: Arc<dyn Device>,
    /// Receives the next use of each entry in the same places: window in the high 32 bits, entry
    /// in the low ones.
    pub(crate) next: Arc<dyn Device>,
    /// Entries of each table in each window, `[K * T]`.
    pub(crate) counts: Vec<u32>,
    pub(crate) table_count: usize,
}

/// Where the entries of one table in one window lie.
#[derive(Debug, Clone, Copy)]
struct Section {
    window: u64,
    first_entry: u64,
    offset_bytes: u64,
    count: usize,
}

impl Entries {
    fn sections(&self, table: usize) -> Vec<Section> {
        let mut offset_bytes = 0;
        let mut sections = Vec::new();
        for (window, counts) in (0..).zip(self.counts.chunks_exact(self.table_count)) {
            let mut first_entry = 0;
            for (at, &count) in counts.iter().enumerate() {
                if at == table && count > 0 {
                    let count = count as usize;
                    sections.push(Section { window, first_entry, offset_bytes, count });
                }
                first_entry += u64::from(count);
                offset_bytes += 8 * u64::from(count);
            }
        }
        sections
    }

    /// Finds the next use of every entry of `table`, which has `row_count` rows, with an array of
    /// at most `memory_bytes`.
    ///
    /// # Errors
    /// Those of the devices.
    pub(crate) fn link(&self, table: usize, row_count: u64, memory_bytes: u64) -> Result<()> {
        let sections = self.sections(table);
        let range_rows = (memory_bytes / 8).clamp(1, row_count);
        let mut uses = vec![NONE; range_rows as usize];
        let mut first_row = 0;
        while first_row < row_count {
            uses.fill(NONE);
            let mut pass = Pass { entries: self, uses: &mut uses, first_row };
            pass.note_first_uses(&sections)?;
            pass.link_backwards(&sections, range_rows < row_count)?;
            first_row += range_rows;
        }
        Ok(())
    }
}

/// One range of one table's rows.
struct Pass<'a> {
    entries: &'a Entries,
    /// The use of each row of the range that comes next, seen from where the pass stands.
    uses: &'a mut [u64],
    first_row: u64,
}

impl Pass<'_> {
    fn note_first_uses(&mut self, sections: &[Section]) -> Result<()> {
        let mut rows = Vec::new();
        for section in sections {
            read_words(&*self.entries.rows, section.offset_bytes, section.count, &mut rows)?;
            for (entry, row) in (section.first_entry..).zip(&rows) {
                let at = row.wrapping_sub(self.first_row) as usize;
                if let Some(first) = self.uses.get_mut(at).filter(|first| **first == NONE) {
                    *first = section.window << 32 | entry;
                }
            }
        }
        Ok(())
    }

    // The array starts with first uses, so the last use of an epoch finds the next epoch's first.
    fn link_backwards(&mut self, sections: &[Section], is_partial: bool) -> Result<()> {
        let (mut rows, mut next) = (Vec::new(), Vec::new());
        for section in sections.iter().rev() {
            let Section { offset_bytes, count, .. } = *section;
            read_words(&*self.entries.rows, offset_bytes, count, &mut rows)?;
            if is_partial && self.first_row > 0 {
                read_words(&*self.entries.next, offset_bytes, count, &mut next)?;
            } else {
                next.clear();
                next.resize(count, NONE);
            }
            for ((entry, row), next) in (section.first_entry..).zip(&rows).zip(&mut next) {
                let at = row.wrapping_sub(self.first_row) as usize;
                if let Some(known) = self.uses.get_mut(at) {
                    *next = std::mem::replace(known, section.window << 32 | entry);
                }
            }
            self.entries.next.write_at(offset_bytes, bytemuck::cast_slice(&next))?;
        }
        Ok(())
    }
}
