//! The systems of the paper, in the order of the paper, and times by hand.

use super::*;

fn log(queries: usize) -> (Vec<u64>, Vec<u32>) {
    let mut rng = SplitMix64::new(2);
    let (mut offsets, mut rows) = (vec![0], Vec::new());
    for _ in 0..queries {
        let mut query: Vec<u32> =
            (0..8).map(|_| (20_000f64.powf(rng.unit_f64()) - 1.0) as u32).collect();
        query.sort_unstable();
        query.dedup();
        rows.extend(query);
        offsets.push(rows.len() as u64);
    }
    (offsets, rows)
}

fn options(read_us: u64, cache_share: f64) -> String {
    json!({
        "read_us": read_us, "batch": 32, "vector_bytes": 128, "cache_share": cache_share,
        "admit_from": 2, "sub_batches": 4, "row_ns": 100, "block_host_ns": 10_000,
        "dense_us": 1000, "warm_share": 0.5,
    })
    .to_string()
}

fn field(result: &Value, system: &str, field: &str) -> f64 {
    let rows = result.as_array().unwrap();
    rows.iter().find(|row| row["system"] == system).unwrap()[field].as_f64().unwrap()
}

#[test]
fn each_idea_of_the_paper_is_faster_than_the_one_before() {
    let (offsets, rows) = log(3200);
    let requests = Requests::new(&offsets, &rows, 20_000).unwrap();
    for read_us in [4, 10, 30] {
        let result = replay(&requests, &options(read_us, 0.01)).unwrap();
        assert_eq!(result, replay(&requests, &options(read_us, 0.01)).unwrap());
        let us: Vec<f64> =
            SYSTEMS.iter().map(|system| field(&result, system.name(), "lookup_us")).collect();
        assert!(us.is_sorted_by(|a, b| a > b), "{us:?} at {read_us}");
        assert!(us[0] > 5.0 * us[3], "{us:?} at {read_us}");
        let bytes: Vec<f64> =
            SYSTEMS.iter().map(|system| field(&result, system.name(), "host_bytes")).collect();
        assert!(bytes[0] > 5.0 * bytes[1] && bytes[1] > bytes[2] && bytes[2] >= bytes[3]);
    }
}

#[test]
fn times_of_memory_and_blocks_are_those_of_their_parts() {
    // 64 queries of one row each, all different: every block is read, one after the other.
    let (offsets, rows): (Vec<u64>, Vec<u32>) = ((0..=64).collect(), (0..64).collect());
    let requests = Requests::new(&offsets, &rows, 64).unwrap();
    let mut told: Value = serde_json::from_str(&options(10, 0.0)).unwrap();
    told["vector_bytes"] = json!(4096);
    let result = replay(&requests, &told.to_string()).unwrap();
    assert_eq!(field(&result, "memory", "lookup_us"), 3.2);
    assert_eq!(field(&result, "memory", "total_us"), 1003.2);
    // Row, host, register and command, flash, channel, DMA of 4 KiB.
    let one_us = 0.1 + 10.0 + 2.5 + 10.0 + 1.28 + 2.28;
    assert!((field(&result, "blocks", "lookup_us") - 32.0 * one_us).abs() < 1e-6);
    assert_eq!(field(&result, "blocks", "host_bytes"), 32.0 * 4096.0);
}

#[test]
fn wrong_options_are_refused() {
    let (offsets, rows) = log(10);
    let requests = Requests::new(&offsets, &rows, 20_000).unwrap();
    assert!(replay(&requests, "{}").is_err());
    assert!(replay(&requests, &options(10, 1.5)).is_err());
    // Ten queries are no batch of 32.
    assert!(replay(&requests, &options(10, 0.5)).is_err());
}
