//! Models in front of a snapshot: numbers and pooled rows in, scores out, a batch at a time.

use std::fmt;
use std::sync::Arc;

use serde::Deserialize;
use tierbed_core::{Error, ErrorKind, Result};
use tierbed_snapshot::{Pooling, View};

use crate::features::{resolve, Feature, ServedFeature};
use crate::plans::{Asked, Plans};
use crate::query::Source;

/// Scores samples whose rows have been looked up.
pub trait Predictor: Send + Sync {
    /// Says what the model takes of a sample.
    fn inputs(&self) -> &ModelInputs;

    /// Says what the model answers, in the order of [`predict`](Self::predict).
    fn outputs(&self) -> &[ModelOutput];

    /// Scores a batch; returns the elements of each output, samples one behind the other. Samples
    /// may be of several requests. Called from several threads.
    ///
    /// # Errors
    /// `Invalid` for numbers that the model refuses; they are answered with 400, others with 500.
    /// Of a batch of several requests each is asked again by itself.
    fn predict(&self, batch: Batch) -> Result<Vec<Vec<f32>>>;

    /// Returns the most samples of a request that may be scored by the thread that received it:
    /// that takes microseconds and waits for nobody. 0: none.
    fn samples_at_once(&self) -> usize {
        0
    }

    /// Returns the model of the next generation; `None`: this one goes on.
    ///
    /// # Errors
    /// Those of reading it: the generation is refused then.
    fn next(&self, view: &View<'_>) -> Result<Option<Arc<dyn Predictor>>> {
        let _ = view;
        Ok(None)
    }
}

impl fmt::Debug for dyn Predictor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Predictor")
            .field("inputs", self.inputs())
            .field("outputs", &self.outputs())
            .finish()
    }
}

/// What a model takes of a sample.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct ModelInputs {
    /// Numerical features.
    pub dense_count: usize,
    /// Features with ids, in the order of requests and of the rows; all are pooled.
    pub features: Vec<ServedFeature>,
}

/// One output of a model.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct ModelOutput {
    /// Its name in answers.
    pub name: String,
    /// Elements of a sample; `None`: one, and the output has one dimension.
    pub width: Option<usize>,
}

impl ModelOutput {
    /// Returns the elements of a sample.
    #[must_use]
    pub fn len(&self) -> usize {
        self.width.unwrap_or(1)
    }

    /// Tells whether a sample has no element.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Samples to score. The memory is the model's own from here on.
#[derive(Debug, Clone, PartialEq)]
pub struct Batch {
    /// Samples, at least one.
    pub sample_count: usize,
    /// Numerical features, `[sample_count, dense_count]`.
    pub dense: Vec<f32>,
    /// Pooled rows of all features side by side, `[sample_count, sum of dims]`.
    pub rows: Vec<f32>,
}

/// A model of a generation, and the tables that it reads.
#[derive(Debug)]
pub(crate) struct Model {
    pub(crate) predictor: Arc<dyn Predictor>,
    pub(crate) features: Vec<Feature>,
    /// All features, in order.
    pub(crate) asked: Box<[Asked]>,
    pub(crate) plans: Plans,
}

impl Model {
    /// Finds the tables of a model.
    ///
    /// # Errors
    /// `Invalid` for features that do not fit, or are not pooled, and for outputs that share a
    /// name or have no element.
    pub(crate) fn new(view: &View<'_>, predictor: Arc<dyn Predictor>) -> Result<Self> {
        let features = resolve(view, Some(&predictor.inputs().features))?;
        if features.is_empty() {
            return Err(Error::invalid("a served model needs at least one feature with ids"));
        }
        if let Some(bare) = features.iter().find(|feature| feature.pooling == Pooling::None) {
            return Err(Error::invalid("a served model takes pooled rows")
                .with("feature", &bare.name)
                .with("found", "none")
                .with("expected", "sum or mean"));
        }
        let outputs = predictor.outputs();
        let is_known =
            |at: usize, name: &str| outputs.iter().take(at).any(|known| known.name == name);
        let mut numbered = outputs.iter().enumerate();
        let bad = numbered.find(|(at, output)| is_known(*at, &output.name) || output.is_empty());
        if let Some((_, output)) = bad {
            return Err(Error::invalid("output of a model is empty or occurs twice")
                .with("output", &output.name));
        }
        if outputs.is_empty() {
            return Err(Error::invalid("a served model needs at least one output"));
        }
        let pooled = features.iter().enumerate();
        let asked =
            pooled.map(|(feature, Feature { pooling, .. })| Asked { feature, pooling: *pooling });
        Ok(Self { predictor, asked: asked.collect(), features, plans: Plans::default() })
    }

    pub(crate) fn source<'a>(&'a self, source: Source<'a>) -> Source<'a> {
        Source { features: &self.features, plans: &self.plans, ..source }
    }

    /// Scores a batch and checks what the model answers.
    ///
    /// # Errors
    /// Those of the model; `Io` for an answer of another shape than it said.
    pub(crate) fn predict(&self, batch: Batch) -> Result<Vec<Vec<f32>>> {
        let sample_count = batch.sample_count;
        let scores = self.predictor.predict(batch)?;
        let outputs = self.predictor.outputs();
        let lengths: Vec<_> = scores.iter().map(Vec::len).collect();
        let expected: Vec<_> = outputs.iter().map(|output| output.len() * sample_count).collect();
        if lengths == expected {
            return Ok(scores);
        }
        // The fault is the server's.
        Err(Error::new(ErrorKind::Io, "the model's answer has another shape than it said")
            .with("found", format_args!("{lengths:?}"))
            .with("expected", format_args!("{expected:?}"))
            .with("samples", sample_count))
    }
}
