//! Outputs of a request, and the answer made of them.
//!
//! The usual answer is one binary matrix as the lookup makes it. Room for it is made behind its
//! head, so the lookup writes into the answer itself. Other answers are put together afterwards.

use axum::body::Bytes;
use serde::ser::Serializer;
use serde::Serialize;
use tierbed_core::{Error, Result};

use super::request::Form;
use super::VERSION;
use crate::answer::JSON;
use crate::columns::Place;
use crate::grpc::message;
use crate::job::{Body, JSON_COST};
use crate::lookup::JSON_BYTES;
use crate::query::Query;

/// The content type of answers with binary outputs.
pub(crate) const OCTETS: &str = "application/octet-stream";

/// The type of an answer's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dtype {
    F32,
    F16,
    Bf16,
}

impl Dtype {
    /// # Errors
    /// `Invalid` for other names.
    pub(super) fn parse(name: Option<&str>) -> Result<Self> {
        match name {
            None | Some("FP32") => Ok(Self::F32),
            Some("FP16") => Ok(Self::F16),
            Some("BF16") => Ok(Self::Bf16),
            Some(found) => Err(Error::invalid("unknown output_dtype")
                .with("expected", "FP32, FP16 or BF16")
                .with("found", format_args!("{found:?}"))),
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::F32 => "FP32",
            Self::F16 => "FP16",
            Self::Bf16 => "BF16",
        }
    }

    pub(crate) fn size(self) -> usize {
        if self == Self::F32 {
            4
        } else {
            2
        }
    }

    /// Appends numbers as they are on the wire.
    pub(crate) fn append(self, values: &[f32], out: &mut Vec<u8>) {
        match self {
            // In memory as on the wire, since both are little-endian.
            Self::F32 => out.extend_from_slice(bytemuck::cast_slice(values)),
            Self::F16 => {
                out.extend(values.iter().flat_map(|x| half::f16::from_f32(*x).to_le_bytes()));
            }
            Self::Bf16 => {
                out.extend(values.iter().flat_map(|x| half::bf16::from_f32(*x).to_le_bytes()));
            }
        }
    }
}

/// Where an output's elements are.
#[derive(Debug, Clone)]
pub(crate) enum Origin {
    /// The whole matrix of a query.
    Query(usize),
    /// One feature of a query.
    Feature(Place),
    /// Numbers of their own.
    Values(Vec<f32>),
}

/// One output as it was asked for.
#[derive(Debug)]
pub(crate) struct Output {
    pub(crate) name: String,
    pub(crate) shape: Vec<usize>,
    pub(crate) is_binary: bool,
    pub(crate) from: Origin,
}

impl Output {
    pub(crate) fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Goes through the elements, slice by slice.
    pub(crate) fn slices<'a>(
        &'a self,
        queries: &'a [Query],
    ) -> Box<dyn Iterator<Item = &'a [f32]> + 'a> {
        match &self.from {
            Origin::Query(at) => {
                Box::new(queries.get(*at).into_iter().map(|query| query.matrix.get()))
            }
            Origin::Feature(place) => Box::new(place.query_of(queries).vectors(place.at)),
            Origin::Values(values) => Box::new(std::iter::once(values.as_slice())),
        }
    }
}

/// The outputs of a request, in order.
#[derive(Debug)]
pub(crate) struct Outputs {
    pub(crate) id: Option<String>,
    pub(crate) model: String,
    pub(crate) generation: String,
    pub(crate) dtype: Dtype,
    pub(crate) form: Form,
    pub(crate) outputs: Vec<Output>,
}

#[derive(Serialize)]
struct Answer<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<&'a str>,
    model_name: &'a str,
    model_version: &'static str,
    parameters: Generation<'a>,
    outputs: Vec<Told<'a>>,
}

#[derive(Serialize)]
struct Generation<'a> {
    generation: &'a str,
}

#[derive(Serialize)]
struct Told<'a> {
    name: &'a str,
    datatype: &'static str,
    shape: &'a [usize],
    #[serde(skip_serializing_if = "Option::is_none")]
    parameters: Option<BinarySize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    data: Option<Elements<'a>>,
}

#[derive(Serialize)]
struct BinarySize {
    binary_data_size: usize,
}

struct Elements<'a> {
    output: &'a Output,
    queries: &'a [Query],
}

impl Serialize for Elements<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.collect_seq(self.output.slices(self.queries).flatten())
    }
}

impl Outputs {
    /// Checks that what is asked for as JSON can be told so.
    ///
    /// # Errors
    /// `Invalid` for types that JSON has no numbers of.
    pub(super) fn check(&self) -> Result<()> {
        match self.outputs.iter().find(|output| !output.is_binary) {
            Some(output) if self.dtype != Dtype::F32 => {
                Err(Error::invalid("output of this type is answered as binary data only")
                    .with("output", &output.name)
                    .with("datatype", self.dtype.name())
                    .with("remedy", "ask for binary data"))
            }
            _ => Ok(()),
        }
    }

    /// Returns how many bytes the elements take at most.
    pub(super) fn byte_count(&self) -> usize {
        let bytes = self.outputs.iter().map(|output| {
            output.len() * if output.is_binary { self.dtype.size() } else { JSON_BYTES }
        });
        bytes.sum()
    }

    /// Returns how long encoding takes, in elements that are copied.
    pub(super) fn encode_cost(&self) -> usize {
        let costs = self.outputs.iter().map(|output| {
            output.len().saturating_mul(if output.is_binary { 1 } else { JSON_COST })
        });
        costs.fold(0, usize::saturating_add)
    }

    /// Returns what comes before the answer's only matrix, where it is binary and the whole
    /// answer of the only query; else the answer has to be put together.
    pub(super) fn head_of_whole(&self, queries: &[Query]) -> Result<Option<Vec<u8>>> {
        let ([output], [query]) = (self.outputs.as_slice(), queries) else { return Ok(None) };
        let is_whole = match &output.from {
            Origin::Query(_) => true,
            Origin::Feature(_) => query.plan.asked.len() == 1,
            Origin::Values(_) => false,
        };
        if !is_whole || !output.is_binary || self.dtype != Dtype::F32 {
            return Ok(None);
        }
        let mut head = self.head(queries)?;
        self.begin(output, &mut head);
        Ok(Some(head))
    }

    /// Makes what comes before all binary outputs.
    fn head(&self, queries: &[Query]) -> Result<Vec<u8>> {
        match self.form {
            Form::Json => self.json(queries),
            Form::Message => Ok(message::head(self)),
        }
    }

    /// Appends what comes before the elements of a binary output.
    fn begin(&self, output: &Output, out: &mut Vec<u8>) {
        if self.form == Form::Message {
            message::begin(output.len() * self.dtype.size(), out);
        }
    }

    /// Makes the JSON, with the elements of those outputs that are not binary.
    fn json(&self, queries: &[Query]) -> Result<Vec<u8>> {
        let outputs = self.outputs.iter().map(|output| Told {
            name: &output.name,
            datatype: self.dtype.name(),
            shape: &output.shape,
            parameters: output
                .is_binary
                .then(|| BinarySize { binary_data_size: output.len() * self.dtype.size() }),
            data: (!output.is_binary).then_some(Elements { output, queries }),
        });
        let answer = Answer {
            id: self.id.as_deref(),
            model_name: &self.model,
            model_version: VERSION,
            parameters: Generation { generation: &self.generation },
            outputs: outputs.collect(),
        };
        serde_json::to_vec(&answer)
            .map_err(|cause| Error::invalid("cannot encode the answer").with("cause", cause))
    }

    /// Puts the answer together.
    ///
    /// # Errors
    /// `Invalid` for numbers that JSON has no word for.
    pub(super) fn encode(&self, queries: &[Query]) -> Result<Body> {
        for output in self.outputs.iter().filter(|output| !output.is_binary) {
            if output.slices(queries).flatten().any(|x| !x.is_finite()) {
                return Err(Error::invalid("output has a number that JSON cannot tell")
                    .with("output", &output.name)
                    .with("remedy", "ask for binary data"));
            }
        }
        let mut bytes = self.head(queries)?;
        let head_bytes = bytes.len();
        let binary = self.outputs.iter().filter(|output| output.is_binary);
        bytes.reserve_exact(binary.clone().map(Output::len).sum::<usize>() * self.dtype.size());
        let has_binary = binary.clone().next().is_some();
        for output in binary {
            self.begin(output, &mut bytes);
            for slice in output.slices(queries) {
                self.dtype.append(slice, &mut bytes);
            }
        }
        Ok(body(self.form, bytes.into(), has_binary.then_some(head_bytes)))
    }
}

/// Wraps the bytes of an answer; `head_bytes` come before binary outputs.
pub(super) fn body(form: Form, bytes: Bytes, head_bytes: Option<usize>) -> Body {
    let (body_type, header_bytes) = match (form, head_bytes) {
        (Form::Message, _) => (message::TYPE, None),
        (Form::Json, Some(_)) => (OCTETS, head_bytes),
        (Form::Json, None) => (JSON, None),
    };
    Body { bytes, body_type, header_bytes, coding: None }
}
