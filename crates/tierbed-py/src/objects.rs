//! Objects of a folder or a bucket, for Python.

use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyBytes;
use tierbed_core::Error;
use tierbed_remote::{open_objects, Objects, Put, Shared, When};

use crate::errors::run;

/// Objects below a path or an address; calls come from any thread.
#[pyclass(frozen, module = "tierbed._native")]
pub(crate) struct NativeObjects {
    objects: Arc<dyn Objects>,
}

#[pymethods]
impl NativeObjects {
    #[new]
    fn new(py: Python<'_>, location: &str) -> PyResult<Self> {
        run(py, || Ok(Self { objects: open_objects(location)? }))
    }

    /// Lists all objects: name and bytes of each, in ascending order of names.
    fn list(&self, py: Python<'_>) -> PyResult<Vec<(String, u64)>> {
        run(py, || {
            let listed = self.objects.list(None)?;
            Ok(listed.into_iter().map(|object| (object.name, object.bytes)).collect())
        })
    }

    /// Reads an object whole; `None` when there is none.
    fn get<'py>(
        &self,
        py: Python<'py>,
        name: &str,
        bytes_max: u64,
    ) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let found = run(py, || self.objects.get(name, bytes_max))?;
        Ok(found.map(|found| PyBytes::new(py, &found.bytes)))
    }

    /// Reads bytes `start..end` of an object; `None` when there is none.
    fn get_range<'py>(
        &self,
        py: Python<'py>,
        name: &str,
        start: u64,
        end: u64,
    ) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let found = run(py, || self.objects.get_range(name, start..end))?;
        Ok(found.map(|bytes| PyBytes::new(py, &bytes)))
    }

    /// Writes an object whole; false when it should be absent and is not.
    fn put(&self, py: Python<'_>, name: &str, raw: PyBackedBytes, is_new: bool) -> PyResult<bool> {
        let when = if is_new { When::Absent } else { When::Always };
        let bytes: Shared = Arc::new(raw);
        run(py, || Ok(self.objects.put_shared(name, bytes, &when)? == Put::Done))
    }

    /// Writes an object in chunks of `chunk_bytes`, some of them at the same time.
    fn put_large(
        &self,
        py: Python<'_>,
        name: &str,
        raw: PyBackedBytes,
        chunk_bytes: usize,
    ) -> PyResult<()> {
        run(py, || {
            if chunk_bytes == 0 {
                return Err(Error::invalid("chunks have bytes"));
            }
            let chunks = raw.chunks(chunk_bytes);
            self.objects.put_large(name, &mut chunks.map(|chunk| Ok(chunk.to_vec())))
        })
    }

    /// Removes an object; fine when there is none.
    fn remove(&self, py: Python<'_>, name: &str) -> PyResult<()> {
        run(py, || self.objects.remove(name))
    }
}
