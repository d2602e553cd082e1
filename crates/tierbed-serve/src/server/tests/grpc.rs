//! gRPC over a real socket, with a client of bare HTTP/2.

use std::collections::HashMap;

use axum::body::Bytes;
use axum::http::{HeaderMap, Request};
use h2::client::SendRequest;
use prost::bytes::BufMut;
use prost::Message;
use tokio::io::{AsyncRead, AsyncWrite};
use tonic::Code;
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};

use super::*;
use crate::coding::Coding;
use crate::grpc::pb::infer_parameter::ParameterChoice;
use crate::grpc::pb::model_infer_request::{InferInputTensor, InferRequestedOutputTensor};
use crate::grpc::pb::{
    InferParameter, InferTensorContents, ModelConfigRequest, ModelConfigResponse,
    ModelInferRequest, ModelInferResponse, ModelMetadataRequest, ModelMetadataResponse,
    ModelReadyRequest, ModelReadyResponse, ModelStatisticsRequest, ModelStatisticsResponse,
    RepositoryIndexRequest, RepositoryIndexResponse, ServerMetadataRequest, ServerMetadataResponse,
    ServerReadyRequest, ServerReadyResponse,
};

mod admission;
mod stream;
mod writes;

const SERVICE: &str = "/inference.GRPCInferenceService";

/// A connection.
pub(super) struct Client {
    runtime: Runtime,
    calls: SendRequest<Bytes>,
}

/// What came of a call.
pub(super) struct Called {
    pub(super) code: Code,
    pub(super) message: String,
    pushback: Option<String>,
    /// What came with the answer, or with the status of a refusal.
    metadata: HeaderMap,
    pub(super) bytes: Vec<u8>,
}

impl Called {
    fn answer<M: Message + Default>(&self) -> M {
        assert_eq!(self.code, Code::Ok, "{}", self.message);
        M::decode(&self.bytes[5..]).unwrap()
    }

    /// Asserts that the call was refused.
    fn refused(&self, code: Code, message: &str) {
        assert_eq!(self.code, code, "{}", self.message);
        assert!(self.message.contains(message), "{}", self.message);
    }
}

fn framed(message: &impl Message) -> Vec<u8> {
    let bytes = message.encode_to_vec();
    let length = u32::try_from(bytes.len()).unwrap();
    let length: Vec<u8> = length.to_le_bytes().into_iter().rev().collect();
    [&[0], &length[..], &bytes].concat()
}

impl Client {
    pub(super) fn new(server: &Server) -> Self {
        Self::through(server, async |stream| stream)
    }

    /// Connects, and speaks through what is made of the socket.
    pub(super) fn through<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
        server: &Server,
        wrap: impl AsyncFnOnce(tokio::net::TcpStream) -> S,
    ) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let calls = runtime.block_on(async {
            let address = server.grpc_address().unwrap();
            let stream = tokio::net::TcpStream::connect(address).await.unwrap();
            let (calls, connection) = h2::client::handshake(wrap(stream).await).await.unwrap();
            tokio::spawn(connection);
            calls
        });
        Self { runtime, calls }
    }

    pub(super) fn call_with(&self, path: &str, timeout: Option<&str>, body: Vec<u8>) -> Called {
        let timeout = timeout.map(|timeout| ("grpc-timeout", timeout));
        self.call_with_header(path, timeout, body)
    }

    pub(super) fn call_with_header(
        &self,
        path: &str,
        header: Option<(&str, &str)>,
        body: Vec<u8>,
    ) -> Called {
        let request = Request::post(format!("http://t{path}"))
            .header("content-type", "application/grpc")
            .header("te", "trailers");
        let request =
            header.into_iter().fold(request, |request, (name, value)| request.header(name, value));
        let request = request.body(()).unwrap();
        self.runtime.block_on(async {
            let mut calls = self.calls.clone().ready().await.unwrap();
            let (answer, mut sending) = calls.send_request(request, false).unwrap();
            // A server that refuses early does not take the rest.
            let _ = sending.send_data(body.into(), true);
            let answer = answer.await.unwrap();
            assert_eq!(
                (answer.status().as_u16(), &answer.headers()["content-type"]),
                (200, &"application/grpc".parse().unwrap())
            );
            let (head, mut body) = answer.into_parts();
            let mut bytes = Vec::new();
            while let Some(part) = body.data().await {
                let part = part.unwrap();
                body.flow_control().release_capacity(part.len()).unwrap();
                bytes.extend_from_slice(&part);
            }
            let trailers = body.trailers().await.unwrap().unwrap_or_else(|| head.headers.clone());
            Called { metadata: head.headers, ..called(&trailers, bytes) }
        })
    }

    fn call(&self, method: &str, message: &impl Message) -> Called {
        self.call_with(&format!("{SERVICE}/{method}"), None, framed(message))
    }

    pub(super) fn infer(&self, request: &ModelInferRequest) -> Called {
        self.call("ModelInfer", request)
    }
}

fn called(trailers: &HeaderMap, bytes: Vec<u8>) -> Called {
    let field = |name: &str| trailers.get(name).map(|value| value.to_str().unwrap().to_owned());
    let code: i32 = field("grpc-status").unwrap().parse().unwrap();
    let message = field("grpc-message").unwrap_or_default().replace("%20", " ");
    let pushback = field("grpc-retry-pushback-ms");
    Called { code: Code::from(code), message, pushback, metadata: HeaderMap::new(), bytes }
}

fn grpc() -> ServeOptions {
    ServeOptions { grpc_address: Some("127.0.0.1:0".into()), ..options() }
}

fn input(name: &str, datatype: &str, shape: &[i64]) -> InferInputTensor {
    InferInputTensor {
        name: name.into(),
        datatype: datatype.into(),
        shape: shape.to_vec(),
        ..Default::default()
    }
}

fn request(inputs: Vec<InferInputTensor>, raw: &[&[u8]]) -> ModelInferRequest {
    ModelInferRequest {
        model_name: "tierbed.rows".into(),
        inputs,
        raw_input_contents: raw.iter().map(|bytes| Bytes::copy_from_slice(bytes)).collect(),
        ..Default::default()
    }
}

fn ids(ids: &[i64]) -> ModelInferRequest {
    let samples = ids.len() as i64 / 2;
    request(vec![input("ids", "INT64", &[samples, 2])], &[&i64s(ids)])
}

/// The body of a call for one sample's rows.
pub(super) fn asked_for_rows() -> Vec<u8> {
    framed(&ids(&[1, 1]))
}

fn word(word: &str) -> InferParameter {
    InferParameter { parameter_choice: Some(ParameterChoice::StringParam(word.into())) }
}

#[test]
fn what_is_served_is_told_by_messages() {
    let server = Server::start(&grpc(), snapshot(), None).unwrap();
    let client = Client::new(&server);
    let name = "tierbed.rows".to_owned();
    let (none, one) = (String::new(), "1".to_owned());
    let ready: ServerReadyResponse =
        client.call("ServerReady", &ServerReadyRequest::default()).answer();
    assert!(ready.ready);
    let about: ServerMetadataResponse =
        client.call("ServerMetadata", &ServerMetadataRequest::default()).answer();
    assert_eq!(about.name, "tierbed");
    let asked = ModelReadyRequest { name: name.clone(), version: one.clone() };
    assert!(client.call("ModelReady", &asked).answer::<ModelReadyResponse>().ready);
    let asked = ModelMetadataRequest { name: name.clone(), version: none.clone() };
    let model: ModelMetadataResponse = client.call("ModelMetadata", &asked).answer();
    assert_eq!((model.inputs[0].name.as_str(), &model.inputs[0].shape[..]), ("ids", &[-1, 2][..]));
    assert_eq!(model.outputs[0].shape, [-1, 11]);
    let asked = ModelConfigRequest { name: name.clone(), version: none.clone() };
    let config: ModelConfigResponse = client.call("ModelConfig", &asked).answer();
    assert_eq!(config.config.unwrap().input[0].data_type, 9, "INT64");
    let index: RepositoryIndexResponse =
        client.call("RepositoryIndex", &RepositoryIndexRequest::default()).answer();
    assert_eq!(index.models.len(), 1);
    let unknown = ModelReadyRequest { name, version: "2".into() };
    client.call("ModelReady", &unknown).refused(Code::NotFound, "unknown model");
    client.call("Trace", &unknown).refused(Code::Unimplemented, "no such method");
    let other = client.call_with("/other.Service/Do", None, framed(&unknown));
    other.refused(Code::Unimplemented, "no such method");
}

#[test]
fn every_form_of_a_call_has_the_bits_of_the_snapshot() {
    let snapshot = snapshot();
    let server = Server::start(&grpc(), Arc::clone(&snapshot), None).unwrap();
    let client = Client::new(&server);
    let user = Bags::new(&USER.0, &USER.1, None, 1).unwrap();
    let item = Bags::new(&ITEM.0, &ITEM.1, Some(&WEIGHTS), 1).unwrap();
    let user = direct(&snapshot, 0, Pooling::Sum, &user);
    let item = direct(&snapshot, 1, Pooling::Sum, &item);
    let values: Vec<i64> = USER.0.iter().chain(&ITEM.0).copied().collect();
    let weights: Vec<f32> = [1.0; 5].iter().chain(&WEIGHTS).copied().collect();
    let inputs = vec![
        input("values", "INT64", &[9]),
        input("lengths", "INT64", &[6]),
        input("weights", "FP32", &[9]),
    ];
    let raw =
        request(inputs.clone(), &[&i64s(&values), &i64s(&[3, 0, 2, 1, 1, 2]), &f32s(&weights)]);
    let raw = ModelInferRequest { id: "7".into(), model_version: "1".into(), ..raw };
    let answer: ModelInferResponse = client.infer(&raw).answer();
    assert_eq!((answer.id.as_str(), answer.outputs[0].name.as_str()), ("7", "pooled"));
    assert_eq!(answer.raw_output_contents, [f32s(&super::oip::side_by_side(&user, &item))]);

    // The same in typed fields; both features by name.
    let contents = [
        InferTensorContents { int64_contents: values, ..Default::default() },
        InferTensorContents { int64_contents: vec![3, 0, 2, 1, 1, 2], ..Default::default() },
        InferTensorContents { fp32_contents: weights, ..Default::default() },
    ];
    let typed = inputs.into_iter().zip(contents);
    let typed =
        typed.map(|(input, contents)| InferInputTensor { contents: Some(contents), ..input });
    let named = ["item.v2", "user"]
        .map(|name| InferRequestedOutputTensor { name: name.into(), ..Default::default() });
    let typed = ModelInferRequest { outputs: named.into(), ..request(typed.collect(), &[]) };
    let answer: ModelInferResponse = client.infer(&typed).answer();
    assert_eq!(answer.outputs[0].shape, [3, 7]);
    assert_eq!(answer.raw_output_contents, [f32s(&item), f32s(&user)]);

    let halves = HashMap::from([("output_dtype".to_owned(), word("FP16"))]);
    let answer: ModelInferResponse =
        client.infer(&ModelInferRequest { parameters: halves, ..ids(&[1, 3]) }).answer();
    assert_eq!(
        (answer.outputs[0].datatype.as_str(), answer.raw_output_contents[0].len()),
        ("FP16", 22)
    );
}

#[test]
fn ragged_features_are_asked_for_by_name() {
    let server = Server::start(&grpc(), snapshot(), None).unwrap();
    let client = Client::new(&server);
    let inputs = vec![
        input("user.values", "INT64", &[3]),
        input("user.lengths", "INT64", &[2]),
        input("item.v2.values", "INT64", &[1]),
        input("item.v2.lengths", "INT64", &[1]),
    ];
    let raw = [&i64s(&[1, 2, 3])[..], &i64s(&[2, 1]), &i64s(&[3]), &i64s(&[1])];
    let mut asked = request(inputs, &raw);
    client.infer(&asked).refused(Code::InvalidArgument, "same number of samples");
    let parameter_choice = Some(ParameterChoice::BoolParam(true));
    asked.parameters.insert("ragged".into(), InferParameter { parameter_choice });
    client.infer(&asked).refused(Code::InvalidArgument, "name the outputs that you want");
    let output =
        |name: &str| InferRequestedOutputTensor { name: name.into(), ..Default::default() };
    asked.outputs = vec![output("user"), output("item.v2")];
    let answer: ModelInferResponse = client.infer(&asked).answer();
    let shapes: Vec<_> = answer.outputs.iter().map(|output| output.shape.clone()).collect();
    assert_eq!(shapes, [vec![2, 4], vec![1, 7]]);
    let user = [[1.1 + 2.1; 4], [3.1_f32; 4]].concat();
    assert_eq!(answer.raw_output_contents[0], f32s(&user));
    asked.parameters.insert("ragged".into(), word("yes"));
    client.infer(&asked).refused(Code::InvalidArgument, "must be true or false");
}

#[test]
fn an_answer_larger_than_all_windows_arrives_whole() {
    let server = Server::start(&grpc(), snapshot(), None).unwrap();
    let client = Client::new(&server);
    let many: Vec<i64> = (0..30_000).flat_map(|at| [at % 500, at % 1000]).collect();
    let answer: ModelInferResponse = client.infer(&ids(&many)).answer();
    assert_eq!(answer.raw_output_contents[0].len(), 30_000 * 11 * 4);
    let expected: ModelInferResponse = client.infer(&ids(&many[..2])).answer();
    assert_eq!(answer.raw_output_contents[0][..44], expected.raw_output_contents[0]);
    let metrics = get(&server, "/metrics").text();
    assert!(metrics.contains("tierbed_answers_unfinished_total 0"), "{metrics}");
}

#[test]
fn refusals_have_their_status() {
    let folder: Arc<dyn Folder> = Arc::new(MemoryFolder::new());
    let snapshot = snapshot_in(&folder, None);
    folder.open("rows.pages", OpenMode::ReadWrite).unwrap().write_at(100, b"x").unwrap();
    let mut options = grpc();
    options.limits.body_bytes_max = 1 << 10;
    let server = Server::start(&options, snapshot, None).unwrap();
    let client = Client::new(&server);
    client.infer(&ids(&[500, 0])).refused(Code::InvalidArgument, "row id out of range");
    let other = ModelInferRequest { model_name: "other".into(), ..ids(&[1, 1]) };
    client.infer(&other).refused(Code::NotFound, "unknown model");
    client.infer(&ids(&[1; 400])).refused(Code::ResourceExhausted, "body_bytes_max");
    client.infer(&ids(&[499, 0])).refused(Code::DataLoss, "checksum");
    let infer = format!("{SERVICE}/ModelInfer");
    let sent = |body: &[u8]| client.call_with(&infer, None, body.to_vec());
    sent(b"").refused(Code::InvalidArgument, "one message");
    sent(b"\0\0\0\0\x09a").refused(Code::InvalidArgument, "one message");
    sent(b"\0\0\0\0\x01\xff").refused(Code::InvalidArgument, "malformed");
    sent(b"\x01\0\0\0\0").refused(Code::InvalidArgument, "grpc-encoding names no coding");
    let late = client.call_with(&infer, Some("1n"), framed(&ids(&[1, 1])));
    late.refused(Code::DeadlineExceeded, "");
    let bad = client.call_with(&infer, Some("1h"), framed(&ids(&[1, 1])));
    bad.refused(Code::InvalidArgument, "grpc-timeout");
    let metrics = get(&server, "/metrics").text();
    let counted = |status: u16, count: u64| {
        let line =
            format!("tierbed_requests_total{{route=\"{infer}\",status=\"{status}\"}} {count}\n");
        assert!(metrics.contains(&line), "{line}{metrics}");
    };
    for (status, count) in [(400, 6), (404, 1), (413, 1), (500, 1), (504, 1)] {
        counted(status, count);
    }
    assert!(metrics.contains("tierbed_request_failures_total{kind=\"corruption\"} 1"), "{metrics}");
    let asked = ModelStatisticsRequest::default();
    let stats: ModelStatisticsResponse = client.call("ModelStatistics", &asked).answer();
    assert!(stats.model_stats[0].inference_stats.as_ref().unwrap().fail.unwrap().count >= 2);
}

#[test]
fn calls_are_named_by_their_metadata_or_their_message() {
    let server = Server::start(&grpc(), snapshot(), None).unwrap();
    let client = Client::new(&server);
    let infer = |header, request: ModelInferRequest| {
        client.call_with_header(&format!("{SERVICE}/ModelInfer"), header, framed(&request))
    };
    let id = |called: &Called| {
        called.metadata.get("x-request-id").map(|id| id.to_str().unwrap().to_owned())
    };
    let named = |row| ModelInferRequest { id: "7".into(), ..ids(&[row, 1]) };
    assert_eq!(id(&infer(None, ids(&[1, 1]))), None);
    assert_eq!(id(&infer(None, named(1))).as_deref(), Some("7"));
    let refused = infer(None, named(500));
    assert_eq!((refused.code, id(&refused).as_deref()), (Code::InvalidArgument, Some("7")));
    let both = infer(Some(("x-request-id", "of-proxy")), named(1));
    assert_eq!(id(&both).as_deref(), Some("of-proxy"));
    assert_eq!(both.answer::<ModelInferResponse>().id, "7");
    let traced = infer(Some(("traceparent", super::origin::TRACEPARENT)), named(1));
    let told = traced.metadata["traceparent"].to_str().unwrap();
    assert!(super::origin::goes_on(told), "{told}");
}

#[test]
fn a_message_that_grows_beyond_the_limit_is_refused() {
    let mut options = grpc();
    options.limits.body_bytes_max = 64 << 10;
    let server = Server::start(&options, snapshot(), None).unwrap();
    let client = Client::new(&server);
    for coding in [Coding::Gzip, Coding::Deflate] {
        let bomb = coding.deflate(&[&vec![0; 1 << 20]]).unwrap();
        let mut body = vec![1];
        body.put_u32(u32::try_from(bomb.len()).unwrap());
        body.extend_from_slice(&bomb);
        assert!(body.len() < 64 << 10, "{} bytes are refused as they are", body.len());
        let header = Some(("grpc-encoding", coding.name()));
        let called = client.call_with_header(&format!("{SERVICE}/ModelInfer"), header, body);
        called.refused(Code::ResourceExhausted, "decompressed");
    }
    let metrics = get(&server, "/metrics").text();
    let refused = "tierbed_requests_refused_total{reason=\"decompressed\"} 2";
    assert!(metrics.contains(refused), "{metrics}");
    client.infer(&ids(&[1, 1])).answer::<ModelInferResponse>();
}

#[test]
fn a_call_without_a_place_is_told_when_to_come_back() {
    let (open, gate) = mpsc::sync_channel(1);
    let picking = Arc::new(super::oip::Picking::new(gate));
    let mut options = grpc();
    options.limits.requests_max = 1;
    let server = Server::start(&options, snapshot(), Some(picking)).unwrap();
    let client = Client::new(&server);
    let slow = ModelInferRequest { model_name: "tierbed".into(), ..ids(&[0, 3]) };
    std::thread::scope(|scope| {
        // Either may have the only place when the other asks: both ask until it is as wanted.
        let waiting = scope.spawn(|| loop {
            let called = client.infer(&slow);
            if called.code != Code::ResourceExhausted {
                break called.answer::<ModelInferResponse>();
            }
        });
        let refused = loop {
            let called = client.infer(&ids(&[1, 1]));
            if called.code != Code::Ok {
                break called;
            }
        };
        refused.refused(Code::ResourceExhausted, "too many requests");
        assert_eq!(refused.pushback.as_deref(), Some("1000"));
        open.send(()).unwrap();
        let answer = waiting.join().unwrap();
        assert_eq!(answer.raw_output_contents, [f32s(&[0.1]), f32s(&[1.0 - 0.7])]);
    });
}

#[test]
fn who_watches_health_hears_of_the_drain_and_does_not_delay_the_end() {
    let server = Server::start(&grpc(), snapshot(), None).unwrap();
    let client = Client::new(&server);
    let check = |service: &str| {
        let asked = HealthCheckRequest { service: service.into() };
        client.call_with("/grpc.health.v1.Health/Check", None, framed(&asked))
    };
    let states = || {
        ["", "inference.GRPCInferenceService"]
            .map(|service| check(service).answer::<HealthCheckResponse>().status)
    };
    assert_eq!(states(), [1; 2], "serving");
    assert_eq!(check("other").code, Code::NotFound);
    let watch = Request::post("http://t/grpc.health.v1.Health/Watch").body(()).unwrap();
    let mut body = client.runtime.block_on(async {
        let mut calls = client.calls.clone().ready().await.unwrap();
        let (answer, mut sending) = calls.send_request(watch, false).unwrap();
        sending.send_data(framed(&HealthCheckRequest::default()).into(), true).unwrap();
        answer.await.unwrap().into_body()
    });
    let mut next = || client.runtime.block_on(async { body.data().await.unwrap().unwrap() });
    assert_eq!(next()[..], *b"\0\0\0\0\x02\x08\x01");
    server.drain();
    assert_eq!(next()[..], *b"\0\0\0\0\x02\x08\x02");
    assert_eq!(states(), [2; 2], "not serving");
    let ready = client.call("ServerReady", &ServerReadyRequest::default());
    assert!(!ready.answer::<ServerReadyResponse>().ready);
    let asked = ModelReadyRequest { name: "tierbed.rows".into(), ..Default::default() };
    assert!(!client.call("ModelReady", &asked).answer::<ModelReadyResponse>().ready);
    client.infer(&ids(&[1, 1])).answer::<ModelInferResponse>();
    assert!(server.stop());
    assert!(server.wait(Duration::ZERO));
    assert!(TcpStream::connect(server.grpc_address().unwrap()).is_err());
}

#[test]
fn silent_clients_are_let_go() {
    let mut options = grpc();
    options.limits.idle_ms_max = 50;
    let server = Server::start(&options, snapshot(), None).unwrap();
    let mut silent = TcpStream::connect(server.grpc_address().unwrap()).unwrap();
    silent.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let mut bytes = Vec::new();
    // Settings of HTTP/2 may come before the end.
    let _ = silent.read_to_end(&mut bytes);
    assert!(server.stop());
}
