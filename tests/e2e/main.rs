//! End to end: real daemon processes, real sockets, the host driver, the library and the C border that trainers use.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails where it is")]

#[path = "../support/standin.rs"]
mod standin;
#[path = "../support/mod.rs"]
mod support;

mod activation;
mod auto;
mod bad_input;
mod border;
mod carriers;
mod cli;
mod compiled;
mod crash;
mod demo;
mod gpu;
mod gpu_script;
mod hoarders;
mod hostile;
mod isolation;
mod keepers;
mod lease;
mod life;
mod live;
mod looks;
mod memcheck;
mod metrics;
mod moments;
mod namespaces;
mod order_cli;
mod partition_cli;
mod plans;
mod python;
mod raw;
mod recorder;
mod replay_cli;
mod selftest;
mod serve;
mod shared;
mod sharing;
mod sleep;
mod soak;
mod steps;
mod takeover;
mod torch_border;
mod trace_cli;
mod turns;
mod versions;
