//! A small host in place of Triton.
//!
//! Its handles are addresses of the types here. In tests these functions are those that the backend
//! calls.

use std::cell::Cell;
use std::ffi::{c_char, c_int, c_void, CStr, CString};
use std::ptr;

use serde_json::Value;

/// Numbers of Triton's interface.
const INT64: c_int = 9;
const FP32: c_int = 11;

pub(super) struct Error {
    pub(super) code: c_int,
    pub(super) message: CString,
}

pub(super) struct Model {
    pub(super) config: CString,
    pub(super) home: CString,
    pub(super) state: *mut c_void,
    pub(super) completed: Option<Value>,
}

pub(super) struct Instance {
    pub(super) model: *mut Model,
    /// Samples of each call.
    pub(super) batches: Vec<u64>,
    pub(super) reported: Vec<bool>,
}

pub(super) struct Input {
    pub(super) name: CString,
    pub(super) shape: Vec<i64>,
    /// Each buffer has some of them.
    pub(super) buffers: Vec<Vec<i64>>,
    pub(super) memory: c_int,
}

#[derive(Default)]
pub(super) struct Request {
    pub(super) inputs: Vec<Input>,
    pub(super) outputs: Vec<CString>,
    /// The kind of its parameter `pooling`.
    pub(super) parameter: c_int,
    pub(super) response: Option<Result<Vec<Output>, (c_int, String)>>,
    pub(super) release_count: usize,
}

thread_local! {
    /// The version of the interface, below 1.
    pub(super) static MINOR: Cell<u32> = const { Cell::new(19) };
}

#[expect(clippy::vec_box, reason = "their addresses stay")]
pub(super) struct Response {
    pub(super) request: *mut Request,
    pub(super) outputs: Vec<Box<Output>>,
}

pub(super) struct Output {
    pub(super) name: String,
    pub(super) shape: Vec<i64>,
    pub(super) elements: Vec<f32>,
}

pub(super) fn c(text: &str) -> CString {
    CString::new(text).unwrap()
}

/// Puts a value where the backend wants it.
///
/// # Safety
/// `place` is one of a call.
unsafe fn put<T>(place: *mut T, value: T) -> *mut Error {
    // SAFETY: places are those of the backend's calls.
    unsafe { place.write(value) };
    ptr::null_mut()
}

/// Defines functions of the host.
macro_rules! host {
    ($(fn $name:ident($($argument:ident: $kind:ty),* $(,)?) $(-> $out:ty)? $body:block)*) => {
        $(
            // SAFETY: names are those of Triton's interface, which no other library here has; the
            // backend hands over addresses that it got from this host.
            #[no_mangle]
            #[allow(unused_unsafe, reason = "some only look at their arguments")]
            unsafe extern "C" fn $name($($argument: $kind),*) $(-> $out)? { unsafe { $body } }
        )*
    };
}

host! {
    fn TRITONSERVER_ErrorNew(code: c_int, message: *const c_char) -> *mut Error {
        Box::into_raw(Box::new(Error { code, message: CStr::from_ptr(message).to_owned() }))
    }
    fn TRITONSERVER_ErrorCode(error: *mut Error) -> c_int { (*error).code }
    fn TRITONSERVER_ErrorMessage(error: *mut Error) -> *const c_char {
        let error = &*error;
        error.message.as_ptr()
    }
    fn TRITONSERVER_ErrorDelete(error: *mut Error) { drop(Box::from_raw(error)) }
    fn TRITONSERVER_LogMessage(
        _level: c_int, _file: *const c_char, _line: c_int, _message: *const c_char,
    ) -> *mut Error { ptr::null_mut() }
    fn TRITONSERVER_DataTypeString(datatype: c_int) -> *const c_char {
        if datatype == INT64 { c"INT64".as_ptr() } else { c"BYTES".as_ptr() }
    }
    fn TRITONSERVER_StringToDataType(name: *const c_char) -> c_int {
        if CStr::from_ptr(name) == c"FP32" { FP32 } else { 0 }
    }
    fn TRITONSERVER_MessageNewFromSerializedJson(
        message: *mut *mut CString, base: *const u8, byte_count: usize,
    ) -> *mut Error {
        let text = std::slice::from_raw_parts(base, byte_count);
        put(message, Box::into_raw(Box::new(CString::new(text).unwrap())))
    }
    fn TRITONSERVER_MessageSerializeToJson(
        message: *mut CString, base: *mut *const c_char, byte_count: *mut usize,
    ) -> *mut Error {
        let text = &*message;
        put(byte_count, text.as_bytes().len());
        put(base, text.as_ptr())
    }
    fn TRITONSERVER_MessageDelete(message: *mut CString) -> *mut Error {
        drop(Box::from_raw(message));
        ptr::null_mut()
    }
    fn TRITONBACKEND_ApiVersion(major: *mut u32, minor: *mut u32) -> *mut Error {
        put(major, 1);
        put(minor, MINOR.get())
    }
    fn TRITONBACKEND_BackendAttributeAddPreferredInstanceGroup(
        attribute: *mut [u64; 2], kind: c_int, count: u64, _ids: *const u64, _id_count: u64,
    ) -> *mut Error { put(attribute, [kind as u64, count]) }
    fn TRITONBACKEND_ModelName(_model: *mut Model, name: *mut *const c_char) -> *mut Error {
        put(name, c"ads".as_ptr())
    }
    fn TRITONBACKEND_ModelVersion(_model: *mut Model, version: *mut u64) -> *mut Error {
        put(version, 1)
    }
    fn TRITONBACKEND_ModelRepository(
        model: *mut Model, kind: *mut c_int, location: *mut *const c_char,
    ) -> *mut Error {
        put(kind, 0);
        let model = &*model;
        put(location, model.home.as_ptr())
    }
    fn TRITONBACKEND_ModelConfig(
        model: *mut Model, _version: u32, config: *mut *mut CString,
    ) -> *mut Error {
        let model = &*model;
        put(config, Box::into_raw(Box::new(model.config.clone())))
    }
    fn TRITONBACKEND_ModelAutoCompleteConfig(
        _model: *mut Model, completes: *mut bool,
    ) -> *mut Error {
        put(completes, true)
    }
    fn TRITONBACKEND_ModelSetConfig(
        model: *mut Model, _version: u32, config: *mut CString,
    ) -> *mut Error {
        let text = &*config;
        (*model).completed = Some(serde_json::from_slice(text.as_bytes()).unwrap());
        ptr::null_mut()
    }
    fn TRITONBACKEND_ModelState(model: *mut Model, state: *mut *mut c_void) -> *mut Error {
        put(state, (*model).state)
    }
    fn TRITONBACKEND_ModelSetState(model: *mut Model, state: *mut c_void) -> *mut Error {
        (*model).state = state;
        ptr::null_mut()
    }
    fn TRITONBACKEND_ModelInstanceModel(
        instance: *mut Instance, model: *mut *mut Model,
    ) -> *mut Error { put(model, (*instance).model) }
    fn TRITONBACKEND_ModelInstanceReportStatistics(
        instance: *mut Instance, request: *mut Request, success: bool, begun: u64, looks: u64,
        found: u64, ended: u64,
    ) -> *mut Error {
        assert!(begun <= looks && looks <= found && found <= ended);
        assert_eq!((*request).release_count, 0);
        let instance = &mut *instance;
        instance.reported.push(success);
        ptr::null_mut()
    }
    fn TRITONBACKEND_ModelInstanceReportBatchStatistics(
        instance: *mut Instance, batch_size: u64, _begun: u64, _looks: u64, _found: u64,
        _ended: u64,
    ) -> *mut Error {
        let instance = &mut *instance;
        instance.batches.push(batch_size);
        ptr::null_mut()
    }
    fn TRITONBACKEND_RequestInputCount(request: *mut Request, count: *mut u32) -> *mut Error {
        let request = &*request;
        put(count, request.inputs.len() as u32)
    }
    fn TRITONBACKEND_RequestInputByIndex(
        request: *mut Request, index: u32, input: *mut *mut Input,
    ) -> *mut Error {
        let request = &mut *request;
        put(input, &mut request.inputs[index as usize])
    }
    fn TRITONBACKEND_InputProperties(
        input: *mut Input, name: *mut *const c_char, datatype: *mut c_int, shape: *mut *const i64,
        dims: *mut u32, byte_count: *mut u64, buffer_count: *mut u32,
    ) -> *mut Error {
        let input = &*input;
        put(name, input.name.as_ptr());
        put(datatype, INT64);
        put(shape, input.shape.as_ptr());
        put(dims, input.shape.len() as u32);
        put(byte_count, 8 * input.buffers.iter().map(Vec::len).sum::<usize>() as u64);
        put(buffer_count, input.buffers.len() as u32)
    }
    fn TRITONBACKEND_InputBuffer(
        input: *mut Input, index: u32, buffer: *mut *const i64, byte_count: *mut u64,
        memory: *mut c_int, _memory_id: *mut i64,
    ) -> *mut Error {
        let input = &*input;
        let part = &input.buffers[index as usize];
        put(byte_count, 8 * part.len() as u64);
        put(memory, input.memory);
        put(buffer, part.as_ptr())
    }
    fn TRITONBACKEND_RequestOutputCount(request: *mut Request, count: *mut u32) -> *mut Error {
        let request = &*request;
        put(count, request.outputs.len() as u32)
    }
    fn TRITONBACKEND_RequestOutputName(
        request: *mut Request, index: u32, name: *mut *const c_char,
    ) -> *mut Error {
        let request = &*request;
        put(name, request.outputs[index as usize].as_ptr())
    }
    fn TRITONBACKEND_RequestParameterCount(_request: *mut Request, count: *mut u32) -> *mut Error {
        put(count, 1)
    }
    fn TRITONBACKEND_RequestParameter(
        request: *mut Request, _index: u32, key: *mut *const c_char, kind: *mut c_int,
        value: *mut *const c_char,
    ) -> *mut Error {
        put(key, c"pooling".as_ptr());
        put(kind, (*request).parameter);
        put(value, c"mean".as_ptr())
    }
    fn TRITONBACKEND_RequestRelease(request: *mut Request, _flags: u32) -> *mut Error {
        (*request).release_count += 1;
        ptr::null_mut()
    }
    fn TRITONBACKEND_ResponseNew(
        response: *mut *mut Response, request: *mut Request,
    ) -> *mut Error {
        put(response, Box::into_raw(Box::new(Response { request, outputs: Vec::new() })))
    }
    fn TRITONBACKEND_ResponseSetStringParameter(
        _response: *mut Response, name: *const c_char, _value: *const c_char,
    ) -> *mut Error {
        assert_eq!(CStr::from_ptr(name), c"generation");
        ptr::null_mut()
    }
    fn TRITONBACKEND_ResponseOutput(
        response: *mut Response, output: *mut *mut Output, name: *const c_char, datatype: c_int,
        shape: *const i64, dims: u32,
    ) -> *mut Error {
        assert_eq!(datatype, FP32);
        let name = CStr::from_ptr(name).to_str().unwrap().to_owned();
        let shape = std::slice::from_raw_parts(shape, dims as usize).to_vec();
        let response = &mut *response;
        response.outputs.push(Box::new(Output { name, shape, elements: Vec::new() }));
        put(output, &mut **response.outputs.last_mut().unwrap())
    }
    fn TRITONBACKEND_OutputBuffer(
        output: *mut Output, buffer: *mut *mut f32, byte_count: u64, _memory: *mut c_int,
        _memory_id: *mut i64,
    ) -> *mut Error {
        let output = &mut *output;
        output.elements = vec![f32::NAN; byte_count as usize / 4];
        put(buffer, output.elements.as_mut_ptr())
    }
    fn TRITONBACKEND_ResponseSend(
        response: *mut Response, _flags: u32, error: *mut Error,
    ) -> *mut Error {
        let Response { request, outputs } = *Box::from_raw(response);
        let request = &mut *request;
        assert!(request.response.is_none(), "a request is answered once");
        request.response = Some(match error.as_ref() {
            Some(error) => Err((error.code, error.message.to_str().unwrap().to_owned())),
            None => Ok(outputs.into_iter().map(|output| *output).collect()),
        });
        ptr::null_mut()
    }
}
