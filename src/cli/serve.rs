//! `stitchd serve`: the daemon.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::{Args, ValueEnum};
use serde_json::json;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tracing_subscriber::EnvFilter;

use super::{DONE, Failure, Outcome, ignores, print_json};
use crate::clock::{Clock as _, SystemClock};
use crate::daemon::config::{Config, Flags, KeeperIs};
use crate::daemon::{Daemon, DaemonError, Listeners, heap};
use crate::error::chain;
use crate::keeper::manager::{self, Passed, Sockets};
use crate::session::locate::{Environment, SOCKET_NAME};
use crate::session::opening;

/// How long work that was begun may take once the daemon has ended.
const GRACE: Duration = Duration::from_secs(1);

/// A driver may take so many calls' time to open: it looks at every device.
pub(super) const OPENING_CALLS: u32 = 4;

#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  stitchd serve --driver host --device 0=16GiB --runtime-dir /tmp/stitchd\n  stitchd serve --config /etc/stitchd.toml --http 127.0.0.1:9464\n  stitchd serve --print-config > stitchd.toml"
)]
pub(super) struct ServeArgs {
    /// Which driver: auto, cuda, hip, host or sim
    #[arg(long, value_name = "NAME")]
    driver: Option<String>,
    /// Where the sockets and the lock are [default: /run/stitchd]
    #[arg(long, value_name = "DIR", env = "STITCHD_RUNTIME_DIR")]
    runtime_dir: Option<PathBuf>,
    /// Where the journal and the keeper's socket are: clients need nothing of it, and what they mount should not have it [default: with the sockets]
    #[arg(long, value_name = "DIR")]
    state_dir: Option<PathBuf>,
    /// Serve the live page, /metrics, /livez and /readyz here
    #[arg(long, value_name = "ADDR")]
    http: Option<String>,
    /// Read this configuration (TOML); flags win over it
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Own this device, by ordinal or UUID, and no other that is not named; BYTES is the size of a pretended device, and of a GPU the most that is taken
    #[arg(long = "device", value_name = "DEVICE[=BYTES]")]
    devices: Vec<String>,
    /// Print the configuration that would be used, and end
    #[arg(long)]
    print_config: bool,
    /// How log lines on standard error look
    #[arg(long, value_enum, default_value_t = LogFormat::Text)]
    log_format: LogFormat,
    /// What is logged, as tracing filters are written
    #[arg(long, value_name = "FILTER", env = "STITCHD_LOG", default_value = "info")]
    log: String,
    /// End when standard input does: whoever started this daemon is gone
    #[arg(long, hide = true)]
    until_stdin_ends: bool,
    /// Print one JSON object when the daemon serves, or with --print-config
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum LogFormat {
    Text,
    Json,
}

pub(super) fn run(args: &ServeArgs) -> Outcome {
    let clock = SystemClock::new();
    let flags = Flags {
        driver: args.driver.clone(),
        runtime_dir: args.runtime_dir.clone(),
        state_dir: args.state_dir.clone(),
        http: args.http.clone(),
        devices: args.devices.clone(),
    };
    let mut config = Config::load(args.config.as_deref(), &flags)?;
    let environment = Environment::read();
    config.manager =
        Passed { socket: environment.notify_socket, names: environment.passed_names, watchdog: environment.watchdog };
    // Before anything is started, which would hold them too.
    manager::close_on_exec(&config.manager);
    let sockets = manager::take_sockets(&mut config.manager);
    if args.until_stdin_ends {
        // Nobody follows it.
        config.keeper = KeeperIs::None;
    }
    if args.print_config {
        match args.json {
            true => print_json(&config.to_json()),
            false => out!("{}", config.to_toml()),
        }
        return DONE;
    }
    start_log(args)?;
    Environment::read().be_mortal("daemon");
    raise_descriptor_limit();
    heap::in_one_piece();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().thread_name("stitchd").build();
    let runtime = runtime.map_err(|error| Failure::Other(error.into()))?;
    let served = runtime.block_on(serve(config, sockets, args, clock));
    // What is still being done for sessions nobody waits for; a call that hangs in the driver would keep this process from ending.
    runtime.shutdown_timeout(GRACE);
    served?;
    DONE
}

fn start_log(args: &ServeArgs) -> Result<(), Failure> {
    let filter = EnvFilter::try_new(&args.log).map_err(|error| Failure::Usage(format!("--log: {error}")))?;
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    // Where the log cannot be written (its disk is full, say) nothing can be said of that either: saying it would panic.
    let log = log.log_internal_errors(false);
    let started = match args.log_format {
        LogFormat::Text => log.with_ansi(false).try_init(),
        LogFormat::Json => log.json().try_init(),
    };
    started.map_err(|error| Failure::Other(anyhow::anyhow!(error)))
}

/// A descriptor per chunk and one per export: take as many as the system gives.
pub(super) fn raise_descriptor_limit() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::warn!(%error, "the limit of open files cannot be raised");
    }
}

async fn serve(config: Config, sockets: Sockets, args: &ServeArgs, clock: SystemClock) -> Result<(), Failure> {
    // The lock first: a second daemon must not touch a device.
    let listeners = Listeners::open(&config, sockets).await.map_err(DaemonError::from)?;
    let (name, totals, library) = (config.driver, config.pretended_totals(), Environment::read().library);
    let limit = config.driver_deadline * OPENING_CALLS;
    let opening = clock.now();
    let driver = opening::in_time(name.as_str(), limit, move || crate::driver::open(name, &totals, &library))?;
    let name = name.opened_as(&*driver);
    // A driver may take seconds for that, and nobody here can do anything about it: it is told apart.
    let driver_ms = (clock.now() - opening).as_secs_f64() * 1e3;
    let http = listeners.http_address();
    let (socket, manager) = (config.runtime_dir.join(SOCKET_NAME), config.manager.clone());
    let daemon = Daemon::build(config, driver)?;
    // Before anybody hears that it serves: who hears it may tell it to end.
    let hangup = if ignores(libc::SIGHUP) { Ok(None) } else { signal(SignalKind::hangup()).map(Some) };
    match (signal(SignalKind::terminate()), signal(SignalKind::interrupt()), hangup) {
        (Ok(terminate), Ok(interrupt), Ok(hangup)) => {
            drop(tokio::spawn(end_on_signal(Arc::clone(&daemon), terminate, interrupt, hangup, has_terminal())));
        }
        _ => tracing::error!("signals cannot be watched; this daemon ends only when it is killed"),
    }
    if args.until_stdin_ends {
        let daemon = Arc::clone(&daemon);
        std::thread::spawn(move || {
            wait_for_end_of_stdin();
            daemon.end();
        });
    }
    if let Some(address) = http {
        tracing::info!(%address, "HTTP");
    }
    if let Err(error) = manager::say_ready(&manager) {
        tracing::warn!(error = %chain(&error), "the service manager cannot be told that this daemon serves");
    }
    let start_ms = clock.now().as_secs_f64() * 1e3;
    tracing::info!(
        driver = name.as_str(),
        driver_ms,
        start_ms,
        "serves: so long since the start of this process, the opening of the driver included"
    );
    if args.json {
        print_json(&json!({
            "socket": socket,
            "http": http.map(|address| address.to_string()),
            "pid": std::process::id(),
            "driver_ms": driver_ms,
            "start_ms": start_ms,
        }));
    } else {
        outln!("serving at {}", socket.display());
    }
    Ok(daemon.serve(listeners).await?)
}

/// Returns when whoever holds the other end of standard input is gone, or lets go of it.
pub(super) fn wait_for_end_of_stdin() {
    // What is written there is for nobody.
    let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
}

/// This process has a terminal, which may go.
fn has_terminal() -> bool {
    std::fs::File::open("/dev/tty").is_ok()
}

async fn end_on_signal(
    daemon: Arc<Daemon>,
    mut terminate: Signal,
    mut interrupt: Signal,
    mut hangup: Option<Signal>,
    has_terminal: bool,
) {
    // One that says nothing more is as good as none.
    let hung_up = async |hangup: &mut Option<Signal>| match hangup {
        Some(hangup) => drop(hangup.recv().await),
        None => std::future::pending().await,
    };
    loop {
        tokio::select! {
            _ = terminate.recv() => break,
            _ = interrupt.recv() => break,
            () = hung_up(&mut hangup) => {
                if has_terminal {
                    break;
                }
                // Where there is no terminal somebody means that files are to be read anew, as of other daemons.
                tracing::warn!("SIGHUP does nothing here: the configuration is read when a daemon starts; one that is started again takes over what there is, and no job notices");
            }
        }
    }
    daemon.end();
}
