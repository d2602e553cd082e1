//! Models of Python: a batch of numbers and rows is given away as tensors, scores come back.

use std::sync::Arc;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use tierbed_core::{Error, ErrorKind, Result};
use tierbed_serve::{Batch, ModelInputs, ModelOutput, Predictor};
use tierbed_snapshot::View;

use crate::ending::attached_or_closed;
use crate::plain::Plain;
use crate::tensors::{matrix, Tensor};

/// The configuration and the dense parameters of a published model, as Python names them.
pub(crate) const MODEL: &str = "model.json";
pub(crate) const DENSE: &str = "dense.safetensors";

/// A model of Python. It says what it takes and answers by `inputs` and `outputs`; `score(dense,
/// rows)` gets capsules of DLPack and returns a tensor per output; `successor(config, dense)` makes
/// that of a delta's model.
pub(crate) struct PythonPredictor {
    model: Py<PyAny>,
    inputs: ModelInputs,
    outputs: Vec<ModelOutput>,
}

impl PythonPredictor {
    pub(crate) fn new(py: Python<'_>, model: Py<PyAny>) -> PyResult<Self> {
        let Plain(inputs) = model.getattr(py, "inputs")?.extract(py)?;
        let Plain(outputs) = model.getattr(py, "outputs")?.extract(py)?;
        Ok(Self { model, inputs, outputs })
    }

    fn score(&self, py: Python<'_>, batch: Batch) -> PyResult<Vec<Vec<f32>>> {
        let Batch { sample_count, dense, rows } = batch;
        let given = (matrix(py, dense, sample_count)?, matrix(py, rows, sample_count)?);
        let scores = self.model.bind(py).call_method1("score", given)?;
        let scores = scores.try_iter()?.map(|score| {
            let score = Tensor::<f32>::import(&score?, "score")?;
            Ok(score.view().to_vec())
        });
        scores.collect()
    }
}

impl Predictor for PythonPredictor {
    fn inputs(&self) -> &ModelInputs {
        &self.inputs
    }

    fn outputs(&self) -> &[ModelOutput] {
        &self.outputs
    }

    fn predict(&self, batch: Batch) -> Result<Vec<Vec<f32>>> {
        attached_or_closed(|py| {
            let scored = self.score(py, batch);
            scored.map_err(|raised| failed(py, &raised, "prediction failed", ErrorKind::Io))
        })?
    }

    fn next(&self, view: &View<'_>) -> Result<Option<Arc<dyn Predictor>>> {
        let Some(dense) = view.attachment(DENSE)? else { return Ok(None) };
        let config = view.attachment(MODEL)?;
        attached_or_closed(|py| {
            let config = config.map(|config| PyBytes::new(py, &config));
            let parts = (config, PyBytes::new(py, &dense));
            let next = self.model.call_method1(py, "successor", parts);
            let next = next.and_then(|model| Self::new(py, model)).map_err(|raised| {
                failed(py, &raised, "the delta's model cannot be used", ErrorKind::Invalid)
            })?;
            Ok(Some(Arc::new(next) as Arc<dyn Predictor>))
        })?
    }
}

/// What errors of the engine know of the thing that failed.
const CONTEXT: [&str; 4] = ["path", "page_id", "table_id", "row"];

/// Turns what the model raised into an error of the kind it had in the engine, or of kind `other`.
fn failed(py: Python<'_>, raised: &PyErr, what: &str, other: ErrorKind) -> Error {
    let value = raised.value(py);
    let kind = value.getattr("kind").and_then(|kind| kind.extract::<String>());
    let kind = match kind.as_deref() {
        Ok("corruption") => ErrorKind::Corruption,
        Ok("closed") => ErrorKind::Closed,
        Ok("poisoned") => ErrorKind::Poisoned,
        // What the model calls a bad value is the client's; anything else is ours.
        _ if raised.is_instance_of::<PyValueError>(py) => ErrorKind::Invalid,
        _ => other,
    };
    let error = Error::new(kind, format!("{what}: {raised}"));
    let Ok(context) = value.getattr("context") else { return error };
    CONTEXT.into_iter().fold(error, |error, key| {
        match context.get_item(key).and_then(|value| value.extract::<String>()) {
            Ok(value) => error.with(key, value),
            Err(_) => error,
        }
    })
}
