//! What fails, garbles, or ends in the middle leaves the old version or the new one.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test that panics has failed")]

mod kit;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

use kit::{at_once, places, seed_of, Answer, Does, Place, NOW_S};
use tierbed_core::env::{Clock, ManualClock, SystemClock};
use tierbed_core::{Error, ErrorKind, Result};
use tierbed_remote::{Bandwidth, Location, Pull, Seq, Want, When};

/// Parts of a version of the kit: seven of rows, one of the index, one of the manifest.
const PARTS: u64 = 9;

#[test]
fn an_interrupted_download_fetches_each_part_once() {
    for place in places() {
        place.open().push_whole(1, "stable").unwrap();
        for ends_at in 0..PARTS {
            let to = tempfile::tempdir().unwrap();
            let objects = place.faulty_objects(|_| Answer::Fine);
            let location = Location::of(objects.clone(), "ads");
            let mut heard = 0;
            let ranges = || objects.ranges.lock().unwrap().len() as u64;
            // The caller ends it once some parts are here.
            let ended = location.pull(
                &Want::Channel("stable".into()),
                to.path(),
                &at_once(),
                &mut |done, total| {
                    assert!((heard..=total).contains(&done), "progress goes on");
                    heard = done;
                    let is_end = ranges() > ends_at;
                    if is_end {
                        Err(Error::invalid("enough"))
                    } else {
                        Ok(())
                    }
                },
            );
            assert_eq!(ended.unwrap_err().message(), "enough");
            assert!(!to.path().join("000001").exists());
            let before = ranges();
            let pulled = location.pull_into("stable", to.path()).unwrap();
            assert_eq!(pulled.parts_fetched, PARTS - before, "{}", place.name);
            let mut fetched = objects.ranges.lock().unwrap().clone();
            let count = fetched.len();
            fetched.sort_unstable();
            fetched.dedup();
            assert_eq!((fetched.len(), count as u64), (count, PARTS), "each part once");
            assert_eq!(seed_of(&pulled.folders[0]), 1);
        }
    }
}

#[test]
fn a_download_takes_no_more_than_its_bandwidth() {
    const BYTES_PER_S: u64 = 50_000;
    for place in places() {
        place.open().push_whole(1, "stable").unwrap();
        // A clock that stands still: what was taken stays to be paid for.
        let clock = Arc::new(ManualClock::default());
        let bandwidth = Bandwidth::with_clock(BYTES_PER_S * 1000, clock);
        let how = Pull { bandwidth: Arc::new(bandwidth), ..at_once() };
        let to = tempfile::tempdir().unwrap();
        let want = Want::Channel("stable".into());
        let pulled = place.open().pull(&want, to.path(), &how, &mut |_, _| Ok(())).unwrap();
        let paid_us = how.bandwidth.behind().as_micros() as u64;
        let cost_us = pulled.bytes_fetched * 1000 / BYTES_PER_S;
        assert!(pulled.bytes_fetched > 8000 && paid_us.abs_diff(cost_us) <= PARTS, "{paid_us}");
        // The machine's clock: at no time have more bytes come than were due.
        let clock = Arc::new(SystemClock::default());
        let bandwidth = Bandwidth::with_clock(BYTES_PER_S, Arc::clone(&clock) as _);
        let how = Pull { bandwidth: Arc::new(bandwidth), thread_count: 4, ..at_once() };
        let to = tempfile::tempdir().unwrap();
        let started_us = clock.now_us();
        place
            .open()
            .pull(&want, to.path(), &how, &mut |done, _| {
                let elapsed_us = clock.now_us() - started_us;
                let due = BYTES_PER_S * (elapsed_us + 100_000) / 1_000_000;
                assert!(done <= due, "{}: {done} bytes after {elapsed_us} us", place.name);
                Ok(())
            })
            .unwrap();
    }
}

#[test]
fn answers_that_are_busy_cut_or_garbled_are_asked_for_again() {
    for place in places() {
        place.open().push_whole(1, "stable").unwrap();
        for answer in [Answer::Busy, Answer::Flipped, Answer::Cut, Answer::DoneUnheard] {
            // Each request fails four times in a row.
            let location = place.faulty(move |call| match call.number % 5 {
                4 => Answer::Fine,
                _ => answer,
            });
            assert_eq!(location.served("stable").unwrap(), [1], "{}: {answer:?}", place.name);
            let threads = Pull { thread_count: 8, ..at_once() };
            let counts = std::sync::Mutex::new(BTreeMap::<String, u64>::new());
            let location = place.faulty(move |call| {
                let mut counts = counts.lock().unwrap();
                let count = counts.entry(call.name.to_owned()).or_default();
                *count += 1;
                if *count < 3 {
                    answer
                } else {
                    Answer::Fine
                }
            });
            let to = tempfile::tempdir().unwrap();
            let want = Want::Channel("stable".into());
            let pulled = location.pull(&want, to.path(), &threads, &mut |_, _| Ok(())).unwrap();
            assert_eq!(seed_of(&pulled.folders[0]), 1);
        }
    }
}

#[test]
fn a_part_that_stays_corrupt_is_refused_after_five_tries() {
    for place in places() {
        place.open().push_whole(1, "stable").unwrap();
        place.objects.put("v/000001/rows.index", &[7; 1024], &When::Always).unwrap();
        let objects = place.faulty_objects(|_| Answer::Fine);
        let location = Location::of(objects.clone(), "ads");
        let to = tempfile::tempdir().unwrap();
        let error = location.pull_into("stable", to.path()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corruption, "{}", place.name);
        let text = error.to_string();
        assert!(text.contains("tries: 5") && text.contains("file: rows.index"), "{text}");
        let ranges = objects.ranges.lock().unwrap();
        assert_eq!(ranges.iter().filter(|(name, _)| name.ends_with("rows.index")).count(), 5);
        assert!(!to.path().join("000001").exists(), "what is not verified has no name");
        // What the error advises: another version, or going back to one that is whole.
        place.open().push_whole(1, "stable").unwrap();
        assert_eq!(place.open().served("stable").unwrap(), [1]);
    }
}

#[test]
fn a_push_that_fails_leaves_nothing_of_its_version() {
    for place in places() {
        place.open().push_whole(1, "stable").unwrap();
        for refused in ["rows.index", "rows.pages", "parts.json", "snapshot.json"] {
            // As on a disk that is full: files are refused, removing them is not.
            let location = place.faulty(move |call| {
                let is_refused = call.verb.starts_with("put") && call.name.ends_with(refused);
                if is_refused {
                    Answer::Busy
                } else {
                    Answer::Fine
                }
            });
            assert!(location.push_whole(2, "stable").is_err(), "{}: {refused}", place.name);
            let listed = place.open().list().unwrap();
            assert_eq!(listed.versions.len(), 1, "{}: {refused}: {listed:?}", place.name);
        }
        assert_eq!(place.open().push_whole(2, "stable").unwrap().seq, Seq(2));
        // A store that refuses everything says what is left there.
        let location = place.faulty(|call| match call.number {
            0..=3 => Answer::Fine,
            _ => Answer::Busy,
        });
        let error = location.push_whole(3, "stable").unwrap_err().to_string();
        assert!(error.contains("left_version: 3"), "{error}");
        assert_eq!(place.open().push_whole(4, "stable").unwrap().seq, Seq(4));
    }
}

#[test]
fn a_missing_file_is_refused_and_names_the_version() {
    for place in places() {
        place.open().push_whole(1, "stable").unwrap();
        place.objects.remove("v/000001/rows.pages").unwrap();
        let error = place.open().served("stable").unwrap_err();
        assert!(error.to_string().contains("a file of the version is gone"), "{error}");
    }
}

#[test]
fn every_changed_byte_of_a_version_is_noticed() {
    for place in places() {
        place.open().push_whole(1, "stable").unwrap();
        // A bucket is asked over a socket: fewer bytes of each object there.
        let count = if place.name == "folder" { 40 } else { 5 };
        for object in place.objects.list(None).unwrap() {
            let is_read = !object.name.ends_with("/claim");
            let bytes = place.objects.get(&object.name, 1 << 20).unwrap().unwrap().bytes;
            for at in (0..bytes.len()).step_by(bytes.len() / count + 1) {
                let mut wrong = bytes.clone();
                wrong[at] ^= 1 << (at % 8);
                place.objects.put(&object.name, &wrong, &When::Always).unwrap();
                let served = place.open().served("stable");
                assert_eq!(served.is_err(), is_read, "byte {at} of {}", object.name);
            }
            place.objects.put(&object.name, &bytes, &When::Always).unwrap();
        }
        assert_eq!(place.open().served("stable").unwrap(), [1], "{}", place.name);
    }
}

#[test]
fn an_answer_that_the_client_asked_for_twice_is_no_loss() {
    for place in places() {
        // Each write is done, and its answer is 412: the first one had arrived.
        let location = place.faulty(|call| match call.verb {
            "put" => Answer::DoneAndLost,
            _ => Answer::Fine,
        });
        location.push_whole(1, "canary").unwrap();
        location.push_delta(2, 1, "canary").unwrap();
        location.promote("canary", "stable", NOW_S).unwrap();
        assert_eq!(location.served("stable").unwrap(), [1, 2], "{}", place.name);
    }
}

type Work = fn(&Location) -> Result<()>;

/// Runs `work` once for each of its requests, which ends it before or after that was done; then
/// looks at the place, and runs `work` to its end.
fn end_at_every_request(prepare: fn(&Place), work: Work, check: fn(&Location)) {
    for make in kit::kinds() {
        for last in [Answer::Busy, Answer::DoneUnheard] {
            for ends_at in 0.. {
                let place = make();
                prepare(&place);
                let dead = AtomicU64::new(u64::MAX);
                let location = place.faulty(move |call| {
                    if call.number == ends_at {
                        dead.store(call.number, Ordering::SeqCst);
                        return last;
                    }
                    // Whoever is dead asks for nothing more.
                    if call.number > dead.load(Ordering::SeqCst) {
                        Answer::Busy
                    } else {
                        Answer::Fine
                    }
                });
                let result = work(&location);
                check(&place.open());
                if result.is_ok() {
                    assert!(ends_at > 2, "there was something to end");
                    break;
                }
                work(&place.open()).unwrap();
                check(&place.open());
            }
        }
    }
}

#[test]
fn a_publisher_that_ends_anywhere_leaves_the_old_head_or_the_new_one() {
    end_at_every_request(
        |place| drop(place.open().push_whole(1, "stable").unwrap()),
        |location| location.push_whole(2, "stable").map(drop),
        |location| assert!(matches!(location.served("stable").unwrap()[..], [1] | [2])),
    );
}

#[test]
fn a_promotion_that_ends_anywhere_leaves_the_old_head_or_the_new_one() {
    end_at_every_request(
        |place| {
            place.open().push_whole(1, "stable").unwrap();
            place.open().push_whole(2, "canary").unwrap();
            place.open().push_delta(3, 2, "canary").unwrap();
        },
        |location| location.promote("canary", "stable", NOW_S).map(drop),
        |location| assert!(matches!(location.served("stable").unwrap()[..], [1] | [2, 3])),
    );
}

#[test]
fn a_prune_that_ends_anywhere_loses_nothing_that_is_needed() {
    end_at_every_request(
        |place| {
            for seed in 1..4 {
                place.open().push_whole(seed, "stable").unwrap();
            }
            place.open().push_delta(4, 3, "stable").unwrap();
            place.open().rollback("stable", Seq(2), 0).unwrap();
            place.open().pin(Seq(4)).unwrap();
        },
        |location| {
            let what = tierbed_remote::Prune { keep_s: 0, now_s: NOW_S };
            location.prune(what, &mut |_, _| Ok(())).map(drop)
        },
        |location| {
            assert_eq!(location.served("stable").unwrap(), [2]);
            let to = tempfile::tempdir().unwrap();
            let want = Want::Version(Seq(4));
            let pulled = location.pull(&want, to.path(), &at_once(), &mut |_, _| Ok(())).unwrap();
            assert_eq!(pulled.folders.iter().map(|at| seed_of(at)).collect::<Vec<_>>(), [3, 4]);
        },
    );
}

#[test]
fn what_does_not_fit_the_disk_is_refused_before_it_is_fetched() {
    let place = kit::folder_place();
    place.open().push_whole(1, "stable").unwrap();
    let parts = place.objects.get("v/000001/parts.json", 1 << 20).unwrap().unwrap().bytes;
    let mut parts = tierbed_remote::Parts::decode(&parts).unwrap();
    let head = place.objects.get("HEAD.stable.json", 1 << 20).unwrap().unwrap().bytes;
    let mut head = tierbed_remote::Head::decode(&head).unwrap();
    // Four terabytes of rows.
    parts.part_bytes = 1 << 30;
    parts.files.iter_mut().for_each(|file| file.sha256.truncate(usize::from(file.bytes > 0)));
    let pages = parts.files.iter_mut().find(|file| file.name == "rows.pages").unwrap();
    pages.bytes = 4 << 40;
    pages.sha256 = vec![pages.sha256[0]; 4 << 10];
    let encoded = parts.encode().unwrap();
    head.chain = parts.chain(&encoded);
    place.objects.put("v/000001/parts.json", &encoded, &When::Always).unwrap();
    place.objects.put("HEAD.stable.json", &head.encode().unwrap(), &When::Always).unwrap();
    let objects = place.faulty_objects(|_| Answer::Fine);
    let error = Location::of(objects.clone(), "ads").served("stable").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}");
    assert_eq!(objects.ranges.lock().unwrap().len(), 0);
}
