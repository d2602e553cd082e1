//! A compiled model with the weights of a generation, called from several threads at once.

use std::ffi::{c_char, c_void, CStr};
use std::ptr::{null, null_mut};

use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use tierbed_core::{Error, ErrorKind, Result};
use tierbed_serve::{Batch, ModelOutput};

use super::about::About;
use super::calls::{torch, Handle, Pair, Torch};
use super::code::Code;
use super::refused;
use crate::tensors::is_contiguous;

/// `ConstantType::Parameter` of torch's `constant_type.h`.
const PARAMETER: i32 = 1;

/// A tensor of torch.
struct Tensor {
    torch: &'static Torch,
    handle: Handle,
}

impl Tensor {
    /// Makes one of memory that it does not own.
    ///
    /// # Safety
    /// `data` has the elements, contiguous, for as long as the tensor or a view of it lives.
    unsafe fn borrow(data: *mut c_void, shape: &[i64], dtype: i32) -> Result<Self> {
        let torch = torch()?;
        let mut strides = vec![1_i64; shape.len()];
        for at in (1..shape.len()).rev() {
            if let (Some(size), Some(&after)) = (shape.get(at), strides.get(at)) {
                let stride = after * (*size).max(1);
                if let Some(before) = strides.get_mut(at - 1) {
                    *before = stride;
                }
            }
        }
        let mut handle = null_mut();
        // SAFETY: shape and strides are read during the call; the caller answers for the data.
        let status = unsafe {
            (torch.create_tensor_from_blob_v2)(
                data,
                shape.len() as i64,
                shape.as_ptr(),
                strides.as_ptr(),
                0,
                dtype,
                (torch.device_type_cpu)(),
                -1,
                &mut handle,
                (torch.layout_strided)(),
                null(),
                0,
            )
        };
        done(status, "a tensor of the model cannot be made")?;
        Ok(Self { torch, handle })
    }

    /// Gives the tensor to who takes it.
    fn release(self) -> Handle {
        std::mem::ManuallyDrop::new(self).handle
    }

    // SAFETY: of `call`: one of the functions of torch that tell a value of this handle.
    fn ask<T: Default>(&self, call: unsafe extern "C" fn(Handle, *mut T) -> i32) -> Result<T> {
        let mut value = T::default();
        // SAFETY: the tensor lives, and the call writes one value.
        let status = unsafe { call(self.handle, &mut value) };
        done(status, "an output of the model is no tensor")?;
        Ok(value)
    }

    // SAFETY: of `call`: as of `ask`.
    fn ask_at(
        &self,
        call: unsafe extern "C" fn(Handle, i64, *mut i64) -> i32,
        dim: i64,
    ) -> Result<i64> {
        let mut value = 0;
        // SAFETY: the tensor lives, has dimension `dim`, and the call writes one value.
        let status = unsafe { call(self.handle, dim, &mut value) };
        done(status, "an output of the model has no such dimension")?;
        Ok(value)
    }

    /// Copies an output of `count` samples.
    ///
    /// # Errors
    /// `Io` for another type or shape than was said.
    fn to_vec(&self, output: &ModelOutput, count: usize) -> Result<Vec<f32>> {
        let mut shape = Vec::new();
        let mut strides = Vec::new();
        for dim in 0..self.ask(self.torch.get_dim)? {
            shape.push(self.ask_at(self.torch.get_size, dim)?);
            strides.push(self.ask_at(self.torch.get_stride, dim)?);
        }
        let expected: Vec<_> =
            [count].into_iter().chain(output.width).map(|size| size as i64).collect();
        // SAFETY: the call only returns a number.
        let is_float = self.ask(self.torch.get_dtype)? == unsafe { (self.torch.dtype_float32)() };
        if shape != expected || !is_float || !is_contiguous(&shape, &strides) {
            return Err(Error::new(
                ErrorKind::Io,
                "an output of the compiled model is another one",
            )
            .with("output", &output.name)
            .with("expected", format_args!("f32 {expected:?}"))
            .with("found", format_args!("{shape:?} of strides {strides:?}")));
        }
        let mut data = null_mut::<c_void>();
        // SAFETY: the tensor lives, and the call writes one pointer.
        let status = unsafe { (self.torch.get_data_ptr)(self.handle, &mut data) };
        done(status, "an output of the model has no data")?;
        let len = count * output.len();
        // SAFETY: a contiguous f32 tensor of the expected shape has `len` elements, and lives.
        Ok(unsafe { std::slice::from_raw_parts(data.cast::<f32>(), len) }.to_vec())
    }
}

impl Drop for Tensor {
    fn drop(&mut self) {
        // SAFETY: the handle is this tensor's own and given back once.
        unsafe { (self.torch.delete_tensor_object)(self.handle) };
    }
}

/// A line of memory at an address that any kernel takes.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct Line([u8; 64]);

/// A parameter of a generation.
struct Weight {
    tensor: Tensor,
    // Behind the tensor, which borrows it.
    _memory: Box<[Line]>,
}

impl Weight {
    fn new(view: &TensorView<'_>) -> Result<Self> {
        let data = view.data();
        let mut memory: Vec<_> = data
            .chunks(size_of::<Line>())
            .map(|chunk| {
                let mut line = Line([0; 64]);
                for (to, from) in line.0.iter_mut().zip(chunk) {
                    *to = *from;
                }
                line
            })
            .collect();
        // A tensor without elements has an address, too.
        memory.push(Line([0; 64]));
        let mut memory = memory.into_boxed_slice();
        let shape: Vec<_> = view.shape().iter().map(|size| *size as i64).collect();
        let dtype = dtype_of(view.dtype())?;
        // SAFETY: the memory holds the elements, and goes after the tensor.
        let tensor = unsafe { Tensor::borrow(memory.as_mut_ptr().cast(), &shape, dtype)? };
        Ok(Self { tensor, _memory: memory })
    }
}

fn dtype_of(dtype: Dtype) -> Result<i32> {
    let torch = torch()?;
    let call = match dtype {
        Dtype::F32 => torch.dtype_float32,
        Dtype::F64 => torch.dtype_float64,
        Dtype::F16 => torch.dtype_float16,
        Dtype::BF16 => torch.dtype_bfloat16,
        Dtype::I64 => torch.dtype_int64,
        Dtype::I32 => torch.dtype_int32,
        Dtype::U8 => torch.dtype_uint8,
        Dtype::I8 => torch.dtype_int8,
        Dtype::BOOL => torch.dtype_bool,
        other => {
            return Err(refused("a compiled model has no parameters of this type")
                .with("dtype", format_args!("{other:?}")))
        }
    };
    // SAFETY: the call only returns a number.
    Ok(unsafe { call() })
}

/// A compiled model, ready to be asked.
pub(super) struct Container {
    code: &'static Code,
    handle: Handle,
    // Behind the container, which reads them.
    weights: Vec<Weight>,
}

// SAFETY: torch's container keeps a model for each concurrent call behind its own locks. Weights
// are not written after `new`.
unsafe impl Send for Container {}
// SAFETY: as above.
unsafe impl Sync for Container {}

impl Container {
    /// Makes one for `threads` calls at once, with the parameters in `dense`.
    ///
    /// # Errors
    /// `Invalid` for parameters other than those that were compiled, `Corruption` for bytes that
    /// are none.
    pub(super) fn new(
        code: &'static Code,
        about: &About,
        dense: &[u8],
        threads: usize,
    ) -> Result<Self> {
        let mut handle = null_mut();
        // SAFETY: the handle is written; the texts are read during the call.
        let status =
            unsafe { (code.calls.CreateWithDevice)(&mut handle, threads, c"cpu".as_ptr(), null()) };
        done(status, "the compiled model cannot be set up")?;
        let mut container = Self { code, handle, weights: Vec::new() };
        let inputs: usize = container.ask(code.calls.GetNumInputs)?;
        let outputs: usize = container.ask(code.calls.GetNumOutputs)?;
        if (inputs, outputs) != (2, about.outputs.len()) {
            return Err(refused("the compiled model takes or answers something else")
                .with("inputs", inputs)
                .with("outputs", outputs));
        }
        container.take(about, dense)?;
        Ok(container)
    }

    // SAFETY: of `call`: one of the functions of torch that tell a value of this handle.
    fn ask<T: Default>(&self, call: unsafe extern "C" fn(Handle, *mut T) -> i32) -> Result<T> {
        let mut value = T::default();
        // SAFETY: the container lives, and the call writes one value.
        let status = unsafe { call(self.handle, &mut value) };
        done(status, "the compiled model does not tell itself")?;
        Ok(value)
    }

    // SAFETY: of `call`: as of `ask`.
    fn ask_at<T>(
        &self,
        call: unsafe extern "C" fn(Handle, usize, *mut T) -> i32,
        at: usize,
        mut value: T,
    ) -> Result<T> {
        // SAFETY: the container lives and has constant `at`; the call writes one value.
        let status = unsafe { call(self.handle, at, &mut value) };
        done(status, "the compiled model does not tell its constants")?;
        Ok(value)
    }

    /// Puts the parameters of a generation in the place of those that were compiled.
    fn take(&mut self, about: &About, dense: &[u8]) -> Result<()> {
        let dense = SafeTensors::deserialize(dense).map_err(|cause| {
            Error::corruption("dense parameters cannot be read").with("cause", cause)
        })?;
        let calls = &self.code.calls;
        let mut names = Vec::new();
        for at in 0..self.ask::<usize>(calls.GetNumConstants)? {
            let original = self.ask_at(calls.GetConstantOriginalFQN, at, null())?;
            // SAFETY: texts of the container live as long as it.
            let original = unsafe { text(original) }?;
            let Some(parameter) = about.parameters.get(original) else {
                if self.ask_at(calls.GetConstantType, at, 0)? == PARAMETER {
                    return Err(refused("the compiled model has a parameter of no name")
                        .with("parameter", original));
                }
                // A constant of the code itself.
                continue;
            };
            let view = dense.tensor(&parameter.name).map_err(|cause| {
                refused("the parameters lack one of the compiled model")
                    .with("parameter", &parameter.name)
                    .with("cause", cause)
            })?;
            let dtype = self.ask_at(calls.GetConstantDtype, at, 0)?;
            if view.shape() != parameter.shape || dtype_of(view.dtype())? != dtype {
                return Err(refused("a parameter is not that of the compiled model")
                    .with("parameter", &parameter.name)
                    .with("found", format_args!("{:?} {:?}", view.dtype(), view.shape()))
                    .with("expected", format_args!("{:?}", parameter.shape)));
            }
            self.weights.push(Weight::new(&view)?);
            names.push(self.ask_at(calls.GetConstantName, at, null())?);
        }
        let named = names.into_iter().zip(&self.weights);
        let pairs: Vec<_> =
            named.map(|(name, weight)| Pair { name, tensor: weight.tensor.handle }).collect();
        // SAFETY: the pairs are read during the call; their tensors live as long as the container.
        let status = unsafe {
            (calls.UpdateUserManagedConstantBufferPairs)(
                self.handle,
                pairs.as_ptr(),
                pairs.len(),
                false,
                false,
            )
        };
        done(status, "the compiled model does not take its parameters")
    }

    /// Scores a batch.
    ///
    /// # Errors
    /// `Io` when the code failed, or answers something else than `outputs`.
    pub(super) fn run(&self, batch: Batch, outputs: &[ModelOutput]) -> Result<Vec<Vec<f32>>> {
        let Batch { sample_count, mut dense, mut rows } = batch;
        let given = [matrix(&mut dense, sample_count)?, matrix(&mut rows, sample_count)?];
        let mut given = given.map(Tensor::release);
        let mut made = vec![null_mut(); outputs.len()];
        // SAFETY: the model has two inputs, which it frees, and as many outputs as `made`. The
        // inputs' memory lives until the outputs, which may be views of it, are copied.
        let status = unsafe {
            (self.code.calls.Run)(
                self.handle,
                given.as_mut_ptr(),
                given.len(),
                made.as_mut_ptr(),
                made.len(),
                null_mut(),
                null_mut(),
            )
        };
        done(status, "the compiled model failed")?;
        let torch = torch()?;
        let made: Vec<_> = made.into_iter().map(|handle| Tensor { torch, handle }).collect();
        let copied = made.iter().zip(outputs);
        copied.map(|(tensor, output)| tensor.to_vec(output, sample_count)).collect()
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        // SAFETY: the handle is this container's own, given back once, and nobody is within.
        unsafe { (self.code.calls.Delete)(self.handle) };
    }
}

/// Makes an input of `values`, which outlive it.
fn matrix(values: &mut [f32], count: usize) -> Result<Tensor> {
    let width = values.len().checked_div(count).unwrap_or_default();
    assert_eq!(count * width, values.len(), "no matrix of {count} rows");
    let torch = torch()?;
    // SAFETY: the call only returns a number.
    let dtype = unsafe { (torch.dtype_float32)() };
    // SAFETY: the values live until the model has answered.
    unsafe { Tensor::borrow(values.as_mut_ptr().cast(), &[count as i64, width as i64], dtype) }
}

/// # Safety
/// `text` is one of C that lives as long as the result.
unsafe fn text<'a>(text: *const c_char) -> Result<&'a str> {
    // SAFETY: the caller's.
    unsafe { CStr::from_ptr(text) }.to_str().map_err(|cause| {
        refused("the compiled model has a constant whose name is no text").with("cause", cause)
    })
}

fn done(status: i32, what: &str) -> Result<()> {
    if status == 0 {
        return Ok(());
    }
    // The fault is the server's. Torch tells the cause to standard error alone.
    Err(Error::new(ErrorKind::Io, what).with("status", status).with(
        "remedy",
        "read the line before on the server's standard error, or leave predict at python",
    ))
}
