//! `stitchd keep`: the process that holds what is to outlive the daemon.

use std::os::fd::{AsFd as _, OwnedFd};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use clap::Args;
use serde_json::json;

use super::{DONE, Failure, Outcome, print_json};
use crate::keeper::process::{Keeping, serve};
use crate::session::locate::{self, Environment};

#[derive(Debug, Args)]
#[command(
    after_help = "A daemon starts one by itself where none is there. Started by hand, or in a pod of its own, it outlives whatever ends the daemon with its children.\n\nExamples:\n  stitchd keep\n  stitchd keep --state-dir /run/stitchd-state --until-alone-for 10m"
)]
pub(super) struct KeepArgs {
    /// Where the daemon's sockets are, and the keeper's too where no other directory is given [default: /run/stitchd]
    #[arg(long, value_name = "DIR", env = "STITCHD_RUNTIME_DIR")]
    runtime_dir: Option<PathBuf>,
    /// The daemon's --state-dir, where it has one
    #[arg(long, value_name = "DIR")]
    state_dir: Option<PathBuf>,
    /// End when no daemon, and none of the processes that had a session, has been there for so long [default: never]
    #[arg(long, value_name = "TIME", value_parser = super::time)]
    until_alone_for: Option<Duration>,
    /// Print one JSON object when it keeps
    #[arg(long)]
    json: bool,
    /// Standard input is a connection to a daemon
    #[arg(long, hide = true)]
    connected: bool,
}

/// Standard input, and nothing in its place: a second copy would keep the connection open.
fn take_input() -> std::io::Result<OwnedFd> {
    let socket = std::io::stdin().as_fd().try_clone_to_owned()?;
    rustix::stdio::dup2_stdin(std::fs::File::open("/dev/null")?)?;
    Ok(socket)
}

pub(super) fn run(args: &KeepArgs) -> Outcome {
    super::serve::raise_descriptor_limit();
    Environment::read().be_mortal("keeper");
    if args.connected {
        // What a terminal, or the system, sends to the daemon and those around it is not for this: one that is stopped would be hung up on when the daemon ends. It fails where this leads a session already.
        let _ = rustix::process::setsid();
    }
    let daemon =
        if args.connected { Some(take_input().context("standard input").map_err(Failure::Other)?) } else { None };
    let state_dir = args.state_dir.clone().or(args.runtime_dir.clone());
    let state_dir = state_dir.unwrap_or_else(|| PathBuf::from(locate::RUNTIME_DIR));
    match (args.connected, args.json) {
        (true, _) => {}
        (false, true) => print_json(&json!({ "keeping": state_dir })),
        (false, false) => outln!("keeping what a daemon of {} hands over", state_dir.display()),
    }
    let keeping = Keeping { state_dir, daemon, alone_max: args.until_alone_for };
    serve(keeping).map_err(|error| Failure::Other(error.into()))?;
    DONE
}
