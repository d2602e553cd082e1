//! What lies at a location: versions, channels, pins.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;
use tierbed_core::Result;

use crate::location::{is_whole, Location};
use crate::names::{Object, Seq, LEAVING};
use crate::objects::Listed;

/// What can be done with a version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// It can be served.
    Whole,
    /// It is being pushed, or its publisher ended before it was done.
    Unfinished,
    /// It is being pruned.
    Leaving,
}

/// A version of a list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Version {
    /// Its number.
    pub seq: Seq,
    /// Whether it can be served.
    pub state: State,
    /// Bytes of all its objects.
    pub bytes: u64,
    /// When the last of them was written, in seconds since 1970.
    pub written_at_s: u64,
    /// Channels that are at it.
    pub channels: Vec<String>,
    /// Channels that are at it, or at a delta on it.
    pub needed_by: Vec<String>,
    /// Whether it is pinned.
    pub is_pinned: bool,
}

/// A channel of a list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Channel {
    /// Its name.
    pub name: String,
    /// The versions that serve it, the one it is at last; none when its HEAD is damaged.
    pub chain: Vec<Seq>,
    /// When it was moved there, in seconds since 1970.
    pub written_at_s: Option<u64>,
    /// Why its HEAD cannot be read.
    pub damage: Option<String>,
}

/// Everything at a location.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Listing {
    /// The versions, oldest first.
    pub versions: Vec<Version>,
    /// The channels, by name.
    pub channels: Vec<Channel>,
}

/// Names at a location, sorted out.
#[derive(Debug, Default)]
pub(crate) struct Names {
    pub(crate) versions: BTreeMap<Seq, Vec<Listed>>,
    pub(crate) channels: BTreeSet<String>,
    pub(crate) pins: BTreeSet<Seq>,
}

impl Names {
    pub(crate) fn read(location: &Location) -> Result<Self> {
        let mut names = Self::default();
        for object in location.objects.list(None)? {
            match Object::of(&object.name) {
                Some(Object::Head { channel }) => {
                    names.channels.insert(channel.to_owned());
                }
                Some(Object::Pin(seq)) => {
                    names.pins.insert(seq);
                }
                Some(Object::OfVersion { seq, file }) => {
                    let name = file.to_owned();
                    names.versions.entry(seq).or_default().push(Listed { name, ..object });
                }
                // Whoever keeps other things there keeps them.
                None => {}
            }
        }
        Ok(names)
    }
}

pub(crate) fn state_of(objects: &[Listed]) -> State {
    match objects.iter().any(|object| object.name == LEAVING) {
        true => State::Leaving,
        false if is_whole(objects) => State::Whole,
        false => State::Unfinished,
    }
}

/// Returns when the last of `objects` was written; a mark of pruning makes no version younger.
pub(crate) fn written_at_s(objects: &[Listed]) -> u64 {
    let own = objects.iter().filter(|object| object.name != LEAVING);
    own.map(|object| object.modified_s).max().unwrap_or(0)
}

impl Location {
    /// Lists versions and channels. A HEAD that cannot be read is told, and no error.
    ///
    /// # Errors
    /// `Io` and `Invalid` from the store.
    pub fn list(&self) -> Result<Listing> {
        let names = Names::read(self)?;
        let mut listing = Listing::default();
        let mut heads = Vec::new();
        for name in names.channels {
            // It is gone only if somebody removed it by hand.
            let Some(found) = self.found_head(&name)? else { continue };
            let (head, damage) = match found.head {
                Ok(head) => (Some(head), None),
                Err(cause) => (None, Some(cause)),
            };
            let links = head.iter().flat_map(|head| &head.chain);
            listing.channels.push(Channel {
                name: name.clone(),
                chain: links.map(|link| link.seq).collect(),
                written_at_s: head.as_ref().map(|head| head.written_at_s),
                damage,
            });
            heads.extend(head.map(|head| (name, head)));
        }
        for (seq, objects) in names.versions {
            let of = |is: &dyn Fn(&crate::Head) -> bool| {
                let heads = heads.iter().filter(|(_, head)| is(head));
                heads.map(|(name, _)| name.clone()).collect()
            };
            listing.versions.push(Version {
                seq,
                state: state_of(&objects),
                bytes: objects.iter().map(|object| object.bytes).sum(),
                written_at_s: written_at_s(&objects),
                channels: of(&|head| head.seq() == seq),
                needed_by: of(&|head| head.names(seq)),
                is_pinned: names.pins.contains(&seq),
            });
        }
        Ok(listing)
    }
}
