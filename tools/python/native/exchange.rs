//! The measured exchange, for Python: rows are arrays in memory.

use std::sync::Mutex;

use pyo3::prelude::*;
use tierbed_core::{Error, Result};
use tierbed_exchange::{Exchange, Step, Wants};

use tierbed_io::process::Owned;

use crate::batch::BatchTensors;
use crate::errors::{run, to_python};
use crate::exchange::{join, owned, NativeExchangePlan, NativeHeap};
use crate::tensors::{check_disjoint, Tensor};

use super::array_rows::ArrayRows;

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<NativeExchangeBench>()
}

/// One rank of the measured exchange: rows are arrays in memory.
#[pyclass(frozen, module = "tierbed._native")]
pub(crate) struct NativeExchangeBench {
    state: Owned<Mutex<BenchState>>,
    feature_count: usize,
}

struct BenchState {
    exchange: Exchange,
    rows: ArrayRows,
    step: Option<Step>,
}

impl NativeExchangeBench {
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut BenchState, &mut Step) -> Result<T> + Send,
    ) -> PyResult<T> {
        run(py, || {
            let mut state = self.state.lock()?;
            let mut step = state.step.take().ok_or_else(|| Error::invalid("begin comes first"))?;
            let result = work(&mut state, &mut step);
            state.step = Some(step);
            result
        })
    }
}

#[pymethods]
impl NativeExchangeBench {
    #[new]
    fn new(
        plan: &Bound<'_, NativeExchangePlan>,
        heap: &Bound<'_, NativeHeap>,
        rank: usize,
        timeout_ms: u64,
    ) -> PyResult<Self> {
        let (heap, inner) = (heap.get(), plan.get());
        run(plan.py(), || {
            let exchange = join(inner, heap, rank, timeout_ms)?;
            let fill = |table: usize, row: u64, first: usize, out: &mut [f32]| {
                out.fill((table as u64 * 31 + row * 7 + first as u64) as f32 % 1024.0);
            };
            let rows = ArrayRows::new(&inner.plan, rank, fill);
            let state = owned(BenchState { exchange, rows, step: None });
            Ok(Self { state, feature_count: inner.plan.feature_count() })
        })
    }

    /// Publishes the ids of a batch, which every call after it uses.
    fn begin(&self, indices: &Bound<'_, PyAny>, offsets: &Bound<'_, PyAny>) -> PyResult<usize> {
        let batch = BatchTensors::import(indices, offsets, None)?;
        let bags = batch.bags(self.feature_count);
        let bags = bags.map_err(|error| to_python(indices.py(), &error))?;
        run(indices.py(), || {
            let mut state = self.state.lock()?;
            let wants = Wants { backward: false, weight_grads: false };
            let step = state.exchange.begin(&bags, wants)?;
            let sample_count = step.sample_count();
            state.step = Some(step);
            Ok(sample_count)
        })
    }

    /// Looks up and writes to all ranks; returns where this rank's output is.
    fn one_sided(&self, py: Python<'_>) -> PyResult<usize> {
        self.with(py, |state, step| Ok(state.exchange.exchange(step, &mut state.rows)?.address))
    }

    /// Looks up into `local`, and sends nothing.
    fn compute_only(&self, local: &Bound<'_, PyAny>) -> PyResult<()> {
        let mut tensor = Tensor::<f32>::import(local, "local")?;
        let local_words = tensor.view_mut().map_err(|error| to_python(local.py(), &error))?;
        self.with(local.py(), |state, step| {
            state.exchange.compute_only(step, &mut state.rows, local_words)
        })
    }

    /// Sends blocks of `local` over the shared memory, and unpacks what came into `out`.
    fn all_to_all_and_unpack(
        &self,
        local: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let py = local.py();
        let local = Tensor::<f32>::import(local, "local")?;
        let mut out = Tensor::<f32>::import(out, "out")?;
        check_disjoint(&[out.place()], &[local.place()]).map_err(|error| to_python(py, &error))?;
        let out = out.view_mut().map_err(|error| to_python(py, &error))?;
        let local = local.view();
        self.with(py, |state, step| {
            state.exchange.all_to_all(step, local)?;
            state.exchange.unpack(step, out)
        })
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        run(py, || self.state.lock()?.exchange.close())
    }
}
