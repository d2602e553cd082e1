//! Triton without its pointers: errors, log, clock, models and instances.

use std::ffi::{c_char, c_int, c_void, CStr, CString};
use std::path::PathBuf;
use std::ptr;

use tierbed_core::Error;

use super::raw;
use super::requests::Request;
use crate::failure::{Code, Failure, Result};

/// Calls a function of Triton; its error becomes ours.
macro_rules! call {
    ($function:ident($($argument:expr),* $(,)?)) => {
        // SAFETY: handles are alive as the module says, and what is written to is the caller's.
        checked(unsafe { raw::$function($($argument),*) })
    };
}

pub(super) use call;

pub(super) fn checked(error: raw::Status) -> Result<()> {
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
pub(super) unsafe fn text(from: *const c_char) -> String {
    if from.is_null() {
        return String::new();
    }
    // SAFETY: as the caller promises.
    unsafe { CStr::from_ptr(from) }.to_string_lossy().into_owned()
}

/// Asks for a text, which is Triton's.
pub(super) fn told(ask: impl FnOnce(raw::PutText) -> Result<()>) -> Result<String> {
    let mut place = ptr::null();
    ask(&mut place)?;
    // SAFETY: Triton puts texts there.
    Ok(unsafe { text(place) })
}

/// Copies elements.
///
/// # Safety
/// `from` has `len` elements, or `len` is 0.
pub(super) unsafe fn copied<T: Copy>(from: *const T, len: usize) -> Vec<T> {
    if len == 0 || from.is_null() {
        return Vec::new();
    }
    // SAFETY: as the caller promises.
    unsafe { std::slice::from_raw_parts(from, len) }.to_vec()
}

/// A text for C; a zero within, which none has, becomes a question mark.
pub(super) fn c_text(text: &str) -> CString {
    let Ok(text) = CString::new(text.replace('\0', "?")) else { panic!("a zero is left") };
    text
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
