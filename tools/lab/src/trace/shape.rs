//! Vocabulary growth of the 26 columns of Criteo-Kaggle's log.
//!
//! Discount and strength of each column solve two equations: the expected distinct tokens are
//! those of the log's first 60,000 rows, and the published ones after 45,840,617 samples
//! (`docs/reference/generator.md` lists both). The share of token 0 makes the distinct tokens of
//! 2,048 samples right (those of the fitted [`generator`](crate::generator)). Columns that are
//! functions of others solve the two for tokens of the other column in place of samples.
//!
//! Differs: chains are independent of one another; in the log some are correlated. A batch's rows
//! and a row's uses do not depend on it.

use super::growth::Growth;
use crate::generator::CRITEO_CARDINALITIES;

/// Where the tokens of a column come from.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Column {
    /// Position in a batch: 0 is C1.
    pub(crate) at: usize,
    /// Whether the column is a function of the one before it in [`COLUMNS`].
    pub(crate) is_function: bool,
    /// Growth over samples, or over the tokens of the column before.
    pub(crate) growth: Growth,
}

const fn drawn(number: usize, top_share: f64, discount: f64, strength: f64) -> Column {
    #[expect(clippy::indexing_slicing, reason = "a constant: checked when it is built")]
    let published = CRITEO_CARDINALITIES[number - 1];
    let token_count_max = published + published / 50;
    let growth = Growth { top_share, discount, strength, token_count_max };
    Column { at: number - 1, is_function: false, growth }
}

const fn function(number: usize, discount: f64, strength: f64) -> Column {
    let drawn = drawn(number, 0.0, discount, strength);
    Column { is_function: true, ..drawn }
}

/// The columns in the order they are made. Token 0 stands for the missing token and for the
/// few most popular ones together, where the log's head is heavier than the process's.
pub(crate) const COLUMNS: [Column; 26] = [
    drawn(3, 0.077, 0.8916, 26.94),
    function(12, 0.9762, 1_117.0),
    function(21, 0.9815, 316.7),
    function(16, 0.9730, 205.5),
    function(4, 0.8804, 951.5),
    function(24, 0.6964, 815.1),
    drawn(7, 0.01, 0.001, 1_179.0),
    function(11, 0.7478, 196.9),
    function(13, 0.0, 4_500.0),
    drawn(15, 0.424, 0.0473, 1_169.0),
    function(18, 0.7461, 109.6),
    function(2, 0.0064, 160.4),
    drawn(26, 0.697, 0.403, 1_475.0),
    drawn(10, 0.463, 0.2882, 1_862.0),
    drawn(1, 0.947, 0.0476, 114.2),
    drawn(5, 0.963, 0.0514, 19.61),
    drawn(6, 0.596, 0.001, 1.354),
    drawn(8, 0.96, 0.0526, 44.4),
    drawn(9, 0.884, 0.001, 0.0611),
    drawn(14, 0.365, 0.001, 1.503),
    drawn(17, 0.424, 0.001, 0.4632),
    drawn(19, 0.845, 0.001, 206.8),
    drawn(20, 0.635, 0.001, 0.1154),
    drawn(22, 0.912, 0.001, 1.077),
    drawn(23, 0.439, 0.001, 0.7662),
    drawn(25, 0.862, 0.001, 7.533),
];
