//! Requests whose pages are read while their thread answers others: as in the queue.

use tokio::sync::oneshot;

use super::inline::{requests, row_body};
use super::*;
use crate::admission::Priority;
use crate::executor::Offer;
use crate::generation::Serving;
use crate::inline::{answer, Tried};
use crate::job::{Done, Job, Stage, Waits, Work};
use crate::routes::work::{Ask, LOOKUP};
use crate::spans::Steps;

/// A snapshot on a disk, whose cache has room for no row.
struct OnDisk {
    _temporary: tempfile::TempDir,
    folder: Arc<dyn Folder>,
    snapshot: Arc<Snapshot>,
}

impl OnDisk {
    fn open() -> Self {
        let temporary = tempfile::tempdir().unwrap();
        let folder = FsFolder::create(temporary.path().join("s")).unwrap();
        let folder: Arc<dyn Folder> = Arc::new(folder);
        drop(snapshot_in(&folder, None));
        let options = SnapshotOptions {
            dram_budget_bytes: 64 << 20,
            cache_bytes_max: Some(0),
            ..SnapshotOptions::default()
        };
        let snapshot = Arc::new(Snapshot::open(Arc::clone(&folder), &options).unwrap());
        Self { _temporary: temporary, folder, snapshot }
    }

    fn serve(&self, options: &ServeOptions) -> Server {
        Server::start(options, Arc::clone(&self.snapshot), None).unwrap()
    }
}

/// Whether the kernel lets this process have a ring; says so where it does not.
fn has_ring() -> bool {
    let engine = EngineOptions { choice: EngineChoice::Uring, ..EngineOptions::default() };
    let opened = tierbed_io::open_engine(&engine).map(drop);
    opened.inspect_err(|error| eprintln!("requests do not read asynchronously: {error}")).is_ok()
}

fn async_requests(server: &Server) -> u64 {
    metric(server, "tierbed_async_requests_total")
}

#[test]
fn asynchronous_answers_are_those_of_the_queue() {
    let on_disk = OnDisk::open();
    let queue = on_disk.serve(&limited(|limits| limits.inline_indices_max = 0));
    // Two servers watch the rings of one snapshot, one after the other.
    let asynchronous = [on_disk.serve(&options()), on_disk.serve(&options())];
    for (path, content_type, lines, body) in requests() {
        let lines = format!("Content-Type: {content_type}\r\n{lines}");
        let ask = |server: &Server| {
            let answer = ask_with(server, &format!("POST {path}"), &lines, &body);
            let head = answer.head.lines().filter(|line| !line.starts_with("date:"));
            (answer.status, head.map(str::to_owned).collect::<Vec<_>>(), answer.body.clone())
        };
        let expected = ask(&queue);
        assert_eq!(expected.0, 200, "{path}: {}", String::from_utf8_lossy(&expected.2));
        for server in [&asynchronous[0], &asynchronous[1], &asynchronous[0]] {
            assert_eq!(ask(server), expected, "{path} {content_type}");
        }
    }
    assert_eq!(async_requests(&queue), 0);
    let count = requests().len() as u64;
    for (server, count) in asynchronous.iter().zip([2 * count, count]) {
        let all = async_requests(server) + metric(server, "tierbed_inline_requests_total");
        assert_eq!(all, if has_ring() { count } else { 0 }, "none goes through the queue");
        assert!(async_requests(server) > 0 || !has_ring());
        let waited = r#"tierbed_queue_seconds_count{route="/v1/lookup"}"#;
        assert!(metric(server, waited) > 0);
    }
    drop(asynchronous);
    let third = on_disk.serve(&options());
    assert_eq!(ask(&third, "POST", "/v1/lookup", "application/json", &row_body(&[7])).status, 200);
}

#[test]
fn clients_who_leave_and_those_who_come_together_change_no_answer() {
    let on_disk = OnDisk::open();
    let server = on_disk.serve(&options());
    let expected = |id: i64| {
        let body = row_body(&[id]);
        ask(&server, "POST", "/v1/lookup", "application/json", &body).json()
    };
    let expected: Vec<_> = (0..20).map(|at| expected(at * 20)).collect();
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let (server, expected) = (&server, &expected);
            scope.spawn(move || {
                for at in 0..50 {
                    let which = (thread + at) % 20;
                    let body = row_body(&[which as i64 * 20]);
                    if at % 3 == 0 {
                        leave(server.address(), &body);
                        continue;
                    }
                    let answer = ask(server, "POST", "/v1/lookup", "application/json", &body);
                    assert_eq!((answer.status, &answer.json()), (200, &expected[which]));
                }
            });
        }
    });
    // What clients left behind ends by itself.
    let has_ended = || metric(&server, "tierbed_requests_in_flight") == 0;
    let ends = (0..2_000).any(|_| {
        std::thread::sleep(Duration::from_millis(5));
        has_ended()
    });
    assert!(ends, "a request of a client who left stays");
    assert!(async_requests(&server) > 0 || !has_ring());
}

/// Sends a request, and closes the connection.
fn leave(address: SocketAddr, body: &[u8]) {
    let mut stream = TcpStream::connect(address).unwrap();
    let head = format!(
        "POST /v1/lookup HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).unwrap();
    stream.write_all(body).unwrap();
}

#[test]
fn a_page_that_fails_is_the_answer_of_its_own_request() {
    let on_disk = OnDisk::open();
    // The first page of the table that is asked for.
    let pages = on_disk.folder.open("rows.pages", OpenMode::ReadWrite).unwrap();
    pages.write_at(4096 + 100, b"x").unwrap();
    let server = on_disk.serve(&options());
    let statuses: Vec<_> = (0..300)
        .step_by(10)
        .map(|id| ask(&server, "POST", "/v1/lookup", "application/json", &row_body(&[id])).status)
        .collect();
    assert!(statuses.contains(&500) && statuses.contains(&200), "{statuses:?}");
    assert_eq!(metric(&server, "tierbed_requests_in_flight"), 0);
}

#[test]
fn no_request_goes_before_those_that_wait() {
    if !has_ring() {
        return;
    }
    let on_disk = OnDisk::open();
    let stop = watch::channel(false).1;
    let service = service(&options(), Arc::clone(&on_disk.snapshot), None, stop).unwrap();
    let prepare = |serving: &Serving<'_>, held| {
        let body = row_body(&[7]).into();
        crate::lookup::prepare(serving.source(), &serving.limits, &body, held, false)
    };
    let (priority, steps) = (Priority::Normal, &Steps::default());
    let ask = Ask {
        route: LOOKUP,
        deadline_us: u64::MAX,
        priority,
        body_bytes: 1,
        generation: None,
        pack: None,
        steps,
    };
    let goes_ahead = || {
        let held = service.buffers.hold_nothing();
        // A page may have come before anybody looked.
        !matches!(answer(&service, &ask, 0, held, &prepare), Tried::Left(_))
    };
    assert!(service.serving(None).is_ok() && goes_ahead());
    let place = Arc::clone(&service.places).try_acquire_owned().unwrap();
    let (told, _answer) = oneshot::channel();
    let work = Work::Lookup(Waits::new(Stage::Received(service.buffers.hold_nothing()), prepare));
    let job = Job {
        deadline_us: u64::MAX,
        generation: None,
        route: LOOKUP,
        queued_us: 0,
        body_bytes: 1,
        work,
        steps: steps.clone(),
        done: Done { place, answer: told },
    };
    let offer = Offer { deadline_us: u64::MAX, priority, request_count: 0 };
    let ticket = service.executor.push(offer, job).unwrap();
    assert!(!goes_ahead(), "a request waits, and no thread takes it");
    service.executor.forget(ticket);
    assert!(goes_ahead());
}
