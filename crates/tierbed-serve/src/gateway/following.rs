//! The thread that looks at members, maps and generations, and moves a gateway to the newest.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{channel, Receiver, Sender};
use std::sync::{Arc, Weak};
use std::time::Duration;

use tierbed_core::env::Clock;
use tierbed_core::{Error, ErrorKind, Result};
use tierbed_snapshot::shards::{ShardMap, SHARDS_NAME};
use tierbed_snapshot::View;
use tokio::runtime::Handle;

use super::access::Access;
use super::head::Head;
use super::members::{Addresses, Source};
use super::pool::Pool;
use super::replica::Tag;
use super::rows::ShardedRows;
use super::{Gateway, GatewayOptions, MissingShard, Now, Routing, RowType};
use crate::routes::Service;
use crate::stamp::Stamp;

/// Time between two looks.
const PAUSE: Duration = Duration::from_millis(50);
/// Looks between two questions to DNS.
const LOOKS_PER_NAME: u64 = 100;
/// Maps of publishes that are kept: that which answers, and those that come.
const MAPS_MAX: usize = 3;

/// See the module documentation.
#[derive(Debug)]
pub(super) struct Follower {
    pool: Arc<Pool>,
    runtime: Handle,
    route: PathBuf,
    route_stamp: Option<Stamp>,
    maps: BTreeMap<u64, Arc<ShardMap>>,
    members: Source,
    members_stamp: Option<Stamp>,
    addresses: Addresses,
    looks: u64,
    row_type: RowType,
    missing: MissingShard,
    time_max: Duration,
}

/// What the shards have in common.
#[derive(Debug)]
struct Common {
    tag: Tag,
    /// Of each shard.
    identities: Vec<Arc<str>>,
}

impl Follower {
    pub(super) fn new(
        options: &GatewayOptions,
        clock: &Arc<dyn Clock>,
        runtime: &Handle,
    ) -> Result<Self> {
        let is_file = options.route.file_name().is_some_and(|name| name == SHARDS_NAME);
        let route = match is_file {
            true => options.route.clone(),
            false => options.route.join(SHARDS_NAME),
        };
        let route_stamp = Stamp::of(&route);
        let map = Arc::new(ShardMap::open(&route)?);
        let access = Arc::new(Access::open(&options.access)?);
        let pool = Arc::new(Pool::new(map.shard_count(), access, clock));
        let mut follower = Self {
            pool,
            runtime: runtime.clone(),
            route,
            route_stamp,
            maps: BTreeMap::from([(map.publish(), map)]),
            members: Source::parse(&options.members)?,
            members_stamp: None,
            addresses: Addresses::new(),
            looks: 0,
            row_type: options.row_type,
            missing: options.missing,
            time_max: options.time_max,
        };
        follower.read_members()?;
        Ok(follower)
    }

    pub(super) fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// Waits for a server of every shard, and returns what they answer from.
    pub(super) fn first(&mut self, wait: Duration) -> Result<Now> {
        let clock = Arc::clone(self.pool.clock());
        let end_us = clock.now_us().saturating_add(wait.as_micros() as u64);
        loop {
            let made = self.common().map(|common| self.make(&common));
            let is_over = clock.now_us() >= end_us;
            match made {
                Some(Err(error)) if error.kind() == ErrorKind::Closed && !is_over => {}
                Some(made) => return made,
                None if is_over => return Err(self.missing_shards(wait)),
                None => {}
            }
            std::thread::sleep(PAUSE);
            self.read_members()?;
        }
    }

    fn missing_shards(&self, wait: Duration) -> Error {
        let is_there =
            |shard: &&super::pool::Shard| shard.replicas().iter().any(|replica| replica.is_live());
        let missing = self.pool.shards.iter().filter(|shard| !is_there(shard));
        let missing: Vec<_> = missing.map(|shard| shard.number().to_string()).collect();
        let error = Error::new(ErrorKind::Closed, "the shards do not answer together")
            .with("waited", format_args!("{wait:?}"));
        match missing.is_empty() {
            true => error
                .with("publish", format_args!("{:?}", self.maps.keys().collect::<Vec<_>>()))
                .with("remedy", "give the shards.json of the publish that the shards serve"),
            false => error
                .with("shards_without_server", missing.join(", "))
                .with("remedy", "start a server of each shard, at an address that members name"),
        }
    }

    /// Finds the newest generation that a live server of every shard has, and whose map is known.
    fn common(&self) -> Option<Common> {
        let of_shards: Vec<_> = self.pool.shards.iter().map(generations_of).collect();
        let (first, _) = of_shards.split_first()?;
        // How far each is behind the newest, at the shard where it is farthest.
        let behind = |tag: Tag| {
            let places = of_shards.iter().map(|known| known.iter().position(|(of, _)| *of == tag));
            places.collect::<Option<Vec<_>>>()?.into_iter().max()
        };
        let known = first.iter().filter(|(tag, _)| self.maps.contains_key(&tag.publish));
        let (_, tag) = known.filter_map(|(tag, _)| Some((behind(*tag)?, *tag))).min()?;
        let identities = of_shards.iter().map(|known| {
            known.iter().find(|(of, _)| *of == tag).map(|(_, identity)| Arc::clone(identity))
        });
        Some(Common { tag, identities: identities.collect::<Option<_>>()? })
    }

    /// Makes what answers from a generation.
    fn make(&self, common: &Common) -> Result<Now> {
        let Common { tag, identities } = common;
        let Some(map) = self.maps.get(&tag.publish) else {
            panic!("a generation without a map was not passed over");
        };
        let Some(first) = identities.first() else { panic!("a map has shards") };
        let shard = self.pool.shard(0);
        let head = self.runtime.block_on(Head::fetch(shard, first, map))?;
        let Head { snapshot, schema, features, model } = head;
        let identity = format!("{}.{}", tag.publish, tag.delta);
        let rows = Arc::new(ShardedRows {
            identity: identity.into(),
            identities: identities.clone(),
            map: Arc::clone(map),
            features,
            model,
            pool: Arc::clone(&self.pool),
            runtime: self.runtime.clone(),
            row_type: self.row_type,
            missing: self.missing,
            time_max: self.time_max,
        });
        let view = View::elsewhere(&snapshot, schema, Vec::new(), Arc::clone(&rows) as _);
        self.pool.uses(identities.clone());
        Ok(Now { tag: *tag, view, rows, head: snapshot })
    }

    fn read_members(&mut self) -> Result<()> {
        let stamp = self.members.stamp();
        let is_named = matches!(self.members, Source::Dns(_));
        let is_due = self.looks.is_multiple_of(LOOKS_PER_NAME);
        self.looks += 1;
        let is_new = if is_named { is_due } else { stamp != self.members_stamp || stamp.is_none() };
        if !is_new {
            return Ok(());
        }
        let addresses = self.members.read(self.pool.shards.len() as u32)?;
        if addresses != self.addresses {
            self.pool.set_members(&self.runtime, &addresses)?;
            self.addresses = addresses;
        }
        self.members_stamp = stamp;
        Ok(())
    }

    fn read_map(&mut self) -> Result<()> {
        let stamp = Stamp::of(&self.route);
        if stamp == self.route_stamp {
            return Ok(());
        }
        self.route_stamp = stamp;
        let map = Arc::new(ShardMap::open(&self.route)?);
        if map.shard_count() as usize != self.pool.shards.len() {
            return Err(Error::invalid("shards.json is of another number of shards")
                .with("path", self.route.display())
                .with("found", map.shard_count())
                .with("shards", self.pool.shards.len())
                .with("remedy", "start a gateway for the new shards beside this one"));
        }
        self.maps.insert(map.publish(), map);
        Ok(())
    }

    /// Looks for changes, and moves the gateway to the newest generation.
    fn look(&mut self, gateway: &Gateway, service: &Service) -> Result<()> {
        let read = self.read_members().and(self.read_map());
        let before = gateway.tag();
        if let Some(common) = self.common().filter(|common| common.tag != before) {
            let next = self.make(&common)?;
            let prepared = service.generations.of(&next.view);
            let parts = match prepared {
                Ok(parts) => parts,
                Err(error) => {
                    service.generations.forget(next.view.identity());
                    return Err(error);
                }
            };
            drop(service.answering.swap(Arc::clone(&next.head)));
            gateway.switch(next);
            service.activated(&parts);
            service.log.generation_served(common.tag.publish, common.tag.delta);
            while self.maps.len() > MAPS_MAX {
                let is_old = |publish: &u64| *publish != common.tag.publish;
                let Some(old) = self.maps.keys().copied().find(is_old) else { break };
                self.maps.remove(&old);
            }
        }
        read
    }
}

/// Returns the generations that live servers of a shard have, those that are newest at one first.
fn generations_of(shard: &super::pool::Shard) -> Vec<(Tag, Arc<str>)> {
    let mut found: Vec<(usize, Tag, Arc<str>)> = Vec::new();
    for replica in shard.replicas().iter().filter(|replica| replica.is_live()) {
        for (at, known) in replica.seen().generations.iter().enumerate() {
            match found.iter_mut().find(|(_, tag, _)| *tag == known.tag) {
                Some((best, ..)) => *best = at.min(*best),
                None => found.push((at, known.tag, Arc::clone(&known.identity))),
            }
        }
    }
    found.sort_by_key(|(at, ..)| *at);
    found.into_iter().map(|(_, tag, identity)| (tag, identity)).collect()
}

/// The thread of a gateway, until it is stopped.
#[derive(Debug)]
pub(crate) struct GatewayThread {
    stop: Arc<AtomicBool>,
    ended: Receiver<()>,
}

impl GatewayThread {
    /// Starts the thread.
    ///
    /// # Errors
    /// `Io` when it cannot be made.
    pub(crate) fn start(routing: Routing, service: &Arc<Service>) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let (ending, ended) = channel();
        let (stopping, weak) = (Arc::clone(&stop), Arc::downgrade(service));
        std::thread::Builder::new()
            .name("tierbed-shards".to_owned())
            .spawn(move || run(routing, &stopping, &weak, ending))
            .map_err(|cause| Error::os("cannot start the thread that follows shards", cause))?;
        Ok(Self { stop, ended })
    }

    /// Ends the thread; waits for it, at most `time`.
    pub(crate) fn stop(&self, time: Duration) {
        self.stop.store(true, Ordering::Relaxed);
        // Closed when the thread has ended.
        let _ = self.ended.recv_timeout(time);
    }
}

fn run(routing: Routing, stop: &AtomicBool, service: &Weak<Service>, ending: Sender<()>) {
    let Routing { gateway, mut follower, .. } = routing;
    let mut told = None;
    while !stop.load(Ordering::Relaxed) {
        std::thread::sleep(PAUSE);
        let Some(service) = service.upgrade() else { break };
        let error = follower.look(&gateway, &service).err().map(|error| error.to_string());
        if let Some(error) = error.as_ref().filter(|error| told.as_ref() != Some(*error)) {
            service.faults.note("shards", error);
            service.log.shards_not_followed(error);
        }
        told = error;
    }
    drop((gateway, follower));
    drop(ending);
}

/// Names what a path to `shards.json` is of: its folder.
pub(super) fn folder_name(route: &Path) -> String {
    let folder = match route.file_name() {
        Some(name) if name == SHARDS_NAME => route.parent().unwrap_or(route),
        _ => route,
    };
    folder.file_name().map_or_else(|| "shards".to_owned(), |name| name.to_string_lossy().into())
}
