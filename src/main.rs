//! The one binary: arguments to a subcommand, its outcome to an exit code.
//!
//! | code | meaning |
//! |---|---|
//! | 0 | done |
//! | 1 | the answer is no |
//! | 2 | the arguments or the input are wrong |
//! | 3 | the daemon cannot be reached |
//! | 70 | a bug |

use std::process::ExitCode;

use clap::Parser as _;
use stitchd::cli::{Cli, Failure};
use stitchd::error::shown;

fn main() -> ExitCode {
    let cli = Cli::parse();
    // A panic is a bug; its message is printed by the standard hook.
    match std::panic::catch_unwind(|| cli.run()) {
        Ok(Ok(code)) => ExitCode::from(code),
        Ok(Err(failure)) => {
            eprintln!("error: {}", shown(&failure.to_string()));
            ExitCode::from(failure.code())
        }
        Err(_) => {
            eprintln!("error: this is a bug in stitchd; please report the lines above");
            ExitCode::from(Failure::BUG)
        }
    }
}
