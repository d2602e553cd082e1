//! A placement: home pages first, then replica pages.
//!
//! ```text
//!             page 0    page 1  │ page 2      home_page_count = 2, rows_per_page = 4
//! page_rows   3 1 4 0   2 5 1   │ 4 2 5       1 has its home on page 0 and a replica on page 1
//! home_page   [0, 0, 1, 0, 0, 1]              by row
//! ```
//!
//! Every row has exactly one home, which is one of the home pages. All its other seats are
//! replicas; they may be on home pages that had room, or on pages of their own.

mod file;
mod replica_budget;

use tierbed_core::{Error, Result};

pub use file::{decode_placement, read_placement, write_placement};
pub use replica_budget::ReplicaBudget;

/// Stands for "no page yet" while a placement is built.
const NO_PAGE: u32 = u32::MAX;

/// Rows `0..row_count` on pages of at most `rows_per_page` rows, checked.
///
/// What always holds: a page has 1 to `rows_per_page` distinct rows, every row sits on its home
/// page, and home pages come before replica pages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    page_offsets: Vec<u64>,
    page_rows: Vec<u32>,
    home_page: Vec<u32>,
    home_page_count: u32,
    rows_per_page: u32,
}

impl Placement {
    /// Starts a placement of `row_count` rows on pages of `rows_per_page`.
    ///
    /// # Errors
    ///
    /// `Invalid` when a page has no room for a row.
    pub fn builder(row_count: u32, rows_per_page: u32) -> Result<PlacementBuilder> {
        if rows_per_page == 0 {
            return Err(Error::invalid("a page must have room for one row at least"));
        }
        let placement = Self {
            page_offsets: vec![0],
            page_rows: Vec::new(),
            home_page: vec![NO_PAGE; row_count as usize],
            home_page_count: 0,
            rows_per_page,
        };
        Ok(PlacementBuilder { placement, last_page: vec![NO_PAGE; row_count as usize] })
    }

    /// Puts the rows on pages in the order given; every row must be there once.
    ///
    /// # Errors
    ///
    /// `Invalid` for a row that is missing, repeated or beyond the table.
    pub fn from_order(order: &[u32], rows_per_page: u32) -> Result<Self> {
        let row_count = u32::try_from(order.len())
            .map_err(|_| Error::invalid("a table has at most 2^32 - 1 rows"))?;
        let mut builder = Self::builder(row_count, rows_per_page)?;
        for page in order.chunks(rows_per_page as usize) {
            builder.push_home_page(page, &[])?;
        }
        builder.finish()
    }

    /// Returns how many rows are placed.
    #[must_use]
    pub fn row_count(&self) -> u32 {
        self.home_page.len() as u32
    }

    /// Returns how many rows a page holds at most.
    #[must_use]
    pub fn rows_per_page(&self) -> u32 {
        self.rows_per_page
    }

    /// Returns how many pages there are, replica pages included.
    #[must_use]
    pub fn page_count(&self) -> u32 {
        (self.page_offsets.len() - 1) as u32
    }

    /// Returns how many of the pages, the first ones, are homes.
    #[must_use]
    pub fn home_page_count(&self) -> u32 {
        self.home_page_count
    }

    /// Returns how many seats are replicas, on home pages and on replica pages.
    #[must_use]
    pub fn replica_count(&self) -> u64 {
        (self.page_rows.len() - self.home_page.len()) as u64
    }

    /// Returns the rows of page `page`, or `None` past the end.
    #[must_use]
    pub fn page(&self, page: u32) -> Option<&[u32]> {
        let at = page as usize;
        let (&begin, &end) = (self.page_offsets.get(at)?, self.page_offsets.get(at + 1)?);
        self.page_rows.get(begin as usize..end as usize)
    }

    /// Returns the pages in order: home pages, then replica pages.
    #[expect(clippy::indexing_slicing, reason = "offsets rise to the number of seats")]
    pub fn pages(&self) -> impl ExactSizeIterator<Item = &[u32]> + Clone {
        self.page_offsets.windows(2).map(|pair| match *pair {
            [begin, end] => &self.page_rows[begin as usize..end as usize],
            _ => unreachable!("windows of two offsets"),
        })
    }

    /// Returns each row's home page, `[row_count]`.
    #[must_use]
    pub fn home_pages(&self) -> &[u32] {
        &self.home_page
    }

    /// Returns where each page begins, `[page_count + 1]`, and the rows of all pages.
    #[must_use]
    pub fn as_parts(&self) -> (&[u64], &[u32]) {
        (&self.page_offsets, &self.page_rows)
    }

    /// Returns the home pages and as many replica pages, in order, as `budget` allows; the last
    /// page is shortened to the row.
    ///
    /// Where replica pages are in order of worth, this is the placement of a lower ratio.
    /// Replicas on home pages count but stay: they cost no page.
    #[must_use]
    #[expect(clippy::indexing_slicing, reason = "page counts are at most those of the offsets")]
    pub fn with_replicas_at_most(&self, budget: ReplicaBudget) -> Self {
        let home_page_count = self.home_page_count as usize;
        let page_count = home_page_count.saturating_add(budget.page_count as usize);
        let page_count = page_count.min(self.page_offsets.len() - 1);
        let homes_end = self.page_offsets[home_page_count];
        let seat_count = self.home_page.len() as u64 + budget.replica_count;
        let end = seat_count.max(homes_end).min(self.page_offsets[page_count]);
        let mut shorter = self.clone();
        shorter.page_offsets.retain(|&offset| offset < end);
        shorter.page_offsets.push(end);
        shorter.page_rows.truncate(end as usize);
        assert!(shorter.page_rows.len() >= shorter.home_page.len(), "every row keeps its home");
        shorter
    }
}

/// Collects pages into a [`Placement`]: home pages first, then replica pages.
#[derive(Debug)]
pub struct PlacementBuilder {
    placement: Placement,
    /// By row: the last page that holds it; finds a row that is twice on a page.
    last_page: Vec<u32>,
}

impl PlacementBuilder {
    /// Starts from the pages of `homes`, which are kept with their replicas.
    ///
    /// # Errors
    ///
    /// `Invalid` when `homes` has replica pages before home pages; one built here never has.
    pub fn from_homes(homes: &Placement) -> Result<Self> {
        let mut builder = Placement::builder(homes.row_count(), homes.rows_per_page)?;
        for (page, rows) in homes.pages().enumerate() {
            let is_home = |row: u32| homes.home_page.get(row as usize) == Some(&(page as u32));
            let (at_home, replicas): (Vec<u32>, Vec<u32>) =
                rows.iter().partition(|&&row| is_home(row));
            if at_home.is_empty() {
                builder.push_replica_page(&replicas)?;
            } else {
                builder.push_home_page(&at_home, &replicas)?;
            }
        }
        Ok(builder)
    }

    /// Adds a page that is the home of `homes`, and holds `replicas` of other rows behind them.
    ///
    /// # Errors
    ///
    /// `Invalid` for a page without homes or over capacity, for a row beyond the table, with two
    /// homes or twice on the page, and behind a replica page.
    pub fn push_home_page(&mut self, homes: &[u32], replicas: &[u32]) -> Result<()> {
        let page = self.placement.page_count();
        if page != self.placement.home_page_count {
            return Err(Error::invalid("home pages come before replica pages").with("page", page));
        }
        if homes.is_empty() {
            return Err(Error::invalid("a home page must be the home of a row").with("page", page));
        }
        for &row in homes {
            let home = self.placement.home_page.get_mut(row as usize);
            let home = home.ok_or_else(|| beyond_the_table(row, page))?;
            if *home != NO_PAGE {
                return Err(Error::invalid("row has two homes")
                    .with("row", row)
                    .with("page", page)
                    .with("other_page", *home));
            }
            *home = page;
        }
        self.push_page(&[homes, replicas])?;
        self.placement.home_page_count += 1;
        Ok(())
    }

    /// Adds a page of replicas only.
    ///
    /// # Errors
    ///
    /// `Invalid` for an empty page or one over capacity, for a row beyond the table or twice on
    /// the page.
    pub fn push_replica_page(&mut self, rows: &[u32]) -> Result<()> {
        if rows.is_empty() {
            let page = self.placement.page_count();
            return Err(Error::invalid("a replica page must hold a row").with("page", page));
        }
        self.push_page(&[rows])
    }

    fn push_page(&mut self, groups: &[&[u32]]) -> Result<()> {
        let page = self.placement.page_count();
        let rows_per_page = self.placement.rows_per_page;
        if page == NO_PAGE {
            return Err(Error::invalid("a placement has at most 2^32 - 1 pages"));
        }
        let row_count: usize = groups.iter().map(|rows| rows.len()).sum();
        if row_count > rows_per_page as usize {
            return Err(Error::invalid("page has more rows than room")
                .with("page", page)
                .with("row_count", row_count)
                .with("rows_per_page", rows_per_page));
        }
        for &row in groups.iter().copied().flatten() {
            let last = self.last_page.get_mut(row as usize);
            let last = last.ok_or_else(|| beyond_the_table(row, page))?;
            if std::mem::replace(last, page) == page {
                return Err(Error::invalid("row is twice on a page")
                    .with("row", row)
                    .with("page", page));
            }
            self.placement.page_rows.push(row);
        }
        self.placement.page_offsets.push(self.placement.page_rows.len() as u64);
        Ok(())
    }

    /// Returns the placement.
    ///
    /// # Errors
    ///
    /// `Invalid` when a row has no home.
    pub fn finish(self) -> Result<Placement> {
        match self.placement.home_page.iter().position(|&home| home == NO_PAGE) {
            Some(row) => Err(Error::invalid("row has no home page").with("row", row)),
            None => Ok(self.placement),
        }
    }
}

fn beyond_the_table(row: u32, page: u32) -> Error {
    Error::invalid("page holds a row beyond the table").with("row", row).with("page", page)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn placement() -> Placement {
        let mut builder = Placement::builder(6, 4).expect("room");
        builder.push_home_page(&[3, 1, 4, 0], &[]).expect("fits");
        builder.push_home_page(&[2, 5], &[1]).expect("fits");
        builder.push_replica_page(&[4, 2, 5]).expect("fits");
        builder.push_replica_page(&[0, 5]).expect("fits");
        builder.finish().expect("all rows have homes")
    }

    #[test]
    fn pages_and_homes_are_as_drawn() {
        let placement = placement();
        assert_eq!((placement.page_count(), placement.home_page_count()), (4, 2));
        assert_eq!(placement.page(1), Some(&[2, 5, 1][..]));
        assert_eq!(placement.page(4), None);
        assert_eq!(placement.home_pages(), [0, 0, 1, 0, 0, 1]);
        assert_eq!(placement.replica_count(), 6);
        assert_eq!(placement.pages().map(<[u32]>::len).collect::<Vec<_>>(), [4, 3, 3, 2]);
    }

    #[test]
    fn a_lower_ratio_is_a_prefix_to_the_row() {
        let placement = placement();
        let with = |replica_count: u64, page_count: u64| {
            let total_page_count = 2 + page_count;
            placement.with_replicas_at_most(ReplicaBudget {
                replica_count,
                page_count,
                total_page_count,
            })
        };
        for replica_count in 1..=6 {
            let shorter = with(replica_count, 2);
            assert_eq!(shorter.replica_count(), replica_count);
            assert_eq!(shorter.home_pages(), placement.home_pages());
            let pages: Vec<u32> = shorter.pages().flatten().copied().collect();
            let all: Vec<u32> = placement.pages().flatten().copied().collect();
            assert_eq!(pages, all[..pages.len()]);
        }
        assert_eq!(with(4, 2).page(2), Some(&[4, 2, 5][..]));
        assert_eq!(with(3, 2).page(2), Some(&[4, 2][..]));
        assert_eq!(with(9, 9), placement);
        assert_eq!(with(9, 1).page_count(), 3, "pages are counted too");
        // Replicas on home pages stay: they cost no page.
        assert_eq!(with(0, 0).replica_count(), 1);
    }

    #[test]
    fn what_breaks_a_promise_is_refused() {
        type Break = fn(&mut PlacementBuilder) -> Result<()>;
        let breaks: [(&str, Break); 8] = [
            ("more rows than room", |b| b.push_home_page(&[2, 3, 4], &[5, 1])),
            ("two homes", |b| b.push_home_page(&[2, 0], &[])),
            ("two homes", |b| b.push_home_page(&[2, 2], &[])),
            ("twice on a page", |b| b.push_home_page(&[2], &[2])),
            ("beyond the table", |b| b.push_home_page(&[6], &[])),
            ("beyond the table", |b| b.push_replica_page(&[6])),
            ("must hold a row", |b| b.push_replica_page(&[])),
            ("before replica pages", |b| {
                b.push_replica_page(&[0])?;
                b.push_home_page(&[2], &[])
            }),
        ];
        for (told, act) in breaks {
            let mut builder = Placement::builder(6, 4).expect("room");
            builder.push_home_page(&[0, 1], &[]).expect("fits");
            let error = act(&mut builder).expect_err(told);
            assert!(error.to_string().contains(told), "{error}");
        }
        let mut builder = Placement::builder(2, 4).expect("room");
        builder.push_home_page(&[0], &[]).expect("fits");
        assert!(builder.finish().is_err(), "row 1 has no home");
        assert!(Placement::builder(2, 0).is_err());
        assert!(Placement::from_order(&[0, 2], 4).is_err());
    }

    #[test]
    fn an_order_fills_page_after_page() {
        let placement = Placement::from_order(&[4, 2, 0, 1, 3], 2).expect("all rows once");
        let pages: Vec<&[u32]> = placement.pages().collect();
        assert_eq!(pages, [&[4, 2][..], &[0, 1], &[3]]);
    }
}
