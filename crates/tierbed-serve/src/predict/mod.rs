//! Predictions: what clients send of samples, and the scores of a model.
//!
//! ```text
//! JSON, safetensors, Open Inference Protocol ─▶ Given ─▶ checked: Samples
//!      ─▶ all that wait: one joint lookup ─▶ one call of the model ─▶ each its scores ─▶ encode
//! ```

pub(crate) mod batch;
pub(crate) mod bodies;
pub(crate) mod given;

use crate::body::Held;
use crate::job::Encode;
use crate::query::Query;

/// The samples of a request, checked.
#[derive(Debug)]
pub(crate) struct Samples {
    pub(crate) count: usize,
    /// `[count, dense_count]`
    pub(crate) dense: Vec<f32>,
    /// The bags of all features of the model.
    pub(crate) query: Query,
}

/// The elements of each output of the model for a request's samples.
pub(crate) type Scores = Vec<Vec<f32>>;

/// A request that was decoded and checked.
pub(crate) struct Prepared {
    pub(crate) samples: Samples,
    /// The memory of body, rows and answer.
    pub(crate) held: Held,
    /// Bytes of the answer at most.
    pub(crate) answer_bytes: usize,
    pub(crate) encode: Encode<Scores>,
}
