//! The window engine behind the automatic choice, and what it knows of the order left.

use std::path::Path;
use std::sync::Arc;

use serde_json::{json, Value};
use tierbed_core::store::{Attachment, CommitInfo};
use tierbed_core::{Bags, Result, RowId, Schema, TableId, TableSchema};
use tierbed_io::FsFolder;
use tierbed_kernels::{FeatureLayout, Grads, Hyper};
use tierbed_snapshot::{PageLayout, Report};
use tierbed_store::CommitLog;

use crate::auto::noting::NotingEngine;
use crate::auto::stats::budget_json;
use crate::auto::tables::Tables;
use crate::batch_token::BatchToken;
use crate::engine::{Access, OwnRows, TableRows, TrainEngine};
use crate::planned::AnySink;
use crate::window::changes::{DeltaCount, Room, Since};
use crate::window::changes_file::Rows;
use crate::window::noted::NOTED_ROWS;
use crate::window::publish::PublishProgress;
use crate::window::vocabularies::VocabularyStats;
use crate::window::{DeltaBase, WindowEngine};

/// Where rows stand beside the last checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Standing {
    /// Nothing was ever written, so that another order may still be chosen.
    Untouched,
    /// Rows changed, or there is no checkpoint.
    Changed,
    /// As in the last checkpoint.
    Durable,
}

/// The engine that needs no plan.
pub(crate) struct Windowed {
    pub(crate) engine: WindowEngine,
    pub(crate) standing: Standing,
    /// Last checkpoint of the order left, until there is one of this engine.
    pub(crate) past: Option<CommitLog>,
}

impl Windowed {
    /// Wraps an engine that was opened at its last checkpoint, if it has one.
    pub(crate) fn opened(engine: WindowEngine) -> Self {
        let standing = match engine.last_checkpoint() {
            Some(_) => Standing::Durable,
            None => Standing::Changed,
        };
        Self { engine, standing, past: None }
    }

    pub(crate) fn is_untouched(&self) -> bool {
        self.standing == Standing::Untouched
    }

    pub(crate) fn has_open_tables(&self) -> bool {
        !self.engine.stats().vocabularies.tables.is_empty()
    }

    /// Notes that the engine has a checkpoint of its rows as they are.
    pub(crate) fn note_checkpoint(&mut self) {
        self.standing = Standing::Durable;
        self.past = None;
    }

    /// Returns the tables and their hyperparameters.
    pub(crate) fn tables(&self) -> Tables {
        Tables { schema: self.engine.schema().clone(), hypers: self.engine.hypers.clone() }
    }
}

impl TrainEngine for Windowed {
    fn schema(&self) -> &Schema {
        self.engine.schema()
    }

    fn add_table(&mut self, table: TableSchema) -> Result<TableId> {
        self.engine.add_table(table)
    }

    fn set_hyper(&mut self, table: TableId, hyper: Hyper) -> Result<()> {
        self.engine.set_hyper(table, hyper)
    }

    fn steps_done(&mut self, table: TableId) -> Result<u64> {
        Ok(self.engine.hyper(table)?.step)
    }

    fn lookup(
        &mut self,
        plan: &FeatureLayout,
        bags: &Bags<'_>,
        out: &mut [f32],
        _is_training: bool,
    ) -> Result<Option<BatchToken>> {
        self.engine.lookup(plan, bags, out).map(|()| None)
    }

    fn update(
        &mut self,
        plan: &FeatureLayout,
        bags: &Bags<'_>,
        grads: Grads<'_>,
        _found: Option<BatchToken>,
    ) -> Result<()> {
        self.standing = Standing::Changed;
        self.engine.update(plan, bags, grads)
    }

    fn prefetch(&mut self, plan: &FeatureLayout, batches: &[Bags<'_>]) -> Result<usize> {
        self.engine.prefetch(plan, batches)
    }

    fn end_lookahead(&mut self) {
        self.engine.end_lookahead();
    }

    fn rows_of(&mut self, table: TableId, access: Access) -> Result<OwnRows<'_>> {
        self.engine.schema().table(table)?;
        if access != Access::Read {
            self.standing = Standing::Changed;
        }
        Ok(OwnRows { engine: &mut self.engine, table })
    }

    fn scan_all(&mut self, sink: &mut AnySink<'_>) -> Result<()> {
        let mut record = Vec::new();
        for table in (0..self.engine.schema().tables().len() as u32).map(TableId) {
            self.engine.scan_rows(table, &mut |row, bytes| {
                record.clear();
                record.extend(bytes.as_chunks().0.iter().map(|word| f32::from_le_bytes(*word)));
                sink(table, row, &record)
            })?;
        }
        Ok(())
    }

    fn checkpoint(&mut self, name: &str, attachments: &[Attachment<'_>]) -> Result<u64> {
        self.standing = Standing::Changed;
        let number = self.engine.checkpoint(name, attachments)?;
        self.note_checkpoint();
        Ok(number)
    }

    fn last_checkpoint(&self) -> Option<&CommitInfo> {
        self.engine.last_checkpoint().or(self.past.as_ref().and_then(CommitLog::info))
    }

    fn attachment(&mut self, name: &str) -> Result<Option<Vec<u8>>> {
        match &self.past {
            Some(past) => past.attachment(name),
            None => self.engine.attachment(name),
        }
    }

    fn attachment_names(&self) -> Result<Vec<String>> {
        match &self.past {
            Some(past) => Ok(callers_names(past)),
            None => self.engine.attachment_names(),
        }
    }

    fn verify(&mut self) -> Result<u64> {
        self.engine.verify()
    }

    fn publish_placed(
        &mut self,
        path: &Path,
        layout: PageLayout,
        attachments: &[Attachment<'_>],
        progress: &mut PublishProgress<'_>,
    ) -> Result<Report> {
        self.engine.publish(Arc::new(FsFolder::create(path)?), layout, attachments, progress)
    }

    fn publish_delta(
        &mut self,
        path: &Path,
        base: DeltaBase,
        attachments: &[Attachment<'_>],
        progress: &mut PublishProgress<'_>,
    ) -> Result<Report> {
        self.engine.publish_delta(Arc::new(FsFolder::create(path)?), base, attachments, progress)
    }

    fn stats(&mut self) -> Result<Value> {
        let stats = self.engine.stats();
        Ok(json!({
            "order": {"kind": "window"},
            "steps": stats.step_count,
            "isa": stats.isa,
            "disk_bytes": stats.store.disk_bytes,
            "store": stats.store,
            "buffer": stats.buffer,
            "vocabularies": stats.vocabularies,
            "changes": stats.changes,
            "budget": budget_json(&[self.engine.budget().report()]),
        }))
    }

    fn vocabularies(&self) -> VocabularyStats {
        self.engine.stats().vocabularies
    }
}

impl NotingEngine for Windowed {
    fn noted_since(&mut self, identities: &[String]) -> Result<Since<Rows>> {
        // A row is noted when it is written.
        self.engine.release_buffer()?;
        Ok(self.engine.store.changes.rows_since(identities))
    }

    fn scan_noted(&mut self, rows: &Rows, sink: &mut AnySink<'_>) -> Result<()> {
        for (&table, rows) in rows {
            let table = TableId(table);
            let mut rows = rows.iter().map(RowId);
            loop {
                let chunk: Vec<RowId> = rows.by_ref().take(NOTED_ROWS).collect();
                if chunk.is_empty() {
                    break;
                }
                let mut taken = Ok(());
                self.engine.visit_listed(table, &chunk, &mut |at, record| {
                    if let (true, Some(&row)) = (taken.is_ok(), chunk.get(at)) {
                        taken = sink(table, row, record);
                    }
                })?;
                taken?;
            }
        }
        Ok(())
    }

    fn note_published(&mut self, identity: &str) -> Result<()> {
        let WindowEngine { store, budget, .. } = &mut self.engine;
        store.changes.published(identity, Room::of(budget));
        Ok(())
    }

    fn count_delta(&mut self, delta: DeltaCount) -> Result<()> {
        self.engine.store.changes.count_delta(delta);
        Ok(())
    }
}

/// Returns the names of the caller's attachments in the commit of `log` that is in force.
pub(crate) fn callers_names(log: &CommitLog) -> Vec<String> {
    let mut names = log.attachment_names();
    names.retain(|name| !name.starts_with('_'));
    names
}
