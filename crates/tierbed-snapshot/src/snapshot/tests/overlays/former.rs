//! Generations before the newest, which still answer.

use std::collections::BTreeMap;
use std::thread;

use super::chains::{branches, Branches};
use super::*;

/// Most generations before the newest.
const KEPT: usize = 3;

#[test]
fn a_former_generation_has_its_own_rows_whatever_is_applied() {
    let Branches { base, chains } = branches();
    for tiers in [two_tiers(PolicyKind::Lru), TierStackOptions::default()] {
        let options = SnapshotOptions { tiers, ..options(16 << 20) };
        let served = Arc::new(Snapshot::open(base.clone(), &options).unwrap());
        served.keep_former(KEPT);
        let (mut rng, mut known) = (SplitMix64::new(6), BTreeMap::new());
        known.insert(served.generation().identity, chains[0].1.clone());
        for number in 0..40 {
            let (deltas, expected) = &chains[rng.below(chains.len() as u64) as usize];
            let before = served.generations();
            let now = served.apply_chain_with(deltas.clone(), |_| Ok(())).unwrap().identity;
            known.insert(now.clone(), expected.clone());
            let generations = served.generations();
            assert_eq!(generations[0], now);
            assert!(generations.len() <= KEPT + 1, "{generations:?}");
            assert!(before[0] == now || generations[1] == before[0], "{before:?} {generations:?}");
            for _ in 0..2 * generations.len() {
                let identity = &generations[rng.below(generations.len() as u64) as usize];
                let view = served.view_of(identity).unwrap();
                assert!(answers_of(&view) == known[identity], "{identity} after {number}");
            }
            if rng.below(3) == 0 && generations.len() > 1 {
                let forgotten = &generations[1 + rng.below(generations.len() as u64 - 1) as usize];
                served.forget_former(forgotten).unwrap();
                assert!(served.view_of(forgotten).is_none());
                assert_eq!(served.generations().len(), generations.len() - 1);
            }
        }
        served.verify().unwrap();
    }
}

#[test]
fn lookups_of_a_former_generation_go_on_while_deltas_are_applied() {
    let Branches { base, chains } = branches();
    let options = SnapshotOptions { tiers: two_tiers(PolicyKind::Lru), ..options(16 << 20) };
    let served = Arc::new(Snapshot::open(base, &options).unwrap());
    served.keep_former(1);
    let known: BTreeMap<String, Vec<u32>> = chains
        .iter()
        .map(|(deltas, expected)| {
            served.apply_chain_with(deltas.clone(), |_| Ok(())).unwrap();
            (served.generation().identity, expected.clone())
        })
        .collect();
    let is_over = AtomicBool::new(false);
    let asked = thread::scope(|scope| {
        let look = || {
            let mut asked = 0;
            while !is_over.load(Ordering::Relaxed) {
                // Forgotten between the two, it is not there.
                let oldest = served.generations().pop().unwrap();
                let Some(view) = served.view_of(&oldest) else { continue };
                assert!(answers_of(&view) == known[&oldest], "{oldest}");
                asked += 1;
            }
            asked
        };
        let looking: Vec<_> = (0..2).map(|_| scope.spawn(look)).collect();
        let mut rng = SplitMix64::new(4);
        for _ in 0..60 {
            let (deltas, _) = &chains[rng.below(chains.len() as u64) as usize];
            served.apply_chain_with(deltas.clone(), |_| Ok(())).unwrap();
        }
        is_over.store(true, Ordering::Relaxed);
        looking.into_iter().map(|looking| looking.join().unwrap()).sum::<usize>()
    });
    assert!(asked > 10, "{asked}");
}
