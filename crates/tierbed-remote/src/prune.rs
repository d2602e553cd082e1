//! Removing versions that nobody needs, and pins that keep some.
//!
//! Kept are versions that a HEAD names, was at within the time to keep, or that are younger than
//! that; pinned ones; and what any of them is a delta on.
//!
//! ```text
//! mark ─▶ look at HEADs and pins again ─▶ remove: manifest first, mark last
//! ```
//!
//! Whoever moves a channel writes its HEAD first and looks for marks then. So one of both sees the
//! other, and no HEAD ends up naming what is removed.

use std::collections::BTreeSet;

use serde::Serialize;
use tierbed_core::{Error, Result};

use crate::head::Head;
use crate::listing::{written_at_s, Names};
use crate::location::{is_whole, Location};
use crate::names::{Seq, CLAIM, LEAVING, PARTS_NAME};
use crate::objects::{Listed, When};
use crate::parts::manifest_of;
use crate::Progress;

/// A mark that is older was left by a prune that is dead.
const MARK_S_MAX: u64 = 3600;

/// What to prune.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Prune {
    /// Versions this young are kept, and those that a channel was at within this time.
    pub keep_s: u64,
    /// Seconds since 1970.
    pub now_s: u64,
}

/// What was pruned.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Pruned {
    /// Versions that are gone.
    pub removed: Vec<Seq>,
    /// Versions that are left.
    pub kept: Vec<Seq>,
    /// Bytes of all objects that are gone.
    pub bytes_removed: u64,
}

impl Location {
    /// Keeps a version, and what it is a delta on, until it is unpinned.
    ///
    /// # Errors
    /// `Invalid` when it is not whole; `Io` from the store.
    pub fn pin(&self, seq: Seq) -> Result<()> {
        self.check_whole([seq])?;
        self.objects.put(&seq.pin(), b"", &When::Always)?;
        // As for HEADs: who prunes marks first, and looks at pins then.
        if let Err(error) = self.check_whole([seq]) {
            self.objects.remove(&seq.pin())?;
            return Err(error);
        }
        Ok(())
    }

    /// Lets a version be pruned again; false when it was not pinned.
    ///
    /// # Errors
    /// `Io` from the store.
    pub fn unpin(&self, seq: Seq) -> Result<bool> {
        let was_pinned = self.objects.get(&seq.pin(), u64::MAX)?.is_some();
        self.objects.remove(&seq.pin())?;
        Ok(was_pinned)
    }

    /// Removes what nobody needs.
    ///
    /// # Errors
    /// `Corruption` when a HEAD, or the parts of a version that is kept, cannot be read: nothing is
    /// removed then. `Io` from the store.
    pub fn prune(&self, what: Prune, progress: &mut Progress<'_>) -> Result<Pruned> {
        let names = Names::read(self)?;
        let kept = self.kept(&names, what)?;
        self.unmark(&names, &kept, what)?;
        let leaving: Vec<Seq> =
            names.versions.keys().copied().filter(|seq| !kept.contains(seq)).collect();
        for seq in &leaving {
            self.objects.put(&seq.object(LEAVING), b"", &When::Always)?;
        }
        let needed = match leaving.is_empty() {
            true => BTreeSet::new(),
            false => self.kept(&Names::read(self)?, Prune { keep_s: 0, ..what })?,
        };
        let mut pruned = Pruned { kept: kept.into_iter().collect(), ..Pruned::default() };
        for (at, seq) in leaving.iter().enumerate() {
            progress(at as u64, leaving.len() as u64)?;
            if needed.contains(seq) {
                self.objects.remove(&seq.object(LEAVING))?;
                pruned.kept.push(*seq);
                continue;
            }
            let objects = self.objects_of(*seq)?;
            pruned.bytes_removed += objects.iter().map(|object| object.bytes).sum::<u64>();
            self.remove_version(*seq, &objects)?;
            pruned.removed.push(*seq);
        }
        pruned.kept.sort_unstable();
        progress(leaving.len() as u64, leaving.len() as u64)?;
        Ok(pruned)
    }

    /// Returns the versions that somebody needs.
    fn kept(&self, names: &Names, what: Prune) -> Result<BTreeSet<Seq>> {
        let is_young = |at_s: u64| what.now_s.saturating_sub(at_s) < what.keep_s;
        let mut kept = BTreeSet::new();
        // Versions whose own `parts.json` says what they are deltas on.
        let mut roots = names.pins.clone();
        for channel in &names.channels {
            let Some(head) = self.head(channel)? else { continue };
            let Head { chain, past, .. } = head;
            kept.extend(chain.iter().map(|link| link.seq));
            let past = past.iter().filter(|past| is_young(past.until_s));
            roots.extend(past.map(|past| past.seq));
        }
        for (seq, objects) in &names.versions {
            if is_young(written_at_s(objects)) {
                roots.insert(*seq);
            }
        }
        // What is a delta on another one has all of its chain, so the newest come first.
        let newest_first = names.versions.iter().rev();
        for (seq, objects) in newest_first.filter(|(seq, _)| roots.contains(seq)) {
            if kept.insert(*seq) && is_whole(objects) {
                let (parts, _) = self.parts_at(*seq).map_err(|error| unsure(error, *seq))?;
                kept.extend(parts.ancestors.iter().map(|link| link.seq));
            }
        }
        Ok(kept)
    }

    /// Takes back marks that a killed prune left on versions that are kept, and are whole.
    fn unmark(&self, names: &Names, kept: &BTreeSet<Seq>, what: Prune) -> Result<()> {
        for (seq, objects) in names.versions.iter().filter(|(seq, _)| kept.contains(seq)) {
            let mark = objects.iter().find(|object| object.name == LEAVING);
            let is_old = |mark: &Listed| what.now_s.saturating_sub(mark.modified_s) > MARK_S_MAX;
            if mark.is_some_and(is_old) && is_whole(objects) {
                self.objects.remove(&seq.object(LEAVING))?;
            }
        }
        Ok(())
    }

    /// Removes objects of a version: what makes it whole first, what says that it leaves last.
    pub(crate) fn remove_version(&self, seq: Seq, objects: &[Listed]) -> Result<()> {
        let rank = |name: &str| match name {
            _ if manifest_of([name].into_iter()).is_some() => 0,
            PARTS_NAME => 1,
            CLAIM => 3,
            LEAVING => 4,
            _ => 2,
        };
        let mut objects: Vec<&Listed> = objects.iter().collect();
        objects.sort_by_key(|object| rank(&object.name));
        objects.iter().try_for_each(|object| self.objects.remove(&seq.object(&object.name)))
    }
}

fn unsure(error: Error, seq: Seq) -> Error {
    let what = "cannot tell what a version that is kept is a delta on";
    Error::new(error.kind(), what)
        .with("version", seq)
        .with("cause", error)
        .with("remedy", "roll channels back that are at it, and unpin it, then prune with --keep 0")
}
