//! The servers of each shard, and which of them is asked.
//!
//! ```text
//! question ─▶ least outstanding ─▶ answer
//!              │ p95 of the last minute is over, or it failed
//!              └▶ another one as well ─▶ the first answer counts
//! ```
//!
//! Where no other is left, those that were asked are asked again after a pause, until the
//! question's time is over.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use tierbed_core::env::Clock;
use tierbed_core::{Error, ErrorKind, Result};
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::time::{sleep, timeout_at, Instant};
use tonic::{Code, Status};

use super::access::Access;
use super::members::Addresses;
use super::pace::{Budgets, Latencies};
use super::replica::{is_gone, Replica, Using};
use super::together::Together;
use crate::answer::LOST_SHARD;
use crate::grpc::pb::{ModelInferRequest, ModelInferResponse};
use crate::grpc::status::RETRY_AFTER;
use crate::grpc::INFER;

/// Time until servers that all refused are asked again; it doubles up to the second one.
const RETRY_PAUSE: Duration = Duration::from_millis(2);
const RETRY_PAUSE_MAX: Duration = Duration::from_millis(50);
/// Longest time to wait for a server of a shard that has just lost all: five looks at them.
const LOST_WAIT: Duration = Duration::from_millis(500);
const LOST_PAUSE: Duration = Duration::from_millis(5);
/// A server is there.
const NOT_LOST: u64 = u64::MAX;

/// The servers of all shards.
#[derive(Debug)]
pub(super) struct Pool {
    pub(super) shards: Vec<Shard>,
    access: Arc<Access>,
    clock: Arc<dyn Clock>,
    using: watch::Sender<Using>,
}

/// One shard.
#[derive(Debug)]
pub(super) struct Shard {
    number: u32,
    replicas: RwLock<Vec<Arc<Replica>>>,
    latencies: Mutex<Latencies>,
    budgets: Mutex<Budgets>,
    turn: AtomicU64,
    /// Since when no server is there, in microseconds of the clock.
    lost_us: AtomicU64,
    pub(super) counts: Counts,
}

/// What became of questions.
#[derive(Debug, Default)]
pub(super) struct Counts {
    pub(super) asked: AtomicU64,
    /// Asked again because an answer took long.
    pub(super) hedged: AtomicU64,
    /// Asked again because a server failed.
    pub(super) retried: AtomicU64,
    /// Answers of servers that were failures.
    pub(super) failed: AtomicU64,
    /// Questions that no server answered.
    pub(super) lost: AtomicU64,
    /// Rows for which initial values stood.
    pub(super) default_rows: AtomicU64,
}

/// A question to a shard.
#[derive(Debug, Clone)]
pub(super) struct Question {
    /// The generation that shall answer.
    pub(super) identity: Arc<str>,
    pub(super) request: ModelInferRequest,
    pub(super) until: Instant,
}

/// Who was asked a question.
#[derive(Debug)]
struct Asked {
    /// Since the last pause.
    tried: Vec<Arc<Replica>>,
    /// Time until they are asked again.
    pause: Duration,
}

impl Pool {
    pub(super) fn new(shard_count: u32, access: Arc<Access>, clock: &Arc<dyn Clock>) -> Self {
        let shards = (0..shard_count).map(|number| Shard {
            number,
            replicas: RwLock::default(),
            latencies: Mutex::default(),
            budgets: Mutex::default(),
            turn: AtomicU64::new(0),
            lost_us: AtomicU64::new(NOT_LOST),
            counts: Counts::default(),
        });
        let using = watch::Sender::new(Using::default());
        Self { shards: shards.collect(), access, clock: Arc::clone(clock), using }
    }

    pub(super) fn clock(&self) -> &Arc<dyn Clock> {
        &self.clock
    }

    /// Returns a shard.
    ///
    /// # Panics
    /// When there is no such shard.
    pub(super) fn shard(&self, number: u32) -> &Shard {
        let Some(shard) = self.shards.get(number as usize) else {
            panic!("shard {number} of {}", self.shards.len());
        };
        shard
    }

    /// Tells servers which generation is asked for, so that they keep it.
    pub(super) fn uses(&self, identities: Vec<Arc<str>>) {
        self.using.send_replace(Using(identities));
    }

    /// Asks the servers at `addresses` from now on. Those that stay keep their connections.
    ///
    /// # Errors
    /// Those of [`Replica::open`]; who was asked before is asked then.
    pub(super) fn set_members(&self, runtime: &Handle, addresses: &Addresses) -> Result<()> {
        let _entered = runtime.enter();
        let mut next = Vec::with_capacity(self.shards.len());
        for (shard, addresses) in self.shards.iter().zip(addresses) {
            let known = shard.replicas();
            let replicas = addresses.iter().map(|address| {
                let known = known.iter().find(|replica| replica.address() == address);
                known.map_or_else(
                    || Ok((Replica::open(shard.number, address, &self.access)?, true)),
                    |known| Ok((Arc::clone(known), false)),
                )
            });
            next.push(replicas.collect::<Result<Vec<_>>>()?);
        }
        for (shard, replicas) in self.shards.iter().zip(next) {
            for (replica, is_new) in &replicas {
                if *is_new {
                    let watching = Replica::watch(Arc::downgrade(replica), self.using.subscribe());
                    runtime.spawn(watching);
                }
            }
            let replicas = replicas.into_iter().map(|(replica, _)| replica).collect();
            *shard.replicas.write().unwrap_or_else(PoisonError::into_inner) = replicas;
        }
        Ok(())
    }
}

/// Why a shard did not answer.
#[derive(Debug)]
pub(super) enum Lost {
    /// No server that has the generation is there.
    NoReplica,
    /// The last of them failed.
    Failed(Status),
    Late,
}

impl Lost {
    /// Returns the error of a shard that did not answer.
    pub(super) fn error(&self, shard: u32) -> Error {
        let lost = |what: &str| {
            Error::new(ErrorKind::Closed, what)
                .with(LOST_SHARD, shard)
                .with("remedy", "start one that members name, or set missing-shard")
        };
        match self {
            Self::NoReplica => lost("no server of a shard answers"),
            Self::Late => lost("no server of a shard answers in time"),
            Self::Failed(status) if status.code() == Code::InvalidArgument => {
                Error::invalid("a shard refused the lookup")
                    .with("shard_number", shard)
                    .with("cause", status.message())
                    .with("remedy", "raise the shards' limits to those of the gateway")
            }
            Self::Failed(status) if status.code() == Code::DataLoss => {
                Error::corruption("a shard could not read a row")
                    .with("shard_number", shard)
                    .with("cause", status.message())
            }
            Self::Failed(status) => lost("the servers of a shard failed")
                .with("code", format_args!("{:?}", status.code()))
                .with("cause", status.message()),
        }
    }

    /// Tells whether default rows may stand for the answer.
    pub(super) fn is_absence(&self) -> bool {
        match self {
            Self::NoReplica | Self::Late => true,
            Self::Failed(status) => may_ask_another(status),
        }
    }
}

/// Tells whether another server might answer.
fn may_ask_another(status: &Status) -> bool {
    !matches!(
        status.code(),
        Code::InvalidArgument
            | Code::NotFound
            | Code::Unauthenticated
            | Code::PermissionDenied
            | Code::Unimplemented
            | Code::DeadlineExceeded
    )
}

/// Tells whether the same server might answer a moment later: it was gone, or had no room.
fn may_pass(status: &Status) -> bool {
    is_gone(status) || status.metadata().contains_key(RETRY_AFTER)
}

impl Shard {
    pub(super) fn number(&self) -> u32 {
        self.number
    }

    // Places are whole after every statement, so are counts.
    pub(super) fn replicas(&self) -> Vec<Arc<Replica>> {
        self.replicas.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn latencies(&self) -> MutexGuard<'_, Latencies> {
        self.latencies.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn budgets(&self) -> MutexGuard<'_, Budgets> {
        self.budgets.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells whether a server that has the generation is there.
    pub(super) fn has_live(&self, identity: &str) -> bool {
        self.replicas().iter().any(|replica| replica.is_live() && replica.has(identity))
    }

    /// Returns a server that is there and was not tried: that with the fewest questions.
    fn pick(&self, identity: &str, tried: &[Arc<Replica>]) -> Option<Arc<Replica>> {
        let replicas = self.replicas();
        let is_tried = |replica: &Arc<Replica>| tried.iter().any(|one| Arc::ptr_eq(one, replica));
        // Equal ones take turns.
        let turn = self.turn.fetch_add(1, Ordering::Relaxed) as usize % replicas.len().max(1);
        let (before, behind) = replicas.split_at(turn);
        let there = behind
            .iter()
            .chain(before)
            .filter(|replica| replica.is_live() && replica.has(identity) && !is_tried(replica));
        there.min_by_key(|replica| replica.outstanding()).cloned()
    }

    /// Asks a server of the shard, and others where that one takes long or fails.
    pub(super) async fn ask(
        &self,
        clock: &dyn Clock,
        question: &Question,
    ) -> std::result::Result<ModelInferResponse, Lost> {
        let asked = self.ask_some(clock, question).await;
        self.counts.asked.fetch_add(1, Ordering::Relaxed);
        self.counts.lost.fetch_add(u64::from(asked.is_err()), Ordering::Relaxed);
        asked
    }

    async fn ask_some(
        &self,
        clock: &dyn Clock,
        question: &Question,
    ) -> std::result::Result<ModelInferResponse, Lost> {
        let until = question.until;
        self.budgets().earn();
        let mut hedge_at = self.hedge_at(clock).filter(|at| *at < until);
        let first = self.first(clock, question).await?;
        let mut asked = Asked { tried: vec![Arc::clone(&first)], pause: RETRY_PAUSE };
        let mut asking = Together::default();
        let ask = |replica: Arc<Replica>| {
            let (request, start_us) = (question.request.clone(), clock.now_us());
            let time = until.saturating_duration_since(Instant::now());
            async move { (replica.ask(INFER, request, time).await, start_us) }
        };
        asking.push(ask(first));
        loop {
            let waited = timeout_at(hedge_at.unwrap_or(until), asking.next()).await;
            let status = match waited {
                Ok(Some((Ok(answer), start_us))) => {
                    self.latencies().note(clock, clock.now_us().saturating_sub(start_us));
                    return Ok(answer);
                }
                Ok(Some((Err(status), _))) => status,
                Ok(None) => return Err(Lost::NoReplica),
                Err(_) if hedge_at.take().is_none() => return Err(Lost::Late),
                Err(_) => {
                    let next = self.pick(&question.identity, &asked.tried);
                    if let Some(next) = next.filter(|_| self.budgets().hedge()) {
                        self.counts.hedged.fetch_add(1, Ordering::Relaxed);
                        asked.tried.push(Arc::clone(&next));
                        asking.push(ask(next));
                    }
                    continue;
                }
            };
            self.counts.failed.fetch_add(1, Ordering::Relaxed);
            if !may_ask_another(&status) {
                return Err(match status.code() {
                    Code::DeadlineExceeded => Lost::Late,
                    _ => Lost::Failed(status),
                });
            }
            let mut next = self.pick(&question.identity, &asked.tried);
            if next.is_none() && asking.is_empty() && may_pass(&status) {
                next = self.first_again(clock, question, &mut asked).await;
            }
            match next.filter(|_| self.budgets().retry()) {
                Some(next) => {
                    self.counts.retried.fetch_add(1, Ordering::Relaxed);
                    asked.tried.push(Arc::clone(&next));
                    asking.push(ask(next));
                }
                None if asking.is_empty() => return Err(Lost::Failed(status)),
                None => {}
            }
        }
    }

    /// Returns when another server is asked as well. `None`: there is no other, or too few answers
    /// came. A timer that is due before all others costs a system call.
    fn hedge_at(&self, clock: &dyn Clock) -> Option<Instant> {
        let count = self.replicas.read().unwrap_or_else(PoisonError::into_inner).len();
        if count < 2 {
            return None;
        }
        let after_us = self.latencies().p95_us(clock)?;
        Some(Instant::now() + Duration::from_micros(after_us))
    }

    /// Begins anew where all were asked: a moment later one may have room, or be there again.
    /// `None` where none is there, or the question's time is over.
    async fn first_again(
        &self,
        clock: &dyn Clock,
        question: &Question,
        Asked { tried, pause }: &mut Asked,
    ) -> Option<Arc<Replica>> {
        if Instant::now() + *pause >= question.until {
            return None;
        }
        sleep(*pause).await;
        *pause = (2 * *pause).min(RETRY_PAUSE_MAX);
        tried.clear();
        self.first(clock, question).await.ok()
    }

    /// Returns a server that is there. One that was lost a moment ago is waited for: it may only
    /// have closed its connection. A shard that is lost for longer keeps nobody waiting.
    async fn first(
        &self,
        clock: &dyn Clock,
        Question { identity, until, .. }: &Question,
    ) -> std::result::Result<Arc<Replica>, Lost> {
        loop {
            if let Some(replica) = self.pick(identity, &[]) {
                self.lost_us.store(NOT_LOST, Ordering::Relaxed);
                return Ok(replica);
            }
            let now_us = clock.now_us();
            let since_us = self.lost_us.fetch_min(now_us, Ordering::Relaxed).min(now_us);
            let is_long = now_us - since_us >= LOST_WAIT.as_micros() as u64;
            if is_long || Instant::now() + LOST_PAUSE >= *until {
                return Err(Lost::NoReplica);
            }
            sleep(LOST_PAUSE).await;
        }
    }
}
