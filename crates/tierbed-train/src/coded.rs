//! Tables kept in memory in fewer bytes a row: looked up, never trained.
//!
//! For serving and evaluation where tables fit memory once their rows are f16, bf16 or int8. A
//! rank of an exchange holds some rows of a table; whoever holds all of them is the case of one
//! rank. Every row is there: one that was never written has the code of its initial value.
//! Lookups decode while they pool. An update is refused: a step smaller than half a code's last
//! place would be lost, so rows train in f32 (`WindowEngine`) and are coded when they are done.
//!
//! ```text
//! table 0: | code of row first | code of the next | ...      code_bytes apart, in large pages
//! ```

#![expect(clippy::indexing_slicing, reason = "the batch was checked, and its tables found")]

use std::ops::Range;

use tierbed_core::store::out_of_range;
use tierbed_core::{Bags, Error, Result, Schema, TableId, TableSchema};
use tierbed_io::WordBuf;
use tierbed_kernels::codec::{Codec, Codes};
use tierbed_kernels::{fill_initial, Destination, FeatureLayout, Kernels, Matrix, PoolFeature};

/// Tables of codes.
#[derive(Debug)]
pub struct CodedTables {
    kernels: Kernels,
    schema: Schema,
    /// By id.
    tables: Vec<HeldCodes>,
    /// First byte of the code of each index of the batch.
    starts: Vec<usize>,
}

/// The held rows of a table.
#[derive(Debug)]
struct HeldCodes {
    codec: Codec,
    code_bytes: usize,
    rows: Range<u64>,
    words: WordBuf,
}

impl HeldCodes {
    /// Codes the initial values of `rows`.
    fn initial(table: &TableSchema, codec: Codec, rows: Range<u64>) -> Result<Self> {
        let dim = table.dim as usize;
        codec.check_dim(dim)?;
        if rows.start > rows.end || rows.end > table.row_count {
            return Err(out_of_range(table, format_args!("{}..{}", rows.start, rows.end)));
        }
        let code_bytes = codec.code_bytes(dim);
        let byte_count = usize::try_from(rows.end - rows.start)
            .ok()
            .and_then(|count| count.checked_mul(code_bytes))
            .ok_or_else(|| Error::invalid("table does not fit the address space"))?;
        let mut words = WordBuf::new(byte_count.div_ceil(size_of::<f32>()));
        let codes = bytemuck::cast_slice_mut::<f32, u8>(&mut words);
        let mut numbers = vec![0.0; dim];
        for (row, code) in rows.clone().zip(codes.chunks_exact_mut(code_bytes)) {
            fill_initial(&table.init, table.seed, row, &mut numbers);
            codec.encode(&numbers, code).map_err(|error| error.with("table", &table.name))?;
        }
        assert!(byte_count <= size_of_val::<[f32]>(&words), "a row has no room for its code");
        Ok(Self { codec, code_bytes, rows, words })
    }

    fn codes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.words)
    }

    /// Returns the bytes of the codes of `count` rows from `first` on.
    fn bytes_of(&self, first: u64, count: usize) -> Option<Range<usize>> {
        let end = first.checked_add(count as u64)?;
        if first < self.rows.start || end > self.rows.end {
            return None;
        }
        let start = (first - self.rows.start) as usize * self.code_bytes;
        Some(start..start + count * self.code_bytes)
    }
}

impl Default for CodedTables {
    fn default() -> Self {
        Self::new()
    }
}

impl CodedTables {
    /// Makes a set of no tables.
    #[must_use]
    pub fn new() -> Self {
        let kernels = Kernels::detect();
        Self { kernels, schema: Schema::default(), tables: Vec::new(), starts: Vec::new() }
    }

    /// Returns the tables; row counts are those of whole tables.
    #[must_use]
    pub fn schema(&self) -> &Schema {
        &self.schema
    }

    /// Adds `rows` of a table, as initial values in `codec`, or finds the same again.
    ///
    /// # Errors
    /// `Invalid` for rows that the table does not have, an initial value that the codec cannot
    /// keep, or a table of that name that differs.
    pub fn add_table(
        &mut self,
        table: TableSchema,
        codec: Codec,
        rows: Range<u64>,
    ) -> Result<TableId> {
        if self.schema.id_of(&table.name).is_some() {
            let id = self.schema.add(table.clone())?;
            let held = self.held(id)?;
            if held.codec == codec && held.rows == rows {
                return Ok(id);
            }
            return Err(Error::invalid("table exists with another codec or other rows")
                .with("table", table.name)
                .with("found", format_args!("{} {:?}", held.codec.name(), held.rows)));
        }
        table.check()?;
        let held = HeldCodes::initial(&table, codec, rows)?;
        let id = self.schema.add(table)?;
        self.tables.push(held);
        assert_eq!(self.tables.len(), id.0 as usize + 1, "every table has its codes");
        Ok(id)
    }

    /// Overwrites rows from `first` on with the codes of `rows`, `[N, dim]`.
    ///
    /// # Errors
    /// `Invalid` for rows that are not held here, and for a row with a number that the codec
    /// cannot keep: rows before it are written then.
    pub fn write_rows(&mut self, table: TableId, first: u64, rows: &[f32]) -> Result<()> {
        let dim = self.schema.table(table)?.dim as usize;
        let (codec, codes) = self.codes_mut(table, first, whole_rows(rows.len(), dim)?)?;
        let code_bytes = codec.code_bytes(dim);
        let all = rows.chunks_exact(dim).zip(codes.chunks_exact_mut(code_bytes));
        for (row, (numbers, code)) in (first..).zip(all) {
            codec.encode(numbers, code).map_err(|error| error.with("row_id", row))?;
        }
        Ok(())
    }

    /// Overwrites rows from `first` on with `codes`, `[N, code_bytes]`, in the table's codec.
    ///
    /// # Errors
    /// `Invalid` for rows that are not held here.
    pub fn write_codes(&mut self, table: TableId, first: u64, codes: &[u8]) -> Result<()> {
        let count = whole_rows(codes.len(), self.held(table)?.code_bytes)?;
        self.codes_mut(table, first, count)?.1.copy_from_slice(codes);
        Ok(())
    }

    /// Decodes rows from `first` on to `out`, `[N, dim]`.
    ///
    /// # Errors
    /// `Invalid` for rows that are not held here.
    pub fn read_rows(&self, table: TableId, first: u64, out: &mut [f32]) -> Result<()> {
        let dim = self.schema.table(table)?.dim as usize;
        let arena = self.codes(table, first, whole_rows(out.len(), dim)?)?;
        let held = self.held(table)?;
        let starts: Vec<usize> = (0..arena.len()).step_by(held.code_bytes).collect();
        let codes = Codes { codec: &held.codec, arena, starts: &starts, weights: None };
        self.kernels.decode_rows(codes, dim, out);
        Ok(())
    }

    /// Returns the codes of `count` rows from `first` on, one behind the other.
    ///
    /// # Errors
    /// `Invalid` for rows that are not held here.
    pub fn codes(&self, table: TableId, first: u64, count: usize) -> Result<&[u8]> {
        let held = self.held(table)?;
        let codes = held.bytes_of(first, count).and_then(|bytes| held.codes().get(bytes));
        codes.ok_or_else(|| self.not_held(table, first, count))
    }

    /// Returns the codec of `table` and the rows of it that are held here.
    ///
    /// # Errors
    /// `Invalid` for an unknown table.
    pub fn kept_as(&self, table: TableId) -> Result<(&Codec, Range<u64>)> {
        let held = self.held(table)?;
        Ok((&held.codec, held.rows.clone()))
    }

    /// Returns the bytes that the rows of `table` take here.
    ///
    /// # Errors
    /// `Invalid` for an unknown table.
    pub fn held_bytes(&self, table: TableId) -> Result<usize> {
        Ok(size_of_val::<[f32]>(&self.held(table)?.words))
    }

    /// Pools the rows of `bags` into `out`, overwritten: `[B, output_dim]`, or `[E, D]` without
    /// pooling.
    ///
    /// # Errors
    /// `Invalid` for shapes that do not match, ids out of range, and rows that are not held here;
    /// nothing is written then.
    pub fn lookup(&mut self, plan: &FeatureLayout, bags: &Bags<'_>, out: &mut [f32]) -> Result<()> {
        plan.check_shape(bags, out.len())?;
        self.lookup_to(plan, bags, &mut Matrix::output(plan, bags, out))
    }

    /// Pools the rows of `bags` into the places that `to` says, with the bits of
    /// [`lookup`](Self::lookup).
    ///
    /// # Errors
    /// As [`lookup`](Self::lookup).
    pub fn lookup_to(
        &mut self,
        plan: &FeatureLayout,
        bags: &Bags<'_>,
        to: &mut dyn Destination,
    ) -> Result<()> {
        plan.check(&self.schema, bags, plan.output_len(bags))?;
        let mut starts = std::mem::take(&mut self.starts);
        starts.clear();
        let result = self.find(plan, bags, &mut starts);
        if result.is_ok() {
            self.pool(plan, bags, &starts, to);
        }
        self.starts = starts;
        result
    }

    // Finds the codes of a checked batch.
    fn find(&self, plan: &FeatureLayout, bags: &Bags<'_>, starts: &mut Vec<usize>) -> Result<()> {
        for (at, feature) in plan.features().iter().enumerate() {
            let held = self.held(feature.table)?;
            for &id in &bags.indices[plan.range(bags, at)] {
                let Some(bytes) = held.bytes_of(id.unsigned_abs(), 1) else {
                    let error = self.not_held(feature.table, id.unsigned_abs(), 1);
                    return Err(error.with("feature", at));
                };
                starts.push(bytes.start);
            }
        }
        Ok(())
    }

    fn pool(
        &self,
        plan: &FeatureLayout,
        bags: &Bags<'_>,
        starts: &[usize],
        to: &mut dyn Destination,
    ) {
        let mut first = 0;
        let mut features = Vec::with_capacity(plan.features().len());
        for (at, feature) in plan.features().iter().enumerate() {
            let held = &self.tables[feature.table.0 as usize];
            let range = plan.range(bags, at);
            let end = first + range.len();
            let codes = Codes {
                codec: &held.codec,
                arena: held.codes(),
                starts: &starts[first..end],
                weights: bags.weights.map(|weights| &weights[range]),
            };
            first = end;
            let (offsets, pooling) = (bags.feature_offsets(at), feature.pooling);
            let dim = feature.columns.dim;
            features.push((codes, PoolFeature { feature: at, offsets, pooling, dim }));
        }
        assert_eq!(first, starts.len(), "the code of an index belongs to no feature");
        self.kernels.pool_codes_to(&features, to);
    }

    fn held(&self, table: TableId) -> Result<&HeldCodes> {
        self.schema.table(table)?;
        self.tables.get(table.0 as usize).ok_or_else(|| Error::invalid("no such table"))
    }

    fn codes_mut(
        &mut self,
        table: TableId,
        first: u64,
        count: usize,
    ) -> Result<(Codec, &mut [u8])> {
        let Some(bytes) = self.held(table)?.bytes_of(first, count) else {
            return Err(self.not_held(table, first, count));
        };
        let held = self.tables.get_mut(table.0 as usize);
        let held = held.ok_or_else(|| Error::invalid("no such table"))?;
        let codes = bytemuck::cast_slice_mut::<f32, u8>(&mut held.words).get_mut(bytes);
        let codes = codes.ok_or_else(|| Error::invalid("rows lie outside their table"))?;
        Ok((held.codec.clone(), codes))
    }

    fn not_held(&self, table: TableId, first: u64, count: usize) -> Error {
        let mut error = Error::invalid("rows are not held here").with("first_row", first);
        if let (Ok(shape), Ok(held)) = (self.schema.table(table), self.held(table)) {
            error =
                error.with("table", &shape.name).with("held_rows", format_args!("{:?}", held.rows));
        }
        error.with("rows", count)
    }
}

/// Returns how many rows of `row_values` there are in `values`.
fn whole_rows(values: usize, row_values: usize) -> Result<usize> {
    if row_values == 0 || !values.is_multiple_of(row_values) {
        return Err(Error::invalid("rows must be whole")
            .with("values", values)
            .with("row_values", row_values));
    }
    Ok(values / row_values)
}

#[cfg(test)]
mod tests;
