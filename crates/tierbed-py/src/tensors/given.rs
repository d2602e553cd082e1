//! Memory of ours that Python gets as a tensor, not copied.

use std::ffi::c_void;

use dlpark::ffi::{DLDevice, DLManagedTensor};
use dlpark::metadata::Dynamic;
use dlpark::DlpackElement;
use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;

/// Gives `values` away as a matrix of `row_count` rows: a capsule of DLPack, which one consumer
/// takes. The memory is freed when the tensor is.
///
/// # Panics
/// When they are not as many whole rows.
pub(crate) fn matrix<T: DlpackElement + Send>(
    py: Python<'_>,
    values: Vec<T>,
    row_count: usize,
) -> PyResult<Bound<'_, PyAny>> {
    let width = values.len().checked_div(row_count).unwrap_or_default();
    given(py, values, &[row_count, width])
}

/// Gives `values` away as a vector, as [`matrix`] does.
pub(crate) fn vector<T: DlpackElement + Send>(
    py: Python<'_>,
    values: Vec<T>,
) -> PyResult<Bound<'_, PyAny>> {
    let count = values.len();
    given(py, values, &[count])
}

fn given<'py, T: DlpackElement + Send>(
    py: Python<'py>,
    values: Vec<T>,
    shape: &[usize],
) -> PyResult<Bound<'py, PyAny>> {
    assert_eq!(shape.iter().product::<usize>(), values.len(), "no tensor of shape {shape:?}");
    let mut values = Box::new(values);
    let data = if values.is_empty() { std::ptr::null_mut() } else { values.as_mut_ptr() };
    let refused = |cause: dlpark::metadata::Error| PyBufferError::new_err(cause.to_string());
    let prepared = Dynamic::compact(shape).prepare_as::<DLManagedTensor>().map_err(refused)?;
    let mut tensor = prepared.initialize(values);
    tensor.set_data(data.cast::<c_void>());
    tensor.set_dtype(T::DTYPE);
    tensor.set_device(DLDevice::CPU);
    // SAFETY: `data` points to as many initialized elements of CPU memory as `shape` says, or to
    // none. The boxed vector, whose elements never move, is the tensor's context: its deleter
    // drops it, and nobody else has it. Shape and strides were written into the allocation.
    let tensor = unsafe { tensor.finish() };
    tensor.into_pyobject(py)
}
