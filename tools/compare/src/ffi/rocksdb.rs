//! How is RocksDB called without being built against? Through its C interface, found at run
//! time by name.
//!
//! Only what [`RocksStore`](crate::RocksStore) needs, as safe calls on [`Db`]. The signatures
//! are those of `rocksdb/c.h`, version 7.8; the library keeps old ones when it grows. The library
//! stays loaded until the process ends.

use std::ffi::{c_char, c_int, c_uchar, c_void, CStr, CString};
use std::path::Path;
use std::sync::OnceLock;

use libloading::Library;
use tierbed_core::{Error, ErrorKind, Result};

use crate::rocks::{RocksMode, RocksOptions};

type Ptr = *mut c_void;
type Text = *const c_char;
type ErrorOut = *mut *mut c_char;

/// Names under which systems install the library; the first with all functions is taken.
const NAMES: [&str; 6] = [
    "librocksdb.so.7.8",
    "librocksdb.so.8.9",
    "librocksdb.so.9.10",
    "librocksdb.so.10",
    "librocksdb.so.11",
    "librocksdb.so",
];

macro_rules! c_interface {
    ($($name:ident($($argument:ty),*) $(-> $returned:ty)?;)*) => {
        /// The functions of the C interface, without their prefix `rocksdb_`.
        // SAFETY: of every call: the types are those of rocksdb/c.h.
        #[expect(non_snake_case, reason = "the names are RocksDB's")]
        struct Api { $($name: unsafe extern "C" fn($($argument),*) $(-> $returned)?,)* }

        impl Api {
            fn of(library: &Library) -> std::result::Result<Self, libloading::Error> {
                // SAFETY: the types are those of rocksdb/c.h; the library is never unloaded.
                unsafe {
                    Ok(Self { $($name: *library.get(
                        concat!("rocksdb_", stringify!($name), "\0").as_bytes(),
                    )?,)* })
                }
            }
        }
    };
}

c_interface! {
    free(Ptr);
    options_create() -> Ptr;
    options_destroy(Ptr);
    options_set_create_if_missing(Ptr, c_uchar);
    options_set_use_direct_reads(Ptr, c_uchar);
    options_set_use_direct_io_for_flush_and_compaction(Ptr, c_uchar);
    options_set_write_buffer_size(Ptr, usize);
    options_set_max_write_buffer_number(Ptr, c_int);
    options_set_max_background_jobs(Ptr, c_int);
    options_set_max_open_files(Ptr, c_int);
    options_set_compression(Ptr, c_int);
    options_set_compaction_style(Ptr, c_int);
    options_set_level_compaction_dynamic_level_bytes(Ptr, c_uchar);
    options_set_max_bytes_for_level_base(Ptr, u64);
    options_set_target_file_size_base(Ptr, u64);
    options_set_level0_file_num_compaction_trigger(Ptr, c_int);
    options_set_bytes_per_sync(Ptr, u64);
    options_set_optimize_filters_for_hits(Ptr, c_int);
    options_set_memtable_whole_key_filtering(Ptr, c_uchar);
    options_set_memtable_prefix_bloom_size_ratio(Ptr, f64);
    options_set_block_based_table_factory(Ptr, Ptr);
    options_set_universal_compaction_options(Ptr, Ptr);
    options_enable_statistics(Ptr);
    options_statistics_get_string(Ptr) -> *mut c_char;
    universal_compaction_options_create() -> Ptr;
    universal_compaction_options_destroy(Ptr);
    universal_compaction_options_set_max_size_amplification_percent(Ptr, c_int);
    block_based_options_create() -> Ptr;
    block_based_options_destroy(Ptr);
    block_based_options_set_block_size(Ptr, usize);
    block_based_options_set_block_cache(Ptr, Ptr);
    block_based_options_set_filter_policy(Ptr, Ptr);
    block_based_options_set_format_version(Ptr, c_int);
    block_based_options_set_checksum(Ptr, c_char);
    block_based_options_set_cache_index_and_filter_blocks(Ptr, c_uchar);
    filterpolicy_create_bloom_full(f64) -> Ptr;
    cache_create_lru(usize) -> Ptr;
    cache_destroy(Ptr);
    readoptions_create() -> Ptr;
    readoptions_destroy(Ptr);
    readoptions_set_verify_checksums(Ptr, c_uchar);
    readoptions_set_fill_cache(Ptr, c_uchar);
    readoptions_set_readahead_size(Ptr, usize);
    writeoptions_create() -> Ptr;
    writeoptions_destroy(Ptr);
    writeoptions_disable_WAL(Ptr, c_int);
    flushoptions_create() -> Ptr;
    flushoptions_destroy(Ptr);
    flushoptions_set_wait(Ptr, c_uchar);
    open_column_families(
        Ptr, Text, c_int, *const Text, *const Ptr, *mut Ptr, ErrorOut) -> Ptr;
    column_family_handle_destroy(Ptr);
    cancel_all_background_work(Ptr, c_uchar);
    close(Ptr);
    flush(Ptr, Ptr, ErrorOut);
    writebatch_create() -> Ptr;
    writebatch_destroy(Ptr);
    writebatch_put(Ptr, Text, usize, Text, usize);
    write(Ptr, Ptr, Ptr, ErrorOut);
    batched_multi_get_cf(
        Ptr, Ptr, Ptr, usize, *const Text, *const usize, *mut Ptr, *mut *mut c_char, bool);
    pinnableslice_value(Ptr, *mut usize) -> Text;
    pinnableslice_destroy(Ptr);
    create_iterator(Ptr, Ptr) -> Ptr;
    iter_destroy(Ptr);
    iter_seek(Ptr, Text, usize);
    iter_valid(Ptr) -> c_uchar;
    iter_next(Ptr);
    iter_key(Ptr, *mut usize) -> Text;
    iter_value(Ptr, *mut usize) -> Text;
    iter_get_error(Ptr, ErrorOut);
    checkpoint_object_create(Ptr, ErrorOut) -> Ptr;
    checkpoint_object_destroy(Ptr);
    checkpoint_create(Ptr, Text, u64, ErrorOut);
    property_int(Ptr, Text, *mut u64) -> c_int;
}

fn api() -> Result<&'static Api> {
    static API: OnceLock<std::result::Result<Api, String>> = OnceLock::new();
    let found = API.get_or_init(|| {
        let mut reasons = Vec::new();
        for name in NAMES {
            // SAFETY: loading runs RocksDB's own initialisers, which need nothing of ours.
            let loaded = unsafe { Library::new(name) };
            match loaded.and_then(|library| Api::of(&library).map(|api| (library, api))) {
                Ok((library, api)) => {
                    // Function pointers live as long as the library: for ever.
                    std::mem::forget(library);
                    return Ok(api);
                }
                Err(reason) => reasons.push(reason.to_string()),
            }
        }
        Err(reasons.join("; "))
    });
    found.as_ref().map_err(|cause| {
        Error::unsupported("RocksDB's library is not on this machine")
            .with("cause", cause)
            .with("remedy", "apt install librocksdb7.8 (or a newer one), or use RocksDictStore")
    })
}

/// Says whether the library can be loaded, and why not.
pub(crate) fn check_available() -> Result<()> {
    api().map(drop)
}

/// Something the library made and must be given back to it.
// SAFETY: of `destroy`: called once, by Drop, with what the matching create function returned.
struct Owned {
    ptr: Ptr,
    destroy: unsafe extern "C" fn(Ptr),
}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: ptr came from the matching create function and is given back once.
        unsafe { (self.destroy)(self.ptr) }
    }
}

/// An open database with one column family. Keys are 8 bytes, big-endian.
pub(crate) struct Db {
    api: &'static Api,
    db: Ptr,
    column: Ptr,
    // Given back after the database, in this order.
    read: Owned,
    scan: Owned,
    write: Owned,
    options: Owned,
    _cache: Owned,
}

// SAFETY: RocksDB's database and its options may be used from any thread.
unsafe impl Send for Db {}
// SAFETY: reads of the database are thread-safe; the option objects are not changed after open.
unsafe impl Sync for Db {}

/// Takes a key and its record; `false` ends the scan.
pub(crate) type Visit<'a> = dyn FnMut(&[u8], &[u8]) -> Result<bool> + 'a;

/// Records found for some keys: their bytes one after the other.
#[derive(Debug, Default)]
pub(crate) struct Found {
    bytes: Vec<u8>,
    /// Where the record of each key ends in `bytes`, and whether there is one.
    ends: Vec<(usize, bool)>,
}

impl Found {
    /// Visits the keys' records in order.
    pub(crate) fn records(&self) -> impl Iterator<Item = Option<&[u8]>> {
        let mut start = 0;
        self.ends.iter().map(move |&(end, is_present)| {
            let record = self.bytes.get(start..end);
            start = end;
            record.filter(|_| is_present)
        })
    }
}

impl Db {
    /// Opens the database in `path`, or makes one.
    pub(crate) fn open(path: &Path, options: &RocksOptions) -> Result<Self> {
        let api = api()?;
        let name = c_path(path)?;
        // SAFETY: plain constructors and setters of objects that are made here; the table factory
        // and the options copy what they are given (the cache is shared by reference count).
        let (cache, options, read, scan, write) = unsafe {
            let cache_ptr = (api.cache_create_lru)(options.block_cache_bytes);
            let cache = Owned { ptr: cache_ptr, destroy: api.cache_destroy };
            let (verify, made) = (c_uchar::from(options.has_checksums), make(api, options, &cache));
            let read = Owned { ptr: (api.readoptions_create)(), destroy: api.readoptions_destroy };
            (api.readoptions_set_verify_checksums)(read.ptr, verify);
            let scan = Owned { ptr: (api.readoptions_create)(), destroy: api.readoptions_destroy };
            (api.readoptions_set_verify_checksums)(scan.ptr, verify);
            (api.readoptions_set_fill_cache)(scan.ptr, 0);
            (api.readoptions_set_readahead_size)(scan.ptr, 256 << 10);
            let write =
                Owned { ptr: (api.writeoptions_create)(), destroy: api.writeoptions_destroy };
            (api.writeoptions_disable_WAL)(write.ptr, 1);
            (cache, made, read, scan, write)
        };
        let column_name = c"default".as_ptr();
        let mut column = std::ptr::null_mut();
        // SAFETY: one column family: arrays of length one, alive during the call.
        let db = run(api, |error| unsafe {
            let (names, all) = (&raw const column_name, &raw const options.ptr);
            (api.open_column_families)(
                options.ptr,
                name.as_ptr(),
                1,
                names,
                all,
                &raw mut column,
                error,
            )
        })?;
        Ok(Self { api, db, column, read, scan, write, options, _cache: cache })
    }

    /// Reads ascending `keys`.
    pub(crate) fn multi_get(&self, keys: &[[u8; 8]]) -> Result<Found> {
        let pointers: Vec<Text> = keys.iter().map(|key| key.as_ptr().cast()).collect();
        let lengths = vec![8; keys.len()];
        let mut slices = vec![std::ptr::null_mut(); keys.len()];
        let mut errors = vec![std::ptr::null_mut(); keys.len()];
        // SAFETY: four arrays of keys.len() entries, alive during the call; it fills the last two.
        unsafe {
            (self.api.batched_multi_get_cf)(
                self.db,
                self.read.ptr,
                self.column,
                keys.len(),
                pointers.as_ptr(),
                lengths.as_ptr(),
                slices.as_mut_ptr(),
                errors.as_mut_ptr(),
                true,
            );
        }
        let mut found = Found::default();
        let mut result = Ok(());
        for (slice, error) in slices.into_iter().zip(errors) {
            result = result.and(take_error(self.api, error));
            if slice.is_null() {
                found.ends.push((found.bytes.len(), false));
                continue;
            }
            let mut len = 0;
            // SAFETY: the slice points to len bytes until it is destroyed, once, after the copy.
            unsafe {
                let start = (self.api.pinnableslice_value)(slice, &raw mut len);
                found.bytes.extend_from_slice(std::slice::from_raw_parts(start.cast(), len));
                (self.api.pinnableslice_destroy)(slice);
            }
            found.ends.push((found.bytes.len(), true));
        }
        result.map(|()| found)
    }

    /// Writes rows as one batch, without a log.
    pub(crate) fn write<'a>(&self, rows: impl Iterator<Item = ([u8; 8], &'a [u8])>) -> Result<()> {
        // SAFETY: the batch is made and given back here; it copies keys and records.
        let batch = unsafe {
            let ptr = (self.api.writebatch_create)();
            let batch = Owned { ptr, destroy: self.api.writebatch_destroy };
            for (key, record) in rows {
                let (start, len) = (record.as_ptr().cast(), record.len());
                (self.api.writebatch_put)(batch.ptr, key.as_ptr().cast(), 8, start, len);
            }
            batch
        };
        // SAFETY: database, options and batch are alive.
        run(self.api, |error| unsafe {
            (self.api.write)(self.db, self.write.ptr, batch.ptr, error);
        })
    }

    /// Visits keys from `first` on, in order, until `visit` returns `false`.
    pub(crate) fn scan(&self, first: [u8; 8], visit: &mut Visit<'_>) -> Result<()> {
        let api = self.api;
        // SAFETY: the iterator is made and given back here; key and value are valid until next.
        unsafe {
            let ptr = (api.create_iterator)(self.db, self.scan.ptr);
            let walk = Owned { ptr, destroy: api.iter_destroy };
            (api.iter_seek)(walk.ptr, first.as_ptr().cast(), 8);
            while (api.iter_valid)(walk.ptr) != 0 {
                let (mut key_len, mut len) = (0, 0);
                let key = (api.iter_key)(walk.ptr, &raw mut key_len);
                let value = (api.iter_value)(walk.ptr, &raw mut len);
                let key = std::slice::from_raw_parts(key.cast(), key_len);
                if !visit(key, std::slice::from_raw_parts(value.cast(), len))? {
                    break;
                }
                (api.iter_next)(walk.ptr);
            }
            run(api, |error| (api.iter_get_error)(walk.ptr, error))
        }
    }

    /// Writes all memtables to files and waits for them.
    pub(crate) fn flush(&self) -> Result<()> {
        // SAFETY: the options are made and given back here; the database is alive.
        run(self.api, |error| unsafe {
            let ptr = (self.api.flushoptions_create)();
            let options = Owned { ptr, destroy: self.api.flushoptions_destroy };
            (self.api.flushoptions_set_wait)(options.ptr, 1);
            (self.api.flush)(self.db, options.ptr, error);
        })
    }

    /// Makes the new folder `path` a copy of the database as it is: links to its files.
    pub(crate) fn checkpoint(&self, path: &Path) -> Result<()> {
        let (api, name) = (self.api, c_path(path)?);
        // SAFETY: the database is alive.
        let made = run(api, |error| unsafe { (api.checkpoint_object_create)(self.db, error) })?;
        let checkpoint = Owned { ptr: made, destroy: api.checkpoint_object_destroy };
        // SAFETY: checkpoint and name are alive; the largest log size: nothing to flush.
        run(api, |error| unsafe {
            (api.checkpoint_create)(checkpoint.ptr, name.as_ptr(), u64::MAX, error);
        })
    }

    /// Returns an integer property such as `rocksdb.total-sst-files-size`; 0 when unknown.
    pub(crate) fn property(&self, name: &CStr) -> u64 {
        let mut value = 0;
        // SAFETY: database and name are alive; value is written on success only.
        unsafe { (self.api.property_int)(self.db, name.as_ptr(), &raw mut value) };
        value
    }

    /// Returns RocksDB's counters as lines `name COUNT : value`.
    pub(crate) fn statistics(&self) -> String {
        // SAFETY: the options are alive; the text is ours to free, once, after the copy.
        unsafe {
            let text = (self.api.options_statistics_get_string)(self.options.ptr);
            if text.is_null() {
                return String::new();
            }
            let copy = CStr::from_ptr(text).to_string_lossy().into_owned();
            (self.api.free)(text.cast());
            copy
        }
    }
}

impl Drop for Db {
    fn drop(&mut self) {
        // SAFETY: both came from open and are given back once, handles before the database.
        unsafe {
            (self.api.cancel_all_background_work)(self.db, 1);
            (self.api.column_family_handle_destroy)(self.column);
            (self.api.close)(self.db);
        }
    }
}

/// Builds the options object.
///
/// # Safety
/// `cache` must be a block cache of this library.
unsafe fn make(api: &Api, from: &RocksOptions, cache: &Owned) -> Owned {
    // SAFETY: setters on objects made here; the factory and the options copy or share their parts.
    unsafe {
        let ptr = (api.options_create)();
        let options = Owned { ptr, destroy: api.options_destroy };
        let direct = c_uchar::from(from.is_direct);
        (api.options_set_create_if_missing)(ptr, 1);
        (api.options_set_use_direct_reads)(ptr, direct);
        (api.options_set_use_direct_io_for_flush_and_compaction)(ptr, direct);
        (api.options_set_write_buffer_size)(ptr, from.memtable_bytes);
        (api.options_set_max_write_buffer_number)(ptr, from.memtables_max);
        (api.options_set_max_background_jobs)(ptr, from.background_jobs);
        (api.options_set_max_open_files)(ptr, -1);
        (api.options_set_compression)(ptr, 0);
        (api.options_set_bytes_per_sync)(ptr, 1 << 20);
        (api.options_set_optimize_filters_for_hits)(ptr, 1);
        (api.options_set_memtable_whole_key_filtering)(ptr, 1);
        (api.options_set_memtable_prefix_bloom_size_ratio)(ptr, 0.05);
        (api.options_set_level0_file_num_compaction_trigger)(ptr, from.l0_trigger);
        (api.options_set_target_file_size_base)(ptr, from.sst_bytes);
        match from.mode {
            RocksMode::Levelled => {
                (api.options_set_level_compaction_dynamic_level_bytes)(ptr, 1);
                (api.options_set_max_bytes_for_level_base)(ptr, from.level1_bytes);
            }
            RocksMode::Universal => {
                (api.options_set_compaction_style)(ptr, 1);
                let make = api.universal_compaction_options_create;
                let shape =
                    Owned { ptr: make(), destroy: api.universal_compaction_options_destroy };
                let set = api.universal_compaction_options_set_max_size_amplification_percent;
                set(shape.ptr, 400);
                (api.options_set_universal_compaction_options)(ptr, shape.ptr);
            }
        }
        let make = api.block_based_options_create;
        let table = Owned { ptr: make(), destroy: api.block_based_options_destroy };
        (api.block_based_options_set_block_size)(table.ptr, from.block_bytes);
        (api.block_based_options_set_block_cache)(table.ptr, cache.ptr);
        // The table options own the filter policy from here on.
        let filter = (api.filterpolicy_create_bloom_full)(f64::from(from.filter_bits_per_row));
        (api.block_based_options_set_filter_policy)(table.ptr, filter);
        (api.block_based_options_set_format_version)(table.ptr, 5);
        (api.block_based_options_set_checksum)(table.ptr, c_char::from(from.has_checksums));
        let counted = c_uchar::from(from.caches_index_and_filters);
        (api.block_based_options_set_cache_index_and_filter_blocks)(table.ptr, counted);
        (api.options_set_block_based_table_factory)(ptr, table.ptr);
        (api.options_enable_statistics)(ptr);
        options
    }
}

fn c_path(path: &Path) -> Result<CString> {
    CString::new(path.as_os_str().as_encoded_bytes())
        .map_err(|_| Error::invalid("path holds a zero byte").with("path", path.display()))
}

fn run<T>(api: &Api, call: impl FnOnce(ErrorOut) -> T) -> Result<T> {
    let mut error = std::ptr::null_mut();
    let returned = call(&raw mut error);
    take_error(api, error).map(|()| returned)
}

/// Turns RocksDB's status text into an error and frees it.
fn take_error(api: &Api, error: *mut c_char) -> Result<()> {
    if error.is_null() {
        return Ok(());
    }
    // SAFETY: a text of the library, ours to free, once, after the copy.
    let text = unsafe {
        let copy = CStr::from_ptr(error).to_string_lossy().into_owned();
        (api.free)(error.cast());
        copy
    };
    Err(of_status(&text))
}

/// Sorts RocksDB's status texts into our kinds.
fn of_status(text: &str) -> Error {
    let kind = if text.contains("No space left") || text.contains("Disk quota exceeded") {
        ErrorKind::NoSpace
    } else if text.starts_with("Corruption") {
        ErrorKind::Corruption
    } else if text.starts_with("Invalid argument") {
        ErrorKind::Invalid
    } else {
        ErrorKind::Io
    };
    Error::new(kind, "RocksDB failed").with("cause", text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_texts_become_kinds() {
        let kind = |text| of_status(text).kind();
        assert_eq!(kind("Corruption: block checksum mismatch"), ErrorKind::Corruption);
        assert_eq!(kind("IO error: No space left on device: While appending"), ErrorKind::NoSpace);
        assert_eq!(kind("IO error: While open a file"), ErrorKind::Io);
        assert_eq!(kind("Invalid argument: x: does not exist"), ErrorKind::Invalid);
    }
}
