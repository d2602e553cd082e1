//! The Open Inference Protocol as its clients speak it.

use super::*;
use crate::coding::{Coding, Inflating};
use crate::predictor::{Batch, ModelInputs, ModelOutput};

/// An answer's JSON and its binary outputs, by name.
pub(super) struct Inferred {
    pub(super) status: u16,
    pub(super) json: Value,
    pub(super) binary: HashMap<String, Vec<u8>>,
}

impl Inferred {
    pub(super) fn error(&self) -> &str {
        self.json["error"].as_str().unwrap()
    }

    fn output(&self, name: &str) -> &Value {
        let outputs = self.json["outputs"].as_array().unwrap();
        outputs.iter().find(|output| output["name"] == name).unwrap()
    }

    fn data(&self, name: &str) -> Vec<f32> {
        let data = self.output(name)["data"].as_array().unwrap();
        data.iter().map(|x| x.as_f64().unwrap() as f32).collect()
    }
}

/// An input as JSON, or as bytes behind it.
fn input(name: &str, shape: &[usize], datatype: &str, data: &Value) -> Value {
    json!({"name": name, "shape": shape, "datatype": datatype, "data": data})
}

pub(super) fn binary(name: &str, shape: &[usize], datatype: &str, bytes: &[u8]) -> Value {
    json!({"name": name, "shape": shape, "datatype": datatype,
        "parameters": {"binary_data_size": bytes.len()}})
}

fn infer_at(server: &Server, path: &str, request: &Value, tail: &[u8]) -> Inferred {
    let head = request.to_string();
    let lines = match tail.is_empty() {
        true => "X-None: 0".to_owned(),
        false => format!("Inference-Header-Content-Length: {}", head.len()),
    };
    let body = [head.as_bytes(), tail].concat();
    let answer = ask_with(server, &format!("POST {path}"), &lines, &body);
    let (json, rest) = match answer.header_bytes {
        Some(length) => answer.body.split_at(length),
        None => (&answer.body[..], &[][..]),
    };
    let json: Value = serde_json::from_slice(json).unwrap();
    let (mut binary, mut at) = (HashMap::new(), 0);
    for output in json["outputs"].as_array().into_iter().flatten() {
        if let Some(size) = output["parameters"]["binary_data_size"].as_u64() {
            let name = output["name"].as_str().unwrap().to_owned();
            binary.insert(name, rest[at..at + size as usize].to_vec());
            at += size as usize;
        }
    }
    assert_eq!(at, rest.len(), "binary outputs are the whole rest");
    let octets = if rest.is_empty() { "application/json" } else { "application/octet-stream" };
    assert_eq!(answer.content_type, octets);
    Inferred { status: answer.status, json, binary }
}

pub(super) fn infer(server: &Server, request: &Value, tail: &[u8]) -> Inferred {
    infer_at(server, "/v2/models/tierbed.rows/infer", request, tail)
}

fn error_at(server: &Server, method: &str, path: &str) -> (u16, String) {
    let answer = ask(server, method, path, "text/plain", b"");
    (answer.status, answer.json()["error"].as_str().unwrap().to_owned())
}

/// Vectors of both features side by side.
pub(super) fn side_by_side(user: &[f32], item: &[f32]) -> Vec<f32> {
    let rows = user.chunks(4).zip(item.chunks(7));
    rows.flat_map(|(user, item)| user.iter().chain(item)).copied().collect()
}

#[test]
fn what_is_served_is_told_to_clients() {
    let server = Server::start(&options(), snapshot(), None).unwrap();
    let about = get(&server, "/v2").json();
    assert_eq!(about["name"], "tierbed");
    assert!(about["extensions"].as_array().unwrap().contains(&json!("binary_tensor_data")));
    for path in ["/v2/health/live", "/v2/health/ready"] {
        let answer = get(&server, path);
        assert_eq!((answer.status, answer.json()), (200, json!({"live": true, "ready": true})));
    }
    let model = get(&server, "/v2/models/tierbed.rows").json();
    assert_eq!((&model["name"], &model["versions"]), (&json!("tierbed.rows"), &json!(["1"])));
    let ids = json!({"name": "ids", "datatype": "INT64", "shape": [-1, 2]});
    assert_eq!(model["inputs"][0], ids);
    let pooled = json!({"name": "pooled", "datatype": "FP32", "shape": [-1, 11]});
    assert_eq!(model["outputs"][0], pooled);
    assert_eq!(model["outputs"][2]["name"], "item.v2");
    let config = get(&server, "/v2/models/tierbed.rows/versions/1/config").json();
    assert_eq!((&config["backend"], &config["max_batch_size"]), (&json!("tierbed"), &json!(0)));
    let first = json!({"name": "ids", "data_type": "TYPE_INT64", "dims": [-1, 2],
        "optional": false});
    assert_eq!(config["input"][0], first);
    assert_eq!(get(&server, "/v2/models/tierbed.rows/ready").json()["ready"], true);
    let index = ask(&server, "POST", "/v2/repository/index", "application/json", b"").json();
    let only = json!([{"name": "tierbed.rows", "version": "1", "state": "READY", "reason": ""}]);
    assert_eq!(index, only);
}

#[test]
fn other_names_and_versions_are_not_found() {
    let named = ServeOptions { model_name: "ads".into(), ..options() };
    let server = Server::start(&named, snapshot(), None).unwrap();
    assert_eq!(get(&server, "/v2/models/ads.rows").status, 200);
    for path in
        ["/v2/models/ads", "/v2/models/tierbed.rows/config", "/v2/models/ads.rows/versions/2"]
    {
        let (status, error) = error_at(&server, "GET", path);
        assert!(status == 404 && error.starts_with("Request for unknown model"), "{error}");
    }
    assert_eq!(error_at(&server, "GET", "/v2/nothing").0, 404);
    assert_eq!(error_at(&server, "GET", "/v2/models/ads.rows/infer").0, 405);
    assert_eq!(error_at(&server, "GET", "/v2/models/%ff/ready").0, 400);
    let (status, error) = error_at(&server, "POST", "/v2/repository/models/ads/load");
    assert!(status == 400 && error.contains("not allowed"), "{error}");
    for bad in ["", "a/b", "stats", "a b"] {
        let bad = ServeOptions { model_name: bad.into(), ..options() };
        let error = Server::start(&bad, snapshot(), None).unwrap_err();
        assert!(error.to_string().contains("model_name"), "{error}");
    }
}

#[test]
fn every_form_of_a_lookup_has_the_bits_of_the_snapshot() {
    let snapshot = snapshot();
    let server = Server::start(&options(), Arc::clone(&snapshot), None).unwrap();
    let user = Bags::new(&USER.0, &USER.1, None, 1).unwrap();
    let item = Bags::new(&ITEM.0, &ITEM.1, Some(&WEIGHTS), 1).unwrap();
    let user = direct(&snapshot, 0, Pooling::Sum, &user);
    let item = direct(&snapshot, 1, Pooling::Sum, &item);

    // All features, with weights.
    let values: Vec<i64> = USER.0.iter().chain(&ITEM.0).copied().collect();
    let lengths = json!([3, 0, 2, 1, 1, 2]);
    let weights: Vec<f32> = [1.0; 5].iter().chain(&WEIGHTS).copied().collect();
    let request = json!({"id": "7", "inputs": [
        input("values", &[9], "INT64", &json!(values)),
        input("lengths", &[6], "INT32", &lengths),
        input("weights", &[9], "FP32", &json!(weights)),
    ]});
    let answer = infer(&server, &request, b"");
    assert_eq!((answer.status, &answer.json["id"]), (200, &json!("7")));
    assert_eq!(answer.json["model_name"], "tierbed.rows");
    assert_eq!(answer.json["parameters"]["generation"], snapshot.identity().unwrap());
    assert_eq!(answer.output("pooled")["shape"], json!([3, 11]));
    assert_eq!(answer.data("pooled"), side_by_side(&user, &item));

    // The same, binary, and by name.
    let (values, lengths) = (i64s(&values), i64s(&[3, 0, 2, 1, 1, 2]));
    let tail = [values.clone(), lengths.clone(), f32s(&weights)].concat();
    let inputs = [
        binary("values", &[9], "INT64", &values),
        binary("lengths", &[6], "INT64", &lengths),
        binary("weights", &[9], "FP32", &f32s(&weights)),
    ];
    let whole = json!({"inputs": inputs, "parameters": {"binary_data_output": true}});
    let answer = infer(&server, &whole, &tail);
    assert_eq!(answer.binary["pooled"], f32s(&side_by_side(&user, &item)));
    let named = json!({"inputs": inputs, "outputs": [
        {"name": "item.v2", "parameters": {"binary_data": true}}, {"name": "user"}]});
    let answer = infer(&server, &named, &tail);
    assert_eq!(answer.binary["item.v2"], f32s(&item));
    assert_eq!(
        (answer.output("user")["shape"].clone(), answer.data("user")),
        (json!([3, 4]), user.clone())
    );
    let one = json!({"inputs": inputs, "outputs": [
        {"name": "item.v2", "parameters": {"binary_data": true}}]});
    assert_eq!(infer(&server, &one, &tail).binary["item.v2"], f32s(&item));

    // Some features, by name.
    let request = json!({"inputs": [
        input("user.lengths", &[3], "INT64", &json!([3, 0, 2])),
        input("user.values", &[5], "INT64", &json!(USER.0)),
    ]});
    let answer = infer(&server, &request, b"");
    assert_eq!(
        (answer.output("pooled")["shape"].clone(), answer.data("pooled")),
        (json!([3, 4]), user)
    );
}

#[test]
fn one_id_per_feature_is_the_simple_form() {
    let snapshot = snapshot();
    let server = Server::start(&options(), Arc::clone(&snapshot), None).unwrap();
    let ids = [[1_i64, 3], [299, 999], [450, 0]];
    let column = |at: usize| -> Vec<i64> { ids.iter().map(|row| row[at]).collect() };
    let of = |table: u32, at: usize| {
        let column = column(at);
        let bags = Bags::new(&column, &[0, 1, 2, 3], None, 1).unwrap();
        direct(&snapshot, table, Pooling::Sum, &bags)
    };
    let expected = side_by_side(&of(0, 0), &of(1, 1));
    let request = json!({"inputs": [input("ids", &[3, 2], "INT64", &json!(ids))]});
    assert_eq!(infer(&server, &request, b"").data("pooled"), expected);
    // A single sample lies in order: its ids are looked up in the body, where they lie as words.
    for spaces in 0..8 {
        let bytes = i64s(&ids[0]);
        let id = " ".repeat(spaces);
        let request = json!({"id": id, "inputs": [binary("ids", &[1, 2], "INT64", &bytes)],
            "parameters": {"binary_data_output": true, "anything": 1}});
        assert_eq!(infer(&server, &request, &bytes).binary["pooled"], f32s(&expected[..11]));
    }
    let none = json!({"inputs": [input("ids", &[0, 2], "INT64", &json!([]))]});
    assert_eq!(infer(&server, &none, b"").output("pooled")["shape"], json!([0, 11]));
}

#[test]
fn parameters_choose_pooling_and_type() {
    let snapshot = snapshot();
    let server = Server::start(&options(), Arc::clone(&snapshot), None).unwrap();
    let inputs = [
        input("user.values", &[5], "INT64", &json!(USER.0)),
        input("user.lengths", &[3], "INT64", &json!([3, 0, 2])),
    ];
    let user = Bags::new(&USER.0, &USER.1, None, 1).unwrap();
    let mean = direct(&snapshot, 0, Pooling::Mean, &user);
    let request = json!({"inputs": inputs, "parameters": {"pooling": "mean"}});
    assert_eq!(infer(&server, &request, b"").data("pooled"), mean);
    let rows = direct(&snapshot, 0, Pooling::None, &user);
    let request = json!({"inputs": inputs, "parameters": {"pooling": "none"}});
    let answer = infer(&server, &request, b"");
    assert_eq!(
        (answer.output("user")["shape"].clone(), answer.data("user")),
        (json!([5, 4]), rows.clone())
    );
    let typed = |dtype: &str| {
        let request = json!({"inputs": inputs,
            "parameters": {"pooling": "none", "output_dtype": dtype, "binary_data_output": true}});
        let answer = infer(&server, &request, b"");
        assert_eq!(answer.output("user")["datatype"], dtype);
        answer.binary["user"].clone()
    };
    let halves: Vec<u8> = rows.iter().flat_map(|x| half::f16::from_f32(*x).to_le_bytes()).collect();
    let brains: Vec<u8> =
        rows.iter().flat_map(|x| half::bf16::from_f32(*x).to_le_bytes()).collect();
    assert_eq!((typed("FP16"), typed("BF16"), typed("FP32")), (halves, brains, f32s(&rows)));
}

#[test]
fn bad_inference_requests_say_what_is_wrong() {
    let small = limited(|limits| (limits.indices_max, limits.bags_max) = (10, 12));
    let server = Server::start(&small, snapshot(), None).unwrap();
    let ids =
        |shape: &[usize], data: Value| json!({"inputs": [input("ids", shape, "INT64", &data)]});
    let with = |key: &str, value: Value| {
        let mut request = ids(&[1, 2], json!([1, 2]));
        request[key] = value;
        request
    };
    let of = |inputs: &[Value]| json!({ "inputs": inputs });
    let values = input("values", &[2], "INT64", &json!([1, 2]));
    let lengths = |data: Value| input("lengths", &[2], "INT64", &data);
    for (request, message) in [
        (json!({}), "failed to parse the request JSON"),
        (of(&[]), "inputs must be of one form"),
        (ids(&[1, 2], json!([500, 2])), "row id out of range (table: user, row: 500"),
        (ids(&[1, 2], json!([1, -1])), "table: item.v2, row: -1"),
        (ids(&[1, 3], json!([1, 2, 3])), "tensor: ids, expected: [B, 2]"),
        (ids(&[2], json!([1, 2])), "two dimensions"),
        (ids(&[1, 2], json!([1, 2, 3])), "another number of elements than its shape"),
        (ids(&[6, 2], json!(vec![0; 12])), "too many indices"),
        (ids(&[usize::MAX, usize::MAX], json!([1])), "another number of elements"),
        (ids(&[1, 2], json!([1.5, 2])), "whole numbers"),
        (of(&[input("ids", &[1, 2], "FP32", &json!([1, 2]))]), "expected: INT64"),
        (of(&[input("ids", &[1, 2], "BYTES", &json!(["a", "b"]))]), "datatype is not taken"),
        (of(&[input("idz", &[1, 2], "INT64", &json!([1, 2]))]), "unknown input (tensor: idz"),
        (of(&[input("no.values", &[1], "INT64", &json!([1]))]), "unknown feature"),
        (of(std::slice::from_ref(&values)), "both values and lengths"),
        (of(&[values.clone(), values.clone()]), "input occurs twice"),
        (of(&[values.clone(), lengths(json!([1, 2]))]), "add up to the number of values"),
        (of(&[values.clone(), lengths(json!([3, -1]))]), "length is out of range"),
        (of(&[values.clone(), lengths(json!([i64::MAX, i64::MAX]))]), "length is out of range"),
        (of(&[json!({"name": "ids", "shape": [1, 2], "datatype": "INT64"})]), "shared memory"),
        (of(&[binary("ids", &[1, 2], "INT64", &[0; 16])]), "body ends within an input"),
        (with("outputs", json!([{"name": "nothing"}])), "unknown feature"),
        (with("outputs", json!([{"name": "user"}, {"name": "user"}])), "output occurs twice"),
        (
            with("outputs", json!([{"name": "user", "parameters": {"classification": 3}}])),
            "classification and shared memory are not supported",
        ),
        (with("parameters", json!({"pooling": "max"})), "unknown pooling"),
        (with("parameters", json!({"output_dtype": "FP64"})), "unknown output_dtype"),
        (with("parameters", json!({"output_dtype": "FP16"})), "ask for binary data"),
        (
            json!({"inputs": [values, lengths(json!([1, 1]))], "parameters": {"pooling": "none"},
                "outputs": [{"name": "pooled"}]}),
            "needs features that are pooled",
        ),
    ] {
        let answer = infer(&server, &request, b"");
        let error = answer.error();
        assert!(answer.status == 400 && error.contains(message), "{request}: {error}");
    }
    let post = |lines: &str, body: &[u8]| {
        let what = "POST /v2/models/tierbed.rows/infer";
        let answer = ask_with(&server, what, lines, body);
        (answer.status, answer.json()["error"].as_str().unwrap().to_owned())
    };
    assert_eq!(post("Inference-Header-Content-Length: 9", b"{}").0, 400);
    assert_eq!(post("Inference-Header-Content-Length: x", b"{}").0, 400);
    assert_eq!(post("Content-Encoding: br", b"{}").0, 415);
    let (status, error) = post("Content-Encoding: gzip", b"{}");
    assert!(status == 400 && error.contains("compressed body cannot be read"), "{error}");
    let left = ids(&[1, 2], json!([1, 2]));
    assert!(infer(&server, &left, b"more").error().contains("more bytes than its inputs"));
}

#[test]
fn compressed_bodies_are_those_they_stand_for() {
    let server =
        Server::start(&limited(|limits| limits.body_bytes_max = 64 << 10), snapshot(), None);
    let server = server.unwrap();
    let request = json!({"inputs": [input("ids", &[1, 2], "INT64", &json!([1, 3]))]}).to_string();
    let post = |lines: &str, body: &[u8]| {
        ask_with(&server, "POST /v2/models/tierbed.rows/infer", lines, body)
    };
    let plain = post("Accept-Encoding: gzip, deflate", request.as_bytes());
    for coding in [Coding::Gzip, Coding::Deflate] {
        let name = coding.name();
        let sent = coding.deflate(&[request.as_bytes()]).unwrap();
        let lines = format!("Content-Encoding: {name}\r\nAccept-Encoding: {name}");
        let answer = post(&lines, &sent);
        assert_eq!(answer.status, 200);
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let told = runtime.block_on(async {
            let buffers = crate::body::Buffers::new(1 << 20);
            let mut inflating = Inflating::new(coding, 1 << 20);
            inflating.push(&answer.body, 0, &mut buffers.hold_nothing()).await.unwrap();
            inflating.finish().unwrap()
        });
        assert_eq!(told, plain.body, "{name}");
        let bomb = coding.deflate(&[&vec![b' '; 1 << 20]]).unwrap();
        assert_eq!(post(&format!("Content-Encoding: {name}"), &bomb).status, 413);
    }
    let refused = "tierbed_requests_refused_total{reason=\"decompressed\"} 2";
    let metrics = get(&server, "/metrics").text();
    assert!(metrics.contains(refused), "{metrics}");
}

#[test]
fn failures_have_the_status_of_the_table() {
    let folder: Arc<dyn Folder> = Arc::new(MemoryFolder::new());
    let snapshot = snapshot_in(&folder, None);
    folder.open("rows.pages", OpenMode::ReadWrite).unwrap().write_at(100, b"x").unwrap();
    let small = limited(|limits| limits.body_bytes_max = 1 << 10);
    let server = Server::start(&small, snapshot, None).unwrap();
    let request = json!({"inputs": [input("ids", &[1, 2], "INT64", &json!([499, 0]))]});
    let answer = infer(&server, &request, b"");
    assert_eq!(answer.status, 500);
    assert!(answer.error().contains("checksum"), "{}", answer.error());
    let large = json!({"id": "x".repeat(1 << 10), "inputs": []});
    assert_eq!(infer(&server, &large, b"").status, 413);
    let stats = get(&server, "/v2/models/tierbed.rows/stats").json();
    assert_eq!(stats["model_stats"][0]["inference_stats"]["fail"]["count"], 2);
}

/// Answers with elements of its rows; thinks until it is told to when the first is that of id 0.
pub(super) struct Picking {
    gate: Mutex<mpsc::Receiver<()>>,
    inputs: ModelInputs,
    outputs: Vec<ModelOutput>,
}

impl Picking {
    pub(super) fn new(gate: mpsc::Receiver<()>) -> Self {
        let output = |name: &str| ModelOutput { name: name.into(), width: None };
        let outputs = ["probability", "logit"].map(output).into();
        Self { gate: Mutex::new(gate), inputs: models::inputs(0), outputs }
    }
}

impl Predictor for Picking {
    fn inputs(&self) -> &ModelInputs {
        &self.inputs
    }

    fn outputs(&self) -> &[ModelOutput] {
        &self.outputs
    }

    fn predict(&self, batch: Batch) -> Result<Vec<Vec<f32>>> {
        assert_eq!(batch.dense, [0.0; 0]);
        if batch.rows[0] == 0.1 {
            lock(&self.gate).recv().unwrap();
        }
        let column = |at: usize| batch.rows.iter().skip(at).step_by(11).copied().collect();
        Ok(vec![column(0), column(4)])
    }
}

#[test]
fn predictions_are_tensors_and_stop_waiting_when_their_time_is_over() {
    let (open, gate) = mpsc::sync_channel(1);
    let picking = Arc::new(Picking::new(gate));
    let server = Server::start(&options(), snapshot(), Some(picking)).unwrap();
    let model = get(&server, "/v2/models/tierbed").json();
    assert_eq!(model["inputs"][0]["shape"], json!([-1, 2]));
    assert_eq!(model["outputs"][1]["name"], "logit");
    let path = "/v2/models/tierbed/versions/1/infer";
    let request = json!({"inputs": [input("ids", &[3, 2], "INT64", &json!([1, 3, 3, 6, 5, 9]))]});
    let answer = infer_at(&server, path, &request, b"");
    assert_eq!(answer.data("probability"), [1.1, 3.1, 5.1]);
    assert_eq!(answer.output("logit")["shape"], json!([3]));
    let bytes = i64s(&[1, 3]);
    let request = json!({"inputs": [binary("ids", &[1, 2], "INT64", &bytes)],
        "outputs": [{"name": "logit", "parameters": {"binary_data": true}}]});
    assert_eq!(infer_at(&server, path, &request, &bytes).binary["logit"], f32s(&[1.0 - 0.7]));
    let late = json!({"parameters": {"timeout": 20_000},
        "inputs": [input("ids", &[1, 2], "INT64", &json!([0, 2]))]});
    let answer = infer_at(&server, path, &late, b"");
    assert_eq!(answer.status, 504, "{}", answer.error());
    open.send(()).unwrap();
    for (inputs, message) in [
        (json!([]), "inputs must be of one form"),
        (json!([input("weights", &[1], "FP32", &json!([1]))]), "unknown input"),
        (json!([input("dense", &[1], "FP32", &json!([1]))]), "two dimensions"),
        (json!([input("ids", &[2, 1], "INT64", &json!([1, 2]))]), "one column per feature"),
        (json!([input("ids", &[1, 2], "INT64", &json!([500, 2]))]), "row id out of range"),
    ] {
        let answer = infer_at(&server, path, &json!({ "inputs": inputs }), b"");
        assert!(answer.status == 400 && answer.error().contains(message), "{}", answer.error());
    }
    let stats = get(&server, "/v2/models/stats").json();
    let stats = &stats["model_stats"][1];
    assert_eq!((&stats["name"], &stats["inference_count"]), (&json!("tierbed"), &json!(4)));
    assert_eq!(stats["inference_stats"]["success"]["count"], 2);
}
