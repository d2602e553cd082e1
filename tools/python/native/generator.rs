//! The seeded generator of samples, for Python.

use std::path::PathBuf;

use pyo3::prelude::*;
use pyo3::types::PyTuple;
use tierbed_core::Error;
use tierbed_data::SampleBatch;
use tierbed_io::lines::Packing;
use tierbed_lab::generator::write_criteo;
use tierbed_lab::GeneratorOptions;

use crate::data::to_bytes;
use crate::errors::run;
use crate::plain::Plain;
use crate::progress::Progress;

/// Adds this module's class.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Generator>()
}

/// The seeded generator of Criteo-shaped samples.
#[pyclass(frozen, module = "tierbed._native")]
pub(crate) struct Generator {
    generator: tierbed_lab::Generator,
}

#[pymethods]
impl Generator {
    #[new]
    fn new(py: Python<'_>, options: Plain<GeneratorOptions>) -> PyResult<Self> {
        let generator = run(py, || tierbed_lab::Generator::new(options.0))?;
        Ok(Self { generator })
    }

    #[staticmethod]
    fn scale_for_rows(row_count: u64) -> f64 {
        GeneratorOptions::scale_for_rows(row_count)
    }

    fn row_counts(&self) -> Vec<u32> {
        self.generator.row_counts().to_vec()
    }

    fn fill<'py>(
        &self,
        py: Python<'py>,
        first_sample: u64,
        sample_count: usize,
    ) -> PyResult<Bound<'py, PyTuple>> {
        let batch = run(py, || {
            let mut batch = SampleBatch::new(tierbed_lab::Generator::shape());
            self.generator.fill(first_sample, sample_count, &mut batch)?;
            Ok(batch)
        })?;
        to_bytes(py, &batch)
    }

    #[expect(clippy::too_many_arguments, reason = "the arguments of a Python call, and self")]
    fn write_criteo(
        &self,
        py: Python<'_>,
        path: PathBuf,
        samples: (u64, u64),
        packing: &str,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<()> {
        let mut told = Progress::new(progress);
        let result = run(py, || {
            let packing = match packing {
                "plain" => Packing::Plain,
                "gzip" => Packing::Gzip,
                "zstd" => Packing::Zstd,
                _ => {
                    return Err(Error::invalid("packing must be plain, gzip or zstd")
                        .with("found", packing))
                }
            };
            let total = samples.1.saturating_sub(samples.0);
            let samples = samples.0..samples.1;
            write_criteo(&self.generator, samples, &path, packing, &mut |done| {
                told.tell(done, total)
            })
        });
        told.finish(result)
    }
}
