//! The targets of `tests/fuzz` as a program: `stitchd-fuzz seeds TARGET DIR` writes what a run begins with, `stitchd-fuzz TARGET [FILE]` reads one input.
//! Built by `cargo afl build` the latter is what `cargo afl fuzz` runs; any other build has nothing of AFL in it.

#[path = "../../targets/mod.rs"]
mod targets;

use std::path::Path;
use std::process::ExitCode;

use targets::Target;

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let found = |name: &str| targets::ALL.iter().find(|target| target.name == name);
    let done = match words[..] {
        ["list"] => {
            targets::ALL.iter().for_each(|target| println!("{}", target.name));
            Ok(())
        }
        ["seeds", name, directory] => match found(name) {
            Some(target) => write_seeds(target, Path::new(directory)),
            None => return usage(),
        },
        [name, ref file @ ..] if file.len() < 2 => match found(name) {
            Some(target) => run(target, file.first().map(Path::new)),
            None => return usage(),
        },
        _ => return usage(),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("stitchd-fuzz: {error}");
            ExitCode::FAILURE
        }
    }
}

fn usage() -> ExitCode {
    eprintln!("usage: stitchd-fuzz list | stitchd-fuzz seeds TARGET DIR | stitchd-fuzz TARGET [FILE]");
    ExitCode::from(2)
}

fn write_seeds(target: &Target, directory: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(directory)?;
    for (number, seed) in (target.seeds)().into_iter().enumerate() {
        // AFL wants something in each file.
        if !seed.is_empty() {
            std::fs::write(directory.join(format!("seed-{number}")), seed)?;
        }
    }
    Ok(())
}

/// One input from a file, or standard input; under AFL as many as it likes.
fn run(target: &Target, file: Option<&Path>) -> std::io::Result<()> {
    if let Some(file) = file {
        (target.run)(&std::fs::read(file)?);
        return Ok(());
    }
    #[cfg(fuzzing)]
    afl::fuzz(true, target.run);
    #[cfg(not(fuzzing))]
    {
        let mut input = Vec::new();
        std::io::Read::read_to_end(&mut std::io::stdin(), &mut input)?;
        (target.run)(&input);
    }
    Ok(())
}
