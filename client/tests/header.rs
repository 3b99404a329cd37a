//! The C header says what the library exports.

use std::path::Path;

/// The files of the border, in the order of the header.
const SOURCES: [&str; 6] =
    ["ffi.rs", "ffi/statistics.rs", "ffi/blocks.rs", "ffi/share.rs", "ffi/sleep.rs", "ffi/torch.rs"];

/// Set this variable to write the header instead.
const UPDATE: &str = "STITCHD_UPDATE";

#[test]
#[expect(clippy::disallowed_methods, reason = "the one variable by which golden files are updated")]
fn the_header_is_what_the_border_exports() {
    let crate_dir = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config = cbindgen::Config::from_file(crate_dir.join("cbindgen.toml")).unwrap();
    let sources = SOURCES.iter().map(|name| crate_dir.join("src").join(name));
    let builder = sources.fold(cbindgen::Builder::new(), cbindgen::Builder::with_src);
    let bindings = builder.with_config(config).generate().unwrap();
    let mut written = Vec::new();
    bindings.write(&mut written);
    let written = String::from_utf8(written).unwrap();
    let golden = crate_dir.join("include/stitch.h");
    if std::env::var_os(UPDATE).is_some() {
        std::fs::write(&golden, &written).unwrap();
    }
    let header = std::fs::read_to_string(&golden).unwrap_or_default();
    assert_eq!(header, written, "include/stitch.h is out of date: {UPDATE}=1 cargo test -p stitchd-client");
}
