//! What Triton calls.

use std::panic::{catch_unwind, AssertUnwindSafe};
use std::ptr;

use tierbed_serve::ServeOptions;

use super::host::{check_version, log_info, prefer_processor, Instance, Model};
use super::raw;
use super::requests::Request;
use crate::config::Config;
use crate::execute::{answer, settle};
use crate::failure::{Failure, Result};

/// Runs the work of a call; an error of it, or its panic, is what the call returns.
pub(super) fn guarded(work: impl FnOnce() -> Result<()>) -> raw::Status {
    let done = catch_unwind(AssertUnwindSafe(work));
    match done.unwrap_or_else(|panic| Err(Failure::of_panic(&*panic))) {
        Ok(()) => ptr::null_mut(),
        Err(failure) => failure.raise(),
    }
}

/// The library was opened.
#[no_mangle]
pub(super) extern "C" fn TRITONBACKEND_Initialize(_backend: *mut raw::Backend) -> raw::Status {
    guarded(check_version)
}

/// The library is not needed any more.
#[no_mangle]
pub(super) extern "C" fn TRITONBACKEND_Finalize(_backend: *mut raw::Backend) -> raw::Status {
    ptr::null_mut()
}

/// Asks what the backend prefers: as many instances as a server has threads that look up.
#[no_mangle]
pub(super) extern "C" fn TRITONBACKEND_GetBackendAttribute(
    _backend: *mut raw::Backend,
    attribute: *mut raw::Attribute,
) -> raw::Status {
    let count = ServeOptions::default().lookup_threads as u64;
    guarded(|| prefer_processor(attribute, count))
}

/// A version of a model is to be loaded.
#[no_mangle]
pub(super) extern "C" fn TRITONBACKEND_ModelInitialize(model: *mut raw::Model) -> raw::Status {
    guarded(|| load(Model(model)))
}

fn load(model: Model) -> Result<()> {
    let config = Config::parse(&model.config()?)?;
    let loaded = crate::model::Model::open(&config, &model.folder()?)?;
    if model.completes()? {
        if let Some(completed) = config.completed(&loaded.inputs, &loaded.outputs) {
            model.set_config(&completed.to_string())?;
        }
    }
    let (name, outputs) = (model.name()?, loaded.outputs.len());
    log_info(&format!("tierbed: {name} is loaded (outputs: {outputs})"));
    model.put(loaded)
}

/// A version of a model answers no more.
#[no_mangle]
pub(super) extern "C" fn TRITONBACKEND_ModelFinalize(model: *mut raw::Model) -> raw::Status {
    guarded(|| Model(model).take().map(drop))
}

/// A thread begins to work for a model.
#[no_mangle]
pub(super) extern "C" fn TRITONBACKEND_ModelInstanceInitialize(
    instance: *mut raw::Instance,
) -> raw::Status {
    guarded(|| Instance(instance).model().map(drop))
}

/// A thread works for a model no more.
#[no_mangle]
pub(super) extern "C" fn TRITONBACKEND_ModelInstanceFinalize(
    _instance: *mut raw::Instance,
) -> raw::Status {
    ptr::null_mut()
}

/// Requests are to be answered. Without an error they are the backend's, else Triton's.
#[no_mangle]
pub(super) extern "C" fn TRITONBACKEND_ModelInstanceExecute(
    instance: *mut raw::Instance,
    requests: *mut *mut raw::Request,
    request_count: u32,
) -> raw::Status {
    guarded(|| {
        let instance = Instance(instance);
        let model = instance.model()?;
        // SAFETY: Triton hands over so many.
        let requests = unsafe { Request::of_call(requests, request_count) };
        let answered = answer(model, &requests);
        settle(instance, model, requests, answered);
        Ok(())
    })
}
