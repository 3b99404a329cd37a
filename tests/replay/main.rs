//! Traces of other people and what replay makes of them: importers and models against real files and published figures.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails where it is")]

mod costs;
mod formats;
mod kinds;
mod models;
mod production;
mod races;
mod random;
mod report;
mod shipped;
mod snapshots;
mod synthetic;
mod trim;

use std::path::Path;

use stitchd::trace::Trace;

/// One of the project's own traces.
fn trace(name: &str) -> Trace {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/data/{name}.csv.zst"));
    stitchd::trace::csv::read_file(&path).unwrap()
}
