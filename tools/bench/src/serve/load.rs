//! An open loop: one thread that sends when requests are due, and reads when answers come.

use std::collections::VecDeque;
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::event::{epoll, Timespec};
use rustix::time::{
    timerfd_create, timerfd_settime, Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags,
};
use serde::Deserialize;
use serde_json::{json, Value};
use tierbed_core::env::{Clock, Env};
use tierbed_core::{Error, Result};

use super::arrivals::{Arrival, Arrivals, Phase, Spread};
use super::connection::{Asked, Connection};
use super::peer::{Outcome, Peer, Target};
use super::report::{cpu_us, Tally};
use super::rows::{Ids, Shape};
use crate::lookup::join;

/// How long answers are waited for after the last request.
const DRAIN_US: u64 = 5_000_000;
/// Events that are taken at once.
const EVENTS: usize = 256;
/// The timer among the events; all others are connections.
const TIMER: u64 = u64::MAX;

/// What `load` is told.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct LoadJob {
    target: Target,
    shape: Shape,
    phases: Vec<Phase>,
    spread: Spread,
    seed: u64,
    /// Connections that are open before the first request.
    connections: usize,
    /// Beyond these, requests wait in the generator, and are late.
    connections_max: usize,
    /// Every so manieth answer is compared with the rows; 0 for none.
    check_every: u64,
    /// Versions of the rows that may answer beside the first. All rows of an answer must be of one.
    #[serde(default)]
    versions: u32,
    /// The server's processes.
    #[serde(default)]
    pids: Vec<u32>,
    /// The processor that the generator runs on; any, when there is none.
    #[serde(default)]
    core: Option<usize>,
}

/// Asks a server and tells what it answered, phase by phase.
pub(super) fn load(job: &LoadJob) -> Result<Value> {
    job.shape.check()?;
    job.phases.iter().try_for_each(Phase::check)?;
    if job.phases.is_empty() || job.connections_max == 0 {
        return Err(Error::invalid("a load needs phases and connections"));
    }
    // A thread of its own, which alone is bound to a processor.
    std::thread::scope(|scope| join(scope.spawn(|| Load::new(job)?.run())))
}

struct Load<'a> {
    job: &'a LoadJob,
    peer: Box<dyn Peer>,
    address: SocketAddr,
    clock: Arc<dyn Clock>,
    start_us: u64,
    epoll: OwnedFd,
    timer: OwnedFd,
    slots: Vec<Option<Connection>>,
    /// Connections without a request, the one used last at the end.
    free: Vec<usize>,
    /// Requests for which there was no connection.
    waiting: VecDeque<Arrival>,
    ids: Ids,
    drawn: Vec<i64>,
    request: Vec<u8>,
    sent: u64,
    under_way: usize,
    tallies: Vec<Tally>,
    /// Processor time of the server at the start of each phase.
    cpu_us: Vec<u64>,
}

fn failed(cause: impl Into<std::io::Error>) -> Error {
    Error::os("the load generator failed", cause.into())
}

impl<'a> Load<'a> {
    fn new(job: &'a LoadJob) -> Result<Self> {
        if let Some(core) = job.core {
            let mut cores = rustix::thread::CpuSet::new();
            cores.set(core);
            rustix::thread::sched_setaffinity(None, &cores).map_err(failed)?;
        }
        let address = &job.target.address;
        let address = address.to_socket_addrs().ok().and_then(|mut found| found.next());
        let Some(address) = address else {
            return Err(Error::invalid("no such address").with("found", &job.target.address));
        };
        let (epoll, timer) = (
            epoll::create(epoll::CreateFlags::CLOEXEC).map_err(failed)?,
            timerfd_create(
                TimerfdClockId::Monotonic,
                TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK,
            )
            .map_err(failed)?,
        );
        let data = epoll::EventData::new_u64(TIMER);
        let edge = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(&epoll, &timer, data, edge).map_err(failed)?;
        let starts = job.phases.iter().scan(0.0, |end_us, phase| {
            let start_us = *end_us;
            *end_us += phase.us();
            Some(start_us)
        });
        let tallies =
            job.phases.iter().zip(starts).map(|(phase, start_us)| Tally::new(phase, start_us));
        let clock = Env::real(0).clock;
        let mut load = Self {
            job,
            peer: job.target.peer(job.shape),
            address,
            start_us: 0,
            clock,
            epoll,
            timer,
            slots: Vec::new(),
            free: Vec::new(),
            waiting: VecDeque::new(),
            // Other numbers than those of the arrivals.
            ids: Ids::new(job.shape, job.seed ^ 0x5EED),
            drawn: Vec::new(),
            request: Vec::new(),
            sent: 0,
            under_way: 0,
            tallies: tallies.collect(),
            cpu_us: Vec::new(),
        };
        for _ in 0..job.connections.min(job.connections_max) {
            let slot = load.open()?;
            load.free.push(slot);
        }
        load.start_us = load.clock.now_us();
        Ok(load)
    }

    fn run(mut self) -> Result<Value> {
        for arrival in Arrivals::new(&self.job.phases, self.job.spread, self.job.seed) {
            self.listen(arrival.due_us)?;
            self.begin_phase(arrival.phase)?;
            self.tally(arrival.phase).offered += 1;
            match self.find()? {
                Some(slot) => self.send(slot, arrival),
                None => self.waiting.push_back(arrival),
            }
        }
        let end_us = self.now_us() + DRAIN_US;
        while self.under_way > 0 && self.now_us() < end_us {
            self.listen_once(end_us)?;
        }
        self.begin_phase(self.job.phases.len())?;
        let unanswered = self.slots.iter().flatten().filter_map(|one| one.asked.as_ref());
        let unanswered: Vec<_> =
            unanswered.map(|asked| asked.arrival).chain(self.waiting.drain(..)).collect();
        for arrival in unanswered {
            self.tally(arrival.phase).unanswered += 1;
        }
        let cpu = self.cpu_us.windows(2).map(|two| match two {
            [start, end] if !self.job.pids.is_empty() => Some(end - start),
            _ => None,
        });
        let phases = self.tallies.into_iter().zip(&self.job.phases).zip(cpu);
        let phases: Vec<_> = phases.map(|((tally, phase), cpu)| tally.told(phase, cpu)).collect();
        Ok(json!({ "phases": phases, "connections": self.slots.len() }))
    }

    fn now_us(&self) -> u64 {
        self.clock.now_us() - self.start_us
    }

    fn tally(&mut self, phase: usize) -> &mut Tally {
        let count = self.tallies.len();
        let Some(tally) = self.tallies.get_mut(phase) else { panic!("phase {phase} of {count}") };
        tally
    }

    /// Notes the server's processor time where a phase begins.
    fn begin_phase(&mut self, phase: usize) -> Result<()> {
        while self.cpu_us.len() <= phase {
            self.cpu_us.push(cpu_us(&self.job.pids)?);
        }
        Ok(())
    }

    /// Finds a connection without a request; `None` when all that may be open have one.
    fn find(&mut self) -> Result<Option<usize>> {
        while let Some(slot) = self.free.pop() {
            // One that the server has closed since is not there any more.
            if self.slots.get(slot).is_some_and(Option::is_some) {
                return Ok(Some(slot));
            }
        }
        if self.slots.iter().flatten().count() >= self.job.connections_max {
            return Ok(None);
        }
        self.open().map(Some)
    }

    fn open(&mut self) -> Result<usize> {
        let connection = Connection::open(self.address)?;
        let slot = self.slots.len();
        let data = epoll::EventData::new_u64(slot as u64);
        let edge = epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::ET;
        epoll::add(&self.epoll, &connection.stream, data, edge).map_err(failed)?;
        self.slots.push(Some(connection));
        Ok(slot)
    }

    fn send(&mut self, slot: usize, arrival: Arrival) {
        self.ids.draw(&mut self.drawn);
        let is_checked = self.job.check_every > 0 && self.sent.is_multiple_of(self.job.check_every);
        self.sent += 1;
        self.under_way += 1;
        let late_us = self.now_us().saturating_sub(arrival.due_us);
        self.tally(arrival.phase).sent(late_us);
        let asked = Asked { arrival, ids: is_checked.then(|| self.drawn.clone()) };
        let Some(Some(connection)) = self.slots.get_mut(slot) else {
            panic!("slot {slot} has no connection")
        };
        self.request.clear();
        self.peer.ask(connection.asked_count, &self.drawn, &mut self.request);
        if connection.send(&self.request, asked).is_err() {
            self.lose(slot);
        }
    }

    /// Reads answers until a request is due.
    fn listen(&mut self, due_us: u64) -> Result<()> {
        while self.now_us() < due_us {
            self.listen_once(due_us)?;
        }
        Ok(())
    }

    fn listen_once(&mut self, due_us: u64) -> Result<()> {
        let us = due_us.saturating_sub(self.now_us()).max(1);
        let it_value =
            Timespec { tv_sec: (us / 1_000_000) as i64, tv_nsec: (us % 1_000_000 * 1_000) as i64 };
        let it_interval = Timespec { tv_sec: 0, tv_nsec: 0 };
        let time = Itimerspec { it_interval, it_value };
        timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &time).map_err(failed)?;
        let mut events = Vec::with_capacity(EVENTS);
        match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(cause) => return Err(failed(cause)),
        }
        for event in events {
            if event.data.u64() != TIMER {
                self.heard(event.data.u64() as usize)?;
            }
        }
        Ok(())
    }

    /// Goes on with a connection on which something happened.
    fn heard(&mut self, slot: usize) -> Result<()> {
        let Some(found) = self.slots.get_mut(slot) else { panic!("an event of no slot: {slot}") };
        // An earlier event may have closed it.
        let Some(connection) = found else { return Ok(()) };
        let is_flushed = connection.flush().is_ok();
        let is_open = is_flushed && connection.hear().unwrap_or(false);
        if connection.asked.is_some() {
            if let Some(answer) = self.peer.answer(&connection.heard)? {
                let bytes: Vec<u8> = connection.heard.drain(..answer.byte_count).collect();
                let Some(asked) = connection.asked.take() else { panic!("an answer to nothing") };
                self.note(&asked, answer.outcome, &bytes);
                if is_open {
                    match self.waiting.pop_front() {
                        Some(arrival) => self.send(slot, arrival),
                        None => self.free.push(slot),
                    }
                }
            }
        }
        if !is_open {
            self.lose(slot);
        }
        Ok(())
    }

    fn note(&mut self, asked: &Asked, outcome: Outcome, bytes: &[u8]) {
        let Arrival { phase, due_us } = asked.arrival;
        let us = self.now_us().saturating_sub(due_us);
        self.under_way -= 1;
        self.tally(phase).answered(outcome, due_us, us);
        if let (Some(ids), Outcome::Good) = (&asked.ids, outcome) {
            let mut found = Vec::new();
            self.peer.rows(bytes, &mut found);
            let is_right = self.is_of_one_version(ids, &found);
            let tally = self.tally(phase);
            tally.checked += 1;
            tally.wrong += u64::from(!is_right);
        }
    }

    /// Whether all rows of an answer are those of one version.
    fn is_of_one_version(&self, ids: &[i64], found: &[u8]) -> bool {
        let LoadJob { shape, versions, .. } = self.job;
        let mut expected = Vec::with_capacity(found.len());
        // The newest is the likely one.
        (0..=*versions).rev().any(|version| {
            expected.clear();
            ids.iter().for_each(|id| shape.put_version(*id as u64, version, &mut expected));
            found == expected
        })
    }

    /// Closes a connection; its request, if it has one, is not answered any more.
    fn lose(&mut self, slot: usize) {
        let lost = self.slots.get_mut(slot).and_then(Option::take);
        if let Some(Asked { arrival, .. }) = lost.and_then(|connection| connection.asked) {
            self.under_way -= 1;
            self.tally(arrival.phase).broken += 1;
        }
    }
}
