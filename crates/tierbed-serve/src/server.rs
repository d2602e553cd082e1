//! How does a server start, and how does it stop?

use std::fmt;
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tierbed::PublishedIds;
use tierbed_core::env::{Clock, SystemClock};
use tierbed_core::{Error, Result};
use tierbed_pagestore::Snapshot;
use tokio::runtime::Runtime;
use tokio::sync::{watch, Semaphore};

use crate::features::{resolve, ServedFeature};
use crate::metrics::Metrics;
use crate::routes::{router, Service};

/// Answers predictions: a model in front of the snapshot.
pub trait Predictor: Send + Sync {
    /// Answers one request: the body and its content type (`application/json` or
    /// `application/x-safetensors`) in, body and content type out. Called from several threads.
    ///
    /// # Errors
    /// `Invalid` for requests the model cannot read; they are answered with 400, others with 500.
    fn predict(&self, body: &[u8], content_type: &str) -> Result<(Vec<u8>, String)>;
}

impl fmt::Debug for dyn Predictor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Predictor")
    }
}

/// How to serve.
#[derive(Debug, Clone)]
pub struct ServeOptions {
    /// Host and port to listen on; port 0 picks a free one.
    pub address: String,
    /// Threads that move bytes.
    pub worker_threads: usize,
    /// Threads that look up and predict.
    pub lookup_threads: usize,
    /// Largest body accepted.
    pub body_bytes_max: usize,
    /// Most indices in one lookup.
    pub indices_max: usize,
    /// Lookups and predictions accepted at once; more are answered with 503.
    pub requests_max: usize,
    /// Longest time from a request's first byte to its answer.
    pub request_ms_max: u64,
    /// Longest time that `stop` waits for requests under way.
    pub stop_ms_max: u64,
    /// The features, when not those of the snapshot.
    pub features: Option<Vec<ServedFeature>>,
    /// The snapshot's name in answers; that of its folder when none is given.
    pub snapshot_name: Option<String>,
    /// The time, for latencies and uptime.
    pub clock: Arc<dyn Clock>,
}

impl Default for ServeOptions {
    fn default() -> Self {
        let cores = std::thread::available_parallelism().map_or(4, std::num::NonZero::get);
        Self {
            address: "127.0.0.1:8080".to_owned(),
            worker_threads: cores.min(2),
            lookup_threads: cores.min(16),
            body_bytes_max: 16 << 20,
            indices_max: 1 << 20,
            requests_max: 256,
            request_ms_max: 60_000,
            stop_ms_max: 10_000,
            features: None,
            snapshot_name: None,
            clock: Arc::new(SystemClock::default()),
        }
    }
}

/// A running server. Dropping it stops it.
#[derive(Debug)]
pub struct Server {
    address: SocketAddr,
    stop: watch::Sender<bool>,
    finished: Arc<Finished>,
    stop_ms_max: u64,
    /// One is taken by every request that is worked on.
    places: Arc<Semaphore>,
    place_count: usize,
    runtime: Mutex<Option<Runtime>>,
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
    /// `Invalid` for an address that cannot be parsed or bound and for features that do not fit
    /// the snapshot, `Io` when threads cannot be made.
    pub fn start(
        options: &ServeOptions,
        snapshot: Arc<Snapshot>,
        predictor: Option<Arc<dyn Predictor>>,
    ) -> Result<Self> {
        let service = Arc::new(service(options, snapshot, predictor)?);
        let places = Arc::clone(&service.places);
        let (listener, address) = bind(&options.address)?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(options.worker_threads.max(1))
            .max_blocking_threads(options.lookup_threads.max(1))
            .thread_name("tierbed-serve")
            .enable_all()
            .build()
            .map_err(|cause| Error::os("cannot start the server's threads", cause))?;
        let listener = {
            let _entered = runtime.enter();
            tokio::net::TcpListener::from_std(listener)
                .map_err(|cause| Error::os("cannot listen", cause).with("address", address))?
        };
        let (stop, mut stopping) = watch::channel(false);
        let finished = Arc::new(Finished::default());
        let finishing = Finishing(Arc::clone(&finished));
        runtime.spawn(async move {
            let _finishing = finishing;
            let asked_to_stop = async move {
                // An error means that the server was dropped: as good a reason to stop.
                let _ = stopping.wait_for(|&stop| stop).await;
            };
            // Accept errors are retried inside; serving ends only by the signal.
            let _ =
                axum::serve(listener, router(&service)).with_graceful_shutdown(asked_to_stop).await;
        });
        Ok(Self {
            address,
            stop,
            finished,
            stop_ms_max: options.stop_ms_max,
            place_count: place_count(options),
            places,
            runtime: Mutex::new(Some(runtime)),
        })
    }

    /// Returns the address bound, with the real port.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Waits up to `timeout`; true when the server has stopped.
    pub fn wait(&self, timeout: Duration) -> bool {
        let guard = lock(&self.finished.is_finished);
        let waited =
            self.finished.changed.wait_timeout_while(guard, timeout, |is_finished| !*is_finished);
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }

    /// Stops: no new connections, requests under way are answered, up to the options' time. Work
    /// whose client has left is waited for, too, up to as much time again.
    ///
    /// Returns whether all work ended; what did not is left to end by itself.
    pub fn stop(&self) -> bool {
        let time = Duration::from_millis(self.stop_ms_max);
        self.stop.send_replace(true);
        self.wait(time);
        if let Some(runtime) = lock(&self.runtime).take() {
            runtime.shutdown_timeout(time);
        }
        self.places.available_permits() == self.place_count
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

fn service(
    options: &ServeOptions,
    snapshot: Arc<Snapshot>,
    predictor: Option<Arc<dyn Predictor>>,
) -> Result<Service> {
    let folder_name = || {
        let name = snapshot.folder().path().and_then(|path| path.file_name());
        name.map_or_else(|| "memory".to_owned(), |name| name.to_string_lossy().into_owned())
    };
    Ok(Service {
        ids: PublishedIds::open(&snapshot)?,
        features: resolve(&snapshot, options.features.as_deref())?,
        snapshot_name: options.snapshot_name.clone().unwrap_or_else(folder_name),
        metrics: Metrics::new(Arc::clone(&snapshot)),
        predictor,
        start_us: options.clock.now_us(),
        clock: Arc::clone(&options.clock),
        indices_max: options.indices_max,
        body_bytes_max: options.body_bytes_max,
        request_ms_max: options.request_ms_max,
        places: Arc::new(Semaphore::new(place_count(options))),
        snapshot,
    })
}

fn place_count(options: &ServeOptions) -> usize {
    options.requests_max.clamp(1, Semaphore::MAX_PERMITS)
}

fn bind(address: &str) -> Result<(TcpListener, SocketAddr)> {
    let failed = |cause: std::io::Error| {
        Error::invalid("cannot listen on this address")
            .with("address", address)
            .with("cause", cause)
            .with("remedy", "choose a free port (0 picks one) of an address of this machine")
    };
    let listener = TcpListener::bind(address).map_err(failed)?;
    listener.set_nonblocking(true).map_err(failed)?;
    let bound = listener.local_addr().map_err(failed)?;
    Ok((listener, bound))
}

// The flag and the runtime's place are whole after every statement.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
