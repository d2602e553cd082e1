//! Newtypes of table, row and feature ids.

/// Position of a table in its [`Schema`](crate::Schema), from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TableId(pub u32);

/// Position of a row in its table, from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RowId(pub u64);

/// One row of one table. Orders by table, then by row: the order of the files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RowKey {
    /// The table.
    pub table: TableId,
    /// The row in that table.
    pub row: RowId,
}

impl RowKey {
    /// Names row `row` of table `table`.
    #[must_use]
    pub fn new(table: TableId, row: RowId) -> Self {
        Self { table, row }
    }
}
