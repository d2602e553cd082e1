//! Input tensors of a request: of JSON, or slices of the body.

use axum::body::Bytes;
use tierbed_core::{Error, Result};

use super::data::numbers;
use super::head::Input;
use crate::query::Ids;

/// One tensor.
#[derive(Debug)]
pub(crate) struct Tensor {
    pub(super) name: String,
    pub(super) shape: Vec<usize>,
    data: Data,
}

/// The elements of a tensor.
#[derive(Debug)]
pub(crate) enum Data {
    Integers(Ids),
    Floats(Vec<f32>),
}

impl Data {
    fn len(&self) -> usize {
        match self {
            Self::Integers(ids) => ids.len(),
            Self::Floats(values) => values.len(),
        }
    }
}

impl Tensor {
    /// Gives elements their name and shape.
    ///
    /// # Errors
    /// `Invalid` for a shape of another number of elements.
    pub(crate) fn new(name: String, shape: Vec<usize>, data: Data) -> Result<Self> {
        let sizes = shape.iter();
        let element_count = sizes.copied().try_fold(1_usize, usize::checked_mul);
        if element_count != Some(data.len()) {
            return Err(Error::invalid("input has another number of elements than its shape")
                .with("shape", format_args!("{shape:?}"))
                .with("found", data.len()));
        }
        Ok(Self { name, shape, data })
    }

    /// Takes the tensor as whole numbers.
    ///
    /// # Errors
    /// `Invalid` when it has others.
    pub(crate) fn integers(self) -> Result<Ids> {
        match self.data {
            Data::Integers(ids) => Ok(ids),
            Data::Floats(_) => Err(of_type(&self.name, "INT64")),
        }
    }

    /// Takes the tensor as 32-bit numbers.
    ///
    /// # Errors
    /// `Invalid` when it has others.
    pub(super) fn floats(self) -> Result<Vec<f32>> {
        match self.data {
            Data::Floats(values) => Ok(values),
            Data::Integers(_) => Err(of_type(&self.name, "FP32")),
        }
    }

    /// Returns the two lengths of a matrix.
    ///
    /// # Errors
    /// `Invalid` for another number of dimensions.
    pub(super) fn matrix(&self) -> Result<[usize; 2]> {
        self.shape.as_slice().try_into().map_err(|_| self.misshapen("two dimensions"))
    }

    /// Checks that there is one dimension.
    ///
    /// # Errors
    /// `Invalid` for others.
    pub(super) fn check_flat(&self) -> Result<()> {
        if self.shape.len() == 1 {
            Ok(())
        } else {
            Err(self.misshapen("one dimension"))
        }
    }

    pub(super) fn misshapen(&self, expected: impl std::fmt::Display) -> Error {
        Error::invalid("tensor has another shape")
            .with("tensor", &self.name)
            .with("expected", expected)
            .with("found", format_args!("{:?}", self.shape))
    }
}

fn of_type(name: &str, expected: &str) -> Error {
    Error::invalid("tensor has another datatype").with("tensor", name).with("expected", expected)
}

/// Reads the tensors of a request; `binary` holds those that are not JSON, one after another.
///
/// # Errors
/// `Invalid` for names that occur twice, types that are not taken, and lengths that do not fit.
pub(super) fn read(inputs: Vec<Input<'_>>, mut binary: Bytes) -> Result<Vec<Tensor>> {
    let tensors = collect(inputs, |input| {
        let name = input.name.clone().into_owned();
        (name, one(input, &mut binary))
    })?;
    if !binary.is_empty() {
        return Err(
            Error::invalid("body has more bytes than its inputs").with("left_bytes", binary.len())
        );
    }
    Ok(tensors)
}

/// Reads inputs one by one, with their names.
///
/// # Errors
/// `Invalid` for names that occur twice; those of `read`, with the name.
pub(crate) fn collect<T>(
    inputs: Vec<T>,
    mut read: impl FnMut(T) -> (String, Result<Tensor>),
) -> Result<Vec<Tensor>> {
    let mut tensors: Vec<Tensor> = Vec::with_capacity(inputs.len());
    for input in inputs {
        let (name, tensor) = read(input);
        if tensors.iter().any(|known| known.name == name) {
            return Err(Error::invalid("input occurs twice").with("tensor", name));
        }
        tensors.push(tensor.map_err(|error| error.with("tensor", name))?);
    }
    Ok(tensors)
}

fn one(input: Input<'_>, binary: &mut Bytes) -> Result<Tensor> {
    let size = input.parameters.and_then(|parameters| parameters.binary_data_size);
    let data = match (size, input.data) {
        (Some(size), None) => {
            if size > binary.len() {
                return Err(Error::invalid("body ends within an input")
                    .with("binary_data_size", size)
                    .with("left_bytes", binary.len()));
            }
            Data::from_bytes(&input.datatype, binary.split_to(size))?
        }
        (None, Some(json)) => from_json(&input.datatype, json.get())?,
        _ => {
            return Err(Error::invalid("input needs either data or binary_data_size")
                .with("remedy", "send the data in the body; shared memory is not supported"))
        }
    };
    Tensor::new(input.name.into_owned(), input.shape, data)
}

impl Data {
    /// Decodes the bytes of a binary tensor.
    ///
    /// # Errors
    /// `Invalid` for types that are not taken, and bytes that are no whole elements.
    pub(crate) fn from_bytes(datatype: &str, bytes: Bytes) -> Result<Self> {
        let size = match datatype {
            "INT64" => 8,
            "INT32" | "FP32" => 4,
            _ => return Err(unknown(datatype)),
        };
        if !bytes.len().is_multiple_of(size) {
            return Err(Error::invalid("binary data is no multiple of the element's size")
                .with("bytes", bytes.len())
                .with("datatype", datatype));
        }
        let (words, _) = bytes.as_chunks();
        Ok(match datatype {
            "INT64" => Self::Integers(Ids::from_le(bytes)),
            "INT32" => {
                let wide = words.iter().map(|word| i64::from(i32::from_le_bytes(*word)));
                Self::Integers(Ids::Copied(wide.collect()))
            }
            _ => Self::Floats(words.iter().map(|word| f32::from_le_bytes(*word)).collect()),
        })
    }
}

/// Reads the lengths of a tensor.
///
/// # Errors
/// `Invalid` for one below 0.
pub(crate) fn lengths(shape: &[i64]) -> Result<Vec<usize>> {
    let lengths = shape.iter().map(|length| usize::try_from(*length));
    lengths.collect::<std::result::Result<_, _>>().map_err(|_| {
        Error::invalid("length of a dimension is below 0").with("shape", format_args!("{shape:?}"))
    })
}

fn from_json(datatype: &str, json: &str) -> Result<Data> {
    match datatype {
        "INT64" | "INT32" => Ok(Data::Integers(Ids::Copied(numbers(json)?))),
        "FP32" => Ok(Data::Floats(numbers(json)?)),
        _ => Err(unknown(datatype)),
    }
}

/// A type that no model takes.
pub(crate) fn unknown(datatype: &str) -> Error {
    Error::invalid("datatype is not taken")
        .with("expected", "INT64, INT32 or FP32")
        .with("found", format_args!("{datatype:?}"))
}
