//! Writer of what is published: one snapshot, or one for each shard.

use std::sync::Arc;

use tierbed_core::{Budget, Error, Result, RowId, RowKey, Schema, TableId};
use tierbed_io::Folder;

use super::writer::ShardsWriter;
use crate::codecs::PageLayout;
use crate::delta::chain::BaseChain;
use crate::writer::{Report, SnapshotWriter};

/// Takes the rows of a publish.
#[derive(Debug)]
pub enum PublishWriter {
    /// Into one snapshot.
    Whole(Box<SnapshotWriter>),
    /// Into the snapshot of each shard.
    Shards(Box<ShardsWriter>),
}

impl PublishWriter {
    /// Starts what `layout` says in `folder`, which must be empty.
    ///
    /// # Errors
    /// As [`SnapshotWriter::create_placed`]; for shards also `Invalid` for a plan of other tables
    /// and `Unsupported` for open vocabularies.
    pub fn create(
        folder: Arc<dyn Folder>,
        schema: &Schema,
        mut layout: PageLayout,
        budget: &Budget,
    ) -> Result<Self> {
        match layout.shards.take() {
            None => {
                let writer = SnapshotWriter::create_placed(folder, schema, layout, budget)?;
                Ok(Self::Whole(Box::new(writer)))
            }
            Some(plan) => {
                let writer = ShardsWriter::create(folder, schema, layout, &plan, budget)?;
                Ok(Self::Shards(Box::new(writer)))
            }
        }
    }

    /// As [`SnapshotWriter::set_chain`].
    ///
    /// # Errors
    /// As there; `Unsupported` for shards.
    pub fn set_chain(&mut self, base: &BaseChain) -> Result<()> {
        match self {
            Self::Whole(writer) => writer.set_chain(base),
            Self::Shards(_) => Err(Error::unsupported("a delta is not divided into shards")
                .with("remedy", "publish in full, with --shards")),
        }
    }

    /// As [`SnapshotWriter::expect_rows`].
    ///
    /// # Errors
    /// As there.
    pub fn expect_rows(&mut self, table: TableId, stored_rows: u64) -> Result<()> {
        match self {
            Self::Whole(writer) => writer.expect_rows(table, stored_rows),
            Self::Shards(writer) => writer.expect_rows(table, stored_rows),
        }
    }

    /// As [`SnapshotWriter::push`]; rows of a table come together.
    ///
    /// # Errors
    /// As there.
    pub fn push(&mut self, table: TableId, row: RowId, weights: &[f32]) -> Result<()> {
        match self {
            Self::Whole(writer) => writer.push(table, row, weights),
            Self::Shards(writer) => writer.push(table, row, weights),
        }
    }

    /// Returns the bytes in which a row of `table` waits until it is pushed: those it has in the
    /// snapshot, or in shards, which are told apart by what they hold, those of its float32.
    ///
    /// # Errors
    /// `Invalid` for a table outside the schema.
    pub fn waiting_bytes(&self, table: TableId) -> Result<usize> {
        match self {
            Self::Whole(writer) => writer.code_bytes(table),
            Self::Shards(writer) => writer.weight_bytes(table),
        }
    }

    /// Fills `waiting`, [`waiting_bytes`](Self::waiting_bytes), with a row that is pushed later;
    /// false where the snapshot does not store it, so that it need not be pushed.
    ///
    /// # Errors
    /// Of [`push`](Self::push) those of the row.
    pub fn prepare(&mut self, key: RowKey, weights: &[f32], waiting: &mut [u8]) -> Result<bool> {
        match self {
            Self::Whole(writer) => writer.code(key, weights, waiting),
            Self::Shards(_) => {
                waiting.copy_from_slice(bytemuck::cast_slice(weights));
                Ok(true)
            }
        }
    }

    /// As [`push`](Self::push), of what [`prepare`](Self::prepare) made of a row.
    ///
    /// # Errors
    /// As there.
    pub fn push_prepared(&mut self, table: TableId, row: RowId, waiting: &[u8]) -> Result<()> {
        match self {
            Self::Whole(writer) => writer.push_code(table, row, waiting),
            Self::Shards(writer) => writer.push_bytes(table, row, waiting),
        }
    }

    /// As [`SnapshotWriter::attach`]; every shard has it.
    ///
    /// # Errors
    /// As there.
    pub fn attach(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        match self {
            Self::Whole(writer) => writer.attach(name, bytes),
            Self::Shards(writer) => writer.attach(name, bytes),
        }
    }

    /// As [`SnapshotWriter::finish`]; of shards all, or none.
    ///
    /// # Errors
    /// As there.
    pub fn finish(self) -> Result<Report> {
        match self {
            Self::Whole(writer) => writer.finish(),
            Self::Shards(writer) => writer.finish(),
        }
    }
}
