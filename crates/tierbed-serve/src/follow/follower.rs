//! The thread that follows a channel.

use std::collections::BTreeSet;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{channel, Receiver, Sender};
use std::sync::{Arc, Weak};
use std::time::Duration;

use tierbed_core::{Error, ErrorKind, Result};
use tierbed_io::Folder;
use tierbed_remote::{Head, Link, Seq, Want};
use tierbed_snapshot::Snapshot;

use super::begin::{head_of, newest, not_named, Folders};
use super::Following;
use crate::routes::Service;

/// Longest sleep between two looks at whether to stop, or at who still has an old snapshot.
const SLICE: Duration = Duration::from_millis(20);
/// Longest time between two looks at a channel whose version cannot be reached.
const PAUSE_MAX: Duration = Duration::from_secs(30);

/// A thread that follows a channel until it is stopped.
#[derive(Debug)]
pub(crate) struct FollowThread {
    stop: Arc<AtomicBool>,
    ended: Receiver<()>,
}

impl FollowThread {
    /// Starts the thread, where there is something to follow.
    ///
    /// # Errors
    /// `Io` when it cannot be made.
    pub(crate) fn start(
        following: Option<Following>,
        service: &Arc<Service>,
    ) -> Result<Option<Self>> {
        let Some(following) = following else { return Ok(None) };
        let Following { chain, behind, .. } = &following;
        service.answering.is_at(newest(chain).seq.0);
        service.answering.in_step();
        if let Some(error) = behind {
            service.not_in_sync(error);
        }
        let stop = Arc::clone(&following.pull.stop);
        let (ending, ended) = channel();
        let follower = Follower {
            following,
            before: Vec::new(),
            failures: 0,
            renewed: None,
            leaving: None,
            _ending: ending,
        };
        let weak = Arc::downgrade(service);
        std::thread::Builder::new()
            .name("tierbed-follow".to_owned())
            .spawn(move || follower.run(&weak))
            .map_err(|cause| Error::os("cannot start the thread that follows a channel", cause))?;
        Ok(Some(Self { stop, ended }))
    }

    /// Ends the thread; waits for it, at most `time`: a request to a store may take longer.
    pub(crate) fn stop(&self, time: Duration) {
        self.stop.store(true, Ordering::Relaxed);
        // Closed when the thread has ended.
        let _ = self.ended.recv_timeout(time);
    }
}

/// See the module documentation.
struct Follower {
    following: Following,
    /// Versions that answered before: rolling back to them needs no download.
    before: Vec<Link>,
    /// Looks in a row that failed.
    failures: u32,
    /// The version whose damaged copy was removed, so that it is pulled again, once.
    renewed: Option<Link>,
    /// A snapshot that answers no more, while batches have it.
    leaving: Option<Arc<Snapshot>>,
    _ending: Sender<()>,
}

impl Follower {
    fn run(mut self, service: &Weak<Service>) {
        // The first one is read by the one behind.
        self.following.snapshot = match service.upgrade() {
            Some(service) => service.snapshot(),
            None => return,
        };
        while self.pause(service) {
            let Some(service) = service.upgrade() else { return };
            let looked = catch_unwind(AssertUnwindSafe(|| self.look(&service)));
            if let Err(panic) = looked {
                let refusal = service.panicked(&*panic);
                let message = format!("the channel is followed no more: {}", refusal.message());
                service.faults.note("panic", &message);
                return service.log.follows_no_more(&message);
            }
        }
    }

    fn stopping(&self) -> bool {
        self.following.pull.stop.load(Ordering::Relaxed)
    }

    /// Waits for the next look; false when the server stops.
    fn pause(&mut self, service: &Weak<Service>) -> bool {
        let poll = self.following.follow.poll;
        let longer = poll.saturating_mul(1 << self.failures.min(8));
        let mut left = longer.min(PAUSE_MAX.max(poll));
        while !left.is_zero() {
            if self.stopping() {
                return false;
            }
            if self.leaving.is_some() {
                let Some(service) = service.upgrade() else { return false };
                self.let_go(&service);
            }
            let slice = left.min(SLICE);
            std::thread::sleep(slice);
            left -= slice;
        }
        !self.stopping()
    }

    fn look(&mut self, service: &Service) {
        match self.follow(service) {
            Ok(()) => {
                self.failures = 0;
                service.answering.in_step();
            }
            // Nobody waits for it any more.
            Err(_) if self.stopping() => {}
            Err(error) => {
                self.failures += 1;
                service.not_in_sync(&error);
            }
        }
    }

    /// Brings the server to where the channel is.
    fn follow(&mut self, service: &Service) -> Result<()> {
        let Following { location, follow, chain, .. } = &self.following;
        let head = head_of(location, &follow.channel)?;
        if head.chain == *chain {
            return Ok(());
        }
        self.bring(service, &head)?;
        if let Err(error) = self.reach(service, &head.chain) {
            if error.kind() != ErrorKind::Corruption {
                return Err(error);
            }
            return match self.remove_damaged(&head.chain) {
                Ok(()) => Err(error),
                Err(other) => Err(error.with("not_removed", other)),
            };
        }
        let Following { follow, local, chain, .. } = &mut self.following;
        self.before = std::mem::replace(chain, head.chain.clone());
        service.answering.is_at(head.seq().0);
        local.note(&follow.channel, &head)?;
        self.tidy(&[&head.chain, &self.before])
    }

    /// Pulls what is not here.
    fn bring(&self, service: &Service, head: &Head) -> Result<()> {
        let Following { location, local, pull, .. } = &self.following;
        local.make_way(&head.chain)?;
        let mut seen = None;
        let mut told = |done: u64, _| {
            let more = done.saturating_sub(seen.replace(done).unwrap_or(done));
            service.metrics.follow.bytes.inc_by(more);
            match self.stopping() {
                true => Err(stops()),
                false => Ok(()),
            }
        };
        let want = Want::Chain(head.chain.clone());
        match location.pull(&want, local.path(), pull, &mut told) {
            Err(error) if error.kind() == ErrorKind::NoSpace => {
                match self.tidy(&[&self.following.chain]) {
                    Ok(()) => Err(error),
                    Err(other) => Err(error.with("not_removed", other)),
                }
            }
            pulled => pulled.map(drop),
        }
    }

    /// Answers from a chain that is here.
    fn reach(&mut self, service: &Service, chain: &[Link]) -> Result<()> {
        let start_us = service.clock.now_us();
        let folders = Folders::open(&self.following.local, chain)?;
        let snapshot = service.snapshot();
        let base = snapshot.identity()?;
        let is_upon_it = chain.first().is_some_and(|link| link.identity == base);
        let answering = snapshot.generation().identity;
        drop(snapshot);
        let at = chain.iter().position(|link| link.identity == answering);
        let how = match at {
            Some(at) if is_upon_it => {
                self.apply(service, chain.iter().skip(1).zip(folders.deltas).skip(at))?;
                "deltas"
            }
            _ if is_upon_it => {
                service.change_deltas(chain, folders)?;
                "other deltas"
            }
            _ => {
                self.swap(service, chain, folders)?;
                "swap"
            }
        };
        let seconds = service.clock.now_us().saturating_sub(start_us) as f64 / 1e6;
        if how == "swap" {
            service.metrics.follow.swapped(seconds);
        }
        service.log.version_served(newest(chain).seq.0, how, seconds);
        Ok(())
    }

    /// Applies deltas upon what answers, one after the other.
    fn apply<'a>(
        &self,
        service: &Service,
        deltas: impl Iterator<Item = (&'a Link, Arc<dyn Folder>)>,
    ) -> Result<()> {
        for (link, delta) in deltas {
            let now = service.apply(delta)?;
            if now.identity != link.identity {
                return Err(not_named(link, &now.identity));
            }
            service.answering.is_at(link.seq.0);
            if self.stopping() {
                return Err(stops());
            }
        }
        Ok(())
    }

    /// Answers from another snapshot.
    fn swap(&mut self, service: &Service, chain: &[Link], folders: Folders) -> Result<()> {
        self.let_go(service);
        if self.leaving.is_some() {
            return Err(Error::new(ErrorKind::Closed, "an old snapshot is still in use")
                .with("remedy", "let go of it, or restart the server"));
        }
        let Following { opener, follow, .. } = &self.following;
        let swapped = service.swap(chain, folders, opener, follow.swap_share);
        let before = swapped.inspect_err(|_| service.metrics.follow.not_swapped())?;
        self.leaving = Some(before);
        self.following.snapshot = service.snapshot();
        Ok(())
    }

    /// Closes a snapshot that answers no more once nobody else has it, and gives its memory to the
    /// one that answers.
    fn let_go(&mut self, service: &Service) {
        let is_last = |snapshot: &mut Arc<Snapshot>| Arc::strong_count(snapshot) == 1;
        let Some(snapshot) = self.leaving.take_if(is_last) else { return };
        drop(snapshot);
        let now = service.snapshot();
        service.generations.keep_only(&now.generation().identity);
        if let Err(error) = now.grow_cache() {
            service.not_in_sync(&error);
        }
    }

    /// Removes the copies of versions that do not answer, so that they are pulled again, once.
    fn remove_damaged(&mut self, chain: &[Link]) -> Result<()> {
        let link = newest(chain);
        if self.renewed.as_ref() == Some(link) {
            return Ok(());
        }
        self.renewed = Some(link.clone());
        let Following { local, chain: answering, .. } = &self.following;
        let mut damaged = chain.iter().filter(|link| !answering.contains(link));
        damaged.try_for_each(|link| local.remove(link.seq))
    }

    /// Removes versions that are of none of `chains`.
    fn tidy(&self, chains: &[&[Link]]) -> Result<()> {
        let kept: BTreeSet<Seq> =
            chains.iter().flat_map(|chain| chain.iter()).map(|link| link.seq).collect();
        self.following.local.keep_only(&kept).map(drop)
    }
}

/// The error of what ends with the server; nobody sees it.
fn stops() -> Error {
    Error::new(ErrorKind::Closed, "the server stops")
}

impl Service {
    /// Tells that the version of the channel does not answer.
    fn not_in_sync(&self, error: &Error) {
        let reason = error.kind().name();
        self.metrics.follow.failed(reason);
        self.faults.note("sync", &error.to_string());
        self.log.not_in_sync(reason, error);
    }
}
