use std::path::Path;

use serde_json::json;
use tierbed_core::env::SplitMix64;
use tierbed_placement::{write_packed, Placement, QueryLog};
use tierbed_snapshot::index::PageIndex;
use tierbed_snapshot::placement::write_placement;

use super::*;

const ROWS: u32 = 300;

/// A log of circles of five rows, and rows placed by circle or not.
fn prepare(folder: &Path) {
    let mut rng = SplitMix64::new(3);
    let queries = (0..400).map(|_| {
        let circle = rng.below(60) as u32;
        (0..4).map(|at| circle + 60 * at).collect::<Vec<u32>>()
    });
    let log = QueryLog::from_queries(ROWS, queries).unwrap();
    write_packed(&log, &folder.join("log")).unwrap();
    let orders: [(&str, Vec<u32>); 2] = [
        ("apart", (0..ROWS).collect()),
        ("together", (0..ROWS).map(|at| at / 5 + 60 * (at % 5)).collect()),
    ];
    for (name, order) in orders {
        let placement = Placement::from_order(&order, 15).unwrap();
        let index = PageIndex::new(ROWS, placement.pages()).unwrap();
        write_placement(&placement, &index, &folder.join(name)).unwrap();
    }
}

fn number(answer: &Value, field: &str) -> f64 {
    answer[field].as_f64().unwrap_or_else(|| panic!("{field} in {answer}"))
}

#[test]
fn placed_together_a_query_reads_a_page_where_it_read_several() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    prepare(folder.path());
    let asked = json!({ "log": path("log"), "clones": 4, "skew": 1.0, "seed": 1 });
    let choice = json!({ "is_greedy": false, "index_limit": 10, "is_pipelined": true });
    let mut read = Vec::new();
    for name in ["apart", "together"] {
        let out = path(&format!("{name}.snapshot"));
        let written = json!({
            "do": "write", "placement": path(name), "out": out, "dim": 64, "clones": 4,
        });
        let written = serve(&written.to_string()).unwrap();
        assert_eq!(number(&written, "row_count"), f64::from(4 * ROWS));
        let run = |backend: &str, cache_share: f64| {
            let job = json!({
                "do": "run", "snapshot": out, "asked": asked, "choice": choice,
                "backend": backend, "threads": 2, "queue_depth": 8, "batch": 1,
                "warm_calls": 50, "calls": 100, "warm_seconds_max": 60.0,
                "seconds_max": 60.0, "cache_share": cache_share,
            });
            serve(&job.to_string()).unwrap()
        };
        let cold = run("direct", 0.0);
        assert_eq!(number(&cold, "pages_read"), number(&run("memory", 0.0), "pages_read"));
        assert!(number(&run("direct", 0.5), "rows_cached") > 100.0);
        let mapped = run("mmap", 0.1);
        assert_eq!(number(&mapped, "pages_read"), number(&cold, "pages_read"));
        let job = json!({
            "do": "select", "placement": path(name), "asked": asked, "choice": choice,
            "batch": 1, "calls": 100,
        });
        let selected = serve(&job.to_string()).unwrap();
        assert!(number(&selected, "pages_per_query") >= 1.0);
        read.push(number(&cold, "pages_per_query"));
        let raw = json!({
            "do": "raw", "snapshot": out, "threads": 1, "queue_depth": 8, "reads": 50,
            "seconds_max": 60.0, "seed": 1,
        });
        assert!(number(&serve(&raw.to_string()).unwrap(), "reads_per_s") > 0.0);
    }
    assert_eq!(read, [4.0, 1.0]);
}

#[test]
fn rows_that_are_given_come_back_from_every_clone() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    prepare(folder.path());
    let rows: Vec<u8> = (0..ROWS * 8).flat_map(|word| (word as f32).to_le_bytes()).collect();
    let home: &dyn tierbed_io::Folder = &tierbed_io::FsFolder::open(folder.path()).unwrap();
    home.write_atomic("rows", &rows).unwrap();
    let write = |dim: u32, out: &str| {
        let job = json!({
            "do": "write", "placement": path("apart"), "out": path(out), "dim": dim, "clones": 3,
            "rows": path("rows"),
        });
        serve(&job.to_string())
    };
    assert!(write(9, "wrong").unwrap_err().to_string().contains("wrong length"));
    write(8, "snapshot").unwrap();
    let opened = std::sync::Arc::new(tierbed_io::FsFolder::open(path("snapshot")).unwrap());
    let options = tierbed_snapshot::SnapshotOptions::default();
    let snapshot = tierbed_snapshot::Snapshot::open(opened, &options).unwrap();
    let schema = snapshot.schema();
    let features = [(tierbed_core::TableId(0), tierbed_snapshot::Pooling::None)];
    let plan = tierbed_snapshot::FeatureLayout::new(schema, &features).unwrap();
    let indices = [7, i64::from(ROWS) + 7, 3 * i64::from(ROWS) - 1];
    let bags = tierbed_core::Bags::new(&indices, &[0, 3], None, 1).unwrap();
    let mut out = vec![0.0; 24];
    snapshot.lookup(&plan, &bags, &mut out).unwrap();
    let row = |row: u32| (row * 8..row * 8 + 8).map(|word| word as f32).collect::<Vec<_>>();
    assert_eq!(out, [row(7), row(7), row(ROWS - 1)].concat());
}

#[test]
fn the_later_part_of_a_log_is_asked_of_what_the_earlier_part_placed() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let line = |query: u32| {
        let circle = query * 7 % 60;
        (0..4).map(|at| (circle + 60 * at).to_string()).collect::<Vec<_>>().join(" ") + "\n"
    };
    let text: String = (0..500).map(line).collect();
    let log: &dyn tierbed_io::Folder = &tierbed_io::FsFolder::open(folder.path()).unwrap();
    log.write_atomic("log.txt", text.as_bytes()).unwrap();
    let wanted = |(method, ratio): (&str, f64)| {
        let out = path(method);
        json!({ "method": method, "ratio": ratio, "cache_share": 0.05, "out": out })
    };
    let methods = [("random", 0.0), ("shp", 0.0), ("maxembed", 0.4), ("grown", 0.4)];
    let job = json!({
        "do": "place", "log": path("log.txt"), "split": 0.8, "query_count_max": null,
        "rows_per_page": 8, "methods": methods.map(wanted), "later": path("later"), "seed": 1,
        "threads": 1,
    });
    let placed = serve(&job.to_string()).unwrap();
    assert_eq!(number(&placed, "later_queries"), 100.0);
    let pages = methods.map(|(method, _)| {
        let job = json!({
            "do": "select", "placement": path(method), "batch": 1, "calls": 100,
            "asked": { "log": path("later"), "clones": 3, "skew": 1.0, "seed": 1 },
            "choice": { "is_greedy": false, "index_limit": 10, "is_pipelined": true },
        });
        number(&serve(&job.to_string()).unwrap(), "pages_per_query")
    });
    assert!(pages[1] < pages[0] && pages[2] <= pages[1], "{pages:?}");
    assert!(pages[3] < 2.0, "{pages:?}");
}

#[test]
fn commands_that_are_none_are_refused() {
    assert!(serve("{}").is_err());
    assert!(serve(r#"{"do": "raw", "snapshot": "/nowhere", "threads": 1}"#).is_err());
    assert!(Clones::new(10, 0, 1.0).is_err());
    assert!(Clones::new(1 << 20, 1 << 12, 1.0).is_err());
}

#[test]
fn earlier_clones_are_asked_for_more_often() {
    let clones = Clones::new(10, 3, 1.0).unwrap();
    let mut rng = SplitMix64::new(2);
    let mut counts = [0i32; 3];
    for _ in 0..1100 {
        counts[clones.draw(&mut rng) as usize / 10] += 1;
    }
    for (count, expected) in counts.into_iter().zip([600, 300, 200]) {
        assert!((count - expected).abs() < 60, "{counts:?}");
    }
}

#[test]
fn an_index_of_a_head_is_small_and_the_head_costs_no_page_more() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    // Few rows are asked for nearly always.
    let mut rng = SplitMix64::new(3);
    let queries = (0..4000).map(|_| {
        let mut rows: Vec<u32> = (0..4)
            .map(|_| {
                let rank = (f64::from(20 * ROWS)).powf(rng.unit_f64()) as u32;
                rank * 77 % (20 * ROWS)
            })
            .collect();
        rows.sort_unstable();
        rows.dedup();
        rows
    });
    let log = QueryLog::from_queries(20 * ROWS, queries).unwrap();
    write_packed(&log, &folder.path().join("log")).unwrap();
    let asked = json!({ "log": path("log"), "clones": 20, "skew": 1.0, "seed": 1 });
    let choice = json!({ "is_greedy": false, "index_limit": 10, "is_pipelined": true });
    let [every_row, of_head] = [None, Some("10%")].map(|head_rows| {
        let out = path(head_rows.unwrap_or("every"));
        let job = json!({
            "do": "write_by_use", "log": path("log"), "out": out, "dim": 64, "clones": 20,
            "skew": 1.0, "head_rows": head_rows,
        });
        let written = serve(&job.to_string()).unwrap();
        let job = json!({
            "do": "run", "snapshot": out, "asked": asked, "choice": choice,
            "backend": "memory", "threads": 1, "queue_depth": 8, "batch": 1,
            "warm_calls": 2000, "calls": 4000, "warm_seconds_max": 60.0,
            "seconds_max": 60.0, "cache_share": 0.1,
        });
        let run = serve(&job.to_string()).unwrap();
        (number(&written, "index_bytes"), number(&run, "pages_per_query"))
    });
    assert!(of_head.0 <= 0.2 * every_row.0, "{of_head:?} of {every_row:?}");
    assert!(of_head.1 <= 1.03 * every_row.1, "{of_head:?} of {every_row:?}");
}
