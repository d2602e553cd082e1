//! Calls that come while others wait.

use ParameterChoice::Int64Param;

use super::super::admission::Held;
use super::*;

const LOOKED_UP: &str =
    r#"tierbed_queue_seconds_count{route="/inference.GRPCInferenceService/ModelInfer"} 1"#;

/// Asks for rows, with parameters that are integers.
fn hurried(parameters: &[(&str, i64)]) -> Vec<u8> {
    let parameters = parameters.iter().map(|(name, number)| {
        let parameter_choice = Some(Int64Param(*number));
        ((*name).to_owned(), InferParameter { parameter_choice })
    });
    framed(&ModelInferRequest { parameters: parameters.collect(), ..ids(&[1, 1]) })
}

fn infer(client: &Client, deadline: Option<&str>, body: Vec<u8>) -> Called {
    client.call_with(&format!("{SERVICE}/ModelInfer"), deadline, body)
}

#[test]
fn a_call_that_would_wait_too_long_is_told_when_to_come_back() {
    let held = Held::start(|_| {});
    let client = Client::new(&held.server);
    let first = held.hold();
    held.clock.advance_us(1_000_000);
    let refused = infer(&client, None, hurried(&[]));
    refused.refused(Code::ResourceExhausted, "wait too long");
    assert_eq!(refused.pushback.as_deref(), Some("1000"));
    assert!(held.has(r#"tierbed_requests_refused_total{reason="predicted_wait"} 1"#));
    held.open();
    held.until("tierbed_requests_in_flight 0");
    infer(&client, None, hurried(&[])).answer::<ModelInferResponse>();
    drop(first);
}

#[test]
fn low_calls_are_refused_first() {
    let held = Held::start(|limits| limits.requests_max = 2);
    let client = Client::new(&held.server);
    let first = held.hold();
    let of =
        |priority| infer(&client, None, hurried(&[("priority", priority), ("timeout", 20_000)]));
    use Code::{DeadlineExceeded, ResourceExhausted};
    let codes = [2, 3, 0, 1].map(|priority| of(priority).code);
    assert_eq!(codes, [ResourceExhausted, ResourceExhausted, DeadlineExceeded, DeadlineExceeded]);
    held.open();
    drop(first);
}

#[test]
fn a_call_ends_at_the_earliest_of_its_times_and_does_no_work() {
    let held = Held::start(|limits| limits.request_ms_max = 5_000);
    let client = Client::new(&held.server);
    let first = held.hold();
    for (count, deadline, timeout_us) in [
        (1, Some("500m"), 0),
        (2, Some("1H"), 500_000),
        (3, None, 500_000),
        (4, Some("500m"), 3_000_000),
    ] {
        let called = infer(&client, deadline, hurried(&[("timeout", timeout_us)]));
        assert_eq!(called.code, Code::DeadlineExceeded, "{}", called.message);
        assert_eq!(called.pushback, None);
        held.until(&format!("tierbed_requests_dropped_total {count}"));
    }
    assert!(held.has(r#"tierbed_requests_refused_total{reason="deadline"} 4"#));
    assert!(held.has("tierbed_queue_requests 0"));
    infer(&client, None, hurried(&[("timeout", -1)])).refused(Code::InvalidArgument, "timeout");
    held.open();
    held.until("tierbed_requests_in_flight 0");
    assert!(!held.has(LOOKED_UP), "it was worked on");
    infer(&client, Some("5S"), hurried(&[])).answer::<ModelInferResponse>();
    assert!(held.has(LOOKED_UP));
    drop(first);
}

#[test]
fn a_client_that_resets_its_call_or_leaves_is_not_worked_for() {
    let held = Held::start(|_| {});
    let client = Client::new(&held.server);
    let first = held.hold();
    let begin = || {
        let request = Request::post(format!("http://t{SERVICE}/ModelInfer")).body(()).unwrap();
        client.runtime.block_on(async {
            let mut calls = client.calls.clone().ready().await.unwrap();
            let (answer, mut sending) = calls.send_request(request, false).unwrap();
            sending.send_data(hurried(&[]).into(), true).unwrap();
            (answer, sending)
        })
    };
    let (_answer, mut sending) = begin();
    held.until("tierbed_queue_requests 1");
    sending.send_reset(h2::Reason::CANCEL);
    held.until("tierbed_requests_dropped_total 1");
    let answers = begin();
    held.until("tierbed_queue_requests 1");
    drop((answers, sending, client));
    held.until("tierbed_requests_dropped_total 2");
    let route = "/inference.GRPCInferenceService/ModelInfer";
    held.until(&format!("tierbed_requests_total{{route=\"{route}\",status=\"499\"}} 2"));
    held.until("tierbed_requests_in_flight 1");
    held.open();
    held.until("tierbed_requests_in_flight 0");
    assert!(!held.has(LOOKED_UP), "it was worked on");
    drop(first);
}
