//! A snapshot and the deltas upon it, by their manifests: all that a delta names of its base.
//!
//! No page and no index is read, so what a delta costs does not grow with the snapshot.

use tierbed_core::{Error, Result, Schema};
use tierbed_io::Folder;

use super::{applied_name, check_codecs, check_plain, check_successor, APPLIED};
use crate::codecs::TableCodecs;
use crate::layers::OVERLAYS_MAX;
use crate::manifest::Manifest;
use crate::snapshot::Snapshot;

/// A snapshot and the deltas upon it, the newest of which is what the next delta is made against.
#[derive(Debug, Clone)]
pub struct BaseChain {
    snapshot: Manifest,
    /// The delta that was applied to make the snapshot.
    applied: Option<String>,
    newest: Option<Manifest>,
    delta_count: usize,
}

impl BaseChain {
    /// Reads the manifest of the whole snapshot in `folder`.
    ///
    /// # Errors
    /// `Invalid` when it holds no snapshot or a delta, `Unsupported` when tables share pages,
    /// `Corruption` and `Io` from the manifest.
    pub fn read(folder: &dyn Folder) -> Result<Self> {
        let snapshot = Manifest::read(folder)?;
        snapshot.check_whole()?;
        check_plain(&snapshot)?;
        let applied = applied_name(snapshot.read_attachment(folder, APPLIED)?)?;
        Ok(Self { snapshot, applied, newest: None, delta_count: 0 })
    }

    /// Returns what `snapshot` answers from.
    ///
    /// # Errors
    /// As [`Snapshot::attachment`].
    pub(crate) fn of(snapshot: &Snapshot) -> Result<Self> {
        let (manifest, layers) = (snapshot.manifest(), snapshot.layers());
        let applied = manifest.read_attachment(snapshot.folder().as_ref(), APPLIED)?;
        Ok(Self {
            snapshot: manifest.clone(),
            applied: applied_name(applied)?,
            newest: layers.overlays.last().map(|newest| newest.manifest.clone()),
            delta_count: layers.overlays.len(),
        })
    }

    /// Puts the delta in `folder` upon those before, as [`Snapshot::apply`] does.
    ///
    /// # Errors
    /// `Invalid` when it was made against something else or is no delta, otherwise as
    /// [`read`](Self::read).
    pub fn push(&mut self, folder: &dyn Folder) -> Result<()> {
        let delta = Manifest::read(folder)?;
        check_plain(&delta)?;
        if delta.identity()? != self.identity()? {
            self.delta_count = self.below().kept(&delta)? + 1;
            self.newest = Some(delta);
        }
        Ok(())
    }

    /// Returns the tables of the newest delta, or of the snapshot.
    #[must_use]
    pub fn schema(&self) -> &Schema {
        self.newest.as_ref().map_or(&self.snapshot.schema, |newest| &newest.schema)
    }

    /// Returns the codecs of the snapshot.
    #[must_use]
    pub fn codecs(&self) -> &TableCodecs {
        &self.snapshot.codecs
    }

    /// Returns the identity of the newest delta, or of the snapshot.
    ///
    /// # Errors
    /// As [`Manifest::encode`].
    pub fn identity(&self) -> Result<String> {
        self.newest.as_ref().unwrap_or(&self.snapshot).identity()
    }

    /// Returns the identity of the delta that made the rows what they are: the newest one, or the
    /// one that was applied to make the snapshot.
    ///
    /// # Errors
    /// As [`Manifest::encode`].
    pub fn delta_identity(&self) -> Result<Option<String>> {
        match &self.newest {
            Some(newest) => newest.identity().map(Some),
            None => Ok(self.applied.clone()),
        }
    }

    fn below(&self) -> Below<'_> {
        Below {
            snapshot: &self.snapshot,
            newest: self.newest.as_ref(),
            delta_count: self.delta_count,
        }
    }
}

/// What a delta is to come upon.
pub(crate) struct Below<'a> {
    pub(crate) snapshot: &'a Manifest,
    /// The newest of `delta_count` deltas.
    pub(crate) newest: Option<&'a Manifest>,
    pub(crate) delta_count: usize,
}

impl Below<'_> {
    /// Checks that a delta fits; returns how many deltas stay below it.
    ///
    /// # Errors
    /// `Invalid` when it was made against something else, or is too much upon the snapshot.
    pub(crate) fn kept(&self, delta: &Manifest) -> Result<usize> {
        let Some(base) = &delta.base else {
            return Err(Error::invalid("folder holds a whole snapshot, not a delta")
                .with("remedy", "open it as a snapshot, or publish a delta against this one"));
        };
        let newest = self.newest.map(Manifest::identity).transpose()?;
        let is_next = newest.is_some() && newest == delta.base_delta;
        let kept = if is_next { self.delta_count } else { 0 };
        if !is_next && *base != self.snapshot.identity()? {
            return Err(Error::invalid("delta was not made against what answers now")
                .with("delta_of", base)
                .with("snapshot", self.snapshot.identity()?)
                .with("newest_delta", format_args!("{newest:?}"))
                .with(
                    "remedy",
                    "apply the deltas before it, or publish one against the snapshot",
                ));
        }
        if kept == OVERLAYS_MAX {
            return Err(Error::invalid("too many deltas lie upon the snapshot")
                .with("deltas", kept)
                .with(
                    "remedy",
                    "publish a delta against the snapshot itself, or publish in full",
                ));
        }
        let below = self.newest.filter(|_| is_next).unwrap_or(self.snapshot);
        check_successor(&below.schema, &delta.schema)?;
        check_codecs(&self.snapshot.schema, &self.snapshot.codecs, &delta.codecs)?;
        let dims =
            |schema: &Schema| schema.tables().iter().map(|table| table.dim).max().unwrap_or(1);
        if dims(&delta.schema) > dims(&self.snapshot.schema) {
            return Err(Error::invalid("delta has longer rows than any of the snapshot")
                .with("dim", dims(&delta.schema))
                .with("remedy", "publish in full, and open the result"));
        }
        Ok(kept)
    }
}
