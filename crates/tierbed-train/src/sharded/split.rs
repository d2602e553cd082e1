//! Division of tables and memory among shards.
//!
//! Whole tables, neighbours together: what a sample needs of one shard then lies side by side in
//! the output. Tables of a shard are numbered anew, in the same order.

#![expect(clippy::indexing_slicing, reason = "every table of the schema has a shard")]

use tierbed_core::{Error, Result, Schema, TableId, TableSchema};

/// Indices a table is taken to get in a batch, to weigh tables against each other.
const NOMINAL_INDICES: f64 = 1024.0;

/// All tables, and the shard of each.
#[derive(Debug, Clone, Default)]
pub(crate) struct Split {
    pub(crate) schema: Schema,
    pub(crate) shard_of: Vec<u32>,
}

impl Split {
    /// Divides the tables among `shard_count` shards by the work they make.
    ///
    /// # Errors
    /// `Invalid` when there are fewer tables than shards.
    pub(crate) fn balanced(schema: Schema, shard_count: usize) -> Result<Self> {
        let tables = schema.tables();
        if tables.len() < shard_count {
            return Err(Error::invalid("a store has at least one table for each shard")
                .with("tables", tables.len())
                .with("shards", shard_count)
                .with("remedy", "open a new store with fewer shards, or add more tables"));
        }
        // Work of the tables before each border.
        let before: Vec<f64> = std::iter::once(0.0)
            .chain(tables.iter().scan(0.0, |sum, table| {
                *sum += work_of(table);
                Some(*sum)
            }))
            .collect();
        let whole = before[tables.len()];
        let mut shard_of = vec![0; tables.len()];
        let mut first = 0;
        for shard in 1..shard_count {
            let wanted = whole * shard as f64 / shard_count as f64;
            // At least one table for this shard's predecessor, and one for each still to come.
            let borders = first + 1..=tables.len() - (shard_count - shard);
            let distance = |at: &usize| (before[*at] - wanted).abs();
            let nearest = borders.min_by(|a, b| distance(a).total_cmp(&distance(b)));
            let Some(nearest) = nearest else { panic!("no table is left for shard {shard}") };
            first = nearest;
            shard_of.iter_mut().skip(first).for_each(|of| *of = shard as u32);
        }
        let last = shard_of.last().map(|&last| last as usize + 1);
        assert_eq!(last, Some(shard_count), "the last tables are not those of the last shard");
        debug_assert!(shard_of.is_sorted(), "tables of a shard are no neighbours");
        Ok(Self { schema, shard_of })
    }

    /// Returns the shard of `table`, and its number there.
    ///
    /// # Errors
    /// `Invalid` for an unknown table.
    pub(crate) fn place(&self, table: TableId) -> Result<(usize, TableId)> {
        self.schema.table(table)?;
        let at = table.0 as usize;
        let shard = self.shard_of[at];
        let before = self.shard_of.iter().take(at).filter(|&&other| other == shard).count();
        Ok((shard as usize, TableId(before as u32)))
    }

    /// Returns the tables of `shard`, in the order of their numbers there.
    pub(crate) fn tables_of(&self, shard: usize) -> impl Iterator<Item = (TableId, &TableSchema)> {
        let all = (0..).map(TableId).zip(self.schema.tables()).zip(&self.shard_of);
        all.filter(move |(_, of)| **of as usize == shard).map(|(table, _)| table)
    }

    /// Returns each shard's share of the memory: a third equally, for what every engine needs, a
    /// third by work, for windows of batches, a third by bytes, for rows that wait.
    pub(crate) fn memory_shares(&self, shard_count: usize) -> Vec<f64> {
        let (work, bytes) = (self.shares(shard_count, work_of), self.byte_shares(shard_count));
        let equal = 1.0 / shard_count as f64;
        let shares = work.iter().zip(&bytes);
        let shares: Vec<f64> = shares.map(|(work, bytes)| (equal + work + bytes) / 3.0).collect();
        assert!(shares.iter().sum::<f64>() < 1.0 + 1e-9, "{shares:?} are more than the memory");
        shares
    }

    /// Returns each shard's share of the bytes.
    pub(crate) fn byte_shares(&self, shard_count: usize) -> Vec<f64> {
        self.shares(shard_count, |table| table.row_count as f64 * table.record_bytes() as f64)
    }

    fn shares(&self, shard_count: usize, of: impl Fn(&TableSchema) -> f64) -> Vec<f64> {
        let sum = |shard| self.tables_of(shard).map(|(_, table)| of(table)).sum::<f64>();
        let sums: Vec<f64> = (0..shard_count).map(sum).collect();
        let whole: f64 = sums.iter().sum();
        sums.iter().map(|sum| sum / whole).collect()
    }
}

// Pooling and gradients cost per index; storage and optimizer per distinct row of the batch.
fn work_of(table: &TableSchema) -> f64 {
    let rows = table.row_count as f64;
    let distinct = rows * (1.0 - (-NOMINAL_INDICES / rows).exp());
    table.record_bytes() as f64 * (NOMINAL_INDICES + 2.0 * distinct)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that panics has failed, as it should")]
pub(crate) mod tests {
    use tierbed_core::{InitSpec, OptimizerKind};

    use super::*;

    /// Tables of these lengths, dim 4.
    pub(crate) fn schema(row_counts: &[u64]) -> Schema {
        let table = |(at, &row_count): (usize, &u64)| TableSchema {
            name: format!("t{at}"),
            row_count,
            dim: 4,
            optimizer: OptimizerKind::RowWiseAdagrad,
            state_init: 0.0,
            init: InitSpec::Uniform { low: -0.5, high: 0.5 },
            seed: 1,
        };
        Schema::new(row_counts.iter().enumerate().map(table).collect()).unwrap()
    }

    #[test]
    fn neighbours_stay_together_and_work_is_divided() {
        let split = Split::balanced(schema(&[1000; 10]), 2).unwrap();
        assert_eq!(split.shard_of, [0, 0, 0, 0, 0, 1, 1, 1, 1, 1]);
        assert_eq!(split.place(TableId(7)).unwrap(), (1, TableId(2)));
        let of_second: Vec<u32> = split.tables_of(1).map(|(id, _)| id.0).collect();
        assert_eq!(of_second, [5, 6, 7, 8, 9]);
        assert!(split.place(TableId(10)).is_err());
    }

    #[test]
    fn every_shard_has_a_table_whatever_their_sizes() {
        for row_counts in [[1 << 40, 1, 1, 1, 1], [1, 1, 1, 1, 1 << 40], [1, 1 << 40, 1, 1, 1]] {
            for count in 1..=5 {
                let split = Split::balanced(schema(&row_counts), count).unwrap();
                assert!(split.shard_of.is_sorted(), "{:?}", split.shard_of);
                for shard in 0..count {
                    assert!(split.tables_of(shard).next().is_some(), "{:?}", split.shard_of);
                }
            }
        }
        assert!(Split::balanced(schema(&[5, 5]), 3).is_err());
    }

    #[test]
    fn memory_goes_by_work_and_by_bytes() {
        let split = Split::balanced(schema(&[1_000_000, 1_000_000, 4000, 4000]), 2).unwrap();
        assert_eq!(split.shard_of, [0, 0, 1, 1]);
        let shares = split.memory_shares(2);
        assert!(shares[0] > 0.6 && shares[1] > 0.25, "{shares:?}");
        assert!((shares[0] + shares[1] - 1.0).abs() < 1e-9);
    }
}
