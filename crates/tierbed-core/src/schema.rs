//! Table schemas: dimensions, optimizer, initial values, record length.
//!
//! A row record is `dim` weights, then the optimizer's state, then a use count, all 4-byte
//! little-endian words with no header:
//!
//! ```text
//! | dim f32 weights | state_words f32 | u32 use_count |      record_bytes = 4 * record_words
//! ```
//!
//! The use count (how many update steps touched the row) rides along because a training store
//! writes the row anyway; publishing and caching read it.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{Error, Result, TableId};

/// Most elements a row may have.
pub const DIM_MAX: u32 = 4096;
/// Most rows a table may have (40 bits: page numbers and packed keys rely on it).
pub const ROW_COUNT_MAX: u64 = 1 << 40;
/// Most tables a schema may have.
pub const TABLES_MAX: usize = 1 << 16;

/// Names of Tierbed's own tables start so: indexes of open vocabularies. Their records hold no
/// embedding, and they are never looked up, exported or published as rows.
pub const OWN_PREFIX: &str = "_ids.";

/// Which optimizer's state rides with the rows of a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OptimizerKind {
    /// No state.
    Sgd,
    /// One accumulator per weight.
    Adagrad,
    /// One accumulator per row.
    RowWiseAdagrad,
    /// First and second moment per weight, touched rows only ("lazy").
    Adam,
    /// First moment per weight, second moment per row.
    PartialRowWiseAdam,
}

impl OptimizerKind {
    /// Every kind, for tests and tables.
    pub const ALL: [Self; 5] =
        [Self::Sgd, Self::Adagrad, Self::RowWiseAdagrad, Self::Adam, Self::PartialRowWiseAdam];

    /// Returns the number of state words behind `dim` weights.
    #[must_use]
    pub fn state_words(self, dim: usize) -> usize {
        match self {
            Self::Sgd => 0,
            Self::Adagrad => dim,
            Self::RowWiseAdagrad => 1,
            Self::Adam => 2 * dim,
            Self::PartialRowWiseAdam => dim + 1,
        }
    }
}

/// Initial value of a row never written: a pure function of (seed, table, row, element).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum InitSpec {
    /// Every weight is `value`.
    Constant {
        /// The value.
        value: f32,
    },
    /// Weights uniform in `[low, high)`.
    Uniform {
        /// Lower bound, included.
        low: f32,
        /// Upper bound, excluded.
        high: f32,
    },
    /// Weights normal with `mean` and standard deviation `std`.
    Normal {
        /// Mean.
        mean: f32,
        /// Standard deviation.
        std: f32,
    },
}

/// One embedding table.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TableSchema {
    /// Unique name: letters, digits, `_`, `-`, `.`; it also names the table's file.
    pub name: String,
    /// Number of rows; row ids run from 0 to `row_count - 1`.
    pub row_count: u64,
    /// Elements per row.
    pub dim: u32,
    /// Optimizer whose state rides with each row.
    pub optimizer: OptimizerKind,
    /// Initial value of every accumulator word (Adagrad's `initial_accumulator_value`).
    pub state_init: f32,
    /// Initial weights.
    pub init: InitSpec,
    /// Seed of the initial weights.
    pub seed: u64,
}

impl TableSchema {
    /// Returns the error of another table of this name: only what differs, in the user's words.
    fn differs_from(&self, asked: &Self) -> Error {
        let text = |value: &dyn fmt::Debug| format!("{value:?}");
        let fields = [
            ("num_embeddings", text(&self.row_count), text(&asked.row_count)),
            ("embedding_dim", text(&self.dim), text(&asked.dim)),
            ("optimizer", text(&self.optimizer), text(&asked.optimizer)),
            ("initial_accumulator_value", text(&self.state_init), text(&asked.state_init)),
            ("init", text(&self.init), text(&asked.init)),
            ("seed", text(&self.seed), text(&asked.seed)),
        ];
        let mut other = fields.iter().filter(|(_, stored, asked)| stored != asked).peekable();
        let is_seed_alone = other.peek().is_some_and(|(field, ..)| *field == "seed");
        let told: Vec<String> = other
            .map(|(field, stored, asked)| format!("{field} is {stored}, not {asked}"))
            .collect();
        let error = Error::invalid("table exists with another shape, optimizer or seed")
            .with("table", &self.name)
            .with("differs", told.join("; "));
        if is_seed_alone {
            return error.with(
                "remedy",
                format_args!(
                    "open the store with the seed it was made with (0 if none was given), or give \
                     the table seed {}",
                    self.seed
                ),
            );
        }
        error.with("remedy", "give the table as it is stored, or choose another name or folder")
    }

    /// Describes a table of rows and nothing else: no optimizer state, zero where nothing was
    /// written. For snapshots, tools and tests, and as the base of a longer description.
    #[must_use]
    pub fn plain(name: impl Into<String>, row_count: u64, dim: u32) -> Self {
        Self {
            name: name.into(),
            row_count,
            dim,
            optimizer: OptimizerKind::Sgd,
            state_init: 0.0,
            init: InitSpec::Constant { value: 0.0 },
            seed: 0,
        }
    }

    /// Returns the words of one record: weights, state, use count.
    #[must_use]
    pub fn record_words(&self) -> usize {
        let dim = self.dim as usize;
        dim + self.optimizer.state_words(dim) + 1
    }

    /// Returns the bytes of one record.
    #[must_use]
    pub fn record_bytes(&self) -> usize {
        4 * self.record_words()
    }

    /// Returns the bytes of all records, touched or not.
    #[must_use]
    pub fn table_bytes(&self) -> u64 {
        self.row_count * self.record_bytes() as u64
    }

    /// Returns whether the table is Tierbed's own, beside a user's: its name starts with
    /// [`OWN_PREFIX`].
    #[must_use]
    pub fn is_own(&self) -> bool {
        self.name.starts_with(OWN_PREFIX)
    }

    /// Checks names and ranges.
    ///
    /// # Errors
    /// `Invalid`, naming the table and the field.
    pub fn check(&self) -> Result<()> {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
        if self.name.is_empty()
            || self.name.len() > 128
            || self.name.starts_with('.')
            || !self.name.chars().all(is_plain)
        {
            return Err(Error::invalid(
                "table name must be 1 to 128 of [A-Za-z0-9_.-], not starting with '.'",
            )
            .with("table", &self.name));
        }
        if self.dim == 0 || self.dim > DIM_MAX {
            return Err(Error::invalid("embedding_dim out of range")
                .with("table", &self.name)
                .with("embedding_dim", self.dim)
                .with("allowed", format_args!("1..={DIM_MAX}")));
        }
        if self.row_count == 0 || self.row_count > ROW_COUNT_MAX {
            return Err(Error::invalid("num_embeddings out of range")
                .with("table", &self.name)
                .with("num_embeddings", self.row_count)
                .with("allowed", format_args!("1..={ROW_COUNT_MAX}")));
        }
        let is_finite = match self.init {
            InitSpec::Constant { value } => value.is_finite(),
            InitSpec::Uniform { low, high } => low.is_finite() && high.is_finite() && low <= high,
            InitSpec::Normal { mean, std } => mean.is_finite() && std.is_finite() && std >= 0.0,
        };
        if !is_finite || !self.state_init.is_finite() {
            return Err(Error::invalid("initial values must be finite and ordered")
                .with("table", &self.name));
        }
        Ok(())
    }
}

/// The tables of a store, in the order they were added.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Schema {
    tables: Vec<TableSchema>,
}

impl Schema {
    /// Builds a schema of `tables`.
    ///
    /// # Errors
    /// `Invalid` when a table is out of range or a name occurs twice.
    pub fn new(tables: Vec<TableSchema>) -> Result<Self> {
        let mut schema = Self::default();
        for table in tables {
            schema.add(table)?;
        }
        Ok(schema)
    }

    /// Adds `table` and returns its id; an identical table already there keeps its id.
    ///
    /// # Errors
    /// `Invalid` when the table is out of range, or differs from the one of that name.
    pub fn add(&mut self, table: TableSchema) -> Result<TableId> {
        table.check()?;
        if let Some(id) = self.id_of(&table.name) {
            let known = self.table(id)?;
            if known == &table {
                return Ok(id);
            }
            return Err(known.differs_from(&table));
        }
        if self.tables.len() >= TABLES_MAX {
            return Err(Error::invalid("too many tables").with("tables_max", TABLES_MAX));
        }
        let id = TableId(u32::try_from(self.tables.len()).unwrap_or(u32::MAX));
        self.tables.push(table);
        Ok(id)
    }

    /// Makes table `id` `row_count` rows long; a table already as long stays as it is.
    ///
    /// # Errors
    /// `Invalid` when there is no such table or no table may be that long.
    pub fn grow(&mut self, id: TableId, row_count: u64) -> Result<()> {
        let longer = TableSchema { row_count, ..self.table(id)?.clone() };
        longer.check()?;
        if let Some(table) = self.tables.get_mut(id.0 as usize) {
            table.row_count = table.row_count.max(row_count);
        }
        Ok(())
    }

    /// Returns table `id`.
    ///
    /// # Errors
    /// `Invalid` when there is no such table.
    pub fn table(&self, id: TableId) -> Result<&TableSchema> {
        self.tables.get(id.0 as usize).ok_or_else(|| {
            Error::invalid("no such table").with("table_id", id.0).with("tables", self.tables.len())
        })
    }

    /// Returns the id of the table called `name`.
    #[must_use]
    pub fn id_of(&self, name: &str) -> Option<TableId> {
        let at = self.tables.iter().position(|table| table.name == name)?;
        u32::try_from(at).ok().map(TableId)
    }

    /// Returns all tables, in id order.
    #[must_use]
    pub fn tables(&self) -> &[TableSchema] {
        &self.tables
    }

    /// Returns the bytes of all records of all tables.
    #[must_use]
    pub fn table_bytes(&self) -> u64 {
        self.tables.iter().map(TableSchema::table_bytes).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(name: &str) -> TableSchema {
        TableSchema { optimizer: OptimizerKind::Adam, seed: 1, ..TableSchema::plain(name, 10, 4) }
    }

    #[test]
    fn record_holds_weights_state_and_count() {
        assert_eq!(table("a").record_words(), 4 + 8 + 1);
        let words: Vec<_> = OptimizerKind::ALL.iter().map(|kind| kind.state_words(36)).collect();
        assert_eq!(words, [0, 36, 1, 72, 37]);
    }

    #[test]
    fn same_table_twice_is_one_table_and_another_shape_is_refused() {
        let mut schema = Schema::new(vec![table("a"), table("b")]).unwrap();
        assert_eq!(schema.add(table("b")).unwrap(), TableId(1));
        let other = TableSchema { dim: 5, ..table("b") };
        assert_eq!(schema.add(other).unwrap_err().kind(), crate::ErrorKind::Invalid);
    }

    #[test]
    fn only_what_differs_is_told_of_a_table_that_exists() {
        let mut schema = Schema::new(vec![table("a")]).unwrap();
        let mut told = |other: TableSchema| schema.add(other).unwrap_err().to_string();
        let longer = told(TableSchema { row_count: 11, dim: 5, ..table("a") });
        assert!(longer.contains("num_embeddings is 10, not 11; embedding_dim is 4, not 5,"));
        assert!(!longer.contains("seed is") && longer.contains("as it is stored"), "{longer}");
        let seeded = told(TableSchema { seed: 9, ..table("a") });
        assert!(seeded.contains("differs: seed is 1, not 9, remedy: open the store with the seed"));
    }

    #[test]
    fn a_table_grows_and_never_shrinks() {
        let mut schema = Schema::new(vec![table("a")]).unwrap();
        schema.grow(TableId(0), 40).unwrap();
        schema.grow(TableId(0), 20).unwrap();
        assert_eq!(schema.table(TableId(0)).unwrap().row_count, 40);
        assert!(schema.grow(TableId(1), 40).is_err());
        assert!(schema.grow(TableId(0), ROW_COUNT_MAX + 1).is_err());
    }

    #[test]
    fn refuses_names_that_are_paths_and_sizes_out_of_range() {
        for name in ["", "a/b", "..", ".hidden", "a b"] {
            assert!(table(name).check().is_err(), "{name}");
        }
        assert!(TableSchema { dim: 0, ..table("a") }.check().is_err());
        assert!(TableSchema { row_count: 0, ..table("a") }.check().is_err());
        let backwards = InitSpec::Uniform { low: 1.0, high: 0.0 };
        assert!(TableSchema { init: backwards, ..table("a") }.check().is_err());
    }
}
