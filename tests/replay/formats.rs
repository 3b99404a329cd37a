//! Trace files of every released version stay readable, and mean what they meant.

use std::path::PathBuf;

use stitchd::trace::{csv, import};

fn data(name: &str) -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "tests/replay/data", name].iter().collect()
}

/// The file has these events, and says this of them.
fn check(name: &str, notes: &[&str]) {
    let expected = csv::read_file(&data(&format!("{name}.csv"))).unwrap();
    let found = import::read_file(&data(&format!("{name}.stitchtrace"))).unwrap();
    assert_eq!((found.trace.events, found.trace.modules), (expected.events, expected.modules));
    assert_eq!(found.notes, notes);
}

#[test]
fn binary_traces_of_version_1_stay_readable() {
    check("version-1", &[]);
}

#[test]
fn recordings_of_version_2_stay_readable() {
    check("version-2", &["memory ran out: 1 request refused, the largest of 1024.00 GiB; in the trace as if served"]);
}
