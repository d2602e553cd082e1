//! Where is the newest version of each asked row?
//!
//! Memtables, then level 0 from the newest SST to the oldest, then one SST of each deeper level.
//! With the key sorter a request goes through the tree SST by SST, in key order, and all blocks
//! an SST must deliver are submitted together; each is loaded once, whatever the cache holds.
//! Without it rows are looked up one by one in the order given, as a plain tree does.

use std::collections::HashMap;
use std::sync::Arc;

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

#[derive(Debug, Clone, Copy)]
struct Wanted {
    key: Key,
    at: usize,
    is_found: bool,
}

/// Wanted rows `from..to` that block `block` may hold.
#[derive(Debug, Clone, Copy)]
struct BlockGroup {
    block: u32,
    from: usize,
    to: usize,
}

impl LsmStore {
    /// Reads rows in any order, duplicates allowed, as a look-ahead window asks for them; the
    /// sink gets each position of `rows` once.
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
        let _scratch = self.options.budget.reserve("read scratch", scratch_bytes)?;
        let started_us = self.options.clock.now_us();
        self.stats.rows_read += rows.len() as u64;
        let keys: Vec<Key> = rows.iter().map(|row| self.allocator.home(*row)).collect();
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
            let Some(key) = keys.get(at).copied() else { continue };
            match self.in_memory(key) {
                Some(record) => {
                    sink(at, Some(record))?;
                    self.lsm.memtable_hits += 1;
                }
                None => wanted.push(Wanted { key, at, is_found: false }),
            }
        }
        let version = Arc::clone(&self.version);
        let level_0 = version.level(0).iter().rev().map(|sst| (0, sst));
        let deeper = version.ssts().filter(|(level, _)| *level > 0);
        for (level, meta) in level_0.chain(deeper) {
            if wanted.is_empty() {
                break;
            }
            let Some(sst) = self.ssts.get(&meta.id).cloned() else { continue };
            let (loads_before, wanted_before) = (self.lsm.block_loads, wanted.len());
            self.read_from(&sst, &mut wanted, loads, sink)?;
            let found = (wanted_before - wanted.len()) as u64;
            self.lsm.count_level(level, self.lsm.block_loads - loads_before, found);
        }
        self.stats.rows_absent += wanted.len() as u64;
        wanted.iter().try_for_each(|row| sink(row.at, None))
    }

    // Answers what `sst` has of `wanted` (ascending) and leaves the others.
    fn read_from(
        &mut self,
        sst: &OpenSst,
        wanted: &mut Vec<Wanted>,
        loads: &mut BlockLoads,
        sink: &mut RowSink<'_>,
    ) -> Result<()> {
        let groups = self.block_groups(sst, wanted);
        if groups.is_empty() {
            return Ok(());
        }
        let mut missing = Vec::new();
        for group in groups {
            match self.cache.get((sst.meta.id, group.block)) {
                Some(block) => {
                    self.lsm.cache_hits += 1;
                    self.answer(sst, &block, wanted.get_mut(group.from..group.to), sink)?;
                }
                None => missing.push(group),
            }
        }
        let wave_len = self.options.engine.queue_depth as usize;
        for group in &missing {
            let is_hot = wanted.get(group.from).is_some_and(|row| row.key.is_hot());
            self.lsm.hot_block_loads += u64::from(is_hot);
        }
        for wave in missing.chunks(wave_len.max(1)) {
            let numbers: Vec<u32> = wave.iter().map(|group| group.block).collect();
            let blocks = self.load_blocks(sst, &numbers, loads)?;
            for (group, block) in wave.iter().zip(blocks) {
                self.answer(sst, &block, wanted.get_mut(group.from..group.to), sink)?;
                self.cache.insert((sst.meta.id, group.block), block);
            }
        }
        wanted.retain(|row| !row.is_found);
        Ok(())
    }

    fn block_groups(&mut self, sst: &OpenSst, wanted: &[Wanted]) -> Vec<BlockGroup> {
        let from = wanted.partition_point(|row| row.key < sst.meta.first);
        let to = wanted.partition_point(|row| row.key <= sst.meta.last);
        let mut groups: Vec<BlockGroup> = Vec::new();
        for at in from..to {
            let Some(row) = wanted.get(at) else { continue };
            if !sst.may_hold(row.key) {
                self.lsm.filter_skips += 1;
                continue;
            }
            let Some(block) = sst.block_of(row.key) else { continue };
            match groups.last_mut() {
                Some(last) if last.block == block => last.to = at + 1,
                _ => groups.push(BlockGroup { block, from: at, to: at + 1 }),
            }
        }
        groups
    }

    fn answer(
        &mut self,
        sst: &OpenSst,
        block: &[u8],
        wanted: Option<&mut [Wanted]>,
        sink: &mut RowSink<'_>,
    ) -> Result<()> {
        let rows = Rows::trusted(block);
        let found = |key| rows.and_then(|rows| rows.find(key));
        for row in wanted.into_iter().flatten() {
            let Some(record) = found(row.key) else { continue };
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
            let Some(sst) = self.ssts.get(&meta.id).cloned() else { continue };
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
                    let loaded = self.load_blocks(&sst, &[number], loads)?.pop();
                    let Some(block) = loaded else { continue };
                    self.cache.insert(place, Arc::clone(&block));
                    block
                }
            };
            let mut wanted = [row];
            self.answer(&sst, &block, Some(&mut wanted), sink)?;
            if wanted.iter().all(|row| row.is_found) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Loads and checks blocks, at most as many as the engine has buffers, all in flight at once.
    fn load_blocks(
        &mut self,
        sst: &OpenSst,
        numbers: &[u32],
        loads: &mut BlockLoads,
    ) -> Result<Vec<Arc<[u8]>>> {
        let block_bytes = sst.meta.block_bytes;
        let device = self.device_ids.get(&sst.meta.id).copied().ok_or_else(|| {
            Error::corruption("live SST is not attached").with("sst_id", sst.meta.id.0)
        })?;
        let mut bufs: Vec<BufId> = Vec::with_capacity(numbers.len());
        for (tag, number) in (0..).zip(numbers) {
            let Some(buf) = self.engine.acquire() else { break };
            bufs.push(buf);
            self.engine.submit(Request {
                device,
                op: Op::Read,
                offset_bytes: u64::from(*number) * u64::from(block_bytes),
                len_bytes: block_bytes,
                buf,
                tag,
            });
            *loads.entry((sst.meta.id, *number)).or_default() += 1;
        }
        let waited = self.wait_for_all();
        let mut blocks = Vec::with_capacity(numbers.len());
        let mut result = waited;
        for (number, buf) in numbers.iter().zip(&bufs) {
            if result.is_ok() {
                let bytes = self.engine.bytes(*buf).get(..block_bytes as usize).unwrap_or(&[]);
                match Rows::check(bytes, sst.block_name(*number)) {
                    Ok(_) => blocks.push(Arc::from(bytes)),
                    Err(error) => result = Err(error),
                }
            }
        }
        bufs.into_iter().for_each(|buf| self.engine.release(buf));
        self.lsm.block_loads += numbers.len() as u64;
        let bytes = u64::from(block_bytes) * numbers.len() as u64;
        self.stats.pages_read += bytes / PAGE_BYTES as u64;
        self.scheduler.observe_client(bytes);
        result.map(|()| blocks)
    }

    // Waits until nothing flies; the first failure is the result.
    fn wait_for_all(&mut self) -> Result<()> {
        let mut done: Vec<Completion> = Vec::new();
        while self.engine.in_flight_count() > 0 {
            self.engine.wait(&mut done)?;
        }
        done.into_iter().try_for_each(|completion| completion.result)
    }
}
