//! A checkpoint of all shards, and rows by number.

use std::path::Path;
use std::sync::Arc;

use crate::planned::AnySink;
use crate::window::publish::PublishProgress;
use crate::window::rows::NewRows;
use serde_json::{json, Value};
use tierbed_core::store::{Attachment, CommitInfo};
use tierbed_core::{Budget, Result, TableId};
use tierbed_io::FsFolder;
use tierbed_snapshot::{PlacedTables, Report};

use super::crew::together;
use super::many::Many;
use crate::auto::engine::AutoEngine;
use crate::auto::publish::{publish_unsorted, Publication};

impl Many {
    /// See [`AutoEngine::checkpoint`]: in force for all shards at once, or for none.
    /// Attachments lie with the first shard. Any error poisons the store, a full disk too: other
    /// shards may have prepared theirs already.
    pub(super) fn checkpoint(&mut self, name: &str, attachments: &[Attachment<'_>]) -> Result<u64> {
        self.decide()?;
        let shares = std::iter::once(attachments).chain(std::iter::repeat(&[][..]));
        let jobs = self.seats().into_iter().zip(shares).collect();
        let made = together(&mut self.engines, false, jobs, |engine, (_seat, attachments)| {
            engine.checkpoint(name, attachments)
        });
        let numbers = self.poison.on_any(made)?;
        Ok(numbers.first().copied().unwrap_or(0))
    }

    /// See [`AutoEngine::last_checkpoint`].
    pub(super) fn last_checkpoint(&self) -> Option<&CommitInfo> {
        self.engines.first().and_then(AutoEngine::last_checkpoint)
    }

    /// See [`AutoEngine::attachment`].
    pub(super) fn attachment(&mut self, name: &str) -> Result<Option<Vec<u8>>> {
        self.engines.first_mut().map_or(Ok(None), |first| first.attachment(name))
    }

    /// See [`AutoEngine::attachment_names`].
    pub(super) fn attachment_names(&self) -> Result<Vec<String>> {
        self.engines.first().map_or(Ok(Vec::new()), AutoEngine::attachment_names)
    }

    /// See [`AutoEngine::verify`].
    pub(super) fn verify(&mut self) -> Result<u64> {
        let jobs = vec![(); self.engines.len()];
        let counts = together(&mut self.engines, false, jobs, |engine, ()| engine.verify())?;
        Ok(counts.iter().sum())
    }

    /// See [`AutoEngine::visit_rows`].
    pub(super) fn visit_rows(
        &mut self,
        table: TableId,
        first: u64,
        count: usize,
        visit: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<()> {
        let (engine, table) = self.engine_of(table)?;
        engine.visit_rows(table, first, count, visit)
    }

    /// See [`AutoEngine::gather_rows`].
    pub(super) fn gather_rows(
        &mut self,
        table: TableId,
        rows: &[i64],
        out: &mut [f32],
    ) -> Result<()> {
        let (engine, table) = self.engine_of(table)?;
        engine.gather_rows(table, rows, out)
    }

    /// See [`AutoEngine::write_rows`].
    pub(super) fn write_rows(
        &mut self,
        table: TableId,
        first: u64,
        rows: NewRows<'_>,
    ) -> Result<()> {
        let (engine, table) = self.engine_of(table)?;
        engine.write_rows(table, first, rows)
    }

    /// See [`AutoEngine::steps_done`].
    pub(super) fn steps_done(&mut self, table: TableId) -> Result<u64> {
        let (engine, table) = self.engine_of(table)?;
        engine.steps_done(table)
    }

    /// See [`AutoEngine::set_steps_done`].
    pub(super) fn set_steps_done(&mut self, table: TableId, steps: u64) -> Result<()> {
        let (engine, table) = self.engine_of(table)?;
        engine.set_steps_done(table, steps)
    }

    /// See [`AutoEngine::scan_all`]; one shard after another.
    pub(super) fn scan_all(&mut self, sink: &mut AnySink<'_>) -> Result<()> {
        self.decide()?;
        for (shard, engine) in self.engines.iter_mut().enumerate() {
            let tables: Vec<TableId> = self.split.tables_of(shard).map(|(id, _)| id).collect();
            engine.scan_all(&mut |own, row, record| {
                let table = tables.get(own.0 as usize).copied().unwrap_or(own);
                sink(table, row, record)
            })?;
        }
        Ok(())
    }

    /// See [`AutoEngine::publish_placed`]; rows of all shards are sorted together, in the
    /// memory kept aside for that.
    pub(super) fn publish_placed(
        &mut self,
        path: &Path,
        placed: Vec<PlacedTables>,
        attachments: &[Attachment<'_>],
        progress: &mut PublishProgress<'_>,
    ) -> Result<Report> {
        self.decide()?;
        let publication = Publication {
            schema: self.split.schema.clone(),
            folder: Arc::new(FsFolder::create(path)?),
            memory: Budget::new(self.config.aside_bytes()),
            placed,
        };
        publish_unsorted(publication, attachments, progress, &mut |sink| self.scan_all(sink))
    }

    /// See [`AutoEngine::stats`]: the order of the first shard, sums of what was counted, and
    /// under `shards` what each has counted.
    pub(super) fn stats(&mut self) -> Result<Value> {
        if self.engines.is_empty() {
            return Ok(json!({"order": {"kind": "window", "reason": null, "fallback_count": 0,
                                       "rows_moved": 0, "replan_count": 0}}));
        }
        let stats = self.engines.iter_mut().map(AutoEngine::stats);
        let stats = stats.collect::<Result<Vec<_>>>()?;
        let mut whole = stats.first().cloned().unwrap_or_else(|| json!({}));
        for of_shard in stats.iter().skip(1) {
            for name in ["disk_bytes", "store", "buffer", "budget"] {
                if let (Some(sum), Some(more)) = (whole.get_mut(name), of_shard.get(name)) {
                    add(sum, more);
                }
            }
        }
        if let Some(whole) = whole.as_object_mut() {
            whole.insert("shards".to_owned(), Value::Array(stats));
        }
        Ok(whole)
    }
}

// Adds numbers, however deep; words stay those of the first.
fn add(sum: &mut Value, more: &Value) {
    match (sum, more) {
        (Value::Object(sum), Value::Object(more)) => {
            for (name, value) in more {
                match sum.get_mut(name) {
                    Some(place) => add(place, value),
                    None => {
                        sum.insert(name.clone(), value.clone());
                    }
                }
            }
        }
        (sum, more) => {
            if let (Some(a), Some(b)) = (sum.as_u64(), more.as_u64()) {
                *sum = json!(a + b);
            } else if let (Some(a), Some(b)) = (sum.as_f64(), more.as_f64()) {
                *sum = json!(a + b);
            }
        }
    }
}
