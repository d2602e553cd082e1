//! Stores that refuse, garble, are slow or not there: what the errors say, and what helps.
#![cfg(feature = "s3")]
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test that panics has failed")]

mod kit;

use std::io::{Read, Write};
use std::net::TcpListener;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::Duration;

use kit::{at_once, server, Does, Line, Proxy, Server, BUCKET, READER, WRITER};
use rustls::pki_types::PrivateKeyDer;
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use tierbed_core::{Error, ErrorKind, Result};
use tierbed_io::{Folder, FsFolder};
use tierbed_remote::{BucketObjects, BucketSettings, Location, Objects, Put, Want, When};

fn open(address: &str, settings: &BucketSettings) -> BucketObjects {
    BucketObjects::open(address, settings).unwrap()
}

/// Settings that lead through a proxy, with a connection for each request.
fn through(proxy: &Proxy) -> BucketSettings {
    let settings = kit::settings(&proxy.endpoint(), WRITER);
    settings.with([("AWS_POOL_MAX_IDLE_PER_HOST", "0")])
}

fn location(objects: BucketObjects) -> Location {
    Location::of(Arc::new(objects), "ads")
}

fn fails(result: Result<impl std::fmt::Debug>, kind: ErrorKind, says: &str) -> Error {
    let error = result.unwrap_err();
    assert_eq!(error.kind(), kind, "{error}");
    assert!(error.to_string().contains(says), "{error}");
    error
}

/// Tries everything that can be asked of a store; each must fail in the same way.
fn all_fail(objects: &BucketObjects, kind: ErrorKind, says: &str) {
    fails(objects.list(None), kind, says);
    fails(objects.get("a", 9), kind, says);
    fails(objects.get_range("a", 0..1), kind, says);
    fails(objects.put("a", b"", &When::Always), kind, says);
    fails(objects.put("a", b"", &When::Absent), kind, says);
    let tag = tierbed_remote::Tag("\"1\"".into());
    // A store may look at the condition first.
    match objects.put("a", b"", &When::Unchanged(tag)) {
        Ok(Put::Lost) => {}
        put => drop(fails(put, kind, says)),
    }
    fails(objects.put_large("a", &mut [Ok(vec![0])].into_iter()), kind, says);
    let mut chunks = (0..2).map(|at| Ok(vec![at; 5 << 20]));
    fails(objects.put_large("a", &mut chunks), kind, says);
}

#[test]
fn a_bucket_that_is_not_there_is_told() {
    let Some(server) = server() else { return };
    let objects = open("tierbed-none/models", &server.settings());
    all_fail(&objects, ErrorKind::Invalid, "there is no such bucket");
    let error = fails(objects.get("a", 9), ErrorKind::Invalid, "bucket: tierbed-none");
    assert!(error.to_string().contains("create the bucket, or name another"), "{error}");
    // What the error advises.
    open(&format!("{BUCKET}/models"), &server.settings()).get("a", 9).unwrap();
}

#[test]
fn who_may_not_write_is_told_and_may_read() {
    let Some(server) = server() else { return };
    location(server.objects("read-only")).push_whole(1, "stable").unwrap();
    let address = format!("{BUCKET}/read-only");
    let reader = || open(&address, &kit::settings(&server.endpoint, READER));
    let error = location(reader()).push_whole(2, "stable").unwrap_err();
    fails(Err::<(), _>(error), ErrorKind::Invalid, "store does not let us do this");
    fails(reader().remove("HEAD.stable.json"), ErrorKind::Invalid, "check AWS_ACCESS_KEY_ID");
    assert_eq!(location(reader()).served("stable").unwrap(), [1]);
    let nobody = open(&address, &kit::settings(&server.endpoint, "nobody"));
    all_fail(&nobody, ErrorKind::Invalid, "store does not let us do this");
    let wrong = server.settings().with([("AWS_SECRET_ACCESS_KEY", "wrong")]);
    all_fail(&open(&address, &wrong), ErrorKind::Invalid, "store does not let us do this");
}

#[test]
fn settings_that_lead_nowhere_are_refused_before_anything_is_asked() {
    let endpoint = |endpoint: &str| {
        let settings = BucketSettings::default().with([("AWS_ENDPOINT_URL", endpoint)]);
        BucketObjects::open("models/ads", &settings)
    };
    fails(endpoint("localhost:8333"), ErrorKind::Invalid, "begin it with https:// or http://");
    endpoint("https://localhost:8333").unwrap();
    fails(endpoint("http://localhost:8333"), ErrorKind::Invalid, "set AWS_ALLOW_HTTP=true");
    let settings = kit::settings("http://localhost:8333", WRITER);
    BucketObjects::open("models/ads", &settings).unwrap();
    let none = BucketSettings::default();
    let half = none.clone().with([("AWS_ACCESS_KEY_ID", "key")]);
    fails(BucketObjects::open("models", &half), ErrorKind::Invalid, "see the settings of buckets");
    let long = none.clone().with([("AWS_TIMEOUT", "long")]);
    fails(BucketObjects::open("models", &long), ErrorKind::Invalid, "see the settings of buckets");
    for address in ["", "/ads", "models//ads", "models/../ads", "mo dels/ads"] {
        fails(
            BucketObjects::open(address, &none),
            ErrorKind::Invalid,
            "name a bucket and a prefix",
        );
    }
    for address in ["models", "models/", "models/ads", "models/a/b/"] {
        BucketObjects::open(address, &none).unwrap();
    }
}

#[test]
fn secrets_are_not_shown() {
    let settings = kit::settings("http://localhost:8333", WRITER);
    let objects = open("models/ads", &settings);
    let shown = format!("{settings:?} {objects:?} {:?}", location(open("models", &settings)));
    assert!(shown.contains("s3://models/ads") && shown.contains("AWS_ACCESS_KEY_ID"), "{shown}");
    assert!(!shown.contains("secret-of"), "{shown}");
}

#[test]
fn who_has_no_credentials_is_told_what_to_set() {
    // Where machines of a cloud ask for theirs; nobody answers.
    let settings =
        BucketSettings::default().with([("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")]);
    let error = open("models/ads", &settings).get("a", 9);
    fails(error, ErrorKind::Invalid, "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY");
}

#[test]
fn answers_of_other_stores_are_understood() {
    let says = |status, body, kind, text| {
        let proxy = Proxy::new("http://127.0.0.1:1", move |_| Line::Says(status, body));
        fails(open("models", &through(&proxy)).get("a", 9), kind, text);
    };
    const SIGNED: &str = "<Error><Code>AuthorizationHeaderMalformed</Code><Message>wrong region\
                          </Message></Error>";
    says("301 Moved", "", ErrorKind::Invalid, "set AWS_REGION");
    says("400 Bad Request", SIGNED, ErrorKind::Invalid, "cause: wrong region");
    const SKEWED: &str = "<Error><Code>RequestTimeTooSkewed</Code></Error>";
    says("403 Forbidden", SKEWED, ErrorKind::Invalid, "set the clock of this machine");
    says(
        "501 Not Implemented",
        "<Error><Code>NotImplemented</Code></Error>",
        ErrorKind::Unsupported,
        "conditional writes",
    );
    says("507 Full", "", ErrorKind::NoSpace, "store is full");
    says("400 Bad Request", "", ErrorKind::Invalid, "store refuses the request");
    says("500 Oh", "", ErrorKind::Io, "store is busy, or fails");
}

#[test]
fn writes_that_meet_others_are_lost_or_told() {
    let put = |status, body, when: When| {
        let proxy = Proxy::new("http://127.0.0.1:1", move |_| Line::Says(status, body));
        let put = open("models", &through(&proxy)).put("a", b"", &when);
        (put, proxy.count())
    };
    let unchanged = || When::Unchanged(tierbed_remote::Tag("\"1\"".into()));
    const GONE: &str = "<Error><Code>NoSuchKey</Code></Error>";
    assert_eq!(put("404 Not Found", GONE, unchanged()).0.unwrap(), Put::Lost);
    const NONE: &str = "<Error><Code>NoSuchBucket</Code></Error>";
    fails(put("404 Not Found", NONE, unchanged()).0, ErrorKind::Invalid, "no such bucket");
    for when in [When::Absent, unchanged()] {
        assert_eq!(put("412 Failed", "", when.clone()).0.unwrap(), Put::Lost);
        const BUSY: &str = "<Error><Code>ConditionalRequestConflict</Code></Error>";
        let (busy, count) = put("409 Conflict", BUSY, when);
        fails(busy, ErrorKind::Io, "other writes kept getting in the way");
        assert_eq!(count, 5, "it is tried again");
    }
}

/// Answers over TLS that there is no such object; returns its endpoint, and its authority as PEM.
fn encrypted() -> (String, String) {
    let rcgen::CertifiedKey { cert, signing_key } =
        rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let key = PrivateKeyDer::try_from(signing_key.serialize_der()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![cert.der().clone()], key)
        .unwrap();
    let config = Arc::new(config);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for line in listener.incoming() {
            let tls = ServerConnection::new(Arc::clone(&config)).unwrap();
            let mut line = StreamOwned::new(tls, line.unwrap());
            let mut head = Vec::new();
            let mut byte = [0];
            while !head.ends_with(b"\r\n\r\n") && line.read(&mut byte).is_ok_and(|len| len == 1) {
                head.push(byte[0]);
            }
            // A client that does not trust us has gone.
            let _ = line.write_all(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n");
            let _ = line.flush();
        }
    });
    (format!("https://localhost:{port}"), cert.pem())
}

#[test]
fn a_store_whose_certificate_is_not_known_is_told() {
    const NAME: &str = "a_store_whose_certificate_is_not_known_is_told";
    const ENDPOINT: &str = "TIERBED_TEST_ENDPOINT";
    let get = |endpoint: &str| open("models", &kit::settings(endpoint, WRITER)).get("a", 9);
    if let Ok(endpoint) = std::env::var(ENDPOINT) {
        assert!(get(&endpoint).unwrap().is_none(), "there is no such object");
        return;
    }
    let (endpoint, authority) = encrypted();
    fails(get(&endpoint), ErrorKind::Invalid, "name the file of its authority by SSL_CERT_FILE");
    // What the error advises, in a process whose environment has it.
    let folder = tempfile::tempdir().unwrap();
    let opened = FsFolder::open(folder.path()).unwrap();
    opened.write_durable("authority.pem", authority.as_bytes()).unwrap();
    let file = folder.path().join("authority.pem").display().to_string();
    run_with(NAME, &[(ENDPOINT, &endpoint), ("SSL_CERT_FILE", &file)]);
}

/// Runs a test again, in a process whose environment has more.
fn run_with(test: &str, environment: &[(&str, &str)]) {
    let status = std::process::Command::new(std::env::current_exe().unwrap())
        .args([test, "--exact"])
        .envs(environment.iter().copied())
        .status();
    assert!(status.unwrap().success());
}

#[test]
fn a_location_is_reached_by_the_settings_of_the_environment() {
    const NAME: &str = "a_location_is_reached_by_the_settings_of_the_environment";
    const LOCATION: &str = "TIERBED_TEST_LOCATION";
    if let Ok(named) = std::env::var(LOCATION) {
        let location = Location::open(&named).unwrap();
        let error = location.promote("canary", "stable", 0).unwrap_err();
        assert!(error.to_string().contains("channel: environment/canary"), "{error}");
        location.push_whole(1, "stable").unwrap();
        assert_eq!(location.served("stable").unwrap(), [1]);
        return;
    }
    let Some(server) = server() else { return };
    let named = format!("s3://{BUCKET}/environment/");
    let secret = format!("secret-of-{WRITER}");
    run_with(
        NAME,
        &[
            (LOCATION, &named),
            ("AWS_ENDPOINT_URL", "http://127.0.0.1:1"),
            ("AWS_ENDPOINT_URL_S3", &server.endpoint),
            ("AWS_ALLOW_HTTP", "true"),
            ("AWS_ACCESS_KEY_ID", WRITER),
            ("AWS_SECRET_ACCESS_KEY", &secret),
            ("AWS_SESSION_TOKEN", ""),
            ("AWS_PROFILE", "of another tool"),
        ],
    );
    assert_eq!(location(server.objects("environment")).served("stable").unwrap(), [1]);
}

#[test]
fn a_store_that_is_not_reached_is_asked_again_later() {
    let Some(server) = server() else { return };
    let is_down = Arc::new(AtomicBool::new(false));
    let down = Arc::clone(&is_down);
    let proxy = Proxy::new(&server.endpoint, move |_| match down.load(Ordering::SeqCst) {
        true => Line::Closed,
        false => Line::Fine,
    });
    let far = || location(open(&format!("{BUCKET}/down"), &through(&proxy)));
    let kept = far();
    kept.push_whole(1, "stable").unwrap();
    is_down.store(true, Ordering::SeqCst);
    fails(kept.head("stable"), ErrorKind::Io, "store cannot be reached");
    fails(far().push_whole(2, "stable"), ErrorKind::Io, "endpoint: http://127.0.0.1");
    is_down.store(false, Ordering::SeqCst);
    assert_eq!(kept.served("stable").unwrap(), [1], "the same client works again");
    assert_eq!(far().push_whole(2, "stable").unwrap().chain.len(), 1);
    assert_eq!(kept.served("stable").unwrap(), [2]);
    // And where nobody listens at all.
    let nobody = open("models", &kit::settings("http://127.0.0.1:1", WRITER));
    all_fail(&nobody, ErrorKind::Io, "store cannot be reached");
}

/// Pushes and pulls through a line; the bytes must arrive, whatever becomes of requests.
fn arrives(
    server: &Server,
    prefix: &str,
    line: impl Fn(u64) -> Line + Send + Sync + 'static,
) -> u64 {
    let proxy = Proxy::new(&server.endpoint, line);
    let far = location(open(&format!("{BUCKET}/{prefix}"), &through(&proxy)));
    far.push_whole(1, "stable").unwrap();
    far.push_delta(2, 1, "stable").unwrap();
    assert_eq!(far.served("stable").unwrap(), [1, 2]);
    proxy.count()
}

#[test]
fn stores_that_are_busy_or_slow_are_asked_again() {
    const BUSY: Line = Line::Says("503 Slow Down", "<Error><Code>SlowDown</Code></Error>");
    let Some(server) = server() else { return };
    let fine = arrives(server, "fine", |_| Line::Fine);
    let busy = arrives(server, "busy", |at| if at % 3 == 0 { BUSY } else { Line::Fine });
    assert!(busy > fine + 10, "each refusal is a request more: {busy}, {fine}");
    let slow = Line::Slow(Duration::from_millis(5));
    assert_eq!(arrives(server, "slow", move |_| slow), fine);
}

#[test]
fn answers_cut_short_are_asked_for_again() {
    let Some(server) = server() else { return };
    location(server.objects("cut")).push_whole(1, "stable").unwrap();
    for bytes in [0, 10, 300, 700] {
        let proxy = Proxy::new(&server.endpoint, move |at| match at % 3 {
            0 => Line::Cut(bytes),
            _ => Line::Fine,
        });
        let far = location(open(&format!("{BUCKET}/cut"), &through(&proxy)));
        assert_eq!(far.served("stable").unwrap(), [1], "{bytes}");
    }
}

#[test]
fn a_store_that_hangs_is_given_up() {
    let Some(server) = server() else { return };
    location(server.objects("hangs")).push_whole(1, "stable").unwrap();
    let proxy = Proxy::new(&server.endpoint, |at| match at {
        0 => Line::Slow(Duration::from_secs(20)),
        _ => Line::Fine,
    });
    let settings = through(&proxy).with([("AWS_TIMEOUT", "300ms")]);
    let far = location(open(&format!("{BUCKET}/hangs"), &settings));
    assert_eq!(far.served("stable").unwrap(), [1]);
}

#[test]
fn an_upload_that_ends_early_leaves_nothing() {
    let Some(server) = server() else { return };
    let objects = server.objects("early");
    let mut chunks = (0..6).map(|at| Ok(vec![at; 5 << 20])).chain([Err(Error::invalid("gone"))]);
    assert_eq!(objects.put_large("half", &mut chunks).unwrap_err().message(), "gone");
    assert!(objects.list(None).unwrap().is_empty());
    assert!(objects.get("half", 9).unwrap().is_none());
    assert!(!server.uploads().contains("early"), "{}", server.uploads());
}

#[test]
fn locations_of_one_bucket_do_not_meet() {
    let Some(server) = server() else { return };
    let (one, two) = (location(server.objects("a/b")), location(server.objects("a/bc")));
    one.push_whole(1, "stable").unwrap();
    two.push_whole(2, "stable").unwrap();
    assert_eq!(one.served("stable").unwrap(), [1]);
    assert_eq!(two.served("stable").unwrap(), [2]);
    // What others keep beside versions means nothing, and stays.
    server.objects("a").put("b.note", b"note", &When::Absent).unwrap();
    server.objects("a/b").put("note", b"note", &When::Absent).unwrap();
    assert_eq!(one.prune_old().unwrap().kept.len(), 1);
    assert_eq!(one.list().unwrap().versions.len(), 1);
    let whole = location(server.objects("")).list();
    assert!(whole.unwrap().versions.is_empty(), "a bucket without a prefix is one too");
    assert_eq!(server.objects("a/b").put("note", b"note", &When::Absent).unwrap(), Put::Lost);
    let odd = location(server.objects("a b%25/\u{fc}=1"));
    odd.push_whole(3, "stable").unwrap();
    assert_eq!((odd.served("stable").unwrap(), odd.list().unwrap().versions.len()), (vec![3], 1));
}

#[test]
fn threads_fetch_side_by_side_through_one_client() {
    let Some(server) = server() else { return };
    let objects = location(server.objects("threads"));
    objects.push_whole(1, "stable").unwrap();
    let to = tempfile::tempdir().unwrap();
    let how = tierbed_remote::Pull { thread_count: 8, ..at_once() };
    let pulled = objects.pull(&Want::Channel("stable".into()), to.path(), &how, &mut |_, _| Ok(()));
    assert_eq!(kit::seed_of(&pulled.unwrap().folders[0]), 1);
}
