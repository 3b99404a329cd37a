//! Trace files of every released version stay readable, and mean what they meant.

use std::path::PathBuf;

use stitchd::trace::{csv, import};

fn data(name: &str) -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "tests/replay/data", name].iter().collect()
}

#[test]
fn binary_traces_of_version_1_stay_readable() {
    let expected = csv::read_file(&data("version-1.csv")).unwrap();
    let found = import::read_file(&data("version-1.stitchtrace")).unwrap().trace;
    assert_eq!((found.events, found.modules), (expected.events, expected.modules));
}
