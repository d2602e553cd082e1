//! Requests answered where they were received: as in the queue, but that they do not wait.

use std::sync::atomic::{AtomicBool, Ordering};

use super::grpc::Client;
use super::*;
use crate::admission::Priority;
use crate::answer::Refusal;
use crate::grpc::pb::model_infer_request::InferInputTensor;
use crate::grpc::pb::ModelInferRequest;
use crate::inline::{self, Tried};
use crate::job::{Made, Stage, Waits, Work};
use crate::routes::work::{made, Ask, Asked};
use crate::spans::Steps;

const JSON: &str = "application/json";
const SAFETENSORS: &str = "application/x-safetensors";
const OCTETS: &str = "application/octet-stream";
pub(super) const INFER: &str = "/v2/models/tierbed.rows/infer";

pub(super) fn with_grpc(limit: impl FnOnce(&mut Limits)) -> ServeOptions {
    ServeOptions { grpc_address: Some("127.0.0.1:0".into()), ..limited(limit) }
}

fn inline_count(server: &Server) -> u64 {
    metric(server, "tierbed_inline_requests_total")
}

pub(super) fn row_body(ids: &[i64]) -> Vec<u8> {
    let offsets: Vec<usize> = (0..=ids.len()).collect();
    json!({"features": {"user": {"values": ids, "offsets": offsets}}}).to_string().into_bytes()
}

fn look_up(server: &Server, ids: &[i64]) -> Answer {
    ask(server, "POST", "/v1/lookup", JSON, &row_body(ids))
}

/// Requests in all forms: path, content type, header lines, body.
pub(super) fn requests() -> Vec<(&'static str, &'static str, String, Vec<u8>)> {
    let json = json!({"features": {
        "user": {"values": USER.0, "offsets": USER.1},
        "item.v2": {"values": ITEM.0, "offsets": ITEM.1, "weights": WEIGHTS},
    }});
    let none =
        json!({"features": {"user": {"values": [7, 1], "offsets": [0, 2]}}, "pooling": "none"});
    let mean =
        json!({"features": {"item.v2": {"values": [3, 0], "offsets": [0, 2]}}, "pooling": "mean"});
    let safetensors = tensors(&[
        ("user.values", Dtype::I64, i64s(&USER.0)),
        ("user.offsets", Dtype::I64, i64s(&USER.1)),
        ("item.v2.values", Dtype::I64, i64s(&ITEM.0)),
        ("item.v2.offsets", Dtype::I64, i64s(&ITEM.1)),
        ("item.v2.weights", Dtype::F32, f32s(&WEIGHTS)),
    ]);
    let input = |data: Value| {
        let mut input = json!({"name": "ids", "shape": [2, 2], "datatype": "INT64"});
        input.as_object_mut().unwrap().extend(data.as_object().unwrap().clone());
        json!({"id": "seven", "inputs": [input]})
    };
    let plain = input(json!({"data": [1, 3, 450, 999]}));
    let mut binary = input(json!({"parameters": {"binary_data_size": 32}}));
    binary["parameters"] = json!({"binary_data_output": true});
    let head = binary.to_string();
    let length = format!("Inference-Header-Content-Length: {}", head.len());
    let with_ids = [head.as_bytes(), &i64s(&[1, 3, 450, 999])].concat();
    let named = json!({"outputs": [{"name": "user"}], "inputs": plain["inputs"]});
    let lines = || "X-Request-Id: of-header".to_owned();
    vec![
        ("/v1/lookup", JSON, lines(), json.to_string().into_bytes()),
        ("/v1/lookup", JSON, lines(), none.to_string().into_bytes()),
        ("/v1/lookup", JSON, lines(), mean.to_string().into_bytes()),
        ("/v1/lookup", SAFETENSORS, lines(), safetensors),
        (INFER, JSON, lines(), plain.to_string().into_bytes()),
        (INFER, OCTETS, length, with_ids),
        (INFER, JSON, lines(), named.to_string().into_bytes()),
    ]
}

#[test]
fn what_is_answered_at_once_is_what_the_queue_answers() {
    let snapshot = snapshot();
    let start = |limit: fn(&mut Limits)| {
        Server::start(&with_grpc(limit), Arc::clone(&snapshot), None).unwrap()
    };
    let (queue, inline) = (start(|limits| limits.inline_indices_max = 0), start(|_| {}));
    for (at, (path, content_type, lines, body)) in (1..).zip(requests()) {
        let lines = format!("Content-Type: {content_type}\r\n{lines}");
        let answers = [&queue, &inline].map(|server| {
            let answer = ask_with(server, &format!("POST {path}"), &lines, &body);
            let head = answer.head.lines().filter(|line| !line.starts_with("date:"));
            (answer.status, head.map(str::to_owned).collect::<Vec<_>>(), answer.body.clone())
        });
        assert_eq!(answers[0].0, 200, "{path}: {}", String::from_utf8_lossy(&answers[0].2));
        assert_eq!(answers[0], answers[1], "{path} {content_type}");
        // The queue's server has read the rows.
        assert_eq!(inline_count(&inline), at, "{path} {content_type}");
    }
    let input = InferInputTensor {
        name: "ids".into(),
        datatype: "INT64".into(),
        shape: vec![2, 2],
        ..InferInputTensor::default()
    };
    let request = ModelInferRequest {
        model_name: "tierbed.rows".into(),
        id: "seven".into(),
        inputs: vec![input],
        raw_input_contents: vec![i64s(&[1, 3, 450, 999]).into()],
        ..ModelInferRequest::default()
    };
    let before = inline_count(&inline);
    let called = [&queue, &inline].map(|server| Client::new(server).infer(&request));
    assert_eq!(called[0].code, tonic::Code::Ok, "{}", called[0].message);
    assert_eq!(called[0].bytes, called[1].bytes);
    assert_eq!((inline_count(&inline), inline_count(&queue)), (before + 1, 0));
    for line in [
        r#"tierbed_requests_total{route="/v1/lookup",status="200"} 4"#,
        r#"tierbed_queue_seconds_count{route="/v1/lookup"} 4"#,
        r#"tierbed_request_seconds_count{route="/v2/infer"} 3"#,
        "tierbed_requests_in_flight 0",
    ] {
        let metrics = get(&inline, "/metrics").text();
        assert!(metrics.lines().any(|found| found == line), "no {line} in\n{metrics}");
    }
    let stats = |server| get(server, "/v2/models/tierbed.rows/stats").json()["model_stats"].clone();
    assert_eq!(stats(&inline)[0]["inference_count"], stats(&queue)[0]["inference_count"]);
}

#[test]
fn rows_that_must_be_read_and_large_requests_go_through_the_queue() {
    let options = limited(|limits| limits.inline_indices_max = 4);
    let server = Server::start(&options, snapshot(), None).unwrap();
    let asked = |ids: &[i64]| {
        let before = inline_count(&server);
        let answer = look_up(&server, ids);
        assert_eq!(answer.status, 200, "{}", answer.text());
        inline_count(&server) > before
    };
    assert!(!asked(&[7]), "it is read");
    assert!(asked(&[7]) && asked(&[7, 499]), "row 499 is stored nowhere");
    assert!(!asked(&[7, 8]) && asked(&[7, 8, 8, 7]));
    assert!(!asked(&[7; 5]), "too many indices");
    let unpooled = json!({"features": {
        "user": {"values": [7], "offsets": [0, 1]},
        "item.v2": {"values": [7], "offsets": [0, 1]},
    }, "pooling": "none"});
    for _ in 0..2 {
        let before = inline_count(&server);
        assert_eq!(post_json(&server, &unpooled).status, 200);
        assert_eq!(inline_count(&server), before, "more than one matrix");
    }
    let compressed = format!("Content-Type: {JSON}\r\nAccept-Encoding: gzip");
    let before = inline_count(&server);
    assert_eq!(ask_with(&server, "POST /v1/lookup", &compressed, &row_body(&[7])).status, 200);
    assert_eq!(inline_count(&server), before, "compressing takes its time");
}

#[test]
fn what_is_refused_is_refused_at_once_too() {
    let start = |inline_indices_max| {
        let options = limited(|limits| limits.inline_indices_max = inline_indices_max);
        Server::start(&options, snapshot(), None).unwrap()
    };
    let (queue, inline) = (start(0), start(512));
    for (body, status) in [
        (row_body(&[500]), 400),
        (row_body(&[-1]), 400),
        (b"{}".to_vec(), 400),
        (json!({"features": {"C9": {"values": [1], "offsets": [0, 1]}}}).to_string().into(), 400),
    ] {
        let answers =
            [&queue, &inline].map(|server| ask(server, "POST", "/v1/lookup", JSON, &body));
        assert_eq!(answers[0].status, status, "{}", answers[0].text());
        assert_eq!((answers[1].status, answers[1].text()), (status, answers[0].text()));
    }
    assert_eq!(inline_count(&inline), 0);
    let refused = r#"tierbed_requests_total{route="/v1/lookup",status="400"} 4"#;
    assert!(get(&inline, "/metrics").text().contains(refused));
}

/// A lookup that has all rows, or comes to nothing as `prepare` says.
fn run(
    service: &Service,
    deadline_us: u64,
    prepare: impl Fn() -> std::result::Result<(), Refusal> + Send + 'static,
) -> std::result::Result<Made, Refusal> {
    let (route, priority) = ("/v1/lookup", Priority::Normal);
    let steps = &Steps::default();
    let (body_bytes, generation, pack) = (10, None, None);
    let ask = Ask { route, deadline_us, priority, body_bytes, generation, pack, steps };
    let held = service.buffers.hold_nothing();
    let body = row_body(&[499]).into();
    let prepare = move |serving: &crate::generation::Serving<'_>, held| {
        prepare()?;
        crate::lookup::prepare(serving.source(), &serving.limits, &body, held, false)
    };
    let looking = made(service, ask, held, Asked { prepare, work: Work::Lookup });
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(looking)
}

fn served(limit: impl FnOnce(&mut Limits)) -> Service {
    super::service(&limited(limit), snapshot(), None, watch::channel(false).1).unwrap()
}

#[test]
fn a_panic_is_the_answer_of_its_own_request() {
    let service = served(|_| {});
    let refusal = run(&service, u64::MAX, || panic!("a mistake of ours")).unwrap_err();
    assert_eq!((refusal.status().as_u16(), refusal.kind()), (500, "panic"));
    assert!(refusal.message().contains("a mistake of ours"), "{}", refusal.message());
    assert_eq!(service.places_taken(), 0);
    assert!(run(&service, u64::MAX, || Ok(())).is_ok(), "no thread works for this service");
}

#[test]
fn places_priorities_and_times_hold_for_what_does_not_wait() {
    let service = served(|limits| limits.requests_max = 2);
    let taken = Arc::clone(&service.places).try_acquire_owned().unwrap();
    assert!(run(&service, u64::MAX, || Ok(())).is_ok());
    let late = run(&service, 0, || panic!("it is late")).unwrap_err();
    assert_eq!((late.status().as_u16(), late.reason()), (504, Some("deadline")));
    let other = Arc::clone(&service.places).try_acquire_owned().unwrap();
    let full = run(&service, u64::MAX, || panic!("there is no place")).unwrap_err();
    assert_eq!((full.status().as_u16(), full.reason()), (503, Some("places")));
    drop((taken, other));
    assert_eq!(service.places_taken(), 0);
}

#[test]
fn a_lookup_that_must_wait_is_prepared_once_a_generation() {
    let snapshot = snapshot();
    let service =
        super::service(&options(), Arc::clone(&snapshot), None, watch::channel(false).1).unwrap();
    let prepared = Arc::new(std::sync::atomic::AtomicU32::new(0));
    for applies in [false, true] {
        let ids = if applies { [8] } else { [7] };
        let (count, body) = (Arc::clone(&prepared), row_body(&ids).into());
        count.store(0, Ordering::Relaxed);
        let prepare = move |serving: &crate::generation::Serving<'_>, held| {
            count.fetch_add(1, Ordering::Relaxed);
            crate::lookup::prepare(serving.source(), &serving.limits, &body, held, false)
        };
        let (route, priority) = ("/v1/lookup", Priority::Normal);
        let (deadline_us, steps) = (u64::MAX, &Steps::default());
        let (body_bytes, generation, pack) = (1, None, None);
        let ask = Ask { route, deadline_us, priority, body_bytes, generation, pack, steps };
        let held = service.buffers.hold_nothing();
        let Tried::Left(stage) = inline::answer(&service, &ask, 0, held, &prepare) else {
            panic!("row {ids:?} is in no tier");
        };
        assert!(matches!(stage, Stage::Prepared(_)));
        if applies {
            service.apply(deltas::delta(&snapshot, 5, None)).unwrap();
        }
        let serving = service.serving(None).unwrap();
        let queries = Waits::new(stage, prepare).prepared(&serving).unwrap().queries;
        assert_eq!(queries[0].bags().indices, ids);
        assert_eq!(prepared.load(Ordering::Relaxed), 1 + u32::from(applies));
    }
}

#[test]
fn predictions_of_a_quick_model_are_answered_as_in_the_queue() {
    let start = |at_once| {
        let mut scoring = Scoring::default();
        scoring.at_once = at_once;
        Server::start(&with_grpc(|_| {}), snapshot(), Some(Arc::new(scoring))).unwrap()
    };
    let (queue, inline) = (start(0), start(2));
    let ask_both = |dense: &[[f32; 1]], values: &[i64]| {
        let body = json!({"dense": dense, "values": values}).to_string();
        let answers = [&queue, &inline].map(|server| {
            let answer = ask(server, "POST", "/v1/predict", JSON, body.as_bytes());
            (answer.status, answer.text())
        });
        assert_eq!(answers[0], answers[1]);
        answers[0].0
    };
    // Rows are read for the first request alone.
    assert_eq!(ask_both(&[[0.5], [7.0]], &[5, 6, 6, 9]), 200);
    assert_eq!(inline_count(&inline), 0);
    assert_eq!(ask_both(&[[0.5], [7.0]], &[5, 6, 6, 9]), 200);
    assert_eq!(inline_count(&inline), 1);
    assert_eq!(ask_both(&[[0.5]; 3], &[5, 6, 6, 9, 9, 9]), 200);
    assert_eq!(inline_count(&inline), 1, "more samples than are quick");
    // What the model refuses, where it panics or answers too little, and bad requests.
    for (number, status) in [(2.0, 400), (3.0, 500), (4.0, 500)] {
        assert_eq!(ask_both(&[[number]], &[5, 9]), status);
    }
    assert_eq!(ask_both(&[[0.5]], &[5, 1 << 40]), 400);
    assert_eq!(ask_both(&[], &[]), 200);
    assert_eq!((inline_count(&inline), inline_count(&queue)), (1, 0));
    assert!(get(&inline, "/metrics").text().contains("tierbed_requests_in_flight 0"));
}

#[test]
fn answers_at_once_are_of_one_generation_while_deltas_come() {
    let snapshot = snapshot();
    let server = Server::start(&options(), Arc::clone(&snapshot), None).unwrap();
    server.apply(deltas::delta(&snapshot, 1, None)).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut newest = 0.0;
            while !stop.load(Ordering::Relaxed) {
                let rows = deltas::asked_rows(&server);
                assert!(rows.iter().all(|number| *number == rows[0]), "{rows:?}");
                assert!(rows[0] >= newest, "{} behind {newest}", rows[0]);
                newest = rows[0];
            }
        });
        for number in 2..=5 {
            let before = inline_count(&server);
            server.apply(deltas::delta(&snapshot, number, None)).unwrap();
            for _ in 0..2 {
                assert!(deltas::asked_rows(&server).iter().all(|row| *row == f64::from(number)));
            }
            assert!(inline_count(&server) > before, "rows were replaced in the tiers");
        }
        stop.store(true, Ordering::Relaxed);
    });
    server.drain();
    let before = inline_count(&server);
    deltas::asked_rows(&server);
    assert!(inline_count(&server) > before, "who drains still answers");
    assert!(server.stop());
}
