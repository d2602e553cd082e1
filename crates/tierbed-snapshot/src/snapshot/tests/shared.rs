//! Snapshots whose tiers share a budget, against snapshots with bytes of their own.

use tierbed_cache::{PolicyKind, TierBudget};

use super::tiers::{ask, plain_table, publish_plain};
use super::*;
use crate::{CacheTier, SharedTiers, TierStackOptions};

fn open(
    folder: &Arc<dyn Folder>,
    policy: PolicyKind,
    budget: &Arc<TierBudget>,
) -> Result<Snapshot> {
    let shared = SharedTiers {
        budget: Arc::clone(budget),
        name: policy.name().to_owned(),
        floor_bytes: Some(budget.limit_bytes() * 5 / 16),
    };
    let tiers = TierStackOptions {
        tiers: vec![CacheTier { policy, ..CacheTier::default() }],
        shared: Some(shared),
        ..TierStackOptions::default()
    };
    Snapshot::open(Arc::clone(folder), &SnapshotOptions { tiers, ..options(2 << 20) })
}

/// Rows below `row_count`, ascending, each once.
fn draw(rng: &mut SplitMix64, row_count: u64) -> Vec<u64> {
    let mut rows: Vec<u64> = (0..8).map(|_| rng.below(row_count)).collect();
    rows.sort_unstable();
    rows.dedup();
    rows
}

#[test]
fn snapshots_of_one_budget_answer_as_with_bytes_of_their_own() {
    const ROWS: u64 = 20_000;
    for name in ["lru", "group_frequency"] {
        let policy = PolicyKind::from_name(name).unwrap();
        let folder = memory_folder();
        let rows = publish_plain(&folder, ROWS);
        let budget = TierBudget::with_epoch(3 << 19, 200).unwrap();
        let (many, few) = (open(&folder, policy, &budget), open(&folder, policy, &budget));
        let (many, few) = (many.unwrap(), few.unwrap());
        let mut rng = SplitMix64::new(5);
        for _ in 0..2500 {
            for (snapshot, row_count) in [(&many, ROWS), (&few, 40)] {
                let asked = draw(&mut rng, row_count);
                let (found, _) = ask(snapshot, &asked);
                let stored = asked.iter().map(|&row| &rows[row as usize]);
                assert!(stored.eq(found.iter()), "{name}");
            }
            let stats = budget.stats();
            assert!(stats.used_bytes <= stats.limit_bytes, "{stats:?}");
        }
        let stats = budget.stats();
        let [first, second] = &stats.members[..] else { panic!("two members: {stats:?}") };
        assert!(first.capacity_bytes > second.capacity_bytes, "{name}: {stats:?}");
        for (member, snapshot) in [(first, &many), (second, &few)] {
            let lookups = snapshot.stats().lookups;
            assert_eq!(member.rows_asked, lookups.row_count);
            assert_eq!(member.rows_hit, lookups.row_count - lookups.rows_read);
            assert!(snapshot.stats().cache_used_bytes <= member.used_bytes);
        }
        let held = budget.stats().members[0].capacity_bytes;
        drop(few);
        assert!(budget.stats().members[0].capacity_bytes > held, "{name}");
        drop(many);
        assert_eq!(budget.stats().used_bytes, 0);
    }
}

#[test]
fn a_snapshot_that_finds_no_room_is_refused() {
    let (folder, _) = plain_table();
    let small = TierBudget::new(1000).unwrap();
    let error = open(&folder, PolicyKind::Lru, &small).err().map(|error| error.kind());
    assert_eq!(error, Some(ErrorKind::Invalid));
    let budget = TierBudget::new(2 << 20).unwrap();
    let shared = Some(SharedTiers { budget, name: String::new(), floor_bytes: None });
    let refused = |tiers: Vec<CacheTier>, cache_bytes_max| {
        let tiers = TierStackOptions { tiers, shared: shared.clone(), ..Default::default() };
        let options = SnapshotOptions { tiers, cache_bytes_max, ..options(2 << 20) };
        let error = Snapshot::open(Arc::clone(&folder), &options).err();
        assert_eq!(error.map(|error| error.kind()), Some(ErrorKind::Invalid));
    };
    refused(Vec::new(), None);
    refused(vec![CacheTier::default()], Some(1 << 20));
}
