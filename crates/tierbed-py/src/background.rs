//! Publishing beside training, for Python: a thread of the caller's drives it.

use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::Duration;

use pyo3::prelude::*;
use tierbed_core::{Error, ErrorKind, Result};
use tierbed_io::FsFolder;
use tierbed_snapshot::Report;
use tierbed_train::window::publish::PublishProgress;
use tierbed_train::window::{FindBy, FrozenRows, Published};
use tierbed_train::ShardedEngine;

use crate::errors::run;
use crate::folders::{check_delta_layout, open_base, read_layout};
use crate::plain::Plain;
use crate::progress::Progress;
use crate::shards::GivenShards;
use crate::store::{borrowed, opened, NativeStore};

/// Rows copied before others may have the engine: it is theirs again after about a millisecond.
const COPY_ROWS: usize = 1024;
/// How long a publish stays back while others wait for the engine.
const GIVE_WAY: Duration = Duration::from_micros(200);

/// Adds the functions of this file to the module.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(begin_publish, module)?)?;
    module.add_function(wrap_pyfunction!(finish_publish, module)?)
}

/// Begins to publish what the tables are now; whether the store can do so while it trains.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "as in Python")]
fn begin_publish(
    store: &Bound<'_, NativeStore>,
    path: PathBuf,
    attachments: Vec<(String, Vec<u8>)>,
    base: Option<Vec<PathBuf>>,
    changes: &str,
    placements: Vec<(Vec<u32>, PathBuf)>,
    codecs: Vec<(u32, String)>,
    heads: Vec<(u32, String)>,
    shards: Option<Plain<GivenShards>>,
) -> PyResult<bool> {
    store.get().with(store.py(), |engine| {
        let mut layout = read_layout(&placements, &codecs, &heads)?;
        layout.shards = shards.map(|Plain(given)| given.plan()).transpose()?;
        let published = match base {
            None => Published::Whole(layout),
            Some(base) => {
                check_delta_layout(&layout, !codecs.is_empty())?;
                Published::Delta(open_base(&base, FindBy::from_name(changes)?)?)
            }
        };
        let Some(engine) = engine.background_mut() else { return Ok(false) };
        let folder = Arc::new(FsFolder::create(path)?);
        engine.begin_publish(folder, published, &borrowed(&attachments))?;
        Ok(true)
    })
}

/// Copies what [`begin_publish`] froze, while others use the store, and writes it; returns a
/// report.
#[pyfunction]
fn finish_publish(
    store: &Bound<'_, NativeStore>,
    progress: Option<Py<PyAny>>,
) -> PyResult<Plain<Report>> {
    let native = store.get();
    let mut told = Progress::new(progress);
    let mut tell = |done: u64, total: u64| told.tell(done, total).is_ok();
    let result = run(store.py(), || {
        let finished = copy(native, &mut tell)?.finish(&mut tell);
        // A store that was closed meanwhile has nothing to note.
        let mut engine = native.engine.lock()?;
        if let Some(engine) = engine.as_mut().and_then(ShardedEngine::background_mut) {
            engine.end_publish(finished.as_ref().ok());
        }
        finished.map(|finished| Plain(finished.report))
    });
    told.finish(result)
}

// Copies rows, some at a time; in between the engine is for those who wait.
fn copy(native: &NativeStore, tell: &mut PublishProgress<'_>) -> Result<FrozenRows> {
    loop {
        if let Some(rows) = copy_some(&mut *native.engine.lock()?, tell)? {
            return Ok(rows);
        }
        while native.waiting.load(Ordering::Relaxed) > 0 {
            std::thread::sleep(GIVE_WAY);
        }
    }
}

fn copy_some(
    engine: &mut Option<ShardedEngine>,
    tell: &mut PublishProgress<'_>,
) -> Result<Option<FrozenRows>> {
    let engine = opened(engine)?.background_mut();
    let engine =
        engine.ok_or_else(|| Error::new(ErrorKind::Closed, "the store changed its order"))?;
    engine.copy_published(COPY_ROWS, tell)
}
