//! Predictions: their forms, their batches, and what fails alone.

use tokio::sync::oneshot;

use super::models::{inputs, BAD, PANIC};
use super::*;
use crate::answer::Refusal;
use crate::batch::run;
use crate::body::Held;
use crate::generation::Serving;
use crate::job::{Done, Job, Made, Stage, Waits, Work};
use crate::predict::bodies::prepare;
use crate::predictor::{Batch, ModelInputs, ModelOutput};
use crate::spans::Steps;

const JSON: &str = "application/json";

/// The sum of both rows and the number of a sample, as [`Scoring`] adds them.
fn scored(user: f32, item: f32, number: f32) -> f32 {
    [user + 0.1; 4].iter().chain(&[item - 0.7; 7]).sum::<f32>() + number
}

#[test]
fn a_prediction_is_answered_in_its_own_form() {
    let scoring = Arc::new(Scoring::default());
    let predictor = Arc::clone(&scoring) as Arc<dyn Predictor>;
    let server = Server::start(&options(), snapshot(), Some(predictor)).unwrap();
    let post = |content_type, body: &[u8]| ask(&server, "POST", "/v1/predict", content_type, body);
    let expected = [scored(5.0, 2.0, 0.5), scored(6.0, 3.0, 7.0)];
    let body = json!({"dense": [[0.5], [7]], "values": [5, 6, 6, 9]}).to_string();
    let answer = post("application/json; charset=utf-8", body.as_bytes());
    assert_eq!((answer.status, answer.content_type.as_str()), (200, JSON), "{}", answer.text());
    assert_eq!(floats(&json!([answer.json()["logit"]])), expected);

    let given = |lengths: &[i64]| {
        tensors(&[
            ("values", Dtype::I64, i64s(&[5, 6, 6, 9])),
            ("lengths", Dtype::I64, i64s(lengths)),
        ])
    };
    let numbers = f32s(&[0.5, 7.0]);
    let with_dense = |lengths: &[i64]| {
        let rest = given(lengths);
        let rest = SafeTensors::deserialize(&rest).unwrap();
        let dense = TensorView::new(Dtype::F32, vec![2, 1], &numbers).unwrap();
        let all = rest.iter().chain([("dense", dense)]);
        safetensors::serialize(all, None).unwrap()
    };
    let binary = |body: &[u8]| post("application/x-safetensors", body);
    let answer = binary(&with_dense(&[1, 1, 1, 1]));
    assert_eq!(answer.content_type, "application/x-safetensors", "{}", answer.text());
    let told = SafeTensors::deserialize(&answer.body).unwrap();
    assert_eq!(told.tensor("logit").unwrap().shape(), [2]);
    assert_eq!(told.tensor("logit").unwrap().data(), f32s(&expected));
    // Two users of the first sample, none of the second.
    assert_eq!(binary(&with_dense(&[2, 0, 1, 1])).status, 200);
    let rows = &scoring.asked.lock().unwrap().last().unwrap().rows.clone();
    let user = 5.1 + 6.1_f32;
    assert_eq!(rows[..4], [user; 4]);
    assert_eq!(rows[11..15], [0.0; 4]);
    assert_eq!(binary(&given(&[1, 1, 1, 1])).status, 400);
    assert_eq!(binary(b"no tensors").status, 400);
    assert_eq!(post("image/png", b"x").status, 415);
    let none = json!({"dense": [], "values": []}).to_string();
    assert_eq!(post(JSON, none.as_bytes()).json()["logit"], json!([]));
}

#[test]
fn what_does_not_fit_the_model_is_refused_in_words() {
    let server = Server::start(
        &limited(|limits| limits.answer_bytes_max = 200),
        snapshot(),
        Some(Arc::new(Scoring::default())),
    )
    .unwrap();
    for (body, message) in [
        (json!({"values": [1, 2]}), "the request lacks dense"),
        (json!({"dense": [[0]]}), "missing field `values`"),
        (json!({"dense": [[0, 1]], "values": [1, 2]}), "one column per numerical feature"),
        (json!({"dense": [[0], [1, 2]], "values": [1, 2, 3, 4]}), "different lengths"),
        (json!({"dense": [[1e39]], "values": [1, 2]}), "more than 32 bits"),
        (json!({"dense": [[0]], "values": [1]}), "needs one of the lengths"),
        (json!({"dense": [[0]], "values": [1], "lengths": [1]}), "needs one of the lengths"),
        (json!({"dense": [[0]], "values": [1], "lengths": [1, 1]}), "add up"),
        (json!({"dense": [[0]], "values": [1], "lengths": [2, -1]}), "length is out of range"),
        (json!({"dense": [[0]], "values": [1, 1000]}), "row id out of range"),
        (json!({"dense": [[0]], "values": [1, 2], "length": [1, 1]}), "unknown field"),
        (json!({"dense": vec![[0]; 5], "values": vec![1; 10]}), "the rows of all samples"),
    ] {
        let body = body.to_string();
        let answer = ask(&server, "POST", "/v1/predict", JSON, body.as_bytes());
        assert_eq!(answer.status, 400, "{body}");
        assert!(answer.text().contains(message), "{body}: {}", answer.text());
    }
    let nan = br#"{"dense": [[NaN]], "values": [1, 2]}"#;
    assert_eq!(ask(&server, "POST", "/v1/predict", JSON, nan).status, 400);
}

type Answer = oneshot::Receiver<std::result::Result<Made, Refusal>>;

fn served(snapshot: Arc<Snapshot>, scoring: &Arc<Scoring>) -> Service {
    let predictor = Some(Arc::clone(scoring) as Arc<dyn Predictor>);
    super::service(&options(), snapshot, predictor, watch::channel(false).1).unwrap()
}

/// A prediction as the route makes it.
fn job(service: &Service, body: &str) -> (Job, Answer) {
    let place = Arc::clone(&service.places).try_acquire_owned().unwrap();
    let (answer, made) = oneshot::channel();
    let (done, held) = (Done { place, answer }, service.buffers.hold_nothing());
    let bytes = axum::body::Bytes::copy_from_slice(body.as_bytes());
    let prepare = move |serving: &Serving<'_>, held: Held| prepare(serving, &bytes, held, false);
    let work = Work::Prediction(Waits::new(Stage::Received(held), prepare));
    let steps = Steps::default();
    let job = Job {
        route: "/v1/predict",
        queued_us: 0,
        body_bytes: 0,
        deadline_us: u64::MAX,
        generation: None,
        work,
        steps,
        done,
    };
    (job, made)
}

/// Answers the bodies as one batch: texts, or kinds and messages.
fn answered(service: &Service, bodies: &[String]) -> Vec<std::result::Result<String, String>> {
    let (jobs, answers): (Vec<_>, Vec<_>) = bodies.iter().map(|body| job(service, body)).unzip();
    run(service, jobs);
    let told = answers.into_iter().map(|mut answer| match answer.try_recv().unwrap() {
        Ok(made) => Ok(String::from_utf8(made.body.bytes.to_vec()).unwrap()),
        Err(refusal) => Err(format!("{}: {}", refusal.kind(), refusal.message())),
    });
    told.collect()
}

fn requests() -> Vec<String> {
    let body = |at: usize| {
        // Bags of 0 to 2 users and of one item for each of 0 to 3 samples.
        let samples = at % 4;
        let users: Vec<usize> = (0..samples).map(|sample| (at + sample) % 3).collect();
        let items = vec![1; samples];
        let count: usize = users.iter().chain(&items).sum();
        let values: Vec<_> = (0..count).map(|id| (id * 31 + at * 7) % 500).collect();
        let dense: Vec<_> = (0..samples).map(|sample| [sample as f32 / 7.0 + 5.0]).collect();
        let lengths = [users, items].concat();
        json!({"dense": dense, "values": values, "lengths": lengths}).to_string()
    };
    (0..24).map(body).collect()
}

#[test]
fn a_batch_gives_the_model_the_rows_of_each_request_bit_for_bit() {
    let scoring = Arc::new(Scoring::default());
    let service = served(snapshot(), &scoring);
    let together = answered(&service, &requests());
    let batches = std::mem::take(&mut *scoring.asked.lock().unwrap());
    let [Batch { sample_count, dense, rows }] = &batches[..] else { panic!("{batches:?}") };
    assert_eq!(*sample_count, 36);
    let alone: Vec<_> =
        requests().iter().flat_map(|one| answered(&service, std::slice::from_ref(one))).collect();
    assert_eq!(together, alone);
    assert!(together.iter().all(std::result::Result::is_ok), "{together:?}");
    let asked = scoring.asked.lock().unwrap();
    // Requests without samples ask nothing.
    assert_eq!(asked.len(), 18);
    let bits = |rows: &[f32]| rows.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    let all: Vec<f32> = asked.iter().flat_map(|batch| batch.rows.clone()).collect();
    assert_eq!(bits(rows), bits(&all));
    assert_eq!(dense[..], asked.iter().flat_map(|batch| batch.dense.clone()).collect::<Vec<_>>());
}

#[test]
fn what_the_model_or_the_check_refuses_fails_alone() {
    let scoring = Arc::new(Scoring::default());
    let service = served(snapshot(), &scoring);
    let mut bodies = requests();
    let good: Vec<_> = answered(&service, &bodies);
    let short = r#"{"dense":[[4]],"values":[1,0]}"#;
    let no_row = r#"{"dense":[[5]],"values":[1,1000]}"#;
    let bad = [(3, BAD), (7, PANIC), (11, no_row), (15, short), (19, "no JSON")];
    for (at, body) in bad {
        bodies[at] = body.to_owned();
    }
    let answers = answered(&service, &bodies);
    let errors = [
        (3, "invalid: not a sample"),
        (7, "panic: "),
        (11, "invalid: row id out of range"),
        (15, "io: the model's answer has another shape"),
        (19, "invalid: body is not the expected JSON"),
    ];
    for (at, error) in errors {
        let found = answers[at].as_ref().unwrap_err();
        assert!(found.starts_with(error), "{at}: {found}");
    }
    for (at, (found, expected)) in answers.iter().zip(&good).enumerate() {
        assert!(bad.iter().any(|(bad, _)| *bad == at) || found == expected, "{at}: {found:?}");
    }
}

#[test]
fn a_bad_page_fails_those_who_need_it() {
    let folder: Arc<dyn Folder> = Arc::new(MemoryFolder::new());
    let snapshot = snapshot_in(&folder, None);
    folder.open("rows.pages", OpenMode::ReadWrite).unwrap().write_at(100, b"x").unwrap();
    let service = served(snapshot, &Arc::new(Scoring::default()));
    // The first page has items; the id 500 was never written and needs no page.
    let body = |item: u32| json!({"dense": [[5]], "values": [250, item]}).to_string();
    let answers = answered(&service, &[body(500), body(0), body(899)]);
    assert!(answers[1].as_ref().unwrap_err().starts_with("corruption"), "{answers:?}");
    assert!(answers[0].is_ok() && answers[2].is_ok(), "{answers:?}");
}

#[test]
fn requests_that_wait_for_a_slow_one_are_predicted_together() {
    let scoring = Arc::new(Scoring::default());
    let one = ServeOptions { lookup_threads: 1, ..options() };
    let predictor = Arc::clone(&scoring) as Arc<dyn Predictor>;
    let server = Server::start(&one, snapshot(), Some(predictor)).unwrap();
    let body = json!({"dense": [[5]], "values": [1, 0]}).to_string();
    let has = |line: &str| get(&server, "/metrics").text().lines().any(|found| found == line);
    let until = |line: &str| {
        while !has(line) {
            std::thread::sleep(Duration::from_millis(2));
        }
    };
    let post = |body: &str| ask(&server, "POST", "/v1/predict", JSON, body.as_bytes());
    std::thread::scope(|scope| {
        let slow = scope.spawn(|| post(SLOW));
        until("tierbed_queue_seconds_count{route=\"/v1/predict\"} 1");
        let waiting: Vec<_> = (0..5).map(|_| scope.spawn(|| post(&body))).collect();
        until("tierbed_queue_requests 5");
        scoring.open();
        for answer in [slow].into_iter().chain(waiting) {
            assert_eq!(answer.join().unwrap().status, 200);
        }
    });
    let counts = scoring.asked.lock().unwrap();
    assert_eq!(counts.iter().map(|batch| batch.sample_count).collect::<Vec<_>>(), [1, 5]);
    assert!(has("tierbed_batch_requests_sum 6.0"));
}

/// A model that says of itself what a test wants.
struct Saying(ModelInputs, Vec<ModelOutput>);

impl Predictor for Saying {
    fn inputs(&self) -> &ModelInputs {
        &self.0
    }

    fn outputs(&self) -> &[ModelOutput] {
        &self.1
    }

    fn predict(&self, _: Batch) -> Result<Vec<Vec<f32>>> {
        panic!("no server starts with it")
    }
}

#[test]
fn a_model_that_does_not_fit_the_tables_is_refused_at_the_start() {
    let with = |change: fn(&mut ServedFeature)| {
        let mut inputs = inputs(0);
        change(&mut inputs.features[1]);
        inputs
    };
    let output = |name: &str, width| ModelOutput { name: name.into(), width };
    let none = ModelInputs { dense_count: 1, features: Vec::new() };
    for (inputs, outputs, message) in [
        (with(|feature| feature.table = "x".into()), models::logit(), "unknown table"),
        (with(|feature| feature.name = "user".into()), models::logit(), "occurs twice"),
        (with(|feature| feature.pooling = "none".into()), models::logit(), "takes pooled rows"),
        (none, models::logit(), "at least one feature"),
        (inputs(0), Vec::new(), "at least one output"),
        (inputs(0), vec![output("a", None), output("a", Some(2))], "occurs twice"),
        (inputs(0), vec![output("a", Some(0))], "is empty"),
    ] {
        let error = Server::start(&options(), snapshot(), Some(Arc::new(Saying(inputs, outputs))));
        let error = error.unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    }
}
