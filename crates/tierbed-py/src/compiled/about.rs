//! What is told of a compiled model beside its code, and whether this machine may run it.

use std::collections::{BTreeSet, HashMap};

use serde::Deserialize;
use tierbed_core::{Error, Result};
use tierbed_serve::{ModelInputs, ModelOutput};
use tierbed_snapshot::View;

use super::calls::torch;
use super::refused;

/// A parameter that was compiled.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Parameter {
    /// Its name among the dense parameters.
    pub(super) name: String,
    pub(super) shape: Vec<usize>,
}

/// The attachment `dense.aoti.json`, as `tierbed.compile_dense` writes it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct About {
    /// `2.11.0+cpu`
    torch: String,
    /// `x86_64`
    machine: String,
    /// Instruction sets that the code may use, by their names in `/proc/cpuinfo`.
    cpu_flags: BTreeSet<String>,
    pub(super) inputs: ModelInputs,
    /// Elements of a sample's rows.
    rows_width: usize,
    pub(super) outputs: Vec<ModelOutput>,
    /// The model's `config()`, where it has one.
    config: Option<serde_json::Value>,
    /// By their names in the code.
    pub(super) parameters: HashMap<String, Parameter>,
}

impl About {
    pub(super) fn parse(bytes: &[u8]) -> Result<Self> {
        serde_json::from_slice(bytes).map_err(|cause| {
            Error::corruption("what is told of the compiled model cannot be read")
                .with("cause", cause)
        })
    }

    /// Returns the elements of a sample, numbers and rows.
    pub(super) fn widths(&self) -> [usize; 2] {
        [self.inputs.dense_count, self.rows_width]
    }

    /// Checks that the code may be run here, before it is loaded.
    ///
    /// # Errors
    /// `Invalid` for code of another torch or another processor.
    pub(super) fn check_machine(&self) -> Result<()> {
        // SAFETY: the call only returns a number.
        let abi = unsafe { (torch()?.abi_version)() };
        let here = format!("{}.{}.", abi >> 56, (abi >> 48) & 0xff);
        if !self.torch.starts_with(&here) {
            return Err(refused("the model was compiled by another torch")
                .with("found", &self.torch)
                .with("expected", format_args!("{here}*")));
        }
        let known = cpu_flags()?;
        let missing: Vec<_> = self.cpu_flags.difference(&known).map(String::as_str).collect();
        if self.machine != std::env::consts::ARCH || !missing.is_empty() {
            return Err(refused("the model was compiled for another processor")
                .with("machine", &self.machine)
                .with("missing", missing.join(" ")));
        }
        Ok(())
    }

    /// Checks that the code is that of the model and the tables of `view`.
    ///
    /// # Errors
    /// `Invalid` for another model, or tables of other dims.
    pub(super) fn check_model(&self, view: &View<'_>, config: Option<&[u8]>) -> Result<()> {
        let mut width = 0;
        for feature in &self.inputs.features {
            // Unknown tables are told by the server, with their features.
            let Some(table) = view.schema().id_of(&feature.table) else { return Ok(()) };
            width += view.schema().table(table)?.dim as usize;
        }
        if width != self.rows_width {
            return Err(refused("the model was compiled for rows of another width")
                .with("found", width)
                .with("expected", self.rows_width));
        }
        let config: Option<serde_json::Value> =
            config.map(serde_json::from_slice).transpose().map_err(|cause| {
                Error::corruption("the configuration of the model is no JSON").with("cause", cause)
            })?;
        if config != self.config {
            return Err(refused("the published model has another config than the compiled one"));
        }
        Ok(())
    }
}

/// Reads the names of this processor's instruction sets.
fn cpu_flags() -> Result<BTreeSet<String>> {
    let path = "/proc/cpuinfo";
    let told = std::fs::read_to_string(path).map_err(|cause| {
        Error::os("the processor's instruction sets are not told", cause).with("path", path)
    })?;
    let flags = told.lines().find_map(|line| {
        let (key, flags) = line.split_once(':')?;
        matches!(key.trim(), "flags" | "Features").then_some(flags)
    });
    Ok(flags.unwrap_or_default().split_whitespace().map(str::to_owned).collect())
}
