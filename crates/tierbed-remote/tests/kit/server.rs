//! A store that speaks S3, for tests: SeaweedFS, brought by `scripts/s3-server`.
//!
//! It is started once for a test program. A shell holds it, and ends it when the program ends,
//! however that comes about.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use tierbed_io::{Folder, FsFolder};
use tierbed_remote::{BucketObjects, BucketSettings, Objects, When};

pub const BUCKET: &str = "tierbed";
/// Who may do all, and who may only read.
pub const WRITER: &str = "writer";
pub const READER: &str = "reader";

const WAITS: usize = 600;
const WAIT: Duration = Duration::from_millis(100);
/// Ends the store, and takes away what it kept, once nobody holds the other end of its input. What
/// ends the tests from a keyboard does not end it.
const HOLD: &str = r#"
trap '' INT TERM HUP
dir=$1
shift
"$@" >"$dir/log" 2>&1 &
cat >"$dir/held"
kill -9 $!
wait
rm -rf "$dir"
"#;

pub struct Server {
    pub endpoint: String,
    filer: u16,
    // Its input is open as long as this.
    _shell: Child,
}

/// Returns the settings that lead to the store at `endpoint`.
pub fn settings(endpoint: &str, who: &str) -> BucketSettings {
    BucketSettings::default().with([
        ("AWS_ENDPOINT_URL", endpoint),
        ("AWS_ALLOW_HTTP", "true"),
        ("AWS_ACCESS_KEY_ID", who),
        ("AWS_SECRET_ACCESS_KEY", &format!("secret-of-{who}")),
    ])
}

/// Returns the store; `None` where there is none, after saying so once.
pub fn server() -> Option<&'static Server> {
    static SERVER: OnceLock<Option<Server>> = OnceLock::new();
    SERVER.get_or_init(start).as_ref()
}

fn start() -> Option<Server> {
    let ours = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.tools/s3/bin/weed");
    let weed = if ours.exists() { ours } else { "weed".into() };
    let mut version = Command::new(&weed);
    let found = version.arg("version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    if !found.is_ok_and(|status| status.success()) {
        eprintln!("skipped over buckets: no SeaweedFS; call scripts/s3-server");
        return None;
    }
    // Another program may take a port meanwhile.
    let started = (0..3).find_map(|_| start_once(&weed));
    assert!(started.is_some(), "SeaweedFS does not start");
    started
}

fn free_ports<const N: usize>() -> [u16; N] {
    let listeners = [(); N].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
    listeners.map(|listener| listener.local_addr().unwrap().port())
}

fn start_once(weed: &Path) -> Option<Server> {
    let dir = tempfile::Builder::new().prefix("tierbed-s3-").tempdir().unwrap().keep();
    let user = |name: &str, actions: &str| {
        format!(
            r#"{{"name": "{name}", "actions": [{actions}],
            "credentials": [{{"accessKey": "{name}", "secretKey": "secret-of-{name}"}}]}}"#
        )
    };
    let all = r#""Admin", "Read", "Write", "List""#;
    let users = [user(WRITER, all), user(READER, r#""Read", "List""#)].join(",");
    let users = format!(r#"{{"identities": [{users}]}}"#);
    FsFolder::open(&dir).unwrap().write_durable("users.json", users.as_bytes()).unwrap();
    let ports = free_ports::<8>();
    let names = ["master", "volume", "filer", "s3"];
    let mut command = Command::new("sh");
    command.args(["-c", HOLD, "sh"]).arg(&dir).arg(weed).args(["server", "-filer", "-s3"]);
    for (name, port) in names.iter().zip(ports.chunks(2)) {
        command.arg(format!("-{name}.port={}", port[0]));
        command.arg(format!("-{name}.port.grpc={}", port[1]));
    }
    let at = |name: &str| dir.join(name).display().to_string();
    let shell = command
        .args(["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.telemetry=false"])
        .args(["-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.autoCreateBucket=false"])
        .args(["-volume.max=16", "-master.volumeSizeLimitMB=64"])
        .arg(format!("-dir={}", dir.display()))
        .arg(format!("-s3.config={}", at("users.json")))
        .arg(format!("-s3.localSocket={}", at("s3.sock")))
        .arg(format!("-filer.localSocket={}", at("filer.sock")))
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let endpoint = format!("http://127.0.0.1:{}", ports[6]);
    let server = Server { endpoint, filer: ports[4], _shell: shell };
    server.is_ready().then_some(server)
}

impl Server {
    /// Waits until it takes an object.
    fn is_ready(&self) -> bool {
        (0..WAITS).any(|_| {
            std::thread::sleep(WAIT);
            // 409 when it was made already.
            let made = |answer: &String| answer.contains(" 201 ") || answer.contains(" 409 ");
            let is_made = self.ask_filer("POST", "").as_ref().is_some_and(made);
            is_made && self.objects("ready").put("ready", b"", &When::Always).is_ok()
        })
    }

    /// Asks for a path below the folder that is the bucket, past S3.
    fn ask_filer(&self, verb: &str, path: &str) -> Option<String> {
        let mut line = TcpStream::connect(("127.0.0.1", self.filer)).ok()?;
        let head = "HTTP/1.1\r\nHost: filer\r\nAccept: application/json\r\n\
                    Connection: close\r\nContent-Length: 0";
        let request = format!("{verb} /buckets/{BUCKET}/{path} {head}\r\n\r\n");
        line.write_all(request.as_bytes()).ok()?;
        let mut answer = String::new();
        line.read_to_string(&mut answer).ok()?;
        Some(answer)
    }

    /// Returns what the store keeps of uploads that nobody ended.
    pub fn uploads(&self) -> String {
        self.ask_filer("GET", ".uploads/").unwrap()
    }

    pub fn settings(&self) -> BucketSettings {
        settings(&self.endpoint, WRITER)
    }

    /// Opens the objects below a prefix.
    pub fn objects(&self, prefix: &str) -> BucketObjects {
        BucketObjects::open(&format!("{BUCKET}/{prefix}"), &self.settings()).unwrap()
    }
}
