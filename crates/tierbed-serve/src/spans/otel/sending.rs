//! The thread that makes spans and sends them; a collector that is away costs it time, and nobody
//! else.

use std::sync::mpsc::{sync_channel, Receiver};
use std::sync::Arc;
use std::time::Duration;

use opentelemetry::{KeyValue, Value};
use opentelemetry_otlp::tonic_types::transport::ClientTlsConfig;
use opentelemetry_otlp::{SpanExporter, WithExportConfig, WithTonicConfig};
use opentelemetry_sdk::trace::{SpanData, SpanExporter as _};
use opentelemetry_sdk::Resource;
use tierbed_core::{Error, Result};
use tokio::runtime::{Builder, Runtime};
use tokio::time::{timeout_at, Instant};

use super::queue::{Queue, Taken};
use super::settings::{wrong_endpoint, Settings};
use super::told::spans;
use crate::log::Log;

/// Longest time for a batch, with all that is tried again.
const BATCH_TIME: Duration = Duration::from_secs(30);
/// Time between two lines of the log about spans that are not sent.
const WARNING_TIME: Duration = Duration::from_secs(60);

/// Starts the thread; what is returned ends with it.
///
/// # Errors
/// `Invalid` for an address that is none, `Io` when the thread cannot be made.
pub(super) fn start(settings: Settings, queue: Arc<Queue>, log: Arc<Log>) -> Result<Receiver<()>> {
    let cannot = |cause| Error::os("cannot start the thread that sends spans", cause);
    let runtime = Builder::new_current_thread().enable_all().build().map_err(cannot)?;
    let exporter = exporter(&runtime, &settings.endpoint)?;
    let (ends, ended) = sync_channel(1);
    let sender = Sender { exporter, queue, log, batch_spans_max: settings.sizes.batch_spans_max };
    std::thread::Builder::new()
        .name("tierbed-spans".to_owned())
        .spawn(move || {
            runtime.block_on(sender.run());
            // A name that is looked up is not waited for.
            runtime.shutdown_background();
            drop(ends);
        })
        .map_err(cannot)?;
    Ok(ended)
}

fn exporter(runtime: &Runtime, endpoint: &str) -> Result<SpanExporter> {
    let _entered = runtime.enter();
    let mut builder = SpanExporter::builder().with_tonic().with_endpoint(endpoint);
    if endpoint.starts_with("https://") {
        builder = builder.with_tls_config(ClientTlsConfig::new().with_enabled_roots());
    }
    let built = builder.build();
    let mut exporter =
        built.map_err(|cause| wrong_endpoint(endpoint).with("cause", cause.to_string()))?;
    exporter.set_resource(&resource());
    Ok(exporter)
}

/// Returns what all spans have in common: the environment's words go before ours.
fn resource() -> Resource {
    let known = Resource::builder().build();
    let is_named = |name: &Value| !name.as_str().starts_with("unknown_service");
    let mut builder = Resource::builder();
    if !known.get_ref(&"service.name".into()).is_some_and(is_named) {
        builder = builder.with_service_name("tierbed");
    }
    if known.get_ref(&"service.version".into()).is_none() {
        let version = env!("CARGO_PKG_VERSION");
        builder = builder.with_attribute(KeyValue::new("service.version", version));
    }
    builder.build()
}

struct Sender {
    exporter: SpanExporter,
    queue: Arc<Queue>,
    log: Arc<Log>,
    batch_spans_max: usize,
}

/// When the log was told last, and what was dropped since.
#[derive(Default)]
struct Warned {
    last: Option<Instant>,
    dropped: u64,
}

impl Sender {
    async fn run(self) {
        let mut warned = Warned::default();
        loop {
            let Taken { ended, is_last } = self.queue.take().await;
            let mut all = ended.into_iter().flat_map(spans);
            loop {
                let batch: Vec<_> = all.by_ref().take(self.batch_spans_max).collect();
                if batch.is_empty() {
                    break;
                }
                self.send(batch, &mut warned).await;
            }
            if is_last {
                return;
            }
        }
    }

    async fn send(&self, batch: Vec<SpanData>, warned: &mut Warned) {
        let (span_count, now) = (batch.len() as u64, Instant::now());
        let end = now + BATCH_TIME;
        let end = self.queue.closes().map_or(end, |closes| end.min(closes));
        let failed = match timeout_at(end, self.exporter.export(batch)).await {
            Ok(Ok(())) => {
                self.queue.counts.sent.inc_by(span_count);
                return;
            }
            Ok(Err(cause)) => cause.to_string(),
            Err(_) => "the collector did not answer in time".to_owned(),
        };
        self.queue.counts.dropped.inc_by(span_count);
        warned.dropped += span_count;
        if warned.last.is_none_or(|last| now - last >= WARNING_TIME) {
            self.log.spans_not_sent(std::mem::take(&mut warned.dropped), &failed);
            warned.last = Some(now);
        }
    }
}
