//! Where rows come from: the folder of a snapshot, or the channel of a location.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tierbed_core::{Error, Result};
use tierbed_serve::{Follow, Following, Opener, Routing};
use tierbed_snapshot::Snapshot;

use crate::opening;
use crate::options::{Options, Versions};

/// What is served, opened.
#[derive(Debug)]
pub enum Source {
    /// A snapshot.
    Folder(Arc<Snapshot>),
    /// The version that a channel is at.
    Channel(Box<Following>),
    /// The servers of shards.
    Shards(Box<Routing>),
}

impl Source {
    /// Opens what `place` names, as the options say: a folder, or `LOCATION@CHANNEL`.
    ///
    /// # Errors
    /// `Invalid` for a place without a snapshot and options that do not fit it; those of
    /// [`Following::begin`].
    pub fn open(place: &str, options: &Options) -> Result<Self> {
        if let Some(gateway) = options.routing.gateway()? {
            return Ok(Self::Shards(Box::new(Routing::begin(&gateway)?)));
        }
        let Versions { local, poll, sync_bandwidth, swap_share } = &options.versions;
        let Some(local) = local else {
            if place.contains('@') && !Path::new(place).exists() {
                return Err(Error::invalid(
                    "the versions of a channel need a folder of this machine",
                )
                .with("found", place)
                .with("remedy", "add --local FOLDER; each server has its own"));
            }
            let snapshot = opening::open(Path::new(place), &options.reading)?;
            opening::record(&snapshot, &options.recording)?;
            return Ok(Self::Folder(snapshot));
        };
        if options.recording.record.is_some() {
            return Err(Error::invalid("queries of a channel that is followed cannot be recorded")
                .with("remedy", "record at a server of one version: its folder, without --local"));
        }
        let follow = Follow {
            poll: Duration::from_secs_f64(*poll),
            sync_bytes_per_s: sync_bandwidth.map(|size| size.0),
            swap_share: *swap_share,
            ..Follow::parse(place, local.clone())?
        };
        let reading = options.reading.clone();
        let opener = Opener::new(move |folder| opening::options(folder, &reading));
        let following = Following::begin(follow, opener)?;
        Ok(Self::Channel(Box::new(following)))
    }

    /// Returns what to tell operators when a channel's version could not be had.
    #[must_use]
    pub fn behind(&self) -> Option<String> {
        let Self::Channel(following) = self else { return None };
        let error = following.behind()?;
        Some(format!("version {} answers: {error}", following.version()))
    }

    /// Returns what answers first.
    #[must_use]
    pub fn snapshot(&self) -> Arc<Snapshot> {
        match self {
            Self::Folder(snapshot) => Arc::clone(snapshot),
            Self::Channel(following) => Arc::clone(following.snapshot()),
            Self::Shards(routing) => routing.snapshot(),
        }
    }
}
