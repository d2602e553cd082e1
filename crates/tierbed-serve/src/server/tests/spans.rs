//! Spans, as a collector gets them.

use std::collections::BTreeMap;

use hyper::server::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::service::TowerToHyperService;
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::{any_value, KeyValue};
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use opentelemetry_proto::tonic::trace::v1::{ResourceSpans, Span};
use tokio_rustls::TlsAcceptor;

use super::models::BAD;
use super::origin::TRACEPARENT;
use super::telling::{damaged, lines, logged, of};
use super::*;

mod away;
mod environment;

const UNSAMPLED: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00";
const LOOKUP: &str = r#"{"features":{"user":{"values":[1,7,1],"offsets":[0,3]}}}"#;

/// A collector in this process.
struct Collector {
    taken: Arc<Mutex<Vec<ResourceSpans>>>,
    address: SocketAddr,
    _runtime: Runtime,
}

struct Taking(Arc<Mutex<Vec<ResourceSpans>>>);

#[tonic::async_trait]
impl TraceService for Taking {
    async fn export(
        &self,
        request: tonic::Request<ExportTraceServiceRequest>,
    ) -> std::result::Result<tonic::Response<ExportTraceServiceResponse>, tonic::Status> {
        lock(&self.0).extend(request.into_inner().resource_spans);
        Ok(tonic::Response::new(ExportTraceServiceResponse::default()))
    }
}

impl Collector {
    fn start() -> Self {
        Self::behind(None)
    }

    /// Takes connections, which are encrypted where there is an acceptor.
    fn behind(acceptor: Option<TlsAcceptor>) -> Self {
        let runtime = super::super::runtime(1).unwrap();
        let taken = Arc::new(Mutex::new(Vec::new()));
        let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        let taking = Arc::clone(&taken);
        runtime.spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let service = TraceServiceServer::new(Taking(Arc::clone(&taking)));
                let service = TowerToHyperService::new(service);
                let builder = http2::Builder::new(TokioExecutor::new());
                match &acceptor {
                    None => {
                        drop(tokio::spawn(builder.serve_connection(TokioIo::new(stream), service)))
                    }
                    Some(acceptor) => {
                        let stream = TokioIo::new(acceptor.accept(stream).await.unwrap());
                        tokio::spawn(builder.serve_connection(stream, service));
                    }
                }
            }
        });
        Self { taken, address, _runtime: runtime }
    }

    /// Options of a server that sends its spans here, for all callers.
    fn options(&self) -> ServeOptions {
        ServeOptions { otlp_endpoint: Some(format!("http://{}", self.address)), ..options() }
    }

    /// The spans that came, in the order in which they began.
    fn spans(&self) -> Vec<Span> {
        let taken = lock(&self.taken);
        let scopes = taken.iter().flat_map(|resource| &resource.scope_spans);
        let mut spans: Vec<_> = scopes.flat_map(|scope| scope.spans.clone()).collect();
        spans.sort_by_key(|span| (span.start_time_unix_nano, span.name.clone()));
        spans
    }

    /// What the server says of itself.
    fn resource(&self) -> Value {
        values(&lock(&self.taken)[0].resource.as_ref().unwrap().attributes)
    }

    /// The spans after the server has stopped: of each request its own, then those of its steps.
    fn requests(&self, server: &Server) -> Vec<Request> {
        assert!(server.stop());
        let all = self.spans();
        let of_server = all.iter().filter(|span| span.kind == SpanKind::Server as i32);
        let requests = of_server.map(|span| {
            let steps = all.iter().filter(|step| step.parent_span_id == span.span_id);
            Request { span: span.clone(), steps: steps.cloned().collect() }
        });
        let requests: Vec<_> = requests.collect();
        let count: usize = requests.iter().map(|request| 1 + request.steps.len()).sum();
        assert_eq!(count, all.len(), "every span is a request's or a step's of one: {all:?}");
        requests.iter().for_each(Request::check);
        requests
    }
}

/// A request and its steps.
#[derive(Debug)]
struct Request {
    span: Span,
    steps: Vec<Span>,
}

impl Request {
    /// Steps are of the same trace, within the request's time, and one behind the other.
    fn check(&self) {
        let Self { span, steps } = self;
        let mut before = span.start_time_unix_nano;
        for step in steps {
            assert_eq!((&step.trace_id, step.kind), (&span.trace_id, SpanKind::Internal as i32));
            assert_eq!(step.trace_state, span.trace_state);
            assert!(step.span_id.len() == 8 && step.span_id != span.span_id);
            assert!(before <= step.start_time_unix_nano, "{self:?}");
            assert!(step.start_time_unix_nano <= step.end_time_unix_nano, "{self:?}");
            before = step.end_time_unix_nano;
        }
        assert!(before <= span.end_time_unix_nano, "{self:?}");
        let now = tierbed_core::env::unix_us() * 1_000;
        assert!((now - 60_000_000_000..=now).contains(&span.end_time_unix_nano), "{self:?}");
    }

    fn names(&self) -> Vec<&str> {
        self.steps.iter().map(|step| step.name.as_str()).collect()
    }

    fn step(&self, name: &str) -> Value {
        let step = self.steps.iter().find(|step| step.name == name);
        values(&step.unwrap_or_else(|| panic!("no {name}: {self:?}")).attributes)
    }

    fn values(&self) -> Value {
        values(&self.span.attributes)
    }

    /// Status and message.
    fn status(&self) -> (StatusCode, &str) {
        let status = self.span.status.as_ref();
        let message = status.map_or("", |status| status.message.as_str());
        (status.map_or(StatusCode::Unset, |status| status.code()), message)
    }
}

fn values(attributes: &[KeyValue]) -> Value {
    let named = attributes.iter().map(|attribute| {
        let value = match attribute.value.as_ref().unwrap().value.as_ref().unwrap() {
            any_value::Value::StringValue(text) => json!(text),
            any_value::Value::IntValue(number) => json!(number),
            other => panic!("{other:?}"),
        };
        (attribute.key.clone(), value)
    });
    json!(named.collect::<BTreeMap<_, _>>())
}

fn hex(id: &[u8]) -> String {
    id.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Looks up under headers of the caller's.
fn look_up(server: &Server, lines: &str, body: &str) -> Answer {
    ask_with(server, "POST /v1/lookup", lines, body.as_bytes())
}

#[test]
fn a_lookup_by_http_is_a_span_within_its_callers_trace() {
    let collector = Collector::start();
    let server = Server::start(&collector.options(), snapshot(), None).unwrap();
    let headers = format!("Traceparent: {TRACEPARENT}\r\nTracestate: a=b,c=d\r\nX-Request-Id: r1");
    let first = look_up(&server, &headers, LOOKUP);
    let second = look_up(&server, &headers, LOOKUP);
    let requests = collector.requests(&server);
    assert_eq!(requests.len(), 2);
    for (request, answer) in requests.iter().zip([first, second]) {
        let Span { trace_id, span_id, parent_span_id, trace_state, name, .. } = &request.span;
        assert_eq!(name, "POST /v1/lookup");
        let ids = format!("00-{}-{}-01", hex(trace_id), hex(parent_span_id));
        assert_eq!((ids.as_str(), trace_state.as_str()), (TRACEPARENT, "a=b,c=d"));
        assert_eq!(hex(span_id), answer.field("traceparent")[36..52], "as the client was told");
        let known = json!({
            "http.request.method": "POST", "http.route": "/v1/lookup",
            "http.response.status_code": 200, "url.path": "/v1/lookup", "url.scheme": "http",
            "tierbed.model": "tierbed.rows", "tierbed.request_id": "r1",
        });
        assert_eq!((request.values(), request.status().0), (known, StatusCode::Unset));
    }
    // The first one reads a page, the second one finds its rows in memory.
    assert_eq!(requests[0].names(), ["queue", "lookup"]);
    let found = |hits, pages: u64| {
        json!({"tierbed.batch_requests": 1, "tierbed.rows": 2, "tierbed.hits": hits,
               "tierbed.pages_read": pages})
    };
    assert_eq!(requests[0].step("lookup"), found(0, 1));
    assert_eq!(requests[1].names(), ["lookup"], "it did not wait");
    assert_eq!(requests[1].step("lookup"), found(2, 0));
    let resource = collector.resource();
    assert_eq!(resource["service.name"], "tierbed");
    assert_eq!(resource["service.version"], env!("CARGO_PKG_VERSION"));
}

#[test]
fn a_call_by_grpc_is_a_span_within_its_callers_trace() {
    let collector = Collector::start();
    let grpc = ServeOptions { grpc_address: Some("127.0.0.1:0".into()), ..collector.options() };
    let server = Server::start(&grpc, snapshot(), None).unwrap();
    let client = grpc::Client::new(&server);
    let path = "/inference.GRPCInferenceService/ModelInfer";
    let call = |path, body| client.call_with_header(path, Some(("traceparent", TRACEPARENT)), body);
    assert_eq!(call(path, grpc::asked_for_rows()).code, tonic::Code::Ok);
    assert_eq!(call(path, vec![0, 0, 0, 0, 1, 255]).code, tonic::Code::InvalidArgument);
    let unknown = "/inference.GRPCInferenceService/Guess";
    assert_eq!(call(unknown, vec![0; 5]).code, tonic::Code::Unimplemented);
    let probe = client.call_with("/grpc.health.v1.Health/Check", None, vec![0; 5]);
    assert_eq!(probe.code, tonic::Code::Ok);
    drop(client);
    let requests = collector.requests(&server);
    let names: Vec<_> = requests.iter().map(|request| request.span.name.as_str()).collect();
    let name = "inference.GRPCInferenceService/ModelInfer";
    assert_eq!(names, [name, name, "_OTHER"], "and no probe");
    for request in &requests {
        let Span { trace_id, parent_span_id, .. } = &request.span;
        let ids = format!("00-{}-{}-01", hex(trace_id), hex(parent_span_id));
        assert_eq!(ids, TRACEPARENT);
    }
    let codes = ["OK", "INVALID_ARGUMENT", "UNIMPLEMENTED"];
    for (request, code) in requests.iter().zip(codes) {
        assert_eq!(request.values()["rpc.response.status_code"], code);
        assert_eq!(request.values()["rpc.system.name"], "grpc");
        let is_error = request.status().0 == StatusCode::Error;
        assert_eq!(is_error, code == "UNIMPLEMENTED", "{request:?}");
    }
    assert_eq!(requests[0].names(), ["queue", "lookup"]);
    assert_eq!(requests[0].values()["tierbed.model"], "tierbed.rows");
    assert_eq!(requests[0].values()["rpc.method"], name);
    assert!(requests[1].steps.is_empty());
}

#[test]
fn a_prediction_has_a_step_for_its_model() {
    for at_once in [0, 8] {
        let collector = Collector::start();
        let mut scoring = Scoring::default();
        scoring.at_once = at_once;
        let scoring = Arc::new(scoring);
        let server = Server::start(&collector.options(), snapshot(), Some(scoring)).unwrap();
        let body = r#"{"dense":[[7]],"values":[1,0]}"#;
        for _ in 0..2 {
            assert_eq!(predict(&server, body), 200);
        }
        let requests = collector.requests(&server);
        assert_eq!(requests[0].names(), ["queue", "lookup", "predict"]);
        let queue =
            if at_once == 0 { &["queue", "lookup", "predict"][..] } else { &["lookup", "predict"] };
        assert_eq!(requests[1].names(), queue);
        assert_eq!(requests[1].step("lookup")["tierbed.hits"], 2);
        for request in &requests {
            assert_eq!(request.span.name, "POST /v1/predict");
            assert_eq!(request.values()["tierbed.model"], "tierbed");
            assert!(request.span.parent_span_id.is_empty(), "the trace begins here");
        }
        assert_ne!(requests[0].span.trace_id, requests[1].span.trace_id);
    }
}

#[test]
fn what_nobody_samples_is_not_sent() {
    let collector = Collector::start();
    let server = Server::start(&collector.options(), snapshot(), None).unwrap();
    let of = |trace: &str| format!("Traceparent: {trace}");
    let unsampled = look_up(&server, &of(UNSAMPLED), LOOKUP);
    assert!(unsampled.field("traceparent").ends_with("-00"), "{}", unsampled.head);
    for path in ["/livez", "/readyz", "/metrics", "/health", "/v2/health/ready"] {
        assert_eq!(get(&server, path).field("traceparent"), "", "probes begin no trace");
    }
    let sampled = ask_with(&server, "GET /livez", &of(TRACEPARENT), b"");
    assert!(sampled.field("traceparent").ends_with("-01"), "{}", sampled.head);
    let begun = get(&server, "/v2/models/tierbed.rows/versions/1/config");
    let unknown = ask_with(&server, "PURGE /nowhere/7", "X-A: b", b"");
    let requests = collector.requests(&server);
    let told = [&sampled, &begun, &unknown].map(|answer| answer.field("traceparent"));
    let sent = requests.iter().map(|Request { span, .. }| {
        format!("00-{}-{}-01", hex(&span.trace_id), hex(&span.span_id))
    });
    assert_eq!(sent.collect::<Vec<_>>(), told, "and the clients know them");
    let names: Vec<_> = requests.iter().map(|request| request.span.name.as_str()).collect();
    assert_eq!(names, ["GET /livez", "GET /v2/models/{model}/versions/{version}/config", "HTTP"]);
    let values = requests[2].values();
    assert_eq!(values["http.request.method"], "_OTHER");
    assert_eq!((&values["http.route"], &values["url.path"]), (&Value::Null, &json!("/nowhere/7")));
}

#[test]
fn a_failure_of_the_server_is_an_error_and_a_mistake_of_the_client_is_none() {
    let collector = Collector::start();
    let scoring = Arc::new(Scoring::default());
    let predictor = Arc::clone(&scoring) as Arc<dyn Predictor>;
    let server = Server::start(&collector.options(), damaged(), Some(predictor)).unwrap();
    let bad_page = r#"{"features":{"item.v2":{"values":[0,3],"offsets":[0,2]}}}"#;
    assert_eq!(look_up(&server, "X-A: b", bad_page).status, 500);
    assert_eq!(look_up(&server, "X-A: b", "{").status, 400);
    let requests = collector.requests(&server);
    let (code, message) = requests[0].status();
    assert_eq!(code, StatusCode::Error);
    assert!(message.contains("page_id: 0"), "{message}");
    assert_eq!(requests[0].values()["error.type"], "corruption");
    assert_eq!(requests[0].names(), ["queue", "lookup"]);
    assert_eq!(requests[1].status(), (StatusCode::Unset, ""));
    assert_eq!(requests[1].values()["http.response.status_code"], 400);
    assert_eq!(requests[1].values()["error.type"], Value::Null);
}

/// Asks for a prediction; returns its status.
fn predict(server: &Server, body: &str) -> u16 {
    ask(server, "POST", "/v1/predict", "application/json", body.as_bytes()).status
}

/// Waits until the model was asked.
fn until_asked(scoring: &Scoring) {
    while lock(&scoring.asked).is_empty() {
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_request_that_comes_to_no_end_tells_how_far_it_came() {
    let collector = Collector::start();
    let mut options = ServeOptions { lookup_threads: 1, ..collector.options() };
    options.limits.request_ms_max = 1_000;
    options.limits.queue_ms_max = 10_000;
    let scoring = Arc::new(Scoring::default());
    let predictor = Arc::clone(&scoring) as Arc<dyn Predictor>;
    let server = Server::start(&options, snapshot(), Some(predictor)).unwrap();
    // The model thinks about the first one; the second one waits for the only thread.
    std::thread::scope(|scope| {
        scope.spawn(|| assert_eq!(predict(&server, SLOW), 504));
        until_asked(&scoring);
        assert_eq!(predict(&server, SLOW), 504);
    });
    scoring.open();
    let requests = collector.requests(&server);
    assert_eq!(requests[0].names(), ["queue", "lookup", "predict"]);
    assert_eq!(requests[1].names(), ["queue"]);
    for request in &requests {
        assert_eq!(request.status().0, StatusCode::Error);
        assert_eq!(request.values()["error.type"], "deadline");
        let step = request.steps.last().unwrap();
        assert_eq!(step.end_time_unix_nano, request.span.end_time_unix_nano, "it did not end");
    }
}

#[test]
fn requests_that_are_answered_together_say_so() {
    let collector = Collector::start();
    let options = ServeOptions { lookup_threads: 1, ..collector.options() };
    let scoring = Arc::new(Scoring::default());
    let predictor = Arc::clone(&scoring) as Arc<dyn Predictor>;
    let server = Server::start(&options, snapshot(), Some(predictor)).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| assert_eq!(predict(&server, SLOW), 200));
        until_asked(&scoring);
        for body in [BAD, r#"{"dense":[[7]],"values":[2,0]}"#] {
            let server = &server;
            scope.spawn(move || predict(server, body));
        }
        while !get(&server, "/metrics").text().contains("tierbed_queue_requests 2\n") {
            std::thread::sleep(Duration::from_millis(1));
        }
        scoring.open();
    });
    let requests = collector.requests(&server);
    let counts = requests.iter().map(|it| it.step("lookup")["tierbed.batch_requests"].clone());
    assert_eq!(counts.collect::<Vec<_>>(), [1, 2, 2].map(Value::from));
}
