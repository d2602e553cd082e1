//! `grpc.health.v1.Health`: whether the server and its services answer.

use tokio::sync::watch;
use tonic_health::pb::health_server::HealthServer;
use tonic_health::server::{HealthReporter, HealthService};
use tonic_health::ServingStatus;

use super::{INFERENCE, QUESTION_BYTES_MAX};

/// What clients may ask about; nothing stands for the whole server.
const NAMES: [&str; 2] = ["", INFERENCE.split_at(1).1];

/// What is told of the server's health.
#[derive(Debug, Default)]
pub(crate) struct Health {
    reporter: HealthReporter,
}

impl Health {
    pub(super) fn server(&self) -> HealthServer<HealthService> {
        let service = HealthService::from_health_reporter(self.reporter.clone());
        HealthServer::new(service).max_decoding_message_size(QUESTION_BYTES_MAX)
    }

    /// Tells that the server answers.
    pub(crate) async fn begin(&self) {
        for name in NAMES {
            self.reporter.set_service_status(name, ServingStatus::Serving).await;
        }
    }

    /// Waits until the server drains, and tells so those who watch.
    pub(crate) async fn end(self, mut draining: watch::Receiver<bool>) {
        // An error means that the server was dropped: as good a reason to stop.
        let _ = draining.wait_for(|&drains| drains).await;
        for name in NAMES {
            self.reporter.set_service_status(name, ServingStatus::NotServing).await;
        }
    }
}
