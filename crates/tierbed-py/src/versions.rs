//! Versions of a model at a location, for Python.
//!
//! A location is given by its name each time: nothing of it is kept here, so that a forked child
//! shares no connection with its parent.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use pyo3::prelude::*;
use serde::Serialize;
use tierbed_core::Result;
use tierbed_io::{Folder, FsFolder};
use tierbed_remote::{
    Bandwidth, Expected, Head, Listing, Location, Prune, Pruned, Pull, Pulled, Push, Pushed, Seq,
    Want,
};
use tierbed_snapshot::manifest::Manifest;
use tierbed_snapshot::shards::{ShardsManifest, SHARDS_NAME};

use crate::errors::run;
use crate::plain::Plain;
use crate::progress::Progress;

/// Adds the functions of this file to the module.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(published_identity, module)?)?;
    module.add_function(wrap_pyfunction!(list_versions, module)?)?;
    module.add_function(wrap_pyfunction!(channel_head, module)?)?;
    module.add_function(wrap_pyfunction!(push_version, module)?)?;
    module.add_function(wrap_pyfunction!(pull_versions, module)?)?;
    module.add_function(wrap_pyfunction!(promote_channel, module)?)?;
    module.add_function(wrap_pyfunction!(roll_back_channel, module)?)?;
    module.add_function(wrap_pyfunction!(prune_versions, module)?)?;
    module.add_function(wrap_pyfunction!(pin_version, module)?)?;
    module.add_function(wrap_pyfunction!(unpin_version, module)?)
}

/// What a published folder says that it is.
#[derive(Serialize)]
struct Identity {
    identity: String,
    base: Option<String>,
    base_delta: Option<String>,
}

impl Identity {
    fn of(folder: &Path) -> Result<Self> {
        let folder = FsFolder::open(folder)?;
        if folder.read(SHARDS_NAME)?.is_some() {
            let identity = ShardsManifest::read(&folder)?.identity()?;
            return Ok(Self { identity, base: None, base_delta: None });
        }
        let manifest = Manifest::read(&folder)?;
        let identity = manifest.identity()?;
        Ok(Self { identity, base: manifest.base, base_delta: manifest.base_delta })
    }

    /// Returns the identity that the channel has of those that this is a delta on.
    fn base_at(&self, head: Option<&Head>) -> Option<&str> {
        let chain = head.map_or(&[][..], |head| &head.chain);
        let is_there = |name: &&String| chain.iter().any(|link| link.identity == **name);
        let found = self.base_delta.as_ref().filter(is_there).or(self.base.as_ref());
        found.map(String::as_str)
    }
}

/// Tells what a published folder is, and what it is a delta on.
#[pyfunction]
fn published_identity(py: Python<'_>, folder: PathBuf) -> PyResult<Plain<Identity>> {
    run(py, || Identity::of(&folder).map(Plain))
}

/// Lists versions and channels.
#[pyfunction]
fn list_versions(py: Python<'_>, location: &str) -> PyResult<Plain<Listing>> {
    run(py, || Location::open(location)?.list().map(Plain))
}

/// Tells where a channel is; `None` when nothing was ever pushed to it.
#[pyfunction]
fn channel_head(py: Python<'_>, location: &str, channel: &str) -> PyResult<Option<Plain<Head>>> {
    run(py, || Ok(Location::open(location)?.head(channel)?.map(Plain)))
}

/// What a channel is at before a push.
#[derive(serde::Deserialize)]
#[serde(rename_all = "lowercase")]
enum GivenExpected {
    Anything,
    Nothing,
    Head(Head),
}

impl GivenExpected {
    fn expected(&self) -> Expected<'_> {
        match self {
            Self::Anything => Expected::Anything,
            Self::Nothing => Expected::Nothing,
            Self::Head(head) => Expected::Head(head),
        }
    }
}

/// Pushes a published folder as the next version, and moves `channel` to it.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "as in Python")]
fn push_version(
    py: Python<'_>,
    location: &str,
    folder: PathBuf,
    channel: &str,
    expected: Plain<GivenExpected>,
    now_s: u64,
    progress: Option<Py<PyAny>>,
) -> PyResult<Plain<Pushed>> {
    let mut progress = Progress::new(progress);
    let result = run(py, || {
        let location = Location::open(location)?;
        let own = Identity::of(&folder)?;
        // Where its HEAD cannot be read, a whole version takes its place.
        let head = if own.base.is_some() { location.head(channel)? } else { None };
        let what = Push {
            base: own.base_at(head.as_ref()),
            expected: expected.0.expected(),
            ..Push::new(&folder, &own.identity, channel, now_s)
        };
        location.push(&what, &mut |done, total| progress.tell(done, total)).map(Plain)
    });
    progress.finish(result)
}

/// What to pull: the versions of a channel, or one with what it is a delta on.
#[derive(serde::Deserialize)]
#[serde(rename_all = "lowercase")]
enum GivenWant {
    Channel(String),
    Version(u64),
}

/// Brings versions into folders of `to`.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "as in Python")]
fn pull_versions(
    py: Python<'_>,
    location: &str,
    want: Plain<GivenWant>,
    to: PathBuf,
    bandwidth_bytes: u64,
    progress: Option<Py<PyAny>>,
) -> PyResult<Plain<Pulled>> {
    let mut progress = Progress::new(progress);
    let want = match want.0 {
        GivenWant::Channel(channel) => Want::Channel(channel),
        GivenWant::Version(seq) => Want::Version(Seq(seq)),
    };
    let result = run(py, || {
        let how = Pull { bandwidth: Arc::new(Bandwidth::new(bandwidth_bytes)), ..Pull::default() };
        let told = &mut |done, total| progress.tell(done, total);
        Location::open(location)?.pull(&want, &to, &how, told).map(Plain)
    });
    progress.finish(result)
}

/// Moves the channel `to` where the channel `source` is.
#[pyfunction]
fn promote_channel(
    py: Python<'_>,
    location: &str,
    source: &str,
    to: &str,
    now_s: u64,
) -> PyResult<Plain<Head>> {
    run(py, || Location::open(location)?.promote(source, to, now_s).map(Plain))
}

/// Moves a channel to a version.
#[pyfunction]
fn roll_back_channel(
    py: Python<'_>,
    location: &str,
    channel: &str,
    seq: u64,
    now_s: u64,
) -> PyResult<Plain<Head>> {
    run(py, || Location::open(location)?.rollback(channel, Seq(seq), now_s).map(Plain))
}

/// Removes versions that nobody needs.
#[pyfunction]
fn prune_versions(
    py: Python<'_>,
    location: &str,
    keep_s: u64,
    now_s: u64,
    progress: Option<Py<PyAny>>,
) -> PyResult<Plain<Pruned>> {
    let mut progress = Progress::new(progress);
    let result = run(py, || {
        let told = &mut |done, total| progress.tell(done, total);
        Location::open(location)?.prune(Prune { keep_s, now_s }, told).map(Plain)
    });
    progress.finish(result)
}

/// Keeps a version, and what it is a delta on.
#[pyfunction]
fn pin_version(py: Python<'_>, location: &str, seq: u64) -> PyResult<()> {
    run(py, || Location::open(location)?.pin(Seq(seq)))
}

/// Lets a version be pruned again; false when it was not pinned.
#[pyfunction]
fn unpin_version(py: Python<'_>, location: &str, seq: u64) -> PyResult<bool> {
    run(py, || Location::open(location)?.unpin(Seq(seq)))
}
