//! The store: its parts, how it is opened, and the storage traits.

use std::collections::{BTreeMap, VecDeque};
use std::path::Path;
use std::sync::Arc;

use tierbed_core::stats::StoreStats;
use tierbed_core::store::{check_keys, Ahead, Attachment, CommitInfo, RowSink, ScanSink};
use tierbed_core::{
    check_disk_quota, Budget, Error, Poison, Reservation, Result, RowKey, RowStore, RowWrite,
    Schema, TableId, TableSchema, TrainStore,
};
use tierbed_io::{open_engine, DeviceId, EngineOptions, Folder, FolderLock, IoEngine, PAGE_BYTES};
use tierbed_store::mark::StepMark;
use tierbed_store::{check_records, CommitLog};

use crate::cache::BlockCache;
use crate::commit::Committed;
use crate::compaction::outdated::{OutdatedCounts, OutdatedMonitor};
use crate::compaction::scheduler::Scheduler;
use crate::growth;
use crate::lookahead::hot_rows::HotRowIdentifier;
use crate::lookahead::key_allocator::KeyAllocator;
use crate::memtable::Memtable;
use crate::options::LsmOptions;
use crate::sst::{rows_per_block, verify_sst, OpenSst, SstTools, HEADER_BYTES};
use crate::stats::LsmStats;
use crate::version::{SstId, SstMeta, Version};
use crate::wal::{self, Entry, Segment, SegmentId, SegmentMeta, StepCommit};
use crate::worker::{UnderWay, Work, Worker, WorkerChoice};

/// Row records in a log-structured merge tree. See the crate's page.
pub struct LsmStore {
    // Dropped first: the thread is to end before anything it uses.
    pub(crate) worker: Worker,
    /// What the background thread has.
    pub(crate) under_way: Option<UnderWay>,
    // Dropped before the devices: the engine may still own buffers of the devices in `ssts`.
    pub(crate) engine: Box<dyn IoEngine>,
    pub(crate) version: Arc<Version>,
    pub(crate) ssts: BTreeMap<SstId, Arc<OpenSst>>,
    pub(crate) device_ids: BTreeMap<SstId, DeviceId>,
    pub(crate) active: Memtable,
    /// Memtables to flush, oldest first.
    pub(crate) sealed: VecDeque<Arc<Memtable>>,
    /// Log segments since the last full commit, the ones its version names included.
    pub(crate) log_segments: BTreeMap<SegmentId, SegmentMeta>,
    /// Log bytes since the last full commit.
    pub(crate) log_bytes: u64,
    /// Whether a segment was begun since the folder was synced.
    pub(crate) has_new_segments: bool,
    /// The last commit, when it lives in the log.
    pub(crate) step: Option<StepCommit>,
    /// Where steps are noted that were acknowledged; with `Durability::Step`.
    pub(crate) mark: Option<StepMark>,
    /// What `step` costs.
    pub(crate) step_memory: Reservation,
    /// Log segments that a memtable needs, the one being written included.
    pub(crate) segments: BTreeMap<SegmentId, SegmentMeta>,
    pub(crate) open_segment: Option<Segment>,
    pub(crate) entry: Entry,
    /// Chooses hot rows, with a hot rule.
    pub(crate) identifier: Option<HotRowIdentifier>,
    pub(crate) allocator: KeyAllocator,
    pub(crate) monitor: OutdatedMonitor,
    pub(crate) scheduler: Scheduler,
    pub(crate) cache: BlockCache,
    pub(crate) tools: Arc<SstTools>,
    pub(crate) options: LsmOptions,
    /// Disk space of kept checkpoints.
    pub(crate) kept_bytes: u64,
    pub(crate) schema: Schema,
    pub(crate) log: CommitLog,
    pub(crate) committed: Committed,
    pub(crate) next_segment: u64,
    /// Bytes of the blocks of new SSTs.
    pub(crate) block_bytes: usize,
    pub(crate) stats: StoreStats,
    pub(crate) lsm: LsmStats,
    pub(crate) poison: Poison,
    memory: Memory,
    _lock: FolderLock,
}

/// What is reserved as long as the store is open.
struct Memory {
    engine: Reservation,
    compaction: Reservation,
    metadata: Reservation,
    _write_buffers: Reservation,
    _block_cache: Reservation,
    _log_buffer: Option<Reservation>,
}

impl Memory {
    fn reserve(options: &LsmOptions) -> Result<Self> {
        let (budget, memory) = (&options.budget, &options.memory);
        let memtables = (1 + memory.sealed_memtables_max) as u64;
        let has_log = options.durability == crate::Durability::Step;
        Ok(Self {
            engine: budget.reserve("io buffers", 0)?,
            compaction: budget.reserve("compaction buffers", 0)?,
            metadata: budget.reserve("tree metadata", 0)?,
            _write_buffers: budget
                .reserve("write buffers", memtables * memory.memtable_bytes as u64)?,
            _block_cache: budget.reserve("block cache", memory.block_cache_bytes as u64)?,
            _log_buffer: match has_log {
                true => Some(budget.reserve("log buffer", 2 * crate::write::GROUP_BYTES as u64)?),
                false => None,
            },
        })
    }
}

impl LsmStore {
    /// Opens the store in `folder` at its last commit, or starts a new one in an empty folder.
    ///
    /// # Errors
    /// `Closed` when another process owns it, `Invalid` when the folder holds something else,
    /// options are out of range or the budget is too small, `Corruption` when files are missing,
    /// short or damaged.
    pub fn open(folder: Arc<dyn Folder>, options: LsmOptions) -> Result<Self> {
        options.check()?;
        let lock = folder.lock()?;
        let log = CommitLog::open(folder.clone(), "lsm")?;
        let stored = Self::read_version(folder.as_ref(), &log, &options.budget)?;
        let memory = Memory::reserve(&options)?;
        let budget = options.budget.clone();
        let tools = Arc::new(SstTools::new(folder, &options, stored.next_sst));
        let counts: OutdatedCounts = stored.outdated.iter().copied().collect();
        let mut store = Self {
            worker: Worker::start(options.worker, &tools, &budget)?,
            under_way: None,
            engine: open_engine(&EngineOptions { queue_depth: 1, ..options.engine.clone() })?,
            version: Arc::new(stored.version),
            ssts: BTreeMap::new(),
            device_ids: BTreeMap::new(),
            active: Memtable::new(options.memory.memtable_bytes),
            sealed: VecDeque::new(),
            log_segments: BTreeMap::new(),
            log_bytes: 0,
            has_new_segments: false,
            step: None,
            mark: None,
            step_memory: budget.reserve("log buffer", 0)?,
            segments: BTreeMap::new(),
            open_segment: None,
            entry: Entry::default(),
            identifier: match options.hot_rule {
                Some(rule) => Some(HotRowIdentifier::new(rule, &budget)?),
                None => None,
            },
            allocator: KeyAllocator::new(stored.hot_keys, &budget)?,
            monitor: OutdatedMonitor::new(options.memory.monitored_reads_max, counts, &budget)?,
            scheduler: Scheduler::new(options.scheduling, options.clock.now_us()),
            cache: BlockCache::new(options.memory.block_cache_bytes),
            tools,
            schema: Schema::default(),
            log,
            committed: Committed::default(),
            next_segment: stored.next_segment,
            block_bytes: 0,
            stats: StoreStats::default(),
            lsm: LsmStats::default(),
            poison: Poison::default(),
            memory,
            options,
            kept_bytes: 0,
            _lock: lock,
        };
        store.recover(&stored.segments)?;
        Ok(store)
    }

    fn recover(&mut self, segments: &[SegmentMeta]) -> Result<()> {
        let metas: Vec<_> = self.version.ssts().map(|(_, sst)| *sst).collect();
        let tables = self.log.manifest().map(|manifest| manifest.schema.tables().to_vec());
        let tables = tables.unwrap_or_default();
        let largest = metas.iter().map(|sst| sst.block_bytes as usize).max().unwrap_or(0);
        self.grow_blocks(largest.max(self.options.sst.block_bytes))?;
        for table in tables {
            self.admit_table(table)?;
        }
        for meta in metas {
            let sst = OpenSst::open(&self.tools, meta)?;
            self.attach(Arc::new(sst));
        }
        let segments = self.find_steps(segments)?;
        self.committed = Committed::of(&self.version, &segments);
        self.count_metadata(self.version.ssts().count())?;
        self.remove_garbage();
        for segment in segments {
            self.replay(segment)?;
        }
        if self.options.durability == crate::Durability::Step {
            let reached = self.log.next_number() - 1;
            self.mark = Some(StepMark::open(&*self.tools.folder, reached)?);
        }
        Ok(())
    }

    pub(crate) fn attach(&mut self, sst: Arc<OpenSst>) {
        let id = sst.meta.id;
        self.device_ids.insert(id, self.engine.attach(sst.device.clone()));
        self.ssts.insert(id, sst);
    }

    // Makes blocks of `block_bytes` possible: new SSTs have such blocks, I/O buffers hold them.
    fn grow_blocks(&mut self, block_bytes: usize) -> Result<()> {
        if block_bytes <= self.block_bytes {
            return Ok(());
        }
        let options = EngineOptions { buf_bytes: block_bytes, ..self.options.engine.clone() };
        let mut engine = open_engine(&options)?;
        // Each block in flight is copied once more before it is cached or searched.
        let copies = u64::from(options.queue_depth) * block_bytes as u64;
        self.memory.engine.resize(engine.memory_bytes() + copies)?;
        // A merge reads every SST of level 0, one run and one rewritten SST, and writes one. The
        // caller may flush meanwhile.
        let flushes = usize::from(self.options.worker == WorkerChoice::Thread);
        let cursors = (self.options.shape.l0_stop + 4 + flushes) as u64;
        let chunk = self.options.sst.chunk_bytes.next_multiple_of(block_bytes) as u64;
        self.memory.compaction.resize(cursors * chunk)?;
        self.device_ids =
            self.ssts.iter().map(|(id, sst)| (*id, engine.attach(sst.device.clone()))).collect();
        self.engine = engine;
        self.block_bytes = block_bytes;
        Ok(())
    }

    fn admit_table(&mut self, table: TableSchema) -> Result<TableId> {
        let record_bytes = table.record_bytes();
        if !Memtable::new(self.options.memory.memtable_bytes).fits(1, record_bytes) {
            return Err(Error::invalid("a row does not fit into a memtable")
                .with("table", &table.name)
                .with("record_bytes", record_bytes)
                .with("memtable_bytes", self.options.memory.memtable_bytes)
                .with("remedy", "raise memtable_bytes"));
        }
        let mut schema = self.schema.clone();
        let id = schema.add(table)?;
        if rows_per_block(self.block_bytes, record_bytes) == 0 {
            self.grow_blocks((HEADER_BYTES + 4 + record_bytes).next_multiple_of(PAGE_BYTES))?;
        }
        self.schema = schema;
        self.count_metadata(self.version.ssts().count())?;
        Ok(id)
    }

    /// Counts what is known of `sst_count` SSTs, of the tables and of the commit in force.
    ///
    /// # Errors
    /// `Invalid` when the budget does not hold it.
    pub(crate) fn count_metadata(&mut self, sst_count: usize) -> Result<()> {
        // Two versions while one replaces the other, the open file, four maps of the store.
        const SST_BYTES: usize = 2 * size_of::<SstMeta>() + size_of::<OpenSst>() + 256;
        // Schema and manifest keep a table each, as what was asked and what is in force.
        const TABLE_BYTES: usize = 1024;
        let kept = self.committed.ssts.len();
        let bytes = SST_BYTES * (sst_count + kept) + TABLE_BYTES * self.schema.tables().len();
        self.memory.metadata.resize(bytes as u64)
    }

    // Feeds the hot row identifier and the scheduler.
    fn learn(&mut self, ahead: &Ahead<'_>) {
        let now_us = self.options.clock.now_us();
        self.scheduler.observe_buffer(now_us, ahead.accesses_buffered, ahead.access_count);
        let Some(identifier) = &mut self.identifier else { return };
        if ahead.access_count == 0 {
            return;
        }
        let picked = identifier.observe(ahead, self.allocator.hot());
        let chosen = picked.and_then(|hot| hot.map_or(Ok(()), |hot| self.allocator.set_hot(hot)));
        if chosen.is_err() {
            // Hot rows save reads, nothing else: training goes on with those it has.
            self.lsm.windows_too_large += 1;
        }
    }

    /// Does the next piece of background work: a flush, or else one compaction if the scheduler
    /// allows it.
    ///
    /// # Errors
    /// `NoSpace`, `Corruption`: the tree is as before; others poison the store.
    pub fn step(&mut self) -> Result<Work> {
        self.poison.check()?;
        let result = self.work_once();
        self.poison.on_doubt(result)
    }

    /// Returns what the tree did, for RecDB's figures.
    #[must_use]
    pub fn lsm_stats(&self) -> &LsmStats {
        &self.lsm
    }

    /// Returns the live SSTs.
    #[must_use]
    pub fn version(&self) -> &Version {
        &self.version
    }

    /// Returns the outdated rows known per SST.
    #[must_use]
    pub fn outdated_counts(&self) -> &OutdatedCounts {
        self.monitor.counts()
    }

    /// Returns the account of everything the store allocates.
    #[must_use]
    pub fn budget(&self) -> &Budget {
        &self.options.budget
    }

    pub(crate) fn disk_bytes(&self) -> u64 {
        let is_live = |id: &SstId| self.ssts.contains_key(id);
        let kept = self.committed.ssts.iter().filter(|(id, _)| !is_live(id));
        let kept: u64 = kept.map(|(_, bytes)| bytes).sum();
        let segments: u64 = self.log_segments.values().map(|segment| segment.len_bytes).sum();
        let under_way = self.under_way.map_or(0, |job| job.size_bytes);
        self.version.size_bytes() + kept + segments + self.log.attachment_bytes() + under_way
    }

    pub(crate) fn check_quota(&self, more_bytes: u64) -> Result<()> {
        let wanted = self.disk_bytes() + self.kept_bytes + more_bytes;
        check_disk_quota(self.options.disk_quota_bytes, wanted)
    }
}

impl RowStore for LsmStore {
    fn schema(&self) -> &Schema {
        &self.schema
    }

    fn read(&mut self, keys: &[RowKey], sink: &mut RowSink<'_>) -> Result<()> {
        self.poison.check()?;
        check_keys(&self.schema, keys.iter().copied())?;
        self.read_rows(keys, sink)
    }

    fn scan(&mut self, table: TableId, sink: &mut ScanSink<'_>) -> Result<()> {
        self.poison.check()?;
        self.schema.table(table)?;
        self.scan_table(table, sink)
    }

    fn stats(&self) -> StoreStats {
        // Flushes, merges and the log go to the devices directly, past the engine; they count.
        let mut io = self.engine.stats();
        let written = self.lsm.flush_bytes + self.lsm.wal_bytes + self.lsm.compaction_write_bytes;
        io.write_bytes += written;
        io.read_bytes += self.lsm.compaction_read_bytes;
        let own = self.lsm.own();
        StoreStats { disk_bytes: self.disk_bytes(), io, own, ..self.stats.clone() }
    }
}

impl TrainStore for LsmStore {
    fn set_kept_bytes(&mut self, bytes: u64) {
        self.kept_bytes = bytes;
    }

    fn add_table(&mut self, table: TableSchema) -> Result<TableId> {
        self.poison.check()?;
        let id = self.schema.clone().add(table.clone())?;
        if (id.0 as usize) < self.schema.tables().len() {
            return Ok(id);
        }
        self.admit_table(table)
    }

    fn observe(&mut self, ahead: &Ahead<'_>) -> Result<()> {
        self.poison.check()?;
        self.learn(ahead);
        if !self.options.works_on_write {
            return Ok(());
        }
        // The buffer is as full as it gets: the best moment for a compaction to begin.
        let result = self.work_until_idle();
        self.poison.on_doubt(result)
    }

    fn growth_bytes_max(&self) -> u64 {
        growth::bytes_max(&self.schema, &self.options, self.block_bytes)
    }

    fn grow_table(&mut self, table: TableId, row_count: u64) -> Result<()> {
        self.poison.check()?;
        // Keys are as wide as any row; nothing in the tree is sized by a table's length.
        self.schema.grow(table, row_count)
    }

    fn write(&mut self, rows: &[RowWrite<'_>]) -> Result<()> {
        self.poison.check()?;
        check_keys(&self.schema, rows.iter().map(|row| row.key))?;
        check_records(&self.schema, rows)?;
        let result = self.write_rows(rows);
        self.poison.on_doubt(result)
    }

    fn commit(&mut self, name: &str, attachments: &[Attachment<'_>]) -> Result<()> {
        self.poison.check()?;
        self.commit_all(name, attachments)
    }

    fn last_commit(&self) -> Option<&CommitInfo> {
        self.step.as_ref().map(|step| &step.info).or_else(|| self.log.info())
    }

    fn attachment(&mut self, name: &str) -> Result<Option<Vec<u8>>> {
        match &self.step {
            None => self.log.attachment(name),
            Some(step) => {
                let found = step.attachments.iter().find(|(known, _)| known == name);
                Ok(found.map(|(_, bytes)| bytes.clone()))
            }
        }
    }

    fn attachment_names(&self) -> Result<Vec<String>> {
        Ok(match &self.step {
            None => self.log.attachment_names(),
            Some(step) => step.attachments.iter().map(|(name, _)| name.clone()).collect(),
        })
    }

    fn verify(&mut self) -> Result<u64> {
        self.poison.check()?;
        self.log.verify()?;
        for segment in &self.committed.segments {
            let folder = self.tools.folder.as_ref();
            let budget = &self.options.budget;
            wal::replay(folder, &self.schema, *segment, budget, &mut |_, _| Ok(()))?;
        }
        let mut checked = 0;
        for sst in self.ssts.values() {
            let pages_per_block = u64::from(sst.meta.block_bytes) / PAGE_BYTES as u64;
            checked += pages_per_block * verify_sst(sst)?;
        }
        Ok(checked)
    }

    fn path(&self) -> Option<&Path> {
        self.tools.folder.path()
    }
}
