//! Rows that are elsewhere: other processes have them, and a view asks these.

use std::fmt;

use tierbed_core::{Bags, Result, Schema};
use tierbed_kernels::FeatureLayout;

use crate::lookup::LookupStats;

/// A lookup of bags, and where its vectors go.
#[derive(Debug)]
pub struct Ask<'a> {
    /// Tables, poolings and columns.
    pub plan: &'a FeatureLayout,
    /// Bags of the plan's features.
    pub bags: Bags<'a>,
    /// `[B, output_dim]`, or `[E, D]` unpooled; it is overwritten.
    pub out: &'a mut [f32],
}

/// Who has the rows of a generation. See [`View::elsewhere`](crate::View::elsewhere).
pub trait Elsewhere: fmt::Debug + Send + Sync {
    /// Returns what tells the generation from every other.
    fn identity(&self) -> &str;

    /// Answers lookups as [`Snapshot::lookup`](crate::Snapshot::lookup) answers each, to the last
    /// bit, with as few questions as it takes for all of them.
    ///
    /// # Errors
    /// As `Snapshot::lookup`; `Closed` where nobody who has a row answers.
    fn lookup(&self, schema: &Schema, asks: &mut [Ask<'_>]) -> Result<LookupStats>;
}
