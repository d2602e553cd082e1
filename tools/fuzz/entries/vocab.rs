//! Entries of the fuzz targets, compiled into the crate: any bytes given to its decoders.
//!
//! Pages and directories have no checksum of their own, the store's pages have; so each entry
//! takes the bytes as they are and uses them as serving would. Damage is an error, which is fine;
//! anything else that goes wrong is a bug.

use tierbed_core::{Budget, Schema, TableSchema};

use crate::bucket::{unmix, Bucket};
use crate::directory::Directory;
use crate::pages::PAGE_WORDS;
use crate::vocabulary::{bucket_table, free_table, State};
use crate::{Policy, Published, PAGE_BYTES};

const ROW_COUNT: u64 = 1000;
/// Memory for a directory: 2^18 slots.
const BUDGET_BYTES: u64 = 2 << 20;

/// The directory of a vocabulary.
pub fn directory(bytes: &[u8]) {
    if Directory::decoded_bytes(bytes).is_ok_and(|bytes| bytes > BUDGET_BYTES) {
        return;
    }
    let Ok(directory) = Directory::decode(bytes) else { return };
    for hash in [0, 1, u64::MAX / 3, u64::MAX] {
        assert!(directory.bucket(hash) < directory.bucket_count(), "a bucket that is there");
    }
    assert!(Directory::decode(&directory.encode()).is_ok_and(|again| again == directory));
}

fn published(directory: &[u8]) -> Option<Published> {
    let table = TableSchema::plain("t", ROW_COUNT, 8);
    let schema = Schema::new(vec![table, bucket_table("t"), free_table("t")]).ok()?;
    let state = State {
        table: "t".into(),
        policy: Policy::default(),
        next_row: ROW_COUNT,
        free_count: 0,
        id_count: ROW_COUNT - 1,
        waiting_count: 0,
    };
    Published::open(&schema, state, directory, &Budget::new(BUDGET_BYTES)).ok()
}

/// The index of a snapshot: two bytes of length, the directory, then bucket pages. Asks for the
/// ids that the first page names, and for others.
pub fn pages(bytes: &[u8]) {
    let Some((len, rest)) = bytes.split_first_chunk::<2>() else { return };
    let (directory, pages) = rest.split_at(rest.len().min(u16::from_le_bytes(*len).into()));
    let Some(published) = published(directory) else { return };
    let mut words: Vec<f32> = pages
        .chunks(4)
        .map(|word| match *word {
            [a, b, c, d] => f32::from_le_bytes([a, b, c, d]),
            _ => 0.0,
        })
        .collect();
    words.resize(words.len().next_multiple_of(PAGE_WORDS).max(PAGE_WORDS), 0.0);
    let (first, _) = pages.split_at(pages.len().min(PAGE_BYTES));
    let named = Bucket::parse(first).into_iter().flat_map(Bucket::entries);
    let mut ids: Vec<i64> = named.map(|entry| unmix(entry.hash)).collect();
    ids.extend([0, 1, -1, i64::MAX, i64::MIN]);
    let translated = published.translate(&mut ids, &mut |numbers, out| {
        for (number, out) in numbers.iter().zip(out.chunks_exact_mut(PAGE_WORDS)) {
            let at = *number as usize % (words.len() / PAGE_WORDS);
            let (_, from) = words.split_at(at * PAGE_WORDS);
            let (page, _) = from.split_at(PAGE_WORDS);
            out.copy_from_slice(page);
        }
        Ok(())
    });
    if translated.is_ok() {
        assert!(ids.iter().all(|row| (0..ROW_COUNT as i64).contains(row)), "rows of the table");
    }
}

#[cfg(test)]
mod tests {
    use tierbed_sim::fuzz::replay_seeds;

    #[test]
    fn seeds_of_every_target_pass() {
        replay_seeds("vocab_pages", super::pages);
        replay_seeds("vocab_directory", super::directory);
    }
}
