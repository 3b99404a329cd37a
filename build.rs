//! Generates the wire code from `proto/`, with a protobuf compiler written in Rust: nothing needs to be installed.

use std::path::PathBuf;

use prost::Message as _;

#[expect(clippy::disallowed_methods, reason = "cargo speaks to build scripts through the environment")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    let descriptors = protox::compile(["stitchd/v1/stitchd.proto"], ["proto"])?;
    let out = PathBuf::from(std::env::var_os("OUT_DIR").ok_or("cargo sets OUT_DIR")?);
    // For gRPC reflection.
    std::fs::write(out.join("stitchd.v1.bin"), descriptors.encode_to_vec())?;
    let with_server = std::env::var_os("CARGO_FEATURE_DAEMON").is_some();
    tonic_prost_build::configure()
        .build_server(with_server)
        .codec_path("crate::wire::codec::SmallCodec")
        .compile_fds(descriptors)?;
    Ok(())
}
