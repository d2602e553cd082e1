//! Requests and their responses, without Triton's pointers.

use std::ffi::c_int;
use std::ptr;

use tierbed_core::Error;
use tierbed_serve::{HostedInput, HostedOutput};

use super::host::{c_text, call, checked, copied, text, told};
use super::raw;
use crate::failure::{Failure, Result};

/// A request, ours until it is released.
#[derive(Debug)]
pub(crate) struct Request(pub(super) *mut raw::Request);

impl Request {
    /// Wraps the requests of a call.
    ///
    /// # Safety
    /// `requests` has `count` requests.
    pub(super) unsafe fn of_call(requests: *mut *mut raw::Request, count: u32) -> Vec<Self> {
        // SAFETY: as the caller promises.
        unsafe { copied(requests, count as usize) }.into_iter().map(Self).collect()
    }

    /// Copies the inputs.
    pub(crate) fn inputs(&self) -> Result<Vec<HostedInput>> {
        let mut count = 0;
        call!(TRITONBACKEND_RequestInputCount(self.0, &mut count))?;
        let inputs = (0..count).map(|at| {
            let mut input = ptr::null_mut();
            call!(TRITONBACKEND_RequestInputByIndex(self.0, at, &mut input))?;
            read(input)
        });
        inputs.collect()
    }

    /// Returns the names of the outputs that are asked for.
    pub(crate) fn outputs(&self) -> Result<Vec<String>> {
        let mut count = 0;
        call!(TRITONBACKEND_RequestOutputCount(self.0, &mut count))?;
        let names = (0..count)
            .map(|at| told(|place| call!(TRITONBACKEND_RequestOutputName(self.0, at, place))));
        names.collect()
    }

    /// Returns a parameter that is a text.
    pub(crate) fn word(&self, name: &str) -> Result<Option<String>> {
        let mut count = 0;
        call!(TRITONBACKEND_RequestParameterCount(self.0, &mut count))?;
        for at in 0..count {
            let (mut kind, mut value) = (0, ptr::null());
            let key = told(|place| {
                call!(TRITONBACKEND_RequestParameter(self.0, at, place, &mut kind, &mut value))
            })?;
            if key != name {
                continue;
            }
            if kind != raw::PARAMETER_STRING {
                return Err(Error::invalid("a parameter of the request is no string")
                    .with("parameter", name)
                    .with("remedy", "give it as a string")
                    .into());
            }
            // SAFETY: the value of a text is its address.
            return Ok(Some(unsafe { text(value.cast()) }));
        }
        Ok(None)
    }

    /// Gives the request back.
    pub(crate) fn release(self) -> Result<()> {
        call!(TRITONBACKEND_RequestRelease(self.0, raw::RELEASE_ALL))
    }
}

/// Whether a kind of memory is one that the processor reads.
fn check_memory(memory: c_int, tensor: &str) -> Result<()> {
    match memory {
        raw::MEMORY_CPU | raw::MEMORY_CPU_PINNED => Ok(()),
        _ => Err(Error::unsupported("a tensor lies in the memory of a device")
            .with("tensor", tensor)
            .with("remedy", "send it from the processor's memory, and take answers there")
            .into()),
    }
}

fn read(input: *mut raw::Input) -> Result<HostedInput> {
    let (mut datatype, mut shape, mut dims) = (0, ptr::null(), 0);
    let (mut byte_count, mut buffer_count) = (0, 0);
    let name = told(|place| {
        call!(TRITONBACKEND_InputProperties(
            input,
            place,
            &mut datatype,
            &mut shape,
            &mut dims,
            &mut byte_count,
            &mut buffer_count,
        ))
    })?;
    let mut bytes = Vec::with_capacity(byte_count as usize);
    for at in 0..buffer_count {
        let (mut buffer, mut len) = (ptr::null(), 0);
        let (mut memory, mut memory_id) = (raw::MEMORY_CPU, 0);
        call!(TRITONBACKEND_InputBuffer(
            input,
            at,
            &mut buffer,
            &mut len,
            &mut memory,
            &mut memory_id,
        ))?;
        check_memory(memory, &name)?;
        // SAFETY: the buffer has so many bytes, until the request is released.
        bytes.extend_from_slice(&unsafe { copied(buffer.cast::<u8>(), len as usize) });
    }
    // SAFETY: names of types are constants, and a shape has so many lengths.
    let (datatype, shape) =
        unsafe { (text(raw::TRITONSERVER_DataTypeString(datatype)), copied(shape, dims as usize)) };
    Ok(HostedInput { name, datatype, shape, bytes })
}

/// The response to a request, ours until it is sent.
#[derive(Debug)]
pub(crate) struct Response(*mut raw::Response);

impl Response {
    pub(crate) fn new(request: &Request) -> Result<Self> {
        let mut response = ptr::null_mut();
        call!(TRITONBACKEND_ResponseNew(&mut response, request.0))?;
        Ok(Self(response))
    }

    /// Adds a parameter.
    pub(crate) fn tell(&self, name: &str, value: &str) -> Result<()> {
        let (name, value) = (c_text(name), c_text(value));
        call!(TRITONBACKEND_ResponseSetStringParameter(self.0, name.as_ptr(), value.as_ptr()))
    }

    /// Adds an output, and returns the room for its elements.
    pub(crate) fn output(&self, told: &HostedOutput<'_>, datatype: &str) -> Result<Room> {
        let (name, datatype) = (c_text(told.name()), c_text(datatype));
        // SAFETY: the name of a type, which ends with a zero.
        let datatype = unsafe { raw::TRITONSERVER_StringToDataType(datatype.as_ptr()) };
        let shape: Vec<i64> = told.shape().iter().map(|length| *length as i64).collect();
        let mut output = ptr::null_mut();
        call!(TRITONBACKEND_ResponseOutput(
            self.0,
            &mut output,
            name.as_ptr(),
            datatype,
            shape.as_ptr(),
            shape.len() as u32,
        ))?;
        let (mut start, len) = (ptr::null_mut(), told.byte_count());
        let (mut memory, mut memory_id) = (raw::MEMORY_CPU, 0);
        call!(TRITONBACKEND_OutputBuffer(
            output,
            &mut start,
            len as u64,
            &mut memory,
            &mut memory_id,
        ))?;
        check_memory(memory, told.name())?;
        Ok(Room { start: start.cast(), len, used: 0 })
    }

    /// Sends the outputs, or an error.
    pub(crate) fn send(self, failure: Option<&Failure>) -> Result<()> {
        let error = failure.map_or(ptr::null_mut(), Failure::raise);
        let sent = call!(TRITONBACKEND_ResponseSend(self.0, raw::FINAL, error));
        if !error.is_null() {
            // SAFETY: it was made above, and sending copied it.
            unsafe { raw::TRITONSERVER_ErrorDelete(error) };
        }
        sent
    }
}

/// Triton's memory for the elements of an output.
#[derive(Debug)]
pub(crate) struct Room {
    start: *mut u8,
    len: usize,
    used: usize,
}

impl Room {
    /// Writes what comes next.
    ///
    /// # Panics
    /// When there is no room for it.
    pub(crate) fn append(&mut self, bytes: &[u8]) {
        assert!(bytes.len() <= self.len - self.used, "an output is longer than its shape says");
        // SAFETY: the room has `len` bytes until its response is sent, and nobody else has it.
        unsafe {
            ptr::copy_nonoverlapping(bytes.as_ptr(), self.start.add(self.used), bytes.len());
        }
        self.used += bytes.len();
    }
}
