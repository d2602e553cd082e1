//! Chains of deltas: forward, back, and to another branch.

use super::*;

/// Deltas `a b c` upon each other, and `d e` beside `b c` upon `a`; what each chain answers.
pub(super) struct Branches {
    pub(super) base: Arc<dyn Folder>,
    pub(super) chains: Vec<Branch>,
}

/// Deltas, oldest first, and what a snapshot answers with them.
pub(super) type Branch = (Vec<Arc<dyn Folder>>, Vec<u32>);

pub(super) fn branches() -> Branches {
    let mut rng = SplitMix64::new(5);
    let mut chain = Chain::publish(schema(), Codec::F32, Vec::new());
    let base = chain.folder.clone();
    let mut whole = base.clone();
    let told = |whole: &Arc<dyn Folder>| {
        answers(&Snapshot::open(whole.clone(), &options(8 << 20)).unwrap())
    };
    let mut chains = vec![(Vec::new(), told(&base))];
    let mut fork = None;
    for at in 0..5 {
        if at == 3 {
            let (deltas, model): (Vec<_>, Model) = fork.clone().unwrap();
            (whole, chain.model) = (applied(&base, &deltas[0]), model);
            chains.push((deltas, told(&whole)));
        }
        let rows = chain.changes(300, &mut rng);
        let delta = chain.delta(&whole, &rows);
        whole = applied(&whole, &delta);
        let mut deltas = chains.last().unwrap().0.clone();
        deltas.push(delta);
        if at == 0 {
            fork = Some((deltas.clone(), chain.model.clone()));
        }
        chains.push((deltas, told(&whole)));
    }
    Branches { base, chains }
}

#[test]
fn a_snapshot_answers_from_whichever_chain_it_is_told() {
    let Branches { base, chains } = branches();
    let tiers = two_tiers(PolicyKind::Lru);
    let served = Snapshot::open(base, &SnapshotOptions { tiers, ..options(16 << 20) }).unwrap();
    let mut rng = SplitMix64::new(8);
    for number in 0..40 {
        let (deltas, expected) = &chains[rng.below(chains.len() as u64) as usize];
        let mut seen = Vec::new();
        let prepare = |view: &crate::View<'_>| {
            seen.push(Arc::clone(view.identity()));
            Ok(())
        };
        let generation = served.apply_chain_with(deltas.clone(), prepare).unwrap();
        assert_eq!(generation.delta_count, deltas.len() as u64, "{number}");
        assert_eq!(seen.last().unwrap().to_string(), generation.identity);
        // Twice: from pages, then from the tiers.
        assert!(answers(&served) == *expected, "chain of {} deltas, {number}", deltas.len());
        assert!(answers(&served) == *expected);
    }
    assert!(served.stats().generation.rows_replaced > 0);
    assert!(served.budget_report().peak_bytes <= 16 << 20);
}

#[test]
fn a_chain_with_a_gap_or_a_damaged_delta_changes_nothing() {
    let Branches { base, chains } = branches();
    let served = Snapshot::open(base, &options(16 << 20)).unwrap();
    let (deltas, _) = &chains[3];
    let (applied, expected) = &chains[2];
    served.apply_chain_with(applied.clone(), |_| Ok(())).unwrap();
    let gap = vec![deltas[0].clone(), deltas[2].clone()];
    let refused = |deltas: Vec<Arc<dyn Folder>>| {
        let error = served.apply_chain_with(deltas, |_| Ok(())).unwrap_err();
        assert!(answers(&served) == *expected);
        error.to_string()
    };
    assert!(refused(gap).contains("apply the deltas before it"));
    let twice = vec![deltas[0].clone(), deltas[0].clone()];
    assert!(refused(twice).contains("give a snapshot's deltas in the order of their making"));
    let torn = memory_folder();
    for name in deltas[2].list().unwrap().iter().filter(|name| *name != "rows.index") {
        torn.write_atomic(name, &deltas[2].read(name).unwrap().unwrap()).unwrap();
    }
    refused(vec![deltas[0].clone(), deltas[1].clone(), torn]);
    let no = |_: &crate::View<'_>| Err(Error::invalid("no"));
    let error = served.apply_chain_with(Vec::new(), no).unwrap_err();
    assert!(error.to_string().contains("no") && answers(&served) == *expected);
}
