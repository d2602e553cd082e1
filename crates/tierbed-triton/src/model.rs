//! A loaded model: lookups of a snapshot, or of the version that a channel is at.

use std::path::Path;

use tierbed_core::{Error, ErrorKind};
use tierbed_serve::{Hosted, LogLevel, LogOptions, ServeOptions, ServedTensor};
use tierbed_server::Source;

use crate::config::Config;
use crate::failure::Result;
use crate::ffi::log_error;

/// See the module documentation.
#[derive(Debug)]
pub(crate) struct Model {
    pub(crate) hosted: Hosted,
    /// What requests may give and ask for, as it was when the model was loaded.
    pub(crate) inputs: Vec<ServedTensor>,
    pub(crate) outputs: Vec<ServedTensor>,
    /// Whether Triton joins requests.
    pub(crate) is_batched: bool,
}

impl Model {
    /// Opens what the configuration names; else the snapshot in `folder`, that of the model's
    /// version.
    ///
    /// # Errors
    /// Those of [`Source::open`] and [`Hosted::start`].
    pub(crate) fn open(config: &Config, folder: &Path) -> Result<Self> {
        let options = config.options()?;
        let folder = folder.to_string_lossy();
        let place = config.place().unwrap_or(&folder);
        let source = Source::open(place, &options).map_err(|error| advised(error, place))?;
        if let Some(behind) = source.behind() {
            log_error(&format!("tierbed: {behind}"));
        }
        let log = LogOptions {
            level: LogLevel::parse(&options.serving.log_level)?,
            ..LogOptions::default()
        };
        let limits = options.limits.limits();
        let serving = ServeOptions { limits, log, ..ServeOptions::default() };
        let hosted = match source {
            Source::Folder(snapshot) => Hosted::start(&serving, snapshot)?,
            Source::Channel(following) => Hosted::follow(&serving, *following)?,
            Source::Shards(routing) => Hosted::route(&serving, *routing)?,
        };
        let (inputs, outputs) = (hosted.inputs(), hosted.outputs());
        Ok(Self { hosted, inputs, outputs, is_batched: config.is_batched() })
    }
}

/// Says what to do about a place that has no snapshot, where the error does not.
fn advised(error: Error, place: &str) -> Error {
    let is_advised = error.context().iter().any(|(key, _)| *key == "remedy");
    if is_advised || !matches!(error.kind(), ErrorKind::Invalid | ErrorKind::Io) {
        return error;
    }
    error
        .with("snapshot", place)
        .with("remedy", "give the folder that publish wrote, by the parameter snapshot")
}
