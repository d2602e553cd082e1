//! The pages of a placement, shard by shard.
//!
//! A page of the placement falls into as many as it has shards; what is left of pages that follow
//! each other is put together again, as long as it fits. Where shards are cut between pages every
//! page stays as it is.
#![expect(clippy::indexing_slicing, reason = "items and shards are those of the placement")]

use tierbed_core::{Result, Schema};

use super::map::ShardMap;
use crate::index::{Lists, PageIndex};
use crate::placed::{Numbering, PlacedTables};

/// Stands for all shards.
const ALL: u16 = u16::MAX;
/// Stands for no item.
const NONE: u32 = u32::MAX;

/// Returns the placement of each shard's rows; `schemas` are those of the shards.
pub(crate) fn divide_pages(
    placed: &PlacedTables,
    schema: &Schema,
    schemas: &[Schema],
    map: &ShardMap,
) -> Result<Vec<PlacedTables>> {
    let tables: Vec<u32> = placed.tables.iter().map(|table| table.0).collect();
    let numbering = Numbering::new(schema, &tables)?;
    let shards = shards_of_items(&numbering, map)?;
    let divide = |(shard, schema): (u16, &Schema)| {
        let own = Numbering::new(schema, &tables)?;
        let is_held = |item: u32| matches!(shards[item as usize], at if at == shard || at == ALL);
        let pages = join_pages(&placed.index, &is_held);
        let mut globals = vec![NONE; own.item_count as usize];
        for item in (0..numbering.item_count).filter(|&item| is_held(item)) {
            let Some(key) = numbering.key_of(item) else { continue };
            let start = own.tables().find(|(table, _)| *table == key.table);
            let row = map.locate_row(key.table, key.row.0)?.row;
            globals[start.map_or(0, |(_, start)| start as usize) + row as usize] = item;
        }
        let (mut starts, mut items) = (vec![0u32], Vec::new());
        for item in globals {
            let start = items.len();
            let of_item = if item == NONE { &[][..] } else { placed.index.pages_of(item) };
            for &page in of_item {
                let page = pages[page as usize];
                // Once on a page that several became.
                if !items[start..].contains(&page) {
                    items.push(page);
                }
            }
            starts.push(items.len() as u32);
        }
        let index = PageIndex::from_forward(Lists::from_parts(starts, items)?);
        Ok(PlacedTables { tables: placed.tables.clone(), index })
    };
    (0..).zip(schemas).map(divide).collect()
}

/// Returns the shard of each item, [`ALL`] where all have it.
fn shards_of_items(numbering: &Numbering, map: &ShardMap) -> Result<Vec<u16>> {
    let shard_of = |item| match numbering.key_of(item) {
        None => Ok(ALL),
        Some(key) => {
            let located = map.locate_row(key.table, key.row.0)?;
            Ok(located.shard.map_or(ALL, |shard| shard as u16))
        }
    };
    (0..numbering.item_count).map(shard_of).collect()
}

/// Returns, by page of the placement, the page that takes those of its rows that are held.
fn join_pages(index: &PageIndex, is_held: &dyn Fn(u32) -> bool) -> Vec<u32> {
    let rows_per_page = index.inverted().iter().map(<[u32]>::len).max().unwrap_or(0);
    let (mut page, mut filled) = (0u32, 0usize);
    let joined = index.inverted().iter().map(|rows| {
        let count = rows.iter().filter(|&&item| is_held(item)).count();
        if filled > 0 && filled + count > rows_per_page {
            (page, filled) = (page + 1, 0);
        }
        filled += count;
        page
    });
    joined.collect()
}
