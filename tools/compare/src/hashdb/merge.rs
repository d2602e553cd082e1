//! How do changed rows reach their buckets, and outdated buckets leave their files?
//!
//! Read, merge, append, and only when the new versions are on the device they come into force:
//! a failure in between leaves every row where it was, changed ones still in the cache.

use tierbed_core::{check_disk_quota, Error, Result, RowKey};
use tierbed_io::PAGE_BYTES;

use super::bucket::{pages_of, Bucket, BucketId};
use super::index::{Place, BUCKET_PAGES_MAX};
use super::store::HashDb;
use super::traffic::{read_buckets, Wanted};

/// Buckets merged at a time.
pub(super) const MERGE_BUCKETS: usize = 256;

impl HashDb {
    pub(super) fn make_room(&mut self, record_bytes: usize) -> Result<()> {
        self.write_dirty()?;
        while !self.cache.has_room(record_bytes) && self.cache.evict_quarter() {}
        self.compact()
    }

    /// Writes every changed row: its bucket is read, merged and appended.
    pub(super) fn write_dirty(&mut self) -> Result<()> {
        let dirty = self.cache.dirty_rows();
        let mut rows: Vec<(BucketId, RowKey)> = Vec::with_capacity(dirty.len());
        for key in dirty {
            rows.push((self.bucket_of(key)?, key));
        }
        rows.sort_unstable();
        let mut groups: Vec<&[(BucketId, RowKey)]> = rows.chunk_by(|a, b| a.0 == b.0).collect();
        // In the order of the files, so that reads go forward.
        let place_of = |group: &&[(BucketId, RowKey)]| {
            let id = group.first().map(|(id, _)| *id);
            id.and_then(|id| Some(self.tables.get(id.table as usize)?.place(id.bucket)))
        };
        groups.sort_by_cached_key(place_of);
        for some in groups.chunks(MERGE_BUCKETS) {
            self.rewrite(some)?;
            let keys: Vec<_> =
                some.iter().flat_map(|group| group.iter().map(|row| row.1)).collect();
            self.cache.set_clean(&keys);
        }
        Ok(())
    }

    // Merges changed rows into their buckets and puts the new versions in force.
    fn rewrite(&mut self, groups: &[&[(BucketId, RowKey)]]) -> Result<()> {
        let mut wanted = Vec::new();
        let mut fresh = Vec::new();
        for (tag, group) in groups.iter().enumerate() {
            let Some((id, _)) = group.first() else { continue };
            let place = self.table(id.table)?.place(id.bucket);
            let bucket = Wanted { id: *id, place, tag };
            if place == Place::NONE {
                fresh.push(bucket)
            } else {
                wanted.push(bucket)
            }
        }
        self.check_growth(groups)?;
        let Self { engine, files, tables, cache, .. } = self;
        let mut staged: Vec<(BucketId, Place)> = Vec::new();
        let mut merged: Vec<(BucketId, Vec<u8>)> = Vec::new();
        let merge = |asked: Wanted, bytes: Option<&[u8]>| -> Result<(BucketId, Vec<u8>)> {
            let record_bytes =
                tables.get(asked.id.table as usize).map_or(0, |table| table.record_bytes);
            let old = match bytes {
                Some(bytes) => Bucket::check(bytes, asked.id, record_bytes)?,
                None => Bucket::empty(record_bytes),
            };
            let group = groups.get(asked.tag).copied().unwrap_or(&[]);
            let changes = group.iter().filter_map(|(_, key)| Some((key.row.0, cache.peek(*key)?)));
            let mut out = Vec::new();
            old.merge_into(asked.id, changes, &mut out);
            if out.len() / PAGE_BYTES > BUCKET_PAGES_MAX {
                return Err(Error::invalid("bucket too long").with("bucket", asked.id.bucket));
            }
            Ok((asked.id, out))
        };
        for bucket in fresh {
            merged.push(merge(bucket, None)?);
        }
        let pages = read_buckets(&wanted, files, engine.as_mut(), &mut |asked, bytes| {
            merged.push(merge(asked, Some(bytes))?);
            Ok(())
        })?;
        self.stats.pages_read += pages;
        // Buckets of one table lie together, in order, whatever came in first.
        merged.sort_unstable_by_key(|(id, _)| *id);
        let appended = self.append_all(&merged, &mut staged);
        self.put_in_place(appended, &staged)
    }

    fn append_all(
        &mut self,
        buckets: &[(BucketId, Vec<u8>)],
        staged: &mut Vec<(BucketId, Place)>,
    ) -> Result<()> {
        for (id, bytes) in buckets {
            staged.push((*id, self.files.append(bytes, self.engine.as_mut())?));
        }
        self.files.flush()
    }

    // Only what is on the device comes into force; otherwise the old versions stay.
    fn put_in_place(&mut self, appended: Result<()>, staged: &[(BucketId, Place)]) -> Result<()> {
        if let Err(error) = appended {
            self.files.abandon(staged.iter().map(|(_, place)| *place));
            return Err(error);
        }
        for (id, place) in staged {
            if let Some(table) = self.tables.get_mut(id.table as usize) {
                let old = table.set_place(id.bucket, *place);
                self.files.note_outdated(old);
            }
        }
        Ok(())
    }

    fn check_growth(&self, groups: &[&[(BucketId, RowKey)]]) -> Result<()> {
        if self.options.disk_quota_bytes.is_none() {
            return Ok(());
        }
        let mut pages = 0;
        for group in groups {
            let Some((id, _)) = group.first() else { continue };
            let table = self.table(id.table)?;
            pages +=
                table.place(id.bucket).page_count() + pages_of(group.len(), table.record_bytes);
        }
        let wanted = self.disk_bytes() + self.kept_bytes + (pages * PAGE_BYTES) as u64;
        check_disk_quota(self.options.disk_quota_bytes, wanted)
    }

    /// Moves live buckets out of files with too many outdated ones.
    fn compact(&mut self) -> Result<()> {
        let due = self.files.outdated_files(self.options.outdated_ratio_max);
        if due.is_empty() {
            return Ok(());
        }
        let (store, mut live) = (self.log.store(), Vec::<Wanted>::new());
        for (id, table) in self.tables.iter().enumerate() {
            let buckets = table.buckets(id as u32, store);
            let buckets = buckets.filter(|(_, at)| due.contains(&at.file()));
            live.extend(buckets.map(|(id, place)| Wanted { id, place, tag: 0 }));
        }
        live.sort_unstable_by_key(|bucket| bucket.place);
        for some in live.chunks(MERGE_BUCKETS) {
            let mut moved = Vec::new();
            let Self { engine, files, tables, .. } = &mut *self;
            let pages = read_buckets(some, files, engine.as_mut(), &mut |asked, bytes| {
                let record_bytes =
                    tables.get(asked.id.table as usize).map_or(0, |table| table.record_bytes);
                Bucket::check(bytes, asked.id, record_bytes)?;
                moved.push((asked.id, bytes.to_vec()));
                Ok(())
            })?;
            self.stats.pages_read += pages;
            moved.sort_unstable_by_key(|(id, _)| *id);
            let mut staged = Vec::new();
            let appended = self.append_all(&moved, &mut staged);
            self.put_in_place(appended, &staged)?;
        }
        self.files.retire(&due, self.engine.as_mut())
    }
}
