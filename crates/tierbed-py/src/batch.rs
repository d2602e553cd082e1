//! A batch as Python gives it: which features it has, and its tensors.

use pyo3::prelude::*;
use tierbed_core::{Bags, Result};

use crate::errors::{run, to_python};
use crate::tensors::{check_disjoint, Tensor};

/// Which table, pooling and output columns each feature of a batch has.
#[pyclass(frozen, module = "tierbed._native")]
pub(crate) struct FeaturePlan {
    pub(crate) plan: tierbed_kernels::FeatureLayout,
}

#[pymethods]
impl FeaturePlan {
    #[getter]
    fn feature_count(&self) -> usize {
        self.plan.features().len()
    }

    #[getter]
    fn output_dim(&self) -> usize {
        self.plan.output_dim()
    }
}

/// Tensors of one batch, imported.
pub(crate) struct BatchTensors {
    indices: Tensor<i64>,
    offsets: Tensor<i64>,
    weights: Option<Tensor<f32>>,
}

impl BatchTensors {
    pub(crate) fn import(
        indices: &Bound<'_, PyAny>,
        offsets: &Bound<'_, PyAny>,
        weights: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        Ok(Self {
            indices: Tensor::import(indices, "indices")?,
            offsets: Tensor::import(offsets, "offsets")?,
            weights: weights.map(|weights| Tensor::import(weights, "weights")).transpose()?,
        })
    }

    /// Checks that no output overlaps the batch or another output.
    pub(crate) fn check_outputs(&self, outputs: &[crate::tensors::Place]) -> Result<()> {
        let mut inputs = vec![self.indices.place(), self.offsets.place()];
        inputs.extend(self.weights.as_ref().map(Tensor::place));
        check_disjoint(outputs, &inputs)
    }

    pub(crate) fn bags(&self, feature_count: usize) -> Result<Bags<'_>> {
        let weights = self.weights.as_ref().map(Tensor::view);
        Bags::new(self.indices.view(), self.offsets.view(), weights, feature_count)
    }
}

/// The tensors of one lookup, as Python gave them.
pub(crate) struct LookupArguments<'a, 'py> {
    pub(crate) indices: &'a Bound<'py, PyAny>,
    pub(crate) offsets: &'a Bound<'py, PyAny>,
    pub(crate) weights: Option<&'a Bound<'py, PyAny>>,
    pub(crate) out: &'a Bound<'py, PyAny>,
}

/// Imports and checks the tensors of a lookup, then runs `work` on them without the GIL.
pub(crate) fn run_lookup<T: Send>(
    plan: &Bound<'_, FeaturePlan>,
    arguments: &LookupArguments<'_, '_>,
    work: impl FnOnce(&tierbed_kernels::FeatureLayout, &Bags<'_>, &mut [f32]) -> Result<T> + Send,
) -> PyResult<T> {
    let py = plan.py();
    let LookupArguments { indices, offsets, weights, out } = *arguments;
    let batch = BatchTensors::import(indices, offsets, weights)?;
    let mut out = Tensor::<f32>::import(out, "out")?;
    batch.check_outputs(&[out.place()]).map_err(|error| to_python(py, &error))?;
    let plan = &plan.get().plan;
    let bags = batch.bags(plan.features().len()).map_err(|error| to_python(py, &error))?;
    let out = out.view_mut().map_err(|error| to_python(py, &error))?;
    run(py, || work(plan, &bags, out))
}

/// Imports and checks the tensors of a translation, then runs `work` on them without the GIL.
pub(crate) fn run_translate(
    plan: &Bound<'_, FeaturePlan>,
    indices: &Bound<'_, PyAny>,
    offsets: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
    work: impl FnOnce(&tierbed_kernels::FeatureLayout, &Bags<'_>, &mut [i64]) -> Result<()> + Send,
) -> PyResult<()> {
    let py = plan.py();
    let batch = BatchTensors::import(indices, offsets, None)?;
    let mut out = Tensor::<i64>::import(out, "out")?;
    batch.check_outputs(&[out.place()]).map_err(|error| to_python(py, &error))?;
    let plan = &plan.get().plan;
    let bags = batch.bags(plan.features().len()).map_err(|error| to_python(py, &error))?;
    let out = out.view_mut().map_err(|error| to_python(py, &error))?;
    run(py, || work(plan, &bags, out))
}
