//! Windows of the forward order on a device, whose memory Python manages.
//!
//! The object gets addresses of the engine's memory, valid during a call, or from `open` to
//! `close`. The engine runs without the GIL, which is taken for each call.

use pyo3::prelude::*;
use tierbed_core::{Bags, Error, ErrorKind, Result};
use tierbed_kernels::FeatureLayout;
use tierbed_train::planned::device::{DeviceWindows, HostWindow, WindowChange, WindowTable};
use tierbed_train::{BatchToken, ShardedEngine, TrainEngine};

use crate::batch::BatchTensors;
use crate::ending::attached;
use crate::errors::to_python;
use crate::tensors::Tensor;

/// A `tierbed.ops.windows.device.WindowsOnDevice`.
#[derive(Debug)]
pub(crate) struct PythonWindows(Py<PyAny>);

/// First entry, entries, first word, words of a record.
type GivenTable = (u32, u32, usize, usize);

/// What a batch is stepped by: learning rate, eps, weight decay.
pub(crate) type Numbers = (f64, f64, f64);

/// Epochs, and batches of the epoch done; and the numbers of each feature.
pub(crate) type Stepped = (Option<(u64, u64)>, Vec<Numbers>);

impl PythonWindows {
    pub(crate) fn new(windows: Py<PyAny>) -> Self {
        Self(windows)
    }

    fn call<T>(
        &self,
        what: &'static str,
        work: impl FnOnce(&Bound<'_, PyAny>) -> PyResult<T>,
    ) -> Result<T> {
        attached(|py| work(self.0.bind(py)).map_err(|raised| of_python(py, what, &raised)))
    }
}

fn of_python(py: Python<'_>, what: &'static str, raised: &PyErr) -> Error {
    let invalid = py.import("tierbed.errors").and_then(|errors| errors.getattr("InvalidError"));
    let is_invalid = invalid.is_ok_and(|class| raised.is_instance(py, &class));
    let kind = if is_invalid { ErrorKind::Invalid } else { ErrorKind::Io };
    Error::new(kind, "rows on a device failed").with("call", what).with("cause", raised)
}

fn address(words: &[f32]) -> (usize, usize) {
    (words.as_ptr() as usize, words.len())
}

fn tables(window: HostWindow<'_>) -> Vec<GivenTable> {
    let given = |table: &WindowTable| {
        let WindowTable { first_entry, entry_count, first_word, record_words } = *table;
        (first_entry, entry_count, first_word, record_words)
    };
    window.tables.iter().map(given).collect()
}

impl DeviceWindows for PythonWindows {
    fn open(&self, windows: [&[f32]; 2]) -> Result<()> {
        let places = windows.map(address).to_vec();
        self.call("open", |object| object.call_method1("open", (places,)).map(drop))
    }

    fn upload(&self, window: HostWindow<'_>) -> Result<()> {
        let arguments = (address(window.words), tables(window));
        self.call("upload", |object| object.call_method1("upload", arguments).map(drop))
    }

    fn download(&self, words: &mut [f32]) -> Result<u64> {
        let place = address(words);
        self.call("download", |object| object.call_method1("download", (place,))?.extract())
    }

    fn advance(&self, change: WindowChange<'_>) -> Result<u64> {
        let WindowChange { ended, begun, carried } = change;
        let pairs = (carried.as_ptr() as usize, carried.len());
        let arguments = (address(ended), address(begun.words), tables(begun), pairs);
        self.call("advance", |object| object.call_method1("advance", arguments)?.extract())
    }

    fn close(&self) {
        // While the interpreter ends there is nothing to call any more.
        let _ = Python::try_attach(|py| self.0.bind(py).call_method0("close").map(drop));
    }
}

/// Looks a batch up on the device: writes the entry of each id to `entries`.
pub(crate) fn look_up<'py>(
    plan: &Bound<'py, crate::batch::FeaturePlan>,
    indices: &Bound<'py, PyAny>,
    offsets: &Bound<'py, PyAny>,
    entries: &Bound<'py, PyAny>,
    with: impl FnOnce(&FeatureLayout, &Bags<'_>, &mut [u32]) -> PyResult<Option<BatchToken>>,
) -> PyResult<Option<u64>> {
    let py = plan.py();
    let batch = BatchTensors::import(indices, offsets, None)?;
    let mut entries = Tensor::<i32>::import(entries, "entries")?;
    let plan = &plan.get().plan;
    let told = |error| to_python(py, &error);
    batch.check_outputs(&[entries.place()]).map_err(told)?;
    let bags = batch.bags(plan.features().len()).map_err(told)?;
    let entries = bytemuck::cast_slice_mut(entries.view_mut().map_err(told)?);
    Ok(with(plan, &bags, entries)?.map(BatchToken::number))
}

/// Counts the step of a batch that the device makes.
pub(crate) fn step(
    engine: &mut ShardedEngine,
    plan: &FeatureLayout,
    bags: &Bags<'_>,
    found: u64,
) -> Result<Stepped> {
    let unknown = || Error::invalid("the batch was not looked up");
    let found = BatchToken::of_number(found).ok_or_else(unknown)?;
    engine.check_writable()?;
    let engine = engine.single()?;
    let hypers = engine.step_on_device(plan, bags, found)?;
    let numbers = hypers.iter().map(|hyper| (hyper.lr, hyper.eps, hyper.weight_decay));
    Ok((engine.position(), numbers.collect()))
}
