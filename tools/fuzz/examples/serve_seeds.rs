//! Writes the seeds of the server's fuzz targets: one request of each form.
//!
//! `cargo run --manifest-path tools/fuzz/Cargo.toml --example serve_seeds`, from the repository's
//! root. The same code gives the same seeds.

use std::fs;
use std::path::Path;

type Outcome = std::io::Result<()>;

fn put(target: &str, name: &str, bytes: &[u8]) -> Outcome {
    let folder = Path::new("tools/fuzz/seeds").join(target);
    fs::create_dir_all(&folder)?;
    fs::write(folder.join(name), bytes)
}

fn words(ids: &[i64]) -> Vec<u8> {
    ids.iter().flat_map(|id| id.to_le_bytes()).collect()
}

fn oip() -> Outcome {
    let json = r#"{"id": "7", "parameters": {"pooling": "mean", "timeout": 1000, "priority": 1},
        "inputs": [{"name": "ids", "shape": [2, 2], "datatype": "INT64", "data": [[1, 2], [3, 4]]}],
        "outputs": [{"name": "pooled", "parameters": {"binary_data": true}}]}"#;
    put("serve_oip_json", "ids", json.as_bytes())?;
    let json = r#"{"parameters": {"output_dtype": "FP16", "binary_data_output": true}, "inputs": [
        {"name": "user.values", "shape": [2], "datatype": "INT32", "data": [1, 2]},
        {"name": "user.lengths", "shape": [2], "datatype": "INT64", "data": [2, 0]},
        {"name": "user.weights", "shape": [2], "datatype": "FP32", "data": [0.5, -1e3]}]}"#;
    put("serve_oip_json", "one-feature", json.as_bytes())?;
    let json = r#"{"inputs": [{"name": "values", "shape": [3], "datatype": "INT64",
        "parameters": {"binary_data_size": 24}}, {"name": "lengths", "shape": [4],
        "datatype": "INT64", "parameters": {"binary_data_size": 32}}]}"#;
    let length = (json.len() as u16).to_le_bytes();
    let bags = [words(&[1, 299, 999]), words(&[1, 1, 0, 1])].concat();
    put("serve_oip_binary", "bags", &[&length, json.as_bytes(), &bags].concat())
}

/// A field of a message that has a length.
fn field(number: u8, bytes: &[u8]) -> Vec<u8> {
    [&[number << 3 | 2, bytes.len() as u8], bytes].concat()
}

fn grpc() -> Outcome {
    let shape = field(3, &[2, 2]);
    let input = |rest: &[u8]| {
        let named = [field(1, b"ids"), field(2, b"INT64"), shape.clone()].concat();
        field(5, &[&named, rest].concat())
    };
    let head = [field(1, b"tierbed.rows"), field(3, b"7")].concat();
    let raw = [head.clone(), input(&[]), field(7, &words(&[1, 2, 3, 4]))].concat();
    put("serve_grpc_infer", "raw", &raw)?;
    let contents = field(5, &field(3, &[1, 2, 3, 4]));
    let pooling = [field(1, b"pooling"), field(2, &field(3, b"none"))].concat();
    let outputs = field(6, &field(1, b"user"));
    let typed = [head, field(4, &pooling), input(&contents), outputs].concat();
    put("serve_grpc_infer", "typed", &typed)
}

fn lookup() -> Outcome {
    let json = r#"{"pooling": "mean", "features": {
        "user": {"values": [1, 2, 2], "offsets": [0, 1, 3], "weights": [1, 0.5, -2]},
        "item.v2": {"values": [999], "offsets": [0, 0, 1]}}}"#;
    put("serve_lookup", "json", json.as_bytes())?;
    let head = r#"{"user.values":{"dtype":"I64","shape":[2],"data_offsets":[0,16]},
        "user.offsets":{"dtype":"I64","shape":[3],"data_offsets":[16,40]}}"#;
    let head = format!("{head:<160}");
    let length = (head.len() as u64).to_le_bytes();
    let tensors = words(&[1, 2, 0, 1, 2]);
    put("serve_lookup", "tensors", &[b"t", &length[..], head.as_bytes(), &tensors].concat())
}

/// `abc` in a block that is stored as it is, in both codings.
fn inflating() -> Outcome {
    let stored = b"\x01\x03\0\xfc\xffabc";
    let head = b"\x1f\x8b\x08\0\0\0\0\0\0\xff";
    let gzip = [&head[..], &stored[..], b"\xc2\x41\x24\x35\x03\0\0\0"].concat();
    put("serve_inflating", "gzip", &[&[0, 4], &gzip[..]].concat())?;
    let deflate = [b"\x78\x01", &stored[..], b"\x02\x4d\x01\x27"].concat();
    put("serve_inflating", "deflate", &[&[1, 4], &deflate[..]].concat())
}

fn main() -> Outcome {
    oip()?;
    grpc()?;
    lookup()?;
    inflating()
}
