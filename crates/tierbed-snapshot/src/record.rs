//! Recorder of a sample of the served queries, as a log for the next placement.
//!
//! A sample of a lookup is one query: the rows it asks for in the tables of a [`Recorded`] group,
//! numbered through in the group's order, as placements of these tables are. Lookups append to a
//! buffer; a thread writes full buffers as files that appear whole, oldest first by name, and
//! removes the oldest when all take more space than given:
//!
//! ```text
//! lookups ─▶ [buffer] ─▶ queue of a few ─▶ queries-00000007.txt   one query a line
//!               queue is full: the buffer is dropped, and counted; no lookup ever waits
//! ```
//!
//! Format: `docs/reference/formats/query-log.md`.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{sync_channel, Receiver, SyncSender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use serde::Serialize;
use tierbed_core::env::mix64;
use tierbed_core::{Bags, Error, Result, TableId};
use tierbed_io::{Folder, OpenMode};
use tierbed_kernels::FeatureLayout;

use crate::placed::Numbering;
use crate::snapshot::Snapshot;

const PREFIX: &str = "queries-";
const SUFFIX: &str = ".txt";
/// Full buffers that wait for the disk, over all groups.
const QUEUED_MAX: usize = 4;

/// Tables whose rows are recorded together.
#[derive(Debug, Clone)]
pub struct Recorded {
    /// Rows are numbered through in this order.
    pub tables: Vec<TableId>,
    /// Where the files go; files of earlier recordings stay and count.
    pub folder: Arc<dyn Folder>,
}

/// How much is recorded.
#[derive(Debug, Clone, PartialEq)]
pub struct RecordOptions {
    /// Share of the samples that are recorded, each drawn by itself.
    pub sample: f64,
    /// Equal seeds draw equal samples of equal lookups.
    pub seed: u64,
    /// Bytes of a file, and of the buffer it is collected in.
    pub file_bytes: usize,
    /// Most bytes of a group's files; the oldest are removed.
    pub bytes_max: u64,
}

impl Default for RecordOptions {
    fn default() -> Self {
        Self { sample: 1.0, seed: 0, file_bytes: 1 << 20, bytes_max: 1 << 30 }
    }
}

/// What was recorded since the start.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct RecordStats {
    /// Queries that went into a buffer.
    pub queries_recorded: u64,
    /// Of these, queries that were dropped because the disk was too slow, or failed.
    pub queries_dropped: u64,
    /// Files written.
    pub files_written: u64,
    /// Files removed to make room.
    pub files_removed: u64,
    /// Why writing failed; nothing is written after that.
    pub error: Option<String>,
}

/// Queries of a buffer, as text.
#[derive(Debug, Default)]
struct Buffer {
    text: Vec<u8>,
    query_count: u64,
}

#[derive(Debug)]
struct Group {
    starts: Vec<(TableId, u32)>,
    buffer: Mutex<Buffer>,
}

/// Records lookups until dropped; what is in buffers is then written.
#[derive(Debug)]
pub(crate) struct Recorder {
    groups: Vec<Group>,
    sample: f64,
    seed: u64,
    file_bytes: usize,
    sample_count: AtomicU64,
    stats: Arc<Mutex<RecordStats>>,
    queue: Option<SyncSender<(usize, Buffer)>>,
    writer: Option<JoinHandle<()>>,
}

impl Snapshot {
    /// Records what is looked up from now on, until the snapshot is dropped.
    ///
    /// # Errors
    /// `Invalid` when the snapshot records already, for a sample outside `0..=1`, no group, and
    /// groups of unknown tables, repeated ones or ones of several dims; `Io` from the folders.
    pub fn record(&self, groups: Vec<Recorded>, options: &RecordOptions) -> Result<()> {
        let again = || Error::invalid("this snapshot records its queries already");
        if self.recorder.get().is_some() {
            return Err(again());
        }
        let recorder = Recorder::new(self, groups, options)?;
        self.recorder.set(recorder).map_err(|_| again())
    }

    /// Returns what was recorded; nothing where nothing is.
    #[must_use]
    pub fn record_stats(&self) -> Option<RecordStats> {
        self.recorder.get().map(|recorder| lock(&recorder.stats).clone())
    }
}

impl Recorder {
    fn new(snapshot: &Snapshot, groups: Vec<Recorded>, options: &RecordOptions) -> Result<Self> {
        if !(0.0..=1.0).contains(&options.sample) || groups.is_empty() || options.file_bytes == 0 {
            return Err(Error::invalid("recording needs tables, a sample from 0 to 1 and a size")
                .with("sample", options.sample)
                .with("groups", groups.len())
                .with("file_bytes", options.file_bytes));
        }
        let mut folders = Vec::new();
        let mut known = Vec::new();
        for group in groups {
            let ids: Vec<u32> = group.tables.iter().map(|table| table.0).collect();
            let numbering = Numbering::new(snapshot.schema(), &ids)?;
            folders.push(GroupFiles::open(group.folder, options.bytes_max)?);
            let buffer = Mutex::new(Buffer::default());
            known.push(Group { starts: numbering.tables().collect(), buffer });
        }
        let stats = Arc::new(Mutex::new(RecordStats::default()));
        let (queue, full) = sync_channel(QUEUED_MAX);
        let shared = Arc::clone(&stats);
        let writer = std::thread::Builder::new()
            .name("tierbed-record".to_owned())
            .spawn(move || write_all(&full, &mut folders, &shared))
            .map_err(|cause| Error::os("cannot start the recording thread", cause))?;
        Ok(Self {
            groups: known,
            sample: options.sample,
            seed: options.seed,
            file_bytes: options.file_bytes,
            sample_count: AtomicU64::new(0),
            stats,
            queue: Some(queue),
            writer: Some(writer),
        })
    }

    /// Records the samples of a lookup that are drawn.
    pub(crate) fn note(&self, plan: &FeatureLayout, bags: &Bags<'_>) {
        let count = bags.batch_size();
        let first = self.sample_count.fetch_add(count as u64, Ordering::Relaxed);
        for sample in (0..count).filter(|&sample| self.is_drawn(first + sample as u64)) {
            for (at, group) in self.groups.iter().enumerate() {
                let mut buffer = lock(&group.buffer);
                if !group.append(&mut buffer.text, plan, bags, sample) {
                    continue;
                }
                buffer.query_count += 1;
                lock(&self.stats).queries_recorded += 1;
                if buffer.text.len() >= self.file_bytes {
                    let full = std::mem::take(&mut *buffer);
                    drop(buffer);
                    self.hand_over(at, full);
                }
            }
        }
    }

    fn is_drawn(&self, sample: u64) -> bool {
        // The top 53 bits as a fraction, as generators do.
        let luck = mix64(self.seed ^ mix64(sample)) >> 11;
        (luck as f64) < self.sample * (1u64 << 53) as f64
    }

    fn hand_over(&self, group: usize, buffer: Buffer) {
        let query_count = buffer.query_count;
        let sent = self.queue.as_ref().map(|queue| queue.try_send((group, buffer)));
        if !matches!(sent, Some(Ok(()))) {
            lock(&self.stats).queries_dropped += query_count;
        }
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        let Some(queue) = self.queue.take() else { return };
        for (at, group) in self.groups.iter().enumerate() {
            let rest = std::mem::take(&mut *lock(&group.buffer));
            if rest.query_count > 0 {
                // The writer has ended only after a panic, and its statistics with it.
                let _ = queue.send((at, rest));
            }
        }
        drop(queue);
        if let Some(writer) = self.writer.take() {
            let _ = writer.join();
        }
    }
}

impl Group {
    /// Appends the rows that a sample asks for in these tables; `false` when there is none.
    #[expect(clippy::indexing_slicing, reason = "the bags are checked, and the sample is theirs")]
    fn append(
        &self,
        text: &mut Vec<u8>,
        plan: &FeatureLayout,
        bags: &Bags<'_>,
        sample: usize,
    ) -> bool {
        let before = text.len();
        for (at, feature) in plan.features().iter().enumerate() {
            let found = self.starts.iter().find(|(table, _)| *table == feature.table);
            let Some(&(_, start)) = found else { continue };
            let offsets = bags.feature_offsets(at);
            assert!(sample + 1 < offsets.len(), "sample {sample} of {} offsets", offsets.len());
            let (from, to) = (offsets[sample] as usize, offsets[sample + 1] as usize);
            for &id in &bags.indices[from..to] {
                let row = u64::from(start) + feature.row_key(id).row.0;
                if text.len() > before {
                    text.push(b' ');
                }
                text.extend(row.to_string().as_bytes());
            }
        }
        if text.len() > before {
            text.push(b'\n');
        }
        text.len() > before
    }
}

/// Writes buffers until all senders are gone.
fn write_all(
    full: &Receiver<(usize, Buffer)>,
    folders: &mut [GroupFiles],
    stats: &Mutex<RecordStats>,
) {
    for (group, buffer) in full {
        let Some(files) = folders.get_mut(group) else {
            panic!("queries of group {group} of {}", folders.len())
        };
        let has_failed = lock(stats).error.is_some();
        let written = if has_failed { None } else { Some(files.put(&buffer.text)) };
        let mut stats = lock(stats);
        match written {
            Some(Ok(removed_count)) => {
                stats.files_written += 1;
                stats.files_removed += removed_count;
            }
            Some(Err(error)) => {
                stats.queries_dropped += buffer.query_count;
                stats.error = Some(error.to_string());
            }
            None => stats.queries_dropped += buffer.query_count,
        }
    }
}

/// The files of a group.
#[derive(Debug)]
struct GroupFiles {
    folder: Arc<dyn Folder>,
    /// Number and bytes of each file, oldest first.
    files: std::collections::VecDeque<(u64, u64)>,
    bytes_max: u64,
}

impl GroupFiles {
    fn open(folder: Arc<dyn Folder>, bytes_max: u64) -> Result<Self> {
        let mut files = std::collections::VecDeque::new();
        for name in folder.list()? {
            let number = name.strip_prefix(PREFIX).and_then(|rest| rest.strip_suffix(SUFFIX));
            if let Some(number) = number.and_then(|number| number.parse().ok()) {
                files.push_back((number, folder.open(&name, OpenMode::ReadOnly)?.len_bytes()?));
            }
        }
        Ok(Self { folder, files, bytes_max })
    }

    /// Writes a file and removes as many old ones as there is no room for; returns how many.
    fn put(&mut self, text: &[u8]) -> Result<u64> {
        let number = self.files.back().map_or(1, |(number, _)| number + 1);
        self.folder.write_atomic(&name_of(number), text)?;
        self.files.push_back((number, text.len() as u64));
        let mut removed_count = 0;
        while self.files.len() > 1 && self.bytes() > self.bytes_max {
            if let Some((oldest, _)) = self.files.pop_front() {
                self.folder.remove(&name_of(oldest))?;
                removed_count += 1;
            }
        }
        Ok(removed_count)
    }

    fn bytes(&self) -> u64 {
        self.files.iter().map(|(_, bytes)| bytes).sum()
    }
}

fn name_of(number: u64) -> String {
    format!("{PREFIX}{number:08}{SUFFIX}")
}

// Buffers and counters are whole after every statement.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
