//! Training of one store on several cores: whole tables divided over shards.
//!
//! A [`ShardedEngine`] spreads whole tables over several engines in one folder, each with its
//! own part of the memory, and lets them work at the same time, each on a thread of its own.
//! Everything a caller sees is as with one engine: table ids, output, bits. One checkpoint holds
//! all shards: see [`coordinator`].
//!
//! ```text
//!            ┌─ tables 0, 1, 2 ─▶ engine of shard 0 ─▶ shard0.*  ┐
//!  batch ────┤                                                   ├─▶ SHARDS
//!            └─ tables 3, 4 ────▶ engine of shard 1 ─▶ shard1.*  ┘
//! ```
//!
//! Not with several shards: leaving the forward order, checkpoints that are kept, open
//! vocabularies, a checkpoint of every step. One shard is an [`AutoEngine`] and nothing more.

mod coordinator;
mod folder;
mod noting;
mod part;
mod planning;
mod run_shards;
mod shard_set;
mod split;
mod stats;
mod train;

use std::path::Path;
use std::sync::Arc;

use tierbed_core::{Error, ErrorKind, Result, TableId, TableSchema};
use tierbed_io::{Folder, FsFolder};
use tierbed_store::kept::finish_restore;
use tierbed_store::shards::{read_file, SHARDS_MAX};
use tierbed_store::CommitLog;

use crate::auto::engine::AutoEngine;
use crate::auto::look::{never_at_rest, read_only, Look, Looking, ATTEMPTS_MAX};
use crate::auto::moving::has_moved;
use crate::auto::options::OrderConfig;
use crate::engine::PlanFollower;
use crate::folders::check_folder;
use crate::window::WindowEngine;
use shard_set::ShardSet;

/// Training on one shard or several. Calls need `&mut`: one at a time, in a fixed order, so that
/// equal calls give equal bits.
pub struct ShardedEngine {
    shards: Shards,
    /// Only looked at: nothing may change.
    look: Option<Look>,
}

enum Shards {
    One(Box<AutoEngine>),
    Many(Box<ShardSet>),
}

impl Shards {
    fn engine(&self) -> &dyn PlanFollower {
        match self {
            Self::One(engine) => engine.as_ref(),
            Self::Many(engine) => engine.as_ref(),
        }
    }

    fn engine_mut(&mut self) -> &mut dyn PlanFollower {
        match self {
            Self::One(engine) => engine.as_mut(),
            Self::Many(engine) => engine.as_mut(),
        }
    }
}

impl ShardedEngine {
    /// Opens the store at `path` as [`AutoEngine::open`] does, with as many shards as
    /// `config` says, or as the folder has.
    ///
    /// # Errors
    /// As [`AutoEngine::open`]; `Invalid` for another number of shards than the folder's,
    /// `Unsupported` for options that several shards do not have.
    pub fn open(path: Option<&Path>, config: &OrderConfig) -> Result<Self> {
        let folder: Option<Arc<dyn Folder>> = match path {
            Some(path) if config.read_only => return Self::look_at(path, config),
            Some(path) => Some(Arc::new(FsFolder::create(path)?)),
            None => None,
        };
        Self::open_in(folder, config)
    }

    // Opens a view of the folder; begins again as long as the owner commits meanwhile.
    fn look_at(path: &Path, config: &OrderConfig) -> Result<Self> {
        for _ in 0..ATTEMPTS_MAX {
            let Looking { view, look } = match &config.kept {
                Some(name) => Look::at_kept(path, name)?,
                None => Look::begin(path)?,
            };
            match Self::open_in(Some(view), config) {
                Ok(opened) => return Ok(Self { look: Some(look), ..opened }),
                Err(_) if look.is_outdated()? => {}
                Err(error) => return Err(error),
            }
        }
        Err(never_at_rest())
    }

    /// Checks that the store may be changed.
    ///
    /// # Errors
    /// `Unsupported` when it was opened to be read only.
    pub fn check_writable(&self) -> Result<()> {
        match &self.look {
            Some(_) => Err(read_only()),
            None => Ok(()),
        }
    }

    /// Returns the engine, for calls that change nothing.
    #[must_use]
    pub fn engine(&self) -> &dyn PlanFollower {
        self.shards.engine()
    }

    /// Returns the engine, for calls that change no row of the store.
    pub fn engine_mut(&mut self) -> &mut dyn PlanFollower {
        self.shards.engine_mut()
    }

    /// Returns the engine, for calls that change the store.
    ///
    /// # Errors
    /// `Unsupported` when it was opened to be read only.
    pub fn writable(&mut self) -> Result<&mut dyn PlanFollower> {
        self.check_writable()?;
        Ok(self.shards.engine_mut())
    }

    /// Adds a table, or finds the identical one; see [`TrainEngine::add_table`].
    ///
    /// # Errors
    /// As there; `Unsupported` for a new table of a store opened to be read only.
    ///
    /// [`TrainEngine::add_table`]: crate::TrainEngine::add_table
    pub fn add_table(&mut self, table: TableSchema) -> Result<TableId> {
        match self.engine().schema().id_of(&table.name) {
            Some(_) => self.engine_mut().add_table(table),
            None => self.writable()?.add_table(table),
        }
    }

    /// Checks every checksum of the store and of what it keeps; returns the number of pages (or
    /// chunks) checked. A store that is only looked at is opened again when its owner commits
    /// meanwhile.
    ///
    /// # Errors
    /// `Corruption`, naming the first bad place; `Closed` when the owner commits all the time.
    pub fn verify(&mut self) -> Result<u64> {
        for _ in 0..ATTEMPTS_MAX {
            let verified = self.engine_mut().verify();
            match (verified, &self.look) {
                (Err(_), Some(look)) if look.is_outdated()? => {
                    let path = look.path().to_owned();
                    let config = self.config();
                    *self = Self::look_at(&path, &config)?;
                }
                (verified, _) => return verified,
            }
        }
        Err(never_at_rest())
    }

    fn config(&self) -> OrderConfig {
        match &self.shards {
            Shards::One(engine) => engine.config.clone(),
            Shards::Many(many) => many.config.clone(),
        }
    }

    /// Opens the store in `folder`; see [`open`](Self::open).
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_in(folder: Option<Arc<dyn Folder>>, config: &OrderConfig) -> Result<Self> {
        Self::open_whole(folder, config).map_err(from_a_copy)
    }

    fn open_whole(folder: Option<Arc<dyn Folder>>, config: &OrderConfig) -> Result<Self> {
        if let Some(folder) = &folder {
            finish_restore(folder, &check_folder)?;
        }
        let asked = config.shards.map(|shards| shards as usize);
        let stored = stored_shards(folder.as_deref(), asked)?;
        let shard_count = match (stored, asked) {
            (Some(stored), Some(asked)) if stored != asked => {
                return Err(another_number(stored, asked));
            }
            (Some(stored), _) => stored,
            (None, asked) => asked.unwrap_or(1),
        };
        if shard_count == 0 || shard_count > SHARDS_MAX {
            return Err(Error::invalid("number of shards out of range")
                .with("shards", shard_count)
                .with("allowed", format_args!("1..={SHARDS_MAX}")));
        }
        if config.device.is_some() && config.storage_thread == Some(true) {
            return Err(Error::unsupported("windows on a device have no storage thread")
                .with("remedy", "leave storage_thread out, or open the store without a device"));
        }
        if shard_count > 1 && config.device.is_some() {
            return Err(Error::unsupported("windows of several shards are not held by a device")
                .with("shards", shard_count)
                .with("remedy", "open a new store with one shard, or open it without a device"));
        }
        let shards = match shard_count {
            1 => Shards::One(Box::new(AutoEngine::open_in(folder, config)?)),
            many => {
                // Of one shard by itself, `None` would not know of the others.
                let pays = || config.pays_for_threads(many);
                let storage_thread = config.storage_thread.or_else(|| (!pays()).then_some(false));
                let config = OrderConfig { storage_thread, ..config.clone() };
                Shards::Many(Box::new(ShardSet::open(folder, many, &config)?))
            }
        };
        Ok(Self { shards, look: None })
    }

    /// Wraps one engine: one shard.
    #[must_use]
    pub fn over(engine: AutoEngine) -> Self {
        Self { shards: Shards::One(Box::new(engine)), look: None }
    }

    /// Returns the engine that can publish while it trains; `None` where there are several, and
    /// where [`AutoEngine::background_mut`] has none.
    pub fn background_mut(&mut self) -> Option<&mut WindowEngine> {
        match (&mut self.shards, &self.look) {
            (Shards::One(engine), None) => engine.background_mut(),
            _ => None,
        }
    }

    /// Returns the engine of a store of one shard, for what several cannot do.
    ///
    /// # Errors
    /// `Unsupported` when there are several.
    pub fn single(&mut self) -> Result<&mut AutoEngine> {
        match &mut self.shards {
            Shards::One(engine) => Ok(engine),
            Shards::Many(many) => {
                Err(Error::unsupported("a store of several shards cannot do this")
                    .with("shards", many.shard_count())
                    .with("remedy", "open a new store with one shard"))
            }
        }
    }
}

// Files are read in many places, most of which cannot know what would bring them back.
fn from_a_copy(error: Error) -> Error {
    let is_mended = error.context().iter().any(|(name, _)| *name == "remedy");
    match error.kind() {
        ErrorKind::Corruption if !is_mended => {
            error.with("remedy", "restore the store's folder from a copy")
        }
        _ => error,
    }
}

fn another_number(stored: usize, asked: usize) -> Error {
    Error::invalid("store has another number of shards")
        .with("stored", stored)
        .with("asked", asked)
        .with("remedy", "open it with as many shards as it has, or without shards")
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
