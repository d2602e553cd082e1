//! Input tensors of a request: of JSON, or slices of the body.

use axum::body::Bytes;
use tierbed_core::{Error, Result};

use super::data::numbers;
use super::head::Input;
use crate::query::Ids;

/// One tensor.
#[derive(Debug)]
pub(super) struct Tensor {
    pub(super) name: String,
    pub(super) shape: Vec<usize>,
    data: Data,
}

#[derive(Debug)]
enum Data {
    Integers(Ids),
    Floats(Vec<f32>),
}

impl Tensor {
    /// Takes the tensor as whole numbers.
    ///
    /// # Errors
    /// `Invalid` when it has others.
    pub(super) fn integers(self) -> Result<Ids> {
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
    let mut tensors: Vec<Tensor> = Vec::with_capacity(inputs.len());
    for input in inputs {
        let name = input.name.clone().into_owned();
        if tensors.iter().any(|known| known.name == name) {
            return Err(Error::invalid("input occurs twice").with("tensor", name));
        }
        let tensor = one(input, &mut binary).map_err(|error| error.with("tensor", name))?;
        tensors.push(tensor);
    }
    if !binary.is_empty() {
        return Err(
            Error::invalid("body has more bytes than its inputs").with("left_bytes", binary.len())
        );
    }
    Ok(tensors)
}

fn one(input: Input<'_>, binary: &mut Bytes) -> Result<Tensor> {
    let sizes = input.shape.iter();
    let element_count = sizes.copied().try_fold(1_usize, usize::checked_mul);
    let size = input.parameters.and_then(|parameters| parameters.binary_data_size);
    let (data, found) = match (size, input.data) {
        (Some(size), None) => {
            if size > binary.len() {
                return Err(Error::invalid("body ends within an input")
                    .with("binary_data_size", size)
                    .with("left_bytes", binary.len()));
            }
            from_bytes(&input.datatype, binary.split_to(size))?
        }
        (None, Some(json)) => from_json(&input.datatype, json.get())?,
        _ => {
            return Err(Error::invalid("input needs either data or binary_data_size")
                .with("remedy", "send the data in the body; shared memory is not supported"))
        }
    };
    if element_count != Some(found) {
        return Err(Error::invalid("input has another number of elements than its shape")
            .with("shape", format_args!("{:?}", input.shape))
            .with("found", found));
    }
    Ok(Tensor { name: input.name.into_owned(), shape: input.shape, data })
}

/// Decodes a binary tensor; returns its elements, and how many they are.
fn from_bytes(datatype: &str, bytes: Bytes) -> Result<(Data, usize)> {
    let size = match datatype {
        "INT64" => 8,
        "INT32" | "FP32" => 4,
        _ => return Err(unknown(datatype)),
    };
    if !bytes.len().is_multiple_of(size) {
        return Err(Error::invalid("binary_data_size is no multiple of the element's size")
            .with("binary_data_size", bytes.len())
            .with("datatype", datatype));
    }
    let found = bytes.len() / size;
    let (words, _) = bytes.as_chunks();
    let data = match datatype {
        "INT64" => Data::Integers(Ids::from_le(bytes)),
        "INT32" => {
            let wide = words.iter().map(|word| i64::from(i32::from_le_bytes(*word)));
            Data::Integers(Ids::Copied(wide.collect()))
        }
        _ => Data::Floats(words.iter().map(|word| f32::from_le_bytes(*word)).collect()),
    };
    Ok((data, found))
}

fn from_json(datatype: &str, json: &str) -> Result<(Data, usize)> {
    match datatype {
        "INT64" | "INT32" => {
            let values = numbers(json)?;
            let found = values.len();
            Ok((Data::Integers(Ids::Copied(values)), found))
        }
        "FP32" => {
            let values = numbers(json)?;
            let found = values.len();
            Ok((Data::Floats(values), found))
        }
        _ => Err(unknown(datatype)),
    }
}

fn unknown(datatype: &str) -> Error {
    Error::invalid("datatype is not taken")
        .with("expected", "INT64, INT32 or FP32")
        .with("found", format_args!("{datatype:?}"))
}
