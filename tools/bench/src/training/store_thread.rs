//! How does a store read while training goes on? On a thread of its own, one request at a time.
//!
//! A request writes the rows that left the buffer, then reads those the next window wants; so a
//! row that left and comes back is read as it was written.

use std::sync::mpsc::{channel, Receiver, Sender};
use std::sync::Arc;
use std::thread::JoinHandle;

use bytemuck::cast_slice;
use serde_json::{json, Value};
use tierbed_core::store::Ahead;
use tierbed_core::{Error, Result, RowId, RowKey, RowWrite, Schema, TableId};
use tierbed_kernels::init_record;

use super::stores::AnyStore;
use super::timeline::Window;

/// Rows written at once.
const WRITE_ROWS: usize = 8192;

/// Rows to write and rows to read, by number through all tables, ascending.
#[derive(Debug, Default)]
pub(crate) struct Request {
    pub(crate) write_rows: Vec<u32>,
    pub(crate) write_records: Vec<f32>,
    pub(crate) read_rows: Vec<u32>,
    /// The window the reads are for.
    pub(crate) window: Option<Arc<Window>>,
    pub(crate) window_batches: u32,
    pub(crate) batch_len: usize,
}

enum Call {
    Exchange(Request),
    Commit,
    Counters,
}

/// What a request brings, as the store is told of it.
struct Brought {
    window: Arc<Window>,
    window_batches: u32,
    batch_len: usize,
}

impl Call {
    fn brought(&self) -> Option<Brought> {
        let Self::Exchange(request) = self else { return None };
        let Request { window_batches, batch_len, .. } = *request;
        Some(Brought { window: request.window.clone()?, window_batches, batch_len })
    }
}

enum Answer {
    /// The records read, and the request back for its memory.
    Exchanged(Vec<f32>, Request),
    Committed,
    Counters(Value),
}

/// The caller's side.
#[derive(Debug)]
pub(crate) struct StoreThread {
    calls: Option<Sender<Call>>,
    answers: Receiver<Result<Answer>>,
    thread: Option<JoinHandle<()>>,
}

impl StoreThread {
    pub(crate) fn start(store: AnyStore, first_rows: Vec<u32>) -> Result<Self> {
        let (calls, work) = channel::<Call>();
        let (done, answers) = channel();
        let builder = std::thread::Builder::new().name("bench-store".to_owned());
        let thread = builder
            .spawn(move || {
                let mut side = StoreSide { store, first_rows };
                let mut observed = Ok(());
                while let Ok(call) = work.recv() {
                    let brought = call.brought();
                    let answer = observed.and_then(|()| side.answer(call));
                    if done.send(answer).is_err() {
                        break;
                    }
                    // The rows come first: what the store does about them, compactions for
                    // instance, is not in their way. The next call tells of a failure.
                    observed = brought.map_or(Ok(()), |brought| side.observe(&brought));
                }
            })
            .map_err(|cause| Error::os("could not start the store's thread", cause))?;
        Ok(Self { calls: Some(calls), answers, thread: Some(thread) })
    }

    /// Begins a request; [`finish`](Self::finish) waits for it.
    pub(crate) fn begin(&mut self, request: Request) -> Result<()> {
        self.call(Call::Exchange(request))
    }

    /// Waits for the records of the request begun.
    pub(crate) fn finish(&mut self) -> Result<(Vec<f32>, Request)> {
        match self.answer()? {
            Answer::Exchanged(records, request) => Ok((records, request)),
            _ => Err(Error::invalid("no request was begun")),
        }
    }

    pub(crate) fn commit(&mut self) -> Result<()> {
        self.call(Call::Commit)?;
        self.answer().map(|_| ())
    }

    pub(crate) fn counters(&mut self) -> Result<Value> {
        self.call(Call::Counters)?;
        match self.answer()? {
            Answer::Counters(value) => Ok(value),
            _ => Err(Error::invalid("a request is under way")),
        }
    }

    fn call(&mut self, call: Call) -> Result<()> {
        let calls = self.calls.as_ref().ok_or_else(gone)?;
        calls.send(call).map_err(|_| gone())
    }

    fn answer(&mut self) -> Result<Answer> {
        self.answers.recv().map_err(|_| gone())?
    }
}

impl Drop for StoreThread {
    fn drop(&mut self) {
        self.calls = None;
        if let Some(thread) = self.thread.take() {
            // A panic there was reported when its answer was missing.
            let _ = thread.join();
        }
    }
}

fn gone() -> Error {
    Error::new(tierbed_core::ErrorKind::Poisoned, "the store's thread ended")
}

struct StoreSide {
    store: AnyStore,
    first_rows: Vec<u32>,
}

impl StoreSide {
    fn answer(&mut self, call: Call) -> Result<Answer> {
        match call {
            Call::Exchange(request) => {
                self.write(&request)?;
                let records = self.read(&request)?;
                Ok(Answer::Exchanged(records, request))
            }
            Call::Commit => {
                self.store.get().commit("bench", &[])?;
                Ok(Answer::Committed)
            }
            Call::Counters => Ok(Answer::Counters(self.counters())),
        }
    }

    fn write(&mut self, request: &Request) -> Result<()> {
        let words = record_words(self.store.get().schema());
        let keys = Keys::new(&self.first_rows);
        let records = request.write_records.chunks_exact(words.max(1));
        let rows: Vec<RowWrite<'_>> = request
            .write_rows
            .iter()
            .zip(records)
            .scan(keys, |keys, (row, record)| {
                Some(RowWrite { key: keys.key(*row), record: cast_slice(record) })
            })
            .collect();
        rows.chunks(WRITE_ROWS).try_for_each(|rows| self.store.get().write(rows))
    }

    fn read(&mut self, request: &Request) -> Result<Vec<f32>> {
        let schema = self.store.get().schema().clone();
        let words = record_words(&schema);
        let mut keys = Keys::new(&self.first_rows);
        let keys: Vec<RowKey> = request.read_rows.iter().map(|row| keys.key(*row)).collect();
        let mut records = vec![0.0f32; keys.len() * words];
        self.store.get().read(&keys, &mut |at, found| {
            let Some(record) = records.get_mut(at * words..(at + 1) * words) else {
                return Ok(());
            };
            match (found, keys.get(at)) {
                (Some(bytes), _) if bytes.len() == 4 * words => {
                    bytemuck::cast_slice_mut(record).copy_from_slice(bytes);
                }
                (Some(bytes), _) => {
                    return Err(Error::corruption("store gave a record of another length")
                        .with("bytes", bytes.len()));
                }
                (None, Some(key)) => init_record(schema.table(key.table)?, key.row.0, record),
                (None, None) => {}
            }
            Ok(())
        })?;
        Ok(records)
    }

    // Tells the store what was brought, as the engine's look-ahead does.
    fn observe(&mut self, brought: &Brought) -> Result<()> {
        let Brought { window, window_batches, batch_len } = brought;
        let first_rows = &self.first_rows;
        let visit = |sink: &mut dyn FnMut(RowKey)| {
            let mut keys = Keys::new(first_rows);
            let keys: Vec<RowKey> = window.rows.iter().map(|row| keys.key(*row)).collect();
            let accesses = window.entries.iter().filter_map(|entry| keys.get(*entry as usize));
            accesses.for_each(|key| sink(*key));
        };
        let accesses = window.entries.len() as u64;
        self.store.get().observe(&Ahead {
            batches_buffered: *window_batches,
            accesses_buffered: accesses,
            sample_count: u64::from(*window_batches) * *batch_len as u64,
            access_count: accesses,
            visit_accesses: &visit,
        })
    }

    fn counters(&mut self) -> Value {
        let stats = self.store.get().stats();
        let record_bytes = 4 * record_words(self.store.get().schema()) as u64;
        let rows = u64::from(self.first_rows.last().copied().unwrap_or(0));
        let mut counters = json!({
            "device_read_count": stats.io.read_count,
            "device_read_bytes": stats.io.read_bytes,
            "device_write_bytes": stats.io.write_bytes,
            "changed_bytes": stats.rows_written * record_bytes,
            "rows_read": stats.rows_read,
            "rows_written": stats.rows_written,
            "live_bytes": rows * record_bytes,
            "disk_bytes": stats.disk_bytes,
        });
        if let (Some(counters), Value::Object(extra)) =
            (counters.as_object_mut(), self.store.extra())
        {
            counters.extend(extra);
        }
        counters
    }
}

pub(crate) fn record_words(schema: &Schema) -> usize {
    schema.tables().first().map_or(0, |table| table.record_words())
}

/// Turns ascending row numbers into keys.
#[derive(Debug, Clone)]
pub(crate) struct Keys<'a> {
    first_rows: &'a [u32],
    table: usize,
}

impl<'a> Keys<'a> {
    pub(crate) fn new(first_rows: &'a [u32]) -> Self {
        Self { first_rows, table: 0 }
    }

    pub(crate) fn key(&mut self, row: u32) -> RowKey {
        while self.first_rows.get(self.table + 1).is_some_and(|first| *first <= row) {
            self.table += 1;
        }
        let first = self.first_rows.get(self.table).copied().unwrap_or(0);
        RowKey::new(TableId(self.table as u32), RowId(u64::from(row.saturating_sub(first))))
    }
}
