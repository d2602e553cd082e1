//! Health, metadata, configuration and statistics as messages.

use super::pb::model_metadata_response::TensorMetadata;
use super::pb::model_version_policy::{Latest, PolicyChoice};
use super::pb::repository_index_response::ModelIndex;
use super::pb::{
    DataType, InferStatistics, ModelConfig, ModelConfigResponse, ModelInput, ModelMetadataResponse,
    ModelOutput, ModelReadyResponse, ModelStatistics, ModelStatisticsResponse, ModelVersionPolicy,
    RepositoryIndexResponse, ServerLiveResponse, ServerMetadataResponse, ServerReadyResponse,
    StatisticDuration,
};
use crate::oip::about::EXTENSIONS;
use crate::oip::config::{inputs, outputs, Tensor};
use crate::oip::model::Kind;
use crate::oip::stats::Times;
use crate::oip::VERSION;
use crate::routes::Service;

pub(super) fn live() -> ServerLiveResponse {
    ServerLiveResponse { live: true }
}

pub(super) fn ready(service: &Service) -> ServerReadyResponse {
    ServerReadyResponse { ready: service.is_ready() }
}

pub(super) fn model_ready(service: &Service) -> ModelReadyResponse {
    ModelReadyResponse { ready: service.is_ready() }
}

pub(super) fn server() -> ServerMetadataResponse {
    ServerMetadataResponse {
        name: "tierbed".to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        extensions: EXTENSIONS.map(str::to_owned).into(),
    }
}

pub(super) fn model(service: &Service, kind: Kind) -> ModelMetadataResponse {
    let shown = |tensors: Vec<Tensor>| {
        let shown = tensors.into_iter().map(|Tensor { name, datatype, shape, .. }| {
            TensorMetadata { name, datatype: datatype.to_owned(), shape }
        });
        shown.collect()
    };
    ModelMetadataResponse {
        name: service.models.name(kind).to_owned(),
        versions: vec![VERSION.to_owned()],
        platform: "tierbed".to_owned(),
        inputs: shown(inputs(service, kind)),
        outputs: shown(outputs(service, kind)),
    }
}

pub(super) fn config(service: &Service, kind: Kind) -> ModelConfigResponse {
    let inputs = inputs(service, kind).into_iter().map(|tensor| ModelInput {
        data_type: data_type(tensor.datatype),
        name: tensor.name,
        dims: tensor.shape,
        optional: tensor.is_optional,
    });
    let outputs = outputs(service, kind).into_iter().map(|tensor| ModelOutput {
        data_type: data_type(tensor.datatype),
        name: tensor.name,
        dims: tensor.shape,
    });
    let latest = PolicyChoice::Latest(Latest { num_versions: 1 });
    let config = ModelConfig {
        name: service.models.name(kind).to_owned(),
        platform: String::new(),
        version_policy: Some(ModelVersionPolicy { policy_choice: Some(latest) }),
        max_batch_size: 0,
        input: inputs.collect(),
        output: outputs.collect(),
        backend: "tierbed".to_owned(),
    };
    ModelConfigResponse { config: Some(config) }
}

fn data_type(name: &str) -> i32 {
    let Some(known) = DataType::from_str_name(&format!("TYPE_{name}")) else {
        panic!("{name} is no type of the protocol");
    };
    known.into()
}

/// Tells of one model, or of all.
pub(super) fn statistics(service: &Service, one: Option<Kind>) -> ModelStatisticsResponse {
    let kinds = service.kinds().filter(|kind| one.is_none_or(|one| one == *kind));
    ModelStatisticsResponse {
        model_stats: kinds.map(|kind| statistics_of(service, kind)).collect(),
    }
}

fn statistics_of(service: &Service, kind: Kind) -> ModelStatistics {
    let counts = service.models.counts(kind);
    let told = |times: &Times| Some(StatisticDuration { count: times.count(), ns: times.ns() });
    ModelStatistics {
        name: service.models.name(kind).to_owned(),
        version: VERSION.to_owned(),
        inference_count: counts.sample_count(),
        execution_count: counts.success.count(),
        inference_stats: Some(InferStatistics {
            success: told(&counts.success),
            fail: told(&counts.fail),
            queue: told(&counts.queue),
            compute_input: told(&counts.input),
            compute_infer: told(&counts.infer),
            compute_output: told(&counts.output),
            cache_hit: told(&Times::default()),
            cache_miss: told(&Times::default()),
        }),
    }
}

pub(super) fn index(service: &Service) -> RepositoryIndexResponse {
    let models = service.kinds().map(|kind| ModelIndex {
        name: service.models.name(kind).to_owned(),
        version: VERSION.to_owned(),
        state: "READY".to_owned(),
        reason: String::new(),
    });
    RepositoryIndexResponse { models: models.collect() }
}
