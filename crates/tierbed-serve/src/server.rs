//! Start and graceful stop of a server.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tierbed_core::{Error, ErrorKind, Result};
use tierbed_io::Folder;
use tierbed_snapshot::{Generation, Snapshot};
use tokio::runtime::Runtime;
use tokio::sync::{watch, Semaphore};

use crate::admin::{self, life::Life};
use crate::admission::Rule;
use crate::answering::Answering;
use crate::body::Buffers;
use crate::connection::{Callee, Protocol};
use crate::deltas::Follower;
use crate::executor::Executor;
use crate::faults::Faults;
use crate::follow::{FollowThread, Following};
use crate::following;
use crate::gateway::{Gateway, GatewayThread, Routing};
use crate::generation::Generations;
use crate::grpc::{self, Health};
use crate::listen::{bind, connections_allowed, Door};
use crate::log::Log;
use crate::metrics::process::open_files;
use crate::metrics::{Metrics, Served};
use crate::oip::Models;
use crate::options::ServeOptions;
use crate::predictor::Predictor;
use crate::routes::{router, Service};
use crate::spans::Spans;
use crate::tls::Tls;
use crate::tokens::Tokens;

/// Longest time that stopping waits for a collector to take the last spans.
const SPANS_TIME: Duration = Duration::from_secs(5);

/// How long a shard answers from a generation before the newest, where nothing else is said.
const GRACE_MS: u64 = 5_000;

/// Servers that this process has started.
static STARTED: AtomicU64 = AtomicU64::new(0);

/// A running server. Dropping it stops it.
#[derive(Debug)]
pub struct Server {
    address: SocketAddr,
    grpc_address: Option<SocketAddr>,
    admin_address: Option<SocketAddr>,
    stop: watch::Sender<bool>,
    finished: Arc<Finished>,
    stop_ms_max: u64,
    place_count: usize,
    places: Arc<Semaphore>,
    /// Until it has stopped: a server that is kept after that holds no snapshot.
    running: Mutex<Option<Running>>,
}

#[derive(Debug)]
struct Running {
    service: Arc<Service>,
    runtime: Runtime,
    follower: Option<Thread>,
}

/// What a server moves with.
#[derive(Debug)]
pub(crate) enum Moving {
    Nothing,
    Channel(Box<Following>),
    Shards(Box<Routing>),
}

impl Moving {
    pub(crate) fn gateway(&self) -> Option<Arc<Gateway>> {
        match self {
            Self::Shards(routing) => Some(Arc::clone(routing.gateway())),
            Self::Nothing | Self::Channel(_) => None,
        }
    }

    /// Returns `thread_count` threads that move bytes: those that are there already, if any.
    fn runtime(&self, thread_count: usize) -> Result<Runtime> {
        let shared = match self {
            Self::Shards(routing) => routing.take_runtime(thread_count),
            Self::Nothing | Self::Channel(_) => None,
        };
        shared.map_or_else(|| runtime(thread_count), Ok)
    }
}

/// The thread that looks whether to move.
#[derive(Debug)]
pub(crate) enum Thread {
    Channel(FollowThread),
    Shards(GatewayThread),
}

impl Thread {
    pub(crate) fn start(moving: Moving, service: &Arc<Service>) -> Result<Option<Self>> {
        Ok(match moving {
            Moving::Nothing => None,
            Moving::Channel(following) => {
                FollowThread::start(Some(*following), service)?.map(Self::Channel)
            }
            Moving::Shards(routing) => Some(Self::Shards(GatewayThread::start(*routing, service)?)),
        })
    }

    pub(crate) fn stop(&self, time: Duration) {
        match self {
            Self::Channel(thread) => thread.stop(time),
            Self::Shards(thread) => thread.stop(time),
        }
    }
}

#[derive(Debug, Default)]
struct Finished {
    is_finished: Mutex<bool>,
    changed: Condvar,
}

/// Tells the waiting when the serving task ends, however it ends.
struct Finishing(Arc<Finished>);

impl Drop for Finishing {
    fn drop(&mut self) {
        *lock(&self.0.is_finished) = true;
        self.0.changed.notify_all();
    }
}

impl Server {
    /// Binds the address and starts answering.
    ///
    /// # Errors
    /// `Invalid` for options out of range, for an address that cannot be parsed or bound and for
    /// features that do not fit the snapshot, `Io` when threads cannot be made.
    pub fn start(
        options: &ServeOptions,
        snapshot: Arc<Snapshot>,
        predictor: Option<Arc<dyn Predictor>>,
    ) -> Result<Self> {
        Self::begin(options, snapshot, predictor, Moving::Nothing)
    }

    /// As [`start`](Self::start), without rows of its own: it asks the servers of shards for them.
    ///
    /// # Errors
    /// As [`start`](Self::start), and `Invalid` where deltas are to be followed.
    pub fn route(
        options: &ServeOptions,
        routing: Routing,
        predictor: Option<Arc<dyn Predictor>>,
    ) -> Result<Self> {
        if options.deltas.is_some() {
            return Err(Error::invalid("a gateway has no rows that deltas could change")
                .with("remedy", "let the shards follow deltas, and leave out deltas here"));
        }
        let name = options.snapshot_name.clone().unwrap_or_else(|| routing.name().to_owned());
        let clock = Arc::clone(routing.clock());
        let options = ServeOptions { snapshot_name: Some(name), clock, ..options.clone() };
        let head = routing.snapshot();
        Self::begin(&options, head, predictor, Moving::Shards(Box::new(routing)))
    }

    /// As [`start`](Self::start); answers from the version that a channel is at, and follows it.
    ///
    /// # Errors
    /// As [`start`](Self::start), and `Invalid` where a folder of deltas is to be followed too.
    pub fn follow(
        options: &ServeOptions,
        following: Following,
        predictor: Option<Arc<dyn Predictor>>,
    ) -> Result<Self> {
        if options.deltas.is_some() {
            return Err(Error::invalid("a server follows a channel or a folder of deltas")
                .with("remedy", "push the deltas to the channel, and leave out deltas"));
        }
        let snapshot = Arc::clone(following.snapshot());
        let name = options.snapshot_name.clone().unwrap_or_else(|| following.name());
        let options = ServeOptions { snapshot_name: Some(name), ..options.clone() };
        Self::begin(&options, snapshot, predictor, Moving::Channel(Box::new(following)))
    }

    fn begin(
        options: &ServeOptions,
        snapshot: Arc<Snapshot>,
        predictor: Option<Arc<dyn Predictor>>,
        moving: Moving,
    ) -> Result<Self> {
        options.check()?;
        let (stop, stopping) = watch::channel(false);
        let gateway = moving.gateway();
        let service = Arc::new(service_of(options, snapshot, predictor, stopping, gateway)?);
        let runtime = moving.runtime(options.worker_threads)?;
        let admin = options.admin_address.as_deref();
        let admin = admin.map(|address| admin::open(&runtime, &service, address)).transpose()?;
        let (admin_address, admin) = admin.map(|admin| (admin.address, admin.ended)).unzip();
        let deltas = options.deltas.as_deref();
        let deltas = deltas.map(|path| Follower::begin(path, &service)).transpose()?;
        let (listener, address) = bind(&options.address)?;
        let grpc = options.grpc_address.as_deref().map(bind).transpose()?;
        let entered = runtime.enter();
        let listener = listening(listener, address)?;
        let grpc = match grpc {
            Some((listener, address)) => Some((listening(listener, address)?, address)),
            None => None,
        };
        drop(entered);
        let finished = Arc::new(Finished::default());
        let finishing = Finishing(Arc::clone(&finished));
        let grpc_address = grpc.as_ref().map(|(_, address)| *address);
        know_clients(&service, &[Some(address), grpc_address])?;
        begin_work(&service, options, address)?;
        let callee = |router, protocol| Callee { router, service: Arc::clone(&service), protocol };
        let door = Door::new(callee(router(&service), Protocol::Http), allowed(&service));
        let beside = grpc.map(|(listener, _)| {
            let health = Health::default();
            let router = grpc::router(&service, &health);
            (door.beside(callee(router, Protocol::Grpc)), listener, health)
        });
        following::begin(&runtime, &service, deltas);
        let follower = Thread::start(moving, &service)?;
        let draining = service.draining.subscribe();
        service.begin();
        runtime.spawn(async move {
            let _finishing = finishing;
            let beside = match beside {
                Some((door, listener, health)) => {
                    health.begin().await;
                    tokio::spawn(health.end(draining));
                    Some(tokio::spawn(door.open(listener)))
                }
                None => None,
            };
            door.open(listener).await;
            for beside in [beside, admin].into_iter().flatten() {
                // A panic of it was told already; the server stops all the same.
                let _ = beside.await;
            }
        });
        Ok(Self {
            address,
            grpc_address,
            admin_address,
            stop,
            finished,
            stop_ms_max: options.limits.stop_ms_max,
            place_count: place_count(options),
            places: Arc::clone(&service.places),
            running: Mutex::new(Some(Running { service, runtime, follower })),
        })
    }

    /// Returns the address bound, with the real port.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the address bound for gRPC, with the real port.
    #[must_use]
    pub fn grpc_address(&self) -> Option<SocketAddr> {
        self.grpc_address
    }

    /// Returns the address bound for operators, with the real port.
    #[must_use]
    pub fn admin_address(&self) -> Option<SocketAddr> {
        self.admin_address
    }

    /// Waits up to `timeout`; true when the server has stopped.
    pub fn wait(&self, timeout: Duration) -> bool {
        let guard = lock(&self.finished.is_finished);
        let waited =
            self.finished.changed.wait_timeout_while(guard, timeout, |is_finished| !*is_finished);
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }

    /// Answers from the delta in `folder` from now on; see [`Snapshot::apply`]. Rows, ids, dense
    /// weights and features of an answer are of one generation.
    ///
    /// # Errors
    /// `Closed` behind [`Server::stop`]; those of [`Snapshot::apply`] and of the model. Everything
    /// is answered as before then.
    pub fn apply(&self, folder: Arc<dyn Folder>) -> Result<Generation> {
        let service = match &*lock(&self.running) {
            Some(Running { follower: Some(_), .. }) => {
                return Err(Error::invalid("the server follows a channel, or shards")
                    .with("remedy", "push the delta to the channel, or to those of the shards"));
            }
            Some(Running { service, .. }) => Arc::clone(service),
            None => return Err(Error::new(ErrorKind::Closed, "the server has stopped")),
        };
        service.apply(folder)
    }

    /// Tells balancers to send no more requests: `/readyz` says so, and everything is still
    /// answered. To be called some time before [`Server::stop`], so that nobody is sent to a closed
    /// door.
    pub fn drain(&self) {
        if let Some(Running { service, .. }) = &*lock(&self.running) {
            service.drain();
        }
    }

    /// Reads the files of tokens and of TLS again, changed or not. What cannot be used is told by
    /// the log, and what was read before goes on.
    pub fn reload(&self) {
        if let Some(Running { service, .. }) = &*lock(&self.running) {
            following::reload(service);
        }
    }

    /// Tells whether the threads that move bytes do a piece of work within `timeout`.
    #[must_use]
    pub fn responds(&self, timeout: Duration) -> bool {
        let (done, is_done) = std::sync::mpsc::channel();
        match &*lock(&self.running) {
            Some(Running { runtime, .. }) => runtime.spawn(async move {
                // Who waited too long does not listen.
                let _ = done.send(());
            }),
            None => return false,
        };
        is_done.recv_timeout(timeout).is_ok()
    }

    /// Stops: no new connections, requests under way are answered, up to the options' time. Work
    /// whose client has left is waited for, too, up to as much time again.
    ///
    /// Connections that the kernel has accepted and requests that lie unread in their sockets are
    /// under way; idle connections are closed after a moment.
    ///
    /// Returns whether all work ended; what did not is left to end by itself.
    pub fn stop(&self) -> bool {
        let time = Duration::from_millis(self.stop_ms_max);
        self.drain();
        self.stop.send_replace(true);
        self.wait(time);
        let Some(Running { service, runtime, follower }) = lock(&self.running).take() else {
            return self.is_whole();
        };
        if let Some(follower) = follower {
            follower.stop(time);
        }
        service.executor.close();
        service.executor.wait(time);
        runtime.shutdown_timeout(time);
        service.spans.close(time.min(SPANS_TIME));
        let is_whole = self.is_whole();
        service.log.stopped(is_whole);
        service.log.flush();
        is_whole
    }
}

impl Server {
    /// Tells whether no work is under way.
    fn is_whole(&self) -> bool {
        self.places.available_permits() == self.place_count
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

#[cfg(any(test, fuzzing))]
pub(crate) fn service(
    options: &ServeOptions,
    snapshot: Arc<Snapshot>,
    predictor: Option<Arc<dyn Predictor>>,
    stopping: watch::Receiver<bool>,
) -> Result<Service> {
    service_of(options, snapshot, predictor, stopping, None)
}

/// As [`service`]; a `gateway` has the rows, where there is one.
pub(crate) fn service_of(
    options: &ServeOptions,
    snapshot: Arc<Snapshot>,
    predictor: Option<Arc<dyn Predictor>>,
    stopping: watch::Receiver<bool>,
    gateway: Option<Arc<Gateway>>,
) -> Result<Service> {
    let folder_name = || {
        let name = snapshot.folder().path().and_then(|path| path.file_name());
        name.map_or_else(|| "memory".to_owned(), |name| name.to_string_lossy().into_owned())
    };
    let limits = options.limits.clone();
    let clock = &options.clock;
    let name = options.snapshot_name.clone().unwrap_or_else(folder_name);
    let identity = snapshot.identity()?;
    let tls = options.tls.as_ref().map(|files| Tls::open(files, limits.handshakes_max));
    let places = Arc::new(Semaphore::new(place_count(options)));
    let buffers = Buffers::new(limits.buffer_bytes_max);
    let (log, spans) = (Arc::new(Log::open(&options.log, clock)?), Spans::default());
    let rule = Rule {
        queue_us_max: limits.queue_ms_max * 1_000,
        requests_max: place_count(options) as u64,
    };
    let executor = Arc::new(Executor::new(clock, rule));
    let generations = Generations::new(options.features.clone(), predictor);
    let newest = match &gateway {
        Some(gateway) => generations.of(&gateway.view())?,
        None => generations.of(&snapshot.view())?,
    };
    let answering = Arc::new(Answering::new(snapshot, clock));
    answering.keep_former(grace_us(options, newest.shard.is_some() && gateway.is_none()));
    answering.committed(newest.committed_at_ms);
    let served = Served {
        answering: Arc::clone(&answering),
        name: name.clone(),
        places: Arc::clone(&places),
        place_count: place_count(options),
        buffers: buffers.clone(),
        executor: Arc::clone(&executor),
        log_dropped: log.dropped(),
        spans: &spans,
        gateway: gateway.as_ref(),
    };
    Ok(Service {
        number: STARTED.fetch_add(1, Ordering::Relaxed),
        generations,
        models: Models::new(&options.model_name)?,
        snapshot_name: name,
        identity,
        metrics: Arc::new(Metrics::new(served)),
        log,
        spans,
        faults: Faults::new(clock, limits.degraded_ms),
        start_us: clock.now_us(),
        life: Life::new(clock.now_us()),
        clock: Arc::clone(clock),
        limits,
        tls: tls.transpose()?,
        tokens: options.tokens.as_deref().map(Tokens::open).transpose()?,
        requires_auth: options.requires_auth,
        stopping,
        draining: watch::Sender::new(false),
        places,
        place_count: place_count(options),
        buffers,
        executor,
        answering,
        gateway,
    })
}

/// Returns how long generations before the newest answer, which is that of a shard or not.
fn grace_us(options: &ServeOptions, is_shard: bool) -> u64 {
    let grace_ms = options.generation_grace_ms.unwrap_or(if is_shard { GRACE_MS } else { 0 });
    grace_ms.saturating_mul(1_000)
}

/// Starts the threads that work for requests, and tells where these may come.
///
/// # Errors
/// `Invalid` for settings of spans that are none, `Io` when a thread cannot be made.
fn begin_work(service: &Arc<Service>, options: &ServeOptions, address: SocketAddr) -> Result<()> {
    let Service { snapshot_name, identity, log, spans, .. } = &**service;
    spans.start(options, log)?;
    log.serving(&address.to_string(), snapshot_name, identity, options.lookup_threads);
    Executor::start(service, options.lookup_threads)
}

/// Returns how many connections there may be; tells when these are fewer than the options say.
fn allowed(service: &Service) -> usize {
    let asked = service.limits.connections_max;
    let allowed = connections_allowed(asked, open_files());
    if allowed < asked {
        service.log.fewer_connections(asked, allowed);
    }
    allowed
}

/// Tells of addresses that others can reach when clients need neither token nor certificate.
///
/// # Errors
/// `Invalid` for such an address where clients must be known.
pub(crate) fn know_clients(service: &Service, addresses: &[Option<SocketAddr>]) -> Result<()> {
    let has_certificates = service.tls.as_ref().is_some_and(Tls::knows_clients);
    if service.tokens.is_some() || has_certificates {
        return Ok(());
    }
    for address in addresses.iter().flatten().filter(|address| !address.ip().is_loopback()) {
        if service.requires_auth {
            return Err(Error::invalid("whoever reaches the address could ask")
                .with("address", address)
                .with(
                    "remedy",
                    "give tokens or tls_client_ca, or an address of this machine alone",
                ));
        }
        service.log.open_to_all(&address.to_string());
    }
    Ok(())
}

/// Starts the threads that move bytes.
///
/// # Errors
/// `Io` when they cannot be made.
pub(crate) fn runtime(worker_threads: usize) -> Result<Runtime> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(worker_threads)
        .thread_name("tierbed-serve")
        .enable_all()
        .build()
        .map_err(|cause| Error::os("cannot start the server's threads", cause))
}

/// Gives a listener to the runtime that is entered.
pub(crate) fn listening(
    listener: std::net::TcpListener,
    address: SocketAddr,
) -> Result<tokio::net::TcpListener> {
    tokio::net::TcpListener::from_std(listener)
        .map_err(|cause| Error::os("cannot listen", cause).with("address", address))
}

fn place_count(options: &ServeOptions) -> usize {
    options.limits.requests_max.clamp(1, Semaphore::MAX_PERMITS)
}

// The flag and the runtime's place are whole after every statement.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
