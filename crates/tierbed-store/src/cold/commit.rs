//! Commits: runs and merged ranges first, then the files that name them.
//!
//! A commit writes what waits in the write buffer as runs, syncs the table files, writes one
//! small file per table (bases, extents, runs: no rows) and switches with the protocol of
//! `crate::CommitLog`. Its cost is that of the rows changed since the last flush.

use crate::{CommitFailure, CommitLog, Manifest, TableMeta};
use tierbed_core::checksum::crc32c;
use tierbed_core::store::Attachment;
use tierbed_core::Result;

use crate::cold::store::ColdStore;
use crate::cold::table_file;

impl ColdStore {
    pub(crate) fn commit_all(&mut self, name: &str, attachments: &[Attachment<'_>]) -> Result<()> {
        let result = self.put_in_force(name, attachments);
        result.map_err(|failure| failure.into_error(&mut self.poison))?;
        for table in &mut self.tables {
            table.extents.commit();
            table.is_dirty = false;
        }
        self.stats.commit_count += 1;
        Ok(())
    }

    fn put_in_force(
        &mut self,
        name: &str,
        attachments: &[Attachment<'_>],
    ) -> std::result::Result<(), CommitFailure> {
        self.flush().map_err(CommitFailure::of_merge)?;
        // Rows of runs that were given up wait in the write buffer again.
        self.flush_runs().map_err(CommitFailure::of_merge)?;
        assert!(self.buffer.is_empty(), "a commit would lose the rows that wait");
        let new_bytes = attachments.iter().map(|attachment| attachment.bytes.len() as u64).sum();
        self.check_quota(new_bytes).map_err(CommitFailure::of_merge)?;
        // A failed sync leaves open which writes reached the disk; asking again proves nothing.
        // Source: Rebello et al., "Can applications recover from fsync failures?", ATC'20.
        for table in self.tables.iter().filter(|table| table.is_dirty) {
            let synced = table.device.sync().map_err(|error| error.with("file", &table.file));
            synced.map_err(CommitFailure::Poisoned)?;
        }
        let number = self.log.next_number();
        let manifest = Manifest {
            tables: self.write_tables(number).map_err(CommitFailure::of)?,
            ..self.log.next_manifest(name, &self.schema)
        };
        self.log.put_in_force(manifest, attachments)
    }

    fn write_tables(&self, number: u64) -> Result<Vec<TableMeta>> {
        assert_eq!(self.tables.len(), self.schema.tables().len(), "every table is open");
        let mut metas = Vec::with_capacity(self.tables.len());
        for (table, schema) in self.tables.iter().zip(self.schema.tables()) {
            let file = CommitLog::file_name(number, &format!("{}.cold", schema.name));
            let bytes = table_file::encode(table);
            let written = self.folder.write_durable(&file, &bytes);
            if let Err(error) = written {
                for meta in metas.iter().map(|meta: &TableMeta| &meta.file).chain([&file]) {
                    let _ = self.folder.remove(meta);
                }
                return Err(error);
            }
            let entry_count = table.runs.len() as u64;
            metas.push(TableMeta {
                file,
                crc32c: crc32c(&bytes),
                entry_count,
                grown_at: Vec::new(),
            });
        }
        Ok(metas)
    }
}
