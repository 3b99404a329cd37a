//! Every reader of bytes that come from outside, as a function that takes any bytes and asserts what must hold of them.
//!
//! What holds for all: a reader never panics, and what it has read writes back and reads as itself. Whoever runs a target adds that it does not take
//! memory out of proportion to its input.

mod config;
mod graph;
mod imports;
mod journal;
mod messages;
mod partition;
mod plan;
mod snapshot;
mod stats_page;
mod trace;
mod words;

/// A reader, and small inputs that lead into it.
#[derive(Clone, Copy)]
pub(crate) struct Target {
    /// What people call it.
    pub(crate) name: &'static str,
    /// Reads the bytes and asserts what must hold.
    pub(crate) run: fn(&[u8]),
    /// Valid inputs, and some that are nearly so.
    pub(crate) seeds: fn() -> Vec<Vec<u8>>,
}

/// All of them.
pub(crate) const ALL: [Target; 17] = [
    Target { name: "trace", run: trace::read, seeds: trace::seeds },
    Target { name: "binary", run: imports::binary, seeds: imports::binaries },
    Target { name: "rmm", run: imports::rmm, seeds: imports::rmm_logs },
    Target { name: "problem", run: imports::problem, seeds: imports::problems },
    Target { name: "snapshot", run: snapshot::read, seeds: snapshot::seeds },
    Target { name: "graph", run: graph::json, seeds: graph::graphs },
    Target { name: "onnx", run: graph::onnx, seeds: graph::models },
    Target { name: "profile", run: partition::profile, seeds: partition::profiles },
    Target { name: "results", run: partition::results, seeds: partition::all_results },
    Target { name: "plan", run: plan::read, seeds: plan::seeds },
    Target { name: "config", run: config::read, seeds: config::seeds },
    Target { name: "client-packet", run: messages::client_packet, seeds: messages::client_packets },
    Target { name: "daemon-packet", run: messages::daemon_packet, seeds: messages::daemon_packets },
    Target { name: "grpc", run: messages::grpc, seeds: messages::grpc_seeds },
    Target { name: "journal", run: journal::read, seeds: journal::seeds },
    Target { name: "stats-page", run: stats_page::read, seeds: stats_page::seeds },
    Target { name: "words", run: words::read, seeds: words::seeds },
];
