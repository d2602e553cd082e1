//! Tiers against a plain map: exact ones give its bits, coded ones a row or its code, and what
//! stands in for a row is counted.

use tierbed_cache::{AdmissionRule, PolicyKind};
use tierbed_kernels::Codec;

use super::*;
use crate::{CacheTier, HeadRows, MissMode, ResidentTable, Tail, TierStackOptions};

pub(super) const ROWS: u64 = 3000;
pub(super) const DIM: usize = 16;

pub(super) fn stack(tiers: Vec<CacheTier>) -> TierStackOptions {
    TierStackOptions { tiers, ..TierStackOptions::default() }
}

pub(super) fn tier(codec: Codec, policy: PolicyKind, share: f64) -> CacheTier {
    CacheTier { codec, policy, share, ..CacheTier::default() }
}

#[test]
fn exact_tiers_of_every_policy_give_the_bits_of_a_map() {
    let (folder, schema) = (memory_folder(), schema());
    let rows = some_rows(&schema, 4);
    publish(&folder, &schema, &rows);
    let model: Model = rows.into_iter().collect();
    for policy in PolicyKind::ALL {
        let admission = AdmissionRule::SECOND_USE;
        let tiers = vec![
            CacheTier { admission, ..tier(Codec::F32, policy, 1.0) },
            tier(Codec::F32, policy, 2.0),
        ];
        let options = SnapshotOptions {
            tiers: stack(tiers),
            cache_bytes_max: Some(1 << 20),
            ..options(8 << 20)
        };
        let snapshot = Snapshot::open(Arc::clone(&folder), &options).unwrap();
        let total = check_lookups(&snapshot, &model, 7);
        let stats = snapshot.stats();
        assert_eq!(stats.cache_hits, total.rows_cached, "{policy:?}");
        assert_eq!(stats.cache_misses, total.rows_read + total.rows_initial, "{policy:?}");
        assert!(stats.cache_used_bytes <= 1 << 20, "{policy:?}: {}", stats.cache_used_bytes);
        assert_eq!(stats.tiers.len(), 2);
        assert!(total.rows_cached > 0, "{policy:?}: {stats:?}");
    }
}

/// A table of its own, whose rows are asked for one by one.
pub(super) fn plain_table() -> (Arc<dyn Folder>, Vec<Vec<f32>>) {
    let folder = memory_folder();
    let rows = publish_plain(&folder, ROWS);
    (folder, rows)
}

/// Publishes a table of `row_count` rows, and ten never written; returns its rows.
pub(super) fn publish_plain(folder: &Arc<dyn Folder>, row_count: u64) -> Vec<Vec<f32>> {
    let schema = Schema::new(vec![table("plain", row_count + 10, DIM as u32)]).unwrap();
    let mut rng = SplitMix64::new(3);
    let row = |_| (0..DIM).map(|_| rng.unit_f64() as f32 - 0.5).collect::<Vec<f32>>();
    let rows: Vec<Vec<f32>> = (0..row_count).map(row).collect();
    let keyed = rows.iter().zip(0..);
    let keyed: Vec<_> =
        keyed.map(|(row, at)| (RowKey::new(TableId(0), RowId(at)), row.clone())).collect();
    publish(folder, &schema, &keyed);
    rows
}

pub(super) fn ask(snapshot: &Snapshot, rows: &[u64]) -> (Vec<Vec<f32>>, LookupStats) {
    try_ask(snapshot, rows).unwrap()
}

/// As [`ask`], where the disk may fail.
pub(super) fn try_ask(snapshot: &Snapshot, rows: &[u64]) -> Result<(Vec<Vec<f32>>, LookupStats)> {
    let indices: Vec<i64> = rows.iter().map(|&row| row as i64).collect();
    let offsets = [0, indices.len() as i64];
    let plan = FeatureLayout::new(snapshot.schema(), &[(TableId(0), Pooling::None)]).unwrap();
    let bags = Bags::new(&indices, &offsets, None, 1).unwrap();
    let mut out = vec![f32::NAN; plan.output_len(&bags)];
    let stats = snapshot.lookup(&plan, &bags, &mut out)?;
    Ok((out.chunks(DIM).map(<[f32]>::to_vec).collect(), stats))
}

pub(super) fn coded(codec: &Codec, row: &[f32]) -> Vec<f32> {
    let mut code = vec![0; codec.code_bytes(row.len())];
    codec.encode(row, &mut code).unwrap();
    let mut out = vec![0.0; row.len()];
    Kernels::detect().decode_row(codec, &code, &mut out);
    out
}

#[test]
fn rows_fall_from_a_wide_tier_to_a_narrow_one() {
    let (folder, rows) = plain_table();
    for policy in [PolicyKind::Lru, PolicyKind::from_name("group_frequency").unwrap()] {
        let tiers = vec![tier(Codec::Int8, policy, 1.0), tier(Codec::Int4, policy, 1.0)];
        let options = SnapshotOptions {
            tiers: stack(tiers),
            cache_bytes_max: Some(60 << 10),
            ..options(2 << 20)
        };
        let snapshot = Snapshot::open(Arc::clone(&folder), &options).unwrap();
        let mut rng = SplitMix64::new(11);
        let (mut wide, mut narrow, mut exact) = (0, 0, 0);
        for _ in 0..600 {
            let mut asked: Vec<u64> = (0..20)
                .map(|_| rng.below(ROWS).min(rng.below(ROWS)).min(rng.below(ROWS)))
                .collect();
            asked.sort_unstable();
            asked.dedup();
            let (found, stats) = ask(&snapshot, &asked);
            let mut cached = 0;
            for (&row, found) in asked.iter().zip(&found) {
                let stored = &rows[row as usize];
                let eight = coded(&Codec::Int8, stored);
                if found == stored {
                    exact += 1;
                } else if *found == eight {
                    (wide, cached) = (wide + 1, cached + 1);
                } else {
                    // It was bypassed as it is, or fell out of the wide tier.
                    let fallen = [coded(&Codec::Int4, stored), coded(&Codec::Int4, &eight)];
                    assert!(fallen.contains(found), "{policy:?}: row {row} is {found:?}");
                    (narrow, cached) = (narrow + 1, cached + 1);
                }
            }
            assert_eq!((cached, asked.len() as u64 - cached), (stats.rows_cached, stats.rows_read));
        }
        let tiers = snapshot.stats().tiers;
        assert_eq!((tiers[0].hits, tiers[1].hits), (wide, narrow), "{policy:?}");
        assert_eq!(tiers[1].misses, exact);
        assert!(wide > 100 && narrow > 100 && exact > 100, "{policy:?}: {wide} {narrow} {exact}");
    }
}

pub(super) fn resident(rows: &[Vec<f32>], tail: Option<Tail>) -> ResidentTable {
    let codec = Codec::Gauss4;
    let head: Vec<u64> = (0..ROWS).filter(|row| row % 7 == 3).collect();
    let mut codes = vec![0; head.len() * codec.code_bytes(DIM)];
    for (row, code) in head.iter().zip(codes.chunks_mut(codec.code_bytes(DIM))) {
        codec.encode(&rows[*row as usize], code).unwrap();
    }
    let head = HeadRows::new(codec, ROWS + 10, DIM, &head, codes).unwrap();
    let default_row = Some(vec![0.25; DIM]);
    ResidentTable { table: TableId(0), head: Some(head), tail, default_row }
}

pub(super) fn tail_codes(rows: &[Vec<f32>]) -> Vec<u8> {
    let codec = Codec::Int4;
    let mut codes = vec![0; (ROWS as usize + 10) * codec.code_bytes(DIM)];
    for (row, code) in rows.iter().zip(codes.chunks_mut(codec.code_bytes(DIM))) {
        codec.encode(row, code).unwrap();
    }
    codes
}

fn open_resident(
    folder: &Arc<dyn Folder>,
    table: ResidentTable,
    misses: MissMode,
    tiers: Vec<CacheTier>,
) -> Snapshot {
    let resident = vec![Arc::new(table)];
    let tiers = TierStackOptions { tiers, resident, misses, ..TierStackOptions::default() };
    Snapshot::open(Arc::clone(folder), &SnapshotOptions { tiers, ..options(2 << 20) }).unwrap()
}

#[test]
fn resident_rows_answer_without_reading() {
    let (folder, rows) = plain_table();
    let asked: Vec<u64> = (0..ROWS + 10).step_by(3).collect();
    let head_count = asked.iter().filter(|&&row| row < ROWS && row % 7 == 3).count() as u64;
    let stored_count = asked.iter().filter(|&&row| row < ROWS).count() as u64;
    let codes = || Some(Tail { codec: Codec::Int4, codes: tail_codes(&rows) });
    for (misses, tail) in [
        (MissMode::Read, codes()),
        (MissMode::Surrogate, codes()),
        (MissMode::Default, codes()),
        (MissMode::Surrogate, None),
        (MissMode::Default, None),
    ] {
        let has_tail = tail.is_some();
        let snapshot = open_resident(&folder, resident(&rows, tail), misses, Vec::new());
        let (found, stats) = ask(&snapshot, &asked);
        for (&row, found) in asked.iter().zip(&found) {
            let Some(stored) = rows.get(row as usize) else { continue };
            let expected = match misses {
                _ if row % 7 == 3 => coded(&Codec::Gauss4, stored),
                MissMode::Surrogate | MissMode::Default if has_tail => coded(&Codec::Int4, stored),
                MissMode::Default => vec![0.25; DIM],
                _ => stored.clone(),
            };
            assert_eq!(*found, expected, "{misses:?}, row {row}");
        }
        let others = stored_count - head_count;
        let expected = match misses {
            MissMode::Surrogate | MissMode::Default if has_tail => (0, others, 0),
            MissMode::Default => (0, 0, others),
            _ => (others, 0, 0),
        };
        assert_eq!((stats.rows_read, stats.rows_surrogate, stats.rows_default), expected);
        assert_eq!(stats.rows_resident, head_count);
        // Rows never written have their initial values, at no cost.
        assert_eq!(stats.rows_initial, asked.len() as u64 - stored_count);
        assert_eq!(stats.pages_read > 0, expected.0 > 0);
        let held = snapshot.stats().resident_bytes;
        let head_bytes = (ROWS / 7) * Codec::Gauss4.code_bytes(DIM) as u64;
        assert!(held >= head_bytes && snapshot.budget_report().used_bytes >= held);
    }
}

#[test]
fn wrong_resident_rows_are_refused() {
    let (folder, rows) = plain_table();
    let refused = |table: ResidentTable, tables: usize| {
        let table = Arc::new(table);
        let resident = (0..tables).map(|_| Arc::clone(&table)).collect();
        let tiers = TierStackOptions { resident, ..TierStackOptions::default() };
        let error =
            Snapshot::open(Arc::clone(&folder), &SnapshotOptions { tiers, ..options(2 << 20) });
        assert_eq!(error.unwrap_err().kind(), ErrorKind::Invalid);
    };
    refused(resident(&rows, None), 2);
    refused(resident(&rows, Some(Tail { codec: Codec::Int4, codes: vec![0; 5] })), 1);
    refused(ResidentTable { default_row: Some(vec![0.0]), ..resident(&rows, None) }, 1);
    refused(ResidentTable { table: TableId(1), ..resident(&rows, None) }, 1);
    for (rows, bytes) in [(&[1, 1][..], 20), (&[2, 1], 20), (&[50], 10), (&[1], 9)] {
        assert!(HeadRows::new(Codec::Gauss4, 50, 16, rows, vec![0; bytes]).is_err());
    }
}

#[test]
fn a_cache_need_not_begin_empty() {
    let (folder, rows) = plain_table();
    for codec in [Codec::F32, Codec::Int8] {
        let options = SnapshotOptions {
            tiers: stack(vec![tier(codec.clone(), PolicyKind::Lru, 1.0)]),
            cache_bytes_max: Some(256 << 10),
            ..options(2 << 20)
        };
        let snapshot = Snapshot::open(Arc::clone(&folder), &options).unwrap();
        let room = snapshot.stats().tiers[0].row_count_max;
        assert!(room > 500, "{room}");
        let keys: Vec<_> = (0..500).map(|row| RowKey::new(TableId(0), RowId(row))).collect();
        snapshot.preload(&keys, &rows[..500].concat()).unwrap();
        let (found, stats) = ask(&snapshot, &[3, 499, 500]);
        assert_eq!((stats.rows_cached, stats.rows_read), (2, 1));
        assert_eq!(found[1], coded(&codec, &rows[499]));
        assert!(snapshot.preload(&keys, &[0.0; 3]).is_err());
    }
}

#[test]
fn a_tier_too_small_for_a_row_tells_so() {
    let (folder, _) = plain_table();
    let options = SnapshotOptions { cache_bytes_max: Some(100), ..options(2 << 20) };
    let snapshot = Snapshot::open(folder, &options).unwrap();
    assert_eq!(snapshot.stats().tiers[0].row_count_max, 0);
}

/// Turns a byte of page `page_id` around; once more, and it is as before.
pub(super) fn spoil(folder: &Arc<dyn Folder>, page_id: u64) {
    let device = folder.open(PAGES_NAME, OpenMode::ReadWrite).unwrap();
    let (at, mut byte) = (page_id * PAGE_BYTES as u64 + 999, [0]);
    device.read_at(at, &mut byte).unwrap();
    device.write_at(at, &[!byte[0]]).unwrap();
}

/// However misses are answered: what has to be read from a page that fails its checks is an error,
/// and neither then nor later the value of anything.
#[test]
fn a_bad_page_beneath_tiers_is_an_error_and_never_a_value() {
    let (folder, rows) = plain_table();
    let asked: Vec<u64> = (0..ROWS).filter(|row| row % 7 != 3).take(200).collect();
    let codes = || Some(Tail { codec: Codec::Int4, codes: tail_codes(&rows) });
    for (misses, tail) in [
        (MissMode::Read, codes()),
        (MissMode::Read, None),
        (MissMode::Surrogate, codes()),
        (MissMode::Surrogate, None),
        (MissMode::Default, codes()),
        (MissMode::Default, None),
    ] {
        let has_codes = tail.is_some();
        let is_read = misses == MissMode::Read || misses == MissMode::Surrogate && !has_codes;
        let policy = PolicyKind::from_name("group_frequency").unwrap();
        let tiers = vec![tier(Codec::F32, policy, 1.0), tier(Codec::Int8, PolicyKind::Lru, 1.0)];
        let table = resident(&rows, tail);
        let snapshot = open_resident(&folder, table, misses, tiers);
        spoil(&folder, 1);
        let (mut failed, mut exact) = (Vec::new(), 0);
        for &row in &asked {
            match try_ask(&snapshot, &[row]) {
                Ok((found, _)) if is_read => {
                    assert_eq!(found[0], rows[row as usize], "{misses:?}, row {row}");
                    exact += 1;
                }
                Ok((found, _)) => {
                    let coded = coded(&Codec::Int4, &rows[row as usize]);
                    let expected = if has_codes { coded } else { vec![0.25; DIM] };
                    assert_eq!(found[0], expected, "{misses:?}, row {row}");
                }
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Corruption);
                    failed.push(row);
                }
            }
        }
        assert_eq!(!failed.is_empty(), is_read, "{misses:?}: pages are read for misses or not");
        assert_eq!(exact > 0, is_read, "{misses:?}: other pages are whole");
        spoil(&folder, 1);
        for row in failed {
            let (found, stats) = ask(&snapshot, &[row]);
            assert_eq!((stats.rows_cached, &found[0]), (0, &rows[row as usize]));
        }
    }
}
