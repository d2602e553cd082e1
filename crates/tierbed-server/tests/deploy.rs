//! Files of `deploy/`: what they set is known, what they promise is so, their probes are answered.
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::disallowed_methods,
    reason = "what goes wrong here fails the test, and the time is that of another process"
)]

mod kit;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use kit::{command, ended, run, write_snapshot, Running};
use saphyr::{LoadableYamlNode, Yaml};

fn deployed(name: &str) -> String {
    fs::read_to_string(place(name)).unwrap()
}

fn place(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy").join(name)
}

/// The file of options within the manifest of Kubernetes.
fn of_kubernetes() -> String {
    let manifest = deployed("kubernetes/tierbed-server.yaml");
    let (_, block) = manifest.split_once("server.toml: |\n").unwrap();
    let lines = block.lines().take_while(|line| line.starts_with("    "));
    lines.map(|line| format!("{}\n", &line[4..])).collect()
}

/// What the server makes of a file of options: the value of a key.
fn value(config: &str, key: &str) -> String {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("server.toml");
    fs::write(&file, config).unwrap();
    let (code, printed, told) = run(&["--print-config", "--config", file.to_str().unwrap()]);
    assert_eq!(code, 0, "{told}");
    let line = printed.lines().find(|line| line.starts_with(&format!("{key} = ")));
    let line = line.unwrap_or_else(|| panic!("no {key}: {printed}"));
    let (_, value) = line.split_once(" = ").unwrap();
    value.split("  # ").next().unwrap().trim_matches('"').to_owned()
}

fn number_behind(text: &str, what: &str) -> u64 {
    let (_, rest) = text.split_once(what).unwrap_or_else(|| panic!("no {what}"));
    let digits: String = rest.trim_start().chars().take_while(char::is_ascii_digit).collect();
    digits.parse().unwrap()
}

fn mib(size: &str) -> u64 {
    size.parse::<tierbed_server::Size>().unwrap().0 >> 20
}

#[test]
fn files_of_options_have_only_what_the_server_knows() {
    for config in [of_kubernetes(), deployed("systemd/server.toml")] {
        assert_eq!(value(&config, "dram-budget"), "4GiB");
        // What stands in comments is known, too.
        let all = config.replace("# require-auth", "require-auth").replace("# tokens", "tokens");
        let all = all.replace("# tls-", "tls-");
        assert!(value(&all, "snapshot").starts_with("ads=/"));
    }
}

#[test]
fn memory_is_enough_and_time_to_stop_is_left() {
    let unit = deployed("systemd/tierbed-server.service");
    let manifest = deployed("kubernetes/tierbed-server.yaml");
    for (config, memory_mib, stop_s) in [
        (
            deployed("systemd/server.toml"),
            number_behind(&unit, "MemoryMax="),
            number_behind(&unit, "TimeoutStopSec="),
        ),
        (
            of_kubernetes(),
            number_behind(&manifest, "memory: "),
            number_behind(&manifest, "terminationGracePeriodSeconds:"),
        ),
    ] {
        let needs_mib =
            mib(&value(&config, "dram-budget")) + mib(&value(&config, "buffer-max")) + 40;
        assert!(memory_mib >= needs_mib, "{memory_mib} MiB for {needs_mib} MiB");
        let drain_s: u64 = value(&config, "drain-delay").parse().unwrap();
        let stop_ms: u64 = value(&config, "stop-ms-max").parse().unwrap();
        assert!(stop_s >= drain_s + 3 * stop_ms / 1000, "{stop_s} s to stop");
    }
}

#[test]
fn probes_and_ports_of_kubernetes_are_those_of_the_server() {
    let folder = tempfile::tempdir().unwrap();
    let snapshot = folder.path().join("ads");
    write_snapshot(&snapshot, 1000, 4);
    let manifest = deployed("kubernetes/tierbed-server.yaml");
    for (key, port) in [("address", "8080"), ("grpc-address", "8081")] {
        assert_eq!(value(&of_kubernetes(), key), format!("0.0.0.0:{port}"));
        assert!(manifest.contains(&format!("containerPort: {port}")));
    }
    let config = of_kubernetes()
        .replace("/data/ads-1", snapshot.to_str().unwrap())
        .replace("4GiB", "16MiB")
        .replace("0.0.0.0:8080", "127.0.0.1:0")
        .replace("0.0.0.0:8081", "127.0.0.1:0");
    let file = folder.path().join("server.toml");
    fs::write(&file, config).unwrap();
    let server = Running::of(&mut command(&["--config", file.to_str().unwrap()]));
    let paths: Vec<&str> =
        manifest.lines().filter_map(|line| line.trim().strip_prefix("path: ")).collect();
    assert_eq!(paths, ["/livez", "/readyz", "/livez"]);
    for path in paths {
        assert_eq!(server.get(path).0, 200, "{path}");
    }
    assert_eq!(server.get("/v2/models/ads.rows/ready").0, 200);
}

#[test]
fn words_of_the_container_are_those_of_the_server_and_its_probe_is_answered() {
    let file = deployed("Containerfile");
    let words = |name: &str| -> Vec<String> {
        let at = file.rfind(&format!("{name} [")).unwrap() + name.len();
        serde_json::from_str(file[at..].lines().next().unwrap()).unwrap()
    };
    assert_eq!(words("ENTRYPOINT"), ["tierbed-server"]);
    let given = words("\nCMD");
    let (code, printed, told) = ended(command(&["--print-config"]).args(&given));
    assert_eq!(code, 0, "{told}");
    assert!(printed.contains("address = \"0.0.0.0:8080\"  # command line"), "{printed}");
    let folder = tempfile::tempdir().unwrap();
    write_snapshot(&folder.path().join("ads"), 100, 4);
    let server = Running::start(&folder.path().join("ads"), &[]);
    let probe: Vec<String> = words("    CMD");
    let (program, probe) = probe.split_first().unwrap();
    let port = server.address.rsplit(':').next().unwrap();
    let probe = probe.iter().map(|word| word.replace("/8080;", &format!("/{port};")));
    let probe: Vec<String> = probe.collect();
    let asked = Command::new(program).args(&probe).status().unwrap();
    assert!(asked.success());
    drop(server);
    let asked = Command::new(program).args(&probe).output().unwrap();
    assert!(!asked.status.success(), "nothing answers there any more");
}

#[test]
fn the_unit_is_one_that_systemd_takes() {
    let unit = deployed("systemd/tierbed-server.service");
    assert!(unit.contains("\nType=notify\n") && unit.contains("\nWatchdogSec="));
    assert!(unit.contains("tierbed-server --config /etc/tierbed/server.toml\n"));
    // Whoever has the tool also checks every line; the program and the user are not here.
    let folder = tempfile::tempdir().unwrap();
    let here = folder.path().join("tierbed-server.service");
    let program = kit::program();
    let unit = unit
        .replace("/usr/local/bin/tierbed-server", program.to_str().unwrap())
        .replace("User=tierbed", "User=root")
        .replace("Group=tierbed", "Group=root");
    fs::write(&here, unit).unwrap();
    let mut verify = Command::new("systemd-analyze");
    match verify.args(["verify", "--man=no"]).arg(&here).output() {
        Err(missing) => eprintln!("skipped: systemd-analyze is not here ({missing})"),
        Ok(output) => {
            let told = String::from_utf8_lossy(&output.stderr);
            let of_ours = told.lines().filter(|line| line.contains("tierbed-server.service"));
            let of_ours: Vec<_> = of_ours.collect();
            assert!(of_ours.is_empty(), "{}", of_ours.join("\n"));
        }
    }
}

#[test]
fn the_metrics_that_the_guide_watches_are_there() {
    let guide =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/how-to/serve-in-production.md");
    let guide = fs::read_to_string(guide).unwrap();
    let (_, table) = guide.split_once("| metric |").unwrap();
    let rows = table.lines().skip(2).take_while(|line| line.starts_with('|'));
    let names: Vec<&str> = rows.map(|line| line.split('`').nth(1).unwrap()).collect();
    assert!(names.len() > 4, "{names:?}");
    let folder = tempfile::tempdir().unwrap();
    write_snapshot(&folder.path().join("ads"), 100, 4);
    let server = Running::start(&folder.path().join("ads"), &["--connections-max", "1"]);
    assert_eq!(server.lookup(&[1]).0, 200);
    // A family of many kinds is there from the first of them: a refused connection is one.
    let (metrics, began) = (|| server.get("/metrics").1, std::time::Instant::now());
    while !metrics().contains("tierbed_requests_refused_total") {
        assert!(began.elapsed() < std::time::Duration::from_secs(20), "nothing was refused");
        let first = std::net::TcpStream::connect(&server.address).unwrap();
        let _ = server.get("/livez");
        drop(first);
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    let metrics = metrics();
    for name in names {
        assert!(metrics.contains(&format!("# HELP {name} ")), "{name}: {metrics}");
    }
}

/// Names of our metrics in expressions.
fn names_in(expressions: &[String]) -> BTreeSet<&str> {
    let is_of_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let words = expressions.iter().flat_map(|text| text.split(move |c| !is_of_name(c)));
    words.filter(|word| word.starts_with("tierbed_") || word.starts_with("process_")).collect()
}

/// Expressions of the dashboard, with its variables filled in.
fn of_dashboard() -> Vec<String> {
    let dashboard: serde_json::Value =
        serde_json::from_str(&deployed("grafana/tierbed.json")).unwrap();
    let panels = dashboard["panels"].as_array().unwrap().iter();
    let targets = panels.flat_map(|panel| panel["targets"].as_array().unwrap());
    let expressions = targets.map(|target| target["expr"].as_str().unwrap());
    expressions
        .map(|text| text.replace("$__rate_interval", "1m").replace("$instance", "a"))
        .collect()
}

fn of_alerts() -> Vec<String> {
    let documents = Yaml::load_from_str(&deployed("prometheus/alerts.yaml")).unwrap();
    let rules = documents[0]["groups"][0]["rules"].as_vec().unwrap().iter();
    rules.map(|rule| rule["expr"].as_str().unwrap().to_owned()).collect()
}

/// Metrics of a server that has answered, failed and refused.
fn metrics_of_all_kinds() -> String {
    let folder = tempfile::tempdir().unwrap();
    let snapshot = folder.path().join("ads");
    write_snapshot(&snapshot, 1000, 4);
    let server = Running::start(&snapshot, &["--connections-max", "1"]);
    assert_eq!(server.lookup(&[999]).0, 200);
    let mut pages = fs::read(snapshot.join("rows.pages")).unwrap();
    pages[100] ^= 1;
    fs::write(snapshot.join("rows.pages"), pages).unwrap();
    // Connections are closed a moment after their answers.
    let began = std::time::Instant::now();
    while server.lookup(&[0]).0 != 500 {
        assert!(began.elapsed() < std::time::Duration::from_secs(20), "no damaged page");
    }
    loop {
        let first = std::net::TcpStream::connect(&server.address).unwrap();
        let _ = server.get("/livez");
        drop(first);
        std::thread::sleep(std::time::Duration::from_millis(50));
        let (status, metrics) = server.get("/metrics");
        if status == 200 && metrics.contains("tierbed_requests_refused_total{") {
            return metrics;
        }
        assert!(began.elapsed() < std::time::Duration::from_secs(20), "nothing was refused");
    }
}

#[test]
fn dashboard_and_alerts_ask_for_metrics_that_there_are() {
    let expressions = [of_dashboard(), of_alerts()].concat();
    let names = names_in(&expressions);
    assert!(names.len() > 20, "{names:?}");
    let metrics = metrics_of_all_kinds();
    let is_there = |name: &str| metrics.lines().any(|line| line.starts_with(name));
    let of_line = |name: &str| is_there(&format!("{name} ")) || is_there(&format!("{name}{{"));
    // Those of shards are a gateway's; its own tests look for them.
    let names = names.into_iter().filter(|name| !name.starts_with("tierbed_shard"));
    let missing: Vec<_> = names.filter(|name| !of_line(name)).collect();
    assert!(missing.is_empty(), "{missing:?} in\n{metrics}");
}

#[test]
fn prometheus_takes_every_expression() {
    let built = place("../.tools/clients/bin/promtool");
    let promtool = if built.is_file() { built } else { PathBuf::from("promtool") };
    if let Err(missing) = Command::new(&promtool).arg("--version").output() {
        return eprintln!("skipped: promtool is not here, see scripts/client-deps ({missing})");
    }
    let folder = tempfile::tempdir().unwrap();
    let panels = folder.path().join("panels.yaml");
    let rules = of_dashboard().into_iter().zip(0..);
    let rules =
        rules.map(|(text, at)| serde_json::json!({"record": format!("panel:{at}"), "expr": text}));
    let rules = serde_json::json!({"groups": [{"name": "a", "rules": rules.collect::<Vec<_>>()}]});
    fs::write(&panels, rules.to_string()).unwrap();
    for file in [panels, place("prometheus/alerts.yaml")] {
        let checked = Command::new(&promtool).args(["check", "rules"]).arg(&file).output().unwrap();
        assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stderr));
    }
}

#[test]
fn the_manifest_is_yaml_whose_parts_fit_each_other() {
    let documents = Yaml::load_from_str(&deployed("kubernetes/tierbed-server.yaml")).unwrap();
    let kinds: Vec<_> = documents.iter().map(|document| document["kind"].as_str()).collect();
    assert_eq!(kinds, [Some("ConfigMap"), Some("Deployment"), Some("Service")]);
    let [settings, deployment, service] = &documents[..] else { unreachable!("three kinds") };
    assert_eq!(settings["data"]["server.toml"].as_str(), Some(of_kubernetes().as_str()));
    let (spec, pod) = (&deployment["spec"], &deployment["spec"]["template"]);
    let app = pod["metadata"]["labels"]["app"].as_str();
    assert_eq!(spec["selector"]["matchLabels"]["app"].as_str(), app);
    assert_eq!(service["spec"]["selector"]["app"].as_str(), app);
    let container = &pod["spec"]["containers"][0];
    let of = |ports: &Yaml<'_>, key: &str| -> Vec<String> {
        let ports = ports.as_vec().unwrap().iter();
        ports.map(|port| port[key].as_str().unwrap().to_owned()).collect()
    };
    let ports = of(&container["ports"], "name");
    assert_eq!(of(&service["spec"]["ports"], "targetPort"), ports);
    for probe in ["startupProbe", "readinessProbe", "livenessProbe"] {
        assert_eq!(container[probe]["httpGet"]["port"].as_str(), Some(ports[0].as_str()));
    }
    let (code, _, told) = run(&["--print-config", container["args"][0].as_str().unwrap()]);
    assert!(code == 2 && told.contains("/etc/tierbed/server.toml"), "only the file lacks: {told}");
    let mount = &container["volumeMounts"][0];
    assert_eq!(mount["mountPath"].as_str(), Some("/etc/tierbed"));
    let volume = &pod["spec"]["volumes"][0];
    assert_eq!(volume["name"].as_str(), mount["name"].as_str());
    assert_eq!(volume["configMap"]["name"].as_str(), settings["metadata"]["name"].as_str());
}
