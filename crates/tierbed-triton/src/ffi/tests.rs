//! The backend as a host calls it.

mod fake;

use std::ffi::c_int;
use std::path::Path;
use std::ptr;
use std::sync::Arc;

use serde_json::json;
use tierbed_core::{Budget, RowId, Schema, TableId, TableSchema};
use tierbed_io::FsFolder;
use tierbed_snapshot::SnapshotWriter;

use self::fake::{c, Error, Input, Instance, Model, Request, MINOR};
use super::entries::*;
use super::raw;
use crate::failure::Code;

/// Writes a snapshot of one table whose row `r` has the elements `r` and `-r`.
fn write_snapshot(folder: &Path) {
    write_pooled(folder, "sum");
}

/// The same, with a pooling of its feature.
fn write_pooled(folder: &Path, pooling: &str) {
    let schema = Schema::new(vec![TableSchema::plain("item", 100, 2)]).unwrap();
    let folder = Arc::new(FsFolder::create(folder).unwrap());
    let mut writer = SnapshotWriter::create(folder, &schema, &Budget::new(1 << 20)).unwrap();
    for row in 0..100 {
        writer.push(TableId(0), RowId(row), &[row as f32, -(row as f32)]).unwrap();
    }
    let served = json!({ "features": [{ "name": "item", "table": "item", "pooling": pooling }] });
    writer.attach("serving.json", served.to_string().as_bytes()).unwrap();
    writer.finish().unwrap();
}

/// What a call returned: nothing, or an error.
fn done(error: raw::Status) -> Result<(), (c_int, String)> {
    let error: *mut Error = error.cast();
    if error.is_null() {
        return Ok(());
    }
    // SAFETY: the backend made it with the host's function.
    let error = unsafe { Box::from_raw(error) };
    Err((error.code, error.message.to_str().unwrap().to_owned()))
}

/// A model whose version folder is `home/1`.
fn model(home: &Path, parameters: &[[&str; 2]], max_batch_size: u32) -> Box<Model> {
    let mut config = json!({ "max_batch_size": max_batch_size, "input": [], "output": [] });
    for [name, value] in parameters {
        config["parameters"][name] = json!({ "string_value": value });
    }
    Box::new(Model {
        config: c(&config.to_string()),
        home: c(home.to_str().unwrap()),
        state: ptr::null_mut(),
        completed: None,
    })
}

fn ids(ids: &[i64]) -> Box<Request> {
    // Triton may have a tensor in pieces.
    let (first, rest) = ids.split_at(ids.len() / 2);
    let buffers = vec![first.to_vec(), rest.to_vec()];
    let input = Input { name: c("ids"), shape: vec![ids.len() as i64, 1], buffers, memory: 0 };
    Box::new(Request {
        inputs: vec![input],
        outputs: vec![c("item"), c("pooled")],
        ..Request::default()
    })
}

/// Hands requests over at once; returns the samples that were told, and whether each succeeded.
fn execute(model: &mut Model, requests: &mut [Box<Request>]) -> (Vec<u64>, Vec<bool>) {
    let mut instance = Instance { model, batches: Vec::new(), reported: Vec::new() };
    let mut handles: Vec<*mut Request> =
        requests.iter_mut().map(|request| &raw mut **request).collect();
    let (first, count) = (handles.as_mut_ptr().cast(), handles.len() as u32);
    let this: *mut Instance = &mut instance;
    done(TRITONBACKEND_ModelInstanceInitialize(this.cast())).unwrap();
    done(TRITONBACKEND_ModelInstanceExecute(this.cast(), first, count)).unwrap();
    (instance.batches, instance.reported)
}

fn loaded(mut model: Box<Model>) -> Box<Model> {
    let this: *mut Model = &mut *model;
    done(TRITONBACKEND_ModelInitialize(this.cast())).unwrap();
    model
}

fn unload(model: &mut Model) {
    let this: *mut Model = &mut *model;
    done(TRITONBACKEND_ModelFinalize(this.cast())).unwrap();
    assert!(model.state.is_null());
    // Triton ends models that could not be loaded, too.
    done(TRITONBACKEND_ModelFinalize(this.cast())).unwrap();
}

#[test]
fn requests_of_a_call_are_answered_once_and_mistakes_fail_alone() {
    let home = tempfile::tempdir().unwrap();
    write_snapshot(&home.path().join("1"));
    let mut model = loaded(model(home.path(), &[["dram_budget", "4MiB"]], 8));
    let completed = model.completed.clone().unwrap();
    assert_eq!(completed["input"][0]["dims"], json!([1]));
    assert_eq!(
        completed["output"][0],
        json!({"name": "pooled", "data_type": "TYPE_FP32", "dims": [2]})
    );
    let mut requests = vec![ids(&[3, 4]), ids(&[7, 100]), ids(&[99]), ids(&[5])];
    requests[2].outputs.pop();
    requests[3].inputs[0].memory = 2;
    let (batches, reported) = execute(&mut model, &mut requests);
    assert_eq!((batches, reported), (vec![3], vec![true, false, true, false]));
    assert!(requests.iter().all(|request| request.release_count == 1));
    let mut answers = requests.into_iter().map(|request| request.response.unwrap());
    let mut told = || {
        answers.next().unwrap().map(|outputs| {
            let told =
                outputs.into_iter().map(|output| (output.name, output.shape, output.elements));
            told.collect::<Vec<_>>()
        })
    };
    let both = |name: &str| (name.to_owned(), vec![2, 2], vec![3.0, -3.0, 4.0, -4.0]);
    assert_eq!(told().unwrap(), [both("pooled"), both("item")]);
    let (code, message) = told().unwrap_err();
    assert!(code == Code::InvalidArg as c_int && message.contains("100"), "{code} {message}");
    assert_eq!(told().unwrap(), [("item".to_owned(), vec![1, 2], vec![99.0, -99.0])]);
    let (code, message) = told().unwrap_err();
    assert!(code == Code::Unsupported as c_int && message.contains("ids"), "{code} {message}");
    unload(&mut model);
}

#[test]
fn a_model_that_cannot_be_loaded_says_what_to_do() {
    let home = tempfile::tempdir().unwrap();
    let refused = |parameters: &[[&str; 2]]| {
        let mut model = model(home.path(), parameters, 0);
        let this: *mut Model = &mut *model;
        let told = done(TRITONBACKEND_ModelInitialize(this.cast())).unwrap_err();
        unload(&mut model);
        told
    };
    let remedy = "remedy: give the folder that publish wrote, by the parameter snapshot";
    let (code, message) = refused(&[]);
    assert!(code == Code::InvalidArg as c_int && message.contains(remedy), "{code} {message}");
    // The folder of a version that has nothing in it.
    FsFolder::create(home.path().join("1")).unwrap();
    let (_, message) = refused(&[]);
    assert!(message.contains(remedy), "{message}");
    let (_, message) = refused(&[["grpc_address", "a:1"]]);
    assert!(message.contains("leave it out of config.pbtxt"), "{message}");
    write_snapshot(&home.path().join("ads"));
    let place = home.path().join("ads");
    unload(&mut loaded(model(home.path(), &[["snapshot", place.to_str().unwrap()]], 0)));
}

#[test]
fn an_instance_of_a_model_that_is_not_loaded_is_an_error() {
    let home = tempfile::tempdir().unwrap();
    let mut model = model(home.path(), &[], 0);
    let mut instance = Instance { model: &mut *model, batches: vec![], reported: vec![] };
    let this: *mut Instance = &mut instance;
    let (code, message) = done(TRITONBACKEND_ModelInstanceInitialize(this.cast())).unwrap_err();
    assert!(code == Code::Internal as c_int && message.starts_with("the model was not loaded"));
}

#[test]
fn a_panic_becomes_an_error_of_the_host() {
    let (code, message) = done(guarded(|| panic!("of {}", "this test"))).unwrap_err();
    assert_eq!(
        (code, message.as_str()),
        (Code::Internal as c_int, "the backend panicked: of this test")
    );
}

#[test]
fn what_the_backend_cannot_take_is_refused_until_it_is_as_told() {
    let home = tempfile::tempdir().unwrap();
    write_snapshot(&home.path().join("1"));
    let mut model = loaded(model(home.path(), &[], 0));
    let mut ask = |memory, parameter| {
        let mut request = ids(&[5]);
        (request.inputs[0].memory, request.parameter) = (memory, parameter);
        let mut requests = [request];
        execute(&mut model, &mut requests);
        let [request] = requests;
        request.response.unwrap().map(|outputs| outputs.len())
    };
    let (code, message) = ask(2, 0).unwrap_err();
    assert_eq!(code, Code::Unsupported as c_int);
    assert!(message.contains("remedy: send it from the processor's memory"), "{message}");
    let (code, message) = ask(0, 1).unwrap_err();
    assert_eq!(code, Code::InvalidArg as c_int);
    assert!(message.contains("remedy: give it as a string"), "{message}");
    assert_eq!((ask(0, 0), ask(1, 0)), (Ok(2), Ok(2)));
    unload(&mut model);
}

#[test]
fn outputs_that_triton_does_not_know_are_left_out() {
    let home = tempfile::tempdir().unwrap();
    write_pooled(&home.path().join("1"), "none");
    let mut model = loaded(model(home.path(), &[], 0));
    let known = &model.completed.as_ref().unwrap()["output"];
    assert_eq!(known.as_array().unwrap().len(), 1);
    // The request's parameter pools what the model does not.
    let mut requests = [ids(&[5])];
    requests[0].outputs.pop();
    execute(&mut model, &mut requests);
    let [request] = requests;
    let outputs = request.response.unwrap().unwrap();
    let told: Vec<_> = outputs.iter().map(|output| output.name.as_str()).collect();
    assert_eq!(told, ["item"]);
    unload(&mut model);
}

#[test]
fn an_older_host_is_refused() {
    MINOR.set(11);
    let (code, message) = done(TRITONBACKEND_Initialize(ptr::null_mut())).unwrap_err();
    assert_eq!(code, Code::Unsupported as c_int);
    assert!(message.contains("remedy: install Triton 2.32 or newer"), "{message}");
    MINOR.set(12);
    done(TRITONBACKEND_Initialize(ptr::null_mut())).unwrap();
}

#[test]
fn the_backend_wants_instances_of_the_processor() {
    let mut preferred = [0_u64; 2];
    let this: *mut [u64; 2] = &mut preferred;
    done(TRITONBACKEND_Initialize(ptr::null_mut())).unwrap();
    done(TRITONBACKEND_GetBackendAttribute(ptr::null_mut(), this.cast())).unwrap();
    done(TRITONBACKEND_Finalize(ptr::null_mut())).unwrap();
    assert!(preferred[0] == 1 && preferred[1] >= 1, "{preferred:?}");
}
