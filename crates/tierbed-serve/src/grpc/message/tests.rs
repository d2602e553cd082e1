use super::*;
use crate::admission::Priority;
use crate::grpc::pb::model_infer_request::InferInputTensor as Input;
use crate::oip::outputs::{Dtype, Origin, Output};
use ParameterChoice::{BoolParam, Int64Param, StringParam, Uint64Param};

fn input(name: &str, datatype: &str, shape: &[i64]) -> Input {
    Input {
        name: name.into(),
        datatype: datatype.into(),
        shape: shape.to_vec(),
        ..Input::default()
    }
}

fn contents(int64_contents: &[i64]) -> Option<InferTensorContents> {
    Some(InferTensorContents { int64_contents: int64_contents.to_vec(), ..Default::default() })
}

fn decoded(request_: ModelInferRequest) -> Result<Request> {
    request(request_.encode_to_vec().into())
}

fn of(inputs: Vec<Input>, raw: &[&'static [u8]]) -> ModelInferRequest {
    let raw_input_contents = raw.iter().map(|bytes| Bytes::from_static(bytes)).collect();
    ModelInferRequest { inputs, raw_input_contents, ..Default::default() }
}

fn integers(request: Request) -> Vec<i64> {
    let [tensor] = request.tensors.try_into().unwrap();
    let tensor: Tensor = tensor;
    tensor.integers().unwrap().to_vec()
}

#[test]
fn elements_come_raw_or_typed() {
    let raw = of(vec![input("ids", "INT32", &[1, 2])], &[b"\x01\0\0\0\xff\xff\xff\xff"]);
    assert_eq!(integers(decoded(raw).unwrap()), [1, -1]);
    let typed = Input { contents: contents(&[7, -7]), ..input("ids", "INT64", &[2]) };
    assert_eq!(integers(decoded(of(vec![typed], &[])).unwrap()), [7, -7]);
    let none = decoded(of(vec![input("ids", "INT64", &[0, 2])], &[])).unwrap();
    assert_eq!(integers(none), [0; 0]);
}

#[test]
fn what_is_not_of_the_form_is_refused() {
    let both = Input { contents: contents(&[1]), ..input("ids", "INT64", &[1]) };
    let word = InferParameter { parameter_choice: Some(BoolParam(true)) };
    let parameters = Parameters::from([("pooling".to_owned(), word)]);
    for (bad, message) in [
        (of(vec![input("ids", "INT64", &[1])], &[b"", b""]), "one entry per input"),
        (of(vec![input("ids", "INT64", &[-1])], &[]), "below 0"),
        (of(vec![input("ids", "INT64", &[2])], &[b"12345678"]), "another number of elements"),
        (of(vec![input("ids", "INT64", &[1])], &[b"1234"]), "no multiple"),
        (of(vec![input("ids", "BYTES", &[1])], &[b"1234"]), "datatype is not taken"),
        (of(vec![both], &[b"12345678"]), "both contents and raw_input_contents"),
        (of(vec![input("ids", "INT64", &[0]); 2], &[]), "input occurs twice"),
        (ModelInferRequest { parameters, ..Default::default() }, "must be a string"),
    ] {
        let error = decoded(bad).unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    }
    assert!(request(Bytes::from_static(b"\xff")).is_err());
}

fn addressed(parameters: &[(&str, Option<ParameterChoice>)]) -> Addressed {
    let parameters = parameters.iter().map(|(name, choice)| {
        ((*name).to_owned(), InferParameter { parameter_choice: choice.clone() })
    });
    let whole = ModelInferRequest {
        model_name: "ads".into(),
        parameters: parameters.collect(),
        ..of(vec![input("ids", "INT64", &[1])], &[b"12345678"])
    };
    reply::decode(whole.encode_to_vec().into()).unwrap()
}

#[test]
fn the_address_of_a_request_is_read_without_its_tensors() {
    let hurried = [("timeout", Some(Int64Param(250))), ("priority", Some(Uint64Param(1)))];
    let addressed = addressed(&hurried);
    let hurry = Hurry { timeout_us: Some(250), priority: Priority::High };
    assert_eq!((addressed.model_name.as_str(), addressed.hurry().unwrap()), ("ads", hurry));
}

#[test]
fn a_time_that_is_none_is_refused() {
    let none = addressed(&[("timeout", Some(Int64Param(0))), ("priority", Some(Int64Param(0)))]);
    assert_eq!(none.hurry().unwrap(), Hurry::default());
    assert_eq!(addressed(&[]).hurry().unwrap(), Hurry::default());
    for bad in [Some(Int64Param(-5)), Some(StringParam("5".into())), Some(BoolParam(true)), None] {
        for name in ["timeout", "priority"] {
            let error = addressed(&[(name, bad.clone())]).hurry().unwrap_err().to_string();
            assert!(error.contains("must be an integer") && error.contains(name), "{error}");
        }
    }
}

#[test]
fn a_head_with_its_elements_is_the_message() {
    let output = |name: &str, shape: &[usize]| Output {
        name: name.into(),
        shape: shape.to_vec(),
        is_binary: true,
        from: Origin::Query(0),
    };
    let outputs = Outputs {
        id: Some("7".into()),
        model: "ads.rows".into(),
        generation: "9f".into(),
        dtype: Dtype::F32,
        form: Form::Message,
        outputs: vec![output("a", &[1, 2]), output("b", &[0, 4])],
    };
    let mut bytes = head(&outputs);
    begin(8, &mut bytes);
    bytes.extend_from_slice(&[1; 8]);
    begin(0, &mut bytes);
    let message = reply::Framed::only(&bytes.into()).unwrap().bytes;
    let answer: ModelInferResponse = reply::decode(message).unwrap();
    assert_eq!((answer.id.as_str(), answer.outputs[0].shape.as_slice()), ("7", &[1, 2][..]));
    assert_eq!(answer.raw_output_contents, [Bytes::from_static(&[1; 8]), Bytes::new()]);
}

#[test]
fn a_message_is_cut_before_elements_that_come_last() {
    let whole = |request: &ModelInferRequest| Bytes::from(request.encode_to_vec());
    let cut_of = |request: &ModelInferRequest| cut(&whole(request));
    let one = of(vec![input("ids", "INT64", &[1])], &[b"12345678"]);
    let Cut { body_type, head, binary } = cut_of(&one).unwrap();
    assert_eq!((body_type, &binary[..]), (TYPE, &b"12345678"[..]));
    let parts = [&head[..], b"\x3a\x08", &binary].concat();
    assert_eq!(parts, whole(&one));
    assert_eq!(cut_of(&of(vec![], &[b""])).unwrap().binary.len(), 0);
    let two = of(vec![input("a", "INT64", &[1]), input("b", "INT64", &[1])], &[b"1", b"2"]);
    assert!(cut_of(&two).is_none());
    assert!(cut_of(&of(vec![], &[])).is_none(), "there are no elements");
    let bytes = whole(&one);
    for end in 0..bytes.len() {
        assert!(cut(&bytes.slice(..end)).is_none(), "{end} bytes are no message");
    }
    assert!(cut(&[&bytes[..], b"\x08\x01"].concat().into()).is_none(), "more comes behind");
    assert!(cut(&[b"\x08\x01", &bytes[..]].concat().into()).is_none(), "no field of the form");
}
