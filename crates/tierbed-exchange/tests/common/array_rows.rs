//! Rows of one rank as plain arrays: what fits in memory and is only looked up.

#![expect(
    clippy::indexing_slicing,
    reason = "tables and groups are those of the plan; positions come from checked bags"
)]

use std::ops::Range;

use tierbed_core::{Bags, Error, Result};
use tierbed_exchange::{ExchangePlan, LookupRows};
use tierbed_io::WordBuf;
use tierbed_kernels::{Destination, Kernels, PoolFeature, Pooling, Rows};

/// Held rows and columns of each table, `[rows, dim]`, without optimizer state.
#[derive(Debug)]
pub(crate) struct ArrayRows {
    kernels: Kernels,
    /// Per table of the plan; empty where nothing is held. In large pages, as the rows of an engine
    /// are: a walk through small ones takes longer than reading a row does.
    pub(crate) tables: Vec<WordBuf>,
    /// Per group its members.
    groups: Vec<Vec<HeldMember>>,
    starts: Vec<usize>,
}

#[derive(Debug)]
struct HeldMember {
    table: usize,
    pooling: Pooling,
    dim: usize,
    first_row: u64,
    row_count: u64,
}

impl ArrayRows {
    /// Holds what `rank` holds by `plan`, filled by `fill(table, row, first_column, out)`.
    pub(crate) fn new(
        plan: &ExchangePlan,
        rank: usize,
        mut fill: impl FnMut(usize, u64, usize, &mut [f32]),
    ) -> Self {
        let mut tables = Vec::new();
        tables.resize_with(plan.tables().len(), WordBuf::default);
        let mut groups = Vec::new();
        for group in plan.groups(rank) {
            let mut members = Vec::new();
            for member in &group.members {
                let rows = member.rows.first()..member.rows.end();
                members.push(HeldMember {
                    table: member.table,
                    pooling: member.pooling,
                    dim: member.dim,
                    first_row: member.rows.first(),
                    row_count: rows.end - rows.start,
                });
                let words = &mut tables[member.table];
                if words.is_empty() {
                    *words = WordBuf::new((rows.end - rows.start) as usize * member.dim);
                    for (row, words) in rows.zip(words.chunks_exact_mut(member.dim)) {
                        fill(member.table, row, member.first_column, words);
                    }
                }
            }
            groups.push(members);
        }
        Self { kernels: Kernels::detect(), tables, groups, starts: Vec::new() }
    }

    /// Returns the held part of `table`, `[rows, dim]`.
    ///
    /// # Panics
    /// When the plan has no such table.
    pub(crate) fn table(&self, table: usize) -> &[f32] {
        &self.tables[table]
    }
}

/// Returns the positions of a feature's indices; a feature has at least one offset.
fn feature_range(offsets: &[i64]) -> Range<usize> {
    offsets[0] as usize..offsets[offsets.len() - 1] as usize
}

impl LookupRows for ArrayRows {
    fn lookup(&mut self, group: usize, bags: &Bags<'_>, to: &mut impl Destination) -> Result<()> {
        let members = self.groups.get(group).ok_or_else(|| Error::invalid("no such group"))?;
        self.starts.clear();
        for (at, member) in members.iter().enumerate() {
            let range = feature_range(bags.feature_offsets(at));
            for &id in &bags.indices[range] {
                let row = (id as u64).wrapping_sub(member.first_row);
                if row >= member.row_count {
                    return Err(Error::invalid("row is not held here").with("row_id", id));
                }
                self.starts.push(row as usize * member.dim);
            }
        }
        let feature = |(at, member): (usize, &HeldMember)| {
            let offsets = bags.feature_offsets(at);
            let range = feature_range(offsets);
            let rows = Rows {
                arena: self.table(member.table),
                starts: &self.starts[range.clone()],
                weights: bags.weights.map(|weights| &weights[range]),
            };
            let (pooling, dim) = (member.pooling, member.dim);
            (rows, PoolFeature { feature: at, offsets, pooling, dim })
        };
        let features: Vec<_> = members.iter().enumerate().map(feature).collect();
        self.kernels.pool_all_to(&features, to);
        Ok(())
    }
}
