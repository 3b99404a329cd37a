//! The command line: one file per subcommand. Every command prints a table or sentences for people, or with `--json` one object on standard output and
//! nothing else there.

/// Prints on standard output, as `print!` does, and lives on if nobody listens.
macro_rules! out {
    ($($text:tt)*) => { $crate::cli::print_out(&format_args!($($text)*)) };
}

/// The same with an end of line.
macro_rules! outln {
    ($($text:tt)*) => { $crate::cli::print_out(&format_args!("{}\n", format_args!($($text)*))) };
}

mod ask;
mod demo;
mod drain;
mod evict;
mod health;
mod interrupt;
mod keep;
mod limit;
mod order;
mod partition;
mod plan;
mod plans;
mod replay;
mod reserve;
mod revocations;
mod run;
mod scratch;
mod scrub;
mod selftest;
mod serve;
mod sessions;
mod shared;
mod spinner;
mod status;
mod table;
mod top;
mod trace;
mod trainer;
mod trim;
mod whole_file;

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use clap::{Args, Parser, Subcommand};

use crate::clock::{Clock as _, SystemClock};
use crate::daemon::DaemonError;
use crate::daemon::config::ConfigError;
use crate::driver::OpenError;
use crate::error::{ErrorKind, chain};
use crate::order::OrderError;
use crate::plan::PlanError;
use crate::plan::format::FormatError;
use crate::session::SessionError;
use crate::session::locate::Environment;
use crate::trace::TraceError;
use crate::units::parse_time;

/// The arguments of `stitchd`.
#[derive(Debug, Parser)]
#[command(
    name = "stitchd",
    version,
    about = "The memory daemon for GPU nodes: stitched, planned and shared GPU memory for training processes",
    after_help = "Examples:\n  stitchd demo                                  # the whole thing on this machine, no GPU needed\n  stitchd serve --runtime-dir /tmp/s &          # a daemon\n  stitchd status --socket /tmp/s/stitchd.sock   # what it holds",
    max_term_width = 110
)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Shows the main job on this machine: a daemon, trainers with plans and stitched pools, a crash, every byte checked
    Demo(demo::DemoArgs),
    /// Runs the daemon
    Serve(serve::ServeArgs),
    /// Runs a training command with its GPU memory from the daemon, without a change of the program
    Run(run::RunArgs),
    /// Makes a plan from a trace, checks or shows one
    Plan(plan::PlanArgs),
    /// Finds the order of a graph's operators that needs the least memory, and places for its tensors
    Order(order::OrderArgs),
    /// Says where to cut a model for pipelined training so that the fullest GPU holds least
    Partition(Box<partition::PartitionArgs>),
    /// Runs a trace through these pools and models of others, and says what each needs
    Replay(Box<replay::ReplayArgs>),
    /// Says what a trace is in numbers, and turns what others recorded into traces
    Trace(trace::TraceArgs),
    /// Creates the chunks of a plan's static pool before its job starts
    Reserve(reserve::ReserveArgs),
    /// Shows a running daemon's devices and totals
    Status(status::StatusArgs),
    /// Shows a running daemon live in the terminal: devices, sessions, who waits, what happened
    Top(top::TopArgs),
    /// Shows who holds what
    Sessions(sessions::SessionsArgs),
    /// Shows who was asked for memory for whom, and gave how much
    Revocations(revocations::RevocationsArgs),
    /// Shows which ranges of memory processes share, and who holds them
    Shared(shared::SharedArgs),
    /// Changes what a session may have while it runs
    Limit(limit::LimitArgs),
    /// Has idle memory go back to the driver
    Trim(trim::TrimArgs),
    /// Gives a session nothing more, and on demand ends its process
    Evict(evict::EvictArgs),
    /// Leases nothing more of a device
    Drain(drain::DrainArgs),
    /// Lists, stores, fetches or deletes the plans that a daemon keeps
    Plans(plans::PlansArgs),
    /// Asks a daemon whether it serves: exit code 0 if it does
    Health(health::HealthArgs),
    /// Checks whether a driver keeps the rules on this machine, and measures what its calls cost
    Selftest(selftest::SelftestArgs),
    /// Holds what is to outlive the daemon: memory that is leased, for the daemon that follows
    Keep(keep::KeepArgs),
    /// Clears new chunks for the daemon that started it
    #[command(hide = true)]
    Scrub(scrub::ScrubArgs),
    /// The other process of an experiment of the selftest
    #[command(hide = true)]
    Probe(selftest::probe::ProbeArgs),
    /// One training process of the demo
    #[command(hide = true)]
    Trainer(trainer::TrainerArgs),
}

/// Where the daemon is and how to print.
#[derive(Debug, Clone, Args)]
struct Common {
    /// The daemon's socket [default: $STITCHD_SOCKET, else stitchd.sock in $STITCHD_RUNTIME_DIR or /run/stitchd]
    #[arg(long, value_name = "PATH", global = true)]
    socket: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long, global = true)]
    json: bool,
}

impl Common {
    fn socket(&self) -> PathBuf {
        self.socket.clone().unwrap_or_else(|| Environment::read().socket())
    }
}

/// Why a command did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The daemon could not be reached, or said no.
    #[error("{}", chain(.0))]
    Session(#[from] SessionError),
    /// The daemon cannot run.
    #[error("{}", chain(.0))]
    Daemon(#[from] DaemonError),
    /// There is no such driver on this machine.
    #[error("{}", chain(.0))]
    Driver(#[from] OpenError),
    /// The configuration is wrong.
    #[error("{}", chain(.0))]
    Config(#[from] ConfigError),
    /// The trace is wrong.
    #[error("{path}: {}", chain(.source))]
    Trace {
        /// Which.
        path: PathBuf,
        /// Why.
        source: TraceError,
    },
    /// There is no plan for it.
    #[error("{}", chain(.0))]
    Plan(#[from] PlanError),
    /// A graph is wrong.
    #[error("{path}: {source}")]
    Graph {
        /// Which.
        path: PathBuf,
        /// Why.
        source: OrderError,
    },
    /// A file is no plan.
    #[error("{path}: {}", chain(.source))]
    PlanFile {
        /// Which.
        path: PathBuf,
        /// Why.
        source: FormatError,
    },
    /// A file cannot be read or written.
    #[error("{path}: {source}")]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// What there was to say could not be said.
    #[error("cannot write to standard output: {0}")]
    Output(std::io::Error),
    /// There is no daemon to ask.
    #[error("{0}")]
    NoDaemon(String),
    /// What was asked for makes no sense.
    #[error("{0}")]
    Usage(String),
    /// Something failed that should not have.
    #[error("{0:#}")]
    Other(#[from] anyhow::Error),
}

impl Failure {
    /// The exit code of a bug (EX_SOFTWARE).
    pub const BUG: u8 = 70;
    const NO: u8 = 1;
    const USAGE: u8 = 2;
    const UNREACHABLE: u8 = 3;

    /// The exit code.
    pub fn code(&self) -> u8 {
        match self {
            Failure::NoDaemon(_)
            | Failure::Session(
                SessionError::NoDaemon { .. } | SessionError::Forbidden { .. } | SessionError::DaemonGone,
            ) => Self::UNREACHABLE,
            // The daemon could not do it, and that is its answer.
            Failure::Session(SessionError::Refused { kind: ErrorKind::Broken, .. }) => Self::NO,
            Failure::Session(error) => code_of(error.kind()),
            Failure::Daemon(error) => code_of(error.kind()),
            Failure::Driver(OpenError::Overdue { .. } | OpenError::Unopened { .. }) => Self::NO,
            // A solver's mistake, which whoever checks its plan has found.
            Failure::Plan(PlanError::Wrong { .. }) => Self::BUG,
            Failure::Driver(_)
            | Failure::Config(_)
            | Failure::Trace { .. }
            | Failure::Plan(_)
            | Failure::PlanFile { .. }
            | Failure::Graph { .. }
            | Failure::File { .. }
            | Failure::Usage(_)
            | Failure::Output(_) => Self::USAGE,
            Failure::Other(_) => Self::NO,
        }
    }
}

fn code_of(kind: ErrorKind) -> u8 {
    match kind {
        ErrorKind::Exhausted | ErrorKind::OverLimit => Failure::NO,
        ErrorKind::Invalid | ErrorKind::NotFound | ErrorKind::Conflict | ErrorKind::Unsupported => Failure::USAGE,
        ErrorKind::Unavailable => Failure::UNREACHABLE,
        ErrorKind::Broken => Failure::BUG,
    }
}

type Outcome = Result<u8, Failure>;

const DONE: Outcome = Ok(0);

impl Cli {
    /// Does it. The answer is an exit code.
    pub fn run(self) -> Outcome {
        let code = self.command.run()?;
        match OUTPUT.lock().unwrap_or_else(PoisonError::into_inner).take() {
            Some(error) => Err(Failure::Output(error)),
            None => Ok(code),
        }
    }
}

impl Command {
    fn run(self) -> Outcome {
        match self {
            Command::Demo(args) => demo::run(&args),
            Command::Serve(args) => serve::run(&args),
            Command::Run(args) => run::run(&args),
            Command::Plan(args) => plan::run(&args),
            Command::Order(args) => order::run(&args),
            Command::Partition(args) => partition::run(&args),
            Command::Replay(args) => replay::run(&args),
            Command::Trace(args) => trace::run(&args),
            Command::Reserve(args) => reserve::run(&args),
            Command::Status(args) => status::run(&args),
            Command::Top(args) => top::run(&args),
            Command::Sessions(args) => sessions::run(&args),
            Command::Revocations(args) => revocations::run(&args),
            Command::Shared(args) => shared::run(&args),
            Command::Limit(args) => limit::run(&args),
            Command::Trim(args) => trim::run(&args),
            Command::Evict(args) => evict::run(&args),
            Command::Drain(args) => drain::run(&args),
            Command::Plans(args) => plans::run(&args),
            Command::Health(args) => health::run(&args),
            Command::Selftest(args) => selftest::run(&args),
            Command::Keep(args) => keep::run(&args),
            Command::Scrub(args) => scrub::run(&args),
            Command::Probe(args) => selftest::probe::run(&args),
            Command::Trainer(args) => trainer::run(&args),
        }
    }
}

/// Prints one JSON object on standard output.
fn print_json(value: &serde_json::Value) {
    outln!("{value}");
}

/// Why standard output could not be written to, if it could not.
static OUTPUT: Mutex<Option<std::io::Error>> = Mutex::new(None);

/// Prints on standard output. Whoever reads it may have seen enough before its end (`| head`), and that is no error; what else goes wrong is told at the end.
fn print_out(text: &impl std::fmt::Display) {
    use std::io::Write as _;
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    match write!(out, "{text}").and_then(|()| out.flush()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            *OUTPUT.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
        }
        _ => {}
    }
}

fn file_error(path: &std::path::Path) -> impl FnOnce(std::io::Error) -> Failure {
    let path = path.to_owned();
    move |source| Failure::File { path, source }
}

/// A time as people write it: `2s`, `0.5s`, `500ms`, and a number alone is of seconds.
fn time(text: &str) -> Result<Duration, String> {
    let text = text.trim();
    let is_number = text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    if is_number { parse_time(&format!("{text}s")) } else { parse_time(text) }
}

/// Whoever has started this process wants it to go on where such a signal would end others: nohup, or a script that has put it behind its back.
fn ignores(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    // Signals count from 1.
    ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

/// Says stop when so much time has passed.
fn stop_after(limit: Duration) -> crate::work::Stop {
    let clock = SystemClock::new();
    std::sync::Arc::new(move || clock.now() >= limit)
}

/// Reads a plan file.
fn read_plan(path: &std::path::Path) -> Result<crate::plan::Plan, Failure> {
    let bytes = std::fs::read(path).map_err(file_error(path))?;
    crate::plan::format::read(&bytes).map_err(|source| Failure::PlanFile { path: path.to_owned(), source })
}
