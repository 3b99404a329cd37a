//! `STITCHD_RECORD`: a C program's allocations, read back event by event; and what is left when it makes more than there is room for, is killed, or forks.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use stitchd::trace::binary::{self, Recorded, Remarks};
use stitchd::trace::{Event, EventKind, Trace};
use stitchd::units::Bytes;

use crate::support::{TestDaemon, client_library, eventually, hear, run_json, stderr};

const MIB: u64 = 1 << 20;

/// The programs of `recorded.c`, and a daemon for them.
struct Jobs {
    daemon: TestDaemon,
    program: PathBuf,
    library: PathBuf,
}

impl Jobs {
    /// `None`, and said, where something is missing.
    fn new() -> Option<Jobs> {
        let Some(library) = client_library() else {
            println!("SKIP: libstitchd_client.so was not built");
            return None;
        };
        if Command::new("cc").arg("--version").output().is_err() {
            println!("SKIP: there is no C compiler");
            return None;
        }
        let daemon = TestDaemon::start(128);
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let program = daemon.path().join("recorded");
        let built = Command::new("cc")
            .args(["-Wall", "-Wextra", "-Werror", "-std=gnu99", "-pthread", "-I"])
            .arg(root.join("client/include"))
            .arg(root.join("tests/e2e/recorded.c"))
            .arg(&library)
            .arg("-o")
            .arg(&program)
            .output()
            .unwrap();
        assert!(built.status.success(), "{}", stderr(&built));
        Some(Jobs { daemon, program, library })
    }

    fn start(&self, job: &str, record: &Path) -> Child {
        Command::new(&self.program)
            .arg(job)
            .envs(self.daemon.environment())
            .env("STITCHD_RECORD", record)
            .env("LD_LIBRARY_PATH", self.library.parent().unwrap())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap()
    }

    fn file(&self) -> PathBuf {
        self.daemon.path().join("job.stitchtrace")
    }

    /// Where the recording of a job's first device is.
    fn recording(&self, job: &Child) -> PathBuf {
        self.daemon.path().join(format!("job.{}.0.stitchtrace", job.id()))
    }

    /// Runs a job to its end.
    fn run(&self, job: &str) -> PathBuf {
        let mut child = self.start(job, &self.file());
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert_eq!(hear(&mut lines), "fine");
        assert!(child.wait().unwrap().success());
        self.recording(&child)
    }
}

fn read(path: &Path) -> Recorded {
    binary::read_recorded(std::fs::File::open(path).unwrap()).unwrap()
}

/// An event as the script's author would write it down.
fn line(trace: &Trace, event: &Event) -> String {
    let context = event.context;
    let number = |n: Option<u32>| n.map_or("-".to_owned(), |n| n.to_string());
    let what = match event.kind {
        EventKind::Alloc => format!("{} {}", event.id, event.bytes.get()),
        kind if kind.has_id() => event.id.to_string(),
        _ => String::new(),
    };
    format!(
        "{} {what}|{} {} {} {} {} {}{}",
        event.kind.name(),
        event.stream.0,
        event.iteration,
        context.phase.name(),
        number(context.microbatch),
        number(context.chunk),
        trace.modules[context.module as usize],
        if event.is_dynamic { " dynamic" } else { "" }
    )
}

#[test]
fn what_a_program_did_is_what_was_recorded() {
    let Some(jobs) = Jobs::new() else { return };
    let path = jobs.run("script");
    let Recorded { trace, remarks } = read(&path);
    let expected = [
        "alloc 0 1000|0 0 other - - ",
        "alloc 1 3145728|7 0 forward 0 - model.layers.0",
        "alloc 2 5242880|0 0 forward 0 1 model.layers.0.experts dynamic",
        "free 1|7 0 forward 0 - model.layers.0",
        "mark |0 0 other - - ",
        "alloc 3 2000|0 1 other - - ",
        "free 2|0 1 backward 0 - model.layers.0",
        "alloc 4 4000|0 1 backward 0 - model.layers.0",
        "alloc 5 1099511627776|0 1 other - - ",
        "free 5|0 1 other - - ",
        "mark |0 1 other - - ",
        "free 0|0 2 other - - ",
        "free 3|0 2 other - - ",
    ];
    let found: Vec<String> = trace.events.iter().map(|event| line(&trace, event)).collect();
    assert_eq!(found, expected);
    assert_eq!(remarks, Remarks { refused: 1, refused_largest: Bytes::gib(1024), ..Remarks::default() });
    let main = trace.events[0].thread;
    let others: Vec<usize> = (0..trace.events.len()).filter(|at| trace.events[*at].thread != main).collect();
    assert_eq!(others, [6, 7]);
    let info = run_json(&["trace", "info", path.to_str().unwrap(), "--json"]);
    assert_eq!((&info["iterations"], &info["iterations_from"]), (&3.into(), &"column".into()));
    assert!(info["notes"][0].as_str().unwrap().starts_with("memory ran out: 1 request refused"), "{info}");
}

#[test]
fn a_job_that_is_faster_than_its_recorder_is_told_how_much_is_missing() {
    let Some(jobs) = Jobs::new() else { return };
    // On a busy machine the recorder may keep up with the job by chance.
    let mut runs = (0..20).map(|_| jobs.run("burst")).map(|path| (read(&path), path));
    let faster = runs.find(|(recorded, _)| recorded.remarks.dropped > 0);
    let (Recorded { trace, remarks }, path) =
        faster.expect("a million events are more than the recorder is fast enough for");
    assert!(remarks.cut.is_none(), "{remarks:?}");
    // Every allocation and every free is there, or counted; frees that were made up are in addition.
    let recorded = trace.events.len() as u64 + remarks.unknown - remarks.lost_frees;
    assert_eq!(recorded + remarks.dropped, 1_000_000);
    let mut live = BTreeMap::new();
    for event in &trace.events {
        match event.kind {
            EventKind::Alloc => assert_eq!(live.insert(event.id, ()), None),
            _ => assert_eq!(live.remove(&event.id), Some(())),
        }
    }
    let info = run_json(&["trace", "info", path.to_str().unwrap(), "--json"]);
    let said = format!("{} events for which the recorder had no room", remarks.dropped);
    assert!(info["notes"][0].as_str().unwrap().starts_with(&said), "{info}");
}

#[test]
fn a_job_that_is_killed_leaves_what_can_be_planned() {
    let Some(jobs) = Jobs::new() else { return };
    let mut child = jobs.start("forever", &jobs.file());
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert_eq!(hear(&mut lines), "begun");
    let path = jobs.recording(&child);
    eventually("a recording of fifty iterations", || {
        let recorded = binary::read_recorded(std::fs::File::open(&path).unwrap()).ok()?;
        (recorded.trace.iterations() > 50).then_some(())
    });
    child.kill().unwrap();
    child.wait().unwrap();
    let Recorded { trace, remarks } = read(&path);
    assert_eq!(Remarks { cut: None, ..remarks }, Remarks::default());
    assert!(remarks.cut.is_some());
    // Iteration by iteration what it did.
    for (at, event) in trace.events.iter().enumerate() {
        let (iteration, step) = (at / 41, at % 41);
        let (kind, bytes) = match step {
            0..20 => (EventKind::Alloc, MIB / 4 * (step as u64 + 1)),
            40 => (EventKind::Mark, 0),
            _ => (EventKind::Free, 0),
        };
        assert_eq!((event.kind, event.bytes.get(), event.iteration), (kind, bytes, iteration as u32), "event {at}");
    }
    let path = path.to_str().unwrap();
    let info = run_json(&["trace", "info", path, "--json"]);
    assert!(info["notes"][0].as_str().unwrap().starts_with("the recording is cut at byte"), "{info}");
    let plan = jobs.daemon.path().join("killed.plan");
    let planned = run_json(&["plan", path, "-o", plan.to_str().unwrap(), "--json"]);
    assert!(planned["static_requests"].as_u64().unwrap() >= 20, "{planned}");
    let replayed = run_json(&["replay", path, "--pool", "stitchd", "--json"]);
    assert_eq!(replayed["trace"]["peak_live_bytes"], 210 * MIB / 4, "{replayed}");
}

#[test]
fn a_forked_child_records_nothing_and_leaves_the_file_as_it_is() {
    let Some(jobs) = Jobs::new() else { return };
    let path = jobs.run("forked");
    let Recorded { trace, remarks } = read(&path);
    assert_eq!((trace.events.len(), trace.iterations(), remarks), (82, 2, Remarks::default()));
    let recordings = std::fs::read_dir(jobs.daemon.path()).unwrap();
    let is_recording = |name: &std::ffi::OsStr| name.to_string_lossy().ends_with(".stitchtrace");
    assert_eq!(recordings.filter(|entry| is_recording(&entry.as_ref().unwrap().file_name())).count(), 1);
}

#[test]
fn a_file_that_cannot_be_made_is_said_before_the_job_has_begun() {
    let Some(jobs) = Jobs::new() else { return };
    let mut child = jobs.start("refused", Path::new("/nowhere/job.stitchtrace"));
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert_eq!(hear(&mut lines), "fine");
    assert!(child.wait().unwrap().success());
}
