//! Tensors of each model, as metadata and Triton's model configuration tell them.

use axum::extract::State;
use axum::response::Response;
use serde_json::json;
use tierbed_snapshot::Pooling;

use super::about::told;
use super::model::{Kind, Named};
use crate::routes::{Service, Shared};

/// The output that has all pooled features side by side.
pub(super) const POOLED: &str = "pooled";

/// One tensor of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tensor {
    /// Its name in requests and answers.
    pub name: String,
    /// `INT64` or `FP32`.
    pub datatype: &'static str,
    /// Its lengths; -1 is one that requests choose.
    pub shape: Vec<i64>,
    /// Whether tools that make up requests leave it out.
    pub is_optional: bool,
}

fn tensor(name: impl Into<String>, datatype: &'static str, shape: &[i64]) -> Tensor {
    Tensor { name: name.into(), datatype, shape: shape.to_vec(), is_optional: false }
}

fn optional(name: impl Into<String>, datatype: &'static str) -> Tensor {
    Tensor { is_optional: true, ..tensor(name, datatype, &[-1]) }
}

/// Returns the inputs of a model. Of the forms of a lookup the simplest is the one that tools
/// which make up requests should use: the others are optional.
pub(crate) fn inputs(service: &Service, kind: Kind) -> Vec<Tensor> {
    let bags = [optional("values", "INT64"), optional("lengths", "INT64")];
    match kind {
        Kind::Rows => {
            let features = &service.newest().features;
            let ids = tensor("ids", "INT64", &[-1, features.len() as i64]);
            let own = features.iter().flat_map(|feature| {
                ["values", "lengths", "weights"].map(|part| {
                    let datatype = if part == "weights" { "FP32" } else { "INT64" };
                    optional(format!("{}.{part}", feature.name), datatype)
                })
            });
            let bags = bags.into_iter().chain([optional("weights", "FP32")]);
            [ids].into_iter().chain(bags).chain(own).collect()
        }
        Kind::Predictions => {
            let newest = service.newest();
            let Some(model) = newest.model.as_ref() else { return Vec::new() };
            let dense_count = model.predictor.inputs().dense_count;
            let dense = tensor("dense", "FP32", &[-1, dense_count as i64]);
            let ids = tensor("ids", "INT64", &[-1, model.features.len() as i64]);
            let dense = (dense_count != 0).then_some(dense);
            dense.into_iter().chain([ids]).chain(bags).collect()
        }
    }
}

/// Returns the outputs of a model; those that a request gets by default come first.
pub(crate) fn outputs(service: &Service, kind: Kind) -> Vec<Tensor> {
    let newest = service.newest();
    if kind == Kind::Predictions {
        let outputs = newest.model.iter().flat_map(|model| model.predictor.outputs());
        let told = outputs.map(|output| {
            let width = output.width.map(|width| width as i64);
            let shape: Vec<_> = [-1].into_iter().chain(width).collect();
            tensor(&output.name, "FP32", &shape)
        });
        return told.collect();
    }
    let features = &newest.features;
    let is_pooled = features.iter().all(|feature| feature.pooling != Pooling::None);
    let width = features.iter().map(|feature| i64::from(feature.dim)).sum();
    let pooled = is_pooled.then(|| tensor(POOLED, "FP32", &[-1, width]));
    let own = features.iter();
    let own = own.map(|feature| tensor(&feature.name, "FP32", &[-1, i64::from(feature.dim)]));
    pooled.into_iter().chain(own).collect()
}

/// Answers with what Triton's tools read of a model's configuration.
pub(super) async fn model(State(service): Shared, Named(kind): Named) -> Response {
    let shown = |tensors: Vec<Tensor>| -> Vec<_> {
        let shown = tensors.into_iter().map(|Tensor { name, datatype, shape, is_optional }| {
            let data_type = format!("TYPE_{datatype}");
            json!({ "name": name, "data_type": data_type, "dims": shape, "optional": is_optional })
        });
        shown.collect()
    };
    let mut outputs = shown(outputs(&service, kind));
    for output in outputs.iter_mut().filter_map(|output| output.as_object_mut()) {
        output.remove("optional");
    }
    told(&json!({
        "name": service.models.name(kind),
        "platform": "",
        "backend": "tierbed",
        "version_policy": { "latest": { "num_versions": 1 } },
        "max_batch_size": 0,
        "input": shown(inputs(&service, kind)),
        "output": outputs,
    }))
}
