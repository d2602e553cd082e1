//! How do more cores than one train on one store?
//!
//! A [`ShardedEngine`] spreads whole tables over several engines in one folder, each with its
//! own part of the memory, and lets them work at the same time, each on a thread of its own.
//! Everything a caller sees is as with one engine: table ids, output, bits. One checkpoint holds
//! all shards: see [`council`].
//!
//! ```text
//!            ┌─ tables 0, 1, 2 ─▶ engine of shard 0 ─▶ shard0.*  ┐
//!  batch ────┤                                                   ├─▶ SHARDS
//!            └─ tables 3, 4 ────▶ engine of shard 1 ─▶ shard1.*  ┘
//! ```
//!
//! Not with several shards: leaving the forward order, checkpoints that are kept, deltas, open
//! vocabularies, a checkpoint of every step. One shard is an [`OrderedEngine`] and nothing more.

mod council;
mod crew;
mod folder;
mod front;
mod life;
mod many;
mod part;
mod split;
mod train;

use std::path::Path;
use std::sync::Arc;

use tierbed_core::{Error, Result};
use tierbed_io::{Folder, FsFolder};
use tierbed_trainstore::kept::finish_restore;
use tierbed_trainstore::shards::{read_file, SHARDS_MAX};
use tierbed_trainstore::CommitLog;

use crate::engine::OrderedEngine;
use crate::folders::check_folder;
use crate::moving::has_moved;
use crate::options::OrderConfig;
use many::Many;

/// Training on one shard or several. Calls need `&mut`: one at a time, in a fixed order, so that
/// equal calls give equal bits.
pub struct ShardedEngine(Shards);

enum Shards {
    One(Box<OrderedEngine>),
    Many(Box<Many>),
}

impl ShardedEngine {
    /// Opens the store at `path` as [`OrderedEngine::open`] does, with as many shards as
    /// `config` says, or as the folder has.
    ///
    /// # Errors
    /// As [`OrderedEngine::open`]; `Invalid` for another number of shards than the folder's,
    /// `Unsupported` for options that several shards do not have.
    pub fn open(path: Option<&Path>, config: &OrderConfig) -> Result<Self> {
        let folder: Option<Arc<dyn Folder>> = match path {
            Some(path) => Some(Arc::new(FsFolder::create(path)?)),
            None => None,
        };
        Self::open_in(folder, config)
    }

    /// Opens the store in `folder`; see [`open`](Self::open).
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_in(folder: Option<Arc<dyn Folder>>, config: &OrderConfig) -> Result<Self> {
        if let Some(folder) = &folder {
            finish_restore(folder, &check_folder)?;
        }
        let asked = config.shards.map(|shards| shards as usize);
        let stored = stored_shards(folder.as_deref(), asked)?;
        let shard_count = match (stored, asked) {
            (Some(stored), Some(asked)) if stored != asked => {
                return Err(Error::invalid("store has another number of shards")
                    .with("stored", stored)
                    .with("asked", asked)
                    .with("remedy", "open it with as many shards as it has, or without shards"));
            }
            (Some(stored), _) => stored,
            (None, asked) => asked.unwrap_or(1),
        };
        if shard_count == 0 || shard_count > SHARDS_MAX {
            return Err(Error::invalid("number of shards out of range")
                .with("shards", shard_count)
                .with("allowed", format_args!("1..={SHARDS_MAX}")));
        }
        Ok(Self(match shard_count {
            1 => Shards::One(Box::new(OrderedEngine::open_in(folder, config)?)),
            many => Shards::Many(Box::new(Many::open(folder, many, config)?)),
        }))
    }

    /// Wraps one engine: one shard.
    #[must_use]
    pub fn over(engine: OrderedEngine) -> Self {
        Self(Shards::One(Box::new(engine)))
    }

    /// Returns the engine of a store of one shard, for what several cannot do.
    ///
    /// # Errors
    /// `Unsupported` when there are several.
    pub fn single(&mut self) -> Result<&mut OrderedEngine> {
        match &mut self.0 {
            Shards::One(engine) => Ok(engine),
            Shards::Many(many) => {
                Err(Error::unsupported("a store of several shards cannot do this")
                    .with("shards", many.shard_count())
                    .with("remedy", "open a new store with one shard"))
            }
        }
    }
}

// How many shards the store in `folder` has; `None` when nothing was committed there, so that it
// may have as many as `asked`.
fn stored_shards(folder: Option<&dyn Folder>, asked: Option<usize>) -> Result<Option<usize>> {
    let Some(folder) = folder else { return Ok(None) };
    match read_file(folder)? {
        Some(file) if file.is_new() && asked.is_some_and(|asked| asked > 1) => Ok(None),
        Some(file) => Ok(Some(file.shard_count())),
        None if has_moved(folder)? => Ok(Some(1)),
        None => Ok(CommitLog::stored_backend(folder)?.map(|_| 1)),
    }
}
