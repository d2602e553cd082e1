//! Checkpoints of the window engine: everything durable together, or nothing.
//!
//! A checkpoint is the store's commit plus one attachment of the engine's own: step counters
//! and hyperparameters per table. What the caller attaches (dense parameters, data position,
//! generator states) is committed in the same instant.

use serde::{Deserialize, Serialize};
use tierbed_core::store::{Attachment, CommitInfo};
use tierbed_core::{Error, Result, TrainStore};

use crate::attachments::check_names;
use crate::hypers::Hypers;
use crate::window::engine::WindowEngine;

/// The engine's attachment; names that start with `_` are the house's own.
const RUNS: &str = "_engine.json";

#[derive(Debug, Serialize, Deserialize)]
struct Runs {
    tables: Hypers,
}

impl WindowEngine {
    /// Writes dirty rows and commits them with `attachments` as `name`; returns the number.
    ///
    /// # Errors
    /// `NoSpace` leaves the last checkpoint in force and training may go on; after `Io` the
    /// store is poisoned: reopen it at the last checkpoint.
    pub fn checkpoint(&mut self, name: &str, attachments: &[Attachment<'_>]) -> Result<u64> {
        self.poison.check()?;
        check_names(attachments)?;
        if let Some(buffer) = &mut self.buffer {
            buffer.flush(&mut self.store)?;
        }
        let runs = self.runs_json()?;
        let vocabularies = self.flush_vocabularies()?;
        let mut all = vec![Attachment { name: RUNS, bytes: runs.as_bytes() }];
        all.extend(vocabularies.iter().map(|(name, bytes)| Attachment { name, bytes }));
        all.extend_from_slice(attachments);
        self.store.commit(name, &all)?;
        let Some(info) = self.store.last_commit() else { panic!("a commit leaves a number") };
        Ok(info.number)
    }

    /// Returns number and name of the last checkpoint.
    #[must_use]
    pub fn last_checkpoint(&self) -> Option<&CommitInfo> {
        self.store.last_commit()
    }

    /// Reads an attachment of the last checkpoint.
    ///
    /// # Errors
    /// `Corruption` when it fails its checksum, `Io` from the device.
    pub fn attachment(&mut self, name: &str) -> Result<Option<Vec<u8>>> {
        self.store.attachment(name)
    }

    /// Returns the names of the caller's attachments of the last checkpoint.
    ///
    /// # Errors
    /// `Unsupported` by a store that does not know them.
    pub fn attachment_names(&self) -> Result<Vec<String>> {
        let mut names = self.store.attachment_names()?;
        names.retain(|name| !name.starts_with('_'));
        Ok(names)
    }

    fn runs_json(&self) -> Result<String> {
        assert_eq!(self.hypers.len(), self.schema.tables().len(), "every table has its steps");
        let runs = Runs { tables: self.hypers.clone() };
        serde_json::to_string(&runs)
            .map_err(|cause| Error::invalid("counters cannot be written").with("cause", cause))
    }

    /// Takes over step counters and hyperparameters of the last checkpoint.
    pub(crate) fn restore_runs(&mut self) -> Result<()> {
        let damaged = || Error::corruption("the engine's attachment is damaged").with("name", RUNS);
        let table_count = self.schema.tables().len();
        self.hypers = Hypers::fresh(table_count);
        let Some(bytes) = self.store.attachment(RUNS)? else { return Ok(()) };
        let runs: Runs =
            serde_json::from_slice(&bytes).map_err(|cause| damaged().with("cause", cause))?;
        if runs.tables.len() != table_count {
            return Err(damaged().with("tables", runs.tables.len()));
        }
        self.hypers = runs.tables;
        Ok(())
    }
}
