//! Page selection: the pages to read for the rows of a query.
//!
//! A row may lie on several pages, and a page read for one row brings others along. Choosing the
//! fewest pages is set cover; two choices are offered. [`one_pass`] goes through the rows once,
//! those with fewest pages first, because a row with one page leaves no choice and often brings the
//! others along. [`greedy`] reads the page with most rows still needed first, again and again.
//!
//! ```text
//! rows of a query ─▶ marked as needed ─▶ page chosen ─▶ its rows are needed no more ─▶ …
//!                                            └─▶ taken at once: the read flies meanwhile
//! ```
//!
//! The rows of several queries may be given together: pages they share are chosen once. Both are
//! pure, and take no memory beyond the [`Scratch`] once it has grown to the largest call.
//!
//! Source: MaxEmbed §6.1 (one pass selection, and greedy set cover as its baseline), §6.2.

mod greedy;
mod one_pass;
mod scratch;

use crate::index::RowPages;

pub use greedy::greedy;
pub use one_pass::one_pass;
pub use scratch::Scratch;

/// How pages are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Selection {
    /// [`one_pass`].
    #[default]
    OnePass,
    /// [`greedy`].
    Greedy,
}

impl Selection {
    /// Chooses pages for `rows`; see [`one_pass`] and [`greedy`].
    pub fn select(
        self,
        index: &impl RowPages,
        rows: &[u32],
        scratch: &mut Scratch,
        take: impl FnMut(u32, &[u32]),
    ) -> Selected {
        match self {
            Self::OnePass => one_pass(index, rows, scratch, take),
            Self::Greedy => greedy(index, rows, scratch, take),
        }
    }
}

/// What a selection came to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Selected {
    /// Pages chosen.
    pub page_count: u32,
    /// Rows they serve: each row asked for that lies on a page, once.
    pub row_count: u32,
}

#[cfg(test)]
mod tests;
