//! Zero-copy views of Python tensors, with checks of dtype, shape and device.
//!
//! A view is made only of CPU memory, of the dtype asked for, in C order without gaps. Outputs
//! must not overlap inputs or each other: Rust may assume that what it writes is not read
//! through another name.

mod given;

use std::marker::PhantomData;
use std::ops::Range;

use dlpark::ffi::{DLDataType, DLDataTypeCode, DLDeviceType};
use dlpark::python::{from_dlpack, ImportRequest, ImportedDlpack};
use dlpark::{DlpackElement, DlpackFlags};
use pyo3::prelude::*;
use tierbed_core::{Error, Result};

use crate::ending::Passing;
use crate::errors::to_python;

pub(crate) use self::given::{matrix, vector};

/// A Python tensor of `T`, held while views of it live.
pub(crate) struct Tensor<T> {
    name: &'static str,
    start: *mut T,
    len: usize,
    is_read_only: bool,
    _owner: ImportedDlpack,
    _element: PhantomData<T>,
}

impl<T: DlpackElement + Copy> Tensor<T> {
    /// Imports `object`, which an error calls `name`.
    pub(crate) fn import(object: &Bound<'_, PyAny>, name: &'static str) -> PyResult<Self> {
        let py = object.py();
        // The producer may be written in Python.
        let _passing = Passing::begin_attached(py);
        let owner = import(object).map_err(|cause| {
            let error = Error::invalid("argument is not a tensor that can be shared")
                .with("argument", name)
                .with("cause", cause)
                .with(
                    "remedy",
                    "pass a dense CPU tensor without gradient, such as tensor.detach() or \
                     tensor.to_dense()",
                );
            to_python(py, &error)
        })?;
        Self::check(owner, name).map_err(|error| to_python(py, &error))
    }

    fn check(owner: ImportedDlpack, name: &'static str) -> Result<Self> {
        let wrong = |what: &str| Error::invalid(format!("argument {what}")).with("argument", name);
        let is_read_only = owner.flags().contains(DlpackFlags::READ_ONLY);
        let (start, len) = {
            let tensor = owner.validate().map_err(|cause| {
                wrong("is a damaged tensor").with("cause", format_args!("{cause:?}"))
            })?;
            if !is_host(tensor.device().device_type) {
                return Err(wrong("is not in CPU memory").with("remedy", "pass tensor.cpu()"));
            }
            if tensor.dtype() != T::DTYPE {
                return Err(wrong("has the wrong dtype")
                    .with("expected", dtype_name(T::DTYPE))
                    .with("found", dtype_name(tensor.dtype())));
            }
            if !tensor.strides().is_none_or(|strides| is_contiguous(tensor.shape(), strides)) {
                return Err(wrong("is not contiguous")
                    .with("shape", format_args!("{:?}", tensor.shape()))
                    .with("strides", format_args!("{:?}", tensor.strides()))
                    .with("remedy", "pass tensor.contiguous()"));
            }
            // SAFETY: the descriptor was validated just above and the producer, by the DLPack
            // protocol, points to `num_elements` elements of CPU memory; nothing is read here.
            let pointer = unsafe { tensor.offset_data_ptr::<T>() }
                .map_err(|cause| wrong("has no data").with("cause", format_args!("{cause:?}")))?;
            (pointer.cast_mut(), tensor.num_elements())
        };
        if len > 0 && (start.is_null() || !start.is_aligned()) {
            return Err(wrong("is not aligned to its elements"));
        }
        Ok(Self { name, start, len, is_read_only, _owner: owner, _element: PhantomData })
    }

    /// Returns the elements.
    pub(crate) fn view(&self) -> &[T] {
        if self.len == 0 {
            return &[];
        }
        // SAFETY: `check` saw a compact, aligned CPU tensor of `len` elements, `_owner` keeps it
        // alive, and outputs that overlap it are refused by `check_disjoint` before any is written.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }

    /// Returns the elements for writing.
    ///
    /// # Errors
    /// `Invalid` when the producer says that they are read-only.
    pub(crate) fn view_mut(&mut self) -> Result<&mut [T]> {
        if self.is_read_only {
            return Err(Error::invalid("argument is read-only").with("argument", self.name));
        }
        if self.len == 0 {
            return Ok(&mut []);
        }
        // SAFETY: as in `view`; that no other view of this call overlaps was checked by
        // `check_disjoint`. Other Python threads may touch the tensor at the same time, which is
        // a race of the program's own, as with any in-place operator of torch.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.start, self.len) })
    }

    /// Returns where the elements lie, for [`check_disjoint`].
    pub(crate) fn place(&self) -> Place {
        let start = self.start as usize;
        Place { name: self.name, bytes: start..start + self.len * size_of::<T>() }
    }
}

/// The addresses of a tensor.
pub(crate) struct Place {
    name: &'static str,
    bytes: Range<usize>,
}

/// Checks that no output overlaps an input or another output.
///
/// # Errors
/// `Invalid`, naming both.
pub(crate) fn check_disjoint(outputs: &[Place], inputs: &[Place]) -> Result<()> {
    for (at, output) in outputs.iter().enumerate() {
        let others = inputs.iter().chain(outputs.iter().skip(at + 1));
        for other in others {
            let is_apart = output.bytes.end <= other.bytes.start
                || other.bytes.end <= output.bytes.start
                || output.bytes.is_empty()
                || other.bytes.is_empty();
            if !is_apart {
                return Err(Error::invalid("arguments share memory")
                    .with("output", output.name)
                    .with("argument", other.name)
                    .with("remedy", "pass a tensor of its own, such as tensor.clone()"));
            }
        }
    }
    Ok(())
}

/// Tells whether elements of this shape lie in C order without gaps. Nothing is ever a stride away
/// along a dimension of one element, so that its stride may be any, as for torch.
pub(crate) fn is_contiguous(shape: &[i64], strides: &[i64]) -> bool {
    let mut after = 1;
    let is_dense = shape.iter().zip(strides).rev().all(|(size, stride)| {
        let is_next = *size == 1 || *stride == after;
        after *= size;
        is_next
    });
    is_dense || shape.contains(&0)
}

/// Tells whether memory of a device of this type is that of the host: pinned memory is, too.
fn is_host(device: DLDeviceType) -> bool {
    matches!(device, DLDeviceType::CPU | DLDeviceType::CUDAHOST | DLDeviceType::ROCMHOST)
}

/// Imports a tensor without a copy.
///
/// Of a pinned tensor, releases of torch say "pinned memory of CUDA" when they are asked for the
/// device, and "memory of the CPU" in what they export. An importer that compares the two refuses.
fn import(object: &Bound<'_, PyAny>) -> PyResult<ImportedDlpack> {
    let request = ImportRequest::new(object.as_borrowed())?;
    match request.device() {
        Ok(device) if device.device_type != DLDeviceType::CPU && is_host(device.device_type) => {
            // A capsule alone has one device, which `Tensor::check` looks at.
            let capsule = object.call_method0("__dlpack__")?;
            from_dlpack(capsule.as_borrowed(), None, None)
        }
        _ => request.import(None, Some(false)),
    }
}

fn dtype_name(dtype: DLDataType) -> String {
    let kinds = [
        (DLDataTypeCode::INT, "int"),
        (DLDataTypeCode::UINT, "uint"),
        (DLDataTypeCode::FLOAT, "float"),
        (DLDataTypeCode::BFLOAT, "bfloat"),
        (DLDataTypeCode::COMPLEX, "complex"),
    ];
    let kind = kinds.iter().find(|(code, _)| *code == dtype.code).map(|(_, kind)| *kind);
    match kind {
        Some(kind) => format!("{kind}{}", dtype.bits),
        None if dtype == DLDataType::BOOL => "bool".to_owned(),
        None => format!("{dtype:?}"),
    }
}
