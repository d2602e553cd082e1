//! Entries of the fuzz targets of training: plan files and chunk lists, which no bytes may make
//! panic.
//!
//! A plan is mended so that what lies behind its checksums is reached; every window of it is loaded
//! and walked. Damage is an error, which is fine; anything else that goes wrong is a bug.

use tierbed_core::checksum::crc32c;
use tierbed_io::{Folder, MemoryFolder, PAGE_BYTES};

use super::engine::stored::{decode_buckets, Stored};
use super::plan::{EpochPlan, PlanWindow};

/// A plan file.
pub fn plan(bytes: &[u8]) {
    let mut bytes = bytes.to_vec();
    bytes.resize(bytes.len().next_multiple_of(PAGE_BYTES).max(PAGE_BYTES), 0);
    // Bytes too short for checksums are tried as they are.
    let _ = mend(&mut bytes);
    let folder = MemoryFolder::default();
    if folder.write_durable("p.plan", &bytes).is_err() {
        return;
    }
    let Ok(plan) = EpochPlan::open(&folder, "p.plan") else { return };
    let _ = (plan.stats(), plan.identity(), plan.verify());
    let mut window = PlanWindow::default();
    for number in 0..plan.window_count().min(64) {
        if plan.load_entries(number, &mut window).is_ok() {
            let _ = (window.row_of(0), window.row_of(u32::MAX));
        }
        if plan.load(number, &mut window).is_ok() {
            walk(&window);
        }
    }
}

/// The chunk lists of a checkpoint.
pub fn chunks(bytes: &[u8]) {
    if let Ok(buckets) = decode_buckets(bytes) {
        let mut stored = Stored::default();
        stored.buckets.extend(buckets);
        let _ = stored.buckets(4, 64);
    }
}

fn walk(window: &PlanWindow) {
    for table in window.tables() {
        let next = window.next_uses(table);
        for at in 0..(table.count as usize).min(1000) {
            let _ = next.get(at);
        }
        window.rows(table).take(1000).for_each(drop);
    }
    for at in 0..window.batch_count().min(100) {
        let Some(mut batch) = window.batch(at) else { continue };
        for table in 0..window.tables().len() {
            let mapping = window.mapping(&mut batch, table, 10);
            let _ = (mapping.get(0), mapping.get(9));
        }
    }
}

// Puts the right checksums over a plan's windows, its directory and its header.
fn mend(bytes: &mut [u8]) -> Option<()> {
    fn put(bytes: &mut [u8], at: usize, crc: u32) {
        if let Some(place) = bytes.get_mut(at..at.saturating_add(4)) {
            place.copy_from_slice(&crc.to_le_bytes());
        }
    }
    let long = |bytes: &[u8], at: usize| {
        let word = bytes.get(at..).and_then(<[u8]>::first_chunk);
        word.map(|word| u64::from_le_bytes(*word) as usize)
    };
    let (from, len_bytes) = (long(bytes, 16)?, long(bytes, 24)?);
    let directory = bytes.get(from..from.saturating_add(len_bytes));
    let directory = directory.map(<[u8]>::to_vec).into_iter().flatten().collect::<Vec<u8>>();
    // A window's entry is 16 bytes somewhere in the directory; a wrong guess mends nothing.
    for entry in (0..directory.len().min(2000)).step_by(4) {
        let (Some(at), Some(block)) = (long(&directory, entry), long(&directory, entry + 8)) else {
            break;
        };
        let end = at.saturating_add(block as u32 as usize);
        let is_before = at >= PAGE_BYTES && end <= from;
        let block = bytes.get(at.saturating_add(4)..end).filter(|_| is_before);
        if let Some(crc) = block.map(crc32c) {
            put(bytes, at, crc);
        }
    }
    put(bytes, 32, crc32c(&directory));
    let crc = crc32c(bytes.get(12..PAGE_BYTES)?);
    put(bytes, 8, crc);
    Some(())
}

#[cfg(test)]
mod tests {
    use tierbed_sim::fuzz::replay_seeds;

    #[test]
    fn seeds_of_every_target_pass() {
        replay_seeds("forward_plan", super::plan);
        replay_seeds("forward_chunks", super::chunks);
    }
}
