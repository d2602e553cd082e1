//! Point reads: the newest version of each requested row.
//!
//! Memtables, then level 0 from the newest SST to the oldest, then one SST of each deeper level.
//! With the key sorter a request goes through the tree level by level, in key order, and all
//! blocks that the SSTs of a level (on level 0: one SST) must deliver are one stream; each is
//! loaded once, whatever the cache holds.
//! Without it rows are looked up one by one in the order given, as a plain tree does.

#![expect(
    clippy::indexing_slicing,
    reason = "positions are those of the keys, groups and blocks asked for"
)]

use std::sync::Arc;

use hashbrown::HashMap;
use tierbed_core::store::{out_of_range, RowSink};
use tierbed_core::{Error, Result, RowKey};
use tierbed_io::{BufId, Completion, Op, Request, PAGE_BYTES};

use crate::key::Key;
use crate::lookahead::key_sorter::read_order;
use crate::sst::{OpenSst, Rows};
use crate::store::LsmStore;
use crate::version::SstId;

/// Bytes a request costs per row while it is answered: keys, order, positions, block counts.
const ROW_SCRATCH_BYTES: u64 = 96;

/// How often each block was loaded in one call.
type BlockLoads = HashMap<(SstId, u32), u32>;

/// Takes loaded blocks by their position in what was asked.
type BlockSink<'a> = dyn FnMut(&mut LsmStore, usize, Arc<[u8]>) -> Result<()> + 'a;

#[derive(Debug, Clone, Copy)]
struct Wanted {
    key: Key,
    at: usize,
    is_found: bool,
}

/// Wanted rows `from..to` that block `block` of an SST may hold.
#[derive(Debug, Clone, Copy)]
struct BlockGroup<'a> {
    sst: &'a OpenSst,
    block: u32,
    from: usize,
    to: usize,
}

impl LsmStore {
    /// Reads rows in any order, duplicates allowed, as a look-ahead window asks for them; the
    /// sink gets each position of `rows` once. A request too large for the memory that is left is
    /// read in parts.
    ///
    /// # Errors
    /// As [`RowStore::read`](tierbed_core::RowStore::read), and `Invalid` when the budget does
    /// not hold the request.
    pub fn read_requests(&mut self, rows: &[RowKey], sink: &mut RowSink<'_>) -> Result<()> {
        self.poison.check()?;
        for row in rows {
            let table = self.schema.table(row.table)?;
            if row.row.0 >= table.row_count {
                return Err(out_of_range(table, row.row.0));
            }
        }
        self.read_rows(rows, sink)
    }

    pub(crate) fn read_rows(&mut self, rows: &[RowKey], sink: &mut RowSink<'_>) -> Result<()> {
        let scratch_bytes = ROW_SCRATCH_BYTES * rows.len() as u64;
        let budget = &self.options.budget;
        if rows.len() > 1 && scratch_bytes > budget.free_bytes() {
            // Little memory is left: the rest of the request waits.
            let (first, rest) = rows.split_at(rows.len() / 2);
            self.read_rows(first, sink)?;
            return self.read_rows(rest, &mut |at, record| sink(first.len() + at, record));
        }
        let _scratch = budget.reserve("read scratch", scratch_bytes)?;
        let started_us = self.options.clock.now_us();
        self.stats.rows_read += rows.len() as u64;
        let keys: Vec<Key> = rows.iter().map(|row| self.allocator.newest_key(*row)).collect();
        let mut loads = BlockLoads::new();
        let result = if self.options.sorts_requests {
            self.read_sorted(&keys, &mut loads, sink)
        } else {
            self.read_in_order(&keys, &mut loads, sink)
        };
        for count in loads.into_values() {
            self.lsm.count_block_loads(count);
            self.lsm.block_reloads += u64::from(count - 1);
        }
        self.lsm.count_read_call(self.options.clock.now_us().saturating_sub(started_us));
        result
    }

    /// Returns a live SST.
    pub(crate) fn open_sst(&self, id: SstId) -> Arc<OpenSst> {
        Arc::clone(&self.ssts[&id])
    }

    // Newest memtable first.
    fn in_memory(&self, key: Key) -> Option<&[u8]> {
        self.active.get(key).or_else(|| self.sealed.iter().rev().find_map(|table| table.get(key)))
    }

    fn read_sorted(
        &mut self,
        keys: &[Key],
        loads: &mut BlockLoads,
        sink: &mut RowSink<'_>,
    ) -> Result<()> {
        let mut wanted = Vec::with_capacity(keys.len());
        for at in read_order(keys) {
            let key = keys[at];
            match self.in_memory(key) {
                Some(record) => {
                    sink(at, Some(record))?;
                    self.lsm.memtable_hits += 1;
                }
                None => wanted.push(Wanted { key, at, is_found: false }),
            }
        }
        let version = Arc::clone(&self.version);
        // SSTs of level 0 overlap, so they are asked one after another; those of a deeper level
        // do not.
        let level_0 = version.level(0).iter().rev().map(|sst| (0, std::slice::from_ref(sst)));
        let deeper = (1..crate::LEVELS_MAX).map(|level| (level, version.level(level)));
        for (level, metas) in level_0.chain(deeper) {
            if wanted.is_empty() {
                break;
            }
            let ssts: Vec<_> = metas.iter().map(|meta| self.open_sst(meta.id)).collect();
            let (loads_before, wanted_before) = (self.lsm.block_loads, wanted.len());
            self.read_from(&ssts, &mut wanted, loads, sink)?;
            let found = (wanted_before - wanted.len()) as u64;
            self.lsm.count_level(level, self.lsm.block_loads - loads_before, found);
        }
        self.stats.rows_absent += wanted.len() as u64;
        wanted.iter().try_for_each(|row| sink(row.at, None))
    }

    // Answers what `ssts`, which do not overlap, have of `wanted` (ascending) and leaves the
    // others.
    fn read_from(
        &mut self,
        ssts: &[Arc<OpenSst>],
        wanted: &mut Vec<Wanted>,
        loads: &mut BlockLoads,
        sink: &mut RowSink<'_>,
    ) -> Result<()> {
        let mut groups = Vec::new();
        ssts.iter().for_each(|sst| self.block_groups(sst, wanted, &mut groups));
        let mut missing = Vec::new();
        for group in groups {
            match self.cache.get((group.sst.meta.id, group.block)) {
                Some(block) => {
                    self.lsm.cache_hits += 1;
                    self.answer(group.sst, &block, &mut wanted[group.from..group.to], sink)?;
                }
                None => missing.push(group),
            }
        }
        for group in &missing {
            self.lsm.hot_block_loads += u64::from(wanted[group.from].key.is_hot());
        }
        let places: Vec<_> = missing.iter().map(|group| (group.sst, group.block)).collect();
        self.load_blocks(&places, loads, &mut |store, at, block| {
            let group = missing[at];
            store.answer(group.sst, &block, &mut wanted[group.from..group.to], sink)?;
            store.cache.insert((group.sst.meta.id, group.block), block);
            Ok(())
        })?;
        wanted.retain(|row| !row.is_found);
        Ok(())
    }

    fn block_groups<'a>(
        &mut self,
        sst: &'a OpenSst,
        wanted: &[Wanted],
        groups: &mut Vec<BlockGroup<'a>>,
    ) {
        let from = wanted.partition_point(|row| row.key < sst.meta.first);
        let to = wanted.partition_point(|row| row.key <= sst.meta.last);
        let mut last_block = None;
        for (at, row) in (from..).zip(&wanted[from..to]) {
            if !sst.may_hold(row.key) {
                self.lsm.filter_skips += 1;
                continue;
            }
            let Some(block) = sst.block_of(row.key) else {
                panic!("the key is within the SST's range")
            };
            match groups.last_mut() {
                Some(last) if last_block == Some(block) => last.to = at + 1,
                _ => groups.push(BlockGroup { sst, block, from: at, to: at + 1 }),
            }
            last_block = Some(block);
        }
    }

    fn answer(
        &mut self,
        sst: &OpenSst,
        block: &[u8],
        wanted: &mut [Wanted],
        sink: &mut RowSink<'_>,
    ) -> Result<()> {
        let Some(rows) = Rows::trusted(block) else { panic!("the block was checked when loaded") };
        for row in wanted {
            let Some(record) = rows.find(row.key) else { continue };
            self.check_record(row.key, record, sst)?;
            row.is_found = true;
            self.monitor.note_read(row.key, sst.meta.id);
            sink(row.at, Some(record))?;
        }
        Ok(())
    }

    fn check_record(&self, key: Key, record: &[u8], sst: &OpenSst) -> Result<()> {
        let table = self.schema.table(key.row().table)?;
        if record.len() == table.record_bytes() {
            return Ok(());
        }
        Err(Error::corruption("stored record has the wrong length")
            .with("table", &table.name)
            .with("sst_id", sst.meta.id.0)
            .with("expected", table.record_bytes())
            .with("found", record.len()))
    }

    fn read_in_order(
        &mut self,
        keys: &[Key],
        loads: &mut BlockLoads,
        sink: &mut RowSink<'_>,
    ) -> Result<()> {
        for (at, key) in keys.iter().enumerate() {
            if let Some(record) = self.in_memory(*key) {
                sink(at, Some(record))?;
                self.lsm.memtable_hits += 1;
                continue;
            }
            if !self.read_one(Wanted { key: *key, at, is_found: false }, loads, sink)? {
                self.stats.rows_absent += 1;
                sink(at, None)?;
            }
        }
        Ok(())
    }

    fn read_one(
        &mut self,
        row: Wanted,
        loads: &mut BlockLoads,
        sink: &mut RowSink<'_>,
    ) -> Result<bool> {
        let version = Arc::clone(&self.version);
        let deeper = (1..crate::LEVELS_MAX).filter_map(|level| {
            let ssts = version.level(level);
            ssts.get(ssts.partition_point(|sst| sst.last < row.key))
        });
        for meta in version.level(0).iter().rev().chain(deeper) {
            let sst = self.open_sst(meta.id);
            let Some(number) = sst.block_of(row.key) else { continue };
            if !sst.may_hold(row.key) {
                self.lsm.filter_skips += 1;
                continue;
            }
            let place = (meta.id, number);
            let block = match self.cache.get(place) {
                Some(block) => {
                    self.lsm.cache_hits += 1;
                    block
                }
                None => {
                    let mut loaded = None;
                    self.load_blocks(&[(sst.as_ref(), number)], loads, &mut |_, _, block| {
                        loaded = Some(block);
                        Ok(())
                    })?;
                    let Some(block) = loaded else { panic!("one block was asked for") };
                    self.cache.insert(place, Arc::clone(&block));
                    block
                }
            };
            let mut wanted = [row];
            self.answer(&sst, &block, &mut wanted, sink)?;
            if wanted.iter().all(|row| row.is_found) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Loads and checks blocks (SST, number) and gives each, by its position, to `take`, in any
    /// order. New requests go out by the half queue, so that one call into the kernel starts many
    /// and the device is never without work.
    fn load_blocks(
        &mut self,
        places: &[(&OpenSst, u32)],
        loads: &mut BlockLoads,
        take: &mut BlockSink<'_>,
    ) -> Result<()> {
        let refill_below = (self.options.engine.queue_depth as usize / 2).max(1);
        let mut waiting = (0u64..).zip(places);
        let mut done: Vec<Completion> = Vec::new();
        let mut result = Ok(());
        loop {
            let is_low = self.engine.in_flight_count() <= refill_below && result.is_ok();
            while let Some(buf) = is_low.then(|| self.engine.acquire()).flatten() {
                let Some((tag, (sst, number))) = waiting.next() else {
                    self.engine.release(buf);
                    break;
                };
                let begun = self.submit_block(sst, *number, buf, tag);
                if let Err(error) = begun {
                    self.engine.release(buf);
                    result = Err(error);
                    break;
                }
                *loads.entry((sst.meta.id, *number)).or_default() += 1;
            }
            if self.engine.in_flight_count() == 0 {
                let is_done = waiting.next().is_none();
                assert!(is_done || result.is_err(), "a block that was asked for was not read");
                return result;
            }
            self.engine.wait(&mut done)?;
            for Completion { tag, buf, result: read, .. } in done.drain(..) {
                let (sst, number) = places[tag as usize];
                let block = result
                    .is_ok()
                    .then(|| read.and_then(|()| self.checked_block(sst, number, buf)));
                self.engine.release(buf);
                if let Some(block) = block {
                    result = block.and_then(|block| take(self, tag as usize, block));
                }
            }
        }
    }

    fn submit_block(&mut self, sst: &OpenSst, number: u32, buf: BufId, tag: u64) -> Result<()> {
        let block_bytes = sst.meta.block_bytes;
        let device = self.device_ids.get(&sst.meta.id).copied().ok_or_else(|| {
            Error::corruption("live SST is not attached").with("sst_id", sst.meta.id.0)
        })?;
        self.engine.submit(Request {
            device,
            op: Op::Read,
            offset_bytes: u64::from(number) * u64::from(block_bytes),
            len_bytes: block_bytes,
            buf,
            tag,
        });
        self.lsm.block_loads += 1;
        self.stats.pages_read += u64::from(block_bytes) / PAGE_BYTES as u64;
        self.scheduler.observe_client(u64::from(block_bytes));
        Ok(())
    }

    // The block in `buf`, copied for the cache once it is known to be what it should be.
    fn checked_block(&self, sst: &OpenSst, number: u32, buf: BufId) -> Result<Arc<[u8]>> {
        let bytes = &self.engine.bytes(buf)[..sst.meta.block_bytes as usize];
        Rows::check(bytes, sst.block_name(number))?;
        Ok(Arc::from(bytes))
    }
}
