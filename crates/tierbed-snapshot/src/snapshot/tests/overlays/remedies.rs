//! What errors of applying a delta advise, done.

use super::*;

/// Checks that `folder` is refused with `remedy`.
fn refused(snapshot: &Snapshot, folder: &Arc<dyn Folder>, remedy: &str) {
    let error = snapshot.apply(Arc::clone(folder)).unwrap_err();
    assert!(error.to_string().contains(remedy), "{error}");
}

fn small() -> Chain {
    let schema = Schema::new(vec![table("t", 60, 16), table("large", 3, 1100)]).unwrap();
    Chain::publish(schema, Codec::F32, Vec::new())
}

#[test]
fn a_whole_snapshot_is_opened_and_a_delta_is_applied() {
    let mut chain = small();
    let served = Snapshot::open(chain.folder.clone(), &options(4 << 20)).unwrap();
    let whole = chain.folder.clone();
    refused(&served, &whole, "open it as a snapshot, or publish a delta against this one");
    Snapshot::open(whole.clone(), &options(4 << 20)).unwrap();
    let rows = chain.changes(9, &mut SplitMix64::new(1));
    served.apply(chain.delta(&whole, &rows)).unwrap();
}

#[test]
fn deltas_are_applied_one_after_the_other_and_not_too_many() {
    let (mut chain, mut rng) = (small(), SplitMix64::new(1));
    let served = Snapshot::open(chain.folder.clone(), &options(4 << 20)).unwrap();
    let (base, mut whole) = (chain.folder.clone(), chain.folder.clone());
    let mut deltas = Vec::new();
    for _ in 0..9 {
        let rows = chain.changes(5, &mut rng);
        let delta = chain.delta(&whole, &rows);
        whole = applied(&whole, &delta);
        deltas.push(delta);
    }
    let before = "apply the deltas before it, or publish one against the snapshot";
    refused(&served, &deltas[1], before);
    deltas[..8].iter().for_each(|delta| drop(served.apply(delta.clone()).unwrap()));
    let many = "publish a delta against the snapshot itself, or publish in full";
    refused(&served, &deltas[8], many);
    let rows = chain.all_since(&Model::new(), &[]);
    let generation = served.apply(chain.delta(&base, &rows)).unwrap();
    assert_eq!(generation.delta_count, 1);
}

#[test]
fn longer_rows_are_published_in_full() {
    let chain = small();
    let served = Snapshot::open(chain.folder.clone(), &options(4 << 20)).unwrap();
    let mut tables = chain.schema.tables().to_vec();
    tables.push(table("longer", 3, 2000));
    let schema = Schema::new(tables).unwrap();
    let mut longer = Chain { schema: schema.clone(), ..chain };
    let base = longer.folder.clone();
    let delta = longer.delta(&base, &[]);
    refused(&served, &delta, "publish in full, and open the result");
    let whole = Chain::publish(schema, Codec::F32, Vec::new());
    Snapshot::open(whole.folder, &options(4 << 20)).unwrap();
}

#[test]
fn a_larger_budget_has_room_for_a_delta() {
    let mut chain = Chain::publish(schema(), Codec::F32, Vec::new());
    let rows = chain.changes(4000, &mut SplitMix64::new(6));
    let base = chain.folder.clone();
    let delta = chain.delta(&base, &rows);
    let options = |bytes| SnapshotOptions { cache_bytes_max: Some(0), ..options(bytes) };
    let served = Snapshot::open(base.clone(), &options(700 << 10)).unwrap();
    let report = served.budget_report();
    let taken = served.budget().reserve("test", report.limit_bytes - report.used_bytes).unwrap();
    refused(&served, &delta, "open the snapshot with a larger dram_budget");
    drop((taken, served));
    Snapshot::open(base, &options(2 << 20)).unwrap().apply(delta).unwrap();
}

#[test]
fn a_damaged_delta_is_copied_again() {
    let mut chain = small();
    let served = Snapshot::open(chain.folder.clone(), &options(4 << 20)).unwrap();
    let base = chain.folder.clone();
    let rows = chain.changes(9, &mut SplitMix64::new(1));
    let delta = chain.delta(&base, &rows);
    let index = delta.read(INDEX_NAME).unwrap().unwrap();
    delta.write_atomic(INDEX_NAME, &index[..index.len() / 2]).unwrap();
    refused(&served, &delta, "copy or publish the delta again");
    delta.write_atomic(INDEX_NAME, &index).unwrap();
    served.apply(delta).unwrap();
    check_lookups(&served, &chain.model, 1);
}
