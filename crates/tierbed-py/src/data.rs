//! Readers and vocabularies, for Python.
//!
//! A batch leaves as four `bytearray` objects (dense, label, values, offsets) that Python wraps
//! in tensors without a further copy: they own their memory, nothing of ours stays behind them.

use std::path::PathBuf;
use std::sync::Mutex;

use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyTuple};
use tierbed_core::{Error, Result};
use tierbed_data::{
    LogReader, Position, ReaderOptions, SampleBatch, VocabularyOptions, VocabularyReport,
};
use tierbed_io::process::Owned;

use crate::errors::run;
use crate::plain::Plain;

/// Adds this module's classes.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Vocabulary>()?;
    module.add_class::<VocabularyBuilder>()?;
    module.add_class::<CriteoReader>()
}

fn owned<T>(value: T, what: &'static str) -> Owned<Mutex<T>> {
    Owned::new(Mutex::new(value), what, "make another one in the worker")
}

/// Copies a batch into four `bytearray`s: dense f32, label f32, values i64, offsets i64.
pub(crate) fn to_bytes<'py>(py: Python<'py>, batch: &SampleBatch) -> PyResult<Bound<'py, PyTuple>> {
    fn pack<'py, T: Copy, const N: usize>(
        py: Python<'py>,
        values: &[T],
        encode: impl Fn(T) -> [u8; N],
    ) -> PyResult<Bound<'py, PyByteArray>> {
        PyByteArray::new_with(py, values.len() * N, |bytes| {
            for (target, value) in bytes.as_chunks_mut::<N>().0.iter_mut().zip(values) {
                *target = encode(*value);
            }
            Ok(())
        })
    }
    PyTuple::new(
        py,
        [
            pack(py, &batch.dense, f32::to_le_bytes)?,
            pack(py, &batch.label, f32::to_le_bytes)?,
            pack(py, &batch.values, i64::to_le_bytes)?,
            pack(py, batch.offsets(), i64::to_le_bytes)?,
        ],
    )
}

/// A vocabulary file, opened.
#[pyclass(frozen, module = "tierbed._native")]
pub(crate) struct Vocabulary {
    vocabulary: tierbed_data::Vocabulary,
}

#[pymethods]
impl Vocabulary {
    #[new]
    fn new(py: Python<'_>, path: PathBuf, resident_budget_bytes: u64) -> PyResult<Self> {
        let vocabulary = run(py, || tierbed_data::Vocabulary::open(&path, resident_budget_bytes))?;
        Ok(Self { vocabulary })
    }

    #[getter]
    fn feature_names(&self) -> Vec<&str> {
        self.vocabulary.feature_names().collect()
    }

    #[getter]
    fn row_counts(&self) -> Vec<u64> {
        self.vocabulary.row_counts().collect()
    }

    #[getter]
    fn sample_count(&self) -> u64 {
        self.vocabulary.sample_count()
    }

    #[getter]
    fn min_count(&self) -> u64 {
        self.vocabulary.min_count()
    }

    #[getter]
    fn resident_bytes(&self) -> u64 {
        self.vocabulary.resident_bytes()
    }

    fn look_up<'py>(
        &self,
        py: Python<'py>,
        feature: usize,
        tokens: Vec<Vec<u8>>,
    ) -> PyResult<Bound<'py, PyByteArray>> {
        let ids = run(py, || {
            if feature >= self.vocabulary.feature_count() {
                return Err(Error::invalid("vocabulary has no such feature")
                    .with("feature", feature)
                    .with("features", self.vocabulary.feature_count()));
            }
            let fingerprints = tokens
                .iter()
                .map(|token| tierbed_data::fingerprint::fingerprint(feature as u32, token));
            let mut ids = vec![0; tokens.len()];
            self.vocabulary.look_up(feature, fingerprints, &mut ids);
            Ok(ids.into_iter().flat_map(i64::to_le_bytes).collect::<Vec<u8>>())
        })?;
        Ok(PyByteArray::new(py, &ids))
    }
}

/// Counts tokens, then writes a vocabulary file.
#[pyclass(frozen, module = "tierbed._native")]
pub(crate) struct VocabularyBuilder {
    // Its scratch files are those of the process that began it.
    builder: Owned<Mutex<Option<tierbed_data::VocabularyBuilder>>>,
}

impl VocabularyBuilder {
    fn with<T>(
        &self,
        work: impl FnOnce(&mut tierbed_data::VocabularyBuilder) -> Result<T>,
    ) -> Result<T> {
        match self.builder.lock()?.as_mut() {
            Some(builder) => work(builder),
            None => Err(Error::invalid("this vocabulary is finished")
                .with("remedy", "make another builder")),
        }
    }
}

#[pymethods]
impl VocabularyBuilder {
    #[new]
    fn new(
        py: Python<'_>,
        feature_names: Vec<String>,
        memory_budget_bytes: u64,
        scratch_folder: PathBuf,
        min_count: u64,
    ) -> PyResult<Self> {
        let options = VocabularyOptions { memory_budget_bytes, scratch_folder, min_count };
        let builder = run(py, || tierbed_data::VocabularyBuilder::new(&feature_names, options))?;
        Ok(Self { builder: owned(Some(builder), "the vocabulary builder") })
    }

    fn add_column(&self, py: Python<'_>, feature: usize, tokens: Vec<Vec<u8>>) -> PyResult<()> {
        run(py, || {
            self.with(|builder| builder.add_column(feature, tokens.iter().map(Vec::as_slice)))
        })
    }

    fn note_samples(&self, py: Python<'_>, sample_count: u64) -> PyResult<()> {
        run(py, || {
            self.with(|builder| {
                builder.note_samples(sample_count);
                Ok(())
            })
        })
    }

    fn finish(&self, py: Python<'_>, path: PathBuf) -> PyResult<Plain<VocabularyReport>> {
        run(py, || {
            let builder = self.builder.lock()?.take();
            let builder = builder.ok_or_else(|| Error::invalid("this vocabulary is finished"))?;
            builder.finish(&path).map(Plain)
        })
    }
}

/// A log being read: Criteo's layout or Avazu's.
#[pyclass(frozen, module = "tierbed._native")]
pub(crate) struct CriteoReader {
    // A forked child has the same place in the same open file.
    state: Owned<Mutex<ReaderState>>,
}

struct ReaderState {
    reader: LogReader,
    batch: SampleBatch,
}

#[pymethods]
impl CriteoReader {
    #[new]
    fn new(py: Python<'_>, paths: Vec<PathBuf>, options: Plain<ReaderOptions>) -> PyResult<Self> {
        let reader = run(py, || LogReader::open(paths, options.0))?;
        let batch = SampleBatch::new(reader.parser().shape());
        Ok(Self { state: owned(ReaderState { reader, batch }, "the reader of a log") })
    }

    fn feature_names(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        run(py, || Ok(self.state.lock()?.reader.parser().feature_names().to_vec()))
    }

    #[getter]
    fn dense_count(&self, py: Python<'_>) -> PyResult<usize> {
        run(py, || Ok(self.state.lock()?.reader.parser().shape().dense_count))
    }

    fn next_batch<'py>(
        &self,
        py: Python<'py>,
        vocabulary: &Bound<'py, Vocabulary>,
        sample_count_max: usize,
    ) -> PyResult<Option<Bound<'py, PyTuple>>> {
        let vocabulary = vocabulary.get();
        let batch = run(py, || {
            let mut state = self.state.lock()?;
            let ReaderState { reader, batch } = &mut *state;
            let read = reader.next_batch(&vocabulary.vocabulary, sample_count_max, batch)?;
            // The guard cannot leave this thread's work; the batch can, and comes back below.
            let empty = SampleBatch::new(batch.shape());
            Ok((read > 0).then(|| std::mem::replace(batch, empty)))
        })?;
        let Some(batch) = batch else { return Ok(None) };
        let parts = to_bytes(py, &batch)?;
        run(py, || {
            self.state.lock()?.batch = batch;
            Ok(())
        })?;
        Ok(Some(parts))
    }

    fn count_tokens(
        &self,
        py: Python<'_>,
        builder: &Bound<'_, VocabularyBuilder>,
        sample_count_max: usize,
    ) -> PyResult<usize> {
        let builder = builder.get();
        run(py, || {
            let mut state = self.state.lock()?;
            builder.with(|builder| state.reader.count_tokens(builder, sample_count_max))
        })
    }

    fn skip(&self, py: Python<'_>, sample_count_max: u64) -> PyResult<u64> {
        run(py, || self.state.lock()?.reader.skip(sample_count_max))
    }

    fn position(&self, py: Python<'_>) -> PyResult<Plain<Position>> {
        run(py, || Ok(Plain(self.state.lock()?.reader.position())))
    }

    fn seek(&self, py: Python<'_>, position: Plain<Position>) -> PyResult<()> {
        run(py, || self.state.lock()?.reader.seek(position.0))
    }

    fn progress(&self, py: Python<'_>) -> PyResult<(u64, u64)> {
        let progress = run(py, || Ok(self.state.lock()?.reader.progress()))?;
        Ok((progress.done_bytes, progress.total_bytes))
    }
}
