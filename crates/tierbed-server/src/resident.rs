//! Plan of resident rows, from the file that `TierPlan.save` of the Python package writes.
//!
//! A safetensors file: tensors `TABLE/head_rows`, `TABLE/head_codes`, `TABLE/tail_codes`,
//! `TABLE/default_row` and `codebooks/DIM`, and in its metadata the plan in JSON and a SHA-256 of
//! plan and tensors.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde::Deserialize;
use sha2::{Digest, Sha256};
use tierbed_core::{Error, Result, TableId};
use tierbed_kernels::{Codec, ProductQuantizer};
use tierbed_snapshot::manifest::Manifest;
use tierbed_snapshot::{HeadRows, ResidentTable, Tail};

const FORMAT: &str = "tierbed-tiers-1";
/// Entries of a codebook.
const ENTRIES: usize = 256;

#[derive(Deserialize)]
struct Plan {
    tables: Vec<PlannedTable>,
    about: About,
}

#[derive(Deserialize)]
struct About {
    /// The identity of the snapshot that it was made of.
    snapshot: Option<String>,
}

#[derive(Deserialize)]
struct PlannedTable {
    name: String,
    rows: u64,
    dim: usize,
    head_codec: String,
}

/// Reads the plan at `path` for the snapshot of `manifest`.
///
/// # Errors
/// `Invalid` for a file that is no plan or of another snapshot, `Corruption` for one that is not
/// what was written.
pub(crate) fn read(path: &Path, manifest: &Manifest) -> Result<Vec<Arc<ResidentTable>>> {
    let of = |error: Error| error.with("path", path.display());
    let bytes = std::fs::read(path).map_err(|cause| {
        of(Error::invalid("cannot read the plan of tiers"))
            .with("cause", cause)
            .with("remedy", "name a file that TierPlan.save wrote")
    })?;
    parse(&bytes, manifest).map_err(of)
}

fn no_plan() -> Error {
    Error::invalid("the file holds no plan of tiers")
        .with("remedy", "name a file that TierPlan.save wrote")
}

fn damaged(what: &str) -> Error {
    Error::corruption("the plan of tiers is not what was written")
        .with("found", what)
        .with("remedy", "write the plan again, by tb.plan_tiers and save")
}

fn parse(bytes: &[u8], manifest: &Manifest) -> Result<Vec<Arc<ResidentTable>>> {
    let (_, head) = SafeTensors::read_metadata(bytes).map_err(|_| no_plan())?;
    let tensors = SafeTensors::deserialize(bytes).map_err(|_| no_plan())?;
    let told = head.metadata().as_ref();
    let word = |key: &str| told.and_then(|told| told.get(key));
    if word("format").map(String::as_str) != Some(FORMAT) {
        return Err(no_plan());
    }
    let (Some(text), Some(sum)) = (word("plan"), word("sha256")) else {
        return Err(damaged("a plan without its checksum"));
    };
    let by_name: BTreeMap<String, TensorView<'_>> = tensors.tensors().into_iter().collect();
    if checksum(text, &by_name) != *sum {
        return Err(damaged("another checksum"));
    }
    let plan: Plan = serde_json::from_str(text).map_err(|_| damaged("a plan of another form"))?;
    let identity = manifest.identity()?;
    if let Some(made_of) = plan.about.snapshot.as_ref().filter(|&made_of| *made_of != identity) {
        return Err(Error::invalid("the plan of tiers was made of another snapshot")
            .with("expected", identity)
            .with("found", made_of)
            .with("remedy", "plan the tiers of this snapshot: tb.plan_tiers"));
    }
    plan.tables.iter().map(|table| resident(table, manifest, &by_name).map(Arc::new)).collect()
}

fn checksum(text: &str, tensors: &BTreeMap<String, TensorView<'_>>) -> String {
    let mut sum = Sha256::new();
    sum.update(text);
    for (name, tensor) in tensors {
        let sizes: Vec<String> = tensor.shape().iter().map(ToString::to_string).collect();
        // As Python writes a tuple.
        let shape = match sizes.as_slice() {
            [one] => format!("({one},)"),
            _ => format!("({})", sizes.join(", ")),
        };
        sum.update(format!("{name}{shape}"));
        sum.update(tensor.data());
    }
    sum.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn resident(
    planned: &PlannedTable,
    manifest: &Manifest,
    tensors: &BTreeMap<String, TensorView<'_>>,
) -> Result<ResidentTable> {
    let tables = (0..).map(TableId).zip(manifest.schema.tables());
    let known = tables.into_iter().find(|(_, table)| table.name == planned.name);
    let Some((id, _)) = known else {
        return Err(Error::invalid("the plan of tiers has a table that the snapshot has not")
            .with("table", &planned.name)
            .with("remedy", "plan the tiers of this snapshot: tb.plan_tiers"));
    };
    let part = |name: &str| tensors.get(&format!("{}/{name}", planned.name));
    let (Some(rows), Some(codes)) = (part("head_rows"), part("head_codes")) else {
        return Err(damaged("a table without its head"));
    };
    let rows: Vec<u64> = words(rows, Dtype::I64)?.map(u64::from_le_bytes).collect();
    let codec = Codec::by_name(&planned.head_codec)?;
    let codes = of_kind(codes, Dtype::U8)?.to_vec();
    let head = HeadRows::new(codec, planned.rows, planned.dim, &rows, codes)?;
    let tail = part("tail_codes").map(|codes| {
        let books = tensors.get(&format!("codebooks/{}", planned.dim));
        let books = books.ok_or_else(|| damaged("product codes without codebooks"))?;
        let &[part_count, ENTRIES, _] = books.shape() else {
            return Err(damaged("codebooks of another shape"));
        };
        let entries = floats(books)?;
        let product = ProductQuantizer::new(planned.dim, part_count, entries)?;
        let codes = of_kind(codes, Dtype::U8)?.to_vec();
        Ok(Tail { codec: Codec::Product(Arc::new(product)), codes })
    });
    let default_row = part("default_row").map(floats).transpose()?;
    Ok(ResidentTable { table: id, head: Some(head), tail: tail.transpose()?, default_row })
}

fn of_kind<'a>(tensor: &'a TensorView<'_>, kind: Dtype) -> Result<&'a [u8]> {
    if tensor.dtype() == kind {
        Ok(tensor.data())
    } else {
        Err(damaged("a tensor of another kind"))
    }
}

fn words<'a, const N: usize>(
    tensor: &'a TensorView<'_>,
    kind: Dtype,
) -> Result<impl Iterator<Item = [u8; N]> + 'a> {
    let (words, rest) = of_kind(tensor, kind)?.as_chunks::<N>();
    assert!(rest.is_empty(), "safetensors checks the bytes of each tensor");
    Ok(words.iter().copied())
}

fn floats(tensor: &TensorView<'_>) -> Result<Vec<f32>> {
    Ok(words(tensor, Dtype::F32)?.map(f32::from_le_bytes).collect())
}
