//! Versions on the machine of a server: which it may serve, and which go.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test that panics has failed")]

mod kit;

use std::collections::BTreeSet;
use std::path::Path;

use kit::{folder_place, seed_of, Does};
use tierbed_core::ErrorKind;
use tierbed_remote::{Link, Local, Location, Seq, Want};

fn seqs(chain: &[Link]) -> Vec<u64> {
    chain.iter().map(|link| link.seq.0).collect()
}

/// Four versions, `1 2 3` and `4`, of which the first three are here.
fn served() -> (kit::Place, Location, tempfile::TempDir) {
    let (place, to) = (folder_place(), tempfile::tempdir().unwrap());
    let location = place.open();
    location.push_whole(1, "stable").unwrap();
    location.push_delta(2, 1, "stable").unwrap();
    location.push_delta(3, 2, "stable").unwrap();
    location.pull_into("stable", to.path()).unwrap();
    location.push_whole(4, "canary").unwrap();
    (place, location, to)
}

#[test]
fn a_server_without_its_store_has_what_it_noted_or_the_newest_that_is_whole() {
    let (_place, location, to) = served();
    let local = Local::open(to.path()).unwrap();
    assert_eq!(seqs(&local.newest("stable").unwrap().unwrap()), [1, 2, 3]);
    location.rollback("stable", Seq(2), kit::NOW_S).unwrap();
    local.note("stable", &location.head("stable").unwrap().unwrap()).unwrap();
    assert_eq!(seqs(&local.newest("stable").unwrap().unwrap()), [1, 2]);
    assert_eq!(seqs(&local.newest("canary").unwrap().unwrap()), [1, 2, 3], "another channel");
    local.remove(Seq(2)).unwrap();
    assert_eq!(seqs(&local.newest("stable").unwrap().unwrap()), [1]);
    std::fs::remove_file(to.path().join("000001/parts.json")).unwrap();
    assert!(local.newest("stable").unwrap().is_none());
}

#[test]
fn what_is_not_kept_goes_and_comes_again_whole() {
    let (_place, location, to) = served();
    let local = Local::open(to.path()).unwrap();
    // Left by a kill.
    for name in ["000009.incoming", "000003.incoming", "000007.leaving"] {
        std::fs::create_dir(to.path().join(name)).unwrap();
    }
    let kept: BTreeSet<Seq> = [Seq(1), Seq(3)].into();
    assert_eq!(local.keep_only(&kept).unwrap(), [Seq(2)]);
    let there = |name: &str| to.path().join(name).exists();
    assert!(there("000001") && there("000003") && there("000003.incoming"));
    assert!(!there("000002") && !there("000009.incoming") && !there("000007.leaving"));
    let chain = location.head("stable").unwrap().unwrap().chain;
    let pull =
        |want: &Want, to: &Path| location.pull(want, to, &kit::at_once(), &mut |_, _| Ok(()));
    std::fs::remove_file(to.path().join("000003/parts.json")).unwrap();
    let error = pull(&Want::Chain(chain.clone()), to.path()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    local.make_way(&chain).unwrap();
    assert!(there("000001") && !there("000003"));
    let pulled = pull(&Want::Chain(chain), to.path()).unwrap();
    let seeds: Vec<u64> = pulled.folders.iter().map(|folder| seed_of(folder)).collect();
    assert_eq!((seeds, pulled.folders[1].clone()), (vec![1, 2, 3], local.version(Seq(2))));
    let error = pull(&Want::Chain(Vec::new()), to.path()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    let error = Local::open(to.path()).unwrap_err();
    assert!(error.kind() == ErrorKind::Closed, "{error}");
}
