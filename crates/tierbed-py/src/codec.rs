//! Codecs for Python: rows of a tensor to codes and back.

use std::sync::Arc;

use pyo3::prelude::*;
use tierbed_core::{Error, Result};
use tierbed_kernels::{Codec, Codes, Kernels, ProductQuantizer};

use crate::errors::{run, to_python};
use crate::tensors::{check_disjoint, Tensor};

/// A codec for rows of one dim.
#[pyclass(frozen, module = "tierbed._native")]
pub(crate) struct NativeCodec {
    codec: Codec,
    dim: usize,
}

#[pymethods]
impl NativeCodec {
    #[new]
    #[pyo3(signature = (name, dim, codebooks, part_count))]
    fn new(
        py: Python<'_>,
        name: &str,
        dim: usize,
        codebooks: Option<&Bound<'_, PyAny>>,
        part_count: usize,
    ) -> PyResult<Self> {
        let codebooks =
            codebooks.map(|books| Tensor::<f32>::import(books, "codebooks")).transpose()?;
        let codebooks = codebooks.as_ref().map(|books| books.view().to_vec());
        run(py, || {
            let codec = match codebooks {
                Some(books) => {
                    Codec::Product(Arc::new(ProductQuantizer::new(dim, part_count, books)?))
                }
                None => Codec::by_name(name)?,
            };
            codec.check_dim(dim)?;
            Ok(Self { codec, dim })
        })
    }

    /// Bytes of one code.
    fn code_bytes(&self) -> usize {
        self.codec.code_bytes(self.dim)
    }

    /// Encodes rows `[N, dim]` into `codes` `[N, code_bytes]`.
    fn encode(&self, rows: &Bound<'_, PyAny>, codes: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = rows.py();
        let rows = Tensor::<f32>::import(rows, "rows")?;
        let mut codes = Tensor::<u8>::import(codes, "codes")?;
        let refuse = |error| to_python(py, &error);
        check_disjoint(&[codes.place()], &[rows.place()]).map_err(refuse)?;
        let (rows, codes) = (rows.view(), codes.view_mut().map_err(refuse)?);
        run(py, || {
            let code_bytes = self.codec.code_bytes(self.dim);
            self.check_counts(rows.len(), codes.len())?;
            for (row, code) in rows.chunks_exact(self.dim).zip(codes.chunks_exact_mut(code_bytes)) {
                self.codec.encode(row, code)?;
            }
            Ok(())
        })
    }

    /// Decodes codes `indices` `[E]` of `codes` `[N, code_bytes]` into `out` `[E, dim]`, `rounds`
    /// times over: once for what they hold, more often to measure what it costs.
    fn decode(
        &self,
        codes: &Bound<'_, PyAny>,
        indices: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
        rounds: usize,
    ) -> PyResult<()> {
        let py = codes.py();
        let codes = Tensor::<u8>::import(codes, "codes")?;
        let indices = Tensor::<i64>::import(indices, "indices")?;
        let mut out = Tensor::<f32>::import(out, "out")?;
        let refuse = |error| to_python(py, &error);
        check_disjoint(&[out.place()], &[codes.place(), indices.place()]).map_err(refuse)?;
        let (codes, indices) = (codes.view(), indices.view());
        let out = out.view_mut().map_err(refuse)?;
        run(py, || {
            let code_bytes = self.codec.code_bytes(self.dim);
            let starts = starts_of(indices, codes.len(), code_bytes)?;
            if out.len() != starts.len() * self.dim {
                return Err(Error::invalid("out must be [E, dim]").with("dim", self.dim));
            }
            let codes = Codes { codec: &self.codec, arena: codes, starts: &starts, weights: None };
            for _ in 0..rounds {
                Kernels::detect().decode_rows(codes, self.dim, out);
            }
            Ok(())
        })
    }
}

impl NativeCodec {
    pub(crate) fn codec(&self) -> &Codec {
        &self.codec
    }

    pub(crate) fn dim(&self) -> usize {
        self.dim
    }

    /// Checks that as many whole rows as codes were given.
    fn check_counts(&self, values: usize, bytes: usize) -> Result<()> {
        let code_bytes = self.codec.code_bytes(self.dim);
        let is_whole = values.is_multiple_of(self.dim) && bytes.is_multiple_of(code_bytes);
        if !is_whole || values / self.dim != bytes / code_bytes {
            return Err(Error::invalid("rows must be [N, dim] and codes [N, code_bytes]")
                .with("dim", self.dim)
                .with("code_bytes", code_bytes));
        }
        Ok(())
    }
}

/// Returns where each asked code begins.
///
/// # Errors
/// `Invalid` when there is no such code.
fn starts_of(indices: &[i64], byte_count: usize, code_bytes: usize) -> Result<Vec<usize>> {
    let code_count = byte_count / code_bytes;
    let start = |&index: &i64| match usize::try_from(index) {
        Ok(at) if at < code_count => Ok(at * code_bytes),
        _ => {
            Err(Error::invalid("index out of range").with("index", index).with("codes", code_count))
        }
    };
    indices.iter().map(start).collect()
}
