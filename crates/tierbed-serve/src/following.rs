//! Files that a server follows until it stops: its tokens, those of TLS, and a folder of deltas.

use std::sync::Arc;
use std::time::Duration;

use tierbed_core::Result;
use tokio::runtime::Runtime;

use crate::deltas::Follower;
use crate::routes::Service;

/// Time between two looks.
const PAUSE: Duration = Duration::from_millis(500);

/// Follows what there is to follow.
pub(crate) fn begin(runtime: &Runtime, service: &Arc<Service>, deltas: Option<Follower>) {
    if service.tokens.is_some() {
        runtime.spawn(follow_tokens(Arc::clone(service)));
    }
    if service.tls.is_some() {
        runtime.spawn(follow_tls(Arc::clone(service)));
    }
    runtime.spawn(forget_generations(Arc::clone(service)));
    if let Some(deltas) = deltas {
        runtime.spawn(follow_deltas(Arc::clone(service), deltas));
    }
}

/// Waits for the next look; false when the server stops.
async fn pause(service: &Service) -> bool {
    let mut stopping = service.stopping.clone();
    let is_over = tokio::time::timeout(PAUSE, stopping.wait_for(|&stop| stop)).await.is_err();
    is_over
}

/// Reads the files of tokens and of TLS again, changed or not.
pub(crate) fn reload(service: &Service) {
    if let Some(tokens) = &service.tokens {
        tell_of_tokens(service, tokens.reload().map(Some));
    }
    if let Some(tls) = &service.tls {
        tell_of_tls(service, tls.reload().map(|()| true));
    }
}

async fn follow_tokens(service: Arc<Service>) {
    let Some(tokens) = &service.tokens else { return };
    while pause(&service).await {
        tell_of_tokens(&service, tokens.follow());
    }
}

fn tell_of_tokens(service: &Service, read: Result<Option<usize>>) {
    match read {
        Ok(Some(clients)) => service.log.tokens_read(clients),
        Ok(None) => {}
        Err(error) => service.log.tokens_not_read(&error),
    }
}

async fn follow_tls(service: Arc<Service>) {
    let Some(tls) = &service.tls else { return };
    while pause(&service).await {
        tell_of_tls(&service, tls.follow());
    }
}

fn tell_of_tls(service: &Service, read: Result<bool>) {
    match read {
        Ok(true) => service.log.tls_read(),
        Ok(false) => {}
        Err(error) => {
            service.metrics.tls_refused.inc();
            service.log.tls_not_read(&error);
        }
    }
}

/// Lets former generations answer no more when nobody asks for them.
async fn forget_generations(service: Arc<Service>) {
    while pause(&service).await {
        let looking = Arc::clone(&service);
        // Batches that look at them are waited for.
        let forgotten = move || looking.answering.forget_unused();
        let told = match tokio::task::spawn_blocking(forgotten).await {
            Ok(forgotten) => forgotten.map_err(|error| error.to_string()),
            Err(panic) => Err(panic.to_string()),
        };
        if let Err(message) = told {
            service.faults.note("generations", &message);
        }
    }
}

async fn follow_deltas(service: Arc<Service>, mut deltas: Follower) {
    while pause(&service).await {
        let looking = Arc::clone(&service);
        // Reading a delta and building its model take their time.
        let looked = tokio::task::spawn_blocking(move || {
            deltas.look(&looking);
            deltas
        });
        deltas = match looked.await {
            Ok(deltas) => deltas,
            Err(panic) => {
                let message = format!("deltas are followed no more: {panic}");
                service.faults.note("panic", &message);
                return service.log.panicked(&message);
            }
        };
    }
}
