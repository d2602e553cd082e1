//! Next use of every use of a row: one pass backwards. It ends with the first uses, which follow
//! the last ones.
//!
//! Works on as many neighbouring tables at a time as have room for an array over their rows, and
//! on one range of rows at a time where a single table has not. Memory therefore never depends
//! on the tables.

#![expect(
    clippy::indexing_slicing,
    reason = "windows and tables are counted when the entries are made"
)]

use std::ops::Range;
use std::sync::Arc;

use tierbed_core::checksum::crc32c;
use tierbed_core::Result;
use tierbed_io::Device;

use super::scratch::read_words;
use super::writer::lost_scratch;

/// No use seen yet.
pub(crate) const NONE: u64 = u64::MAX;

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
    /// Checksum of the rows of each table in each window, `[K * T]`.
    row_crcs: Vec<u32>,
    /// Entries before each window, `[K]`.
    entries_before: Vec<u64>,
    table_count: usize,
}

/// Neighbouring tables, or a range of one table's rows, that are linked together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Group {
    pub(crate) tables: Range<usize>,
    pub(crate) rows: Range<u64>,
}

/// Cuts tables into groups whose rows together are at most `rows_max`.
///
/// # Panics
/// When a group has no room for a row.
pub(crate) fn groups(row_counts: &[u64], rows_max: u64) -> Vec<Group> {
    assert!(rows_max > 0, "a group has room for at least one row");
    let mut groups: Vec<Group> = Vec::new();
    let mut room = 0;
    for (table, &rows) in row_counts.iter().enumerate() {
        if rows > rows_max {
            let firsts = (0..rows).step_by(rows_max as usize);
            groups.extend(firsts.map(|first| Group {
                tables: table..table + 1,
                rows: first..(first + rows_max).min(rows),
            }));
            room = 0;
            continue;
        }
        match groups.last_mut().filter(|_| rows <= room) {
            Some(group) => group.tables.end = table + 1,
            None => {
                groups.push(Group { tables: table..table + 1, rows: 0..u64::MAX });
                room = rows_max;
            }
        }
        room -= rows;
    }
    groups
}

impl Entries {
    pub(crate) fn new(
        rows: Arc<dyn Device>,
        next: Arc<dyn Device>,
        counts: Vec<u32>,
        row_crcs: Vec<u32>,
        table_count: usize,
    ) -> Self {
        assert_eq!(counts.len(), row_crcs.len(), "the rows of each count have a checksum");
        assert!(counts.len().is_multiple_of(table_count.max(1)), "a window lacks a table");
        let mut before = 0;
        let windows = counts.chunks_exact(table_count.max(1)).map(|window| {
            let first = before;
            before += window.iter().map(|&count| u64::from(count)).sum::<u64>();
            first
        });
        let entries_before = windows.collect();
        Self { rows, next, counts, row_crcs, entries_before, table_count }
    }

    fn window_count(&self) -> usize {
        self.counts.len() / self.table_count.max(1)
    }
}

/// The work on one group.
pub(crate) struct Pass<'a> {
    entries: &'a Entries,
    group: Group,
    /// Per table of the group, per row: the use that comes next, seen from where the pass stands.
    uses: Vec<Vec<u64>>,
    /// Checksum of the next uses of each table in each window.
    crcs: &'a mut [u32],
    rows: Vec<u64>,
    next: Vec<u64>,
}

/// Where the group's entries of one window lie.
struct Section<'a> {
    counts: &'a [u32],
    /// Of all tables, window after window: the group's tables in this one.
    tables: Range<usize>,
    first_entry: u64,
    offset_bytes: u64,
    count: usize,
}

impl<'a> Pass<'a> {
    pub(crate) fn new(
        entries: &'a Entries,
        group: Group,
        row_counts: &[u64],
        crcs: &'a mut [u32],
    ) -> Self {
        assert_eq!(crcs.len(), entries.counts.len(), "the next uses of each count have a checksum");
        let rows = row_counts[group.tables.clone()].iter();
        let lens = rows.map(|&rows| (group.rows.end.min(rows) - group.rows.start) as usize);
        let uses = lens.map(|len| vec![NONE; len]).collect();
        Self { entries, group, uses, crcs, rows: Vec::new(), next: Vec::new() }
    }

    fn section(&self, window: usize) -> Section<'a> {
        let entries = self.entries;
        let first = window * entries.table_count;
        let sum = |range: Range<usize>| {
            let counts = &entries.counts[range];
            counts.iter().map(|&count| u64::from(count)).sum::<u64>()
        };
        let before = entries.entries_before[window];
        let tables = first + self.group.tables.start..first + self.group.tables.end;
        Section {
            counts: &entries.counts[tables.clone()],
            first_entry: sum(first..tables.start),
            offset_bytes: 8 * (before + sum(first..tables.start)),
            count: sum(tables.clone()) as usize,
            tables,
        }
    }

    /// Finds the next use of every entry of the group in this epoch; [`NONE`] for the last.
    ///
    /// # Errors
    /// `Corruption` for scratch that is not what was written, otherwise those of the devices.
    pub(crate) fn link_backwards(&mut self) -> Result<()> {
        for window in (0..self.entries.window_count()).rev() {
            let section = self.section(window);
            let Section { offset_bytes, count, .. } = section;
            self.read_rows(&section)?;
            if self.group.rows.start > 0 {
                // Earlier ranges of this table have left theirs.
                read_words(&*self.entries.next, offset_bytes, count, &mut self.next)?;
                check(&self.next, section.counts, &self.crcs[section.tables.clone()])?;
            } else {
                self.next.clear();
                self.next.resize(count, NONE);
            }
            let mut entries = (section.first_entry..).zip(&self.rows).zip(&mut self.next);
            for (uses, &count) in self.uses.iter_mut().zip(section.counts) {
                for ((entry, row), next) in entries.by_ref().take(count as usize) {
                    let at = row.wrapping_sub(self.group.rows.start) as usize;
                    if let Some(known) = uses.get_mut(at) {
                        *next = std::mem::replace(known, (window as u64) << 32 | entry);
                    }
                }
            }
            self.put(&section)?;
        }
        Ok(())
    }

    /// Lets each last use be followed by the row's first use: what the first pass ended with.
    ///
    /// # Errors
    /// As [`link_backwards`](Self::link_backwards).
    pub(crate) fn close_rings(&mut self) -> Result<()> {
        for window in 0..self.entries.window_count() {
            let section = self.section(window);
            let Section { offset_bytes, count, .. } = section;
            self.read_rows(&section)?;
            read_words(&*self.entries.next, offset_bytes, count, &mut self.next)?;
            check(&self.next, section.counts, &self.crcs[section.tables.clone()])?;
            let mut entries = self.rows.iter().zip(&mut self.next);
            for (uses, &count) in self.uses.iter().zip(section.counts) {
                for (row, next) in entries.by_ref().take(count as usize) {
                    let at = row.wrapping_sub(self.group.rows.start) as usize;
                    if let Some(first) = uses.get(at).filter(|_| *next == NONE) {
                        *next = *first;
                    }
                }
            }
            self.put(&section)?;
        }
        Ok(())
    }

    /// Returns the first use of each row of each table, after the pass backwards.
    pub(crate) fn into_first_uses(self) -> Vec<Vec<u64>> {
        self.uses
    }

    fn put(&mut self, section: &Section<'_>) -> Result<()> {
        let mut rest = self.next.as_slice();
        let crcs = &mut self.crcs[section.tables.clone()];
        for (crc, &count) in crcs.iter_mut().zip(section.counts) {
            let (now, later) = rest.split_at(count as usize);
            *crc = crc32c(bytemuck::cast_slice(now));
            rest = later;
        }
        self.entries.next.write_at(section.offset_bytes, bytemuck::cast_slice(&self.next))
    }

    fn read_rows(&mut self, section: &Section<'_>) -> Result<()> {
        let Section { offset_bytes, count, .. } = *section;
        read_words(&*self.entries.rows, offset_bytes, count, &mut self.rows)?;
        check(&self.rows, section.counts, &self.entries.row_crcs[section.tables.clone()])
    }
}

/// Compares words, so many per table, with the checksum of each table.
///
/// # Errors
/// `Corruption` when they are not what was written.
///
/// # Panics
/// When there is not one checksum per table, or fewer words than the counts say.
pub(crate) fn check(words: &[u64], counts: &[u32], crcs: &[u32]) -> Result<()> {
    assert_eq!(counts.len(), crcs.len(), "each table has a checksum");
    let mut rest = words;
    for (&count, &crc) in counts.iter().zip(crcs) {
        let (now, later) = rest.split_at(count as usize);
        if crc != crc32c(bytemuck::cast_slice(now)) {
            return Err(lost_scratch());
        }
        rest = later;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_hold_all_rows_once_and_keep_the_bound() {
        let whole = 0..u64::MAX;
        let found = groups(&[3, 4, 2, 25, 1, 9], 10);
        let expected =
            [(0..3, whole.clone()), (3..4, 0..10), (3..4, 10..20), (3..4, 20..25), (4..6, whole)];
        assert_eq!(found, expected.map(|(tables, rows)| Group { tables, rows }));
    }
}
