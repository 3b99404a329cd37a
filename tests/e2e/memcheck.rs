//! The C border under valgrind: no byte read or written that is nobody's, none used before it was written, none lost.
//!
//! Memory of the host driver is mapped, not allocated, so valgrind takes all of it for good; what it sees is everything around it.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::support::{TestDaemon, client_library, needs_host, stderr};

/// What valgrind ends with when it found something.
const FOUND: i32 = 99;

/// Programs built against the library, and how to run them. `None`, and said, where a tool is missing.
struct Bench {
    dir: tempfile::TempDir,
    library: PathBuf,
}

impl Bench {
    fn new() -> Option<Bench> {
        if needs_host("the programs write with the CPU") {
            return None;
        }
        let Some(library) = client_library() else {
            println!("SKIP: libstitchd_client.so was not built; build the whole workspace");
            return None;
        };
        for tool in ["cc", "valgrind"] {
            if Command::new(tool).arg("--version").output().is_err() {
                println!("SKIP: there is no {tool} to look at the C border with");
                return None;
            }
        }
        Some(Bench { dir: tempfile::tempdir().unwrap(), library })
    }

    fn build(&self, source: &str) -> PathBuf {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let program = self.dir.path().join(Path::new(source).file_stem().unwrap());
        let built = Command::new("cc")
            .args(["-Wall", "-Wextra", "-Werror", "-std=gnu99", "-g", "-O0", "-pthread", "-I"])
            .arg(root.join("client/include"))
            .arg(root.join(source))
            .arg(&self.library)
            .arg("-o")
            .arg(&program)
            .output()
            .unwrap();
        assert!(built.status.success(), "{}", stderr(&built));
        program
    }

    fn run(&self, program: &Path, words: &[&str], socket: &Path) -> Output {
        Command::new("valgrind")
            .args([
                "--quiet",
                "--leak-check=full",
                "--show-leak-kinds=definite",
                "--errors-for-leak-kinds=definite",
                "--num-callers=30",
            ])
            // Threads take turns, or one that spins keeps the other from letting go.
            .arg("--fair-sched=yes")
            .arg(format!("--error-exitcode={FOUND}"))
            .arg(program)
            .args(words)
            .env("STITCHD_SOCKET", socket)
            .env("LD_LIBRARY_PATH", self.library.parent().unwrap())
            .output()
            .unwrap()
    }

    /// It ends with this, and valgrind has nothing to say.
    fn check(&self, program: &Path, words: &[&str], socket: &Path, expected: i32) -> String {
        let output = self.run(program, words, socket);
        assert_eq!(output.status.code(), Some(expected), "{words:?}: {}", stderr(&output));
        assert!(!stderr(&output).contains("=="), "{words:?}: {}", stderr(&output));
        String::from_utf8_lossy(&output.stdout).into_owned()
    }
}

const NOWHERE: &str = "/nowhere/stitchd.sock";

#[test]
fn the_checker_sees_what_is_wrong() {
    let Some(bench) = Bench::new() else { return };
    let output = bench.run(&bench.build("tests/e2e/exercise.c"), &["wrong"], Path::new(NOWHERE));
    assert_eq!(output.status.code(), Some(FOUND), "{}", stderr(&output));
    let said = stderr(&output);
    assert!(
        said.contains("Invalid read of size 1") && said.contains("32 bytes in 1 blocks are definitely lost"),
        "{said}"
    );
}

#[test]
fn the_border_touches_nothing_that_is_not_its_own_and_loses_nothing() {
    let Some(bench) = Bench::new() else { return };
    let exercise = bench.build("tests/e2e/exercise.c");
    assert_eq!(bench.check(&exercise, &["without"], Path::new(NOWHERE), 0), "fine\n");
    let daemon = TestDaemon::start(128);
    assert_eq!(bench.check(&exercise, &["with"], &daemon.socket(), 0), "fine\n");
    // The programs are gone, and with them what they had.
    daemon.wait_for_device("leased_bytes", 0);
    let hello = bench.build("client/examples/hello.c");
    assert!(bench.check(&hello, &[], &daemon.socket(), 0).starts_with("67108864 bytes"));
    bench.check(&hello, &[], Path::new(NOWHERE), 1);
}
