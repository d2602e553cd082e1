//! Table scans in row order.
//!
//! A table lies in two places of the tree, its hot rows and the others. Both are walked at once
//! and joined by row; each walk joins memtables (newest) with all levels. Memory: one block per
//! SST of level 0 and per level, and the memtable rows' places.

#![expect(clippy::indexing_slicing, reason = "the walk chosen is one of the two")]

use std::collections::btree_map::{BTreeMap, IntoIter};
use std::iter::Peekable;
use std::sync::Arc;

use tierbed_core::store::ScanSink;
use tierbed_core::{Error, Result, TableId};

use crate::compaction::merge::Merge;
use crate::key::Key;
use crate::lookahead::key_allocator::KeyAllocator;
use crate::sst::{OpenSst, RunCursor};
use crate::store::LsmStore;

/// Walks the live rows of one prefix of a table.
struct Walk<'a> {
    in_memory: Peekable<IntoIter<Key, &'a [u8]>>,
    on_disk: Merge,
    allocator: &'a KeyAllocator,
}

impl Walk<'_> {
    // The walk stands before its next live row: superseded versions are skipped.
    fn settle(&mut self) -> Result<Option<Key>> {
        while let Some(key) = self.key() {
            if !self.allocator.is_superseded(key) {
                return Ok(Some(key));
            }
            self.advance(key)?;
        }
        Ok(None)
    }

    fn key(&mut self) -> Option<Key> {
        let in_memory = self.in_memory.peek().map(|(key, _)| *key);
        let on_disk = self.on_disk.key();
        in_memory.into_iter().chain(on_disk).min()
    }

    fn record(&mut self, key: Key) -> Option<&[u8]> {
        match self.in_memory.peek() {
            Some((found, record)) if *found == key => Some(record),
            _ => self.on_disk.row().map(|(_, record)| record),
        }
    }

    fn advance(&mut self, key: Key) -> Result<()> {
        self.in_memory.next_if(|(found, _)| *found == key);
        if self.on_disk.key() == Some(key) {
            self.on_disk.advance()?;
        }
        Ok(())
    }
}

impl LsmStore {
    pub(crate) fn scan_table(&mut self, table: TableId, sink: &mut ScanSink<'_>) -> Result<()> {
        let record_bytes = self.schema.table(table)?.record_bytes();
        let cursors = self.version.level(0).len() + crate::LEVELS_MAX - 1;
        let memtables = self.sealed.iter().map(Arc::as_ref).chain([&self.active]);
        let rows: usize = memtables.map(crate::memtable::Memtable::row_count).sum();
        let bytes = 2 * cursors * self.block_bytes + 40 * rows;
        let _memory = self.options.budget.reserve("scan buffers", bytes as u64)?;
        let mut walks = [self.walk(table, true)?, self.walk(table, false)?];
        loop {
            let mut next: Option<(Key, usize)> = None;
            for (at, walk) in walks.iter_mut().enumerate() {
                let Some(key) = walk.settle()? else { continue };
                if next.is_none_or(|(smallest, _)| key.row() < smallest.row()) {
                    next = Some((key, at));
                }
            }
            let Some((key, at)) = next else { return Ok(()) };
            let walk = &mut walks[at];
            let Some(record) = walk.record(key) else { panic!("the walk stands at this row") };
            if record.len() != record_bytes {
                return Err(Error::corruption("stored record has the wrong length")
                    .with("table_id", table.0)
                    .with("row", key.row().row.0)
                    .with("expected", record_bytes)
                    .with("found", record.len()));
            }
            sink(key.row().row, record)?;
            walk.advance(key)?;
        }
    }

    fn walk(&self, table: TableId, is_hot: bool) -> Result<Walk<'_>> {
        let range = Key::range_of(table, is_hot);
        let mut in_memory = BTreeMap::new();
        // Oldest first: newer versions replace older ones.
        for memtable in self.sealed.iter().map(Arc::as_ref).chain([&self.active]) {
            in_memory.extend(memtable.range(range.clone()));
        }
        let open = |ssts: &[crate::SstMeta]| -> Vec<Arc<OpenSst>> {
            ssts.iter().map(|sst| self.open_sst(sst.id)).collect()
        };
        let mut runs: Vec<_> =
            self.version.level(0).iter().rev().map(|sst| open(std::slice::from_ref(sst))).collect();
        runs.extend((1..crate::LEVELS_MAX).map(|level| open(self.version.level(level))));
        let cursors: Result<Vec<_>> =
            runs.into_iter().map(|run| RunCursor::new(run, &range, self.block_bytes)).collect();
        Ok(Walk {
            in_memory: in_memory.into_iter().peekable(),
            on_disk: Merge::new(cursors?),
            allocator: &self.allocator,
        })
    }
}
