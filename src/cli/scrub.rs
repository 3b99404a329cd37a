//! `stitchd scrub`: the process that clears new chunks for a daemon. Nobody starts it but the daemon.

use std::os::fd::AsFd as _;

use anyhow::Context as _;
use clap::Args;

use super::{DONE, Failure, Outcome};
use crate::daemon::scrubber;
use crate::driver::{self, DriverName};
use crate::ids::DeviceUuid;
use crate::session::locate::Environment;

#[derive(Debug, Args)]
pub(super) struct ScrubArgs {
    /// The daemon's driver
    #[arg(long)]
    driver: DriverName,
    /// Whose memory
    #[arg(long, value_parser = uuid)]
    device: DeviceUuid,
}

fn uuid(text: &str) -> Result<DeviceUuid, String> {
    DeviceUuid::parse(text).ok_or_else(|| format!("'{text}' is not a device's uuid"))
}

pub(super) fn run(args: &ScrubArgs) -> Outcome {
    super::serve::raise_descriptor_limit();
    let socket = std::io::stdin().as_fd().try_clone_to_owned().context("standard input").map_err(Failure::Other)?;
    let driver = driver::open(args.driver, &[], &Environment::read().library)?;
    scrubber::serve(socket, driver, args.device).map_err(|error| Failure::Other(error.into()))?;
    DONE
}
