//! The exchange between ranks, for Python.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pyo3::prelude::*;
use serde::Deserialize;
use tierbed_core::env::SystemClock;
use tierbed_core::{Bags, Error, ErrorKind, Result};
use tierbed_exchange::protocol::Turns;
use tierbed_exchange::{
    Arrivals, Exchange, ExchangePlan, Group, Layout, Limits, LocalHeap, LookupRows, Nodes, Pad,
    Precision, ShardedTable, Sharding, ShmHeap, StepRows, SymmetricHeap, UpdateRows, Wants,
};
use tierbed_io::process::Owned;
use tierbed_kernels::Destination;
use tierbed_train::planned::Piece;
use tierbed_train::window::update::Grads;
use tierbed_train::window::{FeatureLayout, Pooling};
use tierbed_train::{AutoEngine, CodedTables, PlanFollower, TrainEngine};

use crate::batch::{BatchTensors, FeaturePlan};
use crate::coded::{no_training, NativeCodedTables};
use crate::errors::{run, to_python};
use crate::plain::Plain;
use crate::rails::NativeRail;
use crate::store::{named_pooling, NativeStore};
use crate::tensors::{check_disjoint, Tensor};

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<NativeExchangePlan>()?;
    module.add_class::<NativeHeap>()?;
    module.add_class::<NativeArrivals>()?;
    module.add_class::<NativeExchange>()?;
    module.add_class::<NativeRail>()
}

/// A plan as Python describes it.
#[derive(Deserialize)]
struct GivenPlan {
    ranks: usize,
    tables: Vec<GivenTable>,
    features: Vec<(usize, String)>,
    outputs: String,
    rows: String,
}

#[derive(Deserialize)]
struct GivenTable {
    row_count: u64,
    dim: usize,
    sharding: GivenSharding,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
enum GivenSharding {
    Whole { rank: usize },
    Rows { bounds: Vec<u64> },
    Blocks { block_rows: u64 },
    Columns { bounds: Vec<usize> },
    Mirrored,
}

impl From<GivenSharding> for Sharding {
    fn from(given: GivenSharding) -> Self {
        match given {
            GivenSharding::Whole { rank } => Self::Whole { rank },
            GivenSharding::Rows { bounds } => Self::Rows { bounds },
            GivenSharding::Blocks { block_rows } => Self::Blocks { block_rows },
            GivenSharding::Columns { bounds } => Self::Columns { bounds },
            GivenSharding::Mirrored => Self::Mirrored,
        }
    }
}

/// Who holds what, and the largest batch of a rank.
#[pyclass(frozen, module = "tierbed._native")]
pub(crate) struct NativeExchangePlan {
    pub(crate) plan: ExchangePlan,
    layout: Layout,
    /// As the ranks of the first node see them.
    nodes: Nodes,
}

#[pymethods]
impl NativeExchangePlan {
    /// Of `node_count` nodes of equally many ranks.
    #[new]
    fn new(
        py: Python<'_>,
        plan: Plain<GivenPlan>,
        samples_max: usize,
        indices_max: usize,
        node_count: usize,
    ) -> PyResult<Self> {
        run(py, || {
            let Plain(given) = plan;
            let table = |given: GivenTable| ShardedTable {
                row_count: given.row_count,
                dim: given.dim,
                sharding: given.sharding.into(),
            };
            let tables = given.tables.into_iter().map(table).collect();
            let features = given.features.iter();
            let features = features.map(|(table, pooling)| Ok((*table, named_pooling(pooling)?)));
            let features = features.collect::<Result<Vec<_>>>()?;
            let precision = [&given.outputs, &given.rows].map(|name| Precision::by_name(name));
            let [outputs, rows] = precision;
            let plan = ExchangePlan::new(given.ranks, tables, features)?
                .with_precision(outputs?, rows?)?;
            let limits = Limits { samples_max, indices_max };
            let ranks_each = given.ranks.checked_div(node_count).unwrap_or(0);
            let nodes = Nodes::new(0, node_count, ranks_each)?;
            let layout = Layout::of_nodes(&plan, limits, Turns::new(2), nodes)?;
            Ok(Self { plan, layout, nodes })
        })
    }

    #[getter]
    fn output_dim(&self) -> usize {
        self.plan.output_dim()
    }

    #[getter]
    fn region_bytes(&self) -> usize {
        self.layout.region_bytes()
    }

    /// Returns per group of `rank` table and pooling of each member.
    fn groups(&self, rank: usize) -> Vec<Vec<(usize, &'static str)>> {
        let pooling = |pooling| match pooling {
            Pooling::Sum => "sum",
            Pooling::Mean => "mean",
            Pooling::None => "none",
        };
        let members = |group: &Group| {
            group.members.iter().map(|member| (member.table, pooling(member.pooling))).collect()
        };
        self.plan.groups(rank).iter().map(members).collect()
    }
}

/// Memory that all ranks share.
#[pyclass(frozen, module = "tierbed._native")]
pub(crate) struct NativeHeap {
    heap: Arc<dyn SymmetricHeap>,
    path: Option<PathBuf>,
}

#[pymethods]
impl NativeHeap {
    #[staticmethod]
    fn local(py: Python<'_>, rank_count: usize, region_bytes: usize) -> PyResult<Self> {
        let heap = run(py, || LocalHeap::new(rank_count, region_bytes))?;
        Ok(Self { heap: Arc::new(heap), path: None })
    }

    #[staticmethod]
    fn create(
        py: Python<'_>,
        rank_count: usize,
        region_bytes: usize,
        token: u64,
    ) -> PyResult<Self> {
        let heap = run(py, || ShmHeap::create(rank_count, region_bytes, token))?;
        Ok(Self { path: Some(heap.path()), heap: Arc::new(heap) })
    }

    #[staticmethod]
    fn open(py: Python<'_>, path: PathBuf, rank_count: usize, token: u64) -> PyResult<Self> {
        let heap = run(py, || ShmHeap::open(&path, rank_count, token))?;
        Ok(Self { heap: Arc::new(heap), path: Some(path) })
    }

    #[getter]
    fn path(&self) -> Option<PathBuf> {
        self.path.clone()
    }
}

/// What a rank looks up.
#[derive(FromPyObject)]
pub(crate) enum RankStore<'py> {
    Trained(Bound<'py, NativeStore>),
    Coded(Bound<'py, NativeCodedTables>),
}

/// The rows that a rank holds.
pub(crate) enum HeldRows<'a> {
    Trained(&'a mut AutoEngine),
    Coded(&'a mut CodedTables),
}

/// The rows that a rank holds, group by group.
pub(crate) struct GroupRows<'a> {
    rows: HeldRows<'a>,
    plans: &'a [FeatureLayout],
    is_training: bool,
    /// All rows of the step, where training follows a plan.
    planned: Option<StepRows>,
}

impl GroupRows<'_> {
    fn begin_step(&mut self, rows: impl FnOnce() -> StepRows) -> Result<()> {
        self.planned = None;
        let HeldRows::Trained(engine) = &mut self.rows else { return Ok(()) };
        if engine.follows_plan() {
            let rows = rows();
            let layout = joined_layout(engine, self.plans)?;
            if let Some(layout) = layout {
                let bags = joined_bags(&rows, &layout)?;
                let is_planned = engine.expect_pieces(&layout, &bags)?;
                self.planned = is_planned.then_some(rows);
            }
        }
        Ok(())
    }
}

/// Returns the features of all groups as those of one batch; `None` where a rank holds nothing.
pub(crate) fn joined_layout(
    engine: &AutoEngine,
    plans: &[FeatureLayout],
) -> Result<Option<FeatureLayout>> {
    let features = plans.iter().flat_map(FeatureLayout::features);
    // Only rows are named: how they are pooled does not matter.
    let features: Vec<_> = features.map(|feature| (feature.table, Pooling::Sum)).collect();
    if features.is_empty() {
        return Ok(None);
    }
    FeatureLayout::new(engine.schema(), &features).map(Some)
}

fn joined_bags<'a>(rows: &'a StepRows, layout: &FeatureLayout) -> Result<Bags<'a>> {
    Bags::new(&rows.indices, &rows.offsets, None, layout.features().len())
}

fn plan_of(plans: &[FeatureLayout], group: usize) -> Result<&FeatureLayout> {
    plans.get(group).ok_or_else(|| Error::invalid("no such group"))
}

/// Returns group `group` of the step that has `rows`.
fn piece_of<'a>(
    plans: &'a [FeatureLayout],
    rows: &'a StepRows,
    group: usize,
    bags: &'a Bags<'a>,
) -> Result<Piece<'a>> {
    let before = plans.iter().take(group);
    Ok(Piece {
        batch: Some(&rows.indices),
        first_feature: before.map(|plan| plan.features().len()).sum(),
        layout: plan_of(plans, group)?,
        bags,
    })
}

impl LookupRows for GroupRows<'_> {
    fn begin(&mut self, rows: impl FnOnce() -> StepRows) -> Result<()> {
        self.begin_step(rows)
    }

    fn pass(&mut self, count: usize) {
        if let HeldRows::Trained(engine) = &mut self.rows {
            engine.note_looked_up(count);
        }
    }

    fn lookup(&mut self, group: usize, bags: &Bags<'_>, to: &mut impl Destination) -> Result<()> {
        let plan = plan_of(self.plans, group)?;
        match (&mut self.rows, &self.planned) {
            (HeldRows::Trained(engine), Some(rows)) => {
                engine.lookup_piece(piece_of(self.plans, rows, group, bags)?, to)
            }
            (HeldRows::Trained(engine), None) => {
                engine.lookup_to(plan, bags, to, self.is_training).map(drop)
            }
            (HeldRows::Coded(tables), _) => tables.lookup_to(plan, bags, to),
        }
    }
}

impl UpdateRows for GroupRows<'_> {
    fn begin(&mut self, rows: impl FnOnce() -> StepRows) -> Result<()> {
        self.begin_step(rows)
    }

    fn update(
        &mut self,
        group: usize,
        bags: &Bags<'_>,
        grads: &[f32],
        weight_grads: Option<&mut [f32]>,
    ) -> Result<()> {
        let plan = plan_of(self.plans, group)?;
        let grads = Grads { output: grads, weights: weight_grads };
        match (&mut self.rows, &self.planned) {
            (HeldRows::Trained(engine), Some(rows)) => {
                engine.update_piece(piece_of(self.plans, rows, group, bags)?, grads)
            }
            (HeldRows::Trained(engine), None) => engine.update(plan, bags, grads, None),
            (HeldRows::Coded(_), _) => Err(no_training()),
        }
    }

    fn finish(&mut self) -> Result<()> {
        match (&mut self.rows, self.planned.take()) {
            (HeldRows::Trained(engine), Some(_)) => engine.finish_pieces(),
            _ => Ok(()),
        }
    }
}

/// A rank is one process: dropping a copy of it must tell the others nothing.
pub(crate) fn owned<T>(rank: T) -> Owned<Mutex<T>> {
    Owned::new(Mutex::new(rank), "this rank", "look up in the process of the rank")
}

pub(crate) fn join(
    plan: &NativeExchangePlan,
    heap: &NativeHeap,
    rank: usize,
    timeout_ms: u64,
) -> Result<Exchange> {
    let clock = Arc::new(SystemClock::default());
    let ranks_each = plan.nodes.ranks_each();
    let nodes = Nodes::new(rank, plan.nodes.count(), ranks_each)?;
    let timeout = Duration::from_millis(timeout_ms);
    let pad = Pad::new(heap.heap.clone(), rank % ranks_each, clock, timeout)?;
    Exchange::of_nodes(plan.plan.clone(), plan.layout.clone(), pad, nodes)
}

/// An output on its way, part by part.
#[pyclass(frozen, module = "tierbed._native")]
pub(crate) struct NativeArrivals {
    pub(crate) arrivals: Arrivals,
}

#[pymethods]
impl NativeArrivals {
    /// Number of the step.
    #[getter]
    fn step(&self) -> u64 {
        self.arrivals.place().step
    }

    /// Address of the first number.
    #[getter]
    fn address(&self) -> usize {
        self.arrivals.place().address
    }

    /// First sample of `part`, and the one behind its last.
    fn samples(&self, part: usize) -> (usize, usize) {
        let samples = self.arrivals.samples(part);
        (samples.start, samples.end)
    }

    /// Waits until `part` is complete.
    fn wait(&self, py: Python<'_>, part: usize) -> PyResult<()> {
        run(py, || self.arrivals.wait(part).map(|_| ()))
    }
}

/// One rank of an exchange over a store.
#[pyclass(frozen, module = "tierbed._native")]
pub(crate) struct NativeExchange {
    rank: RankExchange,
}

/// Whether `error` says that the store is closed.
fn is_closed(py: Python<'_>, error: &PyErr) -> bool {
    let kind = error.value(py).getattr("kind").and_then(|kind| kind.extract::<String>());
    kind.is_ok_and(|kind| kind == ErrorKind::Closed.name())
}

/// A rank, and what it looks up.
#[derive(Clone)]
pub(crate) struct RankExchange {
    pub(crate) exchange: Arc<Owned<Mutex<Exchange>>>,
    pub(crate) feature_count: usize,
    plans: Arc<Vec<FeatureLayout>>,
}

impl RankExchange {
    /// Runs `work` on the exchange alone.
    pub(crate) fn run<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut Exchange) -> Result<T> + Send,
    ) -> PyResult<T> {
        run(py, || work(&mut *self.exchange.lock()?))
    }

    /// Runs `work` on the exchange and the rows.
    pub(crate) fn with<T: Send>(
        &self,
        py: Python<'_>,
        store: &RankStore<'_>,
        is_training: bool,
        work: impl FnOnce(&mut Exchange, &mut GroupRows<'_>) -> Result<T> + Send,
    ) -> PyResult<T> {
        let (lock, plans) = (&self.exchange, self.plans.as_slice());
        let work = |rows: HeldRows<'_>| {
            let mut exchange = lock.lock()?;
            work(&mut exchange, &mut GroupRows { rows, plans, is_training, planned: None })
        };
        let result = match store {
            RankStore::Trained(store) => {
                store.get().with(py, |engine| work(HeldRows::Trained(engine.single()?)))
            }
            RankStore::Coded(tables) => {
                tables.get().with(py, |tables| work(HeldRows::Coded(tables)))
            }
        };
        if let Err(error) = &result {
            if is_closed(py, error) {
                // No later call can succeed: the other ranks need not wait for one.
                self.run(py, |exchange| {
                    exchange.fail("the store of this rank is closed");
                    Ok(())
                })?;
            }
        }
        result
    }

    /// Brings the rows of the next `count` announced batches; returns how many fit.
    fn bring(&self, engine: &mut AutoEngine, count: usize) -> Result<usize> {
        let rows = self.exchange.lock()?.rows_to_bring(count);
        self.prefetch(engine, &rows)
    }

    fn prefetch(&self, engine: &mut AutoEngine, rows: &[StepRows]) -> Result<usize> {
        let Some(layout) = joined_layout(engine, &self.plans)? else { return Ok(rows.len()) };
        let bags = rows.iter().map(|rows| joined_bags(rows, &layout));
        let bags = bags.collect::<Result<Vec<_>>>()?;
        engine.prefetch_pieces(&layout, &bags)
    }

    /// Does `work` on the rows of the batch that was announced last, which is to be planned.
    fn with_planned(
        &self,
        engine: &mut AutoEngine,
        work: impl FnOnce(&mut AutoEngine, &FeatureLayout, &Bags<'_>) -> Result<()>,
    ) -> Result<()> {
        let mut exchange = self.exchange.lock()?;
        let rows = exchange.take_to_plan()?;
        let Some(layout) = joined_layout(engine, &self.plans)? else { return Ok(()) };
        let result = joined_bags(&rows, &layout).and_then(|bags| work(engine, &layout, &bags));
        result.inspect_err(|error| exchange.fail(&error.to_string()))
    }

    /// Keeps the rows of the first `agreed` of `fit` batches, which all ranks brought.
    fn keep_brought(&self, engine: &mut AutoEngine, fit: usize, agreed: usize) -> Result<()> {
        let mut exchange = self.exchange.lock()?;
        let (_, before) = exchange.announced();
        exchange.note_brought(agreed);
        if agreed < fit {
            // The rest is announced again with the next batches.
            let rows = exchange.brought_rows();
            drop(exchange);
            engine.end_lookahead();
            let again = self.prefetch(engine, &rows)?;
            assert!(again >= before, "what was brought before fits again");
        }
        Ok(())
    }
}

#[pymethods]
impl NativeExchange {
    #[new]
    fn new(
        plan: &Bound<'_, NativeExchangePlan>,
        heap: &Bound<'_, NativeHeap>,
        rank: usize,
        timeout_ms: u64,
        groups: Vec<PyRef<'_, FeaturePlan>>,
    ) -> PyResult<Self> {
        let plans = groups.iter().map(|group| group.plan.clone()).collect();
        let (heap, inner) = (heap.get(), plan.get());
        let exchange = run(plan.py(), || join(inner, heap, rank, timeout_ms))?;
        let feature_count = inner.plan.feature_count();
        let exchange = Arc::new(owned(exchange));
        Ok(Self { rank: RankExchange { exchange, feature_count, plans: Arc::new(plans) } })
    }

    /// Returns this rank's messages to other nodes.
    fn rail(&self) -> NativeRail {
        NativeRail { rank: self.rank.clone() }
    }

    /// Announces a batch together with the ranks of one node.
    #[pyo3(signature = (indices, offsets, weights))]
    fn announce(
        &self,
        indices: &Bound<'_, PyAny>,
        offsets: &Bound<'_, PyAny>,
        weights: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let py = indices.py();
        let batch = BatchTensors::import(indices, offsets, weights)?;
        let bags = batch.bags(self.rank.feature_count).map_err(|error| to_python(py, &error))?;
        self.rank.run(py, |exchange| exchange.announce(&bags))
    }

    /// Returns how many batches are announced, and how many of them were brought.
    fn announced(&self, py: Python<'_>) -> PyResult<(usize, usize)> {
        self.rank.run(py, |exchange| Ok(exchange.announced()))
    }

    /// Returns whether a batch is announced batch number `at`.
    #[pyo3(signature = (at, indices, offsets, weights))]
    fn is_announced(
        &self,
        at: usize,
        indices: &Bound<'_, PyAny>,
        offsets: &Bound<'_, PyAny>,
        weights: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<bool> {
        let py = indices.py();
        let batch = BatchTensors::import(indices, offsets, weights)?;
        let bags = batch.bags(self.rank.feature_count).map_err(|error| to_python(py, &error))?;
        self.rank.run(py, |exchange| Ok(exchange.is_announced(at, &bags)))
    }

    /// Brings the rows of the next `count` announced batches into memory; returns how many fit.
    /// Where training follows a plan, it brings rows that are looked up beside it.
    fn bring(&self, store: &Bound<'_, NativeStore>, count: usize) -> PyResult<usize> {
        store.get().with(store.py(), |engine| self.rank.bring(engine.single()?, count))
    }

    /// Keeps the first `agreed` of the `fit` batches that were brought.
    fn keep_brought(
        &self,
        store: &Bound<'_, NativeStore>,
        fit: usize,
        agreed: usize,
    ) -> PyResult<()> {
        store.get().with(store.py(), |engine| self.rank.keep_brought(engine.single()?, fit, agreed))
    }

    /// Forgets the batch that was announced last, of which another rank makes a plan.
    fn pass_announced(&self, py: Python<'_>) -> PyResult<()> {
        self.rank.run(py, |exchange| exchange.take_to_plan().map(drop))
    }

    /// Adds the rows of the batch that was announced last to the plan that the store makes.
    fn push_planned(&self, store: &Bound<'_, NativeStore>) -> PyResult<()> {
        store.get().with(store.py(), |engine| {
            let push = |engine: &mut AutoEngine, _: &FeatureLayout, bags: &Bags<'_>| {
                engine.push_planned(bags, true)
            };
            self.rank.with_planned(engine.single()?, push)
        })
    }

    /// Passes the batch that was announced last, the next one of the plan, without a step.
    fn pass_planned(&self, store: &Bound<'_, NativeStore>) -> PyResult<()> {
        store.get().with(store.py(), |engine| {
            let pass = |engine: &mut AutoEngine, layout: &FeatureLayout, bags: &Bags<'_>| {
                engine.skip(layout, bags)
            };
            self.rank.with_planned(engine.single()?, pass)
        })
    }

    /// Forgets announced batches up to `number`, counted from 1, which the next lookup is of.
    fn skip_announced(&self, py: Python<'_>, number: usize) -> PyResult<()> {
        self.rank.run(py, |exchange| exchange.skip_announced(number))
    }

    /// Makes sure that a batch may be looked up now, before anything of it is sent.
    #[pyo3(signature = (indices, offsets, weights))]
    fn check_batch(
        &self,
        indices: &Bound<'_, PyAny>,
        offsets: &Bound<'_, PyAny>,
        weights: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let py = indices.py();
        let batch = BatchTensors::import(indices, offsets, weights)?;
        let bags = batch.bags(self.rank.feature_count).map_err(|error| to_python(py, &error))?;
        self.rank.run(py, |exchange| exchange.check_batch(&bags))
    }

    /// Breaks the exchange: `cause` kept this rank from its part in a call of all ranks.
    fn fail(&self, py: Python<'_>, cause: &str) -> PyResult<()> {
        self.rank.run(py, |exchange| {
            exchange.fail(cause);
            Ok(())
        })
    }

    /// Forgets announced batches behind the first `kept`.
    fn forget_announced(&self, py: Python<'_>, kept: usize) -> PyResult<()> {
        self.rank.run(py, |exchange| {
            exchange.forget_announced(kept);
            Ok(())
        })
    }

    /// Tells the ranks of the node a number; returns the smallest and the largest one.
    fn agree(&self, py: Python<'_>, number: u64) -> PyResult<(u64, u64)> {
        let agreed = self.rank.run(py, |exchange| exchange.agree(number))?;
        Ok((agreed.least, agreed.most))
    }

    #[pyo3(signature = (store, indices, offsets, weights, wants_backward, wants_weight_grads))]
    #[expect(clippy::too_many_arguments, reason = "one argument per tensor, as in Python")]
    fn forward(
        &self,
        py: Python<'_>,
        store: RankStore<'_>,
        indices: &Bound<'_, PyAny>,
        offsets: &Bound<'_, PyAny>,
        weights: Option<&Bound<'_, PyAny>>,
        wants_backward: bool,
        wants_weight_grads: bool,
    ) -> PyResult<(u64, usize, usize)> {
        let batch = BatchTensors::import(indices, offsets, weights)?;
        let wants = Wants { backward: wants_backward, weight_grads: wants_weight_grads };
        let bags = batch.bags(self.rank.feature_count).map_err(|error| to_python(py, &error))?;
        let output = self.rank.with(py, &store, wants_backward, |exchange, rows| {
            exchange.forward(&bags, wants, rows)
        })?;
        Ok((output.step, output.address, output.sample_count))
    }

    /// Begins a lookup that completes in parts, which `serve` looks up.
    #[pyo3(signature = (indices, offsets, weights, wants_backward, wants_weight_grads, parts))]
    #[expect(clippy::too_many_arguments, reason = "one argument per tensor, as in Python")]
    fn forward_parts(
        &self,
        indices: &Bound<'_, PyAny>,
        offsets: &Bound<'_, PyAny>,
        weights: Option<&Bound<'_, PyAny>>,
        wants_backward: bool,
        wants_weight_grads: bool,
        parts: usize,
    ) -> PyResult<NativeArrivals> {
        let py = indices.py();
        let batch = BatchTensors::import(indices, offsets, weights)?;
        let wants = Wants { backward: wants_backward, weight_grads: wants_weight_grads };
        let bags = batch.bags(self.rank.feature_count).map_err(|error| to_python(py, &error))?;
        let arrivals = self.rank.run(py, |exchange| exchange.forward_parts(&bags, wants, parts))?;
        Ok(NativeArrivals { arrivals })
    }

    /// Looks up the parts of the lookup that was begun, for all ranks.
    fn serve(&self, py: Python<'_>, store: RankStore<'_>, is_training: bool) -> PyResult<()> {
        self.rank.with(py, &store, is_training, |exchange, rows| exchange.serve(rows))
    }

    #[pyo3(signature = (store, step, grad, weight_grads))]
    fn backward(
        &self,
        store: RankStore<'_>,
        step: u64,
        grad: &Bound<'_, PyAny>,
        weight_grads: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let py = grad.py();
        let grad = Tensor::<f32>::import(grad, "grad")?;
        let mut weight_grads =
            weight_grads.map(|tensor| Tensor::<f32>::import(tensor, "weight_grads")).transpose()?;
        let outputs: Vec<_> = weight_grads.iter().map(Tensor::place).collect();
        check_disjoint(&outputs, &[grad.place()]).map_err(|error| to_python(py, &error))?;
        let place = weight_grads.as_mut().map(Tensor::view_mut).transpose();
        let place = place.map_err(|error| to_python(py, &error))?;
        let grad = grad.view();
        self.rank
            .with(py, &store, true, |exchange, rows| exchange.backward(step, grad, place, rows))
    }

    fn set_timeout_ms(&self, py: Python<'_>, timeout_ms: u64) -> PyResult<()> {
        self.rank.run(py, |exchange| {
            exchange.set_timeout(Duration::from_millis(timeout_ms));
            Ok(())
        })
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let exchange = &self.rank.exchange;
        run(py, || match exchange.is_here() {
            true => exchange.lock()?.close(),
            // The rank is another process; the other ranks must not hear of this.
            false => Ok(()),
        })
    }
}
