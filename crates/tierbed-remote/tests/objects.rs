//! Folders and buckets are alike: what the trait says holds wherever objects lie.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test that panics has failed")]

mod kit;

use std::sync::Arc;

use kit::places;
use tierbed_core::{Error, ErrorKind, Result};
use tierbed_remote::{Objects, Put, Tag, When};

fn names(objects: &dyn Objects, folder: Option<&str>) -> Vec<String> {
    objects.list(folder).unwrap().into_iter().map(|object| object.name).collect()
}

#[test]
fn what_is_there_is_not_created_again() {
    for place in places() {
        let put = |bytes: &[u8]| place.objects.put("HEAD.a.json", bytes, &When::Absent).unwrap();
        assert_eq!(put(b"1"), Put::Done, "{}", place.name);
        assert_eq!(put(b"2"), Put::Lost);
        assert_eq!(put(b"1"), Put::Lost, "not with the same bytes either");
        assert_eq!(place.objects.get("HEAD.a.json", 9).unwrap().unwrap().bytes, b"1");
        place.objects.remove("HEAD.a.json").unwrap();
        assert_eq!(put(b"2"), Put::Done);
    }
}

#[test]
fn bytes_that_are_lent_are_written_as_others_are() {
    for place in places() {
        let put = |bytes: &[u8], when| {
            place.objects.put_shared("rank0", Arc::new(bytes.to_vec()), when).unwrap()
        };
        assert_eq!(put(b"12", &When::Absent), Put::Done, "{}", place.name);
        assert_eq!(put(b"3", &When::Absent), Put::Lost);
        assert_eq!(place.objects.get("rank0", 9).unwrap().unwrap().bytes, b"12");
        assert_eq!(put(b"3", &When::Always), Put::Done);
        assert_eq!(place.objects.get("rank0", 9).unwrap().unwrap().bytes, b"3");
    }
}

#[test]
fn what_changed_since_it_was_read_is_not_replaced() {
    for place in places() {
        let objects = &place.objects;
        let put = |bytes: &[u8], tag: &Tag| {
            objects.put("HEAD.a.json", bytes, &When::Unchanged(tag.clone())).unwrap()
        };
        objects.put("HEAD.a.json", b"1", &When::Absent).unwrap();
        let first = objects.get("HEAD.a.json", 9).unwrap().unwrap().tag;
        assert_eq!(put(b"2", &first), Put::Done, "{}", place.name);
        assert_eq!(put(b"3", &first), Put::Lost);
        let second = objects.get("HEAD.a.json", 9).unwrap().unwrap();
        assert_eq!((second.bytes.as_slice(), second.tag == first), (b"2".as_slice(), false));
        objects.remove("HEAD.a.json").unwrap();
        assert_eq!(put(b"3", &second.tag), Put::Lost, "what is gone is not as it was");
        assert!(objects.get("HEAD.a.json", 9).unwrap().is_none());
    }
}

#[test]
fn of_many_writers_one_wins_wherever_they_write() {
    for place in places() {
        let objects = &*place.objects;
        objects.put("HEAD.a.json", b"0", &When::Absent).unwrap();
        for round in 0..5 {
            let tag = objects.get("HEAD.a.json", 99).unwrap().unwrap().tag;
            let won = std::thread::scope(|scope| {
                let writers: Vec<_> = (0..4)
                    .map(|writer| {
                        let (bytes, when) = (format!("{round}, {writer}"), tag.clone());
                        scope.spawn(move || {
                            let when = When::Unchanged(when);
                            objects.put("HEAD.a.json", bytes.as_bytes(), &when).unwrap()
                        })
                    })
                    .collect();
                let puts = writers.into_iter().map(|writer| writer.join().unwrap());
                puts.filter(|put| *put == Put::Done).count()
            });
            assert_eq!(won, 1, "{}", place.name);
        }
    }
}

#[test]
fn ranges_are_whole_or_an_error() {
    for place in places() {
        let objects = &place.objects;
        let bytes: Vec<u8> = (0..1000u32).map(|at| at as u8).collect();
        objects.put_large("v/000001/rows.pages", &mut [Ok(bytes.clone())].into_iter()).unwrap();
        let range = |range| objects.get_range("v/000001/rows.pages", range);
        assert_eq!(range(0..1000).unwrap().unwrap(), bytes, "{}", place.name);
        assert_eq!(range(10..11).unwrap().unwrap(), [10]);
        assert!(range(5..5).unwrap().unwrap().is_empty());
        for beyond in [990..1001, 1000..1001, 5000..5001] {
            assert_eq!(range(beyond).unwrap_err().kind(), ErrorKind::Corruption);
        }
        assert!(objects.get_range("v/000001/none", 0..1).unwrap().is_none());
        assert!(objects.get_range("v/000001/none", 0..0).unwrap().is_none());
        let too_long = objects.get("v/000001/rows.pages", 999).unwrap_err();
        assert_eq!(too_long.kind(), ErrorKind::Corruption);
        assert!(objects.get("v/000001/none", 999).unwrap().is_none());
    }
}

#[test]
fn lists_ascend_and_stay_below_their_folder() {
    for place in places() {
        let objects = &place.objects;
        assert_eq!(names(&**objects, None), [""; 0], "{}", place.name);
        let all = ["HEAD.a.json", "pins/000002", "v/000001/a", "v/000001/b", "v/0000010/c"];
        for name in all.iter().rev() {
            objects.put(name, b"12", &When::Always).unwrap();
        }
        assert_eq!(names(&**objects, None), all);
        assert_eq!(names(&**objects, Some("v/000001")), ["v/000001/a", "v/000001/b"]);
        assert_eq!(names(&**objects, Some("v/000003")), [""; 0]);
        let listed = objects.list(Some("pins")).unwrap();
        assert_eq!(listed[0].bytes, 2);
        let newest = objects.list(None).unwrap().iter().map(|object| object.modified_s).max();
        assert!(newest.unwrap() > 1_700_000_000, "seconds since 1970");
        objects.remove("v/000001/a").unwrap();
        objects.remove("v/000001/a").unwrap();
        assert_eq!(names(&**objects, Some("v/000001")), ["v/000001/b"]);
    }
}

#[test]
fn names_that_lead_elsewhere_reach_no_object() {
    for place in places() {
        for name in ["../a", "v/../a", "LOCK", "a.tmp", "", "/a", "a//b", "a/"] {
            assert!(place.objects.put(name, b"", &When::Always).is_err(), "{name}");
            assert!(place.objects.get(name, 9).is_err(), "{name}");
            assert!(place.objects.get_range(name, 0..1).is_err(), "{name}");
            assert!(place.objects.remove(name).is_err(), "{name}");
        }
        assert_eq!(names(&*place.objects, None), [""; 0], "{}", place.name);
    }
}

/// The least that a store takes as a chunk.
const CHUNK_BYTES: usize = 5 << 20;

fn chunk(at: u8, len: usize) -> Result<Vec<u8>> {
    Ok(vec![at; len])
}

#[test]
fn large_objects_come_back_whole() {
    for place in places() {
        let objects = &place.objects;
        for (name, lens) in [
            ("none", vec![]),
            ("one", vec![7]),
            ("six", vec![CHUNK_BYTES, CHUNK_BYTES, CHUNK_BYTES, CHUNK_BYTES, CHUNK_BYTES, 7]),
        ] {
            let mut chunks = (0..).zip(&lens).map(|(at, len)| chunk(at, *len));
            objects.put_large(name, &mut chunks).unwrap();
            let bytes: u64 = lens.iter().map(|len| *len as u64).sum();
            assert_eq!(objects.list(None).unwrap().last().unwrap().bytes, bytes, "{}", place.name);
            let mut start = 0;
            for (at, len) in (0..).zip(&lens) {
                let end = start + *len as u64;
                let found = objects.get_range(name, start..end).unwrap().unwrap();
                assert!(found == vec![at; *len], "chunk {at} of {name}");
                start = end;
            }
            objects.remove(name).unwrap();
        }
    }
}

#[test]
fn a_large_object_that_ends_early_tells_its_error() {
    for place in places() {
        for good in 0..4 {
            let mut chunks = (0..good)
                .map(|at| chunk(at, CHUNK_BYTES))
                .chain([Err(Error::invalid("the source is gone"))]);
            let error = place.objects.put_large("half", &mut chunks).unwrap_err();
            assert_eq!(error.message(), "the source is gone", "{}", place.name);
        }
    }
}
