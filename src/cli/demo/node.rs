//! The processes of the demo: the daemon and the trainers, started from this very binary.

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use indicatif::ProgressBar;
use serde_json::Value;
use tokio::signal::unix::{SignalKind, signal};

use super::cast::{Act, DEVICE};
use super::show::Show;
use crate::cli::trainer::WAITING;
use crate::cli::{ask, scratch};
use crate::clock::{Clock as _, SystemClock};
use crate::driver::DriverName;
use crate::limits;
use crate::session::locate::SOCKET_NAME;
use crate::units::Bytes;
use crate::wire::v1;
use crate::wire::v1::plans_client::PlansClient;

/// How long anything may take that should take a moment.
const PATIENCE: Duration = Duration::from_secs(60);

/// As shells count a process that Ctrl-C ended.
const INTERRUPTED: i32 = 130;

/// The daemon and its scratch directory. Neither outlives this: children end when their standard input does, and what signals leave behind is cleaned up. Only SIGKILL
/// leaves the directory.
#[derive(Debug)]
pub(super) struct Node {
    daemon: Child,
    directory: PathBuf,
    keep: bool,
    driver: DriverName,
    /// What others held before anything began: other processes, and the context of the process that clears new memory.
    foreign: Bytes,
    /// Where its page is.
    http: String,
}

/// What was left when all had finished.
#[derive(Debug)]
pub(super) struct End {
    pub(super) budget: Bytes,
    pub(super) peak_leased: Bytes,
    pub(super) lost: Bytes,
}

/// What became of the victim's memory.
#[derive(Debug, Default)]
pub(super) struct Killed {
    pub(super) returned: Bytes,
    pub(super) seconds: f64,
    /// The most bytes that all processes together really had, seen whenever one of them said something.
    pub(super) resident: Bytes,
}

impl Drop for Node {
    fn drop(&mut self) {
        // Gone already if all went well.
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
        if !self.keep {
            let _ = std::fs::remove_dir_all(&self.directory);
        }
    }
}

/// The user has seen enough: what main would clean up is cleaned up here.
#[expect(clippy::disallowed_methods, reason = "main waits for trainers, and is not asked")]
fn end_now(daemon: rustix::process::Pid, directory: Option<PathBuf>) {
    // It may have ended already.
    let _ = rustix::process::kill_process(daemon, rustix::process::Signal::KILL);
    if let Some(directory) = directory {
        let _ = std::fs::remove_dir_all(directory);
    }
    std::process::exit(INTERRUPTED);
}

fn this_binary() -> anyhow::Result<PathBuf> {
    std::env::current_exe().context("finding this binary")
}

impl Node {
    pub(super) fn start(driver: DriverName, http: &str, keep: bool, show: &Show) -> anyhow::Result<Node> {
        let chunk_len = chunk_len_for(rustix::process::getrlimit(rustix::process::Resource::Nofile).maximum)?;
        let directory = scratch::directory("stitchd-demo")?;
        let config = directory.join("stitchd.toml");
        std::fs::write(&config, format!("ladder = ['{chunk_len}', '32 MiB', '256 MiB']\n"))
            .context("writing a file")?;
        if chunk_len > limits::CHUNK_LEN_MIN {
            show.say(&format!(
                "Few open files are allowed here (ulimit -Hn), so processes grow in chunks of {chunk_len}."
            ));
        }
        let log = std::fs::File::create(directory.join("daemon.log")).context("creating the daemon's log")?;
        let daemon = Command::new(this_binary()?)
            .args(["serve", "--json", "--driver", driver.as_str(), "--http", http])
            .arg("--config")
            .arg(&config)
            .arg("--runtime-dir")
            .arg(&directory)
            .arg(format!("--device=0={}", DEVICE.get()))
            .arg("--until-stdin-ends")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .context("starting the daemon")?;
        let mut node = Node { daemon, directory, keep, driver, foreign: Bytes::ZERO, http: String::new() };
        node.clean_up_on_signals()?;
        let stdout = node.daemon.stdout.take().context("the daemon has a standard output")?;
        let mut ready = String::new();
        BufReader::new(stdout).read_line(&mut ready).context("waiting for the daemon")?;
        ensure!(!ready.is_empty(), "the daemon did not start:\n{}", node.log());
        let said: serde_json::Value = serde_json::from_str(&ready).context("what the daemon says when it serves")?;
        node.http = said["http"].as_str().unwrap_or_default().to_owned();
        node.foreign = Bytes::new(node.device()?.foreign_bytes);
        Ok(node)
    }

    /// Address and port of its page.
    pub(super) fn http(&self) -> &str {
        &self.http
    }

    /// One allocation of so many is marked and checked. Bytes of a GPU are read and written by copies, some 8 µs each on an H200, and all trainers' one after the other: of all three million the demo would be minutes.
    fn mark_every(&self) -> u32 {
        if self.driver.is_pretended() { 1 } else { 32 }
    }

    /// What the demo runs on, in a sentence.
    pub(super) fn introduce(&self) -> anyhow::Result<String> {
        let device = self.device()?;
        let model = device.device.map(|device| device.model).unwrap_or_default();
        let budget = Bytes::new(device.budget_bytes);
        Ok(if self.driver.is_pretended() {
            format!(
                "A pretended device of {budget} in host memory. Memory is sparse: only pages that carry patterns are really there."
            )
        } else {
            let (foreign, every) = (self.foreign, self.mark_every());
            format!(
                "{model}, of which the daemon may take {budget}; others hold {foreign} of that. One allocation of {every} is marked and checked."
            )
        })
    }

    /// Ctrl-C, or a polite end: the daemon and the directory go, too.
    fn clean_up_on_signals(&self) -> anyhow::Result<()> {
        let pid = rustix::process::Pid::from_child(&self.daemon);
        let (directory, keep) = (self.directory.clone(), self.keep);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let mut signals = {
            let _inside = runtime.enter();
            [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()].map(signal)
        };
        std::thread::spawn(move || {
            let [interrupt, terminate, hangup] = &mut signals;
            let (Ok(interrupt), Ok(terminate), Ok(hangup)) = (interrupt, terminate, hangup) else { return };
            runtime.block_on(async {
                tokio::select! {
                    _ = interrupt.recv() => {}
                    _ = terminate.recv() => {}
                    _ = hangup.recv() => {}
                }
            });
            end_now(pid, Some(directory).filter(|_| !keep));
        });
        Ok(())
    }

    pub(super) fn daemon_pid(&self) -> u32 {
        self.daemon.id()
    }

    pub(super) fn directory(&self) -> &Path {
        &self.directory
    }

    pub(super) fn socket(&self) -> PathBuf {
        self.directory.join(SOCKET_NAME)
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.directory.join("daemon.log")).unwrap_or_default()
    }

    fn status(&self) -> anyhow::Result<v1::StatusReply> {
        ask::status(&self.socket()).map_err(anyhow::Error::from)
    }

    fn device(&self) -> anyhow::Result<v1::DeviceStatus> {
        self.status()?.devices.into_iter().next().context("the daemon has a device")
    }

    /// As `stitchd reserve` would. Says how many chunks it took.
    pub(super) fn reserve(&self, act: &Act) -> anyhow::Result<u64> {
        let uuid = self.device()?.device.context("the device has a name")?.uuid;
        let put = v1::PutPlanRequest { plan: act.plan_bytes.clone(), name: act.role.name.to_owned() };
        let socket = self.socket();
        ask::ask(&socket, Duration::ZERO, async |channel| PlansClient::new(channel).put(put).await)?;
        let reserve = v1::ReservePlanRequest { plan_id: act.plan.0, device_uuid: uuid, wait_ms: 0 };
        let reserved =
            ask::ask(&socket, Duration::ZERO, async |channel| PlansClient::new(channel).reserve(reserve).await)?;
        Ok(reserved.chunks)
    }

    pub(super) fn troupe(&self, acts: Vec<Act>, repeat: u32, show: &Show) -> anyhow::Result<Troupe> {
        let (send, heard) = mpsc::channel();
        let mut players = Vec::new();
        for (number, act) in acts.into_iter().enumerate() {
            let bar = show.bar(act.role.name);
            let process = if act.role.is_late { None } else { Some(self.trainer(&act, number, repeat, &send)?) };
            players.push(Player { act, process, bar, is_over: false });
        }
        Ok(Troupe { players, heard, send, repeat })
    }

    fn trainer(&self, act: &Act, number: usize, repeat: u32, heard: &mpsc::Sender<Heard>) -> anyhow::Result<Child> {
        let log = std::fs::File::create(self.directory.join(format!("{}.log", act.role.name)))?;
        // Who is there from the start gives nothing back and stays until the late one has its memory; the victim works
        // until it is killed. So the late one waits for the victim's memory, whichever is faster.
        let until = match (act.role.is_victim, act.role.is_late) {
            (true, _) => &["--endless", "--keep-idle"][..],
            (false, false) => &["--hold", "--keep-idle"],
            (false, true) => &[],
        };
        let mut trainer = Command::new(this_binary()?)
            .args(["trainer", "--until-unheard"])
            .args(until)
            .arg("--socket")
            .arg(self.socket())
            .arg("--trace")
            .arg(&act.trace_file)
            .arg("--plan")
            .arg(&act.plan_file)
            .arg(format!("--name={}", act.role.name))
            .arg(format!("--repeat={repeat}"))
            .arg(format!("--wait={}", if act.role.is_late { PATIENCE.as_secs() } else { 5 }))
            .arg(format!("--tag={}", number + 1))
            .arg(format!("--mark-every={}", self.mark_every()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .context("starting a trainer")?;
        let stdout = trainer.stdout.take().context("a trainer has a standard output")?;
        let heard = heard.clone();
        std::thread::spawn(move || listen(number, stdout, &heard));
        Ok(trainer)
    }

    /// Ends the daemon, and says what it still had.
    pub(super) fn end(mut self, show: &Show) -> anyhow::Result<End> {
        // The last session's process is gone; the kernel tells the daemon in its own time.
        let clock = SystemClock::new();
        let device = loop {
            let device = self.device()?;
            let is_back = device.available_bytes == device.budget_bytes && device.foreign_bytes <= self.foreign.get();
            if is_back || clock.now() > PATIENCE {
                break device;
            }
            std::thread::sleep(Duration::from_millis(20));
        };
        let total = device.device.as_ref().map_or(0, |device| device.total_bytes);
        let end = End {
            budget: Bytes::new(total),
            peak_leased: Bytes::new(device.peak_leased_bytes),
            lost: Bytes::new(total.saturating_sub(device.available_bytes)).saturating_sub(self.foreign),
        };
        let pid = rustix::process::Pid::from_child(&self.daemon);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).context("ending the daemon")?;
        let status = self.daemon.wait().context("waiting for the daemon")?;
        ensure!(status.success(), "the daemon ended with {status}:\n{}", self.log());
        let log = self.log();
        let complaints: Vec<_> = log.lines().filter(|line| line.contains("ERROR") || line.contains("WARN")).collect();
        ensure!(complaints.is_empty(), "the daemon complained:\n{}", complaints.join("\n"));
        show.say("daemon    ended");
        Ok(end)
    }
}

/// The smallest chunks that the demo can have where a process may have so many files open: a chunk of the host driver is one, and one more when it is
/// exported.
fn chunk_len_for(files_max: Option<u64>) -> anyhow::Result<Bytes> {
    const FEW: u64 = 16_384;
    const TOO_FEW: u64 = 4_096;
    match files_max {
        Some(max) if max < TOO_FEW => {
            bail!("the demo needs {TOO_FEW} open files and this system allows {max}; raise the hard limit (ulimit -Hn)")
        }
        Some(max) if max < FEW => Ok(Bytes::mib(8)),
        _ => Ok(limits::CHUNK_LEN_MIN),
    }
}

/// What a trainer said, or that it says nothing more.
#[derive(Debug)]
struct Heard {
    player: usize,
    line: Option<Value>,
}

fn listen(player: usize, stdout: ChildStdout, heard: &mpsc::Sender<Heard>) {
    for line in BufReader::new(stdout).lines().map_while(Result::ok) {
        // A line that was cut by a kill says nothing.
        if let Ok(line) = serde_json::from_str(&line) {
            let _ = heard.send(Heard { player, line: Some(line) });
        }
    }
    let _ = heard.send(Heard { player, line: None });
}

#[derive(Debug)]
struct Player {
    act: Act,
    process: Option<Child>,
    bar: ProgressBar,
    is_over: bool,
}

impl Player {
    fn is_half_way(&self) -> bool {
        self.bar.position() * 2 >= self.bar.length().unwrap_or(u64::MAX)
    }
}

/// The trainers.
#[derive(Debug)]
pub(super) struct Troupe {
    players: Vec<Player>,
    heard: mpsc::Receiver<Heard>,
    send: mpsc::Sender<Heard>,
    repeat: u32,
}

impl Drop for Troupe {
    fn drop(&mut self) {
        for process in self.players.iter_mut().filter_map(|player| player.process.as_mut()) {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

impl Troupe {
    /// Runs until all have finished but the victim, which is killed half way, when the late one waits for memory.
    pub(super) fn play(&mut self, node: &mut Node, show: &Show) -> anyhow::Result<Killed> {
        let mut killed = None;
        let mut resident_max = Bytes::ZERO;
        while self.players.iter().any(|player| !player.is_over) {
            let heard = self.heard.recv_timeout(PATIENCE).context("the trainers have fallen silent")?;
            match heard.line {
                Some(line) => self.note(heard.player, &line),
                None => self.note_end(heard.player, node)?,
            }
            resident_max = resident_max.max(self.resident(node));
            // Half way the others have taken all they need: there is not enough for the late one, and it waits.
            if self.players.iter().all(|player| player.act.role.is_late || player.is_half_way()) {
                self.start_late(node, show)?;
            }
            if killed.is_none() && self.is_time_to_kill(node)? {
                killed = Some(self.kill(node, show)?);
                self.release_holders();
            }
            // The victim works until it is killed: there is nothing to wait for.
            if killed.is_none() && self.players.iter().any(|player| player.act.role.is_late && player.is_over) {
                break;
            }
        }
        let killed = killed.context("no trainer was killed: the late one never had to wait")?;
        Ok(Killed { resident: resident_max, ..killed })
    }

    /// The victim is in the middle of its work, and the late one waits for memory, as the daemon sees it too.
    fn is_time_to_kill(&self, node: &Node) -> anyhow::Result<bool> {
        let is_working = self.players.iter().any(|player| player.act.role.is_victim && player.is_half_way());
        let is_waiting = self.players.iter().any(|player| player.act.role.is_late && player.bar.message() == WAITING);
        Ok(is_working && is_waiting && node.status()?.waiting_requests > 0)
    }

    /// Lets those end that hold their memory.
    fn release_holders(&mut self) {
        for process in self.players.iter_mut().filter_map(|player| player.process.as_mut()) {
            drop(process.stdin.take());
        }
    }

    fn note(&mut self, number: usize, line: &Value) {
        let player = &mut self.players[number];
        let bytes = |key: &str| line.get(key).and_then(Value::as_u64).map(Bytes::new);
        if let Some(state) = line.get("state").and_then(Value::as_str) {
            player.bar.set_message(state.to_owned());
        }
        if let (Some(live), Some(leased)) = (bytes("live_bytes"), bytes("leased_bytes")) {
            player.act.seen_live = player.act.seen_live.max(live);
            player.act.seen_leased = player.act.seen_leased.max(leased);
            player.bar.set_message(format!("live {live}, leased {leased}"));
        }
        if let (Some(done), Some(total)) =
            (line.get("done").and_then(Value::as_u64), line.get("total").and_then(Value::as_u64))
        {
            player.bar.set_length(total);
            player.bar.set_position(done);
        }
        if let Some(report) = line.get("report") {
            player.act.report = Some(report.clone());
            player.bar.set_position(player.bar.length().unwrap_or(0));
            player.bar.set_message("all patterns held");
        }
    }

    fn note_end(&mut self, number: usize, node: &Node) -> anyhow::Result<()> {
        let player = &mut self.players[number];
        player.is_over = true;
        let process = player.process.as_mut().context("only who was started ends")?;
        let status = process.wait()?;
        let name = player.act.role.name;
        if player.act.was_killed {
            player.bar.abandon_with_message("killed");
            return Ok(());
        }
        if !status.success() {
            let log = std::fs::read_to_string(node.directory().join(format!("{name}.log"))).unwrap_or_default();
            bail!("trainer {name} failed ({status}):\n{log}");
        }
        player.bar.finish_with_message("done, all patterns held");
        Ok(())
    }

    fn start_late(&mut self, node: &Node, show: &Show) -> anyhow::Result<()> {
        for (number, player) in self.players.iter_mut().enumerate() {
            if player.process.is_none() {
                player.process = Some(node.trainer(&player.act, number, self.repeat, &self.send)?);
                let left = Bytes::new(node.device()?.available_bytes);
                show.say(&format!(
                    "late      {} wants {} and has to wait: {left} are left",
                    player.act.role.name, player.act.pool_len
                ));
            }
        }
        Ok(())
    }

    /// SIGKILL in the middle of its work, and a look at how long its memory takes to come back.
    fn kill(&mut self, node: &Node, show: &Show) -> anyhow::Result<Killed> {
        let before = node.status()?;
        let mut players = self.players.iter_mut();
        let player = players.find(|player| player.act.role.is_victim).context("the cast has a victim")?;
        let process = player.process.as_mut().context("the victim was started")?;
        let clock = SystemClock::new();
        process.kill().context("killing a trainer")?;
        player.act.was_killed = true;
        let returned = loop {
            let returned = node.status()?.returned_by_death_bytes - before.returned_by_death_bytes;
            if returned > 0 {
                break Bytes::new(returned);
            }
            ensure!(clock.now() < PATIENCE, "the memory of a killed trainer does not come back");
            std::thread::sleep(Duration::from_millis(1));
        };
        let seconds = clock.now().as_secs_f64();
        show.say(&format!(
            "killed    {} half way: {returned} came back in {:.0} ms",
            player.act.role.name,
            seconds * 1000.0
        ));
        Ok(Killed { returned, seconds, resident: Bytes::ZERO })
    }

    /// What all processes really have: shared pages count where they are mapped, so this is at most too much.
    fn resident(&self, node: &Node) -> Bytes {
        let processes = self.players.iter().filter_map(|player| player.process.as_ref()).map(Child::id);
        processes.chain([node.daemon_pid()]).map(resident_of).sum()
    }

    pub(super) fn finish(mut self) -> Vec<Act> {
        let players = std::mem::take(&mut self.players);
        players.into_iter().map(|player| player.act).collect()
    }
}

fn resident_of(pid: u32) -> Bytes {
    let statm = std::fs::read_to_string(format!("/proc/{pid}/statm")).unwrap_or_default();
    let pages = statm.split_whitespace().nth(1).and_then(|pages| pages.parse::<u64>().ok()).unwrap_or(0);
    // The kernel counts its own pages, which are 4 to 64 KiB.
    limits::page_size().checked_mul(pages).unwrap_or(Bytes::ZERO)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_few_files_are_allowed_chunks_are_larger() {
        assert_eq!(chunk_len_for(None).unwrap(), Bytes::mib(2));
        assert_eq!(chunk_len_for(Some(1 << 20)).unwrap(), Bytes::mib(2));
        assert_eq!(chunk_len_for(Some(4_096)).unwrap(), Bytes::mib(8));
        let error = chunk_len_for(Some(1_024)).unwrap_err().to_string();
        assert!(error.contains("1024") && error.contains("ulimit"), "{error}");
    }
}
