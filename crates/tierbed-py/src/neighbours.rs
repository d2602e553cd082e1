//! Files of neighbours, for Python: how they are written.

use std::path::{Path, PathBuf};

use tierbed_core::{Error, Result, RowId, RowKey, Schema, TableId};
use tierbed_io::{Folder, FsFolder, OpenMode};
use tierbed_snapshot::{NeighbourFile, NeighbourOptions};

/// The neighbours of a table's rows, `[row_count, 2]`: table and row, or a negative table for none.
pub(crate) struct TableNeighbours<'a> {
    pub(crate) table: TableId,
    pub(crate) near: &'a [i64],
}

/// Writes the neighbours of some tables of a snapshot of `schema` to a file, whole or not at all;
/// without a path beside the snapshot, which goes on with the file that it opened.
///
/// # Errors
/// `Invalid` for tables and rows that there are not, `Io` and `NoSpace`.
pub(crate) fn write(
    folder: &dyn Folder,
    schema: &Schema,
    path: Option<PathBuf>,
    given: &[TableNeighbours<'_>],
) -> Result<PathBuf> {
    for TableNeighbours { table, near } in given {
        let rows = schema.table(*table)?.row_count;
        if near.len() as u64 != 2 * rows {
            return Err(Error::invalid("a table has a neighbour, or none, for every row")
                .with("table", &schema.table(*table)?.name)
                .with("found", near.len() / 2)
                .with("expected", rows));
        }
    }
    let path = match (path, folder.path()) {
        (Some(path), _) => path,
        (None, Some(snapshot)) => NeighbourOptions::beside(snapshot),
        (None, None) => return Err(Error::invalid("name the file of neighbours")),
    };
    let name = path.file_name().and_then(|name| name.to_str());
    let (Some(name), parent) = (name, path.parent().unwrap_or(Path::new(""))) else {
        return Err(Error::invalid("not the name of a file").with("path", path.display()));
    };
    let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
    let parent = FsFolder::create(parent)?;
    let fresh = format!("{name}.new");
    let device = parent.open(&fresh, OpenMode::Create)?;
    let named = |table: TableId| given.iter().find(|of| of.table == table);
    let neighbour = |key: RowKey| {
        let at = 2 * usize::try_from(key.row.0).ok()?;
        let pair = named(key.table)?.near.get(at..at + 2)?;
        let &[table, row] = pair else { return None };
        // A row below 0 is one that no table has.
        let row = RowId(u64::try_from(row).unwrap_or(u64::MAX));
        (table >= 0).then(|| RowKey::new(TableId(u32::try_from(table).unwrap_or(u32::MAX)), row))
    };
    let written = device.set_len(0).and_then(|()| {
        let has_neighbours = |table| named(table).is_some();
        NeighbourFile::write(&device, schema, has_neighbours, &neighbour)
    });
    drop(device);
    if let Err(error) = written {
        // Best effort: give the space back; the next attempt overwrites it anyway.
        let _ = parent.remove(&fresh);
        return Err(error);
    }
    std::fs::rename(path.with_file_name(&fresh), &path)
        .map_err(|cause| Error::os("cannot rename file", cause).with("path", path.display()))?;
    parent.sync()?;
    Ok(path)
}
