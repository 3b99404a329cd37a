//! The Python package, and `stitchd run`: its own tests in processes of Python, and whole commands over a package that stands for PyTorch.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;
use stitchd::driver::gpu::GpuKind;

use crate::standin::Machine;
use crate::support::{TestDaemon, client_library_for, stitchd, variable};

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// The interpreter: one with PyTorch, if whoever runs the tests names it.
fn interpreter() -> PathBuf {
    variable("STITCHD_TEST_PYTHON").map_or_else(|| "python3".into(), PathBuf::from)
}

fn on_gpus() -> TestDaemon {
    TestDaemon::on(Machine::new(GpuKind::Cuda, "devices = 1073741824"), &[])
}

/// The library with test hooks, or why not.
fn library() -> Option<PathBuf> {
    let library = client_library_for(true);
    if library.is_none() {
        println!("SKIP: no libstitchd_client.so with test hooks was built; build the whole workspace with its tests");
    }
    library
}

/// Runs one file of the package's tests.
fn list(file: &str, daemon: &TestDaemon, driver: &str, library: &Path) -> Option<Output> {
    let ran = Command::new(interpreter())
        .args(["-m", "unittest", "-v", &format!("tests.cpu.{file}")])
        .current_dir(Path::new(ROOT).join("client/python"))
        .envs(daemon.environment())
        .env("STITCHD_LIBRARY", library)
        .env("STITCHD_TEST_DRIVER", driver)
        .stdin(Stdio::null())
        .output();
    match ran {
        Ok(output) => Some(output),
        Err(error) => {
            println!("SKIP: {} cannot be started: {error}", interpreter().display());
            None
        }
    }
}

fn passes(output: &Output) {
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    for skipped in said.lines().filter(|line| line.contains("... skipped")) {
        println!("SKIP: {skipped}");
    }
}

#[test]
fn the_package_by_itself_and_its_library_do_what_they_say() {
    let Some(library) = library() else { return };
    let daemon = TestDaemon::start(64);
    for file in ["test_package", "test_library"] {
        let Some(output) = list(file, &daemon, crate::support::driver_name(), &library) else { return };
        passes(&output);
    }
}

#[test]
fn with_a_real_pytorch_the_package_does_what_it_says() {
    let Some(library) = library() else { return };
    let daemon = on_gpus();
    let Some(output) = list("test_with_torch", &daemon, "cuda", &library) else { return };
    passes(&output);
}

/// `stitchd run` of a job over what stands for PyTorch.
fn run(daemon: &TestDaemon, library: &Path, flags: &[&str], command: &[&str]) -> Output {
    let mut ran = stitchd();
    ran.arg("run").args(flags).arg("--").args(command).envs(daemon.environment()).env("STITCHD_LIBRARY", library);
    ran.env("PYTHONPATH", Path::new(ROOT).join("tests/e2e/torch_like"));
    ran.current_dir(daemon.path()).stdin(Stdio::null()).output().unwrap()
}

fn job() -> String {
    Path::new(ROOT).join("tests/e2e/torch_like/job.py").display().to_string()
}

#[test]
fn a_program_that_knows_nothing_of_it_is_served_by_the_daemon_and_summed_up() {
    let Some(library) = library() else { return };
    let daemon = on_gpus();
    let (python, job) = (interpreter().display().to_string(), job());
    let output = run(&daemon, &library, &["--plan", "auto", "--json"], &[&python, &job, "12", "0.2"]);
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{errors}");
    // What the program said is with what is for people.
    assert!(errors.contains("served True"), "{errors}");
    let said: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"));
    let process = &said["processes"][0];
    assert_eq!((said["exit_code"].as_u64(), process["is_over"].as_bool()), (Some(0), Some(true)), "{said}");
    assert_eq!(process["iterations"].as_u64(), Some(11), "{said}");
    let device = &process["devices"][0];
    let bytes = |name: &str| device[name].as_u64().unwrap_or_else(|| panic!("{name}: {said}"));
    // 8 MiB of weights, 9 and 15 MiB kept with 512 bytes each, and 5 MiB of the second layer's scratch beside them.
    assert_eq!(bytes("peak_allocated_bytes"), (37 << 20) + 1024);
    assert!(bytes("peak_reserved_bytes") >= 37 << 20 && bytes("pytorch_reserved_bytes") >= 37 << 20, "{said}");
    assert_eq!((bytes("requests"), device["pytorch_is_of_beginning"].as_bool()), (1 + 12 * 4, Some(false)), "{said}");
    assert_eq!(device["counters"]["plans_installed"].as_u64(), Some(1), "{said}");
    assert_eq!(daemon.device("leased_bytes"), 0);
}

#[test]
fn people_see_what_happens_and_a_table_at_the_end() {
    let Some(library) = library() else { return };
    let daemon = on_gpus();
    let (python, job) = (interpreter().display().to_string(), job());
    let output = run(&daemon, &library, &["--record", "run.stitchtrace"], &[&python, &job, "4"]);
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "served True\n", "{errors}");
    assert!(errors.contains("device 0 is served by stitchd"), "{errors}");
    let table: Vec<&str> = errors.lines().skip_while(|line| !line.starts_with("process")).collect();
    assert!(
        table.len() >= 2 && table[0].contains("PyTorch would reserve") && table[1].contains("37.0 MiB"),
        "{errors}"
    );
    // The recording is one that plans are made of, with phases and modules.
    let recorded = std::fs::read_dir(daemon.path()).unwrap().flatten().map(|entry| entry.path());
    let recorded =
        recorded.filter(|path| path.extension().is_some_and(|ending| ending == "stitchtrace")).collect::<Vec<_>>();
    assert_eq!(recorded.len(), 1, "{recorded:?}");
    let info = crate::support::run_json(&["trace", "info", recorded[0].to_str().unwrap(), "--layers", "--json"]);
    let layers: Vec<&str> =
        info["layers"].as_array().unwrap().iter().filter_map(|layer| layer["name"].as_str()).collect();
    assert!(layers.contains(&"layers.0") && layers.contains(&"layers.1"), "{info}");
    assert_eq!(info["iterations"].as_u64(), Some(4), "{info}");
}

#[test]
fn exit_codes_and_signals_are_the_commands_own() {
    let Some(library) = library() else { return };
    let daemon = on_gpus();
    let code = |command: &[&str]| run(&daemon, &library, &["--quiet"], command).status.code();
    assert_eq!(code(&["sh", "-c", "exit 7"]), Some(7));
    assert_eq!(code(&["sh", "-c", "kill -9 $$"]), Some(137));
    let output = run(&daemon, &library, &[], &["true"]);
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && errors.starts_with("stitchd: nothing was served: "), "{errors}");
    let output = run(&daemon, &library, &[], &["/nowhere/python", "train.py"]);
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{errors}");
    assert!(errors.contains("/nowhere/python"), "{errors}");
}

#[test]
fn without_a_daemon_or_with_a_wrong_plan_one_line_says_what_happens() {
    let Some(library) = library() else { return };
    let mut daemon = on_gpus();
    let (python, job) = (interpreter().display().to_string(), job());
    let output = run(&daemon, &library, &["--plan", &job], &[&python, &job, "2"]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let output = run(&daemon, &library, &["--record", "/nowhere/run.stitchtrace"], &[&python, &job, "2"]);
    assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0), "{output:?}");
    daemon.terminate();
    let output = run(&daemon, &library, &[], &[&python, &job, "2"]);
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "own allocator False\n", "{errors}");
    assert!(output.status.success() && errors.contains("the program keeps PyTorch's own allocator"), "{errors}");
    let output = run(&daemon, &library, &["--without-daemon", "stop"], &[&python, &job, "2"]);
    assert_eq!((output.status.code(), output.stdout.len()), (Some(3), 0), "{output:?}");
    let output = run(&daemon, &library, &["--without-daemon", "private"], &[&python, &job, "2"]);
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "served True\n", "{errors}");
}

#[test]
fn what_goes_wrong_beside_the_job_does_not_go_wrong_in_it() {
    let Some(library) = library() else { return };
    let daemon = on_gpus();
    let (python, job) = (interpreter().display().to_string(), job());
    let output = run(&daemon, &library, &["--record", "run.stitchtrace", "--no-compare"], &[&python, &job, "3"]);
    assert!(output.status.success(), "{output:?}");
    let mut recorded = std::fs::read_dir(daemon.path()).unwrap().flatten().map(|entry| entry.path());
    let recorded = recorded.find(|path| path.extension().is_some_and(|ending| ending == "stitchtrace")).unwrap();
    let plan = daemon.path().join("job.plan").display().to_string();
    assert!(crate::support::run(&["plan", recorded.to_str().unwrap(), "-o", &plan]).status.success());
    let small = TestDaemon::on(Machine::new(GpuKind::Cuda, "devices = 1073741824"), &["--device=0=38MiB"]);
    let holder = small.runtime("holder");
    let held = holder.alloc(&stitchd::pool::Request::of(stitchd::units::Bytes::mib(2))).unwrap();
    // The plan's pool cannot be had, and the job is served without it as far as memory goes.
    let script =
        "import torch; torch.cuda.init(); s = torch.cuda.Storage(1 << 20); print('served' if s.address else 'not')";
    let output = run(&small, &library, &["--plan", &plan], &[&python, "-c", script]);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "served\n", "{output:?}");
    holder.free(held, stitchd::ids::StreamId::DEFAULT).unwrap();
    // The command's code is its own where nobody can hear what there is to say, and processes that outlive it are served.
    let mut deaf = stitchd();
    deaf.args(["run", "--", "sh", "-c", "exit 3"]).envs(daemon.environment());
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    assert_eq!(deaf.stderr(full).stdin(Stdio::null()).status().unwrap().code(), Some(3));
    let said = daemon.path().join("said").display().to_string();
    let outlives = format!("(sleep 1; {python} {job} 1 > {said}.new; mv {said}.new {said}) > /dev/null 2>&1 &");
    assert!(run(&daemon, &library, &[], &["sh", "-c", &outlives]).status.success());
    let heard = crate::support::eventually("the process that was left behind", || std::fs::read_to_string(&said).ok());
    assert_eq!(heard, "served True\n");
}
