//! Generation order of a trace's columns.
//!
//! The first column of a chain is drawn sample by sample. The next one is a function of its
//! tokens: drawn token by token, in order of first appearance, and then looked up per sample.

#![expect(
    clippy::indexing_slicing,
    reason = "a parent is drawn for every token of the column before"
)]

use tierbed_core::env::mix64;
use tierbed_core::Result;

use super::growth::Tokens;
use super::shape::COLUMNS;
use super::TraceOptions;

/// Takes a column: its position (0 is C1), the row id of every sample, and its rows.
pub(crate) type ColumnSink<'a> = dyn FnMut(usize, &[u32], u32) -> Result<()> + 'a;

/// Makes the columns of a trace, one at a time.
#[derive(Debug)]
pub(crate) struct Columns {
    sample_count: u32,
    seed: u64,
}

impl Columns {
    pub(crate) fn new(options: &TraceOptions) -> Self {
        Self { sample_count: options.sample_count() as u32, seed: options.seed }
    }

    /// Hands every column to `sink`, in the order of [`COLUMNS`].
    pub(crate) fn for_each(&self, sink: &mut ColumnSink<'_>) -> Result<()> {
        let mut column = Tokens { draws: Vec::new(), token_count: 0 };
        for shape in &COLUMNS {
            let seed = mix64(self.seed ^ mix64(0x0074_7261_6365 + shape.at as u64));
            if shape.is_function {
                let parents = shape.growth.draw(column.token_count, seed);
                for token in &mut column.draws {
                    *token = parents.draws[*token as usize];
                }
                column.token_count = parents.token_count;
            } else {
                // The column before is given back before the next one is made.
                drop(std::mem::take(&mut column.draws));
                column = shape.growth.draw(self.sample_count, seed);
            }
            sink(shape.at, &column.draws, column.token_count)?;
        }
        Ok(())
    }
}
