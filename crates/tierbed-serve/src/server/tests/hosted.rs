//! Lookups of a process that has a server of its own: as ours answers them.

use super::oip::{binary, infer};
use super::*;
use crate::hosted::{Hosted, HostedAnswer, HostedInput, HostedRequest};

fn input(name: &str, shape: &[i64], ids: &[i64]) -> HostedInput {
    let datatype = "INT64".to_owned();
    HostedInput { name: name.into(), datatype, shape: shape.to_vec(), bytes: i64s(ids) }
}

fn ids(ids: &[i64]) -> HostedRequest {
    let shape = [ids.len() as i64 / 2, 2];
    HostedRequest { inputs: vec![input("ids", &shape, ids)], ..HostedRequest::default() }
}

/// Names, lengths and bytes of the outputs.
fn told(answer: &HostedAnswer) -> Vec<(String, Vec<usize>, Vec<u8>)> {
    let outputs = answer.outputs().map(|output| {
        let mut bytes = Vec::new();
        output.for_each_piece(|piece| bytes.extend_from_slice(piece));
        assert_eq!(bytes.len(), output.byte_count());
        (output.name().to_owned(), output.shape().to_vec(), bytes)
    });
    outputs.collect()
}

fn hosted() -> Hosted {
    Hosted::start(&options(), snapshot()).unwrap()
}

#[test]
fn requests_of_a_call_get_the_bytes_that_a_server_answers_and_mistakes_fail_alone() {
    let (hosted, server) = (hosted(), Server::start(&options(), snapshot(), None).unwrap());
    let asked: [&[i64]; 5] = [&[1, 2, 299, 898], &[7, 1000], &[499, 999], &[-1, 0], &[3, 3]];
    let answers = hosted.answer(asked.map(ids).to_vec());
    assert_eq!(answers.len(), asked.len());
    for (ids, answer) in asked.into_iter().zip(answers) {
        let bytes = i64s(ids);
        let given = binary("ids", &[ids.len() / 2, 2], "INT64", &bytes);
        let request = json!({"inputs": [given], "parameters": {"binary_data_output": true}});
        let ours = infer(&server, &request, &bytes);
        match answer {
            Ok(answer) => {
                assert_eq!(ours.status, 200);
                let [(name, shape, bytes)] = &told(&answer)[..] else { panic!("{answer:?}") };
                assert_eq!((name.as_str(), shape.as_slice()), ("pooled", &[ids.len() / 2, 11][..]));
                assert_eq!(bytes, &ours.binary["pooled"]);
                assert_eq!(answer.generation(), ours.json["parameters"]["generation"]);
                assert_eq!(answer.sample_count(), ids.len() as u64 / 2);
            }
            Err(refused) => {
                assert_eq!((refused.status, refused.message.as_str()), (ours.status, ours.error()));
                assert_eq!(refused.status, 400);
            }
        }
    }
}

#[test]
fn all_outputs_are_those_that_the_inputs_give() {
    let hosted = hosted();
    let names = |request: HostedRequest| -> Vec<String> {
        let answers = hosted.answer(vec![HostedRequest { takes_all: true, ..request }]);
        let answer = answers.into_iter().next().unwrap().unwrap();
        told(&answer).into_iter().map(|(name, _, _)| name).collect()
    };
    let unpooled = HostedRequest { pooling: Some("none".into()), ..ids(&[1, 2]) };
    let one = vec![input("user.values", &[2], &[4, 5]), input("user.lengths", &[1], &[2])];
    let one = HostedRequest { inputs: one, ..HostedRequest::default() };
    assert_eq!(names(ids(&[1, 2])), ["pooled", "user", "item.v2"]);
    assert_eq!(names(unpooled), ["user", "item.v2"]);
    assert_eq!(names(one), ["pooled", "user"]);
    assert_eq!(hosted.outputs().len(), 3);
    assert_eq!(hosted.inputs()[0].shape, [-1, 2]);
}

#[test]
fn tensors_that_do_not_fit_are_refused() {
    let hosted = hosted();
    let short = HostedInput { bytes: i64s(&[1]), ..input("ids", &[1, 2], &[]) };
    let text = HostedInput { datatype: "BYTES".into(), ..input("ids", &[1, 2], &[1, 2]) };
    let twice = vec![input("ids", &[1, 2], &[1, 2]); 2];
    let wrong = [
        (vec![short], "another number of elements"),
        (vec![text], "datatype is not taken"),
        (vec![input("ids", &[-1, 2], &[1, 2])], "below 0"),
        (vec![input("idx", &[1], &[1])], "unknown input"),
        (twice, "occurs twice"),
        (vec![], "one form"),
    ];
    for (inputs, expected) in wrong {
        let answers = hosted.answer(vec![HostedRequest { inputs, ..HostedRequest::default() }]);
        let refused = answers.into_iter().next().unwrap().unwrap_err();
        assert!(refused.status == 400 && refused.message.contains(expected), "{refused:?}");
    }
}
