//! Entries of the fuzz targets, compiled into the crate: any bytes given to its decoders.
//!
//! Each takes arbitrary bytes, mends their checksums so that what lies behind is reached, decodes
//! them, and uses what came out as a reader would. Damage is an error, which is fine; anything
//! else that goes wrong is a bug.

use tierbed_core::checksum::crc32c;
use tierbed_core::{Budget, Schema, TableSchema};
use tierbed_io::{Folder, MemoryFolder};

use crate::key::Key;
use crate::sst::block::{BlockKind, BlockName};
use crate::sst::{read_u32, read_u64, Rows};
use crate::version::{decode, encode};
use crate::wal::{find_tail, replay, SegmentId, SegmentMeta};

/// Most bytes of a log that are looked at.
const LOG_BYTES_MAX: usize = 1 << 20;

// Puts the checksum of the rest over the first four bytes.
fn mend(bytes: &mut [u8]) {
    if let Some((place, rest)) = bytes.split_first_chunk_mut::<4>() {
        *place = crc32c(rest).to_le_bytes();
    }
}

/// A rows block of an SST.
pub fn rows_block(bytes: &[u8]) {
    let mut block = bytes.to_vec();
    mend(&mut block);
    let sst = crate::SstId(read_u64(&block, 8).unwrap_or(0));
    let number = read_u32(&block, 16).unwrap_or(0);
    let name = BlockName { sst, number, kind: BlockKind::Rows };
    let Ok(rows) = Rows::check(&block, name) else { return };
    let places = rows.places();
    for at in 0..rows.count() {
        let (Some((key, record)), Some(place)) = (rows.row(at), places.row(&block, at)) else {
            continue;
        };
        assert_eq!(place.0, key, "two ways to the same row");
        assert_eq!(rows.find(key), Some(record), "a row that is there is found");
    }
    let _ = (rows.find(Key::MIN), rows.find(Key::MAX));
}

/// A version file.
pub fn version(bytes: &[u8]) {
    if let Ok(stored) = decode(bytes) {
        assert_eq!(encode(&stored).len(), bytes.len(), "nothing is left over");
        assert_eq!(decode(&encode(&stored)).ok(), Some(stored), "comes back as it was");
    }
}

fn schema() -> Option<Schema> {
    let table = TableSchema::plain("t", 1000, 1);
    Schema::new(vec![table]).ok()
}

/// A log segment: as the committed part of a full commit, and behind it.
pub fn log(bytes: &[u8]) {
    let mut log: Vec<u8> = bytes.iter().copied().take(LOG_BYTES_MAX).collect();
    let mut rest = log.as_mut_slice();
    let mut entry_count = 0u64;
    while let Some(length) = read_u32(rest, 4) {
        let len_bytes = 24 + (length & !(1 << 31)) as usize;
        if len_bytes > rest.len() {
            break;
        }
        let (entry, later) = rest.split_at_mut(len_bytes);
        for (place, byte) in entry
            .iter_mut()
            .skip(8)
            .zip(0u64.to_le_bytes().into_iter().chain(entry_count.to_le_bytes()))
        {
            *place = byte;
        }
        mend(entry);
        entry_count += 1;
        rest = later;
    }
    let Some(schema) = schema() else { return };
    let id = SegmentId(0);
    let meta = SegmentMeta { id, len_bytes: log.len() as u64, entry_count };
    let folder = MemoryFolder::default();
    if folder.write_durable("000000.wal", &log).is_err() {
        return;
    }
    let _ = replay(&folder, &schema, meta, &Budget::unlimited(), &mut |_, _| Ok(()));
    if let Ok(tail) = find_tail(&folder, &[], 0, 0, &Budget::unlimited()) {
        for segment in tail.segments {
            assert!(segment.len_bytes <= log.len() as u64, "the tail ends inside the log");
        }
    }
}

#[cfg(test)]
mod tests {
    use tierbed_sim::fuzz::replay_seeds;

    #[test]
    fn seeds_of_every_target_pass() {
        replay_seeds("lsm_rows", super::rows_block);
        replay_seeds("lsm_version", super::version);
        replay_seeds("lsm_log", super::log);
    }
}
