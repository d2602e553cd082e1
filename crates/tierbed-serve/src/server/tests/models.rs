//! Models that tests serve, over the features `user` and `item.v2`.

use super::*;
use crate::predictor::{Batch, ModelInputs, ModelOutput};

/// Samples of which [`Scoring`] makes something of its own, by their only number.
pub(super) const SLOW: &str = r#"{"dense":[[1]],"values":[1,0]}"#;
pub(super) const BAD: &str = r#"{"dense":[[2]],"values":[1,0]}"#;
pub(super) const PANIC: &str = r#"{"dense":[[3]],"values":[1,0]}"#;

pub(super) fn inputs(dense_count: usize) -> ModelInputs {
    let feature =
        |name: &str| ServedFeature { name: name.into(), table: name.into(), pooling: "sum".into() };
    ModelInputs { dense_count, features: vec![feature("user"), feature("item.v2")] }
}

pub(super) fn logit() -> Vec<ModelOutput> {
    vec![ModelOutput { name: "logit".into(), width: None }]
}

/// A prediction with head and body, which [`Scoring`] takes its time for.
pub(super) fn slow_request() -> String {
    let length = SLOW.len();
    format!("POST /v1/predict HTTP/1.1\r\nHost: t\r\nContent-Length: {length}\r\n\r\n{SLOW}")
}

/// Adds up the numbers and rows of each sample. A number of 1 waits until told, 2 is refused, 3
/// panics, and 4 is answered with too few scores.
pub(super) struct Scoring {
    gate: Mutex<bool>,
    opened: Condvar,
    inputs: ModelInputs,
    outputs: Vec<ModelOutput>,
    /// Every batch that was asked for.
    pub(super) asked: Mutex<Vec<Batch>>,
    pub(super) at_once: usize,
}

impl Default for Scoring {
    fn default() -> Self {
        Self {
            gate: Mutex::default(),
            opened: Condvar::new(),
            inputs: inputs(1),
            outputs: logit(),
            asked: Mutex::default(),
            at_once: 0,
        }
    }
}

impl Scoring {
    pub(super) fn open(&self) {
        *self.gate.lock().unwrap() = true;
        self.opened.notify_all();
    }
}

impl Predictor for Scoring {
    fn inputs(&self) -> &ModelInputs {
        &self.inputs
    }

    fn outputs(&self) -> &[ModelOutput] {
        &self.outputs
    }

    fn predict(&self, batch: Batch) -> Result<Vec<Vec<f32>>> {
        self.asked.lock().unwrap().push(batch.clone());
        let has = |number: f32| batch.dense.contains(&number);
        assert!(!has(3.0), "a model's bug");
        if has(2.0) {
            return Err(Error::invalid("not a sample"));
        }
        if has(1.0) {
            let gate = self.gate.lock().unwrap();
            drop(self.opened.wait_while(gate, |open| !*open).unwrap());
        }
        let rows = batch.rows.chunks_exact(11).zip(&batch.dense);
        let scores = rows.map(|(row, number)| row.iter().sum::<f32>() + number);
        Ok(vec![scores.skip(usize::from(has(4.0))).collect()])
    }

    fn samples_at_once(&self) -> usize {
        self.at_once
    }
}

/// Says when it was asked, and thinks until it is told to answer.
pub(super) struct Thinking {
    asked: mpsc::SyncSender<()>,
    answer: Mutex<mpsc::Receiver<()>>,
    inputs: ModelInputs,
    outputs: Vec<ModelOutput>,
}

impl Thinking {
    pub(super) fn new(asked: mpsc::SyncSender<()>, answer: mpsc::Receiver<()>) -> Self {
        Self { asked, answer: Mutex::new(answer), inputs: inputs(1), outputs: logit() }
    }
}

impl Predictor for Thinking {
    fn inputs(&self) -> &ModelInputs {
        &self.inputs
    }

    fn outputs(&self) -> &[ModelOutput] {
        &self.outputs
    }

    fn predict(&self, batch: Batch) -> Result<Vec<Vec<f32>>> {
        self.asked.send(()).unwrap();
        lock(&self.answer).recv().unwrap();
        Ok(vec![vec![0.0; batch.sample_count]])
    }
}
