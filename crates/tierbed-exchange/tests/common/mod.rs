//! Ranks as threads, rows as arrays, and what one process would compute.

#![allow(dead_code, reason = "each test binary uses a part")]
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test may panic")]

mod array_rows;
pub(crate) mod rail;

use std::sync::Arc;
use std::time::Duration;

use tierbed_core::env::{SplitMix64, SystemClock};
use tierbed_core::{Bags, Result};
use tierbed_exchange::{
    protocol::Turns, Exchange, ExchangePlan, Layout, Limits, LocalHeap, LookupRows, Nodes, Pad,
    ShardedTable, Sharding, SymmetricHeap, UpdateRows,
};
use tierbed_kernels::{Destination, Kernels, Pooling};

use array_rows::ArrayRows;

/// Learning rate of the tests' optimizer.
const RATE: f32 = 0.125;

/// The batch of one rank.
#[derive(Debug, Clone, Default)]
pub(crate) struct Batch {
    pub(crate) indices: Vec<i64>,
    pub(crate) offsets: Vec<i64>,
    pub(crate) weights: Option<Vec<f32>>,
    pub(crate) features: usize,
}

impl Batch {
    pub(crate) fn bags(&self) -> Bags<'_> {
        Bags::new(&self.indices, &self.offsets, self.weights.as_deref(), self.features).unwrap()
    }

    pub(crate) fn samples(&self) -> usize {
        (self.offsets.len() - 1) / self.features
    }

    /// Draws bags of 0 to `longest` ids for each feature's table.
    pub(crate) fn draw(
        rng: &mut SplitMix64,
        row_counts: &[u64],
        samples: usize,
        longest: u64,
        is_weighted: bool,
    ) -> Self {
        let mut batch = Self { offsets: vec![0], features: row_counts.len(), ..Self::default() };
        for &row_count in row_counts {
            for _ in 0..samples {
                for _ in 0..rng.below(longest + 1) {
                    batch.indices.push(rng.below(row_count) as i64);
                }
                batch.offsets.push(batch.indices.len() as i64);
            }
        }
        let weight = |_: &i64| (rng.unit_f64() * 2.0 - 1.0) as f32;
        batch.weights = is_weighted.then(|| batch.indices.iter().map(weight).collect());
        batch
    }

    /// Joins the batches of all ranks: samples of rank 0 first.
    pub(crate) fn join(parts: &[Self]) -> Self {
        let features = parts[0].features;
        let is_weighted = parts.iter().any(|part| part.weights.is_some());
        let mut whole = Self { offsets: vec![0], features, ..Self::default() };
        let mut weights = Vec::new();
        for feature in 0..features {
            for part in parts {
                for bounds in part.bags().feature_offsets(feature).windows(2) {
                    let range = bounds[0] as usize..bounds[1] as usize;
                    whole.indices.extend(&part.indices[range.clone()]);
                    weights.extend(part.weights.iter().flat_map(|all| &all[range.clone()]));
                    whole.offsets.push(whole.indices.len() as i64);
                }
            }
        }
        whole.weights = is_weighted.then_some(weights);
        whole
    }
}

/// Rows as arrays, stepped by plain gradient descent: sums per row in index order.
#[derive(Debug)]
pub(crate) struct TestRows {
    pub(crate) rows: ArrayRows,
    pub(crate) plan: ExchangePlan,
    pub(crate) rank: usize,
}

impl TestRows {
    pub(crate) fn new(plan: &ExchangePlan, rank: usize) -> Self {
        let fill = |table: usize, row: u64, first_column: usize, out: &mut [f32]| {
            for (column, place) in out.iter_mut().enumerate() {
                *place = initial(table, row, first_column + column);
            }
        };
        Self { rows: ArrayRows::new(plan, rank, fill), plan: plan.clone(), rank }
    }
}

/// The weight an element starts with.
pub(crate) fn initial(table: usize, row: u64, column: usize) -> f32 {
    let bits = tierbed_core::env::mix64((table as u64) << 40 ^ row << 12 ^ column as u64);
    (bits >> 40) as f32 / 16_777_216.0 - 0.5
}

impl LookupRows for TestRows {
    fn lookup(&mut self, group: usize, bags: &Bags<'_>, to: &mut impl Destination) -> Result<()> {
        self.rows.lookup(group, bags, to)
    }
}

impl UpdateRows for TestRows {
    fn update(
        &mut self,
        group: usize,
        bags: &Bags<'_>,
        grads: &[f32],
        mut weight_grads: Option<&mut [f32]>,
    ) -> Result<()> {
        let group = &self.plan.groups(self.rank)[group];
        for table in 0..self.plan.tables().len() {
            let mut uses: Vec<(u64, usize, usize, usize)> = Vec::new();
            for (at, member) in group.members.iter().enumerate() {
                if member.table == table {
                    for (bag, bounds) in bags.feature_offsets(at).windows(2).enumerate() {
                        for position in bounds[0] as usize..bounds[1] as usize {
                            let row = bags.indices[position] as u64 - member.rows.first();
                            uses.push((row, position, at, bag));
                        }
                    }
                }
            }
            uses.sort_unstable();
            let before = self.rows.table(table).to_vec();
            for of_row in uses.chunk_by(|a, b| a.0 == b.0) {
                let dim = group.members[of_row[0].2].dim;
                let mut sum = vec![0.0f32; dim];
                for &(row, position, at, bag) in of_row {
                    let member = &group.members[at];
                    let offsets = bags.feature_offsets(at);
                    let count = (offsets[bag + 1] - offsets[bag]) as f32;
                    let start = match member.pooling {
                        Pooling::None => position * dim,
                        _ => bag * group.width + member.grad_column,
                    };
                    let weights = bags.weights.filter(|_| member.pooling != Pooling::None);
                    let old = &before[row as usize * dim..][..dim];
                    let product = Kernels::detect().dot(old, &grads[start..start + dim]);
                    for (sum, &grad) in sum.iter_mut().zip(&grads[start..]) {
                        let grad = weights.map_or(grad, |weights| weights[position] * grad);
                        let is_mean = member.pooling == Pooling::Mean;
                        *sum += if is_mean { grad / count } else { grad };
                    }
                    if let Some(place) = weight_grads.as_deref_mut() {
                        let is_mean = member.pooling == Pooling::Mean;
                        place[position] = if is_mean { product / count } else { product };
                    }
                }
                let start = of_row[0].0 as usize * dim;
                let row = &mut self.rows.tables[table][start..start + dim];
                for (weight, sum) in row.iter_mut().zip(&sum) {
                    *weight -= RATE * sum;
                }
            }
        }
        Ok(())
    }
}

/// Makes one exchange per rank over one heap.
pub(crate) fn exchanges(plan: &ExchangePlan, layout: &Layout, timeout_ms: u64) -> Vec<Exchange> {
    let ranks = plan.rank_count();
    let heap: Arc<dyn SymmetricHeap> =
        Arc::new(LocalHeap::new(ranks, layout.region_bytes()).unwrap());
    (0..ranks).map(|rank| exchange(plan, layout, heap.clone(), rank, timeout_ms)).collect()
}

/// Makes the exchange of one rank.
pub(crate) fn exchange(
    plan: &ExchangePlan,
    layout: &Layout,
    heap: Arc<dyn SymmetricHeap>,
    rank: usize,
    timeout_ms: u64,
) -> Exchange {
    let clock = Arc::new(SystemClock::default());
    let pad = Pad::new(heap, rank, clock, Duration::from_millis(timeout_ms)).unwrap();
    Exchange::new(plan.clone(), layout.clone(), pad).unwrap()
}

/// Makes one exchange per rank, with memory that only the ranks of a node share.
pub(crate) fn exchanges_of_nodes(plan: &ExchangePlan, node_count: usize) -> Vec<Exchange> {
    let ranks_each = plan.rank_count() / node_count;
    let mut exchanges = Vec::new();
    for node in 0..node_count {
        let nodes = Nodes::new(node * ranks_each, node_count, ranks_each).unwrap();
        let layout = Layout::of_nodes(plan, LIMITS, Turns::new(2), nodes).unwrap();
        let heap: Arc<dyn SymmetricHeap> =
            Arc::new(LocalHeap::new(ranks_each, layout.region_bytes()).unwrap());
        for local in 0..ranks_each {
            let clock = Arc::new(SystemClock::default());
            let pad = Pad::new(heap.clone(), local, clock, Duration::from_secs(20)).unwrap();
            exchanges.push(Exchange::of_nodes(plan.clone(), layout.clone(), pad, nodes).unwrap());
        }
    }
    exchanges
}

/// Limits that the tests' batches keep.
pub(crate) const LIMITS: Limits = Limits { samples_max: 64, indices_max: 2048 };

/// Three tables, one of them read by two features, each divided by `sharding(dim, rows)`.
pub(crate) fn plan_of(ranks: usize, sharding: impl Fn(u64, usize) -> Sharding) -> ExchangePlan {
    let table =
        |row_count, dim| ShardedTable { row_count, dim, sharding: sharding(row_count, dim) };
    let tables = vec![table(40, 8), table(7, 20), table(100, 8)];
    let features =
        vec![(0, Pooling::Sum), (1, Pooling::Mean), (2, Pooling::Sum), (0, Pooling::Mean)];
    ExchangePlan::new(ranks, tables, features).unwrap()
}

/// Cuts `0..end` into `ranks` ranges of nearly equal length.
pub(crate) fn cuts(ranks: usize, end: usize) -> Vec<usize> {
    (0..=ranks).map(|rank| rank * end / ranks).collect()
}
