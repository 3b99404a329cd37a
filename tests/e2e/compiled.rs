//! C and C++ programs built for a test, against the header and the client library.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::support::{TestDaemon, client_library};

/// A compiler, and how strict it is asked to be.
#[derive(Clone, Copy)]
pub(crate) enum Language {
    C,
    Cpp,
}

impl Language {
    fn compiler(self) -> &'static str {
        match self {
            Language::C => "cc",
            Language::Cpp => "c++",
        }
    }

    fn flags(self) -> &'static [&'static str] {
        match self {
            Language::C => &["-Wall", "-Wextra", "-Werror", "-std=c99", "-pedantic"],
            Language::Cpp => &["-Wall", "-Wextra", "-Werror", "-std=c++17", "-pedantic"],
        }
    }
}

/// What a compiler makes of `source`, which lies in the project, and of `words`; `None`, with a word, where there is no compiler or no client library.
pub(crate) fn compiled(language: Language, source: &str, to: PathBuf, words: &[&str]) -> Option<PathBuf> {
    let Some(library) = client_library() else {
        println!("SKIP: libstitchd_client.so was not built");
        return None;
    };
    if Command::new(language.compiler()).arg("--version").output().is_err() {
        println!("SKIP: there is no compiler called {}", language.compiler());
        return None;
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut command = Command::new(language.compiler());
    command.args(language.flags()).arg("-I").arg(root.join("client/include")).arg(root.join(source)).args(words);
    let output = command.arg(&library).arg("-ldl").arg("-lpthread").arg("-o").arg(&to).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(to)
}

/// A program that was compiled, with what it needs to find the library and the daemon.
pub(crate) fn command(program: &Path, daemon: &TestDaemon) -> Command {
    let library = client_library().expect("the program was linked to it");
    let mut command = Command::new(program);
    command.envs(daemon.environment()).env("LD_LIBRARY_PATH", library.parent().unwrap());
    command
}

/// Runs such a program.
pub(crate) fn run(program: &Path, daemon: &TestDaemon, words: &[&str], environment: &[(&str, &str)]) -> Output {
    command(program, daemon).args(words).envs(environment.iter().copied()).output().unwrap()
}
