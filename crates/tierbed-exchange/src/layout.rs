//! The layout of messages in a region.
//!
//! ```text
//! | pad | bags: header, offsets, indices, weights | outputs, 2 | rows, 2 | grads, 2 |
//! | weight grads | agreement, 2 | staged grads, 2 | guests |
//! ```
//!
//! The last two are there with several nodes only: gradients that this rank sends to the holders on
//! its rail for all ranks of its node, and bags of mirrored tables that came on it.
//!
//! All regions have this layout, long enough for the largest batch; memory is only taken for what
//! is touched. Buffers that are read while the next step may be under way take turns.

use tierbed_core::{Error, Result};

use crate::nodes::Nodes;
use crate::pad::pad_bytes;
use crate::plan::{ExchangePlan, ShardedTable};
use crate::protocol::Turns;

/// Bytes of a bags header: six numbers, padded to a cache line.
pub(crate) const BAGS_HEADER_BYTES: usize = 64;
const ALIGN_BYTES: usize = 128;

/// The largest batch of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Most samples.
    pub samples_max: usize,
    /// Most indices of all features together.
    pub indices_max: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { samples_max: 1 << 16, indices_max: 1 << 23 }
    }
}

/// Buffers of one kind, one behind the other.
#[derive(Debug, Clone, Copy, Default)]
struct Area {
    start: usize,
    bytes: usize,
}

impl Area {
    fn buffer(self, at: usize) -> usize {
        self.start + at * self.bytes
    }
}

/// Byte positions in a region.
#[derive(Debug, Clone)]
pub struct Layout {
    pub(crate) limits: Limits,
    turns: Turns,
    bags: Area,
    offsets: Area,
    indices: Area,
    weights: Area,
    outputs: Area,
    rows: Area,
    grads: Area,
    weight_grads: Area,
    agreement: Area,
    /// Per turn one buffer for each other node.
    staged: Area,
    other_nodes: usize,
    guests: Area,
    region_bytes: usize,
}

impl Layout {
    /// Lays out the regions of `plan` with two buffers in turn.
    ///
    /// # Errors
    /// `Invalid` when the limits are 0 or a region would not fit the address space.
    pub fn new(plan: &ExchangePlan, limits: Limits) -> Result<Self> {
        Self::with_turns(plan, limits, Turns::new(2))
    }

    /// As [`new`](Self::new) with other turns: tests show that one buffer is too few.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_turns(plan: &ExchangePlan, limits: Limits, turns: Turns) -> Result<Self> {
        Self::of_nodes(plan, limits, turns, Nodes::one(plan.rank_count()))
    }

    /// Lays out the regions of a node: as many as it has ranks.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn of_nodes(
        plan: &ExchangePlan,
        limits: Limits,
        turns: Turns,
        nodes: Nodes,
    ) -> Result<Self> {
        let Limits { samples_max, indices_max } = limits;
        if samples_max == 0 || indices_max == 0 {
            return Err(Error::invalid("limits of a batch must not be 0"));
        }
        let ranks = plan.rank_count();
        let others = nodes.count() - 1;
        let output_bytes = |columns| plan.output_precision().vector_bytes(columns);
        let row_bytes = plan.tables().iter().map(|table| row_bytes(plan, table)).max().unwrap_or(0);
        let mut next = Areas { end: Some(pad_bytes(nodes.ranks_each())) };
        let offset_count = plan.feature_count().saturating_mul(samples_max).saturating_add(1);
        let grad_columns = plan.grad_columns_max().saturating_mul(ranks);
        let node_columns = plan.grad_columns_max().saturating_mul(nodes.ranks_each());
        let guest_bytes = if plan.has_mirrors() { guest_bytes(plan, limits) } else { 0 };
        let layout = Self {
            limits,
            turns,
            bags: next.area(1, BAGS_HEADER_BYTES, 1),
            offsets: next.area(1, offset_count, 8),
            indices: next.area(1, indices_max, 8),
            weights: next.area(1, indices_max, 4),
            outputs: next.area(turns.count(), samples_max, output_bytes(plan.output_dim())),
            rows: next.area(turns.count(), indices_max, row_bytes),
            grads: next.area(turns.count(), samples_max, output_bytes(grad_columns)),
            weight_grads: next.area(1, indices_max, 4),
            agreement: next.area(turns.count(), 2, 8),
            staged: next.area(turns.count() * others, samples_max, output_bytes(node_columns)),
            other_nodes: others,
            guests: next.area(others, guest_bytes, 1),
            region_bytes: next.end.unwrap_or(0),
        };
        if next.end.is_none() {
            return Err(Error::invalid(
                "regions of the largest batch do not fit the address space",
            )
            .with("samples_max", samples_max)
            .with("indices_max", indices_max));
        }
        Ok(layout)
    }

    /// Returns the bytes of a region.
    #[must_use]
    pub fn region_bytes(&self) -> usize {
        self.region_bytes
    }

    pub(crate) fn bags_at(&self) -> usize {
        self.bags.start
    }

    pub(crate) fn offsets_at(&self) -> usize {
        self.offsets.start
    }

    pub(crate) fn indices_at(&self) -> usize {
        self.indices.start
    }

    pub(crate) fn weights_at(&self) -> usize {
        self.weights.start
    }

    /// Returns where the output of `step` lies, `[samples, output_dim]`.
    pub(crate) fn output_at(&self, step: u64) -> usize {
        self.outputs.buffer(self.turns.buffer(step))
    }

    /// Returns where the rows of `step` arrive, one per index of a row-wise feature.
    pub(crate) fn rows_at(&self, step: u64) -> usize {
        self.rows.buffer(self.turns.buffer(step))
    }

    /// Returns where the gradient matrices of backward `step` lie.
    pub(crate) fn grads_at(&self, step: u64) -> usize {
        self.grads.buffer(self.turns.buffer(step))
    }

    /// Returns where gradients of weights come back, one per index.
    pub(crate) fn weight_grads_at(&self) -> usize {
        self.weight_grads.start
    }

    /// Returns where a rank says what it wants in agreement `number`: two numbers of 8 bytes.
    pub(crate) fn agreement_at(&self, number: u64) -> usize {
        self.agreement.buffer(self.turns.buffer(number))
    }

    /// Returns where gradients of backward `step` wait that are sent to the other node `other`.
    pub(crate) fn staged_at(&self, step: u64, other: usize) -> usize {
        assert!(other < self.other_nodes, "there is no other node {other}");
        self.staged.buffer(self.turns.buffer(step) * self.other_nodes + other)
    }

    /// Returns where bags of mirrored tables of the other node `other` lie, and how many bytes they
    /// may take.
    pub(crate) fn guests_at(&self, other: usize) -> (usize, usize) {
        assert!(other < self.other_nodes, "there is no other node {other}");
        (self.guests.buffer(other), self.guests.bytes)
    }

    /// Returns how many outputs exist at a time.
    #[must_use]
    pub fn output_count(&self) -> usize {
        self.turns.count()
    }
}

fn row_bytes(plan: &ExchangePlan, table: &ShardedTable) -> usize {
    if table.sharding.divides_rows() {
        plan.row_precision().vector_bytes(table.dim)
    } else {
        0
    }
}

// Most bytes of the mirrored bags of one rank: their number, lengths, ids and weights.
fn guest_bytes(plan: &ExchangePlan, limits: Limits) -> usize {
    let lengths = plan.feature_count().saturating_mul(limits.samples_max.saturating_mul(10) + 16);
    limits.indices_max.saturating_mul(12).saturating_add(lengths).saturating_add(8)
}

/// Gives out areas in order.
struct Areas {
    /// `None` once an area did not fit the address space.
    end: Option<usize>,
}

impl Areas {
    /// Returns `count` buffers of `items * item_bytes`.
    fn area(&mut self, count: usize, items: usize, item_bytes: usize) -> Area {
        let place = |end: usize| {
            let start = end.checked_next_multiple_of(ALIGN_BYTES)?;
            let bytes = items.checked_mul(item_bytes)?.checked_next_multiple_of(ALIGN_BYTES)?;
            Some((Area { start, bytes }, bytes.checked_mul(count)?.checked_add(start)?))
        };
        let placed = self.end.and_then(place);
        self.end = placed.map(|(_, end)| end);
        placed.map_or_else(Area::default, |(area, _)| area)
    }
}
