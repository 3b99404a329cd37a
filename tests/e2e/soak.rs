//! Two trainers whose peaks are in turn, and more together than the device has, and a reader of shared weights; any of them is killed at a random moment, again and again.
//!
//! `STITCHD_SOAK_KILLS=1000 cargo test --release --test e2e soak -- --nocapture` is the long one, some twenty minutes; without the variable it is a short one.

use std::io::{BufRead as _, BufReader};
use std::process::Child;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use stitchd::rng::Rng;

use crate::support::{SHARES, TestDaemon, python, variable};

const MIB: u64 = 1 << 20;
const DEVICE_MIB: u64 = 96;
/// Kills where nobody says how many.
const FEW: u64 = 12;

/// Weights that stay, and peaks of up to 72 MiB between: every byte has the process's own mark, and fresh memory none but that.
const TRAINER: &str = "
import random
rng = random.Random(os.getpid())
tag = bytes([os.getpid() % 251 + 1])
def take(mib):
    p = lib.stitch_malloc(mib * MIB, 0, None)
    if not p:
        say('refused')
        return None
    if peek(p, mib * MIB).strip(b'\\0' + tag):
        say('BROKEN: bytes of another')
        sys.exit(1)
    poke(p, tag * (mib * MIB))
    return p, mib
def check(block):
    if peek(block[0], block[1] * MIB) != tag * (block[1] * MIB):
        say('BROKEN: a pattern')
        sys.exit(1)
weights = None
while weights is None:
    weights = take(8)
while True:
    peak = []
    for _ in range(rng.randint(2, 6)):
        block = take(rng.randint(2, 12))
        if block is None:
            break
        peak.append(block)
    time.sleep(rng.random() * 0.02)
    for block in peak:
        check(block)
        free(block[0], block[1] * MIB)
    check(weights)
    say('round')
    time.sleep(rng.random() * 0.02)
";

/// The weights of all are one memory, which whoever comes first publishes; they are read all the time.
const READER: &str = "
r = Range()
while True:
    if lib.stitch_share_attach(b'weights', 0, None, 0, ctypes.byref(r)) != 0:
        if lib.stitch_share_create(8 * MIB, 0, ctypes.byref(r)) != 0:
            time.sleep(0.02)
            continue
        poke(r.address, bytes([0x5e]) * (8 * MIB))
        if lib.stitch_share_publish(r.address, b'weights', 8 * MIB, 60000, 0, None, 0, ctypes.byref(r)) != 0:
            say('refused')
            sys.exit(1)
    for _ in range(20):
        if peek(r.address, 8 * MIB) != bytes([0x5e]) * (8 * MIB):
            say('BROKEN: shared weights')
            sys.exit(1)
        say('read')
        time.sleep(0.02)
    lib.stitch_share_close(r.address)
";

/// What trainers have said.
#[derive(Debug, Default)]
struct Said {
    rounds: AtomicU64,
    reads: AtomicU64,
    refused: AtomicU64,
    broken: AtomicU64,
}

/// A trainer and who listens to it.
struct Trainer {
    child: Child,
    script: &'static str,
    listens: std::thread::JoinHandle<()>,
}

impl Trainer {
    fn start(daemon: &TestDaemon, script: &'static str, said: &Arc<Said>) -> Option<Trainer> {
        let mut child = python(daemon, &format!("{SHARES}{script}"))?;
        let (lines, said) = (BufReader::new(child.stdout.take().unwrap()).lines(), Arc::clone(said));
        let listens = std::thread::spawn(move || {
            // The last line of one that is killed may be half a line.
            for line in lines.map_while(Result::ok) {
                let count = match line.as_str() {
                    "round" => &said.rounds,
                    "read" => &said.reads,
                    "refused" => &said.refused,
                    line if line.starts_with("BROKEN") => &said.broken,
                    _ => continue,
                };
                count.fetch_add(1, Ordering::Relaxed);
            }
        });
        Some(Trainer { child, listens, script })
    }

    fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        self.listens.join().unwrap();
    }
}

#[test]
fn trainers_that_share_a_device_lose_no_byte_when_any_of_them_is_killed_at_any_moment() {
    let kills = variable("STITCHD_SOAK_KILLS").map_or(FEW, |kills| kills.to_string_lossy().parse().unwrap());
    let daemon = TestDaemon::start(DEVICE_MIB);
    let said = Arc::new(Said::default());
    let mut rng = Rng::new(7);
    let mut trainers = Vec::new();
    for script in [TRAINER, TRAINER, READER] {
        let Some(trainer) = Trainer::start(&daemon, script, &said) else { return };
        trainers.push(trainer);
    }
    for kill in 1..=kills {
        std::thread::sleep(Duration::from_millis(rng.below(1_600)));
        let killed = trainers.swap_remove(rng.index(3));
        let script = killed.script;
        killed.kill();
        trainers.push(Trainer::start(&daemon, script, &said).unwrap());
        assert_eq!(said.broken.load(Ordering::Relaxed), 0, "after {kill} kills");
        if kill % 50 == 0 {
            println!("{kill} of {kills} killed: {said:?}");
        }
    }
    trainers.into_iter().for_each(Trainer::kill);
    // The weights outlive who published them: until they are withdrawn.
    for range in daemon.cli_json(&["shared"])["ranges"].as_array().unwrap() {
        assert!(daemon.cli(&["shared", "--withdraw", &range["range"].to_string()]).status.success());
    }
    daemon.wait_for_device("available_bytes", DEVICE_MIB * MIB);
    let status = daemon.status();
    let device = &status["devices"][0];
    for figure in ["leased_bytes", "shared_bytes", "foreign_bytes", "quarantined_bytes", "waiting_requests"] {
        assert_eq!(device[figure], 0, "{figure} after {kills} kills: {status}");
    }
    let (rounds, refused, broken) = (&said.rounds, &said.refused, said.broken.load(Ordering::Relaxed));
    println!("{}", String::from_utf8_lossy(&daemon.cli(&["revocations"]).stdout));
    println!(
        "{kills} kills, {rounds:?} rounds, {refused:?} requests refused; {}",
        daemon.status()["returned_by_revocation_bytes"]
    );
    assert_eq!(broken, 0);
    let reads = said.reads.load(Ordering::Relaxed);
    println!("{reads} times the shared weights were read");
    assert!(rounds.load(Ordering::Relaxed) >= kills && reads >= kills, "they hardly worked");
    assert!(status["returned_by_revocation_bytes"].as_u64() > Some(0), "nobody was asked for anything");
}
