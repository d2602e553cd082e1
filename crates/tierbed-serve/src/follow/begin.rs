//! The first version: pulled, or what is here already.

use std::collections::BTreeSet;
use std::sync::Arc;

use tierbed_core::{Error, ErrorKind, Result};
use tierbed_io::{Folder, FsFolder};
use tierbed_remote::{Bandwidth, Head, Link, Local, Location, Pull, Seq, Want};
use tierbed_snapshot::Snapshot;

use super::{Follow, Opener};

/// A channel, and its version that is open: what [`Server::follow`](crate::Server::follow) serves.
#[derive(Debug)]
pub struct Following {
    pub(super) follow: Follow,
    pub(super) location: Location,
    pub(super) local: Local,
    pub(super) pull: Pull,
    pub(super) opener: Opener,
    pub(super) snapshot: Arc<Snapshot>,
    /// The version that is open, and those that it is a delta on.
    pub(super) chain: Vec<Link>,
    /// Why it is not the channel's, if it is not.
    pub(super) behind: Option<Error>,
}

/// The folders of a version.
#[derive(Debug)]
pub(super) struct Folders {
    pub(super) base: FsFolder,
    /// Oldest first.
    pub(super) deltas: Vec<Arc<dyn Folder>>,
}

impl Folders {
    pub(super) fn open(local: &Local, chain: &[Link]) -> Result<Self> {
        let Some((base, deltas)) = chain.split_first() else { panic!("a chain has a version") };
        let base = FsFolder::open(local.version(base.seq))?;
        let deltas = deltas
            .iter()
            .map(|link| Ok(Arc::new(FsFolder::open(local.version(link.seq))?) as Arc<dyn Folder>));
        Ok(Self { base, deltas: deltas.collect::<Result<_>>()? })
    }
}

/// Returns the error of a version that says to be another one.
pub(super) fn not_named(link: &Link, found: &str) -> Error {
    Error::corruption("a version is not the one that HEAD names")
        .with("version", link.seq)
        .with("expected", &link.identity)
        .with("found", found)
        .with("remedy", "push the version again, or roll the channel back")
}

impl Following {
    /// Brings the version of the channel here and opens it; where it cannot be had, the one that
    /// was served last, or the newest that is whole here.
    ///
    /// # Errors
    /// `Closed` when another server has the folder; those of pulling where no version is here;
    /// those of opening it.
    pub fn begin(follow: Follow, opener: Opener) -> Result<Self> {
        follow.check()?;
        let location = Location::open(&follow.location)?;
        Self::begin_at(location, follow, opener)
    }

    /// As [`begin`](Self::begin), at a location that is open.
    ///
    /// # Errors
    /// As [`begin`](Self::begin).
    pub fn begin_at(location: Location, follow: Follow, opener: Opener) -> Result<Self> {
        follow.check()?;
        let local = Local::open(&follow.local)?;
        let bandwidth = match follow.sync_bytes_per_s {
            Some(bytes_per_s) => Bandwidth::new(bytes_per_s),
            None => Bandwidth::auto(local.path())?,
        };
        let bandwidth = Arc::new(bandwidth);
        let pull = Pull { retry: follow.retry, bandwidth, ..Pull::default() };
        let pulled = || -> Result<(Arc<Snapshot>, Head)> {
            let head = head_of(&location, &follow.channel)?;
            let bring = || {
                local.make_way(&head.chain)?;
                let want = Want::Chain(head.chain.clone());
                location.pull(&want, local.path(), &pull, &mut |_, _| Ok(()))
            };
            bring()?;
            let opened = match open(&local, &opener, &head.chain) {
                // What lies here rotted: it comes once more.
                Err(error) if error.kind() == ErrorKind::Corruption => {
                    head.chain.iter().try_for_each(|link| local.remove(link.seq))?;
                    bring()?;
                    open(&local, &opener, &head.chain)?
                }
                opened => opened?,
            };
            local.note(&follow.channel, &head)?;
            Ok((opened, head))
        };
        let (snapshot, chain, behind) = match pulled() {
            Ok((snapshot, head)) => (snapshot, head.chain, None),
            Err(error) => {
                let Some(chain) = local.newest(&follow.channel)? else {
                    return Err(nothing_here(error, &follow));
                };
                match open(&local, &opener, &chain) {
                    Ok(snapshot) => (snapshot, chain, Some(error)),
                    // Why the channel's version does not answer says more.
                    Err(other) => return Err(error.with("version_here", other)),
                }
            }
        };
        if behind.is_none() {
            let kept: BTreeSet<Seq> = chain.iter().map(|link| link.seq).collect();
            local.keep_only(&kept)?;
        }
        Ok(Self { follow, location, local, pull, opener, snapshot, chain, behind })
    }

    /// Returns what answers call the snapshot, whichever version it is.
    pub(crate) fn name(&self) -> String {
        let location = self.follow.location.trim_end_matches('/');
        location.rsplit('/').next().unwrap_or_default().to_owned()
    }

    /// Returns what answers first.
    #[must_use]
    pub fn snapshot(&self) -> &Arc<Snapshot> {
        &self.snapshot
    }

    /// Returns the version that answers first.
    #[must_use]
    pub fn version(&self) -> Seq {
        newest(&self.chain).seq
    }

    /// Returns why that is not where the channel is, if it could not be pulled.
    #[must_use]
    pub fn behind(&self) -> Option<&Error> {
        self.behind.as_ref()
    }
}

/// Reads where a channel is.
pub(super) fn head_of(location: &Location, channel: &str) -> Result<Head> {
    location.head(channel)?.ok_or_else(|| {
        Error::invalid("the channel that is followed is at no version")
            .with("channel", channel)
            .with("remedy", "publish to it, or follow one that `tierbed models list` names")
    })
}

pub(super) fn newest(chain: &[Link]) -> &Link {
    let Some(newest) = chain.last() else { panic!("a chain has a version") };
    newest
}

fn nothing_here(error: Error, follow: &Follow) -> Error {
    Error::new(error.kind(), "no version of the channel can be had, and none is here")
        .with("location", &follow.location)
        .with("channel", &follow.channel)
        .with("local", follow.local.display())
        .with("cause", error)
        .with("remedy", "see that the location can be reached, and that the channel has a version")
}

/// Opens a version from the folders where it lies.
fn open(local: &Local, opener: &Opener, chain: &[Link]) -> Result<Arc<Snapshot>> {
    let Folders { base, deltas } = Folders::open(local, chain)?;
    let options = opener.options(&base)?;
    let snapshot = Arc::new(Snapshot::open(Arc::new(base), &options)?);
    let generation = snapshot.apply_chain_with(deltas, |_| Ok(()))?;
    if generation.identity != newest(chain).identity {
        return Err(not_named(newest(chain), &generation.identity));
    }
    snapshot.view().ids()?;
    in_background(&snapshot)?;
    Ok(snapshot)
}

/// Starts what a snapshot does besides answering.
pub(super) fn in_background(snapshot: &Arc<Snapshot>) -> Result<()> {
    snapshot.refresh_in_background()?;
    snapshot.map_neighbours_in_background()
}
