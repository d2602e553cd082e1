//! The exchange between ranks, for Python.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pyo3::prelude::*;
use serde::Deserialize;
use tierbed_core::env::SystemClock;
use tierbed_core::{Bags, Error, Result};
use tierbed_exchange::{
    Arrivals, Exchange, ExchangePlan, Group, Layout, Limits, LocalHeap, LookupRows, Pad, Precision,
    ShardedTable, Sharding, ShmHeap, SymmetricHeap, UpdateRows, Wants,
};
use tierbed_io::process::Owned;
use tierbed_kernels::Destination;
use tierbed_train::window::update::Grads;
use tierbed_train::window::{FeatureLayout, Pooling};
use tierbed_train::{AutoEngine, CodedTables, TrainEngine};

use crate::batch::{BatchTensors, FeaturePlan};
use crate::coded::{no_training, NativeCodedTables};
use crate::errors::{run, to_python};
use crate::plain::Plain;
use crate::store::{named_pooling, NativeStore};
use crate::tensors::{check_disjoint, Tensor};

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<NativeExchangePlan>()?;
    module.add_class::<NativeHeap>()?;
    module.add_class::<NativeArrivals>()?;
    module.add_class::<NativeExchange>()
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
    Columns { bounds: Vec<usize> },
    Mirrored,
}

impl From<GivenSharding> for Sharding {
    fn from(given: GivenSharding) -> Self {
        match given {
            GivenSharding::Whole { rank } => Self::Whole { rank },
            GivenSharding::Rows { bounds } => Self::Rows { bounds },
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
}

#[pymethods]
impl NativeExchangePlan {
    #[new]
    fn new(
        py: Python<'_>,
        plan: Plain<GivenPlan>,
        samples_max: usize,
        indices_max: usize,
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
            let layout = Layout::new(&plan, Limits { samples_max, indices_max })?;
            Ok(Self { plan, layout })
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

    /// Whether every table is held whole by one rank.
    #[getter]
    fn is_all_whole(&self) -> bool {
        let is_whole = |table: &ShardedTable| matches!(table.sharding, Sharding::Whole { .. });
        self.plan.tables().iter().all(is_whole)
    }

    /// Returns feature, first output column and columns of what `rank` looks up, in order.
    fn features(&self, rank: usize) -> Vec<(usize, usize, usize)> {
        let members = self.plan.groups(rank).iter().flat_map(|group| &group.members);
        members.map(|member| (member.feature, member.output_column, member.dim)).collect()
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
    fn create(py: Python<'_>, rank_count: usize, region_bytes: usize) -> PyResult<Self> {
        let heap = run(py, || ShmHeap::create(rank_count, region_bytes))?;
        Ok(Self { path: Some(heap.path()), heap: Arc::new(heap) })
    }

    #[staticmethod]
    fn open(py: Python<'_>, path: PathBuf, rank_count: usize) -> PyResult<Self> {
        let heap = run(py, || ShmHeap::open(&path, rank_count))?;
        Ok(Self { heap: Arc::new(heap), path: Some(path) })
    }

    #[getter]
    fn path(&self) -> Option<PathBuf> {
        self.path.clone()
    }
}

/// What a rank looks up.
#[derive(FromPyObject)]
enum RankStore<'py> {
    Trained(Bound<'py, NativeStore>),
    Coded(Bound<'py, NativeCodedTables>),
}

/// The rows that a rank holds.
enum HeldRows<'a> {
    Trained(&'a mut AutoEngine),
    Coded(&'a mut CodedTables),
}

/// The rows that a rank holds, group by group.
struct GroupRows<'a> {
    rows: HeldRows<'a>,
    plans: &'a [FeatureLayout],
    is_training: bool,
}

fn plan_of(plans: &[FeatureLayout], group: usize) -> Result<&FeatureLayout> {
    plans.get(group).ok_or_else(|| Error::invalid("no such group"))
}

impl LookupRows for GroupRows<'_> {
    fn lookup(&mut self, group: usize, bags: &Bags<'_>, to: &mut impl Destination) -> Result<()> {
        let plan = plan_of(self.plans, group)?;
        match &mut self.rows {
            HeldRows::Trained(engine) => {
                engine.lookup_to(plan, bags, to, self.is_training).map(drop)
            }
            HeldRows::Coded(tables) => tables.lookup_to(plan, bags, to),
        }
    }
}

impl UpdateRows for GroupRows<'_> {
    fn update(
        &mut self,
        group: usize,
        bags: &Bags<'_>,
        grads: &[f32],
        weight_grads: Option<&mut [f32]>,
    ) -> Result<()> {
        let plan = plan_of(self.plans, group)?;
        match &mut self.rows {
            HeldRows::Trained(engine) => {
                let grads = Grads { output: grads, weights: weight_grads };
                engine.update(plan, bags, grads, None)
            }
            HeldRows::Coded(_) => Err(no_training()),
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
    let pad = Pad::new(heap.heap.clone(), rank, clock, Duration::from_millis(timeout_ms))?;
    Exchange::new(plan.plan.clone(), plan.layout.clone(), pad)
}

/// An output on its way, part by part.
#[pyclass(frozen, module = "tierbed._native")]
pub(crate) struct NativeArrivals {
    arrivals: Arrivals,
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
    exchange: Owned<Mutex<Exchange>>,
    feature_count: usize,
    plans: Vec<FeatureLayout>,
}

impl NativeExchange {
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        store: &RankStore<'_>,
        is_training: bool,
        work: impl FnOnce(&mut Exchange, &mut GroupRows<'_>) -> Result<T> + Send,
    ) -> PyResult<T> {
        let (lock, plans) = (&self.exchange, self.plans.as_slice());
        let work = |rows: HeldRows<'_>| {
            let mut exchange = lock.lock()?;
            work(&mut exchange, &mut GroupRows { rows, plans, is_training })
        };
        match store {
            RankStore::Trained(store) => {
                store.get().with(py, |engine| work(HeldRows::Trained(engine.single()?)))
            }
            RankStore::Coded(tables) => {
                tables.get().with(py, |tables| work(HeldRows::Coded(tables)))
            }
        }
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
        Ok(Self { exchange: owned(exchange), feature_count, plans })
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
        let bags = batch.bags(self.feature_count).map_err(|error| to_python(py, &error))?;
        let output = self.with(py, &store, wants_backward, |exchange, rows| {
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
        let bags = batch.bags(self.feature_count).map_err(|error| to_python(py, &error))?;
        let arrivals = run(py, || {
            let mut exchange = self.exchange.lock()?;
            exchange.forward_parts(&bags, wants, parts)
        })?;
        Ok(NativeArrivals { arrivals })
    }

    /// Looks up the parts of the lookup that was begun, for all ranks.
    fn serve(&self, py: Python<'_>, store: RankStore<'_>, is_training: bool) -> PyResult<()> {
        self.with(py, &store, is_training, |exchange, rows| exchange.serve(rows))
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
        self.with(py, &store, true, |exchange, rows| exchange.backward(step, grad, place, rows))
    }

    fn set_timeout_ms(&self, py: Python<'_>, timeout_ms: u64) -> PyResult<()> {
        run(py, || {
            let mut exchange = self.exchange.lock()?;
            exchange.set_timeout(Duration::from_millis(timeout_ms));
            Ok(())
        })
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        run(py, || match self.exchange.is_here() {
            true => self.exchange.lock()?.close(),
            // The rank is another process; the other ranks must not hear of this.
            false => Ok(()),
        })
    }
}
