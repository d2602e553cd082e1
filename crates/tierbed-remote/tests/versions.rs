//! Versions are pushed, listed, moved, pinned and pruned, wherever they lie.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test that panics has failed")]

mod kit;

use kit::{places, published, seed_of, Does, Place, NOW_S, PART_BYTES};
use tierbed_core::env::SplitMix64;
use tierbed_core::ErrorKind;
use tierbed_io::{Folder, FsFolder};
use tierbed_remote::{Expected, Prune, Pull, Push, Seq, State, Want, When};

fn seqs(numbers: &[u64]) -> Vec<Seq> {
    numbers.iter().map(|number| Seq(*number)).collect()
}

#[test]
fn a_pushed_version_arrives_with_the_same_bytes() {
    for place in places() {
        let location = place.open();
        assert!(location.head("stable").unwrap().is_none(), "{}", place.name);
        assert_eq!(location.push_whole(1, "stable").unwrap().seq, Seq(1));
        let pushed = location.push_delta(2, 1, "stable").unwrap();
        assert_eq!(pushed.chain, seqs(&[1, 2]));
        assert_eq!(location.push_delta(3, 2, "stable").unwrap().chain, seqs(&[1, 2, 3]));
        assert_eq!(place.open().served("stable").unwrap(), [1, 2, 3]);
        // A delta on an earlier version leaves out those between.
        assert_eq!(location.push_delta(4, 1, "stable").unwrap().chain, seqs(&[1, 4]));
        assert_eq!(location.push_whole(5, "stable").unwrap().chain, seqs(&[5]));
        let to = tempfile::tempdir().unwrap();
        let earlier = Want::Version(Seq(3));
        let pulled = location.pull(&earlier, to.path(), &kit::at_once(), &mut |_, _| Ok(()));
        assert_eq!(pulled.unwrap().folders.len(), 3);
        let again = location.pull(&earlier, to.path(), &kit::at_once(), &mut |_, _| Ok(()));
        assert_eq!(again.unwrap().parts_fetched, 0, "it is here already");
    }
}

#[test]
fn a_large_version_arrives_with_the_same_bytes() {
    // Three chunks of an upload, and five requests of a download.
    const BYTES: usize = (34 << 20) + 7;
    let folder = published(1);
    let mut rng = SplitMix64::new(1);
    let bytes: Vec<u8> = (0..BYTES / 8 + 1).flat_map(|_| rng.next_u64().to_le_bytes()).collect();
    let source = FsFolder::open(folder.path()).unwrap();
    source.write_durable("rows.pages", &bytes[..BYTES]).unwrap();
    for place in places() {
        let push = Push::new(folder.path(), "id1", "stable", NOW_S);
        let mut heard = 0;
        let pushed = place.open().push(&push, &mut |done, total| {
            assert!((heard..=total).contains(&done), "progress goes on");
            heard = done;
            Ok(())
        });
        assert_eq!(pushed.unwrap().bytes, heard, "{}", place.name);
        let to = tempfile::tempdir().unwrap();
        let want = Want::Channel("stable".into());
        let pulled = place.open().pull(&want, to.path(), &Pull::default(), &mut |_, _| Ok(()));
        assert!(kit::files(&pulled.unwrap().folders[0]) == kit::files(folder.path()));
    }
}

#[test]
fn what_was_pulled_can_be_pushed_elsewhere() {
    for place in places() {
        place.open().push_whole(1, "stable").unwrap();
        let to = tempfile::tempdir().unwrap();
        let pulled = place.open().pull_into("stable", to.path()).unwrap();
        let other = kit::folder_place();
        let push = Push::new(&pulled.folders[0], "id1", "stable", NOW_S);
        other.open().push(&push, &mut |_, _| Ok(())).unwrap();
        assert_eq!(other.open().served("stable").unwrap(), [1]);
    }
}

#[test]
fn a_lost_compare_and_swap_names_the_winner() {
    for place in places() {
        place.open().push_whole(1, "stable").unwrap();
        let (mine, folder) = (place.open(), published(2));
        let push = Push::new(folder.path(), "id2", "stable", NOW_S);
        let mut other = Some(place.open());
        let error = mine.push(&push, &mut |_, _| {
            // The other publisher begins later and is done first.
            other.take().map_or(Ok(()), |other| other.push_whole(3, "stable").map(drop))
        });
        let error = error.unwrap_err();
        assert_eq!(error.message(), "another publisher moved ads/stable to 3", "{}", place.name);
        assert_eq!(mine.served("stable").unwrap(), [3]);
        // What the error advises: the loser's version is whole, and can be moved to.
        assert_eq!(mine.list().unwrap().versions[1].state, State::Whole);
        mine.rollback("stable", Seq(2), NOW_S).unwrap();
        assert_eq!(mine.served("stable").unwrap(), [2]);
    }
}

#[test]
fn a_store_that_ignores_conditions_is_refused() {
    for place in places() {
        place.open().push_whole(1, "stable").unwrap();
        let careless = place.faulty(|call| match call.verb {
            "put" => kit::Answer::Unconditional,
            _ => kit::Answer::Fine,
        });
        let error = careless.push_whole(2, "stable").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        assert!(error.to_string().contains("use a store that has conditional writes"), "{error}");
        assert_eq!(place.open().served("stable").unwrap(), [1], "{}", place.name);
        // What the error advises.
        place.open().push_whole(2, "stable").unwrap();
    }
}

#[test]
fn who_goes_on_pushing_learns_of_others_between_two_pushes() {
    for place in places() {
        let (mine, folder) = (place.open(), published(1));
        let mut push = Push::new(folder.path(), "id1", "stable", NOW_S);
        push.expected = Expected::Nothing;
        let first = mine.push(&push, &mut |_, _| Ok(())).unwrap().head;
        assert_eq!(mine.head("stable").unwrap().as_ref(), Some(&first));
        // Who expected to be the first one is not.
        let refused = |push: &Push<'_>| {
            let error = mine.push(push, &mut |_, _| Ok(())).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid);
            let told = error.to_string();
            assert!(told.contains("another publisher moved ads/stable to 1"), "{told}");
        };
        refused(&push);
        push.expected = Expected::Head(&first);
        let second = mine.push(&push, &mut |_, _| Ok(())).unwrap().head;
        // Back at the same version, by somebody else.
        place.open().rollback("stable", Seq(1), NOW_S + 1).unwrap();
        refused(&push);
        push.expected = Expected::Head(&second);
        refused(&push);
        push.expected = Expected::Anything;
        assert_eq!(mine.push(&push, &mut |_, _| Ok(())).unwrap().seq, Seq(3));
    }
}

#[test]
fn a_delta_needs_what_it_was_made_against() {
    for place in places() {
        let location = place.open();
        let refused = location.push_delta(2, 1, "stable").unwrap_err();
        assert!(refused.to_string().contains("delta_of: id1"), "{refused}");
        // What the error advises.
        location.push_whole(1, "stable").unwrap();
        location.push_delta(2, 1, "stable").unwrap();
        assert!(location.push_delta(3, 9, "stable").is_err());
        location.push_whole(3, "stable").unwrap();
    }
}

#[test]
fn a_folder_without_a_manifest_is_not_pushed() {
    let (place, folder) = (kit::folder_place(), published(1));
    std::fs::remove_file(folder.path().join("snapshot.json")).unwrap();
    let push = Push::new(folder.path(), "id1", "stable", NOW_S);
    let error = place.open().push(&push, &mut |_, _| Ok(())).unwrap_err();
    assert!(error.to_string().contains("has no manifest"), "{error}");
    assert!(place.open().list().unwrap().versions.is_empty(), "nothing was claimed");
    // What the error advises.
    kit::publish(folder.path(), 1);
    place.open().push(&push, &mut |_, _| Ok(())).unwrap();
}

#[test]
fn a_channel_is_promoted_and_rolled_back() {
    for place in places() {
        let location = place.open();
        let error = location.promote("canary", "stable", NOW_S).unwrap_err();
        assert!(error.to_string().contains("channel is at no version"), "{error}");
        location.push_whole(1, "canary").unwrap();
        location.push_delta(2, 1, "canary").unwrap();
        location.promote("canary", "stable", NOW_S).unwrap();
        location.push_delta(3, 2, "canary").unwrap();
        assert_eq!(location.served("stable").unwrap(), [1, 2]);
        location.promote("canary", "stable", NOW_S).unwrap();
        assert_eq!(location.served("stable").unwrap(), [1, 2, 3]);
        let head = location.rollback("stable", Seq(1), NOW_S).unwrap();
        assert_eq!(head.past.iter().map(|past| past.seq).collect::<Vec<_>>(), seqs(&[2, 3]));
        assert_eq!(location.served("stable").unwrap(), [1]);
        let error = location.rollback("stable", Seq(9), NOW_S).unwrap_err();
        assert!(error.to_string().contains("is not whole"), "{error}");
        // Numbers go on behind the last one, wherever the channel is.
        assert_eq!(location.push_whole(4, "stable").unwrap().seq, Seq(4));
    }
}

#[test]
fn prune_keeps_what_a_head_names() {
    for place in places() {
        let location = place.open();
        location.push_whole(1, "canary").unwrap();
        location.push_delta(2, 1, "canary").unwrap();
        location.promote("canary", "stable", NOW_S).unwrap();
        for seed in 3..7 {
            location.push_whole(seed, "canary").unwrap();
        }
        location.push_delta(7, 6, "canary").unwrap();
        location.pin(Seq(4)).unwrap();
        let later = |hours: u64| Prune { keep_s: 3600, now_s: NOW_S + hours * 3600 };
        let prune = |what| location.prune(what, &mut |_, _| Ok(())).unwrap();
        // All was at the head of a channel within the last hour.
        assert_eq!(prune(later(0)).removed, []);
        let pruned = prune(later(2));
        assert_eq!(pruned.removed, seqs(&[3, 5]), "{}", place.name);
        assert_eq!(pruned.kept, seqs(&[1, 2, 4, 6, 7]));
        assert!(pruned.bytes_removed > 16_000);
        assert_eq!(location.served("stable").unwrap(), [1, 2]);
        assert_eq!(location.served("canary").unwrap(), [6, 7]);
        assert!(location.unpin(Seq(4)).unwrap() && !location.unpin(Seq(4)).unwrap());
        assert_eq!(prune(later(2)).removed, seqs(&[4]));
        assert_eq!(place.objects.list(Some("v/000004")).unwrap(), []);
    }
}

#[test]
fn a_pinned_delta_keeps_what_it_is_made_on() {
    for place in places() {
        let location = place.open();
        location.push_whole(1, "stable").unwrap();
        location.push_delta(2, 1, "stable").unwrap();
        location.pin(Seq(2)).unwrap();
        location.push_whole(3, "stable").unwrap();
        let what = Prune { keep_s: 0, now_s: NOW_S };
        let pruned = location.prune(what, &mut |_, _| Ok(())).unwrap();
        assert_eq!(pruned.kept, seqs(&[1, 2, 3]));
        location.rollback("stable", Seq(2), NOW_S).unwrap();
        assert_eq!(location.served("stable").unwrap(), [1, 2]);
    }
}

#[test]
fn young_versions_stay_though_nobody_names_them() {
    for place in places() {
        let location = place.open();
        place.objects.put("v/000008/claim", b"another", &When::Absent).unwrap();
        location.push_whole(9, "stable").unwrap();
        let listed = location.list().unwrap();
        let unfinished = listed.versions.iter().find(|version| version.seq == Seq(8)).unwrap();
        assert_eq!(unfinished.state, State::Unfinished);
        let now_s = unfinished.written_at_s;
        let prune = |now_s| location.prune(Prune { keep_s: 60, now_s }, &mut |_, _| Ok(()));
        assert_eq!(prune(now_s + 59).unwrap().removed, []);
        assert_eq!(prune(now_s + 60).unwrap().removed, seqs(&[8]));
    }
}

fn leave(place: &Place, seq: u64) {
    place.objects.put(&format!("v/{seq:06}/leaving"), b"", &When::Always).unwrap();
}

#[test]
fn a_version_that_is_being_pruned_is_not_moved_to() {
    for place in places() {
        let location = place.open();
        location.push_whole(1, "stable").unwrap();
        location.push_whole(2, "stable").unwrap();
        leave(&place, 1);
        assert_eq!(location.list().unwrap().versions[0].state, State::Leaving);
        for error in [
            location.rollback("stable", Seq(1), NOW_S).unwrap_err(),
            location.pin(Seq(1)).unwrap_err(),
        ] {
            assert!(error.to_string().contains("is not whole, or is being pruned"), "{error}");
        }
        // Nor where the mark comes between the look and the move.
        location.push_whole(3, "canary").unwrap();
        let objects = std::sync::Arc::clone(&place.objects);
        let racing = place.faulty(move |call| {
            if (call.verb, call.name) == ("put", "HEAD.stable.json") {
                objects.put("v/000003/leaving", b"", &When::Always).unwrap();
            }
            kit::Answer::Fine
        });
        assert!(racing.promote("canary", "stable", NOW_S).is_err());
        assert_eq!(location.head("stable").unwrap().unwrap().seq(), Seq(2), "{}", place.name);
        // A killed prune left it: the next one takes it back from what is needed.
        location.prune(Prune { keep_s: 0, now_s: NOW_S }, &mut |_, _| Ok(())).unwrap();
        location.promote("canary", "stable", NOW_S).unwrap();
    }
}

#[test]
fn a_damaged_head_is_told_and_replaced_by_going_back() {
    for place in places() {
        let location = place.open();
        location.push_whole(1, "stable").unwrap();
        place.objects.put("HEAD.stable.json", b"tierbed-head 1 0", &When::Always).unwrap();
        assert_eq!(location.head("stable").unwrap_err().kind(), ErrorKind::Corruption);
        let listed = location.list().unwrap();
        assert!(listed.channels[0].damage.is_some() && listed.versions.len() == 1);
        let error = location.prune_old().unwrap_err();
        assert!(
            error.to_string().contains("tierbed models rollback"),
            "nothing is pruned: {error}"
        );
        // What the error advises.
        location.rollback("stable", Seq(1), NOW_S).unwrap();
        assert_eq!(location.served("stable").unwrap(), [1]);
    }
}

#[test]
fn parts_of_another_version_are_not_the_ones_that_head_names() {
    for place in places() {
        let location = place.open();
        location.push_whole(1, "stable").unwrap();
        let other = kit::folder_place();
        other.open().push_whole(2, "stable").unwrap();
        let parts = other.objects.get("v/000001/parts.json", 1 << 20).unwrap().unwrap();
        place.objects.put("v/000001/parts.json", &parts.bytes, &When::Always).unwrap();
        let error = location.served("stable").unwrap_err();
        assert!(error.to_string().contains("not the one that HEAD names"), "{error}");
    }
}

#[test]
fn a_folder_of_another_version_is_not_taken_for_this_one() {
    let to = tempfile::tempdir().unwrap();
    for (seed, place) in [(1, kit::folder_place()), (2, kit::folder_place())] {
        place.open().push_whole(seed, "stable").unwrap();
        let pulled = place.open().pull_into("stable", to.path());
        match seed {
            1 => assert_eq!(seed_of(&pulled.unwrap().folders[0]), 1),
            _ => assert!(pulled.unwrap_err().to_string().contains("choose a new or empty folder")),
        }
    }
    assert_eq!(PART_BYTES, 1024);
}

/// Pushes while something happens to the place, or to the folder, in the middle.
fn push_disturbed(place: &Place, mut disturb: impl FnMut(&std::path::Path)) -> tierbed_core::Error {
    let folder = published(1);
    let push = Push::new(folder.path(), "id1", "stable", NOW_S);
    let pushed = place.open().push(&push, &mut |_, _| {
        disturb(folder.path());
        Ok(())
    });
    pushed.unwrap_err()
}

#[test]
fn a_version_that_changes_while_it_is_pushed_is_refused() {
    for place in places() {
        let objects = &place.objects;
        let error = push_disturbed(&place, |folder| kit::publish(folder, 2));
        assert!(error.to_string().contains("published again while it was pushed"), "{error}");
        let error = push_disturbed(&place, |_| {
            let _ = objects.put("v/000001/parts.json", b"another", &When::Absent).unwrap();
        });
        assert!(error.to_string().contains("another publisher wrote into the version"), "{error}");
        let error = push_disturbed(&place, |_| objects.remove("v/000001/claim").unwrap());
        assert!(error.to_string().contains("was pruned or overwritten"), "{error}");
        assert!(place.open().head("stable").unwrap().is_none(), "{}", place.name);
        // What the errors advise. The version has no claim any more, so what the push left stayed.
        let error = place.open().push_whole(1, "stable").unwrap_err();
        assert!(error.to_string().contains("each push takes a number of its own"), "{error}");
        assert_eq!(place.open().push_whole(1, "stable").unwrap().seq, Seq(1));
        assert_eq!(place.open().served("stable").unwrap(), [1]);
    }
}

#[test]
fn a_chain_has_an_end() {
    for place in places() {
        let location = place.open();
        location.push_whole(1, "stable").unwrap();
        let mut head = location.head("stable").unwrap().unwrap();
        let first = head.chain[0].clone();
        for seq in 2..=256 {
            let identity = format!("id{seq}");
            head.chain.push(tierbed_remote::Link { seq: Seq(seq), identity, ..first.clone() });
        }
        let bytes = head.encode().unwrap();
        place.objects.put("HEAD.stable.json", &bytes, &When::Always).unwrap();
        let error = location.push_delta(257, 256, "stable").unwrap_err();
        assert!(error.to_string().contains("publish in full"), "{error}");
        location.push_whole(3, "stable").unwrap();
        assert_eq!(location.served("stable").unwrap(), [3]);
    }
}

#[test]
fn a_kept_version_whose_parts_cannot_be_read_stops_pruning() {
    for place in places() {
        let location = place.open();
        for seed in 1..4 {
            location.push_whole(seed, "stable").unwrap();
        }
        location.pin(Seq(1)).unwrap();
        place.objects.put("v/000001/parts.json", b"tierbed-parts", &When::Always).unwrap();
        let what = Prune { keep_s: 0, now_s: NOW_S };
        let error = location.prune(what, &mut |_, _| Ok(())).unwrap_err();
        assert!(error.to_string().contains("what a version that is kept is a delta on"), "{error}");
        assert_eq!(location.list().unwrap().versions.len(), 3, "nothing is removed");
        // What the error advises.
        location.unpin(Seq(1)).unwrap();
        let pruned = location.prune(what, &mut |_, _| Ok(())).unwrap();
        assert_eq!(pruned.removed, seqs(&[1, 2]));
    }
}

#[test]
fn a_location_of_another_kind_is_refused() {
    for address in ["ftp://models/ads", "hdfs://models/ads"] {
        let error = tierbed_remote::Location::open(address).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    }
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path().join("ads");
    tierbed_remote::Location::open(at.to_str().unwrap()).unwrap().push_whole(1, "stable").unwrap();
}
