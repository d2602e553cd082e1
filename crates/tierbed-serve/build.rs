//! Types of the messages of `proto/`, and what the server tells of them.

use std::path::Path;

use prost::Message;

#[expect(clippy::disallowed_methods, reason = "an output of the build, made anew when it is lost")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=proto");
    let files = protox::compile(["inference.proto", "shard.proto"], ["proto"])?;
    let out = std::env::var("OUT_DIR")?;
    // Read by clients that ask by reflection.
    std::fs::write(Path::new(&out).join("inference.bin"), files.encode_to_vec())?;
    // Fields of bytes are slices of the message they came in.
    prost_build::Config::new().bytes(["."]).compile_fds(files)?;
    Ok(())
}
