//! Stores written in Python, below the engine: bulk calls on a bridge object.
//!
//! The bridge (`tierbed.backends.bridge.Bridge`) turns bytes into numpy arrays, checks what the
//! store answers and sorts exceptions into our kinds; here the waist's rules are kept: schema,
//! commit numbers, checksums of attachments, poisoning. The engine runs without the GIL; it is
//! taken for each call.

use std::path::Path;

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use serde::{Deserialize, Serialize};
use tierbed_core::checksum::crc32c;
use tierbed_core::conformance::check_row_store;
use tierbed_core::stats::{IoStats, StoreStats};
use tierbed_core::store::{check_keys, Attachment, CommitInfo, RowSink, ScanSink};
use tierbed_core::{
    Error, ErrorKind, Poison, Result, RowId, RowKey, RowStore, RowWrite, Schema, TableId,
    TableSchema, TrainStore,
};
use tierbed_store::check_records;

use crate::ending::attached;
use crate::errors::run;

/// Rows of one call to Python.
const CALL_ROWS: usize = 16 * 1024;
/// Bytes of records of one call of a scan.
const SCAN_BYTES: usize = 1 << 20;
const SCHEMA: &str = "_schema";
const COMMIT: &str = "_commit";

#[derive(Serialize, Deserialize)]
struct StoredCommit {
    number: u64,
    name: String,
}

/// A store behind a Python object.
pub(crate) struct PythonStore {
    bridge: Py<PyAny>,
    schema: Schema,
    info: Option<CommitInfo>,
    stats: StoreStats,
    poison: Poison,
}

impl PythonStore {
    /// Takes over what the object holds of its last commit.
    ///
    /// # Errors
    /// `Corruption` when that is not what a commit wrote; errors of the object.
    pub(crate) fn open(bridge: Py<PyAny>) -> Result<Self> {
        let mut store = Self {
            bridge,
            schema: Schema::default(),
            info: None,
            stats: StoreStats::default(),
            poison: Poison::default(),
        };
        let damaged = |cause: serde_json::Error| {
            Error::corruption("blobs of the Python store are damaged").with("cause", cause)
        };
        let schema = store.blob(SCHEMA)?;
        let commit = store.blob(COMMIT)?;
        if let (Some(schema), Some(commit)) = (schema, commit) {
            let schema: Schema = serde_json::from_slice(&schema).map_err(damaged)?;
            let commit: StoredCommit = serde_json::from_slice(&commit).map_err(damaged)?;
            for table in schema.tables() {
                store.admit(table.clone())?;
            }
            store.info = Some(CommitInfo { number: commit.number, name: commit.name });
        }
        Ok(store)
    }

    fn call<T>(
        &self,
        what: &'static str,
        work: impl FnOnce(&Bound<'_, PyAny>) -> PyResult<T>,
    ) -> Result<T> {
        attached(|py| {
            let bridge = self.bridge.bind(py);
            work(bridge).map_err(|raised| of_python(bridge, what, &raised))
        })
    }

    // A full disk or a bad argument leave the store as it was; after others nobody knows.
    fn settle<T>(&mut self, result: Result<T>) -> Result<T> {
        if let Err(error) = &result {
            if !matches!(error.kind(), ErrorKind::NoSpace | ErrorKind::Invalid) {
                self.poison.note(error);
            }
        }
        result
    }

    fn admit(&mut self, table: TableSchema) -> Result<TableId> {
        let mut schema = self.schema.clone();
        let id = schema.add(table.clone())?;
        if (id.0 as usize) < self.schema.tables().len() {
            return Ok(id);
        }
        let arguments = (id.0, table.name.clone(), table.row_count, table.record_bytes());
        self.call("add_table", |bridge| bridge.call_method1("add_table", arguments).map(drop))?;
        self.schema = schema;
        Ok(id)
    }

    fn blob(&self, name: &str) -> Result<Option<Vec<u8>>> {
        self.call("blob", |bridge| bridge.call_method1("blob", (name,))?.extract())
    }

    fn read_some(&mut self, first: usize, keys: &[RowKey], sink: &mut RowSink<'_>) -> Result<()> {
        let Some(table) = keys.first().map(|key| key.table) else { return Ok(()) };
        let record_bytes = self.schema.table(table)?.record_bytes();
        let rows = row_bytes(keys.iter().map(|key| key.row));
        let (records, present) = self.call("read", |bridge| {
            let rows = PyBytes::new(bridge.py(), &rows);
            bridge.call_method1("read", (table.0, rows))?.extract::<(Vec<u8>, Vec<u8>)>()
        })?;
        if records.len() != keys.len() * record_bytes || present.len() != keys.len() {
            return Err(Error::corruption("the Python store answered with another length"));
        }
        for (at, (record, is_present)) in
            records.chunks_exact(record_bytes).zip(present).enumerate()
        {
            self.stats.rows_absent += u64::from(is_present == 0);
            sink(first + at, (is_present != 0).then_some(record))?;
        }
        self.stats.rows_read += keys.len() as u64;
        Ok(())
    }

    fn write_some(&mut self, rows: &[RowWrite<'_>]) -> Result<()> {
        let Some(table) = rows.first().map(|row| row.key.table) else { return Ok(()) };
        let ids = row_bytes(rows.iter().map(|row| row.key.row));
        let records: Vec<u8> = rows.iter().flat_map(|row| row.record).copied().collect();
        self.call("write", |bridge| {
            let (ids, records) =
                (PyBytes::new(bridge.py(), &ids), PyBytes::new(bridge.py(), &records));
            bridge.call_method1("write", (table.0, ids, records)).map(drop)
        })?;
        self.stats.rows_written += rows.len() as u64;
        Ok(())
    }

    fn scan_table(&mut self, table: TableId, sink: &mut ScanSink<'_>) -> Result<()> {
        let schema = self.schema.table(table)?;
        let (record_bytes, row_count) = (schema.record_bytes(), schema.row_count);
        let count_max = (SCAN_BYTES / record_bytes).max(1);
        let mut after = -1i64;
        loop {
            let (ids, records) = self.call("scan", |bridge| {
                bridge
                    .call_method1("scan", (table.0, after, count_max))?
                    .extract::<(Vec<u8>, Vec<u8>)>()
            })?;
            let (ids, _) = ids.as_chunks::<8>();
            if ids.is_empty() {
                return Ok(());
            }
            if records.len() != ids.len() * record_bytes || ids.len() > count_max {
                return Err(Error::corruption("the Python store answered with another length"));
            }
            for (id, record) in ids.iter().zip(records.chunks_exact(record_bytes)) {
                let row = i64::from_le_bytes(*id);
                if row <= after || row as u64 >= row_count {
                    return Err(Error::corruption("the Python store scans out of order or range")
                        .with("table_id", table.0)
                        .with("row", row));
                }
                after = row;
                sink(RowId(row as u64), record)?;
            }
        }
    }

    fn commit_all(&mut self, name: &str, attachments: &[Attachment<'_>]) -> Result<()> {
        let number = self.info.as_ref().map_or(1, |info| info.number + 1);
        let failed = |cause| Error::invalid("commit cannot be written").with("cause", cause);
        let schema = serde_json::to_vec(&self.schema).map_err(failed)?;
        let stored = StoredCommit { number, name: name.to_owned() };
        let commit = serde_json::to_vec(&stored).map_err(failed)?;
        let mut blobs = vec![(SCHEMA.to_owned(), schema), (COMMIT.to_owned(), commit)];
        for attachment in attachments {
            let name = blob_name(attachment.name);
            if attachment.name.is_empty() || blobs.iter().any(|(other, _)| *other == name) {
                return Err(Error::invalid("attachment given twice or without a name")
                    .with("attachment", attachment.name));
            }
            let crc = crc32c(attachment.bytes).to_le_bytes();
            blobs.push((name, [&crc, attachment.bytes].concat()));
        }
        self.call("commit", |bridge| {
            let py = bridge.py();
            let blobs: Vec<_> =
                blobs.iter().map(|(name, bytes)| (name, PyBytes::new(py, bytes))).collect();
            bridge.call_method1("commit", (blobs,)).map(drop)
        })?;
        self.info = Some(CommitInfo { number, name: name.to_owned() });
        self.stats.commit_count += 1;
        Ok(())
    }
}

fn blob_name(attachment: &str) -> String {
    format!("att.{attachment}")
}

fn row_bytes(rows: impl Iterator<Item = RowId>) -> Vec<u8> {
    rows.flat_map(|row| row.0.to_le_bytes()).collect()
}

/// Turns what Python raised into an error; the bridge knows its kind.
fn of_python(bridge: &Bound<'_, PyAny>, what: &'static str, raised: &PyErr) -> Error {
    let value = raised.value(bridge.py());
    let kind = bridge.call_method1("kind_of", (value,)).and_then(|kind| kind.extract::<String>());
    let kind = match kind.as_deref() {
        Ok("invalid") => ErrorKind::Invalid,
        Ok("corruption") => ErrorKind::Corruption,
        Ok("no_space") => ErrorKind::NoSpace,
        Ok("closed") => ErrorKind::Closed,
        Ok("unsupported") => ErrorKind::Unsupported,
        _ => ErrorKind::Io,
    };
    Error::new(kind, "the Python store failed").with("call", what).with("cause", raised)
}

impl Drop for PythonStore {
    fn drop(&mut self) {
        // While the interpreter ends there is nothing to call any more.
        let _ = Python::try_attach(|py| self.bridge.bind(py).call_method0("close").map(drop));
    }
}

impl RowStore for PythonStore {
    fn schema(&self) -> &Schema {
        &self.schema
    }

    fn read(&mut self, keys: &[RowKey], sink: &mut RowSink<'_>) -> Result<()> {
        self.poison.check()?;
        check_keys(&self.schema, keys.iter().copied())?;
        let mut first = 0;
        for same in keys.chunk_by(|a, b| a.table == b.table) {
            for some in same.chunks(CALL_ROWS) {
                self.read_some(first, some, sink)?;
                first += some.len();
            }
        }
        Ok(())
    }

    fn scan(&mut self, table: TableId, sink: &mut ScanSink<'_>) -> Result<()> {
        self.poison.check()?;
        self.scan_table(table, sink)
    }

    fn stats(&self) -> StoreStats {
        let disk_bytes =
            self.call("disk_bytes", |bridge| bridge.call_method0("disk_bytes")?.extract::<u64>());
        let io = IoStats { engine: "python", ..IoStats::default() };
        StoreStats { io, disk_bytes: disk_bytes.unwrap_or(0), ..self.stats.clone() }
    }
}

impl TrainStore for PythonStore {
    fn add_table(&mut self, table: TableSchema) -> Result<TableId> {
        self.poison.check()?;
        self.admit(table)
    }

    fn write(&mut self, rows: &[RowWrite<'_>]) -> Result<()> {
        self.poison.check()?;
        check_keys(&self.schema, rows.iter().map(|row| row.key))?;
        check_records(&self.schema, rows)?;
        for same in rows.chunk_by(|a, b| a.key.table == b.key.table) {
            for some in same.chunks(CALL_ROWS) {
                let written = self.write_some(some);
                self.settle(written)?;
            }
        }
        Ok(())
    }

    fn commit(&mut self, name: &str, attachments: &[Attachment<'_>]) -> Result<()> {
        self.poison.check()?;
        let committed = self.commit_all(name, attachments);
        self.settle(committed)
    }

    fn last_commit(&self) -> Option<&CommitInfo> {
        self.info.as_ref()
    }

    fn attachment_names(&self) -> Result<Vec<String>> {
        Err(Error::unsupported("a store written in Python does not tell its attachments' names"))
    }

    fn attachment(&mut self, name: &str) -> Result<Option<Vec<u8>>> {
        let Some(stored) = self.blob(&blob_name(name))? else { return Ok(None) };
        match stored.split_first_chunk::<4>() {
            Some((crc, bytes)) if u32::from_le_bytes(*crc) == crc32c(bytes) => {
                Ok(Some(bytes.to_vec()))
            }
            _ => Err(Error::corruption("attachment checksum mismatch").with("attachment", name)),
        }
    }

    fn verify(&mut self) -> Result<u64> {
        self.poison.check()?;
        for table in 0..self.schema.tables().len() as u32 {
            self.scan_table(TableId(table), &mut |_, _| Ok(()))?;
        }
        Ok(0)
    }

    fn path(&self) -> Option<&Path> {
        None
    }
}

/// Runs the conformance kit of the waist against the bridges that `make` returns; `keeps`: a new
/// one continues at the last commit of the one before.
#[pyfunction]
pub(crate) fn check_python_store(
    py: Python<'_>,
    make: Py<PyAny>,
    seed: u64,
    step_count: usize,
    keeps: bool,
) -> PyResult<()> {
    run(py, || {
        let open = || -> Result<Box<dyn TrainStore>> {
            let bridge = attached(|py| make.call0(py)).map_err(|raised| {
                Error::new(ErrorKind::Io, "the Python store cannot be made").with("cause", raised)
            })?;
            Ok(Box::new(PythonStore::open(bridge)?))
        };
        let store = open()?;
        let mut reopen = |old: Box<dyn TrainStore>, _| {
            drop(old);
            open()
        };
        check_row_store(store, if keeps { Some(&mut reopen) } else { None }, seed, step_count)
    })
}
