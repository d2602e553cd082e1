//! Calls of many requests.

use prost::bytes::Buf;

use super::super::admission::Held;
use super::*;
use crate::grpc::pb::ModelStreamInferResponse;

const STREAM: &str = "/inference.GRPCInferenceService/ModelStreamInfer";

/// A call whose client sends and takes as it likes.
struct Stream<'a> {
    client: &'a Client,
    sending: h2::SendStream<Bytes>,
    body: h2::RecvStream,
    bytes: Vec<u8>,
}

impl<'a> Stream<'a> {
    fn begin(client: &'a Client, header: Option<(&str, &str)>) -> Self {
        let request = Request::post(format!("http://t{STREAM}"));
        let request =
            header.into_iter().fold(request, |request, (name, value)| request.header(name, value));
        let (sending, body) = client.runtime.block_on(async {
            let mut calls = client.calls.clone().ready().await.unwrap();
            let (answer, sending) = calls.send_request(request.body(()).unwrap(), false).unwrap();
            (sending, answer.await.unwrap().into_body())
        });
        Self { client, sending, body, bytes: Vec::new() }
    }

    fn send(&mut self, bytes: Vec<u8>) {
        self.sending.send_data(bytes.into(), false).unwrap();
    }

    fn end(&mut self) {
        self.sending.send_data(Bytes::new(), true).unwrap();
    }

    /// Takes the next answer; `None` where the call ends.
    fn next(&mut self) -> Option<ModelStreamInferResponse> {
        loop {
            if let Some((head, rest)) = self.bytes.split_at_checked(5) {
                let length = (&head[1..]).get_u32() as usize;
                if let Some((message, rest)) = rest.split_at_checked(length) {
                    let message = ModelStreamInferResponse::decode(message).unwrap();
                    self.bytes = rest.to_vec();
                    return Some(message);
                }
            }
            let part = self.client.runtime.block_on(self.body.data())?.unwrap();
            self.body.flow_control().release_capacity(part.len()).unwrap();
            self.bytes.extend_from_slice(&part);
        }
    }

    /// Returns how the call ended.
    fn ended(mut self) -> Called {
        assert!(self.next().is_none() && self.bytes.is_empty());
        let trailers = self.client.runtime.block_on(self.body.trailers()).unwrap().unwrap();
        called(&trailers, Vec::new())
    }
}

fn named(id: usize, request: ModelInferRequest) -> ModelInferRequest {
    ModelInferRequest { id: id.to_string(), ..request }
}

#[test]
fn requests_are_answered_in_order_and_errors_in_their_turn() {
    let server = Server::start(&grpc(), snapshot(), None).unwrap();
    let client = Client::new(&server);
    let mut stream = Stream::begin(&client, Some(("x-request-id", "of-call")));
    let request = |at: usize| match at % 10 {
        3 => named(at, ids(&[500, 0])),
        7 => ModelInferRequest { model_name: "other".into(), ..named(at, ids(&[1, 1])) },
        _ => named(at, ids(&[at as i64, 1])),
    };
    let sent: Vec<u8> = (0..100).flat_map(|at| framed(&request(at))).collect();
    // Messages are cut anywhere, and several come together.
    for piece in sent.chunks(777) {
        stream.send(piece.to_vec());
    }
    stream.end();
    for at in 0..100 {
        let ModelStreamInferResponse { error_message, infer_response } = stream.next().unwrap();
        let found = infer_response.unwrap();
        assert_eq!(found.id, at.to_string());
        match at % 10 {
            3 => assert!(error_message.contains("row id out of range"), "{error_message}"),
            7 => assert!(error_message.contains("unknown model"), "{error_message}"),
            _ => {
                let same: ModelInferResponse = client.infer(&request(at)).answer();
                assert_eq!((error_message.as_str(), found), ("", same));
            }
        }
    }
    assert_eq!(stream.ended().code, Code::Ok);
    let metrics = get(&server, "/metrics").text();
    for (status, count) in [(200, 80), (400, 10), (404, 10)] {
        let line =
            format!("tierbed_requests_total{{route=\"{STREAM}\",status=\"{status}\"}} {count}\n");
        assert!(metrics.contains(&line), "{line}{metrics}");
    }
    assert!(metrics.contains("tierbed_answers_unfinished_total 0"), "{metrics}");
}

#[test]
fn a_message_that_cannot_be_read_ends_its_call_behind_the_answers() {
    let mut options = grpc();
    (options.limits.body_bytes_max, options.limits.body_idle_ms_max) = (1 << 10, 100);
    let server = Server::start(&options, snapshot(), None).unwrap();
    let client = Client::new(&server);
    let cases: [(&[u8], bool, Code, &str); 3] = [
        (b"\0\0\0\x10\0", false, Code::ResourceExhausted, "body_bytes_max"),
        (b"\0\0\0\0\x09half", true, Code::InvalidArgument, "cut off"),
        (b"\0\0\0\0\x09half", false, Code::DeadlineExceeded, "nothing came"),
    ];
    for (bytes, has_end, code, message) in cases {
        let mut stream = Stream::begin(&client, None);
        stream.send(framed(&ids(&[1, 1])));
        stream.send(bytes.to_vec());
        if has_end {
            stream.end();
        }
        assert_eq!(stream.next().unwrap().error_message, "");
        stream.ended().refused(code, message);
    }
    // What is no message of the protocol is an error of its request.
    let mut stream = Stream::begin(&client, None);
    stream.send(b"\0\0\0\0\x01\xff".to_vec());
    assert!(stream.next().unwrap().error_message.contains("malformed"));
    // Between messages a client may take its time.
    std::thread::sleep(Duration::from_millis(300));
    stream.send(framed(&ids(&[1, 1])));
    assert_eq!(stream.next().unwrap().error_message, "");
    stream.end();
    assert_eq!(stream.ended().code, Code::Ok);
}

#[test]
fn a_server_that_stops_answers_what_it_has_read_and_ends_silent_calls() {
    let held = Held::start(|_| {});
    let client = Client::new(&held.server);
    let mut silent = Stream::begin(&client, None);
    silent.send(framed(&ids(&[1, 1])));
    assert_eq!(silent.next().unwrap().error_message, "");
    let first = held.hold();
    let mut asking = Stream::begin(&client, None);
    asking.send(framed(&named(5, ids(&[1, 1]))));
    held.until("tierbed_queue_requests 1");
    std::thread::scope(|scope| {
        let stopping = scope.spawn(|| held.server.stop());
        silent.ended().refused(Code::Unavailable, "stops");
        held.open();
        assert_eq!(asking.next().unwrap().infer_response.unwrap().id, "5");
        asking.ended().refused(Code::Unavailable, "stops");
        assert!(stopping.join().unwrap());
    });
    drop(first);
}

#[test]
fn a_call_that_is_over_or_left_is_not_worked_for() {
    let held = Held::start(|limits| limits.requests_max = 100);
    let client = Client::new(&held.server);
    let first = held.hold();
    let mut stream = Stream::begin(&client, Some(("grpc-timeout", "200m")));
    stream.send(framed(&ids(&[1, 1])));
    stream.ended().refused(Code::DeadlineExceeded, "time of the call");
    held.until("tierbed_requests_dropped_total 1");
    let mut stream = Stream::begin(&client, None);
    for _ in 0..50 {
        stream.send(framed(&ids(&[1, 1])));
    }
    // The rest is not read before there is an answer to take.
    held.until("tierbed_queue_requests 32");
    stream.sending.send_reset(h2::Reason::CANCEL);
    held.until("tierbed_requests_dropped_total 33");
    held.open();
    held.until("tierbed_requests_in_flight 0");
    drop((first, stream));
}

#[test]
fn a_client_that_does_not_take_its_answers_is_cut_off() {
    let mut options = grpc();
    options.limits.answer_ms_max = 200;
    let server = Server::start(&options, snapshot(), None).unwrap();
    let client = Client::new(&server);
    let mut stream = Stream::begin(&client, None);
    // One answer is larger than the window of a client that takes nothing.
    let many: Vec<i64> = (0..10_000).flat_map(|at| [at % 500, 1]).collect();
    stream.send(framed(&ids(&many)));
    let line = r#"tierbed_connections_cut_total{reason="answer"} 1"#;
    let is_cut = (0..400).any(|_| {
        std::thread::sleep(Duration::from_millis(10));
        get(&server, "/metrics").text().lines().any(|found| found == line)
    });
    assert!(is_cut, "{}", get(&server, "/metrics").text());
}
