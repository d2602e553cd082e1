//! One server of a shard: its connection, whether it answers, and from which generations.

use std::future::{poll_fn, Future};
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, Weak};
use std::task::Poll;
use std::time::Duration;

use axum::http::uri::PathAndQuery;
use prost::Message;
use tierbed_core::{Error, Result};
use tokio::sync::watch;
use tonic::client::Grpc;
use tonic::metadata::MetadataValue;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status};
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};

use super::access::Access;
use super::codec::Pair;
use crate::grpc::shard_pb::{GenerationsRequest, GenerationsResponse};

/// Longest time to connect, and for a question about health.
const CHECK_TIME: Duration = Duration::from_secs(1);
/// Time between two looks at a server.
const LOOK_PAUSE: Duration = Duration::from_millis(100);
/// Time after which a silent connection is asked whether it is there.
const PING: Duration = Duration::from_secs(5);

const HEALTH: &str = "/grpc.health.v1.Health/Check";
const GENERATIONS: &str = "/tierbed.shard.v1.Shards/Generations";

/// A generation that a server answers from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Known {
    pub(super) identity: Arc<str>,
    pub(super) tag: Tag,
}

/// What is equal in the generations of all shards that belong together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Tag {
    pub(super) publish: u64,
    pub(super) delta: u64,
}

/// What was last seen of a server.
#[derive(Debug, Default)]
pub(super) struct Seen {
    /// The newest first.
    pub(super) generations: Vec<Known>,
    /// Its model of lookups.
    pub(super) model: String,
}

/// See the module documentation.
#[derive(Debug)]
pub(super) struct Replica {
    shard: u32,
    address: String,
    channel: Channel,
    access: Arc<Access>,
    outstanding: AtomicU64,
    is_live: watch::Sender<bool>,
    seen: RwLock<Arc<Seen>>,
}

/// A question that is on its way.
#[derive(Debug)]
struct Outstanding<'a>(&'a AtomicU64);

impl Drop for Outstanding<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Replica {
    /// Opens a server; connects when it is first asked. Called within a runtime.
    ///
    /// # Errors
    /// `Invalid` for an address that is none, and files of TLS that cannot be used.
    pub(super) fn open(shard: u32, address: &str, access: &Arc<Access>) -> Result<Arc<Self>> {
        let wrong = |cause: tonic::transport::Error| {
            let cause = std::error::Error::source(&cause)
                .map_or(cause.to_string(), |source| format!("{cause}: {source}"));
            Error::invalid("a server of a shard cannot be reached like this")
                .with("address", address)
                .with("cause", cause)
                .with("remedy", "name host:port, and files of TLS in PEM")
        };
        let scheme = if access.tls().is_some() { "https" } else { "http" };
        let endpoint = Endpoint::from_shared(format!("{scheme}://{address}")).map_err(wrong)?;
        let mut endpoint = endpoint
            .connect_timeout(CHECK_TIME)
            .tcp_nodelay(true)
            .http2_keep_alive_interval(PING)
            .keep_alive_timeout(PING)
            .initial_stream_window_size(WINDOW_BYTES)
            .initial_connection_window_size(4 * WINDOW_BYTES);
        if let Some(tls) = access.tls() {
            endpoint = endpoint.tls_config(tls.clone()).map_err(wrong)?;
        }
        Ok(Arc::new(Self {
            shard,
            address: address.to_owned(),
            channel: endpoint.connect_lazy(),
            access: Arc::clone(access),
            outstanding: AtomicU64::new(0),
            is_live: watch::Sender::new(false),
            seen: RwLock::default(),
        }))
    }

    pub(super) fn address(&self) -> &str {
        &self.address
    }

    pub(super) fn is_live(&self) -> bool {
        *self.is_live.borrow()
    }

    pub(super) fn outstanding(&self) -> u64 {
        self.outstanding.load(Ordering::Relaxed)
    }

    /// Returns what was last seen of it.
    pub(super) fn seen(&self) -> Arc<Seen> {
        // The place is whole after every statement.
        Arc::clone(&self.seen.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Tells whether it answers from a generation.
    pub(super) fn has(&self, identity: &str) -> bool {
        self.seen().generations.iter().any(|known| *known.identity == *identity)
    }

    /// Asks it something, unless it is seen to be gone meanwhile.
    ///
    /// # Errors
    /// Its status; `Unavailable` when it goes.
    pub(super) async fn ask<Q, A>(
        &self,
        path: &'static str,
        message: Q,
        time: Duration,
    ) -> std::result::Result<A, Status>
    where
        Q: Message + Send + Sync + 'static,
        A: Message + Default + Send + Sync + 'static,
    {
        self.outstanding.fetch_add(1, Ordering::Relaxed);
        let _outstanding = Outstanding(&self.outstanding);
        let mut live = self.is_live.subscribe();
        let mut asking = pin!(self.call(path, message, time));
        let mut going = pin!(async move {
            // An error means that it was let go of.
            let _ = live.wait_for(|&is_live| !is_live).await;
        });
        let answered = poll_fn(|cx| match asking.as_mut().poll(cx) {
            Poll::Ready(answered) => Poll::Ready(answered),
            Poll::Pending => going
                .as_mut()
                .poll(cx)
                .map(|()| Err(Status::unavailable("the server was seen to be gone"))),
        });
        let answered = answered.await;
        if answered.as_ref().is_err_and(is_gone) {
            // Until the next look finds it well.
            self.is_live.send_replace(false);
        }
        answered
    }

    async fn call<Q, A>(
        &self,
        path: &'static str,
        message: Q,
        time: Duration,
    ) -> std::result::Result<A, Status>
    where
        Q: Message + Send + Sync + 'static,
        A: Message + Default + Send + Sync + 'static,
    {
        let call = async {
            let mut grpc = Grpc::new(self.channel.clone()).max_decoding_message_size(usize::MAX);
            let lost = |cause: tonic::transport::Error| Status::unavailable(cause.to_string());
            grpc.ready().await.map_err(lost)?;
            let mut request = Request::new(message);
            request.set_timeout(time);
            if let Some(token) = self.access.token() {
                let bearer = MetadataValue::try_from(format!("Bearer {token}"));
                let bearer = bearer.map_err(|_| Status::internal("the token is no header"))?;
                request.metadata_mut().insert("authorization", bearer);
            }
            let path = PathAndQuery::from_static(path);
            grpc.unary(request, path, Pair::default()).await.map(tonic::Response::into_inner)
        };
        let late = || Status::deadline_exceeded("the server took too long");
        tokio::time::timeout(time, call).await.unwrap_or_else(|_| Err(late()))
    }

    /// Looks at a server until nobody else has it. `using` is what the gateway asks for.
    pub(super) async fn watch(replica: Weak<Self>, using: watch::Receiver<Using>) {
        while let Some(replica) = replica.upgrade() {
            let using = using.borrow().identity_of(replica.shard);
            let is_live = replica.look(using).await;
            replica.is_live.send_if_modified(|known| {
                let is_new = *known != is_live;
                *known = is_live;
                is_new
            });
            drop(replica);
            tokio::time::sleep(LOOK_PAUSE).await;
        }
    }

    /// Looks whether it serves, and from which generations.
    async fn look(&self, using: String) -> bool {
        let about = HealthCheckRequest { service: String::new() };
        let health: std::result::Result<HealthCheckResponse, _> =
            self.call(HEALTH, about, CHECK_TIME).await;
        let serves = health.is_ok_and(|found| found.status == ServingStatus::Serving as i32);
        let asked = GenerationsRequest { using };
        let found: std::result::Result<GenerationsResponse, _> =
            self.call(GENERATIONS, asked, CHECK_TIME).await;
        let Ok(GenerationsResponse { generations, shard, shard_count, model }) = found else {
            return false;
        };
        // A server of another shard, or of a model that is not divided, has other rows.
        if shard_count == 0 || shard != self.shard {
            return false;
        }
        let known = generations.into_iter().map(|found| Known {
            identity: found.identity.into(),
            tag: Tag { publish: found.publish, delta: found.delta },
        });
        let seen = Arc::new(Seen { generations: known.collect(), model });
        *self.seen.write().unwrap_or_else(PoisonError::into_inner) = seen;
        serves
    }
}

/// Bytes that a server may send ahead of what is read, in one answer.
const WINDOW_BYTES: u32 = 1 << 20;

/// Tells whether an error is that of a server that is gone.
pub(super) fn is_gone(status: &Status) -> bool {
    matches!(status.code(), Code::Unavailable | Code::Unknown | Code::Cancelled)
}

/// The generation that a gateway answers from: that of each shard.
#[derive(Debug, Clone, Default)]
pub(super) struct Using(pub(super) Vec<Arc<str>>);

impl Using {
    fn identity_of(&self, shard: u32) -> String {
        match self.0.get(shard as usize) {
            Some(identity) => identity.to_string(),
            // The gateway asks for nothing yet.
            None => String::new(),
        }
    }
}
