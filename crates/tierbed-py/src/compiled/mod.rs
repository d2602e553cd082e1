//! Compiled models: a dense part in machine code, asked without Python.
//!
//! ```text
//! tierbed.compile_dense ─▶ att.dense.aoti.so, att.dense.aoti.json ─▶ Code: loaded once
//! att.dense.safetensors of a generation ─▶ Container: the code with these weights
//! ```
//!
//! The code comes from torch's AOTInductor and calls torch's stable C interface in the libraries
//! that Python has loaded. It runs with all rights of the process, so it is loaded only where
//! `predict` asks for it. A generation has a container of its own, so an answer has weights of one.

mod about;
mod calls;
mod code;
mod container;

use std::sync::Arc;

use tierbed_core::env::{Clock, SystemClock};
use tierbed_core::{Error, Result};
use tierbed_serve::{Batch, ModelInputs, ModelOutput, Predictor};
use tierbed_snapshot::View;

use self::about::About;
use self::code::Code;
use self::container::Container;
use crate::predictor::{DENSE, MODEL};

const ABOUT_NAME: &str = "dense.aoti.json";
const CODE_NAME: &str = "dense.aoti.so";
/// What a thread that moves bytes may be away for. Waking another thread takes about as long.
const AT_ONCE_US: u64 = 50;
/// Most samples of a request that may be scored by such a thread.
const AT_ONCE_MAX: usize = 16;
/// Calls of which the quickest counts.
const PROBES: usize = 5;

/// The compiled model of a generation.
pub(crate) struct CompiledPredictor {
    about: About,
    container: Container,
    threads: usize,
    /// As [`Predictor::samples_at_once`].
    at_once: usize,
}

impl CompiledPredictor {
    /// Loads the compiled model that was published with `view`, for `threads` calls at once.
    ///
    /// # Errors
    /// `Invalid` where there is none, or for another torch, processor, model or shape.
    pub(crate) fn load(view: &View<'_>, threads: usize) -> Result<Self> {
        let told = view.attachment(ABOUT_NAME)?;
        let parts = (told, view.attachment(CODE_NAME)?, view.attachment(DENSE)?);
        let (Some(told), Some(code), Some(dense)) = parts else {
            return Err(refused("no compiled model was published with this"));
        };
        let about = About::parse(&told)?;
        about.check_machine()?;
        about.check_model(view, view.attachment(MODEL)?.as_deref())?;
        let container = Container::new(Code::of(code)?, &about, &dense, threads)?;
        let mut model = Self { about, container, threads, at_once: 0 };
        model.at_once = model.probe()?;
        Ok(model)
    }

    /// Asks for one sample and for several: what has another shape is told now, not to clients.
    /// Returns how many samples take no longer than [`AT_ONCE_US`].
    fn probe(&self) -> Result<usize> {
        let (clock, mut at_once) = (SystemClock::default(), 0);
        let mut sample_count = 1;
        while sample_count <= AT_ONCE_MAX {
            let mut least_us = u64::MAX;
            for _ in 0..PROBES {
                let [dense, rows] =
                    self.about.widths().map(|width| vec![0.0; sample_count * width]);
                let start_us = clock.now_us();
                self.predict(Batch { sample_count, dense, rows })?;
                least_us = least_us.min(clock.now_us().saturating_sub(start_us));
            }
            if least_us <= AT_ONCE_US {
                at_once = sample_count;
            }
            sample_count *= 2;
        }
        Ok(at_once)
    }
}

impl Predictor for CompiledPredictor {
    fn inputs(&self) -> &ModelInputs {
        &self.about.inputs
    }

    fn outputs(&self) -> &[ModelOutput] {
        &self.about.outputs
    }

    fn predict(&self, batch: Batch) -> Result<Vec<Vec<f32>>> {
        self.container.run(batch, &self.about.outputs)
    }

    fn samples_at_once(&self) -> usize {
        self.at_once
    }

    fn next(&self, view: &View<'_>) -> Result<Option<Arc<dyn Predictor>>> {
        if view.attachment(DENSE)?.is_none() {
            return Ok(None);
        }
        Ok(Some(Arc::new(Self::load(view, self.threads)?)))
    }
}

fn refused(what: &str) -> Error {
    Error::invalid(what).with(
        "remedy",
        "publish with compiled, by such a torch on such a processor, or leave predict at python",
    )
}
