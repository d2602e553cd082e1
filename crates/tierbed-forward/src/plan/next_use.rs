//! From every use of a row to its next: one pass forwards for first uses, one backwards.
//!
//! Works on as many neighbouring tables at a time as have room for an array over their rows, and
//! on one range of rows at a time where a single table has not. Memory therefore never depends
//! on the tables.

use std::ops::Range;
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
    /// Entries before each window, `[K]`.
    entries_before: Vec<u64>,
    table_count: usize,
}

/// Neighbouring tables, or a range of one table's rows, that are linked together.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Group {
    tables: Range<usize>,
    rows: Range<u64>,
}

/// Cuts tables into groups whose rows together are at most `rows_max`.
fn groups(row_counts: &[u64], rows_max: u64) -> Vec<Group> {
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
        table_count: usize,
    ) -> Self {
        let mut before = 0;
        let windows = counts.chunks_exact(table_count.max(1)).map(|window| {
            let first = before;
            before += window.iter().map(|&count| u64::from(count)).sum::<u64>();
            first
        });
        let entries_before = windows.collect();
        Self { rows, next, counts, entries_before, table_count }
    }

    /// Finds the next use of every entry with an array of at most `memory_bytes`.
    ///
    /// # Errors
    /// Those of the devices.
    pub(crate) fn link(&mut self, row_counts: &[u64], memory_bytes: u64) -> Result<()> {
        for group in groups(row_counts, (memory_bytes / 8).max(1)) {
            let mut lens = Vec::new();
            for &rows in row_counts.get(group.tables.clone()).unwrap_or(&[]) {
                lens.push((group.rows.end.min(rows) - group.rows.start) as usize);
            }
            let uses = lens.iter().map(|&len| vec![NONE; len]).collect();
            let mut pass = Pass { entries: self, group, uses, rows: Vec::new(), next: Vec::new() };
            for window in 0..self.window_count() {
                pass.note_first_uses(window)?;
            }
            for window in (0..self.window_count()).rev() {
                pass.link_backwards(window)?;
            }
        }
        Ok(())
    }

    fn window_count(&self) -> usize {
        self.counts.len() / self.table_count
    }
}

/// The work on one group.
struct Pass<'a> {
    entries: &'a Entries,
    group: Group,
    /// Per table of the group, per row: the use that comes next, seen from where the pass stands.
    uses: Vec<Vec<u64>>,
    rows: Vec<u64>,
    next: Vec<u64>,
}

/// Where the group's entries of one window lie.
struct Section<'a> {
    counts: &'a [u32],
    first_entry: u64,
    offset_bytes: u64,
    count: usize,
}

impl<'a> Pass<'a> {
    fn section(&self, window: usize) -> Section<'a> {
        let entries = self.entries;
        let first = window * entries.table_count;
        let sum = |range: Range<usize>| {
            let counts = entries.counts.get(range).unwrap_or(&[]);
            counts.iter().map(|&count| u64::from(count)).sum::<u64>()
        };
        let before = entries.entries_before.get(window).copied().unwrap_or(0);
        let tables = first + self.group.tables.start..first + self.group.tables.end;
        Section {
            counts: entries.counts.get(tables.clone()).unwrap_or(&[]),
            first_entry: sum(first..tables.start),
            offset_bytes: 8 * (before + sum(first..tables.start)),
            count: sum(tables) as usize,
        }
    }

    fn note_first_uses(&mut self, window: usize) -> Result<()> {
        let section = self.section(window);
        read_words(&*self.entries.rows, section.offset_bytes, section.count, &mut self.rows)?;
        let mut entries = (section.first_entry..).zip(&self.rows);
        for (uses, &count) in self.uses.iter_mut().zip(section.counts) {
            for (entry, row) in entries.by_ref().take(count as usize) {
                let at = row.wrapping_sub(self.group.rows.start) as usize;
                if let Some(first) = uses.get_mut(at).filter(|first| **first == NONE) {
                    *first = (window as u64) << 32 | entry;
                }
            }
        }
        Ok(())
    }

    // The array starts with first uses, so the last use of an epoch finds the next epoch's first.
    fn link_backwards(&mut self, window: usize) -> Result<()> {
        let section = self.section(window);
        let Section { offset_bytes, count, .. } = section;
        read_words(&*self.entries.rows, offset_bytes, count, &mut self.rows)?;
        if self.group.rows.start > 0 {
            // Earlier ranges of this table have left theirs.
            read_words(&*self.entries.next, offset_bytes, count, &mut self.next)?;
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
        self.entries.next.write_at(offset_bytes, bytemuck::cast_slice(&self.next))
    }
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
