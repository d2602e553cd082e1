//! Rows noted by several shards: a snapshot is known when every shard knows it.

use tierbed_core::{Result, TableId};

use super::shard_set::ShardSet;
use crate::auto::noting::NotingEngine;
use crate::planned::AnySink;
use crate::window::changes::{DeltaCount, Since};
use crate::window::changes_file::Rows;

impl ShardSet {
    // Ids of the tables of a shard, by their numbers there.
    fn ids_of(&self, shard: usize) -> Vec<TableId> {
        self.split.tables_of(shard).map(|(id, _)| id).collect()
    }
}

impl NotingEngine for ShardSet {
    fn noted_since(&mut self, identities: &[String]) -> Result<Since<Rows>> {
        self.decide()?;
        let mut all = Rows::new();
        for shard in 0..self.engines.len() {
            let ids = self.ids_of(shard);
            let Some(engine) = self.engines.get_mut(shard) else { panic!("no shard {shard}") };
            let rows = match engine.noted_since(identities)? {
                Since::Known(rows) => rows,
                Since::Unknown(why) => return Ok(Since::Unknown(why)),
            };
            for (own, rows) in rows {
                let Some(id) = ids.get(own as usize) else { panic!("shard without table {own}") };
                all.insert(id.0, rows);
            }
        }
        Ok(Since::Known(all))
    }

    fn scan_noted(&mut self, rows: &Rows, sink: &mut AnySink<'_>) -> Result<()> {
        for shard in 0..self.engines.len() {
            let ids = self.ids_of(shard);
            let numbered = (0..).zip(&ids);
            let own = numbered.filter_map(|(own, id)| Some((own, rows.get(&id.0)?.clone())));
            let own: Rows = own.collect();
            let Some(engine) = self.engines.get_mut(shard) else { panic!("no shard {shard}") };
            engine.scan_noted(&own, &mut |table, row, record| {
                let Some(id) = ids.get(table.0 as usize) else { panic!("no table {table:?}") };
                sink(*id, row, record)
            })?;
        }
        Ok(())
    }

    fn note_published(&mut self, identity: &str) -> Result<()> {
        self.engines.iter_mut().try_for_each(|engine| engine.note_published(identity))
    }

    // The first shard counts for all.
    fn count_delta(&mut self, delta: DeltaCount) -> Result<()> {
        self.engines.first_mut().map_or(Ok(()), |engine| engine.count_delta(delta))
    }
}
