//! Gateway: a server without rows, which asks the servers of shards for them.
//!
//! ```text
//! requests ─▶ executor: all that wait ─▶ split by shard ─▶ one ModelInfer per shard
//!                              answers ◀─ model, if asked ◀─ joined, pooled ◀─┘
//! ```
//!
//! Whatever a server answers a gateway answers, with the same bits: only where rows come from is
//! different ([`Elsewhere`](tierbed_snapshot::Elsewhere)). A generation is asked for by name, and
//! is the newest that a live server of every shard has, so no answer mixes two. See
//! docs/how-to/serve-on-several-hosts.md.

mod access;
pub(crate) mod calling;
mod codec;
mod following;
mod head;
mod members;
mod metrics;
mod pace;
mod pool;
mod replica;
mod rows;
mod together;

use std::num::NonZero;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tierbed_core::env::{Clock, SystemClock};
use tierbed_core::{Error, Result};
use tierbed_snapshot::{Snapshot, View};
use tokio::runtime::Runtime;

pub use self::access::ShardAccess;
use self::following::Follower;
pub(crate) use self::following::GatewayThread;
pub(crate) use self::metrics::GatewayCollector;
use self::pool::Pool;
use self::replica::Tag;
pub(crate) use self::rows::{Answers, Asking, ShardedRows};

/// How a gateway finds and asks shards.
#[derive(Debug, Clone)]
pub struct GatewayOptions {
    /// `shards.json`, or its folder. Read again when it changes.
    pub route: PathBuf,
    /// A file of members, or `dns:NAME-{shard}:PORT`.
    pub members: String,
    /// What is answered for rows of a shard of which nobody answers.
    pub missing: MissingShard,
    /// How rows come over the network.
    pub row_type: RowType,
    /// How servers of shards are reached.
    pub access: ShardAccess,
    /// Longest time at the start to wait for a server of every shard.
    pub wait: Duration,
    /// Longest time for an answer of a shard.
    pub time_max: Duration,
}

impl GatewayOptions {
    /// The time to wait where none is given.
    pub const WAIT: Duration = Duration::from_secs(60);

    /// Routes by `route` to `members`, with the default of everything else.
    #[must_use]
    pub fn new(route: impl Into<PathBuf>, members: impl Into<String>) -> Self {
        Self {
            route: route.into(),
            members: members.into(),
            missing: MissingShard::default(),
            row_type: RowType::default(),
            access: ShardAccess::default(),
            wait: Self::WAIT,
            time_max: Duration::from_secs(10),
        }
    }
}

/// What is answered for rows of a shard of which nobody answers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MissingShard {
    /// Their requests are refused with 503.
    #[default]
    Refuse,
    /// Their initial values, which the answer counts in `tierbed-default-rows`.
    DefaultRows,
}

/// How rows come over the network.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RowType {
    /// As they are.
    #[default]
    F32,
    /// Rounded to half precision.
    F16,
    /// Rounded to 8 bits of significand.
    Bf16,
}

impl MissingShard {
    /// Returns the one of `name`.
    ///
    /// # Errors
    /// `Invalid` naming those there are.
    pub fn from_name(name: &str) -> Result<Self> {
        match name {
            "refuse" => Ok(Self::Refuse),
            "default-rows" => Ok(Self::DefaultRows),
            other => Err(Error::invalid("unknown answer for a missing shard")
                .with("found", other)
                .with("allowed", "refuse, default-rows")),
        }
    }
}

impl RowType {
    /// Returns the one of `name`.
    ///
    /// # Errors
    /// `Invalid` naming those there are.
    pub fn from_name(name: &str) -> Result<Self> {
        match name {
            "f32" => Ok(Self::F32),
            "f16" => Ok(Self::F16),
            "bf16" => Ok(Self::Bf16),
            other => Err(Error::invalid("unknown type of rows")
                .with("found", other)
                .with("allowed", "f32, f16, bf16")),
        }
    }

    /// Returns its name in the Open Inference Protocol.
    fn name(self) -> &'static str {
        match self {
            Self::F32 => "FP32",
            Self::F16 => "FP16",
            Self::Bf16 => "BF16",
        }
    }

    /// Reads elements; those that are cut off are left out.
    fn decode(self, bytes: &[u8]) -> Vec<f32> {
        let narrow = |read: fn([u8; 2]) -> f32| {
            let (elements, _) = bytes.as_chunks();
            elements.iter().map(|element| read(*element)).collect()
        };
        match self {
            Self::F32 => {
                let (elements, _) = bytes.as_chunks();
                elements.iter().map(|element| f32::from_le_bytes(*element)).collect()
            }
            Self::F16 => narrow(|element| half::f16::from_le_bytes(element).to_f32()),
            Self::Bf16 => narrow(|element| half::bf16::from_le_bytes(element).to_f32()),
        }
    }
}

/// Threads that move bytes between a gateway and shards, as many as a server has for requests.
const THREADS_MAX: usize = 2;

/// What answers now.
#[derive(Debug)]
struct Now {
    tag: Tag,
    view: View<'static>,
    /// The rows of the view.
    rows: Arc<ShardedRows>,
    head: Arc<Snapshot>,
}

/// See the module documentation.
#[derive(Debug)]
pub(crate) struct Gateway {
    now: RwLock<Now>,
    pool: Arc<Pool>,
    /// Some until it is dropped, or a server takes it: it ends without waiting for calls.
    runtime: Mutex<Option<Runtime>>,
}

/// Shards that have been found, and what looks for changes of them: what a gateway answers from.
#[derive(Debug)]
pub struct Routing {
    gateway: Arc<Gateway>,
    follower: Follower,
    name: String,
}

impl Routing {
    /// Finds the shards, and waits until every one has a server.
    ///
    /// # Errors
    /// `Invalid` for a map or members that do not fit, `Closed` naming shards of which no server
    /// answers in time, `Io` when threads cannot be made.
    pub fn begin(options: &GatewayOptions) -> Result<Self> {
        let clock: Arc<dyn Clock> = Arc::new(SystemClock::default());
        let cores = std::thread::available_parallelism().map_or(THREADS_MAX, NonZero::get);
        let runtime = crate::server::runtime(cores.min(THREADS_MAX))?;
        let mut follower = Follower::new(options, &clock, runtime.handle())?;
        let now = follower.first(options.wait)?;
        let pool = Arc::clone(follower.pool());
        let (now, runtime) = (RwLock::new(now), Mutex::new(Some(runtime)));
        let gateway = Arc::new(Gateway { now, pool, runtime });
        let name = following::folder_name(&options.route);
        Ok(Self { gateway, follower, name })
    }

    /// Returns a snapshot with the attachments that answer first, and no rows.
    #[must_use]
    pub fn snapshot(&self) -> Arc<Snapshot> {
        self.gateway.head()
    }

    /// Names what is served: the folder of the map.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Gives the threads away if there are `thread_count`: where those that move bytes of requests
    /// also move those of shards, nobody is woken to hand them over.
    pub(crate) fn take_runtime(&self, thread_count: usize) -> Option<Runtime> {
        let mut runtime = self.gateway.runtime.lock().unwrap_or_else(PoisonError::into_inner);
        runtime.take_if(|runtime| runtime.metrics().num_workers() == thread_count)
    }

    pub(crate) fn clock(&self) -> &Arc<dyn Clock> {
        self.follower.pool().clock()
    }

    pub(crate) fn gateway(&self) -> &Arc<Gateway> {
        &self.gateway
    }
}

impl Gateway {
    /// Looks at what answers now.
    pub(crate) fn view(&self) -> View<'static> {
        // The place is whole after every statement.
        self.now.read().unwrap_or_else(PoisonError::into_inner).view.again()
    }

    /// Returns the snapshot that has all but the rows.
    pub(crate) fn head(&self) -> Arc<Snapshot> {
        Arc::clone(&self.now.read().unwrap_or_else(PoisonError::into_inner).head)
    }

    fn tag(&self) -> Tag {
        self.now.read().unwrap_or_else(PoisonError::into_inner).tag
    }

    /// Returns the rows of the generation of `identity`, if that answers now.
    pub(crate) fn rows(&self, identity: &str) -> Option<Arc<ShardedRows>> {
        let now = self.now.read().unwrap_or_else(PoisonError::into_inner);
        (**now.view.identity() == *identity).then(|| Arc::clone(&now.rows))
    }

    fn switch(&self, next: Now) {
        *self.now.write().unwrap_or_else(PoisonError::into_inner) = next;
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        let runtime = self.runtime.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(runtime) = runtime.take() {
            runtime.shutdown_background();
        }
    }
}
