//! The engine's training side, for Python.

use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use tierbed_core::store::Attachment;
use tierbed_core::{Error, ErrorKind, Result, RowId, Schema, TableId, TableSchema};
use tierbed_io::process::Owned;
use tierbed_snapshot::Report;
use tierbed_train::planned::device::DeviceWindows;
use tierbed_train::window::rows::NewRows;
use tierbed_train::window::update::Grads;
use tierbed_train::window::vocabularies::VocabularyStats;
use tierbed_train::window::{
    FindBy, Hyper, Policy, Pooling, Translate, WindowConfig, WindowEngine,
};
use tierbed_train::{
    Access, Answer, AutoEngine, BatchToken, OrderConfig, PlanRequest, ShardedEngine,
};

use crate::batch::{run_lookup, run_translate, BatchTensors, FeaturePlan, LookupArguments};
use crate::calls::{Calls, Holding};
use crate::chunks::{hand_out_all, Chunk};
use crate::ending::detached;
use crate::errors::{run, to_python};
use crate::folders::{check_delta_layout, open_base, read_layout};
use crate::plain::Plain;
use crate::progress::Progress;
use crate::python_store::PythonStore;
use crate::shards::GivenShards;
use crate::tensors::{check_disjoint, Tensor};
use crate::windows::{self, PythonWindows};

/// The engine over one store.
#[pyclass(frozen, module = "tierbed._native")]
pub(crate) struct NativeStore {
    pub(crate) engine: Owned<Mutex<Option<ShardedEngine>>>,
    /// Calls that wait for the engine.
    pub(crate) waiting: AtomicUsize,
    calls: Calls,
}

/// The engine, for one call.
struct Held<'a> {
    engine: MutexGuard<'a, Option<ShardedEngine>>,
    _holding: Holding<'a>,
}

fn owned(engine: ShardedEngine) -> Owned<Mutex<Option<ShardedEngine>>> {
    Owned::new(
        Mutex::new(Some(engine)),
        "the store",
        "use it in the process that opened it; a worker hands ids to that process, or looks up a \
         published tierbed.Snapshot",
    )
}

pub(crate) fn opened(engine: &mut Option<ShardedEngine>) -> Result<&mut ShardedEngine> {
    engine.as_mut().ok_or_else(|| {
        Error::new(ErrorKind::Closed, "store is closed").with("remedy", "open it again")
    })
}

impl NativeStore {
    fn over_engine(engine: ShardedEngine) -> Self {
        Self { engine: owned(engine), waiting: AtomicUsize::new(0), calls: Calls::default() }
    }

    // Waits for the engine; a publish beside training gives way.
    fn locked(&self) -> Result<Held<'_>> {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let engine = self.engine.lock();
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        Ok(Held { engine: engine?, _holding: self.calls.hold() })
    }

    // Begins a call, after the update that was reserved before it.
    fn begin(&self, py: Python<'_>) -> PyResult<()> {
        // A forked child has no worker that it could wait for; the engine tells it so.
        if !self.engine.is_here() {
            return Ok(());
        }
        self.calls.check_free().map_err(|error| to_python(py, &error))?;
        // Nearly always: then the GIL stays where it is.
        if !self.calls.is_expected() {
            return Ok(());
        }
        detached(py, || self.calls.wait()).map_or(Ok(()), Err)
    }

    // Runs `work` on the engine without the GIL.
    pub(crate) fn with<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut ShardedEngine) -> Result<T> + Send,
    ) -> PyResult<T> {
        self.begin(py)?;
        self.now(py, work)
    }

    // Runs `work` on the engine without the GIL, before the update that is to come.
    fn now<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut ShardedEngine) -> Result<T> + Send,
    ) -> PyResult<T> {
        run(py, || work(opened(&mut self.locked()?.engine)?))
    }
}

#[pymethods]
impl NativeStore {
    #[new]
    #[pyo3(signature = (path, options, windows=None))]
    fn new(
        py: Python<'_>,
        path: Option<PathBuf>,
        options: Plain<OrderConfig>,
        windows: Option<Py<PyAny>>,
    ) -> PyResult<Self> {
        let windows = windows.map(|windows| Arc::new(PythonWindows::new(windows)));
        let device = windows.map(|windows| windows as Arc<dyn DeviceWindows>);
        let config = OrderConfig { device, ..options.0 };
        let engine = run(py, || ShardedEngine::open(path.as_deref(), &config))?;
        Ok(Self::over_engine(engine))
    }

    #[staticmethod]
    fn over(py: Python<'_>, bridge: Py<PyAny>, dram_budget_bytes: u64) -> PyResult<Self> {
        let engine = run(py, || {
            let config = WindowConfig::new(dram_budget_bytes);
            let engine = WindowEngine::over(Box::new(PythonStore::open(bridge)?), &config)?;
            Ok(ShardedEngine::over(AutoEngine::over(engine)))
        })?;
        Ok(Self::over_engine(engine))
    }

    fn add_table(&self, py: Python<'_>, table: Plain<TableSchema>) -> PyResult<u32> {
        self.with(py, |engine| engine.add_table(table.0).map(|id| id.0))
    }

    fn add_open_table(
        &self,
        py: Python<'_>,
        table: Plain<TableSchema>,
        policy: Plain<Policy>,
    ) -> PyResult<u32> {
        self.with(py, |engine| engine.single()?.add_open_table(table.0, policy.0).map(|id| id.0))
    }

    #[pyo3(signature = (plan, indices, offsets, now, out))]
    #[expect(clippy::too_many_arguments, reason = "one argument per tensor, as in Python")]
    fn translate(
        &self,
        plan: &Bound<'_, FeaturePlan>,
        indices: &Bound<'_, PyAny>,
        offsets: &Bound<'_, PyAny>,
        now: Option<u32>,
        out: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        self.begin(plan.py())?;
        run_translate(plan, indices, offsets, out, |plan, bags, rows| {
            let how = now.map_or(Translate::Find, |now| Translate::Train { now });
            let mut held = self.locked()?;
            let engine = opened(&mut held.engine)?;
            now.map_or(Ok(()), |_| engine.check_writable())?;
            engine.single()?.translate(plan, bags, how, rows)
        })
    }

    #[pyo3(signature = (table, ids, now))]
    fn translate_ids(&self, table: u32, ids: &Bound<'_, PyAny>, now: Option<u32>) -> PyResult<()> {
        let py = ids.py();
        let mut ids = Tensor::<i64>::import(ids, "ids")?;
        let ids = ids.view_mut().map_err(|error| to_python(py, &error))?;
        let how = now.map_or(Translate::Find, |now| Translate::Train { now });
        self.with(py, |engine| {
            now.map_or(Ok(()), |_| engine.check_writable())?;
            engine.single()?.translate_ids(TableId(table), how, ids)
        })
    }

    fn evict(&self, py: Python<'_>, table: u32, now: u32) -> PyResult<(u64, u64)> {
        let evicted = self.with(py, |engine| {
            engine.check_writable()?;
            engine.single()?.evict(TableId(table), now)
        })?;
        Ok((evicted.id_count, evicted.waiting_count))
    }

    fn vocabularies(&self, py: Python<'_>) -> PyResult<Plain<VocabularyStats>> {
        self.with(py, |engine| Ok(Plain(engine.engine().vocabularies())))
    }

    fn schema(&self, py: Python<'_>) -> PyResult<Plain<Schema>> {
        self.with(py, |engine| Ok(Plain(engine.engine().schema().clone())))
    }

    fn set_optimizer(&self, py: Python<'_>, table: u32, hyper: Plain<GivenHyper>) -> PyResult<()> {
        self.with(py, |engine| {
            let Plain(GivenHyper { lr, eps, beta1, beta2, weight_decay }) = hyper;
            engine
                .engine_mut()
                .set_hyper(TableId(table), Hyper { lr, eps, beta1, beta2, weight_decay, step: 0 })
        })
    }

    fn plan(
        &self,
        py: Python<'_>,
        tables: Vec<u32>,
        poolings: Vec<String>,
    ) -> PyResult<FeaturePlan> {
        self.with(py, |engine| make_plan(engine.engine().schema(), &tables, &poolings))
    }

    #[pyo3(signature = (plan, indices, offsets, weights, out, is_training=false))]
    #[expect(clippy::too_many_arguments, reason = "one argument per tensor, as in Python")]
    fn lookup(
        &self,
        plan: &Bound<'_, FeaturePlan>,
        indices: &Bound<'_, PyAny>,
        offsets: &Bound<'_, PyAny>,
        weights: Option<&Bound<'_, PyAny>>,
        out: &Bound<'_, PyAny>,
        is_training: bool,
    ) -> PyResult<Option<u64>> {
        self.begin(plan.py())?;
        run_lookup(plan, &LookupArguments { indices, offsets, weights, out }, |plan, bags, out| {
            let mut held = self.locked()?;
            let token =
                opened(&mut held.engine)?.engine_mut().lookup(plan, bags, out, is_training)?;
            Ok(token.map(BatchToken::number))
        })
    }

    /// Reserves the next place in the order of calls for an update that another thread makes.
    fn reserve_update(&self, py: Python<'_>) -> PyResult<u64> {
        self.begin(py)?;
        Ok(detached(py, || self.calls.reserve()))
    }

    /// Ends a reservation: the update was made, or `failure` came, which the next call raises.
    #[pyo3(signature = (ticket, failure=None))]
    fn end_update(
        &self,
        py: Python<'_>,
        ticket: u64,
        failure: Option<Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let failure = failure.map(PyErr::from_value);
        self.calls.end(ticket, failure).map_err(|error| to_python(py, &error))
    }

    #[pyo3(signature = (
        plan, indices, offsets, weights, grad, weights_grad, found=None, ticket=None
    ))]
    #[expect(clippy::too_many_arguments, reason = "one argument per tensor, as in Python")]
    fn update(
        &self,
        plan: &Bound<'_, FeaturePlan>,
        indices: &Bound<'_, PyAny>,
        offsets: &Bound<'_, PyAny>,
        weights: Option<&Bound<'_, PyAny>>,
        grad: &Bound<'_, PyAny>,
        weights_grad: Option<&Bound<'_, PyAny>>,
        found: Option<u64>,
        ticket: Option<u64>,
    ) -> PyResult<Option<(u64, u64)>> {
        let py = plan.py();
        match ticket {
            None => self.begin(py)?,
            Some(ticket) => {
                self.calls.check_ticket(ticket).map_err(|error| to_python(py, &error))?;
            }
        }
        let batch = BatchTensors::import(indices, offsets, weights)?;
        let grad = Tensor::<f32>::import(grad, "grad")?;
        let mut weights_grad =
            weights_grad.map(|tensor| Tensor::<f32>::import(tensor, "weights_grad")).transpose()?;
        let checked = weights_grad.as_ref().map_or(Ok(()), |output| {
            batch.check_outputs(&[output.place()])?;
            check_disjoint(&[output.place()], &[grad.place()])
        });
        checked.map_err(|error| to_python(py, &error))?;
        let plan = &plan.get().plan;
        let bags = batch.bags(plan.features().len()).map_err(|error| to_python(py, &error))?;
        let weights = weights_grad.as_mut().map(Tensor::view_mut).transpose();
        let weights = weights.map_err(|error| to_python(py, &error))?;
        let grads = Grads { output: grad.view(), weights };
        let found = found.and_then(BatchToken::of_number);
        self.now(py, |engine| {
            let engine = engine.writable()?;
            engine.update(plan, &bags, grads, found)?;
            Ok(engine.position())
        })
    }

    fn lookup_on_device(
        &self,
        plan: &Bound<'_, FeaturePlan>,
        indices: &Bound<'_, PyAny>,
        offsets: &Bound<'_, PyAny>,
        entries: &Bound<'_, PyAny>,
    ) -> PyResult<Option<u64>> {
        let py = plan.py();
        windows::look_up(plan, indices, offsets, entries, |plan, bags, entries| {
            self.with(py, |engine| engine.single()?.lookup_on_device(plan, bags, entries))
        })
    }

    fn step_on_device(
        &self,
        plan: &Bound<'_, FeaturePlan>,
        indices: &Bound<'_, PyAny>,
        offsets: &Bound<'_, PyAny>,
        found: u64,
    ) -> PyResult<windows::Stepped> {
        let py = plan.py();
        let batch = BatchTensors::import(indices, offsets, None)?;
        let plan = &plan.get().plan;
        let bags = batch.bags(plan.features().len()).map_err(|error| to_python(py, &error))?;
        self.with(py, |engine| windows::step(engine, plan, &bags, found))
    }

    fn prefetch(
        &self,
        plan: &Bound<'_, FeaturePlan>,
        batches: Vec<(Bound<'_, PyAny>, Bound<'_, PyAny>)>,
    ) -> PyResult<usize> {
        let py = plan.py();
        let tensors = batches
            .iter()
            .map(|(indices, offsets)| BatchTensors::import(indices, offsets, None))
            .collect::<PyResult<Vec<_>>>()?;
        let plan = &plan.get().plan;
        let bags = tensors
            .iter()
            .map(|batch| batch.bags(plan.features().len()))
            .collect::<Result<Vec<_>>>()
            .map_err(|error| to_python(py, &error))?;
        self.with(py, |engine| engine.engine_mut().prefetch(plan, &bags))
    }

    fn end_lookahead(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, |engine| {
            engine.engine_mut().end_lookahead();
            Ok(())
        })
    }

    #[pyo3(signature = (table, first_row, weights, state))]
    fn read_rows(
        &self,
        table: u32,
        first_row: u64,
        weights: &Bound<'_, PyAny>,
        state: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let py = weights.py();
        let mut weights = Tensor::<f32>::import(weights, "weights")?;
        let mut state = state.map(|state| Tensor::<f32>::import(state, "state")).transpose()?;
        let mut outputs = vec![weights.place()];
        outputs.extend(state.as_ref().map(Tensor::place));
        check_disjoint(&outputs, &[]).map_err(|error| to_python(py, &error))?;
        let weights = weights.view_mut().map_err(|error| to_python(py, &error))?;
        let mut state = state
            .as_mut()
            .map(Tensor::view_mut)
            .transpose()
            .map_err(|error| to_python(py, &error))?;
        self.with(py, |engine| {
            let (dim, state_words) = shape_of(engine, table)?;
            let count = rows_in(weights.len(), dim, "weights")?;
            check_state(state.as_deref(), count, state_words)?;
            let own = engine.engine_mut().rows_of(TableId(table), Access::Read)?;
            own.engine.visit_rows(own.table, first_row, count, &mut |at, record| {
                let (head, tail) = record.split_at(dim);
                if let Some(place) = weights.get_mut(at * dim..(at + 1) * dim) {
                    place.copy_from_slice(head);
                }
                let place = state
                    .as_deref_mut()
                    .and_then(|state| state.get_mut(at * state_words..(at + 1) * state_words));
                if let (Some(place), Some(words)) = (place, tail.get(..state_words)) {
                    place.copy_from_slice(words);
                }
            })
        })
    }

    fn scan_rows(
        &self,
        py: Python<'_>,
        chunk_rows: usize,
        visit: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let visit = visit.clone().unbind();
        let mut raised = None;
        let result = self.with(py, |engine| {
            // Pages of an index are rows of tables that nobody asked for: they have no chunk.
            let tables = engine.engine().schema().tables();
            let mut chunks: Vec<Option<Chunk<f32>>> =
                tables.iter().map(|table| (!table.is_own()).then(Chunk::default)).collect();
            let (count, mut held) = (chunks.len(), 0);
            engine.engine_mut().scan_all(&mut |table, row, record| {
                let Some(chunk) = chunks.get_mut(table.0 as usize) else {
                    panic!("a row of table {} of {count} is scanned", table.0)
                };
                let Some(chunk) = chunk else { return Ok(()) };
                chunk.push(row, record);
                held += 1;
                if held < chunk_rows.max(1) {
                    return Ok(());
                }
                held = 0;
                hand_out_all(&mut chunks, &visit, &mut raised)
            })?;
            hand_out_all(&mut chunks, &visit, &mut raised)
        });
        raised.map_or(result, Err)
    }

    fn scan_ids(
        &self,
        py: Python<'_>,
        table: u32,
        chunk_ids: usize,
        visit: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let visit = visit.clone().unbind();
        let mut raised = None;
        let result = self.with(py, |engine| {
            let mut chunk: Chunk<i64> = Chunk::default();
            engine.single()?.visit_ids(TableId(table), &mut |id, row| {
                chunk.push(RowId(row), &[id]);
                match chunk.rows.len() >= chunk_ids.max(1) {
                    true => chunk.hand_out(TableId(table), &visit, &mut raised),
                    false => Ok(()),
                }
            })?;
            chunk.hand_out(TableId(table), &visit, &mut raised)
        });
        raised.map_or(result, Err)
    }

    fn gather_rows(
        &self,
        table: u32,
        rows: &Bound<'_, PyAny>,
        weights: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let py = rows.py();
        let rows = Tensor::<i64>::import(rows, "rows")?;
        let mut weights = Tensor::<f32>::import(weights, "weights")?;
        let checked = check_disjoint(&[weights.place()], &[rows.place()]);
        checked.map_err(|error| to_python(py, &error))?;
        let weights = weights.view_mut().map_err(|error| to_python(py, &error))?;
        let rows = rows.view();
        self.with(py, |engine| {
            let own = engine.engine_mut().rows_of(TableId(table), Access::Read)?;
            own.engine.gather_rows(own.table, rows, weights)
        })
    }

    #[pyo3(signature = (table, first_row, weights, state, use_counts=None))]
    #[expect(clippy::too_many_arguments, reason = "one argument per tensor, as in Python")]
    fn write_rows(
        &self,
        table: u32,
        first_row: u64,
        weights: &Bound<'_, PyAny>,
        state: Option<&Bound<'_, PyAny>>,
        use_counts: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let py = weights.py();
        let weights = Tensor::<f32>::import(weights, "weights")?;
        let state = state.map(|state| Tensor::<f32>::import(state, "state")).transpose()?;
        let counts = use_counts.map(|counts| Tensor::<i64>::import(counts, "use_counts"));
        let counts = counts.transpose()?;
        let rows = NewRows {
            weights: weights.view(),
            state: state.as_ref().map(Tensor::view),
            use_counts: counts.as_ref().map(Tensor::view),
        };
        self.with(py, |engine| {
            let (dim, state_words) = shape_of(engine, table)?;
            let count = rows_in(rows.weights.len(), dim, "weights")?;
            check_state(rows.state, count, state_words)?;
            if let Some(counts) = rows.use_counts.filter(|counts| counts.len() != count) {
                return Err(Error::invalid("use_counts must hold one value per row")
                    .with("rows", count)
                    .with("found_values", counts.len()));
            }
            let own = engine.writable()?.rows_of(TableId(table), Access::Write)?;
            own.engine.write_rows(own.table, first_row, rows)
        })
    }

    fn steps_done(&self, py: Python<'_>, table: u32) -> PyResult<u64> {
        self.with(py, |engine| engine.engine_mut().steps_done(TableId(table)))
    }

    fn set_steps_done(&self, py: Python<'_>, table: u32, steps: u64) -> PyResult<()> {
        self.with(py, |engine| {
            let own = engine.writable()?.rows_of(TableId(table), Access::Resume)?;
            own.engine.set_steps_done(own.table, steps)
        })
    }

    fn use_counts(&self, table: u32, first_row: u64, out: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = out.py();
        let mut out = Tensor::<i64>::import(out, "out")?;
        let out = out.view_mut().map_err(|error| to_python(py, &error))?;
        self.with(py, |engine| {
            let own = engine.engine_mut().rows_of(TableId(table), Access::Read)?;
            own.engine.visit_rows(own.table, first_row, out.len(), &mut |at, record| {
                let count = record.last().map_or(0, |word| word.to_bits());
                if let Some(place) = out.get_mut(at) {
                    *place = i64::from(count);
                }
            })
        })
    }

    #[pyo3(signature = (name, attachments, keep=false))]
    fn checkpoint(
        &self,
        py: Python<'_>,
        name: &str,
        attachments: Vec<(String, Vec<u8>)>,
        keep: bool,
    ) -> PyResult<u64> {
        self.with(py, |engine| {
            engine.check_writable()?;
            if keep {
                return engine.single()?.keep_checkpoint(name, &borrowed(&attachments));
            }
            engine.writable()?.checkpoint(name, &borrowed(&attachments))
        })
    }

    fn drop_checkpoint(&self, py: Python<'_>, name: &str) -> PyResult<()> {
        self.with(py, |engine| {
            engine.check_writable()?;
            engine.single()?.drop_checkpoint(name)
        })
    }

    fn last_checkpoint(&self, py: Python<'_>) -> PyResult<Option<(u64, String)>> {
        self.with(py, |engine| {
            Ok(engine.engine().last_checkpoint().map(|info| (info.number, info.name.clone())))
        })
    }

    fn attachment_names(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        self.with(py, |engine| engine.engine().attachment_names())
    }

    fn attachment<'py>(
        &self,
        py: Python<'py>,
        name: &str,
    ) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let bytes = self.with(py, |engine| engine.engine_mut().attachment(name))?;
        Ok(bytes.map(|bytes| PyBytes::new(py, &bytes)))
    }

    #[pyo3(signature = (
        path, attachments, progress, base=None, changes="auto", placements=Vec::new(),
        codecs=Vec::new(), heads=Vec::new(), shards=None
    ))]
    #[expect(clippy::too_many_arguments, reason = "as in Python")]
    fn publish(
        &self,
        py: Python<'_>,
        path: PathBuf,
        attachments: Vec<(String, Vec<u8>)>,
        progress: Option<Py<PyAny>>,
        base: Option<Vec<PathBuf>>,
        changes: &str,
        placements: Vec<(Vec<u32>, PathBuf)>,
        codecs: Vec<(u32, String)>,
        heads: Vec<(u32, String)>,
        shards: Option<Plain<GivenShards>>,
    ) -> PyResult<Plain<Report>> {
        let mut told = Progress::new(progress);
        let mut tell = |done: u64, total: u64| told.tell(done, total).is_ok();
        let result = self.with(py, |engine| {
            let (parts, tell) = (borrowed(&attachments), &mut tell);
            let mut layout = read_layout(&placements, &codecs, &heads)?;
            layout.shards = shards.map(|Plain(given)| given.plan()).transpose()?;
            let find_by = FindBy::from_name(changes)?;
            let report = match base {
                None => engine.engine_mut().publish_placed(&path, layout, &parts, tell)?,
                Some(base) => {
                    check_delta_layout(&layout, !codecs.is_empty())?;
                    let base = open_base(&base, find_by)?;
                    engine.engine_mut().publish_delta(&path, base, &parts, tell)?
                }
            };
            Ok(Plain(report))
        });
        told.finish(result)
    }

    fn verify(&self, py: Python<'_>) -> PyResult<u64> {
        self.with(py, ShardedEngine::verify)
    }

    fn stats(&self, py: Python<'_>) -> PyResult<Plain<serde_json::Value>> {
        self.with(py, |engine| engine.engine_mut().stats().map(Plain))
    }

    fn follow(
        &self,
        plan: &Bound<'_, FeaturePlan>,
        source: String,
        window_batches_max: u32,
    ) -> PyResult<Plain<Answer>> {
        let request = PlanRequest { source, window_batches_max };
        let features = &plan.get().plan;
        self.with(plan.py(), |engine| engine.writable()?.follow(features, &request).map(Plain))
    }

    fn start_plan(
        &self,
        plan: &Bound<'_, FeaturePlan>,
        source: String,
        window_batches_max: u32,
    ) -> PyResult<()> {
        let request = PlanRequest { source, window_batches_max };
        let features = &plan.get().plan;
        self.with(plan.py(), |engine| engine.writable()?.start_plan(features, &request))
    }

    #[pyo3(signature = (plan, indices, offsets, is_stepped=true))]
    fn push_planned(
        &self,
        plan: &Bound<'_, FeaturePlan>,
        indices: &Bound<'_, PyAny>,
        offsets: &Bound<'_, PyAny>,
        is_stepped: bool,
    ) -> PyResult<()> {
        let py = plan.py();
        let batch = BatchTensors::import(indices, offsets, None)?;
        let bags = batch.bags(plan.get().plan.features().len());
        let bags = bags.map_err(|error| to_python(py, &error))?;
        self.with(py, |engine| engine.writable()?.push_planned(&bags, is_stepped))
    }

    fn finish_plan(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, |engine| engine.writable()?.finish_plan())
    }

    fn position(&self, py: Python<'_>) -> PyResult<Option<(u64, u64)>> {
        self.with(py, |engine| Ok(engine.engine().position()))
    }

    fn pass_planned(
        &self,
        plan: &Bound<'_, FeaturePlan>,
        indices: &Bound<'_, PyAny>,
        offsets: &Bound<'_, PyAny>,
    ) -> PyResult<Option<(u64, u64)>> {
        let py = plan.py();
        let batch = BatchTensors::import(indices, offsets, None)?;
        let plan = &plan.get().plan;
        let bags = batch.bags(plan.features().len()).map_err(|error| to_python(py, &error))?;
        self.with(py, |engine| {
            let engine = engine.writable()?;
            engine.skip(plan, &bags)?;
            Ok(engine.position())
        })
    }

    fn expect_joined(
        &self,
        plan: &Bound<'_, FeaturePlan>,
        indices: &Bound<'_, PyAny>,
        offsets: &Bound<'_, PyAny>,
    ) -> PyResult<bool> {
        let py = plan.py();
        let batch = BatchTensors::import(indices, offsets, None)?;
        let plan = &plan.get().plan;
        let bags = batch.bags(plan.features().len()).map_err(|error| to_python(py, &error))?;
        self.with(py, |engine| {
            engine.check_writable()?;
            engine.single()?.expect_joined(plan, &bags)
        })
    }

    fn end_joined(&self, py: Python<'_>) -> PyResult<bool> {
        self.with(py, |engine| engine.single()?.end_joined())
    }

    fn pass_planned_to(&self, py: Python<'_>, batch: u64) -> PyResult<()> {
        self.with(py, |engine| engine.writable()?.skip_to(batch))
    }

    fn note_reason(&self, py: Python<'_>, reason: &str) -> PyResult<()> {
        self.with(py, |engine| {
            engine.engine_mut().note_reason(reason);
            Ok(())
        })
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        // What a forked child has of a store is closed already: it was never open there.
        if !self.engine.is_here() {
            return Ok(());
        }
        let begun = self.begin(py);
        if begun.is_err() && self.calls.check_free().is_err() {
            return begun;
        }
        // The store closes whatever the update before it came to, which is raised after.
        run(py, || {
            drop(self.locked()?.engine.take());
            Ok(())
        })?;
        begun
    }
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct GivenHyper {
    lr: f64,
    eps: f64,
    beta1: f64,
    beta2: f64,
    weight_decay: f64,
}

pub(crate) fn named_pooling(name: &str) -> Result<Pooling> {
    match name {
        "sum" => Ok(Pooling::Sum),
        "mean" => Ok(Pooling::Mean),
        "none" => Ok(Pooling::None),
        other => Err(Error::invalid("unknown pooling")
            .with("found", other)
            .with("allowed", "sum, mean, none")),
    }
}

pub(crate) fn make_plan(
    schema: &tierbed_core::Schema,
    tables: &[u32],
    poolings: &[String],
) -> Result<FeaturePlan> {
    if tables.len() != poolings.len() {
        return Err(Error::invalid("one pooling per table")
            .with("tables", tables.len())
            .with("poolings", poolings.len()));
    }
    let mut features = Vec::with_capacity(tables.len());
    for (table, pooling) in tables.iter().zip(poolings) {
        features.push((TableId(*table), named_pooling(pooling)?));
    }
    Ok(FeaturePlan { plan: tierbed_kernels::FeatureLayout::new(schema, &features)? })
}

pub(crate) fn borrowed(attachments: &[(String, Vec<u8>)]) -> Vec<Attachment<'_>> {
    attachments.iter().map(|(name, bytes)| Attachment { name, bytes }).collect()
}

fn shape_of(engine: &ShardedEngine, table: u32) -> Result<(usize, usize)> {
    let table = engine.engine().schema().table(TableId(table))?;
    let dim = table.dim as usize;
    Ok((dim, table.optimizer.state_words(dim)))
}

fn rows_in(len: usize, dim: usize, name: &str) -> Result<usize> {
    if len.is_multiple_of(dim) {
        return Ok(len / dim);
    }
    Err(Error::invalid("argument does not hold whole rows")
        .with("argument", name)
        .with("values", len)
        .with("embedding_dim", dim))
}

fn check_state(state: Option<&[f32]>, rows: usize, state_words: usize) -> Result<()> {
    match state {
        Some(state) if state.len() != rows * state_words => {
            Err(Error::invalid("state must hold the optimizer state of every row")
                .with("rows", rows)
                .with("state_per_row", state_words)
                .with("found_values", state.len()))
        }
        _ => Ok(()),
    }
}
