//! Replication methods: which rows get further copies, within one budget.
//!
//! A *ratio* r allows `r * row_count` replicas, rounded down to the row, on as many pages as
//! these fill. Home pages that are not full may hold replicas too; pages are counted together.

mod before_partition;
mod connectivity;
mod fill;
mod marginal;

pub use before_partition::before_partition;
pub use connectivity::{
    best_bases, by_connectivity, connectivity_pages, connectivity_scores, with_connectivity_pages,
};
pub use fill::finer_and_filled;
pub use marginal::by_marginal_gain;
pub(crate) use marginal::{by_marginal_gain_in, BlockRules};
