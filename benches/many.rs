//! A chunk of 2 MiB, leased and given back, while others hold thousands on the `host` driver: real descriptors, real mappings. The floor is the same with a hundred.
//!
//! A chunk takes two descriptors of the daemon and one of its holder, so ten thousand need a limit of open files (`ulimit -Hn`) of 40,000: what does not fit is left out, with a word.
#![expect(clippy::unwrap_used, reason = "a bench that cannot go on has nothing to say")]

mod support;

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use stitchd::ids::StreamId;
use stitchd::pool::Request;
use stitchd::runtime::{Runtime, RuntimeConfig};
use stitchd::session::{Session, SessionConfig};
use stitchd::units::Bytes;
use support::{Compared, compare, timed};

const ROUNDS: usize = 2_001;
const CHUNK: Bytes = Bytes::mib(2);
const FEW: u64 = 100;
/// Who holds the others: so many sessions.
const SESSIONS: u64 = 10;

struct Node {
    child: Child,
    dir: tempfile::TempDir,
    held: Vec<(Arc<Session>, Runtime)>,
}

impl Node {
    /// A daemon of which `chunks` are held, by ten sessions.
    fn with(chunks: u64) -> Node {
        let dir = tempfile::tempdir().unwrap();
        let config = dir.path().join("stitchd.toml");
        std::fs::write(&config, "ladder = ['2MiB']\n").unwrap();
        let mut child = Command::new(env!("CARGO_BIN_EXE_stitchd"))
            .args(["serve", "--json", "--driver", "host", "--device=0=64GiB", "--log", "warn", "--config"])
            .arg(&config)
            .arg("--runtime-dir")
            .arg(dir.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut String::new()).unwrap();
        let mut node = Node { child, dir, held: Vec::new() };
        for _ in 0..SESSIONS {
            let (session, runtime) = node.join();
            for _ in 0..chunks / SESSIONS {
                runtime.alloc(&Request::of(CHUNK)).unwrap();
            }
            node.held.push((session, runtime));
        }
        node
    }

    fn join(&self) -> (Arc<Session>, Runtime) {
        let session = Session::connect(&SessionConfig::new(self.dir.path().join("stitchd.sock"), "bench")).unwrap();
        let runtime = session.runtime(0, RuntimeConfig::default()).unwrap();
        (session, runtime)
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.held.clear();
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// One chunk, from the daemon and back to it.
fn lease(runtime: &Runtime) -> (Duration, u64) {
    let time = timed(|| {
        let address = runtime.alloc(&Request::of(CHUNK)).unwrap();
        runtime.free(address, StreamId::DEFAULT).unwrap();
        assert_eq!(runtime.trim(CHUNK), CHUNK);
    });
    (time, 1)
}

fn main() {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    // What this process holds is open here, too.
    let _ = rustix::process::setrlimit(
        rustix::process::Resource::Nofile,
        rustix::process::Rlimit { current: limit.maximum, ..limit },
    );
    let few = Node::with(FEW);
    let (_session, of_few) = few.join();
    let mut compared: Vec<Compared> = Vec::new();
    for chunks in [1_000, 5_000, 10_000] {
        let name = format!("a chunk leased and given back beside {chunks}");
        if !support::is_wanted(&name) {
            continue;
        }
        if limit.maximum.is_some_and(|most| most < 4 * chunks) {
            println!(
                "SKIP: {chunks} chunks on the host need {} open files, and {:?} is the limit (ulimit -Hn)",
                4 * chunks,
                limit.maximum
            );
            continue;
        }
        let many = Node::with(chunks);
        let (_session, of_many) = many.join();
        compared.push(compare(name, ROUNDS, || lease(&of_many), || lease(&of_few)));
    }
    support::print(("µs", 1000.0), &compared);
}
