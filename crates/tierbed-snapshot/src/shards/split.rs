//! One lookup as questions to shards, and their answers as one.
//!
//! ```text
//! bags ─▶ located ─▶ bag of one shard: pooled there     ─▶ question per shard ─▶ vectors ─┐
//!                 └▶ else: each row once, as it is      ─▶                                │
//! out ◀─ pooled in index order ◀─ rows and pooled bags, as if each were a row ◀───────────┘
//! ```
//!
//! A bag that lies on one shard is added up there in index order, from zero; adding its sum to
//! zero leaves its bits. Rows of other bags are added here in index order by the same kernels. So
//! the answer has the bits of a lookup in one snapshot. Means are divided here, by the lengths that
//! were asked for.
//!
//! A shard that adds a row to zero turns -0 into 0, which no sum shows. Where rows are asked for
//! unpooled no shard adds anything.
#![expect(
    clippy::indexing_slicing,
    reason = "ranges of a plan lie within checked bags, positions are those of parts made here"
)]

use std::collections::HashMap;

use tierbed_core::{Error, Result, Schema, TableId};
use tierbed_kernels::{fill_initial, BagRange, Kernels, Pooling, Rows};

use super::map::{Located, ShardMap};
use crate::elsewhere::Ask;

/// What one shard is asked for.
#[derive(Debug, Clone, PartialEq)]
pub struct ShardPart {
    /// The shard.
    pub shard: u32,
    /// Bags are added up there; else every bag has one row, which comes as it is.
    pub is_pooled: bool,
    /// The tables, each once.
    pub tables: Vec<TablePart>,
}

/// Bags of one table of a shard.
#[derive(Debug, Clone, PartialEq)]
pub struct TablePart {
    /// The table, the same in every shard.
    pub table: TableId,
    /// Elements of a vector.
    pub dim: usize,
    /// Rows of the shard, bag by bag.
    pub values: Vec<i64>,
    /// The same rows by their ids over all shards.
    pub ids: Vec<i64>,
    /// Rows of each bag.
    pub lengths: Vec<i64>,
    /// One for each value, where some have any.
    pub weights: Option<Vec<f32>>,
    /// Where the vector of each bag goes.
    starts: Vec<usize>,
}

/// A lookup, split by shards. See the module documentation.
#[derive(Debug)]
pub struct Split {
    parts: Vec<ShardPart>,
    places: Vec<Vec<FeaturePlaces>>,
    arena: Vec<f32>,
    kernels: Kernels,
}

/// Where the rows and pooled bags of a feature are, in index order.
#[derive(Debug, Default)]
struct FeaturePlaces {
    starts: Vec<usize>,
    offsets: Vec<i64>,
    weights: Option<Vec<f32>>,
}

/// The parts as they are being made.
struct Making {
    parts: Vec<ShardPart>,
    part_of: HashMap<(u32, TableId), (usize, usize)>,
    /// Where each row that comes as it is goes.
    rows: HashMap<(TableId, i64), usize>,
    arena_words: usize,
}

/// A bag, or a row alone.
#[derive(Clone, Copy)]
struct Bag<'a> {
    shard: u32,
    table: TableId,
    dim: usize,
    ids: &'a [i64],
    located: &'a [Located],
    weights: Option<&'a [f32]>,
}

impl Split {
    /// Splits lookups by the shards of `map`; `anywhere` answers for rows that all shards have.
    ///
    /// # Errors
    /// Those of [`ShardMap::locate`].
    pub fn new(map: &ShardMap, asks: &[Ask<'_>], anywhere: u32) -> Result<Self> {
        let may_pool = asks.iter().all(|ask| ask.plan.is_pooled());
        let mut making = Making {
            parts: Vec::new(),
            part_of: HashMap::new(),
            rows: HashMap::new(),
            arena_words: 0,
        };
        let mut places = Vec::with_capacity(asks.len());
        let mut located = Vec::new();
        for ask in asks {
            let mut features = Vec::with_capacity(ask.plan.features().len());
            for at in 0..ask.plan.features().len() {
                located.clear();
                let range = ask.plan.range(&ask.bags, at);
                map.locate(ask.plan.features()[at].table, &ask.bags.indices[range], &mut located)?;
                features.push(making.feature(ask, at, &located, Choice { may_pool, anywhere }));
            }
            places.push(features);
        }
        let Making { mut parts, arena_words, .. } = making;
        for table in parts.iter_mut().flat_map(|part| &mut part.tables) {
            let count = table.values.len();
            table.weights.iter_mut().for_each(|weights| weights.resize(count, 1.0));
        }
        Ok(Self { parts, places, arena: vec![0.0; arena_words], kernels: Kernels::detect() })
    }

    /// Returns what the shards are asked for, each once.
    #[must_use]
    pub fn parts(&self) -> &[ShardPart] {
        &self.parts
    }

    /// Returns how many rows are asked for.
    #[must_use]
    pub fn row_count(&self) -> u64 {
        let tables = self.parts.iter().flat_map(|part| &part.tables);
        tables.map(|table| table.values.len() as u64).sum()
    }

    /// Takes the vectors of table `table` of part `part`, `[bags, dim]`.
    ///
    /// # Errors
    /// `Corruption` for another number of elements.
    pub fn fill(
        &mut self,
        part: usize,
        table: usize,
        vectors: impl ExactSizeIterator<Item = f32>,
    ) -> Result<()> {
        let Self { parts, arena, .. } = self;
        let of = &parts[part].tables[table];
        let expected = of.starts.len() * of.dim;
        if vectors.len() != expected {
            return Err(Error::corruption("a shard answered with another shape")
                .with("shard", parts[part].shard)
                .with("elements", vectors.len())
                .with("expected", expected));
        }
        let mut vectors = vectors;
        for &start in &of.starts {
            for (to, from) in arena[start..start + of.dim].iter_mut().zip(&mut vectors) {
                *to = from;
            }
        }
        Ok(())
    }

    /// Lets initial values stand for all rows of part `part`; returns how many.
    ///
    /// # Errors
    /// `Invalid` when `schema` lacks a table.
    pub fn fill_initial(&mut self, part: usize, schema: &Schema) -> Result<u64> {
        let Self { parts, arena, .. } = self;
        let (mut row, mut count) = (Vec::new(), 0);
        for of in &parts[part].tables {
            let table = schema.table(of.table)?;
            row.resize(of.dim, 0.0);
            let mut index = 0;
            for (&start, &length) in of.starts.iter().zip(&of.lengths) {
                let out = &mut arena[start..start + of.dim];
                out.fill(0.0);
                for index in index..index + length as usize {
                    fill_initial(&table.init, table.seed, of.ids[index] as u64, &mut row);
                    let weight = of.weights.as_ref().map_or(1.0, |weights| weights[index]);
                    out.iter_mut().zip(&row).for_each(|(out, x)| *out += weight * x);
                }
                index += length as usize;
            }
            count += of.values.len() as u64;
        }
        Ok(count)
    }

    /// Pools everything that was filled, `asks` being those that were split.
    pub fn finish(&self, asks: &mut [Ask<'_>]) {
        assert_eq!(asks.len(), self.places.len(), "lookups that were split");
        for (ask, places) in asks.iter_mut().zip(&self.places) {
            if ask.plan.is_pooled() {
                ask.out.fill(0.0);
            }
            for (at, places) in places.iter().enumerate() {
                self.pool(ask, at, places);
            }
        }
    }

    fn pool(&self, ask: &mut Ask<'_>, at: usize, places: &FeaturePlaces) {
        let feature = &ask.plan.features()[at];
        let FeaturePlaces { starts, offsets, weights } = places;
        if feature.pooling == Pooling::None {
            let (dim, range) = (feature.columns.dim, ask.plan.range(&ask.bags, at));
            let out = &mut ask.out[range.start * dim..range.end * dim];
            return self.kernels.gather_rows(&self.arena, starts, dim, out);
        }
        let rows = Rows { arena: &self.arena, starts, weights: weights.as_deref() };
        let bags = BagRange { offsets, first_index: 0 };
        self.kernels.pool_add(rows, bags, feature.columns, ask.out);
        if feature.pooling == Pooling::Mean {
            self.kernels.mean_scale(ask.bags.feature_offsets(at), feature.columns, ask.out);
        }
    }
}

/// How a bag may be asked for.
#[derive(Clone, Copy)]
struct Choice {
    may_pool: bool,
    anywhere: u32,
}

impl Making {
    fn feature(
        &mut self,
        ask: &Ask<'_>,
        at: usize,
        located: &[Located],
        choice: Choice,
    ) -> FeaturePlaces {
        let feature = &ask.plan.features()[at];
        let (table, dim) = (feature.table, feature.columns.dim);
        let range = ask.plan.range(&ask.bags, at);
        let ids = &ask.bags.indices[range.clone()];
        let is_pooled = feature.pooling != Pooling::None;
        let weights = ask.bags.weights.filter(|_| is_pooled).map(|weights| &weights[range.clone()]);
        let mut places = FeaturePlaces { offsets: vec![0], ..FeaturePlaces::default() };
        places.weights = weights.map(|_| Vec::new());
        let bounds = ask.bags.feature_offsets(at);
        for bounds in bounds.windows(2) {
            let own = bounds[0] as usize - range.start..bounds[1] as usize - range.start;
            let shard_of = |located: &Located| located.shard.unwrap_or(choice.anywhere);
            let whole = Bag {
                shard: if own.is_empty() { choice.anywhere } else { shard_of(&located[own.start]) },
                table,
                dim,
                ids: &ids[own.clone()],
                located: &located[own.clone()],
                weights: weights.map(|weights| &weights[own.clone()]),
            };
            let is_there = choice.may_pool
                && own.len() > 1
                && whole.located.iter().all(|located| shard_of(located) == whole.shard);
            if is_there {
                places.push(self.bag(whole), 1.0);
            } else {
                for index in own {
                    let shard = shard_of(&located[index]);
                    let one = index..index + 1;
                    let alone = Bag {
                        shard,
                        ids: &ids[one.clone()],
                        located: &located[one],
                        weights: None,
                        ..whole
                    };
                    places.push(self.row(alone), weights.map_or(1.0, |weights| weights[index]));
                }
            }
            places.offsets.push(places.starts.len() as i64);
        }
        places
    }

    /// Asks for a row as it is, once; returns where it goes.
    fn row(&mut self, row: Bag<'_>) -> usize {
        let key = (row.table, row.ids[0]);
        if let Some(&start) = self.rows.get(&key) {
            return start;
        }
        let start = self.put(row);
        self.rows.insert(key, start);
        start
    }

    /// Asks for the sum of a bag; returns where it goes.
    fn bag(&mut self, bag: Bag<'_>) -> usize {
        let start = self.put(bag);
        let (part, _) = self.part_of[&(bag.shard, bag.table)];
        self.parts[part].is_pooled = true;
        start
    }

    fn put(&mut self, bag: Bag<'_>) -> usize {
        let (part, table) = self.part(bag.shard, bag.table, bag.dim);
        let part = &mut self.parts[part].tables[table];
        let before = part.values.len();
        part.values.extend(bag.located.iter().map(|located| located.row as i64));
        part.ids.extend_from_slice(bag.ids);
        part.lengths.push(bag.ids.len() as i64);
        if let Some(weights) = bag.weights {
            let all = part.weights.get_or_insert_with(Vec::new);
            all.resize(before, 1.0);
            all.extend_from_slice(weights);
        }
        let start = self.arena_words;
        part.starts.push(start);
        self.arena_words += bag.dim;
        start
    }

    fn part(&mut self, shard: u32, table: TableId, dim: usize) -> (usize, usize) {
        if let Some(&known) = self.part_of.get(&(shard, table)) {
            return known;
        }
        let known = self.parts.iter().position(|part| part.shard == shard);
        let part = known.unwrap_or_else(|| {
            self.parts.push(ShardPart { shard, is_pooled: false, tables: Vec::new() });
            self.parts.len() - 1
        });
        let tables = &mut self.parts[part].tables;
        tables.push(TablePart {
            table,
            dim,
            values: Vec::new(),
            ids: Vec::new(),
            lengths: Vec::new(),
            weights: None,
            starts: Vec::new(),
        });
        let found = (part, tables.len() - 1);
        self.part_of.insert((shard, table), found);
        found
    }
}

impl FeaturePlaces {
    fn push(&mut self, start: usize, weight: f32) {
        self.starts.push(start);
        if let Some(weights) = &mut self.weights {
            weights.push(weight);
        }
    }
}
