//! Options and results as plain Python objects, by serde.
//!
//! What serde writes as an object, a list or a number arrives as a `dict`, a `list` or a number.
//! Options are read from the same, and from dataclasses, whose fields are the keys. `_native.pyi`
//! names the types of both sides.

use std::fmt::{self, Display};

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyFloat, PyInt, PyList, PyString, PyTuple};
use pyo3::IntoPyObjectExt;
use serde::de::DeserializeOwned;
use serde::ser::{self, Impossible, Serialize};
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
        self.0.serialize(ToPython(py)).map_err(|failure| failure.0)
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

#[derive(Debug)]
struct Failure(PyErr);

impl Display for Failure {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(out)
    }
}

impl std::error::Error for Failure {}

impl ser::Error for Failure {
    fn custom<T: Display>(message: T) -> Self {
        Self(PyTypeError::new_err(message.to_string()))
    }
}

impl From<PyErr> for Failure {
    fn from(error: PyErr) -> Self {
        Self(error)
    }
}

type Made<'py> = Result<Bound<'py, PyAny>, Failure>;

#[derive(Clone, Copy)]
struct ToPython<'py>(Python<'py>);

/// Writes numbers and the like as pyo3 does.
macro_rules! direct {
    ($($method:ident: $kind:ty),*) => {
        $(fn $method(self, value: $kind) -> Made<'py> {
            Ok(value.into_bound_py_any(self.0)?)
        })*
    };
}

impl<'py> ser::Serializer for ToPython<'py> {
    type Ok = Bound<'py, PyAny>;
    type Error = Failure;
    type SerializeSeq = Items<'py>;
    type SerializeTuple = Items<'py>;
    type SerializeTupleStruct = Items<'py>;
    type SerializeTupleVariant = Impossible<Self::Ok, Failure>;
    type SerializeMap = Fields<'py>;
    type SerializeStruct = Fields<'py>;
    type SerializeStructVariant = Impossible<Self::Ok, Failure>;

    direct!(
        serialize_bool: bool, serialize_i8: i8, serialize_i16: i16, serialize_i32: i32,
        serialize_i64: i64, serialize_u8: u8, serialize_u16: u16, serialize_u32: u32,
        serialize_u64: u64, serialize_char: char, serialize_str: &str, serialize_bytes: &[u8]
    );

    /// As the shortest decimal that is this f32: 0.1, not the f64 next to it.
    fn serialize_f32(self, value: f32) -> Made<'py> {
        let number = value.to_string().parse().map_err(<Failure as ser::Error>::custom)?;
        self.serialize_f64(number)
    }

    /// A number that is not finite, such as a mean of nothing, is `None`.
    fn serialize_f64(self, value: f64) -> Made<'py> {
        Ok(value.is_finite().then_some(value).into_bound_py_any(self.0)?)
    }

    fn serialize_none(self) -> Made<'py> {
        self.serialize_unit()
    }

    fn serialize_some<T: Serialize + ?Sized>(self, value: &T) -> Made<'py> {
        value.serialize(self)
    }

    fn serialize_unit(self) -> Made<'py> {
        Ok(self.0.None().into_bound(self.0))
    }

    fn serialize_unit_struct(self, _: &'static str) -> Made<'py> {
        self.serialize_unit()
    }

    fn serialize_unit_variant(self, _: &'static str, _: u32, variant: &'static str) -> Made<'py> {
        self.serialize_str(variant)
    }

    fn serialize_newtype_struct<T: Serialize + ?Sized>(
        self,
        _: &'static str,
        value: &T,
    ) -> Made<'py> {
        value.serialize(self)
    }

    fn serialize_newtype_variant<T: Serialize + ?Sized>(
        self,
        _: &'static str,
        _: u32,
        variant: &'static str,
        value: &T,
    ) -> Made<'py> {
        let fields = PyDict::new(self.0);
        fields.set_item(variant, value.serialize(self)?)?;
        Ok(fields.into_any())
    }

    fn serialize_seq(self, _: Option<usize>) -> Result<Items<'py>, Failure> {
        Ok(Items(PyList::empty(self.0)))
    }

    fn serialize_tuple(self, _: usize) -> Result<Items<'py>, Failure> {
        Ok(Items(PyList::empty(self.0)))
    }

    fn serialize_tuple_struct(self, _: &'static str, _: usize) -> Result<Items<'py>, Failure> {
        Ok(Items(PyList::empty(self.0)))
    }

    fn serialize_tuple_variant(
        self,
        _: &'static str,
        _: u32,
        variant: &'static str,
        _: usize,
    ) -> Result<Self::SerializeTupleVariant, Failure> {
        Err(ser::Error::custom(format!("no plain object for the variant {variant}")))
    }

    fn serialize_map(self, _: Option<usize>) -> Result<Fields<'py>, Failure> {
        Ok(Fields { dict: PyDict::new(self.0), key: None })
    }

    fn serialize_struct(self, _: &'static str, _: usize) -> Result<Fields<'py>, Failure> {
        Ok(Fields { dict: PyDict::new(self.0), key: None })
    }

    fn serialize_struct_variant(
        self,
        _: &'static str,
        _: u32,
        variant: &'static str,
        _: usize,
    ) -> Result<Self::SerializeStructVariant, Failure> {
        Err(ser::Error::custom(format!("no plain object for the variant {variant}")))
    }
}

/// A list in the making.
struct Items<'py>(Bound<'py, PyList>);

impl<'py> Items<'py> {
    fn push<T: Serialize + ?Sized>(&self, value: &T) -> Result<(), Failure> {
        Ok(self.0.append(value.serialize(ToPython(self.0.py()))?)?)
    }
}

macro_rules! sequence {
    ($($kind:ident: $method:ident),*) => {
        $(impl<'py> ser::$kind for Items<'py> {
            type Ok = Bound<'py, PyAny>;
            type Error = Failure;

            fn $method<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), Failure> {
                self.push(value)
            }

            fn end(self) -> Made<'py> {
                Ok(self.0.into_any())
            }
        })*
    };
}

sequence!(
    SerializeSeq: serialize_element,
    SerializeTuple: serialize_element,
    SerializeTupleStruct: serialize_field
);

/// A dict in the making.
struct Fields<'py> {
    dict: Bound<'py, PyDict>,
    key: Option<Bound<'py, PyAny>>,
}

impl<'py> ser::SerializeStruct for Fields<'py> {
    type Ok = Bound<'py, PyAny>;
    type Error = Failure;

    fn serialize_field<T: Serialize + ?Sized>(
        &mut self,
        key: &'static str,
        value: &T,
    ) -> Result<(), Failure> {
        Ok(self.dict.set_item(key, value.serialize(ToPython(self.dict.py()))?)?)
    }

    fn end(self) -> Made<'py> {
        Ok(self.dict.into_any())
    }
}

impl<'py> ser::SerializeMap for Fields<'py> {
    type Ok = Bound<'py, PyAny>;
    type Error = Failure;

    fn serialize_key<T: Serialize + ?Sized>(&mut self, key: &T) -> Result<(), Failure> {
        self.key = Some(key.serialize(ToPython(self.dict.py()))?);
        Ok(())
    }

    fn serialize_value<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), Failure> {
        let key = self.key.take();
        let key = key.ok_or_else(|| <Failure as ser::Error>::custom("a value without a key"))?;
        Ok(self.dict.set_item(key, value.serialize(ToPython(self.dict.py()))?)?)
    }

    fn end(self) -> Made<'py> {
        Ok(self.dict.into_any())
    }
}
