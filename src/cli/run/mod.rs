//! `stitchd run`: a training command with its GPU memory from the daemon, and its program as it is.
//!
//! The command's environment says what is to be done; the Python package does it, in the processes that use a GPU ([`reports`] hears from them). What runs between is the
//! command itself: its input, output, signals and exit code are its own.

mod compare;
mod reports;

use std::ffi::OsString;
use std::os::fd::AsFd as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use clap::{Args, ValueEnum};
use rustix::process::{Pid, Signal, kill_process};
use tokio::runtime::Builder;
use tokio::signal::unix::{SignalKind, signal};

use self::reports::Reports;
use super::{Common, Failure, Outcome, ask, print_json, read_plan, scratch};
use crate::plan::directory;
use crate::session::SessionError;
use crate::session::locate::{AUTO, Environment, as_limit, is_plan_file};
use crate::units::Bytes;
use crate::wire::v1::sessions_client::SessionsClient;
use crate::wire::{PROTOCOL, v1};

/// How often the command is looked at, and how often what its processes report.
const LOOK: Duration = Duration::from_millis(20);
const LOOKS_PER_REPORT: u32 = 25;

/// The comparison takes no longer than so.
const COMPARED_FOR: Duration = Duration::from_secs(20);

#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  stitchd run -- python train.py\n  stitchd run -- torchrun --nproc-per-node 8 train.py                # plans are made while the job runs, and stored (stitchd plans)\n  stitchd run --plan none -- python train.py                         # without plans\n  stitchd run --record run.stitchtrace -- python train.py            # then: stitchd plan run.PID.DEVICE.stitchtrace -o job.plan\n  stitchd run --plan job.plan --without-daemon stop -- python train.py\n  stitchd run --guarantee 20GiB --limit 60GiB -- python train.py     # 20 GiB whenever it asks, 60 at most\n  stitchd run --admit 60s -- python train.py                         # takes turns with others at the bounds of its iterations\n\nThe exit code is the command's own; 2 if it cannot be started or an argument is wrong, 3 if there is no daemon and that is to stop it. With --json what the command prints goes to standard error."
)]
pub(super) struct RunArgs {
    /// Serve from a plan: `auto` makes it while the job runs, `none` does without; else a plan file,
    /// or a directory with one for each process (RANK, WORLD_SIZE and what the job does first select
    /// it) [default: STITCHD_PLAN, or auto]
    #[arg(long, value_name = "auto|none|FILE")]
    plan: Option<PathBuf>,
    /// Record what each process allocates on each device; PID and device are put into the name
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
    /// What happens where memory cannot come from a daemon
    #[arg(long, value_name = "WAY", default_value = "pytorch")]
    without_daemon: WithoutDaemon,
    /// Bytes that each process may never pass, all devices together
    #[arg(long, value_name = "SIZE")]
    limit: Option<Bytes>,
    /// Bytes of each device that each process is guaranteed: they come when it asks, whoever has them then
    #[arg(long, value_name = "SIZE")]
    guarantee: Option<Bytes>,
    /// Its place among others: higher is served first. No more than the daemon's `priority_max`, which is 0 unless somebody has set it, or its tenant's
    #[arg(long, value_name = "N")]
    priority: Option<u32>,
    /// Whose memory it is, of the tenants of the daemon's configuration that this user may be
    #[arg(long, value_name = "NAME")]
    tenant: Option<String>,
    /// Each iteration waits before it begins, so long at most, until what it needs at its peak is guaranteed: jobs whose peaks are together more than the device has take turns
    #[arg(long, value_name = "TIME", value_parser = super::time)]
    admit: Option<Duration>,
    /// Do not replay the job's beginning through a model of PyTorch's allocator at the end, and record nothing for that
    #[arg(long)]
    no_compare: bool,
    /// Say nothing but what goes wrong
    #[arg(long, short)]
    quiet: bool,
    #[command(flatten)]
    common: Common,
    /// The command
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum WithoutDaemon {
    /// The program goes on with PyTorch's own allocator
    Pytorch,
    /// Each process takes its memory from the GPU's driver by itself
    Private,
    /// The program does not run; where its PyTorch does not look for the package (before 2.5, TORCH_DEVICE_BACKEND_AUTOLOAD=0) nobody can stop it
    Stop,
}

pub(super) fn run(args: &RunArgs) -> Outcome {
    // Before anything begins that takes long.
    if let Some(path) = args.plan.as_ref().filter(|plan| is_plan_file(plan.as_os_str())) {
        if path.is_dir() {
            // Whose each plan is its process knows.
            let found = directory::listed(path);
            let found = found.map_err(|error| Failure::Usage(format!("--plan: {}: {error}", path.display())))?;
            if !args.quiet {
                for (path, why) in found.unusable {
                    say(&format!("stitchd: {} is no plan that can be used: {why}\n", path.display()));
                }
                if found.usable == 0 {
                    let directory = path.display();
                    say(&format!(
                        "stitchd: {directory} has no file *.plan that can be used: the program goes on without a plan\n"
                    ));
                }
            }
        } else if path.exists() && !path.is_file() {
            return Err(Failure::Usage(format!("--plan: {}: it is no file", path.display())));
        } else {
            read_plan(path)?;
        }
    }
    args.limit.map(as_limit).transpose().map_err(|error| Failure::Usage(format!("--limit: {error}")))?;
    if let Some(record) = &args.record {
        let directory = absolute(record).parent().map(Path::to_path_buf).unwrap_or_default();
        // One of a name that is filled in for each process may come later.
        if !directory.is_dir() && !directory.to_string_lossy().contains('{') {
            return Err(Failure::Usage(format!("--record: there is no directory {}", directory.display())));
        }
    }
    let socket = args.common.socket();
    if let Err(failure) = ask::status(&socket) {
        go_without(args, failure)?;
    }
    check_terms(args, &socket)?;
    let scratch = Scratch::new()?;
    let mut reports = Reports::new(&scratch.0, args.quiet);
    let runtime = Builder::new_current_thread().enable_all().build().map_err(|error| Failure::Other(error.into()))?;
    let status = runtime.block_on(with_command(command(args, &socket, &scratch.0), &mut reports))?;
    reports.look();
    let work = (!args.no_compare).then(|| compare::Work::of(&reports, &scratch.0, args.record.as_deref()));
    let compared = work.map_or_else(|| Ok(Vec::new()), |work| runtime.block_on(compared(work)))?;
    if args.common.json {
        print_json(&reports.to_json(code(status), &compared));
    } else if !args.quiet {
        say(&reports.summary(&compared));
        if let Some(record) = &args.record {
            say(&reports.recorded(record.as_os_str()));
        }
    }
    Ok(code(status))
}

/// Says something to people, and lives on if nobody can hear it: the command's exit code is what counts.
fn say(text: &str) {
    use std::io::Write as _;
    let _ = std::io::stderr().lock().write_all(text.as_bytes());
}

/// What PyTorch's allocator would have reserved, as far as that is known in [`COMPARED_FOR`], or until somebody wants this command to end.
async fn compared(work: compare::Work) -> Result<Vec<compare::Compared>, Failure> {
    let (tell, told) = tokio::sync::oneshot::channel();
    // It is left behind if it takes too long, and ends with the process.
    std::thread::spawn(move || tell.send(work.done()));
    let (mut interrupt, mut terminate) = (watch(SignalKind::interrupt())?, watch(SignalKind::terminate())?);
    tokio::select! {
        compared = told => Ok(compared.unwrap_or_default()),
        _ = interrupt.recv() => Ok(Vec::new()),
        _ = terminate.recv() => Ok(Vec::new()),
        () = tokio::time::sleep(COMPARED_FOR) => Ok(Vec::new()),
    }
}

fn watch(kind: SignalKind) -> Result<tokio::signal::unix::Signal, Failure> {
    signal(kind).map_err(|error| Failure::Other(error.into()))
}

/// Where the command's processes report, until this command ends.
#[derive(Debug)]
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Result<Scratch, Failure> {
        scratch::directory("stitchd-run").map(Scratch).map_err(|error| Failure::Other(error.into()))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // What cannot be removed is some KiB of temporary files.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// There is no daemon, or none that answers: says what happens, unless that is the end.
fn go_without(args: &RunArgs, failure: Failure) -> Result<(), Failure> {
    let goes_on = match (&failure, args.without_daemon) {
        // One that is not for this user is none to it.
        (Failure::Session(SessionError::NoDaemon { .. } | SessionError::Forbidden { .. }), WithoutDaemon::Pytorch) => {
            "the program keeps PyTorch's own allocator"
        }
        (Failure::Session(SessionError::NoDaemon { .. }), WithoutDaemon::Private) => {
            "each process takes its memory itself"
        }
        _ => return Err(failure),
    };
    if !args.quiet {
        say(&format!("stitchd: {failure}; until then {goes_on}\n"));
    }
    Ok(())
}

/// Has the daemon say whether it gives such a session what it is to ask for: before a program has begun that would hear it with its first tensor.
fn check_terms(args: &RunArgs, socket: &Path) -> Result<(), Failure> {
    if args.limit.is_none() && args.guarantee.is_none() && args.tenant.is_none() {
        return Ok(());
    }
    let wanted = v1::OpenRequest {
        protocol: PROTOCOL,
        name: "stitchd run".into(),
        limit_bytes: args.limit.map_or(0, Bytes::get),
        priority: args.priority.unwrap_or(0),
        client_version: env!("CARGO_PKG_VERSION").into(),
        tenant: args.tenant.clone().unwrap_or_default(),
        answers: false,
        guarantee_bytes: args.guarantee.map(Bytes::get),
        pod: None,
    };
    let opened = ask::ask(socket, Duration::ZERO, async |channel| {
        let mut sessions = SessionsClient::new(channel);
        let opened = sessions.open(wanted).await?.into_inner();
        let close = v1::CloseRequest { session_id: opened.session_id, secret: opened.secret };
        sessions.close(close).await
    });
    match opened {
        // Without a daemon nobody gives anything.
        Ok(_) | Err(Failure::Session(SessionError::NoDaemon { .. } | SessionError::Forbidden { .. })) => Ok(()),
        Err(Failure::Session(SessionError::Refused { message, .. })) => Err(Failure::Usage(message)),
        Err(failure) => Err(failure),
    }
}

/// The command with what its processes are to know.
fn command(args: &RunArgs, socket: &Path, directory: &Path) -> Command {
    let (program, arguments) = args.command.split_first().expect("there is a command: clap asks for it");
    let environment = Environment::read();
    let mut command = Command::new(program);
    command.args(arguments).env("STITCHD_REPORTS", directory).env("STITCHD_SOCKET", absolute(socket));
    command.env("STITCHD_TORCH", if args.without_daemon == WithoutDaemon::Stop { "require" } else { "1" });
    let alone = if args.without_daemon == WithoutDaemon::Private { "private" } else { "refuse" };
    command.env("STITCHD_WITHOUT_DAEMON", alone);
    let plan = match &args.plan {
        Some(plan) if is_plan_file(plan.as_os_str()) => Some(absolute(plan)),
        Some(plan) => Some(plan.clone()),
        None => environment.plan.is_none().then(|| PathBuf::from(AUTO)),
    };
    command.envs(plan.map(|plan| ("STITCHD_PLAN", plan)));
    let exact = |bytes: &Bytes| bytes.get().to_string();
    let terms = [
        ("STITCHD_LIMIT", args.limit.as_ref().map(exact)),
        ("STITCHD_GUARANTEE", args.guarantee.as_ref().map(exact)),
        ("STITCHD_PRIORITY", args.priority.as_ref().map(u32::to_string)),
        ("STITCHD_TENANT", args.tenant.clone()),
        ("STITCHD_ADMIT", args.admit.map(|wait| format!("{}ms", wait.as_millis()))),
    ];
    for (name, value) in terms {
        command.envs(value.map(|value| (name, value)));
    }
    if let Some(record) = &args.record {
        command.env("STITCHD_RECORD", absolute(record)).env_remove("STITCHD_RECORD_LIMIT");
    } else if !args.no_compare && environment.record.is_none() {
        command.env("STITCHD_RECORD", directory.join(compare::RECORDING));
        command.env("STITCHD_RECORD_LIMIT", compare::COMPARED_LEN_MAX.to_string());
    }
    let own = std::env::current_exe().ok();
    // Whoever names one means it.
    if let Some(library) = own.as_deref().filter(|_| environment.client_library.is_none()).and_then(library_beside) {
        command.env("STITCHD_LIBRARY", library);
    }
    if let Some(boot) = own.as_deref().and_then(boot_beside) {
        // At the end: nothing of it hides what is the program's.
        let mut places: Vec<PathBuf> = environment.python_path.iter().flat_map(std::env::split_paths).collect();
        places.push(boot);
        if let Ok(joined) = std::env::join_paths(places) {
            command.env("PYTHONPATH", joined);
        }
    }
    if args.common.json {
        // Standard output is for one JSON object.
        let errors = std::io::stderr().as_fd().try_clone_to_owned();
        command.stdout(errors.map_or_else(|_| Stdio::null(), Stdio::from));
    }
    command
}

fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

/// The client library of the same build, if it lies beside the program or where a package of the system has it.
fn library_beside(own: &Path) -> Option<PathBuf> {
    const NAME: &str = "libstitchd_client.so";
    let beside = own.parent()?;
    [beside.join(NAME), beside.join("../lib").join(NAME)].into_iter().find(|path| path.is_file())
}

/// The directory that lets `import torch` find the package where that is not installed: of the checkout that the program was built in, or of the installation that it belongs to.
fn boot_beside(own: &Path) -> Option<PathBuf> {
    let beside = own.parent()?;
    let checkout = beside.join("../../client/python");
    let installed = std::fs::read_dir(beside.join("../lib")).into_iter().flatten().flatten();
    let installed = installed.map(|entry| entry.path().join("site-packages"));
    let boot = |package: PathBuf| package.join("stitchd/boot");
    std::iter::once(checkout)
        .chain(installed)
        .map(boot)
        .find(|boot| boot.is_dir())
        .map(|boot| boot.canonicalize().unwrap_or(boot))
}

/// Runs the command to its end, and listens to its processes meanwhile.
async fn with_command(mut command: Command, reports: &mut Reports) -> Result<ExitStatus, Failure> {
    let [mut terminate, mut hang_up] = [watch(SignalKind::terminate())?, watch(SignalKind::hangup())?];
    // Schedulers of clusters announce an end by these.
    let [mut user1, mut user2] = [watch(SignalKind::user_defined1())?, watch(SignalKind::user_defined2())?];
    // A terminal sends this to the command, too, which may have its own answer; this program waits for that.
    let _interrupts = watch(SignalKind::interrupt())?;
    let mut child = start(&mut command)?;
    let mut looks = 0;
    loop {
        if let Some(status) = child.try_wait().map_err(|error| Failure::Other(error.into()))? {
            return Ok(status);
        }
        tokio::select! {
            _ = terminate.recv() => pass_on(&child, Signal::TERM),
            _ = hang_up.recv() => pass_on(&child, Signal::HUP),
            _ = user1.recv() => pass_on(&child, Signal::USR1),
            _ = user2.recv() => pass_on(&child, Signal::USR2),
            () = tokio::time::sleep(LOOK) => {}
        }
        looks += 1;
        if looks % LOOKS_PER_REPORT == 0 {
            reports.look();
        }
    }
}

fn start(command: &mut Command) -> Result<Child, Failure> {
    let started = command.spawn();
    started.map_err(|source| Failure::Usage(format!("{}: {source}", Path::new(command.get_program()).display())))
}

fn pass_on(child: &Child, signal: Signal) {
    if let Some(pid) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
        // It may have ended just now.
        let _ = kill_process(pid, signal);
    }
}

/// What a shell would say.
fn code(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal)).unwrap_or(1);
    u8::try_from(code).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_package_is_found_beside_a_build_and_in_an_installation() {
        let place = tempfile::tempdir().unwrap();
        let made = |path: &str| {
            std::fs::create_dir_all(place.path().join(path)).unwrap();
            place.path().join(path)
        };
        let own = made("checkout/target/release").join("stitchd");
        assert_eq!(boot_beside(&own), None);
        assert_eq!(boot_beside(&own).or_else(|| library_beside(&own)), None);
        let boot = made("checkout/client/python/stitchd/boot");
        assert_eq!(boot_beside(&own), Some(boot.canonicalize().unwrap()));
        std::fs::write(own.with_file_name("libstitchd_client.so"), "").unwrap();
        assert_eq!(library_beside(&own), Some(own.with_file_name("libstitchd_client.so")));
        let own = made("venv/bin").join("stitchd");
        let boot = made("venv/lib/python3.12/site-packages/stitchd/boot");
        assert_eq!(boot_beside(&own), Some(boot.canonicalize().unwrap()));
    }
}
