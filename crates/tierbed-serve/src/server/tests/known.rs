//! Requests whose heads are known are answered as those that are decoded.

use super::grpc::Client;
use super::inline::INFER;
use super::*;
use crate::grpc::pb::model_infer_request::InferInputTensor;
use crate::grpc::pb::ModelInferRequest;

fn with_grpc() -> ServeOptions {
    ServeOptions { grpc_address: Some("127.0.0.1:0".into()), ..options() }
}

/// The head of a request for binary ids `[samples, 2]`; `extra` are more members of it.
fn head(samples: usize, extra: &Value) -> String {
    let input = json!({"name": "ids", "shape": [samples, 2], "datatype": "INT64",
        "parameters": {"binary_data_size": samples * 16}});
    let mut head = json!({"inputs": [input], "parameters": {"binary_data_output": true}});
    head.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    head.to_string()
}

fn infer(server: &Server, head: &str, ids: &[i64]) -> Answer {
    let line = format!("Inference-Header-Content-Length: {}", head.len());
    let body = [head.as_bytes(), &i64s(ids)].concat();
    ask_with(server, &format!("POST {INFER}"), &line, &body)
}

/// Rows of both features side by side, as the snapshot has them.
fn rows(snapshot: &Snapshot, ids: &[i64]) -> Vec<u8> {
    let rows = ids.chunks(2).flat_map(|ids| {
        let row = |table: u32| {
            let id = [ids[table as usize]];
            direct(snapshot, table, Pooling::Sum, &Bags::new(&id, &[0, 1], None, 1).unwrap())
        };
        [row(0), row(1)].concat()
    });
    f32s(&rows.collect::<Vec<_>>())
}

fn known_count(server: &Server) -> usize {
    let running = lock(&server.running);
    running.as_ref().unwrap().service.newest().heads.len()
}

#[test]
fn a_known_head_is_answered_by_the_ids_behind_it() {
    let snapshot = snapshot();
    let server = Server::start(&options(), Arc::clone(&snapshot), None).unwrap();
    for (samples, ids) in [
        (1, [vec![1, 3], vec![299, 999], vec![499, 0], vec![1, 3]]),
        (3, [vec![1, 3, 7, 6, 2, 9], vec![9, 0, 1, 1, 3, 3], vec![0; 6], vec![5; 6]]),
    ] {
        let head = head(samples, &json!({}));
        for ids in ids {
            let answer = infer(&server, &head, &ids);
            assert_eq!(answer.status, 200, "{}", answer.text());
            let (told, matrix) = answer.body.split_at(answer.header_bytes.unwrap());
            assert_eq!(matrix, rows(&snapshot, &ids), "{ids:?}");
            let told: Value = serde_json::from_slice(told).unwrap();
            assert_eq!(told["outputs"][0]["shape"], json!([samples, 11]));
        }
    }
    assert_eq!(known_count(&server), 2);
    let stats = get(&server, "/v2/models/tierbed.rows/stats").json();
    assert_eq!(stats["model_stats"][0]["inference_count"], 16);
}

#[test]
fn what_does_not_fit_a_known_head_is_refused_as_ever() {
    let [server, fresh] = [(); 2].map(|()| Server::start(&options(), snapshot(), None).unwrap());
    let head = head(2, &json!({}));
    assert_eq!(infer(&server, &head, &[1; 4]).status, 200);
    assert_eq!(known_count(&server), 1);
    for ids in [&[1, 1, 500, 1][..], &[-1, 1, 1, 1], &[1, 1, 1], &[1; 5], &[]] {
        let (found, expected) = (infer(&server, &head, ids), infer(&fresh, &head, ids));
        assert_eq!((found.status, found.text()), (400, expected.text()), "{ids:?}");
    }
    assert_eq!(infer(&server, &head, &[1; 4]).status, 200);
}

#[test]
fn only_heads_of_ids_alone_are_known() {
    let server = Server::start(&options(), snapshot(), None).unwrap();
    for extra in [
        json!({"id": "seven"}),
        json!({"outputs": [{"name": "user", "parameters": {"binary_data": true}}]}),
        json!({"outputs": [{"name": "pooled", "parameters": {"binary_data": false}}]}),
        json!({"parameters": {"binary_data_output": true, "output_dtype": "FP16"}}),
        json!({"parameters": {"binary_data_output": true, "pooling": "none"}}),
        json!({"more": "x".repeat(4 << 10)}),
    ] {
        let head = head(2, &extra);
        let [first, second] = [(); 2].map(|()| infer(&server, &head, &[1; 4]));
        assert_eq!((first.status, second.status), (200, 200), "{}", first.text());
        assert_eq!(first.body, second.body, "{extra}");
        assert_eq!(known_count(&server), 0, "{extra}");
    }
    for at in 0..300 {
        assert_eq!(infer(&server, &head(1, &json!({"at": at})), &[at, at]).status, 200);
    }
    assert_eq!(known_count(&server), 256, "whoever asks in ever new words fills no memory");
}

#[test]
fn another_generation_knows_its_own_heads() {
    let snapshot = snapshot();
    let server = Server::start(&options(), Arc::clone(&snapshot), None).unwrap();
    let head = head(1, &json!({}));
    let told = || {
        let answer = infer(&server, &head, &[7, 9]);
        let (told, matrix) = answer.body.split_at(answer.header_bytes.unwrap());
        let told: Value = serde_json::from_slice(told).unwrap();
        (told["parameters"]["generation"].clone(), matrix.to_vec())
    };
    let (before, old) = told();
    assert_eq!(told(), (before.clone(), old));
    server.apply(deltas::delta(&snapshot, 5, None)).unwrap();
    assert_eq!(known_count(&server), 0);
    for _ in 0..2 {
        let (after, matrix) = told();
        assert_ne!(after, before);
        assert_eq!(matrix, f32s(&[5.0; 11]));
    }
    assert_eq!(known_count(&server), 1);
}

#[test]
fn messages_have_heads_too() {
    let snapshot = snapshot();
    let server = Server::start(&with_grpc(), Arc::clone(&snapshot), None).unwrap();
    let client = Client::new(&server);
    let input = InferInputTensor {
        name: "ids".into(),
        datatype: "INT64".into(),
        shape: vec![2, 2],
        ..InferInputTensor::default()
    };
    let call = |id: &str, ids: &[i64]| {
        client.infer(&ModelInferRequest {
            model_name: "tierbed.rows".into(),
            id: id.into(),
            inputs: vec![input.clone()],
            raw_input_contents: vec![i64s(ids).into()],
            ..ModelInferRequest::default()
        })
    };
    for ids in [[1, 3, 299, 999], [7, 6, 1, 0], [0, 0, 2, 3]] {
        let called = call("", &ids);
        assert_eq!(called.code, tonic::Code::Ok, "{}", called.message);
        assert!(called.bytes.ends_with(&rows(&snapshot, &ids)), "{ids:?}");
        assert_eq!(call("seven", &ids).bytes.len(), called.bytes.len() + 7, "the id is told");
    }
    assert_eq!(known_count(&server), 1);
    assert_eq!(call("", &[500, 0, 0, 0]).code, tonic::Code::InvalidArgument);
    assert_eq!(call("", &[0; 3]).code, tonic::Code::InvalidArgument);
}

#[test]
fn lookups_of_one_feature_have_heads_too() {
    let snapshot = snapshot();
    let [server, fresh] =
        [(); 2].map(|()| Server::start(&options(), Arc::clone(&snapshot), None).unwrap());
    let look_up = |server: &Server, values: &[i64], offsets: &[i64]| {
        let body = tensors(&[
            ("item.v2.values", Dtype::I64, i64s(values)),
            ("item.v2.offsets", Dtype::I64, i64s(offsets)),
        ]);
        ask(server, "POST", "/v1/lookup", "application/x-safetensors", &body)
    };
    for (values, offsets) in [
        ([0, 3, 999, 1], [0, 1, 2, 4]),
        ([7, 7, 6, 9], [0, 0, 4, 4]),
        ([30, 27, 1, 1], [0, 2, 2, 4]),
    ] {
        let answer = look_up(&server, &values, &offsets);
        assert_eq!(answer.status, 200, "{}", answer.text());
        let found = SafeTensors::deserialize(&answer.body).unwrap();
        let bags = Bags::new(&values, &offsets, None, 1).unwrap();
        let expected = direct(&snapshot, 1, Pooling::Sum, &bags);
        assert_eq!(found.tensor("item.v2").unwrap().data(), f32s(&expected));
        assert_eq!(known_count(&server), 1);
    }
    for (values, offsets) in [
        ([0, 3, 1000, 1], [0, 1, 2, 4]),
        ([0, 3, -1, 1], [0, 1, 2, 4]),
        ([0, 3, 1, 1], [0, 1, 2, 3]),
        ([0, 3, 1, 1], [0, 3, 2, 4]),
        ([0, 3, 1, 1], [-1, 3, 3, 4]),
    ] {
        let found = look_up(&server, &values, &offsets);
        let expected = look_up(&fresh, &values, &offsets);
        assert_eq!((found.status, found.text()), (400, expected.text()), "{offsets:?}");
    }
    let known = known_count(&server);
    for more in
        [("item.v2.weights", Dtype::F32, f32s(&[1.0; 4])), ("user.values", Dtype::I64, i64s(&[0]))]
    {
        let body = tensors(&[
            ("item.v2.values", Dtype::I64, i64s(&[0, 3, 999, 1])),
            ("item.v2.offsets", Dtype::I64, i64s(&[0, 1, 2, 4])),
            more,
        ]);
        let answers = [&server, &fresh].map(|server| {
            ask(server, "POST", "/v1/lookup", "application/x-safetensors", &body).body
        });
        assert_eq!(answers[0], answers[1]);
    }
    assert_eq!(known_count(&server), known);
}
