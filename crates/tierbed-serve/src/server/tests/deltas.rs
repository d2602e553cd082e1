//! Deltas applied to a server that answers.

use std::sync::atomic::{AtomicBool, Ordering};

use super::*;
use tierbed_core::ErrorKind;
use tierbed_snapshot::View;

use crate::predictor::{Batch, ModelInputs, ModelOutput};

/// Writes the rows that every generation changes, with its number, as a delta of `base`.
pub(super) fn delta(base: &Snapshot, number: u32, serving: Option<&str>) -> Arc<dyn Folder> {
    let folder: Arc<dyn Folder> = Arc::new(MemoryFolder::new());
    write_delta(&folder, base, number, serving);
    folder
}

fn write_delta(folder: &Arc<dyn Folder>, base: &Snapshot, number: u32, serving: Option<&str>) {
    let budget = Budget::new(1 << 20);
    let mut writer = SnapshotWriter::create(Arc::clone(folder), base.schema(), &budget).unwrap();
    writer.set_base(base).unwrap();
    for row in 0..20 {
        writer.push(TableId(0), RowId(row), &[number as f32; 4]).unwrap();
        writer.push(TableId(1), RowId(3 * row), &[number as f32; 7]).unwrap();
    }
    if let Some(serving) = serving {
        writer.attach("serving.json", serving.as_bytes()).unwrap();
    }
    writer.attach("number", number.to_string().as_bytes()).unwrap();
    writer.finish().unwrap();
}

/// Answers with the number of the generation that it was made for, with that of the row that it is
/// given, and with those of rows that it looks up.
struct Numbered {
    number: u32,
    snapshot: Arc<Snapshot>,
    inputs: ModelInputs,
    outputs: Vec<ModelOutput>,
}

impl Numbered {
    fn new(number: u32, snapshot: &Arc<Snapshot>) -> Self {
        let output = |name: &str, width| ModelOutput { name: name.into(), width };
        let outputs = vec![output("model", None), output("row", None), output("rows", Some(3))];
        Self { number, snapshot: Arc::clone(snapshot), inputs: models::inputs(0), outputs }
    }
}

impl Predictor for Numbered {
    fn inputs(&self) -> &ModelInputs {
        &self.inputs
    }

    fn outputs(&self) -> &[ModelOutput] {
        &self.outputs
    }

    fn predict(&self, batch: Batch) -> Result<Vec<Vec<f32>>> {
        let tables = [(TableId(0), Pooling::Sum)];
        let plan = FeatureLayout::new(self.snapshot.schema(), &tables)?;
        let mut rows = Vec::new();
        for _ in 0..3 * batch.sample_count {
            let mut out = [0.0; 4];
            self.snapshot.lookup(&plan, &Bags::new(&[7], &[0, 1], None, 1)?, &mut out)?;
            rows.push(out[0]);
            std::thread::yield_now();
        }
        let own = vec![self.number as f32; batch.sample_count];
        Ok(vec![own, batch.rows.chunks_exact(11).map(|row| row[0]).collect(), rows])
    }

    fn next(&self, view: &View<'_>) -> Result<Option<Arc<dyn Predictor>>> {
        let Some(bytes) = view.attachment("number")? else { return Ok(None) };
        let number = String::from_utf8(bytes).unwrap().parse().unwrap();
        Ok(Some(Arc::new(Self::new(number, &self.snapshot))))
    }
}

pub(super) fn asked_rows(server: &Server) -> Vec<f64> {
    let body = json!({ "features": {
        "user": { "values": [0, 7, 19], "offsets": [0, 1, 2, 3] },
        "item.v2": { "values": [57, 0, 3], "offsets": [0, 1, 2, 3] },
    }});
    let answer = ask(server, "POST", "/v1/lookup", JSON, body.to_string().as_bytes());
    assert_eq!(answer.status, 200, "{}", answer.text());
    let told = answer.json();
    let numbers = |name: &str| -> Vec<f64> {
        let rows = told["features"][name].as_array().unwrap().iter();
        rows.flat_map(|row| row.as_array().unwrap()).map(|x| x.as_f64().unwrap()).collect()
    };
    [numbers("user"), numbers("item.v2")].concat()
}

const JSON: &str = "application/json";

/// Ends the loops of other threads, where a test fails, too.
pub(super) struct Stopping<'a>(pub(super) &'a AtomicBool);

impl Drop for Stopping<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn an_answer_is_of_one_generation_while_deltas_come() {
    let snapshot = snapshot();
    let model = Numbered::new(0, &snapshot);
    let server = Server::start(&options(), Arc::clone(&snapshot), Some(Arc::new(model))).unwrap();
    // Every delta takes the place of the one before: none lies upon what its base is.
    let base = super::snapshot();
    assert_eq!(base.identity().unwrap(), snapshot.identity().unwrap());
    server.apply(delta(&base, 1, None)).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let lookers: Vec<_> = (0..2)
            .map(|_| {
                scope.spawn(|| {
                    let mut newest = 0.0;
                    while !stop.load(Ordering::Relaxed) {
                        let rows = asked_rows(&server);
                        assert!(rows.iter().all(|number| *number == rows[0]), "{rows:?}");
                        assert!(rows[0] >= newest, "{} behind {newest}", rows[0]);
                        newest = rows[0];
                        let sample = br#"{"values": [7, 0]}"#;
                        let predicted = ask(&server, "POST", "/v1/predict", JSON, sample).json();
                        let number = &predicted["model"][0];
                        assert_eq!(predicted["row"], json!([number]));
                        assert_eq!(predicted["rows"], json!([[number, number, number]]));
                    }
                    newest
                })
            })
            .collect();
        let _stopping = Stopping(&stop);
        for number in 2..=12 {
            let generation = server.apply(delta(&base, number, None)).unwrap();
            assert_eq!(generation.number, u64::from(number));
            assert!(asked_rows(&server).iter().all(|found| *found == f64::from(number)));
        }
        stop.store(true, Ordering::Relaxed);
        for looker in lookers {
            looker.join().unwrap();
        }
    });
    let health = ask(&server, "GET", "/health", JSON, b"").json();
    assert_eq!(health["generation"], json!(12));
    assert_eq!(health["identity"], json!(snapshot.generation().identity));
    let metrics = ask(&server, "GET", "/metrics", JSON, b"").text();
    for line in ["tierbed_deltas_applied_total 12", "tierbed_deltas 1", "tierbed_delta_rows 40"] {
        assert!(metrics.contains(line), "{line}");
    }
}

#[test]
fn a_delta_whose_features_do_not_fit_is_refused_whole() {
    let snapshot = snapshot();
    let server = Server::start(&options(), Arc::clone(&snapshot), None).unwrap();
    let before = asked_rows(&server);
    let missing = r#"{"features": [{"name": "user", "table": "none"}]}"#;
    let error = server.apply(delta(&snapshot, 1, Some(missing))).unwrap_err();
    assert!(error.to_string().contains("unknown table"), "{error}");
    assert_eq!(asked_rows(&server), before);
    let renamed = r#"{"features": [{"name": "other", "table": "user"}]}"#;
    server.apply(delta(&snapshot, 2, Some(renamed))).unwrap();
    let body = json!({ "features": { "other": { "values": [3], "offsets": [0, 1] } } });
    let answer = ask(&server, "POST", "/v1/lookup", JSON, body.to_string().as_bytes());
    assert_eq!(answer.json()["features"]["other"], json!([[2.0, 2.0, 2.0, 2.0]]));
    assert_eq!(ask(&server, "GET", "/", JSON, b"").json()["features"][0]["name"], "other");
    // What a delta does not say goes on.
    server.apply(delta(&snapshot, 3, None)).unwrap();
    assert_eq!(ask(&server, "GET", "/", JSON, b"").json()["features"][0]["name"], "other");
    server.stop();
    let error = server.apply(delta(&snapshot, 3, None)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed);
}

#[test]
fn a_server_starts_from_the_newest_delta_and_never_goes_back() {
    let snapshot = snapshot();
    let folder = tempfile::tempdir().unwrap();
    let publish = |name: &str, number: u32| {
        let made = FsFolder::create(folder.path().join(name)).unwrap();
        write_delta(&(Arc::new(made) as Arc<dyn Folder>), &snapshot, number, None);
    };
    publish("delta-9", 9);
    publish("delta-10", 10);
    FsFolder::create(folder.path().join("delta-11")).unwrap();
    let deltas = Some(folder.path().to_owned());
    let server =
        Server::start(&ServeOptions { deltas, ..options() }, Arc::clone(&snapshot), None).unwrap();
    assert!(asked_rows(&server).iter().all(|found| *found == 10.0));
    publish("delta-8", 8);
    publish("delta-12", 12);
    while snapshot.generation().number < 2 {
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(asked_rows(&server).iter().all(|found| *found == 12.0));
    assert_eq!(snapshot.generation().number, 2);
    assert!(server.stop());
}
