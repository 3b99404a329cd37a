//! Traces of other people and what replay makes of them: importers and models against real files and published figures.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails where it is")]

mod formats;
mod models;
mod production;
mod report;
mod snapshots;
