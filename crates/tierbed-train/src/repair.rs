//! Repair of a store whose commit in force is lost or damaged: which commits are still whole.
//!
//! Every commit whose manifest lies in the folder is opened in a view, as if it were in force, and
//! every checksum of it is checked. What is whole may be put in force by hand: one small file is
//! replaced, atomically; nothing is ever removed here. The next opening of the store removes what
//! belongs to other commits, as always.
//!
//! ```text
//! commit-000007.manifest  view with CURRENT of 7  opened, verified  "7, epoch-2, 3 tables, ..."
//! shard<n>.commit-...     view with SHARDS of all of one number     the same
//! ```

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use serde::Serialize;
use tierbed_core::store::CommitInfo;
use tierbed_core::{Error, ErrorKind, Result, Schema, TableId, TableSchema};
use tierbed_io::{Folder, FsFolder, ViewFolder};
use tierbed_store::kept::{self, Kept};
use tierbed_store::mark::{read_mark, write_mark, MARK_FILE};
use tierbed_store::shards::{
    encode_file, prefix, read_file, shard_of_name, ShardsFile, SHARDS_FILE,
};
use tierbed_store::{CommitLog, FoundCommit};

use crate::auto::look::lock_if_possible;
use crate::auto::moving::{has_moved, WINDOW_FOLDER};
use crate::auto::options::OrderConfig;
use crate::folders::with_enough_memory;
use crate::sharded::ShardedEngine;

/// What manifests call the backends over RocksDB.
const ROCKSDB: &str = "rocksdb";

/// A commit of a store, in force or not, or a kept checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Candidate {
    /// Its number; of several shards, that of each.
    pub number: u64,
    /// Number of the last checkpoint that it gives back: a step in its log has a later one.
    pub last_number: u64,
    /// The name that the last checkpoint was given.
    pub name: String,
    /// Whether the store opens at it now.
    pub is_in_force: bool,
    /// Whether it is a kept checkpoint, to which opening the store goes back by name.
    pub is_kept: bool,
    /// Why it cannot be put in force; `None` when every checksum of it is right.
    pub damage: Option<String>,
    /// What it gives back.
    pub tables: Vec<CandidateTable>,
    /// Names of its attachments.
    pub attachments: Vec<String>,
    /// Pages that were checked.
    pub pages: u64,
}

/// A table as of a commit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CandidateTable {
    /// Its name.
    pub name: String,
    /// Its rows, written or not.
    pub row_count: u64,
    /// Steps that its optimizer did; unknown where the commit is damaged.
    pub steps: Option<u64>,
}

/// Lists every commit and kept checkpoint of the store at `path`, each checked; changes nothing.
///
/// # Errors
/// `Invalid` when there is no such folder, or none of a store; `Closed` when a process has the
/// store open; `Io` from the folder.
pub fn candidates(path: &Path) -> Result<Vec<Candidate>> {
    let place = Place::open(path)?;
    let _lock = lock_if_possible(place.folder.as_ref())?;
    place.candidates()
}

/// Puts commit `number` of the store at `path` in force, after it was checked.
///
/// # Errors
/// `Invalid` when there is no such commit, `Corruption` when it is damaged, `Closed` when a process
/// has the store open; nothing has changed then.
pub fn put_in_force(path: &Path, number: u64) -> Result<Candidate> {
    let place = Place::open(path)?;
    let _lock = place.folder.lock()?;
    place.refuse_restoring()?;
    let damaged = |cause: String| {
        Error::corruption("this commit is damaged")
            .with("number", number)
            .with("cause", cause)
            .with("remedy", "choose another one of `tierbed repair FOLDER`")
    };
    let pointer = place.pointer_of(number).map_err(|error| match error.kind() {
        ErrorKind::Corruption => damaged(error.to_string()),
        _ => error,
    })?;
    let Some(text) = pointer else {
        let numbers: Vec<_> = place.numbers()?.iter().map(u64::to_string).collect();
        return Err(Error::invalid("no such commit in this folder")
            .with("number", number)
            .with("found", numbers.join(", ")));
    };
    let candidate = place.candidate(number)?;
    if let Some(damage) = &candidate.damage {
        return Err(damaged(damage.clone()));
    }
    place.folder.write_atomic(place.pointer(), &text)?;
    if place.is_restoring()? {
        kept::give_up_restore(place.folder.as_ref())?;
    }
    // Steps that the log no longer holds are given up.
    if place.folder.read(MARK_FILE)?.is_some() {
        write_mark(place.folder.as_ref(), candidate.last_number)?;
    }
    Ok(candidate)
}

/// The folder that has the rows, and how many shards share it.
struct Place {
    folder: Arc<dyn Folder>,
    /// None with one shard.
    shard_count: Option<usize>,
}

impl Place {
    fn open(path: &Path) -> Result<Self> {
        let outer = FsFolder::open(path)?;
        let inside = path.join(WINDOW_FOLDER);
        // Rows that left a plan; also when it is there that the pointer is lost.
        let is_inside = has_moved(&outer).unwrap_or(true) && inside.is_dir();
        let folder: Arc<dyn Folder> = match is_inside {
            true => Arc::new(FsFolder::open(inside)?),
            false => Arc::new(outer),
        };
        let names = folder.list()?;
        let last_shard = names.iter().filter_map(|name| shard_of_name(name)).max();
        Ok(Self { folder, shard_count: last_shard.map(|last| last + 1) })
    }

    fn refuse_restoring(&self) -> Result<()> {
        // One that is damaged stops every opening: it is given up for the commit that is wanted.
        match kept::can_be_finished(self.folder.as_ref())? && self.is_restoring()? {
            true => Err(Error::invalid("a checkpoint of this store is being restored")
                .with("remedy", "open the store, which finishes it")),
            false => Ok(()),
        }
    }

    fn is_restoring(&self) -> Result<bool> {
        Ok(self.folder.read(kept::RESTORE)?.is_some())
    }

    fn pointer(&self) -> &'static str {
        if self.shard_count.is_some() {
            SHARDS_FILE
        } else {
            CommitLog::CURRENT
        }
    }

    fn candidates(&self) -> Result<Vec<Candidate>> {
        let mut all = Vec::new();
        for number in self.numbers()? {
            all.push(self.candidate(number)?);
        }
        for name in kept::kept_names(self.folder.as_ref())? {
            all.push(self.kept(&name)?);
        }
        if all.is_empty() {
            return Err(Error::invalid("no commit of a store lies in this folder")
                .with("remedy", "name the folder of a store, or restore it from a copy"));
        }
        Ok(all)
    }

    // With shards: numbers that every shard has.
    fn numbers(&self) -> Result<BTreeSet<u64>> {
        let Some(shard_count) = self.shard_count else {
            return CommitLog::found_numbers(self.folder.as_ref());
        };
        let mut common: Option<BTreeSet<u64>> = None;
        for shard in 0..shard_count {
            let own = CommitLog::found_numbers(self.shard(shard)?.as_ref())?;
            common = Some(match common {
                Some(common) => common.intersection(&own).copied().collect(),
                None => own,
            });
        }
        Ok(common.unwrap_or_default())
    }

    // The files of a shard under the names they have in a store of one.
    fn shard(&self, shard: usize) -> Result<Arc<dyn Folder>> {
        let (names, prefix) = (self.folder.list()?, prefix(shard));
        let mut view = ViewFolder::empty(Arc::clone(&self.folder));
        for name in &names {
            if let Some(own) = name.strip_prefix(&prefix) {
                view = view.with_name(own, name);
            }
        }
        Ok(Arc::new(view))
    }

    fn found(&self, number: u64) -> Result<Vec<FoundCommit>> {
        let Some(shard_count) = self.shard_count else {
            return Ok(vec![CommitLog::found(self.folder.as_ref(), number)?]);
        };
        (0..shard_count)
            .map(|shard| CommitLog::found(self.shard(shard)?.as_ref(), number))
            .collect()
    }

    // What the file says that puts commit `number` in force.
    fn pointer_of(&self, number: u64) -> Result<Option<Vec<u8>>> {
        if !self.numbers()?.contains(&number) {
            return Ok(None);
        }
        let found = self.found(number)?;
        if self.shard_count.is_none() {
            return Ok(found.into_iter().next().map(|found| found.current.into_bytes()));
        }
        let current = read_file(self.folder.as_ref()).ok().flatten();
        encode_file(&shards_of(found, current)?).map(Some)
    }

    fn candidate(&self, number: u64) -> Result<Candidate> {
        let mut told = Candidate { number, ..Candidate::empty() };
        let in_force = self.folder.read(self.pointer()).ok().flatten();
        let mut is_named = false;
        let checked = self.found(number).and_then(|found| {
            for commit in &found {
                told.name.clone_from(&commit.manifest.name);
                told.tables.extend(tables_of(&commit.manifest.schema));
                let names = commit.manifest.attachments.iter().map(|meta| meta.name.clone());
                told.attachments.extend(names.filter(|name| !name.starts_with('_')));
            }
            let pointer = self.pointer_of(number)?.unwrap_or_default();
            is_named = in_force.as_ref() == Some(&pointer);
            let view = ViewFolder::of(Arc::clone(&self.folder))?;
            let view = without_pointers(view)?.with_bytes(self.pointer(), &pointer)?;
            let view: Arc<dyn Folder> = Arc::new(view);
            match found.iter().any(|commit| commit.manifest.backend == ROCKSDB) {
                true => look_beside(view),
                false => look_at(&view),
            }
        });
        told.take(checked);
        // Steps that were acknowledged and are not there keep the store from opening.
        let is_short = match read_mark(self.folder.as_ref()) {
            Ok(acknowledged) => acknowledged.unwrap_or(0) > told.last_number,
            Err(_) => true,
        };
        told.is_in_force = is_named && !is_short;
        Ok(told)
    }

    fn kept(&self, name: &str) -> Result<Candidate> {
        let mut told = Candidate { name: name.to_owned(), is_kept: true, ..Candidate::empty() };
        let folder = &self.folder;
        let checked = kept::read(folder.as_ref(), name).and_then(|kept: Kept| {
            told.number = kept.number;
            kept::verify_checkpoint(folder, name, &|_| Ok(0))?;
            let view = kept::view_of(folder, &kept)?;
            let found = CommitLog::found(view.as_ref(), kept.number)?;
            told.tables = tables_of(&found.manifest.schema);
            let names = found.manifest.attachments.into_iter().map(|meta| meta.name);
            told.attachments = names.filter(|name| !name.starts_with('_')).collect();
            look_at(&view)
        });
        told.take(checked);
        Ok(told)
    }
}

/// What an open store says of itself.
struct Look {
    pages: u64,
    last: Option<CommitInfo>,
    steps: Vec<(String, u64)>,
}

// RocksDB's own files lie in folders that no view shows; it checks them when it is opened.
fn look_beside(view: Arc<dyn Folder>) -> Result<Look> {
    let log = CommitLog::open(view, ROCKSDB)?;
    log.verify()?;
    Ok(Look { pages: 0, last: log.info().cloned(), steps: Vec::new() })
}

fn look_at(view: &Arc<dyn Folder>) -> Result<Look> {
    with_enough_memory(&mut |budget_bytes| {
        let config = OrderConfig::new(budget_bytes);
        let mut engine = ShardedEngine::open_in(Some(Arc::clone(view)), &config)?;
        let tables = engine.engine().schema().tables().to_vec();
        let mut steps = Vec::new();
        for (id, table) in (0u32..).map(TableId).zip(tables) {
            steps.push((table.name, engine.engine_mut().steps_done(id)?));
        }
        let last = engine.engine().last_checkpoint().cloned();
        Ok(Look { pages: engine.verify()?, last, steps })
    })
}

impl Candidate {
    fn empty() -> Self {
        Self {
            number: 0,
            last_number: 0,
            name: String::new(),
            is_in_force: false,
            is_kept: false,
            damage: None,
            tables: Vec::new(),
            attachments: Vec::new(),
            pages: 0,
        }
    }

    fn take(&mut self, checked: Result<Look>) {
        match checked {
            Ok(look) => {
                self.pages = look.pages;
                if let Some(last) = look.last {
                    self.last_number = last.number;
                    self.name = last.name;
                }
                for table in &mut self.tables {
                    let own = look.steps.iter().find(|(name, _)| *name == table.name);
                    table.steps = own.map(|(_, steps)| *steps);
                }
            }
            Err(error) => self.damage = Some(error.to_string()),
        }
    }
}

fn tables_of(schema: &Schema) -> Vec<CandidateTable> {
    let of = |table: &TableSchema| CandidateTable {
        name: table.name.clone(),
        row_count: table.row_count,
        steps: None,
    };
    schema.tables().iter().filter(|table| !table.is_own()).map(of).collect()
}

// Only the commit that is looked at is in force in the view, and no kept checkpoint is checked.
fn without_pointers(view: ViewFolder) -> Result<ViewFolder> {
    for name in view.list()? {
        let is_said_elsewhere = [kept::RESTORE, CommitLog::CURRENT, SHARDS_FILE, MARK_FILE];
        if name.starts_with("kept.") || is_said_elsewhere.contains(&name.as_str()) {
            view.remove(&name)?;
        }
    }
    Ok(view)
}

// Which table has which number is written in the lost file alone, but rows are found by name: one
// shard after the other will do, unless the file in force says it.
fn shards_of(found: Vec<FoundCommit>, in_force: Option<ShardsFile>) -> Result<ShardsFile> {
    let currents: Vec<String> = found.iter().map(|commit| commit.current.clone()).collect();
    let mut tables = Vec::new();
    for (shard, commit) in (0u32..).zip(found) {
        let own = commit.manifest.schema.tables().to_vec();
        tables.extend(own.into_iter().map(|table| (table, shard)));
    }
    if let Some(known) = in_force {
        let at = |name: &str| known.schema.id_of(name).map_or(u32::MAX, |id| id.0);
        tables.sort_by_key(|(table, _)| at(&table.name));
    }
    let (tables, shard_of) = tables.into_iter().unzip();
    Ok(ShardsFile { schema: Schema::new(tables)?, shard_of, currents })
}
