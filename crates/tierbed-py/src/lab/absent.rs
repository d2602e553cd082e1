//! The laboratory of a wheel: refusals that name the package to install.

use tierbed_cache::bounds::Requests;
use tierbed_cache::{PolicyKind, ReplayCounts};
use tierbed_core::{Error, Result};
use tierbed_data::GeneratorOptions;

fn missing(what: &'static str) -> Error {
    Error::unsupported("this build of tierbed has no benchmarks and simulators")
        .with("needed_for", what)
        .with("remedy", "install tierbed-bench from a checkout, as `make setup` does")
}

/// Registers nothing: the engine refuses the backends by itself.
pub(crate) fn register_stores() {}

pub(crate) fn serve_training() -> Result<()> {
    Err(missing("bench training"))
}

pub(crate) fn look_up(_command: &str) -> Result<String> {
    Err(missing("bench lookup"))
}

pub(crate) fn replay_ssd(_requests: &Requests<'_>, _options: &str) -> Result<String> {
    Err(missing("sim ssd"))
}

/// Generated samples: there are none here.
pub(crate) enum GeneratedLog {}

impl GeneratedLog {
    pub(crate) fn new(
        _options: GeneratorOptions,
        _sample_count: u64,
        _threads: usize,
        _progress: &mut dyn FnMut(u64, u64) -> Result<()>,
    ) -> Result<Self> {
        Err(missing("sim memory"))
    }

    pub(crate) fn sizes(&self) -> (u64, u64, usize) {
        match *self {}
    }

    pub(crate) fn replay_each(
        &self,
        _caches: &[(PolicyKind, usize)],
        _first: u64,
        _threads: usize,
        _progress: &mut dyn FnMut(u64, u64) -> Result<()>,
    ) -> Result<Vec<ReplayCounts>> {
        match *self {}
    }
}
