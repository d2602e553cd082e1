//! The address for operators: a live page, statistics, metrics, probes, and draining.
//!
//! ```text
//! answer ─▶ [answers]: two atomics ─▶ [window]: a sample a second ─▶ [stats], JSON ─▶ page
//! ```
//!
//! Its listener has connections of its own, so that a server without room for one more client still
//! tells why. It opens before the first deltas are applied. Reading needs the scope `metrics`,
//! draining `admin`; the page itself has no figures and needs none. See docs/reference/http.md.

pub(crate) mod answers;
mod events;
pub(crate) mod life;
mod page;
mod routes;
mod stats;
mod window;

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use axum::body::Bytes;
use tierbed_core::Result;
use tokio::runtime::Runtime;
use tokio::sync::{watch, Semaphore};
use tokio::task::JoinHandle;

use self::window::Window;
use crate::connection::{Callee, Protocol};
use crate::listen::{bind, Door};
use crate::routes::Service;
use crate::server::{know_clients, listening};

/// Connections of operators at once, beside those of clients.
pub(crate) const CONNECTIONS_MAX: usize = 32;
/// Streams of events at once: half of the connections, so that probes find one.
const WATCHERS_MAX: usize = 16;

/// What the routes of operators see.
#[derive(Debug)]
pub(crate) struct Admin {
    service: Arc<Service>,
    window: Mutex<Window>,
    /// The newest event, as it is sent.
    newest: watch::Receiver<Bytes>,
    /// One is taken by every stream of events.
    watchers: Arc<Semaphore>,
}

impl Admin {
    // Samples are whole after every statement.
    fn window(&self) -> MutexGuard<'_, Window> {
        self.window.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Where operators are answered.
#[derive(Debug)]
pub(crate) struct Opened {
    /// With the real port.
    pub(crate) address: SocketAddr,
    /// Ends with the last connection, when the server stops.
    pub(crate) ended: JoinHandle<()>,
}

/// Answers operators at an address until the server stops.
///
/// # Errors
/// `Invalid` for an address that cannot be parsed or bound, or that others can reach where clients
/// must be known; `Io` when the runtime cannot listen.
pub(crate) fn open(runtime: &Runtime, service: &Arc<Service>, address: &str) -> Result<Opened> {
    let (listener, address) = bind(address)?;
    know_clients(service, &[Some(address)])?;
    let (events, newest) = watch::channel(Bytes::new());
    let admin = Arc::new(Admin {
        service: Arc::clone(service),
        window: Mutex::default(),
        newest,
        watchers: Arc::new(Semaphore::new(WATCHERS_MAX)),
    });
    let router = routes::router(&admin);
    let entered = runtime.enter();
    let listener = listening(listener, address)?;
    drop(entered);
    runtime.spawn(events::tell(admin, events));
    let callee = Callee { router, service: Arc::clone(service), protocol: Protocol::Admin };
    let ended = runtime.spawn(Door::new(callee, CONNECTIONS_MAX).open(listener));
    Ok(Opened { address, ended })
}
