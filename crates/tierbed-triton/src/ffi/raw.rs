//! Declarations of what Triton's process has.

use std::ffi::{c_char, c_int, c_void};

/// Declares types that are known by their address alone.
macro_rules! opaque {
    ($($name:ident),*) => {
        $(
            #[repr(C)]
            pub(super) struct $name {
                _private: [u8; 0],
            }
        )*
    };
}

opaque!(Attribute, Backend, Error, Input, Instance, Message, Model, Output, Request, Response);

/// The version of the interface that is asked for.
pub(super) const MAJOR: u32 = 1;
/// Parameters of requests are handed over since then.
pub(super) const MINOR: u32 = 12;

/// Memory that the processor reads; every other kind is a device's, but pinned memory.
pub(super) const MEMORY_CPU: c_int = 0;
pub(super) const MEMORY_CPU_PINNED: c_int = 1;
pub(super) const PARAMETER_STRING: c_int = 0;
pub(super) const KIND_CPU: c_int = 1;
pub(super) const LOG_INFO: c_int = 0;
pub(super) const LOG_ERROR: c_int = 2;
/// The response is the request's last, the request is given back whole.
pub(super) const FINAL: u32 = 1;
pub(super) const RELEASE_ALL: u32 = 1;

/// What a call returns: null, or an error that the caller owns.
pub(super) type Status = *mut Error;
/// An address where a call puts a text that the callee keeps.
pub(super) type PutText = *mut *const c_char;

extern "C" {
    pub(super) fn TRITONSERVER_ErrorNew(code: c_int, message: *const c_char) -> Status;
    pub(super) fn TRITONSERVER_ErrorCode(error: *mut Error) -> c_int;
    pub(super) fn TRITONSERVER_ErrorMessage(error: *mut Error) -> *const c_char;
    pub(super) fn TRITONSERVER_ErrorDelete(error: *mut Error);
    pub(super) fn TRITONSERVER_LogMessage(
        level: c_int,
        file: *const c_char,
        line: c_int,
        message: *const c_char,
    ) -> Status;
    pub(super) fn TRITONSERVER_DataTypeString(datatype: c_int) -> *const c_char;
    pub(super) fn TRITONSERVER_StringToDataType(name: *const c_char) -> c_int;
    pub(super) fn TRITONSERVER_MessageNewFromSerializedJson(
        message: *mut *mut Message,
        base: *const c_char,
        byte_count: usize,
    ) -> Status;
    pub(super) fn TRITONSERVER_MessageSerializeToJson(
        message: *mut Message,
        base: PutText,
        byte_count: *mut usize,
    ) -> Status;
    pub(super) fn TRITONSERVER_MessageDelete(message: *mut Message) -> Status;

    pub(super) fn TRITONBACKEND_ApiVersion(major: *mut u32, minor: *mut u32) -> Status;
    pub(super) fn TRITONBACKEND_BackendAttributeAddPreferredInstanceGroup(
        attribute: *mut Attribute,
        kind: c_int,
        count: u64,
        device_ids: *const u64,
        id_count: u64,
    ) -> Status;

    pub(super) fn TRITONBACKEND_ModelName(model: *mut Model, name: PutText) -> Status;
    pub(super) fn TRITONBACKEND_ModelVersion(model: *mut Model, version: *mut u64) -> Status;
    pub(super) fn TRITONBACKEND_ModelRepository(
        model: *mut Model,
        kind: *mut c_int,
        location: PutText,
    ) -> Status;
    pub(super) fn TRITONBACKEND_ModelConfig(
        model: *mut Model,
        version: u32,
        config: *mut *mut Message,
    ) -> Status;
    pub(super) fn TRITONBACKEND_ModelAutoCompleteConfig(
        model: *mut Model,
        completes: *mut bool,
    ) -> Status;
    pub(super) fn TRITONBACKEND_ModelSetConfig(
        model: *mut Model,
        version: u32,
        config: *mut Message,
    ) -> Status;
    pub(super) fn TRITONBACKEND_ModelState(model: *mut Model, state: *mut *mut c_void) -> Status;
    pub(super) fn TRITONBACKEND_ModelSetState(model: *mut Model, state: *mut c_void) -> Status;

    pub(super) fn TRITONBACKEND_ModelInstanceModel(
        instance: *mut Instance,
        model: *mut *mut Model,
    ) -> Status;
    pub(super) fn TRITONBACKEND_ModelInstanceReportStatistics(
        instance: *mut Instance,
        request: *mut Request,
        success: bool,
        exec_start_ns: u64,
        compute_start_ns: u64,
        compute_end_ns: u64,
        exec_end_ns: u64,
    ) -> Status;
    pub(super) fn TRITONBACKEND_ModelInstanceReportBatchStatistics(
        instance: *mut Instance,
        batch_size: u64,
        exec_start_ns: u64,
        compute_start_ns: u64,
        compute_end_ns: u64,
        exec_end_ns: u64,
    ) -> Status;

    pub(super) fn TRITONBACKEND_RequestInputCount(request: *mut Request, count: *mut u32)
        -> Status;
    pub(super) fn TRITONBACKEND_RequestInputByIndex(
        request: *mut Request,
        index: u32,
        input: *mut *mut Input,
    ) -> Status;
    pub(super) fn TRITONBACKEND_InputProperties(
        input: *mut Input,
        name: PutText,
        datatype: *mut c_int,
        shape: *mut *const i64,
        dims_count: *mut u32,
        byte_count: *mut u64,
        buffer_count: *mut u32,
    ) -> Status;
    pub(super) fn TRITONBACKEND_InputBuffer(
        input: *mut Input,
        index: u32,
        buffer: *mut *const c_void,
        byte_count: *mut u64,
        memory: *mut c_int,
        memory_id: *mut i64,
    ) -> Status;
    pub(super) fn TRITONBACKEND_RequestOutputCount(
        request: *mut Request,
        count: *mut u32,
    ) -> Status;
    pub(super) fn TRITONBACKEND_RequestOutputName(
        request: *mut Request,
        index: u32,
        name: PutText,
    ) -> Status;
    pub(super) fn TRITONBACKEND_RequestParameterCount(
        request: *mut Request,
        count: *mut u32,
    ) -> Status;
    pub(super) fn TRITONBACKEND_RequestParameter(
        request: *mut Request,
        index: u32,
        key: PutText,
        kind: *mut c_int,
        value: *mut *const c_void,
    ) -> Status;
    pub(super) fn TRITONBACKEND_RequestRelease(request: *mut Request, flags: u32) -> Status;

    pub(super) fn TRITONBACKEND_ResponseNew(
        response: *mut *mut Response,
        request: *mut Request,
    ) -> Status;
    pub(super) fn TRITONBACKEND_ResponseSetStringParameter(
        response: *mut Response,
        name: *const c_char,
        value: *const c_char,
    ) -> Status;
    pub(super) fn TRITONBACKEND_ResponseOutput(
        response: *mut Response,
        output: *mut *mut Output,
        name: *const c_char,
        datatype: c_int,
        shape: *const i64,
        dims_count: u32,
    ) -> Status;
    pub(super) fn TRITONBACKEND_OutputBuffer(
        output: *mut Output,
        buffer: *mut *mut c_void,
        byte_count: u64,
        memory: *mut c_int,
        memory_id: *mut i64,
    ) -> Status;
    pub(super) fn TRITONBACKEND_ResponseSend(
        response: *mut Response,
        flags: u32,
        error: *mut Error,
    ) -> Status;
}
