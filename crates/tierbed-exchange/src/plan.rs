//! The sharding plan: rows and columns of each table on each rank, and the work it implies.
//!
//! All ranks make the same plan from the same description, so that each knows where every other
//! one writes. A table is held whole by one rank, by ranges or blocks of rows, by ranges of
//! columns, or by every rank (*mirrors*). What a rank does for one batch falls into groups:
//!
//! | group | tables | looks up | writes | updates by |
//! |---|---|---|---|---|
//! | sums | whole, or columns | all samples | pooled vectors into outputs | all samples |
//! | mirrors | mirrored | its own samples | its own output | all samples |
//! | rows | divided by rows | its rows of all samples | rows, one per index | the same rows |
//!
//! Rows travel unpooled because sums of parts would not have the bits of the whole sum: the rank
//! of the sample adds them in index order. With one index per bag that is the same volume.

#![expect(clippy::indexing_slicing, reason = "tables and features are checked when a plan is made")]

use std::ops::Range;

use tierbed_core::{Error, Result};
use tierbed_kernels::Pooling;

use crate::precision::Precision;
use crate::row_set::RowSet;

/// How one table is divided over the ranks.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Sharding {
    /// One rank holds it.
    Whole {
        /// The rank.
        rank: usize,
    },
    /// Rank `r` holds rows `bounds[r]..bounds[r + 1]`; `[ranks + 1]`.
    Rows {
        /// First row of each rank, then the number of rows.
        bounds: Vec<u64>,
    },
    /// Ranks take turns in holding blocks of rows: for tables that grow.
    Blocks {
        /// Rows of a block.
        block_rows: u64,
    },
    /// Rank `r` holds columns `bounds[r]..bounds[r + 1]` of every row; `[ranks + 1]`.
    Columns {
        /// First column of each rank, then the dim.
        bounds: Vec<usize>,
    },
    /// Every rank holds all of it.
    Mirrored,
}

impl Sharding {
    /// Returns whether each row is held by one rank, and others by other ones.
    #[must_use]
    pub fn divides_rows(&self) -> bool {
        matches!(self, Self::Rows { .. } | Self::Blocks { .. })
    }
}

/// One table of a plan.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ShardedTable {
    /// Number of rows; the most that it may have, where it grows.
    pub row_count: u64,
    /// Elements of a row.
    pub dim: usize,
    /// Who holds what.
    pub sharding: Sharding,
}

/// What a group does; see the module.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GroupKind {
    /// Pools rows of all samples.
    Sums,
    /// Pools rows of its own samples.
    Mirrors,
    /// Sends single rows of all samples.
    Rows,
}

/// A feature, or some of its columns, in a group.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Member {
    /// The feature.
    pub feature: usize,
    /// Its table.
    pub table: usize,
    /// How bags become vectors; `None` in a group of rows.
    pub pooling: Pooling,
    /// First column that is held, of the table's dim.
    pub first_column: usize,
    /// Number of columns that are held.
    pub dim: usize,
    /// First column in the output of a sample's rank.
    pub output_column: usize,
    /// First column in the group's gradient matrix.
    pub grad_column: usize,
    /// Rows that are held.
    pub rows: RowSet,
}

/// What a rank does together: one lookup, one update.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Group {
    /// What it does.
    pub kind: GroupKind,
    /// Its features, in feature order.
    pub members: Vec<Member>,
    /// Columns of its gradient matrix: the sum of the members' dims.
    pub width: usize,
}

/// The division of all tables, the same on every rank.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ExchangePlan {
    tables: Vec<ShardedTable>,
    features: Vec<(usize, Pooling)>,
    first_columns: Vec<usize>,
    output_dim: usize,
    output_precision: Precision,
    row_precision: Precision,
    /// Per rank.
    groups: Vec<Vec<Group>>,
}

impl ExchangePlan {
    /// Plans for `rank_count` ranks; `features` are table and pooling, in output order.
    ///
    /// # Errors
    /// `Invalid` for unknown tables or ranks, bounds that do not cover a table, or a feature that
    /// is not pooled.
    pub fn new(
        rank_count: usize,
        tables: Vec<ShardedTable>,
        features: Vec<(usize, Pooling)>,
    ) -> Result<Self> {
        for (at, table) in tables.iter().enumerate() {
            check(rank_count, table).map_err(|error| error.with("table", at))?;
        }
        let (mut first_columns, mut output_dim) = (Vec::new(), 0);
        for &(table, pooling) in &features {
            let Some(table) = tables.get(table) else {
                return Err(Error::invalid("no such table").with("table", table));
            };
            if pooling == Pooling::None {
                return Err(Error::invalid("only pooled features are exchanged"));
            }
            first_columns.push(output_dim);
            output_dim += table.dim;
        }
        let mut plan = Self {
            tables,
            features,
            first_columns,
            output_dim,
            output_precision: Precision::F32,
            row_precision: Precision::F32,
            groups: Vec::new(),
        };
        plan.groups = (0..rank_count).map(|rank| plan.make_groups(rank, rank_count)).collect();
        Ok(plan)
    }

    /// Lets numbers travel in fewer bytes: those of outputs and of their gradients, and those of
    /// single rows of tables divided by rows.
    ///
    /// # Errors
    /// `Invalid` for outputs in `Int8`: sums have no bounds of their own to divide.
    pub fn with_precision(mut self, outputs: Precision, rows: Precision) -> Result<Self> {
        if outputs == Precision::Int8 {
            return Err(Error::invalid("outputs travel in f32, f16 or bf16")
                .with("remedy", "int8 is for rows of tables divided by rows"));
        }
        (self.output_precision, self.row_precision) = (outputs, rows);
        Ok(self)
    }

    /// Returns what numbers of outputs and of their gradients are.
    #[must_use]
    pub fn output_precision(&self) -> Precision {
        self.output_precision
    }

    /// Returns what numbers of single rows are on their way.
    #[must_use]
    pub fn row_precision(&self) -> Precision {
        self.row_precision
    }

    /// Returns the number of ranks.
    #[must_use]
    pub fn rank_count(&self) -> usize {
        self.groups.len()
    }

    /// Returns the number of features.
    #[must_use]
    pub fn feature_count(&self) -> usize {
        self.features.len()
    }

    /// Returns the columns of the output.
    #[must_use]
    pub fn output_dim(&self) -> usize {
        self.output_dim
    }

    /// Returns the tables.
    #[must_use]
    pub fn tables(&self) -> &[ShardedTable] {
        &self.tables
    }

    /// Returns table and pooling of each feature.
    #[must_use]
    pub fn features(&self) -> &[(usize, Pooling)] {
        &self.features
    }

    /// Returns the table of `feature`.
    ///
    /// # Panics
    /// When there is no such feature.
    #[must_use]
    pub fn table_of(&self, feature: usize) -> &ShardedTable {
        &self.tables[self.features[feature].0]
    }

    /// Returns the first column of `feature` in the output.
    ///
    /// # Panics
    /// When there is no such feature.
    #[must_use]
    pub fn first_column(&self, feature: usize) -> usize {
        self.first_columns[feature]
    }

    /// Returns what `rank` does.
    ///
    /// # Panics
    /// When there is no such rank.
    #[must_use]
    pub fn groups(&self, rank: usize) -> &[Group] {
        &self.groups[rank]
    }

    /// Returns the features whose rows arrive unpooled, in feature order.
    pub fn row_features(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.features.len()).filter(|&at| self.table_of(at).sharding.divides_rows())
    }

    /// Returns whether every rank holds some table.
    #[must_use]
    pub fn has_mirrors(&self) -> bool {
        self.tables.iter().any(|table| table.sharding == Sharding::Mirrored)
    }

    /// Returns whether a table is divided by columns.
    #[must_use]
    pub fn has_columns(&self) -> bool {
        self.tables.iter().any(|table| matches!(table.sharding, Sharding::Columns { .. }))
    }

    /// Returns the columns of all gradient matrices of the rank that has most.
    #[must_use]
    pub fn grad_columns_max(&self) -> usize {
        let columns = |groups: &Vec<Group>| groups.iter().map(|group| group.width).sum();
        self.groups.iter().map(columns).max().unwrap_or(0)
    }

    /// Returns a number that plans share if, and very likely only if, they are equal.
    #[must_use]
    pub fn fingerprint(&self) -> u64 {
        use std::hash::{DefaultHasher, Hash, Hasher};
        let mut hasher = DefaultHasher::new();
        self.hash(&mut hasher);
        hasher.finish()
    }

    fn make_groups(&self, rank: usize, rank_count: usize) -> Vec<Group> {
        let mut groups: Vec<Group> = Vec::new();
        for (feature, &(table_at, pooling)) in self.features.iter().enumerate() {
            let table = self.table_of(feature);
            let Some((kind, held)) = held_by(rank, rank_count, table) else { continue };
            let pooling = if kind == GroupKind::Rows { Pooling::None } else { pooling };
            // Rows of one lookup without pooling have one dim.
            let takes = |group: &Group| {
                let has_dim = |member: &Member| member.dim == held.columns.len();
                group.kind == kind && (kind != GroupKind::Rows || group.members.iter().all(has_dim))
            };
            let at = groups.iter().position(takes).unwrap_or(groups.len());
            if at == groups.len() {
                groups.push(Group { kind, members: Vec::new(), width: 0 });
            }
            let group = &mut groups[at];
            group.members.push(Member {
                feature,
                table: table_at,
                pooling,
                first_column: held.columns.start,
                dim: held.columns.len(),
                output_column: self.first_column(feature) + held.columns.start,
                grad_column: group.width,
                rows: held.rows,
            });
            group.width += held.columns.len();
        }
        groups
    }
}

struct Held {
    rows: RowSet,
    columns: std::ops::Range<usize>,
}

fn held_by(rank: usize, rank_count: usize, table: &ShardedTable) -> Option<(GroupKind, Held)> {
    let (rows, columns) = (RowSet::Range { first: 0, end: table.row_count }, 0..table.dim);
    let (kind, held) = match &table.sharding {
        Sharding::Whole { rank: holder } if *holder != rank => return None,
        Sharding::Whole { .. } => (GroupKind::Sums, Held { rows, columns }),
        Sharding::Mirrored => (GroupKind::Mirrors, Held { rows, columns }),
        Sharding::Rows { bounds } => {
            let Range { start, end } = range_of(bounds, rank)?;
            (GroupKind::Rows, Held { rows: RowSet::Range { first: start, end }, columns })
        }
        &Sharding::Blocks { block_rows } => {
            let (rank, ranks, end) = (rank as u64, rank_count as u64, table.row_count);
            let rows = RowSet::Blocks { rank, ranks, block_rows, end };
            (GroupKind::Rows, Held { rows, columns })
        }
        Sharding::Columns { bounds } => {
            (GroupKind::Sums, Held { rows, columns: range_of(bounds, rank)? })
        }
    };
    (!held.columns.is_empty()).then_some((kind, held))
}

fn range_of<T: Copy>(bounds: &[T], rank: usize) -> Option<Range<T>> {
    Some(*bounds.get(rank)?..*bounds.get(rank + 1)?)
}

fn check(rank_count: usize, table: &ShardedTable) -> Result<()> {
    if table.dim == 0 {
        return Err(Error::invalid("dim must not be 0"));
    }
    let is_right = match &table.sharding {
        Sharding::Whole { rank } => *rank < rank_count,
        Sharding::Rows { bounds } => covers(bounds, rank_count, table.row_count, 0),
        Sharding::Columns { bounds } => covers(bounds, rank_count, table.dim, 0),
        Sharding::Blocks { block_rows } => *block_rows > 0,
        Sharding::Mirrored => true,
    };
    if is_right {
        return Ok(());
    }
    Err(Error::invalid("a sharding must cover its table: one bound per rank and the end")
        .with("ranks", rank_count)
        .with("found", format_args!("{:?}", table.sharding)))
}

fn covers<T: PartialOrd + Copy>(bounds: &[T], rank_count: usize, end: T, zero: T) -> bool {
    bounds.len() == rank_count + 1
        && bounds.first() == Some(&zero)
        && bounds.last() == Some(&end)
        && bounds.is_sorted()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(dim: usize, sharding: Sharding) -> ShardedTable {
        ShardedTable { row_count: 10, dim, sharding }
    }

    #[test]
    fn each_rank_gets_groups_for_what_it_holds() {
        let tables = vec![
            table(4, Sharding::Whole { rank: 1 }),
            table(6, Sharding::Columns { bounds: vec![0, 2, 6] }),
            table(4, Sharding::Rows { bounds: vec![0, 7, 10] }),
            table(8, Sharding::Mirrored),
        ];
        let features =
            vec![(0, Pooling::Sum), (1, Pooling::Mean), (2, Pooling::Sum), (3, Pooling::Sum)];
        let plan = ExchangePlan::new(2, tables, features).unwrap();
        assert_eq!(plan.output_dim(), 22);
        let kinds = |rank| plan.groups(rank).iter().map(|g| (g.kind, g.width)).collect::<Vec<_>>();
        assert_eq!(kinds(0), [(GroupKind::Sums, 2), (GroupKind::Rows, 4), (GroupKind::Mirrors, 8)]);
        assert_eq!(kinds(1), [(GroupKind::Sums, 8), (GroupKind::Rows, 4), (GroupKind::Mirrors, 8)]);
        let columns = &plan.groups(1)[0].members[1];
        assert_eq!((columns.output_column, columns.grad_column, columns.dim), (6, 4, 4));
        let rows = &plan.groups(1)[1].members[0];
        assert_eq!(rows.rows, RowSet::Range { first: 7, end: 10 });
        assert_eq!(rows.pooling, Pooling::None);
        assert_eq!(plan.row_features().collect::<Vec<_>>(), [2]);
        assert_eq!(plan.grad_columns_max(), 20);
    }

    #[test]
    fn shardings_that_do_not_cover_a_table_are_refused() {
        for sharding in [
            Sharding::Whole { rank: 2 },
            Sharding::Rows { bounds: vec![0, 10] },
            Sharding::Rows { bounds: vec![0, 5, 9] },
            Sharding::Columns { bounds: vec![0, 5, 4] },
            Sharding::Columns { bounds: vec![1, 2, 4] },
            Sharding::Blocks { block_rows: 0 },
        ] {
            let features = vec![(0, Pooling::Sum)];
            let plan = ExchangePlan::new(2, vec![table(4, sharding.clone())], features);
            assert!(plan.is_err(), "{sharding:?}");
        }
        let whole = vec![table(4, Sharding::Mirrored)];
        assert!(ExchangePlan::new(2, whole.clone(), vec![(1, Pooling::Sum)]).is_err());
        assert!(ExchangePlan::new(2, whole, vec![(0, Pooling::None)]).is_err());
    }
}
