//! What Triton hands over, without its pointers: models, instances, requests, responses.

use std::ffi::{c_char, c_int, c_void, CStr, CString};
use std::path::PathBuf;
use std::ptr;

use tierbed_core::Error;
use tierbed_serve::{HostedInput, HostedOutput};

use super::raw;
use crate::failure::{Code, Failure, Result};

/// Calls a function of Triton; its error becomes ours.
macro_rules! call {
    ($function:ident($($argument:expr),* $(,)?)) => {
        // SAFETY: handles are alive as the module says, and what is written to is the caller's.
        checked(unsafe { raw::$function($($argument),*) })
    };
}

fn checked(error: raw::Status) -> Result<()> {
    if error.is_null() {
        return Ok(());
    }
    // SAFETY: an error that is returned belongs to the caller until it is deleted.
    let (code, message) = unsafe {
        let message = text(raw::TRITONSERVER_ErrorMessage(error));
        let code = raw::TRITONSERVER_ErrorCode(error);
        raw::TRITONSERVER_ErrorDelete(error);
        (code, message)
    };
    let code = match code {
        2 => Code::NotFound,
        3 => Code::InvalidArg,
        4 => Code::Unavailable,
        5 => Code::Unsupported,
        _ => Code::Internal,
    };
    Err(Failure { code, message })
}

/// Copies a text.
///
/// # Safety
/// `from` is null, or a text that ends with a zero.
unsafe fn text(from: *const c_char) -> String {
    if from.is_null() {
        return String::new();
    }
    // SAFETY: as the caller promises.
    unsafe { CStr::from_ptr(from) }.to_string_lossy().into_owned()
}

/// Asks for a text, which is Triton's.
fn told(ask: impl FnOnce(raw::PutText) -> Result<()>) -> Result<String> {
    let mut place = ptr::null();
    ask(&mut place)?;
    // SAFETY: Triton puts texts there.
    Ok(unsafe { text(place) })
}

/// Copies elements.
///
/// # Safety
/// `from` has `len` elements, or `len` is 0.
unsafe fn copied<T: Copy>(from: *const T, len: usize) -> Vec<T> {
    if len == 0 || from.is_null() {
        return Vec::new();
    }
    // SAFETY: as the caller promises.
    unsafe { std::slice::from_raw_parts(from, len) }.to_vec()
}

/// A text for C; a zero within, which none has, becomes a question mark.
fn c_text(text: &str) -> CString {
    CString::new(text.replace('\0', "?")).unwrap_or_default()
}

impl Failure {
    /// Makes the error that a call of Triton's returns.
    pub(super) fn raise(&self) -> raw::Status {
        // SAFETY: the text is copied.
        unsafe { raw::TRITONSERVER_ErrorNew(self.code as c_int, c_text(&self.message).as_ptr()) }
    }
}

fn log(level: c_int, message: &str) {
    let (file, message) = (c_text("tierbed"), c_text(message));
    // There is nobody else to tell that the log takes nothing.
    let _ = call!(TRITONSERVER_LogMessage(level, file.as_ptr(), 0, message.as_ptr()));
}

/// Writes to Triton's log.
pub(crate) fn log_info(message: &str) {
    log(raw::LOG_INFO, message);
}

/// As [`log_info`], of what went wrong.
pub(crate) fn log_error(message: &str) {
    log(raw::LOG_ERROR, message);
}

/// Returns nanoseconds of the clock that Triton's statistics have.
pub(crate) fn now_ns() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the place is ours; every Linux has this clock.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut now) };
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Checks that Triton's interface is one that this backend was written for.
pub(super) fn check_version() -> Result<()> {
    let (mut major, mut minor) = (0, 0);
    call!(TRITONBACKEND_ApiVersion(&mut major, &mut minor))?;
    if major == raw::MAJOR && minor >= raw::MINOR {
        return Ok(());
    }
    let expected = format!("{}.{} or a later one of {}", raw::MAJOR, raw::MINOR, raw::MAJOR);
    Err(Error::unsupported("the backend does not fit this Triton")
        .with("interface", format_args!("{major}.{minor}"))
        .with("expected", expected)
        .with("remedy", "install Triton 2.32 or newer")
        .into())
}

/// Says that instances belong to the processor, `count` of them where a model does not say.
pub(super) fn prefer_processor(attribute: *mut raw::Attribute, count: u64) -> Result<()> {
    call!(TRITONBACKEND_BackendAttributeAddPreferredInstanceGroup(
        attribute,
        raw::KIND_CPU,
        count,
        ptr::null(),
        0,
    ))
}

/// A version of a model.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Model(pub(super) *mut raw::Model);

impl Model {
    pub(crate) fn name(self) -> Result<String> {
        told(|place| call!(TRITONBACKEND_ModelName(self.0, place)))
    }

    /// Returns the folder of the version.
    pub(crate) fn folder(self) -> Result<PathBuf> {
        let (mut kind, mut version) = (0, 0);
        let home = told(|place| call!(TRITONBACKEND_ModelRepository(self.0, &mut kind, place)))?;
        call!(TRITONBACKEND_ModelVersion(self.0, &mut version))?;
        Ok(PathBuf::from(home).join(version.to_string()))
    }

    /// Returns the configuration in JSON.
    pub(crate) fn config(self) -> Result<Vec<u8>> {
        let (mut message, mut base, mut len) = (ptr::null_mut(), ptr::null(), 0);
        call!(TRITONBACKEND_ModelConfig(self.0, 1, &mut message))?;
        let told = call!(TRITONSERVER_MessageSerializeToJson(message, &mut base, &mut len));
        // SAFETY: the message has so many bytes, and lives until it is deleted.
        let json = told.map(|()| unsafe { copied(base.cast::<u8>(), len) });
        call!(TRITONSERVER_MessageDelete(message))?;
        json
    }

    /// Whether the configuration may be completed.
    pub(crate) fn completes(self) -> Result<bool> {
        let mut completes = false;
        call!(TRITONBACKEND_ModelAutoCompleteConfig(self.0, &mut completes))?;
        Ok(completes)
    }

    pub(crate) fn set_config(self, json: &str) -> Result<()> {
        let mut message = ptr::null_mut();
        let base = json.as_ptr().cast();
        call!(TRITONSERVER_MessageNewFromSerializedJson(&mut message, base, json.len()))?;
        let set = call!(TRITONBACKEND_ModelSetConfig(self.0, 1, message));
        call!(TRITONSERVER_MessageDelete(message))?;
        set
    }

    fn state(self) -> Result<*mut crate::model::Model> {
        let mut state = ptr::null_mut();
        call!(TRITONBACKEND_ModelState(self.0, &mut state))?;
        Ok(state.cast())
    }

    /// Gives Triton what was loaded; until it is taken back.
    pub(super) fn put(self, model: crate::model::Model) -> Result<()> {
        let state: *mut c_void = Box::into_raw(Box::new(model)).cast();
        call!(TRITONBACKEND_ModelSetState(self.0, state))
    }

    /// Takes back what was loaded; `None` when nothing was.
    pub(super) fn take(self) -> Result<Option<Box<crate::model::Model>>> {
        let state = self.state()?;
        if state.is_null() {
            return Ok(None);
        }
        call!(TRITONBACKEND_ModelSetState(self.0, ptr::null_mut()))?;
        // SAFETY: it came from a box in `put`, and nobody finds it any more.
        Ok(Some(unsafe { Box::from_raw(state) }))
    }
}

/// When the steps of a call were, in nanoseconds.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Times {
    /// The call began.
    pub(crate) begun_ns: u64,
    /// Inputs were read.
    pub(crate) looks_ns: u64,
    /// Rows were there.
    pub(crate) found_ns: u64,
}

/// One of the threads that work for a model.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Instance(pub(super) *mut raw::Instance);

impl Instance {
    /// Returns what was loaded for the instance's model.
    pub(super) fn model<'a>(self) -> Result<&'a crate::model::Model> {
        let mut model = ptr::null_mut();
        call!(TRITONBACKEND_ModelInstanceModel(self.0, &mut model))?;
        // SAFETY: Triton ends a model after its instances, and it is changed by nobody.
        let loaded = unsafe { Model(model).state()?.as_ref() };
        loaded.ok_or_else(|| Failure::new(Code::Internal, "the model was not loaded"))
    }

    /// Tells the statistics of a request.
    pub(crate) fn report(self, request: &Request, is_answered: bool, times: Times) -> Result<()> {
        let Times { begun_ns, looks_ns, found_ns } = times;
        call!(TRITONBACKEND_ModelInstanceReportStatistics(
            self.0,
            request.0,
            is_answered,
            begun_ns,
            looks_ns,
            found_ns,
            now_ns(),
        ))
    }

    /// Tells the statistics of a call.
    pub(crate) fn report_batch(self, batch_size: u64, times: Times) -> Result<()> {
        let Times { begun_ns, looks_ns, found_ns } = times;
        call!(TRITONBACKEND_ModelInstanceReportBatchStatistics(
            self.0,
            batch_size,
            begun_ns,
            looks_ns,
            found_ns,
            now_ns(),
        ))
    }
}

/// A request, ours until it is released.
#[derive(Debug)]
pub(crate) struct Request(*mut raw::Request);

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
