//! Options and results as plain Python objects, by serde.
//!
//! What serde writes as an object, a list or a number arrives as a `dict`, a `list` or a number;
//! a number that is not finite, such as a mean of nothing, is `None`. Options are read from the
//! same, and from dataclasses, whose fields are the keys. `_native.pyi` names the types of both
//! sides.

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyFloat, PyInt, PyList, PyString, PyTuple};
use serde::de::DeserializeOwned;
use serde::Serialize;
use serde_json::{Map, Value};
use tierbed_core::Error;

use crate::errors::to_python;

/// A value that crosses the border as plain Python objects.
pub(crate) struct Plain<T>(pub(crate) T);

impl<'py, T: Serialize> IntoPyObject<'py> for Plain<T> {
    type Target = PyAny;
    type Output = Bound<'py, PyAny>;
    type Error = PyErr;

    fn into_pyobject(self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        // Text has the shortest decimal of a number: an f32 of 0.1 is 0.1, not the f64 next to it.
        let text = serde_json::to_string(&self.0)
            .map_err(|cause| PyTypeError::new_err(cause.to_string()))?;
        py.import("json")?.call_method1("loads", (text,))
    }
}

impl<'py, T: DeserializeOwned> FromPyObject<'_, 'py> for Plain<T> {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let given = value_of(&object)?;
        serde_json::from_value(given).map(Self).map_err(|cause| {
            let error = Error::invalid("options are wrong").with("cause", cause);
            to_python(object.py(), &error)
        })
    }
}

/// Reads a Python object: a dataclass or a dict, a list, a tuple, a path, or one value.
fn value_of(object: &Bound<'_, PyAny>) -> PyResult<Value> {
    if object.is_none() {
        return Ok(Value::Null);
    }
    if let Ok(text) = object.cast::<PyString>() {
        return Ok(Value::String(text.to_str()?.to_owned()));
    }
    if let Ok(truth) = object.cast::<PyBool>() {
        return Ok(Value::Bool(truth.is_true()));
    }
    if object.is_instance_of::<PyInt>() {
        let unsigned = object.extract::<u64>().map(Value::from);
        return unsigned.or_else(|_| object.extract::<i64>().map(Value::from)).map_err(|_| {
            let error = Error::invalid("a number of options must have 64 bits");
            to_python(object.py(), &error.with("found", object))
        });
    }
    if object.is_instance_of::<PyFloat>() {
        let number = serde_json::Number::from_f64(object.extract()?);
        return number.map(Value::Number).ok_or_else(|| {
            to_python(object.py(), &Error::invalid("a number of options must be finite"))
        });
    }
    if object.is_instance_of::<PyList>() || object.is_instance_of::<PyTuple>() {
        return object.try_iter()?.map(|item| value_of(&item?)).collect();
    }
    if let Ok(fields) = object.cast::<PyDict>() {
        return fields_of(fields);
    }
    if object.hasattr("__dataclass_fields__")? {
        return fields_of(object.getattr("__dict__")?.cast::<PyDict>()?);
    }
    if object.hasattr("__fspath__")? {
        return value_of(&object.call_method0("__fspath__")?);
    }
    let kind = object.get_type().name()?;
    Err(PyTypeError::new_err(format!("an option cannot be of type {kind}")))
}

fn fields_of(fields: &Bound<'_, PyDict>) -> PyResult<Value> {
    let pairs = fields.iter().map(|(key, item)| Ok((key.extract::<String>()?, value_of(&item)?)));
    pairs.collect::<PyResult<Map<_, _>>>().map(Value::Object)
}
