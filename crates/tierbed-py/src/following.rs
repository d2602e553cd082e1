//! A channel that a server follows, for Python.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use pyo3::prelude::*;
use tierbed_core::{Error, ErrorKind, Result};
use tierbed_io::process::Owned;
use tierbed_serve::{Follow, Following, Opener, Server};

use crate::errors::run;
use crate::opened::OpenedSnapshot;
use crate::plain::Plain;
use crate::server::{self, Asked, NativeServer};
use crate::snapshot::{self, NativeSnapshot};
use crate::tier_budget::NativeTierBudget;

/// A channel whose version is open, until a server takes it.
#[pyclass(frozen, module = "tierbed._native")]
pub(crate) struct NativeFollowing {
    following: Owned<Mutex<Option<Following>>>,
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct GivenFollow {
    location: String,
    channel: String,
    local: PathBuf,
    poll_s: f64,
    sync_bytes_per_s: Option<u64>,
    swap_share: f64,
}

impl GivenFollow {
    fn follow(self) -> Result<Follow> {
        let poll = Duration::try_from_secs_f64(self.poll_s)
            .map_err(|cause| Error::invalid("poll is out of range").with("cause", cause))?;
        Ok(Follow {
            poll,
            sync_bytes_per_s: self.sync_bytes_per_s,
            swap_share: self.swap_share,
            ..Follow::new(&self.location, &self.channel, self.local)
        })
    }
}

impl NativeFollowing {
    fn with<T>(&self, work: impl FnOnce(&mut Option<Following>) -> Result<T>) -> Result<T> {
        // It is there or taken after every statement.
        work(&mut self.following.get()?.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

fn taken() -> Error {
    Error::new(ErrorKind::Closed, "a server follows the channel already")
        .with("remedy", "make another Follow, with a folder of its own")
}

#[pymethods]
impl NativeFollowing {
    #[new]
    #[pyo3(signature = (follow, options, tier_budget))]
    fn new(
        py: Python<'_>,
        follow: Plain<GivenFollow>,
        options: Plain<snapshot::GivenOptions>,
        tier_budget: Option<PyRef<'_, NativeTierBudget>>,
    ) -> PyResult<Self> {
        let budgets = tier_budget.map(|budget| budget.budgets());
        let following = run(py, || {
            let follow = follow.0.follow()?;
            let (name, given) = (follow.location.clone(), options.0);
            let opener = Opener::new(move |folder| {
                let budget = budgets.as_ref().map(|budgets| budgets.here()).transpose()?;
                given.of_folder(folder, &name, Vec::new(), budget)
            });
            Following::begin(follow, opener)
        })?;
        let remedy = "follow the channel in the process that shall answer";
        let following = Owned::new(Mutex::new(Some(following)), "the channel", remedy);
        Ok(Self { following })
    }

    /// The snapshot that answers first; to be closed before the server follows.
    fn snapshot(&self, py: Python<'_>) -> PyResult<NativeSnapshot> {
        let opened = run(py, || {
            let snapshot = self.with(|following| {
                following
                    .as_ref()
                    .map(|following| Arc::clone(following.snapshot()))
                    .ok_or_else(taken)
            })?;
            let once = Mutex::new(Some(snapshot));
            OpenedSnapshot::new(move || {
                once.lock().unwrap_or_else(PoisonError::into_inner).take().ok_or_else(|| {
                    Error::new(ErrorKind::Closed, "a version that a server follows is its own")
                        .with("remedy", "open a snapshot of the version's folder")
                })
            })
        })?;
        Ok(NativeSnapshot::of(opened))
    }

    /// The number of the version that answers first.
    #[getter]
    fn version(&self, py: Python<'_>) -> PyResult<u64> {
        run(py, || {
            self.with(|following| following.as_ref().map(|it| it.version().0).ok_or_else(taken))
        })
    }

    /// Why that is not where the channel is, if it could not be pulled.
    #[getter]
    fn behind(&self, py: Python<'_>) -> PyResult<Option<String>> {
        run(py, || {
            let told = |it: &Following| it.behind().map(ToString::to_string);
            self.with(|following| following.as_ref().map(told).ok_or_else(taken))
        })
    }

    /// Answers from the channel's version, whichever it is.
    #[pyo3(signature = (address, model, options))]
    fn serve(
        &self,
        py: Python<'_>,
        address: &str,
        model: Option<Py<PyAny>>,
        options: Plain<server::GivenOptions>,
    ) -> PyResult<NativeServer> {
        let first =
            || self.with(|it| it.as_ref().map(|it| Arc::clone(it.snapshot())).ok_or_else(taken));
        let asked = Asked { snapshot: first, model };
        NativeServer::begin(py, address, asked, options.0, |options, predictor| {
            let following = self.with(|following| following.take().ok_or_else(taken))?;
            Server::follow(options, following, predictor)
        })
    }
}
