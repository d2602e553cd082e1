//! Objects in a bucket: of S3 or a store that speaks its protocol, of Google Cloud Storage, or in a
//! container of Azure Blob Storage.
//!
//! The library beneath is asynchronous, this crate is not: each call waits on a runtime of one
//! thread, which is the caller's. Of callers on several threads one drives the connections of all.
//! No task, stream or future leaves this file; who has a runtime of their own calls from a thread
//! that may wait. A forked child makes connections of its own.

mod kind;
mod refused;
mod settings;

use std::fmt;
use std::future::Future;
use std::ops::Range;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream::FuturesUnordered;
use futures_util::{StreamExt, TryStreamExt};
use object_store::path::Path;
use object_store::{
    Error as StoreError, GetOptions, GetRange, MultipartUpload, ObjectStore, ObjectStoreExt,
    PutMode, PutPayload,
};
use tierbed_core::{Error, ErrorKind, Result};
use tierbed_io::folder::check_name;
use tierbed_io::process::PerProcess;
use tokio::runtime::{Builder, Runtime};

use crate::folder::too_long;
use crate::objects::{Chunks, Found, Listed, Objects, Put, Shared, When};
pub use kind::BucketKind;
use refused::Asked;
pub use settings::BucketSettings;

/// Chunks of a large object that are on their way at the same time; each has 16 MiB.
const UPLOADS: usize = 4;
/// How often a write is made that the store gave up because of another one at the same time.
const CONFLICT_TRIES: u32 = 5;
const CONFLICT_PAUSE: Duration = Duration::from_millis(50);

/// Objects of a bucket whose names begin with a prefix.
pub struct BucketObjects {
    kind: BucketKind,
    bucket: String,
    /// Without a slash at its end; empty for all of the bucket.
    prefix: Path,
    settings: BucketSettings,
    client: PerProcess<OnceLock<Client>>,
}

/// What a process has of its own.
struct Client {
    runtime: Waiting,
    store: Arc<dyn ObjectStore>,
}

/// The runtime that calls wait on. Dropping it waits for nothing, so that any thread may.
struct Waiting(Option<Runtime>);

impl Waiting {
    fn new() -> Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build();
        let refused = |cause| Error::os("cannot wait for the store", cause);
        runtime.map(|runtime| Self(Some(runtime))).map_err(refused)
    }

    #[expect(clippy::expect_used, reason = "it is taken when dropped")]
    fn on<T>(&self, work: impl Future<Output = T>) -> T {
        self.0.as_ref().expect("a runtime until it is dropped").block_on(work)
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

/// Bytes of a caller that the library sends as they are.
struct Lent(Shared);

impl AsRef<[u8]> for Lent {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for BucketObjects {
    // Settings have secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BucketObjects({:?})", self.address())
    }
}

impl BucketObjects {
    /// Returns the objects at `bucket/prefix` of S3. Nothing is asked of the store yet.
    ///
    /// # Errors
    /// `Invalid` for an address or settings that lead to no store.
    pub fn open(address: &str, settings: &BucketSettings) -> Result<Self> {
        Self::open_in(BucketKind::S3, address, settings)
    }

    /// Returns the objects at `bucket/prefix` of a store of that kind.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_in(kind: BucketKind, address: &str, settings: &BucketSettings) -> Result<Self> {
        let (bucket, prefix) = address.split_once('/').unwrap_or((address, ""));
        let is_named = !bucket.is_empty() && !bucket.contains(char::is_whitespace);
        let words = prefix.trim_end_matches('/');
        let prefix = Path::parse(words).ok().filter(|path| is_named && path.as_ref() == words);
        let prefix = prefix.ok_or_else(|| {
            Error::invalid("address leads to no bucket")
                .with("found", format_args!("{kind}://{address}"))
                .with("remedy", "name a bucket and a prefix: s3://bucket/models/ads")
        })?;
        let objects = Self {
            kind,
            bucket: bucket.to_owned(),
            prefix,
            settings: settings.clone(),
            client: PerProcess::new(OnceLock::new()),
        };
        objects.client()?;
        Ok(objects)
    }

    fn address(&self) -> String {
        match self.prefix.as_ref() {
            "" => format!("{}://{}", self.kind, self.bucket),
            prefix => format!("{}://{}/{prefix}", self.kind, self.bucket),
        }
    }

    fn client(&self) -> Result<&Client> {
        let slot = self.client.get_or_make(OnceLock::new);
        if let Some(client) = slot.get() {
            return Ok(client);
        }
        let store = self.settings.connect(self.kind, &self.bucket)?;
        let made = Client { runtime: Waiting::new()?, store };
        Ok(slot.get_or_init(|| made))
    }

    /// Returns the key of an object, whose name leads nowhere else.
    fn key(&self, name: &str) -> Result<Path> {
        name.split('/').try_for_each(check_name)?;
        let key = match self.prefix.as_ref() {
            "" => name.to_owned(),
            prefix => format!("{prefix}/{name}"),
        };
        Path::parse(&key).map_err(|cause| {
            Error::invalid("name is none of an object").with("name", name).with("cause", cause)
        })
    }

    /// Returns the name of the object with this key; `None` when it is not below the prefix.
    fn name_of<'a>(&self, key: &'a Path) -> Option<&'a str> {
        match self.prefix.as_ref() {
            "" => Some(key.as_ref()),
            prefix => key.as_ref().strip_prefix(prefix)?.strip_prefix('/'),
        }
    }

    /// Writes an object whole, if the condition holds.
    fn put_payload(&self, name: &str, payload: &PutPayload, when: &When) -> Result<Put> {
        let (asked, key, client) = (self.asked("put", name), self.key(name)?, self.client()?);
        let mode = match when {
            When::Always => PutMode::Overwrite,
            When::Absent => PutMode::Create,
            When::Unchanged(tag) => PutMode::Update(self.kind.unchanged(tag)),
        };
        // The library tries replacements again by itself.
        let tries = if matches!(when, When::Unchanged(_)) { 1 } else { CONFLICT_TRIES };
        client.runtime.on(async {
            let mut pause = CONFLICT_PAUSE;
            for _ in 0..tries {
                let payload = payload.clone();
                match client.store.put_opts(&key, payload, mode.clone().into()).await {
                    Ok(_) => return Ok(Put::Done),
                    Err(error) if refused::is_conflict(self.kind, &error) => {
                        tokio::time::sleep(pause).await;
                        pause *= 2;
                    }
                    Err(error) if refused::is_lost(&error) => return Ok(Put::Lost),
                    Err(error) => return Err(asked.refused(&error)),
                }
            }
            Err(Error::new(ErrorKind::Io, "other writes kept getting in the way")
                .with("bucket", &self.bucket)
                .with("name", name))
        })
    }

    /// Says what was asked, for the error that may come of it.
    fn asked<'a>(&'a self, verb: &'static str, name: &'a str) -> Asked<'a> {
        let endpoint = self.settings.endpoint(self.kind);
        Asked { kind: self.kind, bucket: &self.bucket, endpoint, verb, name }
    }
}

/// Whether there is no such object; a bucket that is missing is another thing.
fn present<T>(asked: &Asked<'_>, result: std::result::Result<T, StoreError>) -> Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(StoreError::NotFound { source, .. }) if !refused::is_of_bucket(&*source) => Ok(None),
        Err(error) => Err(asked.refused(&error)),
    }
}

/// Uploads chunks, a few at the same time.
fn upload(
    asked: &Asked<'_>,
    runtime: &Waiting,
    to: &mut dyn MultipartUpload,
    mut chunks: impl Iterator<Item = Result<Vec<u8>>>,
) -> Result<()> {
    let mut under_way = FuturesUnordered::new();
    loop {
        while under_way.len() < UPLOADS {
            // Outside the runtime: whoever makes chunks may ask a store too.
            let Some(chunk) = chunks.next() else { break };
            under_way.push(to.put_part(PutPayload::from(chunk?)));
        }
        match runtime.on(under_way.next()) {
            Some(sent) => sent.map_err(|error| asked.refused(&error))?,
            None => break,
        }
    }
    runtime.on(to.complete()).map(drop).map_err(|error| asked.refused(&error))
}

impl Objects for BucketObjects {
    fn list(&self, folder: Option<&str>) -> Result<Vec<Listed>> {
        let asked = self.asked("list", folder.unwrap_or(""));
        let below = folder.map_or_else(|| Ok(self.prefix.clone()), |name| self.key(name))?;
        let client = self.client()?;
        let found: Vec<_> = client
            .runtime
            .on(client.store.list(Some(&below)).try_collect())
            .map_err(|error| asked.refused(&error))?;
        let named = found.into_iter().filter_map(|object| {
            let modified_s = u64::try_from(object.last_modified.timestamp()).unwrap_or(0);
            let name = self.name_of(&object.location)?.to_owned();
            Some(Listed { name, bytes: object.size, modified_s })
        });
        let mut listed: Vec<_> = named.collect();
        listed.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        Ok(listed)
    }

    fn get(&self, name: &str, bytes_max: u64) -> Result<Option<Found>> {
        let (asked, key, client) = (self.asked("get", name), self.key(name)?, self.client()?);
        client.runtime.on(async {
            let found = client.store.get(&key).await;
            let Some(found) = present(&asked, found)? else { return Ok(None) };
            if found.meta.size > bytes_max {
                return Err(too_long(name, found.meta.size, bytes_max));
            }
            let tag = self.kind.tag(&found.meta).ok_or_else(|| asked.no_conditions())?;
            let bytes = found.bytes().await.map_err(|error| asked.refused(&error))?;
            Ok(Some(Found { bytes: bytes.into(), tag }))
        })
    }

    fn get_range(&self, name: &str, range: Range<u64>) -> Result<Option<Vec<u8>>> {
        let (asked, key, client) = (self.asked("get", name), self.key(name)?, self.client()?);
        let len = range.end.saturating_sub(range.start);
        client.runtime.on(async {
            if len == 0 {
                return Ok(present(&asked, client.store.head(&key).await)?.map(|_| Vec::new()));
            }
            let options = GetOptions::new().with_range(Some(GetRange::Bounded(range.clone())));
            let found = client.store.get_opts(&key, options).await;
            let Some(found) = present(&asked, found)? else { return Ok(None) };
            let bytes = found.bytes().await.map_err(|error| asked.refused(&error))?;
            if bytes.len() as u64 != len {
                return Err(asked.too_short(&range));
            }
            Ok(Some(bytes.into()))
        })
    }

    fn put(&self, name: &str, bytes: &[u8], when: &When) -> Result<Put> {
        self.put_payload(name, &PutPayload::from(bytes.to_vec()), when)
    }

    fn put_shared(&self, name: &str, bytes: Shared, when: &When) -> Result<Put> {
        self.put_payload(name, &PutPayload::from(Bytes::from_owner(Lent(bytes))), when)
    }

    fn put_large(&self, name: &str, chunks: &mut Chunks<'_>) -> Result<()> {
        let (asked, key, client) = (self.asked("put", name), self.key(name)?, self.client()?);
        let first = chunks.next().transpose()?.unwrap_or_default();
        let Some(second) = chunks.next().transpose()? else {
            let put = client.store.put(&key, PutPayload::from(first));
            return client.runtime.on(put).map(drop).map_err(|error| asked.refused(&error));
        };
        let all = [first, second].into_iter().map(Ok).chain(chunks);
        let begun = client.runtime.on(client.store.put_multipart(&key));
        let mut to = begun.map_err(|error| asked.refused(&error))?;
        let Err(error) = upload(&asked, &client.runtime, &mut *to, all) else { return Ok(()) };
        // What was uploaded costs, and no list shows it.
        match client.runtime.on(to.abort()) {
            Ok(()) | Err(StoreError::NotFound { .. }) => Err(error),
            Err(left) => Err(error.with("upload_left", asked.refused(&left))),
        }
    }

    fn remove(&self, name: &str) -> Result<()> {
        let (asked, key, client) = (self.asked("remove", name), self.key(name)?, self.client()?);
        let removed = client.runtime.on(client.store.delete(&key));
        present(&asked, removed).map(drop)
    }
}
