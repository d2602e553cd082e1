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
pub(crate) fn matrix(
    py: Python<'_>,
    values: Vec<f32>,
    row_count: usize,
) -> PyResult<Bound<'_, PyAny>> {
    let width = values.len().checked_div(row_count).unwrap_or_default();
    assert_eq!(row_count * width, values.len(), "no matrix of {row_count} rows");
    let mut values = Box::new(values);
    let data = if values.is_empty() { std::ptr::null_mut() } else { values.as_mut_ptr() };
    let refused = |cause: dlpark::metadata::Error| PyBufferError::new_err(cause.to_string());
    let shape = [row_count, width];
    let prepared = Dynamic::compact(&shape).prepare_as::<DLManagedTensor>().map_err(refused)?;
    let mut tensor = prepared.initialize(values);
    tensor.set_data(data.cast::<c_void>());
    tensor.set_dtype(f32::DTYPE);
    tensor.set_device(DLDevice::CPU);
    // SAFETY: `data` points to `row_count * width` initialized elements of CPU memory, or to none.
    // The boxed vector, whose elements never move, is the tensor's context: its deleter drops it,
    // and nobody else has it. Shape and compact strides were written into the allocation.
    let tensor = unsafe { tensor.finish() };
    tensor.into_pyobject(py)
}
